"""Resident or streamed, and with how many slots: what the ledger says about one machine.

Knows how the ledger's sum becomes a decision and the line that explains it. Refuses to know MLX and
where sizes come from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

from moetap.analysis.ledger import Ledger, Tier, ledger, trace_sizes
from moetap.errors import MoetapError, UsageError
from moetap.trace import ModelInfo

_UNITS = {"": 10**9, "GB": 10**9, "MB": 10**6, "GIB": 2**30, "MIB": 2**20}


@dataclass(frozen=True)
class Choice:
    """slots: C, None for a resident run. why: one line for people."""

    slots: int | None
    why: str


def choose(
    info: ModelInfo,
    tier: Tier,
    context: int,
    *,
    stream: bool = False,
    slots: int | None = None,
    memory_bytes: int | None = None,
    resident: bool = False,
) -> Choice:
    """Decide how to run one stream of at most `context` tokens on a machine.

    Without an option: resident if the ledger says that it fits, else streamed. stream: streamed in
    any case. slots: with that C. memory_bytes: with what fits into that. resident: or not at all.

    Raises:
        UsageError: options that contradict each other; a budget below resident weights and k slots.
        MoetapError: the machine is too small for what is asked.
    """
    if resident and (stream or slots is not None or memory_bytes is not None):
        raise UsageError(
            "--resident does not go with the options of streaming: --stream, --slots, --memory, "
            "--cold, --policy, --experts"
        )
    if slots is not None and memory_bytes is not None:
        raise UsageError("--slots fixes the number of slots, --memory works it out; choose one")
    sizes = trace_sizes(info)
    table = ledger(sizes, [tier], [1], context)
    least, most = sizes.top_k, sizes.n_experts
    everything = _gb(_total(table, most))
    if memory_bytes is not None:
        fits = [c for c in range(least, most + 1) if _total(table, c) <= memory_bytes]
        if not fits:
            raise UsageError(
                f"--memory {_mb(memory_bytes)}: {info.id} needs {_mb(_total(table, least))} with "
                f"{least} slots a layer, the fewest that hold a token's experts"
            )
        if fits[-1] == most and not stream:
            return Choice(None, f"resident: {everything} of the {_gb(memory_bytes)} given")
        return _streamed(table, fits[-1], f"fits the {_gb(memory_bytes)} given")
    line = table.line(tier, most, 1)
    mac = f"{tier.ram_gib} GiB of memory"
    if slots is not None:
        return _streamed(table, slots, "as asked") if least <= slots <= most else Choice(slots, "")
    if resident or (line.verdict == "fits" and not stream):
        if line.verdict == "does not fit":
            raise MoetapError(
                f"{info.id} needs {everything} and does not fit {mac}, "
                f"{_gb(_short(table, tier, most))} too much; leave out --resident to stream its "
                "experts"
            )
        return Choice(None, f"resident: {everything} {_fitting(line.verdict)} {mac}")
    largest = min(table.largest_slots(tier, 1).values())
    if largest < least:
        raise MoetapError(
            f"{info.id} does not fit {mac} even with {least} slots a layer: it needs "
            f"{_gb(_total(table, least))}, {_gb(_short(table, tier, least))} too much"
        )
    reason = f"the most that fit {mac}"
    return _streamed(table, largest, reason if stream else f"{reason}, all would need {everything}")


def parse_memory(text: str) -> int:
    """Bytes of "6GB", "5.5 GiB", "800MB" or "6" (GB of 10^9 bytes). UsageError if it is none."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text, re.I)
    if found and found[2].upper() in _UNITS:
        return int(Decimal(found[1]) * _UNITS[found[2].upper()])
    raise UsageError(f"--memory {text}: not a size like 6GB or 5.5GiB")


def _streamed(table: Ledger, slots: int, reason: str) -> Choice:
    experts = table.sizes.n_experts
    return Choice(
        slots,
        f"streaming: {slots} of {experts} expert slots a layer ({reason}), "
        f"{_gb(_total(table, slots))} in all",
    )


def _fitting(verdict: str) -> str:
    return "fits" if verdict == "fits" else "may or may not fit, by macOS release,"


def _total(table: Ledger, slots: int) -> int:
    return table.terms(slots, 1).total_bytes


def _short(table: Ledger, tier: Tier, slots: int) -> int:
    """Bytes that are missing under the kindest rule."""
    return -max(net.net_bytes for net in table.line(tier, slots, 1).nets)


def _mb(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:,.1f} MB"


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
