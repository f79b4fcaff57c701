"""A copy of a model's experts in which each lies in one piece.

Knows the expert-major file: how it is written, verified and found again. Refuses to change the
model, and to know how experts are read.

In a stacked checkpoint an expert lies in nine places, three matrices of weights, scales and biases;
an SSD reads one piece of the same size up to twice as fast. The file is a safetensors file with one
tensor of bytes per MoE layer, (E, expert_bytes), named like the layer's expert module. Its metadata
hold the parts that follow each other in an expert, the SHA-256 of the data, and that of the model's
weight index or headers, by which the file and the model find out that they belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from moetap.capture import _mlx
from moetap.capture.checkpoint import read_checkpoint, read_tensors
from moetap.capture.streaming.index import Part, locate
from moetap.capture.tap import Switch, find_switches
from moetap.errors import MoetapError

FORMAT = "moetap-experts 1"

ALIGNMENT = 16384
"""Where the data begin: a page of every Mac, and of every disk."""

_CHUNK = 2**23


@dataclass(frozen=True)
class Repacked:
    """What was written: file, bytes of experts, and the SHA-256 that both copies have."""

    path: Path
    n_bytes: int
    sha256: str


def repack(
    model: str,
    target: Path,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Repacked:
    """Write the experts of a model folder to `target`, read them back and compare.

    progress(done, total) is called with bytes, written and then verified.

    Raises MoetapError: the target exists and not `force`, or would be taken for a shard; no room;
    the experts cannot be told apart; what was read back is not what was written. Then there is no
    target.
    """
    if target.exists() and not force:
        raise MoetapError(f"{target}: already exists; --force replaces it")
    opened = _mlx.open_model(model)
    if target.suffix == ".safetensors" and target.parent.resolve() == opened.path.resolve():
        raise MoetapError(
            f"{target}: would be taken for a shard of the model; choose another name or folder"
        )
    switches = find_switches(opened.model)
    layers = locate(switches, read_checkpoint(opened.path), opened.stored)
    total = sum(_expert_bytes(parts) * len(parts[0].places) for parts in layers)
    temporary = target.with_name(target.name + ".tmp")
    try:
        free = shutil.disk_usage(target.parent).free
        if free < total:
            raise MoetapError(
                f"{target}: needs {total / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there"
            )
        written = _write(temporary, opened.info.weights_sha256, switches, layers, total, progress)
        read_back = _digest(temporary, total, progress)
        if read_back != written:
            raise MoetapError(
                f"{target}: what was read back differs from what was written; is the disk failing?"
            )
        os.replace(temporary, target)
    except OSError as error:
        raise MoetapError(f"{target}: cannot be written ({error.strerror or error})") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Repacked(target, total, written)


def locate_repacked(
    path: Path, switches: list[Switch], weights_sha256: str, originals: list[tuple[Part, ...]]
) -> list[tuple[Part, ...]]:
    """As `index.locate`, in an expert-major file. originals: what `index.locate` found.

    Raises MoetapError if it is none, truncated, or of other weights: the hash, which is of names
    and places, or one expert of each layer differs.
    """
    tensors = {t.name: t for t in read_tensors(path)}
    metadata = _metadata(path)
    if metadata.get("format") != FORMAT:
        raise MoetapError(f"{path}: not a file of moetap repack")
    if metadata.get("weights_sha256") != weights_sha256:
        raise MoetapError(f"{path}: holds the experts of other weights; run moetap repack again")
    try:
        parts_of = json.loads(metadata["parts"])
        found = []
        for switch in switches:
            tensor = tensors[switch.path]
            n, size = tensor.shape
            parts, at = [], tensor.begin
            for name, nbytes in parts_of[switch.path]:
                places = tuple((path, at + e * size) for e in range(n))
                parts.append(Part(name, nbytes, places))
                at += nbytes
            found.append(tuple(parts))
    except (KeyError, ValueError, TypeError) as error:
        raise MoetapError(f"{path}: damaged ({error}); run moetap repack again") from error
    for layer, (copy, original) in enumerate(zip(found, originals, strict=True)):
        # Fine-tunes have the names and places of their base. Which expert is compared doesn't
        # matter, as training changes all; not always the first, so that damage may show too.
        expert = 7 * layer % len(original[0].places)
        by_name = {part.name: part for part in copy}
        if any(_slice(p, expert) != _slice(by_name[p.name], expert) for p in original):
            raise MoetapError(
                f"{path}: holds the experts of other weights, or is damaged (expert {expert} of "
                f"MoE layer {layer}); run moetap repack again"
            )
    return found


def _slice(part: Part, expert: int) -> bytes:
    path, begin = part.places[expert]
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), part.nbytes, begin)


def _expert_bytes(parts: tuple[Part, ...]) -> int:
    return sum(part.nbytes for part in parts)


def _write(
    path: Path,
    weights_sha256: str,
    switches: list[Switch],
    layers: list[tuple[Part, ...]],
    total: int,
    progress: Callable[[int, int], None] | None,
) -> str:
    """Write the file; returns the SHA-256 of its data."""
    digest = hashlib.sha256()
    done = 0
    with path.open("wb") as file:
        file.write(_header(weights_sha256, "0" * 64, switches, layers))
        for parts in layers:
            for expert in _experts(parts):
                file.write(expert)
                digest.update(expert)
                done += len(expert)
            if progress:
                progress(done, 2 * total)
        file.seek(0)
        file.write(_header(weights_sha256, digest.hexdigest(), switches, layers))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # so that it is read back from the disk
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return digest.hexdigest()


def _experts(parts: tuple[Part, ...]) -> Iterator[bytes]:
    files = {path: path.open("rb", buffering=0) for part in parts for path, _ in part.places}
    try:
        for e in range(len(parts[0].places)):
            pieces = []
            for part in parts:
                path, begin = part.places[e]
                piece = os.pread(files[path].fileno(), part.nbytes, begin)
                if len(piece) != part.nbytes:
                    raise MoetapError(f"{path}: ends early, at byte {begin + len(piece):,}")
                pieces.append(piece)
            yield b"".join(pieces)
    finally:
        for file in files.values():
            file.close()


def _header(
    weights_sha256: str, data_sha256: str, switches: list[Switch], layers: list[tuple[Part, ...]]
) -> bytes:
    parts = {
        switch.path: [(part.name, part.nbytes) for part in stored]
        for switch, stored in zip(switches, layers, strict=True)
    }
    header: dict[str, Mapping[str, object]] = {
        "__metadata__": {
            "format": FORMAT,
            "weights_sha256": weights_sha256,
            "data_sha256": data_sha256,
            "parts": json.dumps(parts),
        }
    }
    at = 0
    for switch, stored in zip(switches, layers, strict=True):
        n, size = len(stored[0].places), _expert_bytes(stored)
        header[switch.path] = {
            "dtype": "U8",
            "shape": [n, size],
            "data_offsets": [at, at + n * size],
        }
        at += n * size
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _digest(path: Path, total: int, progress: Callable[[int, int], None] | None) -> str:
    """SHA-256 of the data, from the disk."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        file.seek(8 + int.from_bytes(file.read(8), "little"))
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(total + done, 2 * total)
    return digest.hexdigest()


def _metadata(path: Path) -> dict[str, str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata
