"""`moetap analyze`: every table, and the verdict on criteria fixed beforehand.

Knows the command line of the verb. Reads, computes and shows through `moetap.store`,
`moetap.analysis` and `moetap.report`, which are imported when the verb runs: `moetap --help` must
not wait for NumPy.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetap.cli._options import headroom, integers, one_integer, this_mac
from moetap.errors import UsageError

if TYPE_CHECKING:
    from moetap.analysis.study import Options, Study

PARTS = ("union", "cache", "measured", "overflow", "ledger", "time", "locality", "verdict")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "analyze",
        help="union, expert I/O per token, overflow, RAM ledger, locality; the verdict last",
        description="Print what B streams that decode together would share: the union of their "
        "experts, expert I/O per token of a cold step and with a cache of C slots per layer, how "
        "often C is exceeded, whether it fits a Mac; then the verdict on criteria fixed "
        "beforehand.",
    )
    parser.add_argument(
        "traces", nargs="+", metavar="TRACE", help="trace file; several of one model are pooled"
    )
    add = parser.add_argument
    add("-B", dest="sizes", metavar="N,N", help="lanes (default: 1,2,3,4; 1 is always there)")
    add(
        "-C",
        dest="slots",
        metavar="N,N",
        help="expert slots per layer (default: 64,128,256, of few experts a quarter, half and "
        "all; the defaults of the Macs are always there)",
    )
    add(
        "--context",
        default="8192",
        metavar="T",
        help="tokens of each lane in the RAM ledger (default: %(default)s)",
    )
    add(
        "--tier",
        default="8,16,24,32",
        metavar="N,N",
        help="Macs, in GiB of memory (default: %(default)s; the one of the criteria is always "
        "there)",
    )
    add(
        "--headroom",
        metavar="GB",
        help="memory left to the system, in GB of 10^9 bytes (default: 2.5 GB and 10 %% of memory)",
    )
    add(
        "--ssd",
        metavar="GB/S",
        help="SSD bandwidth: 3.4, 2.5-3.1, or a Mac such as m1-air; moetap probe measures it",
    )
    add(
        "--criteria",
        type=Path,
        metavar="FILE",
        help="criteria of the verdict (default: the ones that moetap comes with)",
    )
    add("--only", metavar="PART,PART", help=f"some parts only: {', '.join(PARTS)}")
    add(
        "--groups",
        type=int,
        default=1000,
        metavar="N",
        help="groups of B streams to sample for the quantiles of the union (default: %(default)s); "
        "at most 100 of them are sent through caches and windows",
    )
    add("--seed", type=int, default=0, help="seed of the samples (default: %(default)s)")
    add("--by-layer", action="store_true", help="show each MoE layer instead of depth groups")
    add("--keep-loops", action="store_true", help="count the rows of streams that only repeat")
    add(
        "--by",
        choices=("model",),
        help="analyse the traces of each model apart and compare the models",
    )
    add("--report", metavar="FILE", help="also write one HTML file with tables and plots")
    add("--json", metavar="FILE", help="also write everything as JSON")
    add("--csv", metavar="DIR", help="also write a CSV file per table")
    add("--plots", metavar="DIR", help="also write the plots as PNG and SVG, light and dark")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Analyse the traces and print the tables. Returns the exit code."""
    from moetap.analysis.study import by_model, study
    from moetap.report.files import check_outputs, output_folder, output_path, write_text
    from moetap.report.study import print_studies
    from moetap.report.summary_files import studies_json
    from moetap.store import read

    options = _options(args)
    # Before the work, so that a mistyped path costs no time.
    json_path = output_path(args.json) if args.json else None
    html_path = output_path(args.report) if args.report else None
    csv_folder = output_folder(args.csv) if args.csv else None
    plot_folder = output_folder(args.plots) if args.plots else None
    criteria = [args.criteria] if args.criteria else []
    check_outputs([p for p in (json_path, html_path) if p], [*map(Path, args.traces), *criteria])
    traces = [read(path) for path in args.traces]
    pools = by_model(traces) if args.by else [traces]
    studies = [study(group, options) for group in pools]
    # Files first: printing ends early when the reader of a pipe has seen enough.
    if json_path:
        write_text(json_path, studies_json(studies))
    if csv_folder:
        _write_csv(csv_folder, studies, args.by_layer)
    if plot_folder:
        _write_plots(plot_folder, studies)
    if html_path:
        from moetap.report.html import report_html

        write_text(html_path, report_html(studies, args.by_layer))
    print_studies(studies, args.by_layer)
    return 0


def _options(args: argparse.Namespace) -> Options:
    """What is asked, checked before a trace is read."""
    from moetap.analysis.ledger import make_tier
    from moetap.analysis.study import Bandwidth, Options
    from moetap.criteria import DEFAULT, read_criteria
    from moetap.machines import parse_ssd

    criteria = read_criteria(args.criteria or DEFAULT)
    parts = args.only.split(",") if args.only is not None else PARTS
    for part in parts:
        if part not in PARTS:
            raise UsageError(f"--only {args.only}: no part {part!r}; there are {', '.join(PARTS)}")
    free, device = headroom(args.headroom), this_mac()
    sizes = sorted({*integers("--tier", args.tier), criteria.tier_gib})
    ssd = parse_ssd(args.ssd) if args.ssd is not None else None
    return Options(
        criteria=criteria,
        tiers=tuple(make_tier(gib, free, device) for gib in sizes),
        sizes=tuple(integers("-B", args.sizes)) if args.sizes is not None else None,
        capacities=tuple(integers("-C", args.slots)) if args.slots is not None else None,
        context=one_integer("--context", args.context, "tokens"),
        bandwidth=Bandwidth(ssd.low_bps, ssd.high_bps, ssd.source) if ssd else None,
        groups=args.groups,
        seed=args.seed,
        keep_loops=args.keep_loops,
        parts=frozenset(parts),
    )


def _write_csv(folder: Path, studies: list[Study], by_layer: bool) -> None:
    from moetap.report.files import output_folder, write_text
    from moetap.report.summary_files import csv_text, folder_name, study_csvs

    for one in studies:
        own = output_folder(folder / folder_name(one, studies))
        for name, text in study_csvs(one, by_layer).items():
            write_text(own / name, text)
    if len(studies) > 1:
        from moetap.report.comparison import comparison_lines

        lines = [
            line | {"verdicts": " / ".join(line["verdicts"])} for line in comparison_lines(studies)
        ]
        write_text(folder / "comparison.csv", csv_text(lines))


def _write_plots(folder: Path, studies: list[Study]) -> None:
    from moetap.report.files import output_folder, write_bytes
    from moetap.report.plots import plot_files
    from moetap.report.summary_files import folder_name

    for one in studies:
        own = output_folder(folder / folder_name(one, studies))
        for name, content in plot_files(one):
            write_bytes(own / name, content)
