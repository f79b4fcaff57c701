"""Model cards: the loader's checks, and every number worked out again."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model

from moetap._data import data_dir
from moetap.capture.geometry import trace_geometry
from moetap.cli.ledger import card_caches
from moetap.errors import MoetapError
from moetap.models import FACTS, ModelCard, all_cards, card_names, find_card, load_card

CARDS = all_cards()


def config_of(card: ModelCard) -> dict:
    """mlx-lm's config of the card's model. Dimensions that the card has come from it."""
    dims = {entry.kind: entry.dims for entry in card.attention}
    full = dims.get("full", {})
    base = {
        "model_type": card.model_type,
        "hidden_size": card.hidden_size.value,
        "num_hidden_layers": card.decoder_layers.value,
        "vocab_size": card.vocab_size.value,
        "num_experts_per_tok": card.top_k.value,
        "num_key_value_heads": full.get("kv_heads"),
        "head_dim": full.get("head_dim"),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
    }
    experts, inner = card.n_experts.value, card.moe_intermediate_size.value
    if card.model_type == "qwen3_5_moe":
        linear = dims["linear"]
        return {
            "model_type": card.model_type,
            "text_config": base
            | {
                "num_attention_heads": 16,
                "num_experts": experts,
                "moe_intermediate_size": inner,
                "shared_expert_intermediate_size": 512,
                "intermediate_size": 512,
                "linear_num_value_heads": linear["value_heads"],
                "linear_num_key_heads": linear["key_heads"],
                "linear_key_head_dim": linear["key_dim"],
                "linear_value_head_dim": linear["value_dim"],
                "linear_conv_kernel_dim": linear["conv_kernel"],
                "full_attention_interval": 4,
            },
        }
    if card.model_type == "qwen3_moe":
        return base | {
            "num_attention_heads": 32, "num_experts": experts, "moe_intermediate_size": inner,
            "intermediate_size": 6144, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "rope_theta": 1e6, "norm_topk_prob": True,
        }  # fmt: skip
    if card.model_type == "gpt_oss":
        return base | {
            "num_attention_heads": 64, "num_local_experts": experts, "intermediate_size": inner,
            "sliding_window": dims["sliding"]["window"],
        }  # fmt: skip
    if card.model_type == "glm4_moe":
        return base | {
            "num_attention_heads": 96, "n_routed_experts": experts, "moe_intermediate_size": inner,
            "intermediate_size": 10944, "n_shared_experts": 1, "attention_bias": True,
            "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
            "first_k_dense_replace": card.first_moe_layer.value, "rope_theta": 1e6,
            "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_scaling": None,
        }  # fmt: skip
    if card.model_type == "deepseek_v3":
        return base | {
            "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": experts,
            "moe_intermediate_size": inner, "intermediate_size": 18432, "n_shared_experts": 1,
            "routed_scaling_factor": 2.5, "kv_lora_rank": dims["mla"]["latent_dim"],
            "qk_rope_head_dim": dims["mla"]["rope_dim"], "q_lora_rank": 1536, "v_head_dim": 128,
            "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
            "first_k_dense_replace": card.first_moe_layer.value,
        }  # fmt: skip
    if card.model_type == "olmoe":
        return base | {
            "num_attention_heads": 16, "num_experts": experts, "intermediate_size": inner,
        }  # fmt: skip
    assert card.model_type == "mixtral"
    return base | {
        "num_attention_heads": 32, "num_local_experts": experts, "intermediate_size": inner,
    }  # fmt: skip


def build(card: ModelCard) -> nn.Module:
    """The model in bfloat16, nothing evaluated; what mlx-lm never casts as the checkpoints have
    it.
    """
    module = importlib.import_module(f"mlx_lm.models.{card.model_type}")
    model = module.Model(module.ModelArgs.from_dict(config_of(card)))
    model.set_dtype(mx.bfloat16)
    return model


def quantised(card: ModelCard) -> dict[str, mx.array]:
    """Name -> parameter of the model as mlx-lm quantises it, unevaluated."""
    model = build(card)

    def mxfp4_experts(path: str, _: nn.Module) -> dict:
        if "experts" in path:
            return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        return {"group_size": 64, "bits": 8}

    options = {"quant_predicate": mxfp4_experts} if card.model_type == "gpt_oss" else {}
    model, _ = quantize_model(model, config_of(card), 64, 4, **options)
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_weights_equal_those_of_mlx_lm_s_model(card):
    routed: dict[int, int] = {}
    resident = 0
    for name, array in quantised(card).items():
        if re.search(r"\.(switch_mlp|experts)\.", name):
            layer = int(re.search(r"layers\.(\d+)\.", name)[1])
            routed[layer] = routed.get(layer, 0) + array.nbytes
        else:
            # Correction biases are stored in float32; set_dtype made them 16 bits.
            resident += array.nbytes * (2 if name.endswith("correction_bias") else 1)
    first = card.first_moe_layer.value
    assert routed == dict.fromkeys(
        range(first, first + card.moe_layers.value), card.n_experts.value * card.expert_bytes.value
    )
    assert resident == card.resident_bytes.value


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_caches_equal_those_of_mlx_lm_s_model(card):
    model = build(card)
    geometry = trace_geometry(model)
    assert set(geometry.top_k) == {card.top_k.value}
    caches = card_caches(card, None)
    assert sum(c.bytes_per_token for c in caches) == card.kv_bytes_per_token.value
    assert sum(c.constant_bytes for c in caches) == card.state_bytes.value

    def shape(cache):
        # A state has no step to grow by.
        grows = cache.bytes_per_token > 0
        return (*((cache.bytes_per_token, cache.step) if grows else (0, 0)),
                cache.constant_bytes, cache.max_tokens or 0)  # fmt: skip

    assert sorted(map(shape, caches)) == sorted(map(shape, geometry.caches))
    for bits in (8, 4):
        try:
            live = trace_geometry(model, bits).kv_bytes_per_token
        except MoetapError:
            with pytest.raises(MoetapError, match="cannot quantise"):
                card_caches(card, bits)
        else:
            assert sum(c.bytes_per_token for c in card_caches(card, bits)) == live


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_expert_bytes_by_the_formula(card):
    weights = 3 * card.hidden_size.value * card.moe_intermediate_size.value
    if card.model_type == "gpt_oss":
        expected = weights * 17 // 32 + 3 * 2880 * 2  # 4 bits + 8 / 32; biases
    else:
        expected = weights * 9 // 16  # 4 bits + 2 x 16 / 64
    assert card.expert_bytes.value == expected


def test_the_cards_that_there_are():
    assert card_names() == [
        "deepseek-v3", "glm-4.5-air", "gpt-oss-120b", "gpt-oss-20b", "mixtral-8x7b",
        "olmoe-1b-7b", "qwen3-30b-a3b", "qwen3.6-35b-a3b",
    ]  # fmt: skip
    for name, card in zip(card_names(), CARDS, strict=True):
        assert card.name.lower() == name
        assert find_card(name.upper()) == find_card(card.checkpoints[0]) == card
        assert all(getattr(card, fact).source for fact in FACTS)
    assert find_card("no-such-model") is None


QWEN = (data_dir("models") / "qwen3.6-35b-a3b.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("top_k =", "topk =", "unknown key 'topk'"),
        ('model_type = "qwen3_5_moe"', "", "lacks 'model_type'"),
        ("[sources]", "[sources]\nx = 1", r"\[sources\] must hold text"),
        ('top_k = [8, "config"]', "top_k = 8", "top_k must be"),
        ('top_k = [8, "config"]', 'top_k = [true, "config"]', "top_k must be"),
        ('top_k = [8, "config"]', 'top_k = [0, "config"]', "top_k must be"),
        ('top_k = [8, "config"]', 'top_k = [8, "nowhere"]', "source 'nowhere'"),
        ('top_k = [8, "config"]', 'top_k = [257, "config"]', "larger than n_experts"),
        ('moe_layers = [40, "config"]', 'moe_layers = [41, "config"]', "exceed decoder_layers"),
        ('layers = [10, "config"]', 'layers = [9, "config"]', "has 39 layers"),
        ('kind = "full"', 'kind = "half"', "attention kind 'half' is none of"),
        ("kv_heads =", "heads =", r"\[\[attention\]\] full has the unknown key 'heads'"),
        ("[model]", "[model", "not a readable model card"),
    ],
)
def test_a_card_that_is_not_valid_is_refused(old, new, message, tmp_path: Path):
    path = tmp_path / "card.toml"
    assert old in QWEN
    path.write_text(QWEN.replace(old, new, 1))
    with pytest.raises(MoetapError, match=message) as caught:
        load_card(path)
    assert str(path) in str(caught.value)
