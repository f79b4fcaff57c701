"""moetap: record which experts a Mixture-of-Experts model selects, and find out what concurrent
streams would share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moetap._version import __version__

__all__ = ["MoetapError", "Stream", "Trace", "UsageError", "__version__", "read", "tap"]

if TYPE_CHECKING:
    from moetap.capture.tap import tap
    from moetap.errors import MoetapError, UsageError
    from moetap.store import read
    from moetap.trace import Stream, Trace

# Attribute -> module that defines it. Loaded at first use (PEP 562): mlx and numpy take longer to
# import than `moetap --help` may take to answer.
_LAZY = {
    "MoetapError": "moetap.errors",
    "UsageError": "moetap.errors",
    "Stream": "moetap.trace",
    "Trace": "moetap.trace",
    "read": "moetap.store",
    "tap": "moetap.capture.tap",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moetap' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
