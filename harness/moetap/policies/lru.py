"""LRU: the expert whose last use is longest ago leaves.

Knows recency and nothing else: neither how often an expert is used nor what comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from moetap.policies import Online, StepSets
from moetap.policies._compiled import Compiled, Rule


class LRU(Compiled):
    """Least recently used, all capacities of a step-atomic replay in one pass.

    Order the experts by (step of last use, id), latest and highest first. After every step the
    cache of C slots holds the first C of that order: the step's set goes to the front, the others
    keep their order, and what falls behind place C is what LRU evicts, the lowest id first among
    experts last used in the same step. So a request hits at C exactly if its expert stands before
    place C when the step begins. That is inclusion: what hits at C hits at every larger C, and one
    walk along the order counts the hits of all capacities.
    """

    name = "lru"

    def rule(self, size: NDArray[np.int64], capacity: int) -> Rule:
        """The loop; see `Compiled.rule`."""
        from moetap.policies._list import drop
        from moetap.policies._lru import empty_cache, missed, serve

        return Rule(missed, empty_cache, serve, drop)

    def online(self, n_objects: int, capacity: int) -> Online:
        """See `Policy.online`. In Python, the one policy with a second form of its rule: Numba
        takes 100 MB, which a capture on a small Mac would rather have for slots. `check_policy`
        holds the two together.
        """
        return _Live(n_objects, capacity)

    def misses(self, sets: StepSets, capacities: NDArray[np.int64]) -> NDArray[np.int32]:
        """Misses per step and layer with each capacity, (n_C, steps, L); see `Policy.misses`."""
        from moetap.policies._lru import lru_misses

        rising, place = np.unique(np.asarray(capacities, dtype=np.int64), return_inverse=True)
        counted = lru_misses(sets.n_steps, sets.n_experts, sets.starts, sets.ids, rising)
        return np.asarray(counted[place].transpose(0, 2, 1))


class _Live(Online):
    def __init__(self, n_objects: int, capacity: int) -> None:
        self._n, self._capacity = n_objects, capacity
        self._held: dict[int, None] = {}  # in the order in which they leave

    def request(self, ids: Sequence[int]) -> list[int]:
        if len(ids) > self._capacity:
            raise ValueError(f"{len(ids)} experts in one batch, {self._capacity} slots")
        if ids and (sorted({*ids}) != [*ids] or ids[0] < 0 or ids[-1] >= self._n):
            raise ValueError(f"not distinct, rising and below {self._n}: {[*ids]}")
        held = self._held
        for x in ids:
            held.pop(x, None)
        # What is left is no member: its first ones leave.
        left = list(islice(held, max(0, len(held) + len(ids) - self._capacity)))
        for x in left:
            del held[x]
        for x in ids:
            held[x] = None
        return left

    def __contains__(self, x: int) -> bool:
        return x in self._held

    def forget(self, ids: Iterable[int]) -> None:
        for x in ids:
            self._held.pop(x, None)

    def clear(self) -> None:
        self._held.clear()
