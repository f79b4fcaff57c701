"""What the compiled policies share: a list of objects, and the rule for sets larger than the cache.

Knows arrays only. A list is two arrays, `newer` and `older`, that name each object's neighbours; it
is closed to a ring by a head, an index beyond the objects: newer[head] is the oldest object,
older[head] the newest one, both the head itself if the list is empty. Imports Numba, so it is
itself imported where it is used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids


@njit(cache=True, nogil=True, inline="always")
def empty(n: int, heads: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`newer` and `older` of empty lists of n objects, with the heads n, n + 1 ..."""
    alone = np.arange(n + heads).astype(np.int32)
    return alone, alone.copy()


@njit(cache=True, nogil=True)
def unlink(newer: NDArray[np.int32], older: NDArray[np.int32], x: int) -> None:
    """Take x out of its list."""
    a, b = older[x], newer[x]
    newer[a] = b
    older[b] = a


@njit(cache=True, nogil=True)
def append(newer: NDArray[np.int32], older: NDArray[np.int32], head: int, x: int) -> None:
    """Make x the newest of the list of `head`."""
    last = older[head]
    newer[last] = x
    older[x] = last
    newer[x] = head
    older[head] = x


@njit(cache=True, nogil=True)
def drop(state: Any, x: int) -> None:
    """Take x, of size 1, out of a cache whose state has `newer`, `older`, `resident` and, in
    `totals[0]`, the capacity taken; see `Rule.drop`."""
    unlink(state.newer, state.older, x)
    state.resident[x] = False
    state.totals[0] -= 1


@njit(cache=True, nogil=True)
def first_kept(
    ids: Ids, size: NDArray[np.int64], first: int, stop: int, capacity: int, keep: bool
) -> int:
    """Where the members begin that stay in the cache: those before are run in earlier passes."""
    if keep:
        return first
    room = capacity
    at = stop
    while at > first and size[ids[at - 1]] <= room:
        at -= 1
        room -= size[ids[at]]
    return at
