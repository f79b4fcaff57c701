"""Time each part of the analysis on the synthetic trace, beside plain NumPy and Python sets.

Knows the goal: everything that `moetap analyze` computes on 200 streams x 512 decode steps x 40
layers, top-8 of 256, in 60 s or less on 2 cores and in 4 GB or less. Refuses to judge sharing: the
routing is invented (`synthetic`), only the times mean something.

    PYTHONPATH=harness python benchmarks/analyze.py [--streams N] [--steps D]
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from synthetic import STEPS, STREAMS, synthetic_trace

from moetap.analysis import cache_io, overflow, unions
from moetap.analysis.lanes import Lanes, lay_out
from moetap.analysis.pool import Pool, pool
from moetap.policies.lru import LRU
from moetap.trace import Trace

SIZES = (2, 3, 4, 8)
SLOTS = (64, 128, 256)
T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds that `work` took, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def analysis(trace: Trace, streams: Pool, n_union_groups: int) -> list[tuple[str, float, float]]:
    """Every part, its seconds and its CPU seconds over all cores (which a busy machine changes
    less)."""
    parts: list[tuple[str, Callable[[], object]]] = [
        (
            f"unions: exact means, intervals, {n_union_groups} sampled groups",
            lambda: unions.union_table(streams, SIZES, n_union_groups),
        ),
        (
            f"overflow: W in {overflow.DEFAULT_WINDOWS} and verify of {overflow.DEFAULT_VERIFY}, "
            f"{overflow.DEFAULT_GROUPS} groups",
            lambda: overflow.overflow_table(streams, SIZES, SLOTS),
        ),
        (
            f"cache I/O: C in {SLOTS}, {cache_io.DEFAULT_GROUPS} groups",
            lambda: cache_io.cache_table(streams, SIZES, SLOTS),
        ),
        ("union by decode step, exact", lambda: overflow.union_curves(streams, SIZES)),
        ("prefill chunks", lambda: overflow.prefill_overflow([trace], SLOTS)),
    ]
    found = []
    for name, work in parts:
        before = time.process_time()
        took, _ = timed(work)
        found.append((name, took, time.process_time() - before))
    return found


def sets_rate(streams: Pool, n_pairs: int = 10) -> float:
    """(pair, step, layer) unions per second with Python sets."""
    some = [rows.tolist() for rows in streams.rows[:9]]
    rows = [[[set(cell) for cell in step] for step in steps] for steps in some]
    pairs = [(a, b) for a in range(len(rows)) for b in range(a)][:n_pairs]

    def work() -> int:
        return sum(
            1
            for a, b in pairs
            for one, other in zip(rows[a], rows[b], strict=True)
            for x, y in zip(one, other, strict=True)
            if len(x | y)
        )

    took, done = timed(work)
    return done / took


def numpy_masks(streams: Pool, n: int = 20) -> tuple[float, np.ndarray]:
    """Rows of a layer per second made into masks with plain NumPy; the masks (n, cells, 4)."""
    ids = np.stack(streams.rows[:n]).reshape(n, -1, streams.rows[0].shape[2])

    def work() -> np.ndarray:
        masks = np.zeros((*ids.shape[:2], 4), dtype=np.uint64)
        stream, cell = np.ogrid[:n, : ids.shape[1]]
        for slot in range(ids.shape[2]):
            at = ids[:, :, slot]
            masks[stream, cell, at >> 6] |= np.uint64(1) << (at & 63).astype(np.uint64)
        return masks

    took, masks = timed(work)
    return ids.shape[0] * ids.shape[1] / took, masks


def numpy_pairs_rate(masks: np.ndarray) -> float:
    """(pair, step, layer) unions per second by OR and bit count of ready masks."""
    pairs = [(a, b) for a in range(len(masks)) for b in range(a)]
    took, _ = timed(lambda: [np.bitwise_count(masks[a] | masks[b]).sum(1) for a, b in pairs])
    return len(pairs) * masks.shape[1] / took


def compiled_rates(lanes: Lanes, b: int) -> tuple[float, float, float, float]:
    """Unions, look-ups at three C, footprints at eight W, ids merged; per second, on one core."""
    from moetap.analysis._kernels import footprints

    windows = np.array(overflow.DEFAULT_WINDOWS)
    groups = [np.arange(i, i + b) for i in range(min(20, len(lanes.rows) - b + 1))]
    merging, sets = timed(lambda: [lanes.merge(g) for g in groups])
    looking, _ = timed(lambda: [LRU().misses(s, np.array(SLOTS)) for s in sets])
    counting, _ = timed(
        lambda: [footprints(s.n_steps, s.n_experts, s.starts, s.ids, s.ran, windows) for s in sets]
    )
    cells = sum(s.n_steps * s.n_layers for s in sets)
    requests = sum(len(s.ids) for s in sets)
    return (
        cells / merging,
        requests * len(SLOTS) / looking,
        cells * len(windows) / counting,
        cells * b * lanes.rows[0].shape[2] / merging,
    )


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description="Time every part of the analysis.")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--union-groups", type=int, default=1000)
    args = parser.parse_args()

    took, trace = timed(lambda: synthetic_trace(args.streams, args.steps))
    streams = pool([trace])
    print(
        f"{args.streams} streams x {args.steps} decode steps x {trace.model.n_layers} layers, "
        f"top-{trace.model.max_top_k} of {trace.model.n_experts[0]}, made in {took:.1f} s; "
        f"{os.cpu_count()} cores; peak memory {peak_bytes() / 1e9:.2f} GB"
    )
    small = synthetic_trace(9, 40)
    took, _ = timed(lambda: analysis(small, pool([small]), 10))
    print(f"a tiny trace first, with loading or compiling the loops: {took:.1f} s")

    print(f"\nB in {{1, {', '.join(map(str, SIZES))}}}, all strata")
    times = analysis(trace, streams, args.union_groups)
    print("       s   CPU s")
    for name, took, busy in [*times, ("together", *np.sum([t[1:] for t in times], axis=0))]:
        print(f"  {took:6.2f}  {busy:6.2f}  {name}")
    print(f"  peak memory {peak_bytes() / 1e9:.2f} GB")

    sets = sets_rate(streams)
    building, masks = numpy_masks(streams)
    print("\nrates, in millions per second; the compiled ones on one core")
    print(f"  {sets / 1e6:8.2f}  pair unions, Python sets")
    print(f"  {building / 1e6:8.2f}  rows of a layer made into masks, plain NumPy")
    print(
        f"  {numpy_pairs_rate(masks) / 1e6:8.2f}  pair unions by OR and bit count of masks, NumPy"
    )
    lanes = lay_out(streams)
    for b in (2, 8):
        merged, lookups, counted, ids = compiled_rates(lanes, b)
        print(
            f"  {merged / 1e6:8.2f}  unions of {b} lanes as sorted ids, compiled "
            f"({merged * b / 1e6:.0f} M rows/s, {ids / 1e6:.0f} M ids/s, "
            f"{merged / sets:.0f} x Python sets of a pair)"
        )
        print(f"  {lookups / 1e6:8.2f}  LRU look-ups at B = {b}, three capacities in one pass")
        print(f"  {counted / 1e6:8.2f}  footprints at B = {b}, eight windows in one pass")


if __name__ == "__main__":
    main()
