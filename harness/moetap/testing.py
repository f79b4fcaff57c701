"""A conformance suite for cache policies, for third parties and for the built-in ones.

Knows the rules of `moetap.policies` and how to see from hits and misses alone whether a policy
keeps them, and from what it holds whether it decides the same live. Refuses to judge how good a
policy is.

    from moetap.testing import check_policy

    def test_mine():
        check_policy(MyPolicy)

What is resident is not asked, it follows: an expert that hits has been held since its last use,
since nothing is loaded but what misses. So the hits of a run are possible with C slots exactly if
at each batch its members, and the experts held across it, fit together. And what a policy holds at
the end is what would hit if it came next: more than fits, and the policy knew what would come.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from moetap.errors import UsageError
from moetap.policies import LookUps, Online, Policy, StepSets

Missed = NDArray[np.bool_]


def check_policy(kind: type[Policy], n_cases: int = 40, seed: int = 0) -> None:
    """Check a policy on `n_cases` made-up sequences of look-ups.

    kind: a class that can be made without arguments, as an entry point's must be.

    Raises:
        AssertionError: it breaks a rule; the message says which, with the look-ups.
    """
    policy = kind()
    _check(isinstance(policy.name, str) and bool(policy.name), "a policy needs a name", "")
    rng = np.random.default_rng(seed)
    for look_ups in _cases(rng, n_cases):
        n = len(look_ups.size)
        fitted = policy.fit(rng.integers(0, 9, n))
        for capacity in sorted({1, 2, int(rng.integers(1, n + 1)), n}):
            for asked in (look_ups, look_ups.sequential, replace(look_ups, keep=True)):
                _check_run(fitted, asked, capacity)
            _check_online(fitted, look_ups, capacity)
            _check_online(fitted, look_ups.sequential, capacity)
    _check_layers(policy.fit(np.arange(6)))


def _cases(rng: np.random.Generator, n_cases: int) -> Iterator[LookUps]:
    """Batches of up to five of up to twelve experts, some empty, popular ones more often."""
    for _ in range(n_cases):
        n = int(rng.integers(1, 13))
        share = 1 / np.arange(1, n + 1)
        batches = [
            np.sort(rng.choice(n, int(rng.integers(0, min(n, 5) + 1)), False, share / share.sum()))
            for _ in range(int(rng.integers(0, 25)))
        ]
        starts = np.cumsum([0, *map(len, batches)])
        ids = np.concatenate([np.empty(0), *batches]).astype(np.uint16)
        yield LookUps(starts, ids, np.ones(n, dtype=np.int64))


def _check_run(policy: Policy, asked: LookUps, capacity: int) -> None:
    where = f"{policy.name}, C = {capacity}, keep = {asked.keep}, batches {_batches(asked)}"
    before = asked.starts.copy(), asked.ids.copy(), asked.size.copy()
    missed = policy.missed(asked, capacity)
    _check(
        isinstance(missed, np.ndarray) and missed.dtype == np.bool_,
        "missed must be a NumPy array of bool",
        where,
    )
    _check(missed.shape == asked.ids.shape, "each look-up is a hit or a miss: wrong length", where)
    unchanged = all(map(np.array_equal, before, (asked.starts, asked.ids, asked.size)))
    _check(unchanged, "the look-ups were changed", where)
    _same(missed, policy.missed(asked, capacity), "the same look-ups gave something else", where)
    wide = replace(asked, ids=asked.ids.astype(np.int32))
    _same(missed, policy.missed(wide, capacity), "ids of 32 bits gave something else", where)
    large = replace(asked, size=7 * asked.size)
    _same(missed, policy.missed(large, 7 * capacity + 6), "sizes gave something else", where)
    gaps = replace(asked, starts=np.repeat(asked.starts, 2))
    _same(missed, policy.missed(gaps, capacity), "empty batches changed something", where)
    if not policy.offline:
        half = (len(asked.starts) - 1) // 2
        stop = int(asked.starts[half])
        part = replace(asked, starts=asked.starts[: half + 1], ids=asked.ids[:stop])
        _same(missed[:stop], policy.missed(part, capacity), "it knew what would come", where)
        _check_end(policy, asked, capacity, where)
    first = np.zeros(len(missed), dtype=np.bool_)
    first[np.unique(asked.ids, return_index=True)[1]] = True
    if not policy.preloaded:
        _check(bool(missed[first].all()), "a first use hit", where)
    if capacity >= len(asked.size):
        _check(not missed[~first].any(), "an expert left a cache that had room for all", where)
    _check_room(policy, asked, missed, capacity, where)


def _check_end(policy: Policy, asked: LookUps, capacity: int, where: str) -> None:
    """Each expert in turn as the look-up after the last: as many hit as are held."""
    held = set()
    for x in range(len(asked.size)):
        starts = np.append(asked.starts, len(asked.ids) + 1)
        more = replace(asked, starts=starts, ids=np.append(asked.ids, asked.ids.dtype.type(x)))
        if not policy.missed(more, capacity)[-1]:
            held.add(x)
    last = next((batch for batch in reversed(_batches(asked)) if batch), [])
    over = asked.keep and held <= set(last)
    _check(len(held) <= capacity or over, "more than C would hit after the last batch", where)


def _check_room(policy: Policy, asked: LookUps, missed: Missed, capacity: int, where: str) -> None:
    """What is held fits, and members stay until the next batch where they must."""
    batches = [batch for batch in _batches(asked) if batch]  # an empty one changes nothing
    flags = np.split(missed, np.cumsum([len(batch) for batch in batches])[:-1]) if batches else []
    held_from: list[set[int]] = [set() for _ in range(len(batches) + 1)]  # after batch b - 1
    last: dict[int, int] = {}
    for b, (batch, wrong) in enumerate(zip(batches, flags, strict=True)):
        for x, miss in zip(batch, wrong.tolist(), strict=True):
            if not miss:
                for at in range(last.get(x, -1) + 1, b + 1):
                    held_from[at].add(x)
        last |= dict.fromkeys(batch, b)
    for b, (batch, wrong) in enumerate(zip(batches, flags, strict=True)):
        after = held_from[b + 1]
        if not policy.forced:
            _check(len(after) <= capacity, f"more than C held after batch {b}", where)
            continue
        if len(batch) <= capacity:
            together = len(set(batch) | after)
            _check(together <= capacity, f"more than C held in batch {b}", where)
        elif asked.keep:
            _check(after <= set(batch), f"batch {b} left no room for others", where)
        else:
            _check(
                after <= set(batch[-capacity:]),
                f"batch {b} is larger than C: only its last C can stay",
                where,
            )
        if b:
            stay = batches[b - 1] if asked.keep else batches[b - 1][-capacity:]
            hit = {x for x, miss in zip(batch, wrong.tolist(), strict=True) if not miss}
            _check(set(stay) & set(batch) <= hit, f"a member of batch {b - 1} was evicted", where)


def _check_online(policy: Policy, asked: LookUps, capacity: int) -> None:
    """Live, a policy hits and misses what it says of a replay; nothing if it cannot decide live."""
    n = len(asked.size)
    try:
        cache, other = policy.online(n, capacity), policy.online(n, capacity)
    except UsageError:
        return
    batches = [batch for batch in _batches(asked) if len(batch) <= capacity]
    where = f"{policy.name} online, C = {capacity}, batches {batches}"
    starts = np.cumsum([0, *map(len, batches)])
    ids = np.array([x for batch in batches for x in batch], dtype=np.uint16)
    expected = policy.missed(LookUps(starts, ids, asked.size), capacity).tolist()

    at_start = _held(cache, n)
    _check(policy.preloaded or not at_start, "it is not empty at the start", where)
    found, left = [], []
    # The other one is asked for the same backwards: an engine has one per layer.
    for batch, elsewhere in zip(batches, reversed(batches), strict=True):
        misses, gone = _serve(cache, n, capacity, batch, where)
        found += misses
        left.append(gone)
        _serve(other, n, capacity, elsewhere, where)
    _check(found == expected, "it misses something else than in a replay", where)

    # Whatever it knows by now, it must go on as a cache after some left from outside. Of the batch
    # some may not be held; these are passed over.
    for batch in batches:
        before = _held(cache, n)
        gone = set(batch[::2]) | set(sorted(before)[::3])
        cache.forget(sorted(gone))
        _check(_held(cache, n) == before - gone, "forget did not take out those and no more", where)
        misses, _ = _serve(cache, n, capacity, batch, where)
        hits = {x for x, miss in zip(batch, misses, strict=True) if not miss}
        _check(not hits & gone, "what was forgotten did not miss", where)

    cache.clear()
    _check(_held(cache, n) == at_start, "clear did not bring it back to the start", where)
    again, left_again = [], []
    for batch in batches:
        misses, gone = _serve(cache, n, capacity, batch, where)
        again += misses
        left_again.append(gone)
    _check((again, left_again) == (found, left), "after clear it decided something else", where)


def _held(cache: Online, n: int) -> set[int]:
    return {x for x in range(n) if x in cache}


def _serve(
    cache: Online, n: int, capacity: int, batch: list[int], where: str
) -> tuple[list[bool], set[int]]:
    """Request a batch: which of it missed, and what left."""
    before = _held(cache, n)
    left = list(cache.request(batch))
    after = _held(cache, n)
    _check(set(batch) <= after, f"a member of {batch} is not held afterwards", where)
    _check(len(after) <= capacity, f"more than C held after {batch}", where)
    _check(len(set(left)) == len(left), f"something left twice for {batch}", where)
    gone = set(left)
    _check(gone <= before - set(batch), f"what was not held, or a member, left for {batch}", where)
    _check(after == before - gone | set(batch), f"what left for {batch} is not what it said", where)
    return [x not in before for x in batch], gone


def _check_layers(policy: Policy) -> None:
    """`misses` is `missed`, layer by layer."""
    ids = np.array([0, 1, 1, 2, 5, 0, 1, 3, 4, 3, 4, 1], dtype=np.uint16)
    starts = np.array([0, 2, 4, 5, 5, 8, 10, 12])[[0, 1, 2, 3, 5, 6, 7]]
    ran = np.ones((2, 3), dtype=np.bool_)
    sets = StepSets(3, np.array([6, 6]), starts, ids, ran)
    capacities = np.array([3, 1, 6])
    found = policy.misses(sets, capacities)
    _check(found.shape == (3, 3, 2), "misses must be (n_C, steps, L)", policy.name)
    for at, capacity in enumerate(capacities.tolist()):
        for layer in range(2):
            own = sets.layer(layer)
            expected = own.per_batch(policy.missed(own, capacity))
            _check(
                np.array_equal(found[at, :, layer], expected),
                "misses and missed disagree",
                f"{policy.name}, C = {capacity}, layer {layer}",
            )


def _batches(asked: LookUps) -> list[list[int]]:
    cuts = zip(asked.starts[:-1].tolist(), asked.starts[1:].tolist(), strict=True)
    return [asked.ids[a:b].tolist() for a, b in cuts]


def _same(one: Missed, other: Missed, rule: str, where: str) -> None:
    _check(np.array_equal(one, other), rule, where)


def _check(good: bool, rule: str, where: str) -> None:
    # Not an assert statement: python -O would leave it out.
    if not good:
        raise AssertionError(f"{rule}: {where}" if where else rule)
