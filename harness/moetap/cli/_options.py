"""Values that several verbs take from the command line.

Knows how a list, a size and the machine at hand are given. Knows no verb.
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING

from moetap.errors import UsageError

if TYPE_CHECKING:
    from moetap.analysis.ledger import Device, Headroom


MOST = {"--tier": 10**5}
"""The largest number that makes sense for an option; 10^9 for the others."""

MOST_GB = 1000


def integers(option: str, text: str) -> list[int]:
    """Parse "1,2,4"."""
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"{option} {text}: not a list like 8,16,24") from None
    if min(values) < 1:
        raise UsageError(f"{option} {text}: each must be at least 1")
    most = MOST.get(option, 10**9)
    if max(values) > most:
        raise UsageError(f"{option} {text}: at most {most:,}")
    return values


def one_integer(option: str, text: str, what: str) -> int:
    """Parse "8192"."""
    values = integers(option, text)
    if len(values) != 1:
        raise UsageError(f"{option} {text}: one number of {what}")
    return values[0]


def gigabytes(option: str, text: str) -> int:
    """Parse GB of 10^9 bytes, exactly."""
    try:
        value = Decimal(text)
        if not value.is_finite() or value < 0:
            raise InvalidOperation
    except InvalidOperation:
        raise UsageError(f"{option} {text}: not a size in GB like 0.5") from None
    if value > MOST_GB:
        raise UsageError(f"{option} {text}: at most {MOST_GB:,} GB")
    return int(value * 10**9)


def headroom(text: str | None) -> Headroom:
    """Parse --headroom; the default without it."""
    from fractions import Fraction

    from moetap.analysis.ledger import Headroom

    return Headroom() if text is None else Headroom(gigabytes("--headroom", text), Fraction(0))


def this_mac() -> Device | None:
    """The machine at hand, if it is a Mac with MLX."""
    try:
        from moetap.capture.geometry import this_mac as ask
    except ImportError:
        return None
    return ask()
