"""The trace file: reading it, and writing it so that a kill at any moment loses at most one stream.

Knows the HDF5 layout (`docs/FORMAT.md` is the normative text) and is the only part of moetap that
does. Refuses to know
where routing comes from or what is computed from it: it takes and returns the value types of
`moetap.trace`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moetap.store.reader import read
    from moetap.store.writer import TraceWriter, check_target

__all__ = ["TraceWriter", "check_target", "read"]

# Loaded at first use (PEP 562): the command line imports this package, h5py takes longer to
# import than `--help` may take, and the writer needs fcntl, which analysis on Windows lacks.
_LAZY = {
    "TraceWriter": "moetap.store.writer",
    "check_target": "moetap.store.writer",
    "read": "moetap.store.reader",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moetap.store' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
