"""Output files that are there whole or not at all.

Knows paths. Refuses to know what is written.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moetap._hdf5 import is_hdf5
from moetap.errors import MoetapError, UsageError


def output_path(path: str | Path) -> Path:
    """Check that an output file can be made at `path`, before the work that fills it.

    Raises:
        UsageError: its folder does not exist; `path` is a folder, or something else that must not
            be replaced by a file: a device, or a trace.
    """
    target = Path(path).resolve()  # what a link points to is replaced, not the link
    if target.is_dir():
        raise UsageError(f"{target} is a folder; name a file in it")
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is a device or pipe; name a file")
    if target.is_file() and is_hdf5(target):
        raise UsageError(f"{target} is an HDF5 file, maybe a trace; name another file")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: folder {target.parent} does not exist; make it first")
    return target


def check_outputs(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Refuse outputs that would replace an input or each other.

    Raises:
        UsageError: two of the paths are the same file.
    """
    seen = {path.resolve() for path in inputs}
    for output in outputs:
        if output in seen:
            raise UsageError(f"{output} is named twice, or is an input; name another file")
        seen.add(output)


def output_folder(path: str | Path) -> Path:
    """Make the folder `path` if it is not there; not the ones above it.

    Raises:
        UsageError: it cannot be made, or is a file.
    """
    folder = Path(path)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{folder} is a file; name a folder") from None
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made ({error.strerror or error})") from error
    return folder


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, as `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: a reader, or a crash, never meets half of it.

    Raises:
        MoetapError: the file cannot be written.
    """
    temporary = ""
    try:
        # In the same folder, since a rename is only atomic within one file system.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise MoetapError(f"{path}: cannot be written ({error.strerror or error})") from error


def _umask() -> int:
    """The process's umask. mkstemp makes files for the owner only; a report is an ordinary file."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
