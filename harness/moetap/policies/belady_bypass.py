"""Belady's MIN for caches with room besides them: after each batch, what is needed soonest stays.

Knows the future, and may drop an expert that it has just computed with. An MoE step cannot always:
the experts of its set sit in the slots. So these are lower bounds for engines with a staging area,
and figures by which other tools' "Belady" can be recognised. The rule for sets larger than the
cache has no say, since a set does not have to be in it.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._future import add, levels, lowest, next_look_up, remove
from moetap.policies._list import first_kept


class BeladyBypass(Policy):
    """Of residents and members, those whose next use is nearest stay, as many as fit."""

    name = "belady-bypass"
    forced = False
    offline = True
    _admit = False

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        found: NDArray[np.bool_] = _missed(
            look_ups.starts, look_ups.ids, look_ups.size, capacity, self._admit
        )
        return found


class BeladyAdmit(BeladyBypass):
    """What was loaded stays until the next batch; members that were resident may leave for it.

    Between `belady` and `belady-bypass`. Of more loads than fit, the last ones stay.
    """

    name = "belady-admit"
    _admit = True


@njit(cache=True, nogil=True)
def _missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    admit: bool,
) -> NDArray[np.bool_]:
    n, total = len(size), len(ids)
    after = next_look_up(ids, n)
    words, begins = levels(total)
    resident = np.zeros(n, dtype=np.bool_)
    missed = np.zeros(total, dtype=np.bool_)
    loads = np.empty(n, dtype=np.int32)  # numbers of the look-ups that missed
    objects = np.empty(n, dtype=np.int32)
    used = 0
    for batch in range(len(starts) - 1):
        n_loads = need = 0
        for r in range(starts[batch], starts[batch + 1]):
            x = ids[r]
            if not resident[x]:
                missed[r] = True
                loads[n_loads] = r
                objects[n_loads] = x
                n_loads += 1
                need += size[x]
                continue
            remove(words, begins, total - 1 - r)
            if after[r] >= 0:
                add(words, begins, total - 1 - after[r])
            else:
                resident[x] = False
                used -= size[x]
        # Loads that are never used again take no room once the batch is done, unless they must.
        stay = first_kept(objects, size, 0, n_loads, capacity, False) if admit else 0
        if admit:
            need = 0
            for i in range(stay, n_loads):
                need += size[objects[i]]
        while admit and used + need > capacity:
            used -= _drop_farthest(words, begins, ids, size, resident)
        for i in range(stay, n_loads):
            if after[loads[i]] >= 0:
                add(words, begins, total - 1 - after[loads[i]])
                resident[objects[i]] = True
                used += size[objects[i]]
        while used > capacity:
            used -= _drop_farthest(words, begins, ids, size, resident)
    return missed


@njit(cache=True, nogil=True)
def _drop_farthest(
    words: NDArray[np.uint64],
    begins: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    resident: NDArray[np.bool_],
) -> int:
    """Drop the resident whose next use is farthest away; returns its size."""
    farthest = lowest(words, begins)
    remove(words, begins, farthest)
    victim = ids[len(ids) - 1 - farthest]
    resident[victim] = False
    return int(size[victim])
