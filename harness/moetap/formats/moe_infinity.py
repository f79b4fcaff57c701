"""MoE-Infinity's activation matrices: (sequences, decoder layers, experts) counts as .npy.

Knows the array that its expert tracer loads. Dense layers are rows of zeros.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from moetap.formats.base import Base, Options, count, lost, rows_left_out, save, selected
from moetap.trace import Trace


class MoeInfinity(Base):
    name = "moe-infinity"
    direction = "export"
    summary = "MoE-Infinity activation matrices (.npy), one a stream"
    write_options = ("stream", "rows", "hidden_layers")

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        n_layers = max(options.hidden_layers or 0, int(model.layer_index[-1]) + 1)
        picked = selected(trace, options)
        out = np.zeros((len(picked), n_layers, int(model.n_experts.max())), dtype=np.float32)
        for i, (_, ids) in enumerate(picked):
            out[i, model.layer_index] = count(ids, model.n_experts)
        buffer = io.BytesIO()
        np.save(buffer, out, allow_pickle=False)
        save(path, buffer.getvalue())
        return [
            "the rows: only counts are kept",
            *lost(trace, "layers", "ragged n_experts", "n_experts"),
            *rows_left_out(trace, options),
        ]


FORMAT = MoeInfinity()
