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
from functools import cached_property
from itertools import pairwise
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.jackknife import Estimate
from moetap.analysis.lanes import (
    COLD_STEPS,
    PHASES,
    Alone,
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
from moetap.policies import LookUps, Policy, StepSets, get
from moetap.policies.stacks import CURVES, misses, places
from moetap.trace import NOT_EXECUTED, Trace

DEFAULT_POLICIES = ("lru", "lfu", "static", "belady")
DEFAULT_GROUPS = 100
"""Groups replayed for B > 1. All streams are replayed for B = 1."""

PREFILL = "prefill"
DEFAULT_CHUNK = 2048
"""Prompt tokens of a prefill pass where the trace does not say: mlx-lm's default."""

MOST_OBJECTS = 2**16
"""Experts that one cache may have for a curve: their places are kept in 16 bits."""

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
        over the decode steps and cells that the group executed; None at B = 1 and for prefill.
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
    """Misses of LRU and Belady at every C: slots of each layer's own cache, or all slots of the one
    cache that all layers share.

    policies, phases: names, in order. misses: (policies, phases, caches, n + 1) int64 at C = 0 ..
    n; caches are layers and n the largest E, or there is one cache, of n experts. requests:
    (phases, caches). sets: (phases, caches, E + 1) cells (layer, step) by the size U of the step's
    set, 0 where the layer was not executed. tokens: (phases, L).
    """

    pool: Pool
    options: Options
    draw: Draw
    chunks: tuple[int, ...]
    policies: tuple[str, ...]
    phases: tuple[str, ...]
    misses: NDArray[np.int64]
    requests: NDArray[np.int64]
    sets: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @property
    def capacities(self) -> range:
        """C from k to E, or to all experts of all layers."""
        return range(self.pool.model.max_top_k, self.misses.shape[-1])

    def miss_rate(self, policy: str, capacity: int, phases: Sequence[str]) -> float | None:
        """Misses / look-ups of all layers in some phases; None without a look-up."""
        at = [self.phases.index(phase) for phase in phases]
        asked = int(self.requests[at].sum())
        missed = int(self.misses[self.policies.index(policy), at, :, capacity].sum())
        return missed / asked if asked else None

    def per_token(self, policy: str, capacity: int, phases: Sequence[str]) -> float:
        """Misses per token, summed over the layers: with M_l the misses and T_l the tokens of layer
        l, sum_l (M_l / T_l) over the layers that executed. A shared cache has the sum of M_l only,
        and it is L' sum M / sum T with the L' layers that executed; the same if all T_l are.
        """
        at = [self.phases.index(phase) for phase in phases]
        missed = self.misses[self.policies.index(policy), at, :, capacity].sum(axis=0)
        tokens = self.tokens[at].sum(axis=0)
        ran = tokens > 0
        if self.options.scope == GLOBAL:
            return float(missed[0] / tokens[ran].mean()) if ran.any() else 0.0
        return float(np.sum(missed[ran] / tokens[ran]))

    def extra_passes(self, capacity: int) -> NDArray[np.int64]:
        """(phases, caches) passes beyond the first that sets larger than C forced:
        sum over cells of ceil(U / C) - 1, as `StepSets.extra_passes`."""
        size = np.arange(self.sets.shape[-1])
        return np.asarray(self.sets @ np.maximum(-(-size // capacity) - 1, 0))

    def passes_per_step(self, capacity: int, phases: Sequence[str]) -> float:
        """Extra passes per executed (layer, step)."""
        at = [self.phases.index(phase) for phase in phases]
        cells = int(self.sets[at, :, 1:].sum())
        return int(self.extra_passes(capacity)[at].sum()) / cells if cells else 0.0

    def largest_set(self, phases: Sequence[str]) -> int:
        """Experts of the largest set; with fewer slots extra passes are forced."""
        at = [self.phases.index(phase) for phase in phases]
        return int(np.flatnonzero(self.sets[at].sum(axis=(0, 1))).max(initial=0))


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
        int(sum((~source.lanes.merge(members).ran).sum() for members in source.draw.members)),
    )


def curve(traces: Sequence[Trace], options: Options) -> Curve:
    """LRU and Belady at every C, in one pass over the look-ups of each cache.

    Raises:
        UsageError: an option makes no sense for these traces; the cache that all layers share
            would be of more than MOST_OBJECTS experts.
        MoetapError: as `pool`.
    """
    source = _Source(traces, options)
    n_experts = source.pool.model.n_experts
    n_layers, shared = len(n_experts), options.scope == GLOBAL
    widest = int(n_experts.sum() if shared else n_experts.max())
    if widest > MOST_OBJECTS:
        raise UsageError(
            f"a curve is of at most {MOST_OBJECTS:,} experts, and all layers together have "
            f"{widest:,}; leave --curve out and give sizes (-C)"
        )
    names = (PREFILL, "cold", "steady") if options.prefill else ("cold", "steady")
    caches = np.zeros(n_layers, dtype=np.intp) if shared else np.arange(n_layers)
    n_caches = 1 if shared else n_layers
    found = np.zeros((len(CURVES), len(names), n_caches, widest + 1), dtype=np.int64)
    sizes = np.zeros((len(names), n_caches, int(n_experts.max()) + 1), dtype=np.int64)
    tokens = np.zeros((len(names), n_layers), dtype=np.int64)
    adding = Lock()

    def count(cache: int, look_ups: LookUps, bounds: NDArray[np.int64]) -> None:
        n = len(look_ups.size)
        if options.rule == SEQUENTIAL:
            bounds, look_ups = look_ups.starts[bounds], look_ups.sequential
        for at, policy in enumerate(CURVES):
            own = places(policy, look_ups, bounds)
            with adding:
                found[at, :, cache, :n] += own[:, :n]
                found[at, :, cache, widest] += own[:, n]  # first uses

    def work(members: NDArray[np.intp]) -> None:
        decode, before = source.lanes.merge(members), source.before(members)
        sets = join([before, decode]) if before else decode
        first = before.n_steps if before else 0
        steady = min(first + COLD_STEPS, sets.n_steps)
        bounds = np.array([0, *([first] if options.prefill else []), steady, sets.n_steps])
        with adding:
            for phase, (start, stop) in enumerate(pairwise(bounds)):
                np.add.at(sizes[phase], (caches, sets.requests[start:stop]), 1)
            ran = options.b * decode.ran
            tokens[-2] += ran[:, PHASES["cold"]].sum(axis=1)
            tokens[-1] += ran[:, PHASES["steady"]].sum(axis=1)
            if options.prefill:
                tokens[0] += source.prefill_tokens(members)
        if shared:
            count(0, sets.together(np.ones(n_layers, dtype=np.int64)), bounds * n_layers)
        else:
            in_threads(lambda layer: count(layer, sets.layer(layer), bounds), range(n_layers))

    # On all cores either way: layers of one group, or groups, if there is one cache.
    if shared:
        in_threads(work, source.draw.members)
    else:
        for members in source.draw.members:
            work(members)
    return Curve(
        source.pool,
        options,
        source.draw,
        source.chunks,
        CURVES,
        names,
        misses(found),
        found[0].sum(axis=2),
        sizes,
        tokens,
    )


class _Source:
    """The streams that are replayed, ready to be merged."""

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
            self._prefill.append(prefill_sets(rows, self.pool.model.n_experts, chunk))
            self._prefill_rows.append((rows[:, :, 0] != NOT_EXECUTED).sum(axis=0))

    def before(self, members: NDArray[np.intp]) -> StepSets | None:
        """Step sets of the prefill: the prompts of the lanes one after the other, chunk by chunk.
        None if it is not replayed."""
        return join([self._prefill[i] for i in members]) if self.options.prefill else None

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
        counts = self.uses - sum(self._uses(int(i)) for i in np.unique(members))
        if cache.scope == GLOBAL:
            return [policy.fit(counts)]
        ends = np.cumsum(self.pool.model.n_experts)[:-1]
        return [policy.fit(part) for part in np.split(counts, ends)]

    @cached_property
    def uses(self) -> NDArray[np.int64]:
        """(objects,) how often all streams together request each (layer, expert) while they decode;
        objects as in `StepSets.together`."""
        return np.asarray(sum(self._uses(i) for i in range(self.pool.n_streams)))

    def _uses(self, stream: int) -> NDArray[np.int64]:
        """The same of one stream. Counted when it is needed: kept for all streams, it would take
        more memory than the rows of short ones."""
        rows, parts = self.pool.rows[stream], []
        for layer, n in enumerate(self.pool.model.n_experts):
            ids = rows[:, layer].ravel()
            parts.append(np.bincount(ids[ids != NOT_EXECUTED], minlength=n))
        return np.concatenate(parts)


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

    def one(
        members: NDArray[np.intp], decode: StepSets
    ) -> tuple[StepSets | None, NDArray[np.int32]]:
        before = source.before(members)
        sets = join([before, decode]) if before else decode
        fitted = source.fitted(policy, cache, members)
        return before, missed_per_step(sets, cache, fitted, options.rule)

    def count(stream: int, decode: StepSets) -> NDArray[np.int32]:
        _, missed = one(np.array([stream]), decode)
        return missed[len(missed) - decode.n_steps :]

    alone = None
    if options.b > 1:
        alone = Alone(source.lanes, np.unique(groups).tolist(), count, policy.offline)

    def work(members: NDArray[np.intp]) -> dict[str, _Sums]:
        decode = source.lanes.merge(members)
        before, missed = one(members, decode)
        first = len(missed) - decode.n_steps
        ran = decode.ran.T
        base = alone.total(members, decode.ran) if alone else np.zeros(ran.shape, dtype=np.int64)
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
