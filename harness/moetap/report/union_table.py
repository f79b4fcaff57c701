"""The union table on a terminal or in a pipe.

Knows how many digits a figure deserves and what must be said beside it. Refuses to keep precision:
that is in the files (`moetap.report.union_files`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.overflow import UnionCurve
from moetap.analysis.unions import Figure, UnionTable
from moetap.report import words
from moetap.report.console import make_console
from moetap.report.sections import Heading, Note, Section, grid, print_section

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


def print_union_table(table: UnionTable, by_layer: bool = False) -> None:
    """Print the section on a console of its own."""
    print_section(make_console(), union_section(table, by_layer=by_layer))


def union_section(
    table: UnionTable, curves: Sequence[UnionCurve] = (), by_layer: bool = False
) -> Section:
    """All streams by depth group (by layer with `by_layer`), then each class over all layers, then
    the curves over decode steps.

    The layers of a class are in the files.
    """
    everything = table.select(table.strata[0], shown_layers(by_layer))
    classes = [f for s in table.strata[1:] for f in table.select(s, ("overall",))]
    lines = [("All streams, by layer", "layers", [(f.layers.label, f) for f in everything])]
    if len(table.strata) > 2:  # with a single class its figures are those of all streams
        lines.append(("All layers, by class", "class", [(f.stratum.name, f) for f in classes]))
    parts: list[Heading | Note | Table] = []
    for about, label, figures in lines:
        parts += [Heading(about), _grid(label, figures)]
        plain = [f for _, f in figures]
        parts += [Note(note, main=True) for note in (*_notes(plain), *_no_bytes(table, plain))]
    parts.append(Note(_caption(table)))
    shown = [curve for curve in curves if curve.stratum == "all"]
    if shown:
        parts += [Heading("Mean union by decode step, all streams and layers"), _curves(shown)]
        parts.append(
            Note(
                f"Exact over all groups. First {COLD_STEPS} and rest: means over (group, step, "
                "layer); a step has only the groups whose streams all last to it."
            )
        )
    title = f"Union and expert I/O of B lanes, decode: {table.pool.model.id}"
    return Section("union", title, words.incomplete(table.pool), tuple(parts))


def _curves(curves: Sequence[UnionCurve]) -> Table:
    longest = max(int(curve.steps[-1]) for curve in curves)
    steps = [0] + [2**i for i in range(10) if 2**i <= longest]
    table = grid(("B",), (f"first {COLD_STEPS}", "rest", *(f"d = {d}" for d in steps)))
    for curve in curves:
        at = dict(zip(curve.steps.tolist(), curve.mean.tolist(), strict=True))
        values = [curve.cold, curve.steady, *(at.get(d) for d in steps)]
        table.add_row(str(curve.b), *("n/a" if v is None else f"{v:.2f}" for v in values))
    return table


def shown_layers(by_layer: bool) -> tuple[str, ...]:
    """Kinds of layers that are printed."""
    return ("overall", "layer") if by_layer else ("overall", "group")


def _grid(label: str, lines: list[tuple[str, Figure]]) -> Table:
    unit, divisor = _byte_unit([figure for _, figure in lines])
    quantiles = ("5 %", "25", "50", "75", "95", "max")
    cost = ("loads/\ntoken", "saved\n%", "±", f"{unit}/\ntoken")
    table = grid((label,), ("B", "union", "±", *quantiles, "uniform", "k", *cost))
    before = ""
    for name, figure in lines:
        if before and name != before:
            table.add_section()
        cells = _cells(figure, divisor)
        table.add_row(name if name != before else "", str(figure.b), *cells)
        before = name
    return table


def _byte_unit(figures: list[Figure]) -> tuple[str, float]:
    """One unit for a column of bytes per token: kB for small models, MB for real ones."""
    sizes = [f.values.bytes_per_token for f in figures if f.values is not None]
    largest = max((size.value for size in sizes if size is not None), default=0)
    return ("MB", 1e6) if largest >= 1e7 else ("kB", 1e3)


def _cells(figure: Figure, divisor: float) -> list[str]:
    values = figure.values
    if values is None:
        return ["n/a"]
    spread = values.distribution
    size = values.bytes_per_token
    return [
        *_with_interval(values.union, 2),
        *(str(spread.quantile(q)) if spread.n_triples else "-" for q in QUANTILES),
        f"{values.uniform:.2f}",
        f"{values.overlap:.4g}",
        f"{values.loads.value:.2f}",
        *_with_interval(values.saved.scaled(100), 1),
        "-" if size is None else f"{size.value / divisor:,.1f}",
    ]


def _with_interval(estimate: Estimate, digits: int) -> tuple[str, str]:
    """The figure and half its interval, "-" where there is none."""
    half = estimate.half_width
    # Adding 0.0 turns -0.0, which would read as a loss, into 0.0.
    return (
        f"{round(estimate.value, digits) + 0.0:.{digits}f}",
        "-" if half is None else f"{half:.{digits}f}",
    )


def _notes(figures: list[Figure]) -> list[str]:
    """Why a line is not available or has no interval, each said once."""
    notes = []
    for figure in figures:
        who = f"{figure.stratum.name}, B = {figure.b}"
        if figure.values is None:
            if figure.layers.kind != "overall" and not figure.stratum.why_none(figure.b):
                # Other layers may have run.
                plural = "" if figure.layers.stop - figure.layers.start == 1 else "s"
                who = f"{figure.stratum.name}, layer{plural} {figure.layers.label}, B = {figure.b}"
            notes.append(f"{who}: not available, {figure.missing}.")
        elif figure.values.union.why:
            notes.append(f"{who}: no interval, {figure.values.union.why}.")
    return list(dict.fromkeys(notes))


def no_bytes(expert_bytes: NDArray[np.int64]) -> str:
    """Why there are no bytes per token for layers with experts of these sizes."""
    if np.any(expert_bytes <= 0):
        return "the size of an expert is not recorded"
    return "one of the layers was never executed"


def _no_bytes(table: UnionTable, figures: list[Figure]) -> list[str]:
    """What "-" for bytes per token stands for."""
    without = [f for f in figures if f.values is not None and f.values.bytes_per_token is None]
    found: dict[str, list[str]] = {}
    for f in without:
        why = no_bytes(table.pool.model.expert_bytes[f.layers.span])
        name = f.stratum.name if f.layers.kind == "overall" else f"layers {f.layers.label}"
        found.setdefault(why, []).append(f"{name}, B = {f.b}")
    return [f"No bytes per token ({'; '.join(who)}): {why}." for why, who in found.items()]


def _caption(table: UnionTable) -> str:
    figures = table.select(table.strata[0], ("overall",))
    shown = [f.values for f in figures if f.values is not None]
    groups = ", ".join(f"{v.n_groups:,} x {v.n_steps:,} (B = {v.b})" for v in shown)
    missing = int(table.not_executed.sum())
    cells = table.n_cells * table.pool.model.n_layers
    said = [
        "Decode rows only, at matched decode steps (a group ends at its shortest stream).",
        f"{words.count(table.pool.n_streams, 'stream')}; groups x steps: {groups}.",
        "Union: mean over all groups, steps and layers; ±: half the 95 % delete-one jackknife "
        "interval over streams (Student's t).",
        f"5 % to max: over {words.count(table.groups_asked, 'sampled group')} for each B, seed "
        f"{table.seed} (all groups where there are no more).",
        "Uniform: independent uniform routing; k: full overlap.",
        "I/O of a cold step (nothing survives from one step to the next): loads/token = union / B, "
        "per layer; saved: against B = 1; bytes/token: of expert weights, summed over the line's "
        "layers, kB = 10^3, MB = 10^6.",
        "mixed: groups of more than one class." if len(table.strata) > 2 else "",
        f"Sampler: {words.sampler(table.pool)}.",
        words.left_out(table.pool),
        f"{missing:,} of {cells:,} cells were not executed and are left out." if missing else "",
        f"{words.count(table.pool.n_empty, 'stream')} without decode rows left out."
        if table.pool.n_empty
        else "",
    ]
    return " ".join(part for part in said if part)
