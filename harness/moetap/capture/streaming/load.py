"""From a lazily loaded model to one whose experts stay on disk.

Knows the order that keeps memory bounded: expert parameters are replaced by arenas before anything
is evaluated, so that their tensors are never read. Refuses to know which C is wise (`choice`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from moetap import policies
from moetap.capture import _mlx
from moetap.capture.checkpoint import read_checkpoint
from moetap.capture.repack import locate_repacked
from moetap.capture.streaming.arena import Arena
from moetap.capture.streaming.engine import Engine, Layer
from moetap.capture.streaming.index import Part, expert_parameters, locate
from moetap.capture.streaming.kernel import rows_are_independent
from moetap.capture.streaming.reads import Reader
from moetap.capture.tap import Switch, _evaluated, _hooked, find_switches
from moetap.errors import MoetapError, UsageError, first_line

BUFFER_CACHE_BYTES = 2**25
"""Freed buffers that MLX keeps. Its own limit is the memory of the machine, which would let prefill
activations pile up beside the arena."""


def stream(
    opened: _mlx.Opened,
    slots: int,
    *,
    cold: bool = False,
    experts: Path | None = None,
    policy: str = "lru",
) -> _mlx.Loaded:
    """Make `opened` ready to generate with `slots` expert slots per MoE layer.

    cold: read experts past the page cache. experts: an expert-major copy to read them from.
    policy: of `moetap.policies`, decides in decode steps which experts leave.

    Raises:
        UsageError: slots below k or above E; no such policy, or one that cannot decide online.
        MoetapError: a shard is missing, truncated or not readable; the experts are not stored as
            the model uses them; not enough memory.
    """
    info = opened.info
    k, n = info.max_top_k, int(info.n_experts.max())
    if not k <= slots <= n:
        raise UsageError(
            f"{slots} slots: {info.id} selects {k} of {n} experts per token and layer; give {k} "
            f"to {n}"
        )
    decides = policies.get(policy)
    decides.online(n, slots)
    if decides.preloaded:
        raise UsageError(f"policy {policy}: it wants experts in their slots before the first step")
    independent = rows_are_independent(opened.model)
    checkpoint = read_checkpoint(opened.path)
    switches = find_switches(opened.model)
    parts = locate(switches, checkpoint, opened.stored)
    if experts is not None:
        parts = locate_repacked(experts, switches, info.weights_sha256, parts)
    opened.stored.clear()
    mx.set_cache_limit(BUFFER_CACHE_BYTES)
    reader = Reader(sorted({path for layer in parts for p in layer for path, _ in p.places}), cold)
    engine = Engine(reader, slots, cold, decides, independent)
    try:
        arenas = [_make_arenas(switch, slots) for switch in switches]
        loaded = opened.resident(engine)
        _attach(engine, loaded.model, switches, arenas, parts)
    except (MemoryError, RuntimeError, ValueError) as error:
        reader.close()
        raise MoetapError(
            f"{info.id}: no memory for {slots} slots a layer ({first_line(error)}); "
            f"try --slots {max(k, slots // 2)}"
        ) from error
    except BaseException:
        reader.close()
        raise
    return loaded


def _make_arenas(switch: Switch, slots: int) -> list[Arena]:
    n = min(slots, switch.n_experts)
    arenas = []
    for path, _ in expert_parameters(switch):
        *modules, name = path.split(".")
        owner: Any = switch.module
        for module in modules:
            owner = owner[module]
        arenas.append(Arena(switch.path, path, owner, name, n))
    return arenas


def _attach(
    engine: Engine,
    model: nn.Module,
    switches: list[Switch],
    arenas: list[list[Arena]],
    parts: list[tuple[Part, ...]],
) -> None:
    needed = _needed_in_prefill(model, switches)
    for switch, slots, stored, runs in zip(switches, arenas, parts, needed, strict=True):
        by_name = {part.name: part for part in stored}
        ordered = [by_name[arena.name] for arena in slots]
        engine.layers.append(Layer(engine, switch, slots, ordered, runs))
    for layer, switch in zip(engine.layers, switches, strict=True):
        layer.attach()
        for module in _shared_experts(model, switch):
            layer.overlap(module)


def _shared_experts(model: nn.Module, switch: Switch) -> list[nn.Module]:
    """The shared experts beside `switch`; every family of mlx-lm calls them one of these names."""
    block: Any = model
    for name in switch.path.split(".")[:-1]:
        block = block[int(name)] if name.isdigit() else block[name]
    named = (block.get(name) for name in ("shared_expert", "shared_experts", "shared_mlp"))
    return [module for module in named if isinstance(module, nn.Module)]


def _needed_in_prefill(model: nn.Module, switches: list[Switch]) -> list[bool]:
    """Per MoE layer whether the caches depend on it: a chunk of two tokens is run as mlx-lm's
    prefill does it, with experts that put out zeros, and the routers are asked whether they ran.
    """
    seen: list[mx.array] = []

    def call(_self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        seen.append(indices)
        return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)

    originals = [type(switch.module) for switch in switches]
    try:
        for switch in switches:
            switch.module.__class__ = _hooked(type(switch.module), call)
        cache = make_prompt_cache(model)
        model(mx.zeros((1, 2), mx.int32), cache=cache)
        mx.eval([entry.state for entry in cache])
    finally:
        for switch, original in zip(switches, originals, strict=True):
            switch.module.__class__ = original
    return [_evaluated(indices) for indices in seen]
