"""What a probe of a disk found, on a terminal or in a pipe, and as JSON.

Knows units and what must be said beside a bandwidth: block size, queue depth, cold or warm, how it
was read. Refuses to know how that was done.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moetap.report.console import make_console

if TYPE_CHECKING:
    from moetap.capture.probe import Probe, Reading

_WARM = "Warm: some or all may have come from memory, so it is no bandwidth of the disk."


def print_probe(probe: Probe) -> None:
    """Print the table, what is not cold and why, and what to do with the figures."""
    console = make_console()
    readings = _readings(probe)
    console.print(Text(f"Reads of {probe.path}", style="bold"))
    for why in dict.fromkeys(reading.why_warm for reading in readings if not reading.cold):
        console.print(Text(f"cannot measure cold reads here: {why}", style="bold red"))
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("reads", no_wrap=True)
    for name in ("block\nbytes", "depth", "GB/s", "blocks", "seconds", "median\nms", "95 %\nms"):
        grid.add_column(name, justify="right", no_wrap=True)
    for name in ("pages", "method", "file system"):
        grid.add_column(name, no_wrap=True)
    for reading in readings:
        grid.add_row(*_cells(reading), probe.file_system or "unknown")
    console.print(grid)
    console.print(Padding(Text(_caption(probe), style="dim"), (0, 1)))
    found = probe.cold_range_bps
    if found:
        low, high = (round_gb(bps) for bps in found)
        span = low if low == high else f"{low}-{high}"
        console.print(Text(f"next: moetap analyze TRACE --ssd {span}"))


def probe_json(probe: Probe) -> str:
    """Everything, unrounded. Times in seconds, bandwidths in bytes per second."""
    content: dict[str, Any] = asdict(probe)
    content["random"] = [_plain(reading) for reading in probe.random]
    content["sequential"] = _plain(probe.sequential) if probe.sequential else None
    return json.dumps(content, indent=2)


def round_gb(bps: float) -> str:
    """GB/s in three digits, never in powers of ten."""
    gb = bps / 1e9
    return f"{gb:.2f}" if gb >= 0.1 else f"{gb:.2g}" if gb >= 1e-4 else "0.0001"


def _plain(reading: Reading) -> dict[str, Any]:
    return asdict(reading) | {"bandwidth_bps": reading.bandwidth_bps}


def _readings(probe: Probe) -> list[Reading]:
    return [*probe.random, *([probe.sequential] if probe.sequential else [])]


def _cells(reading: Reading) -> list[str]:
    return [
        reading.kind,
        f"{reading.block_bytes:,}",
        str(reading.depth),
        round_gb(reading.bandwidth_bps),
        f"{reading.blocks:,}",
        f"{reading.time_s:.2f}",
        f"{reading.median_s * 1e3:.2f}",
        f"{reading.p95_s * 1e3:.2f}",
        "cold" if reading.cold else "warm",
        reading.method,
    ]


def _caption(probe: Probe) -> str:
    files = f"{probe.n_files:,} files" if probe.n_files > 1 else "One file"
    said = [
        f"{files}, {probe.size_bytes / 1e9:,.2f} GB; GB = 10^9 bytes.",
        f"Block: {probe.block_source}.",
        "Depth: reads in flight. Median, 95 %: latency of one block.",
        "Cold: no page of a block was in the page cache before it was read, and no block is read "
        "twice.",
        "" if all(r.cold for r in _readings(probe)) else _WARM,
        "The drive's own cache, and that of a virtual machine's host, are out of sight.",
        *probe.notes,
    ]
    return " ".join(part for part in said if part)
