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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from moetap.capture.streaming.arena import Arena
from moetap.capture.streaming.index import Part
from moetap.capture.streaming.meter import Meter
from moetap.capture.streaming.reads import Batch, Done, Reader, Run
from moetap.capture.streaming.slots import SlotTable
from moetap.capture.tap import Switch, _hooked
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
        self._prefill_left = 0
        self._prefill = True
        self._full_prefill = False

    def start(self, n_prompt: int, full_prefill: bool) -> None:
        """A stream of n_prompt tokens begins.

        full_prefill: routing is wanted of the layers that a prefill chunk does not need, too.

        Raises MoetapError if files or slots are not what they were.
        """
        self.settle()  # a stream that was given up in the middle of a step may have left reads
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
        self.reader.check()
        for layer in self.layers:
            layer.check()

    def settle(self) -> None:
        """Wait for the reads of the decode step's last layer that ran; MoetapError if one failed.

        Until then nothing may evaluate what that layer put out.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        misses, done = pending.layer._finish(pending.reads)
        self.meter.note(pending.layer._number, pending.eval_s, misses, done)

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

    @property
    def reading(self) -> bool:
        """Reads of a decode step are under way."""
        return self._pending is not None and self._pending.reads[1] is not None

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
        self.meter.step()


@dataclass(frozen=True)
class _Pending:
    """A layer's reads in a decode step, and for how long its selection was waited for."""

    layer: Layer
    reads: tuple[list[int], Batch | None]
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
        self._arenas, self._parts, self._needed = arenas, parts, needed
        places = parts[0].places  # per expert; the switch itself has slots by now
        self._shape = len(places), min(engine.slots, len(places))
        self.table = SlotTable(self._shape[1], LRU().online(*self._shape))
        # Order in which a chunk's missing experts are read.
        order = sorted(range(len(places)), key=places.__getitem__)
        self._rank = {expert: rank for rank, expert in enumerate(order)}
        self._buffers = [[a.slot(slot) for a in arenas] for slot in range(self.table.n_slots)]
        self._runs: dict[int, list[Run]] = {}  # of experts read so far
        self._last: list[mx.array] = []  # what may still read the slots
        self._compute: Callable[[mx.array, mx.array], mx.array]

    def attach(self) -> None:
        """Put this layer behind its expert module. A closure, as state on an nn.Module would join
        its parameters.
        """
        original: Any = type(self._module)
        module = self._module

        def compute(x: mx.array, slots: mx.array) -> Any:
            return original.__call__(module, x, slots)

        def call(_self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            return self._run(x, indices)

        self._compute = compute
        module.__class__ = _hooked(original, call)

    def begin_prefill(self) -> None:
        """Keep what is resident. Prefill relies on LRU, whatever decides later: of a chunk's groups
        the one that is computed must stay while the next one is read.
        """
        self.table.keep(LRU().online(*self._shape))

    def begin_decode(self) -> None:
        """Empty the slots; from now on the engine's policy decides."""
        self.table.clear(self._engine.policy.online(*self._shape))

    def overlap(self, module: nn.Module) -> None:
        """Launch what `module` puts out at once while reads are under way; it must not depend on
        the routed experts.
        """
        original: Any = type(module)
        engine = self._engine

        def call(_self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = original.__call__(module, *args, **kwargs)
            if engine.reading:
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
        k = int(indices.shape[-1])
        n_tokens = indices.size // k
        engine.settle()
        if self._number == 0:
            engine._enter(n_tokens)
        if engine._prefill and not self._runs_in_prefill():
            return mx.zeros((*indices.shape, x.shape[-1]), x.dtype)
        begin = perf_counter()
        mx.eval(indices, *self._last)
        eval_s = perf_counter() - begin
        ids = np.asarray(indices)
        wanted = sorted(set(ids.ravel().tolist()))
        if len(wanted) > self.table.n_slots:
            return self._in_groups(x, ids, wanted)
        reads = self._submit(wanted)
        if engine._prefill:
            self._finish(reads)
            out = self._compute(x, self._slots_of(ids.ravel().tolist(), ids.shape))
            mx.eval(out)  # kept until the next chunk it would be as large as its activations
            self._last = []
            return out
        out = self._while_reading(x, ids, reads)
        self._last = [out]
        engine._pending = _Pending(self, reads, eval_s)
        if self is engine.layers[-1]:
            engine.settle()  # whoever evaluates the model's output knows nothing of reads
        return out

    def _while_reading(
        self, x: mx.array, ids: NDArray[np.uint32], reads: tuple[list[int], Batch | None]
    ) -> mx.array:
        """The output of a decode step, its missing experts still being read: the resident ones
        compute now, the missing ones once somebody evaluates the result.
        """
        flat, missing = ids.ravel().tolist(), reads[0]
        order = [i for i, e in enumerate(flat) if e not in missing]
        n_ready = len(order)
        one_token = len(flat) == ids.shape[-1]
        if n_ready in (0, len(flat)) or not one_token or not self._engine.independent:
            return self._compute(x, self._slots_of(flat, ids.shape))
        order += [i for i, e in enumerate(flat) if e in missing]
        sorted_ids = [flat[i] for i in order]
        one = ids.shape[:-1]
        ready = self._compute(x, self._slots_of(sorted_ids[:n_ready], (*one, n_ready)))
        mx.async_eval(ready)
        rest = sorted_ids[n_ready:]
        missed = self._compute(x, self._slots_of(rest, (*one, len(rest))))
        back = sorted(range(len(order)), key=order.__getitem__)
        return mx.take(mx.concatenate([ready, missed], axis=-2), mx.array(back), axis=-2)

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
            self._finish(reads)
            rows = np.flatnonzero(np.isin(flat, group))
            taken = rows_in[mx.array(token[rows].astype(np.uint32))]
            out = self._compute(taken, self._slots_of(flat[rows].tolist(), (len(rows), 1)))
            mx.async_eval(out)
            if self.table.n_slots == 1 or not self._engine._prefill:
                mx.eval(out)  # there is no other half, or a policy that may take this one
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
        self._last = []
        return result

    def _submit(self, wanted: list[int]) -> tuple[list[int], Batch | None]:
        """Give all of `wanted` slots and start reading the missing ones: (missing, their reads).

        Nothing may be in flight that reads the slots of other experts, but for the half that was
        used last.
        """
        missing = self.table.request(wanted)
        if not missing:
            return missing, None
        slot_of = self.table.slot_of
        reads = [(self._runs_of(e), self._buffers[slot_of[e]]) for e in missing]
        return missing, self._engine.reader.submit(reads)

    def _finish(self, reads: tuple[list[int], Batch | None]) -> tuple[int, Done | None]:
        """Wait for reads: (misses, what they took). If one fails, all their experts are missing."""
        missing, batch = reads
        try:
            return len(missing), batch.wait() if batch else None
        except BaseException:
            self.table.forget(missing)
            raise

    def _runs_of(self, expert: int) -> list[Run]:
        """Where the expert lies, slices that follow each other in a file together."""
        known = self._runs.get(expert)
        if known is not None:
            return known
        runs: list[Run] = []
        path, end = None, -1
        pieces = sorted((*part.places[expert], number) for number, part in enumerate(self._parts))
        for place, begin, number in pieces:
            if (place, begin) == (path, end):
                runs[-1][2].append(number)
            else:
                runs.append((place, begin, [number]))
            path, end = place, begin + self._parts[number].nbytes
        self._runs[expert] = runs
        return runs

    def _slots_of(self, experts: list[int], shape: tuple[int, ...]) -> mx.array:
        """The slots of experts, as an array of that shape."""
        slot_of = self.table.slot_of
        return mx.array(np.array([slot_of[e] for e in experts], np.uint32).reshape(shape))
