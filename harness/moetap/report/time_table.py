"""What the reads cost in time, on a terminal.

Knows digits and which bound each figure is. Refuses to estimate a bandwidth.
"""

from __future__ import annotations

from collections.abc import Callable

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.study import Study, TimeLine, TimeTable
from moetap.analysis.timing import Rate
from moetap.report import words
from moetap.report.sections import Heading, Note, Section, grid


def time_section(study: Study, table: TimeTable) -> Section:
    """Time of a decode step and the tokens/s that it leaves, cold step and each C."""
    title = f"Time of the expert reads, decode: {study.model.id}"
    warning = words.incomplete(study.pool)
    if table.missing or table.bandwidth is None:
        return Section(
            "time", title, warning, (Note(f"Not available: {table.missing}.", main=True),)
        )
    low, high = table.bandwidth.low_bps / 1e9, table.bandwidth.high_bps / 1e9
    speed = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    shown = grid(
        ("I/O", "B"),
        (
            "all steps\nms/step",
            "tokens/s\na lane",
            "\nin total",
            "with\ncompute",
            f"after {COLD_STEPS} steps\nms/step",
            "tokens/s\na lane",
        ),
    )
    keys = dict.fromkeys(line.capacity for line in table.lines)
    for capacity in keys:
        lines = [line for line in table.lines if line.capacity == capacity]
        sizes = sorted({line.b for line in lines})
        for b in sizes:
            phases = {line.phase: line for line in lines if line.b == b}
            name = "cold step" if capacity is None else f"C = {capacity}"
            shown.add_row(
                name if b == sizes[0] else "",
                str(b),
                *_cells(phases["all"]),
                *(_cells(phases["steady"])[:2] if "steady" in phases else ("", "")),
            )
        shown.add_section()
    return Section(
        "time",
        title,
        warning,
        (
            Heading(f"Upper bounds from reads alone at {speed} GB/s (10^9 bytes per second)"),
            shown,
            Note(
                f"Bandwidth: {table.bandwidth.source}. Every tokens/s is an upper bound: latencies "
                "and computation are left out, and reads run at full bandwidth. Mean bytes of a "
                "step over the bandwidth; each lane waits a whole step for a token. "
                + _compute(study.pool.untraced_tokens_per_s)
            ),
        ),
    )


def _compute(rate: float | None) -> str:
    """What the column beside the reads' own bound means."""
    if rate is None:
        return "With compute: not available, the trace records no untraced decode rate."
    return (
        f"With compute: tokens/s a lane beside the {_three(rate)} tokens/s that one stream decoded "
        "at untraced, from no overlap of reads and computing at the lower bandwidth to full "
        "overlap at the higher; computing B lanes is taken to cost no more than one, so it stays a "
        "bound."
    )


def _cells(line: TimeLine) -> tuple[str, str, str, str]:
    if line.slow is None or line.fast is None:
        return "n/a", "n/a", "n/a", "n/a"
    slow, fast = line.slow.io, line.fast.io

    def span(of: Callable[[Rate], float | None], first: Rate = slow, last: Rate = fast) -> str:
        ends = [of(rate) for rate in (first, last)]
        return "-".join(dict.fromkeys("none" if x is None else _three(x) for x in ends))

    return (
        span(lambda rate: 1000 * rate.step_s),
        span(lambda rate: rate.lane_tokens_per_s),
        span(lambda rate: rate.total_tokens_per_s),
        "-"
        if line.slow.no_overlap is None or line.fast.full_overlap is None
        else span(
            lambda rate: rate.lane_tokens_per_s, line.slow.no_overlap, line.fast.full_overlap
        ),
    )


def _three(value: float) -> str:
    """Three digits, which is more than any bandwidth is known to. Beyond 10,000 tokens/s, or below
    0.01 ms, reads limit nothing."""
    if value > 10_000:
        return ">10,000"
    if 0 < value < 0.01:
        return "<0.01"
    return f"{float(f'{value:.3g}'):,.10g}"
