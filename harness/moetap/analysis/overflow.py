"""How often a layer needs more experts at once than a cache of C slots holds.

Knows footprints: the distinct experts that B lanes select over the last W decode steps. W = 1 is
the step union, which a step needs at the same time; a longer window is a working set, which a cache
would have to hold for nothing to be loaded twice; W = M is also what a speculative verify of M rows
per lane needs at once. Knows chunks of prefill rows too, in a table of their own. Refuses to know
what a cache then does (`replay`).

Where no step can need more than C experts, the answer is "impossible by construction", not 0 %.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import (
    COLD_STEPS,
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
from moetap.analysis.strata import class_names, strata
from moetap.analysis.unions import DEFAULT_SIZES, uniform_union
from moetap.errors import UsageError
from moetap.trace import ModelInfo, Stream, Trace

DEFAULT_GROUPS = 100
DEFAULT_CAPACITIES = (64, 128, 256)
DEFAULT_WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128)
DEFAULT_VERIFY = (8, 24)
"""Rows per lane of a speculative verify."""
DEFAULT_CHUNKS = (512, 2048)
"""Prefill rows of one stream that a pass takes."""

MEASURED = "measured"
IMPOSSIBLE = "impossible by construction"
NOT_AVAILABLE = "not available"


@dataclass(frozen=True, eq=False)
class Footprint:
    """Footprints F_{B,W} of the groups of `draw`, over all (group, step, layer) triples.

    A window is defined from decode step d = W - 1 on, when it is full. One that holds a cell that a
    lane did not execute is left out.

    mean: experts, None where there is no window (`missing` says why).
    uniform: mean if routing were independent and uniform, E (1 - (1 - k/E)^(B W)).
    histogram: (L, E + 1) int64, triples by footprint.
    n_short: groups that end before a window is full. left_out: (L,) windows left out.
    """

    draw: Draw
    window: int
    mean: Estimate | None
    uniform: float | None
    histogram: NDArray[np.int64]
    n_short: int
    left_out: NDArray[np.int64]
    missing: str = ""

    @property
    def n_triples(self) -> int:
        """Windows counted."""
        return int(self.histogram.sum())

    def quantile(self, q: float) -> int | None:
        """Smallest footprint that at least a share `q` of the triples do not exceed."""
        if not self.n_triples:
            return None
        # A hair below q x total, as in `sampling.Distribution`.
        reached = np.cumsum(self.histogram.sum(axis=0))
        return int(np.searchsorted(reached, q * self.n_triples * (1 - 1e-12)))

    def layer_fractions(self, capacity: int) -> list[tuple[int, float]]:
        """(ordinal of the layer, share of its triples above C), worst first, equal ones in order.
        Layers without a triple are left out."""
        counted = self.histogram.sum(axis=1)
        over = self.histogram[:, capacity + 1 :].sum(axis=1)
        found = [(i, float(over[i] / n)) for i, n in enumerate(counted) if n]
        return sorted(found, key=lambda pair: -pair[1])


@dataclass(frozen=True, eq=False)
class Overflow:
    """One line: how often footprints exceed C.

    state: MEASURED; IMPOSSIBLE, as min(E, B k W) <= C in every layer; NOT_AVAILABLE, `missing` says
    why. fraction: of (layer, step) pairs with F_{B,W} > C. passes: mean of ceil(F / C), the passes
    that a
        step costs if it is split. Both only where measured.
    """

    footprint: Footprint
    capacity: int
    state: str
    fraction: Estimate | None
    passes: Estimate | None
    missing: str = ""

    @property
    def draw(self) -> Draw:
        """The groups."""
        return self.footprint.draw

    @property
    def window(self) -> int:
        """W."""
        return self.footprint.window

    def worst_layers(self, n: int = 3) -> list[tuple[int, float]]:
        """(ordinal of the layer, fraction) of the `n` layers that exceed C most often; only those
        that do."""
        worst = self.footprint.layer_fractions(self.capacity)[:n]
        return [(layer, fraction) for layer, fraction in worst if fraction > 0]


@dataclass(frozen=True, eq=False)
class OverflowTable:
    """Footprints by stratum, B and W, and overflow by stratum, B, W and C; the control last.

    windows: all W measured; `verify` are those among them that stand for a speculative verify.
    groups_asked, seed: of the sample.
    """

    pool: Pool
    sizes: tuple[int, ...]
    windows: tuple[int, ...]
    verify: tuple[int, ...]
    capacities: tuple[int, ...]
    footprints: tuple[Footprint, ...]
    lines: tuple[Overflow, ...]
    groups_asked: int
    seed: int

    def find(self, stratum: str, b: int, window: int, capacity: int) -> Overflow:
        """The line of a stratum (by name), B, W and C.

        Raises:
            KeyError: the table has no such line.
        """
        for line in self.lines:
            draw = line.draw
            if (draw.stratum, draw.b, line.window, line.capacity) == (stratum, b, window, capacity):
                return line
        raise KeyError((stratum, b, window, capacity))


def overflow_table(
    pool: Pool,
    sizes: Sequence[int] | None = None,
    capacities: Sequence[int] = DEFAULT_CAPACITIES,
    windows: Sequence[int] = DEFAULT_WINDOWS,
    verify: Sequence[int] = DEFAULT_VERIFY,
    n_groups: int = DEFAULT_GROUPS,
    seed: int = 0,
) -> OverflowTable:
    """Work out the table for groups of each of `sizes` streams; 1 is always among them.

    Without `sizes` the default ones are used, and those that there are too few streams for are said
    to be not available.

    Raises:
        UsageError: a size asked for is below 1 or above the number of streams; C is below k; a
        window is below 1; no group is to be sampled.
    """
    wanted = checked_sizes(pool, sizes, DEFAULT_SIZES)
    slots = checked_capacities(pool, capacities)
    checked_sample(n_groups, seed)
    lengths = sorted({*windows, *verify})
    if not lengths:
        raise UsageError("no window W given")
    if lengths[0] < 1:
        raise UsageError(f"W = {lengths[0]}: a window has at least one step")
    lanes = lay_out(pool)
    footprints: list[Footprint] = []
    lines: list[Overflow] = []
    for draw in draws(pool, wanted, n_groups, seed):
        sums = _sums(lanes, draw, lengths, slots)
        for w, window in enumerate(lengths):
            footprint = _footprint(pool, lanes, draw, sums, w, window)
            footprints.append(footprint)
            lines += [_overflow(pool, footprint, sums, w, c, slots[c]) for c in range(len(slots))]
    return OverflowTable(
        pool=pool,
        sizes=tuple(wanted),
        windows=tuple(lengths),
        verify=tuple(sorted(set(verify))),
        capacities=tuple(slots),
        footprints=tuple(footprints),
        lines=tuple(lines),
        groups_asked=n_groups,
        seed=seed,
    )


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over the (step, layer) pairs of each group.

    pairs, experts: (groups, n_W), number of pairs and of experts in them. over, passes: (groups,
    n_W, n_C), pairs above C and passes. histogram: (n_W, L, E + 1) and left_out: (n_W, L) of all
    groups.
    """

    pairs: NDArray[np.float64]
    experts: NDArray[np.float64]
    over: NDArray[np.float64]
    passes: NDArray[np.float64]
    histogram: NDArray[np.int64]
    left_out: NDArray[np.int64]


def _sums(lanes: Lanes, draw: Draw, windows: Sequence[int], slots: Sequence[int]) -> _Sums:
    """Count every group of a draw. All figures follow from its histogram of footprints."""
    from moetap.analysis._kernels import footprints

    most = int(lanes.n_experts.max())
    size = np.arange(most + 1)
    over = (size[:, None] > np.array(slots)).astype(np.int64)  # (E + 1, n_C)
    passes = -(-size[:, None] // np.array(slots))
    columns = np.concatenate(
        [np.ones((most + 1, 1), dtype=np.int64), size[:, None], over, passes], 1
    )
    total = np.zeros((len(windows), len(lanes.n_experts), most + 1), dtype=np.int64)
    left_out = np.zeros(total.shape[:2], dtype=np.int64)
    adding = threading.Lock()

    def work(members: NDArray[np.intp]) -> NDArray[np.int64]:
        sets = lanes.merge(members)
        histogram, gaps = footprints(
            sets.n_steps, sets.n_experts, sets.starts, sets.ids, sets.ran, np.array(windows)
        )
        with adding:  # integers, so the order in which groups come doesn't matter
            np.add(total, histogram, out=total)
            np.add(left_out, gaps, out=left_out)
        return np.asarray(histogram.sum(axis=1, dtype=np.int64) @ columns)

    done = in_threads(work, draw.members)
    sums = np.array(done, dtype=np.float64).reshape(len(done), len(windows), columns.shape[1])
    n = len(slots)
    return _Sums(
        pairs=sums[:, :, 0],
        experts=sums[:, :, 1],
        over=sums[:, :, 2 : 2 + n],
        passes=sums[:, :, 2 + n :],
        histogram=total,
        left_out=left_out,
    )


def _footprint(pool: Pool, lanes: Lanes, draw: Draw, sums: _Sums, w: int, window: int) -> Footprint:
    """Mean over triples of F_{B,W}(d, l) = |union of the lanes' experts, steps d - W + 1 .. d|."""
    model = pool.model
    short = int((lanes.n_steps[draw.members].min(axis=1) < window).sum()) if draw.n_groups else 0
    mean = over_streams(draw, sums.experts[:, w], sums.pairs[:, w])
    missing, uniform = draw.missing, None
    if mean is not None:
        per_layer = sums.histogram[w].sum(axis=1)
        alike = uniform_union(
            model.n_experts.astype(np.float64),
            model.top_k.astype(np.float64),
            draw.distinct * window,
        )
        uniform = float(per_layer @ alike / per_layer.sum())
    elif not missing:
        missing = (
            f"no group lasts {window} steps"
            if short == draw.n_groups
            else "every window holds a cell that was not executed"
        )
    return Footprint(
        draw, window, mean, uniform, sums.histogram[w], short, sums.left_out[w], missing
    )


def _overflow(
    pool: Pool, footprint: Footprint, sums: _Sums, w: int, c: int, capacity: int
) -> Overflow:
    """Share of (layer, step) pairs with F > C, and mean of ceil(F / C), of one line.

    F can't exceed min(E, B k W): where that is no more than C in every layer, nothing was tested
    and the line says so.
    """
    draw, model = footprint.draw, pool.model
    if draw.missing:
        return Overflow(footprint, capacity, NOT_AVAILABLE, None, None, draw.missing)
    bound = np.minimum(model.n_experts, draw.distinct * model.top_k * footprint.window)
    if np.all(bound <= capacity):
        return Overflow(footprint, capacity, IMPOSSIBLE, None, None)
    fraction = over_streams(draw, sums.over[:, w, c], sums.pairs[:, w])
    passes = over_streams(draw, sums.passes[:, w, c], sums.pairs[:, w])
    if fraction is None or passes is None:
        return Overflow(footprint, capacity, NOT_AVAILABLE, None, None, footprint.missing)
    return Overflow(footprint, capacity, MEASURED, fraction, passes)


@dataclass(frozen=True, eq=False)
class PrefillOverflow:
    """Prefill chunks of `chunk` rows against C.

    state, fraction, passes, missing: as `Overflow`, over (chunk, layer) pairs. union: mean distinct
        experts of a chunk and layer.
    n_chunks, n_full: chunks, and those of them that have all `chunk` rows. n_streams: streams with
        prefill rows. n_without: those with none.
    not_executed: (L,) chunks in which the layer did not run at all, left out.
    worst: (L,) share of each layer's chunks above C, 0 where there is none.
    """

    stratum: str
    chunk: int
    capacity: int
    state: str
    union: Estimate | None
    fraction: Estimate | None
    passes: Estimate | None
    n_chunks: int
    n_full: int
    n_streams: int
    n_without: int
    not_executed: NDArray[np.int64]
    worst: NDArray[np.float64]
    missing: str = ""


def prefill_overflow(
    traces: Sequence[Trace],
    capacities: Sequence[int] = DEFAULT_CAPACITIES,
    chunks: Sequence[int] = DEFAULT_CHUNKS,
) -> tuple[PrefillOverflow, ...]:
    """Unions of prefill chunks, by stratum (all, each class), chunk and C.

    Chunks are cut as prefill cuts them: from the first recorded row of each stream, the last one
    shorter. The last prompt token is not among them: its pass is decode step 0. A chunk's union in
    a layer is over the rows that executed there (the last layers often run for the last row only).

    Raises:
        UsageError: C is below k, a chunk has no row, no trace given.
    """
    if not traces:
        raise UsageError("no trace given")
    model = traces[0].model
    slots = sorted(set(capacities))
    if not slots or slots[0] < model.max_top_k:
        raise UsageError(f"C = {slots[0] if slots else 0}: C is below k = {model.max_top_k}")
    if min(chunks, default=0) < 1:
        raise UsageError("a prefill chunk has at least one row")
    streams = [stream for trace in traces for stream in trace.streams]
    classes = sorted({stream.cls for stream in streams})
    strata = [("all", streams)]
    if len(classes) > 1:
        strata += [(cls, [s for s in streams if s.cls == cls]) for cls in classes]
    found = []
    for name, members in strata:
        for chunk in sorted(set(chunks)):
            sizes = in_threads(partial(_chunk_unions, model, chunk), members)
            found += [_prefill(model, name, members, sizes, chunk, c) for c in slots]
    return tuple(found)


def _chunk_unions(model: ModelInfo, chunk: int, stream: Stream) -> NDArray[np.int64]:
    """Distinct experts per chunk and layer, (chunks, L), 0 where the layer did not run."""
    from moetap.analysis._kernels import distinct

    rows = stream.prefill()
    parts = [
        distinct(rows[start : start + chunk], int(model.n_experts.max()))
        for start in range(0, len(rows), chunk)
    ]
    return np.array(parts, dtype=np.int64).reshape(len(parts), model.n_layers)


def _prefill(
    model: ModelInfo,
    name: str,
    streams: Sequence[Stream],
    sizes: Sequence[NDArray[np.int64]],
    chunk: int,
    capacity: int,
) -> PrefillOverflow:
    """Share of (chunk, layer) pairs whose union U exceeds C, and mean of ceil(U / C), the passes
    that prefill takes if a chunk's experts do not fit at once. U <= min(E, k x rows)."""
    kept = [size for size in sizes if len(size)]
    longest = min(chunk, max((s.decode_start for s in streams), default=0))
    every = np.concatenate([*kept, np.zeros((0, model.n_layers), dtype=np.int64)])
    ran = every > 0
    over = every > capacity
    state, missing = MEASURED, ""
    union = fraction = passes = None
    if not kept:
        state, missing = NOT_AVAILABLE, "no prefill rows"
    else:
        draw = Draw(name, "class", 1, np.arange(len(kept))[:, None], len(kept))
        pairs = np.array([(s > 0).sum() for s in kept], dtype=np.float64)

        def mean(values: Sequence[NDArray[np.generic]]) -> Estimate | None:
            return over_streams(draw, np.array([v.sum() for v in values], dtype=np.float64), pairs)

        union = mean(kept)
        if union is None:
            state, missing = NOT_AVAILABLE, "no layer executed a prefill row"
        elif np.all(np.minimum(model.n_experts, model.top_k * longest) <= capacity):
            state = IMPOSSIBLE
        else:
            fraction = mean([s > capacity for s in kept])
            passes = mean([-(-s // capacity) for s in kept])
    return PrefillOverflow(
        stratum=name,
        chunk=chunk,
        capacity=capacity,
        state=state,
        union=union,
        fraction=fraction,
        passes=passes,
        n_chunks=len(every),
        n_full=sum(s.decode_start // chunk for s in streams),
        n_streams=len(kept),
        n_without=len(streams) - len(kept),
        not_executed=(~ran).sum(axis=0),
        worst=over.sum(axis=0) / np.maximum(ran.sum(axis=0), 1),
        missing=missing,
    )


@dataclass(frozen=True, eq=False)
class UnionCurve:
    """Mean union by decode step, exact over all groups of `b` streams of a stratum, over the
    layers.

    steps: (D,) decode steps that have a group. mean: (D,) experts. n_groups: groups that last to
    the step. cold, steady: mean over the first COLD_STEPS decode steps and over the rest, None
    where there is none.
    """

    stratum: str
    b: int
    steps: NDArray[np.int64]
    mean: NDArray[np.float64]
    n_groups: tuple[int, ...]
    cold: float | None
    steady: float | None


def union_curves(pool: Pool, sizes: Sequence[int] | None = None) -> tuple[UnionCurve, ...]:
    """Mean union by decode step, by stratum and B; a stratum without groups of B has no curve.

    At a cell with N streams alive of which n_e select e, over all groups of B of them,

        sum U = sum_e C(N, B) - C(N - n_e, B)

    as in `unions`, summed over the layers of each step. Mixed groups are all groups less those
    inside one class.

    Raises:
        UsageError: as `overflow_table`.
    """
    from moetap.analysis._kernels import step_unions

    wanted = checked_sizes(pool, sizes, DEFAULT_SIZES)
    lanes, n = lay_out(pool), pool.n_streams
    scales = [
        math.comb(n, b) or 1 for b in wanted
    ]  # keeps exact integers near 1, nothing overflows
    choose = np.array(
        [
            [math.comb(m, b) / scale for m in range(n + 1)]
            for b, scale in zip(wanted, scales, strict=True)
        ]
    )
    longest = int(lanes.n_steps.max())
    every = strata(pool)
    own = [s for s in every if s.kind != "mixed"]
    sums = np.zeros((len(every), 2, len(wanted), longest))
    for at, stratum in enumerate(own):
        length = lanes.n_steps[stratum.members]
        part = step_unions(
            lanes.ids, lanes.first_row[stratum.members], length, lanes.n_experts, choose
        )
        sums[at, 0, :, : length.max()], sums[at, 1, :, : length.max()] = part
    if len(every) > len(own):
        sums[-1] = sums[0] - sums[1 : len(own)].sum(axis=0)

    # Streams of each class that last to step d, (classes, longest).
    alive = np.array(
        [
            (lanes.n_steps[np.array(pool.classes) == cls][:, None] > np.arange(longest)).sum(axis=0)
            for cls in class_names(pool)
        ]
    )
    curves = []
    for at, stratum in enumerate(every):
        for j, b in enumerate(wanted):
            union, weight = sums[at, :, j]
            steps = np.flatnonzero(weight > 0)
            if stratum.why_none(b) or not len(steps):
                continue
            groups = [_groups_at(stratum.kind, at, alive[:, d].tolist(), b) for d in steps]
            early, late = steps[steps < COLD_STEPS], steps[steps >= COLD_STEPS]
            curves.append(
                UnionCurve(
                    stratum=stratum.name,
                    b=b,
                    steps=steps,
                    mean=union[steps] / weight[steps],
                    n_groups=tuple(groups),
                    cold=float(union[early].sum() / weight[early].sum()) if len(early) else None,
                    steady=float(union[late].sum() / weight[late].sum()) if len(late) else None,
                )
            )
    return tuple(curves)


def _groups_at(kind: str, at: int, alive: list[int], b: int) -> int:
    """Groups of `b` streams that all last to a step. alive: streams per class that do; `at`: place
    of the stratum, 1 being the first class."""
    if kind == "class":
        return math.comb(alive[at - 1], b)
    inside = sum(math.comb(n, b) for n in alive) if kind == "mixed" else 0
    return math.comb(sum(alive), b) - inside
