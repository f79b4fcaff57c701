"""What every format has, and the one way in which rows of a stranger's file become a `Trace`.

Knows the protocol, the options, what a trace holds that a format may lose, and the checks that no
file may skip: ids in range, no id twice in a cell, the layer's top-k or nothing. Refuses to know
any layout.

While a file is read, a routing is (rows, L, K) int64 with -1 where there is no id, in any order.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import tempfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moetap.errors import MoetapError, UsageError
from moetap.trace import NOT_EXECUTED, CaptureInfo, ModelInfo, Stream, Trace

MISSING = -1


@dataclass(frozen=True)
class Options:
    """What the caller may say; None where nothing was said.

    A format names the fields that it uses in `write_options` and `read_options`.
    """

    # When writing
    stream: str | None = None  # only the stream of this prompt id
    dtype: str | None = None  # of the stored ids
    missing: int | None = None  # the id that stands for "none"
    rows: str | None = None  # decode | prefill | all
    scope: str | None = None  # global | layer
    lanes: int | None = None  # the first N streams
    # When reading
    model_id: str | None = None
    n_experts: int | None = None
    top_k: int | None = None
    layers: tuple[int, ...] | None = None  # decoder layers that are MoE layers
    n_prompt: int | None = None
    # Both
    hidden_layers: int | None = None  # decoder layers, dense ones included
    start_len: int | None = None  # rows before this position are not in the file


@runtime_checkable
class Format(Protocol):
    """A format. `direction` says which of `write` and `read` may be called.

    summary: one line. not_kept: what files of the format hold and a trace cannot, for the reader.
    """

    name: str
    direction: Literal["both", "import", "export"]
    summary: str
    write_options: tuple[str, ...]
    read_options: tuple[str, ...]
    not_kept: tuple[str, ...]

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        """Write the trace; returns what the file does not hold."""

    def read(self, path: Path, options: Options) -> Trace:
        """Read a file. MoetapError if it is not what it should be: file, place and cause."""


@dataclass(frozen=True, eq=False)
class Counts:
    """How often each expert was selected, without the rows. counts: (L, E) int64."""

    layer_index: NDArray[np.int64]
    counts: NDArray[np.int64]

    def __post_init__(self) -> None:
        ascending(self.layer_index, "layer_index")
        counts = int_array(self.counts, 2, "counts")
        if len(counts) != len(self.layer_index) or not counts.size or counts.min() < 0:
            raise MoetapError(
                f"counts of shape {counts.shape} for {len(self.layer_index)} layers: expected a "
                "row of counts, none negative, for each layer"
            )


@runtime_checkable
class CountsFormat(Format, Protocol):
    """A format of which some files hold counts only; `read` refuses those."""

    def read_counts(self, path: Path, options: Options) -> Counts:
        """Read the counts of a file. MoetapError as in `read`."""


class Base:
    """Defaults for the built-ins."""

    name = ""
    direction: Literal["both", "import", "export"] = "both"
    summary = ""
    write_options: tuple[str, ...] = ()
    read_options: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()
    # A file that is cut between two steps looks whole; the import says so.
    open_end = False

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        raise UsageError(f"{self.name} can only be imported")

    def read(self, path: Path, options: Options) -> Trace:
        raise UsageError(f"{self.name} can only be exported")


# ---- reading


@dataclass(frozen=True, eq=False)
class Rows:
    """One stream as found in a file.

    ids: (rows, L, K) int64, -1 where there is none. scores: the same shape, or None.
    where: says in which place of the file (row, moe_order) stands.
    """

    prompt_id: str
    n_prompt: int
    ids: NDArray[np.int64]
    where: Callable[[int, int], str]
    scores: NDArray[np.float64] | None = None
    tokens: NDArray[np.uint32] | None = None
    first_position: int = 0
    finish_reason: str = ""
    cls: str = ""


def make_trace(
    path: Path,
    streams: Sequence[Rows],
    layer_index: ArrayLike,
    n_experts: ArrayLike,
    *,
    model_id: str = "",
    model_type: str = "",
    expert_bytes: ArrayLike | None = None,
    scores_kind: str = "",
    fallback_k: int = 1,
) -> Trace:
    """Check the rows and make a trace of them. Call it within `refusing`.

    n_experts: per layer, or one number for all. scores_kind: what the scores are, if there are
    any. fallback_k: top-k of a layer that never ran.
    """
    check_text(model_id, model_type)
    layers = np.asarray(layer_index, dtype=np.int64)
    experts = np.broadcast_to(np.asarray(n_experts, dtype=np.int64), layers.shape)
    if not streams or not any(len(s.ids) for s in streams):
        raise MoetapError("holds no rows")
    top_k = np.max([(s.ids != MISSING).sum(axis=2).max(axis=0, initial=0) for s in streams], axis=0)
    top_k = np.where(top_k == 0, min(fallback_k, int(experts.min())), top_k)
    model = ModelInfo(
        id=model_id,
        revision="",
        model_type=model_type,
        config_json="",
        config_sha256="",
        weights_sha256="",
        quantization="",
        layer_index=layers,
        n_experts=experts,
        # Checked below; a cell wider than the layer shall be refused with its place.
        top_k=np.minimum(top_k, experts),
        expert_bytes=np.zeros(len(layers), dtype=np.int64)
        if expert_bytes is None
        else np.asarray(expert_bytes, dtype=np.int64),
    )
    scored = any(s.scores is not None for s in streams)
    return Trace(
        model=model,
        capture=CaptureInfo(
            moetap_version="",
            mode="",
            n_prompts=len(streams),
            scores_kind=scores_kind if scored else "",
        ),
        streams=tuple(_stream(s, model, top_k, scored) for s in streams),
        run_id="",
        created="",
        complete=True,
        source=str(path),
    )


def _stream(rows: Rows, model: ModelInfo, top_k: NDArray[np.int64], scored: bool) -> Stream:
    ids, where = rows.ids, rows.where
    bad = (ids < MISSING) | (ids >= model.n_experts[:, None])
    if bad.any():
        row, layer, slot = np.argwhere(bad)[0]
        raise MoetapError(
            f"{where(row, layer)}: expert id {ids[row, layer, slot]} is out of range, "
            f"the layer has {model.n_experts[layer]}"
        )
    # A missing id sorts last.
    key = np.where(ids == MISSING, NOT_EXECUTED, ids)
    order = np.argsort(key, axis=2, kind="stable")
    key = np.take_along_axis(key, order, axis=2)
    twice = (key[:, :, 1:] == key[:, :, :-1]) & (key[:, :, 1:] != NOT_EXECUTED)
    if twice.any():
        row, layer, slot = np.argwhere(twice)[0]
        raise MoetapError(f"{where(row, layer)}: expert {key[row, layer, slot]} occurs twice")
    count = (key != NOT_EXECUTED).sum(axis=2)
    wrong = (count != 0) & (count != top_k)
    if wrong.any():
        row, layer = np.argwhere(wrong)[0]
        raise MoetapError(
            f"{where(row, layer)}: {count[row, layer]} experts, other rows of the layer have "
            f"{top_k[layer]}"
        )
    width = model.max_top_k
    scores = None
    if scored:
        found = np.full(ids.shape, np.nan) if rows.scores is None else rows.scores
        with np.errstate(over="ignore"):
            scores = np.take_along_axis(found, order, axis=2)[:, :, :width].astype(np.float16)
        if np.isinf(scores).any():
            row, layer, _ = np.argwhere(np.isinf(scores))[0]
            raise MoetapError(f"{where(row, layer)}: weight does not fit float16")
        scores[key[:, :, :width] == NOT_EXECUTED] = np.nan
    check_text(rows.prompt_id, rows.cls, rows.finish_reason)
    n = len(ids)
    first = rows.first_position
    if not first < rows.n_prompt <= first + n:
        raise MoetapError(
            f"{rows.prompt_id}: {rows.n_prompt} prompt tokens do not go with {n} rows from "
            f"position {first}"
        )
    if first + n > 2**32:
        raise MoetapError(f"{rows.prompt_id}: positions do not fit 32 bits")
    return Stream(
        prompt_id=rows.prompt_id,
        cls=rows.cls,
        prompt_sha256="",
        n_prompt=rows.n_prompt,
        n_generated=first + n - rows.n_prompt + 1,
        finish_reason=rows.finish_reason,
        looped_from=-1,
        experts=key[:, :, :width].astype(np.uint16),
        tokens=np.zeros(n, dtype=np.uint32) if rows.tokens is None else rows.tokens,
        position=np.arange(first, first + n, dtype=np.uint32),
        scores=scores,
        first_position=first,
    )


def check_text(*texts: str) -> None:
    """Refuse strings that a trace file cannot hold: half of a surrogate pair, a NUL."""
    for text in texts:
        if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
            raise MoetapError(f"{text!r:.60} is not a text that can be stored")


def need_n_experts(options: Options) -> int:
    """--n-experts of a format whose files do not tell."""
    if options.n_experts is None:
        raise UsageError(
            "the file does not say how many experts a layer has; give --n-experts E "
            "(n_routed_experts or num_experts in the model's config.json)"
        )
    return options.n_experts


def drop_dense(
    path: Path, streams: Sequence[NDArray[np.int64]], options: Options
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """Engines whose arrays have all hidden layers leave zeros where nothing was routed.

    Cells of k >= 2 zeros become -1, layers that have nothing but such cells are taken for dense
    and left out. With k = 1 a zero may be expert 0, so then --layers must name the MoE layers.

    Returns the arrays, and the layers that are left.
    """
    n_layers, k = streams[0].shape[1:]
    if options.layers is None and k == 1 and any((s == 0).all(axis=(0, 2)).any() for s in streams):
        raise UsageError(
            f"{path}: with one expert per token a dense layer looks like expert 0; "
            "name the MoE layers with --layers"
        )
    cleaned = [s.copy() for s in streams]
    if k > 1:
        for ids in cleaned:
            ids[(ids == 0).all(axis=2)] = MISSING
    if options.layers is not None:
        keep = np.asarray(sorted(set(options.layers)), dtype=np.int64)
        if keep[0] < 0 or keep[-1] >= n_layers:
            raise UsageError(f"{path}: has {n_layers} layers, --layers names others")
    else:
        seen = [(ids != MISSING).any(axis=(0, 2)) for ids in cleaned]
        keep = np.flatnonzero(np.any(seen, axis=0))
    if not len(keep):
        raise MoetapError("no layer has routed experts")
    return [ids[:, keep] for ids in cleaned], keep


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """Turn whatever a foreign or damaged file provokes into one line that starts with the path."""
    try:
        if path.is_file() and not path.stat().st_size:
            raise MoetapError("is empty")
        yield
    except MoetapError as error:
        text = str(error)
        raise type(error)(text if text.startswith(f"{path}") else f"{path}: {text}") from None
    except FileNotFoundError:
        raise MoetapError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise MoetapError(f"{path}: is a folder") from None
    except PermissionError as error:
        raise MoetapError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MoetapError(
            f"{path}: is not text (offset {error.start}: {error.reason}), hence not of this format"
        ) from error
    except (
        OSError,
        EOFError,
        LookupError,
        RuntimeError,  # RecursionError and NotImplementedError too
        ValueError,
        TypeError,
        AttributeError,
        ArithmeticError,
        MemoryError,
        SyntaxError,  # numpy parses the header of a .npy as Python
        tokenize.TokenError,
        struct.error,
        zipfile.BadZipFile,
        zlib.error,
        pickle.UnpicklingError,
    ) as error:
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise MoetapError(f"{path}: damaged or not of this format ({cause})") from error


def input_files(path: Path, *suffixes: str) -> list[Path]:
    """The file, or the files of a folder in order of their names."""
    if not path.is_dir():
        return [path]
    found = sorted(p for p in path.iterdir() if p.suffix in suffixes and p.is_file())
    if not found:
        raise MoetapError(f"{path}: the folder has no {' or '.join(suffixes)} file")
    return found


def load_json(path: Path) -> Any:
    """A JSON file; its errors carry line and column."""
    return json.loads(path.read_text(encoding="utf-8"))


def load_npz(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz. Call it within `refusing`."""
    with path.open("rb") as file:
        if file.read(4) != b"PK\3\4":
            # NumPy would take it for a pickle, and advise to run that.
            raise MoetapError("is not an .npz archive")
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except zipfile.BadZipFile as error:
        raise MoetapError(f"cut off or damaged ({error})") from error


def whole(value: Any, what: str, least: int = 0) -> int:
    """`value`, which must be an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MoetapError(f"{what} must be an integer of at least {least}, is {value!r:.40}")
    return value


def mapping(value: Any, what: str) -> dict[str, Any]:
    """`value`, which must be a JSON object."""
    if not isinstance(value, dict):
        raise MoetapError(f"{what} must be a JSON object, is {value!r:.40}")
    return value


def int_array(value: Any, ndim: int, what: str) -> NDArray[np.int64]:
    """`value` as an int64 array; it must hold whole numbers in `ndim` dimensions."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise MoetapError(f"{what} is ragged") from None
    if array.size == 0 and array.ndim <= ndim:
        array = np.zeros(array.shape + (0,) * (ndim - array.ndim), dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != ndim:
        raise MoetapError(
            f"{what} must be whole numbers in {ndim} dimensions, is {array.dtype} "
            f"of shape {array.shape}"
        )
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise MoetapError(f"{what} has a number that does not fit 64 bits")
    return array.astype(np.int64)


def token_array(value: Any, n: int, what: str) -> NDArray[np.uint32]:
    """Token ids; those that the file does not know (negative) become 0."""
    tokens = int_array(value, 1, what)
    if len(tokens) != n:
        raise MoetapError(f"{what}: {len(tokens)} tokens for {n} rows")
    if n and tokens.max() >= 2**32:
        raise MoetapError(f"{what}: token {tokens.max()} does not fit 32 bits")
    return np.maximum(tokens, 0).astype(np.uint32)


def ascending(values: ArrayLike, what: str) -> NDArray[np.int64]:
    """Layer indices: whole, not negative, rising."""
    array = int_array(values, 1, what)
    if not len(array) or array[0] < 0 or (np.diff(array) <= 0).any():
        raise MoetapError(f"{what} must be layer indices that rise, is {array.tolist()!r:.60}")
    return array


# ---- writing


def save(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file in one step: a reader, or a crash, never meets half of it.

    data: the file, or its parts, of which only one at a time is in memory.
    """
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            for part in [data] if isinstance(data, bytes) else data:
                file.write(part)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
        temporary = ""
    except OSError as error:
        raise MoetapError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        if temporary:
            Path(temporary).unlink(missing_ok=True)


def save_text(path: Path, parts: Iterable[str]) -> None:
    """A text file, part by part."""
    save(path, (part.encode() for part in parts))


def save_lines(path: Path, lines: Iterable[str]) -> None:
    """A text file of these lines."""
    save_text(path, (f"{line}\n" for line in lines))


def chosen(trace: Trace, options: Options) -> list[Stream]:
    """The streams to write: all, or the one of --stream."""
    if not trace.streams:
        raise MoetapError(f"{trace.source or 'trace'}: has no streams to export")
    if options.stream is None:
        return list(trace.streams)
    found = [s for s in trace.streams if s.prompt_id == options.stream]
    if not found:
        raise UsageError(
            f"no stream is called {options.stream!r}; "
            f"there are {', '.join(s.prompt_id for s in trace.streams)[:300]}"
        )
    return found


def one_file_per_stream(
    trace: Trace, path: Path, options: Options, suffix: str
) -> list[tuple[Stream, Path]]:
    """Where the streams go in a format of one stream a file: `path`, or numbered files in a new
    folder of that name.
    """
    streams = chosen(trace, options)
    if len(streams) == 1:
        return [(streams[0], path)]
    folder(path)
    width = len(str(len(streams) - 1))
    return [(s, path / f"{i:0{width}d}-{slug(s.prompt_id)}{suffix}") for i, s in enumerate(streams)]


def folder(path: Path) -> None:
    """Make an output folder."""
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise MoetapError(
            f"{path}: cannot make a folder for several files ({error.strerror or error})"
        ) from error


def slug(text: str) -> str:
    """`text` as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)[:80] or "stream"


def routing(stream: Stream) -> NDArray[np.int64]:
    """(rows, L, K) with -1 for "none"."""
    ids = stream.experts.astype(np.int64)
    ids[ids == NOT_EXECUTED] = MISSING
    return ids


def selected(trace: Trace, options: Options) -> list[tuple[Stream, NDArray[np.uint16]]]:
    """Rows of each stream as --rows says: decode (loops left out), prefill or all."""
    kind = options.rows or "decode"
    if kind not in ("decode", "prefill", "all"):
        raise UsageError(f"--rows is decode, prefill or all, not {kind!r}")
    pick: dict[str, Callable[[Stream], NDArray[np.uint16]]] = {
        "decode": Stream.decode,
        "prefill": Stream.prefill,
        "all": lambda s: s.experts,
    }
    return [(s, pick[kind](s)) for s in chosen(trace, options)]


def count(ids: NDArray[np.uint16], n_experts: NDArray[np.int64]) -> NDArray[np.int64]:
    """(L, E) how often each expert occurs in (rows, L, K), E the largest of n_experts."""
    return np.stack(
        [
            np.bincount(
                ids[:, layer][ids[:, layer] != NOT_EXECUTED].astype(np.int64),
                minlength=int(n_experts.max()),
            )
            for layer in range(len(n_experts))
        ]
    )


def rows_left_out(trace: Trace, options: Options) -> list[str]:
    """What `selected` leaves out."""
    kind = options.rows or "decode"
    lost = []
    if kind == "decode" and any(len(s.prefill()) for s in trace.streams):
        lost.append("prefill rows (--rows all or prefill)")
    if kind == "decode" and any(s.looped_from >= 0 for s in trace.streams):
        lost.append("decode rows in loops (--rows all)")
    if kind == "prefill":
        lost.append("decode rows (--rows all or decode)")
    return lost


def gates_unknown(trace: Trace, options: Options, instead: str) -> list[str]:
    """For formats that cannot write a gate that is no number: in how many cells there is one, and
    what stands there instead."""
    n = sum(
        int((~np.isfinite(s.scores) & (s.experts != NOT_EXECUTED)).any(axis=2).sum())
        for s in chosen(trace, options)
        if s.scores is not None
    )
    return [f"gates that are no numbers, in {n} cells ({instead})"] if n else []


def check_rows_ran(stream: Stream, format_name: str) -> None:
    """For formats that have no place for a row of which no layer ran, and that show by the last
    layer of the last row that they are whole.
    """
    empty = (stream.experts == NOT_EXECUTED).all(axis=(1, 2))
    if empty.any():
        raise MoetapError(
            f"stream {stream.prompt_id!r}: no layer ran in row {int(empty.argmax())}, "
            f"{format_name} has no place for such a row"
        )
    ran = (stream.experts != NOT_EXECUTED).any(axis=2)
    if not ran[-1, np.flatnonzero(ran.any(axis=0))[-1]]:
        raise MoetapError(
            f"stream {stream.prompt_id!r}: the last layer did not run in the last row, which "
            f"{format_name} would take for a file that is cut off"
        )


def lost(trace: Trace, *kept: str) -> list[str]:
    """What this trace holds and a file does not that keeps only the parts named `kept`."""
    model, streams = trace.model, trace.streams
    everywhere = bool(streams)
    parts = {
        "model": ("model hashes, config and memory sizes", True),
        "model id": (f"model id {model.id}", bool(model.id)),
        "layers": ("absolute layer indices", True),
        "n_experts": ("number of experts per layer", True),
        "ragged n_experts": (
            "number of experts per layer (only the largest is kept)",
            len(set(model.n_experts.tolist())) > 1,
        ),
        "expert_bytes": ("bytes per expert", bool(model.expert_bytes.any())),
        "capture": ("capture settings", True),
        "prompt ids": ("prompt ids", everywhere),
        "classes": ("classes", any(s.cls for s in streams)),
        "prompt hashes": ("prompt hashes", any(s.prompt_sha256 for s in streams)),
        "tokens": ("tokens", any(s.tokens.any() for s in streams)),
        "scores": ("gate weights", any(s.scores is not None for s in streams)),
        "n_prompt": ("where the prompt ends", everywhere),
        "first_position": ("first positions", any(s.first_position for s in streams)),
        "finish reasons": ("finish reasons", any(s.finish_reason for s in streams)),
        "loops": ("where loops begin", any(s.looped_from >= 0 for s in streams)),
        "io": ("measured I/O of the decode steps", any(s.io is not None for s in streams)),
        "complete": ("that the capture did not end", not trace.complete),
    }
    unknown = set(kept) - set(parts)
    if unknown:
        raise ValueError(f"no such part: {unknown}")
    return [words for name, (words, present) in parts.items() if present and name not in kept]
