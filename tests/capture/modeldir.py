"""Model folders small enough to make in a test: random weights, bytes as tokens, a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from families import CONFIGS, divisible, make_model
from mlx_lm.utils import save_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.items() | list }}{% endfor %}"
    "<|end|>{% endfor %}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking %}<think>{% endif %}{% endif %}"
)


FOUR_BITS = {"group_size": 32, "bits": 4}


def make_model_dir(
    folder: Path,
    family: str = "qwen3_moe",
    template: str | None = TEMPLATE,
    quantization: dict[str, Any] | None = FOUR_BITS,
    **over: Any,
) -> Path:
    """A loadable folder. Every byte is a token of its own and 256 is <|end|>, the EOS.

    quantization: as in config.json; what it does not divide stays plain.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIGS.get(family, {}) | {"vocab_size": 257} | over
    model = make_model(family, config=config)
    full = {"model_type": family, "eos_token_id": 256} | config
    if quantization:
        nn.quantize(model, class_predicate=divisible, **quantization)
        full["quantization"] = quantization
    mx.eval(model.parameters())
    save_model(folder, model, donate_model=False)
    (folder / "config.json").write_text(json.dumps(full))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, eos_token="<|end|>")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
