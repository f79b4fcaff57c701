"""Figures over streams and groups, against replays in plain Python."""

from __future__ import annotations

import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unionkit import Twin, golden_trace, make_model, make_stream, make_trace, random_trace

from moetap.analysis.lanes import COLD_STEPS
from moetap.analysis.replay_study import NO_OTHERS, PREFILL, Options, curve, replay_study
from moetap.errors import MoetapError, UsageError
from moetap.policies.stacks import CURVES
from moetap.trace import NOT_EXECUTED

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))
from policykit import lru_twin  # noqa: E402
from twins import TWINS, run  # noqa: E402


def by_hand(trace, members, policy, options, capacity, hot, asked=None):
    """Misses per (step, layer) of one group, prefill first; and the requests.

    asked: requests of the group that a single stream is compared with. It goes through the cells
    that the group executed, and no others.
    """
    model, steps = trace.model, []
    streams = [trace.streams[i] for i in members]
    if options.prefill:
        for stream in streams:  # one chunk each
            rows = stream.prefill()
            if len(rows):
                cells = [set(rows[:, la].ravel().tolist()) for la in range(model.n_layers)]
                steps.append([c - {NOT_EXECUTED} for c in cells])
    first = len(steps)
    for step in range(min(len(s.decode()) for s in streams) if asked is None else len(asked)):
        cells = []
        for layer in range(model.n_layers):
            lanes = [set(s.decode()[step, layer].tolist()) - {NOT_EXECUTED} for s in streams]
            ran = all(lanes) and (asked is None or asked[step][layer])
            cells.append(set().union(*lanes) if ran else set())
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
            counts = uses(trace, [member])
            own, _, _ = by_hand(trace, [member], policy, single, capacity, counts, asked)
            alone = alone + np.sum(own, axis=0)
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


def test_a_cell_that_a_lane_lacks_warms_no_cache():
    # b did not execute step 1, so the pair has {0,1} and {2,3}: 4 misses. a alone goes through the
    # same two sets and misses 4, as b does: 4 of 8. (Through its own step 1 it would load 2 and 3
    # before they count, miss 2 in what counts, and the pair would look like 4 of 6.)
    cells = {"a": [[{0, 1}], [{2, 3}], [{2, 3}]], "b": [[{0, 1}], [set()], [{2, 3}]]}
    streams = [make_stream(name, "", steps, (2,)) for name, steps in cells.items()]
    trace = make_trace(make_model([8], [2]), streams)
    for policy in ("lru", "belady"):
        study = replay_study([trace], Options((policy,), (4,), b=2))
        every = study.find(policy, "4").phases["all"]
        assert (every.misses.tolist(), every.misses_alone.tolist()) == ([4], [8])
        assert every.relative.value == pytest.approx(0.5)
        assert study.left_out == 1


@pytest.mark.parametrize("seed", range(6))
def test_both_sides_see_the_same_cells(seed):
    trace = random_trace(seed, 4, max_steps=40, missing=0.2)
    twin, capacity = Twin(trace), 5
    study = replay_study([trace], Options(("lru",), (capacity,), b=2))
    every = study.find("lru", str(capacity)).phases["all"]
    for layer in range(trace.model.n_layers):
        misses = alone = 0
        for group in twin.groups("all", 2):
            own = [[row[layer] for row in twin.cells[i]] for i in group]
            steps = list(zip(*own, strict=False))  # as long as the shorter one
            both = [all(lanes) for lanes in steps]
            union = [set().union(*la) if ran else None for la, ran in zip(steps, both, strict=True)]
            misses += sum(lru_twin(union, capacity))
            for lane in range(2):
                kept = [la[lane] if ran else None for la, ran in zip(steps, both, strict=True)]
                alone += sum(lru_twin(kept, capacity))
        assert (every.misses[layer], every.misses_alone[layer]) == (misses, alone)


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


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    "options", [Options(), Options(b=2, prefill=True), Options(rule="sequential", prefill=True)]
)
def test_curve_is_a_replay_for_each_capacity(options, scope):
    trace = random_trace(5, 4, max_steps=9)
    n_layers = trace.model.n_layers
    found = curve([trace], replace(options, scope=scope))
    room = trace.model.n_experts.max() if scope == "layer" else trace.model.n_experts.sum()
    assert found.capacities == range(trace.model.max_top_k, int(room) + 1)
    slots = tuple(range(trace.model.max_top_k, trace.model.max_top_k + 6))
    study = replay_study([trace], replace(options, policies=CURVES, slots=slots, scope=scope))
    for at, policy in enumerate(CURVES):
        for c in slots:
            label, capacity = (
                (f"{c}", c) if scope == "layer" else (f"{c} x {n_layers}", c * n_layers)
            )
            phases = study.find(policy, label).phases
            extra = found.extra_passes(capacity)
            for when, phase in enumerate(found.phases):
                values = phases[phase]
                if not values:
                    assert not found.requests[when].any() and not extra[when].any()
                    continue
                for own, sums in (
                    (found.misses[at, when, :, capacity], values.misses),
                    (found.requests[when], values.requests),
                    (extra[when], values.extra_passes),
                ):
                    assert own.tolist() == (sums.tolist() if scope == "layer" else [sums.sum()])
                assert found.tokens[when].tolist() == values.tokens.tolist()
            every = phases["all"]
            decode = ("cold", "steady")
            assert found.miss_rate(policy, capacity, decode) == pytest.approx(
                every.misses.sum() / every.requests.sum()
            )
            if scope == "layer":
                assert found.per_token(policy, capacity, decode) == pytest.approx(
                    every.per_token.value
                )
            cells = every.tokens.sum() / options.b
            assert found.passes_per_step(capacity, decode) == pytest.approx(
                every.extra_passes.sum() / cells
            )


def test_golden_curve_of_one_cache_for_all_layers():
    # Steps of a: layer 0 {0}, layer 1 {0}, each step the same: two objects, o p o p o p. One slot
    # misses all 6, two slots the first 2. Belady with one slot is forced to load each: 6.
    stream = make_stream("a", "", [[{0}, {0}]] * 3, (1, 1))
    found = curve([make_trace(make_model([2, 2], [1, 1]), [stream])], Options(scope="global"))
    assert found.capacities == range(1, 5)
    assert found.misses[:, 0, 0].tolist() == [[6, 6, 2, 2, 2], [6, 6, 2, 2, 2]]
    assert found.per_token("lru", 2, ("cold", "steady")) == pytest.approx(2 / 3)
    # A step that lacks layer 1 leaves 3 and 2 tokens, 2.5 a layer. It asks for another expert of
    # layer 0, so two slots miss 3.
    cells = [[{0}, {0}], [{0}, {0}], [{1}, set()]]
    stream = make_stream("a", "", cells, (1, 1))
    found = curve([make_trace(make_model([2, 2], [1, 1]), [stream])], Options(scope="global"))
    assert found.misses[0, 0, 0, 2] == 3
    assert found.per_token("lru", 2, ("cold", "steady")) == pytest.approx(3 / 2.5)


def test_golden_extra_passes_of_a_curve():
    # The pair ab: sets of 2, 3 (layer 0), 4 and 3 (layer 1). C = 2: 0 + 1 + 1 + 1; C = 3: the set
    # of 4. C = 1 is below k: 1 + 2 + 3 + 2.
    trace = make_trace(golden_trace().model, golden_trace().streams[:2])
    found = curve([trace], Options(b=2))
    assert [found.extra_passes(c)[0].tolist() for c in (1, 2, 3, 4)] == [
        [3, 5],
        [1, 2],
        [0, 1],
        [0, 0],
    ]
    assert found.passes_per_step(2, ("cold", "steady")) == pytest.approx(3 / 4)
    assert found.largest_set(("cold", "steady")) == 4 and found.largest_set(("steady",)) == 0


@pytest.mark.parametrize(
    "work",
    [
        lambda trace: replay_study([trace], Options(("lru",), (16,))),
        lambda trace: replay_study([trace], Options(("lru",), (16,), b=4, groups=20)),
        lambda trace: replay_study([trace], Options(("static",), (16,))),
        lambda trace: curve([trace], Options()),
        lambda trace: curve([trace], Options(scope="global")),
    ],
    ids=["one lane", "four lanes", "fitted", "curve", "global curve"],
)
def test_memory_stays_below_twice_the_rows(work, monkeypatch):
    """The rows themselves are there before; NumPy reports to tracemalloc, compiled loops don't."""
    # Groups under way hold arrays of their own; as many are as there are threads.
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    rng = np.random.default_rng(0)
    model = make_model([32] * 8, [8] * 8)
    small = make_trace(
        model, [make_stream(f"{i}", "", [[set(range(8))] * 8], [8] * 8) for i in range(5)]
    )
    work(small)  # compiles
    ids = np.sort(rng.random((60, 200, 8, 32)).argpartition(8)[..., :8], axis=-1).astype(np.uint16)
    streams = [
        replace(small.streams[0], prompt_id=f"{i}", n_prompt=1, n_generated=200, experts=own,
                tokens=np.zeros(200, np.uint32), position=np.arange(200, dtype=np.uint32))
        for i, own in enumerate(ids)
    ]  # fmt: skip
    trace = make_trace(model, streams)
    tracemalloc.start()
    try:
        work(trace)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 0.7 * ids.nbytes


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
    wide = make_model([2**15, 2**15 + 1], [1, 1])
    stream = make_stream("a", "", [[{0}, {1}]], (1, 1))
    with pytest.raises(UsageError, match="together have 65,537; leave --curve out and give sizes"):
        curve([make_trace(wide, [stream])], Options(scope="global"))
    with pytest.raises(KeyError):
        golden(policies=("lru",), slots=(4,)).find("lru", "5")
    with pytest.raises(MoetapError):
        replay_study([make_trace(make_model([4], [2]), [])], Options(("lru",), (4,)))
