from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lanekit import numbers, uniform_trace
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

from moetap.analysis.lanes import CONTROL
from moetap.analysis.overflow import (
    IMPOSSIBLE,
    MEASURED,
    NOT_AVAILABLE,
    overflow_table,
    prefill_overflow,
    union_curves,
)
from moetap.analysis.pool import pool
from moetap.analysis.unions import union_table
from moetap.errors import UsageError
from moetap.trace import Stream


@pytest.fixture(scope="module")
def golden():
    return overflow_table(
        pool([golden_trace()]), [1, 2, 3, 4], capacities=[2, 3, 4], windows=[1, 2], verify=[2, 3]
    )


# Step unions of the pairs (test_unions): 2 three times, 3 nine times, 4 four times.


def test_golden_step_union(golden):
    two, three, four = (golden.find("all", 2, 1, c) for c in (2, 3, 4))
    assert two.footprint.mean.value == pytest.approx(49 / 16)
    assert two.footprint.histogram.sum(axis=0).tolist() == [0, 0, 3, 9, 4]
    assert two.footprint.uniform == pytest.approx(3)
    assert two.state == three.state == MEASURED
    assert two.fraction.value == pytest.approx(13 / 16)
    assert three.fraction.value == pytest.approx(4 / 16)
    assert two.passes.value == pytest.approx((3 * 1 + 13 * 2) / 16)
    assert three.passes.value == pytest.approx((12 * 1 + 4 * 2) / 16)
    assert four.state == IMPOSSIBLE and four.fraction is None and four.passes is None
    # Above 3: layer 0 two of nine (ad, bd), layer 1 two of seven (ab, bc).
    assert three.worst_layers() == [(1, pytest.approx(2 / 7)), (0, pytest.approx(2 / 9))]
    assert three.worst_layers(1) == [(1, pytest.approx(2 / 7))]
    assert [two.footprint.quantile(q) for q in (0.05, 0.5, 0.95)] == [2, 3, 4]


def test_golden_interval(golden):
    # Above 3 are ad and bd (layer 0) and ab and bc (layer 1), all at step 0. Of the 16 triples a,
    # b, c and d hold 9, 9, 8 and 6, so without them 2/7, 1/7, 3/8 and 2/10 are above.
    fraction = golden.find("all", 2, 1, 3).fraction
    out = np.array([2 / 7, 1 / 7, 3 / 8, 2 / 10])
    half = student.ppf(0.975, 3) * math.sqrt(3 / 4 * ((out - out.mean()) ** 2).sum())
    assert fraction.high == pytest.approx(1 / 4 + half)
    assert fraction.low == pytest.approx(1 / 4 - half)


def test_golden_window(golden):
    # Over both steps: ab 3 and 4; ac 3; bc 3 (c did not execute layer 1 at step 1). Groups with d
    # are too short.
    line = golden.find("all", 2, 2, 3)
    assert line.footprint.mean.value == pytest.approx(13 / 4)
    assert line.footprint.n_short == 3
    assert line.footprint.left_out.tolist() == [0, 2]
    assert line.fraction.value == pytest.approx(1 / 4)
    assert line.worst_layers() == [(1, 1.0)]
    # a 2 2, b 3 3, c 3 and nothing.
    alone = golden.find("all", 1, 2, 2)
    assert alone.footprint.mean.value == pytest.approx(13 / 5)
    assert alone.fraction.value == pytest.approx(3 / 5)
    assert alone.footprint.n_short == 1
    assert alone.footprint.uniform == pytest.approx(4 * (1 - 0.5**2))


def test_window_longer_than_the_streams(golden):
    line = golden.find("all", 2, 3, 3)
    assert line.state == NOT_AVAILABLE and line.fraction is None
    assert line.missing == line.footprint.missing == "no group lasts 3 steps"
    assert line.footprint.n_short == 6 and line.footprint.quantile(0.5) is None
    assert line.worst_layers() == []
    assert golden.find("code", 3, 1, 2).missing == "2 streams"
    assert golden.windows == (1, 2, 3) and golden.verify == (2, 3)


def test_impossible_by_construction_is_a_state_of_its_own(golden):
    # One token needs k = 2 slots; two steps of one lane need up to 4.
    assert golden.find("all", 1, 1, 2).state == IMPOSSIBLE
    assert golden.find("all", 1, 2, 2).state == MEASURED
    assert golden.find("all", 1, 2, 4).state == IMPOSSIBLE
    # B k = 32 <= 64 as in the original question; B k W = 64 x 4 is not, but E is.
    cells = [[{0, 1}]] * 2
    streams = [make_stream(name, "", cells, (2,)) for name in "abcd"]
    table = overflow_table(
        pool([make_trace(make_model([8], [2]), streams)]), [4], capacities=[7, 8], windows=[1, 2]
    )
    assert table.find("all", 4, 1, 8).state == IMPOSSIBLE  # B k = 8
    assert table.find("all", 4, 2, 8).state == IMPOSSIBLE  # E = 8
    measured = table.find("all", 4, 1, 7)
    assert measured.state == MEASURED and measured.fraction.value == 0


def test_same_prompt_twice(golden):
    for b in (2, 3, 4):
        control, alone = golden.find(CONTROL, b, 1, 2), golden.find("all", 1, 1, 2)
        assert control.footprint.mean.value == 2 == alone.footprint.mean.value
        assert control.state == IMPOSSIBLE
        assert control.footprint.uniform == pytest.approx(2)
        window = golden.find(CONTROL, b, 2, 2)
        assert window.fraction.value == golden.find("all", 1, 2, 2).fraction.value


def test_one_stream_has_no_interval():
    trace = make_trace(golden_trace().model, golden_streams()[1:2])
    line = overflow_table(pool([trace]), [1], capacities=[2], windows=[2]).find("all", 1, 2, 2)
    assert line.fraction.value == 1
    assert line.fraction.low is None and line.fraction.why == "one stream"


def test_refusals():
    streams = pool([golden_trace()])
    for arguments, message in (
        ({"sizes": [5]}, "B = 5"),
        ({"capacities": [1]}, "C is below k"),
        ({"windows": [0]}, "W = 0"),
        ({"windows": [], "verify": []}, "no window"),
        ({"n_groups": 0}, "at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            overflow_table(streams, **{"capacities": [2], **arguments})
    with pytest.raises(KeyError):
        overflow_table(streams, capacities=[2]).find("all", 1, 5, 2)


def twin_footprints(twin, group, window):
    """(layer, footprint) of every full window of a group, None where a cell in it did not run."""
    steps = min(len(twin.cells[i]) for i in group)
    for d in range(window - 1, steps):
        for layer in range(twin.model.n_layers):
            sets = [twin.cells[i][s][layer] for i in group for s in range(d - window + 1, d + 1)]
            yield layer, len(set().union(*sets)) if all(sets) else None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([0.0, 0.02, 0.2]))
def test_equals_the_twin(seed, n_streams, missing):
    trace = random_trace(seed, n_streams, max_steps=14, missing=missing)
    twin = Twin(trace)
    windows, capacities = [1, 2, 3, 7, 12], [3, 5, 9]
    table = overflow_table(
        pool([trace]), range(1, n_streams + 1), capacities, windows=windows, verify=[4]
    )
    assert table.windows == (1, 2, 3, 4, 7, 12)
    for line in table.lines:
        b, w, c = line.draw.b, line.window, line.capacity
        if line.draw.kind == "control":
            groups = [(i,) * b for i in range(n_streams)]
        else:
            groups = list(twin.groups(line.draw.stratum, b))
        every = [pair for g in groups for pair in twin_footprints(twin, g, w)]
        sizes = [size for _, size in every if size is not None]
        assert line.footprint.left_out.sum() == len(every) - len(sizes)
        assert line.footprint.n_triples == len(sizes)
        short = sum(min(len(twin.cells[i]) for i in g) < w for g in groups)
        assert line.footprint.n_short == short
        possible = any(
            min(e, len(set(g)) * k * w) > c
            for e, k in zip(trace.model.n_experts, trace.model.top_k, strict=True)
            for g in groups
        )
        assert (line.state == IMPOSSIBLE) == (bool(groups) and not possible)
        if not sizes:
            assert line.footprint.mean is None and line.footprint.missing
            assert line.state in (IMPOSSIBLE, NOT_AVAILABLE)
            continue
        assert line.footprint.mean.value == pytest.approx(np.mean(sizes))
        if line.state == IMPOSSIBLE:
            assert max(sizes) <= c
            continue
        assert line.fraction.value == pytest.approx(np.mean([s > c for s in sizes]))
        assert line.passes.value == pytest.approx(np.mean([math.ceil(s / c) for s in sizes]))
        for layer, fraction in line.worst_layers(99):
            own = [s for at, s in every if at == layer and s is not None]
            assert fraction == pytest.approx(np.mean([s > c for s in own]))


def test_shuffled_ids_give_uniform_footprints():
    table = overflow_table(
        pool([uniform_trace(12, 150, 2, 32, 2)]), [1, 2, 4], [8], windows=[1, 2, 8, 32]
    )
    for footprint in table.footprints:
        if footprint.mean and footprint.draw.kind != "control":
            low, high = footprint.mean.low, footprint.mean.high
            assert low - 1e-9 <= footprint.uniform <= high + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_no_figure_is_nan(seed):
    streams = pool([random_trace(seed, 1 + seed, max_steps=6, missing=0.6)])
    table = overflow_table(streams, capacities=[3, 64])
    assert all(math.isfinite(x) for line in table.lines for x in numbers(line))
    assert all(math.isfinite(x) for curve in union_curves(streams) for x in numbers(curve))


def prompt(name, cls, prefill, top_k) -> Stream:
    """A stream of one decode step after the given prefill cells."""
    made = make_stream(name, cls, [*prefill, [set(range(k)) for k in top_k]], top_k)
    rows = len(prefill) + 1
    return Stream(
        prompt_id=name,
        cls=cls,
        prompt_sha256="",
        n_prompt=rows,
        n_generated=1,
        finish_reason="length",
        looped_from=-1,
        experts=made.experts[1:],
        tokens=made.tokens[1:],
        position=np.arange(rows, dtype=np.uint32),
    )


def prefill_line(lines, stratum, chunk, capacity):
    (found,) = (x for x in lines if (x.stratum, x.chunk, x.capacity) == (stratum, chunk, capacity))
    return found


def test_golden_prefill():
    # Chunks of two rows. a: layer 0 {0,1,2,3}, {4,5}; layer 1 only in its last row. b: one row.
    # c: no prefill rows.
    model = make_model([6, 6], [2, 2])
    streams = [
        prompt("a", "x", [[{0, 1}, set()], [{2, 3}, set()], [{4, 5}, {0, 1}]], (2, 2)),
        prompt("b", "y", [[{0, 1}, {4, 5}]], (2, 2)),
        prompt("c", "x", [], (2, 2)),
    ]
    lines = prefill_overflow([make_trace(model, streams)], capacities=[2, 3, 4], chunks=[2])
    line = prefill_line(lines, "all", 2, 3)
    # Unions: a layer 0: 4 and 2, layer 1: - and 2; b: 2 and 2.
    assert line.state == MEASURED
    assert line.union.value == pytest.approx(12 / 5)
    assert line.fraction.value == pytest.approx(1 / 5)
    assert line.passes.value == pytest.approx(6 / 5)
    assert (line.n_chunks, line.n_full, line.n_streams, line.n_without) == (3, 1, 2, 1)
    assert line.not_executed.tolist() == [0, 1]
    assert line.worst.tolist() == [pytest.approx(1 / 3), 0]
    assert prefill_line(lines, "all", 2, 4).state == IMPOSSIBLE
    assert prefill_line(lines, "y", 2, 2).state == IMPOSSIBLE  # one row
    assert prefill_line(lines, "x", 2, 2).fraction.value == pytest.approx(1 / 3)
    assert prefill_line(lines, "x", 2, 2).union.why == "one stream"


def test_trace_without_prefill_rows():
    streams = [prompt("a", "", [], (2,)), prompt("b", "", [], (2,))]
    (line,) = prefill_overflow([make_trace(make_model([6], [2]), streams)], [4], [512])
    assert (line.state, line.missing) == (NOT_AVAILABLE, "no prefill rows")
    assert line.fraction is None and line.n_without == 2
    nothing = prompt("a", "", [[set()]], (2,))
    (line,) = prefill_overflow([make_trace(make_model([6], [2]), [nothing])], [2], [512])
    assert (line.state, line.missing) == (NOT_AVAILABLE, "no layer executed a prefill row")


def test_prefill_refusals():
    with pytest.raises(UsageError, match="no trace"):
        prefill_overflow([])
    with pytest.raises(UsageError, match="C is below k"):
        prefill_overflow([golden_trace()], [1])
    with pytest.raises(UsageError, match="at least one row"):
        prefill_overflow([golden_trace()], [2], [0])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 8))
def test_prefill_equals_python_sets(seed, n_rows, chunk):
    rng = np.random.default_rng(seed)
    cells = [
        [
            set() if rng.random() < 0.1 else set(rng.choice(e, 2, replace=False).tolist())
            for e in (5, 20)
        ]
        for _ in range(n_rows)
    ]
    trace = make_trace(make_model([5, 20], [2, 2]), [prompt("a", "", cells, (2, 2))])
    (line,) = prefill_overflow([trace], [4], [chunk])
    sizes = [
        len(set().union(*(row[layer] for row in cells[start : start + chunk])))
        for start in range(0, n_rows, chunk)
        for layer in (0, 1)
    ]
    ran = [s for s in sizes if s]
    assert line.not_executed.sum() == len(sizes) - len(ran)
    if line.union is not None:
        assert line.union.value == pytest.approx(np.mean(ran))
    if line.state == MEASURED:
        assert line.fraction.value == pytest.approx(np.mean([s > 4 for s in ran]))
        assert line.passes.value == pytest.approx(np.mean([math.ceil(s / 4) for s in ran]))
    else:
        assert min(chunk, n_rows) <= 2 or not ran


def test_golden_curve():
    curves = {(c.stratum, c.b): c for c in union_curves(pool([golden_trace()]), [1, 2, 3])}
    curve = curves["all", 2]
    # Step 0: 19 + 19 of twelve; step 1: 8 of three and 3 of one.
    assert curve.steps.tolist() == [0, 1]
    assert curve.mean.tolist() == pytest.approx([38 / 12, 11 / 4])
    assert curve.n_groups == (6, 3)
    assert curve.cold == pytest.approx(49 / 16) and curve.steady is None
    assert curves["mixed", 2].n_groups == (4, 2)
    assert curves["mixed", 2].mean.tolist() == pytest.approx([(38 - 2 - 4 - 3 - 3) / 8, 5 / 2])
    assert ("code", 3) not in curves and ("mixed", 1) not in curves


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5))
def test_curve_equals_the_twin_and_the_table(seed, n_streams):
    trace = random_trace(seed, n_streams)
    twin = Twin(trace)
    table = union_table(pool([trace]), range(1, n_streams + 1))
    for curve in union_curves(pool([trace]), range(1, n_streams + 1)):
        found: dict[int, list[int]] = {}
        alive: dict[int, int] = {}
        for group in combinations(range(n_streams), curve.b):
            if group not in set(twin.groups(curve.stratum, curve.b)):
                continue
            for d in range(min(len(twin.cells[i]) for i in group)):
                alive[d] = alive.get(d, 0) + 1
                for layer in range(trace.model.n_layers):
                    sets = [twin.cells[i][d][layer] for i in group]
                    if all(sets):
                        found.setdefault(d, []).append(len(set().union(*sets)))
        assert curve.steps.tolist() == sorted(found)
        assert curve.mean.tolist() == pytest.approx([np.mean(found[d]) for d in sorted(found)])
        assert curve.n_groups == tuple(alive[d] for d in sorted(found))
        (exact,) = (
            f
            for f in table.figures
            if f.stratum.name == curve.stratum and f.b == curve.b and f.layers.kind == "overall"
        )
        assert curve.cold == pytest.approx(exact.values.union.value)
