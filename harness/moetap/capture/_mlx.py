"""MLX and mlx-lm as moetap uses them: load a model, read its geometry, generate one stream.

Knows mlx-lm's functions and the errors that they raise. Knows nothing about files of ours, prompts'
meaning or statistics.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

# transformers advises to install PyTorch when it finds none; moetap uses its tokenizers alone.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import stream_generate
from mlx_lm.sample_utils import make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import _download, _get_classes, load_config, load_model, load_tokenizer

from moetap.capture.checkpoint import read_checkpoint
from moetap.capture.geometry import trace_geometry
from moetap.capture.streaming.kernel import use_row_kernel
from moetap.capture.tap import find_switches
from moetap.errors import MoetapError, first_line
from moetap.trace import ModelInfo

if TYPE_CHECKING:
    from moetap.capture.streaming.engine import Engine

MLX_VERSION = mx.__version__
MLX_LM_VERSION = mlx_lm.__version__


@dataclass(frozen=True)
class Loaded:
    """A model ready to generate, its tokenizer, and what the trace says about it.

    engine: what reads the experts, if they stay on disk.
    """

    model: nn.Module
    tokenizer: TokenizerWrapper
    info: ModelInfo
    engine: Engine | None = None


@dataclass(frozen=True, eq=False)
class Opened:
    """A model of which only headers were read: its parameters wait to be evaluated.

    path: its folder. stored: its tensors under the names that the files have.
    """

    path: Path
    model: nn.Module
    tokenizer: TokenizerWrapper
    info: ModelInfo
    stored: dict[str, mx.array]

    def resident(self, engine: Engine | None = None) -> Loaded:
        """Read all parameters that the model still has. MoetapError if that fails."""
        self.stored.clear()
        use_row_kernel(self.model)
        try:
            mx.eval(self.model.parameters())
        except Exception as error:
            raise MoetapError(
                f"{self.path}: reading the weights failed: {first_line(error)}"
            ) from error
        return Loaded(self.model, self.tokenizer, self.info, engine)


def backend() -> str:
    """metal | cuda | cpu, by where MLX puts its arrays by default."""
    if mx.default_device() == mx.Device(mx.cpu):
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def device_json() -> str:
    """What MLX says about the device, as JSON; on a Mac with max_recommended_working_set_size."""
    return json.dumps(mx.device_info(), sort_keys=True)


def load(name: str) -> Loaded:
    """Open a model and read all of its weights. MoetapError as `open_model`, or if that fails."""
    return open_model(name).resident()


def open_model(name: str) -> Opened:
    """Open a model folder or Hugging Face id with mlx-lm; no weight is read.

    Raises MoetapError: no such folder or id, no network, no tokenizer, not loadable by mlx-lm, no
    routed experts.
    """
    path = _locate(name)
    try:
        config = load_config(path)
        config_json = (path / "config.json").read_text()
        if not isinstance(json.loads(config_json), dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError, AttributeError) as error:
        raise MoetapError(
            f"{path}: no usable config.json ({first_line(error)}); is this a model folder?"
        ) from error
    if not any(path.glob("*token*")):
        raise MoetapError(
            f"{path}: no tokenizer files; copy tokenizer.json and tokenizer_config.json there"
        )
    try:
        tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    except Exception as error:
        raise MoetapError(f"{path}: cannot load the tokenizer: {first_line(error)}") from error
    # mlx-lm raises whatever the model file, the config or the weights provoke: ValueError for an
    # unknown type, KeyError or TypeError for a config that lacks a key, RuntimeError for a broken
    # file.
    stored: dict[str, mx.array] = {}
    try:
        model, config = load_model(path, lazy=True, get_model_classes=_keeping(stored))
    except Exception as error:
        read_checkpoint(path)  # a better reason, if a shard is missing or truncated
        raise MoetapError(
            f"{path}: mlx-lm {MLX_LM_VERSION} cannot load this model: {first_line(error)}"
        ) from error
    model.__class__ = type(model).__bases__[0]
    info = _describe(name, path, config, config_json, model)
    return Opened(path, model, tokenizer, info, stored)


def _keeping(stored: dict[str, mx.array]) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    """mlx-lm's look-up of a model's classes, changed so that `stored` gets the tensors as the files
    have them, before the model renames or changes any.
    """

    def classes(config: dict[str, Any]) -> tuple[Any, Any]:
        model_class, args_class = _get_classes(config)

        def sanitize(self: Any, weights: dict[str, mx.array]) -> Any:
            stored.update(weights)
            original = getattr(model_class, "sanitize", None)
            return original(self, weights) if original else weights

        return type(model_class.__name__, (model_class,), {"sanitize": sanitize}), args_class

    return classes


def _locate(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise MoetapError(
            f"{name}: is a file; give the folder that holds config.json and the weights"
        )
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise MoetapError(
            f"{name}: no such model folder, and not a Hugging Face id (owner/name) or bundled model"
        )
    try:
        return Path(_download(name))
    except (
        Exception
    ) as error:  # huggingface_hub: not found, gated, offline, disk; each with types of its own
        raise MoetapError(
            f"{name}: no such folder, and not to be had from Hugging Face "
            f"({first_line(error)}); check the id and the network"
        ) from error


def _describe(
    name: str, path: Path, config: dict[str, Any], config_json: str, model: nn.Module
) -> ModelInfo:
    switches = find_switches(model)
    per_layer = [s.expert_bytes for s in switches]
    routed = sum(b * s.n_experts for b, s in zip(per_layer, switches, strict=True))
    total = sum(int(a.nbytes) for _, a in tree_flatten(model.parameters()))
    geometry = trace_geometry(model)
    quantization = config.get("quantization")
    return ModelInfo(
        id=name if not Path(name).expanduser().is_dir() else path.resolve().name,
        revision=path.resolve().name if path.resolve().parent.name == "snapshots" else "",
        model_type=str(config.get("model_type", "")),
        config_json=config_json,
        config_sha256=hashlib.sha256(config_json.encode()).hexdigest(),
        weights_sha256=_weights_sha256(path),
        quantization=json.dumps(quantization, sort_keys=True) if quantization else "",
        layer_index=np.array([s.layer_index for s in switches]),
        n_experts=np.array([s.n_experts for s in switches]),
        top_k=np.array(geometry.top_k),
        expert_bytes=np.array(per_layer),
        resident_bytes=total - routed,
        kv_bytes_per_token=geometry.kv_bytes_per_token,
        state_bytes_per_stream=geometry.state_bytes,
    )


def _weights_sha256(path: Path) -> str:
    """Of the weight index; where there is none, of the shards' headers (names, shapes, offsets)."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return hashlib.sha256(index.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for shard in sorted(path.glob("model*.safetensors")):
        with shard.open("rb") as file:
            # safetensors: the length of the JSON header as a little-endian u64, then the header.
            length = int.from_bytes(file.read(8), "little")
            digest.update(file.read(length))
    return digest.hexdigest()


def generate(
    loaded: Loaded,
    tokens: Sequence[int],
    *,
    max_tokens: int,
    temp: float,
    top_p: float,
    seed: int,
    prefill_step: int,
    on_prefill: Callable[[int, int], None],
    on_token: Callable[[int], None],
) -> tuple[list[int], str]:
    """One stream through mlx-lm's own loop: (generated tokens with the closing EOS if there is one,
    "stop" | "length").

    `on_prefill(done, total)` is called after each chunk, `on_token(n)` after each token; an
    exception that they raise ends the stream and passes through.
    """
    mx.random.seed(seed)
    generated: list[int] = []
    reason = "length"
    for response in stream_generate(
        loaded.model,
        loaded.tokenizer,
        mx.array(tokens),
        max_tokens=max_tokens,
        sampler=make_sampler(temp=temp, top_p=top_p),
        prefill_step_size=prefill_step,
        prompt_progress_callback=on_prefill,
    ):
        generated.append(int(response.token))
        reason = response.finish_reason or reason
        on_token(len(generated))
    return generated, reason
