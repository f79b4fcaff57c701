"""Groups of streams decoding together, merged step by step.

Knows how B streams become one sequence of step sets, which groups are drawn, and how sure a mean
over sampled groups is. Refuses to know what a step set is used for: `replay` sends it through a
cache, `overflow` counts it.

A group ends at its shortest stream. A cell (layer, step) that one of its lanes did not execute is
left out for the whole group, as in `unions`, and for its streams one at a time where they are what
the group is compared with.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import CONFIDENCE, Estimate
from moetap.analysis.pool import Pool
from moetap.analysis.sampling import draw_groups
from moetap.analysis.strata import strata
from moetap.errors import UsageError
from moetap.policies import StepSets

COLD_STEPS = 64
"""A cache that starts empty is called cold for this many decode steps, steady after them."""

PHASES = {
    "all": slice(None),
    "cold": slice(0, COLD_STEPS),
    "steady": slice(COLD_STEPS, None),
}
"""Decode steps of each phase."""

CONTROL = "same prompt twice"

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Lanes:
    """The decode rows of a pool, ready to be merged.

    rows: per stream (steps, L, K) uint16, the pool's own: of all rows only those of a group are
        copied, and only while it is merged. n_steps: (N,) int64 per stream.
    """

    n_experts: NDArray[np.int64]
    rows: tuple[NDArray[np.uint16], ...]
    n_steps: NDArray[np.int64]

    def merge(self, members: NDArray[np.intp]) -> StepSets:
        """Step sets of the lanes of one group; a stream may occur several times."""
        from moetap.analysis._kernels import merge

        steps = int(self.n_steps[members].min())
        starts, ids, ran = merge(np.stack([self.rows[i][:steps] for i in members]), self.n_experts)
        return StepSets(steps, self.n_experts, starts, ids, ran)

    @cached_property
    def ids(self) -> NDArray[np.uint16]:
        """(L, rows, K), the rows of all streams one after another, layer by layer: a copy as large
        as they are, for walks along a layer over many streams at once."""
        n_layers, width = self.rows[0].shape[1:]
        ids = np.empty((n_layers, self.n_steps.sum(), width), dtype=np.uint16)
        for first, rows in zip(self.first_row, self.rows, strict=True):
            ids[:, first : first + len(rows)] = rows.transpose(1, 0, 2)
        return ids

    @property
    def first_row(self) -> NDArray[np.int64]:
        """(N,) row of `ids` that is decode step 0 of each stream."""
        return np.asarray(np.cumsum(self.n_steps) - self.n_steps)


def lay_out(pool: Pool) -> Lanes:
    """The pool's rows as lanes; copies none."""
    n_steps = np.array([len(rows) for rows in pool.rows], dtype=np.int64)
    return Lanes(pool.model.n_experts, pool.rows, n_steps)


def only(sets: StepSets, ran: NDArray[np.bool_]) -> StepSets:
    """The sets with no cell but those of `ran`, (L, steps) with no more steps than they have."""
    n_steps = ran.shape[1]
    keep = np.zeros((sets.n_layers, sets.n_steps), dtype=np.bool_)
    keep[:, :n_steps] = ran
    count = sets.requests.T  # (L, steps)
    starts = np.zeros(ran.size + 1, dtype=np.int64)
    np.cumsum(np.where(ran, count[:, :n_steps], 0).ravel(), out=starts[1:])
    ids = sets.ids[np.repeat(keep.ravel(), count.ravel())]
    return StepSets(n_steps, sets.n_experts, starts, ids, ran)


class Alone:
    """What each stream of a group counts at B = 1 over the cells that the group executed.

    Both sides have the same cells: one that the group leaves out, or that comes after its last
    step, does not pass through the caches of its streams either, where it would load experts for
    the cells that count (or, if the policy knows the future, be expected).

    count: (stream, its step sets) to (..., steps, L), at most 65535 each. offline: what a step
        counts depends on later ones. Each stream is counted once over all its cells, which takes
        1/K of the rows for one count per cell, and again only for groups that have fewer.
    """

    def __init__(
        self,
        lanes: Lanes,
        streams: Iterable[int],
        count: Callable[[int, StepSets], NDArray[np.integer[Any]]],
        offline: bool,
    ) -> None:
        self._lanes, self._count, self._offline = lanes, count, offline

        def work(stream: int) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
            sets = lanes.merge(np.array([stream]))
            return count(stream, sets).astype(np.uint16), sets.ran

        once = sorted(set(streams))
        self._whole = dict(zip(once, in_threads(work, once), strict=True))

    def total(self, members: NDArray[np.intp], ran: NDArray[np.bool_]) -> NDArray[np.int64]:
        """The sum over the lanes, (..., steps, L). ran: (L, steps) of the group."""
        n_steps = ran.shape[1]
        found = []
        for stream in members.tolist():
            whole, own = self._whole[stream]
            later = own.shape[1] > n_steps
            if np.array_equal(own[:, :n_steps], ran) and not (self._offline and later):
                found.append(whole[..., :n_steps, :])
            else:
                sets = self._lanes.merge(np.array([stream]))
                found.append(self._count(stream, only(sets, ran)).astype(np.uint16))
        return np.asarray(np.sum(found, axis=0, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Draw:
    """Groups of `b` lanes of one stratum.

    stratum, kind: as `strata.Stratum`, or the control: each group is one stream `b` times.
    members: (n, b) streams. n_possible: groups that there are. distinct: different streams in a
    group. missing: why there is no group, "" if there is one.
    """

    stratum: str
    kind: str
    b: int
    members: NDArray[np.intp]
    n_possible: int
    missing: str = ""

    @property
    def n_groups(self) -> int:
        """Groups drawn."""
        return len(self.members)

    @property
    def exhaustive(self) -> bool:
        """All groups that there are."""
        return self.n_groups == self.n_possible

    @property
    def distinct(self) -> int:
        """Different streams in a group: b, or 1 in the control."""
        return 1 if self.kind == "control" else self.b

    @cached_property
    def holds(self) -> NDArray[np.float64]:
        """(streams that occur, groups): 1 where the group holds the stream, else 0."""
        streams = np.unique(self.members)
        held = (self.members[None, :, :] == streams[:, None, None]).any(axis=2)
        return np.asarray(held, dtype=np.float64)


def draws(pool: Pool, sizes: Sequence[int], n_groups: int, seed: int) -> tuple[Draw, ...]:
    """At most `n_groups` groups for each stratum and size, the same ones for every metric.

    In the control row "same prompt twice" the lanes are one stream `b` times: the union is k, and
    I/O per token is exactly 1/b of one lane's. It has the streams that the row B = 1 has.
    """
    found = []
    for stratum in strata(pool):
        for b in sizes:
            missing = stratum.why_none(b)
            none = np.empty((0, b), dtype=np.intp)
            members = none if missing else draw_groups(pool, stratum, b, n_groups, seed).members
            found.append(Draw(stratum.name, stratum.kind, b, members, stratum.n_groups(b), missing))
    alone = draw_groups(pool, strata(pool)[0], 1, n_groups, seed).members
    for b in sizes:
        if b > 1:
            members = np.repeat(alone, b, axis=1)
            found.append(Draw(CONTROL, "control", b, members, pool.n_streams))
    return tuple(found)


def checked_sizes(pool: Pool, sizes: Sequence[int] | None, default: Sequence[int]) -> list[int]:
    """Sizes of groups to work out, rising; 1 is always among them.

    Raises:
        UsageError: a size asked for is below 1 or above the number of streams.
    """
    for b in sizes or ():
        if b < 1:
            raise UsageError(f"B = {b}: a group has at least one stream")
        if b > pool.n_streams:
            raise UsageError(f"B = {b} is more than the {pool.n_streams} streams that there are")
    return sorted({1, *(sizes or default)})


def checked_sample(n_groups: int, seed: int) -> None:
    """Raise UsageError unless groups can be drawn."""
    if n_groups < 1:
        raise UsageError(f"{n_groups} groups to sample: at least 1 is needed")
    if seed < 0:
        raise UsageError(f"seed {seed}: must not be negative")


def checked_capacities(pool: Pool, capacities: Sequence[int]) -> list[int]:
    """Capacities, rising.

    Raises:
        UsageError: none is given, or one is below k.
    """
    if not capacities:
        raise UsageError("no capacity C given")
    k = pool.model.max_top_k
    if min(capacities) < k:
        raise UsageError(f"C = {min(capacities)}: C is below k = {k}, not even one token fits")
    return sorted(set(capacities))


def in_threads(work: Callable[[T], R], jobs: Iterable[T]) -> list[R]:
    """Results of `work` in the order of `jobs`, on all cores; for compiled work."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
        return list(threads.map(work, jobs))


def over_streams(
    draw: Draw,
    numerator: NDArray[np.float64],
    denominator: NDArray[np.float64],
    weight: NDArray[np.float64] | None = None,
) -> Estimate | None:
    """A ratio of sums over groups and its 95 % interval over streams; None with nothing to divide
    by.

    numerator, denominator: (groups,), or (groups, J) with weight (J,) for a weighted sum of J
    ratios:

        theta = sum_j w_j (sum_g num_gj / sum_g den_gj)

    Delete-one jackknife: leaving stream i out drops the groups that hold it. It is preferred to a
    bootstrap because what a group yields is measured, not computed from its streams: a resampled
    set of streams would ask for groups that were never replayed.

    Of sampled groups, the jackknife overstates the variance: the groups that hold i differ for
    reasons other than i, and each is dropped once per stream, so their scatter is counted B times
    instead of once. With r_g = sum_j w_j (num_gj - theta_j den_gj) / sum den_j, the share of group
    g in the error of theta, the surplus is (B - 1) sum_g r_g^2; it is taken off, in proportion to
    the share of groups that were not drawn (if all were, the scatter is the statistic's own). What
    is left is the sum of r_g r_h over all pairs of groups that share a stream, each once, known as
    the dyadic cluster-robust variance. It can't be less than sum_g r_g^2, the variance of
    independent groups.

    The interval is symmetric, so that of a share may reach beyond 0 or 1. One of no width means
    that the streams agree, not that others must.
    """
    from scipy.special import stdtrit

    if weight is None:
        numerator, denominator, weight = numerator[:, None], denominator[:, None], np.ones(1)
    total, base = numerator.sum(axis=0), denominator.sum(axis=0)
    if len(base) == 0 or not np.all(base > 0):
        return None
    ratio = total / base
    value = float(weight @ ratio)
    # A stream that adds nothing, being too short for a window say, is no sample of the figure.
    holds = draw.holds[draw.holds @ (np.abs(numerator) + denominator).sum(axis=1) > 0]
    n, m = holds.shape
    if n < 2:
        return Estimate(value, None, None, "one stream")
    base_out = base - holds @ denominator
    if np.any(base_out <= 0):  # denominators are whole numbers, so nothing left is exactly 0
        return Estimate(value, None, None, f"without one of the {n} streams no group is left")
    left_out = ((total - holds @ numerator) / base_out) @ weight
    variance = (n - 1) / n * float(np.sum((left_out - left_out.mean()) ** 2))
    if not draw.exhaustive:
        scatter = float(np.sum((((numerator - ratio * denominator) / base) @ weight) ** 2))
        surplus = (draw.distinct - 1) * (1 - m / draw.n_possible) * scatter
        variance = max(variance - surplus, scatter)
    half = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance)
    return Estimate(value, value - half, value + half)
