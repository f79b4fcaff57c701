"""Tiny random models of several mlx-lm families, and their routers written once more in NumPy.

The routers here are the tests' independent second opinion: they take the input of the MoE block and
the router's weights and select experts in float64, following each architecture's published
definition, without MLX.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

VOCABULARY = 96

_QWEN = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
    "norm_topk_prob": True,
}
_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 16,
    "partial_rotary_factor": 0.5,
    "full_attention_interval": 2,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # One dense layer, so that the MoE ordinal and the layer number differ.
    "qwen3_moe": _QWEN | {"mlp_only_layers": [1]},
    "qwen3_next": _QWEN | _LINEAR,
    "olmoe": {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "intermediate_size": 16,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCABULARY,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
    "deepseek_v3": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_shared_experts": 1,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.5,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 16,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 8,
    },
    "mixtral": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 8,
    },
}
FAMILIES = tuple(CONFIGS)


def make_model(family: str, seed: int = 0, config: dict[str, Any] | None = None) -> nn.Module:
    """A random float32 model of the family. Router biases, zero at start, are randomised so that
    they matter.
    """
    module = importlib.import_module(f"mlx_lm.models.{family}")
    mx.random.seed(seed)
    model = module.Model(
        module.ModelArgs.from_dict({"model_type": family} | (config or CONFIGS[family]))
    )
    if family == "deepseek_v3":
        for _, block in moe_blocks(model):
            shape = block.gate.e_score_correction_bias.shape
            block.gate.weight = mx.random.normal(block.gate.weight.shape)
            block.gate.e_score_correction_bias = mx.random.normal(shape) * 0.1
    mx.eval(model.parameters())
    return model


def divisible(_path: str, module: nn.Module) -> bool:
    """Predicate for nn.quantize: layers whose rows can be cut into groups of 32."""
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def moe_blocks(model: nn.Module) -> list[tuple[int, nn.Module]]:
    """(layer number, MoE block) in layer order, found by class name so that it does not share code
    with the tap.
    """
    layers = model.layers
    found = []
    for number, layer in enumerate(layers):
        block = layer.get("mlp", layer.get("block_sparse_moe"))
        if type(block).__name__ in ROUTERS:
            found.append((number, block))
    return found


def _linear(x: NDArray[np.float64], layer: nn.Module) -> NDArray[np.float64]:
    weight = layer.weight
    if isinstance(layer, nn.QuantizedLinear):
        weight = mx.dequantize(weight, layer.scales, layer.biases, layer.group_size, layer.bits)
    y = x @ np.array(weight.astype(mx.float32), np.float64).T
    return y + np.array(layer.bias, np.float64) if "bias" in layer else y


def _top(values: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    return np.sort(np.argsort(values, axis=-1)[..., -k:], axis=-1)


def _softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def _weights(values: NDArray[np.float64], ids: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.take_along_axis(values, ids, axis=-1)


Selected = tuple[
    NDArray[np.int64], NDArray[np.float64]
]  # ids ascending (R, k), gate weights (R, k)


def _qwen(block: nn.Module, x: NDArray[np.float64]) -> Selected:
    p = _softmax(_linear(x, block.gate))
    ids = _top(p, block.top_k)
    w = _weights(p, ids)
    return ids, w / w.sum(-1, keepdims=True) if block.norm_topk_prob else w


def _mixtral(block: nn.Module, x: NDArray[np.float64]) -> Selected:
    logits = _linear(x, block.gate)
    ids = _top(logits, block.num_experts_per_tok)
    return ids, _softmax(_weights(logits, ids))


def _gpt_oss(block: nn.Module, x: NDArray[np.float64]) -> Selected:
    logits = _linear(x, block.router)
    ids = _top(logits, block.num_experts_per_tok)
    return ids, _softmax(_weights(logits, ids))


def _deepseek_v3(block: nn.Module, x: NDArray[np.float64]) -> Selected:
    gate = block.gate
    score = 1 / (1 + np.exp(-(x @ np.array(gate.weight, np.float64).T)))
    biased = score + np.array(gate.e_score_correction_bias, np.float64)
    groups = biased.reshape(len(x), gate.n_group, -1)
    best_two = np.sort(groups, axis=-1)[..., -2:].sum(-1)
    open_groups = np.argsort(best_two, axis=-1)[:, -gate.topk_group :]
    mask = np.zeros((len(x), gate.n_group, 1), bool)
    np.put_along_axis(mask[..., 0], open_groups, True, axis=1)
    ids = _top(np.where(mask, groups, 0).reshape(len(x), -1), gate.top_k)
    w = _weights(score, ids)
    return ids, w / w.sum(-1, keepdims=True) * gate.routed_scaling_factor


ROUTERS: dict[str, Callable[[nn.Module, NDArray[np.float64]], Selected]] = {
    "Qwen3MoeSparseMoeBlock": _qwen,
    "Qwen3NextSparseMoeBlock": _qwen,
    "OlmoeSparseMoeBlock": _qwen,
    "MixtralSparseMoeBlock": _mixtral,
    "MLPBlock": _gpt_oss,
    "DeepseekV3MoE": _deepseek_v3,
}


def expected_routing(model: nn.Module, tokens: Iterable[int]) -> list[Selected]:
    """One forward over all `tokens` without a cache; per MoE layer what the NumPy router selects
    from the block's input.
    """
    inputs: list[mx.array] = []
    blocks = moe_blocks(model)
    classes = {type(b) for _, b in blocks}
    originals = {c: c.__call__ for c in classes}
    for cls in classes:

        def spy(self: nn.Module, x: mx.array, _original: Any = originals[cls]) -> mx.array:
            inputs.append(x)
            return _original(self, x)

        cls.__call__ = spy
    try:
        mx.eval(model(mx.array([[int(t) for t in tokens]])))
    finally:
        for cls, original in originals.items():
            cls.__call__ = original
    assert len(inputs) == len(blocks) > 0
    return [
        ROUTERS[type(block).__name__](block, np.array(x.astype(mx.float32), np.float64)[0])
        for (_, block), x in zip(blocks, inputs, strict=True)
    ]
