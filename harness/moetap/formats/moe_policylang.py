"""moe-policylang's activation trace: a header line, then {t, l, e, s} per token and layer.

Knows the JSON lines, and the same columns as a Parquet table when the output ends in .parquet. `t`
starts at 0 with each stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moetap.formats._text import (
    Strings,
    chunks,
    finite_lines,
    gate_list,
    id_list,
    strings,
    text,
)
from moetap.formats.base import Base, Options, chosen, gates_unknown, lost, save_text
from moetap.formats.parquet import pyarrow, save_table
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream, Trace


class MoePolicylang(Base):
    name = "moe-policylang"
    direction = "export"
    summary = "moe-policylang trace, .jsonl or .parquet"
    write_options = ("stream",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        streams = chosen(trace, options)
        header = {
            "model_name": model.id,
            "num_layers": int(model.layer_index[-1]) + 1,
            "num_experts": int(model.n_experts.max()),
            "top_k": model.max_top_k,
            "num_entries": sum(int((s.experts[:, :, 0] != NOT_EXECUTED).sum()) for s in streams),
        }
        if path.suffix == ".parquet":
            save_table(path, _table(streams, model, header))
        else:
            save_text(path, _lines(streams, model, header))
        return [
            *lost(trace, "model id", "layers", "ragged n_experts", "n_experts", "scores"),
            *gates_unknown(trace, options, "the cell has no scores"),
        ]


def _lines(streams: list[Stream], model: ModelInfo, header: dict[str, Any]) -> Iterator[str]:
    yield json.dumps(header) + "\n"
    layers = strings([f'{layer}, "e": [' for layer in model.layer_index.tolist()])
    for stream in streams:
        for rows in chunks(stream.n_rows, model.n_layers):
            ids = stream.experts[rows]
            row, order = np.nonzero(ids[:, :, 0] != NOT_EXECUTED)
            ids = ids[row, order]
            steps = strings([f'{{"t": {t}, "l": ' for t in range(rows.start, rows.stop)])
            before: str | Strings = '], "s": null}\n'
            weights: str | Strings = ""
            after: str | Strings = ""
            if stream.scores is not None:
                gates = stream.scores[rows][row, order]
                known = finite_lines(ids, gates)
                before = np.where(known, strings(['], "s": [']), strings(['], "s": null}\n']))
                weights = gate_list(ids, gates, ", ")
                after = np.where(known, strings(["]}\n"]), strings([""]))
            yield text(
                len(row), steps[row], layers[order], id_list(ids, ", "), before, weights, after
            )


def _table(streams: list[Stream], model: ModelInfo, header: dict[str, Any]) -> Any:
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
    tables = []
    for stream in streams:
        row, order = np.nonzero(stream.experts[:, :, 0] != NOT_EXECUTED)
        ids = stream.experts[row, order]
        there = ids != NOT_EXECUTED
        ends = pa.array(np.cumsum([0, *there.sum(axis=1)]), pa.int32())
        scores = pa.nulls(len(row), pa.list_(pa.float32()))
        if stream.scores is not None:
            gates = stream.scores[row, order]
            known = pa.array(~finite_lines(ids, gates))
            values = pa.array(gates[there].astype(np.float32))
            scores = pa.ListArray.from_arrays(ends, values, mask=known)
        experts = pa.ListArray.from_arrays(ends, pa.array(ids[there].astype(np.int32)))
        layers = pa.array(model.layer_index[order], pa.int32())
        columns = [pa.array(row, pa.int32()), layers, experts, scores]
        tables.append(pa.table(columns, schema=schema))
    return pa.concat_tables(tables)


FORMAT = MoePolicylang()
