"""LRU and Belady with every capacity in one pass.

Knows the two stacks: LRU and Belady with forced admission have inclusion, that is, what a cache of
C slots holds, one of C + 1 slots holds too. So there is an order of all objects whose first C are
the content at C, for every C at once, and a look-up hits at C exactly if its object stands before
place C. Refuses to know experts of different sizes, for which there is no such order, and policies
without inclusion.

After a batch, its members are on top, the highest id first (so that of a set larger than the cache
the C members with the highest ids stay). Below:

- LRU: the others in their old order.
- Belady (Mattson et al., 1970, here for sets): at C the members push out the others whose next use
  is farthest away. Going down the old order, C rising, keep the pool of those pushed out so far. If
  the next object is a member, a cache of C + 1 pushes out one less; if it is not, it joins the
  pool. Either way the one of the pool that is needed soonest is what C + 1 holds more than C, and
  takes the place. Where the pool is empty the rest of the order stays.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetap.errors import UsageError
from moetap.policies import Ids, LookUps

CURVES = ("lru", "belady")
"""Policies that have a curve."""


def places(
    policy: str, look_ups: LookUps, bounds: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Look-ups by the place of their object in the stack, (phases, n_objects + 1), first uses last.

    bounds: (phases + 1,) the batches where phases begin and end; one phase of all without it. The
    stack is the same throughout.

        misses(C) = look-ups - sum_{d < C} places[d]

    Raises:
        UsageError: the policy has no such order, or objects differ in size.
    """
    if policy not in CURVES:
        raise UsageError(f"no curve of {policy}; there are {', '.join(CURVES)}")
    if np.any(look_ups.size != 1) or look_ups.keep:
        raise UsageError("a curve needs a cache of slots")
    from moetap.policies._stacks import belady_places, lru_places

    n = len(look_ups.size)
    if bounds is None:
        bounds = np.array([0, len(look_ups.starts) - 1])
    if policy == "belady":
        found: NDArray[np.int64] = belady_places(look_ups.starts, look_ups.ids, n, bounds)
        return found
    # Filled with the largest value of the type, "never used".
    place: Ids = np.full(n, 2**8 - 1, np.uint8) if n <= 2**8 else np.full(n, 2**16 - 1, np.uint16)
    found = lru_places(look_ups.starts, look_ups.ids, place, bounds)
    return found


def misses(found: NDArray[np.int64]) -> NDArray[np.int64]:
    """Misses at C = 0 .. n_objects from `places`, the same shape."""
    hits = np.cumsum(found[..., :-1], axis=-1)
    total = found.sum(axis=-1, keepdims=True)
    return np.concatenate([total, total - hits], axis=-1)
