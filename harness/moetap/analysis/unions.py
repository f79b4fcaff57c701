"""How many distinct experts B lanes select together, and what that saves in expert I/O per token.

Knows unions at matched decode steps: the exact mean over all groups of B streams, its interval over
streams, the I/O per token of a cold step, and what independent uniform routing and full overlap
would give. Refuses to know prefill rows (never mixed into a decode figure) and caches: a cold step
assumes that nothing survives from one step to the next.

Names: N streams, B lanes, d decode step, l MoE layer, e expert; n_e the number of the N_dl streams
alive at (d, l) that select e. A stream is alive at (d, l) if it has a decode step d and executed
layer l there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate, jackknife
from moetap.analysis.pool import Pool
from moetap.analysis.sampling import Distribution, draw_groups, union_histograms
from moetap.analysis.strata import Layers, Stratum, class_names, layer_groups, strata
from moetap.errors import UsageError
from moetap.trace import NOT_EXECUTED

DEFAULT_SIZES = (1, 2, 3, 4)
DEFAULT_GROUPS = 1000
COUNT_BYTES = 256_000_000
"""Expert counts and their tables held at a time. Decode steps are processed in chunks that fit."""


@dataclass(frozen=True, eq=False)
class Values:
    """The figures of one line of the table.

    union: mean union, in experts per (group, step, layer).
    saved: 1 - io_B / io_1, the share of a token's expert loads that B lanes save.
    bytes_per_token: expert bytes per token, summed over the layers; None where an expert's size or
        a layer is missing.
    uniform, overlap: the mean union if routing were independent and uniform, and if all lanes
        selected the same experts.
    n_groups: groups of B streams behind the mean. n_steps: decode steps that have at least one.
    """

    b: int
    union: Estimate
    saved: Estimate
    bytes_per_token: Estimate | None
    uniform: float
    overlap: float
    n_groups: int
    n_steps: int
    distribution: Distribution

    @property
    def loads(self) -> Estimate:
        """io_B = U_B / B, expert loads per token and layer: B tokens share the union's loads."""
        return self.union.scaled(1 / self.b)

    @property
    def uniform_saved(self) -> float:
        """What independent uniform routing would save."""
        return 1 - self.uniform / (self.b * self.overlap)


@dataclass(frozen=True, eq=False)
class Figure:
    """One line of the table: groups of `b` streams of a stratum in some layers. `values` is None if
    there are no such groups, and `missing` says why."""

    stratum: Stratum
    layers: Layers
    b: int
    values: Values | None
    missing: str = ""


@dataclass(frozen=True, eq=False)
class UnionTable:
    """Every figure of a pool of streams, by stratum, layers and B in this order.

    not_executed: (L,) decode cells (stream, step) of each layer that did not execute and are left
        out.
    n_cells: decode cells per layer, those included.
    groups_asked, seed: of the sampled distribution.
    """

    pool: Pool
    sizes: tuple[int, ...]
    strata: tuple[Stratum, ...]
    layers: tuple[Layers, ...]
    figures: tuple[Figure, ...]
    not_executed: NDArray[np.int64]
    n_cells: int
    groups_asked: int
    seed: int

    def select(self, stratum: Stratum, kinds: Sequence[str]) -> list[Figure]:
        """Lines of one stratum for layers of the given kinds ("overall", "group", "layer")."""
        return [f for f in self.figures if f.stratum is stratum and f.layers.kind in kinds]


def union_table(
    pool: Pool,
    sizes: Sequence[int] | None = None,
    n_groups: int = DEFAULT_GROUPS,
    seed: int = 0,
) -> UnionTable:
    """Work out the union table for groups of each of `sizes` streams; 1 is always among them, as
    the base.

    Without `sizes` the default ones are used, and those that there are too few streams for are said
    to be not available.

    Raises:
        UsageError: a size asked for is below 1 or above the number of streams; no group is to be
        sampled.
    """
    for b in sizes or ():
        if b < 1:
            raise UsageError(f"B = {b}: a group has at least one stream")
        if b > pool.n_streams:
            raise UsageError(f"B = {b} is more than the {pool.n_streams} streams that there are")
    if n_groups < 1:
        raise UsageError(f"{n_groups} groups to sample: at least 1 is needed")
    if seed < 0:
        raise UsageError(f"seed {seed}: must not be negative")
    wanted = tuple(sorted({1, *(sizes or DEFAULT_SIZES)}))
    cells = strata(pool)
    layers = layer_groups(pool.model.layer_index)
    possible = [(s, b) for s in cells for b in wanted if not s.why_none(b)]

    groups = [draw_groups(pool, s, b, n_groups, seed) for s, b in possible]
    histograms = union_histograms(pool, groups)
    sampled = {
        (s.name, b): (g, h) for (s, b), g, h in zip(possible, groups, histograms, strict=True)
    }
    sums = {b: _Sums(len(cells), pool) for b in wanted if b <= pool.n_streams}
    _accumulate(pool, sums)

    figures = []
    for at, stratum in enumerate(cells):
        for span in layers:
            for b in wanted:
                missing = stratum.why_none(b)
                values = None
                if not missing:
                    drawn, histogram = sampled[stratum.name, b]
                    distribution = Distribution(
                        histogram[span.span].sum(axis=0), len(drawn.members), drawn.exhaustive
                    )
                    values = _values(pool, sums[b], at, stratum, span, b, distribution)
                    if values is None:
                        missing = (
                            f"at no step did {b} stream{'' if b == 1 else 's'} execute these layers"
                        )
                figures.append(Figure(stratum, span, b, values, missing))
    executed = [(rows[:, :, 0] == NOT_EXECUTED).sum(axis=0) for rows in pool.rows]
    return UnionTable(
        pool=pool,
        sizes=wanted,
        strata=cells,
        layers=layers,
        figures=tuple(figures),
        not_executed=np.sum(executed, axis=0, dtype=np.int64),
        n_cells=sum(len(rows) for rows in pool.rows),
        groups_asked=n_groups,
        seed=seed,
    )


class _Sums:
    """Sums over decode steps for one B, per stratum (in the order of `strata`) and layer, all
    divided by C(N, B).

    union (strata, L): sum of U over (group, step); weight: number of (group, step).
    with_stream (strata, N, L): the part of `union` that comes from groups with stream i in them.
    weight_without (strata, N, L): number of (group, step) without stream i. Added up from zeros
        rather than subtracted, so that it is exactly zero where no group is left.
    steps (strata,): decode steps that have a group.
    """

    def __init__(self, n_strata: int, pool: Pool) -> None:
        n, n_layers = pool.n_streams, pool.model.n_layers
        self.union = np.zeros((n_strata, n_layers))
        self.weight = np.zeros((n_strata, n_layers))
        self.with_stream = np.zeros((n_strata, n, n_layers))
        self.weight_without = np.zeros((n_strata, n, n_layers))
        self.steps = np.zeros(n_strata, dtype=np.int64)


def _values(
    pool: Pool,
    sums: _Sums,
    at: int,
    stratum: Stratum,
    layers: Layers,
    b: int,
    distribution: Distribution,
) -> Values | None:
    """Figures of one line. None if no (group, step, layer) triple exists.

    The mean is over triples, so with S and W the sums of U and of 1 over the groups at (d, l),

        U_B = sum_dl S / sum_dl W,       saved = 1 - sum S / (B sum W k_l)

    The base of `saved` is what the same groups' lanes would load alone on the same cells. That is
    io_1 = k wherever all layers have one k, and stays a paired comparison where they don't. Bytes
    are summed over layers, so they use each layer's own
    mean union: sum_l bytes_l (S_l / W_l) / B.

    Leaving stream i out leaves S - S_i and W - W_i, with S_i and W_i the parts of groups that hold
    it.
    """
    span = layers.span
    model = pool.model
    k = model.top_k[span].astype(np.float64)
    experts = model.n_experts[span].astype(np.float64)
    union, weight = sums.union[at, span], sums.weight[at, span]
    if not weight.sum() > 0:
        return None
    members = stratum.members
    union_out = union - sums.with_stream[at][members, span]
    weight_out = sums.weight_without[at][members, span]

    mean = union.sum() / weight.sum()
    mean_out = _ratio(union_out.sum(axis=1), weight_out.sum(axis=1))
    share = union.sum() / (b * (weight @ k))
    share_out = _ratio(union_out.sum(axis=1), b * (weight_out @ k))
    bytes_per_token = None
    size = model.expert_bytes[span].astype(np.float64)
    if np.all(size > 0) and np.all(weight > 0):
        per_token = float(size @ (union / weight)) / b
        bytes_per_token = jackknife(per_token, _ratio(union_out, weight_out) @ size / b)
    return Values(
        b=b,
        union=jackknife(float(mean), mean_out),
        saved=jackknife(float(1 - share), 1 - share_out),
        bytes_per_token=bytes_per_token,
        uniform=float(weight @ uniform_union(experts, k, b) / weight.sum()),
        overlap=float(weight @ k / weight.sum()),
        n_groups=stratum.n_groups(b),
        n_steps=int(sums.steps[at]),
        distribution=distribution,
    )


def uniform_union(
    n_experts: NDArray[np.float64], top_k: NDArray[np.float64], b: int
) -> NDArray[np.float64]:
    """Mean union of `b` lanes of independent uniform routing: E (1 - (1 - k/E)^b)."""
    return n_experts * (1 - (1 - top_k / n_experts) ** b)


def _ratio(numerator: NDArray[np.float64], denominator: NDArray[np.float64]) -> NDArray[np.float64]:
    """numerator / denominator, NaN where there is nothing to divide by."""
    out = np.full(numerator.shape, np.nan)
    return np.asarray(np.divide(numerator, denominator, out=out, where=denominator > 0))


def _accumulate(pool: Pool, sums: dict[int, _Sums]) -> None:
    """Fill the sums of every B in one pass over the decode steps.

    At a cell (d, l) with N streams alive, over all groups of B of them,

        W = C(N, B),     S = sum_e C(N, B) - C(N - n_e, B)

    since an expert is outside the union of the C(N - n_e, B) groups none of whose lanes select it.
    Among the C(N - 1, B - 1) groups with stream i, an expert that i selects is always in the union,
    and another one is not in C(N - 1 - n_e, B - 1) of them:

        S_i = sum_e [C(N - 1, B - 1) - C(N - 1 - n_e, B - 1)] + sum_{e in i} C(N - 1 - n_e, B - 1)

    That is the exact leave-one-out identity: only the k ids that i selects are looked up for it.
    Groups inside one class have the same sums over the class's streams; mixed groups are all groups
    less those, cell by cell.

    Every binomial is an exact integer divided by C(all streams, B), so nothing overflows and the
    sums stay near 1.
    """
    model = pool.model
    names = class_names(pool)
    class_of = [names.index(cls) for cls in pool.classes]
    n_pools = len(names) + 1  # all streams, then each class
    n_slots = (
        int(model.n_experts.max()) + 1
    )  # the last one takes ids of cells and slots that are not there
    longest = max(len(rows) for rows in pool.rows)
    per_step = model.n_layers * n_slots * 8 * (n_pools * (len(sums) + 1) + 4)
    chunk = max(1, COUNT_BYTES // per_step)
    tables = {
        b: (_binomials(b, b, pool.n_streams), _binomials(b - 1, b, pool.n_streams)) for b in sums
    }

    for start in range(0, longest, chunk):
        part = [rows[start : start + chunk] for rows in pool.rows]
        counts, alive = _counts(part, class_of, n_pools, n_slots)
        cells = {b: _Cells(counts, alive, *tables[b], mixed=len(names) > 1) for b in sums}
        for b, total in sums.items():
            total.union += cells[b].union.sum(axis=1)
            total.weight += cells[b].weight.sum(axis=1)
            total.steps += (cells[b].weight > 0).any(axis=2).sum(axis=1)
        for i, rows in enumerate(part):
            own = class_of[i] + 1
            ids, ran = _flat_ids(rows, n_slots)
            for b, total in sums.items():
                cell = cells[b]
                total.weight_without[:, i] += cell.weight_without(ran, own)
                every, inside = (cell.with_stream(p, ids, ran) for p in (0, own))
                total.with_stream[0, i] += every
                total.with_stream[own, i] += inside
                if len(names) > 1:
                    total.with_stream[-1, i] += every - inside


def _binomials(choose: int, b: int, n: int) -> NDArray[np.float64]:
    """C(m, choose) / C(n, b) for m = -1 .. n at index m + 1, with C(-1, .) = 0. Shape (n + 2,)."""
    scale = math.comb(n, b)
    return np.array([0.0] + [math.comb(m, choose) / scale for m in range(n + 1)])


def _flat_ids(
    rows: NDArray[np.uint16], n_slots: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Places of (steps, L, K) ids in a flat (steps, L, n_slots) array; which cells ran."""
    steps, n_layers, _ = rows.shape
    cell = np.arange(steps * n_layers, dtype=np.int64).reshape(steps, n_layers, 1)
    return cell * n_slots + np.minimum(rows, n_slots - 1), rows[:, :, 0] != NOT_EXECUTED


def _counts(
    part: Sequence[NDArray[np.uint16]], class_of: Sequence[int], n_pools: int, n_slots: int
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """n_e (pools, steps, L, n_slots) and N (pools, steps, L) of all streams and of each class."""
    steps, n_layers = max(len(rows) for rows in part), part[0].shape[1]
    counts = np.zeros((n_pools, steps, n_layers, n_slots), dtype=np.int32)
    alive = np.zeros((n_pools, steps, n_layers), dtype=np.int32)
    for rows, cls in zip(part, class_of, strict=True):
        ids, ran = _flat_ids(rows, n_slots)
        counts[cls + 1].reshape(-1)[ids] += 1  # a stream's real ids of a cell are distinct
        alive[cls + 1, : len(rows)] += ran
    counts[..., -1] = 0
    counts[0] = counts[1:].sum(axis=0)
    alive[0] = alive[1:].sum(axis=0)
    return counts, alive


class _Cells:
    """S and W of each cell of a chunk of decode steps for one B, and their parts from one stream.

    union, weight: (strata, steps, L), strata being all streams, each class, and mixed groups if
        there are two classes.
    """

    def __init__(
        self,
        counts: NDArray[np.int32],
        alive: NDArray[np.int32],
        choose_b: NDArray[np.float64],
        choose_less: NDArray[np.float64],
        mixed: bool,
    ) -> None:
        # Tables hold C(m, .) at m + 1, so index N - n_e is C(N - n_e - 1, .).
        unselected = alive[..., None] - counts
        self.weight = choose_b[alive + 1]
        self._weight_less = choose_b[alive]  # with one stream fewer
        self.union = (self.weight[..., None] - choose_b[unselected + 1]).sum(axis=3)
        self._outside = choose_less[unselected]  # groups with i but without e
        self._others = (choose_less[alive][..., None] - self._outside).sum(axis=3)
        self._outside[..., -1] = 0
        self._mixed = mixed
        if mixed:
            self.weight = _add_mixed(self.weight)
            self.union = _add_mixed(self.union)

    def with_stream(
        self, pool: int, ids: NDArray[np.int64], ran: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """S_i summed over the steps of one stream, (L,), in the groups of one pool."""
        own = self._outside[pool].reshape(-1).take(ids).sum(axis=0).sum(axis=1)
        return np.asarray(own + (self._others[pool, : len(ran)] * ran).sum(axis=0))

    def weight_without(self, ran: NDArray[np.bool_], own: int) -> NDArray[np.float64]:
        """W - W_i summed over the steps, (strata, L), for a stream of class pool `own`."""
        n = len(ran)
        n_pools = len(self._weight_less)
        left = self.weight[:n_pools].copy()
        for pool in (0, own):
            left[pool, :n] = np.where(ran, self._weight_less[pool, :n], left[pool, :n])
        if self._mixed:
            left = _add_mixed(left)
        return np.asarray(left.sum(axis=1))


def _add_mixed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Append the mixed groups: all (first) less those inside each class; exactly 0 if none."""
    return np.concatenate([values, values[:1] - values[1:].sum(axis=0, keepdims=True)])
