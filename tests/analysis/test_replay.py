from __future__ import annotations

import numpy as np
import pytest
from unionkit import golden_trace, make_model, make_stream, make_trace

from moetap.analysis.lanes import COLD_STEPS, lay_out
from moetap.analysis.pool import pool
from moetap.analysis.replay import (
    GLOBAL,
    SEQUENTIAL,
    cache_of_bytes,
    cache_of_slots,
    join,
    missed_per_step,
    prefill_sets,
    replay,
)
from moetap.errors import UsageError
from moetap.policies import Policy
from moetap.policies.lru import LRU
from moetap.trace import NOT_EXECUTED


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
    class Nothing(Policy):
        name = "nothing"

        def missed(self, look_ups, capacity):
            return np.ones(len(look_ups.ids), dtype=np.bool_)

    (found,) = replay(merged(golden_trace(), 0), [2], 1, Nothing())
    assert found.policy == "nothing"
    assert found.counts().hit_rate == 0


# -- caches of a budget. The golden pair: layer 0 {0,1} {0,1,2}; layer 1 {0,1,2,3} {0,1,2}. Experts
# of layer 0 have 100 bytes, those of layer 1 10.


def test_slots():
    model = golden_trace().model
    own, shared = cache_of_slots(model, 3), cache_of_slots(model, 3, GLOBAL)
    assert (own.label, own.slots.tolist(), own.n_bytes) == ("3", [3, 3], None)
    assert (shared.label, shared.slots.tolist(), shared.capacity) == ("3 x 2", [6, 6], 6)


def test_bytes_are_split_evenly_or_shared():
    model = golden_trace().model
    own = cache_of_bytes(model, 450, "450 B")
    assert own.slots.tolist() == [2, 22]  # 225 each
    shared = cache_of_bytes(model, 450, "450 B", GLOBAL)
    assert (shared.slots.tolist(), shared.size.tolist()) == ([4, 45], [100, 10])
    with pytest.raises(UsageError, match="150 B does not hold an expert: .* needs 200 bytes"):
        cache_of_bytes(model, 150, "150 B")
    with pytest.raises(UsageError, match="no expert sizes; give slots"):
        cache_of_bytes(make_model([4], [2]), 100, "100 B")


def test_missed_per_step_by_rule_and_scope():
    sets, model, lru = merged(golden_trace(), 0, 1), golden_trace().model, LRU()
    per_layer = missed_per_step(sets, cache_of_slots(model, 3), [lru, lru])
    assert per_layer.tolist() == [[2, 4], [1, 1]]
    # One after the other, layer 1 at C = 3: 0 1 2 3 leave 1 2 3, then 0 misses and pushes out 1,
    # which misses and pushes out 2, which misses.
    one_by_one = missed_per_step(sets, cache_of_slots(model, 3), [lru, lru], SEQUENTIAL)
    assert one_by_one.tolist() == [[2, 4], [1, 3]]
    # Six shared slots: all of step 0 fits. In step 1 layer 0 adds its 2, which pushes out 0 of
    # layer 1; that one pushes out 3, which is no member and the oldest.
    shared = missed_per_step(sets, cache_of_slots(model, 3, GLOBAL), [lru])
    assert shared.tolist() == [[2, 4], [1, 1]]
    # 330 bytes: in step 1 layer 0 adds 100 to the 240 that are there, and 0 of layer 1 goes.
    tight = missed_per_step(sets, cache_of_bytes(model, 330, "330 B", GLOBAL), [lru])
    assert tight.tolist() == [[2, 4], [1, 1]]


def test_prefill_sets_are_chunks_and_join_puts_them_first():
    none = NOT_EXECUTED
    rows = np.array([[[0, 1], [2, 3]], [[1, 2], [none, none]], [[0, 3], [none, none]]], np.uint16)
    before = prefill_sets(rows, np.array([4, 4]), 2)
    assert before.requests.tolist() == [[3, 2], [2, 0]]
    assert before.ids.tolist() == [0, 1, 2, 0, 3, 2, 3]
    assert before.ran.tolist() == [[True, True], [True, False]]
    decode = merged(golden_trace(), 0, 1)
    both = join([before, decode])
    assert both.requests.tolist() == [[3, 2], [2, 0], [2, 4], [3, 3]]
    assert both.layer(1).ids.tolist() == [2, 3, 0, 1, 2, 3, 0, 1, 2]
    assert both.ran.tolist() == [[True, True, True, True], [True, False, True, True]]
    nothing = prefill_sets(rows[:0], np.array([4, 4]), 2)
    assert join([nothing, decode]).requests.tolist() == decode.requests.tolist()
