"""Turn a checkpoint of train.py into the shipped MLX folder, and compare the two.

    convert.py CHECKPOINT TOKENIZER OUT   quantise with mlx-lm (affine, 4 bits, groups of 32)
    ... --compare                         also: transformers' logits against MLX's, both fp32

Scales and activations are float32: MLX's CPU backend gathers quantised matrices an order of
magnitude faster in float32 than in bfloat16. Routers keep 8 bits, as mlx-lm does by itself.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.utils import load_model
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

GROUP_SIZE = 32  # an expert's inner width; a larger group does not fit it
CARD_FOLDER = Path(__file__).resolve().parent.parent
COPIED = ("tokenizer_config.json", "chat_template.jinja")
ADDED_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# The split that transformers puts in place of a tokenizer's own one for every qwen3_5_moe model.
FORCED_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def mlx_config(checkpoint: Path) -> dict[str, object]:
    """Nest the text config as released qwen3_5_moe checkpoints do."""
    text = json.loads((checkpoint / "config.json").read_text())
    text.pop("transformers_version", None)
    text["full_attention_interval"] = 4
    return {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "eos_token_id": text["eos_token_id"],
        "pad_token_id": text["pad_token_id"],
        "tie_word_embeddings": False,
        "text_config": text,
    }


def loader_proof(trained: Path) -> str:
    """Return the trained tokenizer's JSON in a form that transformers does not change on loading.

    transformers forces its own split on a qwen3_5_moe model, which would tear apart the tokens
    for a newline with its indentation. Added tokens are matched before any split, so those tokens
    become added ones, under the ids that they have. Only odd counts of spaces are taken (and the
    bare newline): the last space of an even indentation belongs to the word that follows.
    """
    state = json.loads(trained.read_text())
    model = state["model"]
    for token, number in list(model["vocab"].items()):
        text = token.replace("Ċ", "\n").replace("Ġ", " ")
        if text == "\n" or (re.fullmatch("\n{1,2} *", text) and text.count(" ") % 2):
            # Renamed, not doubled: two names for one id do not survive a copy of the tokenizer.
            del model["vocab"][token]
            model["vocab"][text] = number
            added = {"id": number, "content": text}
            added |= dict.fromkeys(ADDED_FLAGS, False)
            state["added_tokens"].append(added)
    state["added_tokens"].sort(key=lambda token: token["id"])
    model["merges"] = [
        [left, right]
        for left, right in model["merges"]
        if {left, right, left + right} <= model["vocab"].keys()
    ]
    shell = Tokenizer(models.BPE())
    shell.normalizer = normalizers.NFC()
    shell.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(FORCED_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    parts = json.loads(shell.to_str())
    state |= {key: parts[key] for key in ("normalizer", "pre_tokenizer")}
    return json.dumps(state, ensure_ascii=False)


def stage(checkpoint: Path, tokenizer: Path, folder: Path) -> None:
    """Lay out a folder that mlx-lm can load: weights, nested config, tokenizer."""
    for shard in checkpoint.glob("model-*.safetensors"):
        shutil.copy(shard, folder / shard.name)
    (folder / "config.json").write_text(json.dumps(mlx_config(checkpoint), indent=2))
    (folder / "tokenizer.json").write_text(loader_proof(tokenizer), encoding="utf-8")
    for name in COPIED:
        shutil.copy(CARD_FOLDER / name, folder / name)


def quantise(staged: Path, out: Path, dtype: str) -> None:
    """Quantise a staged checkpoint and put config and weights into ``out``."""
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / "mlx"
        mlx_lm.convert(
            str(staged), str(made), quantize=True, q_group_size=GROUP_SIZE, q_bits=4, dtype=dtype
        )
        out.mkdir(parents=True, exist_ok=True)
        config = json.loads((made / "config.json").read_text())
        # The same table twice, for readers of either key; one is enough here.
        config.pop("quantization_config", None)
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for weights in [*made.glob("model*.safetensors"), *made.glob("model*.index.json")]:
            shutil.copy(weights, out / weights.name)
        shutil.copy(staged / "tokenizer.json", out / "tokenizer.json")
        for name in COPIED:
            if not (out / name).exists():
                shutil.copy(CARD_FOLDER / name, out / name)


def compare(staged: Path, checkpoint: Path, length: int = 300) -> None:
    """Print the largest difference of fp32 logits between transformers and MLX."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

    theirs = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig.from_pretrained(checkpoint)).eval()
    weights: dict[str, torch.Tensor] = {}
    for shard in checkpoint.glob("model-*.safetensors"):
        weights |= load_file(shard)
    theirs.load_state_dict({name: w.float() for name, w in weights.items()}, strict=True)
    ours, _ = load_model(staged)
    ours.set_dtype(mx.float32)
    rng = np.random.default_rng(0)
    encode = mlx_lm.utils.load_tokenizer(staged).encode
    here = Path(__file__).parent
    texts = [encode((here / name).read_text())[:length] for name in ("prepare.py", "train.py")]
    for trial, tokens in enumerate([rng.integers(9, 8192, length), *map(np.array, texts)]):
        tokens = tokens[None]
        with torch.no_grad():
            reference = theirs(torch.from_numpy(tokens)).logits[0].numpy()
        mine = np.array(ours(mx.array(tokens))[0])
        gap = np.abs(reference - mine)
        same = (reference.argmax(-1) == mine.argmax(-1)).mean()
        print(
            f"sequence {trial}: {length} tokens, logits of size up to {np.abs(reference).max():.1f}"
            f", max difference {gap.max():.2e}, mean {gap.mean():.2e}, same argmax {same:.4f}"
        )


def main() -> None:
    """Parse the command line and convert."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json as trained")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compare", action="store_true", help="needs torch beside mlx")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        staged = Path(scratch)
        stage(options.checkpoint, options.tokenizer, staged)
        if options.compare:
            compare(staged, options.checkpoint)
        quantise(staged, options.out, options.dtype)


if __name__ == "__main__":
    main()
