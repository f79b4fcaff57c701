"""moe-policylang's activation trace: a header line, then {t, l, e, s} per token and layer.

Knows the JSON lines, and the same columns as a Parquet table when the output ends in .parquet. `t`
starts at 0 with each stream.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from moetap.formats.base import Base, Options, chosen, lost, save_lines
from moetap.formats.parquet import pyarrow, save_table
from moetap.trace import NOT_EXECUTED, Trace


class MoePolicylang(Base):
    name = "moe-policylang"
    direction = "export"
    summary = "moe-policylang trace, .jsonl or .parquet"
    write_options = ("stream",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        entries: list[dict[str, Any]] = []
        for stream in chosen(trace, options):
            for row in range(stream.n_rows):
                for order, layer in enumerate(model.layer_index.tolist()):
                    ids = stream.experts[row, order]
                    ids = ids[ids != NOT_EXECUTED]
                    if not len(ids):
                        continue
                    scores = None
                    if stream.scores is not None:
                        found = stream.scores[row, order, : len(ids)].astype(np.float64)
                        scores = found.tolist() if np.isfinite(found).all() else None
                    entries.append({"t": row, "l": layer, "e": ids.tolist(), "s": scores})
        header = {
            "model_name": model.id,
            "num_layers": int(model.layer_index[-1]) + 1,
            "num_experts": int(model.n_experts.max()),
            "top_k": model.max_top_k,
            "num_entries": len(entries),
        }
        if path.suffix == ".parquet":
            pa = pyarrow()
            schema = pa.schema(
                [
                    ("t", pa.int32()),
                    ("l", pa.int32()),
                    ("e", pa.list_(pa.int32())),
                    ("s", pa.list_(pa.float32())),
                ],
                metadata={key: str(value) for key, value in header.items()},
            )
            save_table(path, pa.Table.from_pylist(entries, schema=schema))
        else:
            lines = [json.dumps(line) for line in (header, *entries)]
            save_lines(path, lines)
        return lost(trace, "model id", "layers", "ragged n_experts", "n_experts", "scores")


FORMAT = MoePolicylang()
