"""CLOCK: FIFO with a second chance for experts that were used since they were loaded.

Knows the order of loading and one bit per expert. Refuses to know how long ago or how often it was
used.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._list import append, first_kept, unlink


class Clock(Policy):
    """A hit sets the bit. To evict, go from the oldest on: one with its bit set loses the bit and
    becomes the newest, the first without it leaves. Members of the batch are passed over."""

    name = "clock"

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
    used_since = np.zeros(n, dtype=np.bool_)
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
            if resident[x]:
                used_since[x] = True
            else:
                missed[r] = True
                need += size[x]
        # Those given a second chance are met again at the end of the list, without their bit.
        at = newer[n]
        while used + need > capacity and at != n:
            after = newer[at]
            if member_of[at] != batch:
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
    return missed
