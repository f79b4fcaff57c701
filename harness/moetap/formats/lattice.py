"""lattice's routing trace: JSON lines {layer_idx, token_idx, selected_ids, gate_weights}.

Knows these four fields; the token index is the absolute position.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moetap.formats._lines import Cell, id_list, read_cells, streams_of, weight_list
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


class Lattice(Base):
    name = "lattice"
    summary = "lattice MoE routing trace, JSON lines with gate weights"
    write_options = ("stream",)
    read_options = ("n_experts", "model_id", "n_prompt")
    not_kept = ("rank order within a row (gates are kept)",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        layers = trace.model.layer_index.tolist()
        for stream, file in one_file_per_stream(trace, path, options, ".jsonl"):
            check_rows_ran(stream, "lattice")
            lines = []
            for row, position in enumerate(stream.position.tolist()):
                for order, layer in enumerate(layers):
                    ids = stream.experts[row, order]
                    ids = ids[ids != NOT_EXECUTED]
                    if not len(ids):
                        continue
                    gates = np.zeros(0)
                    if stream.scores is not None:
                        gates = stream.scores[row, order, : len(ids)].astype(np.float64)
                        # JSON has no NaN; a weight that is not known is no weight.
                        gates = gates if np.isfinite(gates).all() else np.zeros(0)
                    line = {
                        "layer_idx": layer,
                        "token_idx": position,
                        "selected_ids": ids.tolist(),
                        "gate_weights": gates.tolist(),
                    }
                    lines.append(json.dumps(line, separators=(",", ":")))
            save_lines(file, lines)
        return lost(trace, "layers", "first_position", "scores")

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


def _cell(record: dict[str, Any], line: int) -> Cell:
    ids = id_list(record["selected_ids"], "selected_ids")
    weights = record["gate_weights"]
    return Cell(
        token=whole(record["token_idx"], "token_idx"),
        layer=whole(record["layer_idx"], "layer_idx"),
        ids=ids,
        weights=None if weights == [] else weight_list(weights, len(ids), "gate_weights"),
        line=line,
    )


FORMAT = Lattice()
