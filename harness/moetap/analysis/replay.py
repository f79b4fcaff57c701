"""One group of lanes sent through caches.

Knows a policy, C slots per layer and one sequence of step sets. Refuses to know how many groups
there are and what their mean is (`cache_io`).

Decode only, from an empty cache: prefill is never mixed into a decode figure, so the first steps
are cold and are kept apart from the steady ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.lanes import PHASES
from moetap.policies import Policy, StepSets
from moetap.policies.lru import LRU


@dataclass(frozen=True, eq=False)
class Replay:
    """What one policy with `capacity` slots per layer missed.

    n_lanes: B. Arrays are (steps, L): misses; requests, the distinct experts asked for (hits are
    requests - misses); extra_passes, forced by sets larger than C; ran, False where a lane did not
    execute the layer and the cell is left out.
    """

    policy: str
    capacity: int
    n_lanes: int
    misses: NDArray[np.int32]
    requests: NDArray[np.int64]
    extra_passes: NDArray[np.int64]
    ran: NDArray[np.bool_]

    def counts(self, phase: str = "all") -> Counts:
        """Sums over the steps of a phase, per layer: "all", "cold" (the first COLD_STEPS) or
        "steady" (the rest)."""
        span = PHASES[phase]
        return Counts(
            misses=self.misses[span].sum(axis=0, dtype=np.int64),
            requests=self.requests[span].sum(axis=0),
            extra_passes=self.extra_passes[span].sum(axis=0),
            tokens=self.n_lanes * self.ran[span].sum(axis=0, dtype=np.int64),
        )


@dataclass(frozen=True, eq=False)
class Counts:
    """Sums over steps, each (L,) int64. tokens: lanes x executed steps."""

    misses: NDArray[np.int64]
    requests: NDArray[np.int64]
    extra_passes: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def hit_rate(self) -> float | None:
        """1 - misses / requests over all layers; None if nothing was requested."""
        asked = int(self.requests.sum())
        return 1 - int(self.misses.sum()) / asked if asked else None


def replay(
    sets: StepSets,
    capacities: Sequence[int],
    n_lanes: int,
    policy: Policy | None = None,
) -> tuple[Replay, ...]:
    """Replay step sets with each capacity (in the order given), by default under LRU.

    At each step the set's distinct experts are requested as one: one look-up per distinct expert,
    however many lanes select it. `moetap.policies` has the rules.
    """
    policy = policy or LRU()
    misses = policy.misses(sets, np.array(capacities, dtype=np.int64))
    return tuple(
        Replay(
            policy=policy.name,
            capacity=capacity,
            n_lanes=n_lanes,
            misses=missed,
            requests=sets.requests,
            extra_passes=sets.extra_passes(capacity),
            ran=sets.ran.T,
        )
        for capacity, missed in zip(capacities, misses, strict=True)
    )
