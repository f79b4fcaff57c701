"""How an HDF5 file begins, for those that must not replace one and know nothing else of HDF5."""

from __future__ import annotations

from pathlib import Path

_SIGNATURE = b"\x89HDF\r\n\x1a\n"


def is_hdf5(path: Path) -> bool:
    """Whether the file begins as HDF5 does; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(_SIGNATURE)) == _SIGNATURE
    except OSError:
        return False
