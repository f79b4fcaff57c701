"""What a model keeps per stream and selects per token, read from a lazy forward.

Knows how to build a model of mlx-lm from its config alone, and that MLX arrays know their shapes
before anything is evaluated: a forward that nobody evaluates gives the caches arrays to measure.
Refuses to know weights and budgets: parameters stay unevaluated, and bytes go to
`moetap.analysis.ledger`.

KV caches have the dtype of the activations, which follows the weights. A model built from its
config is float32 throughout, so every parameter first takes the dtype that the checkpoint stores it
in (a quantised one that of its scales).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# As in `_mlx`: moetap uses transformers' tokenizers alone.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import _decode_tagged_floats, _get_classes

from moetap.analysis.ledger import KV_GROUP, Cache, Device
from moetap.capture import _machine
from moetap.capture.checkpoint import Checkpoint, default_dtype, weight_dtype
from moetap.capture.tap import find_switches, tap
from moetap.errors import MoetapError, first_line

_DTYPES = {"BF16": mx.bfloat16, "F16": mx.float16, "F32": mx.float32}

# Lengths of the two forwards. Caches grow by 256 tokens, so both fill theirs exactly.
_SHORT, _LONG = 256, 512


@dataclass(frozen=True)
class Geometry:
    """layer_index, top_k: per MoE layer. caches: per cache object of one stream, lists of caches
    taken apart.
    """

    layer_index: tuple[int, ...]
    top_k: tuple[int, ...]
    caches: tuple[Cache, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all caches, while no sliding window is full."""
        return sum(cache.bytes_per_token for cache in self.caches)

    @property
    def state_bytes(self) -> int:
        """Constant bytes per stream, over all caches."""
        return sum(cache.constant_bytes for cache in self.caches)


def trace_geometry(model: nn.Module, kv_bits: int | None = None) -> Geometry:
    """Measure a model's caches by two lazy forwards; nothing is evaluated.

    Of each cache the bytes at two lengths make a line: its slope is the bytes per token, its
    intercept the constant state. With `kv_bits` the caches are quantised as mlx-lm does it.

    Raises MoetapError: no routed experts; mlx-lm cannot quantise these caches.
    """
    find_switches(model)  # refuses models whose forward would evaluate the experts (dbrx)
    # One forward only: at the start of another the tap would look for evaluated rows, which takes
    # seconds on a graph of this size.
    with tap(model) as rows:
        short_cache = _forward(model, _SHORT, kv_bits)
        layer_index = tuple(switch.layer_index for switch in rows.switches)
        top_k = tuple(rows.top_k)
    long_cache = _forward(model, _LONG, kv_bits)
    measured = zip(_entries(short_cache), _entries(long_cache), strict=True)
    caches = []
    for (place, entry), (_, longer) in measured:
        short, long = _nbytes(entry), _nbytes(longer)
        slope = -(-(long - short) // (_LONG - _SHORT))  # never too small
        window = getattr(entry, "max_size", None)
        if window is None and hasattr(entry, "chunk_size"):
            # Cut to the chunk before each call, which then makes room for a step more.
            window = entry.chunk_size + entry.step
        caches.append(
            Cache(
                entry=place,
                kind=type(entry).__name__,
                bytes_per_token=slope,
                constant_bytes=max(0, short - slope * _SHORT),
                max_tokens=int(window) if window is not None and slope else None,
                step=int(getattr(entry, "step", 1)) if slope else 1,
            )
        )
    if kv_bits is not None:
        _try(model, long_cache)
    return Geometry(layer_index, top_k, tuple(caches))


def checkpoint_geometry(checkpoint: Checkpoint, kv_bits: int | None = None) -> tuple[Geometry, str]:
    """(geometry of a model that is built from its config, how it was found).

    Raises MoetapError if mlx-lm cannot build the model, besides what `trace_geometry` raises.
    """
    dtype, why = default_dtype(checkpoint.tensors)
    model = _build(checkpoint, dtype)
    words = f"lazy forward of mlx-lm {mlx_lm.__version__}, activations {dtype} ({why})"
    try:
        return trace_geometry(model, kv_bits), words
    except MoetapError as error:
        raise MoetapError(f"{checkpoint.name}: {error}") from error
    except Exception as error:
        raise MoetapError(
            f"{checkpoint.name}: a forward of mlx-lm {mlx_lm.__version__} fails on this config: "
            f"{first_line(error)}"
        ) from error


def this_mac() -> Device | None:
    """Memory and working-set limit of this machine, None if it has no Metal device."""
    if not mx.metal.is_available():
        return None
    limit = mx.device_info().get("max_recommended_working_set_size")
    return None if limit is None else Device(_machine.ram_bytes(), int(limit))


def _build(checkpoint: Checkpoint, dtype: str) -> nn.Module:
    config = _decode_tagged_floats(checkpoint.config)
    try:
        model_class, args_class = _get_classes(config)
        model = model_class(args_class.from_dict(config))
    # Whatever the config provokes in the model's file.
    except Exception as error:
        raise MoetapError(
            f"{checkpoint.name}: mlx-lm {mlx_lm.__version__} cannot build this model from its "
            f"config: {first_line(error)}"
        ) from error
    look_up = weight_dtype(checkpoint.tensors)
    model.update(
        tree_unflatten(
            [
                (name, array.astype(_DTYPES[look_up(name) or dtype]))
                for name, array in tree_flatten(model.parameters())
                if mx.issubdtype(array.dtype, mx.floating)
            ]
        )
    )
    return model


def _forward(model: nn.Module, n: int, kv_bits: int | None) -> list[Any]:
    """The caches after a lazy forward of n tokens."""
    cache: list[Any] = make_prompt_cache(model)
    model(mx.zeros((1, n), mx.int32), cache=cache)
    if kv_bits is not None:
        _quantise(cache, kv_bits)
    return cache


def _quantise(cache: list[Any], bits: int) -> None:
    """Quantise what mlx-lm's `--kv-bits` quantises."""
    for i, entry in enumerate(cache):
        if not hasattr(entry, "to_quantized"):
            continue
        try:
            cache[i] = entry.to_quantized(group_size=KV_GROUP, bits=bits)
        except NotImplementedError:
            raise MoetapError(
                f"mlx-lm cannot quantise a {type(entry).__name__}; leave --kv-bits out"
            ) from None
        except ValueError as error:
            raise MoetapError(
                f"mlx-lm cannot quantise these KV heads: {first_line(error)}"
            ) from error


def _try(model: nn.Module, cache: list[Any]) -> None:
    """One more lazy token: not every family's attention can read quantised KV."""
    try:
        model(mx.zeros((1, 1), mx.int32), cache=cache)
    except Exception as error:
        raise MoetapError(
            f"mlx-lm cannot run this model with quantised KV ({first_line(error)}); "
            "leave --kv-bits out"
        ) from error


def _entries(cache: list[Any]) -> Iterator[tuple[int, Any]]:
    """(place in the list, cache object); lists of caches taken apart, shared objects once."""
    seen: set[int] = set()
    for place, entry in enumerate(cache):
        for part in getattr(entry, "caches", (entry,)):
            if id(part) not in seen:
                seen.add(id(part))
                yield place, part


def _nbytes(entry: Any) -> int:
    """Bytes of every array that a cache object holds."""
    return sum(int(a.nbytes) for _, a in tree_flatten(entry.state) if isinstance(a, mx.array))
