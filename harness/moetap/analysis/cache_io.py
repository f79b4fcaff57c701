"""Expert I/O per token that B lanes really cost when they share a cache.

Knows misses of sampled groups at B lanes against the same streams at B = 1 with the same C, and
beside them what the same groups would load if nothing were cached. Refuses to know the exact means
of the cold step (`unions`), and prefill: every cache starts empty at decode step 0.

B lanes share the C slots: they save loads where they select the same experts, and pay part of that
back because their working sets push each other out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import (
    PHASES,
    Alone,
    Draw,
    Lanes,
    checked_capacities,
    checked_sample,
    checked_sizes,
    draws,
    in_threads,
    lay_out,
    over_streams,
)
from moetap.analysis.pool import Pool
from moetap.analysis.unions import DEFAULT_SIZES
from moetap.policies import Policy
from moetap.policies.lru import LRU

DEFAULT_GROUPS = 100
"""Groups replayed for each stratum and B. A replay costs far more than a union, and with the lanes
compared to themselves alone most of what differs between groups cancels."""

DEFAULT_CAPACITIES = (64, 128, 256)


@dataclass(frozen=True, eq=False)
class CacheValues:
    """The figures of one line. "Alone" is the mean of the groups' streams at B = 1, each with all C
    slots to itself, over the same decode steps and cells.

    loads, loads_alone: misses per token and layer.
    relative: loads / loads_alone, None if nothing misses alone.
    uncached: U_B / B, what the groups would load per token and layer without a cache (the cold-step
        I/O of `unions`, here on the sampled groups); uncached_alone the same at B = 1.
    bytes_per_token, bytes_alone: expert bytes per token, summed over the layers; None where an
        expert's size or a layer is missing.
    hit_rate, hit_rate_alone: 1 - misses / look-ups, one look-up per distinct expert of a step.
    misses, misses_alone, tokens: (L,) int64, the sums behind `loads` layer by layer. tokens is
        lanes x executed steps.
    extra_passes: forced passes per (step, layer), because the set was larger than C.
    """

    loads: Estimate
    loads_alone: Estimate
    relative: Estimate | None
    uncached: Estimate
    uncached_alone: Estimate
    bytes_per_token: Estimate | None
    bytes_alone: Estimate | None
    hit_rate: Estimate
    hit_rate_alone: Estimate
    misses: NDArray[np.int64]
    misses_alone: NDArray[np.int64]
    tokens: NDArray[np.int64]
    extra_passes: float

    @property
    def saved(self) -> Estimate | None:
        """1 - loads / loads_alone, the share of a token's misses that B lanes save; below 0 if they
        cost more."""
        return None if self.relative is None else complement(self.relative)


@dataclass(frozen=True, eq=False)
class CacheFigure:
    """One line: groups of `draw` with C slots per layer, in one phase ("all", "cold", "steady").
    `values` is None if there is nothing to count, and `missing` says why."""

    draw: Draw
    capacity: int
    phase: str
    values: CacheValues | None
    missing: str = ""


@dataclass(frozen=True, eq=False)
class CacheTable:
    """Every figure of a pool, by stratum, B, C and phase in this order; the control last.

    policy: name of the policy. left_out: (L,) cells (group, step) left out over all groups because
    a lane did not execute the layer. groups_asked, seed: of the sample.
    """

    pool: Pool
    policy: str
    sizes: tuple[int, ...]
    capacities: tuple[int, ...]
    figures: tuple[CacheFigure, ...]
    left_out: NDArray[np.int64]
    groups_asked: int
    seed: int

    def find(self, stratum: str, b: int, capacity: int, phase: str = "all") -> CacheFigure:
        """The line of a stratum (by name), B, C and phase.

        Raises:
            KeyError: the table has no such line.
        """
        for figure in self.figures:
            draw = figure.draw
            if (draw.stratum, draw.b, figure.capacity, figure.phase) == (
                stratum,
                b,
                capacity,
                phase,
            ):
                return figure
        raise KeyError((stratum, b, capacity, phase))


def cache_table(
    pool: Pool,
    sizes: Sequence[int] | None = None,
    capacities: Sequence[int] = DEFAULT_CAPACITIES,
    n_groups: int = DEFAULT_GROUPS,
    seed: int = 0,
    policy: Policy | None = None,
) -> CacheTable:
    """Work out the table for groups of each of `sizes` streams; 1 is always among them.

    Without `sizes` the default ones are used, and those that there are too few streams for are said
    to be not available.

    Raises:
        UsageError: a size asked for is below 1 or above the number of streams; C is below k; no
        group is to be sampled.
    """
    policy = policy or LRU()
    wanted = checked_sizes(pool, sizes, DEFAULT_SIZES)
    slots = checked_capacities(pool, capacities)
    checked_sample(n_groups, seed)
    groups = draws(pool, wanted, n_groups, seed)
    lanes = lay_out(pool)
    every_c = np.array(slots, dtype=np.int64)
    alone = Alone(
        lanes,
        (int(i) for draw in groups for i in np.unique(draw.members)),
        lambda _, sets: policy.misses(sets, every_c),
        policy.offline,
    )

    figures = []
    left_out = np.zeros(pool.model.n_layers, dtype=np.int64)
    for draw in groups:
        sums = _sums(lanes, draw, alone, every_c, policy)
        left_out += sums.left_out.sum(axis=0)
        for at, capacity in enumerate(slots):
            for phase in PHASES:
                missing, values = draw.missing, None
                if not missing:
                    values = _values(pool, draw, sums, at, phase)
                    if values is None:
                        missing = "no decode step in this phase"
                figures.append(CacheFigure(draw, capacity, phase, values, missing))
    return CacheTable(
        pool=pool,
        policy=policy.name,
        sizes=tuple(wanted),
        capacities=tuple(slots),
        figures=tuple(figures),
        left_out=left_out,
        groups_asked=n_groups,
        seed=seed,
    )


def complement(estimate: Estimate) -> Estimate:
    """The estimate of 1 - x."""
    low = None if estimate.high is None else 1 - estimate.high
    high = None if estimate.low is None else 1 - estimate.low
    return Estimate(1 - estimate.value, low, high, estimate.why)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the steps of each group, cold and steady steps apart.

    misses, alone, extra: (groups, n_C, 2, L): misses of the group; of its streams at B = 1, added
        up; forced passes.
    requests, cells: (groups, 2, L): look-ups; executed steps.
    left_out: (groups, L) steps that a lane did not execute.
    """

    misses: NDArray[np.int64]
    alone: NDArray[np.int64]
    extra: NDArray[np.int64]
    requests: NDArray[np.int64]
    cells: NDArray[np.int64]
    left_out: NDArray[np.int64]


def _sums(
    lanes: Lanes,
    draw: Draw,
    alone: Alone,
    slots: NDArray[np.int64],
    policy: Policy,
) -> _Sums:
    """Replay every group of a draw."""
    n_layers = len(lanes.n_experts)

    def by_phase(cells: NDArray[np.generic]) -> NDArray[np.int64]:
        """(..., steps, L) summed to (..., 2, L)."""
        parts = [cells[..., PHASES[p], :].sum(axis=-2, dtype=np.int64) for p in ("cold", "steady")]
        return np.stack(parts, axis=-2)

    def work(members: NDArray[np.intp]) -> tuple[NDArray[np.int64], ...]:
        sets = lanes.merge(members)
        ran = sets.ran.T
        return (
            by_phase(policy.misses(sets, slots)),
            by_phase(alone.total(members, sets.ran)),
            by_phase(np.stack([sets.extra_passes(int(c)) for c in slots])),
            by_phase(sets.requests),
            by_phase(ran),
            (~ran).sum(axis=0),
        )

    done = in_threads(work, draw.members)
    if not done:
        empty = np.zeros((0, 2, n_layers), dtype=np.int64)
        none = np.zeros((0, len(slots), 2, n_layers), dtype=np.int64)
        return _Sums(none, none, none, empty, empty, empty[:, 0])
    return _Sums(*(np.stack(part) for part in zip(*done, strict=True)))


def _values(pool: Pool, draw: Draw, sums: _Sums, at: int, phase: str) -> CacheValues | None:
    """Figures of one line; None if no group has a step in this phase.

    With M_g the misses of group g, A_g the sum of its streams' misses at B = 1 over the steps that
    the group has, T_g = B x its executed (step, layer) pairs, R_g its look-ups:

        loads = sum M / sum T,    loads_alone = sum A / sum T,    relative = sum M / sum A
        uncached = sum R / sum T,    hit rate = 1 - sum M / sum R

    Both sides have the same streams, steps and cells, so that `relative` compares like with like:
    what differs between prompts is on both. Bytes are summed over layers, so each layer has its own
    ratio: sum_l bytes_l (sum M_l / sum T_l). At B = 1 relative is 1; in the control M_g is the
    misses of one stream and A_g B times that, so relative is 1/B.
    """
    half = {"all": slice(0, 2), "cold": slice(0, 1), "steady": slice(1, 2)}[phase]
    model = pool.model
    k = model.top_k.astype(np.float64)

    def of(part: NDArray[np.int64]) -> NDArray[np.float64]:
        """(groups, L), summed over the phase."""
        return np.asarray(part[:, half].sum(axis=1), dtype=np.float64)

    misses, alone = of(sums.misses[:, at]), of(sums.alone[:, at])
    requests, tokens = of(sums.requests), draw.b * of(sums.cells)
    requests_alone = tokens * k  # an executed cell has exactly k ids
    total = tokens.sum(axis=1)

    def ratio(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> Estimate | None:
        return over_streams(draw, top, bottom)

    loads, loads_alone = ratio(misses.sum(axis=1), total), ratio(alone.sum(axis=1), total)
    uncached, uncached_alone = ratio(requests.sum(axis=1), total), ratio(tokens @ k, total)
    hits = ratio((requests - misses).sum(axis=1), requests.sum(axis=1))
    hits_alone = ratio((requests_alone - alone).sum(axis=1), tokens @ k)
    if not (loads and loads_alone and uncached and uncached_alone and hits and hits_alone):
        return None
    size = model.expert_bytes.astype(np.float64)
    known = bool(np.all(size > 0))
    return CacheValues(
        loads=loads,
        loads_alone=loads_alone,
        relative=ratio(misses.sum(axis=1), alone.sum(axis=1)),
        uncached=uncached,
        uncached_alone=uncached_alone,
        bytes_per_token=over_streams(draw, misses, tokens, size) if known else None,
        bytes_alone=over_streams(draw, alone, tokens, size) if known else None,
        hit_rate=hits,
        hit_rate_alone=hits_alone,
        misses=misses.sum(axis=0).astype(np.int64),
        misses_alone=alone.sum(axis=0).astype(np.int64),
        tokens=tokens.sum(axis=0).astype(np.int64),
        extra_passes=float(of(sums.extra[:, at]).sum() * draw.b / total.sum()),
    )
