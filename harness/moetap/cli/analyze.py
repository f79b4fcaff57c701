"""`moetap analyze`: union, I/O per token.

Knows the command line of the verb. Reads, computes and shows through `moetap.store`,
`moetap.analysis` and `moetap.report`, which are imported when the verb runs: `moetap --help` must
not wait for NumPy.
"""

from __future__ import annotations

import argparse
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "analyze",
        help="union and expert I/O per token of B streams decoding together",
        description="Print how many distinct experts B streams select together at matched decode "
        "steps, and how much expert I/O per token that saves against B = 1 when nothing is cached.",
    )
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="trace file; several of one model are pooled"
    )
    parser.add_argument(
        "-B",
        dest="sizes",
        type=_sizes,
        metavar="N,N",
        help="lanes (default: 1,2,3,4; 1 is always there)",
    )
    parser.add_argument(
        "--groups",
        type=int,
        default=1000,
        metavar="N",
        help="groups to sample for the quantiles (default: %(default)s); means are exact",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the sample (default: %(default)s)"
    )
    parser.add_argument(
        "--by-layer", action="store_true", help="show each MoE layer instead of depth groups"
    )
    parser.add_argument(
        "--keep-loops", action="store_true", help="count the rows of streams that only repeat"
    )
    parser.add_argument("--json", metavar="FILE", help="also write everything as JSON")
    parser.add_argument(
        "--csv", metavar="PATH", help="also write the tables as CSV: a file, or a folder for it"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Analyse the traces and print the tables. Returns the exit code."""
    from moetap.analysis.pool import pool
    from moetap.analysis.unions import union_table
    from moetap.report.files import output_path, write_text
    from moetap.report.union_files import CSV_NAME, union_csv, union_json
    from moetap.report.union_table import print_union_table
    from moetap.store import read

    json_path = output_path(args.json) if args.json else None
    csv_path = output_path(args.csv, CSV_NAME) if args.csv else None
    streams = pool([read(path) for path in args.traces], keep_loops=args.keep_loops)
    table = union_table(streams, args.sizes, n_groups=args.groups, seed=args.seed)
    print_union_table(table, by_layer=args.by_layer)
    if json_path:
        write_text(json_path, union_json(table))
    if csv_path:
        write_text(csv_path, union_csv(table, by_layer=args.by_layer))
    return 0


def _sizes(text: str) -> tuple[int, ...]:
    """Parse "2,3,4"."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list like 2,3,4") from None
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError("a group has at least one stream")
    return sizes
