"""Where a generated text starts to do nothing but repeat itself.

Knows token ids. Knows nothing about routing: a greedy run that falls into a loop repeats its
routing too, so the capture flags the stream here and every metric leaves the looped rows out unless
asked not to.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_PERIOD = 256
"""Longest period looked for, in tokens. A loop of a whole paragraph fits; the cost is O(G x
MAX_PERIOD)."""

MIN_INSTANCES = 3
"""A period must occur this often in a row. Twice is common in honest text (a quoted line, a
repeated call)."""

MIN_LOOPED_TOKENS = 48
"""Shortest periodic tail that counts. Short periods occur honestly: a table rule is dozens of '-'
tokens."""


def looped_from(tokens: Sequence[int]) -> int:
    """Return the decode step from which the stream only repeats itself, -1 if it does not.

    tokens: the G generated token ids, in order.

    The tokens loop with period p <= MAX_PERIOD if they end in a run of length >= max(MIN_INSTANCES
    p, MIN_LOOPED_TOKENS) in which each token equals the one p places before it. The run's first p
    tokens are the first instance, not a repetition. With j the index of the first repeated token,
    the answer is j + 1: generated token j is fed at decode step j + 1. Where
    several periods qualify, the one that explains most counts: of a pure loop that is the smallest
        period (its multiples start repeating later), and a loop whose line ends in a long rule of
        '-' is not mistaken for a loop of '-'.

    The last generated token is never fed, so it has no row and no say: an end-of-sequence token
    does not hide a loop.
    """
    fed = np.asarray(tokens, dtype=np.int64)[:-1]
    n = len(fed)
    first_repeated = n
    for period in range(1, min(MAX_PERIOD, n // MIN_INSTANCES) + 1):
        differs = np.flatnonzero(fed[period:] != fed[:-period])
        j = period + (int(differs[-1]) + 1 if len(differs) else 0)
        if n - (j - period) >= max(MIN_INSTANCES * period, MIN_LOOPED_TOKENS):
            first_repeated = min(first_repeated, j)
    return first_repeated + 1 if first_repeated < n else -1
