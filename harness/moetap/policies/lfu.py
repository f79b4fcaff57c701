"""LFU: the expert that was used least often leaves, of equals the one used longest ago.

Knows how often and when an expert was used; a use is a batch that it was a member of. The policies
differ in what becomes of the count: forgotten when the expert leaves (`lfu`), kept for ever
(`lfu-kept`), or forgotten and aged (`lfu-aging`).
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._heap import push, take
from moetap.policies._list import first_kept


class LFU(Policy):
    """Frequency forgotten at eviction: an expert that comes back starts from one."""

    name = "lfu"
    _kept = False
    _aging = False
    _bypass = False

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        found: NDArray[np.bool_] = _missed(
            look_ups.starts,
            look_ups.ids,
            look_ups.size,
            capacity,
            look_ups.keep,
            self._kept,
            self._aging,
            self._bypass,
        )
        return found


class LFUKept(LFU):
    """Frequency kept at eviction: counts of all uses since the start."""

    name = "lfu-kept"
    _kept = True


class LFUBypass(LFUKept):
    """Frequency kept, for caches with room besides them: after each batch, of residents and members
    those used most often stay. Other tools' "step-atomic LFU"."""

    name = "lfu-bypass"
    forced = False
    _bypass = True


class LFUAging(LFU):
    """Frequency forgotten at eviction, with dynamic aging (LFUDA; Arlitt et al., 2000).

    An expert's value is its count plus the value of the last evicted expert when it was last used.
    So the value that new ones start from rises, and experts that were hot long ago leave.
    """

    name = "lfu-aging"
    _aging = True


@njit(cache=True, nogil=True)
def _missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
    kept: bool,
    aging: bool,
    bypass: bool,
) -> NDArray[np.bool_]:
    """The key is value * R + number of the look-up, R look-ups in all: by value, then by last use.
    Values are below R for counts and R for the sum of counts, so it fits for R < 2^31."""
    n = len(size)
    heap = np.empty(n, dtype=np.int32)
    place = np.empty(n, dtype=np.int32)
    key = np.zeros(n, dtype=np.int64)
    count = np.zeros(n, dtype=np.int64)
    resident = np.zeros(n, dtype=np.bool_)
    missed = np.zeros(len(ids), dtype=np.bool_)
    total = len(ids)
    used = held = age = 0
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        need = 0
        for r in range(first, stop):
            x = ids[r]
            count[x] += 1
            if resident[x]:
                take(heap, place, key, held, x)  # a member can't be evicted
                held -= 1
            else:
                missed[r] = True
                need += size[x]
        while not bypass and used + need > capacity and held:
            victim = heap[0]
            take(heap, place, key, held, victim)
            held -= 1
            resident[victim] = False
            used -= size[victim]
            if aging:
                age = key[victim] // total
            if not kept:
                count[victim] = 0
        if not bypass and used + need > capacity:  # nothing but members is left
            stay = first_kept(ids, size, first, stop, capacity, keep)
            for r in range(first, stay):
                x = ids[r]
                if resident[x]:
                    resident[x] = False
                    used -= size[x]
                if not kept:
                    count[x] = 0
            first = stay
        for r in range(first, stop):
            x = ids[r]
            key[x] = (count[x] + age) * total + r
            push(heap, place, key, held, x)
            held += 1
            if not resident[x]:
                resident[x] = True
                used += size[x]
        while bypass and used > capacity:
            victim = heap[0]
            take(heap, place, key, held, victim)
            held -= 1
            resident[victim] = False
            used -= size[victim]
    return missed
