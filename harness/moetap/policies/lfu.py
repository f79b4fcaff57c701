"""LFU: the expert that was used least often leaves, of equals the one used longest ago.

Knows how often and when an expert was used; a use is a batch that it was a member of. The policies
differ in what becomes of the count: forgotten when the expert leaves (`lfu`), kept for ever
(`lfu-kept`), or forgotten and aged (`lfu-aging`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids
from moetap.policies._compiled import Compiled, Rule
from moetap.policies._heap import push, take
from moetap.policies._list import first_kept


class LFU(Compiled):
    """Frequency forgotten at eviction: an expert that comes back starts from one."""

    name = "lfu"
    _kept = False
    _aging = False
    _bypass = False

    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop; see `Compiled.rule`."""
        flags = self._kept, self._aging, self._bypass
        return Rule(_missed, _empty, _serve, _drop, flags)


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


# The key is value * 2^31 + number of the look-up: by value, then by last use. A value is a sum of
# counts of different stays in the cache (its own, and with aging those of a chain of evicted ones),
# so it is at most the number of look-ups so far. Up to 2^31 of them the number can't reach the
# value, and the key stays below 2^62. A layer that uses 8 experts a step gets there after 2^28
# steps.
_VALUE = 2**31


class _State(NamedTuple):
    """heap, place, key: the residents, as in `_heap`. uses: (n_objects,) that count.
    totals: capacity taken; objects held; age; look-ups so far."""

    heap: NDArray[np.int32]
    place: NDArray[np.int32]
    key: NDArray[np.int64]
    uses: NDArray[np.int64]
    resident: NDArray[np.bool_]
    totals: NDArray[np.int64]
    kept: bool
    aging: bool
    bypass: bool


@njit(cache=True, nogil=True, inline="always")
def _empty(n: int, kept: bool, aging: bool, bypass: bool) -> _State:
    heap, place = np.empty(n, np.int32), np.empty(n, np.int32)
    key, count, totals = np.zeros(n, np.int64), np.zeros(n, np.int64), np.zeros(4, np.int64)
    return _State(heap, place, key, count, np.zeros(n, np.bool_), totals, kept, aging, bypass)


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
    return _serve(_empty(len(size), kept, aging, bypass), starts, ids, size, capacity, keep)


@njit(cache=True, nogil=True, inline="always")
def _serve(
    state: _State,
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    heap, place, key, count, resident, totals, kept, aging, bypass = state
    used, held, age, now = totals[0], totals[1], totals[2], totals[3]
    missed = np.zeros(len(ids), dtype=np.bool_)
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
                age = key[victim] // _VALUE
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
            key[x] = (count[x] + age) * _VALUE + now
            now += 1
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
    totals[0], totals[1], totals[2], totals[3] = used, held, age, now
    return missed


@njit(cache=True, nogil=True)
def _drop(state: _State, x: int) -> None:
    take(state.heap, state.place, state.key, state.totals[1], x)
    state.totals[1] -= 1
    state.totals[0] -= 1
    state.resident[x] = False
    if not state.kept:
        state.uses[x] = 0
