"""Other tools' files: one module a format, one protocol, third parties through entry points.

Knows which formats there are and how one is found by name. Refuses to know HDF5, MLX and the
command line: a format converts between its files and a `Trace`.

A plug-in is an entry point of the group `moetap.formats` whose name is the format's name and whose
value is an object with the protocol `Format` of `moetap.formats.base`. It may not shadow a
built-in: a built-in's name always means the built-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from moetap.errors import MoetapError, UsageError

if TYPE_CHECKING:
    from moetap.formats.base import Format

GROUP = "moetap.formats"

# Name -> module, in the order in which they are listed. Each module has one object, FORMAT.
BUILT_IN = {
    "npz": "npz",
    "route-trace": "route_trace",
    "vllm": "vllm",
    "sglang": "sglang",
    "sglang-stat": "sglang_stat",
    "mblt": "mblt",
    "streamlx": "streamlx",
    "colibri": "colibri",
    "mer": "mer",
    "lattice": "lattice",
    "moe-policylang": "moe_policylang",
    "libcachesim": "libcachesim",
    "libcachesim-csv": "libcachesim_csv",
    "moe-infinity": "moe_infinity",
    "eplb": "eplb",
    "imatrix": "imatrix",
    "per-agent": "per_agent",
    "parquet": "parquet",
}


def names() -> list[str]:
    """Names that `get` knows, built-ins first."""
    return [*BUILT_IN, *(point.name for point in _plug_ins() if point.name not in BUILT_IN)]


def shadowing() -> list[str]:
    """Plug-ins that are ignored because a built-in has their name, as "name (module)"."""
    return [f"{point.name} ({point.value})" for point in _plug_ins() if point.name in BUILT_IN]


def get(name: str) -> Format:
    """The format of this name.

    Raises:
        UsageError: there is none.
        MoetapError: a plug-in cannot be loaded.
    """
    if name in BUILT_IN:
        found: Format = import_module(f"moetap.formats.{BUILT_IN[name]}").FORMAT
        return found
    for point in _plug_ins():
        if point.name == name:
            return _load(point)
    close = get_close_matches(name, names(), 1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise UsageError(f"no format is called {name!r}; {hint}moetap formats lists them")


def _load(point: EntryPoint) -> Format:
    from moetap.formats.base import Format

    try:
        found = point.load()
    except Exception as error:  # whatever a stranger's module raises when it is imported
        raise MoetapError(
            f"format {point.name} ({point.value}) cannot be loaded: {error!r:.200}"
        ) from error
    if not isinstance(found, Format):
        raise MoetapError(f"format {point.name} ({point.value}) lacks a part of the protocol")
    return found


def _plug_ins() -> Iterator[EntryPoint]:
    yield from sorted(entry_points(group=GROUP), key=lambda point: point.name)
