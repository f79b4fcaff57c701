"""The command line: one module per verb, each of which parses, calls and prints.

Knows the verbs and how errors become exit codes: 0 done, 1 failed, 2 used wrongly. Imports nothing
heavy, so that `moetap --help` answers at once; the verbs import what they need when they run.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from moetap._version import __version__
from moetap.cli import (
    analyze,
    capture,
    export,
    formats,
    import_,
    info,
    ledger,
    probe,
    repack,
    replay,
    verify,
)
from moetap.errors import MoetapError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="moetap",
        description="Record which experts an MLX Mixture-of-Experts model selects, "
        "and find out what concurrent streams would share.",
    )
    parser.add_argument("--version", action="version", version=f"moetap {__version__}")
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for verb in (
        capture,
        info,
        analyze,
        ledger,
        probe,
        replay,
        export,
        import_,
        formats,
        repack,
        verify,
    ):
        verb.add_parser(verbs)
    args = parser.parse_args(argv)
    # Python leaves these None where the shell closed them (moetap ... >&-).
    nowhere = open(os.devnull, "w")  # noqa: SIM115, as long-lived as the process
    sys.stdout, sys.stderr = sys.stdout or nowhere, sys.stderr or nowhere
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except MoetapError as error:
        from moetap.report.console import visible

        # It may hold a name from a file.
        print(f"moetap: error: {visible(str(error), keep=chr(10))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("moetap: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader (head, less) has gone.
        _discard_output()
        return 0
    except OSError as error:
        # What verbs open themselves is reported by them; this is standard output on a full disk.
        print(f"moetap: error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1


def _discard_output() -> None:
    """Python flushes standard output at exit, which would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
