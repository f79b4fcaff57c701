"""CLOCK: FIFO with a second chance for experts that were used since they were loaded.

Knows the order of loading and one bit per expert. Refuses to know how long ago or how often it was
used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids
from moetap.policies._compiled import Compiled, Rule
from moetap.policies._list import append, drop, empty, first_kept, unlink


class Clock(Compiled):
    """A hit sets the bit. To evict, go from the oldest on: one with its bit set loses the bit and
    becomes the newest, the first without it leaves. Members of the batch are passed over."""

    name = "clock"

    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop; see `Compiled.rule`."""
        return Rule(_missed, _empty, _serve, drop)


class _State(NamedTuple):
    """used_since: (n_objects,) the bit.
    member_of: (n_objects,) number of the last batch that an object was a member of.
    totals: capacity taken; batches so far."""

    newer: NDArray[np.int32]
    older: NDArray[np.int32]
    resident: NDArray[np.bool_]
    used_since: NDArray[np.bool_]
    member_of: NDArray[np.int64]
    totals: NDArray[np.int64]


@njit(cache=True, nogil=True, inline="always")
def _empty(n: int) -> _State:
    newer, older = empty(n, 1)
    resident, used_since, member_of = (
        np.zeros(n, np.bool_),
        np.zeros(n, np.bool_),
        np.zeros(n, np.int64),
    )
    return _State(newer, older, resident, used_since, member_of, np.zeros(2, np.int64))


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
    newer, older, resident, used_since, member_of, totals = state
    n = len(size)
    used, now = totals[0], totals[1]
    missed = np.zeros(len(ids), dtype=np.bool_)
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        now += 1
        need = 0
        for r in range(first, stop):
            x = ids[r]
            member_of[x] = now
            if resident[x]:
                used_since[x] = True
            else:
                missed[r] = True
                need += size[x]
        # Those given a second chance are met again at the end of the list, without their bit.
        at = newer[n]
        while used + need > capacity and at != n:
            after = newer[at]
            if member_of[at] != now:
                unlink(newer, older, at)
                if used_since[at]:
                    used_since[at] = False
                    append(newer, older, n, at)
                    if after == n:
                        after = at
                else:
                    resident[at] = False
                    used -= size[at]
            at = after
        if used + need > capacity:  # nothing but members is left
            stay = first_kept(ids, size, first, stop, capacity, keep)
            for r in range(first, stay):
                if resident[ids[r]]:
                    unlink(newer, older, ids[r])
                    resident[ids[r]] = False
                    used -= size[ids[r]]
            first = stay
        for r in range(first, stop):
            x = ids[r]
            if not resident[x]:
                append(newer, older, n, x)
                resident[x] = True
                used_since[x] = False
                used += size[x]
    totals[0], totals[1] = used, now
    return missed
