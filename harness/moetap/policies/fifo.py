"""FIFO: the expert that was loaded longest ago leaves, used since or not.

Knows the order of loading and nothing else: a hit changes nothing.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._list import append, first_kept, unlink


class FIFO(Policy):
    """First in, first out; the oldest that is no member of the batch leaves."""

    name = "fifo"

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        found: NDArray[np.bool_] = _missed(
            look_ups.starts, look_ups.ids, look_ups.size, capacity, look_ups.keep
        )
        return found


@njit(cache=True, nogil=True)
def _missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    n = len(size)
    newer = np.empty(n + 1, dtype=np.int32)
    older = np.empty(n + 1, dtype=np.int32)
    newer[n] = older[n] = n
    resident = np.zeros(n, dtype=np.bool_)
    member_of = np.full(n, -1, dtype=np.int64)  # the last batch that an object was a member of
    missed = np.zeros(len(ids), dtype=np.bool_)
    used = 0
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        need = 0
        for r in range(first, stop):
            x = ids[r]
            member_of[x] = batch
            if not resident[x]:
                missed[r] = True
                need += size[x]
        at = newer[n]
        while used + need > capacity and at != n:
            after = newer[at]
            if member_of[at] != batch:
                unlink(newer, older, at)
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
                used += size[x]
    return missed
