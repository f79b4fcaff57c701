"""Expert I/O per token on a terminal: a cold step and a shared cache side by side.

Knows digits and what must be said beside the figures. Refuses to keep precision: that is in the
files (`moetap.report.summary_files`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from moetap.analysis.cache_io import CacheFigure, CacheTable
from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import COLD_STEPS, CONTROL
from moetap.analysis.unions import UnionTable
from moetap.report import words
from moetap.report.sections import Heading, Note, Section, grid
from moetap.report.union_table import no_bytes


def cache_section(table: CacheTable, unions: UnionTable, capacity: int) -> Section:
    """All streams for every C; the other strata and the control with `capacity` slots."""
    strata = list(dict.fromkeys(f.draw.stratum for f in table.figures))
    others = [s for s in strata if s != "all"]
    if len(others) == 2:  # a single class is all streams
        others = [CONTROL]
    parts: list[Heading | Note | Table] = [
        Heading("All streams"),
        _grid(table, unions, ["all"], table.capacities, "C"),
        Heading(f"By class, and the control, C = {capacity}"),
        _grid(table, unions, others, [capacity], "class"),
    ]
    missing = dict.fromkeys(
        f"{f.draw.stratum}, B = {f.draw.b}: not available, {f.draw.missing}."
        for f in table.figures
        if f.draw.missing
    )
    parts += [Note(text, main=True) for text in missing]
    if any(f.values and f.values.bytes_per_token is None for f in table.figures):
        why = no_bytes(table.pool.model.expert_bytes)
        parts.append(Note(f"No bytes per token (-): {why}.", main=True))
    parts += [Note(text, main=True) for text in _passes(table)]
    parts.append(Note(_caption(table)))
    title = f"Expert I/O per token of B lanes, decode: cold step and cache, {table.pool.model.id}"
    return Section("cache", title, words.incomplete(table.pool), tuple(parts))


def _grid(
    table: CacheTable,
    unions: UnionTable,
    strata: Sequence[str],
    capacities: Sequence[int],
    label: str,
) -> Table:
    unit, divisor = _unit(table, unions)
    shown = grid(
        (label, "B"),
        (
            "cold step\nloads",
            "\n% of B=1",
            f"\n{unit}",
            "cached\nmisses",
            "\n% of B=1",
            "\n±",
            f"\n{unit}",
            "hits %\nfirst",
            "\nrest",
        ),
    )
    exact = {(f.stratum.name, f.b): f for f in unions.figures if f.layers.kind == "overall"}
    for stratum in strata:
        for capacity in capacities:
            first = True
            for b in table.sizes:
                try:
                    line = table.find(stratum, b, capacity)
                except KeyError:  # the control has no B = 1
                    continue
                name = str(capacity) if label == "C" else stratum
                values = exact[stratum, b].values if (stratum, b) in exact else None
                if line.values is None:
                    cells = ["n/a"]
                else:
                    cold = values.loads if values else line.values.uncached
                    size = values.bytes_per_token if values else None
                    share = 1 - values.saved.value if values else 1 / b
                    if stratum == CONTROL:
                        size = _control_bytes(unions, b)
                    cells = [
                        f"{cold.value:.2f}",
                        f"{100 * share:.1f}",
                        _bytes(size, divisor),
                        f"{line.values.loads.value:.3f}",
                        *_relative(line.values.relative),
                        _bytes(line.values.bytes_per_token, divisor),
                        *(_hits(table, stratum, b, capacity, p) for p in ("cold", "steady")),
                    ]
                shown.add_row(name if first else "", str(b), *cells)
                first = False
            shown.add_section()
    return shown


def _control_bytes(unions: UnionTable, b: int) -> Estimate | None:
    """One stream's bytes, shared by the `b` lanes that are this stream."""
    values = unions.select(unions.strata[0], ("overall",))[0].values
    size = values.bytes_per_token if values else None
    return None if size is None else size.scaled(1 / b)


def _unit(table: CacheTable, unions: UnionTable) -> tuple[str, float]:
    sizes = [f.values.bytes_per_token for f in unions.figures if f.values is not None]
    largest = max((size.value for size in sizes if size is not None), default=0)
    return ("MB", 1e6) if largest >= 1e7 else ("kB", 1e3)


def _bytes(size: Estimate | None, divisor: float) -> str:
    return "-" if size is None else f"{size.value / divisor:,.1f}"


def _relative(relative: Estimate | None) -> tuple[str, str]:
    if relative is None:
        return "n/a", "-"
    half = relative.half_width
    return f"{100 * relative.value:.1f}", "-" if half is None else f"{100 * half:.1f}"


def _hits(table: CacheTable, stratum: str, b: int, capacity: int, phase: str) -> str:
    figure: CacheFigure = table.find(stratum, b, capacity, phase)
    if figure.values is None:
        return "n/a"
    return f"{100 * figure.values.hit_rate.value:.1f}"


def _passes(table: CacheTable) -> list[str]:
    """Where a step's set was larger than the cache."""
    found = [
        f"{1 + f.values.extra_passes:.2f} at C = {f.capacity}, B = {f.draw.b}"
        for f in table.figures
        if f.values and f.values.extra_passes and (f.draw.stratum, f.phase) == ("all", "all")
    ]
    if not found:
        return []
    return [
        f"Passes per step and layer, all streams: {'; '.join(found)}. A set larger than C runs in "
        "ceil(U / C) passes: what is resident at the start of the step hits, every other member is "
        "loaded once, and C of them stay, so experts beyond C are read again each step."
    ]


def _caption(table: CacheTable) -> str:
    left_out = int(table.left_out.sum())
    said = [
        "Experts per token and layer; bytes per token, summed over layers, kB = 10^3, MB = 10^6.",
        "Cold step: union / B, exact over all groups, nothing survives from one step to the next. "
        f"Cached: {table.policy.upper()} of C slots per layer that the B lanes share, step-atomic "
        "(a step's distinct experts are looked up as one set), empty at decode step 0, first uses "
        "are misses, no prefill; mean over "
        f"{words.count(table.groups_asked, 'sampled group')} for each B, seed {table.seed} (all "
        "where there are no more).",
        "% of B=1: against the same streams one at a time, each with all C slots. 100 % less that "
        "is what B lanes save. Both sides count only the matched decode steps (a group ends at its "
        "shortest stream).",
        f"Hits: of one look-up per distinct expert, first {COLD_STEPS} decode steps and the rest.",
        f"{CONTROL}: the B lanes are one stream, so I/O must be 1/B.",
        f"{left_out:,} (group, step, layer) cells left out, since a lane did not execute them."
        if left_out
        else "",
        f"Sampler: {words.sampler(table.pool)}.",
        words.left_out(table.pool),
    ]
    return " ".join(part for part in said if part)
