"""The compiled loops of LRU.

Knows arrays only; `moetap.policies.lru` says what they mean. A file of its own because importing
Numba takes longer than `moetap --help` may.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids
from moetap.policies._list import append, empty, first_kept, unlink


class State(NamedTuple):
    """totals: capacity taken."""

    newer: NDArray[np.int32]
    older: NDArray[np.int32]
    resident: NDArray[np.bool_]
    totals: NDArray[np.int64]


@njit(cache=True, nogil=True, inline="always")
def empty_cache(n: int) -> State:
    newer, older = empty(n, 1)
    return State(newer, older, np.zeros(n, np.bool_), np.zeros(1, np.int64))


@njit(cache=True, nogil=True)
def missed(
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    return serve(empty_cache(len(size)), starts, ids, size, capacity, keep)


@njit(cache=True, nogil=True, inline="always")
def serve(
    state: State,
    starts: NDArray[np.int64],
    ids: Ids,
    size: NDArray[np.int64],
    capacity: int,
    keep: bool,
) -> NDArray[np.bool_]:
    newer, older, resident, totals = state
    n = len(size)
    used = totals[0]
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
        while used + need > capacity and newer[n] != n:
            victim = newer[n]
            unlink(newer, older, victim)
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
            append(newer, older, n, x)
            if not resident[x]:
                resident[x] = True
                used += size[x]
    totals[0] = used
    return missed


@njit(cache=True, nogil=True)
def lru_misses(
    n_steps: int,
    n_experts: NDArray[np.int64],
    starts: NDArray[np.int64],
    ids: NDArray[np.uint16],
    capacities: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Misses (n_C, L, steps) of step-atomic LRU. capacities: (n_C,) rising, without repeats.

    Where C >= E only first uses miss, so the walk ends at the largest C below E. With C = E asked
    for besides E / 4 and E / 2 that takes two fifths off the time.
    """
    n_layers, n_sizes = len(n_experts), len(capacities)
    most = int(n_experts.max())
    misses = np.zeros((n_sizes, n_layers, n_steps), dtype=np.int32)
    order = np.empty(most + 1, dtype=np.uint16)  # latest first
    after = np.empty(most + 1, dtype=np.uint16)  # the same once the step is done
    member = np.zeros(most, dtype=np.uint8)
    used = np.empty(most, dtype=np.uint8)
    for layer in range(n_layers):
        held = 0
        used[:] = 0
        n_small = np.searchsorted(capacities, n_experts[layer])  # capacities below E
        deepest = capacities[n_small - 1] if n_small else 0
        for step in range(n_steps):
            cell = layer * n_steps + step
            first, stop = starts[cell], starts[cell + 1]
            size = stop - first
            if size == 0:
                continue
            new = 0
            for i in range(size):
                expert = ids[stop - 1 - i]
                after[i] = expert
                member[expert] = 1
                new += 1 - used[expert]
                used[expert] = 1
            end = size
            place = 0
            for c in range(n_small):
                for r in range(place, min(held, capacities[c])):
                    expert = order[r]
                    after[end] = expert  # without a branch: a member is written over by the next
                    end += 1 - member[expert]
                place = min(held, capacities[c])
                # Of the first `place` experts of the order, those not appended are members.
                misses[c, layer, step] = size - (place - (end - size))
            misses[n_small:, layer, step] = new
            for i in range(size):
                member[ids[first + i]] = 0
            # What stands behind the largest cache can't hit any more.
            held = min(end, deepest)
            order, after = after, order
    return misses
