"""SIEVE: CLOCK whose survivors stay where they are, so that new experts are judged first.

Knows the order of loading, one bit per expert and a hand (Zhang et al., NSDI 2024). Refuses to know
how long ago or how often an expert was used.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids, LookUps, Policy
from moetap.policies._list import append, first_kept, unlink


class Sieve(Policy):
    """A hit sets the bit. To evict, the hand goes on from where it stopped towards newer experts,
    from the newest back to the oldest: one with its bit set loses the bit and stays, the first
    without it leaves. Members of the batch are passed over."""

    name = "sieve"

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
    used = held = 0  # capacity taken, objects
    hand = n  # at the head: next time from the oldest
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        need = 0
        others = held
        for r in range(first, stop):
            x = ids[r]
            member_of[x] = batch
            if resident[x]:
                used_since[x] = True
                others -= 1
            else:
                missed[r] = True
                need += size[x]
        while used + need > capacity and others > 0:
            if hand == n:
                hand = newer[n]
            at = hand
            hand = newer[at]
            if member_of[at] == batch:
                continue
            if used_since[at]:
                used_since[at] = False
                continue
            unlink(newer, older, at)
            resident[at] = False
            used -= size[at]
            held -= 1
            others -= 1
        if used + need > capacity:  # nothing but members is left
            stay = first_kept(ids, size, first, stop, capacity, keep)
            for r in range(first, stay):
                x = ids[r]
                if resident[x]:
                    if hand == x:
                        hand = newer[x]
                    unlink(newer, older, x)
                    resident[x] = False
                    used -= size[x]
                    held -= 1
            first = stay
        for r in range(first, stop):
            x = ids[r]
            if not resident[x]:
                append(newer, older, n, x)
                resident[x] = True
                used_since[x] = False
                used += size[x]
                held += 1
    return missed
