"""The published replay curve of BigMoeOnEdge, and hand-made excerpts that take the same paths.

The curve's policies and accounting are in routekit. `random` is left out: its victims are drawn.
"""

from __future__ import annotations

import numpy as np
import pytest
import real
from routekit import figures, read_route, replayed

CURVE = "qwen3-30b-a3b.expected.json"
ROUTE = "qwen3-30b-a3b.route.csv"


def csv(rows, n_expert=4, used=2, sizes=(10, 30)):
    """rows: (phase, step, layer, experts in the order of slots, hits)."""
    lines = [
        "# route_trace v1",
        f"# model=m arch=a n_layer={len(sizes)} n_expert={n_expert} n_expert_used={used}",
        *(f"# layer={i} expert_bytes={size} dense_bytes=1" for i, size in enumerate(sizes)),
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes",
    ]
    for phase, step, layer, experts, hits in rows:
        for slot, (expert, hit) in enumerate(zip(experts, hits, strict=True)):
            lines.append(f"0,{phase},{step},{layer},{slot},{expert},0.5,{hit},0")
    return "\n".join(lines) + "\n"


# Two prompt tokens of which layer 1 ran the last one only, then two decode steps.
EXCERPT = csv(
    [
        (0, 0, 0, (1, 0), (0, 0)),
        (0, 1, 0, (2, 1), (0, 1)),
        (0, 1, 1, (3, 0), (0, 0)),
        (1, 2, 0, (1, 3), (1, 0)),
        (1, 2, 1, (0, 1), (1, 0)),
        (1, 3, 0, (0, 1), (0, 1)),
        (1, 3, 1, (1, 3), (1, 0)),
    ]
)


def test_excerpt_is_read_as_the_engine_did():
    route = read_route(EXCERPT)
    batches = np.split(route.asked.ids, route.asked.starts[1:-1])
    # Prefill of layer 0 is one batch; 1 was asked for again by the second token, so it comes last.
    assert [b.tolist() for b in batches] == [
        [0, 2, 1], [7, 4], [1, 3], [4, 5], [0, 1], [5, 7],
    ]  # fmt: skip
    assert route.decode.tolist() == [False] * 5 + [True] * 8
    assert route.asked.size.tolist() == [10] * 4 + [30] * 4


@pytest.mark.parametrize(
    ("policy", "budget", "decode_misses"),
    [
        # After prefill three of 10 and two of 30 fill the 90. Step 2: 3 pushes out 0, then 5 pushes
        # out 2 and 7, of which 2 alone would not do. Step 3: 0 misses and fits, then 7 pushes out 3
        # and 4.
        ("lru", 90, [[3], [5], [0], [7]]),
        ("lru", 1000, [[3], [5], [], []]),  # everything fits
        # Nothing but the batch itself stays, whatever the budget.
        ("lru", 5, [[1, 3], [4, 5], [0, 1], [5, 7]]),
        # 45 per layer: four of layer 0, one of layer 1, and there the batch itself.
        ("layer", 90, [[3], [5], [], [7]]),
        ("layerlfu", 90, [[3], [5], [], [7]]),
    ],
)
def test_excerpt_by_hand(policy, budget, decode_misses):
    route = read_route(EXCERPT)
    missed = replayed(route, policy, budget)
    wrong = np.split(np.where(missed, route.asked.ids.astype(int), -1), route.asked.starts[1:-1])
    assert [[x for x in batch.tolist() if x >= 0] for batch in wrong][2:] == decode_misses


def test_excerpt_has_the_flags_of_its_engine_and_figures():
    route = read_route(EXCERPT)
    missed = replayed(route, "lru", 90)
    assert (route.hit == ~missed)[route.decode].all()
    # 5 of 13 hit, 4 of the 8 of decode; 3 x 10 + 2 x 30 and then 3, 5, 0, 7.
    assert figures(route, missed) == {
        "hit_pct_cum": round(400 / 13, 3),
        "hit_pct_decode": 50.0,
        "read_mib": round((30 + 60 + 10 + 30 + 10 + 30) / 2**20, 1),
    }


@pytest.mark.parametrize("policy", ["belady", "lru", "lfu", "layer", "layerlfu"])
def test_every_row_of_the_published_curve(policy):
    route = read_route(real.path(ROUTE).read_text())
    rows = [row for row in real.load_json(CURVE)["curve"] if row["policy"] == policy]
    assert len(rows) == 11
    for row in rows:
        missed = replayed(route, policy, int(row["budget_mib"] * 2**20))
        printed = {name: row[name] for name in ("hit_pct_cum", "hit_pct_decode", "read_mib")}
        assert figures(route, missed) == printed, row["budget_mib"]


def test_every_flag_that_the_engine_recorded_while_it_decoded():
    route = read_route(real.path(ROUTE).read_text())
    expected = real.load_json(CURVE)
    missed = replayed(route, "lru", expected["budget_mib_of_recorded_run"] * 2**20)
    assert route.decode.sum() == 128 * 48 * 6
    assert (route.hit == ~missed)[route.decode].all()

    # And the rate that it printed after each step, prefill included.
    batch = np.repeat(np.arange(len(route.asked.starts) - 1), np.diff(route.asked.starts))
    step = (batch[route.decode] - batch[route.decode][0]) // 48
    before = (~route.decode).sum()
    hits = np.cumsum(np.bincount(step, ~missed[route.decode]))
    asked = before + np.cumsum(np.bincount(step))
    printed = expected["engine_cumulative_hit_pct_per_decode_step"]
    assert np.abs(100 * hits / asked - printed).max() <= 0.005 + 1e-9
