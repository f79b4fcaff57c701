"""Policies that decide live: by hand, against replays and twins, and what check_policy refuses."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_policies import MRU, sequences
from twins import TWINS, look_ups, serve

from moetap.errors import UsageError
from moetap.policies import BUILT_IN, Online, get
from moetap.testing import check_policy

ONLINE = ["lru", "lfu", "lfu-kept", "lfu-aging", "fifo", "clock", "sieve", "slru", "pinned"]


def held(cache, n=10):
    return [x for x in range(n) if x in cache]


def run(cache, *batches):
    """(missed, left) for each batch."""
    found = []
    for batch in batches:
        missed = [x for x in batch if x not in cache]
        found.append((missed, sorted(cache.request(batch))))
    return found


# -- by hand


def test_lru():
    # C = 3. 1 is used after 0, so 0 leaves for 3, then 2, the lower of the two used before 3.
    cache = get("lru").online(10, 3)
    assert run(cache, [0, 1], [1, 2], [3], [0, 4]) == [
        ([0, 1], []),
        ([2], []),
        ([3], [0]),
        ([0, 4], [1, 2]),
    ]
    assert held(cache) == [0, 3, 4]


def test_lfu():
    # C = 3. 0 is used three times, 1 and 2 twice; 2 longer ago. Forgotten, 2 starts from one again
    # and is the first to leave. Kept, it has three uses and 3 one: the same; then 1 has two.
    seen = [0, 1, 2], [0, 2], [0, 1], [3], [2], [3]
    assert run(get("lfu").online(10, 3), *seen) == [
        ([0, 1, 2], []),
        ([], []),
        ([], []),
        ([3], [2]),
        ([2], [3]),
        ([3], [2]),
    ]
    assert run(get("lfu-kept").online(10, 3), *seen)[3:] == [([3], [2]), ([2], [3]), ([3], [1])]


def test_fifo():
    # C = 3. Hits change nothing: 0 leaves first, but for a batch that it is a member of.
    cache = get("fifo").online(10, 3)
    assert run(cache, [0], [1, 2], [0], [3], [1, 4], [0]) == [
        ([0], []),
        ([1, 2], []),
        ([], []),
        ([3], [0]),
        ([4], [2]),
        ([0], [1]),
    ]


def test_slru():
    # C = 5, four of them protected: 0 and 1 are, and those on probation leave before them.
    cache = get("slru").online(10, 5)
    assert run(cache, [0, 1], [0, 1], [2, 3, 4], [5], [6, 7]) == [
        ([0, 1], []),
        ([], []),
        ([2, 3, 4], []),
        ([5], [2]),
        ([6, 7], [3, 4]),
    ]
    # Forgotten, 0 comes back on probation and leaves after 5, 6 and 7, before 1.
    cache.forget([0])
    assert run(cache, [0], [8, 9], [2, 3]) == [([0], []), ([8, 9], [5, 6]), ([2, 3], [0, 7])]


# -- all of them


def fitted(name, n):
    return get(name).fit(np.arange(n)[::-1] % 4)


@pytest.mark.parametrize("name", ONLINE)
@settings(max_examples=150, deadline=None)
@given(sequences(max_objects=12, max_batches=30), st.integers(1, 12))
def test_misses_what_a_replay_misses(name, sequence, capacity):
    n, batches = sequence
    batches = [batch for batch in batches if len(batch) <= capacity]
    policy = fitted(name, n)
    cache = policy.online(n, capacity)
    found = []
    for batch in batches:
        found += [x not in cache for x in batch]
        cache.request(batch)
    assert found == policy.missed(look_ups(batches, n), capacity).tolist()


@pytest.mark.parametrize("name", ONLINE)
def test_the_size_of_a_model(name):
    rng = np.random.default_rng(0)
    n, k, capacity = 256, 8, 64
    share = 1 / np.arange(1, n + 1)
    batches = [sorted(rng.choice(n, k, False, share / share.sum()).tolist()) for _ in range(2000)]
    policy = fitted(name, n)
    cache = policy.online(n, capacity)
    found = []
    for batch in batches:
        found += [x not in cache for x in batch]
        cache.request(batch)
    assert found == policy.missed(look_ups(batches, n), capacity).tolist()


@pytest.mark.parametrize("name", ONLINE)
def test_forgotten_ones_miss_and_leave_room(name):
    cache = fitted(name, 10).online(10, 3)
    run(cache, [0, 1], [1, 2], [0, 2])
    cache.forget([2, 1, 9])
    assert held(cache) == [0]
    assert run(cache, [1, 2]) == [([1, 2], [])]
    cache.forget(range(10))
    cache.forget([0])
    assert run(cache, [7, 8, 9]) == [([7, 8, 9], [])]
    cache.clear()
    assert held(cache) == []


@pytest.mark.parametrize("name", ONLINE)
@settings(max_examples=150, deadline=None)
@given(sequences(max_objects=10, max_batches=30), st.integers(4, 8), st.data())
def test_forgetting_is_an_eviction_from_outside(name, sequence, capacity, data):
    n, batches = sequence
    counts, size = (np.arange(n)[::-1] % 4).tolist(), [1] * n
    cache, twin = get(name).fit(np.array(counts)).online(n, capacity), TWINS[name]
    twin = twin(batches, capacity, size, counts)
    for now, batch in enumerate(batches):
        twin.now = now
        if batch:
            hits = [x for x in batch if x in twin.held()]
            twin.seen(batch)
            serve(twin, batch, hits, capacity, size, keep=False)
        cache.request(batch)
        assert held(cache, n) == sorted(twin.held())
        gone = data.draw(st.sets(st.sampled_from(held(cache, n)), max_size=2)) if batch else ()
        cache.forget(gone)
        for x in gone:
            twin.remove(x)
            twin.passed(x)


@pytest.mark.parametrize("name", ONLINE)
def test_more_objects_than_16_bits(name):
    cache = fitted(name, 70_000).online(70_000, 2)
    assert run(cache, [1, 65_537], [1, 65_537], [1, 69_999]) == [
        ([1, 65_537], []),
        ([], []),
        ([69_999], [65_537]),
    ]


@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [-1], [10], [0, 1, 2, 3]])
def test_ids_that_compiled_code_must_not_see(ids):
    cache = get("lru").online(10, 3)
    with pytest.raises(ValueError, match="distinct, rising and below 10|4 experts .* 3 slots"):
        cache.request(ids)
    assert held(cache) == []


def test_who_cannot():
    refused = {}
    for name in BUILT_IN:
        if name not in ONLINE or name == "pinned":
            with pytest.raises(UsageError, match=f"{name} cannot decide online") as error:
                get(name).online(4, 2)
            refused[name] = str(error.value).partition("it needs ")[2]
    assert refused == {
        "lfu-bypass": "room besides the slots",
        "static": "room besides the slots",
        "static-preloaded": "room besides the slots",
        "pinned": "counts (`fit`)",
        "belady": "to know what will be requested",
        "belady-admit": "to know what will be requested",
        "belady-bypass": "to know what will be requested",
    }
    with pytest.raises(UsageError, match="mru cannot decide online: .* `online` of its own"):
        MRU().online(4, 2)


def test_help_does_not_import_numba():
    code = (
        "import contextlib, sys\nfrom moetap.cli import main\n"
        "with contextlib.suppress(SystemExit):\n    main(['--help'])\n"
        "import moetap.policies.lru\nsys.exit('numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "replay" in done.stdout


# -- a third party's, and what may be wrong with it


class Live(Online):
    def __init__(self, capacity):
        self.capacity, self.order = capacity, []

    def request(self, ids):
        others = [x for x in self.order if x not in ids]
        kept = others[: self.capacity - len(ids)] if ids else others
        left = others[len(kept) :]
        self.order = kept + (list(ids) if ids else [])
        return left

    def __contains__(self, x):
        return x in self.order

    def forget(self, ids):
        self.order = [x for x in self.order if x not in ids]

    def clear(self):
        self.order = []


def live_mru(kind):
    return type("LiveMRU", (MRU,), {"online": lambda self, n, capacity: kind(capacity)})


class TestTheSuiteCatches:
    def refused(self, match, kind=Live, **changes):
        with pytest.raises(AssertionError, match=match):
            check_policy(live_mru(type("Wrong", (kind,), changes)))

    def test_nothing_where_nothing_is_wrong(self):
        check_policy(live_mru(Live))

    def test_another_rule(self):
        class Other(MRU):
            def online(self, n, capacity):
                return get("lru").online(n, capacity)

        with pytest.raises(AssertionError, match="something else than in a replay"):
            check_policy(Other)

    def test_a_member_that_leaves(self):
        def request(self, ids):
            return [*Live.request(self, ids), self.order.pop()] if len(ids) > 1 else []

        self.refused("member of .* is not held", request=request)

    def test_more_than_fits(self):
        self.refused("more than C", __init__=lambda self, c: Live.__init__(self, c + 1))

    def test_leaving_in_silence(self):
        def request(self, ids):
            Live.request(self, ids)
            return []

        self.refused("not what it said", request=request)

    def test_leaving_twice(self):
        self.refused("left twice", request=lambda self, ids: 2 * Live.request(self, ids))

    def test_leaving_without_having_been_there(self):
        def request(self, ids):
            new = [x for x in ids if x not in self.order]
            return Live.request(self, ids) + new

        self.refused("was not held", request=request)

    def test_one_state_for_all_layers(self):
        shared = Live(0)

        def request(self, ids):
            shared.capacity = self.capacity
            left = Live.request(shared, ids)
            self.order = shared.order
            return left

        self.refused("not what it said|was not held|something else", request=request)

    def test_forget_and_clear_that_do_nothing(self):
        self.refused("forget did not", forget=lambda self, ids: None)
        self.refused("clear did not", clear=lambda self: None)

    def test_clear_that_leaves_something_behind(self):
        def clear(self):
            self.order, self.request = [], get("lru").online(12, self.capacity).request

        self.refused("is not held|something else", clear=clear)

    def test_forget_that_takes_more(self):
        self.refused("and no more", forget=lambda self, ids: self.clear())
