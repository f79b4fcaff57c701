"""`moetap replay`: the routing sent through expert caches under several policies.

Knows the command line of the verb. Reads, computes and shows through `moetap.store`,
`moetap.analysis` and `moetap.report`, which are imported when the verb runs.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from moetap.cli._options import integers
from moetap.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from moetap.analysis.replay_study import Options
    from moetap.trace import Trace


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    """Add the verb to the command line."""
    parser = subparsers.add_parser(
        "replay",
        help="misses of expert caches: LRU, LFU, Belady and others at any size, or every size",
        description="Send the recorded routing through expert caches and count what would be "
        "loaded: by policy and size, one cache per layer or one for all, cold and steady apart; or "
        "the miss-rate curve of LRU and Belady at every size in one pass.",
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="TRACE", help="trace file; several of one model are pooled")
    add(
        "--policy",
        metavar="NAME,NAME",
        help="default: lru,lfu,static,belady; --list names all, plug-ins included",
    )
    add("-C", dest="slots", metavar="N,N", help="expert slots per layer (default: as analyze)")
    add("--budget-gib", metavar="N,N", help="bytes of experts in GiB of 2^30, instead of slots")
    add("-B", dest="lanes", type=int, default=1, metavar="B", help="lanes that share the cache")
    add(
        "--scope",
        choices=("layer", "global"),
        default="layer",
        help="one cache per layer, or one over all layers of C x layers slots (default: layer)",
    )
    add(
        "--lookups",
        choices=("step", "sequential"),
        default="step",
        help="a step's experts as one set, or one after the other (default: step)",
    )
    add("--prefill", action="store_true", help="replay each prompt first, chunk by chunk")
    add("--curve", action="store_true", help="LRU and Belady at every size")
    add("--groups", type=int, default=100, metavar="N", help="groups to sample where B > 1")
    add("--seed", type=int, default=0, help="seed of the sample (default: %(default)s)")
    add("--by-layer", action="store_true", help="also show each MoE layer")
    add("--keep-loops", action="store_true", help="count the rows of streams that only repeat")
    add("--json", metavar="FILE", help="also write everything as JSON")
    add("--csv", metavar="FILE", help="also write everything as CSV")
    add("--plots", metavar="DIR", help="with --curve: also write the plot as PNG and SVG")
    add("--list", action=_ListPolicies, help="list the policies and stop")
    parser.set_defaults(run=run)


class _ListPolicies(argparse.Action):
    """Like --help: needs no trace."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from moetap.policies import names, shadowing

        print("\n".join(names()))
        for plug_in in shadowing():
            print(f"ignored, a built-in has this name: {plug_in}")
        parser.exit()


def run(args: argparse.Namespace) -> int:
    """Replay the traces and print the tables. Returns the exit code."""
    from moetap.report.files import output_folder, output_path
    from moetap.store import read

    options = _options(args)
    # Before the work, so that a mistyped path costs no time.
    json_path = output_path(args.json) if args.json else None
    csv_path = output_path(args.csv) if args.csv else None
    plot_folder = output_folder(args.plots) if args.plots else None
    traces = [read(path) for path in args.traces]
    if args.curve:
        _curve(args, traces, options, json_path, csv_path, plot_folder)
    else:
        _study(args, traces, options, json_path, csv_path)
    return 0


def _options(args: argparse.Namespace) -> Options:
    """What is asked, checked before a trace is read."""
    from moetap.analysis.replay_study import DEFAULT_POLICIES, Options
    from moetap.policies import get

    if args.curve:
        unused = (
            ("--policy", args.policy),
            ("--budget-gib", args.budget_gib),
            ("--by-layer", args.by_layer),
        )
        for option, given in unused:
            if given:
                raise UsageError(f"--curve is of LRU and Belady in slots; leave {option} out")
    elif args.plots:
        raise UsageError("--plots draws the curve; add --curve")
    policies = DEFAULT_POLICIES if args.policy is None else tuple(args.policy.split(","))
    for policy in policies if not args.curve else ():
        get(policy)
    return Options(
        policies=tuple(dict.fromkeys(policies)),
        slots=tuple(sorted(set(integers("-C", args.slots)))) if args.slots is not None else (),
        budgets=_budgets(args.budget_gib) if args.budget_gib is not None else (),
        b=args.lanes,
        scope=args.scope,
        rule=args.lookups,
        prefill=args.prefill,
        keep_loops=args.keep_loops,
        groups=args.groups,
        seed=args.seed,
    )


def _budgets(text: str) -> tuple[tuple[int, str], ...]:
    """Parse --budget-gib: bytes, exactly, and how they are called."""
    from decimal import Decimal, InvalidOperation

    found = []
    for part in text.split(","):
        try:
            n_bytes = Decimal(part) * 2**30
            if not n_bytes.is_finite() or not 1 <= n_bytes < 2**62:
                raise InvalidOperation
        except InvalidOperation:
            raise UsageError(f"--budget-gib {text}: not a list like 4,8") from None
        found.append((int(n_bytes), f"{part.strip()} GiB"))
    return tuple(found)


def _study(
    args: argparse.Namespace,
    traces: list[Trace],
    options: Options,
    json_path: Path | None,
    csv_path: Path | None,
) -> None:
    from dataclasses import replace

    from moetap.analysis.replay_study import replay_study
    from moetap.analysis.study import all_capacities
    from moetap.report.files import write_text
    from moetap.report.replay_files import replay_csv, replay_json
    from moetap.report.replay_table import print_replay

    if not options.slots and not options.budgets:
        options = replace(options, slots=all_capacities(None, traces[0].model, ()))
    study = replay_study(traces, options)
    print_replay(study, args.by_layer)
    if json_path:
        write_text(json_path, replay_json(study))
    if csv_path:
        write_text(csv_path, replay_csv(study))


def _curve(
    args: argparse.Namespace,
    traces: list[Trace],
    options: Options,
    json_path: Path | None,
    csv_path: Path | None,
    plot_folder: Path | None,
) -> None:
    from moetap.analysis.replay_study import curve
    from moetap.report.files import write_bytes, write_text
    from moetap.report.replay_files import curve_csv, curve_json
    from moetap.report.replay_table import chosen_capacities, print_curve

    found = curve(traces, options)
    print_curve(found, chosen_capacities(found, options.slots or None))
    if json_path:
        write_text(json_path, curve_json(found))
    if csv_path:
        write_text(csv_path, curve_csv(found))
    if plot_folder:
        from moetap.report.replay_plot import curve_files

        for name, content in curve_files(found):
            write_bytes(plot_folder / name, content)
