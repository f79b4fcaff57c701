"""The RAM ledger on a terminal, and as JSON.

Knows units, digits and what must be said beside the figures. Refuses to compute a size: byte counts
are those of `moetap.analysis.ledger`; GB is 10^9 bytes, GiB 2^30.

JSON, one object, every size in bytes:

    metric                "ledger"
    model, source         what the sizes are of, and where they came from
    notes                 what else is to be known about them
    context               T, tokens of each lane
    kv_bits               null: KV as the activations
    resident_bytes        everything that is not a routed expert
    layers                MoE layers: [{layer_index, n_experts, top_k, expert_bytes}]
    caches                of a lane: [{entry, kind, bytes_per_token, constant_bytes, max_tokens,
                          step}]
    cache_source          how they were found
    kv_bytes_per_lane, state_bytes_per_lane, kv_bytes_per_token
    activations, overhead {bytes, source}
    tiers                 [{ram_gib, headroom_bytes, physical_bytes,
                          limits: [{rule, bytes, source}],
                          default_slots, largest_slots: {B: {rule: C}},
                          largest_lanes: {C: {rule: B}} with null where lanes cost nothing}]
                          0 where none fits
    lines                 [{ram_gib, slots, lanes, resident_bytes, arena_bytes, kv_bytes,
                          state_bytes, activation_bytes, overhead_bytes, model_bytes, total_bytes,
                          largest_term, nets: [{rule, physical_bytes, working_set_bytes, net_bytes,
                          tight}], verdict, tight}]; model_bytes is before activations and overhead
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table
from rich.text import Text

from moetap.analysis.ledger import GB, Cache, Ledger, Line, Tier
from moetap.report.console import make_console
from moetap.report.sections import Heading, Note, Section, print_section
from moetap.report.sections import grid as make_grid
from moetap.report.words import count

RULES = ("older", "newer", "device")

COLUMNS = 7
"""Figures side by side that fit 100 columns."""


def print_ledger(ledger: Ledger) -> None:
    """Print the section on a console of its own."""
    print_section(make_console(), ledger_section(ledger))


def ledger_section(ledger: Ledger, warning: str = "", defaults_only: bool = False) -> Section:
    """The terms, the budgets, the lines, the largest C and B, and a verdict by tier.

    defaults_only: of the lines, show those with the tier's own default C.
    """
    parts: list[Heading | Note | Table] = [
        Heading("What is needed, GB (10^9 bytes)"),
        _terms(ledger),
        Note(_about_sizes(ledger)),
        Heading("Budgets, GB (10^9 bytes)"),
        _budgets(ledger),
        Note(_about_budgets(ledger)),
        Heading("Net, GB: what is left of the budget, negative if it does not fit"),
        _lines(ledger, defaults_only),
        Note(
            "C: expert slots a layer (* default of the tier); B: lanes; total: what they need; "
            f"physical, {', '.join(_rules(ledger))}: net of physical memory and of the working set "
            "by rule; tight: the budget with the smaller net, which decides."
        ),
    ]
    for i, table in enumerate(_largest(ledger)):
        more = ", continued" if i else ""
        parts += [Heading(f"Largest C for B lanes, largest B for C slots{more}"), table]
    parts.append(Note(_about_largest(ledger)))
    for tier in ledger.tiers:
        default = ledger.default_slots(tier)
        # The lines of the table: without the default among them, what was asked for.
        for slots in (default,) if default in ledger.slots else ledger.slots:
            parts.append(Note(_verdict(ledger, tier, slots), main=True))
    title = f"RAM ledger: {ledger.sizes.model}, {count(ledger.context, 'token')} of context a lane"
    return Section("ledger", title, warning, tuple(parts))


def ledger_json(ledger: Ledger) -> str:
    """The whole ledger as JSON text."""
    return json.dumps(ledger_dict(ledger), indent=1, allow_nan=False) + "\n"


def ledger_dict(ledger: Ledger) -> dict[str, Any]:
    """The whole ledger, ready for `json.dumps`."""
    sizes = ledger.sizes
    return {
        "metric": "ledger",
        "model": sizes.model,
        "source": sizes.source,
        "notes": list(sizes.notes),
        "context": ledger.context,
        "kv_bits": sizes.kv_bits,
        "resident_bytes": sizes.resident_bytes,
        "layers": [asdict(layer) for layer in sizes.layers],
        "caches": [asdict(cache) for cache in sizes.caches],
        "cache_source": sizes.cache_source,
        "kv_bytes_per_lane": sizes.kv_bytes(ledger.context),
        "state_bytes_per_lane": sizes.state_bytes,
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "activations": {"bytes": ledger.activations.n_bytes, "source": ledger.activations.source},
        "overhead": {"bytes": ledger.overhead.n_bytes, "source": ledger.overhead.source},
        "tiers": [_tier_json(ledger, tier) for tier in ledger.tiers],
        "lines": [_line_json(line) for line in ledger.lines],
    }


def _tier_json(ledger: Ledger, tier: Tier) -> dict[str, Any]:
    return {
        "ram_gib": tier.ram_gib,
        "headroom_bytes": tier.headroom_bytes,
        "physical_bytes": tier.physical_bytes,
        "limits": [
            {"rule": lim.rule, "bytes": lim.n_bytes, "source": lim.source} for lim in tier.limits
        ],
        "default_slots": ledger.default_slots(tier),
        "largest_slots": {str(b): ledger.largest_slots(tier, b) for b in ledger.lanes},
        "largest_lanes": {str(c): ledger.largest_lanes(tier, c) for c in ledger.slots},
    }


def _line_json(line: Line) -> dict[str, Any]:
    terms = line.terms
    return {
        "ram_gib": line.tier.ram_gib,
        **asdict(terms),
        "model_bytes": terms.model_bytes,
        "total_bytes": terms.total_bytes,
        "largest_term": terms.largest[0],
        "nets": [
            asdict(net) | {"net_bytes": net.net_bytes, "tight": net.tight} for net in line.nets
        ],
        "verdict": line.verdict,
        "tight": line.tight,
    }


# -- tables


def _terms(ledger: Ledger) -> Table:
    sizes = ledger.sizes
    grid = make_grid(("term",), ("bytes", "GB"))
    grid.add_column("", no_wrap=False)

    def add(term: str, n: int, words: str = "") -> None:
        grid.add_row(term, f"{n:,}", _gb(n), words)

    add("resident weights", sizes.resident_bytes, "everything that is not a routed expert")
    n_layers = count(len(sizes.layers), "MoE layer")
    per_expert = sorted({layer.expert_bytes for layer in sizes.layers})
    span = " to ".join(f"{n:,}" for n in dict.fromkeys((per_expert[0], per_expert[-1])))
    add(
        "one expert slot in each layer", sizes.arena_bytes(1), f"{n_layers}, {span} bytes an expert"
    )
    for slots in ledger.slots:
        words = f"of {sizes.n_experts} experts, {sizes.top_k} selected"
        add(f"expert slots, C = {slots}", sizes.arena_bytes(slots), words)
    add("KV of a lane", sizes.kv_bytes(ledger.context), _kv_words(ledger))
    add("constant state of a lane", sizes.state_bytes, _kinds(sizes.caches, constant=True))
    add("activation peak", ledger.activations.n_bytes, ledger.activations.source)
    add("runtime overhead", ledger.overhead.n_bytes, ledger.overhead.source)
    return grid


def _kv_words(ledger: Ledger) -> str:
    sizes = ledger.sizes
    if not sizes.kv_bytes_per_token:
        return "no cache grows with the context"
    bits = "" if sizes.kv_bits is None else f", {sizes.kv_bits}-bit"
    words = f"{sizes.kv_bytes_per_token:,} a token{bits}: {_kinds(sizes.caches, constant=False)}"
    windows = sorted({c.max_tokens for c in sizes.caches if c.max_tokens is not None})
    if windows:
        words += f"; windows of {', '.join(f'{w:,}' for w in windows)} tokens"
    return words


def _kinds(caches: tuple[Cache, ...], constant: bool) -> str:
    """Such as "10 KVCache"."""
    kinds = [c.kind for c in caches if (c.constant_bytes if constant else c.bytes_per_token)]
    return ", ".join(f"{len(list(same))} {kind}" for kind, same in groupby(sorted(kinds)))


def _budgets(ledger: Ledger) -> Table:
    rules = _rules(ledger)
    grid = make_grid(
        ("Mac",), ("memory", "headroom", "physical", *(f"working set, {rule}" for rule in rules))
    )
    for tier in ledger.tiers:
        limits = {limit.rule: limit for limit in tier.limits}
        grid.add_row(
            f"{tier.ram_gib} GiB",
            _gb(tier.physical_bytes + tier.headroom_bytes),
            _gb(tier.headroom_bytes),
            _gb(tier.physical_bytes),
            *(_limit(limits[r].n_bytes, limits[r].source) if r in limits else "-" for r in rules),
        )
    return grid


def _limit(n_bytes: int, source: str) -> str:
    return _gb(n_bytes) + (" ~" if source.startswith("no log") else "")


def _rules(ledger: Ledger) -> list[str]:
    found = {limit.rule for tier in ledger.tiers for limit in tier.limits}
    return [rule for rule in RULES if rule in found]


def _lines(ledger: Ledger, defaults_only: bool) -> Table:
    rules = _rules(ledger)
    grid = make_grid(("Mac",), ("C", "B", "total", "physical", *rules))
    for name in ("tight", "verdict"):
        grid.add_column(name, no_wrap=True)
    for tier, lines in groupby(ledger.lines, key=lambda line: line.tier):
        label = f"{tier.ram_gib} GiB"
        for line in lines:
            nets = {net.rule: net for net in line.nets}
            default = line.terms.slots == ledger.default_slots(tier)
            if defaults_only and not default:
                continue
            grid.add_row(
                label,
                f"{line.terms.slots}{'*' if default else ' '}",
                str(line.terms.lanes),
                _gb(line.terms.total_bytes),
                _signed(line.nets[0].physical_bytes),
                *(_signed(nets[r].working_set_bytes) if r in nets else "-" for r in rules),
                line.tight if ":" not in line.tight else "by rule",
                line.verdict,
            )
            label = ""
        grid.add_section()
    return grid


def _largest(ledger: Ledger) -> list[Table]:
    """The largest C and B, in as many tables as the width asks for."""
    columns: list[tuple[str, dict[Tier, dict[str, int] | None]]] = [
        (f"C, B = {b}", {t: ledger.largest_slots(t, b) for t in ledger.tiers}) for b in ledger.lanes
    ]
    columns += [
        (f"B, C = {c}", {t: ledger.largest_lanes(t, c) for t in ledger.tiers}) for c in ledger.slots
    ]
    grids = []
    for at in range(0, len(columns), COLUMNS):
        part = columns[at : at + COLUMNS]
        grid = make_grid(("Mac", "rule"), tuple(head for head, _ in part))
        for tier in ledger.tiers:
            label = f"{tier.ram_gib} GiB"
            for limit in tier.limits:
                found = (values[tier] for _, values in part)
                cells = ("any" if f is None else _most(f[limit.rule]) for f in found)
                grid.add_row(label, limit.rule, *cells)
                label = ""
            grid.add_section()
        grids.append(grid)
    return grids


def _most(n: int) -> str:
    return f"{n:,}" if n else "none"


# -- words


def _about_sizes(ledger: Ledger) -> str:
    sizes = ledger.sizes
    rounded = any(c.bytes_per_token and c.max_tokens is None for c in sizes.caches)
    steps = sorted({c.step for c in sizes.caches if c.bytes_per_token and c.step > 1})
    said = [
        f"Weights: {sizes.source}.",
        f"Caches: {sizes.cache_source}.",
        f"T is rounded up to steps of {steps[-1]} tokens, as the caches grow."
        if rounded and steps
        else "",
        "A sliding window counts with the most that it allocates at T tokens; the prefill chunk "
        "that it holds besides while a prompt is fed is part of the activation peak."
        if any(c.max_tokens is not None for c in sizes.caches)
        else "",
        "KV is quantised from the first token on." if sizes.kv_bits is not None else "",
        *(f"{note}." for note in sizes.notes),
    ]
    return " ".join(part for part in said if part)


def _about_budgets(ledger: Ledger) -> str:
    said = [
        "Physical: memory less headroom for the system and other programs (2.5 GB and 10 % unless "
        "--headroom says otherwise). Working set: what the "
        "GPU may keep wired (recommendedMaxWorkingSetSize); older and newer are the shares that "
        "macOS releases give; sudo sysctl iogpu.wired_limit_mb=N raises it until reboot. mlx-lm "
        "warns above 0.9 of it."
    ]
    for tier in ledger.tiers:
        guessed = [lim for lim in tier.limits if lim.source.startswith("no log")]
        said += [f"~ {tier.ram_gib} GiB, {lim.rule}: {lim.source}." for lim in guessed]
        said += [
            f"{tier.ram_gib} GiB: {lim.source}." for lim in tier.limits if lim.rule == "device"
        ]
    return " ".join(said)


def _about_largest(ledger: Ledger) -> str:
    sizes = ledger.sizes
    return (
        f"C at most {sizes.n_experts}, all experts; none: not even the {sizes.top_k} experts of "
        "one token fit (C), or not one lane (B)."
    )


def _verdict(ledger: Ledger, tier: Tier, slots: int) -> Text:
    """One sentence or two on one C and the most lanes."""
    line = ledger.line(tier, slots, max(ledger.lanes))
    terms = line.terms
    style = {"fits": "green", "does not fit": "red"}.get(line.verdict, "yellow")
    text = Text()
    default = " (default)" if slots == ledger.default_slots(tier) else ""
    where = f"{tier.ram_gib} GiB, C = {terms.slots}{default}, B = {terms.lanes}: "
    text.append(where, style="bold")
    text.append(line.verdict, style=f"bold {style}")
    text.append(f": {_net_words(line)}. ")
    if line.verdict == "depends on the rule":
        before = terms.total_bytes - terms.model_bytes
        parts = [f"{_size(net.net_bytes + before)} ({net.rule})" for net in line.nets]
        text.append(
            f"Before activations and overhead the nets are {' and '.join(parts)}: the macOS "
            "release decides. "
        )
    name, size = terms.largest
    text.append(f"Largest term: {name}, {size / terms.total_bytes:.0%}.")
    return text


def _net_words(line: Line) -> str:
    """What is left or short, by rule unless the rule makes no difference."""
    found = []
    for net in line.nets:
        size = _size(abs(net.net_bytes)) + (" left" if net.net_bytes >= 0 else " short")
        where = "physical memory" if net.tight == "physical" else f"working set, {net.rule} rule"
        found.append(f"{size} ({where})")
    return "; ".join(dict.fromkeys(found))


def _gb(n: int) -> str:
    return f"{n / GB:.3f}"


def _signed(n: int) -> str:
    return f"{n / GB:+.3f}"


def _size(n: int) -> str:
    return f"{n / 1e6:,.1f} MB" if abs(n) < GB else f"{n / GB:,.2f} GB"
