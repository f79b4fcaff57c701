"""The ledger: the known case by hand, a twin in plain Python, and what must hold for any sizes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moetap.analysis.ledger import (
    ACTIVATIONS,
    GIB,
    OVERHEAD,
    Allowance,
    Cache,
    Device,
    Headroom,
    Ledger,
    MoeLayer,
    Sizes,
    attention_bytes_per_token,
    default_slots,
    ledger,
    linear_attention_bytes,
    make_tier,
    mamba_bytes,
    trace_sizes,
    working_set_limits,
)
from moetap.errors import MoetapError, UsageError
from moetap.trace import ModelInfo

FREE = Allowance(0, "none")


def qwen36() -> Sizes:
    """Qwen3.6-35B-A3B, 4 bits: by hand from its dimensions."""
    expert = 3 * (2048 * 512 // 2 + 2 * 2 * 2048 * 512 // 64)
    state = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4
    caches = tuple(
        Cache(i, "full", bytes_per_token=2 * 2 * 256 * 2)
        if i % 4 == 3
        else Cache(i, "linear", constant_bytes=state)
        for i in range(40)
    )
    layers = tuple(MoeLayer(i, 256, 8, expert) for i in range(40))
    return Sizes("qwen36", "by hand", layers, 1_389_394_176, caches, "by hand")


def rules(found: dict[str, int] | None) -> list[int]:
    assert found is not None and list(found) == ["older", "newer"]
    return list(found.values())


def test_the_known_case():
    sizes = qwen36()
    assert sizes.layers[0].expert_bytes == 1_769_472
    assert sizes.kv_bytes_per_token == 20_480
    assert sizes.state_bytes == 64_389_120
    assert [sizes.arena_bytes(c) for c in (64, 128, 192, 256)] == [
        4_529_848_320, 9_059_696_640, 13_589_544_960, 18_119_393_280,
    ]  # fmt: skip
    table = ledger(sizes, [make_tier(16)], [4], 8192, [128], FREE, FREE)
    (line,) = table.lines
    assert line.terms.total_bytes == line.terms.model_bytes == 11_377_735_936
    older, newer = line.nets
    assert (older.rule, older.working_set_bytes) == ("older", 75_514_064)  # 75.5 MB
    assert (newer.rule, newer.working_set_bytes) == ("newer", 1_335_384_064)  # 1.34 GB
    # With any activations and overhead worth the name the verdict hangs on the rule.
    line = ledger(sizes, [make_tier(16)], [4], 8192, [128]).lines[0]
    assert line.terms.total_bytes == 11_377_735_936 + 500_000_000
    assert [n.net_bytes for n in line.nets] == [-424_485_936, 835_384_064]
    assert line.verdict == "depends on the rule"
    assert line.tight == "working set"
    assert line.terms.largest == ("experts", 9_059_696_640)


def test_kv_is_rounded_up_to_256_tokens():
    sizes = qwen36()
    assert [sizes.kv_bytes(t) for t in (1, 256, 257, 8192)] == [
        5_242_880, 5_242_880, 10_485_760, 167_772_160,
    ]  # fmt: skip


def test_formulas_by_hand():
    assert attention_bytes_per_token(2, 256, 256) == 2048
    assert 10 * attention_bytes_per_token(2, 256, 256, kv_bits=8) == 10_880
    assert 10 * attention_bytes_per_token(2, 256, 256, kv_bits=4) == 5_760
    assert attention_bytes_per_token(1, 512, 64) == 1152  # DeepSeek's MLA
    assert linear_attention_bytes(16, 32, 128, 128, 4) == 49_152 + 2_097_152
    # (4 - 1) x (64 x 64 + 2 x 8 x 128) x 2 + 64 x 64 x 128 x 2
    assert mamba_bytes(64, 64, 128, 8, 4) == 36_864 + 1_048_576


def test_budgets():
    assert [(x.rule, x.n_bytes) for x in working_set_limits(16)] == [
        ("older", 11_453_250_000),
        ("newer", 12_713_120_000),
    ]
    older, newer = working_set_limits(8)
    assert older.n_bytes == 5_726_630_000
    assert newer.n_bytes == 12_713_120_000 // 2 and "no log" in newer.source
    # 24: older between 16 and 32, which have the same share (to the digits printed).
    older, newer = working_set_limits(24)
    assert abs(older.n_bytes - 24 * GIB * 2 // 3) < 20_000 and "between 16 and 32" in older.source
    assert newer.n_bytes == 19_069_670_000
    # 48: newer half way between the shares of 32 and 64.
    low, high = Fraction(26_800_600_000, 32 * GIB), Fraction(55_662_790_000, 64 * GIB)
    assert working_set_limits(48)[1].n_bytes == int((low + high) / 2 * 48 * GIB)
    # 192: the last share known.
    assert working_set_limits(192)[0].n_bytes == 49_152 * 2**20 * 3
    # 16 GiB less 2.5 GB less 10 %.
    assert make_tier(16).physical_bytes == 17_179_869_184 - 2_500_000_000 - 1_717_986_918
    assert make_tier(16, Headroom(4 * 10**9, Fraction(0))).physical_bytes == 13_179_869_184


def test_this_machine_s_own_limit_is_used_for_its_tier_only():
    mac = Device(16 * GIB, 12_000_000_000)
    assert [(x.rule, x.n_bytes) for x in make_tier(16, None, mac).limits] == [
        ("device", 12_000_000_000)
    ]
    assert [x.rule for x in make_tier(24, None, mac).limits] == ["older", "newer"]
    line = ledger(qwen36(), [make_tier(16, None, mac)], [4], 8192, [128]).lines[0]
    assert line.verdict == "fits"


def test_default_slots_by_tier():
    assert [default_slots(t) for t in (4, 8, 12, 16, 18, 24, 31, 32, 64)] == [
        64, 64, 64, 128, 128, 192, 192, None, None,
    ]  # fmt: skip
    table = ledger(qwen36(), [make_tier(t) for t in (32, 8, 16)], [1], 100)
    assert [t.ram_gib for t in table.tiers] == [8, 16, 32]
    assert table.slots == (64, 128, 256)
    small = Sizes("s", "", (MoeLayer(0, 8, 2, 100),), 0, (), "")
    assert ledger(small, [make_tier(16)], [1], 1).slots == (8,)


def test_verdicts_and_what_is_tight():
    sizes = qwen36()
    table = ledger(sizes, [make_tier(t) for t in (8, 16, 24, 32)], [1, 2, 4], 8192)
    lines = [table.line(tier, table.default_slots(tier), 4) for tier in table.tiers]
    assert [line.verdict for line in lines] == [
        "does not fit", "depends on the rule", "fits", "fits",
    ]  # fmt: skip
    assert lines[0].tight == "physical"
    # Tight by rule: physical memory in between the two limits.
    tier = make_tier(16, Headroom(5 * 10**9, Fraction(0)))
    line = ledger(sizes, [tier], [1], 8192, [64]).lines[0]
    assert line.tight == "older: working set, newer: physical"


def test_largest_c_and_b_by_hand():
    table = ledger(qwen36(), [make_tier(16)], [1, 4], 8192, [128])
    slot, lane = 40 * 1_769_472, 167_772_160 + 64_389_120
    rest = 1_389_394_176 + 500_000_000
    budgets = [11_453_250_000, 12_713_120_000]
    assert rules(table.largest_slots(table.tiers[0], 4)) == [
        (b - rest - 4 * lane) // slot for b in budgets
    ]
    assert rules(table.largest_lanes(table.tiers[0], 128)) == [
        (b - rest - 128 * slot) // lane for b in budgets
    ]
    assert rules(table.largest_slots(table.tiers[0], 4)) == [122, 139]
    assert rules(table.largest_lanes(table.tiers[0], 128)) == [2, 7]


def test_none_fits_and_lanes_for_nothing():
    big = Sizes("b", "", (MoeLayer(0, 64, 4, GIB),), 0, (Cache(0, "x", 1),), "")
    table = ledger(big, [make_tier(8)], [1], 1, [64])
    assert rules(table.largest_slots(table.tiers[0], 1)) == [4, 4]  # 4.29 of 4.73 GB
    bigger = Sizes("b", "", (MoeLayer(0, 64, 5, GIB),), 0, (), "")
    table = ledger(bigger, [make_tier(8)], [1], 1, [64])
    assert rules(table.largest_slots(table.tiers[0], 1)) == [0, 0]  # 4 slots, but k = 5
    assert table.largest_lanes(table.tiers[0], 64) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [7]}, "C = 7 is less than the 8 experts"),
        ({"lanes": [0]}, "B = 0"),
        ({"lanes": []}, "at least one tier and one B"),
        ({"tiers": []}, "at least one tier"),
        ({"context": 0}, "context 0"),
        ({"overhead": Allowance(-1, "")}, "must not be negative"),
    ],
)
def test_questions_that_make_no_sense(change, message):
    asked = {"tiers": [make_tier(16)], "lanes": [1], "context": 1} | change
    with pytest.raises(UsageError, match=message):
        ledger(qwen36(), **asked)


def test_impossible_tier_and_sizes():
    with pytest.raises(UsageError, match="tier 0"):
        make_tier(0)
    with pytest.raises(MoetapError, match="at least one MoE layer"):
        Sizes("x", "", (), 0, (), "")


def test_the_sizes_that_a_trace_records():
    info = ModelInfo(
        id="m", revision="", model_type="x", config_json="{}", config_sha256="", weights_sha256="",
        quantization="", layer_index=np.array([1, 3]), n_experts=np.array([8, 4]),
        top_k=np.array([2, 1]), expert_bytes=np.array([100, 50]), resident_bytes=7,
        kv_bytes_per_token=3, state_bytes_per_stream=11,
    )  # fmt: skip
    sizes = trace_sizes(info)
    assert sizes.arena_bytes(5) == 5 * 100 + 4 * 50
    assert (sizes.kv_bytes(257), sizes.state_bytes, sizes.resident_bytes) == (512 * 3, 11, 7)
    assert (sizes.top_k, sizes.n_experts) == (2, 8)
    assert type(sizes.layers[0].expert_bytes) is int
    for lacking in ({"kv_bytes_per_token": None}, {"expert_bytes": np.array([100, 0])}):
        with pytest.raises(MoetapError, match="does not record the model's sizes"):
            trace_sizes(replace(info, **lacking))


# -- any sizes

LAYERS = st.lists(
    st.tuples(st.integers(1, 300), st.integers(1, 8), st.integers(1, 5_000_000)),
    min_size=1,
    max_size=6,
)
CACHES = st.lists(
    st.tuples(
        st.integers(0, 5000),
        st.integers(0, 3_000_000),
        st.none() | st.integers(1, 5000),
        st.sampled_from((1, 256)),
    ),
    max_size=6,
)


@st.composite
def sizes_of(draw: st.DrawFn) -> Sizes:
    layers = draw(LAYERS)
    caches = draw(CACHES)
    return Sizes(
        "m",
        "",
        tuple(MoeLayer(i, e, min(k, e), n) for i, (e, k, n) in enumerate(layers)),
        draw(st.integers(0, 10**10)),
        tuple(Cache(i, "c", *entry) for i, entry in enumerate(caches)),
        "",
    )


def asked(sizes: Sizes, gib: int, lanes: int, context: int) -> Ledger:
    return ledger(sizes, [make_tier(gib)], [lanes], context)


@given(sizes_of(), st.integers(1, 400), st.integers(1, 9), st.integers(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_sum_against_plain_python(sizes, slots, lanes, context):
    total = sizes.resident_bytes + ACTIVATIONS.n_bytes + OVERHEAD.n_bytes
    for layer in sizes.layers:
        for _ in range(min(slots, layer.n_experts)):
            total += layer.expert_bytes
    for _ in range(lanes):
        for cache in sizes.caches:
            held = 0
            while cache.max_tokens is None and held < context:
                held += cache.step
            if cache.max_tokens is not None:
                held = min(context + cache.step - 1, cache.max_tokens)
            total += held * cache.bytes_per_token + cache.constant_bytes
    assert asked(sizes, 16, lanes, context).terms(slots, lanes).total_bytes == total


@given(
    sizes_of(), st.integers(1, 400), st.integers(1, 400),
    st.integers(1, 9), st.integers(1, 9), st.integers(1, 9999), st.integers(1, 9999),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_more_never_costs_less(sizes, c1, c2, b1, b2, t1, t2):
    low = asked(sizes, 16, 1, min(t1, t2)).terms(min(c1, c2), min(b1, b2))
    high = asked(sizes, 16, 1, max(t1, t2)).terms(max(c1, c2), max(b1, b2))
    assert low.total_bytes <= high.total_bytes


@given(sizes_of(), st.sampled_from((8, 16, 24)), st.integers(1, 9), st.integers(1, 10_000))
@settings(max_examples=60, deadline=None)
def test_the_largest_really_is_the_largest(sizes, gib, lanes, context):
    table = asked(sizes, gib, lanes, context)
    (tier,) = table.tiers
    for i, limit in enumerate(tier.limits):

        def fits(slots: int, b: int, at: int = i) -> bool:
            return table.line(tier, slots, b).nets[at].net_bytes >= 0

        most = table.largest_slots(tier, lanes)[limit.rule]
        possible = [c for c in range(sizes.top_k, sizes.n_experts + 1) if fits(c, lanes)]
        assert most == max(possible, default=0)
        slots = table.slots[0]
        found = table.largest_lanes(tier, slots)
        if found is None:
            assert table.terms(slots, 1) == table.terms(slots, 1)
            continue
        most = found[limit.rule]
        assert most == 0 or fits(slots, most)
        assert not fits(slots, most + 1)


@given(st.integers(1, 512))
@settings(max_examples=60, deadline=None)
def test_limits_grow_with_memory_and_stay_below_it(gib):
    for small, large in zip(working_set_limits(gib), working_set_limits(gib + 1), strict=True):
        assert 0 < small.n_bytes < gib * GIB
        assert small.n_bytes <= large.n_bytes
