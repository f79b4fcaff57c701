"""What every table says about the streams behind it.

Knows how to put in words what is incomplete, left out, and how the tokens were sampled. Knows no
metric.
"""

from __future__ import annotations

from pathlib import Path

from moetap.analysis.pool import Origin, Pool


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


def sampler(pool: Pool) -> str:
    """How the traced tokens were chosen."""
    found = []
    for origin in pool.origins:
        words = "greedy (temperature 0)" if origin.temp == 0 else f"temperature {origin.temp:g}"
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
