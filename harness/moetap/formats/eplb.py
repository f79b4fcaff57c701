"""The load matrix of DeepSeek's expert-parallel load balancer: (MoE layers, experts) as .npy.

Knows the `weight` argument of its rebalance_experts, which is a tensor of loads.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from moetap.formats.base import Base, Options, count, lost, rows_left_out, save, selected
from moetap.trace import Trace


class Eplb(Base):
    name = "eplb"
    direction = "export"
    summary = "EPLB load matrix (layers, experts) as .npy"
    write_options = ("stream", "rows")

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        total = sum(count(ids, model.n_experts) for _, ids in selected(trace, options))
        buffer = io.BytesIO()
        np.save(buffer, np.asarray(total, dtype=np.int64), allow_pickle=False)
        save(path, buffer.getvalue())
        return ["the rows: only counts are kept", *lost(trace), *rows_left_out(trace, options)]


FORMAT = Eplb()
