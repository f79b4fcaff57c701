"""The compiled loops of the locality figures, one MoE layer at a time.

Knows arrays of ids and counts; what the counts mean is said where they are used
(`moetap.analysis.locality.recency`, `moetap.analysis.locality.coselection`). Imports Numba, so it
is itself imported where it is used.

Names: T cells of one layer, the decode steps of all S streams one after the other; k ids a cell,
ascending; 65535 in the first slot of a cell that did not execute.
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.locality.streams import MAX_LAG
from moetap.trace import NOT_EXECUTED


@numba.njit(cache=True, nogil=True)
def walk(
    ids: NDArray[np.uint16],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    overlap: NDArray[np.int64],
    pairs: NDArray[np.int64],
    depth: NDArray[np.int64],
    first_uses: NDArray[np.int64],
    distance: NDArray[np.int64],
    time: NDArray[np.int64],
    recent: NDArray[np.int64],
) -> None:
    """Walk each stream through one layer; add what is seen to the arrays after `starts`.

    ids (T, k); starts (S + 1,) the first cell of each stream. Added to:
    counts (S, E): cells that select the expert.
    overlap, pairs (S, MAX_LAG): sum of |S(d) & S(d - lag)| and pairs of executed steps, at lag - 1.
    depth (S, 2, E): re-uses by depth in the recency stack, before and from step COLD_STEPS on.
    first_uses (S, 2): selections of an expert that the stream has not used before, likewise.
    distance (E,), time (steps,): re-uses by distinct other experts and by steps since the last use.
    recent (S,): selections among the 2k most recently used experts, where the step before ran.

    All ids of a step are looked up against the state that the step found, then all are marked used.
    """
    n_experts = counts.shape[1]
    k = ids.shape[1]
    one = np.uint64(1)
    last = np.empty(n_experts, dtype=np.int32)  # step of the last use, -1 before the first
    used = np.empty(n_experts, dtype=np.uint64)  # bit j: also used j steps before the last use
    for s in range(len(starts) - 1):
        last[:] = -1
        used[:] = np.uint64(0)
        ran = np.uint64(0)  # bit j: the layer executed j + 1 steps ago
        for t in range(starts[s], starts[s + 1]):
            if ids[t, 0] == NOT_EXECUTED:
                ran = ran << one
                continue
            step = np.int32(t - starts[s])
            phase = 1 if step >= COLD_STEPS else 0  # cold, steady
            for j in range(MAX_LAG):
                pairs[s, j] += np.int64((ran >> np.uint64(j)) & one)
            for i in range(k):
                e = np.int64(ids[t, i])
                counts[s, e] += 1
                seen = last[e]
                if seen < 0:
                    first_uses[s, phase] += 1
                    continue
                later = np.int32(0)
                for x in range(n_experts):
                    later += np.int32(last[x] > seen)
                ahead = np.int32(0)  # used last at the same step, with a larger id
                for x in range(e + 1, n_experts):
                    ahead += np.int32(last[x] == seen)
                distance[later] += 1
                depth[s, phase, later + ahead] += 1
                time[step - seen] += 1
                if ran & one and later + ahead < 2 * k:
                    recent[s] += 1
                gap = step - seen
                if gap <= MAX_LAG:
                    word = used[e] << np.uint64(gap - 1)
                    for j in range(MAX_LAG):
                        overlap[s, j] += np.int64((word >> np.uint64(j)) & one)
            for i in range(k):
                e = np.int64(ids[t, i])
                gap = step - last[e]
                if last[e] < 0 or gap >= MAX_LAG:
                    used[e] = one
                else:
                    used[e] = (used[e] << np.uint64(gap)) | one
                last[e] = step
            ran = (ran << one) | one


@numba.njit(cache=True, nogil=True)
def count_pairs(
    source: NDArray[np.uint16],
    target: NDArray[np.uint16],
    group: NDArray[np.int64],
    together: NDArray[np.int64],
) -> None:
    """Add to `together` (G, E, E') how often an expert of `target` was selected with one of
    `source`.

    source (T, k), target (T, k'): the two cells of each pair. group (T,): where the pair counts, -1
    for nowhere.
    """
    for t in range(len(source)):
        g = group[t]
        if g < 0:
            continue
        for i in range(source.shape[1]):
            row = together[g, source[t, i]]
            for j in range(target.shape[1]):
                row[target[t, j]] += 1


@numba.njit(cache=True, nogil=True)
def predict(
    source: NDArray[np.uint16],
    target: NDArray[np.uint16],
    stream: NDArray[np.int64],
    table_of: NDArray[np.int64],
    tables: NDArray[np.float32],
    hits: NDArray[np.int64],
) -> None:
    """Rank the experts of each target cell by the sum of its source experts' table rows.

    source (T, k), target (T, k'). stream (T,): -1 for a pair that does not count. table_of (S,):
    the table that predicts for a stream. tables (G, E, E'). Added to hits (S, 2): selected experts
    among the k' and 2k' best. Of equal scores the smaller id is the better.
    """
    n_experts = tables.shape[2]
    k = target.shape[1]
    score = np.empty(n_experts, dtype=np.float32)
    for t in range(len(source)):
        s = stream[t]
        if s < 0:
            continue
        table = tables[table_of[s]]
        score[:] = np.float32(0)
        for i in range(source.shape[1]):
            row = table[source[t, i]]
            for x in range(n_experts):
                score[x] += row[x]
        for i in range(k):
            e = np.int64(target[t, i])
            rank = np.int32(0)
            for x in range(n_experts):
                rank += np.int32(score[x] > score[e])
            for x in range(e):
                rank += np.int32(score[x] == score[e])
            if rank < k:
                hits[s, 0] += 1
            if rank < 2 * k:
                hits[s, 1] += 1
