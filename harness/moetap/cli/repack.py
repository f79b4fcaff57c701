"""`moetap repack`: copy a model's experts into a file that holds each in one piece.

Knows the command line of the verb.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser(
        "repack",
        help="copy a model's experts so that each is read in one piece when streaming",
        description="Write an expert-major copy of a model's routed experts, read it back and "
        "compare hashes. The model is not changed. Use it with moetap capture --experts FILE.",
    )
    parser.add_argument("model", metavar="DIR_OR_ID", help="model folder or Hugging Face id")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="such as model.experts"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Copy, verify, say what was done."""
    from moetap.capture.repack import repack
    from moetap.models import bundled_model

    name = str(bundled_model(args.model) or args.model)
    tty = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if tty:
            print(f"\r{done / total:4.0%}", end="", file=sys.stderr, flush=True)

    done = repack(name, args.output, args.force, progress)
    if tty:
        print("\r", end="", file=sys.stderr)
    print(
        f"{done.path}: {done.n_bytes / 1e9:.3f} GB of experts, verified, sha256 {done.sha256[:16]}"
    )
    print(f"next: moetap capture --model {args.model} --experts {done.path}")
    return 0
