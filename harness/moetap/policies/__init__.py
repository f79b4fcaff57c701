"""Cache policies: one file each, one protocol.

Knows the question that every policy answers: of the experts that a layer requests at each step, how
many are not among the C that it holds? Refuses to know streams, lanes and statistics: it gets sets
of ids per (layer, step) and returns counts.

The rules that all policies of this package share:

- One cache of C slots per layer, empty at the start. A layer with no more experts than slots never
  evicts.
- Look-ups are step-atomic: the distinct experts of a step are requested as one set, one look-up per
  distinct expert. Hits are touched before misses get slots, and no member of the set is evicted for
  another member while it still has to run.
- Among experts that the policy values equally, the lowest id leaves first.
- A set larger than C runs in ceil(U / C) passes. Members that are resident at the start of the step
  run in the first one and hit; all others miss, once each. The C members with the highest ids
  stay, as if the passes had gone through the ids in rising order. The passes beyond the first are
  forced and counted by `StepSets.extra_passes`: they depend on the sets alone.
- A cell (layer, step) that did not run requests nothing and leaves the cache as it is.

A new policy is a new file with a class that has a `name` and a `misses` as in `Policy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class StepSets:
    """The distinct experts that each (layer, step) requests, as compressed rows.

    Cell c = layer * n_steps + step holds ids[starts[c] : starts[c + 1]], ascending.

    n_experts: (L,) int64. starts: (L * n_steps + 1,) int64. ids: uint16.
    ran: (L, n_steps) bool, False where the cell did not execute and so requests nothing.
    """

    n_steps: int
    n_experts: NDArray[np.int64]
    starts: NDArray[np.int64]
    ids: NDArray[np.uint16]
    ran: NDArray[np.bool_]

    @property
    def n_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.n_experts)

    @property
    def requests(self) -> NDArray[np.int64]:
        """(steps, L) look-ups: distinct experts of the set, 0 where the cell did not run."""
        return np.diff(self.starts).reshape(self.n_layers, self.n_steps).T

    def extra_passes(self, capacity: int) -> NDArray[np.int64]:
        """(steps, L) forced passes beyond the first, ceil(U / C) - 1 where U > C, else 0."""
        return np.maximum(-(-self.requests // capacity) - 1, 0)


class Policy(Protocol):
    """What a cache policy must have."""

    @property
    def name(self) -> str:
        """The name in tables and on the command line."""

    def misses(self, sets: StepSets, capacities: NDArray[np.int64]) -> NDArray[np.int32]:
        """Misses per step and layer with each of several capacities, (n_C, steps, L).

        capacities: (n_C,) slots per layer, in any order. They come together because some policies
        (those with inclusion) answer all of them in one pass.

        Hits are the rest: `sets.requests - misses`.
        """
