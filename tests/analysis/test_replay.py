from __future__ import annotations

import numpy as np
import pytest
from unionkit import golden_trace, make_model, make_stream, make_trace

from moetap.analysis.lanes import COLD_STEPS, lay_out
from moetap.analysis.pool import pool
from moetap.analysis.replay import replay


def merged(trace, *group):
    return lay_out(pool([trace])).merge(np.array(group))


def test_golden_pair():
    # Sets of a and b: layer 0 {0,1} {0,1,2}; layer 1 {0,1,2,3} {0,1,2}.
    # C = 2: layer 0 misses 2, then 2 alone; layer 1 misses all four and keeps 2 and 3, so then 0
    # and 1 miss. C = 3: layer 1 keeps 1, 2 and 3, so then only 0 misses.
    two, three = replay(merged(golden_trace(), 0, 1), [2, 3], n_lanes=2)
    assert (two.policy, two.capacity, two.n_lanes) == ("lru", 2, 2)
    assert two.misses.tolist() == [[2, 4], [1, 2]]
    assert three.misses.tolist() == [[2, 4], [1, 1]]
    assert two.requests.tolist() == three.requests.tolist() == [[2, 4], [3, 3]]
    assert two.extra_passes.tolist() == [[0, 1], [1, 1]]
    assert three.extra_passes.tolist() == [[0, 1], [0, 0]]


def test_cell_that_a_lane_did_not_execute_is_no_token():
    (found,) = replay(merged(golden_trace(), 0, 2), [4], n_lanes=2)
    assert found.ran.tolist() == [[True, True], [True, False]]
    counts = found.counts()
    assert counts.tokens.tolist() == [4, 2]
    assert counts.requests.tolist() == [5, 2]
    assert counts.misses.tolist() == [3, 2]
    assert counts.hit_rate == pytest.approx(2 / 7)


def test_cold_and_steady_are_apart():
    # One new expert in the first steady step, none later.
    steps = [[{0, 1}]] * COLD_STEPS + [[{1, 2}]] * 3
    trace = make_trace(make_model([4], [2]), [make_stream("a", "", steps, (2,))])
    (found,) = replay(merged(trace, 0), [3], n_lanes=1)
    cold, steady = found.counts("cold"), found.counts("steady")
    assert (cold.misses.tolist(), cold.tokens.tolist()) == ([2], [COLD_STEPS])
    assert (steady.misses.tolist(), steady.tokens.tolist()) == ([1], [3])
    assert found.counts().misses.tolist() == [3]
    (short,) = replay(merged(golden_trace(), 0), [3], n_lanes=1)
    assert short.counts("steady").hit_rate is None


def test_another_policy_can_be_replayed():
    class Nothing:
        name = "nothing"

        def misses(self, sets, capacities):
            return np.stack([sets.requests] * len(capacities)).astype(np.int32)

    (found,) = replay(merged(golden_trace(), 0), [2], 1, Nothing())
    assert found.policy == "nothing"
    assert found.counts().hit_rate == 0
