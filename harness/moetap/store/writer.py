"""Writing a trace: one part per finished stream while the capture runs, one file when it ends.

Knows how streams become a file of the format, and in which order things must reach the disk so that
a kill at any moment loses at most the stream in progress. Refuses to know where streams come from,
and what they mean beyond `check_stream`.

The order: a stream is written to a temporary, made durable, and renamed into `<trace>.parts/` (see
`parts`). `close` copies the trace so far and the parts into one temporary, makes it durable,
renames it onto the trace, and only then deletes the parts. A reader finds a stream that is in both
places once, by its prompt id.
"""

from __future__ import annotations

import io
import os
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import h5py
import numpy as np

from moetap._hdf5 import is_hdf5
from moetap.errors import MoetapError, UsageError
from moetap.store import disk, parts, spec
from moetap.store.reader import TraceFile, check_same_run, most_swap
from moetap.store.spec import Attribute, Dataset, Header, Record, Rows
from moetap.trace import (
    NOT_EXECUTED,
    STREAMING,
    CaptureInfo,
    ModelInfo,
    Stream,
    StreamIO,
    check_stream,
)

# A resumed capture must be what an uninterrupted one would have been. Machine and operating
# system may differ: a long capture may move to another Mac of the same backend and versions.
_SAME_MODEL = (
    "config_sha256",
    "weights_sha256",
    "layer_index",
    "n_experts",
    "top_k",
    "expert_bytes",
)
_SAME_CAPTURE = (
    "temp",
    "top_p",
    "seed",
    "max_tokens",
    "prefill_step",
    "full_prefill",
    "mode",
    "slots",
    "policy",
    "cold_reads",
    "expert_kernel",
    "mix_sha256",
    "n_prompts",
    "chat_template_sha256",
    "thinking",
    "scores_kind",
    "backend",
    "mlx_version",
    "mlx_lm_version",
)


_LONGEST_NAME = 255 - len(".parts")  # bytes; macOS and Linux allow 255


def check_target(path: str | Path, *, resume: bool, force: bool) -> None:
    """Refuse an output that `TraceWriter` would refuse, before anything expensive happens.

    Raises:
        UsageError: resume and force together.
        MoetapError: the folder is missing or cannot be written to; the trace, or finished streams
            of it, exist and neither `resume` nor `force` is given; there is nothing to resume, or
            it is no trace, or complete; another writer is at work.
    """
    path = Path(path)
    if resume and force:
        raise UsageError(
            "--resume continues a trace and --force overwrites it; choose one of the two"
        )
    # os.path rather than Path: a folder that may not be entered is an answer, not an exception.
    if os.path.isdir(path):
        raise MoetapError(f"{path}: is a folder; name a file in it, such as {path / 'trace.h5'}")
    # By the first bytes: a damaged trace, or an empty file, may be replaced too.
    ours = os.path.isfile(path) and (os.path.getsize(path) == 0 or is_hdf5(path))
    if os.path.lexists(path) and not ours:
        raise MoetapError(f"{path}: exists and is no trace; choose another output")
    if os.path.exists(path.parent) and not os.path.isdir(path.parent):
        raise MoetapError(f"{path}: {path.parent} is a file, not a folder; choose another output")
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise MoetapError(f"{path}: the name is too long; choose a shorter one")
    if not os.path.isdir(path.parent):
        raise MoetapError(f"{path}: the folder {path.parent} does not exist; create it first")
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise MoetapError(
            f"{path}: cannot write to the folder {path.parent}; choose another output"
        )
    disk.check_unlocked(parts.folder(path))
    _check_existing(path, resume, force)


def _check_existing(path: Path, resume: bool, force: bool) -> None:
    found = _sources(path)
    if resume:
        if not found:
            raise MoetapError(
                f"{path}: nothing to resume, there is no such trace; leave out --resume"
            )
        try:
            with TraceFile(found[0]) as file:
                complete = file.complete
        except MoetapError as error:
            raise MoetapError(f"cannot resume {error}") from None
        if complete:
            raise MoetapError(
                f"{path}: nothing to resume, the trace is already complete; --force records it anew"
            )
    elif found and not force:
        what = (
            "already exists"
            if found[0] == path
            else "has finished streams of an unfinished capture"
        )
        raise MoetapError(
            f"{found[0] if found[0] == path else parts.folder(path)}: {what}; "
            "--resume continues it, --force discards it, or choose another output"
        )


class TraceWriter:
    """Writes one trace; a context manager.

    path: the trace file, which appears when the writer is closed. With `resume`, its finished
    streams are kept and `model` and `capture` must agree with it; with `force`, it is replaced when
    the first stream is appended.

    Leaving the context without `close`, by an exception or not, closes the trace as incomplete and
    resumable.

    Raises:
        UsageError, MoetapError: as `check_target`; also if a setting that changes the routing
            differs from the trace to be resumed, and if the disk does not play along.
    """

    def __init__(
        self,
        path: str | Path,
        model: ModelInfo,
        capture: CaptureInfo,
        *,
        resume: bool = False,
        force: bool = False,
    ) -> None:
        self.path = Path(path)
        check_target(self.path, resume=resume, force=force)
        with self._blaming("cannot begin"):
            self._lock = disk.Lock(parts.folder(self.path))
        try:
            with self._blaming("cannot begin"):
                # Again, now that nobody else can change it.
                _check_existing(self.path, resume, force)
                self._begin(model, capture, force)
        except BaseException:
            self._lock.release()
            raise
        self._closed = False

    def _begin(self, model: ModelInfo, capture: CaptureInfo, force: bool) -> None:
        for leftover in parts.temporaries(self.path):
            leftover.unlink()
        if force:
            self._remove_parts()
        # A trace that is to be replaced stays until the first new stream is there to replace it;
        # until then nothing of the new run is on the disk: two runs must never lie side by side.
        self._replaces = force and self.path.exists()
        disk.sync(self.path.parent)
        self._finished: dict[str, None] = {}
        self._next = 1 + max((parts.number_of(p) for p in parts.listing(self.path)), default=0)
        found = [] if self._replaces else _sources(self.path)
        if not found:
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._header = Header(model, capture, uuid.uuid4().hex, now)
            if not self._replaces:
                self._write_part(0, [], [], [])
            return
        for number, source in enumerate(found):
            with TraceFile(source) as file:
                if number == 0:
                    self._header = file.header
                    _check_settings(self.path, file.header, model, capture)
                if file.has_io != (capture.mode == STREAMING):
                    raise MoetapError(f"{self.path}: cannot resume, its I/O was not measured")
                check_same_run(str(source), file.header.run_id, str(found[0]), self._header.run_id)
                self._finished.update((r.prompt_id, None) for r in file.records)
                self.note_swap(file.header.capture.swap_growth_bytes)

    @property
    def finished(self) -> frozenset[str]:
        """Prompt ids of the streams that are stored."""
        return frozenset(self._finished)

    def note_swap(self, growth_bytes: int | None) -> None:
        """Record by how much swap has grown since this session began; None if that is not known.

        The trace keeps the largest figure of all sessions: growth is judged against what a machine
        at ease shows, and the sum of many small ones would pose as pressure that there never was.
        Stored with every stream appended from now on, and when the trace is closed, however that
        comes about.
        """
        known = self._header.capture.swap_growth_bytes
        if growth_bytes is not None:
            growth_bytes = max(growth_bytes, 0)
        most = most_swap((known, growth_bytes))
        if most != known:
            capture = replace(self._header.capture, swap_growth_bytes=most)
            self._header = replace(self._header, capture=capture)

    def append(self, stream: Stream) -> None:
        """Store a finished stream; durable, against power cuts too, when it returns.

        Raises:
            MoetapError: the stream is impossible for this model, stored already or lacks (or has
                unexpected) scores or measured I/O; or the disk failed, in which case everything
                appended before is safe.
        """
        self._check(stream)
        record = Record(
            **{f: getattr(stream, f) for f in Record._fields if f != "first_row"}, first_row=0
        )
        rows = Rows(stream.experts, stream.tokens, stream.position, stream.scores)
        number = self._next
        self._next += 1  # first: an interrupted append may have stored its part already
        with self._blaming(f"cannot store stream {stream.prompt_id!r}"):
            if self._replaces:
                self.path.unlink()
                self._replaces = False
                self._write_part(0, [], [], [])
            self._write_part(number, [record], [rows], [stream.io] if stream.io else [])
        self._finished[stream.prompt_id] = None

    def close(self, complete: bool) -> None:
        """Merge everything stored into the trace file. Does nothing when closed already.

        complete: the run reached its end. A trace can be resumed unless it is complete. An
        interrupt (Ctrl-C) during the merge is raised when the merge is done.

        Raises:
            MoetapError: `complete`, but streams are missing; or the disk failed, in which case
            nothing is lost.
        """
        if self._closed:
            return
        expected = self._header.capture.n_prompts
        if complete and expected and len(self._finished) != expected:
            raise MoetapError(
                f"{self.path}: has {len(self._finished)} of {expected} streams, "
                "cannot be closed as complete"
            )
        self._closed = True

        def work() -> None:
            try:
                if not self._replaces:  # else no stream came: the old trace stays
                    self._merge(complete)
            finally:
                self._lock.release()

        # Not in the main thread: there, Ctrl-C could strike inside HDF5's calls to the sink.
        with self._blaming("cannot write the trace"), ThreadPoolExecutor(1) as pool:
            pool.submit(work).result()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        try:
            self.close(complete=False)
        except MoetapError as second:
            if error is None:
                raise
            error.add_note(str(second))

    def _check(self, stream: Stream) -> None:
        if self._closed:
            raise MoetapError(f"{self.path}: is closed, cannot append {stream.prompt_id!r}")
        check_stream(stream, self._header.model)
        who = f"stream {stream.prompt_id!r}"
        if stream.prompt_id in self._finished:
            raise MoetapError(f"{self.path}: {who} is stored already")
        kind = self._header.capture.scores_kind
        if (stream.scores is not None) != bool(kind):
            raise MoetapError(
                f"{who}: has {'no ' if kind else ''}scores, but scores_kind is {kind!r}"
            )
        if (stream.io is not None) != (self._header.capture.mode == STREAMING):
            raise MoetapError(
                f"{who}: has {'no ' if stream.io is None else ''}measured I/O, but the capture's "
                f"mode is {self._header.capture.mode!r}"
            )
        values = {item: getattr(stream, item.name) for item in spec.ROW_DATASETS}
        values |= {item: getattr(stream.io, item.name, None) for item in spec.IO_DATASETS}
        for item, value in values.items():
            if value is not None and value.dtype != item.dtype:
                raise MoetapError(f"{who}: {item.name} are {value.dtype}, expected {item.dtype}")

    def _write_part(
        self, number: int, records: list[Record], blocks: list[Rows], io_blocks: list[StreamIO]
    ) -> None:
        # Built in memory: HDF5 does not survive a full disk (see disk.Sink), and a stream is small.
        image = io.BytesIO()
        _write(image, self._header, False, records, blocks, io_blocks)
        final = parts.part_file(self.path, number)
        temporary = final.with_suffix(".tmp")
        try:
            temporary.write_bytes(image.getbuffer())
            disk.publish(temporary, final)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _merge(self, complete: bool) -> None:
        sources: list[Path] = []
        records: list[Record] = []
        seen: set[str] = set()
        row = 0
        for source in _sources(self.path):
            with TraceFile(source) as file:
                # A part has one stream, so a source is new as a whole or known as a whole.
                if seen.issuperset(r.prompt_id for r in file.records):
                    continue
                sources.append(source)
                for record in file.records:
                    seen.add(record.prompt_id)
                    records.append(record._replace(first_row=row))
                    row += record.n_rows

        temporary = parts.folder(self.path) / "merged.tmp"
        try:
            sink = disk.Sink(temporary)
            try:
                with sink:
                    rows, steps = _copy(sources, sink), _copy_io(sources, sink)
                    _write(sink, self._header, complete, records, rows, steps)
            finally:
                _check_sink(sink)  # the reason of whatever HDF5 made of dropped writes
            disk.publish(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        # What is left of the parts from here on is known to be superfluous, by every reader.
        with suppress(OSError):
            self._remove_parts()

    def _remove_parts(self) -> None:
        for file in (*parts.listing(self.path), *parts.temporaries(self.path)):
            file.unlink()

    @contextmanager
    def _blaming(self, what: str) -> Iterator[None]:
        try:
            yield
        # HDF5 reports some failures as RuntimeError, values it cannot take as ValueError.
        except (OSError, RuntimeError, ValueError, OverflowError) as error:
            cause = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
            kept = (
                f"; finished streams are kept in {parts.folder(self.path)}, --resume continues"
                if parts.listing(self.path)
                else ""
            )
            raise MoetapError(f"{self.path}: {what}: {cause}{kept}") from error


def _sources(path: Path) -> list[Path]:
    """What there is of the trace: the file itself if it exists, then its parts."""
    return ([path] if path.exists() else []) + parts.listing(path)


def _copy(sources: list[Path], sink: disk.Sink) -> Iterator[Rows]:
    """The rows of all sources, a bounded number at a time."""
    for source in sources:
        with TraceFile(source) as file:
            for start in range(0, file.n_rows, spec.CHUNK_ROWS):
                _check_sink(sink)
                yield file.rows(start, min(start + spec.CHUNK_ROWS, file.n_rows))


def _copy_io(sources: list[Path], sink: disk.Sink) -> Iterator[StreamIO]:
    """The measured steps of all sources, a bounded number at a time."""
    for source in sources:
        with TraceFile(source) as file:
            for start in range(0, file.n_steps, spec.CHUNK_ROWS):
                _check_sink(sink)
                block = file.io(start, min(start + spec.CHUNK_ROWS, file.n_steps))
                if block is not None:
                    yield block


def _check_sink(sink: disk.Sink) -> None:
    if sink.error is not None:
        raise sink.error


def _check_settings(path: Path, stored: Header, model: ModelInfo, capture: CaptureInfo) -> None:
    pairs = [
        *((name, getattr(stored.model, name), getattr(model, name)) for name in _SAME_MODEL),
        *((name, getattr(stored.capture, name), getattr(capture, name)) for name in _SAME_CAPTURE),
    ]
    for name, old, new in pairs:
        if not np.array_equal(old, new):
            old, new = (v.tolist() if isinstance(v, np.ndarray) else v for v in (old, new))
            raise MoetapError(
                f"{path}: cannot resume, {name} differs: {old!r} in the trace, {new!r} now; "
                "use the same settings, or record another trace"
            )


def _write(
    target: io.IOBase,
    header: Header,
    complete: bool,
    records: list[Record],
    blocks: Iterable[Rows],
    io_blocks: Iterable[StreamIO],
) -> None:
    """Write one file of the format into `target`, which must be empty.

    blocks, io_blocks: the rows and the measured decode steps of all records, in order, in pieces of
    any length.
    """
    model, capture = header.model, header.capture
    n_rows = sum(r.n_rows for r in records)
    cell = (n_rows, model.n_layers, model.max_top_k)
    # Room for two rows of chunks, so that each chunk is compressed once though blocks don't end
    # where chunks do.
    cache = 4 * spec.CHUNK_ROWS * cell[1] * cell[2] + 2**20
    # "v110" puts a checksum on every piece of metadata; HDF5 1.10 (2016) and newer read it.
    with h5py.File(target, "w", libver=("v110", "v110"), rdcc_nbytes=cache) as file:
        root = {
            "format": spec.FORMAT,
            "format_version": spec.FORMAT_VERSION,
            "creator": f"moetap {capture.moetap_version}",
            "created": header.created,
            "run_id": header.run_id,
            "complete": complete,
        }
        _put_attributes(file, "/", root)
        group = file.create_group("model")
        _put_attributes(group, "/model", vars(model))
        for item in spec.MODEL_DATASETS:
            _create(group, item, cell[1:2])[...] = getattr(model, item.name)
        _put_attributes(file.create_group("capture"), "/capture", vars(capture))
        group = file.create_group("streams")
        for item in spec.STREAM_DATASETS:
            values = [getattr(r, spec.STREAM_FIELD.get(item.name, item.name)) for r in records]
            _put_column(group, item, values)

        rows = {
            item.name: _create(file, item, cell[: len(item.dims)])
            for item in spec.ROW_DATASETS
            if not item.optional or capture.scores_kind
        }
        if capture.scores_kind:
            _put_attributes(rows["scores"], "/scores", {"kind": capture.scores_kind})
        row = 0
        for block in blocks:
            stop = row + len(block.experts)
            for name, dataset in rows.items():
                dataset[row:stop] = getattr(block, name)
            row = stop
        if capture.mode == STREAMING:
            _put_io(file.create_group("io"), records, cell[1], io_blocks)


def _put_io(group: Any, records: list[Record], n_layers: int, blocks: Iterable[StreamIO]) -> None:
    cell = (sum(r.n_generated for r in records), n_layers)
    datasets = {
        item.name: _create(group, item, cell[: len(item.dims)]) for item in spec.IO_DATASETS
    }
    step = 0
    for block in blocks:
        stop = step + block.n_steps
        for name, dataset in datasets.items():
            dataset[step:stop] = getattr(block, name)
        step = stop


def _create(group: Any, item: Dataset, shape: tuple[int, ...], dtype: Any = None) -> Any:
    """An empty dataset with the filters of the format; a dataset without elements has none."""
    options: dict[str, Any] = {}
    if shape[0]:
        # One slot a chunk: see spec.CHUNK_ROWS.
        chunk = (min(shape[0], spec.CHUNK_ROWS), *shape[1:2], *(1 for _ in shape[2:]))
        options = {
            "chunks": chunk,
            "shuffle": True,
            "compression": "gzip",
            "compression_opts": spec.GZIP_LEVEL,
            "fletcher32": True,
        }
    if item.name == "experts":
        options["fillvalue"] = NOT_EXECUTED
    dataset = group.create_dataset(item.name, shape=shape, dtype=dtype or item.dtype, **options)
    for axis, name in enumerate(item.dims):
        dataset.dims[axis].label = name
    return dataset


def _put_column(group: Any, item: Dataset, values: list[Any]) -> None:
    dtype: Any = np.dtype(item.dtype) if item.dtype != spec.TEXT else None
    if dtype is None:
        values = [_encode(v, item.name) for v in values]
        dtype = _string(max(map(len, values), default=1))
    dataset = _create(group, item, (len(values),), dtype)
    if values:
        dataset[...] = np.array(values, dtype=dtype)


def _put_attributes(owner: Any, where: str, values: dict[str, Any]) -> None:
    for item in spec.ATTRIBUTES[where]:
        value = values[item.name]
        if value is not None:
            _put_attribute(owner, item, value)


def _put_attribute(owner: Any, item: Attribute, value: Any) -> None:
    if item.dtype == spec.TEXT:
        text = _encode(value, item.name)
        owner.attrs.create(item.name, np.array(text), dtype=_string(len(text)))
    else:
        owner.attrs.create(item.name, np.dtype(item.dtype).type(value))


def _encode(text: str, where: str) -> bytes:
    """UTF-8. Padding with nulls, the format cannot hold them; a lone surrogate is no Unicode."""
    try:
        encoded = text.encode("utf-8")
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise MoetapError(f"{where} has a character that cannot be stored: {text!r:.80}")
    return encoded


def _string(length: int) -> Any:
    return h5py.string_dtype("utf-8", max(length, 1))
