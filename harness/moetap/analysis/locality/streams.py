"""What the locality figures share: a layer's cells, halves of the streams, ratios over streams.

Knows how decode rows are laid out for a walk through one layer and how an interval over streams is
made from sums per stream. Knows no metric.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate, jackknife
from moetap.analysis.pool import Pool
from moetap.analysis.strata import class_names
from moetap.trace import NOT_EXECUTED

MAX_LAG = 64
"""Longest lag, in decode steps. An expert's uses at the last 64 steps are the bits of one word."""


@dataclass(frozen=True, eq=False)
class LayerCells:
    """The decode cells of one MoE layer, all streams one after the other.

    ids: (T, k) uint16, k the layer's own top-k. starts: (S + 1,) first cell of each stream.
    stream: (T,) stream of each cell. ran: (T,) whether the cell executed.
    """

    ids: NDArray[np.uint16]
    starts: NDArray[np.int64]
    stream: NDArray[np.int64]
    ran: NDArray[np.bool_]


def layer_cells(pool: Pool, layer: int) -> LayerCells:
    """Cut one layer, by ordinal, out of the pool's rows."""
    k = int(pool.model.top_k[layer])
    lengths = [len(rows) for rows in pool.rows]
    ids = np.concatenate([rows[:, layer, :k] for rows in pool.rows])
    return LayerCells(
        ids=ids,
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        stream=np.repeat(np.arange(pool.n_streams), lengths),
        ran=ids[:, 0] != NOT_EXECUTED,
    )


def split_streams(pool: Pool, seed: int) -> NDArray[np.int64] | None:
    """Half (0 or 1) of each stream, (S,); None if there is one stream only.

    Drawn by stream, since the steps of a stream resemble each other. Each class is dealt out in
    turn, so that the halves hold the same mix and, within one stream, the same number.
    """
    if pool.n_streams < 2:
        return None
    rng = np.random.default_rng(seed)
    classes = np.array(pool.classes)
    order = [rng.permutation(np.flatnonzero(classes == cls)) for cls in class_names(pool)]
    half = np.empty(pool.n_streams, dtype=np.int64)
    half[np.concatenate(order)] = np.arange(pool.n_streams) % 2
    return half


def ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> Estimate | None:
    """sum(part) / sum(whole) over streams with its jackknife interval; None if `whole` is empty.

    part, whole: (S,) sums per stream. A stream that has nothing in `whole` is not a sample.
    """
    has = whole > 0
    if not has.any():
        return None
    part, whole = part[has].astype(np.float64), whole[has].astype(np.float64)
    value = float(part.sum() / whole.sum())
    if len(part) < 2:
        return jackknife(value, np.array([value]))
    return jackknife(value, (part.sum() - part) / (whole.sum() - whole))
