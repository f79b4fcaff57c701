from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import real
from hypothesis import given, settings
from hypothesis import strategies as st
from localitykit import LocalityTwin, entropy, locality_trace, trace_of
from scipy.stats import t as student
from unionkit import make_model, make_stream, make_trace, random_trace

from moetap.analysis.locality import locality
from moetap.analysis.locality.recency import histogram_quantile
from moetap.analysis.pool import pool
from moetap.errors import UsageError

T1 = 12.7062047362  # t(0.975, 1)


def line(lines, layers="all", **fields):
    """The one line for these layers (or depth group) whose other fields are as given."""
    (found,) = (
        x
        for x in lines
        if x.layers.label == layers
        and x.layers.kind in ("overall", "group")
        and all(getattr(x, name) == value for name, value in fields.items())
    )
    return found


@pytest.fixture(scope="module")
def golden():
    return locality(pool([locality_trace()]), capacities=(1, 2, 3, 4), hot_sizes=(1, 2, 3))


# The trace (decoder layers 3 and 5, top-2 of 4 and top-1 of 4):
#
#   step        0     1     2     3
#   x layer 3  0 1   0 2   1 2   0 1
#     layer 5  0     0     1     0
#   y layer 3  0 1   0 1   2 3
#     layer 5  0     -     2


def test_golden_lag_overlap(golden):
    # Lag 1: x 1 1 1, y 2 0 of 2 each.
    three = line(golden.lags, "3")
    assert three.overlap[0].value == pytest.approx(5 / 10)
    # Lag 2: x 1 1, y 0. Without x: 0, without y: 1/2; mean 1/4, variance 1/2 x 2/16.
    assert three.overlap[1].value == pytest.approx(2 / 6)
    assert three.overlap[1].half_width == pytest.approx(T1 / 4)
    # Layer 5: x 1 0 0, and nothing from y, whose step 1 was not executed; lag 2: x 0 1, y 0.
    five = line(golden.lags, "5")
    assert five.overlap[0].value == pytest.approx(1 / 3)
    assert five.overlap[0].why == "one stream"
    assert five.overlap[1].value == pytest.approx(1 / 3)
    assert line(golden.lags).overlap[0].value == pytest.approx((5 / 2 + 1) / 8)
    assert line(golden.lags).n_pairs[:4].tolist() == [8, 6, 2, 0]
    assert line(golden.lags).overlap[3] is None
    assert math.isnan(line(golden.lags).uniform[3])


def test_golden_lag_baselines(golden):
    # Layer 3, 7 cells: selected 5 5 3 1 times. (20 + 20 + 6) / (7 x 6) / 2.
    three = line(golden.lags, "3")
    assert three.popular[0] == pytest.approx(23 / 42)
    # x, 4 cells: 3 3 2 -> 14 / 12 / 2 = 7/12; y, 3 cells: 2 2 1 1 -> 4 / 6 / 2 = 1/3.
    assert three.own[0] == pytest.approx((3 * 7 / 12 + 2 * 1 / 3) / 5)
    assert three.own[1] == pytest.approx((2 * 7 / 12 + 1 * 1 / 3) / 3)
    assert line(golden.lags).uniform[0] == pytest.approx((5 * 2 / 4 + 3 * 1 / 4) / 8)


def test_golden_reuse(golden):
    # Layer 3. x step 1: 0 after 1 step, nothing between, 1 stands above it (same step, larger id).
    # Step 2: 1 after 2 steps, 0 and 2 between; 2 after 1. Step 3: 0 after 2, 1 and 2 between; 1
    # after 1, below 2. y step 1: 0 below 1, and 1.
    three = line(golden.reuse, "3")
    assert (three.lookups, three.first_uses) == (14, 7)
    assert three.distance.tolist() == [5, 0, 2, 0]
    assert three.depth.tolist() == [2, 3, 2, 0]
    assert three.time.tolist() == [0, 5, 2, 0]
    # Layer 5: x 0 at once, and again after 1 stood between.
    five = line(golden.reuse, "5")
    assert (five.lookups, five.first_uses) == (6, 4)
    assert five.distance.tolist() == five.depth.tolist() == [1, 1, 0, 0]
    assert line(golden.reuse).time.tolist() == [0, 6, 3, 0]


def test_golden_lru(golden):
    hits = {h.capacity: h for h in line(golden.reuse, "3").hits}
    assert hits[2].every.value == pytest.approx(5 / 14)
    assert hits[3].every.value == pytest.approx(7 / 14)
    assert hits[3].uniform == pytest.approx(3 / 4)
    # C = 2: x 3 of 8, y 2 of 6. Left out: 1/3 and 3/8, each 1/48 from the mean.
    assert hits[2].every.half_width == pytest.approx(T1 / 48)
    assert hits[2].cold == hits[2].every and hits[2].steady is None
    assert hits[1].every is None and hits[1].missing == "a step needs k = 2 slots"
    assert line(golden.reuse, "5").hits[0].every.value == pytest.approx(1 / 6)
    assert line(golden.reuse).hits[1].every.value == pytest.approx((5 + 2) / 20)


def test_golden_usage(golden):
    # 5 5 3 1 of 14: 2 x 5/14 x 1.485427 + 3/14 x 2.222392 + 1/14 x 3.807355 = 1.809200 bits.
    found = golden.usage
    assert found.entropy[0] == pytest.approx(1.809200, abs=1e-6)
    assert found.effective[0] == pytest.approx(2**1.809200, abs=1e-5)
    assert found.corrected[0] == pytest.approx(1.809200 + 3 / (28 * 0.693147), abs=1e-6)
    assert found.max_share[0] == pytest.approx(5 / 14)
    # Ascending 1 3 5 5: 2 (1 + 6 + 15 + 20) / 14 = 6, less E + 1, over E.
    assert found.gini[0] == pytest.approx(1 / 4)
    # Layer 5, ascending 0 1 1 4 of 6: 2 (0 + 2 + 3 + 16) / 6 = 7.
    assert found.gini[1] == pytest.approx(2 / 4)
    assert found.never.tolist() == [0, 1]
    assert found.heat.tolist() == [[5 / 14, 5 / 14, 3 / 14, 1 / 14], [4 / 6, 1 / 6, 1 / 6, 0]]


def test_golden_hottest(golden):
    # Layer 5: x 3 1 0 0, y 1 0 1 0. n = 2: x takes 0 1 (4 of 4; 1 of y's 2), y takes 0 2 (2 of 2; 3
    # of x's 4). Layer 3: x 3 3 2 0, y 2 2 1 1, both take 0 1: 6 of 8 and 4 of 6.
    five = line(golden.hottest, "5", n=2)
    assert (five.fitted, five.tested.value) == pytest.approx((1, 4 / 6))
    assert five.uniform == pytest.approx(2 / 4)
    # Left out x: 1/2, y: 3/4.
    assert five.tested.half_width == pytest.approx(T1 / 8)
    every = line(golden.hottest, n=2)
    assert (every.fitted, every.tested.value) == pytest.approx((16 / 20, 14 / 20))
    # n = 1: 0 everywhere. Of equally hot experts the smaller id is taken.
    assert line(golden.hottest, "3", n=1).tested.value == pytest.approx(5 / 14)


def test_golden_transfers(golden):
    found = {(x.fitted_on, x.tested_on): x.share for x in golden.transfers if x.n == 2}
    assert found["code", "agentic"].value == pytest.approx((4 + 1) / 8)
    assert found["agentic", "code"].value == pytest.approx((6 + 3) / 12)
    assert found["code", "code"] is None  # one stream


def test_golden_lift(golden):
    # Pairs (layer 3, layer 5) in 6 cells: 00 4 times, 10 3, 20, 11, 21, 22, 32 once.
    # Selected 4 4 3 1 and 4 1 1. Lifts 1.5 1.125 .5 1.5 2 2 6.
    assert golden.lifts.source.tolist() == [3] and golden.lifts.target.tolist() == [5]
    assert golden.lifts.n_cells.tolist() == [6]
    assert golden.lifts.plug_in[0] == pytest.approx((4 * 1.5 + 3 * 1.125 + 12) / 12)
    # x's lifts over y's pairs: 00 4/3, 10 8/9, 22 and 32 unknown: 1. y's over x's: 00 2 three
    # times, 10 2 twice, 20 0, 11 and 21 unknown: 1.
    assert golden.lifts.tested[0] == pytest.approx((4 / 3 + 8 / 9 + 2 + 6 + 4 + 0 + 2) / 12)


def test_golden_predictions(golden):
    def rates(target, method, layers):
        found = line(golden.predictions, layers, target=target, method=method)
        return found.top_k.value, found.top_2k.value, found.n_cells

    # y by x's table: step 0 0 is guessed, step 2 0 and 1 (not 2). x by y's table: 0 at every step
    # (a tie with 2 at step 1), then 2; step 2 is 1.
    assert rates("next layer", "co-selection", "5") == pytest.approx((4 / 6, 4 / 6, 6))
    # y by x's 0 1: step 0; x by y's 0 2: all but step 2.
    assert rates("next layer", "popularity", "5") == pytest.approx((4 / 6, 4 / 6, 6))
    # x's table, from 0 1: 13/9 10/9 13/9 0, so 0 2 are guessed: 1 and 1 of y's two steps. y's table
    # says nothing, so 0 1 are guessed: 1 1 2 of x's three steps. 2k = E guesses find everything.
    assert rates("next step", "co-selection", "3") == pytest.approx((6 / 10, 1, 5))
    # Repeating: overlap at lag 1; with 4 guesses all that the stream used before.
    assert rates("next step", "repeat", "3") == pytest.approx((5 / 10, 7 / 10, 5))
    assert rates("next step", "repeat", "5") == pytest.approx((1 / 3, 2 / 3, 3))
    found = line(golden.predictions, "5", target="next step", method="repeat")
    assert (found.uniform_k, found.uniform_2k) == pytest.approx((1 / 4, 2 / 4))


def test_golden_counts(golden):
    assert golden.not_executed.tolist() == [0, 1]
    assert golden.n_cells == 7
    assert sorted(golden.half.tolist()) == [0, 1]


def test_one_half_without_a_pair_is_said(golden):
    # y never executed layer 5 at two steps running.
    found = line(golden.predictions, "5", target="next step", method="co-selection")
    assert found.top_k is None
    assert found.missing == "one half of the streams has no pair of executed cells"


def test_first_layer_has_none_before_it(golden):
    found = line(golden.predictions, "3", target="next layer", method="popularity")
    assert found.top_k is None and found.missing == "no MoE layer before it"


def test_one_stream():
    trace = locality_trace()
    found = locality(pool([make_trace(trace.model, trace.streams[:1])]))
    assert found.half is None
    assert line(found.lags).overlap[0].low is None
    assert line(found.reuse).hits[0].every.why == "one stream"
    assert all(x.tested is None and x.missing == found.no_split for x in found.hottest)
    assert np.isnan(found.lifts.tested).all() and not np.isnan(found.lifts.plug_in).any()
    for x in found.predictions:
        assert (x.top_k is None) == (x.method != "repeat")
    assert found.transfers == ()


def test_one_layer():
    model = make_model((4,), (2,))
    cells = [[{0, 1}], [{0, 2}]]
    streams = [make_stream(name, "", cells, (2,)) for name in "ab"]
    found = locality(pool([make_trace(model, streams)]))
    assert len(found.lifts.plug_in) == 0
    next_layer = [x for x in found.predictions if x.target == "next layer"]
    assert all(x.missing == "no MoE layer before it" for x in next_layer)
    assert line(found.predictions, "0", target="next step", method="co-selection").top_k.value == 1


def test_layer_that_never_ran():
    cells = [[{0, 1}, set()], [{0, 2}, set()]]
    streams = [make_stream(name, name, cells, (2, 2)) for name in "ab"]
    found = locality(pool([make_trace(make_model((4, 4), (2, 2)), streams)]))
    assert math.isnan(found.usage.entropy[1]) and np.isnan(found.usage.heat[1]).all()
    assert found.not_executed.tolist() == [0, 4]
    assert line(found.lags, "1").overlap[0] is None
    assert line(found.reuse, "1").hits[0].every is None
    assert line(found.hottest, "1", n=8).tested is None
    assert math.isnan(found.lifts.plug_in[0])


@pytest.mark.parametrize("options", [{"capacities": (0,)}, {"hot_sizes": (0,)}, {"seed": -1}])
def test_bad_arguments(options):
    with pytest.raises(UsageError):
        locality(pool([locality_trace()]), **options)


def check(found, twin):
    """All figures against Python sets."""
    spans = [x for x in found.layers if x.kind != "group"]
    at = {id(x): i for i, x in enumerate(found.layers)}
    longest = max(len(s) for s in twin.cells)
    for span in spans:
        i = at[id(span)]
        lag_line = found.lags[i]
        for lag in [x for x in (1, 2, 3, 5, 63, 64) if x <= max(longest, 3)]:
            expected = twin.overlap(lag, span.span)
            got = lag_line.overlap[lag - 1]
            assert (got is None) == (expected is None)
            if expected is None:
                continue
            assert got.value == pytest.approx(expected)
            base = lag_line.popular[lag - 1], lag_line.own[lag - 1]
            if longest < 20:
                assert base == pytest.approx(twin.baselines(lag, span.span))
            has = {s for s, _, _ in twin.pairs(lag, span.span)}
            if len(has) > 1:
                out = np.array([twin.overlap(lag, span.span, s) for s in has])
                n = len(out)
                half = student.ppf(0.975, n - 1) * math.sqrt((n - 1) * out.var())
                assert got.half_width == pytest.approx(half, abs=1e-9)

        reuse = found.reuse[i]
        first, distance, time = twin.reuse(span.span)
        assert reuse.first_uses == first
        assert {v: c for v, c in enumerate(reuse.distance.tolist()) if c} == distance
        assert {v: c for v, c in enumerate(reuse.time.tolist()) if c} == time
        for hits in reuse.hits:
            if hits.missing:
                assert hits.capacity < twin.model.top_k[span.span].max()
                continue
            parts = (hits.cold, slice(0, 64)), (hits.steady, slice(64, None))
            for got, phase in (*parts, (hits.every, slice(None))):
                n_hits, lookups = twin.lru(hits.capacity, span.span, phase)
                assert (got is None) == (lookups == 0)
                if lookups:
                    assert got.value == pytest.approx(n_hits / lookups)

        if found.half is None:
            continue
        a, b = twin.halves()
        for x in (x for x in found.hottest if x.layers is span):
            hits, total = twin.hot(x.n, span.span, [(a, b), (b, a)])
            assert (x.tested is None) == (total == 0)
            if total:
                assert x.tested.value == pytest.approx(hits / total)
        for x in (x for x in found.predictions if x.layers is span):
            guesses = [
                g
                for layer in range(twin.model.n_layers)[span.span]
                if layer or x.target == "next step"
                for g in (
                    twin.repeats(layer)
                    if x.method == "repeat"
                    else twin.guesses(x.target, x.method, layer)
                )
            ]
            assert x.n_cells == len(guesses)
            if guesses:
                got = x.top_k.value, x.top_2k.value
                assert got == pytest.approx(tuple(np.mean(guesses, axis=0)))

    for layer in range(twin.model.n_layers):
        counts = twin.counts(range(twin.n), layer)
        if counts:
            assert found.usage.entropy[layer] == pytest.approx(entropy(counts))
        for e in range(twin.model.n_experts[layer]):
            assert found.usage.counts[layer, e] == counts[e]
        if layer:
            every = twin.neighbours("next layer", layer, range(twin.n))
            total, pairs = twin.lift(layer, every, every)
            if pairs:
                assert found.lifts.plug_in[layer - 1] == pytest.approx(total / pairs)
            if found.half is not None:
                a, b = (twin.neighbours("next layer", layer, side) for side in twin.halves())
                if a and b:
                    parts = [twin.lift(layer, a, b), twin.lift(layer, b, a)]
                    expected = sum(p[0] for p in parts) / sum(p[1] for p in parts)
                    assert found.lifts.tested[layer - 1] == pytest.approx(expected)
                else:
                    assert math.isnan(found.lifts.tested[layer - 1])
    names = sorted(set(twin.classes))
    assert bool(found.transfers) == (len(names) == 2)
    for x in found.transfers:
        if x.fitted_on == x.tested_on:
            a, b = twin.halves(x.fitted_on)
            sides = [(a, b), (b, a)]
        else:
            sides = [
                [
                    [s for s in range(twin.n) if twin.classes[s] == c]
                    for c in (x.fitted_on, x.tested_on)
                ]
            ]
        hits, total = twin.hot(x.n, slice(None), sides)
        assert (x.share is None) == (total == 0)
        if total:
            assert x.share.value == pytest.approx(hits / total)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 6), missing=st.sampled_from([0, 0.2, 0.6]))
def test_equals_python_sets(seed, n, missing):
    trace = random_trace(seed, n, max_steps=7, missing=missing)
    found = locality(
        pool([trace]), capacities=(1, 2, 3, 5, 20), hot_sizes=(1, 3, 30), seed=seed % 5
    )
    check(found, LocalityTwin(trace, found.half))


@pytest.mark.parametrize("seed", [1, 2])
def test_long_streams_equal_python_sets(seed):
    rng = np.random.default_rng(seed)
    streams = []
    for i in range(2):
        cells = []
        for _ in range(int(rng.integers(100, 140))):
            ids = set(rng.choice(9 if rng.random() < 0.5 else 4, 3, replace=False).tolist())
            cells.append([ids if rng.random() > 0.05 else set()])
        # Experts that come back after exactly 64 and 65 steps; earlier uses must be forgotten.
        for step in (2, 3, 67, 68, 133, 134):
            if step < len(cells):
                cells[step] = [{9, 10, 11}]
        streams.append(make_stream(f"s{i}", "code", cells, (3,)))
    trace = make_trace(make_model((12,), (3,)), streams)
    found = locality(pool([trace]), capacities=(3, 4, 6, 12), hot_sizes=(2,))
    check(found, LocalityTwin(trace, found.half))


def draws(rng, n_streams, n_steps, n_layers, k, n_experts):
    """Independent uniform routing, (S, steps, L, k)."""
    noise = rng.random((n_streams, n_steps, n_layers, n_experts))
    return noise.argpartition(k, axis=3)[..., :k]


def test_uniform_routing_gives_the_uniform_values():
    trace = trace_of(draws(np.random.default_rng(5), 12, 150, 2, 2, 16), 16)
    found = locality(pool([trace]), capacities=(4, 8), hot_sizes=(4,))
    lags = line(found.lags)
    inside = 0
    for j in range(64):
        assert lags.overlap[j].value == pytest.approx(2 / 16, abs=0.02)
        inside += lags.overlap[j].low <= lags.uniform[j] <= lags.overlap[j].high
    assert inside >= 56  # 61 of 64 on average
    assert lags.popular == pytest.approx(lags.uniform, abs=0.002)
    assert lags.own == pytest.approx(lags.uniform, abs=0.002)
    # A full cache of C of E equally likely experts holds C/E of the next step's.
    for hits in line(found.reuse).hits:
        assert hits.steady.value == pytest.approx(hits.capacity / 16, abs=0.02)
    hot = line(found.hottest, n=4)
    assert hot.fitted > hot.uniform > hot.tested.low
    assert hot.tested.value == pytest.approx(0.25, abs=0.01)
    assert found.usage.corrected == pytest.approx([4, 4], abs=0.005)
    assert found.lifts.tested == pytest.approx([1], abs=0.02)
    assert found.lifts.plug_in == pytest.approx([1 + 15 * 15 / (1800 * 4)], abs=0.02)
    for x in (x for x in found.predictions if x.layers.kind == "overall"):
        assert x.top_k.value == pytest.approx(x.uniform_k, abs=0.02)
        assert x.top_2k.value == pytest.approx(x.uniform_2k, abs=0.02)


@pytest.mark.parametrize("stay", [0.3, 0.8])
def test_sticky_routing_is_recovered(stay):
    # A step repeats the one before it with chance `stay`, else it is drawn afresh.
    rng = np.random.default_rng(7)
    ids = draws(rng, 20, 200, 1, 2, 16)
    for s in range(20):
        for d in range(1, 200):
            if rng.random() < stay:
                ids[s, d] = ids[s, d - 1]
    found = locality(pool([trace_of(ids, 16)]), capacities=(2,))
    lags = line(found.lags)
    for lag in (1, 2, 4):
        expected = stay**lag + (1 - stay**lag) * 2 / 16
        assert lags.overlap[lag - 1].value == pytest.approx(expected, abs=0.03)
    repeat = line(found.predictions, target="next step", method="repeat")
    assert repeat.top_k.value == lags.overlap[0].value
    table = line(found.predictions, target="next step", method="co-selection")
    # Repeated and popular-by-chance experts alike.
    assert table.top_k.value == pytest.approx(stay + (1 - stay) * 2 / 16, abs=0.03)
    # With C = k only the step before is held, so all steps but the first hit like a repeat.
    (hits,) = line(found.reuse).hits
    assert hits.every.value == pytest.approx(repeat.top_k.value * 199 / 200)


def test_repeated_step_overlaps_fully():
    ids = np.tile(draws(np.random.default_rng(1), 3, 1, 2, 4, 16), (1, 80, 1, 1))
    found = locality(pool([trace_of(ids, 16)]), capacities=(4,))
    lags = line(found.lags)
    assert [x.value for x in lags.overlap] == pytest.approx([1] * 64)
    assert lags.own == pytest.approx([1] * 64)  # taste, not order
    reuse = line(found.reuse)
    assert reuse.distance[1:].sum() == 0 and reuse.time[2:].sum() == 0
    assert reuse.hits[0].cold.value == pytest.approx(63 / 64)
    assert reuse.hits[0].steady.value == 1


def test_a_layer_that_copies_the_one_before_is_predicted():
    ids = draws(np.random.default_rng(2), 8, 100, 1, 2, 16)
    ids = np.concatenate([ids, (ids + 5) % 16], axis=2)
    found = locality(pool([trace_of(ids, 16)]))
    table = line(found.predictions, target="next layer", method="co-selection")
    assert table.top_k.value > 0.99
    # Selected pairs: half are a copy, P = 1 against 1/8; half a chance pair, 1/15 against 1/8.
    assert found.lifts.tested[0] == pytest.approx(0.5 * 8 + 0.5 * 8 / 15, abs=0.1)


def test_shuffled_steps_lose_order_and_keep_taste():
    rng = np.random.default_rng(3)
    ids = draws(rng, 10, 200, 1, 2, 16)
    for s in range(10):
        ids[s] %= 8  # a taste of the stream's own: eight of the sixteen experts
        ids[s] += 8 * (s % 2)
        ids[s, :, :, 1] = ids[s, :, :, 0] // 8 * 8 + (ids[s, :, :, 0] + 1 + ids[s, :, :, 1] % 7) % 8
    lags = line(locality(pool([trace_of(ids, 16)])).lags)
    assert lags.own[0] == pytest.approx(2 / 8, abs=0.01)
    assert lags.popular[0] == pytest.approx(2 / 16, abs=0.01)
    assert lags.overlap[0].value == pytest.approx(lags.own[0], abs=0.02)


def test_split_is_seeded_and_deals_out_each_class():
    trace = trace_of(draws(np.random.default_rng(0), 9, 2, 1, 2, 4), 4)
    one, same, other = (locality(pool([trace]), seed=s).half for s in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()
    assert abs(2 * int(one.sum()) - 9) == 1
    code = one[::2]
    assert abs(2 * int(code.sum()) - 5) == 1


def test_lru_equals_an_independent_program():
    expected = real.load_json("replay.expected.json")["traces"][
        "gptoss20b_decode_4x511_small[0:511]"
    ]
    trace = real.gpt_oss()
    found = locality(pool([replace(trace, streams=trace.streams[:1])]), capacities=(4, 8, 16, 24))
    reuse = line(found.reuse)
    assert reuse.lookups == expected["accesses"]
    for hits in reuse.hits:
        facts = expected["capacities"][str(hits.capacity)]
        # Experts of one step are equally old; that program orders them otherwise.
        slack = 20 if facts["mce_event_atomic_lru_tie_dependent"] else 0
        got = hits.every.value * reuse.lookups
        assert got == pytest.approx(facts["mce_event_atomic_lru"], abs=slack + 1e-6)


def test_quantile_of_nothing_is_none():
    assert histogram_quantile(np.zeros(4, dtype=np.int64), 0.5) is None
    assert histogram_quantile(np.array([0, 3, 1]), 0.75) == 1
    assert histogram_quantile(np.array([0, 3, 1]), 0.76) == 2
