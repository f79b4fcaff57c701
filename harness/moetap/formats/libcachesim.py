"""libCacheSim's oracleGeneral: 24 bytes a request, with the time of the next one for the object.

Knows the record, and the order of requests: stream by stream, row by row, layer by layer, ids
ascending. An object is moe_order x E + expert. Look-ups are sequential there, one object after the
other; step-atomic replay is `moetap replay`'s.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import (
    Base,
    Options,
    folder,
    lost,
    rows_left_out,
    save,
    selected,
)
from moetap.trace import NOT_EXECUTED, Trace

RECORD = np.dtype(
    [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next_access", "<i8")], align=False
)
OPTIONS = ("stream", "rows", "scope")


class LibCacheSim(Base):
    name = "libcachesim"
    direction = "export"
    summary = "libCacheSim oracleGeneral; global or a file per layer"
    write_options = OPTIONS

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for records, file in requests(trace, path, options, ".oracleGeneral.bin"):
            save(file, records.tobytes())
        return what_is_lost(trace, options)


def what_is_lost(trace: Trace, options: Options) -> list[str]:
    """Of both formats of libCacheSim."""
    sizes = "bytes per expert of 0: written as size 1" if not trace.model.expert_bytes.all() else ""
    return [
        *lost(trace, "expert_bytes"),
        "that a step requests its experts at once",
        *([sizes] if sizes else []),
        *rows_left_out(trace, options),
    ]


def requests(
    trace: Trace, path: Path, options: Options, suffix: str
) -> list[tuple[NDArray[np.void], Path]]:
    """RECORDs and the file they go to: one for all layers, or one per layer in a folder."""
    model = trace.model
    ids = np.concatenate([rows for _, rows in selected(trace, options)])
    flat = ids.reshape(-1)
    at = np.flatnonzero(flat != NOT_EXECUTED)
    if not len(at):
        raise MoetapError(f"{trace.source or 'trace'}: no request to write")
    if len(ids) > 2**32 or model.expert_bytes.max() >= 2**32:
        raise MoetapError("a time or an expert's size does not fit 32 bits")
    cell = at // ids.shape[2]
    order = cell % model.n_layers
    records = np.empty(len(at), dtype=RECORD)
    records["time"] = cell // model.n_layers
    records["object"] = order * int(model.n_experts.max()) + flat[at]
    # libCacheSim skips requests of size 0.
    records["size"] = np.maximum(model.expert_bytes[order], 1)
    scope = options.scope or "global"
    if scope == "global":
        records["next_access"] = _next(records["object"])
        return [(records, path)]
    if scope != "layer":
        raise UsageError(f"--scope is global or layer, not {scope!r}")
    folder(path)
    out = []
    for layer, index in enumerate(model.layer_index.tolist()):
        own = records[order == layer]
        if len(own):
            own["next_access"] = _next(own["object"])
            out.append((own, path / f"layer-{index:03d}{suffix}"))
    return out


def _next(objects: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The request number, counted from 1, at which each request's object is wanted again; -1
    never."""
    # NumPy sorts 16-bit numbers several times faster.
    narrow = objects.astype(np.min_scalar_type(int(objects.max())))
    order = np.argsort(narrow, kind="stable")
    same = narrow[order][1:] == narrow[order][:-1]
    out = np.full(len(objects), -1, dtype=np.int64)
    out[order[:-1][same]] = order[1:][same] + 1
    return out


FORMAT = LibCacheSim()
