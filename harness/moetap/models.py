"""Bundled models and model cards: which ones ship with moetap, where they are, what a card says.

Knows names, folders and the layout of a card. Refuses to know what follows from the numbers:
`moetap.capture` loads models, `moetap.analysis.ledger` has the arithmetic that the cards feed.

A card is models/NAME.toml. It states the sizes of one checkpoint family, for models that are not at
hand or where MLX is not installed; models/README.md describes it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moetap._data import data_dir
from moetap.errors import MoetapError

DEMO_MODEL = "tiny-qwen3_5-moe"
"""Trained stand-in with the target model's architecture, small enough for any machine."""


def bundled_model(name: str) -> Path | None:
    """Folder of the bundled model called `name`, None if there is none."""
    folder = data_dir("models") / name
    return folder if (folder / "config.json").is_file() and "/" not in name else None


@dataclass(frozen=True)
class Fact:
    """A number and where it comes from."""

    value: int
    source: str


@dataclass(frozen=True)
class Attention:
    """Some layers of one kind, and their dimensions."""

    kind: str
    layers: int
    dims: dict[str, int]


DIMENSIONS = {
    "full": ("kv_heads", "head_dim"),
    "sliding": ("kv_heads", "head_dim", "window"),
    "mla": ("latent_dim", "rope_dim"),
    "linear": ("key_heads", "value_heads", "key_dim", "value_dim", "conv_kernel"),
    "mamba": ("heads", "head_dim", "state_dim", "groups", "conv_kernel"),
}
"""Kind of attention -> the dimensions that its cache depends on."""


@dataclass(frozen=True)
class ModelCard:
    """Sizes of a checkpoint family at the stated quantisation, caches at 16 bits.

    The MoE layers are the decoder layers from first_moe_layer on.
    """

    name: str
    checkpoints: tuple[str, ...]
    model_type: str
    quantization: str
    attention: tuple[Attention, ...]
    decoder_layers: Fact
    moe_layers: Fact
    first_moe_layer: Fact
    n_experts: Fact
    top_k: Fact
    hidden_size: Fact
    moe_intermediate_size: Fact
    vocab_size: Fact
    expert_bytes: Fact
    resident_bytes: Fact
    kv_bytes_per_token: Fact
    state_bytes: Fact


FACTS = tuple(f.name for f in fields(ModelCard) if f.type == "Fact")
_ZERO_ALLOWED = ("first_moe_layer", "state_bytes")


_NOT_CARDS = ("machines",)  # SSD bandwidths, which lie beside the cards


def card_names() -> list[str]:
    """Names of the bundled cards, as files without .toml."""
    names = (path.stem for path in data_dir("models").glob("*.toml"))
    return sorted(name for name in names if name not in _NOT_CARDS)


def find_card(name: str) -> ModelCard | None:
    """The bundled card with this name, or that lists this checkpoint; case does not matter."""
    wanted = name.lower()
    for card in all_cards():
        if wanted in (card.name.lower(), *(c.lower() for c in card.checkpoints)):
            return card
    return None


def all_cards() -> list[ModelCard]:
    """Every bundled card, by name."""
    return [load_card(data_dir("models") / f"{name}.toml") for name in card_names()]


def load_card(path: Path) -> ModelCard:
    """Read a card. MoetapError if it is not valid: keys unknown or missing, wrong types, numbers
    out of range, a source that is not there.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise MoetapError(f"{path}: not a readable model card ({error})") from error
    top = ("name", "checkpoints", "model_type", "quantization", "sources", "model", "attention")
    _check_keys(path, "card", content, top)
    _check_keys(path, "[model]", content["model"], FACTS)
    sources = content["sources"]
    if not isinstance(sources, dict) or not all(isinstance(s, str) for s in sources.values()):
        raise MoetapError(f"{path}: [sources] must hold text")
    checkpoints = content["checkpoints"]
    if not isinstance(checkpoints, list) or not all(isinstance(c, str) for c in checkpoints):
        raise MoetapError(f"{path}: checkpoints must be a list of names")
    if not isinstance(content["attention"], list):
        raise MoetapError(f"{path}: attention must be a list of tables, [[attention]]")
    words: dict[str, Any] = {k: content[k] for k in ("name", "model_type", "quantization")}
    for key, value in words.items():
        if not isinstance(value, str) or not value:
            raise MoetapError(f"{path}: {key} must be text")
    facts: dict[str, Any] = {key: _fact(path, key, content["model"][key], sources) for key in FACTS}
    card = ModelCard(
        checkpoints=tuple(checkpoints),
        attention=tuple(_attention(path, entry, sources) for entry in content["attention"]),
        **words,
        **facts,
    )
    _check(path, card)
    return card


def _check_keys(path: Path, where: str, table: Any, expected: tuple[str, ...]) -> None:
    if not isinstance(table, dict):
        raise MoetapError(f"{path}: {where} is not a table")
    unknown = sorted(set(table) - set(expected))
    if unknown:
        raise MoetapError(f"{path}: {where} has the unknown key {unknown[0]!r}")
    missing = [key for key in expected if key not in table]
    if missing:
        raise MoetapError(f"{path}: {where} lacks {missing[0]!r}")


def _fact(path: Path, key: str, value: Any, sources: dict[str, str]) -> Fact:
    if (
        not isinstance(value, list)
        or [type(part) for part in value] != [int, str]
        or value[0] < (0 if key in _ZERO_ALLOWED else 1)
    ):
        raise MoetapError(f'{path}: {key} must be [positive number, "source"], is {value!r}')
    if value[1] not in sources:
        raise MoetapError(f"{path}: {key} names the source {value[1]!r}, which [sources] lacks")
    return Fact(value[0], sources[value[1]])


def _attention(path: Path, entry: Any, sources: dict[str, str]) -> Attention:
    kind = entry.get("kind") if isinstance(entry, dict) else None
    if kind not in DIMENSIONS:
        raise MoetapError(f"{path}: attention kind {kind!r} is none of {', '.join(DIMENSIONS)}")
    _check_keys(path, f"[[attention]] {kind}", entry, ("kind", "layers", *DIMENSIONS[kind]))
    dims = {key: _fact(path, key, entry[key], sources).value for key in DIMENSIONS[kind]}
    return Attention(kind, _fact(path, "layers", entry["layers"], sources).value, dims)


def _check(path: Path, card: ModelCard) -> None:
    """Refuse numbers that contradict each other."""
    if card.top_k.value > card.n_experts.value:
        raise MoetapError(f"{path}: top_k is larger than n_experts")
    if card.first_moe_layer.value + card.moe_layers.value > card.decoder_layers.value:
        raise MoetapError(f"{path}: first_moe_layer and moe_layers exceed decoder_layers")
    covered = sum(entry.layers for entry in card.attention)
    if covered != card.decoder_layers.value:
        raise MoetapError(
            f"{path}: [[attention]] has {covered} layers, decoder_layers is "
            f"{card.decoder_layers.value}"
        )
