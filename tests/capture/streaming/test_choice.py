"""Resident or streamed, and the line that says why."""

from __future__ import annotations

import numpy as np
import pytest

from moetap.analysis.ledger import make_tier
from moetap.capture.streaming.choice import choose, parse_memory
from moetap.errors import MoetapError, UsageError
from moetap.trace import ModelInfo

# The bytes of Qwen3.6-35B-A3B at 4 bits.
LAYERS = 40
INFO = ModelInfo(
    "qwen", "", "qwen3_5_moe", "{}", "", "", "",
    layer_index=np.arange(LAYERS),
    n_experts=np.full(LAYERS, 256),
    top_k=np.full(LAYERS, 8),
    expert_bytes=np.full(LAYERS, 1_769_472),
    resident_bytes=1_389_394_176,
    kv_bytes_per_token=20_480,
    state_bytes_per_stream=64_389_120,
)  # fmt: skip


def pick(gib: int, **options):
    return choose(INFO, make_tier(gib), 8192, **options)


def test_the_tier_decides():
    assert pick(64).slots is None
    assert pick(64).why == "resident: 20.24 GB fits 64 GiB of memory"
    slots = [pick(gib).slots for gib in (8, 16, 24)]
    assert slots == sorted(slots) and 8 <= slots[0] < 64 and 100 < slots[2] < 256
    assert pick(16).why.startswith(f"streaming: {slots[1]} of 256 expert slots a layer (the most")


def test_one_slot_more_would_not_fit():
    from moetap.analysis.ledger import ledger, trace_sizes

    tier = make_tier(16)
    table = ledger(trace_sizes(INFO), [tier], [1], 8192)
    slots = pick(16).slots
    assert table.line(tier, slots, 1).verdict == "fits"
    assert table.line(tier, slots + 1, 1).verdict != "fits"


def test_options():
    assert pick(64, stream=True).slots == 256
    assert pick(8, slots=64).slots == 64
    assert pick(64, resident=True).slots is None
    with pytest.raises(MoetapError, match=r"needs 20\.24 GB and does not fit 16 GiB .* too much"):
        pick(16, resident=True)
    for options in ({"stream": True}, {"slots": 9}, {"memory_bytes": 1}):
        with pytest.raises(UsageError, match="--resident does not go with"):
            pick(64, resident=True, **options)
    with pytest.raises(UsageError, match="choose one"):
        pick(64, slots=9, memory_bytes=10**10)


def test_a_budget():
    choice = pick(64, memory_bytes=6 * 10**9)
    total = 1_389_394_176 + 8192 * 20_480 + 64_389_120 + 500_000_000
    assert choice.slots == (6 * 10**9 - total) // (40 * 1_769_472)
    assert pick(8, memory_bytes=21 * 10**9).slots is None
    assert pick(8, memory_bytes=21 * 10**9, stream=True).slots == 256
    with pytest.raises(UsageError, match=r"--memory 2,000\.0 MB: qwen needs 2,687\.8 MB with 8"):
        pick(64, memory_bytes=2 * 10**9)


def test_a_machine_too_small_for_k_slots():
    with pytest.raises(MoetapError, match=r"does not fit 4 GiB .* even with 8 slots"):
        pick(4)


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("6GB", 6 * 10**9), ("5.5 GiB", 5905580032), ("800mb", 8 * 10**8), ("6", 6 * 10**9)],
)
def test_sizes(text, n_bytes):
    assert parse_memory(text) == n_bytes


@pytest.mark.parametrize("text", ["", "six", "-1GB", "6TB", "6 GB of memory", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="not a size like 6GB"):
        parse_memory(text)
