"""Everything that is worked out about a pool of streams, in one object.

Knows which parts there are, in which order, and with which settings each is asked. Refuses to know
a formula (those stand with each part) and how results are shown: the terminal, JSON, CSV, plots and
HTML all render the same Study, so that no figure is computed twice or can differ between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moetap.analysis import cache_io, overflow
from moetap.analysis.cache_io import CacheTable, cache_table
from moetap.analysis.ledger import Ledger, Tier, default_slots, ledger, trace_sizes
from moetap.analysis.locality import Locality, locality
from moetap.analysis.measured import Comparison, compare, has_io
from moetap.analysis.overflow import (
    OverflowTable,
    PrefillOverflow,
    UnionCurve,
    overflow_table,
    prefill_overflow,
    union_curves,
)
from moetap.analysis.pool import Pool, pool
from moetap.analysis.timing import TimeBound, time_bound
from moetap.analysis.unions import DEFAULT_GROUPS, DEFAULT_SIZES, UnionTable, union_table
from moetap.analysis.verdict import Verdict, verdict
from moetap.criteria import Criteria
from moetap.errors import MoetapError, UsageError
from moetap.trace import ModelInfo, Trace

UNION, CACHE, MEASURED, OVERFLOW, LEDGER, TIME, LOCALITY, VERDICT = PARTS = (
    "union",
    "cache",
    "measured",
    "overflow",
    "ledger",
    "time",
    "locality",
    "verdict",
)

DEFAULT_CAPACITIES = (64, 128, 256)
DEFAULT_CONTEXT = 8192

_NEEDS = {
    CACHE: (UNION,),
    TIME: (UNION, CACHE),
    VERDICT: (UNION, CACHE, OVERFLOW, LEDGER),
}


@dataclass(frozen=True)
class Bandwidth:
    """SSD reads, bytes per second: lowest and highest figure, and where they come from."""

    low_bps: float
    high_bps: float
    source: str


@dataclass(frozen=True)
class Options:
    """What is asked of a pool.

    sizes, capacities: B and C asked for; None for the defaults. tiers: Macs asked for. groups: of
    the sampled quantiles; windows and caches are gone through for at most the number that is the
    default of their tables. parts: those to work out; others that they need are added.
    """

    criteria: Criteria
    tiers: tuple[Tier, ...]
    sizes: tuple[int, ...] | None = None
    capacities: tuple[int, ...] | None = None
    context: int = DEFAULT_CONTEXT
    bandwidth: Bandwidth | None = None
    groups: int = DEFAULT_GROUPS
    seed: int = 0
    keep_loops: bool = False
    parts: frozenset[str] = frozenset(PARTS)


@dataclass(frozen=True)
class TimeLine:
    """Time of a decode step of B lanes. capacity: C, None for cold steps. phase: of the cached
    steps. slow, fast: bounds at the lowest and at the highest bandwidth, None if `missing`."""

    b: int
    capacity: int | None
    phase: str
    slow: TimeBound | None
    fast: TimeBound | None
    missing: str = ""


@dataclass(frozen=True)
class TimeTable:
    """Lines by B and C. missing: why there is none, "" if there are."""

    bandwidth: Bandwidth | None
    lines: tuple[TimeLine, ...]
    missing: str = ""


@dataclass(frozen=True, eq=False)
class Study:
    """The results for one pool; a part that was not asked for, or is not available, is None.

    capacities: C of every table, those asked for and the defaults of the Macs, at most E. default:
    C of each Mac. traces: for their provenance. measured: of the traces that measured their reads.
    no_ledger: why there is no ledger.
    """

    traces: tuple[Trace, ...]
    pool: Pool
    options: Options
    capacities: tuple[int, ...]
    macs: tuple[tuple[Tier, int], ...]
    unions: UnionTable | None
    curves: tuple[UnionCurve, ...]
    cache: CacheTable | None
    measured: tuple[Comparison, ...]
    overflow: OverflowTable | None
    prefill: tuple[PrefillOverflow, ...]
    ledger: Ledger | None
    no_ledger: str
    time: TimeTable | None
    locality: Locality | None
    verdict: Verdict | None

    @property
    def model(self) -> ModelInfo:
        """The traced model."""
        return self.pool.model

    @property
    def default_capacity(self) -> int:
        """Default C of the Mac that the criteria are about."""
        tier_gib = self.options.criteria.tier_gib
        return next(slots for tier, slots in self.macs if tier.ram_gib == tier_gib)


def study(traces: Sequence[Trace], options: Options) -> Study:
    """Work out every part that is asked for.

    Raises:
        UsageError: the traces are of different models, or a part refuses its settings.
        MoetapError: there is nothing to analyse.
    """
    streams = pool(traces, keep_loops=options.keep_loops)
    model = streams.model
    criteria = options.criteria
    parts = set(options.parts)
    for part in options.parts:
        parts |= set(_NEEDS.get(part, ()))
    macs = tuple((tier, tier_slots(tier, model)) for tier in options.tiers)
    if not any(tier.ram_gib == criteria.tier_gib for tier, _ in macs):
        raise UsageError(
            f"the Mac of the criteria, {criteria.tier_gib} GiB, is not among the tiers"
        )
    capacities = all_capacities(options.capacities, model, (slots for _, slots in macs))
    sizes = _sizes(options.sizes, criteria.lanes, streams.n_streams, VERDICT in parts)
    groups, seed = options.groups, options.seed

    unions = union_table(streams, sizes, groups, seed) if UNION in parts else None
    curves = union_curves(streams, sizes) if UNION in parts else ()
    replayed = min(groups, cache_io.DEFAULT_GROUPS)
    cached = cache_table(streams, sizes, capacities, replayed, seed) if CACHE in parts else None
    own = tuple(compare(t, options.keep_loops) for t in traces if MEASURED in parts and has_io(t))
    over = None
    prefill: tuple[PrefillOverflow, ...] = ()
    if OVERFLOW in parts:
        counted = min(groups, overflow.DEFAULT_GROUPS)
        over = overflow_table(streams, sizes, capacities, n_groups=counted, seed=seed)
        prefill = prefill_overflow(traces, capacities)
    lines, no_ledger = None, ""
    if LEDGER in parts:
        lines, no_ledger = _ledger(streams, options, capacities, sizes)
    found = None
    if LOCALITY in parts:
        found = locality(streams, capacities, seed=seed)
    time = _time(unions, cached, options.bandwidth) if TIME in parts else None
    decision = None
    if VERDICT in parts:
        assert unions is not None and cached is not None and over is not None
        decision = verdict(criteria, macs, unions, cached, over, lines, no_ledger)
    return Study(
        traces=tuple(traces),
        pool=streams,
        options=options,
        capacities=capacities,
        macs=macs,
        unions=unions,
        curves=curves,
        cache=cached,
        measured=own,
        overflow=over,
        prefill=prefill,
        ledger=lines,
        no_ledger=no_ledger,
        time=time,
        locality=found,
        verdict=decision,
    )


def by_model(traces: Sequence[Trace]) -> list[list[Trace]]:
    """The traces of each model, in the order in which models first occur."""
    groups: dict[tuple[object, ...], list[Trace]] = {}
    for trace in traces:
        model = trace.model
        arrays = (model.layer_index, model.n_experts, model.top_k, model.expert_bytes)
        key = (model.config_sha256, model.weights_sha256, *(tuple(a.tolist()) for a in arrays))
        groups.setdefault(key, []).append(trace)
    return list(groups.values())


def tier_slots(tier: Tier, model: ModelInfo) -> int:
    """The default C of a Mac for this model: at most E, since more slots hold nothing, and at least
    k, since fewer cannot run a token."""
    most = int(model.n_experts.max())
    return max(min(default_slots(tier.ram_gib) or most, most), model.max_top_k)


def all_capacities(
    asked: Iterable[int] | None, model: ModelInfo, defaults: Iterable[int]
) -> tuple[int, ...]:
    """C of every table, rising: those asked for and the defaults of the Macs, at most E.

    Without any asked for: 64, 128 and 256; of at most 64 experts a quarter, half and all of them.
    """
    most = int(model.n_experts.max())
    if asked is None:
        own = DEFAULT_CAPACITIES if most > DEFAULT_CAPACITIES[0] else (most // 4, most // 2, most)
        asked = (max(c, model.max_top_k) for c in own)
    return tuple(sorted({min(c, most) for c in (*asked, *defaults)}))


def _sizes(
    asked: Sequence[int] | None, lanes: int, n_streams: int, judged: bool
) -> Sequence[int] | None:
    """B of every table: those asked for, and the B of the criteria if it is to be judged and there
    are streams enough. None: the default ones."""
    if not judged or lanes > n_streams or lanes in (asked or DEFAULT_SIZES):
        return asked
    return sorted({*(asked or (b for b in DEFAULT_SIZES if b <= n_streams)), lanes})


def _ledger(
    streams: Pool, options: Options, capacities: Sequence[int], sizes: Sequence[int] | None
) -> tuple[Ledger | None, str]:
    try:
        known = trace_sizes(streams.model)
    except MoetapError as error:
        return None, str(error)
    lanes = sorted({1, *(sizes or DEFAULT_SIZES)})
    return ledger(known, options.tiers, lanes, options.context, capacities), ""


def _time(
    unions: UnionTable | None, cached: CacheTable | None, bandwidth: Bandwidth | None
) -> TimeTable:
    """Bytes read per step, B x bytes per token, at the bandwidth, next to the decode rate that the
    traces' machine reached untraced.
    """
    assert unions is not None and cached is not None
    if bandwidth is None:
        return TimeTable(None, (), "no SSD bandwidth given: --ssd GB/s, or a machine of the table")
    if not np.all(unions.pool.model.expert_bytes > 0):
        return TimeTable(bandwidth, (), "the trace does not record the size of an expert")
    rate = unions.pool.untraced_tokens_per_s
    lines = []
    for figure in unions.select(unions.strata[0], ("overall",)):
        size = figure.values.bytes_per_token if figure.values else None
        missing = figure.missing or "" if size is None else ""
        lines.append(
            _line(
                figure.b,
                None,
                "all",
                None if size is None else size.value,
                bandwidth,
                rate,
                missing,
            )
        )
        for c in cached.capacities:
            for phase in ("all", "steady"):
                line = cached.find("all", figure.b, c, phase)
                size = line.values.bytes_per_token if line.values else None
                value = None if size is None else size.value
                lines.append(_line(figure.b, c, phase, value, bandwidth, rate, line.missing))
    return TimeTable(bandwidth, tuple(lines))


def _line(
    b: int,
    capacity: int | None,
    phase: str,
    per_token: float | None,
    ssd: Bandwidth,
    rate: float | None,
    missing: str,
) -> TimeLine:
    if per_token is None:
        why = missing or "a layer was never executed"
        return TimeLine(b, capacity, phase, None, None, why)
    slow, fast = (time_bound(b * per_token, b, bps, rate) for bps in (ssd.low_bps, ssd.high_bps))
    return TimeLine(b, capacity, phase, slow, fast)
