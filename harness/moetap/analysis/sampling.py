"""The distribution of the union over sampled groups of streams.

Knows how to draw groups and how to count the union of B lanes with bit masks. Refuses to know
means: those are exact (`moetap.analysis.unions`) and need no sample. Only quantiles and the
histogram do, because they need every group's own union and there are too many groups to visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, islice

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.pool import Pool
from moetap.analysis.strata import Stratum, class_names
from moetap.trace import NOT_EXECUTED

MASK_BYTES = 256_000_000
"""Bit masks held at a time. Decode steps are processed in chunks that fit."""


@dataclass(frozen=True, eq=False)
class Distribution:
    """Unions of the sampled groups at all their decode steps.

    histogram: (U,) int64, number of (group, step, layer) triples by union size, from 0.
    n_groups: groups counted. exhaustive: these are all the groups there are, no sample was drawn.
    """

    histogram: NDArray[np.int64]
    n_groups: int
    exhaustive: bool

    @property
    def n_triples(self) -> int:
        """Triples counted."""
        return int(self.histogram.sum())

    def quantile(self, q: float) -> int | None:
        """Smallest union size that at least a share `q` of the triples do not exceed."""
        if not self.n_triples:
            return None
        # A hair below q x total, lest 0.95 x 20 is rounded up and asks for the 20th triple.
        return int(np.searchsorted(np.cumsum(self.histogram), q * self.n_triples * (1 - 1e-12)))

    @property
    def mean(self) -> float | None:
        """Mean over the triples; compare it with the exact mean to judge the sample."""
        if not self.n_triples:
            return None
        return float(self.histogram @ np.arange(len(self.histogram))) / self.n_triples


@dataclass(frozen=True, eq=False)
class Groups:
    """Groups to count: (n, b) stream indices, ascending within a group. exhaustive: all that there
    are."""

    members: NDArray[np.intp]
    exhaustive: bool


def draw_groups(pool: Pool, stratum: Stratum, b: int, n_groups: int, seed: int) -> Groups:
    """Draw `n_groups` different groups of `b` distinct streams, uniformly among the stratum's
    groups.

    If there are no more than that, take them all. The draw depends on the seed, the stratum's
    streams and `b` alone, so the other sizes of a table do not change it.
    """
    names = class_names(pool)
    class_of = np.array([names.index(cls) for cls in pool.classes])

    def wanted(rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        if stratum.kind != "mixed":
            return np.ones(len(rows), dtype=bool)
        return np.asarray((class_of[rows] != class_of[rows[:, :1]]).any(axis=1))

    if stratum.n_groups(b) <= n_groups:
        rows = np.array(list(combinations(stratum.members.tolist(), b)), dtype=np.intp)
        return Groups(rows[wanted(rows)], exhaustive=True)
    rng = np.random.default_rng([seed, b])
    n = stratum.n_streams
    batch = max(1, min(n_groups, 4_000_000 // n))
    drawn: dict[tuple[int, ...], None] = {}  # in order of drawing, so that cutting it off is fair
    while len(drawn) < n_groups:
        # The b smallest of n independent numbers are a uniform subset.
        picks = rng.random((batch, n)).argpartition(b - 1, axis=1)[:, :b]
        rows = np.sort(stratum.members[picks], axis=1)
        drawn.update(dict.fromkeys(map(tuple, rows[wanted(rows)].tolist())))
    return Groups(np.array(list(islice(drawn, n_groups)), dtype=np.intp), exhaustive=False)


def union_histograms(pool: Pool, groups: Sequence[Groups]) -> list[NDArray[np.int64]]:
    """Histogram of the union size over all decode steps of all groups, one (L, U) array per entry
    of `groups`.

    A group ends at its shortest stream. A cell that one of its streams did not execute is left out.
    Each stream's ids of a cell become a mask of ceil(E / 64) words, so that a union is a bitwise OR
    and its size a bit count.
    """
    model = pool.model
    n_layers, n_words = model.n_layers, -(-int(model.n_experts.max()) // 64)
    longest = max(len(rows) for rows in pool.rows)
    chunk = max(1, MASK_BYTES // (pool.n_streams * n_layers * (n_words * 8 + 1)))
    widths = [
        int(np.minimum(model.n_experts, model.top_k * g.members.shape[1]).max()) + 1 for g in groups
    ]
    # One bin more than there are sizes: the last one takes the cells that do not count.
    counts = [np.zeros(n_layers * (width + 1), dtype=np.int64) for width in widths]
    for start in range(0, longest, chunk):
        part = [rows[start : start + chunk] for rows in pool.rows]
        masks, missing = _masks(part, n_words)
        lengths = np.array([len(rows) for rows in part])
        any_missing = bool(missing.any())
        for job, count, width in zip(groups, counts, widths, strict=True):
            bins = np.arange(n_layers, dtype=np.intp) * (width + 1)
            for group in job.members[lengths[job.members].min(axis=1) > 0]:
                steps = int(lengths[group].min())
                union = masks[group[0], :, :steps].copy()
                for stream in group[1:]:
                    union |= masks[stream, :, :steps]
                size = np.bitwise_count(union).sum(axis=0, dtype=np.intp)  # (steps, L)
                if any_missing:
                    size[missing[group, :steps].any(axis=0)] = width
                size += bins
                count += np.bincount(size.ravel(), minlength=len(count))
    return [
        count.reshape(n_layers, width + 1)[:, :width]
        for count, width in zip(counts, widths, strict=True)
    ]


def _masks(
    part: Sequence[NDArray[np.uint16]], n_words: int
) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Bit masks (S, words, steps, L) of the streams' rows, and which cells did not execute (S,
    steps, L).

    The words come before the steps so that summing their bit counts runs along contiguous memory.
    """
    steps = max(len(rows) for rows in part)
    n_layers = part[0].shape[1]
    masks = np.zeros((len(part), n_words, steps, n_layers), dtype=np.uint64)
    missing = np.zeros((len(part), steps, n_layers), dtype=bool)
    step, layer = np.ogrid[:steps, :n_layers]
    for i, rows in enumerate(part):
        n = len(rows)
        missing[i, :n] = rows[:, :, 0] == NOT_EXECUTED
        for slot in range(rows.shape[2]):  # ids of one slot hit each cell once, so |= loses nothing
            ids = rows[:, :, slot]
            real = ids != NOT_EXECUTED
            word = np.where(real, ids >> 6, 0)
            bit = np.where(real, np.uint64(1) << (ids & 63).astype(np.uint64), np.uint64(0))
            masks[i, word, step[:n], layer] |= bit
    return masks, missing
