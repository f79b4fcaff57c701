"""`moetap formats`: the files that `export` writes and `import` reads.

Knows the command line of the verb.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb."""
    parser = verbs.add_parser("formats", help="list the formats of export and import")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a line per format."""
    from moetap import formats
    from moetap.errors import MoetapError

    for name in formats.names():
        try:
            found = formats.get(name)
        except MoetapError as error:
            print(f"{name:<16} -       {error}")
            continue
        print(f"{name:<16} {found.direction:<7} {found.summary}")
    for point in formats.shadowing():
        print(f"ignored: plug-in {point}, since a built-in has its name")
    return 0
