"""One kernel for the routed experts, whatever the chunk, the sorting and the number of slots.

Knows how MLX chooses the kernel of an expert's matrix product and how to keep it at one. Refuses to
know where the weights are: resident and streamed captures both run what this module leaves.

mlx-lm sorts the rows of a chunk by expert and says so to MLX (`sorted_indices`). On Metal that flag
selects a tiled kernel: always for plain weights, and for quantised ones if rows // E >= 4, where E
is the first dimension of the weight array. An arena of C slots has another first dimension and a
group of experts has fewer rows, so a streamed run would change kernels elsewhere than a resident
one, and different kernels round differently. Without the flag every row is a product of its own
(`gather_qmv`, `gather_mv`), chosen by the sizes of one expert's matrix alone. Rows are still
sorted, which keeps an expert's weights in the GPU's cache.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from moetap.capture.tap import find_switches

ROW_KERNEL = "row"
"""`CaptureInfo.expert_kernel` of every capture that ran through `use_row_kernel`."""


def use_row_kernel(model: nn.Module) -> None:
    """Make every routed expert of `model` compute row by row, for good.

    Only the projections of expert modules change, not a SwitchLinear elsewhere (deepseek_v41 has
    one in its attention).
    """
    for switch in find_switches(model):
        for _, module in switch.module.named_modules():
            if type(module) in (SwitchLinear, QuantizedSwitchLinear):
                module.__class__ = _row_by_row(type(module))


def _row_by_row(original: Any) -> type:
    def call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        return original.__call__(self, x, indices, sorted_indices=False)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {"__call__": call, **names})
