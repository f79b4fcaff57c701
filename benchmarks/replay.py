"""Replay and miss-rate curves beside libcachesim, in one process on the same requests.

Knows one made-up sequence: independent draws with Zipf popularity (exponent 0.8), one cache,
sequential look-ups. Refuses to judge policies: the requests are invented, only the times mean
something. Miss counts must agree exactly, or it fails.

libcachesim (pip install libcachesim) reads a file of 24-byte records with the time of each object's
next request; to make it is part of its end-to-end time, as finding the next requests is of moetap's
Belady. Times are the best of some rounds, after one that is not counted (Numba compiles then).

    PYTHONPATH=harness python benchmarks/replay.py [--requests N] [--objects E] [-C C] [--rounds N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import libcachesim
import numpy as np
from numpy.typing import NDArray

from moetap.formats.libcachesim import RECORD, _next
from moetap.policies import LookUps, get, stacks

T = TypeVar("T")


def zipf(n: int, n_objects: int, seed: int = 0) -> NDArray[np.uint16]:
    """`n` independent requests."""
    share = 1 / np.arange(1, n_objects + 1) ** 0.8
    rng = np.random.default_rng(seed)
    return rng.choice(n_objects, n, p=share / share.sum()).astype(np.uint16)


def write_records(ids: NDArray[np.uint16], path: Path) -> None:
    """libcachesim's file of the requests."""
    records = np.empty(len(ids), dtype=RECORD)
    records["time"] = np.arange(len(ids))
    records["object"] = ids
    records["size"] = 1
    records["next_access"] = _next(records["object"])
    records.tofile(path)


def peer_misses(name: str, path: Path, capacity: int, n: int) -> int:
    """Misses of libcachesim's policy."""
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    cache = getattr(libcachesim, name)(cache_size=capacity)
    ratio, _ = cache.process_trace(reader)
    return round(ratio * n)


def best_s(work: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Shortest time in seconds, and what `work` returned."""
    result = work()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return min(times), result


def main() -> int:
    """Print the times and ratios. Returns 1 if a miss count differs."""
    parser = argparse.ArgumentParser(description="Time replay beside libcachesim.")
    parser.add_argument("--requests", type=int, default=4_000_000)
    parser.add_argument("--objects", type=int, default=256)
    parser.add_argument("-C", dest="capacity", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    n, capacity = args.requests, args.capacity

    ids = zipf(n, args.objects)
    asked = LookUps(np.arange(n + 1), ids, np.ones(args.objects, dtype=np.int64))
    print(f"{n:,} requests, {args.objects} objects, C = {capacity}, best of {args.rounds}")
    print(f"{'':28}{'s':>8}{'M requests/s':>14}{'misses':>12}")

    def line(label: str, took: float, misses: int | None = None) -> None:
        count = "" if misses is None else f"{misses:,}"
        print(f"{label:28}{took:8.3f}{n / took / 1e6:14.1f}{count:>12}")

    same = True
    own: dict[str, float] = {}
    peer: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.oracleGeneral.bin"
        prepare, _ = best_s(lambda: write_records(ids, path), args.rounds)
        line("libcachesim's file", prepare)
        for name, theirs in (("lru", "LRU"), ("belady", "Belady")):
            peer[name], expected = best_s(
                lambda theirs=theirs: peer_misses(theirs, path, capacity, n), args.rounds
            )
            line(f"libcachesim {theirs}", peer[name], expected)
            own[name], missed = best_s(
                lambda name=name: int(get(name).missed(asked, capacity).sum()), args.rounds
            )
            line(f"moetap {name}", own[name], missed)
            same &= missed == expected
        for name, theirs in (("lru", "LRU"), ("belady", "Belady")):
            took, curve = best_s(
                lambda name=name: stacks.misses(stacks.places(name, asked))[0], args.rounds
            )
            own[f"{name} curve"] = took
            line(f"moetap {name} at every C", took, int(curve[capacity]))
            for c in {1, capacity, args.objects // 2, args.objects}:
                same &= int(curve[c]) == peer_misses(theirs, path, c, n)

    print()
    for name in ("lru", "belady"):
        print(
            f"{name}: {(peer[name] + prepare) / own[name]:.1f} times as fast as libcachesim end to "
            f"end, {peer[name] / own[name]:.1f} times without its file's preparation"
        )
    for name in ("lru", "belady"):
        ratio = own[f"{name} curve"] / peer[name]
        print(
            f"{name} at all {args.objects} C: {ratio:.2f} times one libcachesim run "
            f"({own[f'{name} curve'] / (peer[name] + prepare):.2f} end to end)"
        )
    print("miss counts: " + ("all the same" if same else "NOT THE SAME"))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
