"""`moetap probe`: how fast this disk reads expert-sized blocks that are not cached.

Knows the command line of the verb.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser(
        "probe",
        help="measure cold reads of expert-sized blocks on this disk",
        description="Read random blocks of a file at queue depths 1, 4 and 16 past the page cache. "
        "Nothing is written. Where cold reads cannot be had it says so.",
    )
    parser.add_argument(
        "path",
        type=Path,
        metavar="FILE|DIR",
        help="a large file on the disk to measure, or a model folder",
    )
    parser.add_argument(
        "--block",
        type=int,
        metavar="BYTES",
        help="block size (default: one expert of the model folder, else 1769472, one expert of "
        "Qwen3.6-35B-A3B at 4 bits)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=3.0,
        metavar="S",
        help="time for each queue depth (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure and print. Returns the exit code."""
    from moetap.capture.probe import probe
    from moetap.report.probe_table import print_probe, probe_json

    result = probe(args.path, args.block, seconds=args.seconds)
    if args.json:
        print(probe_json(result))
    else:
        print_probe(result)
    return 0
