"""SIEVE: CLOCK whose survivors stay where they are, so that new experts are judged first.

Knows the order of loading, one bit per expert and a hand (Zhang et al., NSDI 2024). Refuses to know
how long ago or how often an expert was used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids
from moetap.policies._compiled import Compiled, Rule
from moetap.policies._list import append, drop, empty, first_kept, unlink


class Sieve(Compiled):
    """A hit sets the bit. To evict, the hand goes on from where it stopped towards newer experts,
    from the newest back to the oldest: one with its bit set loses the bit and stays, the first
    without it leaves. Members of the batch are passed over."""

    name = "sieve"

    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop; see `Compiled.rule`."""
        return Rule(_missed, _empty, _serve, _drop)


class _State(NamedTuple):
    """used_since: (n_objects,) the bit.
    member_of: (n_objects,) number of the last batch that an object was a member of.
    totals: capacity taken; batches so far; objects held; where the hand is."""

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
    totals = np.zeros(4, np.int64)
    totals[3] = n  # the head: next time from the oldest
    return _State(newer, older, resident, used_since, member_of, totals)


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
    used, now, held, hand = totals[0], totals[1], totals[2], totals[3]
    missed = np.zeros(len(ids), dtype=np.bool_)
    for batch in range(len(starts) - 1):
        first, stop = starts[batch], starts[batch + 1]
        if first == stop:
            continue
        now += 1
        need = 0
        others = held
        for r in range(first, stop):
            x = ids[r]
            member_of[x] = now
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
            if member_of[at] == now:
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
    totals[0], totals[1], totals[2], totals[3] = used, now, held, hand
    return missed


@njit(cache=True, nogil=True)
def _drop(state: _State, x: int) -> None:
    if state.totals[3] == x:
        state.totals[3] = state.newer[x]
    state.totals[2] -= 1
    drop(state, x)
