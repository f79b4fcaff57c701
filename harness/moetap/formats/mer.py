"""MER's routing trace: JSON lines {token, layer, experts, cache_hit, predicted}.

Knows the first three fields; the cache's and the predictor's view has no place in a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moetap.formats._lines import Cell, read_cells, streams_of
from moetap.formats._lines import id_list as ids_of
from moetap.formats._text import chunks, id_list, strings, text
from moetap.formats.base import (
    Base,
    Options,
    check_rows_ran,
    lost,
    make_trace,
    need_n_experts,
    one_file_per_stream,
    refusing,
    save_text,
    whole,
)
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream, Trace


class Mer(Base):
    name = "mer"
    summary = "MER (micro-expert-router) --trace-out JSON lines"
    write_options = ("stream",)
    read_options = ("n_experts", "model_id", "n_prompt")
    not_kept = ("cache hits", "predicted experts")
    open_end = True

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for stream, file in one_file_per_stream(trace, path, options, ".jsonl"):
            check_rows_ran(stream, "MER")
            save_text(file, _lines(stream, trace.model))
        return [
            *lost(trace, "layers", "first_position"),
            "cache hits: left empty, since a trace knows no cache",
        ]

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            streams, layers = streams_of(read_cells(path, _cell), options)
            return make_trace(
                path, streams, layers, need_n_experts(options), model_id=options.model_id or ""
            )


def _lines(stream: Stream, model: ModelInfo) -> Iterator[str]:
    layers = strings([f'{layer},"experts":[' for layer in model.layer_index.tolist()])
    for rows in chunks(stream.n_rows, model.n_layers):
        ids = stream.experts[rows]
        row, order = np.nonzero(ids[:, :, 0] != NOT_EXECUTED)
        tokens = strings([f'{{"token":{p},"layer":' for p in stream.position[rows].tolist()])
        yield text(
            len(row),
            tokens[row],
            layers[order],
            id_list(ids[row, order], ","),
            '],"cache_hit":[],"predicted":[]}\n',
        )


def _cell(record: dict[str, Any], line: int) -> Cell:
    return Cell(
        token=whole(record["token"], "token"),
        layer=whole(record["layer"], "layer"),
        ids=ids_of(record["experts"], "experts"),
        weights=None,
        line=line,
    )


FORMAT = Mer()
