"""Each policy by hand, against its plain twin, and the rules that hold for all."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import TWINS, fewest_misses, look_ups, run

from moetap import policies
from moetap.errors import MoetapError, UsageError
from moetap.policies import BUILT_IN, LookUps, Policy, get
from moetap.policies.lru import LRU
from moetap.policies.stacks import CURVES, misses, places
from moetap.testing import check_policy

FORCED = [name for name in BUILT_IN if get(name).forced]


def missed(name, batches, capacity, n_objects=8, size=None, keep=False, counts=None):
    """The ids that miss, batch by batch."""
    asked = look_ups(batches, n_objects, size, keep)
    policy = get(name)
    if policy.fitted:
        policy = policy.fit(np.array(counts))
    flags = policy.missed(asked, capacity).tolist()
    found = []
    for batch in batches:
        found.append([x for x in batch if flags.pop(0)])
    return found


def ones(*ids):
    return [[x] for x in ids]


def test_every_built_in_has_a_twin_and_its_own_name():
    assert list(TWINS) == list(BUILT_IN)
    assert [get(name).name for name in BUILT_IN] == list(BUILT_IN)


# -- by hand, C = 2 and one id at a time unless said otherwise


def test_lru():
    assert missed("lru", ones(0, 1, 0, 2, 1), 2) == [[0], [1], [], [2], [1]]


def test_fifo_does_not_care_for_hits():
    assert missed("fifo", ones(0, 1, 0, 2, 0), 2) == [[0], [1], [], [2], [0]]


def test_clock_gives_a_second_chance():
    # 0 has its bit set and becomes the newest, 1 leaves; then 0 has no bit and leaves before 2.
    assert missed("clock", ones(0, 1, 0, 2, 0, 3, 0), 2)[3:] == [[2], [], [3], []]
    assert missed("clock", ones(0, 1, 0, 2, 3, 2), 2)[3:] == [[2], [3], []]


def test_sieve_judges_new_ones_first():
    # C = 3. 0 was used, so 3 pushes out 1 and the hand is at 2, which 4 pushes out; CLOCK too. Then
    # the hand is at 3: 5 pushes out 3 although 0 is older and its bit has been taken.
    assert missed("sieve", ones(0, 1, 2, 0, 3, 4, 5, 0, 3), 3)[4:] == [[3], [4], [5], [], [3]]


def test_slru_protects_what_was_used_again():
    # C = 5, four of them protected: 0 survives any number of others.
    assert missed("slru", ones(0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 7, 3), 5)[-3:] == [[], [], [3]]


def test_lfu_and_what_becomes_of_the_count():
    # 0 is used twice, 1 leaves for 2 and 2 for 1: forgotten, 1 starts from one again.
    seen = ones(0, 0, 1, 2, 1, 2, 1, 2, 3)
    assert missed("lfu", seen, 2) == [[0], [], [1], [2], [1], [2], [1], [2], [3]]
    # Kept, the second 2 finds 0 and 1 used twice each; 0 was used longer ago and leaves.
    assert missed("lfu-kept", seen, 2)[:8] == [[0], [], [1], [2], [1], [2], [], []]
    # Aged: each eviction raises what a new one starts from, so that 0 leaves in the end.
    long = ones(*[0] * 3, 1, 2, 1, 2, 1, 2, 0)
    assert missed("lfu", long, 2)[-1] == [] and missed("lfu-aging", long, 2)[-1] == [0]


def test_static_holds_the_hottest():
    counts = [1, 5, 5, 3]
    seen = [[0, 1], [1, 2], [2, 3]]
    assert missed("static", seen, 2, 4, counts=counts) == [[0, 1], [2], [3]]
    assert missed("static-preloaded", seen, 2, 4, counts=counts) == [[0], [], [3]]
    assert missed("static-preloaded", seen, 1, 4, counts=counts) == [[0], [2], [2, 3]]


def test_pinned_ones_leave_last():
    counts = [9, 0, 0, 0]
    assert missed("pinned", ones(0, 1, 2, 0), 2, 4, counts=counts)[-1] == []
    assert missed("pinned", [[0], [1, 2], [0]], 2, 4, counts=counts)[-1] == [0]
    half = get("pinned:1").fit(np.array([9, 8, 0, 0]))
    assert half.name == "pinned:1"
    asked = look_ups(ones(0, 1, 2, 3, 0, 1), 4)
    assert half.missed(asked, 4).tolist() == [True] * 4 + [False] * 2
    assert half.missed(asked, 2).tolist() == [True] * 4 + [False, True]


def test_belady_and_bypass():
    # At 2, forced: 1 is needed last, so it leaves. Bypass: 2 itself is never needed again.
    seen = ones(0, 1, 2, 0, 1)
    assert missed("belady", seen, 2) == [[0], [1], [2], [], [1]]
    assert missed("belady-bypass", seen, 2) == [[0], [1], [2], [], []]
    # {0,1}, {1,2}: 1 was there and may leave for 2, although 0 is no member.
    steps = [[0, 1], [1, 2], [0, 2], [1]]
    assert missed("belady", steps, 2) == [[0, 1], [2], [0], [1]]
    assert missed("belady-admit", steps, 2) == [[0, 1], [2], [], [1]]


@pytest.mark.parametrize("name", FORCED)
def test_set_larger_than_the_cache(name):
    # C = 2. Residents of the first pass hit; 3 and 4 are left.
    seen = [[1, 2], [0, 1, 2, 3, 4], [3, 4], [2, 3]]
    found = missed(name, seen, 2, counts=[0] * 8)
    assert found == [[1, 2], [0, 3, 4], [], [2]]
    kept = missed(name, [[0, 1, 2], [0], [1]], 2, keep=True, counts=[0] * 8)
    assert kept[:2] == [[0, 1, 2], []]  # over the budget until the next batch


def test_bytes():
    # Room for 10: 6 and 3 fit, 5 pushes out 6; then 3 and 5 stay and 2 more fit.
    size = [6, 3, 5, 2]
    assert missed("lru", ones(0, 1, 2, 1, 3, 2, 0), 10, 4, size) == [
        [0], [1], [2], [], [3], [], [0],
    ]  # fmt: skip


def test_step_sets_of_layers_as_one_cache():
    from policykit import step_sets

    sets = step_sets([[{0, 1}, None, {1}], [{0}, {0, 2}, {1}]], [2, 3])
    asked = sets.together(np.array([7, 5]))
    batches = np.split(asked.ids, asked.starts[1:-1])
    assert [b.tolist() for b in batches] == [[0, 1], [2], [], [2, 4], [1], [3]]
    assert asked.size.tolist() == [7, 7, 5, 5, 5]
    assert sets.layer(1).ids.tolist() == [0, 0, 2, 1]
    assert sets.layer(1).starts.tolist() == [0, 1, 3, 4]
    assert sets.extra_passes(np.array([1, 1])).tolist() == [[1, 0], [0, 1], [0, 0]]


def test_more_objects_than_16_bits():
    from policykit import step_sets

    sets = step_sets([[{60_000}], [{60_000}]], [60_001, 60_001])
    asked = sets.together(np.ones(2, dtype=np.int64))
    assert asked.ids.tolist() == [60_000, 120_001]
    assert LRU().missed(asked, 2).tolist() == [True, True]


# -- against the twins


@st.composite
def sequences(draw, max_objects=8, max_batches=14):
    n = draw(st.integers(1, max_objects))
    member = st.integers(0, n - 1)
    batches = draw(st.lists(st.sets(member, max_size=4).map(sorted), max_size=max_batches))
    if draw(st.booleans()):  # sequential look-ups
        batches = [[x] for batch in batches for x in batch]
    return n, batches


@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=120, deadline=None)
@given(sequences(), st.integers(1, 9), st.booleans(), st.data())
def test_equals_its_twin(name, sequence, capacity, keep, data):
    n, batches = sequence
    size = [1] * n
    if data.draw(st.booleans()):
        size = data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
        capacity += 2  # no object is larger than the cache
    counts = data.draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))
    policy = get(name).fit(np.array(counts))
    found = policy.missed(look_ups(batches, n, size, keep), capacity).tolist()
    assert len(found) == sum(map(len, batches))
    expected = run(TWINS[name], batches, capacity, size, keep, counts)
    # Which of two that are never needed again, or in one batch, leaves is left open.
    if name.startswith("belady") and len(set(size)) > 1:
        return
    if name == "belady":
        assert sum(found) == sum(expected)
    else:
        assert found == expected


# -- what holds for all


@settings(max_examples=150, deadline=None)
@given(sequences(), st.lists(st.integers(0, 4), min_size=8, max_size=8))
def test_belady_misses_least(sequence, counts):
    n, batches = sequence
    asked = look_ups(batches, n)
    for capacity in range(1, n + 1):
        total = {
            name: int(get(name).fit(np.array(counts[:n])).missed(asked, capacity).sum())
            for name in BUILT_IN
        }
        assert total["belady"] == min(total[name] for name in FORCED)
        free = [total[name] for name in BUILT_IN if name != "static-preloaded"]
        if max(map(len, batches), default=0) <= capacity:
            assert total["belady-bypass"] == min(free)
            assert total["belady-bypass"] <= total["belady-admit"] <= total["belady"]


@settings(max_examples=60, deadline=None)
@given(sequences(max_objects=5, max_batches=7))
def test_no_choice_of_victims_misses_less_than_belady(sequence):
    n, batches = sequence
    for capacity in range(1, n + 1):
        found = get("belady").missed(look_ups(batches, n), capacity)
        assert found.sum() == fewest_misses([b for b in batches if b], capacity)


@settings(max_examples=150, deadline=None)
@given(sequences(max_objects=12, max_batches=20), st.data())
def test_a_curve_is_one_replay_for_each_capacity(sequence, data):
    n, batches = sequence
    asked = look_ups(batches, n)
    cut = data.draw(st.integers(0, len(batches)))
    for name in CURVES:
        found = misses(places(name, asked, np.array([0, cut, len(batches)])))
        assert found.shape == (2, n + 2 - 1)
        assert (np.diff(found, axis=1) <= 0).all(), "inclusion: a larger cache never misses more"
        assert found[:, 0].sum() == len(asked.ids)
        for capacity in range(1, n + 1):
            flags = get(name).missed(asked, capacity)
            first = int(asked.starts[cut])
            assert found[:, capacity].sum() == flags.sum()
            if name == "lru":
                assert found[0, capacity] == flags[:first].sum()
        assert places(name, asked).tolist() == [places(name, asked)[0].tolist()]


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_lru_inclusion(sequence):
    n, batches = sequence
    asked = look_ups(batches, n)
    flags = np.stack([LRU().missed(asked, capacity) for capacity in range(1, n + 2)])
    assert not (flags[1:] & ~flags[:-1]).any(), "what hits at C hits at C + 1"


@pytest.mark.parametrize("n", [255, 256, 257])
def test_curve_where_places_change_their_type(n):
    rng = np.random.default_rng(0)
    asked = look_ups([[x] for x in [*rng.permutation(n), *rng.integers(0, n, 400)]], n)
    for name in CURVES:
        found = misses(places(name, asked))[0]
        for capacity in (1, 2, n // 2, n - 1, n):
            assert found[capacity] == get(name).missed(asked, capacity).sum()


def test_curves_are_of_two_policies_in_slots():
    with pytest.raises(UsageError, match="no curve of fifo"):
        places("fifo", look_ups([[0]], 1))
    with pytest.raises(UsageError, match="slots"):
        places("lru", look_ups([[0]], 1, [5]))


# -- the registry and the conformance suite


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_ins_conform(name):
    check_policy(type(get(name)), n_cases=15)


def test_unknown_names_and_numbers():
    with pytest.raises(UsageError, match="no policy is called 'lur'; there are lru, lfu"):
        get("lur")
    for spec in ("lru:3", "pinned:x", "pinned:-1", "pinned:"):
        with pytest.raises(UsageError, match="pinned|lru"):
            get(spec)
    with pytest.raises(UsageError, match="must be fitted"):
        get("static").missed(look_ups([[0]], 1), 1)
    with pytest.raises(UsageError, match="must be fitted"):
        get("pinned").missed(look_ups([[0]], 1), 1)


class MRU(Policy):
    """A third party's, in plain Python: the most recently used leaves."""

    name = "mru"

    def missed(self, asked: LookUps, capacity: int):
        held: list[int] = []
        found = []
        for first, stop in zip(asked.starts[:-1], asked.starts[1:], strict=True):
            batch = asked.ids[first:stop].tolist()
            found += [x not in held for x in batch]
            if not batch:
                continue
            others = [x for x in held if x not in batch]
            while others and sum(asked.size[x] for x in [*others, *batch]) > capacity:
                others.pop()
            if not asked.keep:
                while sum(asked.size[x] for x in batch) > capacity:
                    batch.pop(0)
            held = others + batch
        return np.array(found, dtype=np.bool_)


@pytest.fixture
def plug_ins(monkeypatch):
    """Pretend that packages with these entry points are installed."""

    def install(**points):
        made = [EntryPoint(n, v, policies.GROUP) for n, v in points.items()]
        monkeypatch.setattr(policies, "entry_points", lambda group: made)

    return install


def test_third_parties(plug_ins):
    check_policy(MRU)
    plug_ins(mru="test_policies:MRU", lru="test_policies:MRU")
    assert policies.names() == [*BUILT_IN, "mru"]
    assert policies.shadowing() == ["lru (test_policies:MRU)"]
    assert get("mru").name == "mru"
    assert type(get("lru")) is LRU, "a plug-in may not shadow a built-in"


def test_plug_ins_that_cannot_be_used(plug_ins):
    plug_ins(gone="no_such_module:X", wrong="test_policies:ones")
    with pytest.raises(MoetapError, match="gone .* cannot be loaded"):
        get("gone")
    with pytest.raises(MoetapError, match="no subclass"):
        get("wrong")


def bad(**changes):
    return type("Bad", (MRU,), {"name": "bad", **changes})


class TestTheSuiteCatches:
    def refused(self, match, **changes):
        with pytest.raises(AssertionError, match=match):
            check_policy(bad(**changes))

    def test_no_name(self):
        self.refused("needs a name", name="")

    def test_numbers_instead_of_flags(self):
        self.refused("array of bool", missed=lambda self, a, c: np.zeros(len(a.ids)))

    def test_a_look_up_too_few(self):
        self.refused("wrong length", missed=lambda self, a, c: MRU().missed(a, c)[1:])

    def test_first_uses_that_hit(self):
        def cheat(self, asked, capacity):
            return np.zeros(len(asked.ids), dtype=np.bool_)

        self.refused("first use|would hit", missed=cheat)

    def test_chance(self):
        rng = np.random.default_rng(0)
        self.refused("something else", missed=lambda self, a, c: rng.random(len(a.ids)) < 0.5)

    def test_more_slots_than_there_are(self):
        def cheat(self, asked, capacity):
            return LRU().missed(asked, capacity + 2 * int(asked.size[0]))

        self.refused("more than C|only its last C", missed=cheat)

    def test_a_member_evicted(self):
        def cheat(self, asked, capacity):  # step-atomic asked, sequential answered
            return LRU().missed(asked.sequential, capacity)

        self.refused("was evicted", missed=cheat)

    def test_knowing_the_future_in_silence(self):
        self.refused("would hit", missed=lambda self, a, c: get("belady").missed(a, c))

    def test_hits_that_depend_on_what_comes(self):
        def cheat(self, asked, capacity):
            return get("lru" if len(asked.ids) % 2 else "fifo").missed(asked, capacity)

        self.refused("would come|would hit|something else", missed=cheat)

    def test_bypass_in_silence(self):
        def cheat(self, asked, capacity):
            return get("belady-bypass").missed(asked, capacity)

        self.refused("was evicted|more than C|only its last C", missed=cheat, offline=True)

    def test_changed_look_ups(self):
        def cheat(self, asked, capacity):
            asked.ids[:] = 0
            return MRU().missed(asked, capacity)

        self.refused("changed|something else|first use", missed=cheat)

    def test_misses_of_its_own(self):
        self.refused("disagree", misses=lambda self, s, c: np.zeros((3, 3, 2), np.int32))
