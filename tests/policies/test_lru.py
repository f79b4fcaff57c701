from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from policykit import lru_twin, step_sets

from moetap.policies import Policy
from moetap.policies.lru import LRU


def misses(layers, n_experts, capacities) -> list[list[list[int]]]:
    """[capacity][layer][step]"""
    sets = step_sets(layers, n_experts)
    return LRU().misses(sets, np.array(capacities)).transpose(0, 2, 1).tolist()


def test_hits_are_touched_before_misses_get_slots():
    # C = 2. {0,1}: two misses. {1,2}: 1 stays, 0 leaves. {0,1}: 2 leaves.
    assert misses([[{0, 1}, {1, 2}, {0, 1}]], [3], [2]) == [[[2, 1, 1]]]


def test_among_equals_the_lowest_id_leaves_first():
    # C = 3. After {0,1,2} expert 3 pushes 0 out, so {1,2} hits and {0} misses.
    assert misses([[{0, 1, 2}, {3}, {1, 2}, {0}]], [4], [3]) == [[[3, 1, 0, 1]]]
    # 2 was touched later than 3, which has the higher id but the older use.
    assert misses([[{1, 3}, {1}, {2}, {0}, {1}, {3}]], [4], [3]) == [[[2, 0, 1, 1, 0, 1]]]


def test_set_larger_than_the_cache():
    # C = 2. {0,1}, then {0,1,2}: 0 and 1 hit in the first pass, 2 costs a second one; 1 and 2 stay.
    layers = [[{0, 1}, {0, 1, 2}, {1, 2}, {0, 1, 2, 3, 4}, {3, 4}]]
    assert misses(layers, [5], [2]) == [[[2, 1, 0, 3, 0]]]
    extra = step_sets(layers, [5]).extra_passes(2)
    assert extra.T.tolist() == [[0, 1, 0, 2, 0]]


def test_cell_that_did_not_run_leaves_the_cache_alone():
    assert misses([[{0, 1}, None, {0, 1}]], [3], [2]) == [[[2, 0, 0]]]


def test_capacities_in_any_order_and_layers_of_their_own():
    layers = [[{0, 1}, {2, 3}, {0, 1}], [{0}, {0}, {5}]]
    assert misses(layers, [4, 6], [4, 2, 4]) == [
        [[2, 2, 0], [1, 0, 1]],
        [[2, 2, 2], [1, 0, 1]],
        [[2, 2, 0], [1, 0, 1]],
    ]


def test_requests_are_distinct_experts():
    sets = step_sets([[{0, 1}, None], [{0}, {1, 2, 3}]], [4, 4])
    assert sets.requests.tolist() == [[2, 1], [0, 3]]


def test_expert_ids_up_to_the_largest_possible():
    assert misses([[{65533, 65534}, {0, 65534}]], [65535], [2, 8]) == [[[2, 1]], [[2, 1]]]


@st.composite
def routings(draw):
    n_experts = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
    n_steps = draw(st.integers(1, 12))
    layers = [
        [
            draw(st.none() | st.sets(st.integers(0, n - 1), min_size=1, max_size=6))
            for _ in range(n_steps)
        ]
        for n in n_experts
    ]
    return layers, n_experts


@settings(max_examples=150, deadline=None)
@given(routings())
def test_equals_the_twin_at_every_capacity(routing):
    layers, n_experts = routing
    capacities = list(range(1, 14))
    found = misses(layers, n_experts, capacities)
    for capacity, per_layer in zip(capacities, found, strict=True):
        assert per_layer == [lru_twin(steps, capacity) for steps in layers]
        # One capacity at a time gives the same: they don't disturb each other.
        assert misses(layers, n_experts, [capacity]) == [per_layer]


@settings(max_examples=100, deadline=None)
@given(routings())
def test_inclusion_and_bounds(routing):
    layers, n_experts = routing
    sets = step_sets(layers, n_experts)
    found = LRU().misses(sets, np.arange(1, 14))
    assert (np.diff(found, axis=0) <= 0).all(), "a larger cache never misses more, at any step"
    assert (found >= 0).all() and (found <= sets.requests).all()
    distinct = [len(set().union(*(cell for cell in steps if cell))) for steps in layers]
    assert (found.sum(axis=1) >= distinct).all()
    assert found[-1].sum(axis=0).tolist() == distinct, "with C >= E only first uses miss"


def test_is_a_policy():
    policy: Policy = LRU()
    assert policy.name == "lru"


def test_importing_policies_and_metrics_does_not_import_numba():
    names = "policies.lru", "analysis.replay", "analysis.cache_io", "analysis.overflow"
    code = "import sys\n" + "".join(f"import moetap.{name}\n" for name in names)
    code += "sys.exit('numba' in sys.modules or 'scipy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
