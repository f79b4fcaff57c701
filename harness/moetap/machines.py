"""How fast Macs read from their SSD: the bundled table, and what a user may give in its place.

Knows the table's format and how a bandwidth is written. Refuses to know what it is used for
(`moetap.analysis.timing`) and to measure one (`moetap.capture.probe`).
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetap._data import data_dir
from moetap.errors import MoetapError, UsageError

GB = 1e9
MAX_GB_PER_S = 1000.0
"""More than this is no SSD but a number in another unit (MB/s)."""


@dataclass(frozen=True)
class Ssd:
    """A range of read bandwidths, bytes per second. low_bps = high_bps where one figure is known.

    source: where it comes from, in words fit for a table.
    """

    low_bps: float
    high_bps: float
    source: str


@dataclass(frozen=True)
class Machine:
    """One row of the table. name: for the command line; machine: in words."""

    name: str
    machine: str
    low_bps: float
    high_bps: float
    how_read: str
    source: str

    @property
    def ssd(self) -> Ssd:
        """Its bandwidth."""
        return Ssd(self.low_bps, self.high_bps, f"{self.machine}, {self.how_read}: {self.source}")


def load_machines() -> tuple[Machine, ...]:
    """Return the bundled table.

    Raises:
        MoetapError: the table is missing or malformed.
    """
    return read_machines(data_dir("models") / "machines.toml")


def read_machines(path: Path) -> tuple[Machine, ...]:
    """Return the table in `path`, as `load_machines` does for the bundled one."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["ssd"]
        machines = tuple(_machine(row) for row in rows)
    except OSError as error:
        raise MoetapError(f"{path}: cannot read: {error.strerror}; reinstall moetap") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MoetapError(f"{path}: malformed table of machines: {error}") from error
    for known_as, count in Counter(name for m in machines for name in _names(m)).items():
        if count > 1:
            raise MoetapError(f"{path}: {known_as!r} names two machines")
    return machines


def find_machine(name: str) -> Machine:
    """Return the machine called `name` (or its description); case and punctuation do not count.

    Raises:
        UsageError: there is none; lists the names.
    """
    machines = load_machines()
    for machine in machines:
        if _plain(name) in _names(machine):
            return machine
    known = ", ".join(machine.name for machine in machines)
    raise UsageError(f"no machine {name!r} in the table of SSDs; it has {known}")


def parse_ssd(text: str) -> Ssd:
    """Return the bandwidth that `text` gives: "3.4" or "2.5-3.1" in GB/s (10^9), or a machine.

    Raises:
        UsageError: neither; says what would do.
    """
    number = r"\d+(?:\.\d*)?|\.\d+"
    found = re.fullmatch(rf"\s*({number})(?:\s*-\s*({number}))?\s*(?:gb/s)?\s*", text, re.I)
    if found:
        low, high = float(found[1]), float(found[2] or found[1])
        if not 0 < low <= high <= MAX_GB_PER_S:
            raise UsageError(
                f"SSD bandwidth {text!r}: give GB/s (10^9 bytes per second) above 0 and up to "
                f"{MAX_GB_PER_S:g}, the lower figure of a range first"
            )
        return Ssd(low * GB, high * GB, "as given")
    try:
        return find_machine(text).ssd
    except UsageError as error:
        raise UsageError(
            f"SSD bandwidth {text!r} is neither a number in GB/s, nor a range like 2.5-3.1: {error}"
        ) from None


def _machine(row: dict[str, Any]) -> Machine:
    texts = [row[key] for key in ("name", "machine", "how_read", "source")]
    if len(row) != 5 or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(
            f"row {row['name']!r} must have name, machine, how_read, source (texts) and gb_per_s"
        )
    low, high = (float(gb) for gb in row["gb_per_s"])
    if not 0 < low <= high <= MAX_GB_PER_S:
        raise ValueError(f"row {row['name']!r} has gb_per_s {low:g} to {high:g}")
    name, machine, how_read, source = texts
    return Machine(name, machine, low * GB, high * GB, how_read, source)


def _names(machine: Machine) -> set[str]:
    return {_plain(machine.name), _plain(machine.machine)}


def _plain(text: str) -> str:
    """Letters and digits only, in lower case."""
    return re.sub(r"[^a-z0-9]+", "", text.lower())
