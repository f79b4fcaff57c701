"""One group of lanes sent through caches.

Knows a policy, the caches of a budget (one per layer, or one over all layers) and one sequence of
step sets. Refuses to know how many groups there are and what their mean is (`cache_io`,
`replay_study`).

From an empty cache. Prefill is never mixed into a decode figure, so the first steps are cold and
are kept apart from the steady ones; where prefill is replayed first, it is counted apart too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.lanes import PHASES
from moetap.errors import MoetapError, UsageError
from moetap.policies import LookUps, Policy, StepSets
from moetap.policies.lru import LRU
from moetap.trace import NOT_EXECUTED, ModelInfo

STEP, SEQUENTIAL = "step", "sequential"
RULES = {STEP: "step-atomic look-ups", SEQUENTIAL: "sequential look-ups"}
"""How the distinct experts of a layer and step are looked up: as one set, of which no member is
evicted while it runs, or one after the other in rising order, in which an expert may push out one
that the same step still needs. Either way it is one look-up per distinct expert."""

LAYER, GLOBAL = "layer", "global"
SCOPES = {LAYER: "one cache per layer", GLOBAL: "one cache for all layers"}


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


@dataclass(frozen=True, eq=False)
class Cache:
    """The caches of one budget.

    label: the budget as it was asked for. scope: of `SCOPES`. n_bytes: None for a budget in slots.
    slots: (L,) int64, how many experts of the layer fit at once: its own slots, or if the cache is
        global all that would hold experts of this layer only.
    size, capacity: of the global cache: (L,) what an expert takes of it, and what there is.
    """

    label: str
    scope: str
    slots: NDArray[np.int64]
    size: NDArray[np.int64]
    capacity: int
    n_bytes: int | None = None


def cache_of_slots(model: ModelInfo, slots: int, scope: str = LAYER) -> Cache:
    """C slots per layer; of a global cache, C times the number of layers."""
    one = np.ones(model.n_layers, dtype=np.int64)
    capacity = slots * model.n_layers
    if scope == LAYER:
        return Cache(str(slots), scope, slots * one, one, capacity)
    return Cache(f"{slots} x {model.n_layers}", scope, capacity * one, one, capacity)


def cache_of_bytes(model: ModelInfo, n_bytes: int, label: str, scope: str = LAYER) -> Cache:
    """A budget in bytes of experts; per layer it is split evenly, and what is left over is lost.

    Raises:
        UsageError: sizes of experts are not known, or the budget does not hold one.
    """
    size = model.expert_bytes
    if np.any(size <= 0):
        raise UsageError(f"{model.id}: the trace has no expert sizes; give slots (-C) instead")
    share = n_bytes // model.n_layers if scope == LAYER else n_bytes
    slots = share // size
    if np.any(slots < 1):
        least = int(size.max()) * (model.n_layers if scope == LAYER else 1)
        raise UsageError(f"{label} does not hold an expert: {SCOPES[scope]} needs {least:,} bytes")
    return Cache(label, scope, slots, size, n_bytes, n_bytes)


def missed_per_step(
    sets: StepSets, cache: Cache, policies: Sequence[Policy], rule: str = STEP
) -> NDArray[np.int32]:
    """Misses of each step and layer, (steps, L).

    policies: one per cache: L of them, or one if the cache is global.
    """

    def count(look_ups: LookUps, policy: Policy, capacity: int) -> NDArray[np.int32]:
        asked = look_ups.sequential if rule == SEQUENTIAL else look_ups
        return look_ups.per_batch(ask(policy, asked, capacity))

    if cache.scope == GLOBAL:
        found = count(sets.together(cache.size), policies[0], cache.capacity)
        return found.reshape(sets.n_steps, sets.n_layers)
    per_layer = [
        count(sets.layer(layer), policies[layer], int(cache.slots[layer]))
        for layer in range(sets.n_layers)
    ]
    return np.stack(per_layer, axis=1)


def ask(policy: Policy, look_ups: LookUps, capacity: int) -> NDArray[np.bool_]:
    """`Policy.missed`. MoetapError, one line, if a plug-in fails or answers nonsense."""
    if type(policy).__module__.startswith("moetap."):
        return policy.missed(look_ups, capacity)  # ours: the traceback is wanted
    where = f"policy {policy.name} ({type(policy).__module__}:{type(policy).__qualname__})"
    try:
        found = policy.missed(look_ups, capacity)
    except Exception as error:
        raise MoetapError(f"{where} failed: {error!r:.200}") from error
    if np.shape(found) != look_ups.ids.shape or np.asarray(found).dtype != np.bool_:
        raise MoetapError(
            f"{where} did not say of each look-up whether it missed; check it with "
            "moetap.testing.check_policy"
        )
    return found


def join(parts: Sequence[StepSets]) -> StepSets:
    """The steps of all parts, one part after the other."""
    n_layers = parts[0].n_layers
    own = [[part.layer(layer) for part in parts] for layer in range(n_layers)]
    sizes = [np.diff(one.starts) for layer in own for one in layer]
    starts = np.zeros(sum(map(len, sizes)) + 1, dtype=np.int64)
    np.cumsum(np.concatenate(sizes), out=starts[1:])
    return StepSets(
        n_steps=sum(part.n_steps for part in parts),
        n_experts=parts[0].n_experts,
        starts=starts,
        ids=np.concatenate([one.ids for layer in own for one in layer]).astype(np.uint16),
        ran=np.concatenate([part.ran for part in parts], axis=1),
    )


def prefill_sets(rows: NDArray[np.uint16], n_experts: NDArray[np.int64], chunk: int) -> StepSets:
    """Prefill as one set per layer and chunk of prompt tokens.

    rows: (rows, L, K). Rows at which a layer did not execute add nothing to its set; a set without
    any did not run.
    """
    chunks = [rows[at : at + chunk] for at in range(0, len(rows), chunk)]
    cells = [
        ids[ids != NOT_EXECUTED]
        for layer in range(len(n_experts))
        for ids in (np.unique(part[:, layer]) for part in chunks)
    ]
    starts = np.cumsum([0, *map(len, cells)])
    ran = np.array([len(ids) > 0 for ids in cells], dtype=np.bool_)
    return StepSets(
        n_steps=len(chunks),
        n_experts=n_experts,
        starts=starts,
        ids=np.concatenate([np.empty(0, dtype=np.uint16), *cells]),
        ran=ran.reshape(len(n_experts), len(chunks)),
    )
