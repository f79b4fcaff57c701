"""SGLang's expert-distribution dump of mode `stat`: how often each layer selected each expert.

Knows torch's zip files as far as this dump needs them, and reads them without torch and without
running what a pickle asks for: only tensors, dicts and numbers are built. There are no rows in such
a file, so it never becomes a trace.
"""

from __future__ import annotations

import collections
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError
from moetap.formats.base import Base, Counts, Options, refusing
from moetap.trace import Trace

_STORAGE = {
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "i2",
    "IntStorage": "i4",
    "LongStorage": "i8",
    "FloatStorage": "f4",
    "DoubleStorage": "f8",
}
_LIMIT = 2**31  # bytes of one member: a dump of counts is far smaller


class SglangStat(Base):
    name = "sglang-stat"
    direction = "import"
    summary = "SGLang expert distribution (.pt), counts only"
    read_options = ()
    not_kept = ("average utilisation",)

    def read(self, path: Path, options: Options) -> Trace:
        self.read_counts(path, options)  # a damaged file is the more important thing to say
        raise MoetapError(
            f"{path}: holds counts, no rows, so no trace can be made of it; "
            "write a table instead: -o counts.csv"
        )

    def read_counts(self, path: Path, options: Options) -> Counts:
        """The counts, summed over the recorded passes; layers that never routed are left out."""
        with refusing(path):
            found = _load(path)
            if not isinstance(found, dict):
                raise MoetapError("holds no dict")
            if "records" in found:
                raise MoetapError("is a detail dump (per_token or per_pass), not stat")
            counts = found.get("logical_count")
            if not isinstance(counts, np.ndarray):
                raise MoetapError("has no logical_count")
            if counts.ndim not in (2, 3) or counts.dtype.kind not in "iu" or not counts.size:
                raise MoetapError(
                    f"logical_count is {counts.dtype} of shape {counts.shape}, expected whole "
                    "numbers (passes, layers, experts)"
                )
            if counts.min() < 0:
                raise MoetapError("logical_count has negative counts")
            total = counts.astype(np.int64)
            if total.ndim == 3:
                total = total.sum(axis=0)
            ran = np.flatnonzero(total.any(axis=1))
            if not len(ran):
                raise MoetapError("all counts are zero: nothing was recorded")
            return Counts(ran.astype(np.int64), total[ran])


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        if file.read(2) == b"\x80\x02":
            raise MoetapError(
                "is a pickle without a zip, as torch.save wrote before version 1.6; load it with "
                "torch and save it again"
            )
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith("/data.pkl")]
        if len(names) != 1:
            raise MoetapError("is no file of torch.save (zip with data.pkl)")
        root = names[0].removesuffix("data.pkl")
        members = set(archive.namelist())

        def member(name: str) -> bytes:
            if archive.getinfo(name).file_size > _LIMIT:
                raise MoetapError(f"{name} is larger than any dump of counts")
            return archive.read(name)

        if f"{root}byteorder" in members and member(f"{root}byteorder") != b"little":
            raise MoetapError("was written on a big-endian machine")
        with archive.open(names[0]) as stream:
            if archive.getinfo(names[0]).file_size > _LIMIT:
                raise MoetapError("data.pkl is larger than any dump of counts")
            return _Reader(stream, lambda key: member(f"{root}data/{key}")).load()


class _Reader(pickle.Unpickler):
    """Builds nothing but tensors (as arrays), dicts and plain values."""

    def __init__(self, stream: Any, storage: Any) -> None:
        super().__init__(stream)
        self._storage = storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in _STORAGE:
            return _STORAGE[name]
        raise MoetapError(f"the pickle asks for {module}.{name}, which is not allowed here")

    def persistent_load(self, pid: Any) -> Any:
        kind, dtype, key, _, n = pid
        if kind != "storage" or dtype not in _STORAGE.values():
            raise MoetapError(f"unknown storage {pid!r:.60}")
        values = np.frombuffer(self._storage(str(key)), dtype=f"<{dtype}")
        if len(values) != n:
            raise MoetapError(f"storage {key} has {len(values)} values, expected {n}")
        return values


def _tensor(
    storage: NDArray[Any], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: Any
) -> NDArray[Any]:
    if not isinstance(storage, np.ndarray) or len(size) != len(stride) or len(size) > 8:
        raise MoetapError("a tensor without storage")
    numbers = (offset, *size, *stride)
    if not all(isinstance(i, int) and i >= 0 for i in numbers):
        raise MoetapError("a tensor with impossible shape or stride")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if 0 in size:
        return np.zeros(size, storage.dtype)
    if last >= len(storage):
        raise MoetapError("a tensor reaches beyond its storage")
    total = 1
    for n in size:
        total *= n
    if total > len(storage):
        raise MoetapError("a tensor that repeats its storage")
    bytes_ = [step * storage.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(storage[offset:], size, bytes_, writeable=False).copy()


FORMAT = SglangStat()
