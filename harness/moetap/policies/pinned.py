"""Pinned + LRU: the hottest experts stay, the others share what is left by LRU.

Knows which experts are hot (fitted on other streams) and recency. Refuses to know what comes.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.errors import UsageError
from moetap.policies import Ids, LookUps, Policy
from moetap.policies._list import append, first_kept, unlink
from moetap.policies.static import hottest


class Pinned(Policy):
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

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        if self.counts is None:
            raise UsageError(f"{self.name} must be fitted first")
        room = capacity // 2 if self.n is None else capacity
        pinned = hottest(self.counts, look_ups.size, room, self.n)
        found: NDArray[np.bool_] = _missed(
            look_ups.starts, look_ups.ids, look_ups.size, capacity, look_ups.keep, pinned
        )
        return found


@njit(cache=True, nogil=True)
def _missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
    pinned: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    n = len(size)
    newer = np.empty(n + 2, dtype=np.int32)  # n heads the list of the others, n + 1 the pinned
    older = np.empty(n + 2, dtype=np.int32)
    newer[n] = older[n] = n
    newer[n + 1] = older[n + 1] = n + 1
    resident = np.zeros(n, dtype=np.bool_)
    missed = np.zeros(len(ids), dtype=np.bool_)
    used = 0
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
    return missed
