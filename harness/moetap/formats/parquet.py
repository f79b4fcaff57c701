"""A long table for pandas, Polars and DuckDB: one line a selected expert.

Knows the columns. Parquet, or an Arrow IPC file when the output ends in .arrow or .feather; pyarrow
is the extra `moetap[parquet]` and is imported when it is used.
"""

from __future__ import annotations

from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from moetap.errors import MoetapError
from moetap.formats.base import Base, Options, chosen, lost, save
from moetap.trace import NOT_EXECUTED, Trace


def pyarrow() -> Any:
    """The module, or what to do about its absence."""
    try:
        return import_module("pyarrow")
    except ImportError:
        raise MoetapError("this format needs pyarrow: pip install 'moetap[parquet]'") from None


class Parquet(Base):
    name = "parquet"
    direction = "export"
    summary = "long table: .parquet, .arrow or .feather"
    write_options = ("stream",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        pa = pyarrow()
        layers = trace.model.layer_index
        tables = []
        for stream in chosen(trace, options):
            row, order, slot = np.nonzero(stream.experts != NOT_EXECUTED)
            step = row - stream.decode_start
            scores = None if stream.scores is None else stream.scores[row, order, slot]
            n = len(row)
            tables.append(
                pa.table(
                    {
                        "prompt_id": pa.array([stream.prompt_id] * n, pa.string()),
                        "class": pa.array([stream.cls] * n, pa.string()),
                        "position": pa.array(stream.position[row], pa.uint32()),
                        # Null in prefill, so that no one mixes the two by accident.
                        "decode_step": pa.array(step, pa.int32(), mask=step < 0),
                        "token": pa.array(stream.tokens[row], pa.uint32()),
                        "layer": pa.array(layers[order], pa.int32()),
                        "moe_order": pa.array(order, pa.int32()),
                        "expert": pa.array(stream.experts[row, order, slot], pa.uint16()),
                        "score": pa.nulls(n, pa.float32())
                        if scores is None
                        else pa.array(scores.astype(np.float32), mask=np.isnan(scores)),
                    }
                )
            )
        save_table(path, pa.concat_tables(tables))
        kept = ["layers", "prompt ids", "classes", "tokens", "scores", "n_prompt"]
        extra = ["cells that did not run: they have no line"]
        return [*lost(trace, *kept, "first_position"), *extra]


def save_table(path: Path, table: Any) -> None:
    """Write a pyarrow.Table in the format that the name asks for."""
    buffer = BytesIO()
    if path.suffix in (".arrow", ".feather"):
        ipc = import_module("pyarrow.ipc")
        with ipc.new_file(buffer, table.schema) as writer:
            writer.write_table(table)
    else:
        import_module("pyarrow.parquet").write_table(table, buffer)
    save(path, buffer.getvalue())


FORMAT = Parquet()
