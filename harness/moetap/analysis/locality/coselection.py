"""What the experts of one cell tell about those of the next layer, and of the next step.

Knows co-selection of neighbouring cells of one stream: its lift, and how many of a cell's experts a
prefetcher would have guessed with k or 2k guesses. Refuses to know router weights and hidden
states: a prefetcher that has them can do better than any figure here.

Neighbours are layer l and the next MoE layer at the same step ("next layer"), and steps d and d + 1
of the same layer ("next step"). A pair counts if both cells executed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.locality.recency import RecencySums
from moetap.analysis.locality.streams import LayerCells, ratio
from moetap.analysis.pool import Pool
from moetap.analysis.strata import Layers

NEXT_LAYER, NEXT_STEP = "next layer", "next step"
POPULARITY, TABLE, REPEAT = "popularity", "co-selection", "repeat"

METHODS = (
    (NEXT_LAYER, POPULARITY),
    (NEXT_LAYER, TABLE),
    (NEXT_STEP, POPULARITY),
    (NEXT_STEP, TABLE),
    (NEXT_STEP, REPEAT),
)
"""What is predicted, and from what."""


@dataclass(frozen=True, eq=False)
class Lifts:
    """How much likelier a selected expert of layer l makes one of the next MoE layer l + 1.

        lift(e, e') = P(e' in S_{l+1} | e in S_l) / P(e' in S_{l+1})

    averaged over the selected pairs (e, e'), each as often as it occurs; 1 if the layers know
    nothing of each other.

    source, target: (L - 1,) absolute decoder layers. n_cells: (L - 1,) cells with both executed.
    plug_in: over all streams, lifts and pairs from the same cells. Biased upwards: without any
        dependence about 1 + (E - 1) (E' - 1) / (n k k') for n independent cells.
    tested: lifts of one half of the streams over the pairs of the other, each half in turn; no such
        bias, but noisy where streams are few and of different taste, since a lift divides by the
        first half's popularity. A pair with an expert that the first half never selects has lift
        1: nothing is known.
    NaN where there is nothing to average.
    """

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    plug_in: NDArray[np.float64]
    tested: NDArray[np.float64]
    n_cells: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PredictionLine:
    """Share of a cell's experts that are among the first k and the first 2k guesses.

    target: "next layer" (the cell is of the same step, guessed from the layer before) or "next
        step" (of the same layer, guessed from the step before). layers: those of the guessed cell.
    method: "popularity" (the layer's hottest experts), "co-selection" (`score_tables`), both fitted
        on half of the streams and tested on the other, each half in turn; or "repeat" (the k or 2k
        experts of the layer that the stream used last, nothing fitted).
    top_k, top_2k: mean over cells; the interval is over tested streams, for the tables as fitted.
    uniform_k, uniform_2k: k/E and 2k/E, what guessing at random gives.
    None, NaN and 0 if `missing` says why.
    """

    target: str
    method: str
    layers: Layers
    top_k: Estimate | None
    top_2k: Estimate | None
    uniform_k: float
    uniform_2k: float
    n_cells: int
    missing: str = ""


class CoselectionSums:
    """Guessed experts and cells of each layer, per tested stream.

    hits (methods, S, L, 2): experts among the first k and 2k guesses. cells (methods, S, L).
    lifts (3, L - 1): plug-in, tested, cells.
    """

    def __init__(self, pool: Pool, half: NDArray[np.int64] | None) -> None:
        n, n_layers = pool.n_streams, pool.model.n_layers
        self._half = half
        self._n_experts = pool.model.n_experts
        self.hits = np.zeros((len(METHODS), n, n_layers, 2), dtype=np.int64)
        self.cells = np.zeros((len(METHODS), n, n_layers), dtype=np.int64)
        self.plug_in = np.full(n_layers - 1, np.nan)
        self.tested = np.full(n_layers - 1, np.nan)
        self.n_cells = np.zeros(n_layers - 1, dtype=np.int64)

    def add_step(self, layer: int, cells: LayerCells, recency: RecencySums) -> None:
        """Guess the next step's cells of one layer."""
        both = cells.ran[:-1] & cells.ran[1:] & (cells.stream[:-1] == cells.stream[1:])
        stream = np.where(both, cells.stream[1:], -1)
        self._guess(NEXT_STEP, layer, layer, cells.ids[:-1], cells.ids[1:], stream)
        # The k experts used last are those of the step before: their hits are the overlap at lag 1.
        repeat = METHODS.index((NEXT_STEP, REPEAT))
        self.hits[repeat, :, layer, 0] = recency.overlap[:, layer, 0]
        self.hits[repeat, :, layer, 1] = recency.recent[:, layer]
        self.cells[repeat, :, layer] = recency.pairs[:, layer, 0]

    def add_layer(self, layer: int, before: LayerCells, cells: LayerCells) -> None:
        """Guess the cells of one layer from the MoE layer before it, and work out their lift."""
        stream = np.where(before.ran & cells.ran, cells.stream, -1)
        together = self._guess(NEXT_LAYER, layer - 1, layer, before.ids, cells.ids, stream)
        k, k_next = before.ids.shape[1], cells.ids.shape[1]
        every = together.sum(axis=0)
        at = layer - 1
        self.n_cells[at] = every.sum() // (k * k_next)
        if self.n_cells[at]:
            self.plug_in[at] = float((every * lift(every, k, k_next)).sum() / every.sum())
        if self._half is not None and together.any(axis=(1, 2)).all():
            part = sum(
                float((together[1 - h] * lift(together[h], k, k_next)).sum()) for h in (0, 1)
            )
            self.tested[at] = part / float(every.sum())

    def _guess(
        self,
        target: str,
        source_layer: int,
        layer: int,
        source: NDArray[np.uint16],
        ids: NDArray[np.uint16],
        stream: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Fit on each half and test on the other. Returns the pair counts by half, (2, E, E')."""
        from moetap.analysis.locality.kernels import count_pairs, predict

        half = np.zeros(self.hits.shape[1], dtype=np.int64) if self._half is None else self._half
        shape = (2, int(self._n_experts[source_layer]), int(self._n_experts[layer]))
        together = np.zeros(shape, dtype=np.int64)
        count_pairs(source, ids, np.where(stream < 0, -1, half[stream]), together)
        if self._half is None or not together.any(axis=(1, 2)).all():
            return together
        k, k_next = source.shape[1], ids.shape[1]
        there = stream >= 0
        cells = np.bincount(stream[there], minlength=len(half))
        scores = [score_tables(part, k, k_next).astype(np.float32) for part in together]
        hits = np.zeros((len(half), 2), dtype=np.int64)
        predict(source, ids, stream, 1 - half, np.stack(scores), hits)
        at = METHODS.index((target, TABLE))
        self.hits[at, :, layer], self.cells[at, :, layer] = hits, cells

        order = np.argsort(-together.sum(axis=1), axis=1, kind="stable")
        rank = np.argsort(order, axis=1)  # (2, E') by popularity in each half, the hottest is 0
        tester = stream[there]
        guessed = rank[1 - half[tester, None], ids[there]]
        at = METHODS.index((target, POPULARITY))
        for i, n in enumerate((k_next, 2 * k_next)):
            found = np.bincount(tester, (guessed < n).sum(axis=1), minlength=len(half))
            self.hits[at, :, layer, i] = found
        self.cells[at, :, layer] = cells
        return together


def popularity(together: NDArray[np.int64], k: int, k_next: int) -> NDArray[np.float64]:
    """P(e' in S'), the share of cells that select each expert of the target; (E',).

    together (E, E'): cells with e in the source and e' in the target. A cell adds k to the column
    of each expert that it selects.
    """
    return np.asarray(together.sum(axis=0) / k / _n_cells(together, k, k_next))


def score_tables(together: NDArray[np.int64], k: int, k_next: int) -> NDArray[np.float64]:
    """What each source expert says of each target expert, (E, E'):

        P(e' in S' | e in S) = (n_ee' + q_e') / (n_e + 1),     q_e' = P(e' in S')

    A cell's guesses are the experts with the largest sum of these over the k source experts. The
    one made-up cell with average experts lets an expert that was hardly seen say what the
    popularity says.
    """
    seen = together.sum(axis=1, keepdims=True) / k_next
    return np.asarray((together + popularity(together, k, k_next)) / (seen + 1))


def lift(together: NDArray[np.int64], k: int, k_next: int) -> NDArray[np.float64]:
    """n_ee' n / (n_e n_e'), (E, E'); 1 where e or e' was never selected."""
    seen = together.sum(axis=1, keepdims=True) / k_next
    wanted = together.sum(axis=0, keepdims=True) / k
    out = np.ones(together.shape)
    by_chance = seen * wanted
    n = _n_cells(together, k, k_next)
    return np.asarray(np.divide(together * n, by_chance, out=out, where=by_chance > 0))


def _n_cells(together: NDArray[np.int64], k: int, k_next: int) -> float:
    return float(together.sum()) / (k * k_next)


def lifts(sums: CoselectionSums, pool: Pool) -> Lifts:
    """The lift of each pair of neighbouring MoE layers; empty arrays if there is one layer."""
    index = pool.model.layer_index
    return Lifts(index[:-1], index[1:], sums.plug_in, sums.tested, sums.n_cells)


def prediction_lines(
    sums: CoselectionSums, pool: Pool, layers: Sequence[Layers], no_split: str
) -> tuple[PredictionLine, ...]:
    """Hit rates for each target and method and each entry of `layers`: a mean over cells of guessed
    experts / k_l. The first MoE layer has no layer before it and is never a "next layer"."""
    k = pool.model.top_k.astype(np.float64)
    experts = pool.model.n_experts.astype(np.float64)
    lines = []
    for at, (target, method) in enumerate(METHODS):
        for span in layers:
            own = span.span
            cells = sums.cells[at, :, own].astype(np.float64)  # (S, layers)
            part = (sums.hits[at, :, own] / k[own, None]).sum(axis=1)  # (S, 2)
            top_k, top_2k = (ratio(part[:, i], cells.sum(axis=1)) for i in (0, 1))
            if top_k is None:
                why = _why_none(target, method, span, no_split)
                nan = float("nan")
                lines.append(PredictionLine(target, method, span, None, None, nan, nan, 0, why))
                continue
            weight = cells.sum(axis=0)
            once, twice = (np.minimum(m * k[own], experts[own]) / experts[own] for m in (1, 2))
            lines.append(
                PredictionLine(
                    target,
                    method,
                    span,
                    top_k,
                    top_2k,
                    float(weight @ once / weight.sum()),
                    float(weight @ twice / weight.sum()),
                    int(cells.sum()),
                )
            )
    return tuple(lines)


def _why_none(target: str, method: str, span: Layers, no_split: str) -> str:
    if target == NEXT_LAYER and span.stop == 1:
        return "no MoE layer before it"
    if method != REPEAT and no_split:
        return no_split
    if method != REPEAT:
        return "one half of the streams has no pair of executed cells"
    return "no pair of executed cells"
