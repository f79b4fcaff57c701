"""Times and rates, by hand and against their own definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetap.analysis.timing import layer_bytes, step_bytes, time_bound
from moetap.errors import UsageError

GB = 1e9
MB = 1_000_000


def test_bytes_by_hand():
    assert step_bytes([3, 1], [1 * MB, 2 * MB]) == 5 * MB
    assert step_bytes([3, 1], 1 * MB) == 4 * MB
    assert step_bytes([[3, 1], [0, 2]], [1 * MB, 2 * MB]).tolist() == [5 * MB, 4 * MB]
    assert layer_bytes([3, 1], [1 * MB, 2 * MB]).tolist() == [3 * MB, 2 * MB]


def test_golden_io_bound():
    """5 MB a step at 1 GB/s: 5 ms a step, so 200 tokens/s for each of 2 lanes, 400 in total."""
    bound = time_bound(step_bytes([3, 1], [1 * MB, 2 * MB]), 2, 1 * GB)
    assert bound.step_bytes == 5 * MB
    assert bound.io.step_s == pytest.approx(5e-3) and bound.io.token_s == pytest.approx(2.5e-3)
    assert bound.io.lane_tokens_per_s == pytest.approx(200)
    assert bound.io.total_tokens_per_s == pytest.approx(400)
    assert bound.compute is bound.full_overlap is bound.no_overlap is bound.io_share is None


def test_golden_with_compute():
    """125 tokens/s untraced: 8 ms. Full overlap max(5, 8) = 8 ms, none 5 + 8 = 13 ms."""
    bound = time_bound(5 * MB, 2, 1 * GB, untraced_tokens_per_s=125)
    assert bound.compute.step_s == pytest.approx(8e-3)
    assert bound.full_overlap.step_s == pytest.approx(8e-3)
    assert bound.full_overlap.lane_tokens_per_s == pytest.approx(125)
    assert bound.full_overlap.total_tokens_per_s == pytest.approx(250)
    assert bound.no_overlap.step_s == pytest.approx(13e-3)
    assert bound.no_overlap.lane_tokens_per_s == pytest.approx(1000 / 13)
    assert bound.no_overlap.total_tokens_per_s == pytest.approx(2000 / 13)
    assert bound.io_share == 0


def test_steps_are_averaged_as_times():
    """Steps of 2 and 14 ms with 8 ms of compute: max is 8 and 14, so 11 ms; their means would
    give 8. The rate is 1 / 11 ms, not the mean of 125 and 71.4."""
    bound = time_bound([2 * MB, 14 * MB], 1, 1 * GB, untraced_tokens_per_s=125)
    assert bound.io.step_s == pytest.approx(8e-3)
    assert bound.full_overlap.step_s == pytest.approx(11e-3)
    assert bound.full_overlap.lane_tokens_per_s == pytest.approx(1000 / 11)
    assert bound.no_overlap.step_s == pytest.approx(16e-3)
    assert bound.io_share == 0.5


def test_golden_target_model():
    """Qwen3.6-35B-A3B cold at B = 1: 40 layers x 8 experts of 1,769,472 bytes are 566,231,040
    bytes, 166.54 ms at 3.4 GB/s, 6.0 tokens/s at most."""
    bound = time_bound(step_bytes(np.full(40, 8), 1_769_472), 1, 3.4 * GB)
    assert bound.step_bytes == 566_231_040
    assert bound.io.step_s == pytest.approx(0.16653854, rel=1e-6)
    assert bound.io.lane_tokens_per_s == pytest.approx(6.0046, rel=1e-4)


def test_nothing_read_is_no_bound():
    bound = time_bound(0, 2, 1 * GB, untraced_tokens_per_s=100)
    assert bound.io.step_s == 0
    assert bound.io.lane_tokens_per_s is None and bound.io.total_tokens_per_s is None
    assert bound.full_overlap.lane_tokens_per_s == pytest.approx(100)


@given(
    st.lists(st.integers(0, 10**10), min_size=1, max_size=20),
    st.integers(1, 64),
    st.floats(1e6, 1e11),
    st.floats(0.1, 1e4),
)
def test_bounds_are_ordered(sizes, lanes, bandwidth, rate):
    bound = time_bound(sizes, lanes, bandwidth, rate)
    slack = 1 + 1e-9
    assert max(bound.io.step_s, bound.compute.step_s) <= bound.full_overlap.step_s * slack
    assert bound.full_overlap.step_s <= bound.no_overlap.step_s * slack
    assert bound.no_overlap.step_s <= 2 * bound.full_overlap.step_s * slack
    of_mean = time_bound(float(np.mean(sizes)), lanes, bandwidth, rate)
    assert of_mean.io.step_s == pytest.approx(bound.io.step_s)
    assert of_mean.no_overlap.step_s == pytest.approx(bound.no_overlap.step_s)
    assert of_mean.full_overlap.step_s <= bound.full_overlap.step_s * slack


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((5.0, 0, GB), "0 lanes"),
        ((5.0, 1, 0.0), "bandwidth"),
        ((5.0, 1, float("nan")), "bandwidth"),
        ((5.0, 1, GB, 0.0), "tokens/s untraced"),
        ((5.0, 1, GB, float("inf")), "tokens/s untraced"),
        ((-1.0, 1, GB), "not negative"),
        (([float("nan")], 1, GB), "finite"),
        (([], 1, GB), r"shape \(0,\)"),
        (([[1.0]], 1, GB), r"shape \(1, 1\)"),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(UsageError, match=words):
        time_bound(*arguments)


@pytest.mark.parametrize(
    ("loads", "sizes", "words"),
    [
        (1, MB, "shape"),
        ([], MB, "shape"),
        ([1, 2], [MB], "expert sizes for 2 layers"),
        ([1, 2], [MB] * 3, "expert sizes for 2 layers"),
        ([1, -2], MB, "loads"),
        ([1, 2], [MB, -MB], "expert sizes must"),
    ],
)
def test_refused_loads(loads, sizes, words):
    with pytest.raises(UsageError, match=words):
        step_bytes(loads, sizes)
