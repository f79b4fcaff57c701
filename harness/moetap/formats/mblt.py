"""MBLT version 1, the binary routing log of mbolt: a stream of 32-bit integers.

Knows magic, version and number of experts, then layer, k, tokens and ids of each record. A pass, a
prompt and a stream are not marked; `_passes` finds them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moetap.errors import MoetapError
from moetap.formats._passes import Record, passes_of, streams_of
from moetap.formats.base import (
    Base,
    Options,
    lost,
    make_trace,
    one_file_per_stream,
    refusing,
    save,
)
from moetap.trace import Trace

MAGIC = 0x544C424D  # "MBLT", little-endian


class Mblt(Base):
    name = "mblt"
    summary = "MBLT v1, mbolt's binary log of a llama.cpp run"
    write_options = ("stream",)
    read_options = ("model_id", "n_prompt")
    not_kept = ()

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        for stream, file in one_file_per_stream(trace, path, options, ".bin"):
            parts = [np.array([MAGIC, 1, model.n_experts.max()])]
            for this in passes_of(stream, model, "MBLT"):
                for order, at in this:
                    k = int(model.top_k[order])
                    ids = stream.experts[at, order, :k]
                    parts.append(np.array([model.layer_index[order], k, len(ids)]))
                    parts.append(ids.ravel())
            save(file, np.concatenate(parts).astype("<i4").tobytes())
        kept = ["layers", "n_experts", "n_prompt"]
        return lost(trace, *kept)

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            raw = path.read_bytes()
            if len(raw) < 12 or len(raw) % 4:
                raise MoetapError(f"offset {len(raw)}: cut off within a number or the header")
            words = np.frombuffer(raw, dtype="<i4").astype(np.int64)
            if words[0] != MAGIC:
                raise MoetapError("offset 0: no MBLT magic")
            if words[1] != 1:
                raise MoetapError(f"offset 4: version {words[1]}, only 1 is known")
            n_experts = int(words[2])
            if n_experts < 1:
                raise MoetapError(f"offset 8: {n_experts} experts")
            records = []
            at = 3
            while at < len(words):
                where = f"offset {4 * at}"
                if at + 3 > len(words):
                    raise MoetapError(f"{where}: the last record is cut off")
                layer, k, n = (int(w) for w in words[at : at + 3])
                if not (0 <= layer < 2**20 and 1 <= k <= n_experts and n >= 1):
                    raise MoetapError(f"{where}: layer {layer}, k {k}, {n} tokens make no record")
                at += 3
                if at + n * k > len(words):
                    raise MoetapError(
                        f"{where}: a record of {n} tokens is cut off; end the engine properly"
                    )
                ids = words[at : at + n * k].reshape(n, k)
                records.append(Record(layer, ids, None, where))
                if (ids < 0).any():
                    raise MoetapError(f"{where}: negative expert id")
                at += n * k
            if not records:
                raise MoetapError("holds no record")
            streams, layers = streams_of(records, options)
            return make_trace(path, streams, layers, n_experts, model_id=options.model_id or "")


FORMAT = Mblt()
