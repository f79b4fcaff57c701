"""Pinned + LRU: the hottest experts stay, the others share what is left by LRU.

Knows which experts are hot (fitted on other streams) and recency. Refuses to know what comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.errors import UsageError
from moetap.policies import Ids, Online
from moetap.policies._compiled import Compiled, Rule
from moetap.policies._list import append, drop, empty, first_kept, unlink
from moetap.policies.static import hottest


class Pinned(Compiled):
    """LRU in which the n hottest experts of a cache leave only if nothing else can: half of the
    cache without a number, `pinned:16` sixteen of them. A pinned expert is loaded when it is first
    used, and misses then."""

    fitted = True

    def __init__(self, n: int | None = None, counts: NDArray[np.int64] | None = None) -> None:
        if n is not None and n < 0:
            raise UsageError(f"pinned:{n}: a number of experts to pin")
        self.n, self.counts = n, counts
        self.name = "pinned" if n is None else f"pinned:{n}"

    def fit(self, counts: NDArray[np.int64]) -> Pinned:
        """Pin by these counts."""
        return Pinned(self.n, counts)

    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop; see `Compiled.rule`."""
        if self.counts is None:
            raise UsageError(f"{self.name} must be fitted first")
        pinned = hottest(self.counts, size, capacity // 2 if self.n is None else capacity, self.n)
        return Rule(_missed, _empty, _serve, drop, (pinned,))

    def online(self, n_objects: int, capacity: int) -> Online:
        """The same loop, batch by batch; see `Policy.online`."""
        if self.counts is None:
            raise UsageError(f"policy {self.name} cannot decide online: it needs counts (`fit`)")
        return super().online(n_objects, capacity)


class _State(NamedTuple):
    """The list of n_objects + 1 is of the pinned ones, that of n_objects of the others.
    totals: capacity taken."""

    newer: NDArray[np.int32]
    older: NDArray[np.int32]
    resident: NDArray[np.bool_]
    pinned: NDArray[np.bool_]
    totals: NDArray[np.int64]


@njit(cache=True, nogil=True, inline="always")
def _empty(n: int, pinned: NDArray[np.bool_]) -> _State:
    newer, older = empty(n, 2)
    return _State(newer, older, np.zeros(n, np.bool_), pinned, np.zeros(1, np.int64))


@njit(cache=True, nogil=True)
def _missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
    pinned: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    return _serve(_empty(len(size), pinned), starts, ids, size, capacity, keep)


@njit(cache=True, nogil=True, inline="always")
def _serve(
    state: _State,
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    newer, older, resident, pinned, totals = state
    n = len(size)
    used = totals[0]
    missed = np.zeros(len(ids), dtype=np.bool_)
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        need = 0
        for r in range(first, stop):
            x = ids[r]
            if resident[x]:
                unlink(newer, older, x)  # a member can't be evicted
            else:
                missed[r] = True
                need += size[x]
        while used + need > capacity:
            victim = newer[n] if newer[n] != n else newer[n + 1]
            if victim == n + 1:
                break
            unlink(newer, older, victim)
            resident[victim] = False
            used -= size[victim]
        if used + need > capacity:  # nothing but members is left
            stay = first_kept(ids, size, first, stop, capacity, keep)
            for r in range(first, stay):
                if resident[ids[r]]:
                    resident[ids[r]] = False
                    used -= size[ids[r]]
            first = stay
        for r in range(first, stop):
            x = ids[r]
            append(newer, older, n + 1 if pinned[x] else n, x)
            if not resident[x]:
                resident[x] = True
                used += size[x]
    totals[0] = used
    return missed
