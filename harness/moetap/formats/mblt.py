"""MBLT version 1, the binary routing log of mbolt: a stream of 32-bit integers.

Knows magic, version and number of experts, then layer, k, tokens and ids of each record. A pass, a
prompt and a stream are not marked; `_passes` finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError
from moetap.formats._passes import Record, prompt_pass, streams_of
from moetap.formats._text import chunks
from moetap.formats.base import (
    Base,
    Options,
    lost,
    make_trace,
    one_file_per_stream,
    refusing,
    save,
)
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream, Trace

MAGIC = 0x544C424D  # "MBLT", little-endian


class Mblt(Base):
    name = "mblt"
    summary = "MBLT v1, mbolt's binary log of a llama.cpp run"
    write_options = ("stream",)
    read_options = ("model_id", "n_prompt")
    not_kept = ()
    open_end = True

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for stream, file in one_file_per_stream(trace, path, options, ".bin"):
            prompt = prompt_pass(stream, trace.model, "MBLT")
            save(
                file, (part.astype("<i4").tobytes() for part in _words(stream, prompt, trace.model))
            )
        kept = ["layers", "n_experts", "n_prompt"]
        return lost(trace, *kept)

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            raw = path.read_bytes()
            if raw[:4] != MAGIC.to_bytes(4, "little")[: len(raw)]:
                raise MoetapError("offset 0: no MBLT magic")
            if len(raw) < 12 or len(raw) % 4:
                raise MoetapError(f"offset {len(raw)}: cut off within a number or the header")
            words = np.frombuffer(raw, dtype="<i4").astype(np.int64)
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


def _words(
    stream: Stream, prompt: list[tuple[int, slice]], model: ModelInfo
) -> Iterator[NDArray[Any]]:
    yield np.array([MAGIC, 1, model.n_experts.max()])
    for layer, rows in prompt:
        k = int(model.top_k[layer])
        yield np.array([model.layer_index[layer], k, rows.stop - rows.start])
        yield stream.experts[rows, layer, :k].ravel()
    for part in chunks(stream.n_rows - prompt[0][1].stop, model.n_layers):
        ids = stream.experts[prompt[0][1].stop :][part]
        row, order = np.nonzero(ids[:, :, 0] != NOT_EXECUTED)
        records = np.empty((len(row), 3 + model.max_top_k), dtype=np.int64)
        records[:, 0] = model.layer_index[order]
        records[:, 1] = model.top_k[order]
        records[:, 2] = 1
        records[:, 3:] = ids[row, order]
        is_there = np.ones(records.shape, dtype=bool)
        is_there[:, 3:] = records[:, 3:] != NOT_EXECUTED
        yield records[is_there]


FORMAT = Mblt()
