from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student
from unionkit import (
    Twin,
    golden_streams,
    golden_trace,
    make_model,
    make_stream,
    make_trace,
    random_trace,
)

from moetap.analysis import sampling, unions
from moetap.analysis.pool import pool
from moetap.analysis.unions import union_table
from moetap.errors import UsageError
from moetap.trace import NOT_EXECUTED


def figure(table, b, stratum="all", layers="all"):
    """The one line of the table."""
    (found,) = (
        f
        for f in table.figures
        if (f.b, f.stratum.name, f.layers.label) == (b, stratum, layers)
        and f.layers.kind in ("overall", "group")
    )
    return found


@pytest.fixture(scope="module")
def golden():
    return union_table(pool([golden_trace()]))


# Unions of the pairs of the golden trace (layer 0 is decoder layer 3, layer 1 is decoder layer 5):
#
#                  ab ac ad bc bd cd
#   layer 0 step 0  2  3  4  3  4  3   sum 19 of 6
#   layer 0 step 1  3  2  -  3  -  -   sum  8 of 3   (d has ended)
#   layer 1 step 0  4  2  3  4  3  3   sum 19 of 6
#   layer 1 step 1  3  -  -  -  -  -   sum  3 of 1   (d has ended, c was not executed)


def test_golden_mean_of_pairs(golden):
    assert figure(golden, 2).values.union.value == pytest.approx((19 + 8 + 19 + 3) / 16)
    assert figure(golden, 2, layers="3").values.union.value == pytest.approx(27 / 9)
    assert figure(golden, 2, layers="5").values.union.value == pytest.approx(22 / 7)


def test_golden_mean_of_triples_and_all_four(golden):
    # Triples: layer 0 step 0: abc 3, abd 4, acd 4, bcd 4; step 1: abc 3;
    # layer 1 step 0: abc 4, abd 4, acd 3, bcd 4.
    assert figure(golden, 3).values.union.value == pytest.approx(33 / 9)
    # All four: step 0 only, 4 in both layers.
    assert figure(golden, 4).values.union.value == pytest.approx(4)
    assert figure(golden, 1).values.union.value == pytest.approx(2)


def test_golden_interval(golden):
    # Left out a: 10/3 3/1 10/3 -   of (layer 0 step 0, step 1, layer 1 step 0, step 1) -> 23/7
    #          b: 10/3 2/1  8/3 -   -> 20/7
    #          c: 10/3 3/1 10/3 3/1 -> 26/8
    #          d:  8/3 8/3 10/3 3/1 -> 29/10
    # mean 3.0732143, squares of the deviations .0451563 .0466869
    # .0312532 .0300032, sum .1530996; x 3/4, root .3388579; t(0.975, 3) = 3.1824463 -> 1.0783970
    union = figure(golden, 2).values.union
    assert union.half_width == pytest.approx(1.0783970, abs=1e-6)
    assert union.low == pytest.approx(49 / 16 - 1.0783970, abs=1e-6)
    # saved = 1 - union / (B k) with k = 2 in both layers, so its interval is a quarter of that.
    assert figure(golden, 2).values.saved.half_width == pytest.approx(1.0783970 / 4, abs=1e-6)


def test_golden_interval_of_bytes(golden):
    # 100 bytes x layer 0 + 10 bytes x layer 1, / 2 lanes.
    # Left out a: layer 0 13/4, layer 1 10/3 -> 179.16667
    #          b: 12/4, 8/3                  -> 163.33333
    #          c: 13/4, 13/4                 -> 178.75
    #          d: 16/6, 13/4                 -> 149.58333
    # mean 167.70833; squares 131.2934 19.1406 121.9184 328.5156, sum 600.8681; x 3/4,
    # root 21.228541; x t
    got = figure(golden, 2).values.bytes_per_token
    assert got.value == pytest.approx((100 * 27 / 9 + 10 * 22 / 7) / 2)
    assert got.half_width == pytest.approx(21.228541 * 3.1824463, abs=1e-4)


def test_golden_io_uniform_and_overlap(golden):
    values = figure(golden, 2).values
    assert values.loads.value == pytest.approx(49 / 32)
    assert values.saved.value == pytest.approx(1 - (49 / 32) / 2)  # io_1 = k = 2
    assert values.uniform == pytest.approx(4 * (1 - 0.5**2))
    assert values.uniform_saved == pytest.approx(0.25)  # 3 / 2 against 2
    assert values.overlap == pytest.approx(2)
    base = figure(golden, 1).values
    assert base.saved.value == pytest.approx(0)
    assert base.bytes_per_token.value == pytest.approx(2 * 100 + 2 * 10)


def test_golden_quantiles(golden):
    # The 16 unions above: 2 three times, 3 nine times, 4 four times. No sample: all 6 pairs count.
    spread = figure(golden, 2).values.distribution
    assert spread.exhaustive and spread.n_groups == 6
    assert spread.histogram.tolist() == [0, 0, 3, 9, 4]
    # Ranks 0.8, 4, 8, 12, 15.2 and 16 of 16.
    assert [spread.quantile(q) for q in (0.05, 0.25, 0.5, 0.75, 0.95, 1.0)] == [2, 3, 3, 3, 4, 4]


def test_golden_strata(golden):
    # ab: 2 3 4 3; cd: 3 3; mixed: the other ten, 49 - 18 = 31.
    assert figure(golden, 2, "code").values.union.value == pytest.approx(12 / 4)
    assert figure(golden, 2, "agentic").values.union.value == pytest.approx(6 / 2)
    mixed = figure(golden, 2, "mixed").values
    assert mixed.union.value == pytest.approx(31 / 10)
    assert mixed.distribution.histogram.tolist() == [0, 0, 2, 5, 3]
    # Left out a: 17/5, b: 14/5, c: 14/4, d: 17/6.
    out = np.array([17 / 5, 14 / 5, 14 / 4, 17 / 6])
    half = 3.1824463 * math.sqrt(3 / 4 * ((out - out.mean()) ** 2).sum())
    assert mixed.union.half_width == pytest.approx(half, abs=1e-6)


def test_golden_counts(golden):
    assert golden.not_executed.tolist() == [0, 1]
    assert golden.n_cells == 7  # 2 + 2 + 2 + 1 steps
    lines = [figure(golden, b).values for b in (1, 2, 3, 4)]
    counts = [(v.n_groups, v.n_steps) for v in lines]
    assert counts == [(4, 2), (6, 2), (4, 2), (1, 1)]
    assert figure(golden, 2, "mixed").values.n_groups == 4


def test_not_available_is_said(golden):
    assert figure(golden, 3, "code").values is None
    assert figure(golden, 3, "code").missing == "2 streams"
    assert figure(golden, 1, "mixed").values is None
    # With all four in the group, or both of a class, nothing is left when one is left out.
    for line in (figure(golden, 4), figure(golden, 2, "code")):
        assert line.values.union.low is None
        assert "without one of the" in line.values.union.why


def test_one_stream_has_no_interval():
    table = union_table(pool([make_trace(golden_trace().model, golden_streams()[:1])]))
    assert figure(table, 1).values.union.low is None
    assert figure(table, 1).values.union.why == "one stream"
    assert figure(table, 2).missing == "1 stream"


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_table_equals_sets(seed, n_streams):
    trace = random_trace(seed, n_streams)
    twin = Twin(trace)
    table = union_table(pool([trace]))
    for line in table.figures:
        stratum, span = line.stratum.name, line.layers.span
        mean, saved, size = twin.figures(stratum, line.b, span)
        if line.values is None:
            assert mean is None or (stratum == "mixed" and line.b == 1)
            continue
        values = line.values
        assert values.union.value == pytest.approx(mean)
        assert values.saved.value == pytest.approx(saved, abs=1e-9)
        assert values.n_groups == len(list(twin.groups(stratum, line.b)))
        sizes = [u for _, u in twin.unions(stratum, line.b, span)]
        expected = np.bincount(sizes, minlength=len(values.distribution.histogram))
        assert values.distribution.exhaustive
        assert values.distribution.histogram.tolist() == expected.tolist()
        quantile = np.quantile(sizes, 0.25, method="inverted_cdf")
        assert values.distribution.quantile(0.25) == quantile
        weights = [
            (int(trace.model.n_experts[la]), int(trace.model.top_k[la]))
            for la, _ in twin.unions(stratum, line.b, span)
        ]
        uniform = [e * (1 - (1 - k / e) ** line.b) for e, k in weights]
        assert values.uniform == pytest.approx(sum(uniform) / len(uniform))
        assert values.overlap == pytest.approx(sum(k for _, k in weights) / len(weights))
        t = student.ppf(0.975, max(line.stratum.n_streams - 1, 1))
        for which, got in enumerate((values.union, values.saved, values.bytes_per_token)):
            if got is None:
                assert size is None
                continue
            half = twin.interval(which, stratum, line.b, span, t)
            if half is None:
                assert got.half_width is None
            else:
                assert got.half_width == pytest.approx(half, abs=1e-7)
        if size is not None:
            assert values.bytes_per_token.value == pytest.approx(size)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 9))
def test_bounds_and_order(seed, n_streams):
    trace = random_trace(seed, n_streams, missing=0.0)
    table = union_table(pool([trace]))
    for layer in (f for f in table.layers if f.kind == "layer"):
        lines = [f.values for f in table.figures if f.layers is layer and f.stratum.name == "all"]
        e = int(trace.model.n_experts[layer.start])
        k = int(trace.model.top_k[layer.start])
        assert lines[0].union.value == pytest.approx(k)
        for values in lines:
            assert k - 1e-9 <= values.union.value <= min(e, values.b * k) + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 9))
def test_more_lanes_never_have_a_smaller_union(seed, n_streams):
    trace = random_trace(seed, n_streams, max_steps=1, missing=0.0)  # the same cells at every B
    table = union_table(pool([trace]))
    means = [f.values.union.value for f in table.select(table.strata[0], ["overall"])]
    assert all(a <= b + 1e-9 for a, b in zip(means, means[1:], strict=False))


def test_the_same_stream_twice_shares_everything():
    cells = [[{0, 1}, {2, 3}], [{1, 2}, {0, 3}]]
    streams = [make_stream(name, "code", cells, (2, 2)) for name in "abc"]
    table = union_table(pool([make_trace(make_model((4, 4), (2, 2)), streams)]))
    for b in (1, 2, 3):
        assert figure(table, b).values.union.value == pytest.approx(2)
        assert figure(table, b).values.saved.value == pytest.approx(1 - 1 / b)


def uniform_pool(rng, n_streams, n_steps, n_experts, k, n_layers=2):
    order = rng.random((n_streams, n_steps, n_layers, n_experts)).argpartition(k - 1, axis=3)
    ids = np.sort(order[..., :k], axis=3).astype(np.uint16)
    streams = [
        make_stream(f"s{i}", "code", [[set()] * n_layers] * n_steps, (k,) * n_layers)
        for i in range(n_streams)
    ]
    for stream, own in zip(streams, ids, strict=True):
        stream.experts[1:] = own
    return pool([make_trace(make_model((n_experts,) * n_layers, (k,) * n_layers), streams)])


def test_interval_covers_the_uniform_mean():
    # 400 traces of 8 streams: a 95 % interval should hold the true mean 380 times; 3 standard
    # deviations are 13. The jackknife is somewhat wide for so few streams: the upper side is open.
    rng = np.random.default_rng(1)
    truth = 16 * (1 - (1 - 4 / 16) ** 3)
    hits = 0
    for _ in range(400):
        table = union_table(uniform_pool(rng, 8, 3, 16, 4), [3], n_groups=1)
        union = figure(table, 3).values.union
        hits += union.low <= truth <= union.high
    assert hits >= 367, hits


def test_interval_covers_streams_that_differ():
    # Each stream routes to one of two halves, so half of the pairs share one. Within a half of 8,
    # top-2: 8 (1 - (3/4)^2) = 3.5; across halves 4. The cells of a stream are as correlated as can
    # be: an interval over (step, layer) pairs would be far too narrow.
    rng = np.random.default_rng(2)
    truth = (3.5 + 4) / 2
    hits = 0
    for _ in range(300):
        p = uniform_pool(rng, 12, 6, 8, 2)
        for rows in p.rows:
            rows += 8 * rng.integers(0, 2, dtype=np.uint16)
        object.__setattr__(p.model, "n_experts", np.full(2, 16))
        union = figure(union_table(p, [2], n_groups=1), 2).values.union
        hits += union.low <= truth <= union.high
    assert hits >= 270, hits


def test_many_streams_and_lanes_stay_exact():
    # Expert 0 is selected by all of 10 000 streams, expert 1 + (i mod 3) by every third.
    n = 10_000
    ids = np.array([[[0, 1 + i % 3]] for i in range(n)], dtype=np.uint16)
    model = make_model((4,), (2,))
    streams = [make_stream(f"s{i}", "code", [[set(ids[i, 0].tolist())]], (2,)) for i in range(n)]
    table = union_table(pool([make_trace(model, streams)]), [8], n_groups=1)
    sizes = [3334, 3333, 3333]
    exact = 1 + sum(1 - math.comb(n - m, 8) / math.comb(n, 8) for m in sizes)
    union = figure(table, 8).values.union
    assert union.value == pytest.approx(exact, rel=1e-12)
    assert 0 < union.half_width < 1e-3


@pytest.mark.parametrize("missing", [0.0, 0.2])
def test_chunks_do_not_change_the_table(monkeypatch, missing):
    trace = random_trace(5, 6, max_steps=9, missing=missing)
    whole = union_table(pool([trace]), n_groups=5)
    monkeypatch.setattr(unions, "COUNT_BYTES", 1)
    monkeypatch.setattr(sampling, "MASK_BYTES", 1)
    stepwise = union_table(pool([trace]), n_groups=5)
    for a, b in zip(whole.figures, stepwise.figures, strict=True):
        assert a.missing == b.missing
        if a.values is not None:
            assert a.values.union.value == pytest.approx(b.values.union.value)
            assert a.values.n_steps == b.values.n_steps
            if a.values.union.half_width is not None:
                assert a.values.union.half_width == pytest.approx(
                    b.values.union.half_width, abs=1e-9
                )
            one, other = a.values.distribution, b.values.distribution
            assert one.histogram.tolist() == other.histogram.tolist()


def test_looped_rows_are_left_out_unless_kept():
    model = make_model((4,), (1,))
    a = make_stream("a", "code", [[{0}], [{0}], [{0}]], (1,), looped_from=1)
    b = make_stream("b", "code", [[{1}], [{0}], [{0}]], (1,))
    trace = make_trace(model, [a, b])
    left_out = pool([trace])
    assert (left_out.n_looped, left_out.n_looped_rows) == (1, 2)
    assert figure(union_table(left_out), 2).values.union.value == pytest.approx(2)  # step 0 only
    kept = pool([trace], keep_loops=True)
    assert figure(union_table(kept), 2).values.union.value == pytest.approx((2 + 1 + 1) / 3)


def test_layer_that_never_ran_is_not_available():
    model = make_model((4, 4), (1, 1), expert_bytes=[1, 1])
    streams = [make_stream(n, "code", [[{0}, set()]], (1, 1)) for n in "ab"]
    table = union_table(pool([make_trace(model, streams)]))
    assert figure(table, 2, layers="1").values is None
    assert "execute" in figure(table, 2, layers="1").missing
    assert figure(table, 2).values.union.value == pytest.approx(1)
    assert figure(table, 2).values.bytes_per_token is None
    assert (streams[0].experts[1, 1] == NOT_EXECUTED).all()


def test_unknown_expert_size_gives_no_bytes():
    table = union_table(pool([make_trace(make_model((4, 4), (2, 2)), golden_streams())]))
    assert figure(table, 2).values.bytes_per_token is None


def test_too_many_lanes_names_both_numbers():
    with pytest.raises(UsageError, match=r"B = 5 .* 4 streams"):
        union_table(pool([golden_trace()]), [2, 5])
    assert figure(union_table(pool([golden_trace()]), [2]), 1).values is not None


@pytest.mark.parametrize("arguments", [{"sizes": [0]}, {"n_groups": 0}, {"seed": -1}])
def test_senseless_arguments(arguments):
    with pytest.raises(UsageError):
        union_table(pool([golden_trace()]), **arguments)
