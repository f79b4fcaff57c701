from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moetap.analysis.loops import MAX_PERIOD, MIN_INSTANCES, MIN_LOOPED_TOKENS, looped_from

EOS = 999
TEXT = list(range(100, 120))


def twin(tokens):
    """The definition, token by token: the most that any period explains."""
    fed = list(tokens)[:-1]
    best = -1
    for period in range(1, MAX_PERIOD + 1):
        start = len(fed) - period
        if start < 0:
            break
        while start > 0 and fed[start - 1] == fed[start - 1 + period]:
            start -= 1
        length = len(fed) - start
        if length >= max(MIN_INSTANCES * period, MIN_LOOPED_TOKENS):
            first_repeated = start + period
            if best < 0 or first_repeated < best:
                best = first_repeated
    return best + 1 if best >= 0 else -1


def test_golden():
    # 20 tokens of text, then (1 2 3) 20 times. The first instance is generated tokens 20, 21, 22;
    # token 23 is the first repeated one, and generated token 23 is fed at decode step 24.
    assert looped_from(TEXT + [1, 2, 3] * 20) == 24


def test_eos_does_not_hide_a_loop():
    assert looped_from(TEXT + [1, 2, 3] * 20 + [EOS]) == 24


def test_loop_may_end_inside_a_period():
    assert looped_from(TEXT + [1, 2, 3] * 20 + [1, EOS]) == 24


def test_one_token_over_and_over():
    # Generated token 1 is the first repetition, fed at decode step 2.
    assert looped_from([5] * 60) == 2


def test_short_or_broken_repetition_is_no_loop():
    assert looped_from(TEXT + [1, 2, 3] * 10) == -1  # 30 tokens
    assert looped_from(TEXT + [7] * 47 + [EOS]) == -1  # a table rule of 47 dashes
    assert looped_from(TEXT + [1, 2, 3] * 20 + [7, EOS]) == -1  # it got out
    assert looped_from((TEXT * 3)[:59] + [EOS]) == -1  # not three whole periods of 20
    assert looped_from(TEXT * 3 + [EOS]) == 21
    assert looped_from([]) == looped_from([1]) == -1


def test_longest_period():
    longest = list(range(MAX_PERIOD))
    assert looped_from(longest * 3 + [EOS]) == MAX_PERIOD + 1
    assert looped_from(list(range(MAX_PERIOD + 1)) * 4 + [EOS]) == -1


def test_a_rule_inside_a_looping_paragraph_does_not_pose_as_the_loop():
    # "text, 60 dashes" over and over: period 80 from the start, though it ends in 60 equal tokens.
    assert looped_from((TEXT + [0] * 60) * 4 + [EOS]) == 81


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(0, 12),
    st.lists(st.integers(0, 2), max_size=2),
)
@example([], [0], 0, [])
def test_equals_the_definition(text, period, times, tail):
    tokens = text + period * times + tail
    got = looped_from(tokens)
    assert got == twin(tokens)
    assert got == -1 or 2 <= got < len(tokens)


@pytest.mark.parametrize("period", [1, 7, 100, 256])
def test_long_stream_is_fast_enough(period):
    tokens = list(range(1000)) + list(range(period)) * (20_000 // period)
    assert looped_from([*tokens, EOS]) == 1000 + period + 1
