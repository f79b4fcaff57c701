"""Everything that one stream's routing shows about caching, pinning and prefetching.

Knows which figures there are and goes through the decode rows once, layer by layer, to gather them.
Refuses to know several lanes (`moetap.analysis.unions`), prefill rows, and formulas: those stand
with each figure, in `locality.recency` (lag overlap, reuse), `locality.usage` (entropy, hottest
experts) and `locality.coselection` (lift, predictions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.locality.coselection import (
    CoselectionSums,
    Lifts,
    PredictionLine,
    lifts,
    prediction_lines,
)
from moetap.analysis.locality.recency import (
    LagLine,
    RecencySums,
    ReuseLine,
    lag_lines,
    reuse_lines,
)
from moetap.analysis.locality.streams import layer_cells, split_streams
from moetap.analysis.locality.usage import (
    HotLine,
    HotSums,
    Transfer,
    Usage,
    hot_lines,
    transfers,
    usage,
)
from moetap.analysis.pool import Pool
from moetap.analysis.strata import Layers, layer_groups
from moetap.errors import UsageError

DEFAULT_CAPACITIES = (64, 128, 256)
DEFAULT_HOT_SIZES = (8, 16, 32, 64, 128)


@dataclass(frozen=True, eq=False)
class Locality:
    """Every figure of a pool of single streams; lines are per entry of `layers`, in this order.

    half: (S,) the half that each stream was put in, None if there is one stream only.
    no_split: why nothing could be fitted on one half and tested on the other, "" if it could.
    not_executed: (L,) decode cells (stream, step) of each layer that did not execute and are left
        out. n_cells: decode cells per layer, those included.
    """

    pool: Pool
    layers: tuple[Layers, ...]
    capacities: tuple[int, ...]
    hot_sizes: tuple[int, ...]
    seed: int
    half: NDArray[np.int64] | None
    no_split: str
    lags: tuple[LagLine, ...]
    reuse: tuple[ReuseLine, ...]
    usage: Usage
    hottest: tuple[HotLine, ...]
    transfers: tuple[Transfer, ...]
    lifts: Lifts
    predictions: tuple[PredictionLine, ...]
    not_executed: NDArray[np.int64]
    n_cells: int


def locality(
    pool: Pool,
    capacities: Sequence[int] = DEFAULT_CAPACITIES,
    hot_sizes: Sequence[int] = DEFAULT_HOT_SIZES,
    seed: int = 0,
) -> Locality:
    """Work out all locality figures.

    capacities: C of the LRU hit rates. hot_sizes: n of the hottest experts. seed: of the split of
    the streams into halves.

    Raises:
        UsageError: a capacity or size below 1, or a negative seed.
    """
    for name, values in (("C", capacities), ("n", hot_sizes)):
        for value in values:
            if value < 1:
                raise UsageError(f"{name} = {value}: must be at least 1")
    if seed < 0:
        raise UsageError(f"seed {seed}: must not be negative")
    capacities, hot_sizes = sorted(set(capacities)), sorted(set(hot_sizes))
    model = pool.model
    half = split_streams(pool, seed)
    no_split = "one stream: there is no other half to test on" if half is None else ""
    layers = layer_groups(model.layer_index)

    counts = np.zeros((model.n_layers, int(model.n_experts.max())), dtype=np.int64)
    recency = RecencySums(pool, capacities)
    hot = HotSums(pool, hot_sizes, half)
    coselection = CoselectionSums(pool, half)
    before = None
    for layer, n_experts in enumerate(model.n_experts.tolist()):
        cells = layer_cells(pool, layer)
        per_stream = recency.add(layer, cells, n_experts)
        counts[layer, :n_experts] = per_stream.sum(axis=0)
        hot.add(layer, per_stream)
        coselection.add_step(layer, cells, recency)
        if before is not None:
            coselection.add_layer(layer, before, cells)
        before = cells
    n_cells = sum(len(rows) for rows in pool.rows)
    return Locality(
        pool=pool,
        layers=layers,
        capacities=tuple(capacities),
        hot_sizes=tuple(hot_sizes),
        seed=seed,
        half=half,
        no_split=no_split,
        lags=lag_lines(recency, pool, layers),
        reuse=reuse_lines(recency, pool, layers),
        usage=usage(counts, model.n_experts),
        hottest=hot_lines(hot, pool, layers, no_split),
        transfers=transfers(hot, pool),
        lifts=lifts(coselection, pool),
        predictions=prediction_lines(coselection, pool, layers, no_split),
        not_executed=n_cells - recency.cells.sum(axis=0),
        n_cells=n_cells,
    )
