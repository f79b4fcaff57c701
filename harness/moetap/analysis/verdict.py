"""The verdict: criteria that were fixed beforehand against what was measured.

Knows how a figure and its interval are judged, which Macs a failure rules out, and what follows.
Refuses to measure: figures come from the tables of a study, thresholds from a criteria file.

The question is asked of the Mac that the criteria name (16 GiB) at its default C and their B, once
under each definition of expert I/O: a cold step (`unions`) and a cache of that C (`cache_io`).
Overflow and the RAM ledger do not depend on the definition. Larger Macs are judged in the same way,
each at its own default C, since a failure may only rule out the smaller ones.

    at least t:  pass if the interval is at or above t, fail if below, undecided if it straddles t
    at most t:   the other way round
    ledger:      pass if every working-set rule leaves the net, fail if none does, else undecided

A figure without an interval is undecided, whatever the figure itself says: one sample proves
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moetap.analysis.cache_io import CacheTable
from moetap.analysis.jackknife import Estimate
from moetap.analysis.ledger import GB, Ledger, Line, Tier
from moetap.analysis.overflow import IMPOSSIBLE, MEASURED, OverflowTable
from moetap.analysis.unions import UnionTable
from moetap.criteria import CLOSE, RESTRICT, Criteria, Criterion

PASS, FAIL, UNDECIDED, MISSING = "pass", "fail", "undecided", "not available"
BY_CONSTRUCTION = "pass by construction"
GO = "go"

COLD, CACHED = "cold step", "cached"
DEFINITIONS = (COLD, CACHED)
"""Definitions of expert I/O per token."""

IO, OVERFLOW, LEDGER = "io_reduction", "overflow", "ledger"

ROUNDING = 1e-12
"""A figure that misses its threshold by no more than this does so by floating-point rounding."""


@dataclass(frozen=True)
class Judgement:
    """One criterion on one Mac.

    criterion: IO, OVERFLOW or LEDGER. definition: of expert I/O, "" where it makes no difference.
    rows: per lane (overflow), 1 or a verify width. figure: None in a ledger, whose `line` has the
    nets, and where there is none (`why`). point, interval, outcome: what the figure, its interval
    and both together say.
    """

    criterion: str
    definition: str
    tier: Tier
    slots: int
    lanes: int
    point: str
    interval: str
    outcome: str
    rows: int = 1
    figure: Estimate | None = None
    line: Line | None = None
    why: str = ""

    @property
    def passed(self) -> bool:
        """Passed, by construction or not."""
        return self.outcome in (PASS, BY_CONSTRUCTION)


@dataclass(frozen=True)
class MacVerdict:
    """The three criteria on one Mac under one definition. `beside`: what is shown but not counted:
    overflow at verify widths, and the saving in steady steps alone."""

    definition: str
    tier: Tier
    slots: int
    judgements: tuple[Judgement, ...]
    beside: tuple[Judgement, ...]

    @property
    def outcome(self) -> str:
        """PASS if all pass; else FAIL if any fails, MISSING if any is not available, UNDECIDED."""
        outcomes = [j.outcome for j in self.judgements]
        for worst in (FAIL, MISSING, UNDECIDED):
            if worst in outcomes:
                return worst
        return PASS


@dataclass(frozen=True)
class Decision:
    """What follows under one definition.

    word: GO, RESTRICT, CLOSE, UNDECIDED or MISSING. sentence: the same in words, with the reason.
    would_change: one sentence for each criterion on what would change its outcome.
    """

    definition: str
    word: str
    sentence: str
    would_change: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """macs: by definition and memory. decisions: by definition."""

    criteria: Criteria
    macs: tuple[MacVerdict, ...]
    decisions: tuple[Decision, ...]

    def asked(self, definition: str) -> MacVerdict:
        """The Mac that the criteria are about."""
        return next(
            mac
            for mac in self.macs
            if mac.definition == definition and mac.tier.ram_gib == self.criteria.tier_gib
        )


def judge(
    estimate: Estimate, threshold: float, at_least: bool
) -> tuple[str, str, str]:  # fmt: skip
    """What the figure, its interval, and both together say: (point, interval, outcome)."""
    sign = 1 if at_least else -1

    def met(value: float) -> bool:
        return sign * value >= sign * threshold - ROUNDING

    point = PASS if met(estimate.value) else FAIL
    if estimate.low is None or estimate.high is None:
        return point, MISSING, UNDECIDED
    ends = {met(estimate.low), met(estimate.high)}
    interval = UNDECIDED if len(ends) == 2 else PASS if ends.pop() else FAIL
    return point, interval, interval


def verdict(
    criteria: Criteria,
    tiers: Sequence[tuple[Tier, int]],
    unions: UnionTable,
    cache: CacheTable,
    overflow: OverflowTable,
    ledger: Ledger | None,
    no_ledger: str = "",
) -> Verdict:
    """Judge every Mac of `tiers`, (Mac, its default C) by rising memory, and decide.

    The Mac that the criteria are about must be among them. no_ledger: why there is no ledger.
    """
    macs = tuple(
        MacVerdict(
            definition=definition,
            tier=tier,
            slots=slots,
            judgements=(
                _cold(criteria, tier, slots, unions)
                if definition == COLD
                else _cached(criteria, tier, slots, cache),
                _overflow(criteria, tier, slots, overflow, 1),
                _ledger(criteria, tier, slots, ledger, no_ledger),
            ),
            beside=(
                *(_overflow(criteria, tier, slots, overflow, rows) for rows in overflow.verify),
                *(
                    (_cached(criteria, tier, slots, cache, "steady"),)
                    if definition == CACHED
                    else ()
                ),
            ),
        )
        for definition in DEFINITIONS
        for tier, slots in tiers
    )
    decisions = tuple(
        decide(criteria, definition, [mac for mac in macs if mac.definition == definition], ledger)
        for definition in DEFINITIONS
    )
    return Verdict(criteria, macs, decisions)


# -- one criterion on one Mac


def _cold(criteria: Criteria, tier: Tier, slots: int, table: UnionTable) -> Judgement:
    """1 - io_B / io_1 of a cold step, exact over all groups."""
    lines = table.select(table.strata[0], ("overall",))
    line = next((f for f in lines if f.b == criteria.lanes), None)
    if line is None or line.values is None:
        why = _too_few(table.pool.n_streams, criteria.lanes) if line is None else line.missing
        return _missing(IO, COLD, criteria, tier, slots, why)
    return _judged(IO, COLD, criteria, tier, slots, line.values.saved)


def _cached(
    criteria: Criteria, tier: Tier, slots: int, table: CacheTable, phase: str = "all"
) -> Judgement:
    """1 - misses at B lanes / misses of the same streams at B = 1, each per token, with C slots."""
    definition = CACHED if phase == "all" else f"{CACHED}, {phase}"
    try:
        line = table.find("all", criteria.lanes, slots, phase)
    except KeyError:
        why = _too_few(table.pool.n_streams, criteria.lanes)
        return _missing(IO, definition, criteria, tier, slots, why)
    if line.values is None:
        return _missing(IO, definition, criteria, tier, slots, line.missing)
    if line.values.saved is None:
        why = "nothing misses at B = 1, so there is nothing to save"
        return _missing(IO, definition, criteria, tier, slots, why)
    return _judged(IO, definition, criteria, tier, slots, line.values.saved)


def _overflow(
    criteria: Criteria, tier: Tier, slots: int, table: OverflowTable, rows: int
) -> Judgement:
    """Share of (layer, step) pairs with F_{B,rows} > C."""
    try:
        line = table.find("all", criteria.lanes, rows, slots)
    except KeyError:
        why = _too_few(table.pool.n_streams, criteria.lanes)
        return _missing(OVERFLOW, "", criteria, tier, slots, why, rows)
    if line.state == IMPOSSIBLE:
        need = f"{criteria.lanes} lanes of {rows} row{'s' if rows > 1 else ''}"
        return Judgement(
            OVERFLOW, "", tier, slots, criteria.lanes, PASS, PASS, BY_CONSTRUCTION, rows,
            why=f"{need} select no more than C = {slots} experts",
        )  # fmt: skip
    if line.state != MEASURED or line.fraction is None:
        return _missing(OVERFLOW, "", criteria, tier, slots, line.missing, rows)
    return _judged(OVERFLOW, "", criteria, tier, slots, line.fraction, rows)


def _ledger(
    criteria: Criteria, tier: Tier, slots: int, ledger: Ledger | None, no_ledger: str
) -> Judgement:
    """What the tighter budget leaves, under each working-set rule."""
    if ledger is None:
        return _missing(LEDGER, "", criteria, tier, slots, no_ledger)
    line = ledger.line(tier, slots, criteria.lanes)
    least = round(criteria.ledger.threshold * GB)
    met = {net.rule: net.net_bytes >= least for net in line.nets}
    outcome = PASS if all(met.values()) else UNDECIDED if any(met.values()) else FAIL
    why = ""
    if outcome == UNDECIDED:
        fits = ", ".join(rule for rule, ok in met.items() if ok)
        not_so = ", ".join(rule for rule, ok in met.items() if not ok)
        why = f"depends on the rule: met under the {fits} one, not under the {not_so} one"
    return Judgement(
        LEDGER, "", tier, slots, criteria.lanes, outcome, "exact", outcome, line=line, why=why
    )


def _judged(
    criterion: str, definition: str, criteria: Criteria, tier: Tier, slots: int, figure: Estimate,
    rows: int = 1,
) -> Judgement:  # fmt: skip
    rule: Criterion = getattr(criteria, criterion)
    point, interval, outcome = judge(figure, rule.threshold, criterion == IO)
    why = f"no interval: {figure.why}" if interval == MISSING else ""
    return Judgement(
        criterion, definition, tier, slots, criteria.lanes, point, interval, outcome, rows,
        figure, why=why,
    )  # fmt: skip


def _missing(
    criterion: str, definition: str, criteria: Criteria, tier: Tier, slots: int, why: str,
    rows: int = 1,
) -> Judgement:  # fmt: skip
    return Judgement(
        criterion, definition, tier, slots, criteria.lanes, MISSING, MISSING, MISSING, rows, why=why
    )


def _too_few(n_streams: int, lanes: int) -> str:
    return f"{n_streams} stream{'' if n_streams == 1 else 's'}, {lanes} lanes"


# -- what follows


def decide(
    criteria: Criteria, definition: str, macs: Sequence[MacVerdict], ledger: Ledger | None = None
) -> Decision:
    """What follows from the Macs of one definition, by rising memory.

    A criterion that says "close" closes the question if it fails on the Mac that was asked about.
    One that says "restrict" rules out that Mac and leaves the larger ones that pass.
    """
    at = next(i for i, mac in enumerate(macs) if mac.tier.ram_gib == criteria.tier_gib)
    asked, larger = macs[at], macs[at + 1 :]
    good = [mac for mac in larger if mac.outcome == PASS]
    open_ = [mac for mac in larger if mac.outcome in (UNDECIDED, MISSING)]
    failed = [j for j in asked.judgements if j.outcome == FAIL]
    unsure = [j for j in asked.judgements if j.outcome in (UNDECIDED, MISSING)]
    closing = [j for j in failed if _otherwise(criteria, j) == CLOSE]
    where = f"{asked.tier.ram_gib} GiB, C = {asked.slots}, B = {criteria.lanes}"

    if closing:
        word, sentence = (
            CLOSE,
            f"close: {_names(closing)} {_verb(closing, 'fails', 'fail')} at {where}",
        )
    elif failed:
        reason = f"{_names(failed)} {_verb(failed, 'fails', 'fail')} at {where}"
        if good:
            word, sentence = RESTRICT, f"{_restriction(failed, good[0])}: {reason}"
            before = [mac for mac in open_ if mac.tier.ram_gib < good[0].tier.ram_gib]
            if before:
                sentence += f"; {_gib(before)} undecided"
        elif open_:
            word = UNDECIDED
            sentence = (
                f"undecided: {reason}; at best {_restriction(failed, open_[0])}, where "
                f"{_names(_unsure(open_[0]))} is not settled"
            )
        else:
            word = CLOSE
            sentence = f"close: {reason}" + (f", and {_gib(larger)} fail too" if larger else "")
    elif unsure:
        gone = [j for j in unsure if j.outcome == MISSING]
        word = MISSING if gone else UNDECIDED
        what = "no verdict" if gone else "undecided"
        stakes = _stakes(criteria, unsure, good)
        names, verb = _names(gone or unsure), _verb(gone or unsure, "is", "are")
        sentence = f"{what}: {names} {verb} {word} at {where}; {stakes}"
    else:
        word, sentence = GO, f"go: all criteria pass at {where}"
        bad = [mac for mac in larger if mac.outcome != PASS]
        if bad:
            sentence += "; " + "; ".join(
                f"on {mac.tier.ram_gib} GiB {_names(_not_passed(mac))} "
                f"{'fails' if mac.outcome == FAIL else 'is ' + mac.outcome}"
                for mac in bad
            )
    wider = any(j.criterion == OVERFLOW and j.outcome != BY_CONSTRUCTION for j in asked.beside)
    changes = tuple(_would_change(criteria, j, ledger, wider) for j in asked.judgements)
    return Decision(definition, word, sentence + ".", changes)


def _otherwise(criteria: Criteria, judgement: Judgement) -> str:
    rule: Criterion = getattr(criteria, judgement.criterion)
    return rule.otherwise


def _unsure(mac: MacVerdict) -> list[Judgement]:
    return [j for j in mac.judgements if j.outcome in (UNDECIDED, MISSING)]


def _not_passed(mac: MacVerdict) -> list[Judgement]:
    return [j for j in mac.judgements if j.outcome == mac.outcome]


def _names(judgements: Sequence[Judgement]) -> str:
    names = {IO: "I/O reduction", OVERFLOW: "overflow", LEDGER: "the RAM ledger"}
    *rest, last = (names[j.criterion] for j in judgements)
    return f"{', '.join(rest)} and {last}" if rest else last


def _verb(judgements: Sequence[Judgement], one: str, several: str) -> str:
    return one if len(judgements) == 1 else several


def _gib(macs: Sequence[MacVerdict]) -> str:
    return ", ".join(f"{mac.tier.ram_gib} GiB" for mac in macs)


def _restriction(failed: Sequence[Judgement], mac: MacVerdict) -> str:
    """Such as "restrict to >= 24 GiB", or to a larger C if that is what failed."""
    if any(j.criterion == OVERFLOW for j in failed):
        return f"restrict to C >= {mac.slots} (the default from {mac.tier.ram_gib} GiB up)"
    return f"restrict to >= {mac.tier.ram_gib} GiB"


def _stakes(criteria: Criteria, unsure: Sequence[Judgement], good: Sequence[MacVerdict]) -> str:
    """What it comes to at best and at worst."""
    if any(_otherwise(criteria, j) == CLOSE for j in unsure) or not good:
        return "at best go, at worst close"
    return f"at best go, at worst {_restriction(unsure, good[0])}"


def _would_change(
    criteria: Criteria, judgement: Judgement, ledger: Ledger | None, wider: bool
) -> str:
    """What would give another outcome on the Mac that was asked about.

    wider: at some verify width overflow is possible.
    """
    rule: Criterion = getattr(criteria, judgement.criterion)
    if judgement.outcome == MISSING:
        return f"{_capital([judgement])} is not available ({judgement.why})."
    if judgement.outcome == BY_CONSTRUCTION:
        more = " More rows per lane would (verify widths)." if wider else ""
        return f"Overflow cannot fail: {judgement.why}.{more}"
    if judgement.criterion == LEDGER:
        return _ledger_change(judgement, ledger)
    assert judgement.figure is not None
    figure, name = judgement.figure, _capital([judgement])
    now, limit = f"{100 * figure.value:.1f} %", f"{100 * rule.threshold:g} %"
    if judgement.outcome == UNDECIDED:
        if figure.half_width is None:
            return f"{name} is {now} against {limit}, {judgement.why}: more streams would decide."
        return (
            f"{name} is {now} ± {100 * figure.half_width:.1f} and straddles {limit}: more streams "
            "narrow the interval."
        )
    margin = 100 * abs(figure.value - rule.threshold)
    room = "to spare" if judgement.passed else "short"
    return f"{name} is {now} against {limit}: {margin:.1f} points {room}."


def _capital(judgements: Sequence[Judgement]) -> str:
    name = _names(judgements)
    return name[0].upper() + name[1:]


def _ledger_change(judgement: Judgement, ledger: Ledger | None) -> str:
    assert judgement.line is not None and ledger is not None
    nets = "; ".join(f"{net.net_bytes / GB:+.2f} GB ({net.rule})" for net in judgement.line.nets)
    most = ledger.largest_slots(judgement.tier, judgement.lanes)
    slots = " or ".join(str(c) if c else "no C" for c in dict.fromkeys(most.values()))
    extra = ""
    if judgement.outcome == UNDECIDED:
        extra = (
            " The macOS release decides; on the Mac itself moetap uses the limit that it reports, "
            "and sudo sysctl iogpu.wired_limit_mb=N raises it."
        )
    return f"The RAM ledger leaves {nets}; the largest C that fits is {slots}.{extra}"
