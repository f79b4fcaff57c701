from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanekit import numbers, uniform_trace
from scipy.stats import t as student
from unionkit import (
    Twin,
    golden_streams,
    golden_trace,
    make_model,
    make_stream,
    make_trace,
    random_trace,
)

from moetap.analysis.cache_io import cache_table
from moetap.analysis.lanes import COLD_STEPS, CONTROL
from moetap.analysis.pool import pool
from moetap.errors import UsageError

sys.path.insert(0, str(Path(__file__).parents[1] / "policies"))
from policykit import lru_twin  # noqa: E402


@pytest.fixture(scope="module")
def golden():
    return cache_table(pool([golden_trace()]), [1, 2, 3, 4], capacities=[2, 3])


# a and b are all there is in "code"; see test_replay for the misses of the pair: 9 at C = 2 and 8
# at C = 3, of 12 look-ups, in 4 (step, layer) pairs of 2 tokens each.
# Alone: a misses {0,1} once in both layers, 4. b: layer 0 {0,1} {1,2}: 2 and 1, layer 1 {2,3}
# {0,2}: 2 and 1, so 6. C makes no difference to them.


def test_golden_pair(golden):
    two, three = (golden.find("code", 2, c).values for c in (2, 3))
    assert two.loads.value == pytest.approx(9 / 8)
    assert three.loads.value == pytest.approx(8 / 8)
    assert two.loads_alone.value == three.loads_alone.value == pytest.approx(10 / 8)
    assert two.relative.value == pytest.approx(9 / 10)
    assert three.relative.value == pytest.approx(8 / 10)
    assert three.saved.value == pytest.approx(0.2)
    # Without a cache: 12 experts for 8 tokens, 2 each alone.
    assert two.uncached.value == pytest.approx(12 / 8)
    assert two.uncached_alone.value == pytest.approx(2)
    assert two.hit_rate.value == pytest.approx(1 - 9 / 12)
    assert three.hit_rate.value == pytest.approx(1 - 8 / 12)
    assert two.hit_rate_alone.value == pytest.approx(1 - 10 / 16)
    # Experts of 100 and 10 bytes. Per layer: 3 and 6 misses for 4 tokens; alone 2 + 3 in both.
    assert two.bytes_per_token.value == pytest.approx(100 * 3 / 4 + 10 * 6 / 4)
    assert two.bytes_alone.value == pytest.approx(100 * 5 / 4 + 10 * 5 / 4)
    assert (two.misses.tolist(), two.misses_alone.tolist()) == ([3, 6], [5, 5])
    assert two.tokens.tolist() == [4, 4]
    # Sets of 3, 4 and 3 experts take a second pass at C = 2, the one of 4 at C = 3.
    assert two.extra_passes == pytest.approx(3 / 4)
    assert three.extra_passes == pytest.approx(1 / 4)
    assert two.relative.low is None and "without one of the 2 streams" in two.relative.why


def test_golden_alone(golden):
    # a 4 misses of 4, b 6 of 4, c {0,2} {0,1} and {0,1}: 5 of 3, d {2,3} and {0,2}: 4 of 2.
    loads = golden.find("all", 1, 2).values.loads
    assert loads.value == pytest.approx(19 / 13)
    out = np.array([15 / 9, 13 / 9, 14 / 10, 15 / 11])
    half = student.ppf(0.975, 3) * math.sqrt(3 / 4 * ((out - out.mean()) ** 2).sum())
    assert loads.half_width == pytest.approx(half)
    relative = golden.find("all", 1, 2).values.relative
    assert (relative.value, relative.low, relative.high) == (1, 1, 1)


def test_golden_left_out_cells(golden):
    # At B = 1 c lacks one ("all", "agentic"); at B = 2 the groups ac and bc do ("all", "mixed"); at
    # B = 3 abc ("all", "mixed"); at B = 4 nobody lasts to it. The control has c at three sizes.
    assert golden.left_out.tolist() == [0, (1 + 1) + (2 + 2) + (1 + 1) + 0 + 3]


def test_not_available_is_said(golden):
    assert golden.find("code", 3, 2).missing == "2 streams"
    assert golden.find("all", 2, 2, "steady").missing == "no decode step in this phase"
    assert golden.find("all", 2, 2, "cold").values.loads == golden.find("all", 2, 2).values.loads
    with pytest.raises(KeyError):
        golden.find("all", 2, 99)


@pytest.mark.parametrize("b", [2, 3, 4])
def test_same_prompt_twice(golden, b):
    alone = golden.find("all", 1, 2).values
    values = golden.find(CONTROL, b, 2).values
    assert values.loads.value == pytest.approx(alone.loads.value / b)
    assert values.loads_alone.value == pytest.approx(alone.loads.value)
    relative = values.relative
    assert (relative.value, relative.low, relative.high) == pytest.approx((1 / b, 1 / b, 1 / b))
    assert values.uncached.value == pytest.approx(2 / b)
    assert values.hit_rate.value == pytest.approx(alone.hit_rate.value)


def test_one_stream_has_no_interval():
    trace = make_trace(golden_trace().model, golden_streams()[:1])
    values = cache_table(pool([trace]), capacities=[2]).find("all", 1, 2).values
    assert values.loads.low is None and values.loads.why == "one stream"
    assert cache_table(pool([trace]), capacities=[2]).find("all", 2, 2).missing == "1 stream"


def test_refusals():
    streams = pool([golden_trace()])
    with pytest.raises(UsageError, match="B = 5"):
        cache_table(streams, [5], capacities=[2])
    with pytest.raises(UsageError, match="C = 1: C is below k"):
        cache_table(streams, capacities=[1])
    with pytest.raises(UsageError, match="at least 1"):
        cache_table(streams, capacities=[2], n_groups=0)


def test_nothing_missed_alone_has_no_relative_figure():
    steps = [[{0, 1}]] * (COLD_STEPS + 5)
    streams = [make_stream(name, "", steps, (2,)) for name in "ab"]
    table = cache_table(pool([make_trace(make_model([4], [2]), streams)]), [2], capacities=[4])
    values = table.find("all", 2, 4, "steady").values
    assert values.loads.value == 0 and values.hit_rate.value == 1
    assert values.relative is None and values.saved is None
    assert values.bytes_per_token is None  # sizes are not known
    assert table.find("all", 2, 4, "cold").values.relative.value == pytest.approx(0.5)


def twin_counts(twin, group, capacity, phase):
    """Per layer: misses, misses alone, look-ups and cells of one group, with Python sets."""
    steps = min(len(twin.cells[i]) for i in group)
    span = {"all": range(steps), "cold": range(min(steps, COLD_STEPS))}.get(phase)
    span = range(COLD_STEPS, max(steps, COLD_STEPS)) if span is None else span
    rows = []
    for layer in range(twin.model.n_layers):
        own = [[row[layer] for row in twin.cells[i]] for i in group]
        sets = [
            set().union(*(s[d] for s in own)) if all(s[d] for s in own) else None
            for d in range(steps)
        ]
        missed = lru_twin(sets, capacity)
        # Like for like: what the group leaves out, its streams do not see either.
        both = [[s[d] if sets[d] else None for d in range(steps)] for s in own]
        alone = [lru_twin(s, capacity) for s in both]
        ran = [d for d in span if sets[d]]
        rows.append(
            (
                sum(missed[d] for d in ran),
                sum(a[d] for a in alone for d in ran),
                sum(len(sets[d]) for d in ran),
                len(ran),
            )
        )
    return np.array(rows, dtype=float)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4))
def test_equals_the_twin(seed, n_streams):
    # Longer than the cold phase now and then, with every group (none is sampled).
    check_with_twin(
        random_trace(seed, n_streams, max_steps=8 if seed % 3 else COLD_STEPS + 9), n_streams
    )


@pytest.mark.parametrize("seed", range(6))
def test_both_sides_see_the_same_cells(seed):
    check_with_twin(random_trace(seed, 4, max_steps=40, missing=0.2), 4)


def test_a_cell_that_a_lane_lacks_warms_no_cache():
    # At step 1 only a ran. Alone it would load 2 and 3 there, and hit at step 2.
    cells = {"a": [[{0, 1}], [{2, 3}], [{2, 3}]], "b": [[{0, 1}], [set()], [{2, 3}]]}
    streams = [make_stream(name, "", steps, (2,)) for name, steps in cells.items()]
    trace = make_trace(make_model([8], [2]), streams)
    values = cache_table(pool([trace]), [2], capacities=[4]).find("all", 2, 4).values
    assert (values.misses.tolist(), values.misses_alone.tolist()) == ([4], [8])
    assert values.relative.value == pytest.approx(0.5)  # the lanes select the same experts


def check_with_twin(trace, n_streams):
    twin = Twin(trace)
    sizes = range(1, n_streams + 1)
    k = trace.model.top_k.astype(float)
    size = trace.model.expert_bytes.astype(float)
    table = cache_table(pool([trace]), list(sizes), capacities=[3, 5, 80])
    for figure in table.figures:
        b = figure.draw.b
        if figure.draw.kind == "control":
            groups = [(i,) * b for i in range(n_streams)]
        else:
            groups = list(twin.groups(figure.draw.stratum, b))
        counts = {g: twin_counts(twin, g, figure.capacity, figure.phase) for g in groups}
        total = sum(counts.values(), np.zeros((len(k), 4)))
        if not total[:, 3].any():
            assert figure.values is None and figure.missing
            continue

        def ratios(total, b=b):
            missed, alone, asked, cells = total.T
            tokens = b * cells
            per_layer = missed / tokens if tokens.all() else None
            return {
                "loads": missed.sum() / tokens.sum(),
                "loads_alone": alone.sum() / tokens.sum(),
                "relative": missed.sum() / alone.sum() if alone.any() else None,
                "uncached": asked.sum() / tokens.sum(),
                "uncached_alone": tokens @ k / tokens.sum(),
                "bytes_per_token": None if per_layer is None else per_layer @ size,
                "hit_rate": 1 - missed.sum() / asked.sum(),
                "hit_rate_alone": 1 - alone.sum() / (tokens @ k),
            }

        for name, expected in ratios(total).items():
            got = getattr(figure.values, name)
            assert (got is None) == (expected is None)
            if got is not None:
                assert got.value == pytest.approx(expected)
        # The interval: every stream that adds something left out in turn.
        counting = {i for g, c in counts.items() for i in g if c[:, 3].any()}
        without = [
            sum((c for g, c in counts.items() if i not in g), np.zeros((len(k), 4)))
            for i in sorted(counting)
        ]
        got = figure.values.loads
        if len(counting) < 2 or not all(part[:, 3].any() for part in without):
            assert got.low is None and got.why
        else:
            out = np.array([ratios(part)["loads"] for part in without])
            spread = math.sqrt((len(out) - 1) * out.var())
            assert got.half_width == pytest.approx(
                student.ppf(0.975, len(out) - 1) * spread, abs=1e-9
            )


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.integers(2, 5))
def test_larger_caches_miss_no_more_and_all_miss_what_is_new(seed, n_streams):
    streams = pool([random_trace(seed, n_streams, max_steps=12)])
    capacities = [3, 4, 6, 10, 70]
    table = cache_table(streams, [2], capacities=capacities)
    for b in (1, 2):
        found = [table.find("all", b, c).values for c in capacities]
        if found[0] is None:
            continue
        misses = np.array([v.misses for v in found])
        assert (np.diff(misses, axis=0) <= 0).all()
        assert (misses <= found[0].tokens * streams.model.top_k).all()


def test_shuffled_ids_hit_as_uniform_routing_does():
    # Every expert is equally likely to stand anywhere in the order, so steady LRU hits at C / E,
    # whatever B is.
    trace = uniform_trace(12, 200, 2, 16, 2)
    table = cache_table(pool([trace]), [2, 3], capacities=[4, 8])
    for b in (1, 2, 3):
        for capacity in (4, 8):
            if b * 2 > capacity:
                continue
            values = table.find("all", b, capacity, "steady").values
            assert values.hit_rate.low <= capacity / 16 <= values.hit_rate.high
            union = 16 * (1 - (1 - 2 / 16) ** b)
            assert values.uncached.low <= union / b <= values.uncached.high


@pytest.mark.parametrize("seed", range(6))
def test_no_figure_is_nan(seed):
    trace = random_trace(seed, 1 + seed, max_steps=6, missing=0.6)
    table = cache_table(pool([trace]), capacities=[3, 64])
    assert all(math.isfinite(x) for figure in table.figures for x in numbers(figure.values))


def test_layer_that_never_ran():
    steps = [[{0, 1}, set()], [{1, 2}, set()]]
    streams = [make_stream(name, "", steps, (2, 2)) for name in "abc"]
    model = make_model([4, 4], [2, 2], expert_bytes=[1, 1])
    values = cache_table(pool([make_trace(model, streams)]), [2], [2]).find("all", 2, 2).values
    assert values.loads.value == pytest.approx(3 / 4)
    assert values.tokens.tolist() == [12, 0]
    assert values.bytes_per_token is None
