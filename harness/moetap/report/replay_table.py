"""A replay on a terminal: misses by policy and capacity, and the curves of LRU and Belady.

Knows digits and what must be said beside the figures: the rule of look-ups, the scope, what a
policy could not do in an engine. Refuses to keep precision: that is in the files
(`moetap.report.replay_files`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Table

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import COLD_STEPS, Draw
from moetap.analysis.pool import Pool
from moetap.analysis.replay import GLOBAL, RULES, SCOPES, SEQUENTIAL
from moetap.analysis.replay_study import PREFILL, Curve, Figure, Options, Study, Values
from moetap.report import words
from moetap.report.console import make_console
from moetap.report.sections import Heading, Note, Section, grid, print_section, print_warnings

DECODE = ("cold", "steady")


def print_replay(study: Study, by_layer: bool = False) -> None:
    """Print the tables of a study."""
    _print(study.pool, replay_section(study, by_layer))


def print_curve(curve: Curve, capacities: Sequence[int]) -> None:
    """Print the table of a curve at some C."""
    _print(curve.pool, curve_section(curve, capacities))


def _print(pool: Pool, section: Section) -> None:
    console = make_console()
    print_warnings(console, words.warnings(pool))
    print_section(console, section)


def replay_section(study: Study, by_layer: bool = False) -> Section:
    """One line per budget and policy; prefill in a table of its own; one line per layer on
    request."""
    parts: list[Heading | Note | Table] = [Heading("Decode"), _decode(study)]
    if study.options.prefill:
        parts += [Heading("Prefill, replayed before decode"), _prefill(study)]
    if by_layer:
        parts += [Heading("Decode, by layer"), _layers(study)]
    parts += [
        Note(f"{f.policy.name}, {f.cache.label}: not available, {f.missing}.", main=True)
        for f in study.figures
        if f.missing
    ]
    parts.append(Note(_caption(study)))
    return Section(
        "replay",
        f"Replay: {_rules(study.options)}, {study.pool.model.id}",
        words.incomplete(study.pool),
        tuple(parts),
    )


def curve_section(curve: Curve, capacities: Sequence[int]) -> Section:
    """LRU and Belady at some C, one line each."""
    options, phases = curve.options, ("all", *DECODE)
    forced = forced_passes(curve, min(capacities))
    passes = bool(forced)
    names = ["lru\nmisses %", "\nfirst", "\nrest", "belady\nmisses %", "\nfirst", "\nrest"]
    names += ["lru per\ntoken", "belady per\ntoken", "lru above\nbelady %"]
    shown = grid(
        ("slots",) if options.scope == GLOBAL else ("C",),
        [*names, *(["extra\npasses"] if passes else [])],
    )
    for capacity in capacities:
        rates = [
            curve.miss_rate(policy, capacity, DECODE if phase == "all" else (phase,))
            for policy in curve.policies
            for phase in phases
        ]
        loads = [curve.per_token(policy, capacity, DECODE) for policy in curve.policies]
        over = 100 * (loads[0] / loads[1] - 1) if loads[1] else None
        shown.add_row(
            f"{capacity:,}",
            *("n/a" if rate is None else f"{100 * rate:.2f}" for rate in rates),
            *(f"{load:.2f}" for load in loads),
            "n/a" if over is None else f"{over:.1f}",
            *([f"{curve.passes_per_step(capacity, DECODE):.2f}"] if passes else []),
        )
    parts: list[Heading | Note | Table] = [shown]
    if forced:
        parts.append(Note(forced, main=True))
    parts.append(Note(_curve_caption(curve)))
    title = f"Miss-rate curve: {_rules(options)}, {curve.pool.model.id}"
    return Section("curve", title, words.incomplete(curve.pool), tuple(parts))


def forced_passes(curve: Curve, smallest: int) -> str:
    """From which C on a decode step's set fits at once; "" if it does with `smallest` slots."""
    largest = curve.largest_set(DECODE)
    if largest <= smallest:
        return ""
    return (
        f"The largest set of a layer and step has {largest} experts. With fewer slots some steps "
        "run in several passes (extra passes: per layer and step), so a miss rate there does not "
        "stand for an engine that runs each layer in one."
    )


def _curve_caption(curve: Curve) -> str:
    options, low, high = curve.options, curve.capacities[0], curve.capacities[-1]
    n_layers = curve.pool.model.n_layers
    said = [
        f"Share of look-ups that miss, all decode steps, the first {COLD_STEPS} of each "
        f"{_unit(options)} and the rest; misses per token, summed over layers. One look-up per "
        "distinct expert of a layer and step.",
        f"Slots of one size, shared by all layers: -C N is N x {n_layers} of them. Every number "
        f"from {low:,} to {high:,} was counted in one pass; --json and --csv have them all."
        if options.scope == GLOBAL
        else f"Every C from k = {low} to E = {high} was counted in one pass; --json and --csv have "
        "them all, by layer.",
        "Belady knows the future: no policy that loads what it misses misses less.",
        _start(options, curve.chunks),
        _streams(curve.draw, options),
        f"Sampler: {words.sampler(curve.pool)}.",
        words.left_out(curve.pool),
    ]
    return " ".join(part for part in said if part)


def chosen_capacities(curve: Curve, asked: Sequence[int] | None) -> list[int]:
    """Those asked for, at most E; else k, E and the numbers 2^i and 3 x 2^i between them. Of a
    cache that all layers share: the same, times the layers."""
    model = curve.pool.model
    if asked is None:
        low, high = model.max_top_k, int(model.n_experts.max())
        between = (m << i for i in range(high.bit_length()) for m in (1, 3))
        asked = [low, high, *(c for c in between if low < c < high)]
    times = model.n_layers if curve.options.scope == GLOBAL else 1
    return sorted({min(c * times, curve.capacities[-1]) for c in asked})


def _decode(study: Study) -> Table:
    several, forced = study.options.b > 1, _forced(study)
    unit, divisor = _bytes_unit(study)
    shown = grid(
        ("budget", "policy"),
        (
            "misses\nper token",
            "\n±",
            "\nfirst",
            "\nrest",
            f"\n{unit}",
            "hits %\nall",
            "\nfirst",
            "\nrest",
            *(("% of B=1\nall", "\n±", "\nrest") if several else ()),
            *(("extra\npasses",) if forced else ()),
        ),
    )
    for label in dict.fromkeys(f.cache.label for f in study.figures):
        first = True
        for figure in (f for f in study.figures if f.cache.label == label):
            phases = [figure.phases.get(phase) for phase in ("all", *DECODE)]
            cells = ["n/a"]
            every = phases[0]
            if every is not None:
                cells = [
                    f"{every.per_token.value:.2f}",
                    _half(every.per_token, 1, 2),
                    *(_value(v.per_token if v else None, 1, 2) for v in phases[1:]),
                    _value(every.bytes_per_token, 1 / divisor, 1),
                    *(_value(v.hit_rate if v else None, 100, 1) for v in phases),
                ]
                if several:
                    cells += [
                        _value(every.relative, 100, 1),
                        _half(every.relative, 100, 1),
                        _value(phases[2].relative if phases[2] else None, 100, 1),
                    ]
                if forced:
                    cells.append(_passes(every, study.options.b))
            shown.add_row(label if first else "", figure.policy.name, *cells)
            first = False
        shown.add_section()
    return shown


def _prefill(study: Study) -> Table:
    shown = grid(("budget", "policy"), ("misses per\nprompt token", "hits %"))
    last = ""
    for figure in _by_budget(study):
        values = figure.phases.get(PREFILL)
        cells = ["n/a", "n/a"]
        if values is not None:
            cells = [f"{values.per_token.value:.2f}", f"{100 * values.hit_rate.value:.1f}"]
        label = figure.cache.label
        shown.add_row("" if label == last else label, figure.policy.name, *cells)
        last = label
    return shown


def _layers(study: Study) -> Table:
    shown = grid(("budget", "policy", "layer"), ("misses\nper token", "hits %"))
    for figure in _by_budget(study):
        every = figure.phases.get("all")
        for at, layer in enumerate(study.pool.model.layer_index.tolist()):
            if every is None or not every.tokens[at]:
                cells = ["n/a", "n/a"]
            else:
                missed = int(every.misses[at])
                cells = [
                    f"{missed / every.tokens[at]:.3f}",
                    f"{100 * (1 - missed / every.requests[at]):.1f}",
                ]
            head = (figure.cache.label, figure.policy.name) if at == 0 else ("", "")
            shown.add_row(*head, str(layer), *cells)
        shown.add_section()
    return shown


def _by_budget(study: Study) -> list[Figure]:
    labels = list(dict.fromkeys(f.cache.label for f in study.figures))
    return sorted(study.figures, key=lambda f: labels.index(f.cache.label))


def _rules(options: Options) -> str:
    return f"{RULES[options.rule]}, {SCOPES[options.scope]}, B = {options.b}"


def _unit(options: Options) -> str:
    return "stream" if options.b == 1 else "group"


def _streams(draw: Draw, options: Options) -> str:
    if options.b == 1:
        return f"{words.count(draw.n_groups, 'stream')}, one at a time."
    if draw.exhaustive:
        return f"All {words.count(draw.n_groups, 'group')} of {options.b} streams."
    sampled = words.count(draw.n_groups, "group")
    return f"{sampled} of {options.b} streams, drawn with seed {options.seed}."


def _start(options: Options, chunks: Sequence[int]) -> str:
    if not options.prefill:
        return f"Decode only: the cache is empty at decode step 0 of each {_unit(options)}."
    sizes = " or ".join(f"{chunk:,}" for chunk in dict.fromkeys(chunks))
    prompts = "prompt" if options.b == 1 else "prompts, one after the other,"
    return (
        f"The cache is empty before the {prompts} of each {_unit(options)}; prefill is one set per "
        f"layer and chunk of {sizes} prompt tokens, and in no decode figure."
    )


def _caption(study: Study) -> str:
    options = study.options
    policies = {f.policy.name: f.policy for f in study.figures}.values()
    budgets = {f.cache.n_bytes is not None for f in study.figures}
    room = [p.name for p in policies if not p.forced]
    bounds = [p.name for p in policies if p.offline and p.forced]
    future = [p.name for p in policies if p.offline and not p.forced]
    fitted = [p.name for p in policies if p.fitted]
    roomy = dict.fromkeys(f.cache.label for f in study.figures if _holds_all(study, f))
    preloaded = [p.name for p in policies if p.preloaded]
    said = [
        f"Misses per token, summed over layers; first {COLD_STEPS} decode steps and the rest; kB = "
        "10^3, MB = 10^6 bytes.",
        "One look-up per distinct expert of a layer and step; "
        + (
            "one after the other in rising order, so that an expert may push out one that the same "
            "step still needs."
            if options.rule == SEQUENTIAL
            else "a step's experts are one set, of which no member is evicted while it runs; among "
            "experts last used in the same step the lowest id leaves first."
        ),
        "Budget: "
        + " or ".join(
            [
                *(["bytes of experts" + ("" if options.scope == GLOBAL else
                   ", split evenly over the layers")] if True in budgets else []),
                *(["slots per layer" + (" x layers, shared by all layers"
                   if options.scope == GLOBAL else "")] if False in budgets else []),
            ]
        )
        + ".",
        "Extra passes: forced, per layer and step, because the set is larger than the cache."
        if _forced(study)
        else "No set is larger than its cache: no extra passes.",
        f"Room for every expert: {', '.join(roomy)}." if roomy else "",
        _start(options, study.chunks),
        f"Not possible without room besides the slots: {', '.join(room)}." if room else "",
        f"Knows the future, so a bound{_how_exact(study)} of those that load every miss into a "
        f"slot: {', '.join(bounds)}."
        if bounds
        else "",
        f"Knows the future: {', '.join(future)}." if future else "",
        f"Fitted on the streams that are not replayed with it: {', '.join(fitted)}."
        if fitted
        else "",
        f"Loads before the first step are not counted: {', '.join(preloaded)}."
        if preloaded
        else "",
        "% of B=1: misses against the same streams one at a time over the same steps and cells, "
        "each with the whole cache; 100 % less that is what B lanes save."
        if options.b > 1
        else "",
        _streams(study.draw, options),
        f"{study.left_out:,} (group, step, layer) cells left out, since a lane did not execute "
        "them."
        if study.left_out
        else "",
        f"Sampler: {words.sampler(study.pool)}.",
        words.left_out(study.pool),
    ]  # fmt: skip
    return " ".join(part for part in said if part)


def _how_exact(study: Study) -> str:
    """Belady's choice is only best among experts of one size."""
    sizes = [np.unique(f.cache.size) for f in study.figures if f.cache.scope == GLOBAL]
    return " (not an exact one: experts differ in size)" if any(len(s) > 1 for s in sizes) else ""


def _forced(study: Study) -> bool:
    """Some decode step needed an extra pass."""
    every = [f.phases.get("all") for f in study.figures]
    return any(v is not None and v.extra_passes.any() for v in every)


def _holds_all(study: Study, figure: Figure) -> bool:
    cache, n_experts = figure.cache, study.pool.model.n_experts
    if cache.scope == GLOBAL:
        return int(cache.size @ n_experts) <= cache.capacity
    return bool(np.all(n_experts <= cache.slots))


def _bytes_unit(study: Study) -> tuple[str, float]:
    every = [f.phases.get("all") for f in study.figures]
    sizes = [v.bytes_per_token.value for v in every if v is not None and v.bytes_per_token]
    return ("MB", 1e6) if max(sizes, default=0) >= 1e7 else ("kB", 1e3)


def _passes(values: Values, b: int) -> str:
    cells = int(values.tokens.sum()) // b
    return f"{int(values.extra_passes.sum()) / cells:.2f}"


def _value(estimate: Estimate | None, factor: float, digits: int) -> str:
    return "n/a" if estimate is None else f"{factor * estimate.value:,.{digits}f}"


def _half(estimate: Estimate | None, factor: float, digits: int) -> str:
    half = None if estimate is None else estimate.half_width
    return "-" if half is None else f"{factor * half:.{digits}f}"
