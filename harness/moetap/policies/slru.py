"""SLRU: LRU in two segments, so that experts used once can't push out those used again.

Knows recency and whether an expert was used again while it was held (Karedla et al., 1994). Refuses
to know how often.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids
from moetap.policies._compiled import Compiled, Rule
from moetap.policies._list import append, drop, empty, first_kept, unlink


class SLRU(Compiled):
    """Segmented LRU. A new expert goes on probation; a hit makes it protected. Protected experts
    take at most four fifths of the cache (rounded down): beyond that the one used longest ago goes
    back on probation, as its latest. The one on probation that was used longest ago leaves; a
    protected one only where none is."""

    name = "slru"

    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop; see `Compiled.rule`."""
        return Rule(_missed, _empty, _serve, _drop)


class _State(NamedTuple):
    """The list of n_objects is on probation, that of n_objects + 1 protected.
    totals: capacity taken; by protected ones."""

    newer: NDArray[np.int32]
    older: NDArray[np.int32]
    resident: NDArray[np.bool_]
    is_protected: NDArray[np.bool_]
    totals: NDArray[np.int64]


@njit(cache=True, nogil=True, inline="always")
def _empty(n: int) -> _State:
    newer, older = empty(n, 2)
    return _State(newer, older, np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.zeros(2, np.int64))


@njit(cache=True, nogil=True)
def _missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    return _serve(_empty(len(size)), starts, ids, size, capacity, keep)


@njit(cache=True, nogil=True, inline="always")
def _serve(
    state: _State,
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    newer, older, resident, is_protected, totals = state
    probation, protected = len(size), len(size) + 1
    share = capacity * 4 // 5
    used, used_protected = totals[0], totals[1]
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
            victim = newer[probation]
            if victim == probation:
                victim = newer[protected]
                if victim == protected:
                    break
                is_protected[victim] = False
                used_protected -= size[victim]
            unlink(newer, older, victim)
            resident[victim] = False
            used -= size[victim]
        if used + need > capacity:  # nothing but members is left
            stay = first_kept(ids, size, first, stop, capacity, keep)
            for r in range(first, stay):
                x = ids[r]
                if resident[x]:
                    resident[x] = False
                    used -= size[x]
                    if is_protected[x]:
                        is_protected[x] = False
                        used_protected -= size[x]
            first = stay
        for r in range(first, stop):
            x = ids[r]
            if not resident[x]:
                resident[x] = True
                used += size[x]
                append(newer, older, probation, x)
                continue
            append(newer, older, protected, x)
            if not is_protected[x]:
                is_protected[x] = True
                used_protected += size[x]
        while used_protected > share:
            x = newer[protected]
            unlink(newer, older, x)
            is_protected[x] = False
            used_protected -= size[x]
            append(newer, older, probation, x)
    totals[0], totals[1] = used, used_protected
    return missed


@njit(cache=True, nogil=True)
def _drop(state: _State, x: int) -> None:
    if state.is_protected[x]:
        state.is_protected[x] = False
        state.totals[1] -= 1
    drop(state, x)
