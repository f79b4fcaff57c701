"""Reading a trace file, or what a killed capture left of one, as a `Trace`.

Knows how to open one file of format version 1..N, what makes it inconsistent, and how a file and
its parts make up one trace. Refuses to repair, to write, and to hand out anything it has not
checked: damage is a MoetapError of one line that starts with the path, never a wrong trace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from moetap.errors import MoetapError
from moetap.store import parts, spec
from moetap.store.spec import Attribute, Dataset, Header, Record, Rows
from moetap.trace import CaptureInfo, ModelInfo, Stream, StreamIO, Trace


def read(path: str | Path) -> Trace:
    """Read a trace, be it closed, still being captured, or left by a killed capture.

    A stream's arrays are views into arrays that are read once, all in memory: about 2 L K + 8 bytes
    a row, without scores. `complete` is True only if a finished run closed the file.

    Raises:
        MoetapError: missing, not a trace, of a newer format version, damaged or inconsistent; one
        line.
    """
    path = Path(path)
    if not path.name:
        raise MoetapError(f"{str(path)!r} names no file; give the path of a trace")
    # Parts first, then the file: the writer deletes parts only once the file has them all, so that
    # a part that vanishes meanwhile is found in the file.
    pieces = []
    for part in parts.listing(path):
        try:
            pieces.append(_load(part))
        except MoetapError:
            if part.exists():
                raise
    if path.exists() or not pieces:
        pieces.insert(0, _load(path))
    if len(pieces) == 1 and pieces[0].source == str(path):
        return pieces[0]

    first = pieces[0]
    streams: dict[str, Stream] = {}
    for piece in pieces:
        check_same_run(piece.source, piece.run_id, first.source, first.run_id)
        for stream in piece.streams:
            streams.setdefault(stream.prompt_id, stream)
    with _refusing(path):
        return Trace(
            model=first.model,
            capture=replace(
                first.capture,
                swap_growth_bytes=most_swap(p.capture.swap_growth_bytes for p in pieces),
            ),
            streams=tuple(streams.values()),
            run_id=first.run_id,
            created=first.created,
            complete=first.complete and len(streams) == len(first.streams),
            source=str(path),
        )


def check_same_run(source: str, run_id: str, first_source: str, first_run_id: str) -> None:
    """Raise MoetapError unless two files come from one capture."""
    if run_id != first_run_id:
        raise MoetapError(
            f"{source}: belongs to run {run_id}, {first_source} to run {first_run_id}; "
            "move one of them away"
        )


def most_swap(growths: Iterable[int | None]) -> int | None:
    """The largest known growth, None if none is known. The only setting in which the parts of a
    capture differ.
    """
    return max((growth for growth in growths if growth is not None), default=None)


class TraceFile:
    """One open file of the format; a context manager.

    All but the rows is read and checked when it is built.

    records: the streams, in order. n_rows: R. n_steps: decode steps over all streams. has_io: the
    steps' I/O was measured. Rows and steps are read, and their checksums verified, by `rows` and
    `io`.

    Raises:
        MoetapError: as `read`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _refusing(path):
            if not path.exists():
                raise MoetapError("no such file; check the name, or record it with moetap capture")
            if path.is_dir():
                raise MoetapError("is a folder, not a trace file")
            if path.stat().st_size == 0:
                raise MoetapError("is empty, not a trace file")
            with path.open("rb"):
                pass  # so that a missing permission is not taken for a foreign format
            if not h5py.is_hdf5(path):
                raise MoetapError(
                    "is not an HDF5 file, hence no trace (or its beginning is damaged)"
                )
            # HDF5's own lock would only fail on file systems that have none: files are replaced,
            # never changed.
            self._file = h5py.File(path, "r", locking=False)
            try:
                self._read_tables()
            except BaseException:
                self._file.close()
                raise

    def _read_tables(self) -> None:
        root = self._file
        if _text(root.attrs.get("format", "")) != spec.FORMAT:
            raise MoetapError("is an HDF5 file, but not a trace of moetap")
        version = root.attrs.get("format_version")
        if not isinstance(version, np.integer) or version < 1:
            raise MoetapError(f"has an unknown format version, {version!r}")
        if version > spec.FORMAT_VERSION:
            raise MoetapError(
                f"has format version {version}, this moetap reads up to {spec.FORMAT_VERSION}: "
                "upgrade moetap"
            )
        attrs = _attributes(root, "/")
        model = _group(root, "/model")
        layers = _dataset(model, spec.MODEL_DATASETS[0], None).shape[:1]
        self.header = Header(
            model=ModelInfo(
                **_attributes(model, "/model"),
                **{d.name: _dataset(model, d, layers)[...] for d in spec.MODEL_DATASETS},
            ),
            capture=CaptureInfo(**_attributes(_group(root, "/capture"), "/capture")),
            run_id=attrs["run_id"],
            created=attrs["created"],
        )
        self.complete: bool = attrs["complete"]
        self.records = _records(_group(root, "/streams"))
        self.n_rows = sum(r.n_rows for r in self.records)

        cell = (self.n_rows, self.header.model.n_layers, self.header.model.max_top_k)
        self._rows = {
            d.name: _dataset(root, d, cell[: len(d.dims)])
            for d in spec.ROW_DATASETS
            if d.name in root or not d.optional
        }
        kind = self.header.capture.scores_kind
        if ("scores" in self._rows) != bool(kind):
            raise MoetapError(f"/capture says scores_kind={kind!r}, but /scores does not agree")
        if kind and _attributes(self._rows["scores"], "/scores")["kind"] != kind:
            raise MoetapError("/scores and /capture disagree on what the scores are")

        self.n_steps = sum(r.n_generated for r in self.records)
        self.has_io = "io" in root
        step = (self.n_steps, self.header.model.n_layers)
        self._io = {
            d.name: _dataset(_group(root, "/io"), d, step[: len(d.dims)])
            for d in (spec.IO_DATASETS if self.has_io else ())
        }

    def rows(self, start: int, stop: int) -> Rows:
        """Rows start..stop-1. MoetapError if the chunks that hold them are damaged."""
        with _refusing(self.path):
            got = {name: dataset[start:stop] for name, dataset in self._rows.items()}
            return Rows(got["experts"], got["tokens"], got["position"], got.get("scores"))

    def io(self, start: int, stop: int) -> StreamIO | None:
        """Decode steps start..stop-1, counted over all streams; None if nothing was measured.
        MoetapError if the chunks that hold them are damaged.
        """
        if not self.has_io:
            return None
        with _refusing(self.path):
            return StreamIO(**{name: dataset[start:stop] for name, dataset in self._io.items()})

    def __enter__(self) -> TraceFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _load(path: Path) -> Trace:
    """One whole file as a Trace."""
    with TraceFile(path) as file:
        rows = file.rows(0, file.n_rows)
        io = file.io(0, file.n_steps)
    with _refusing(path):
        return Trace(
            model=file.header.model,
            capture=file.header.capture,
            streams=_streams(file.records, rows, io),
            run_id=file.header.run_id,
            created=file.header.created,
            complete=file.complete,
            source=str(path),
        )


def _streams(records: list[Record], rows: Rows, io: StreamIO | None) -> tuple[Stream, ...]:
    streams = []
    step = 0
    for record in records:
        fields = record._asdict()
        at = slice(fields.pop("first_row"), record.first_row + fields.pop("n_rows"))
        steps = slice(step, step + record.n_generated)
        step = steps.stop
        streams.append(
            Stream(
                **fields,
                experts=rows.experts[at],
                tokens=rows.tokens[at],
                position=rows.position[at],
                scores=None if rows.scores is None else rows.scores[at],
                io=None if io is None else StreamIO(*(v[steps] for v in vars(io).values())),
            )
        )
    return tuple(streams)


def _records(group: Any) -> list[Record]:
    """The /streams table; streams must follow each other without a gap, each with some rows."""
    length = _dataset(group, spec.STREAM_DATASETS[0], None).shape[:1]
    columns = {}
    for item in spec.STREAM_DATASETS:
        column = _dataset(group, item, length)
        values = column.asstr()[...] if item.dtype == spec.TEXT else column[...]
        columns[spec.STREAM_FIELD.get(item.name, item.name)] = values.tolist()
    records = [
        Record(**dict(zip(columns, line, strict=True)))
        for line in zip(*columns.values(), strict=True)
    ]
    row = 0
    for record in records:
        if record.first_row != row or record.n_rows < 1:
            raise MoetapError(
                f"stream {record.prompt_id!r} has {record.n_rows} rows from {record.first_row}, "
                f"expected at least one from {row}"
            )
        row += record.n_rows
    return records


def _group(parent: Any, name: str) -> Any:
    # Not get(), which takes damage for absence.
    if name not in parent or not isinstance(parent[name], h5py.Group):
        raise MoetapError(f"group {name} is missing")
    return parent[name]


def _dataset(group: Any, item: Dataset, shape: tuple[int, ...] | None) -> Any:
    """The dataset, unread; its dtype, number of dimensions and (if given) shape are right."""
    where = f"{group.name.rstrip('/')}/{item.name}"
    if item.name not in group or not isinstance(group[item.name], h5py.Dataset):
        raise MoetapError(f"dataset {where} is missing")
    found = group[item.name]
    if item.dtype == spec.TEXT:
        fits = h5py.check_string_dtype(found.dtype) is not None
    else:
        fits = found.dtype == np.dtype(item.dtype)
    if not fits:
        raise MoetapError(f"{where} has dtype {found.dtype}, expected {item.dtype}")
    if found.shape is None or len(found.shape) != len(item.dims):
        raise MoetapError(f"{where} has shape {found.shape}, expected ({', '.join(item.dims)})")
    if shape is not None and found.shape != shape:
        raise MoetapError(f"{where} has shape {found.shape}, expected {shape}")
    return found


def _attributes(owner: Any, where: str) -> dict[str, Any]:
    return {item.name: _scalar(owner, item, where) for item in spec.ATTRIBUTES[where]}


def _scalar(owner: Any, item: Attribute, where: str) -> str | int | float | bool | None:
    """An attribute's value as the Python type that its dtype stands for, None if absent."""
    if item.name not in owner.attrs:
        if item.optional:
            return None
        raise MoetapError(f"attribute {item.name} of {where} is missing")
    value = owner.attrs[item.name]
    if item.dtype == spec.TEXT and isinstance(value, (str, bytes)):
        return str(_text(value))
    if item.dtype == "float64" and isinstance(value, np.floating):
        return float(value)
    if item.dtype == "int64" and isinstance(value, np.integer):
        return int(value)
    if item.dtype == "uint8" and isinstance(value, np.integer) and value in (0, 1):
        return bool(value)
    raise MoetapError(f"attribute {item.name} of {where} is no {item.dtype}: {value!r:.80}")


def _text(value: Any) -> Any:
    return value.decode("utf-8") if isinstance(value, bytes) else value


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn whatever a foreign or damaged file provokes into one line that starts with the path."""
    try:
        yield
    except MoetapError as error:
        raise MoetapError(f"{path}: {error}") from None
    except PermissionError as error:
        raise MoetapError(f"{path}: cannot be read: {error.strerror}") from error
    except (
        OSError,
        KeyError,
        RuntimeError,
        ValueError,
        TypeError,
        ArithmeticError,
        MemoryError,
    ) as error:
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        raise MoetapError(
            f"{path}: damaged or truncated ({cause}); get a good copy, or record it again"
        ) from error
