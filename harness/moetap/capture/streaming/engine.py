"""The streamed expert module, and what the modules of a model share.

Knows when a layer's slots may be written, which experts a call needs, and how a chunk whose union
exceeds the slots is cut. Refuses to know where experts lie (`index`) and who calls the model.

Three rules keep the results those of a resident run:

* A launched graph reads slots when it runs. Before slots are written, everything that read them is
  evaluated: the layer's last output, and a chunk's at once.
* Each row is a product of its own (`kernel`), so rows may be computed in any grouping.
* mlx-lm's prefill evaluates caches alone, so the last MoE layer(s) of a chunk never run. A streamed
  layer must run to know what to read; those layers are told apart beforehand and return an output
  that nobody evaluates.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from moetap.capture.streaming.arena import Arena
from moetap.capture.streaming.index import Part
from moetap.capture.streaming.meter import Meter
from moetap.capture.streaming.reads import Batch, Done, Reader
from moetap.capture.streaming.slots import SlotTable
from moetap.capture.tap import Switch, _hooked
from moetap.errors import MoetapError
from moetap.policies import Policy
from moetap.policies.lru import LRU
from moetap.trace import StreamIO


class Engine:
    """What the streamed layers of one model share. Call `start` before each stream.

    policy: decides in decode steps which experts leave; it must be able to (`Policy.online`).
    independent: of `kernel.rows_are_independent`.
    """

    def __init__(
        self, reader: Reader, slots: int, cold: bool, policy: Policy, independent: bool
    ) -> None:
        self.reader, self.slots, self.cold, self.policy = reader, slots, cold, policy
        self.independent = independent
        self.layers: list[Layer] = []
        self.meter = Meter(0)
        self._pending: _Pending | None = None
        # Reads may be in flight that nobody will wait for, if an interrupt comes now.
        self._torn = False
        self._prefill_left = 0
        self._prefill = True
        self._full_prefill = False

    def start(self, n_prompt: int, full_prefill: bool) -> None:
        """A stream of n_prompt tokens begins.

        full_prefill: routing is wanted of the layers that a prefill chunk does not need, too.

        Raises MoetapError if files or slots are not what they were.
        """
        # A stream that was given up in the middle of a step may have left reads. If one failed, its
        # experts are forgotten, and this stream will say it if it fails again.
        with suppress(MoetapError):
            self.settle()
        self.check()
        if not self._prefill:
            for layer in self.layers:
                layer.begin_prefill()
        self._prefill_left = n_prompt - 1  # the last one is decode step 0
        self._prefill = True
        self._full_prefill = full_prefill
        self.meter = Meter(len(self.layers))

    def take(self, n_steps: int) -> StreamIO:
        """The measurements of the stream's decode steps; MoetapError as `start`."""
        self.check()
        return self.meter.take(n_steps)

    def check(self) -> None:
        """MoetapError if files or slots are not what they were."""
        if self._torn:
            raise MoetapError(
                "interrupted while experts were read, so that slots may hold anything; load the "
                "model again"
            )
        self.reader.check()
        for layer in self.layers:
            layer.check()

    def settle(self) -> None:
        """Wait for the reads of the decode step's last layer that ran; MoetapError if one failed.

        Until then nothing may evaluate what that layer put out.
        """
        if self._pending is not None:
            layer, missing, batch, eval_s = self._pending
            self._torn, self._pending = True, None
            done = layer._finish(missing, batch)
            self.meter.note(layer._number, eval_s, len(missing), done)

    @property
    def warnings(self) -> list[str]:
        """What a person should know before trusting times and bits."""
        found = self.reader.warnings
        if not self.independent:
            found.append(
                "MLX's kernels for these experts depend here on how many rows they get at once: "
                "streamed and resident runs may differ where the router nearly ties (moetap verify "
                "--streaming compares them)"
            )
        return found

    def reads_for(self, layer: Layer) -> bool:
        """Reads of `layer` in a decode step are under way, and of no other."""
        pending = self._pending
        return pending is not None and pending.layer is layer and pending.batch is not None

    def close(self) -> None:
        """Close the checkpoint's files."""
        self.reader.close()

    def _enter(self, n_tokens: int) -> None:
        """A forward of n_tokens begins."""
        if self._prefill_left > 0:
            self._prefill_left -= n_tokens
            return
        if self._prefill:
            # Decode starts with empty slots, so that what it misses does not depend on the prompt's
            # chunks and equals a replay of the decode rows.
            self._prefill = False
            for layer in self.layers:
                layer.begin_decode()
        if n_tokens != 1:
            raise MoetapError(
                f"{n_tokens} tokens in one decode step: experts are streamed for one at a time"
            )
        self.meter.step()


class _Pending(NamedTuple):
    """What a layer reads in a decode step, and for how long its selection was waited for."""

    layer: Layer
    missing: list[int]
    batch: Batch | None
    eval_s: float


class Layer:
    """One MoE layer: its arenas, its slot table and its place in the model.

    needed: the layer runs in a prefill chunk.
    """

    def __init__(
        self,
        engine: Engine,
        switch: Switch,
        arenas: Sequence[Arena],
        parts: Sequence[Part],
        needed: bool,
    ) -> None:
        self._engine, self._number = engine, len(engine.layers)
        self._module = switch.module
        self._arenas, self._needed = arenas, needed
        places = parts[0].places  # per expert; the switch itself has slots by now
        self._shape = len(places), min(engine.slots, len(places))
        self.table = SlotTable(self._shape[1], LRU().online(*self._shape))
        # Order in which a chunk's missing experts are read.
        order = sorted(range(len(places)), key=places.__getitem__)
        self._rank = {expert: rank for rank, expert in enumerate(order)}
        self._buffers = [[a.slot(slot) for a in arenas] for slot in range(self.table.n_slots)]
        sizes = [part.nbytes for part in parts]
        self._runs = [
            engine.reader.runs((*place, n) for place, n in zip(of_one, sizes, strict=True))
            for of_one in zip(*(part.places for part in parts), strict=True)
        ]
        self._last: list[mx.array] = []  # what may still read the slots
        # Of a decode step: the slots of both halves, and where their outputs belong.
        self._halves: tuple[_Late, _Late, _Late] | None = None
        self._compute: Callable[[mx.array, mx.array], mx.array]

    def attach(self) -> None:
        """Put this layer behind its expert module. A closure, as state on an nn.Module would join
        its parameters.
        """
        original: Any = type(self._module)

        def call(_self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            return self._run(x, indices)

        self._compute = partial(original.__call__, self._module)
        self._module.__class__ = _hooked(original, call)

    def begin_prefill(self) -> None:
        """Keep what is resident. Prefill relies on LRU, whatever decides later: of a chunk's groups
        the one that is computed must stay while the next one is read.
        """
        self.table.keep(LRU().online(*self._shape))

    def begin_decode(self) -> None:
        """Empty the slots; from now on the engine's policy decides."""
        self.table.clear(self._engine.policy.online(*self._shape))

    def overlap(self, module: nn.Module) -> None:
        """Launch what `module` puts out at once while this layer's reads are under way; it must not
        depend on the layer's routed experts. (It does on the layer's before, so where a block calls
        it before the routed experts, it is left alone.)
        """
        original: Any = type(module)

        def call(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = original.__call__(module, *args, **kwargs)
            if self._engine.reads_for(self):
                mx.async_eval(out)
            return out

        module.__class__ = _hooked(original, call)

    def check(self) -> None:
        """MoetapError if slots are not where they were."""
        for arena in self._arenas:
            arena.check()

    def _run(self, x: mx.array, indices: mx.array) -> mx.array:
        """The experts' outputs (..., k, D) for x (..., D) and indices (..., k)."""
        engine = self._engine
        if self._number == 0:
            engine._enter(indices.size // int(indices.shape[-1]))
        if not engine._prefill:
            return self._run_token(x, indices)
        if not self._runs_in_prefill():
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        return self._run_chunk(x, indices)

    def _run_token(self, x: mx.array, indices: mx.array) -> mx.array:
        """A decode step in two halves, resident experts first. The first half is computed at once
        if all of its experts are resident. Missing ones are still being read when this returns;
        whoever evaluates the output waits for them first.

        The graph is built before the selection is known, and its slots are written later: Python
        that has waited for reads or an evaluation finds the processor's caches cold, which makes it
        ten times slower.
        """
        engine = self._engine
        if self._halves is None:
            k = int(indices.shape[-1])
            n = k // 2 if engine.independent else 0
            shape = indices.shape[:-1]
            self._halves = _Late((*shape, n)), _Late((*shape, k - n)), _Late((k,))
        first, second, back = self._halves
        out = self._compute(x, second.array)
        if first.size:
            early = self._compute(x, first.array)
            out = mx.take(mx.concatenate([early, out], axis=-2), back.array, axis=-2)
        engine.settle()
        begin = perf_counter()
        mx.eval(indices, *self._last)
        eval_s = perf_counter() - begin
        experts = indices.tolist()
        while isinstance(experts[0], list):
            (experts,) = experts
        missing, batch = self._submit(sorted({*experts}))
        slot_of = self.table.slot_of
        slots = [slot_of[e] for e in experts]
        if first.size:
            late = [e in missing for e in experts]
            order = sorted(range(len(slots)), key=late.__getitem__)
            slots = [slots[i] for i in order]
            first.write(slots[: first.size])
            back.write(sorted(range(len(order)), key=order.__getitem__))
            if missing and late.count(False) >= first.size:
                mx.async_eval(early)
        second.write(slots[first.size :])
        self._last = [out]
        engine._pending, engine._torn = _Pending(self, missing, batch, eval_s), False
        if self is engine.layers[-1]:
            engine.settle()  # whoever evaluates the model's output knows nothing of reads
        return out

    def _run_chunk(self, x: mx.array, indices: mx.array) -> mx.array:
        """A chunk of prefill."""
        mx.eval(indices, *self._last)
        self._last = []
        ids = np.asarray(indices)
        flat = ids.ravel().tolist()
        wanted = sorted(set(flat))
        if len(wanted) > self.table.n_slots:
            return self._in_groups(x, ids, wanted)
        self._finish(*self._submit(wanted))
        out = self._compute(x, self._slots_of(flat, ids.shape))
        mx.eval(out)  # kept until the next chunk it would be as large as its activations
        return out

    def _runs_in_prefill(self) -> bool:
        # Of the last layer only the routing is ever asked for.
        last = self._number == len(self._engine.layers) - 1
        return self._needed or (self._engine._full_prefill and not last)

    def _in_groups(self, x: mx.array, ids: NDArray[np.uint32], wanted: list[int]) -> mx.array:
        """A chunk with more experts than slots: group by group, the resident ones first, then the
        missing in the order in which they are stored. Every expert is read at most once.

        A group takes half of the slots, so that the next one is read while it is computed.
        """
        flat = ids.ravel()
        token = np.arange(flat.size) // ids.shape[-1]
        rows_in = x.reshape(-1, x.shape[-1])
        resident = [e for e in wanted if e in self.table.slot_of]
        missing = sorted(set(wanted) - set(resident), key=self._rank.__getitem__)
        half = max(1, self.table.n_slots // 2)
        groups = [
            sorted(experts[i : i + half])
            for experts in (resident, missing)
            for i in range(0, len(experts), half)
        ]
        outputs, places = [], []
        reads = self._submit(groups[0])
        for i, group in enumerate(groups):
            self._finish(*reads)
            rows = np.flatnonzero(np.isin(flat, group))
            taken = rows_in[mx.array(token[rows].astype(np.uint32))]
            out = self._compute(taken, self._slots_of(flat[rows].tolist(), (len(rows), 1)))
            mx.async_eval(out)
            if self.table.n_slots == 1:
                mx.eval(out)  # there is no other half
            if i + 1 < len(groups):
                # Into slots that nothing reads: this group's were used last, the others' outputs
                # are evaluated.
                reads = self._submit(groups[i + 1])
            mx.eval(out)
            outputs.append(out.reshape(len(rows), -1))
            places.append(rows)
        order = np.argsort(np.concatenate(places)).astype(np.uint32)
        result = mx.concatenate(outputs)[mx.array(order)].reshape(*ids.shape, -1)
        mx.eval(result)
        return result

    def _submit(self, wanted: list[int]) -> tuple[list[int], Batch | None]:
        """Give all of `wanted` slots and start reading the missing ones: (missing, their reads).

        Nothing may be in flight that reads the slots of other experts, but for the half that was
        used last.
        """
        self._engine._torn = True
        missing = self.table.request(wanted)
        if not missing:
            return missing, None
        slot_of = self.table.slot_of
        reads = [(self._runs[e], self._buffers[slot_of[e]]) for e in missing]
        return missing, self._engine.reader.submit(reads)

    def _finish(self, missing: list[int], batch: Batch | None) -> Done | None:
        """Wait for what `_submit` began. If a read fails, all its experts are missing."""
        try:
            done = batch.wait() if batch else None
        except MoetapError:
            self.table.forget(missing)
            self._engine._torn = False
            raise
        self._engine._torn = False
        return done

    def _slots_of(self, experts: list[int], shape: tuple[int, ...]) -> mx.array:
        """The slots of experts, as an array of that shape."""
        slot_of = self.table.slot_of
        return mx.array(np.array([slot_of[e] for e in experts], np.uint32).reshape(shape))


class _Late:
    """Indices of a shape whose values are written after a graph was built on them, and before it
    runs. Nothing that reads the values of before may be in flight.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.array = mx.zeros(shape, mx.uint32)
        mx.eval(self.array)
        self.size = int(self.array.size)
        self._memory = np.frombuffer(self.array, np.uint32).data

    def write(self, values: list[int]) -> None:
        """All of them, in C order."""
        self._memory[:] = array("I", values)
