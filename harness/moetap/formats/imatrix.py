"""llama.cpp's importance matrix, as far as routing fills it: counts per expert, in GGUF.

Knows the few parts of GGUF version 3 that such a file needs, and the names of its tensors. A trace
has no activations, so there are no sums: llama-quantize refuses the file, as it should; tools that
read the counts do not.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from moetap.formats.base import Base, Options, count, lost, rows_left_out, save, selected
from moetap.trace import Trace

_ALIGN = 32
_U32, _STRING, _ARRAY = 4, 8, 9  # GGUF value types
_F32 = 0  # GGML tensor type


class Imatrix(Base):
    name = "imatrix"
    direction = "export"
    summary = "llama.cpp imatrix counts (GGUF), no activations"
    write_options = ("stream", "rows")

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        picked = selected(trace, options)
        total = np.asarray(sum(count(ids, model.n_experts) for _, ids in picked))
        tensors = [
            (
                f"blk.{layer}.ffn_{part}_exps.weight.counts",
                total[order, : model.n_experts[order]].astype("<f4"),
            )
            for order, layer in enumerate(model.layer_index.tolist())
            for part in ("down", "gate", "up")
        ]
        save(path, _gguf(tensors, len(picked)))
        return [
            "the rows: only counts are kept",
            "sums of activations, which a trace does not hold: for statistics, not for quantising",
            *lost(trace, "layers", "n_experts"),
            *rows_left_out(trace, options),
        ]


def _gguf(tensors: list[tuple[str, np.ndarray]], n_chunks: int) -> bytes:
    values = [
        _text("general.type") + struct.pack("<I", _STRING) + _text("imatrix"),
        _text("imatrix.datasets") + struct.pack("<IIQ", _ARRAY, _STRING, 1) + _text("moetap"),
        _text("imatrix.chunk_count") + struct.pack("<II", _U32, n_chunks),
        _text("imatrix.chunk_size") + struct.pack("<II", _U32, 1),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values)
    data = b""
    for name, array in tensors:
        # GGUF lists the fastest dimension first: one value for each expert.
        head += _text(name) + struct.pack("<IQQIQ", 2, 1, len(array), _F32, len(data))
        data += _pad(array.tobytes())
    return _pad(head) + data


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _pad(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % _ALIGN)


FORMAT = Imatrix()
