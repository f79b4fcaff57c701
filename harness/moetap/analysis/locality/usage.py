"""How evenly a layer's routing is spread over its experts, and what a fixed set of hot ones serves.

Knows how often each expert is selected, and the share of routing that the n hottest experts get
when they are chosen on some streams and judged on others. Refuses to know order in time: a fixed
set neither adapts nor evicts.

Names: c_e the number of decode cells (stream, step) of a layer that select expert e; n = sum_e c_e
selections; p_e = c_e / n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.locality.streams import ratio
from moetap.analysis.pool import Pool
from moetap.analysis.strata import Layers, class_names

FITTED, TESTED, ACROSS, WITHIN = range(4)
"""Which streams the hottest experts are chosen on, for a tested stream (HotSums)."""


@dataclass(frozen=True, eq=False)
class Usage:
    """How the selections of each MoE layer are spread. Arrays (L,), NaN for a layer that never
    executed.

    counts: (L, E) cells that select the expert; 0 beyond a layer's own E.
    entropy: H = -sum_e p_e log2 p_e, in bits; at most log2 E. The plug-in estimate, which is too
        low on average.
    corrected: H + (m - 1) / (2 n ln 2) bits (Miller-Madow) with m experts seen. It takes the n
        selections for independent; those of a stream are not, so some of the bias is left.
    max_share: the hottest expert's p_e. gini: 0 if all are used alike, (E - 1) / E if one gets all.
    never: experts of the layer that no cell selects.
    """

    counts: NDArray[np.int64]
    n_experts: NDArray[np.int64]
    entropy: NDArray[np.float64]
    corrected: NDArray[np.float64]
    max_share: NDArray[np.float64]
    gini: NDArray[np.float64]
    never: NDArray[np.int64]

    @property
    def effective(self) -> NDArray[np.float64]:
        """2^H, the number of equally used experts that would have this entropy (plug-in)."""
        return np.asarray(2.0**self.entropy)

    @property
    def heat(self) -> NDArray[np.float64]:
        """(L, E) share of the layer's decode selections; NaN beyond its E or if it never ran."""
        total = self.counts.sum(axis=1, keepdims=True).astype(np.float64)
        real = np.arange(self.counts.shape[1]) < self.n_experts[:, None]
        out = np.full(self.counts.shape, np.nan)
        return np.asarray(np.divide(self.counts, total, out=out, where=real & (total > 0)))


@dataclass(frozen=True, eq=False)
class HotLine:
    """Share of the selections in some layers that go to each layer's `n` hottest experts.

    fitted: on the half of the streams that the experts were chosen on. tested: on the other half,
    each half in turn, with the interval over streams for the chosen experts as they are. The gap
    between them is over-fit. uniform: n/E. None and NaN if `missing` says why.
    """

    layers: Layers
    n: int
    fitted: float
    tested: Estimate | None
    uniform: float
    missing: str = ""


@dataclass(frozen=True, eq=False)
class Transfer:
    """Share of the selections of one class that go to the `n` hottest experts of another, over all
    layers.

    Of the same class: chosen on half of its streams and tested on the other half, as in HotLine,
    for comparison. None if there are no such halves.
    """

    fitted_on: str
    tested_on: str
    n: int
    share: Estimate | None


class HotSums:
    """Selections of the hottest experts, per tested stream.

    share (4, S, L, n): those that go to experts chosen on the stream's own half (FITTED), the other
    half (TESTED), the other class (ACROSS), the other half of its own class (WITHIN).
    total (4, S, L): selections behind each, 0 where there is nothing to choose from.
    """

    def __init__(self, pool: Pool, sizes: Sequence[int], half: NDArray[np.int64] | None) -> None:
        shape = (pool.n_streams, pool.model.n_layers, len(sizes))
        self.sizes = np.array(sizes)
        names = class_names(pool)
        self._half = half
        self._cls = np.array([names.index(cls) for cls in pool.classes])
        self._two_classes = len(names) == 2
        self.share = np.zeros((4, *shape), dtype=np.int64)
        self.total = np.zeros((4, *shape[:2]), dtype=np.int64)

    def add(self, layer: int, counts: NDArray[np.int64]) -> None:
        """Choose and test in one layer; counts (S, E) per stream."""
        half, cls = self._half, self._cls
        if half is None:
            return
        self._exchange(layer, counts, half == 0, half == 1, TESTED)
        if self.total[TESTED, :, layer].any():
            for own in (half == 0, half == 1):
                self._test(layer, counts, own, own, FITTED)
        if self._two_classes:
            self._exchange(layer, counts, cls == 0, cls == 1, ACROSS)
            for own in (cls == 0, cls == 1):
                self._exchange(layer, counts, own & (half == 0), own & (half == 1), WITHIN)

    def _exchange(
        self,
        layer: int,
        counts: NDArray[np.int64],
        one: NDArray[np.bool_],
        other: NDArray[np.bool_],
        kind: int,
    ) -> None:
        """Choose on each of two sets of streams and test on the other; nothing if one is empty."""
        if counts[one].any() and counts[other].any():
            self._test(layer, counts, one, other, kind)
            self._test(layer, counts, other, one, kind)

    def _test(
        self,
        layer: int,
        counts: NDArray[np.int64],
        chosen_on: NDArray[np.bool_],
        tested_on: NDArray[np.bool_],
        kind: int,
    ) -> None:
        fit = counts[chosen_on].sum(axis=0)
        self.share[kind, tested_on, layer] = hot_hits(fit, counts[tested_on], self.sizes)
        self.total[kind, tested_on, layer] = counts[tested_on].sum(axis=1)


def hot_hits(
    fit: NDArray[np.int64], counts: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Selections of `counts` (S, E) that go to the n experts with the most in `fit` (E,), (S, n).

    Of equally hot experts the smaller id is taken. An n above E takes them all.
    """
    order = np.argsort(-fit, kind="stable")
    within = np.cumsum(counts[:, order], axis=1)
    return np.asarray(within[:, np.minimum(sizes, len(fit)) - 1])


def usage(counts: NDArray[np.int64], n_experts: NDArray[np.int64]) -> Usage:
    """How the selections are spread; counts (L, E), those of a layer in its first n_experts."""
    n_layers = len(counts)
    entropy, corrected, max_share, gini = np.full((4, n_layers), np.nan)
    never = np.zeros(n_layers, dtype=np.int64)
    for layer, e in enumerate(n_experts):
        own = counts[layer, :e]
        n = int(own.sum())
        never[layer] = int((own == 0).sum())
        if not n:
            continue
        p = own[own > 0] / n
        # Adding 0.0 turns the -0.0 of a single expert into 0.0.
        entropy[layer] = -float(p @ np.log2(p)) + 0.0
        corrected[layer] = entropy[layer] + (len(p) - 1) / (2 * n * math.log(2))
        max_share[layer] = p.max()
        # With p ascending and i from 1: (2 sum_i i p_i - (E + 1)) / E.
        rank = np.arange(1, e + 1)
        gini[layer] = (2 * float(rank @ np.sort(own)) / n - (e + 1)) / e
    return Usage(counts, n_experts, entropy, corrected, max_share, gini, never)


def hot_lines(
    sums: HotSums, pool: Pool, layers: Sequence[Layers], no_split: str
) -> tuple[HotLine, ...]:
    """Share of the hottest n for each entry of `layers` and each n.

    Selections of the chosen experts over all selections, summed over streams and layers. The two
    directions of the split add up, each by its number of selections.
    """
    lines = []
    for span in layers:
        at = span.span
        for i, n in enumerate(sums.sizes.tolist()):
            whole = sums.total[:, :, at].sum(axis=2).astype(np.float64)  # (kind, S)
            part = sums.share[:, :, at, i].sum(axis=2).astype(np.float64)
            fitted, tested = (ratio(part[kind], whole[kind]) for kind in (FITTED, TESTED))
            if fitted is None or tested is None:
                why = no_split or "one half of the streams has no executed cell"
                lines.append(HotLine(span, n, math.nan, None, math.nan, why))
                continue
            weight = sums.total[TESTED, :, at].sum(axis=0)
            even = np.minimum(n, pool.model.n_experts[at]) / pool.model.n_experts[at]
            uniform = float(weight @ even / weight.sum())
            lines.append(HotLine(span, n, fitted.value, tested, uniform))
    return tuple(lines)


def transfers(sums: HotSums, pool: Pool) -> tuple[Transfer, ...]:
    """Each class's hottest experts tested on each class; empty unless there are two classes."""
    names = class_names(pool)
    if len(names) != 2:
        return ()
    classes = np.array(pool.classes)
    found = []
    for fitted_on in names:
        for tested_on in names:
            kind = WITHIN if fitted_on == tested_on else ACROSS
            own = classes == tested_on
            whole = sums.total[kind, own].sum(axis=1).astype(np.float64)
            for i, n in enumerate(sums.sizes.tolist()):
                part = sums.share[kind, own, :, i].sum(axis=1).astype(np.float64)
                found.append(Transfer(fitted_on, tested_on, n, ratio(part, whole)))
    return tuple(found)
