"""Measured I/O of a trace, summed and compared with a replay."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moetap.analysis.measured import agreement, measured, replayed_misses
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
    total = measured(trace())
    assert (total.steps, total.requests, total.misses, total.read_bytes) == (3, 12, 6, 60)
    assert total.hit_rate == 0.5
    assert total.bandwidth_bps == 10
    assert (total.read_s, total.wait_s, total.eval_s, total.step_s) == (6, 3, 1.5, 6)
    assert measured(trace(), "steady").steps == 0


def test_replay_of_decode_rows_from_empty_slots_loops_included():
    t = trace()
    assert replayed_misses(t, t.streams[0]).tolist() == MISSES.tolist()
    assert agreement(t).different == 0
    wrong = MISSES.copy()
    wrong[2, 1] = 1
    found = agreement(trace(wrong))
    assert (found.cells, found.different, found.measured, found.replayed) == (6, 1, 7, 6)


def test_what_cannot_be_compared():
    with pytest.raises(MoetapError, match="policy 'future'"):
        agreement(trace(policy="future"))
    t = trace()
    bare = replace(t, streams=(replace(t.streams[0], io=None),))
    for function in (measured, agreement):
        with pytest.raises(MoetapError, match="no measured I/O"):
            function(bare)
