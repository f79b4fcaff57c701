"""`moetap ledger`: does a model fit a Mac with C expert slots and B lanes?

Knows the command line of the verb, and how a model folder, a repository or a model card becomes the
sizes that the ledger needs. Reads headers and configs, never a weight.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetap.cli._options import gigabytes, headroom, integers, one_integer, this_mac
from moetap.errors import MoetapError

if TYPE_CHECKING:
    from moetap.analysis.ledger import Cache, MoeLayer, Sizes
    from moetap.capture.checkpoint import Checkpoint, Inventory
    from moetap.models import Attention, ModelCard


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "ledger",
        help="does a model fit a Mac with C expert slots and B lanes? no trace needed",
        description="Print what a model needs with C expert slots per layer and B lanes, against "
        "what Macs have: from config.json and the safetensors headers alone, or from a model card.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_ID_OR_CARD",
        help="model folder, Hugging Face id, or a bundled model card such as qwen3.6-35b-a3b",
    )
    parser.add_argument(
        "-B", dest="lanes", default="1,2,4", metavar="N,N", help="lanes (default: %(default)s)"
    )
    parser.add_argument(
        "-C", dest="slots", metavar="N,N", help="expert slots (default: each tier's default)"
    )
    parser.add_argument(
        "--context",
        default="8192",
        metavar="T",
        help="tokens of each lane, prompt included (default: %(default)s)",
    )
    parser.add_argument(
        "--tier", default="8,16,24,32", metavar="N,N", help="GiB of memory (default: %(default)s)"
    )
    parser.add_argument(
        "--headroom",
        metavar="GB",
        help="memory left to the system, in GB of 10^9 bytes (default: 2.5 GB and 10 %% of memory)",
    )
    parser.add_argument(
        "--activations", metavar="GB", help="activation peak, in GB of 10^9 bytes (default: 0.3)"
    )
    parser.add_argument(
        "--overhead", metavar="GB", help="runtime overhead, in GB of 10^9 bytes (default: 0.2)"
    )
    parser.add_argument(
        "--kv-bits", choices=("8", "4"), help="quantised KV, group 64 (default: not quantised)"
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the ledger. Returns the exit code."""
    from moetap.analysis.ledger import ACTIVATIONS, OVERHEAD, Allowance, ledger, make_tier
    from moetap.report.files import output_path, write_text
    from moetap.report.ledger_table import ledger_json, print_ledger

    lanes = integers("-B", args.lanes)
    slots = integers("-C", args.slots) if args.slots is not None else None
    context = one_integer("--context", args.context, "tokens")
    left_free = headroom(args.headroom)
    given = {
        name: Allowance(gigabytes(f"--{name}", text), "given on the command line")
        for name, text in (("activations", args.activations), ("overhead", args.overhead))
        if text is not None
    }
    tiers = integers("--tier", args.tier)
    device = this_mac()
    macs = [make_tier(gib, left_free, device) for gib in tiers]
    json_path = output_path(args.json) if args.json else None
    sizes = find_sizes(args.model, int(args.kv_bits) if args.kv_bits else None)
    table = ledger(
        sizes,
        macs,
        lanes,
        context,
        slots,
        given.get("activations", ACTIVATIONS),
        given.get("overhead", OVERHEAD),
    )
    print_ledger(table)
    if json_path:
        write_text(json_path, ledger_json(table))
    return 0


# -- sizes of a model


def find_sizes(name: str, kv_bits: int | None) -> Sizes:
    """Sizes of a folder, bundled model, model card or Hugging Face repository, tried in this order.

    Raises MoetapError if it is none of these, or cannot be used.
    """
    from moetap.capture.checkpoint import read_checkpoint, read_repository
    from moetap.models import bundled_model, card_names, find_card

    folder = bundled_model(name) or Path(name).expanduser()
    if folder.is_dir():
        return _of_checkpoint(read_checkpoint(folder), folder.resolve().name, kv_bits)
    card = find_card(name)
    if card is not None and "/" not in name:
        return _of_card(card, kv_bits)
    known = f"model cards: {', '.join(card_names())}"
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise MoetapError(f"{name}: no such model folder, and no model card; {known}")
    try:
        checkpoint = read_repository(name)
    except MoetapError as error:
        if card is None:
            raise MoetapError(f"{error}; {known}") from error
        note = (
            f"{name} itself was not read ({error}): the figures are those of the card's "
            f"quantisation, {card.quantization}, whatever that of {name} is"
        )
        return _of_card(card, kv_bits, (note,))
    return _of_checkpoint(checkpoint, name, kv_bits)


def _of_checkpoint(checkpoint: Checkpoint, name: str, kv_bits: int | None) -> Sizes:
    from moetap.analysis.ledger import MoeLayer, Sizes
    from moetap.capture.checkpoint import classify

    inventory = classify(checkpoint)
    try:
        from moetap.capture.geometry import checkpoint_geometry
    except ImportError:
        top_k, caches, how = _by_card(inventory, kv_bits)
    else:
        geometry, how = checkpoint_geometry(checkpoint, kv_bits)
        if geometry.layer_index != tuple(layer.layer_index for layer in inventory.layers):
            raise MoetapError(
                f"{checkpoint.name}: mlx-lm's model has its experts in other layers than the "
                "checkpoint; please report the model type"
            )
        top_k, caches = geometry.top_k, geometry.caches
    return Sizes(
        model=name,
        source=f"safetensors headers, {checkpoint.listing}",
        layers=tuple(
            MoeLayer(layer.layer_index, layer.n_experts, k, layer.expert_bytes)
            for layer, k in zip(inventory.layers, top_k, strict=True)
        ),
        resident_bytes=inventory.resident_bytes,
        caches=caches,
        cache_source=how,
        kv_bits=kv_bits,
        notes=_notes(inventory),
    )


def _notes(inventory: Inventory) -> tuple[str, ...]:
    """What must be said about a checkpoint besides its sizes."""
    notes = [
        f"Not loaded by mlx-lm and not counted: {reason}, {n / 1e9:.3f} GB"
        for reason, n in inventory.dropped_by_reason.items()
    ]
    unknown = inventory.unrecognised
    if unknown:
        names = ", ".join(t.name for t in unknown[:3])
        size = sum(t.nbytes for t in unknown)
        notes.append(
            f"Not recognised and counted as resident: {len(unknown)} tensors, {size / 1e9:.3f} GB "
            f"({names}{', ...' if len(unknown) > 3 else ''})"
        )
    if any(p.expert is not None or p.projection.startswith("gate_up") for p in inventory.experts):
        notes.append("Not an MLX conversion: sizes as stored, before mlx-lm converts it")
    return tuple(notes)


def _by_card(
    inventory: Inventory, kv_bits: int | None
) -> tuple[tuple[int, ...], tuple[Cache, ...], str]:
    """top-k, caches and their source from the card of the same shape, where MLX is missing."""
    from moetap.models import all_cards

    layers = inventory.layers
    model_type = inventory.checkpoint.config.get("model_type")
    for card in all_cards():
        if (card.model_type, card.moe_layers.value, card.n_experts.value) == (
            model_type,
            len(layers),
            layers[0].n_experts,
        ):
            how = f"model card {card.name} (MLX is not installed)"
            return (card.top_k.value,) * len(layers), card_caches(card, kv_bits), how
    raise MoetapError(
        f"{inventory.checkpoint.name}: MLX is not installed and no model card has its shape, "
        "so that the size of its caches is not known; pip install mlx-lm"
    )


def _of_card(card: ModelCard, kv_bits: int | None, notes: tuple[str, ...] = ()) -> Sizes:
    from moetap.analysis.ledger import MoeLayer, Sizes

    first = card.first_moe_layer.value
    layers: list[MoeLayer] = [
        MoeLayer(i, card.n_experts.value, card.top_k.value, card.expert_bytes.value)
        for i in range(first, first + card.moe_layers.value)
    ]
    return Sizes(
        model=card.name,
        source=f"model card {card.name} ({card.quantization}), which has the source of each number",
        layers=tuple(layers),
        resident_bytes=card.resident_bytes.value,
        caches=card_caches(card, kv_bits),
        cache_source="formulas on the card's dimensions, 16-bit activations",
        kv_bits=kv_bits,
        notes=notes,
    )


def card_caches(card: ModelCard, kv_bits: int | None) -> tuple[Cache, ...]:
    """One cache for each decoder layer, in the card's order of kinds."""
    found: list[Cache] = []
    for entry in card.attention:
        for _ in range(entry.layers):
            found.append(_card_cache(card, entry, len(found), kv_bits))
    return tuple(found)


def _card_cache(card: ModelCard, entry: Attention, place: int, kv_bits: int | None) -> Cache:
    from moetap.analysis import ledger

    dims, kind = entry.dims, entry.kind
    if kind == "linear":
        return ledger.Cache(place, kind, constant_bytes=ledger.linear_attention_bytes(**dims))
    if kind == "mamba":
        return ledger.Cache(place, kind, constant_bytes=ledger.mamba_bytes(**dims))
    if kv_bits is not None and kind != "full":
        raise MoetapError(
            f"{card.name}: mlx-lm cannot quantise the KV of {kind} attention; leave --kv-bits out"
        )
    if kind == "mla":
        heads, key, value = 1, dims["latent_dim"], dims["rope_dim"]
    else:
        heads, key, value = dims["kv_heads"], dims["head_dim"], dims["head_dim"]
    size = ledger.attention_bytes_per_token(heads, key, value, kv_bits=kv_bits)
    return ledger.Cache(place, kind, bytes_per_token=size, max_tokens=dims.get("window"))
