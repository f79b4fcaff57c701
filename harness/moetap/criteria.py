"""The criteria of the verdict, fixed in a file before a trace is looked at.

Knows the format of a criteria file and which values make sense. Refuses to know traces and to judge
(`moetap.analysis.verdict`). The text of the file and its sha256 go into every report.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetap.errors import UsageError

DEFAULT = Path(__file__).with_name("criteria.toml")

CLOSE, RESTRICT = "close", "restrict"

_SECTIONS = {"io_reduction": "at_least", "overflow": "at_most", "ledger": "net_at_least_gb"}


@dataclass(frozen=True)
class Criterion:
    """A threshold, and what follows if it is not met: CLOSE or RESTRICT (to the Macs that pass)."""

    threshold: float
    otherwise: str


@dataclass(frozen=True)
class Criteria:
    """lanes: B. tier_gib: memory of the Mac that the question is about, GiB.

    io_reduction: at least this share of a token's expert I/O is saved. overflow: at most this share
    of (layer, step) pairs. ledger: at least so many GB are left. name, text, sha256: of the file.
    """

    lanes: int
    tier_gib: int
    io_reduction: Criterion
    overflow: Criterion
    ledger: Criterion
    name: str
    text: str
    sha256: str

    @property
    def shipped(self) -> bool:
        """These are the criteria that moetap comes with, fixed before any trace was looked at."""
        return self.sha256 == hashlib.sha256(DEFAULT.read_bytes()).hexdigest()


def read_criteria(path: Path = DEFAULT) -> Criteria:
    """Return the criteria in `path`, by default the ones that moetap comes with.

    Raises:
        UsageError: the file cannot be read, a key is unknown or missing, a value makes no sense.
    """
    try:
        raw = path.read_bytes()
        text = raw.decode("utf-8")
        content = tomllib.loads(text)
    except OSError as error:
        raise UsageError(f"{path}: cannot read the criteria: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise UsageError(f"{path}: not a TOML file: {error}") from error
    try:
        _check_keys(content, {"lanes", "tier_gib", *_SECTIONS}, "")
        criteria = {name: _criterion(name, content[name]) for name in _SECTIONS}
        return Criteria(
            lanes=_whole("lanes", content["lanes"], 2),
            tier_gib=_whole("tier_gib", content["tier_gib"], 1),
            **criteria,
            name=path.name,
            text=text,
            sha256=hashlib.sha256(raw).hexdigest(),
        )
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None


def _criterion(name: str, section: Any) -> Criterion:
    if not isinstance(section, dict):
        raise ValueError(f"{name} must be a section, [{name}]")
    key = _SECTIONS[name]
    _check_keys(section, {key, "otherwise"}, f" in [{name}]")
    value, where = section[key], f"{key} in [{name}]"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{where} is {value!r}, must be a number")
    if key == "net_at_least_gb":
        if abs(value) > 10_000:
            raise ValueError(f"{where} is {value:g}, must be GB between -10000 and 10000")
    elif not 0 <= value <= 1:
        raise ValueError(f"{where} is {value:g}, must be a share between 0 and 1 (25 % is 0.25)")
    if section["otherwise"] not in (CLOSE, RESTRICT):
        raise ValueError(
            f'otherwise in [{name}] is {section["otherwise"]!r}, must be "close" or "restrict"'
        )
    return Criterion(float(value), section["otherwise"])


def _whole(key: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10_000:
        raise ValueError(f"{key} is {value!r}, must be a whole number between {least} and 10000")
    return value


def _check_keys(content: dict[str, Any], expected: set[str], where: str) -> None:
    unknown, missing = sorted(set(content) - expected), sorted(expected - set(content))
    if unknown:
        known = ", ".join(sorted(expected))
        raise ValueError(f"unknown key {unknown[0]!r}{where}; it may have {known}")
    if missing:
        raise ValueError(f"key {missing[0]!r}{where} is missing")
