"""Output files that are there whole or not at all.

Knows paths. Refuses to know what is written.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moetap.errors import MoetapError, UsageError


def output_path(path: str | Path, name_in_folder: str = "") -> Path:
    """Check that an output file can be made at `path`, before the work that fills it.

    name_in_folder: file name to use if `path` is a folder; without it a folder is refused.

    Raises:
        UsageError: the folder does not exist, or a file is wanted and `path` is a folder.
    """
    target = Path(path)
    if target.is_dir():
        if not name_in_folder:
            raise UsageError(f"{target} is a folder; name a file in it")
        return target / name_in_folder
    if not target.parent.is_dir():
        raise UsageError(f"{target}: folder {target.parent} does not exist; make it first")
    return target


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file in one step: a reader, or a crash, never meets half of it.

    Raises:
        MoetapError: the file cannot be written.
    """
    temporary = ""
    try:
        # In the same folder, since a rename is only atomic within one file system.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            file.write(text)
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
