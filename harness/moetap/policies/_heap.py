"""A binary heap of objects with the least key at its root, from which any object can be taken.

Knows arrays only: heap[:n] objects, place[x] the index of x in it, key[x]. Imports Numba, so it is
itself imported where it is used.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray


@njit(cache=True, nogil=True)
def push(
    heap: NDArray[np.int32], place: NDArray[np.int32], key: NDArray[np.int64], n: int, x: int
) -> None:
    """Add x to a heap of n objects."""
    _rise(heap, place, key, n, x)


@njit(cache=True, nogil=True)
def take(
    heap: NDArray[np.int32], place: NDArray[np.int32], key: NDArray[np.int64], n: int, x: int
) -> None:
    """Take x out of a heap of n objects. The last one takes its place, then rises or sinks."""
    hole = place[x]
    last = heap[n - 1]
    if last == x:
        return
    if hole and key[last] < key[heap[(hole - 1) >> 1]]:
        _rise(heap, place, key, hole, last)
        return
    while True:
        child = 2 * hole + 1
        if child >= n - 1:
            break
        if child + 1 < n - 1 and key[heap[child + 1]] < key[heap[child]]:
            child += 1
        if key[heap[child]] >= key[last]:
            break
        heap[hole] = heap[child]
        place[heap[hole]] = hole
        hole = child
    heap[hole] = last
    place[last] = hole


@njit(cache=True, nogil=True)
def _rise(
    heap: NDArray[np.int32], place: NDArray[np.int32], key: NDArray[np.int64], hole: int, x: int
) -> None:
    while hole:
        parent = (hole - 1) >> 1
        if key[heap[parent]] <= key[x]:
            break
        heap[hole] = heap[parent]
        place[heap[hole]] = hole
        hole = parent
    heap[hole] = x
    place[x] = hole
