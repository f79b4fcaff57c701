"""The locality tables on a terminal or in a pipe.

Knows which of the figures an engine author looks at first and what must be said beside them.
Refuses to keep the rest and the precision: they are in the files (`moetap.report.locality_files`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.locality import Locality
from moetap.analysis.locality.recency import histogram_quantile
from moetap.report import words
from moetap.report.console import make_console
from moetap.report.sections import Heading, Note, Section, print_section
from moetap.report.sections import grid as make_grid
from moetap.report.union_table import shown_layers

LAGS = (1, 2, 4, 8, 16, 32, 64)
QUANTILES = (0.5, 0.75, 0.9, 0.95)


def print_locality(found: Locality, by_layer: bool = False) -> None:
    """Print the section on a console of its own."""
    print_section(make_console(), locality_section(found, by_layer))


def locality_section(found: Locality, by_layer: bool = False) -> Section:
    """All locality tables: all layers, then depth groups (each layer with `by_layer`)."""
    parts: list[Heading | Note | Table] = []

    def show(table: Table, title: str) -> None:
        parts.extend((Heading(title), table))

    def say(*sentences: str) -> None:
        parts.append(Note(" ".join(s for s in sentences if s)))

    shown = [i for i, x in enumerate(found.layers) if x.kind in shown_layers(by_layer)]
    show(_lags(found, shown), "Experts shared with the step `lag` steps before, % of k")
    say(
        "Own shuffled: each stream's steps in random order (the stream's own popularity is left); "
        "all shuffled: the steps of all streams together (the layer's popularity is left); "
        "uniform: k/E. Overlap above own shuffled is locality in time.",
    )
    show(_reuse(found, shown), "Between two uses of an expert by a stream")
    show(_lru(found, shown), "Hit rate of LRU with C slots per layer, %")
    say(
        "Other experts: distinct ones used at the steps between; first uses apart. LRU: per layer, "
        "empty at the start of each stream, step-atomic (a step's set is looked up as one), first "
        f"uses are misses; it follows from the recency stack. Cold: the first {COLD_STEPS} decode "
        "steps; steady: the others. Uniform: C/E, a full cache.",
        *(
            f"C = {h.capacity} not available: {h.missing}."
            for h in found.reuse[0].hits
            if h.missing
        ),
        _left_out("C", found, found.capacities),
    )
    show(_hottest(found, shown), "Selections that go to the n hottest experts, %")
    say(
        f"Chosen on half of the streams (split by stream, seed {found.seed}) and counted there "
        "(fitted) or on the other half (tested), both ways; the gap is over-fit. A > B: chosen on "
        "class A, tested on class B (within a class on the other half of it), all layers.",
        *(f"Not available: {x.missing}." for x in found.hottest[:1] if x.missing),
        _left_out("n", found, found.hot_sizes),
    )
    show(_usage(found, shown), "Spread of the selections, mean over layers")
    say(
        "Effective: 2^entropy equally used experts. Corrected: Miller-Madow; the plug-in entropy "
        "is too low on average, and part of that stays, since a stream's selections are not "
        "independent. Gini: 0 if all are used alike.",
    )
    show(_predictions(found), "Experts of a cell among the first k or 2k guesses, %")
    say(
        _lift_words(found),
        "From the layer or step before: the experts with the largest sum of P(expert | e) over the "
        "e selected there. These and popularity are fitted on half of the streams and tested on "
        "the other, both ways. Used last: the stream's k or 2k latest experts of the layer.",
        *_prediction_notes(found),
    )
    say(_caption(found))
    who = words.count(found.pool.n_streams, "stream")
    title = f"Locality of single streams (B = 1), decode: {who}, {found.pool.model.id}"
    return Section("locality", title, words.incomplete(found.pool), tuple(parts))


def _lags(found: Locality, shown: list[int]) -> Table:
    grid = make_grid(("layers", "lag, steps"), [str(lag) for lag in LAGS])
    for i in shown:
        line = found.lags[i]
        at = [lag - 1 for lag in LAGS]
        overlap = [line.overlap[j] for j in at]
        grid.add_row(line.layers.label, "overlap", *(_percent(x) for x in overlap))
        if line.layers.kind == "overall":
            grid.add_row("", "  ±", *(_half(x) for x in overlap))
            for name, values in (
                ("own shuffled", line.own),
                ("all shuffled", line.popular),
                ("uniform", line.uniform),
            ):
                grid.add_row("", name, *(_percent(values[j]) for j in at))
            grid.add_section()
    return grid


def _reuse(found: Locality, shown: list[int]) -> Table:
    quantiles = [f"{q * 100:.0f} %" for q in QUANTILES]
    names = [f"others\n{q}" for q in quantiles] + [f"steps\n{q}" for q in quantiles]
    grid = make_grid(("layers",), ["selections", "first\nuses %", *names])
    for i in shown:
        line = found.reuse[i]
        first = line.first_uses / line.lookups if line.lookups else None
        values = [histogram_quantile(h, q) for h in (line.distance, line.time) for q in QUANTILES]
        grid.add_row(
            line.layers.label,
            f"{line.lookups:,}",
            "n/a" if first is None else f"{100 * first:.2f}",
            *("-" if v is None else str(v) for v in values),
        )
    return grid


def _lru(found: Locality, shown: list[int]) -> Table:
    grid = make_grid(("layers",), ["C", "cold", "±", "steady", "±", "all steps", "±", "uniform"])
    for i in shown:
        line = found.reuse[i]
        for at, hits in enumerate(line.hits[: _n_telling(found, found.capacities)]):
            rates = (hits.cold, hits.steady, hits.every)
            grid.add_row(
                "" if at else line.layers.label,
                str(hits.capacity),
                *(text for x in rates for text in (_percent(x), _half(x))),
                _percent(hits.uniform),
            )
        grid.add_section()
    return grid


def _hottest(found: Locality, shown: list[int]) -> Table:
    sizes = found.hot_sizes[: _n_telling(found, found.hot_sizes)]
    grid = make_grid(("layers", "n experts"), [str(n) for n in sizes])
    for i in shown:
        layers = found.layers[i]
        lines = [x for x in found.hottest if x.layers is layers and x.n in sizes]
        tested = [x.tested for x in lines]
        if layers.kind != "overall":
            grid.add_row(layers.label, "tested", *(_percent(x) for x in tested))
            continue
        grid.add_row(layers.label, "fitted", *(_percent(x.fitted) for x in lines))
        grid.add_row("", "tested", *(_percent(x) for x in tested))
        grid.add_row("", "  ±", *(_half(x) for x in tested))
        grid.add_row("", "uniform", *(_percent(x.uniform) for x in lines))
        for pair in dict.fromkeys((x.fitted_on, x.tested_on) for x in found.transfers):
            shares = [x.share for x in found.transfers if (x.fitted_on, x.tested_on) == pair]
            grid.add_row("", " > ".join(pair), *(_percent(x) for x in shares[: len(sizes)]))
        grid.add_section()
    return grid


def _usage(found: Locality, shown: list[int]) -> Table:
    names = ["entropy\nbits", "corrected\nbits", "log2 E", "effective\nexperts", "E"]
    grid = make_grid(("layers",), [*names, "never used\nper layer", "hottest\n%", "Gini"])
    usage = found.usage
    for i in shown:
        span = found.layers[i].span
        ran = ~np.isnan(usage.entropy[span])
        if not ran.any():
            grid.add_row(found.layers[i].label, "n/a")
            continue
        figures = (
            (usage.entropy, ".3f"),
            (usage.corrected, ".3f"),
            (np.log2(usage.n_experts), ".3f"),
            (usage.effective, ".1f"),
            (usage.n_experts, ".4g"),
            (usage.never, ".1f"),
            (100 * usage.max_share, ".2f"),
            (usage.gini, ".3f"),
        )
        means = (format(float(np.mean(x[span][ran])), digits) for x, digits in figures)
        grid.add_row(found.layers[i].label, *means)
    return grid


def _n_telling(found: Locality, sizes: Sequence[int]) -> int:
    """How many of the rising sizes to print: from the first that takes in all experts on, all say
    the same."""
    most = int(found.pool.model.n_experts.max())
    return min(len(sizes), sum(n < most for n in sizes) + 1)


def _left_out(name: str, found: Locality, sizes: Sequence[int]) -> str:
    rest = sizes[_n_telling(found, sizes) :]
    if not rest:
        return ""
    same = sizes[-len(rest) - 1]
    return f"{name} = {', '.join(map(str, rest))}: as {name} = {same}, which holds every expert."


def _predictions(found: Locality) -> Table:
    grid = make_grid(
        ("guessed", "from"),
        ["cells", "k\nguesses", "±", "uniform", "2k\nguesses", "±", "uniform"],
    )
    known = {
        ("next layer", "popularity"): "popularity",
        ("next layer", "co-selection"): "layer before",
        ("next step", "popularity"): "popularity",
        ("next step", "co-selection"): "step before",
        ("next step", "repeat"): "used last",
    }
    target = ""
    for x in (x for x in found.predictions if x.layers.kind == "overall"):
        if target and x.target != target:
            grid.add_section()
        grid.add_row(
            x.target if x.target != target else "",
            known[x.target, x.method],
            f"{x.n_cells:,}",
            _percent(x.top_k),
            _half(x.top_k),
            _percent(x.uniform_k),
            _percent(x.top_2k),
            _half(x.top_2k),
            _percent(x.uniform_2k),
        )
        target = x.target
    return grid


def _lift_words(found: Locality) -> str:
    lifts = found.lifts
    tested = lifts.tested[~np.isnan(lifts.tested)]
    plug_in = lifts.plug_in[~np.isnan(lifts.plug_in)]
    if not len(plug_in):
        return "Lift from layer to layer: not available."
    said = f"Lift from layer to layer, mean of {words.count(len(plug_in), 'pair')}: "
    if not len(tested):
        return said + f"{plug_in.mean():.2f} (fitted and read on the same streams: biased upwards)."
    best = int(np.nanargmax(lifts.tested))
    return said + (
        f"{tested.mean():.2f} on the other half of the streams (1 = the layers know nothing of "
        f"each other; {plug_in.mean():.2f} on the same streams), highest "
        f"{lifts.tested[best]:.2f} from layer {lifts.source[best]} to {lifts.target[best]}."
    )


def _prediction_notes(found: Locality) -> list[str]:
    return list(
        dict.fromkeys(
            f"{x.target[0].upper()}{x.target[1:]} from {x.method} not available: {x.missing}."
            for x in found.predictions
            if x.layers.kind == "overall" and x.missing
        )
    )


def _caption(found: Locality) -> str:
    pool = found.pool
    missing = int(found.not_executed.sum())
    cells = found.n_cells * pool.model.n_layers
    classes = {cls: pool.classes.count(cls) for cls in sorted(set(pool.classes))}
    said = [
        "Decode rows only, each stream by itself.",
        f"{words.count(pool.n_streams, 'stream')}"
        + (f" ({', '.join(f'{n:,} {c}' for c, n in classes.items())})" if any(classes) else "")
        + f", {words.count(found.n_cells, 'decode step')}.",
        "±: half the 95 % delete-one jackknife interval over streams (Student's t), for hot "
        "experts and tables as fitted."
        if pool.n_streams > 1
        else "No interval: one stream.",
        f"Sampler: {words.sampler(pool)}.",
        words.left_out(pool),
        f"{missing:,} of {cells:,} cells were not executed and are left out." if missing else "",
        f"{words.count(pool.n_empty, 'stream')} without decode rows left out."
        if pool.n_empty
        else "",
    ]
    return " ".join(part for part in said if part)


def _percent(value: Estimate | float | None) -> str:
    """A share as a percentage, "n/a" where there is none."""
    number = value.value if isinstance(value, Estimate) else value
    return "n/a" if number is None or np.isnan(number) else f"{100 * number:.1f}"


def _half(estimate: Estimate | None) -> str:
    half = None if estimate is None else estimate.half_width
    return "-" if half is None else f"{100 * half:.1f}"
