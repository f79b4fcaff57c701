"""How soon a single stream comes back to the experts that it has just used.

Knows the overlap of a decode step with an earlier one (lag overlap), and how many other experts and
how many steps lie between two uses of an expert (reuse distance and time), with the hit rate of an
LRU cache that follows. Refuses to know several lanes, other policies and windows: those are a
replay's (B lanes share a cache) and the footprint's.

Names: S(d) the k experts of one stream and layer at decode step d. A step at which the layer did
not execute is left out; it still counts as time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.locality.streams import MAX_LAG, LayerCells, ratio
from moetap.analysis.pool import Pool
from moetap.analysis.strata import Layers


@dataclass(frozen=True, eq=False)
class LagLine:
    """Overlap of decode steps `lag` apart, for lags 1..64 at index lag - 1, in some layers.

    overlap: mean of |S(d) & S(d - lag)| / k over (stream, step, layer); None where no stream has
        two executed steps so far apart.
    uniform: k/E, what independent uniform routing gives.
    popular: what remains if the steps of all streams are shuffled together: the popularity of the
        layer's experts stays, all order is lost.
    own: what remains if each stream's steps are shuffled among themselves: the stream's own
        popularity stays too. overlap above `own` is temporal locality proper; `own` above `popular`
        is a stream's taste.
    n_pairs: (stream, step, layer) triples behind each mean.
    The last four are arrays (64,), the first three of them NaN where there is no pair.
    """

    layers: Layers
    overlap: tuple[Estimate | None, ...]
    uniform: NDArray[np.float64]
    popular: NDArray[np.float64]
    own: NDArray[np.float64]
    n_pairs: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CacheHits:
    """Hit rate of an LRU cache of C slots per layer, empty at the start of each stream, at B = 1.

    Step-atomic, one look-up per distinct expert, first uses counted as misses. cold: the first
    COLD_STEPS decode steps, in which the cache fills; steady: the others; every: both. None where
    there is no such step; all None if `missing` says why.
    uniform: C/E, what a full cache hits under independent uniform routing; NaN without a look-up.
    """

    capacity: int
    uniform: float
    cold: Estimate | None
    steady: Estimate | None
    every: Estimate | None
    missing: str = ""


@dataclass(frozen=True, eq=False)
class ReuseLine:
    """Re-uses of experts in some layers, all decode steps.

    lookups: selections. first_uses: of these, a stream's first use of the expert; the histograms
    hold the others.
    distance: (E,) by the number of distinct other experts used at steps after the previous use and
        before this one. Experts of one step count as used at one time, so those of the previous
        use's own step and of this step add nothing.
    depth: (E,) by depth in the recency stack, which settles that tie (`reuse_lines`).
    time: (steps,) by decode steps since the previous use, from 0 (always empty).
    """

    layers: Layers
    lookups: int
    first_uses: int
    distance: NDArray[np.int64]
    depth: NDArray[np.int64]
    time: NDArray[np.int64]
    hits: tuple[CacheHits, ...]


class RecencySums:
    """Sums of the walks through all layers, per stream where an interval needs them.

    overlap, pairs (S, L, 64), recent (S, L): as in `locality.kernels.walk`. cells (S, L): executed.
    own (S, L), popular (L,): mean overlap of two different cells of the stream or layer, as a share
    of k; NaN if there are no two. lookups, first_uses (S, L, 2): in cold steps and in steady ones.
    hits (S, L, 2, C): look-ups that hit at each capacity. distance, depth (L, E), time (L, steps):
    as in ReuseLine.
    """

    def __init__(self, pool: Pool, capacities: Sequence[int]) -> None:
        n, n_layers = pool.n_streams, pool.model.n_layers
        widest = int(pool.model.n_experts.max())
        longest = max(len(rows) for rows in pool.rows)
        self.capacities = tuple(capacities)
        self.overlap = np.zeros((n, n_layers, MAX_LAG), dtype=np.int64)
        self.pairs = np.zeros((n, n_layers, MAX_LAG), dtype=np.int64)
        self.cells = np.zeros((n, n_layers), dtype=np.int64)
        self.own = np.full((n, n_layers), np.nan)
        self.popular = np.full(n_layers, np.nan)
        self.recent = np.zeros((n, n_layers), dtype=np.int64)
        self.lookups = np.zeros((n, n_layers, 2), dtype=np.int64)
        self.first_uses = np.zeros((n, n_layers, 2), dtype=np.int64)
        self.hits = np.zeros((n, n_layers, 2, len(capacities)), dtype=np.int64)
        self.distance = np.zeros((n_layers, widest), dtype=np.int64)
        self.depth = np.zeros((n_layers, widest), dtype=np.int64)
        self.time = np.zeros((n_layers, longest), dtype=np.int64)

    def add(self, layer: int, cells: LayerCells, n_experts: int) -> NDArray[np.int64]:
        """Walk through one layer. Returns its counts per stream, (S, E)."""
        from moetap.analysis.locality.kernels import walk

        n, k = len(self.cells), cells.ids.shape[1]
        counts = np.zeros((n, n_experts), dtype=np.int64)
        depth = np.zeros((n, 2, n_experts), dtype=np.int64)
        overlap, pairs = np.zeros((2, n, MAX_LAG), dtype=np.int64)
        first_uses = np.zeros((n, 2), dtype=np.int64)
        recent = np.zeros(n, dtype=np.int64)
        walk(
            cells.ids,
            cells.starts,
            counts,
            overlap,
            pairs,
            depth,
            first_uses,
            self.distance[layer, :n_experts],
            self.time[layer],
            recent,
        )
        self.overlap[:, layer], self.pairs[:, layer] = overlap, pairs
        self.first_uses[:, layer], self.recent[:, layer] = first_uses, recent
        self.lookups[:, layer] = depth.sum(axis=2) + first_uses
        self.depth[layer, :n_experts] = depth.sum(axis=(0, 1))
        within = np.cumsum(depth, axis=2)
        for at, capacity in enumerate(self.capacities):
            self.hits[:, layer, :, at] = within[:, :, min(capacity, n_experts) - 1]
        self.cells[:, layer] = counts.sum(axis=1) // k
        self.own[:, layer] = mean_shared(counts, self.cells[:, layer]) / k
        self.popular[layer] = mean_shared(counts.sum(axis=0), self.cells[:, layer].sum()) / k
        return counts


def mean_shared(counts: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.float64]:
    """Mean number of experts that two different cells share; NaN if there are no two.

    counts (..., E): of n (...) cells, those that select e. Two cells drawn without replacement both
    select e with chance n_e (n_e - 1) / (n (n - 1)), so the mean is

        sum_e n_e (n_e - 1) / (n (n - 1))

    With many cells that is sum_e q_e^2 for q_e = n_e / n, or k^2 sum_e p_e^2 for shares p_e = q_e /
    k of the selections. In this form it is what shuffling the cells gives on average, exactly.
    """
    number = np.asarray(n, dtype=np.float64)
    both = (counts.astype(np.float64) * (counts - 1)).sum(axis=-1)
    out = np.full(number.shape, np.nan)
    return np.asarray(np.divide(both, number * (number - 1), out=out, where=number > 1))


def lag_lines(sums: RecencySums, pool: Pool, layers: Sequence[Layers]) -> tuple[LagLine, ...]:
    """Overlap by lag for each entry of `layers`.

    A mean over (stream, step, layer): sum of |S(d) & S(d - lag)| / k_l over the number of pairs of
    executed steps. The three baselines are weighted by the same pairs, since long streams have more
    of the long lags.
    """
    k = pool.model.top_k.astype(np.float64)
    share = k / pool.model.n_experts
    lines = []
    for span in layers:
        at = span.span
        pairs = sums.pairs[:, at].astype(np.float64)  # (S, layers, 64)
        per_stream = pairs.sum(axis=1)
        weight = per_stream.sum(axis=0)
        part = (sums.overlap[:, at] / k[at, None]).sum(axis=1)
        # A stream with a pair has two cells: NaN only meets zero pairs here.
        own = np.einsum("sl,slj->j", np.nan_to_num(sums.own[:, at]), pairs)
        popular = np.einsum("l,slj->j", np.nan_to_num(sums.popular[at]), pairs)
        uniform = np.einsum("l,slj->j", share[at], pairs)
        lines.append(
            LagLine(
                layers=span,
                overlap=tuple(ratio(part[:, j], per_stream[:, j]) for j in range(MAX_LAG)),
                uniform=_over(uniform, weight),
                popular=_over(popular, weight),
                own=_over(own, weight),
                n_pairs=weight.astype(np.int64),
            )
        )
    return tuple(lines)


def reuse_lines(sums: RecencySums, pool: Pool, layers: Sequence[Layers]) -> tuple[ReuseLine, ...]:
    """Reuse histograms and LRU hit rates for each entry of `layers`.

    The recency stack of a layer holds the experts that the stream has used, the latest step first
    and within a step the larger id first (rows are looked up in stored order, ascending). An
    expert's depth at step d is the number of experts above it when the step begins.

    A step-atomic LRU of C >= k slots that breaks ties in that order holds exactly the top C of the
    stack: a step loads its members, which cannot be evicted while it runs, and what remains of the
    other C - k slots are the latest of the others. So

        hit rate at C = look-ups at depth < C / all look-ups

    is exact for every C, without a replay. The reuse distance alone is not: it leaves out experts
    that were last used at the same step, so look-ups at distance < C are an upper bound.
    """
    lines = []
    for span in layers:
        at = span.span
        k = int(pool.model.top_k[at].max())
        lookups = sums.lookups[:, at].sum(axis=1)  # (S, phase)
        hits = sums.hits[:, at].sum(axis=1)  # (S, phase, C)
        lines.append(
            ReuseLine(
                layers=span,
                lookups=int(lookups.sum()),
                first_uses=int(sums.first_uses[:, at].sum()),
                distance=sums.distance[at].sum(axis=0),
                depth=sums.depth[at].sum(axis=0),
                time=sums.time[at].sum(axis=0),
                hits=tuple(
                    CacheHits(
                        capacity=c,
                        uniform=_uniform_hits(pool, sums, span, c),
                        cold=ratio(hits[:, 0, i], lookups[:, 0]),
                        steady=ratio(hits[:, 1, i], lookups[:, 1]),
                        every=ratio(hits[:, :, i].sum(axis=1), lookups.sum(axis=1)),
                    )
                    if c >= k
                    else CacheHits(
                        c,
                        _uniform_hits(pool, sums, span, c),
                        None,
                        None,
                        None,
                        f"a step needs k = {k} slots",
                    )
                    for i, c in enumerate(sums.capacities)
                ),
            )
        )
    return tuple(lines)


def _uniform_hits(pool: Pool, sums: RecencySums, layers: Layers, capacity: int) -> float:
    """Mean of min(C, E_l) / E_l over the look-ups."""
    experts = pool.model.n_experts[layers.span]
    lookups = sums.lookups[:, layers.span].sum(axis=(0, 2))
    share = np.minimum(capacity, experts) / experts
    return float(lookups @ share / lookups.sum()) if lookups.any() else math.nan


def histogram_quantile(histogram: NDArray[np.int64], q: float) -> int | None:
    """Smallest value that at least a share `q` of the counted do not exceed; None without any."""
    total = int(histogram.sum())
    if not total:
        return None
    # A hair below q x total, lest 0.95 x 20 is rounded up and asks for the 20th.
    return int(np.searchsorted(np.cumsum(histogram), q * total * (1 - 1e-12)))


def _over(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    out = np.full(part.shape, np.nan)
    return np.asarray(np.divide(part, whole, out=out, where=whole > 0))
