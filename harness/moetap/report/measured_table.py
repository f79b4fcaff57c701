"""Measured reads next to replayed misses, on a terminal.

Knows digits, and what must be said loudly: the two kinds of misses are equal or something is wrong.
Refuses to compute either.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table
from rich.text import Text

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.measured import Comparison, Line
from moetap.analysis.pool import Pool
from moetap.report import words
from moetap.report.sections import Heading, Note, Section, grid

PHASES = {"cold": f"first {COLD_STEPS}", "steady": "rest"}


def measured_section(pool: Pool, found: Sequence[Comparison]) -> Section:
    """Every trace that measured its reads, cold and steady; why there is none if there is none."""
    title = f"Expert reads, decode, measured and replayed: {pool.model.id}"
    cut = words.incomplete(pool)
    if not found:
        note = Note(
            "Not available: no trace measured its reads; moetap capture --stream does.", True
        )
        return Section("measured", title, cut, (note,))
    parts: list[Heading | Note | Table] = []
    for comparison in found:
        how = f"{comparison.policy or '?'}, C = {comparison.slots or '?'}"
        parts.append(Heading(f"{_name(comparison)}: {how}, one stream at a time (B = 1)"))
        parts += [_grid(comparison), _agreement(comparison)]
    runs = {comparison.run_id for comparison in found}
    without = [Path(o.source).name or o.run_id for o in pool.origins if o.run_id not in runs]
    if without:
        parts.append(Note(f"Without measured reads: {', '.join(without)}.", main=True))
    parts.append(Note(_caption(pool, found)))
    return Section("measured", title, cut, tuple(parts))


def _grid(comparison: Comparison) -> Table:
    phases = [line.measured for line in comparison.lines]
    largest = max(phase.per_token(phase.read_bytes) or 0 for phase in phases)
    unit, divisor = ("MB", 1e6) if largest >= 1e7 else ("kB", 1e3)
    table = grid(
        ("steps",),
        (
            "tokens", "misses/token\nmeasured", "\nreplayed", "hits\n%", f"{unit}/token\nread",
            "\nmissed", "reads\nGB/s", "wait\nms/token",
        ),
    )  # fmt: skip
    for line in comparison.lines:
        if line.phase in PHASES:
            tokens = f"{line.measured.steps:,}"
            table.add_row(PHASES[line.phase], tokens, *_cells(line, divisor))
    return table


def _cells(line: Line, divisor: float) -> list[Text | str]:
    phase = line.measured
    replayed = None if line.replayed is None else phase.per_token(line.replayed)
    wrong = line.replayed not in (None, phase.misses)
    return [
        _number(phase.per_token(phase.misses), 2),
        Text(_number(replayed, 2), style="red" if wrong else ""),
        _number(phase.hit_rate, 1, 100),
        _number(phase.per_token(phase.read_bytes), 1, 1 / divisor),
        _number(phase.per_token(phase.miss_bytes), 1, 1 / divisor),
        _number(phase.bandwidth_bps, 2, 1e-9),
        _number(phase.per_token(phase.wait_s), 2, 1000),
    ]


def _agreement(comparison: Comparison) -> Note:
    same = comparison.agreement
    text = f"Measured and replayed misses: {agreement_words(comparison)}."
    return Note(text, main=True, warning=same is not None and same.different > 0)


def agreement_words(comparison: Comparison) -> str:
    """What became of measured against replayed misses: equal, or something is wrong."""
    same = comparison.agreement
    if same is None:
        return f"not compared, {comparison.missing}"
    cells = f"{same.cells:,} (step, layer) cells"
    if same.different:
        return (
            f"DIFFERENT in {same.different:,} of {cells}, {same.measured:,} measured, "
            f"{same.replayed:,} replayed. With one policy and C they must be equal: this is a bug "
            "of moetap, or the file was changed; please report it"
        )
    return f"equal in all {cells}, as they must be"


def _name(comparison: Comparison) -> str:
    return Path(comparison.source).name or f"run {comparison.run_id}"


def _number(value: float | None, digits: int, factor: float = 1) -> str:
    return "-" if value is None else f"{factor * value:,.{digits}f}"


def _caption(pool: Pool, found: Sequence[Comparison]) -> str:
    past = {True: "past the page cache", False: "through the page cache", None: "not recorded how"}
    how = {c.cold_reads: past[c.cold_reads] for c in found}
    n_looped = pool.n_looped and not pool.keep_loops
    said = [
        "Sums over layers per decode step, which is a token; all streams of a trace, slots empty "
        "at decode step 0, no prefill. Replayed: the recorded routing, step-atomic, with the same "
        "policy and C.",
        "Looped rows count for the comparison of the cells only." if n_looped else "",
        "Read: what was read; missed: misses x stored bytes of an expert.",
        f"GB/s: bytes read ({' and '.join(how.values())}) over the time in which a layer's reads "
        "were under way, at the queue depth that its misses give; 10^9 bytes per second.",
        "Wait: for which the model waited for reads, in the traced run.",
    ]
    return " ".join(part for part in said if part)
