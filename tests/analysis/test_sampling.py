from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from unionkit import Twin, random_trace

from moetap.analysis.pool import pool
from moetap.analysis.sampling import Distribution, draw_groups, union_histograms
from moetap.analysis.strata import strata


@pytest.fixture(scope="module")
def streams():
    return pool([random_trace(3, 14)])


@pytest.mark.parametrize("b", [2, 3, 8])
def test_groups_are_distinct_seeded_and_of_their_stratum(streams, b):
    for stratum in strata(streams):
        if not stratum.n_groups(b):
            continue
        drawn = draw_groups(streams, stratum, b, 20, seed=7)
        again = draw_groups(streams, stratum, b, 20, seed=7)
        assert drawn.members.tolist() == again.members.tolist()
        assert len(drawn.members) == min(20, stratum.n_groups(b))
        assert drawn.exhaustive == (stratum.n_groups(b) <= 20)
        assert len({tuple(g) for g in drawn.members.tolist()}) == len(drawn.members)
        for group in drawn.members.tolist():
            classes = {streams.classes[i] for i in group}
            assert len(set(group)) == b
            if stratum.kind == "class":
                assert classes == {stratum.name}
            if stratum.kind == "mixed":
                assert len(classes) > 1


def test_other_seed_other_groups(streams):
    every = strata(streams)[0]
    a, b = (draw_groups(streams, every, 3, 20, seed).members.tolist() for seed in (0, 1))
    assert a != b


def test_groups_are_uniform(streams):
    # Each of the C(14, 2) = 91 pairs should be among 9 drawn ones in 9/91 of the draws.
    every = strata(streams)[0]
    seen = Counter()
    for seed in range(600):
        seen.update(map(tuple, draw_groups(streams, every, 2, 9, seed).members.tolist()))
    expected = 600 * 9 / math.comb(14, 2)
    assert len(seen) == 91
    assert max(abs(n - expected) for n in seen.values()) < 5 * math.sqrt(expected)


def test_histogram_of_sampled_groups_equals_sets():
    trace = random_trace(11, 9, max_steps=6, missing=0.2)
    p = pool([trace])
    twin = Twin(trace)
    drawn = draw_groups(p, strata(p)[0], 3, 12, seed=0)
    (histogram,) = union_histograms(p, [drawn])
    expected = np.zeros_like(histogram)
    for group in drawn.members.tolist():
        for step in range(min(len(twin.cells[i]) for i in group)):
            for layer in range(trace.model.n_layers):
                sets = [twin.cells[i][step][layer] for i in group]
                if all(sets):
                    expected[layer, len(set().union(*sets))] += 1
    assert histogram.tolist() == expected.tolist()


def test_quantile_is_the_inverse_of_the_distribution():
    values = [2] * 3 + [5] * 16 + [6]
    spread = Distribution(np.bincount(values), 1, True)
    for q in (0.01, 0.05, 0.15, 0.16, 0.5, 0.95, 0.96, 1.0):
        assert spread.quantile(q) == np.quantile(values, q, method="inverted_cdf")
    assert spread.mean == pytest.approx(np.mean(values))
    assert Distribution(np.zeros(4, dtype=np.int64), 1, True).quantile(0.5) is None
