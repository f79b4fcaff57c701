"""The slot table misses exactly where the policy's replay does, and never evicts its own set."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetap import policies
from moetap.capture.streaming.slots import SlotTable
from moetap.policies import StepSets
from moetap.policies.lru import LRU

ONLINE = ("lru", "lfu", "lfu-kept", "lfu-aging", "fifo", "clock", "sieve", "slru")
steps = st.lists(st.sets(st.integers(0, 19), max_size=6), max_size=80)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ONLINE), steps, st.integers(6, 20))
def test_misses_equal_the_policys(name, steps, n_slots):
    policy = policies.get(name)
    table = SlotTable(n_slots, policy.online(20, n_slots))
    misses = []
    for step in steps:
        wanted = sorted(step)
        misses.append(len(table.request(wanted)))
        assert set(wanted) <= set(table.slot_of)
        assert len(set(table.slot_of.values())) == len(table.slot_of) <= n_slots
    if not steps:
        return
    sizes = [len(s) for s in steps]
    sets = StepSets(
        n_steps=len(steps),
        n_experts=np.array([20]),
        starts=np.concatenate([[0], np.cumsum(sizes)]),
        ids=np.array([e for s in steps for e in sorted(s)], np.uint16),
        ran=np.ones((1, len(steps)), bool),
    )
    assert policy.misses(sets, np.array([n_slots]))[0, :, 0].tolist() == misses


def lru(n_slots):
    return SlotTable(n_slots, LRU().online(9, n_slots))


def test_more_experts_than_slots_are_refused():
    with pytest.raises(ValueError, match="3 experts in one batch, 2 slots"):
        lru(2).request([1, 2, 3])


def test_forgotten_experts_miss_again_and_give_back_their_slots():
    table = lru(2)
    assert table.request([1, 2]) == [1, 2]
    table.forget([1])
    assert table.request([1, 2]) == [1]
    table.clear(LRU().online(9, 2))
    assert table.request([7, 8]) == [7, 8]
    assert sorted(table.slot_of.values()) == [0, 1]


def test_another_policy_keeps_what_is_resident():
    table = lru(2)
    table.request([1])
    table.request([2])
    before = dict(table.slot_of)
    table.keep(LRU().online(9, 2))
    assert table.slot_of == before
    assert table.request([2]) == []
    assert table.request([3]) == [3]  # in place of 1, which the new policy saw first as well
    assert table.slot_of == {2: before[2], 3: before[1]}
