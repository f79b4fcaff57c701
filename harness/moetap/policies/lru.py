"""LRU: the expert whose last use is longest ago leaves.

Knows recency and nothing else: neither how often an expert is used nor what comes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetap.policies import LookUps, Policy, StepSets


class LRU(Policy):
    """Least recently used, all capacities of a step-atomic replay in one pass.

    Order the experts by (step of last use, id), latest and highest first. After every step the
    cache of C slots holds the first C of that order: the step's set goes to the front, the others
    keep their order, and what falls behind place C is what LRU evicts, the lowest id first among
    experts last used in the same step. So a request hits at C exactly if its expert stands before
    place C when the step begins. That is inclusion: what hits at C hits at every larger C, and one
    walk along the order counts the hits of all capacities.
    """

    name = "lru"

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        from moetap.policies._lru import lru_missed

        found: NDArray[np.bool_] = lru_missed(
            look_ups.starts, look_ups.ids, look_ups.size, capacity, look_ups.keep
        )
        return found

    def misses(self, sets: StepSets, capacities: NDArray[np.int64]) -> NDArray[np.int32]:
        """Misses per step and layer with each capacity, (n_C, steps, L); see `Policy.misses`."""
        from moetap.policies._lru import lru_misses

        rising, place = np.unique(np.asarray(capacities, dtype=np.int64), return_inverse=True)
        counted = lru_misses(sets.n_steps, sets.n_experts, sets.starts, sets.ids, rising)
        return np.asarray(counted[place].transpose(0, 2, 1))
