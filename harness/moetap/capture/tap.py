"""The tap: record which experts every MoE layer of an MLX model selects, around any loop that calls
the model.

Knows where routed indices enter mlx-lm's expert modules, when MLX has evaluated them, and how
forwards line up with positions. Knows nothing about prompts, files or statistics, and changes
nothing that the model computes.

How it works. Every family of mlx-lm but dbrx calls one `SwitchGLU` or `SwitchMLP` per MoE layer and
forward, as `switch(x, indices)`. The tap gives each such instance a one-off subclass (and the model
too, to see where a forward starts and which tokens it feeds) and restores the classes in `finally`.
Parameters, quantisation and module paths stay untouched, so loading, `shard()` and LoRA keep
working while it is attached.

Three facts of MLX shape the code:

* Arrays are lazy. `np.asarray` of an array that nobody evaluated would evaluate it, so an
  unevaluated one is recognised without touching it (`_evaluated`). mlx-lm's prefill evaluates the
  caches alone: the last MoE layer(s) of a prefill chunk never run, and their cells are
  NOT_EXECUTED.
* `generate_step` runs one step ahead. While it builds one forward, the one before is in flight and
  those before that are done, so reading all but the newest never waits. Its last forward feeds the
  last generated token, whose output nobody sees: no row.
* `indices` is a view of the router's (T, E) buffer and keeps it alive. In prefill a uint16 copy,
  computed together with the layer (`mx.depends`), lets go of that buffer; one token's view is small
  and is kept as it is.
"""

from __future__ import annotations

import functools
import inspect
import io
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.trace import NOT_EXECUTED

_LAYER_NUMBER = re.compile(r"(?:layers|blocks|h)\.(\d+)\.")

# Local variable of the MoE block that holds the weights of the selected experts when it calls the
# switch, most specific first. The array must have the shape of `indices`, which rules out namesakes
# over all experts.
_SCORE_NAMES = (
    "selected_scores",
    "regular_weights",
    "topk_weights",
    "topk_weight",
    "top_k_weights",
    "expert_weights",
    "weights",
    "scores",
    "gates",
)

READ_EVERY = 16
"""Decode steps read at a time. Asking MLX whether an array is evaluated costs as much for many."""


@dataclass(frozen=True)
class Switch:
    """One MoE layer's expert module: its path in the model, absolute layer number, and the module
    itself.
    """

    path: str
    layer_index: int
    module: nn.Module

    @property
    def n_experts(self) -> int:
        """E, from the weights themselves."""
        first = self.module.gate_proj if isinstance(self.module, SwitchGLU) else self.module.fc1
        return int(first.weight.shape[0])

    @property
    def expert_bytes(self) -> int:
        """Stored bytes of one routed expert: every parameter of the switch that has one slice per
        expert.
        """
        arrays = [
            a for _, a in tree_flatten(self.module.parameters()) if a.shape[:1] == (self.n_experts,)
        ]
        return sum(int(a.nbytes) for a in arrays) // self.n_experts


def find_switches(model: nn.Module) -> list[Switch]:
    """The expert modules of `model` in layer order.

    Raises MoetapError if there is none, or if a path does not tell its layer.
    """
    found = []
    for path, module in model.named_modules():
        if not isinstance(module, SwitchGLU | SwitchMLP):
            continue
        number = _LAYER_NUMBER.search(path + ".")
        if number is None:
            raise MoetapError(
                f"cannot tell the layer of expert module {path!r}; please report the model type"
            )
        found.append(Switch(path, int(number.group(1)), module))
    if not found:
        raise MoetapError(
            f"no routed experts found in {type(model).__module__}.{type(model).__name__}: "
            "a dense model, or one whose experts are not a SwitchGLU or SwitchMLP (dbrx)"
        )
    return sorted(found, key=lambda s: s.layer_index)


@dataclass(frozen=True, eq=False)
class Rows:
    """The routing of one stream: experts (R, L, K) uint16, tokens (R,) and position (R,) uint32.

    Ids ascend within a cell; NOT_EXECUTED where the layer did not run or its top-k is below K.
    `scores` (R, L, K) float16 are the gate weights in the same order, NaN without an id, or None.
    """

    experts: NDArray[np.uint16]
    tokens: NDArray[np.uint32]
    position: NDArray[np.uint32]
    scores: NDArray[np.float16] | None


class _Forward:
    """One call of the model: what it was fed and what its MoE layers selected, at first as MLX
    arrays.
    """

    __slots__ = ("cells", "inputs", "n_tokens", "scores", "start")

    def __init__(self, inputs: mx.array, start: int, n_layers: int) -> None:
        self.inputs = inputs
        self.start = start
        self.n_tokens = int(inputs.shape[-1])
        self.cells: list[mx.array | None] = [None] * n_layers
        self.scores: list[mx.array | None] = [None] * n_layers


class Recorder:
    """What `tap` yields. Read it after generation, or between two generations.

    With one stream recorded, `experts`, `tokens`, `position` and `scores` are that stream's (see
    `Rows`); `streams` has all of them in order. A stream begins whenever the model is called with
    another cache.
    """

    def __init__(
        self, switches: list[Switch], scores: bool, full_prefill: bool, run_ahead: bool
    ) -> None:
        self.switches = tuple(switches)
        self._keep_scores = scores
        self._full_prefill = full_prefill
        self._run_ahead = run_ahead
        self._cache: weakref.ref[Any] | None = None
        self._next_position = 0
        self._pending: list[_Forward] = []  # not yet copied out of MLX, newest last
        self._read: list[Rows] = []  # forwards of the current stream that are
        self._streams: list[Rows] = []
        self.top_k = [0] * len(switches)
        """(L,) experts that each layer selected per token, 0 until it was called."""
        self.score_names: dict[str, str] = {}
        """MoE block class -> its variable that holds the scores, for the families met so far."""

    # -- called from inside the model

    def _start_forward(self, inputs: mx.array, cache: Any) -> None:
        if inputs.ndim != 2 or inputs.shape[0] != 1:
            raise MoetapError(
                "tap records one stream at a time, "
                f"the model was called with inputs of shape {tuple(inputs.shape)}"
            )
        first = cache[0] if cache else None
        offset = _cache_offset(cache)
        if first is None or self._cache is None or self._cache() is not first:
            self._finish_stream()
            self._cache = weakref.ref(first) if first is not None else None
            self._next_position = offset or 0
        elif offset is not None and offset != self._next_position:
            raise MoetapError(
                f"the cache holds {offset} tokens where {self._next_position} were fed: "
                "tap does not follow a cache that is rewound (speculative decoding)"
            )
        else:
            # generate_step evaluates a prefill chunk before it goes on: read it, and let its memory
            # go, at once. Of single tokens the newest is in flight.
            if self._pending and self._pending[-1].n_tokens > 1:
                self._drain(keep=0, final=False)
            elif len(self._pending) > READ_EVERY:
                self._drain(keep=1, final=False)
        self._pending.append(_Forward(inputs, self._next_position, len(self.switches)))
        self._next_position += int(inputs.shape[1])

    def _note(self, layer: int, x: mx.array, indices: mx.array, frame: Any) -> mx.array:
        """Keep what `layer` selected; returns x, tied to the copies so that they are computed with
        the layer.
        """
        if not self._pending:
            return x  # the block was called on its own, outside a forward of the model
        forward = self._pending[-1]
        if forward.cells[layer] is not None:
            raise MoetapError(
                f"{self.switches[layer].path} ran twice in one forward; "
                "please report the model type"
            )
        self.top_k[layer] = int(indices.shape[-1])
        tied = []
        if forward.n_tokens > 1:
            indices = indices.astype(mx.uint16)
            tied.append(indices)
        forward.cells[layer] = indices
        if self._keep_scores:
            scores = self._find_scores(layer, indices.shape, frame).astype(mx.float16)
            forward.scores[layer] = scores
            tied.append(scores)
        return mx.depends(x, tied) if tied else x

    def _find_scores(self, layer: int, shape: tuple[int, ...], frame: Any) -> mx.array:
        block = type(frame.f_locals.get("self")).__name__
        names = (self.score_names[block],) if block in self.score_names else _SCORE_NAMES
        for name in names:
            value = frame.f_locals.get(name)
            if (
                isinstance(value, mx.array)
                and value.shape == shape
                and mx.issubdtype(value.dtype, mx.floating)
            ):
                self.score_names[block] = name
                return value
        raise MoetapError(
            f"gate weights not found in {block} ({self.switches[layer].path}); "
            "capture without scores"
        )

    # -- out of MLX

    def _drain(self, keep: int, final: bool) -> None:
        """Copy pending forwards to NumPy, oldest first, but for the newest `keep`.

        A forward of which nothing is evaluated yet stays, unless `final` says that nothing will be.
        """
        ready = self._pending[: len(self._pending) - keep]
        # Layers depend on the ones before them and on earlier forwards' caches, so a forward with
        # an evaluated layer settles all before it.
        while ready and not final and not self._any_evaluated(ready[-1]):
            ready.pop()
        del self._pending[: len(ready)]
        # The usual case, decode steps that ran whole, is recognised and read in one go.
        if ready and _evaluated(*(f.cells[-1] for f in ready)):
            self._read.append(self._copy(ready, len(self.switches)))
        else:
            for forward in ready:
                self._read.append(self._copy([forward], self._settle(forward)))

    def _any_evaluated(self, forward: _Forward) -> bool:
        first = next((c for c in forward.cells if c is not None), None)
        return self._full_prefill or _evaluated(first)

    def _settle(self, forward: _Forward) -> int:
        """One past the last layer that ran, or that `full_prefill` makes run now."""
        last = len(forward.cells)
        while last > 0 and not _evaluated(forward.cells[last - 1]):
            last -= 1
        if self._full_prefill and last < len(forward.cells):
            mx.eval([a for a in (*forward.cells, *forward.scores) if a is not None])
            return len(forward.cells)
        return last

    def _copy(self, forwards: list[_Forward], last: int) -> Rows:
        """Forwards as NumPy arrays, NOT_EXECUTED from layer `last` on."""
        n = sum(f.n_tokens for f in forwards)
        experts = np.full((n, len(self.switches), max(self.top_k)), NOT_EXECUTED, np.uint16)
        scores = np.full(experts.shape, np.nan, np.float16) if self._keep_scores else None
        for layer in range(last):
            cells = [f.cells[layer] for f in forwards]
            if any(c is None for c in cells):
                continue
            k = self.top_k[layer]
            experts[:, layer, :k] = _stack(cells, k)
            if scores is not None:
                scores[:, layer, :k] = _stack([f.scores[layer] for f in forwards], k)
        tokens = _stack([f.inputs for f in forwards], 1)[:, 0].astype(np.uint32)
        start = forwards[0].start
        return Rows(experts, tokens, np.arange(start, start + n, dtype=np.uint32), scores)

    def _finish_stream(self) -> None:
        n_forwards = len(self._pending) + len(self._read)
        if self._run_ahead and n_forwards > 1 and self._pending[-1].n_tokens == 1:
            self._pending.pop()
        self._drain(keep=0, final=True)
        if self._read:
            self._streams.append(_join(self._read))
            self._read = []
        self._cache = None

    # -- for the user

    @property
    def streams(self) -> list[Rows]:
        """Every stream recorded so far, the current one included; the current one ends here."""
        self._finish_stream()
        return list(self._streams)

    def take(self) -> Rows:
        """The one stream recorded since the last `take`, which is then forgotten.

        Raises MoetapError if there were none or several.
        """
        rows = self._only()
        self._streams.clear()
        return rows

    def _only(self) -> Rows:
        streams = self.streams
        if len(streams) != 1:
            raise MoetapError(f"{len(streams)} streams were recorded, not one; use .streams")
        return streams[0]

    @property
    def experts(self) -> NDArray[np.uint16]:
        """(R, L, K) of the only stream; MoetapError if there is not exactly one."""
        return self._only().experts

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """(R,) tokens fed, of the only stream."""
        return self._only().tokens

    @property
    def position(self) -> NDArray[np.uint32]:
        """(R,) absolute positions, of the only stream."""
        return self._only().position

    @property
    def scores(self) -> NDArray[np.float16] | None:
        """(R, L, K) gate weights of the only stream, None unless asked for."""
        return self._only().scores


def _evaluated(*arrays: mx.array | None) -> bool:
    """Whether MLX has evaluated (or launched) all `arrays`, without making it do so.

    MLX has no such query. It cuts an array off its graph when it launches the evaluation, so arrays
    whose exported graph has no edge need no more work.
    """
    if any(a is None for a in arrays):
        return False
    graph = io.StringIO()
    mx.export_to_dot(graph, *arrays)
    return "->" not in graph.getvalue()


def _stack(arrays: list[Any], width: int) -> NDArray[Any]:
    """Evaluated arrays of any leading shape as one (rows, width) NumPy array. No MLX operation: one
    would queue behind the step in flight.
    """
    return np.concatenate([np.asarray(a).reshape(-1, width) for a in arrays])


def _cache_offset(cache: Any) -> int | None:
    """Tokens that the cache holds already; None where no layer's cache says (recurrent states do
    not).
    """
    for layer in cache or ():
        offset = getattr(layer, "offset", None)
        if isinstance(offset, int):
            return offset
    return None


def _join(parts: list[Rows]) -> Rows:
    """Consecutive forwards as one stream, ids sorted within each cell, scores along with them."""
    experts = np.concatenate([p.experts for p in parts])
    order = np.argsort(experts, axis=2, kind="stable")
    scores = None
    if parts[0].scores is not None:
        kept = np.concatenate([p.scores for p in parts if p.scores is not None])
        scores = np.take_along_axis(kept, order, axis=2)
    return Rows(
        np.take_along_axis(experts, order, axis=2),
        np.concatenate([p.tokens for p in parts]),
        np.concatenate([p.position for p in parts]),
        scores,
    )


def _hooked(original: Any, call: Callable[..., Any]) -> type:
    """A subclass of `original` whose instances are called through `call`; copies and pickles come
    out unhooked.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        function, args, *rest = original.__reduce_ex__(self, protocol)
        return (function, tuple(original if a is hooked else a for a in args), *rest)

    namespace = {
        "__call__": functools.wraps(original.__call__)(call),
        "__reduce_ex__": reduce,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_moetap": True,
    }
    hooked = type(original.__name__, (original,), namespace)
    return hooked


@contextmanager
def tap(
    model: nn.Module, *, scores: bool = False, full_prefill: bool = False, run_ahead: bool = True
) -> Iterator[Recorder]:
    """Record the routing of `model` while the `with` block runs; yields a `Recorder`.

        with moetap.tap(model) as rows:
            text = mlx_lm.generate(model, tokenizer, prompt)
        rows.experts  # (P + G - 1, L, K) uint16

    scores: keep the gate weights, as applied, too.
    full_prefill: compute the routing that mlx-lm's prefill leaves out in the last MoE layer(s), at
    the cost of one attention and one router per chunk. run_ahead: the loop launches the forward of
    the last token although nobody needs its output, as mlx-lm's `generate_step` does; that forward
    is left out. Pass False for a loop of your own that doesn't.

    Raises MoetapError if the model has no routed experts that the tap knows, is tapped already, or
    is called with a batch of several streams.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"tap takes the model that mlx_lm.load returned, not {type(model).__name__}"
        )
    switches = find_switches(model)
    if getattr(type(model), "_moetap", False):
        raise MoetapError(
            f"{type(model).__name__} is tapped already; leave the first tap before the next"
        )
    recorder = Recorder(switches, scores, full_prefill, run_ahead)
    undo: list[tuple[nn.Module, type]] = []

    def swap(module: nn.Module, call: Callable[..., Any]) -> None:
        undo.append((module, type(module)))
        module.__class__ = _hooked(type(module), call)

    try:
        swap(model, _model_call(type(model), recorder))
        for layer, switch in enumerate(switches):
            swap(switch.module, _switch_call(type(switch.module), recorder, layer))
        yield recorder
    finally:
        for module, original in reversed(undo):
            module.__class__ = original


# State stays in closures: an attribute set on an nn.Module would join its parameters.


def _model_call(original: type, recorder: Recorder) -> Callable[..., Any]:
    parameters = list(inspect.signature(original.__call__).parameters)
    cache_at = parameters.index("cache") - 2 if "cache" in parameters else None  # less self, inputs

    def call(self: Any, inputs: mx.array, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        if cache is None and cache_at is not None and len(args) > cache_at:
            cache = args[cache_at]
        recorder._start_forward(inputs, cache)
        return original.__call__(self, inputs, *args, **kwargs)

    return call


def _switch_call(original: type, recorder: Recorder, layer: int) -> Callable[..., Any]:
    def call(self: Any, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> Any:
        x = recorder._note(layer, x, indices, sys._getframe(1))
        return original.__call__(self, x, indices, *args, **kwargs)

    return call
