"""Every stream, or groups of B of them, sent through caches under several policies.

Knows which streams are replayed, what a fitted policy may learn from, and how sums over streams
become figures with intervals. Refuses to know what a policy does (`moetap.policies`), how one group
goes through its caches (`replay`), and words.

Decode figures come in three phases: all decode steps, the first COLD_STEPS of each stream, and the
steady rest. Every stream, or group, starts with an empty cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import (
    COLD_STEPS,
    PHASES,
    Draw,
    Lanes,
    checked_sample,
    checked_sizes,
    in_threads,
    lay_out,
    over_streams,
)
from moetap.analysis.pool import Pool, pool
from moetap.analysis.replay import (
    GLOBAL,
    LAYER,
    SEQUENTIAL,
    STEP,
    Cache,
    cache_of_bytes,
    cache_of_slots,
    join,
    missed_per_step,
    prefill_sets,
)
from moetap.analysis.sampling import draw_groups
from moetap.analysis.strata import strata
from moetap.errors import UsageError
from moetap.policies import Policy, StepSets, get
from moetap.policies.stacks import CURVES, misses, places
from moetap.trace import NOT_EXECUTED, Trace

DEFAULT_POLICIES = ("lru", "lfu", "static", "belady")
DEFAULT_GROUPS = 100
"""Groups replayed for B > 1. All streams are replayed for B = 1."""

PREFILL = "prefill"
DEFAULT_CHUNK = 2048
"""Prompt tokens of a prefill pass where the trace does not say: mlx-lm's default."""

NO_OTHERS = "no other stream to be fitted on"


@dataclass(frozen=True)
class Options:
    """What is asked.

    slots: C per layer. budgets: (bytes, label). b: lanes. scope, rule: as in `replay`. prefill:
    replay the prompt first. groups, seed: of the sample of groups, where B > 1.
    """

    policies: tuple[str, ...] = DEFAULT_POLICIES
    slots: tuple[int, ...] = ()
    budgets: tuple[tuple[int, str], ...] = ()
    b: int = 1
    scope: str = LAYER
    rule: str = STEP
    prefill: bool = False
    keep_loops: bool = False
    groups: int = DEFAULT_GROUPS
    seed: int = 0


@dataclass(frozen=True, eq=False)
class Values:
    """The figures of one phase.

    misses, requests, tokens, extra_passes: (L,) int64 sums. requests: one look-up per distinct
        expert of a layer and step. tokens: lanes x executed steps, or prefill rows.
    per_token: misses per token, summed over the layers. bytes_per_token: the same in bytes, None
        where the size of an expert is not known. hit_rate: 1 - misses / requests.
    misses_alone: (L,) misses of the same streams one at a time, each with the same cache to itself,
        over the same decode steps; None at B = 1 and for prefill.
    relative: misses / misses alone, None if there is none.
    """

    misses: NDArray[np.int64]
    requests: NDArray[np.int64]
    tokens: NDArray[np.int64]
    extra_passes: NDArray[np.int64]
    per_token: Estimate
    bytes_per_token: Estimate | None
    hit_rate: Estimate
    misses_alone: NDArray[np.int64] | None
    relative: Estimate | None


@dataclass(frozen=True, eq=False)
class Figure:
    """One policy with one budget. phases: by name, PREFILL among them where it was replayed; None
    where there is no such step. missing: why there is no figure at all, "" if there is one."""

    policy: Policy
    cache: Cache
    phases: dict[str, Values | None]
    missing: str = ""


@dataclass(frozen=True, eq=False)
class Study:
    """Every figure, by policy and budget. chunks: prompt tokens of a prefill pass, of each trace.
    draw: the streams or groups that were replayed. left_out: cells (group, step, layer) that a lane
    did not execute."""

    pool: Pool
    options: Options
    draw: Draw
    chunks: tuple[int, ...]
    figures: tuple[Figure, ...]
    left_out: int

    def find(self, policy: str, label: str) -> Figure:
        """The figure of a policy and a budget.

        Raises:
            KeyError: there is none.
        """
        for figure in self.figures:
            if (figure.policy.name, figure.cache.label) == (policy, label):
                return figure
        raise KeyError((policy, label))


@dataclass(frozen=True, eq=False)
class Curve:
    """Misses of LRU and Belady at every C, one cache per layer.

    policies: names. phases: names, in order. misses: (policies, phases, L, E + 1) int64 at C = 0 ..
    E, E the largest number of experts; requests, tokens: (phases, L).
    """

    pool: Pool
    options: Options
    draw: Draw
    chunks: tuple[int, ...]
    policies: tuple[str, ...]
    phases: tuple[str, ...]
    misses: NDArray[np.int64]
    requests: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def capacities(self) -> range:
        """C from k to E."""
        model = self.pool.model
        return range(model.max_top_k, int(model.n_experts.max()) + 1)

    def miss_rate(self, policy: str, capacity: int, phases: Sequence[str]) -> float | None:
        """Misses / look-ups of all layers in some phases; None without a look-up."""
        at = [self.phases.index(phase) for phase in phases]
        asked = int(self.requests[at].sum())
        missed = int(self.misses[self.policies.index(policy), at, :, capacity].sum())
        return missed / asked if asked else None


def replay_study(traces: Sequence[Trace], options: Options) -> Study:
    """Replay the streams of the traces.

    Raises:
        UsageError: an option makes no sense for these traces.
        MoetapError: as `pool`; a policy cannot be loaded.
    """
    policies = [get(spec) for spec in options.policies]
    source = _Source(traces, options)
    caches = [
        *(cache_of_slots(source.pool.model, c, options.scope) for c in options.slots),
        *(cache_of_bytes(source.pool.model, n, t, options.scope) for n, t in options.budgets),
    ]
    if not caches:
        raise UsageError("no capacity and no budget given")
    figures = tuple(
        _figure(source, policy, cache, options) for policy in policies for cache in caches
    )
    return Study(
        source.pool,
        options,
        source.draw,
        source.chunks,
        figures,
        int(sum((~source.sets(members)[0].ran).sum() for members in source.draw.members)),
    )


def curve(traces: Sequence[Trace], options: Options) -> Curve:
    """LRU and Belady at every C, in one pass over the look-ups of each layer.

    Raises:
        UsageError: the scope is global, or an option makes no sense for these traces.
        MoetapError: as `pool`.
    """
    if options.scope == GLOBAL:
        raise UsageError("a curve is of one cache per layer; leave --scope out")
    source = _Source(traces, options)
    model = source.pool.model
    widest = int(model.n_experts.max())
    names = (PREFILL, "cold", "steady") if options.prefill else ("cold", "steady")
    found = np.zeros((len(CURVES), len(names), model.n_layers, widest + 1), dtype=np.int64)
    tokens = np.zeros((len(names), model.n_layers), dtype=np.int64)
    for members in source.draw.members:
        decode, before = source.sets(members)
        sets = join([before, decode]) if before else decode
        first = before.n_steps if before else 0
        steady = min(first + COLD_STEPS, sets.n_steps)
        bounds = np.array([0, *([first] if options.prefill else []), steady, sets.n_steps])

        def work(layer: int, sets: StepSets = sets, bounds: NDArray[np.int64] = bounds) -> None:
            look_ups = sets.layer(layer)
            n = len(look_ups.size)
            if options.rule == SEQUENTIAL:
                bounds, look_ups = look_ups.starts[bounds], look_ups.sequential
            for at, policy in enumerate(CURVES):
                own = places(policy, look_ups, bounds)
                found[at, :, layer, :n] += own[:, :n]
                found[at, :, layer, widest] += own[:, n]  # first uses

        in_threads(work, range(model.n_layers))
        ran = options.b * decode.ran
        tokens[-2] += ran[:, PHASES["cold"]].sum(axis=1)
        tokens[-1] += ran[:, PHASES["steady"]].sum(axis=1)
        if options.prefill:
            tokens[0] += source.prefill_tokens(members)
    return Curve(
        source.pool,
        options,
        source.draw,
        source.chunks,
        CURVES,
        names,
        misses(found),
        found[0].sum(axis=2),
        tokens,
    )


class _Source:
    """The streams that are replayed, ready to be merged.

    hot: (N, objects) int64, how often each stream requests each (layer, expert) while it decodes;
    objects as in `StepSets.together`.
    """

    def __init__(self, traces: Sequence[Trace], options: Options) -> None:
        self.options = options
        self.pool = pool(traces, options.keep_loops)
        checked_sizes(self.pool, [options.b], ())
        checked_sample(options.groups, options.seed)
        self.lanes: Lanes = lay_out(self.pool)
        self.draw = _draw(self.pool, options)
        # In the order of the pool, which leaves streams without a decode row out.
        kept = [
            (trace, stream)
            for trace in traces
            for stream in trace.streams
            if len(stream.decode(options.keep_loops))
        ]
        self.chunks = tuple(trace.capture.prefill_step or DEFAULT_CHUNK for trace in traces)
        self._prefill: list[StepSets] = []
        self._prefill_rows: list[NDArray[np.int64]] = []
        for trace, stream in kept if options.prefill else ():
            rows, chunk = stream.prefill(), trace.capture.prefill_step or DEFAULT_CHUNK
            self._prefill.append(prefill_sets(rows, self.lanes.n_experts, chunk))
            self._prefill_rows.append((rows[:, :, 0] != NOT_EXECUTED).sum(axis=0))
        self._hot: NDArray[np.int64] | None = None

    def sets(self, members: NDArray[np.intp]) -> tuple[StepSets, StepSets | None]:
        """Step sets of decode, and of the prefill before it: the prompts of the lanes one after the
        other, chunk by chunk. None where there is none."""
        decode = self.lanes.merge(members)
        if not self.options.prefill:
            return decode, None
        return decode, join([self._prefill[i] for i in members])

    def prefill_tokens(self, members: NDArray[np.intp]) -> NDArray[np.int64]:
        """(L,) prompt rows that executed the layer."""
        return np.asarray(sum(self._prefill_rows[i] for i in members), dtype=np.int64)

    def fitted(self, policy: Policy, cache: Cache, members: NDArray[np.intp]) -> Sequence[Policy]:
        """One policy per cache, told how often the streams outside the group use each expert.

        So a list of hot experts is never tested on a stream that it was fitted on.
        """
        n_caches = 1 if cache.scope == GLOBAL else self.pool.model.n_layers
        if not policy.fitted:
            return [policy] * n_caches
        hot = self.hot
        counts = hot.sum(axis=0) - hot[np.unique(members)].sum(axis=0)
        if cache.scope == GLOBAL:
            return [policy.fit(counts)]
        ends = np.cumsum(self.lanes.n_experts)[:-1]
        return [policy.fit(part) for part in np.split(counts, ends)]

    @property
    def hot(self) -> NDArray[np.int64]:
        """See the class."""
        if self._hot is None:
            n_experts = self.lanes.n_experts
            first = np.cumsum(n_experts) - n_experts
            # Filled before it is kept: threads share it, and must not meet a part of it.
            hot = np.zeros((self.pool.n_streams, int(n_experts.sum())), dtype=np.int64)
            for stream, rows in enumerate(self.pool.rows):
                for layer in range(len(n_experts)):
                    ids = rows[:, layer].ravel()
                    counts = np.bincount(ids[ids != NOT_EXECUTED], minlength=n_experts[layer])
                    hot[stream, first[layer] : first[layer] + n_experts[layer]] = counts
            self._hot = hot
        return self._hot


def _draw(pool: Pool, options: Options) -> Draw:
    """All streams one at a time, or groups of B of them."""
    everyone = strata(pool)[0]
    if options.b == 1:
        members = np.arange(pool.n_streams)[:, None]
    else:
        members = draw_groups(pool, everyone, options.b, options.groups, options.seed).members
    return Draw(everyone.name, everyone.kind, options.b, members, everyone.n_groups(options.b))


def _figure(source: _Source, policy: Policy, cache: Cache, options: Options) -> Figure:
    """Replay every group of the draw with one policy and budget."""
    groups = source.draw.members
    if policy.fitted and source.pool.n_streams <= options.b:
        return Figure(policy, cache, {}, NO_OTHERS)

    def one(members: NDArray[np.intp]) -> tuple[StepSets, StepSets | None, NDArray[np.int32]]:
        decode, before = source.sets(members)
        sets = join([before, decode]) if before else decode
        fitted = source.fitted(policy, cache, members)
        return decode, before, missed_per_step(sets, cache, fitted, options.rule)

    def alone(stream: int) -> NDArray[np.uint16]:
        # A step of one lane misses at most k experts, so uint16 holds them.
        decode, _, missed = one(np.array([stream]))
        return missed[len(missed) - decode.n_steps :].astype(np.uint16)

    single: dict[int, NDArray[np.uint16]] = {}
    if options.b > 1:
        streams = np.unique(groups).tolist()
        single = dict(zip(streams, in_threads(alone, streams), strict=True))

    def work(members: NDArray[np.intp]) -> dict[str, _Sums]:
        decode, before, missed = one(members)
        first = len(missed) - decode.n_steps
        ran = decode.ran.T
        base = np.zeros(ran.shape, dtype=np.int64)
        for stream in members if single else ():
            base += single[int(stream)][: decode.n_steps]
        base *= ran  # a cell that the group leaves out does not count alone either
        extra = decode.extra_passes(cache.slots)
        found = {
            phase: _Sums(
                missed[first:][span].sum(axis=0, dtype=np.int64),
                decode.requests[span].sum(axis=0),
                options.b * ran[span].sum(axis=0, dtype=np.int64),
                extra[span].sum(axis=0),
                base[span].sum(axis=0),
            )
            for phase, span in PHASES.items()
        }
        if before:
            found[PREFILL] = _Sums(
                missed[:first].sum(axis=0, dtype=np.int64),
                before.requests.sum(axis=0),
                source.prefill_tokens(members),
                before.extra_passes(cache.slots).sum(axis=0),
                np.zeros(before.n_layers, dtype=np.int64),
            )
        return found

    done = in_threads(work, groups)
    phases = {
        phase: _values(source, phase, _stack([sums[phase] for sums in done])) for phase in done[0]
    }
    return Figure(policy, cache, phases)


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over steps, (L,) of one group or (groups, L) of all; as in `Values`."""

    misses: NDArray[np.int64]
    requests: NDArray[np.int64]
    tokens: NDArray[np.int64]
    extra: NDArray[np.int64]
    alone: NDArray[np.int64]


def _stack(parts: Sequence[_Sums]) -> _Sums:
    return _Sums(
        *(
            np.stack([getattr(part, name) for part in parts])
            for name in ("misses", "requests", "tokens", "extra", "alone")
        )
    )


def _values(source: _Source, phase: str, sums: _Sums) -> Values | None:
    """Figures of one phase; None if no group has a step in it.

    With M_gl the misses of group g in layer l, R_gl its look-ups, T_gl its tokens, A_gl the misses
    of its streams at B = 1 over the same cells:

        misses per token = sum_l (sum_g M_gl / sum_g T_gl),    bytes = sum_l bytes_l (the same)
        hit rate = 1 - sum M / sum R,    relative = sum M / sum A

    Each layer has its own ratio, since a layer that did not execute everywhere has fewer tokens. A
    layer without any adds nothing.
    """
    draw, model = source.draw, source.pool.model
    ran = sums.tokens.sum(axis=0) > 0

    def of(top: NDArray[np.int64], bottom: NDArray[np.int64]) -> Estimate | None:
        return over_streams(draw, top.astype(float).sum(axis=1), bottom.astype(float).sum(axis=1))

    def per_token(weight: NDArray[np.int64]) -> Estimate | None:
        return over_streams(
            draw,
            sums.misses[:, ran].astype(float),
            sums.tokens[:, ran].astype(float),
            weight[ran].astype(float),
        )

    if not ran.any():
        return None
    loads = per_token(np.ones(model.n_layers, dtype=np.int64))
    missed = of(sums.misses, sums.requests)
    if loads is None or missed is None:
        return None
    together = source.options.b > 1 and phase != PREFILL
    low = None if missed.high is None else 1 - missed.high
    high = None if missed.low is None else 1 - missed.low
    return Values(
        misses=sums.misses.sum(axis=0),
        requests=sums.requests.sum(axis=0),
        tokens=sums.tokens.sum(axis=0),
        extra_passes=sums.extra.sum(axis=0),
        per_token=loads,
        bytes_per_token=per_token(model.expert_bytes) if np.all(model.expert_bytes > 0) else None,
        hit_rate=Estimate(1 - missed.value, low, high, missed.why),
        misses_alone=sums.alone.sum(axis=0) if together else None,
        relative=of(sums.misses, sums.alone) if together else None,
    )
