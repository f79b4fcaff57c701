"""What every table says about the streams behind it.

Knows how to put in words what is incomplete, left out, and how the tokens were sampled. Knows no
metric.
"""

from __future__ import annotations

from pathlib import Path

from moetap.analysis.measured import SWAP_LIMIT_BYTES
from moetap.analysis.pool import Difference, Origin, Pool

NOT_RECORDED = "not recorded"


def count(n: int, noun: str) -> str:
    """`n` and the noun, in the plural unless n is 1."""
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def incomplete(pool: Pool) -> str:
    """Which traces are incomplete, for a title; "" if all are complete."""
    cut = [origin for origin in pool.origins if not origin.complete]
    if not cut:
        return ""
    several = len(pool.origins) > 1
    return "INCOMPLETE: " + ", ".join(
        (f"{Path(origin.source).name} has " if several else "") + _how_many(origin)
        for origin in cut
    )


def _how_many(origin: Origin) -> str:
    if origin.n_planned:
        return f"{origin.n_streams:,} of {count(origin.n_planned, 'stream')}"
    return count(origin.n_streams, "stream")


def warnings(pool: Pool) -> list[str]:
    """What must be said of a whole report besides what is incomplete, a line each."""
    said = [_not_alike(difference) for difference in pool.differences]
    for origin in pool.origins:
        swapped = swap_growth(origin.swap_growth_bytes)
        if swapped:
            said.append(f"{_name(origin)}: {swapped}")
    return said


def swap_growth(n_bytes: int | None) -> str:
    """What swap growth during a capture means for its times; "" if it means nothing."""
    if n_bytes is None or n_bytes <= SWAP_LIMIT_BYTES:
        return ""
    return (
        f"memory ran short, swap grew by {n_bytes / 1e9:.2f} GB during the capture: the routing is "
        "right, the times are not those of a machine at ease"
    )


def _not_alike(difference: Difference) -> str:
    values = ", ".join(f"{what} {a} against {b}" for what, a, b in difference.values)
    return (
        f"{_name(difference.first)} and {_name(difference.second)} were not computed alike "
        f"({values}): pooled all the same, but near ties may be routed differently"
    )


def _name(origin: Origin) -> str:
    return origin.source or f"run {origin.run_id}"


def sampler(pool: Pool) -> str:
    """How the traced tokens were chosen."""
    found = []
    for origin in pool.origins:
        words = "greedy (temperature 0)" if origin.temp == 0 else f"temperature {origin.temp:g}"
        if origin.imported and origin.temp == 0:
            words = NOT_RECORDED
        if origin.top_p:
            words += f", top-p {origin.top_p:g}"
        found.append(words)
    return " and ".join(dict.fromkeys(found))


def left_out(pool: Pool) -> str:
    """What became of looped tails and of repeated prompts; "" if there are none."""
    said = []
    if pool.n_looped:
        fate = "kept" if pool.keep_loops else "left out"
        rows, streams = count(pool.n_looped_rows, "looped row"), count(pool.n_looped, "stream")
        said.append(f"{rows} of {streams} {fate}.")
    if pool.n_repeated:
        streams = count(pool.n_repeated, "stream")
        said.append(f"{streams} of a prompt that occurs before left out.")
    return " ".join(said)
