"""SLRU: LRU in two segments, so that experts used once can't push out those used again.

Knows recency and whether an expert was used again while it was held (Karedla et al., 1994). Refuses
to know how often.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._list import append, first_kept, unlink


class SLRU(Policy):
    """Segmented LRU. A new expert goes on probation; a hit makes it protected. Protected experts
    take at most four fifths of the cache (rounded down): beyond that the one used longest ago goes
    back on probation, as its latest. The one on probation that was used longest ago leaves; a
    protected one only where none is."""

    name = "slru"

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
    probation, protected = n, n + 1
    newer = np.empty(n + 2, dtype=np.int32)
    older = np.empty(n + 2, dtype=np.int32)
    newer[probation] = older[probation] = probation
    newer[protected] = older[protected] = protected
    resident = np.zeros(n, dtype=np.bool_)
    is_protected = np.zeros(n, dtype=np.bool_)
    missed = np.zeros(len(ids), dtype=np.bool_)
    share = capacity * 4 // 5
    used = used_protected = 0
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
    return missed
