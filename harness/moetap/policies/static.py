"""Static: the hottest experts are held, all others are loaded each time they are used.

Knows which experts are hot (fitted on other streams). Refuses to adapt. Since all slots are taken
by the hot ones, the others need room besides the cache: the policy is not `forced`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moetap.errors import UsageError
from moetap.policies import LookUps, Policy


class Static(Policy):
    """Top C. A hot expert is loaded when it is first used, and misses then, so that first uses
    count as with every other policy."""

    name = "static"
    forced = False
    fitted = True

    def __init__(self, counts: NDArray[np.int64] | None = None) -> None:
        self.counts = counts

    def fit(self, counts: NDArray[np.int64]) -> Static:
        """Hold by these counts."""
        return type(self)(counts)

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        missed = self._not_hot(look_ups, capacity)
        missed[np.unique(look_ups.ids, return_index=True)[1]] = True
        return missed

    def _not_hot(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        if self.counts is None:
            raise UsageError(f"{self.name} must be fitted first")
        return ~hottest(self.counts, look_ups.size, capacity)[look_ups.ids]


class StaticPreloaded(Static):
    """Top C, loaded before the first step; those loads are not counted."""

    name = "static-preloaded"
    preloaded = True

    def missed(self, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
        """Which look-ups miss; see `Policy.missed`."""
        return self._not_hot(look_ups, capacity)


def hottest(
    counts: NDArray[np.int64], size: NDArray[np.int64], room: int, most: int | None = None
) -> NDArray[np.bool_]:
    """The objects that are requested most often, as many as fit and at most `most`, (n_objects,).

    By count whatever the size: a hit saves `size` bytes and takes as many. Of equal ones the lowest
    id comes first; what does not fit is passed over.
    """
    chosen = np.zeros(len(size), dtype=np.bool_)
    for x in np.argsort(-counts, kind="stable")[:most]:
        if size[x] <= room:
            chosen[x] = True
            room -= int(size[x])
    return chosen
