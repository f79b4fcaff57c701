"""Footprints and overflow on a terminal.

Knows digits, and the words for what cannot happen. Refuses to keep precision: that is in the files
(`moetap.report.summary_files`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from moetap.analysis.jackknife import Estimate
from moetap.analysis.overflow import (
    IMPOSSIBLE,
    MEASURED,
    Overflow,
    OverflowTable,
    PrefillOverflow,
)
from moetap.report import words
from moetap.report.sections import Heading, Note, Section, grid

IMPOSSIBLE_CELL = "imposs."


def overflow_section(table: OverflowTable, prefill: Sequence[PrefillOverflow]) -> Section:
    """What a step needs at once, then footprints and overflow by window, then prefill chunks; all
    streams. Other strata and the control are in the files."""
    rows = sorted({1, *table.verify})
    parts: list[Heading | Note | Table] = [
        Heading("What a step needs at once: overflow, % of (layer, step) pairs above C"),
        _at_once(table, rows),
        Note(
            "Rows: of each lane in one step; 1: plain decoding, the union; "
            f"{', '.join(map(str, table.verify))}: a speculative verify, the footprint over so "
            "many steps. Passes: mean of ceil(F / C), what a step costs if it is split. "
            f"{IMPOSSIBLE_CELL}: {IMPOSSIBLE}, min(E, B k rows) <= C."
        ),
        Heading("The layer that exceeds C most often, and its share of steps"),
        _worst(table, rows),
        Heading("Footprint of B lanes over the last W decode steps, experts"),
        _footprints(table),
        Heading("Overflow by window: % of (layer, step) pairs whose footprint exceeds C"),
        _windows(table),
        Note(
            "A footprint over W > 1 steps is a working set, not what a step needs at once: a cache "
            "smaller than it loads something twice. ±: half the 95 % jackknife interval over "
            f"streams, which ends at 0 and 100 %. {IMPOSSIBLE_CELL}: {IMPOSSIBLE}, min(E, B k W) "
            "<= C; n/a: no group lasts W steps."
        ),
    ]
    shown = [line for line in prefill if line.stratum == "all"]
    if any(line.state != "not available" for line in shown):
        parts += [Heading("Prefill chunks of one stream"), _prefill(table, shown)]
        without = max(line.n_without for line in shown)
        absent = int(shown[0].not_executed.sum())
        parts.append(
            Note(
                "Union over the rows of a chunk, per (chunk, layer); the last chunk of a prompt is "
                "shorter. Prefill is never mixed with decode."
                + (f" {words.count(without, 'stream')} without prefill rows." if without else "")
                + (
                    f" {absent:,} (chunk, layer) pairs did not execute and are left out."
                    if absent
                    else ""
                )
            )
        )
    else:
        parts.append(Note("Prefill chunks: not available, no prefill rows.", main=True))
    parts.append(Note(_caption(table)))
    title = f"Overflow of C expert slots per layer: {table.pool.model.id}"
    return Section("overflow", title, words.incomplete(table.pool), tuple(parts))


def _at_once(table: OverflowTable, rows: list[int]) -> Table:
    shown = grid(
        ("rows", "B"), [x for c in table.capacities for x in (f"C={c}\n%", "\n±", "\npasses")]
    )
    for n in rows:
        for b in table.sizes:
            lines = [table.find("all", b, n, c) for c in table.capacities]
            cells = [text for line in lines for text in (*_fraction(line), _passes(line))]
            shown.add_row(str(n) if b == table.sizes[0] else "", str(b), *cells)
        shown.add_section()
    return shown


def _worst(table: OverflowTable, rows: list[int]) -> Table:
    shown = grid(("rows", "B"), [f"C={c}" for c in table.capacities])
    for n in rows:
        for b in table.sizes:
            found = (table.find("all", b, n, c).worst_layers(1) for c in table.capacities)
            cells = [
                f"layer {table.pool.model.layer_index[w[0][0]]} ({100 * w[0][1]:.0f} %)"
                if w
                else "-"
                for w in found
            ]
            shown.add_row(str(n) if b == table.sizes[0] else "", str(b), *cells)
        shown.add_section()
    return shown


def _footprints(table: OverflowTable) -> Table:
    shown = grid(("B", "W"), [str(w) for w in table.windows])
    for b in table.sizes:
        found = [
            next(
                f for f in table.footprints if (f.draw.stratum, f.draw.b, f.window) == ("all", b, w)
            )
            for w in table.windows
        ]
        shown.add_row(str(b), "mean", *(_number(f.mean.value if f.mean else None) for f in found))
        shown.add_row(
            "", "±", *(_number(f.mean.half_width if f.mean else None, "-") for f in found)
        )
        shown.add_row("", "uniform", *(_number(f.uniform) for f in found))
        shown.add_section()
    return shown


def _windows(table: OverflowTable) -> Table:
    shown = grid(("C", "B", "W"), [str(w) for w in table.windows])
    for c in table.capacities:
        for b in table.sizes:
            cells = [_fraction(table.find("all", b, w, c)) for w in table.windows]
            first = b == table.sizes[0]
            shown.add_row(str(c) if first else "", str(b), "%", *(value for value, _ in cells))
            if any(half not in ("", "-") for _, half in cells):
                shown.add_row("", "", "±", *(half for _, half in cells))
        shown.add_section()
    return shown


def _prefill(table: OverflowTable, lines: Sequence[PrefillOverflow]) -> Table:
    shown = grid(("chunk",), ("C", "chunks", "full", "union", "±", "above C %", "±", "passes"))
    shown.add_column("worst layers")
    before = 0
    for line in lines:
        if before and line.chunk != before:
            shown.add_section()
        order = sorted(range(len(line.worst)), key=lambda i: -line.worst[i])[:2]
        worst = ", ".join(
            f"{table.pool.model.layer_index[i]} ({100 * line.worst[i]:.0f} %)"
            for i in order
            if line.worst[i] > 0
        )
        union = line.union
        shown.add_row(
            str(line.chunk) if line.chunk != before else "",
            str(line.capacity),
            str(line.n_chunks),
            str(line.n_full),
            _number(union.value if union else None),
            _number(union.half_width if union else None, "-"),
            *_state(line.state, line.fraction),
            _number(line.passes.value if line.passes else None, "1" if union else "n/a", 2),
            worst or "-",
        )
        before = line.chunk
    return shown


def _fraction(line: Overflow) -> tuple[str, str]:
    return _state(line.state, line.fraction)


def _state(state: str, fraction: Estimate | None) -> tuple[str, str]:
    """The share and half its interval; what cannot happen is said in words, never as 0 %."""
    if state == IMPOSSIBLE:
        return IMPOSSIBLE_CELL, ""
    if state != MEASURED or fraction is None:
        return "n/a", ""
    half = fraction.half_width
    return f"{100 * fraction.value:.1f}", "-" if half is None else f"{100 * half:.1f}"


def _passes(line: Overflow) -> str:
    if line.state == IMPOSSIBLE:
        return "1"
    return "n/a" if line.passes is None else f"{line.passes.value:.2f}"


def _number(value: float | None, none: str = "n/a", digits: int = 1) -> str:
    return none if value is None else f"{value:.{digits}f}"


def _caption(table: OverflowTable) -> str:
    said = [
        "Decode rows only.",
        f"Means over {words.count(table.groups_asked, 'sampled group')} for each B, seed "
        f"{table.seed} (all groups where there are no more).",
        "Uniform: independent uniform routing.",
        f"Sampler: {words.sampler(table.pool)}.",
        words.left_out(table.pool),
    ]
    return " ".join(part for part in said if part)
