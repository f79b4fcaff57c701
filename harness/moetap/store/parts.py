"""Where the finished streams of a capture lie until its trace file is closed.

Knows the folder `<trace>.parts/` and the names in it. Refuses to know what the files hold
(`reader`, `writer`) and how they get onto the disk (`disk`).

    00000000.h5   a trace without streams: which model, which settings, which run
    00000001.h5   a trace of the first stream appended, and so on; the names give the order
    *.tmp         unfinished; nobody reads them, the next writer deletes them
    lock          held by the one writer
"""

from __future__ import annotations

import re
from pathlib import Path

from moetap.errors import MoetapError

_PART = re.compile(r"\d{8}\.h5")


def folder(trace: Path) -> Path:
    """The folder of parts that belongs to the trace file `trace`, existing or not."""
    return trace.with_name(trace.name + ".parts")


def part_file(trace: Path, number: int) -> Path:
    """Where part `number` belongs; 0 is the one without a stream."""
    return folder(trace) / f"{number:08d}.h5"


def number_of(part: Path) -> int:
    """The number in a part's name."""
    return int(part.stem)


def listing(trace: Path) -> list[Path]:
    """The parts of `trace` in the order of appending. Other files in the folder are not ours."""
    return sorted(p for p in _entries(trace) if _PART.fullmatch(p.name))


def temporaries(trace: Path) -> list[Path]:
    """What a killed writer left unfinished."""
    return [p for p in _entries(trace) if p.suffix == ".tmp"]


def _entries(trace: Path) -> list[Path]:
    try:
        return list(folder(trace).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise MoetapError(f"{folder(trace)}: cannot be read: {error.strerror}") from error
