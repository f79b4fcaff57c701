from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student
from unionkit import Twin, golden_trace, make_model, make_stream, make_trace, random_trace

from moetap.analysis.jackknife import jackknife
from moetap.analysis.lanes import (
    CONTROL,
    Alone,
    Draw,
    checked_capacities,
    checked_sample,
    checked_sizes,
    draws,
    lay_out,
    over_streams,
)
from moetap.analysis.pool import pool
from moetap.errors import UsageError


def cells(sets):
    """[layer][step], None where it did not run."""
    found = np.split(sets.ids, sets.starts[1:-1])
    return [
        [
            set(found[layer * sets.n_steps + step].tolist()) if sets.ran[layer, step] else None
            for step in range(sets.n_steps)
        ]
        for layer in range(sets.n_layers)
    ]


def test_golden_merge():
    lanes = lay_out(pool([golden_trace()]))
    assert cells(lanes.merge(np.array([0, 1]))) == [
        [{0, 1}, {0, 1, 2}],
        [{0, 1, 2, 3}, {0, 1, 2}],
    ]
    # c did not execute layer 1 at step 1, so the group has nothing there.
    assert cells(lanes.merge(np.array([0, 2]))) == [[{0, 1, 2}, {0, 1}], [{0, 1}, None]]
    # d ends after one step.
    assert cells(lanes.merge(np.array([0, 1, 3]))) == [[{0, 1, 2, 3}], [{0, 1, 2, 3}]]
    # A stream with itself is itself.
    assert cells(lanes.merge(np.array([1, 1, 1]))) == cells(lanes.merge(np.array([1])))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.data())
def test_merge_equals_python_sets(seed, n_streams, data):
    trace = random_trace(seed, n_streams)
    group = data.draw(st.lists(st.integers(0, n_streams - 1), min_size=1, max_size=6))
    own = [Twin(trace).cells[i] for i in group]
    expected = [
        [
            set().union(*(s[step][layer] for s in own))
            if all(s[step][layer] for s in own)
            else None
            for step in range(min(map(len, own)))
        ]
        for layer in range(trace.model.n_layers)
    ]
    sets = lay_out(pool([trace])).merge(np.array(group))
    assert cells(sets) == expected
    for first, stop in zip(sets.starts[:-1], sets.starts[1:], strict=True):
        assert (np.diff(sets.ids[first:stop].astype(int)) > 0).all()


@pytest.mark.parametrize("offline", [False, True])
def test_alone_has_the_cells_of_the_group(offline):
    """A count that is all about what comes: of each cell, the look-ups of its layer still ahead."""

    def ahead(_, sets):
        return np.cumsum(sets.requests[::-1], axis=0)[::-1]

    lanes = lay_out(pool([golden_trace()]))
    alone = Alone(lanes, [0, 1, 2, 3], ahead, offline)

    def total(*group):
        return alone.total(np.array(group), lanes.merge(np.array(group)).ran).tolist()

    # a with b: both have all cells, 4 look-ups left in each layer at step 0 and 2 at step 1.
    assert total(0, 1) == [[8, 8], [4, 4]]
    # a with c, which lacks step 1 of layer 1: a goes without it too.
    assert total(0, 2) == [[8, 4], [4, 0]]
    # a with d, which ends after a step. A count said not to depend on what comes is cut off there.
    assert total(0, 3) == [[2 + 2, 2 + 2] if offline else [4 + 2, 4 + 2]]


def test_all_rows_layer_by_layer():
    streams = pool([golden_trace()])
    lanes = lay_out(streams)
    assert all(own is rows for own, rows in zip(lanes.rows, streams.rows, strict=True))
    spans = zip(lanes.first_row, lanes.n_steps, streams.rows, strict=True)
    for first, n, rows in spans:
        assert np.array_equal(lanes.ids[:, first : first + n], rows.transpose(1, 0, 2))


def test_draws_cover_strata_and_the_control():
    found = {(d.stratum, d.b): d for d in draws(pool([golden_trace()]), [1, 2, 3], 100, seed=0)}
    assert [key for key in found if key[0] == CONTROL] == [(CONTROL, 2), (CONTROL, 3)]
    assert found["all", 2].n_groups == 6 and found["all", 2].exhaustive
    assert found["mixed", 2].n_groups == 4
    assert found["code", 3].n_groups == 0 and found["code", 3].missing == "2 streams"
    control = found[CONTROL, 3]
    assert control.members.tolist() == [[i] * 3 for i in range(4)]
    assert control.exhaustive and control.distinct == 1 and found["all", 3].distinct == 3
    assert found["code", 2].holds.tolist() == [[1], [1]]


def test_draws_are_samples_where_there_are_more_groups():
    streams = pool([random_trace(1, 12)])
    found = draws(streams, [1, 4], 10, seed=3)
    again = draws(streams, [1, 4], 10, seed=3)
    for one, other in zip(found, again, strict=True):
        assert np.array_equal(one.members, other.members)
    every = next(d for d in found if (d.stratum, d.b) == ("all", 4))
    assert every.n_groups == 10 and every.n_possible == math.comb(12, 4) and not every.exhaustive
    assert all(len(set(group)) == 4 for group in every.members.tolist())


def test_refusals():
    streams = pool([golden_trace()])
    assert checked_sizes(streams, None, (1, 2, 8)) == [1, 2, 8]  # defaults may be too large
    assert checked_sizes(streams, [4, 2], ()) == [1, 2, 4]
    with pytest.raises(UsageError, match="B = 5 is more than the 4 streams"):
        checked_sizes(streams, [5], ())
    with pytest.raises(UsageError, match="B = 0"):
        checked_sizes(streams, [0], ())
    with pytest.raises(UsageError, match="C is below k = 2"):
        checked_capacities(streams, [64, 1])
    with pytest.raises(UsageError, match="no capacity"):
        checked_capacities(streams, [])
    with pytest.raises(UsageError, match="at least 1"):
        checked_sample(0, 0)
    with pytest.raises(UsageError, match="seed"):
        checked_sample(1, -1)


def all_of(members, n_possible=None) -> Draw:
    members = np.array(members)
    return Draw("all", "all", members.shape[1], members, n_possible or len(members))


def test_golden_interval():
    # Streams 0, 1, 2 in pairs 01, 02, 12: 3/1, 4/2, 8/1 -> 15/4.
    # Without 0: 8/1, without 1: 4/2, without 2: 3/1. Mean 13/3; squares 121/9 49/9 16/9,
    # sum 186/9, x 2/3, root 3.7118429; t(0.975, 2) = 4.3026527.
    found = over_streams(
        all_of([[0, 1], [0, 2], [1, 2]]), np.array([3.0, 4, 8]), np.array([1.0, 2, 1])
    )
    assert found.value == pytest.approx(15 / 4)
    assert found.half_width == pytest.approx(3.7118429 * 4.3026527, abs=1e-5)


def test_golden_interval_of_a_sample():
    # Four streams, of whose six pairs 01, 12, 23, 03 were drawn: 1, 2, 4, 1 -> 8/4 = 2.
    # Without 0: 6/2, 1: 5/2, 2: 2/2, 3: 3/2. Mean 2; squares 1 1/4 1 1/4, x 3/4 = 1.875.
    # r = (1-2, 0, 2, -1)/4, sum of squares 6/16; surplus 1 x (1 - 4/6) x 6/16 = 1/8.
    draw = all_of([[0, 1], [1, 2], [2, 3], [0, 3]], n_possible=6)
    found = over_streams(draw, np.array([1.0, 2, 4, 1]), np.ones(4))
    assert found.value == 2
    assert found.half_width == pytest.approx(math.sqrt(1.75) * student.ppf(0.975, 3))
    # Never less than if the groups were independent: streams that cancel out are no evidence.
    # 1, 3, 1, 3: without 0: 4/2, 1: 4/2, ... the jackknife sees nothing; r = 1/4 each, 4/16.
    found = over_streams(draw, np.array([1.0, 3, 1, 3]), np.ones(4))
    assert found.half_width == pytest.approx(math.sqrt(4 / 16) * student.ppf(0.975, 3))


def test_weighted_sum_of_ratios():
    top, bottom = np.array([[3.0, 1], [4, 5]]), np.array([[1.0, 2], [2, 2]])
    found = over_streams(all_of([[0], [1]]), top, bottom, np.array([10.0, 100]))
    assert found.value == pytest.approx(10 * 7 / 3 + 100 * 6 / 4)
    left_out = np.array([10 * 2 + 100 * 5 / 2, 10 * 3 + 100 / 2])
    assert found.half_width == pytest.approx(jackknife(0, left_out).half_width)


def test_no_interval_is_said():
    one = over_streams(all_of([[0]]), np.ones(1), np.ones(1))
    assert (one.value, one.low, one.why) == (1, None, "one stream")
    pair = over_streams(all_of([[0, 1]]), np.ones(1), np.ones(1))
    assert pair.low is None and "without one of the 2 streams" in pair.why
    assert over_streams(all_of([[0], [1]]), np.zeros(2), np.zeros(2)) is None
    assert over_streams(all_of(np.empty((0, 2))), np.zeros(0), np.zeros(0)) is None


def test_stream_that_adds_nothing_is_no_sample():
    # The third stream is too short to count: two streams, one degree of freedom.
    found = over_streams(all_of([[0], [1], [2]]), np.array([1.0, 3, 0]), np.array([1.0, 1, 0]))
    alone = over_streams(all_of([[0], [1]]), np.array([1.0, 3]), np.ones(2))
    assert found == alone
    only = over_streams(all_of([[0], [1]]), np.array([1.0, 0]), np.array([1.0, 0]))
    assert only.why == "one stream"


@pytest.mark.parametrize("b", [1, 2, 4, 8])
@pytest.mark.parametrize("n_streams", [20, 60, 200])
def test_interval_of_sampled_groups_holds_the_truth(b, n_streams):
    """Groups of random streams, each worth its streams' mean and something of its own (which
    streams push each other out), weighted by random lengths. The truth is 0."""
    rng = np.random.default_rng([b, n_streams])
    held, widths, values = 0, [], []
    n_trials, n_groups = 600, 100
    for _ in range(n_trials):
        own = rng.standard_normal(n_streams)
        length = rng.integers(50, 150, n_streams)
        picks = rng.random((n_groups, n_streams)).argpartition(b - 1, axis=1)[:, :b]
        members = np.unique(np.sort(picks, axis=1), axis=0)
        worth = own[members].mean(axis=1) + 0.3 * rng.standard_normal(len(members)) * (b > 1)
        weight = length[members].min(axis=1).astype(float)
        draw = all_of(members, math.comb(n_streams, b))
        found = over_streams(draw, worth * weight, weight)
        held += found.low <= 0 <= found.high
        widths.append(found.half_width)
        values.append(found.value)
    assert 0.92 <= held / n_trials <= 0.985
    # Not held by being wide: the mean width is that of the true spread, give or take a fifth.
    assert np.mean(widths) == pytest.approx(1.96 * np.std(values), rel=0.2)


def test_ids_of_every_word_of_the_mask():
    ids = [0, 1, 63, 64, 127, 128, 255, 256, 511]
    model = make_model([512], [len(ids)])
    trace = make_trace(model, [make_stream("a", "", [[set(ids)]], [len(ids)])])
    assert cells(lay_out(pool([trace])).merge(np.array([0]))) == [[set(ids)]]
