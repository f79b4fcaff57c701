"""The compiled loops of the two stacks; `moetap.policies.stacks` says what they mean.

Knows arrays only. Imports Numba, so it is itself imported where it is used.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids
from moetap.policies._future import next_look_up


@njit(cache=True, nogil=True)
def lru_places(
    starts: NDArray[np.int64],
    ids: Ids,
    place: Ids,
    bounds: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Look-ups by place in the recency stack, (phases, n_objects + 1), first uses last.

    place: (n_objects, or some more) of a type that holds n_objects - 1, filled with the largest
    value of that type, which stands for never used. A place of an object that was used is smaller
    as long as there is one that was not.

    Objects know their place, instead of places their object: to move one to the top is then a
    comparison and an addition for each object, without a branch, which the compiler makes vector
    instructions of. That is faster than to walk along the stack.
    """
    n = len(place)
    found = np.zeros((len(bounds) - 1, n + 1), dtype=np.int64)
    used = np.zeros(n, dtype=np.bool_)
    for phase in range(len(bounds) - 1):
        for batch in range(bounds[phase], bounds[phase + 1]):
            first, stop = starts[batch], starts[batch + 1]
            for r in range(first, stop):  # all are looked up before one is touched
                x = ids[r]
                found[phase, place[x] if used[x] else n] += 1
                used[x] = True
            for r in range(first, stop):
                x = ids[r]
                old = place[x]
                if old:
                    for other in range(n):
                        place[other] += place[other] < old
                    place[x] = 0
    return found


@njit(cache=True, nogil=True)
def belady_places(
    starts: NDArray[np.int64],
    ids: Ids,
    n_objects: int,
    bounds: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Look-ups by place in Belady's stack, (phases, n_objects + 1), first uses last.

    The stack holds, for each object, the number of its next look-up, which says both when it is
    needed and which object it is; the number of look-ups stands for never. Members of a batch are
    the entries between its first and last look-up.
    """
    total = len(ids)
    after = next_look_up(ids, n_objects)
    found = np.zeros((len(bounds) - 1, n_objects + 1), dtype=np.int64)
    stack = np.empty(n_objects, dtype=np.int32)
    pool = np.empty(n_objects, dtype=np.int32)  # soonest first
    held = 0
    never = np.int32(total)
    for phase in range(len(bounds) - 1):
        for batch in range(bounds[phase], bounds[phase + 1]):
            first, stop = starts[batch], starts[batch + 1]
            width = stop - first
            if width == 1:
                upcoming = after[first] if after[first] >= 0 else never
                here = np.int32(first)
                carried = upcoming
                at = 0
                if held:
                    carried = stack[0]
                    stack[0] = upcoming
                    if carried != here:
                        at = 1
                        while at < held:
                            entry = stack[at]
                            if entry == here:
                                break
                            stack[at] = min(entry, carried)
                            carried = max(entry, carried)
                            at += 1
                        if at < held:
                            stack[at] = carried
                if at < held:
                    found[phase, at] += 1
                else:
                    found[phase, n_objects] += 1
                    stack[held] = carried
                    held += 1
                continue
            waiting = hits = 0
            for at in range(min(width, held)):
                entry = stack[at]
                if first <= entry < stop:
                    found[phase, at] += 1
                    hits += 1
                else:
                    waiting = _insert(pool, 0, waiting, entry)
            for i in range(width):  # the highest id on top
                r = stop - 1 - i
                stack[i] = after[r] if after[r] >= 0 else never
            at = width
            begin = 0
            while at < held and begin < waiting:
                entry = stack[at]
                if first <= entry < stop:
                    found[phase, at] += 1
                    hits += 1
                    stack[at] = pool[begin]
                    begin += 1
                elif entry > pool[begin]:
                    stack[at] = pool[begin]
                    waiting = _insert(pool, begin + 1, waiting, entry)
                    begin += 1
                at += 1
            if begin < waiting or held < width:
                held = max(held, width)
                while begin < waiting:
                    stack[held] = pool[begin]
                    held += 1
                    begin += 1
            found[phase, n_objects] += width - hits
    return found


@njit(cache=True, nogil=True)
def _insert(pool: NDArray[np.int32], begin: int, end: int, entry: int) -> int:
    """Insert into pool[begin:end], which rises; returns the new end."""
    at = end
    while at > begin and pool[at - 1] > entry:
        pool[at] = pool[at - 1]
        at -= 1
    pool[at] = entry
    return end + 1
