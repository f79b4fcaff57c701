"""Against results of independent programs on published routing; skipped where it is not present."""

from __future__ import annotations

import numpy as np
import pytest
import real

from moetap.analysis.lanes import lay_out
from moetap.analysis.overflow import MEASURED, overflow_table, union_curves
from moetap.analysis.pool import pool
from moetap.analysis.replay import replay
from moetap.analysis.unions import union_table
from moetap.trace import NOT_EXECUTED


def test_data_are_as_described():
    topk, lengths = real.gpt_oss_topk()
    assert topk.shape == (2044, 24, 4)
    assert lengths == [511] * 4
    assert not (real.gpt_oss().streams[0].experts == NOT_EXECUTED).any()


@pytest.mark.parametrize("b", [2, 4])
def test_unions_equal_python_sets(b):
    topk, _ = real.gpt_oss_topk()
    lanes = topk.reshape(4, 511, 24, 4)[:b]
    streams = pool([real.gpt_oss()])
    sets = lay_out(streams).merge(np.arange(b))
    cells = np.split(sets.ids, sets.starts[1:-1])
    for layer in range(24):
        for step in range(511):
            expected = set().union(*(lanes[i, step, layer].tolist() for i in range(b)))
            assert cells[layer * 511 + step].tolist() == sorted(expected)


def test_mean_union_and_share_above_capacity_equal_python_sets():
    topk, _ = real.gpt_oss_topk()
    lanes = topk.reshape(4, 511, 24, 4)
    sizes = [
        len(set(lanes[:, step, layer].ravel().tolist()))
        for step in range(511)
        for layer in range(24)
    ]
    streams = pool([real.gpt_oss()])
    line = overflow_table(streams, [4], capacities=[8], windows=[1]).find("all", 4, 1, 8)
    assert line.state == MEASURED
    assert line.footprint.mean.value == pytest.approx(np.mean(sizes))
    assert line.fraction.value == pytest.approx(np.mean([size > 8 for size in sizes]))
    assert line.passes.value == pytest.approx(np.mean([-(-size // 8) for size in sizes]))
    exact = next(
        f for f in union_table(streams, [4]).figures if (f.b, f.layers.label) == (4, "all")
    )
    assert exact.values.union.value == pytest.approx(np.mean(sizes))
    (curve,) = (c for c in union_curves(streams, [4]) if (c.b, c.stratum) == (4, "all"))
    assert curve.mean.mean() == pytest.approx(np.mean(sizes))


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("gptoss20b_decode_4x511_small[0:511]", [511]),
        ("gptoss20b_decode_4x511_small", [2044]),  # one after another, the cache is not reset
    ],
)
def test_lru_misses_equal_those_of_moe_cache_eval(name, lengths):
    expected = real.load_json("replay.expected.json")["traces"][name]
    sets = lay_out(pool([real.gpt_oss(lengths)])).merge(np.array([0]))
    capacities = [int(c) for c in expected["capacities"]]
    for found in replay(sets, capacities, 1):
        values = expected["capacities"][str(found.capacity)]
        hits = int(found.requests.sum() - found.misses.sum())
        assert found.requests.sum() == expected["accesses"]
        if values.get("mce_event_atomic_lru_tie_dependent"):
            # Among experts last used in the same step either program may evict another one.
            assert hits == pytest.approx(values["mce_event_atomic_lru"], rel=0.001)
        else:
            assert hits == values["mce_event_atomic_lru"]


def test_toy_of_moe_cache_eval():
    toy = real.load_json("fixtures.expected.json")["mce_toy"]
    from unionkit import make_model, make_stream, make_trace

    n = toy["layers"]
    cells = [[set(step)] * n for step in toy["steps"]]
    model = make_model([toy["experts"]] * n, [2] * n)
    sets = lay_out(pool([make_trace(model, [make_stream("toy", "", cells, [2] * n)])])).merge(
        np.array([0])
    )
    (found,) = replay(sets, [toy["capacity_per_layer"]], 1)
    expected = toy["expected"]
    assert found.misses.ravel().tolist() == expected["event_misses"]  # layer by layer in each step
    counts = found.counts()
    assert counts.misses.sum() == expected["misses"] == 18
    assert counts.requests.sum() - counts.misses.sum() == expected["hits"] == 12
