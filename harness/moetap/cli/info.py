"""`moetap info`: what a trace file holds and how it was made."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser("info", help="show what a trace holds and how it was made")
    parser.add_argument("trace", type=Path, help="trace file written by moetap capture")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    from moetap.report.info import print_info
    from moetap.store import read

    print_info(read(args.trace), args.trace)
    return 0
