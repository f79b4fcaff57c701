"""Measured I/O of a trace, summed and compared with a replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moetap.analysis.measured import agreement, compare, measured, replayed_misses
from moetap.errors import MoetapError
from moetap.trace import CaptureInfo, ModelInfo, Stream, StreamIO, Trace

MODEL = ModelInfo(
    "m", "", "t", "{}", "", "", "",
    layer_index=np.arange(2),
    n_experts=np.array([8, 8]),
    top_k=np.array([2, 2]),
    expert_bytes=np.array([10, 10]),
)  # fmt: skip
# One layer sees three experts in turn through two slots, the other always the same two.
ROWS = np.array([[[5, 6], [0, 1]], [[0, 1], [0, 1]], [[1, 2], [0, 1]], [[0, 2], [0, 1]]], np.uint16)
MISSES = np.array([[2, 2], [1, 0], [1, 0]], np.uint16)


def trace(misses=MISSES, policy="lru", slots=2) -> Trace:
    seconds = np.ones(misses.shape, np.float32)
    io = StreamIO(misses, misses.astype(np.int64) * 10, seconds, seconds / 2, seconds / 4,
                  step_s=np.full(3, 2, np.float32))  # fmt: skip
    stream = Stream(
        "p", "code", "", 2, 3, "length", 1, ROWS,
        np.arange(4, dtype=np.uint32), np.arange(4, dtype=np.uint32), io=io,
    )  # fmt: skip
    capture = CaptureInfo("0", mode="streaming", slots=slots, policy=policy)
    return Trace(MODEL, capture, (stream,), "r", "", True)


def test_sums():
    total = measured(trace(), keep_loops=True)
    assert (total.steps, total.requests, total.misses, total.read_bytes) == (3, 12, 6, 60)
    assert total.hit_rate == 0.5
    assert total.bandwidth_bps == 10
    assert (total.read_s, total.wait_s, total.eval_s, total.step_s) == (6, 3, 1.5, 6)
    assert measured(trace(), "steady", keep_loops=True).steps == 0
    assert total.miss_bytes == 60
    assert total.per_token(total.misses) == 2
    # The stream loops from step 1: step 0 alone counts, 4 misses in 4 requests.
    first = measured(trace())
    assert (first.steps, first.requests, first.misses, first.hit_rate) == (1, 4, 4, 0)
    assert (first.read_s, first.step_s) == (2, 2)
    nothing = measured(trace(), "steady")
    assert nothing.hit_rate is nothing.bandwidth_bps is nothing.per_token(0) is None


def test_misses_of_layers_of_different_sizes_take_different_bytes():
    t = trace()
    sized = replace(t, model=replace(MODEL, expert_bytes=np.array([10, 1000])))
    assert measured(sized, keep_loops=True).miss_bytes == 4 * 10 + 2 * 1000


def test_replay_of_decode_rows_from_empty_slots_loops_included():
    t = trace()
    assert replayed_misses(t, t.streams[0]).tolist() == MISSES.tolist()
    assert agreement(t).different == 0
    wrong = MISSES.copy()
    wrong[2, 1] = 1
    found = agreement(trace(wrong))
    assert (found.cells, found.different, found.measured, found.replayed) == (6, 1, 7, 6)


def test_each_phase_beside_its_replay():
    found = compare(trace(), keep_loops=True)
    assert [(x.phase, x.measured.misses, x.replayed) for x in found.lines] == [
        ("all", 6, 6), ("cold", 6, 6), ("steady", 0, 0),
    ]  # fmt: skip
    assert (found.policy, found.slots, found.missing) == ("lru", 2, "")
    assert found.agreement == agreement(trace())
    # A wrong cell in the looped tail is no part of the figures, but of the comparison.
    wrong = MISSES.copy()
    wrong[2, 1] = 1
    found = compare(trace(wrong))
    assert [(x.measured.misses, x.replayed) for x in found.lines] == [(4, 4), (4, 4), (0, 0)]
    assert found.agreement.different == 1


def lru_by_hand(rows, slots: int) -> list[list[int]]:
    """Misses of each step and layer, by a list of experts, the first to leave first."""
    held: list[list[int]] = [[] for _ in rows[0]]
    found = []
    for step in rows:
        line = []
        for layer, ids in enumerate(step):
            asked = sorted(set(ids) - {65535})
            line.append(len(set(asked) - set(held[layer])))
            kept = [x for x in held[layer] if x not in asked]
            held[layer] = [*kept[len(kept) - max(0, min(len(kept), slots - len(asked))) :], *asked]
        found.append(line)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_replay_against_lists(seed):
    """Ragged E and k, layers that did not run, a prefix of prefill rows that must not count."""
    rng = np.random.default_rng(seed)
    n_experts, top_k = np.array([9, 5, 12]), np.array([3, 1, 2])
    rows = np.full((90, 3, 3), 65535, np.uint16)
    for row in rows:
        for layer, (e, k) in enumerate(zip(n_experts, top_k, strict=True)):
            if rng.random() < 0.9:
                row[layer, :k] = np.sort(rng.choice(e, k, replace=False))
    prefill = int(rng.integers(0, 9))
    stream = Stream(
        "p", "", "", prefill + 1, 90 - prefill, "stop", -1, rows,
        np.zeros(90, np.uint32), np.arange(90, dtype=np.uint32),
    )  # fmt: skip
    model = replace(
        MODEL, layer_index=np.arange(3), n_experts=n_experts, top_k=top_k, expert_bytes=[1] * 3
    )
    slots = int(rng.integers(3, 9))
    capture = CaptureInfo("0", mode="streaming", slots=slots, policy="lru")
    found = replayed_misses(Trace(model, capture, (stream,), "r", "", True), stream)
    assert found.tolist() == lru_by_hand(rows[prefill:].tolist(), slots)


def test_any_policy_that_an_engine_can_have():
    fifo = trace(policy="fifo")
    assert replayed_misses(fifo, fifo.streams[0]).shape == MISSES.shape


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "future"}, "policy 'future': no policy is called"),
        ({"policy": "belady"}, "policy 'belady': it needs to be told"),
        ({"policy": "static"}, "policy 'static': it needs to be told"),
        ({"policy": None}, "policy None and C = 2"),
        ({"slots": None}, "and C = None"),
    ],
)
def test_what_cannot_be_replayed_is_still_summed_up(changes, words):
    found = compare(trace(**changes))
    assert words in found.missing and found.agreement is None
    assert [x.replayed for x in found.lines] == [None] * 3
    assert found.lines[0].measured.misses == 4


def test_what_cannot_be_compared():
    with pytest.raises(MoetapError, match="policy 'future'"):
        agreement(trace(policy="future"))
    t = trace()
    bare = replace(t, streams=(replace(t.streams[0], io=None),))
    for function in (measured, agreement, compare):
        with pytest.raises(MoetapError, match="no measured I/O"):
            function(bare)
