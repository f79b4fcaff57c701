"""Cache sizes: the lazy forward and the formulas against caches that were really evaluated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import CONFIGS, FAMILIES, divisible, make_model, moe_blocks
from headerkit import described, write_checkpoint
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import save_model

from moetap.analysis.ledger import (
    Cache,
    attention_bytes_per_token,
    linear_attention_bytes,
    mamba_bytes,
)
from moetap.capture.checkpoint import classify, read_checkpoint
from moetap.capture.geometry import Geometry, checkpoint_geometry, this_mac, trace_geometry
from moetap.capture.tap import find_switches
from moetap.errors import MoetapError

_BASE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
}
MAMBA: dict[str, Any] = _BASE | {
    "intermediate_size": 16,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_proj_bias": False,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_n_groups": 2,
    "mamba_conv_bias": True,
}
KDA: dict[str, Any] = _BASE | {
    "intermediate_size": 48,
    "head_dim": 16,
    "rope_theta": 1e4,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
    "model_max_length": 4096,
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
CHUNKED: dict[str, Any] = {
    "text_config": {
        **_BASE,
        "model_type": "llama4_text",
        "attention_bias": False,
        "attention_chunk_size": 300,
        "head_dim": 16,
        "interleave_moe_layer_step": 1,
        "intermediate_size": 16,
        "intermediate_size_mlp": 16,
        "max_position_embeddings": 4096,
        "num_experts_per_tok": 1,
        "num_local_experts": 8,
        "rope_scaling": None,
        "rope_theta": 1e4,
        "use_qk_norm": False,
    }
}
WINDOWS = {f"gpt_oss_{n}": CONFIGS["gpt_oss"] | {"sliding_window": n} for n in (8, 300, 600)}
MODELS: dict[str, tuple[str, dict[str, Any]]] = (
    {family: (family, CONFIGS[family]) for family in FAMILIES}
    | {name: ("gpt_oss", config) for name, config in WINDOWS.items()}
    | {"mamba": ("granitemoehybrid", MAMBA), "kda": ("kimi_linear", KDA)}
)


def model_of(name: str) -> nn.Module:
    family, config = MODELS[name]
    return make_model(family, config=config)


def fill(model: nn.Module, prompt: int, steps: int, kv_bits: int | None = None) -> list[Any]:
    """Evaluated caches after `prompt` tokens at once and `steps` one by one, as mlx-lm feeds it."""
    cache = make_prompt_cache(model)
    for n in [prompt] * (prompt > 0) + [1] * steps:
        mx.eval(model(mx.zeros((1, n), mx.int32), cache=cache))
        maybe_quantize_kv_cache(cache, 0, 64, kv_bits)
        mx.eval([c.state for c in cache])
    return cache


def parts(cache: list[Any]) -> list[Any]:
    return [part for entry in cache for part in getattr(entry, "caches", (entry,))]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tokens", [3, 100, 256, 257, 700])
def test_evaluated_caches_are_as_large_as_the_ledger_says(name, tokens):
    """After a prompt of T - 1 tokens and one decode step: the most that T tokens can take."""
    model = model_of(name)
    geometry = trace_geometry(model)
    live = parts(fill(model, tokens - 1, 1))
    assert [c.nbytes(tokens) for c in geometry.caches] == [c.nbytes for c in live]
    assert [c.kind for c in geometry.caches] == [type(c).__name__ for c in live]


@pytest.mark.parametrize("name", ["gpt_oss_300", "gpt_oss_600", "qwen3_next"])
def test_where_the_prompt_ended_never_costs_more(name):
    model = model_of(name)
    caches = trace_geometry(model).caches
    for prompt, steps in ((1, 40), (40, 20), (250, 20), (290, 20), (590, 20)):
        live = parts(fill(model, prompt, steps))
        for cache, entry in zip(caches, live, strict=True):
            assert entry.nbytes <= cache.nbytes(prompt + steps)
            if cache.max_tokens is None:
                assert entry.nbytes == cache.nbytes(prompt + steps)


def test_a_chunked_cache_is_never_larger_than_said():
    model = make_model("llama4", config=CHUNKED)
    geometry = trace_geometry(model)
    assert [c.max_tokens for c in geometry.caches] == [556, 556, 556, None]
    for prompt in (10, 299, 600):
        cache = make_prompt_cache(model)
        model(mx.zeros((1, prompt), mx.int32), cache=cache)
        for step in range(3):
            model(mx.zeros((1, 1), mx.int32), cache=cache)
            mx.eval([c.state for c in cache])
            said = [c.nbytes(prompt + step + 1) for c in geometry.caches]
            assert all(a.nbytes <= b for a, b in zip(cache, said, strict=True))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_caches(bits):
    config = CONFIGS["qwen3_moe"] | {"head_dim": 64}
    model = make_model("qwen3_moe", config=config)
    geometry = trace_geometry(model, bits)
    # By hand for 2 KV heads of 64: K and V at `bits` bits, with a float32 scale and bias each.
    assert geometry.kv_bytes_per_token == 4 * 2 * 2 * (64 * bits // 8 + 8)
    assert {c.bytes_per_token for c in geometry.caches} == {
        attention_bytes_per_token(2, 64, 64, itemsize=4, kv_bits=bits)
    }
    for tokens in (257, 600):
        live = fill(model, tokens - 1, 1, bits)
        assert [c.nbytes(tokens) for c in geometry.caches] == [c.nbytes for c in live]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gpt_oss", "RotatingKVCache"), ("deepseek_v3", "quantis"), ("qwen3_moe", "KV heads")],
)
def test_kv_that_mlx_lm_cannot_quantise_is_refused(name, reason):
    with pytest.raises(MoetapError, match=f"mlx-lm cannot .*{reason}"):
        trace_geometry(model_of(name), 8)


def sums(geometry: Geometry) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for c in geometry.caches:
        a, b = found.get(c.kind, (0, 0))
        found[c.kind] = (a + c.bytes_per_token, b + c.constant_bytes)
    return found


def test_formulas_equal_the_caches():
    """The models are float32: 4 bytes a number."""
    full = attention_bytes_per_token(2, 16, 16, 4)
    assert full == 2 * 2 * 16 * 4
    assert sums(trace_geometry(model_of("qwen3_moe"))) == {"KVCache": (4 * full, 0)}
    assert sums(trace_geometry(model_of("gpt_oss"))) == {
        "KVCache": (2 * full, 0),
        "RotatingKVCache": (2 * full, 0),
    }
    mla = attention_bytes_per_token(1, 16, 8, 4)
    assert sums(trace_geometry(model_of("deepseek_v3"))) == {"KVCache": (4 * mla, 0)}
    linear = linear_attention_bytes(2, 2, 16, 16, 4, itemsize=4)
    assert sums(trace_geometry(model_of("qwen3_next"))) == {
        "KVCache": (2 * full, 0),
        "ArraysCache": (0, 2 * linear),
    }
    kda = linear_attention_bytes(4, 4, 16, 16, 4, itemsize=4)
    found = sums(trace_geometry(model_of("kda")))
    assert found["ArraysCache"] == (0, 3 * kda)
    mamba = mamba_bytes(4, 16, 8, 2, 4, itemsize=4, state_itemsize=4)
    found = sums(trace_geometry(model_of("mamba")))
    assert found["ArraysCache"] == (0, 3 * mamba)


def test_top_k_and_layers_are_read_from_what_ran():
    model = model_of("qwen3_moe")
    geometry = trace_geometry(model)
    assert geometry.top_k == (4, 4, 4)
    assert list(geometry.layer_index) == [n for n, _ in moe_blocks(model)]


def test_nothing_is_evaluated_and_the_tap_is_gone():
    model = make_model("qwen3_next")
    switch = model.layers[0].mlp.switch_mlp
    kind, before = type(switch), mx.get_active_memory()
    trace_geometry(model)
    assert type(switch) is kind
    assert mx.get_active_memory() - before < 100_000


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
@pytest.mark.parametrize("family", ["qwen3_next", "mixtral"])
def test_caches_follow_the_dtype_of_the_checkpoint(family, dtype, tmp_path):
    # Every expert matrix can be quantised: MLX's CPU backend multiplies no plain half-precision
    # experts.
    config = CONFIGS[family] | {"moe_intermediate_size": 32, "intermediate_size": 32}
    model = make_model(family, config=config)
    model.set_dtype(dtype)
    nn.quantize(model, 32, 4, class_predicate=divisible)
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family} | config))
    geometry, how = checkpoint_geometry(read_checkpoint(tmp_path))
    live = fill(model, 5, 1)
    assert [c.nbytes(6) for c in geometry.caches] == [c.nbytes for c in live]
    assert {mx.bfloat16: "BF16", mx.float16: "F16", mx.float32: "F32"}[dtype] in how.split()


def test_qwen36_without_weights(tmp_path):
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, *described()), header_only=True)
    mx.reset_peak_memory()
    geometry, how = checkpoint_geometry(checkpoint)
    assert geometry.kv_bytes_per_token == 10 * 2 * 2 * 256 * 2 == 20_480
    conv, state = 3 * (2 * 16 * 128 + 32 * 128) * 2, 32 * 128 * 128 * 4
    assert geometry.state_bytes == 30 * (conv + state) == 64_389_120
    assert geometry.top_k == (8,) * 40
    assert "BF16" in how and "norms, biases and scales" in how
    assert mx.get_peak_memory() < 2**30  # the model would be 70 GB
    for bits, size in ((8, 10_880), (4, 5_760)):
        assert checkpoint_geometry(checkpoint, bits)[0].kv_bytes_per_token == size


def test_a_config_that_mlx_lm_cannot_build(tmp_path: Path):
    for config, message in (
        ({"model_type": "no_such_model"}, "no_such_model not supported"),
        ({}, "KeyError"),
        ({"model_type": "qwen3_moe"}, "TypeError"),
        ({"model_type": "llama", **_BASE, "intermediate_size": 8}, "no routed experts"),
    ):
        folder = write_checkpoint(tmp_path, config, {"norm.weight": ("BF16", [8])}, data=True)
        with pytest.raises(MoetapError, match=message) as caught:
            checkpoint_geometry(read_checkpoint(folder))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [MAMBA, KDA, CHUNKED], ids=["mamba", "kda", "llama4"])
def test_other_families_are_classified_as_their_modules(config, tmp_path):
    family = {id(MAMBA): "granitemoehybrid", id(KDA): "kimi_linear", id(CHUNKED): "llama4"}
    model = make_model(family[id(config)], config=config)
    save_model(tmp_path, model)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family[id(config)]} | config))
    inventory = classify(read_checkpoint(tmp_path))
    assert [(s.layer_index, s.n_experts, s.expert_bytes) for s in find_switches(model)] == [
        (layer.layer_index, layer.n_experts, layer.expert_bytes) for layer in inventory.layers
    ]
    assert inventory.unrecognised == () and inventory.dropped == ()


def test_slots():
    plain, window = Cache(0, "x", 10), Cache(0, "x", 10, 7, max_tokens=300)
    assert [plain.slots(t) for t in (0, 1, 256, 257)] == [0, 256, 256, 512]
    assert [window.slots(t) for t in (0, 1, 44, 45, 46, 300, 10**6)] == [
        0, 256, 299, 300, 300, 300, 300,
    ]  # fmt: skip
    assert window.nbytes(10**6) == 3007
    assert Cache(0, "x", 10, step=1).slots(257) == 257


def test_this_mac(monkeypatch):
    assert (this_mac() is None) == (not mx.metal.is_available())
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(
        mx, "device_info", lambda: {"max_recommended_working_set_size": 12_713_115_648}
    )
    monkeypatch.setattr("moetap.capture._machine.ram_bytes", lambda: 2**34)
    mac = this_mac()
    assert (mac.ram_bytes, mac.working_set_bytes) == (2**34, 12_713_115_648)
