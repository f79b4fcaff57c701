"""Step sets from Python sets, and LRU worked out with an OrderedDict."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from moetap.policies import StepSets


def step_sets(layers, n_experts) -> StepSets:
    """layers[layer][step] is a set of ids, or None where the cell did not run."""
    cells = [cell for steps in layers for cell in steps]
    sizes = [len(cell or ()) for cell in cells]
    ids = [i for cell in cells for i in sorted(cell or ())]
    return StepSets(
        n_steps=len(layers[0]),
        n_experts=np.array(n_experts),
        starts=np.cumsum([0, *sizes]),
        ids=np.array(ids, dtype=np.uint16),
        ran=np.array([cell is not None for cell in cells]).reshape(len(layers), -1),
    )


def lru_twin(steps, capacity) -> list[int]:
    """Misses per step of one layer. The cache is in eviction order: by last use, then by id."""
    cache: OrderedDict[int, None] = OrderedDict()
    misses = []
    for wanted in steps:
        if not wanted:
            misses.append(0)
            continue
        missing = [i for i in sorted(wanted) if i not in cache]
        misses.append(len(missing))
        if len(wanted) > capacity:  # passes in rising order leave the last ids behind
            cache = OrderedDict.fromkeys(sorted(wanted)[-capacity:])
            continue
        for i in missing:
            if len(cache) == capacity:
                del cache[next(j for j in cache if j not in wanted)]
            cache[i] = None
        for i in sorted(wanted):
            cache.move_to_end(i)
    return misses
