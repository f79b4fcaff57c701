"""What the two Belady policies share: the next look-up of each object, and the farthest of them.

Knows arrays only. `Farthest` in words: a set of numbers of look-ups as bits, 64 to a word, with a
level above it that has a bit for each word that is not zero, and so on. Numbers are counted from
the end, so that the farthest is the lowest bit. Adding, removing and finding take a step per level:
4 for 16 M look-ups. Imports Numba, so it is itself imported where it is used.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.policies import Ids

# Place of a word's only bit: multiplying by a de Bruijn sequence brings a different 6 bits to the
# top for each of the 64 places.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_PLACE = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _PLACE[((int(_DE_BRUIJN) << _bit) & (2**64 - 1)) >> 58] = _bit


@njit(cache=True, nogil=True)
def next_look_up(ids: Ids, n_objects: int) -> NDArray[np.int32]:
    """Number of the next look-up of the same object, -1 if there is none, (len(ids),)."""
    after = np.empty(len(ids), dtype=np.int32)
    upcoming = np.full(n_objects, -1, dtype=np.int32)
    for r in range(len(ids) - 1, -1, -1):
        after[r] = upcoming[ids[r]]
        upcoming[ids[r]] = r
    return after


@njit(cache=True, nogil=True)
def levels(n: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """An empty set of numbers below n: all words, and where each level begins."""
    begins = [0]
    words = (n + 63) // 64
    while True:
        begins.append(begins[-1] + words)
        if words <= 1:
            break
        words = (words + 63) // 64
    return np.zeros(begins[-1], dtype=np.uint64), np.array(begins, dtype=np.int64)


@njit(cache=True, nogil=True)
def add(words: NDArray[np.uint64], begins: NDArray[np.int64], i: int) -> None:
    """Add number i."""
    for level in range(len(begins) - 1):
        at = begins[level] + (i >> 6)
        before = words[at]
        words[at] = before | (np.uint64(1) << np.uint64(i & 63))
        if before:
            return
        i >>= 6


@njit(cache=True, nogil=True)
def remove(words: NDArray[np.uint64], begins: NDArray[np.int64], i: int) -> None:
    """Remove number i, which is in the set."""
    for level in range(len(begins) - 1):
        at = begins[level] + (i >> 6)
        words[at] ^= np.uint64(1) << np.uint64(i & 63)
        if words[at]:
            return
        i >>= 6


@njit(cache=True, nogil=True)
def lowest(words: NDArray[np.uint64], begins: NDArray[np.int64]) -> int:
    """The lowest number of a set that is not empty."""
    i = 0
    for level in range(len(begins) - 2, -1, -1):
        word = words[begins[level] + i]
        only = word & (~word + np.uint64(1))
        i = (i << 6) + _PLACE[(only * _DE_BRUIJN) >> np.uint64(58)]
    return i
