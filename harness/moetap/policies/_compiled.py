"""Policies that are one compiled loop, which answers replays and decides live.

Knows the two drivers of such a loop: over all batches from an empty state (`missed`), and one batch
at a time on a state that stays (`online`). Refuses to know any rule. Does not import Numba; who
makes a `Rule` does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from moetap.policies import LookUps, Online, Policy


class State(Protocol):
    """What a cache holds and its policy remembers, as arrays that the loop changes in place.

    A NamedTuple of arrays; numbers that change are elements of an array, too.
    """

    @property
    def resident(self) -> NDArray[np.bool_]:
        """(n_objects,)"""

    def __iter__(self) -> Iterator[Any]:
        """The fields."""


class Rule(NamedTuple):
    """A policy for one cache, compiled.

    `serve` is the rule. `missed` is `serve` on what `empty` makes, both inlined: of arrays that
    come from outside LLVM must assume that they overlap, which costs a nanosecond a look-up, up to
    a tenth of the time.

    missed: (starts, ids, size, capacity, keep, *args), as in `LookUps` and `Policy.missed`.
    empty: (n_objects, *args), the state of an empty cache.
    serve: (state, starts, ids, size, capacity, keep), serves all the batches; returns which of the
        look-ups missed and leaves the state, a tuple of any kind, as it is after the last batch.
    drop: (state, x), takes the resident object x of size 1 out, as if it had been evicted.
    """

    missed: Callable[..., Any]
    empty: Callable[..., State]
    serve: Callable[..., Any]
    drop: Callable[[Any, int], None]
    args: tuple[Any, ...] = ()


class Compiled(Policy):
    """A policy that is a compiled loop."""

    @abstractmethod
    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop for a cache of objects of these sizes, (n_objects,)."""

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        rule = self.rule(look_ups.size, capacity)
        found: NDArray[np.bool_] = rule.missed(
            look_ups.starts, look_ups.ids, look_ups.size, capacity, look_ups.keep, *rule.args
        )
        return found

    def online(self, n_objects: int, capacity: int) -> Online:
        """The same loop, batch by batch; see `Policy.online`. Compiled once this returns."""
        if not self.forced:
            return super().online(n_objects, capacity)
        return _Live(self, n_objects, capacity)


class _Live(Online):
    def __init__(self, policy: Compiled, n_objects: int, capacity: int) -> None:
        self.capacity = capacity
        self._n = n_objects
        self._size = np.ones(n_objects, dtype=np.int64)
        self._rule = policy.rule(self._size, capacity)
        self._starts = np.zeros(2, dtype=np.int64)
        # The type that a replay has, so that no second variant of the loop is compiled.
        self._type = np.uint16 if n_objects <= 2**16 else np.int32
        self.clear()
        self.request([])

    def request(self, ids: Sequence[int]) -> list[int]:
        if len(ids) > self.capacity:
            raise ValueError(f"{len(ids)} experts in one batch, {self.capacity} slots")
        # Compiled code does not check: other ids would write anywhere.
        if ids and (sorted({*ids}) != [*ids] or ids[0] < 0 or ids[-1] >= self._n):
            raise ValueError(f"not distinct, rising and below {self._n}: {[*ids]}")
        resident = self._state.resident
        before = resident.copy()
        self._starts[1] = len(ids)
        asked = np.array(ids, dtype=self._type)
        self._rule.serve(self._fields, self._starts, asked, self._size, self.capacity, False)
        left: list[int] = (before > resident).nonzero()[0].tolist()
        return left

    def __contains__(self, x: int) -> bool:
        return bool(self._state.resident[x])

    def forget(self, ids: Iterable[int]) -> None:
        for x in ids:
            if x in self:
                self._rule.drop(self._state, x)

    def clear(self) -> None:
        self._state = self._rule.empty(self._n, *self._rule.args)
        # Of two kinds of NamedTuple with fields of the same types Numba caches one, and takes 150
        # us to recognise the other at each call. A tuple has no kind.
        self._fields = tuple(self._state)
