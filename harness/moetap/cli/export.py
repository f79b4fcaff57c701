"""`moetap export`: a trace as another tool's file.

Knows the command line of the verb, and says what the file does not hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from moetap._hdf5 import is_hdf5
from moetap.errors import MoetapError, UsageError

if TYPE_CHECKING:
    from moetap.formats.base import Format, Options
    from moetap.trace import Trace

MOST_LAYERS = 10_000
"""More than any model has; a slip with more would ask for terabytes."""


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser(
        "export",
        help="write a trace in another tool's format",
        description="Write a trace in another tool's format and say what that format cannot hold. "
        "`moetap formats` lists them. Formats of one stream a file make a folder when the trace "
        "has several.",
    )
    parser.add_argument("trace", type=Path, help="trace file written by moetap")
    parser.add_argument("--to", required=True, metavar="FORMAT", help="see moetap formats")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="OUT")
    parser.add_argument("--force", action="store_true", help="overwrite OUT")
    parser.add_argument("--stream", metavar="ID", help="only the stream of this prompt id")
    parser.add_argument("--dtype", help="integer type of the ids (npz)")
    parser.add_argument("--missing", type=int, metavar="N", help="id for none: 65535 or -1 (npz)")
    parser.add_argument(
        "--rows",
        choices=("decode", "prefill", "all"),
        help="rows to write (default: decode; request and count formats)",
    )
    parser.add_argument(
        "--scope", choices=("global", "layer"), help="one file, or one per layer (libcachesim)"
    )
    parser.add_argument("--lanes", type=int, metavar="B", help="the first B streams (per-agent)")
    parser.add_argument(
        "--hidden-layers", type=int, metavar="N", help="decoder layers, dense ones included"
    )
    parser.add_argument("--start-len", type=int, metavar="P", help="rows from position P (sglang)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export. Returns the exit code."""
    from moetap import formats
    from moetap.formats.base import Options
    from moetap.store import read

    found = formats.get(args.to)
    if found.direction == "import":
        raise UsageError(f"{args.to} can only be imported")
    options = Options(**given(args, found.write_options, args.to))
    if options.hidden_layers is not None and not 0 < options.hidden_layers <= MOST_LAYERS:
        raise UsageError(f"--hidden-layers must be from 1 to {MOST_LAYERS:,}")
    if is_hdf5(args.output):  # also with --force: a slip must not cost the trace
        raise UsageError(f"{args.output}: is an HDF5 file, maybe a trace; choose another output")
    trace = read(args.trace)
    check_output(args.output, args.force)
    written, lost = _write(found, trace, args.output, options, args.force)
    print(f"wrote {', '.join(map(str, written))} ({args.to})")
    if args.stream is not None and len(trace.streams) > 1:
        lost = [*lost, f"{len(trace.streams) - 1} other streams"]
    for part in lost:
        print(f"not kept: {part}")
    return 0


def _write(
    found: Format, trace: Trace, output: Path, options: Options, force: bool
) -> tuple[list[Path], list[str]]:
    """All files of the export or none: they are written beside the output, then moved there.

    Returns the files (a folder counts as one), and what they do not hold.
    """
    try:
        with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as name:
            staged = Path(name) / output.name
            try:
                lost = found.write(trace, staged, options)
            except MoetapError as error:
                # The user knows the place where the file should be, not this one.
                text = str(error).replace(str(staged), str(output))
                raise type(error)(text.replace(f"{name}/", f"{output.parent}/")) from error
            # The output itself last: it is the sign that all is there.
            parts = sorted(Path(name).iterdir(), key=lambda part: part == staged)
            written = [output.parent / part.name for part in parts]
            for part, path in zip(parts, written, strict=True):
                check_output(path, force)
                if path.exists() and part.is_dir() != path.is_dir():
                    made, there = ("folder", "file") if part.is_dir() else ("file", "folder")
                    raise UsageError(
                        f"{path}: is a {there}, the export makes a {made}; choose another output"
                    )
            for part, path in zip(parts, written, strict=True):
                part.replace(path)
    except OSError as error:
        raise MoetapError(f"{output}: cannot be written ({error.strerror or error})") from error
    return written[::-1], lost


def given(args: argparse.Namespace, allowed: tuple[str, ...], name: str) -> dict[str, Any]:
    """The options that were given; one that the format has no use for is refused."""
    from dataclasses import fields

    from moetap.formats.base import Options

    every = {f.name: getattr(args, f.name, None) for f in fields(Options)}
    said = {key: value for key, value in every.items() if value is not None}
    for key in said:
        if key not in allowed:
            raise UsageError(f"{name} has no use for --{key.replace('_', '-')}")
    return said


def check_output(path: Path, force: bool) -> None:
    """Refuse an output that is in the way, before the work."""
    if not path.parent.is_dir():
        raise UsageError(f"{path}: folder {path.parent} does not exist; make it first")
    if path.is_dir():
        # Files of another export among those of this one would be read as its streams.
        if any(path.iterdir()):
            raise UsageError(f"{path}: is a folder with files in it; empty it, or choose another")
    elif path.exists() and not path.is_file():
        raise UsageError(f"{path}: is no regular file; choose another output")
    elif path.exists() and not force:
        raise UsageError(f"{path}: already exists; --force overwrites it")
