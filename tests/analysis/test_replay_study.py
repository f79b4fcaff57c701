"""Figures over streams and groups, against replays in plain Python."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unionkit import golden_trace, make_model, make_stream, make_trace, random_trace

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.replay_study import NO_OTHERS, PREFILL, Options, curve, replay_study
from moetap.errors import MoetapError, UsageError
from moetap.policies.stacks import CURVES
from moetap.trace import NOT_EXECUTED

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))
from twins import TWINS, run  # noqa: E402


def by_hand(trace, members, policy, options, capacity, hot):
    """Misses per (step, layer) of one group, prefill first; and the requests."""
    model, steps = trace.model, []
    streams = [trace.streams[i] for i in members]
    if options.prefill:
        for stream in streams:  # one chunk each
            rows = stream.prefill()
            if len(rows):
                cells = [set(rows[:, la].ravel().tolist()) for la in range(model.n_layers)]
                steps.append([c - {NOT_EXECUTED} for c in cells])
    first = len(steps)
    for step in range(min(len(s.decode()) for s in streams)):
        cells = []
        for layer in range(model.n_layers):
            lanes = [set(s.decode()[step, layer].tolist()) - {NOT_EXECUTED} for s in streams]
            cells.append(set().union(*lanes) if all(lanes) else set())
        steps.append(cells)

    def replayed(batches, n, room, counts):
        if options.rule == "sequential":
            single = [[x] for batch in batches for x in batch]
            flags = run(TWINS[policy], single, room, [1] * n, counts=counts)
        else:
            flags = run(TWINS[policy], batches, room, [1] * n, counts=counts)
        return [sum(flags.pop(0) for _ in batch) for batch in batches]

    sizes = model.n_experts.tolist()
    if options.scope == "layer":
        columns = []
        for layer, n in enumerate(sizes):
            batches = [sorted(cells[layer]) for cells in steps]
            counts = [hot[layer, x] for x in range(n)]
            columns.append(replayed(batches, n, capacity, counts))
        missed = [list(row) for row in zip(*columns, strict=True)]
    else:
        base = np.cumsum([0, *sizes])[:-1].tolist()
        batches = [[base[la] + x for x in sorted(c)] for cs in steps for la, c in enumerate(cs)]
        counts = [hot[layer, x] for layer, n in enumerate(sizes) for x in range(n)]
        flat = replayed(batches, sum(sizes), capacity * len(sizes), counts)
        missed = [flat[i : i + len(sizes)] for i in range(0, len(flat), len(sizes))]
    return missed[first:], [[len(c) for c in cells] for cells in steps[first:]], missed[:first]


def uses(trace, without):
    found = Counter()
    for i, stream in enumerate(trace.streams):
        if i not in without:
            for cells in stream.decode():
                for layer, ids in enumerate(cells):
                    found.update((layer, x) for x in ids.tolist() if x != NOT_EXECUTED)
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(["lru", "lfu", "sieve", "belady", "static", "pinned"]),
    st.sampled_from(["layer", "global"]),
    st.sampled_from(["step", "sequential"]),
    st.booleans(),
    st.integers(1, 2),
    st.integers(2, 9),
)
def test_sums_equal_those_by_hand(seed, policy, scope, rule, prefill, b, capacity):
    trace = random_trace(seed, 3)
    options = Options((policy,), (capacity,), b=b, scope=scope, rule=rule, prefill=prefill)
    study = replay_study([trace], options)
    (figure,) = study.figures
    every = figure.phases["all"]
    misses = requests = before = alone = 0
    for members in study.draw.members.tolist():
        hot = uses(trace, members)
        missed, asked, first = by_hand(trace, members, policy, options, capacity, hot)
        misses, requests = misses + np.sum(missed, axis=0), requests + np.sum(asked, axis=0)
        before = before + np.sum(first, axis=0) if first else before
        for member in members if b > 1 else ():
            single = Options((policy,), (capacity,), scope=scope, rule=rule, prefill=prefill)
            own, _, _ = by_hand(trace, [member], policy, single, capacity, uses(trace, [member]))
            ran = np.array(asked) > 0
            alone = alone + (np.array(own)[: len(missed)] * ran).sum(axis=0)
    if every is None:
        assert np.sum(requests) == 0
        return
    assert every.misses.tolist() == np.asarray(misses).tolist()
    assert every.requests.tolist() == np.asarray(requests).tolist()
    if b > 1:
        assert every.misses_alone.tolist() == np.asarray(alone).tolist()
    if prefill:
        assert figure.phases[PREFILL].misses.tolist() == np.asarray(before).tolist()


def golden(**options):
    return replay_study([golden_trace()], Options(**options))


def test_figures_of_single_streams():
    # a {0,1} {0,1} twice: 2 misses a layer. b: 2 + 1, 2 + 1 (3 or 2 stays with 0 or 1); c: 2 + 1
    # and 2; d: 2 and 2. C = 3.
    figure = golden(policies=("lru",), slots=(3,)).find("lru", "3")
    every = figure.phases["all"]
    assert every.misses.tolist() == [2 + 3 + 3 + 2, 2 + 3 + 2 + 2]
    assert every.requests.tolist() == [14, 12]
    assert every.tokens.tolist() == [7, 6]
    assert every.per_token.value == pytest.approx(10 / 7 + 9 / 6)
    assert every.bytes_per_token.value == pytest.approx(100 * 10 / 7 + 10 * 9 / 6)
    assert every.hit_rate.value == pytest.approx(1 - 19 / 26)
    assert every.hit_rate.low < every.hit_rate.value < every.hit_rate.high
    assert every.relative is None and every.misses_alone is None
    assert figure.phases["cold"].misses.tolist() == every.misses.tolist()
    assert figure.phases["steady"] is None


def test_lanes_against_the_same_streams_alone():
    study = golden(policies=("lru",), slots=(4,), b=2)
    every = study.find("lru", "4").phases["all"]
    # All six pairs; with four slots only first uses miss. Layer 0: ab {0,1,2}, ac {0,1,2},
    # ad {0,1,2,3}, bc {0,1,2}, bd {0,1,2,3}, cd {0,2,3}.
    assert study.draw.n_groups == 6
    assert every.misses.tolist()[0] == 3 + 3 + 4 + 3 + 4 + 3
    assert every.relative.value == pytest.approx(every.misses.sum() / every.misses_alone.sum())
    assert study.left_out == 2  # c did not execute layer 1 at step 1, nor does a group with it


def test_prefill_comes_first_and_is_counted_apart():
    # The prompt's row has {0,1} in both layers, so a decodes without a miss.
    figure = golden(policies=("lru",), slots=(4,), prefill=True).find("lru", "4")
    assert figure.phases[PREFILL].misses.tolist() == [8, 8]
    assert figure.phases[PREFILL].tokens.tolist() == [4, 4]
    without = golden(policies=("lru",), slots=(4,)).find("lru", "4")
    assert figure.phases["all"].misses.sum() < without.phases["all"].misses.sum()
    assert figure.phases["all"].requests.tolist() == without.phases["all"].requests.tolist()


def test_a_hot_list_is_never_fitted_on_the_stream_that_it_is_tested_on():
    # Each stream has two experts of its own, so the others' lists are of no use.
    streams = [make_stream(f"s{i}", "", [[{2 * i, 2 * i + 1}]] * 5, (2,)) for i in range(3)]
    trace = make_trace(make_model([6], [2]), streams)
    study = replay_study([trace], Options(("static-preloaded", "lru"), (4,)))
    # Of equal counts the lowest ids: 2 3 4 5 for s0, 0 1 4 5 for s1, 0 1 2 3 for s2.
    assert study.find("static-preloaded", "4").phases["all"].hit_rate.value == 0
    lone = replay_study([make_trace(make_model([6], [2]), streams[:1])], Options(("static",), (4,)))
    assert (lone.figures[0].phases, lone.figures[0].missing) == ({}, NO_OTHERS)


def test_extra_passes_are_counted_not_hidden():
    every = golden(policies=("lru",), slots=(1,), b=2).find("lru", "1").phases["all"]
    assert (every.extra_passes > 0).all()
    assert (every.extra_passes == every.requests - every.tokens // 2).all()


def test_curve_is_a_replay_for_each_capacity():
    trace = random_trace(5, 4, max_steps=9)
    for options in (
        Options(),
        Options(b=2, prefill=True),
        Options(rule="sequential", prefill=True),
    ):
        found = curve([trace], options)
        assert found.capacities == range(
            trace.model.max_top_k, int(trace.model.n_experts.max()) + 1
        )
        slots = tuple(found.capacities)[:6]
        from dataclasses import replace

        study = replay_study([trace], replace(options, policies=CURVES, slots=slots))
        for at, policy in enumerate(CURVES):
            for capacity in slots:
                phases = study.find(policy, str(capacity)).phases
                for when, phase in enumerate(found.phases):
                    values = phases[phase]
                    line = found.misses[at, when, :, capacity]
                    assert line.tolist() == (
                        [0] * len(line) if not values else values.misses.tolist()
                    )
                    if values:
                        assert found.requests[when].tolist() == values.requests.tolist()
                        assert found.tokens[when].tolist() == values.tokens.tolist()
                every = phases["all"]
                assert found.miss_rate(policy, capacity, ("cold", "steady")) == pytest.approx(
                    every.misses.sum() / every.requests.sum()
                )


def test_steady_steps_of_a_curve():
    steps = [[{0, 1}]] * COLD_STEPS + [[{1, 2}]] * 3
    trace = make_trace(make_model([4], [2]), [make_stream("a", "", steps, (2,))])
    found = curve([trace], Options())
    assert found.phases == ("cold", "steady")
    assert found.misses[0, :, 0, 3].tolist() == [2, 1]
    assert found.requests[:, 0].tolist() == [2 * COLD_STEPS, 6]


def test_refusals():
    for options, match in (
        (Options(("lru",)), "no capacity"),
        (Options(("nope",), (4,)), "no policy is called"),
        (Options(("lru",), (4,), b=9), "more than the 4 streams"),
        (Options(("lru",), (4,), groups=0), "0 groups"),
    ):
        with pytest.raises(UsageError, match=match):
            replay_study([golden_trace()], options)
    with pytest.raises(UsageError, match="leave --scope out"):
        curve([golden_trace()], Options(scope="global"))
    with pytest.raises(KeyError):
        golden(policies=("lru",), slots=(4,)).find("lru", "5")
    with pytest.raises(MoetapError):
        replay_study([make_trace(make_model([4], [2]), [])], Options(("lru",), (4,)))
