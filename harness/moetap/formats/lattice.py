"""lattice's routing trace: JSON lines {layer_idx, token_idx, selected_ids, gate_weights}.

Knows these four fields; the token index is the absolute position.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moetap.formats._lines import Cell, read_cells, streams_of, weight_list
from moetap.formats._lines import id_list as ids_of
from moetap.formats._text import Strings, chunks, gate_list, id_list, strings, text
from moetap.formats.base import (
    Base,
    Options,
    check_rows_ran,
    gates_unknown,
    lost,
    make_trace,
    need_n_experts,
    one_file_per_stream,
    refusing,
    save_text,
    whole,
)
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream, Trace


class Lattice(Base):
    name = "lattice"
    summary = "lattice MoE routing trace, JSON lines with gate weights"
    write_options = ("stream",)
    read_options = ("n_experts", "model_id", "n_prompt")
    not_kept = ("rank order within a row (gates are kept)",)
    open_end = True

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for stream, file in one_file_per_stream(trace, path, options, ".jsonl"):
            check_rows_ran(stream, "lattice")
            save_text(file, _lines(stream, trace.model))
        return [
            *lost(trace, "layers", "first_position", "scores"),
            *gates_unknown(trace, options, "the cell has no gates"),
        ]

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            streams, layers = streams_of(read_cells(path, _cell), options)
            return make_trace(
                path,
                streams,
                layers,
                need_n_experts(options),
                model_id=options.model_id or "",
                scores_kind="gate weight after renormalisation, from lattice",
            )


def _lines(stream: Stream, model: ModelInfo) -> Iterator[str]:
    layers = strings(
        [f'{{"layer_idx":{layer},"token_idx":' for layer in model.layer_index.tolist()]
    )
    for rows in chunks(stream.n_rows, model.n_layers):
        ids = stream.experts[rows]
        row, order = np.nonzero(ids[:, :, 0] != NOT_EXECUTED)
        ids = ids[row, order]
        tokens = strings([f'{p},"selected_ids":[' for p in stream.position[rows].tolist()])
        weights: str | Strings = ""
        if stream.scores is not None:
            # JSON has no NaN; a weight that is not known is no weight.
            weights = gate_list(ids, stream.scores[rows][row, order], ",")
        yield text(
            len(row),
            layers[order],
            tokens[row],
            id_list(ids, ","),
            '],"gate_weights":[',
            weights,
            "]}\n",
        )


def _cell(record: dict[str, Any], line: int) -> Cell:
    ids = ids_of(record["selected_ids"], "selected_ids")
    weights = record["gate_weights"]
    return Cell(
        token=whole(record["token_idx"], "token_idx"),
        layer=whole(record["layer_idx"], "layer_idx"),
        ids=ids,
        weights=None if weights == [] else weight_list(weights, len(ids), "gate_weights"),
        line=line,
    )


FORMAT = Lattice()
