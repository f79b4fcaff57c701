"""MER's routing trace: JSON lines {token, layer, experts, cache_hit, predicted}.

Knows the first three fields; the cache's and the predictor's view has no place in a trace.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moetap.formats._lines import Cell, id_list, read_cells, streams_of
from moetap.formats.base import (
    Base,
    Options,
    check_rows_ran,
    lost,
    make_trace,
    need_n_experts,
    one_file_per_stream,
    refusing,
    save_lines,
    whole,
)
from moetap.trace import NOT_EXECUTED, Trace


class Mer(Base):
    name = "mer"
    summary = "MER (micro-expert-router) --trace-out JSON lines"
    write_options = ("stream",)
    read_options = ("n_experts", "model_id", "n_prompt")
    not_kept = ("cache hits", "predicted experts")

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        layers = trace.model.layer_index.tolist()
        for stream, file in one_file_per_stream(trace, path, options, ".jsonl"):
            check_rows_ran(stream, "MER")
            lines = []
            for row, position in enumerate(stream.position.tolist()):
                for order, layer in enumerate(layers):
                    ids = stream.experts[row, order]
                    ids = ids[ids != NOT_EXECUTED]
                    if len(ids):
                        line = {
                            "token": position,
                            "layer": layer,
                            "experts": ids.tolist(),
                            "cache_hit": [],
                            "predicted": [],
                        }
                        lines.append(json.dumps(line, separators=(",", ":")))
            save_lines(file, lines)
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


def _cell(record: dict[str, Any], line: int) -> Cell:
    return Cell(
        token=whole(record["token"], "token"),
        layer=whole(record["layer"], "layer"),
        ids=id_list(record["experts"], "experts"),
        weights=None,
        line=line,
    )


FORMAT = Mer()
