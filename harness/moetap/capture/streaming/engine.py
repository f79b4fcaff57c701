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
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from moetap.capture.streaming.arena import Arena
from moetap.capture.streaming.index import Part
from moetap.capture.streaming.meter import Meter
from moetap.capture.streaming.reads import Batch, Done, Range, Reader
from moetap.capture.streaming.slots import LRUSlots
from moetap.capture.tap import Switch, _hooked
from moetap.trace import StreamIO


class Engine:
    """What the streamed layers of one model share. Call `start` before each stream."""

    policy = "lru"

    def __init__(self, reader: Reader, slots: int, cold: bool) -> None:
        self.reader, self.slots, self.cold = reader, slots, cold
        self.layers: list[Layer] = []
        self.meter = Meter(0)
        self._prefill_left = 0
        self._prefill = False
        self._full_prefill = False

    def start(self, n_prompt: int, full_prefill: bool) -> None:
        """A stream of n_prompt tokens begins.

        full_prefill: routing is wanted of the layers that a prefill chunk does not need, too.

        Raises MoetapError if files or slots are not what they were.
        """
        self.check()
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
                layer.table.clear()
        self.meter.step()


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
        self.table = LRUSlots(min(engine.slots, len(places)))
        # Order in which a chunk's missing experts are read.
        order = sorted(range(len(places)), key=places.__getitem__)
        self._rank = {expert: rank for rank, expert in enumerate(order)}
        self._runs: dict[int, list[tuple[Path, int, list[int]]]] = {}  # of experts read so far
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

    def check(self) -> None:
        """MoetapError if slots are not where they were."""
        for arena in self._arenas:
            arena.check()

    def _run(self, x: mx.array, indices: mx.array) -> mx.array:
        """The experts' outputs (..., k, D) for x (..., D) and indices (..., k)."""
        engine = self._engine
        k = int(indices.shape[-1])
        n_tokens = indices.size // k
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
        misses, done = self._finish(self._submit(wanted))
        out = self._compute(x, self._slots_of(ids))
        if engine._prefill:
            mx.eval(
                out
            )  # kept until the next chunk it would be as large as the chunk's activations
            self._last = []
        else:
            self._last = [out]
            engine.meter.note(self._number, eval_s, misses, done)
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
            self._finish(reads)
            rows = np.flatnonzero(np.isin(flat, group))
            taken = rows_in[mx.array(token[rows].astype(np.uint32))]
            out = self._compute(taken, self._slots_of(flat[rows])[:, None])
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
        return missing, self._engine.reader.submit([self._ranges(e) for e in missing])

    def _finish(self, reads: tuple[list[int], Batch | None]) -> tuple[int, Done | None]:
        """Wait for reads: (misses, what they took). If one fails, all their experts are missing."""
        missing, batch = reads
        try:
            return len(missing), batch.wait() if batch else None
        except BaseException:
            self.table.forget(missing)
            raise

    def _ranges(self, expert: int) -> list[Range]:
        """The expert's slices in its slot, adjacent ones together."""
        runs = self._runs.get(expert)
        if runs is None:
            runs = self._runs[expert] = self._join(expert)
        slot = self.table.slot_of[expert]
        return [
            Range(path, begin, [self._arenas[number].slot(slot) for number in numbers])
            for path, begin, numbers in runs
        ]

    def _join(self, expert: int) -> list[tuple[Path, int, list[int]]]:
        """Where the expert lies: file, first byte, and the parts that follow each other there."""
        runs: list[tuple[Path, int, list[int]]] = []
        path, end = None, -1
        pieces = sorted((*part.places[expert], number) for number, part in enumerate(self._parts))
        for place, begin, number in pieces:
            if (place, begin) == (path, end):
                runs[-1][2].append(number)
            else:
                runs.append((place, begin, [number]))
            path, end = place, begin + self._parts[number].nbytes
        return runs

    def _slots_of(self, ids: NDArray[np.uint32]) -> mx.array:
        """Expert ids replaced by their slots, in the same shape."""
        table = self.table.slot_of
        slots = [table[e] for e in ids.ravel().tolist()]
        return mx.array(np.array(slots, np.uint32).reshape(ids.shape))
