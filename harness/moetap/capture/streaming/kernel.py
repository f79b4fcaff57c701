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
"""`CaptureInfo.expert_kernel` of a capture that ran through `use_row_kernel`."""

DEPENDENT = "row, grouped"
"""The same of a streaming capture where rows are not independent."""


def use_row_kernel(model: nn.Module) -> None:
    """Make every routed expert of `model` compute row by row, for good.

    Only the projections of expert modules change, not a SwitchLinear elsewhere (deepseek_v41 has
    one in its attention).
    """
    for module in _projections(model):
        if type(module) in (SwitchLinear, QuantizedSwitchLinear):
            module.__class__ = _row_by_row(type(module))


def rows_are_independent(model: nn.Module) -> bool:
    """Whether MLX gives a row of an expert's product the same bits whatever rows it is computed
    with, tried on random weights of every shape that the model's experts have.

    Streaming computes a chunk in groups and a step's resident experts before the others, so it
    needs that. It holds on MLX's CPU backend and, by its source, on Metal; not on CUDA, which
    chooses the kernel of quantised products by the number of rows.
    """
    # Kernels may change anywhere; the CPU backend has one, and is slow.
    n_rows = 16 if mx.default_device() == mx.Device(mx.cpu) else 1024
    tried = set()
    for module in _projections(model):
        weights = module.scales if "scales" in module else module.weight
        # Scales of the fp formats are no activations.
        dtype = weights.dtype if mx.issubdtype(weights.dtype, mx.floating) else mx.bfloat16
        how = tuple(getattr(module, name, None) for name in ("group_size", "bits", "mode"))
        shape = (module.input_dims, module.output_dims)
        if (shape, how, dtype) in tried:
            continue
        tried.add((shape, how, dtype))
        if not _independent(*shape, how, dtype, n_rows):
            return False
    return True


def _independent(
    input_dims: int, output_dims: int, how: tuple[Any, ...], dtype: mx.Dtype, n_rows: int
) -> bool:
    experts: Any = SwitchLinear(input_dims, output_dims, 2, bias=False)
    experts.set_dtype(dtype)
    if how[0] is not None:
        experts = experts.to_quantized(*how)
    use = _row_by_row(type(experts)).__call__
    x = mx.random.normal((n_rows, 1, input_dims), key=mx.random.key(0)).astype(dtype)
    indices = mx.arange(n_rows, dtype=mx.uint32) % 2
    parts = [0, 1, 3, 8, n_rows]
    apart = [use(experts, x[a:b], indices[a:b]) for a, b in zip(parts, parts[1:], strict=False)]
    try:
        return bool(mx.array_equal(use(experts, x, indices), mx.concatenate(apart)).item())
    except RuntimeError:  # MLX cannot compute this type here at all; generating says so
        return True


def _projections(model: nn.Module) -> list[Any]:
    """The matrices of all routed experts."""
    return [
        module
        for switch in find_switches(model)
        for _, module in switch.module.named_modules()
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear)
    ]


def _row_by_row(original: Any) -> type:
    def call(self: Any, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> Any:
        return original.__call__(self, x, indices, sorted_indices=False)

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (original,), {"__call__": call, **names})
