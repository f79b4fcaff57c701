"""Hits on published routing against two independent programs; skipped where it is not present.

libcachesim and the simulator of moe-cache-eval, one cache per layer, requests in the order of the
published rows. Under sequential look-ups every value must be equal. The step-atomic values of
moe-cache-eval are equal where a tie makes no difference. Three of its policies draw lots among
equals (moetap: the lowest id leaves first, or of two that are needed in the same step the highest):
its LRU, its LFU and its Belady with forced admission, though only LRU's are marked in the data.
There the values must be within 0.1 %, and a twin in plain Python must give their value with their
lots and moetap's with moetap's rule, which shows that the lots are all that differs.
"""

from __future__ import annotations

import numpy as np
import pytest
import real

from moetap.policies import LookUps, get

SMALL = "gptoss20b_decode_4x511_small[0:511]"
TRACES = (SMALL, "gptoss20b_decode_4x511_small")
LAYERS, EXPERTS, WIDTH = 24, 32, 4

SEQUENTIAL = {
    "libcachesim_LRU": "lru",
    "libcachesim_LFU": "lfu",
    "libcachesim_FIFO": "fifo",
    "libcachesim_Belady": "belady",
    "mce_sequential_lru": "lru",
    "mce_sequential_lfu": "lfu-kept",
    "mce_sequential_belady": "belady-bypass",
    "mce_sequential_static": "static-preloaded",
}
ATOMIC = {
    "mce_event_atomic_belady": "belady-bypass",
    "mce_event_atomic_static": "static-preloaded",
}
BY_LOT = {
    "mce_event_atomic_lru": "lru",
    "mce_event_atomic_lfu": "lfu-bypass",
    "mce_event_atomic_belady_forced_admit": "belady-admit",
}


def look_ups(name, layer) -> LookUps:
    topk, _ = real.gpt_oss_topk()
    rows = topk[: real.load_json("replay.expected.json")["traces"][name]["tokens"], layer]
    starts = WIDTH * np.arange(len(rows) + 1)
    return LookUps(starts, rows.astype(np.uint16).ravel(), np.ones(EXPERTS, dtype=np.int64))


def rising(asked: LookUps) -> LookUps:
    """Members in moetap's order, on which ties depend."""
    ids = np.sort(asked.ids.reshape(-1, WIDTH), axis=1).ravel()
    return LookUps(asked.starts, ids, asked.size)


def hits(asked: LookUps, policy: str, capacity: int) -> int:
    # Their static list is fitted on what it is tested on.
    found = get(policy).fit(np.bincount(asked.ids, minlength=len(asked.size)))
    return int((~found.missed(asked, capacity)).sum())


@pytest.mark.parametrize("name", TRACES)
def test_every_value_that_lots_do_not_touch(name):
    expected = real.load_json("replay.expected.json")["traces"][name]["capacities"]
    layers = [look_ups(name, layer) for layer in range(LAYERS)]
    checked = 0
    for capacity, values in expected.items():
        for key, policy in SEQUENTIAL.items():
            assert values[key] == sum(hits(a.sequential, policy, int(capacity)) for a in layers)
        for key, policy in ATOMIC.items():
            assert values[key] == sum(hits(a, policy, int(capacity)) for a in layers)
        if not values["mce_event_atomic_lru_tie_dependent"]:
            assert values["mce_event_atomic_lru"] == sum(
                hits(rising(a), "lru", int(capacity)) for a in layers
            )
        checked += 1
    assert checked == {SMALL: 4}.get(name, 2)


@pytest.mark.parametrize("name", TRACES)
def test_values_by_lot_are_close(name):
    expected = real.load_json("replay.expected.json")["traces"][name]["capacities"]
    layers = [rising(look_ups(name, layer)) for layer in range(LAYERS)]
    for capacity, values in expected.items():
        for key, policy in BY_LOT.items():
            found = sum(hits(asked, policy, int(capacity)) for asked in layers)
            assert found == pytest.approx(values[key], rel=1e-3)


@pytest.mark.parametrize("capacity", ["8", "16"])
def test_lots_are_all_that_differs(capacity):
    values = real.load_json("replay.expected.json")["traces"][SMALL]["capacities"][capacity]
    layers = [rising(look_ups(SMALL, layer)) for layer in range(LAYERS)]
    lots = np.random.default_rng(20260729).random(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    for key, policy in BY_LOT.items():
        own = np.arange(EXPERTS) * (-1 if policy == "belady-admit" else 1)
        twins = [twin(a, policy, int(capacity), own) for a in layers]
        assert twins == [hits(a, policy, int(capacity)) for a in layers]
        theirs = sum(
            twin(a, policy, int(capacity), lot) for a, lot in zip(layers, lots, strict=True)
        )
        assert theirs == values[key]


def twin(asked: LookUps, policy: str, capacity: int, lot: np.ndarray) -> int:
    """Hits if after each step the most valuable stay; of equals, those with the highest lot."""
    steps = asked.ids.reshape(-1, WIDTH).tolist()
    never = len(steps)
    upcoming = [never] * EXPERTS
    after = []  # the next use of each member, step by step
    for step in range(len(steps) - 1, -1, -1):
        after.append([upcoming[x] for x in steps[step]])
        for x in steps[step]:
            upcoming[x] = step
    held: set[int] = set()
    last, count, need, found = [0] * EXPERTS, [0] * EXPERTS, [0] * EXPERTS, 0
    worth = {
        "lru": lambda x: (last[x], lot[x]),
        "lfu-bypass": lambda x: (count[x], last[x], lot[x]),
        "belady-admit": lambda x: (-need[x], lot[x]),
    }[policy]
    for step, (members, uses) in enumerate(zip(steps, reversed(after), strict=True)):
        loads = [x for x in members if x not in held]
        found += WIDTH - len(loads)
        for x, use in zip(members, uses, strict=True):
            last[x], need[x] = step, use
            count[x] += 1
        if len(held | set(members)) <= capacity:
            held |= set(members)
            continue
        first = set(loads) if policy == "belady-admit" else set()
        others = sorted((held | set(members)) - first, key=worth, reverse=True)
        held = first | set(others[: capacity - len(first)])
    return found


def test_eight_events_of_expertflow():
    event = real.load_json("fixtures.expected.json")["expertflow8"]
    rows, expected = np.array(event["topk"], dtype=np.uint16), event["expected"]
    asked = LookUps(8 * np.arange(9), np.sort(rows, axis=1).ravel(), np.ones(128, dtype=np.int64))
    capacity = expected["capacity_per_layer"]
    for key, policy in (("lru", "lru"), ("static_hotset", "static-preloaded")):
        found = get(policy).fit(np.bincount(rows.ravel(), minlength=128))
        missed = found.missed(asked, capacity)
        assert (~missed).sum() == expected[key]["hits"]
        assert missed.sum() == expected[key]["misses"]


def test_excerpt_by_hand_of_the_same_paths():
    # Two slots. Sequential, in the order of the rows: 3 and 1, then 1 hits and 0 pushes out 3, then
    # 3 pushes out 1 and 0 hits.
    asked = LookUps(
        np.array([0, 2, 4, 6]), np.array([3, 1, 1, 0, 3, 0], np.uint16), np.ones(4, dtype=np.int64)
    )
    assert hits(asked.sequential, "lru", 2) == 2
    # As sets {1,3} {0,1} {0,3}: the same hits, whatever the order.
    ids = np.array([1, 3, 0, 1, 0, 3], dtype=np.uint16)
    assert hits(LookUps(asked.starts, ids, asked.size), "lru", 2) == 2
    # 0, 1 and 3 are all asked for twice, so 0 and 1 are the hot ones.
    assert hits(asked, "static-preloaded", 2) == 4
