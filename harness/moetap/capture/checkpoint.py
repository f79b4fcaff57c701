"""A checkpoint as its safetensors headers describe it: which tensors there are, where they lie, and
which of them are routed experts.

Knows the layout of safetensors files, the names under which MLX and Hugging Face checkpoints store
experts, and what mlx-lm leaves out of a text model. Refuses to know MLX, tensor values and what the
sizes are used for: it reads headers and file sizes, never a weight.

A safetensors file is the length of its header as a little-endian u64, the header (JSON: name ->
dtype, shape, byte range), then the data. Ranges count from the end of the header; here they are
absolute, so that a tensor can be read with its path and range alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Protocol, cast

from moetap.errors import MoetapError

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a longer header is a file of something else."""

_BITS = {
    4: "F4",
    8: "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0",
    16: "U16 I16 F16 BF16",
    32: "U32 I32 F32",
    64: "U64 I64 F64 C64",
}
DTYPE_BITS = {dtype: bits for bits, dtypes in _BITS.items() for dtype in dtypes.split()}
"""Bits of one element, by the names that headers use."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|blocks|h)\.(\d+)\.")
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_EXPERT_MODULES = ("switch_mlp", "switch_glu", "experts")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint: begin and end are absolute bytes in the file `path`."""

    name: str
    dtype: str  # as in the header: U32, BF16, ...
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.end - self.begin

    @property
    def layer(self) -> int | None:
        """Decoder layer, None outside the layers."""
        found = _LAYER.search(self.name)
        return int(found.group(1)) if found else None


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Every tensor of a model folder, in name order, and its config.

    listing says where the list of files came from: the index, or all files and why.
    """

    name: str
    config: dict[str, Any]
    config_json: str
    tensors: tuple[Tensor, ...]
    listing: str


@dataclass(frozen=True)
class ExpertPart:
    """One parameter of one projection of a layer's experts, as stored in one tensor.

    expert: whose it is, None for a tensor stacked over all n_experts, expert 0 first. Then expert e
    lies at begin + e x bytes_per_expert.
    """

    tensor: Tensor
    layer: int
    projection: str  # gate_proj, up_proj, down_proj, fc1, ...; gate_up_proj where the two are fused
    parameter: str  # weight, scales, biases, bias, ...
    n_experts: int
    expert: int | None

    @property
    def path(self) -> Path:
        """File that holds it."""
        return self.tensor.path

    @property
    def begin(self) -> int:
        """First byte, absolute in the file."""
        return self.tensor.begin

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert in this tensor."""
        return self.tensor.nbytes // (self.n_experts if self.expert is None else 1)


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer: absolute decoder layer, E, and the stored bytes of one expert."""

    layer_index: int
    n_experts: int
    expert_bytes: int


@dataclass(frozen=True, eq=False)
class Inventory:
    """A checkpoint with every tensor put in one of three places: routed expert, resident, dropped.

    dropped: tensors that mlx-lm does not load for a text model, with the reason.
    unrecognised: resident tensors whose names say nothing that is known here.
    """

    checkpoint: Checkpoint
    experts: tuple[ExpertPart, ...]
    layers: tuple[ExpertLayer, ...]
    resident: tuple[Tensor, ...]
    dropped: tuple[tuple[Tensor, str], ...]
    unrecognised: tuple[Tensor, ...]

    @cached_property
    def resident_by_layer(self) -> dict[int | None, int]:
        """Resident bytes of each decoder layer, and outside the layers under None."""
        sizes: dict[int | None, int] = {}
        for tensor in self.resident:
            sizes[tensor.layer] = sizes.get(tensor.layer, 0) + tensor.nbytes
        return sizes

    @property
    def resident_bytes(self) -> int:
        """Bytes of everything that is neither a routed expert nor dropped."""
        return sum(self.resident_by_layer.values())

    @property
    def dropped_by_reason(self) -> dict[str, int]:
        """Bytes that mlx-lm does not load, by reason."""
        sizes: dict[str, int] = {}
        for tensor, reason in self.dropped:
            sizes[reason] = sizes.get(reason, 0) + tensor.nbytes
        return sizes

    @property
    def resident_by_module(self) -> dict[str, int]:
        """Resident bytes by module path, layer numbers replaced by "*", largest first."""
        sizes: Counter[str] = Counter()
        for tensor in self.resident:
            module = re.sub(r"\.\d+\.", ".*.", tensor.name)
            sizes[module.rpartition(".")[0] or module] += tensor.nbytes
        return dict(sizes.most_common())


# -- reading


class _Source(Protocol):
    """Where files come from: a folder, or a repository on Hugging Face read by ranges."""

    name: str

    def names(self) -> list[str]: ...

    def size(self, name: str) -> int: ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]: ...

    def path(self, name: str) -> Path: ...


class _Folder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = str(folder)

    def names(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir())

    def size(self, name: str) -> int:
        return (self.folder / name).stat().st_size

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        return (self.folder / name).open("rb")

    def path(self, name: str) -> Path:
        return self.folder / name


class _Repository:
    """A Hugging Face repository. Its files are read by ranges, so headers alone are transferred."""

    def __init__(self, repo_id: str, filesystem: Any) -> None:
        self.name = repo_id
        self._fs = filesystem
        self._sizes = {
            PurePosixPath(entry["name"]).name: int(entry["size"])
            for entry in filesystem.ls(repo_id, detail=True)
            if entry["type"] == "file"
        }

    def names(self) -> list[str]:
        return sorted(self._sizes)

    def size(self, name: str) -> int:
        return self._sizes[name]

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        # A header of a large model is a few hundred kB; the default block of 5 MB is too much.
        file = self._fs.open(f"{self.name}/{name}", "rb", block_size=2**19)
        return cast("AbstractContextManager[BinaryIO]", file)

    def path(self, name: str) -> Path:
        return Path(self.name) / name


def read_checkpoint(folder: Path, header_only: bool = False) -> Checkpoint:
    """Read the config and all headers of a model folder.

    With `header_only` the files may end after their headers (descriptions of checkpoints); sizes
    are not checked then.

    Raises MoetapError: no config.json or safetensors files, a shard that is missing, truncated or
    not a safetensors file.
    """
    try:
        return _read(_Folder(folder), header_only)
    except OSError as error:
        raise MoetapError(
            f"{error.filename or folder}: cannot be read ({error.strerror or error})"
        ) from error


def read_tensors(path: Path) -> list[Tensor]:
    """The tensors of one safetensors file. MoetapError if it is missing, truncated or none."""
    try:
        return _read_header(_Folder(path.parent), path.name, header_only=False)
    except OSError as error:
        raise MoetapError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_repository(repo_id: str) -> Checkpoint:
    """The same for a repository on Hugging Face: from the local cache if it was downloaded, else
    from the network, headers alone.

    Raises MoetapError also if the repository is not to be had.
    """
    try:
        from huggingface_hub import HfFileSystem, try_to_load_from_cache

        config = try_to_load_from_cache(repo_id, "config.json")
        if isinstance(config, str) and any(Path(config).parent.glob("model*.safetensors")):
            return read_checkpoint(Path(config).parent)
        return _read(_Repository(repo_id, HfFileSystem()), header_only=False)
    except MoetapError:
        raise
    # Not found, gated, offline: each with a type of its own, some of them of the HTTP library.
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0][:200]
        raise MoetapError(
            f"{repo_id}: not to be had from Hugging Face ({type(error).__name__}: {first}); "
            "check the id and the network"
        ) from error


def _read(source: _Source, header_only: bool) -> Checkpoint:
    names = source.names()
    if "config.json" not in names:
        raise MoetapError(f"{source.name}: no config.json; is this a model folder?")
    with source.open("config.json") as file:
        text = file.read()
    try:
        config = json.loads(text)
        config_json = text.decode()
    except ValueError as error:
        raise MoetapError(f"{source.path('config.json')}: not valid JSON ({error})") from error
    if not isinstance(config, dict):
        raise MoetapError(f"{source.path('config.json')}: holds no JSON object")
    shards = [n for n in names if n.startswith("model") and n.endswith(".safetensors")]
    index = _read_index(source) if INDEX in names else None
    _check_complete(source, shards, index)
    tables = {name: _read_header(source, name, header_only) for name in shards}
    chosen, listing = _choose(shards, index, tables)
    found: dict[str, Tensor] = {}
    for name in chosen:
        for tensor in tables[name]:
            if tensor.name in found:
                raise MoetapError(
                    f"{source.name}: tensor {tensor.name!r} is both in "
                    f"{found[tensor.name].path.name} and in {name}; remove the file that is stale"
                )
            found[tensor.name] = tensor
    tensors = tuple(found[name] for name in sorted(found))
    return Checkpoint(source.name, config, config_json, tensors, listing)


def _read_index(source: _Source) -> dict[str, str] | None:
    """tensor -> file, None if the index is not usable."""
    try:
        with source.open(INDEX) as file:
            weight_map = json.loads(file.read())["weight_map"]
        return {str(tensor): str(name) for tensor, name in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _check_complete(source: _Source, shards: list[str], index: dict[str, str] | None) -> None:
    """Refuse a folder that lacks a shard, by the index or by the shards' own numbering."""
    expected = set(index.values()) if index else set()
    for name in shards:
        numbered = _SHARD.fullmatch(name)
        if numbered and not index:
            width, total = len(numbered.group(1)), numbered.group(2)
            expected |= {
                f"model-{i:0{width}d}-of-{total}.safetensors" for i in range(1, int(total) + 1)
            }
    missing = sorted(expected - set(source.names()))
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MoetapError(
            f"{source.name}: {missing[0]}{more} missing, {len(shards)} of "
            f"{len(expected)} shards found; download the rest"
        )
    if not shards:
        raise MoetapError(f"{source.name}: no model*.safetensors files")


def _choose(
    shards: list[str], index: dict[str, str] | None, tables: dict[str, list[Tensor]]
) -> tuple[list[str], str]:
    """The files to count and what to say about the choice: those of the index if it knows every
    tensor, else all, as mlx-lm loads them.
    """
    everything = f"all {len(shards)} model*.safetensors files"
    if index is None:
        return shards, f"{everything} (no usable {INDEX})"
    indexed = sorted(set(index.values()))
    held = {t.name: name for name in indexed for t in tables.get(name, ())}
    strangers = [t.name for name in shards for t in tables[name] if t.name not in index]
    absent = [name for name in index if name not in held]
    if strangers:
        return shards, f"{everything} ({INDEX} is incomplete: it lacks {len(strangers)} tensors)"
    if absent:
        return shards, f"{everything} ({INDEX} is stale: {len(absent)} of its tensors do not exist)"
    left = [name for name in shards if name not in indexed]
    also = f"; not in it and left out: {', '.join(left)}" if left else ""
    return indexed, f"{len(indexed)} file{'s' if len(indexed) != 1 else ''} of {INDEX}{also}"


def _read_header(source: _Source, name: str, header_only: bool) -> list[Tensor]:
    path = source.path(name)
    size = source.size(name)
    with source.open(name) as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > MAX_HEADER_BYTES:
            pointer = ", a Git LFS pointer: fetch the file itself" if start == b"version " else ""
            raise MoetapError(f"{path}: not a safetensors file ({size:,} bytes{pointer})")
        text = file.read(length)
    if len(text) < length:
        raise MoetapError(
            f"{path}: truncated in its header, expected at least {8 + length:,} bytes, "
            f"found {size:,}; download it again"
        )
    try:
        header = json.loads(text)
        tensors = [
            _tensor(key, entry, path, 8 + length)
            for key, entry in header.items()
            if key != "__metadata__"
        ]
        _check_ranges(tensors)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise MoetapError(f"{path}: the safetensors header is broken ({e})") from e
    expected = max((t.end for t in tensors), default=8 + length)
    if not header_only and size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise MoetapError(
            f"{path}: {what}, expected {expected:,} bytes, found {size:,}; download it again"
        )
    return tensors


def _check_ranges(tensors: list[Tensor]) -> None:
    """ValueError if two tensors share bytes: these would be counted twice."""
    ordered = sorted(tensors, key=lambda t: (t.begin, t.end))
    for before, after in pairwise(ordered):
        if after.begin < before.end:
            raise ValueError(f"{before.name} and {after.name} overlap")


def _tensor(name: str, entry: dict[str, Any], path: Path, data: int) -> Tensor:
    """One entry of a header; `data` is where the data begins. ValueError if it contradicts
    itself.
    """
    begin, end = (int(offset) for offset in entry["data_offsets"])
    shape = tuple(int(n) for n in entry["shape"])
    dtype = str(entry["dtype"])
    if begin < 0 or end < begin or any(n < 0 for n in shape):
        raise ValueError(f"{name}: range {begin}-{end}, shape {list(shape)}")
    # An unknown dtype is not refused: the range says how many bytes there are.
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and (end - begin) * 8 != prod(shape) * bits:
        raise ValueError(f"{name}: {end - begin} bytes for {dtype} {list(shape)}")
    return Tensor(name, dtype, shape, path, data + begin, data + end)


# -- classifying


def classify(checkpoint: Checkpoint) -> Inventory:
    """Put every tensor in its place: routed expert of a layer, resident, or not loaded.

    Routed are, in a module called switch_mlp, switch_glu or experts: tensors stacked over the
    experts (leading dimension E, the one that the module's weights share), and those of numbered
    experts (`experts.7.w1.weight`). Never: names with "shared", correction biases, routers.
    Whatever is not recognised is resident.

    Raises MoetapError if a layer's experts contradict each other, or if there are none.
    """
    dropped, kept = [], []
    for tensor in checkpoint.tensors:
        reason = _why_dropped(tensor, checkpoint.config)
        if reason:
            dropped.append((tensor, reason))
        else:
            kept.append(tensor)
    modules: dict[str, list[tuple[Tensor, str]]] = {}  # path of the expert module -> its tensors
    for tensor in kept:
        split = _split(tensor.name)
        if split and tensor.layer is not None:
            modules.setdefault(split[0], []).append((tensor, split[1]))
    experts = [p for found in modules.values() for p in _numbered(found) or _stacked(found)]
    if not experts:
        raise MoetapError(
            f"{checkpoint.name}: no routed experts among {len(checkpoint.tensors)} tensors: a "
            "dense model, or a way of storing experts that is not known here"
        )
    experts.sort(key=lambda p: (p.layer, p.projection, p.parameter, p.expert or 0))
    routed = {part.tensor.name for part in experts}
    resident = tuple(t for t in kept if t.name not in routed)
    layers = _layers(checkpoint, experts)
    sizes = {layer.n_experts for layer in layers}
    unrecognised = tuple(t for t in resident if not _is_known(t, sizes))
    return Inventory(checkpoint, tuple(experts), layers, resident, tuple(dropped), unrecognised)


# What mlx-lm's `sanitize` removes before it builds a text model. The names stand at the start of a
# path, or after a leading "model.".
_OTHER_SENSES = {
    "vision_tower": "vision tower",
    "vision_model": "vision tower",
    "visual": "vision tower",
    "vision_adapter": "vision tower",
    "vision_projection": "vision tower",
    "embed_vision": "vision tower",
    "patch_merge_mlp": "vision tower",
    "multi_modal_projector": "vision tower",
    "audio_tower": "audio tower",
    "embed_audio": "audio tower",
}
# Families of mlx-lm that run their vision tower.
_SEEING = ("muse_spark",)
_MTP = "multi-token prediction"

# Names of resident tensors that are understood. This is for pointing out what is new, not for
# counting.
_KNOWN = re.compile(
    r"embed|wte|lm_head|norm|\bln_|attn|attention|mixer|mamba|conv|router|gate|mlp|feed_forward|"
    r"ffn|shared|correction_bias|expert_bias|block_sparse_moe|sinks|indexer"
)


def _is_known(tensor: Tensor, sizes: set[int]) -> bool:
    """Whether a resident tensor's name explains it; `sizes` are the numbers of experts met."""
    if not _KNOWN.search(tensor.name):
        return False
    # Stacked over as many slices as there are experts, and not attention's heads: experts under a
    # name that is not known here?
    stacked = len(tensor.shape) >= 3 and tensor.shape[0] in sizes and "attn" not in tensor.name
    return not stacked or "shared" in tensor.name or "conv" in tensor.name


def _why_dropped(tensor: Tensor, config: dict[str, Any]) -> str:
    """Why mlx-lm does not load this tensor for a text model, "" if it does."""
    segments = tensor.name.split(".")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else config
    first = segments[1] if segments[0] == "model" and len(segments) > 1 else segments[0]
    if config.get("model_type") not in _SEEING and first in _OTHER_SENSES:
        return _OTHER_SENSES[first]
    # No family of mlx-lm runs a multi-token prediction head: all of them drop these names.
    if any(s.startswith(("mtp", "nextn")) for s in segments):
        return _MTP
    n_layers = text.get("num_hidden_layers")
    if isinstance(n_layers, int) and tensor.layer is not None and tensor.layer >= n_layers:
        # DeepSeek, GLM: the head is one more decoder layer. A tower counts its layers on its own.
        return "" if first in _OTHER_SENSES else _MTP
    if tensor.name.endswith("rotary_emb.inv_freq"):
        return "rotary frequencies, computed anew"
    tied = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    if tied is True and "lm_head" in segments:
        return "output head tied to the embedding"
    return ""


def _split(name: str) -> tuple[str, str] | None:
    """(path of the expert module, rest of the name), None if the tensor belongs to no expert."""
    segments = name.split(".")
    if any("shared" in s or "correction_bias" in s or s == "router" for s in segments):
        return None
    # The last one: gemma4 has experts.switch_glu.
    for at in range(len(segments) - 2, -1, -1):
        if segments[at] in _EXPERT_MODULES:
            return ".".join(segments[: at + 1]), ".".join(segments[at + 1 :])
    return None


def _numbered(members: list[tuple[Tensor, str]]) -> list[ExpertPart]:
    """Parts of experts stored one by one, [] if these are not."""
    parts = []
    for tensor, rest in members:
        number, _, inner = rest.partition(".")
        if number.isdigit() and inner and tensor.layer is not None:
            projection, _, parameter = inner.rpartition(".")
            parts.append((tensor, tensor.layer, projection, parameter, int(number)))
    n = len({part[4] for part in parts})
    return [ExpertPart(t, layer, p, q, n, expert) for t, layer, p, q, expert in parts]


def _stacked(members: list[tuple[Tensor, str]]) -> list[ExpertPart]:
    """Parts of experts stacked in one tensor per parameter: those with the leading dimension that
    the weights have.
    """
    leading = Counter(t.shape[0] for t, _ in members if len(t.shape) >= 3)
    if not leading:
        return []
    n = leading.most_common(1)[0][0]
    parts = []
    for tensor, rest in members:
        if tensor.shape[:1] != (n,) or tensor.layer is None:
            continue
        # Hugging Face's fused experts have no parameter of their own: experts.gate_up_proj,
        # experts.gate_up_proj_blocks.
        projection, dot, parameter = rest.rpartition(".")
        if not dot:
            base, _, suffix = rest.partition("_proj")
            projection = base + "_proj" if suffix or rest.endswith("_proj") else rest
            parameter = suffix.lstrip("_") or "weight"
        parts.append(ExpertPart(tensor, tensor.layer, projection, parameter, n, None))
    return parts


def _layers(checkpoint: Checkpoint, experts: list[ExpertPart]) -> tuple[ExpertLayer, ...]:
    by_layer: dict[int, list[ExpertPart]] = {}
    for part in experts:
        by_layer.setdefault(part.layer, []).append(part)
    return tuple(
        _layer(f"{checkpoint.name}: layer {layer}", layer, parts)
        for layer, parts in sorted(by_layer.items())
    )


def _layer(who: str, layer: int, parts: list[ExpertPart]) -> ExpertLayer:
    counts = {part.n_experts for part in parts}
    if len(counts) > 1:
        raise MoetapError(f"{who} has experts in groups of different sizes: {sorted(counts)}")
    n = counts.pop()
    stacked_bytes = sum(part.bytes_per_expert for part in parts if part.expert is None)
    sizes = dict.fromkeys((part.expert for part in parts if part.expert is not None), stacked_bytes)
    for part in parts:
        if part.expert is not None:
            sizes[part.expert] += part.bytes_per_expert
    if sizes and (min(sizes), max(sizes)) != (0, n - 1):
        raise MoetapError(f"{who}: its {n} experts are not numbered from 0 to {n - 1}")
    if len(set(sizes.values())) > 1:
        raise MoetapError(
            f"{who}: experts of different sizes, {min(sizes.values()):,} to "
            f"{max(sizes.values()):,} bytes; is a tensor missing?"
        )
    return ExpertLayer(layer, n, sizes[0] if sizes else stacked_bytes)


# -- dtypes


def default_dtype(tensors: Iterable[Tensor]) -> tuple[str, str]:
    """(dtype that activations, and so KV caches, have; how that is known).

    It is the floating-point dtype that most of the tensors have which are not quantised: norms, and
    the scales of quantised weights.
    """
    counts = Counter(
        t.dtype
        for t in tensors
        if t.dtype in ("BF16", "F16", "F32") and (len(t.shape) == 1 or t.name.endswith(".scales"))
    )
    if not counts:
        return "BF16", "assumed: the checkpoint has no norms or scales in floating point"
    dtype, n = counts.most_common(1)[0]
    return dtype, f"{n:,} of {sum(counts.values()):,} norms, biases and scales of the checkpoint"


def weight_dtype(
    tensors: Iterable[Tensor],
) -> Callable[[str], str | None]:
    """A function: name of a parameter -> floating-point dtype that it works in, None if unknown.

    A quantised weight works in the dtype of its scales.
    """
    dtypes = {t.name: t.dtype for t in tensors}

    def look_up(name: str) -> str | None:
        scales = name.removesuffix("weight") + "scales"
        dtype = dtypes.get(scales if scales in dtypes else name)
        return dtype if dtype in ("BF16", "F16", "F32") else None

    return look_up
