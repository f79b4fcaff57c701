"""Belady's MIN with forced admission: the expert whose next use is farthest away leaves.

Knows the future. No engine does, so it is a bound: with the same rule of look-ups and experts of
one size, no policy that loads what it misses and nothing else misses less. With sizes that differ
(one cache over layers, in bytes) it is the usual reference, not a bound.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._future import add, levels, lowest, next_look_up, remove
from moetap.policies._list import first_kept


class Belady(Policy):
    """Every missing expert takes a slot, as it must in an MoE step, and members of the batch stay.

    Which of several experts that are next used in the same batch (or never again) leaves makes no
    difference to the misses: they are of one layer, so of one size, or worthless alike.
    """

    name = "belady"
    offline = True

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
    n, total = len(size), len(ids)
    after = next_look_up(ids, n)
    words, begins = levels(total)
    done = np.empty(n, dtype=np.int32)  # residents that are never used again
    n_done = waiting = 0  # of them; of residents with a next use
    resident = np.zeros(n, dtype=np.bool_)
    missed = np.zeros(total, dtype=np.bool_)
    used = 0
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        need = 0
        for r in range(first, stop):
            x = ids[r]
            if resident[x]:
                remove(words, begins, total - 1 - r)  # a member can't be evicted
                waiting -= 1
            else:
                missed[r] = True
                need += size[x]
        while used + need > capacity:
            if n_done:
                n_done -= 1
                victim = done[n_done]
            elif waiting:
                farthest = lowest(words, begins)
                remove(words, begins, farthest)
                waiting -= 1
                victim = np.int32(ids[total - 1 - farthest])
            else:
                break
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
            if not resident[x]:
                resident[x] = True
                used += size[x]
            if after[r] >= 0:
                add(words, begins, total - 1 - after[r])
                waiting += 1
            else:
                done[n_done] = x
                n_done += 1
    return missed
