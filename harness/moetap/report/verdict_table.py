"""The verdict on a terminal.

Knows the words of each criterion. Refuses to judge.
"""

from __future__ import annotations

import math

from rich.table import Table
from rich.text import Text

from moetap.analysis.ledger import GB
from moetap.analysis.study import Study
from moetap.analysis.verdict import (
    BY_CONSTRUCTION,
    CACHED,
    COLD,
    DEFINITIONS,
    FAIL,
    GO,
    IO,
    MISSING,
    OVERFLOW,
    PASS,
    UNDECIDED,
    Decision,
    Judgement,
    Verdict,
)
from moetap.criteria import CLOSE, RESTRICT, Criteria
from moetap.report import words
from moetap.report.sections import Heading, Note, Section, grid

STYLES = {
    PASS: "green",
    BY_CONSTRUCTION: "green",
    GO: "green",
    FAIL: "red",
    CLOSE: "red",
    UNDECIDED: "yellow",
    RESTRICT: "yellow",
    MISSING: "yellow",
}


def verdict_section(study: Study, verdict: Verdict) -> Section:
    """Each criterion on the Mac that was asked about, every Mac, and what follows."""
    criteria = verdict.criteria
    asked = verdict.asked(COLD)
    parts: list[Heading | Note | Table] = [
        Heading(
            f"Criteria at {asked.tier.ram_gib} GiB, C = {asked.slots} (its default), "
            f"B = {criteria.lanes}"
        ),
        _criteria(verdict),
        Note(
            "Judged on the figure (point) and on its 95 % interval over streams; the interval "
            "decides. Not counted: shown beside. Overflow and ledger are the same under both "
            f"definitions of I/O. Ledger at {study.options.context:,} tokens of context a lane, "
            "activations and overhead included."
        ),
        *(Note(f"{text}.") for text in _reasons(verdict)),
        Heading("Every Mac at its default C"),
        _macs(verdict),
        Note(
            "cold, cached: all criteria together, under each definition of I/O. *: the Mac that "
            "the criteria are about. "
            f"Criteria: {criteria.name}, sha256 {criteria.sha256[:16]}"
            f"{'. Fixed before looking' if criteria.shipped else ''}; the file is in the JSON and "
            "HTML reports."
        ),
    ]
    for decision in verdict.decisions:
        parts.append(Note(_decision(decision, asked.slots), main=True))
        parts += [Note(f"- {change}") for change in decision.would_change]
    title = f"Verdict: {study.model.id}, {words.count(study.pool.n_streams, 'stream')}"
    return Section("verdict", title, words.incomplete(study.pool), tuple(parts))


def name(judgement: Judgement) -> str:
    """A criterion in words."""
    if judgement.criterion == IO:
        return f"I/O saved, {judgement.definition}".replace(f"{CACHED}, ", "")
    if judgement.criterion == OVERFLOW:
        rows = judgement.rows
        return f"overflow, {rows} row{'' if rows == 1 else 's'}/lane"
    return "RAM ledger, net"


def threshold(criteria: Criteria, judgement: Judgement) -> str:
    """What is asked."""
    if judgement.criterion == IO:
        return f">= {100 * criteria.io_reduction.threshold:g} %"
    if judgement.criterion == OVERFLOW:
        return f"<= {100 * criteria.overflow.threshold:g} %"
    return f">= {criteria.ledger.threshold:g} GB"


def figure(judgement: Judgement) -> str:
    """What was found."""
    if judgement.line is not None:
        nets = {net.rule: f"{net.net_bytes / GB:+.2f}" for net in judgement.line.nets}
        if len(set(nets.values())) == 1:
            return f"{next(iter(nets.values()))} GB"
        return ", ".join(f"{value} {rule}" for rule, value in nets.items())
    if judgement.figure is None:
        return "impossible" if judgement.outcome == BY_CONSTRUCTION else "n/a"
    estimate = judgement.figure
    half = estimate.half_width
    spread = "" if half is None else f" ± {100 * half:.1f}"
    if estimate.low is not None and estimate.high is not None:
        # A saving may be negative, a loss; no share is above 100 %, and overflow not below 0 %.
        floor = 0.0 if judgement.criterion == OVERFLOW else -math.inf
        low, high = max(estimate.low, floor), min(estimate.high, 1.0)
        if (low, high) != (estimate.low, estimate.high):
            return f"{100 * estimate.value + 0.0:.1f} %, {100 * low:.1f} to {100 * high:.1f} %"
    return f"{100 * estimate.value + 0.0:.1f}{spread} %"


def _criteria(verdict: Verdict) -> Table:
    criteria = verdict.criteria
    cold, cached = (verdict.asked(d) for d in DEFINITIONS)
    counted = [cold.judgements[0], cached.judgements[0], *cold.judgements[1:]]
    table = grid(("criterion", "asked", "found", "point", "interval", "outcome"), ())
    for judgement in counted:
        table.add_row(*_row(criteria, judgement), styled(judgement.outcome))
    table.add_section()
    for judgement in cached.beside:
        table.add_row(*_row(criteria, judgement), f"({_short(judgement.outcome)})")
    return table


def _row(criteria: Criteria, judgement: Judgement) -> tuple[str, ...]:
    exact = judgement.interval in ("exact",) or judgement.outcome == BY_CONSTRUCTION
    return (
        name(judgement),
        threshold(criteria, judgement),
        figure(judgement),
        _short(judgement.point),
        "-" if exact else _short(judgement.interval),
    )


def _reasons(verdict: Verdict) -> list[str]:
    cold, cached = (verdict.asked(d) for d in DEFINITIONS)
    judged = (*cold.judgements, *cached.judgements[:1], *cached.beside)
    said = (
        f"{name(j)[0].upper()}{name(j)[1:]}: {j.why}"
        for j in judged
        if j.why and j.outcome != BY_CONSTRUCTION
    )
    return list(dict.fromkeys(said))


def _macs(verdict: Verdict) -> Table:
    table = grid(
        ("Mac", "C", "saved, cold step", "saved, cached", "overflow", "ledger", "cold", "cached"),
        (),
    )
    cached = {m.tier.ram_gib: m for m in verdict.macs if m.definition == CACHED}
    for mac in (m for m in verdict.macs if m.definition == COLD):
        other = cached[mac.tier.ram_gib]
        cells = []
        for judgement in (mac.judgements[0], other.judgements[0], *mac.judgements[1:]):
            said = _short(judgement.outcome)
            if judgement.criterion == IO and judgement.figure is not None:
                said = f"{100 * judgement.figure.value + 0.0:.1f} % {said}"
            cells.append(Text(said, style=STYLES[judgement.outcome]))
        asked = "*" if mac.tier.ram_gib == verdict.criteria.tier_gib else ""
        table.add_row(
            f"{mac.tier.ram_gib} GiB{asked}",
            str(mac.slots),
            *cells,
            styled(mac.outcome),
            styled(other.outcome),
        )
    return table


def _short(outcome: str) -> str:
    return {BY_CONSTRUCTION: "impossible", MISSING: "n/a"}.get(outcome, outcome)


def styled(outcome: str) -> Text:
    """An outcome in its colour; the word says it without."""
    return Text("n/a" if outcome == MISSING else outcome, style=STYLES[outcome])


def _decision(decision: Decision, slots: int) -> Text:
    what = "cold step" if decision.definition == COLD else f"cached at C = {slots}"
    text = Text(
        f"Verdict, I/O of a {what}: " if decision.definition == COLD else f"Verdict, I/O {what}: "
    )
    text.stylize("bold")
    text.append(decision.sentence, style=f"bold {STYLES[decision.word]}")
    return text
