"""Safetensors files made of headers alone, from compact descriptions of real checkpoints."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moetap.capture.checkpoint import DTYPE_BITS

HEADERS = Path(__file__).parents[1] / "data" / "headers"
LAYERS = {
    "": [None],
    "all": range(40),
    "linear": [i for i in range(40) if i % 4 != 3],
    "full": range(3, 40, 4),
    "vision": range(27),
}

Entry = tuple[str, list[int]]  # dtype, shape


def described(name: str = "qwen3.6-35b-a3b-4bit") -> tuple[dict[str, Any], dict[str, Entry]]:
    """(config, tensor name -> dtype and shape)."""
    content = json.loads((HEADERS / f"{name}.json").read_text())
    tensors = {
        pattern.format(layer): (dtype, shape)
        for pattern, layers, dtype, shape in content["tensors"]
        for layer in LAYERS[layers]
    }
    return content["config"], tensors


def nbytes(entry: Entry) -> int:
    return math.prod(entry[1]) * DTYPE_BITS[entry[0]] // 8


def write_headers(path: Path, tensors: dict[str, Entry], data: bool = False) -> None:
    """One safetensors file; with `data` as long as its header says (sparse, zeros)."""
    header, at = {}, 0
    for name, entry in tensors.items():
        header[name] = {
            "dtype": entry[0],
            "shape": entry[1],
            "data_offsets": [at, at + nbytes(entry)],
        }
        at += nbytes(entry)
    text = json.dumps({"__metadata__": {"format": "mlx"}} | header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        if data:
            file.truncate(8 + len(text) + at)


def write_checkpoint(
    folder: Path, config: dict[str, Any], tensors: dict[str, Entry], shards: int = 1,
    data: bool = False, index: bool = True,
) -> Path:  # fmt: skip
    """A model folder: config.json, `shards` files and, if wanted, their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    size = -(-len(names) // shards)
    weight_map = {}
    for i in range(shards):
        part = names[i * size : (i + 1) * size]
        file = (
            f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        )
        write_headers(folder / file, {name: tensors[name] for name in part}, data)
        weight_map |= dict.fromkeys(part, file)
    if index:
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder
