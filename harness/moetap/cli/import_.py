"""`moetap import`: another tool's file as a trace.

Knows the command line of the verb, joins the formats with the store, and says what the trace does
not hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetap.cli.export import MOST_LAYERS
from moetap.errors import UsageError

if TYPE_CHECKING:
    from moetap.formats.base import Counts
    from moetap.trace import Trace


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser(
        "import",
        help="make a trace of another tool's file",
        description="Make a trace of another tool's file and say what a trace cannot hold. "
        "`moetap formats` lists them.",
    )
    parser.add_argument("file", type=Path, help="file, or folder of files, to read")
    parser.add_argument(
        "--from", required=True, dest="source", metavar="FORMAT", help="see moetap formats"
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        type=Path,
        metavar="TRACE",
        help="trace to write (counts.csv where the file holds only counts)",
    )
    parser.add_argument("--force", action="store_true", help="overwrite TRACE")
    parser.add_argument("--model-id", metavar="ID", help="name of the model")
    parser.add_argument("--n-experts", type=int, metavar="E", help="routed experts per layer")
    parser.add_argument("--top-k", type=int, metavar="K", help="experts per token (sglang)")
    parser.add_argument("--hidden-layers", type=int, metavar="N", help="decoder layers (sglang)")
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="L",
        help="decoder layers that are MoE layers, such as 1-47 or 1,3,5",
    )
    parser.add_argument("--n-prompt", type=int, metavar="P", help="prompt tokens of the stream")
    parser.add_argument("--start-len", type=int, metavar="P", help="position of the first row")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Import. Returns the exit code."""
    from moetap import formats
    from moetap.cli.export import check_output, given
    from moetap.formats.base import CountsFormat, Options

    found = formats.get(args.source)
    if found.direction == "export":
        raise UsageError(f"{args.source} can only be exported")
    for name in ("n_experts", "top_k", "hidden_layers", "n_prompt"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if args.start_len is not None and args.start_len < 0:
        raise UsageError("--start-len must not be negative")
    options = Options(**given(args, found.read_options, args.source))
    check_output(args.output, args.force)
    if isinstance(found, CountsFormat) and args.output.suffix == ".csv":
        trace = None
        _write_counts(args.output, found.read_counts(args.file, options))
    else:
        trace = found.read(args.file, options)
        # A plug-in need not know of this.
        _write_trace(args.output, trace, args.force, getattr(found, "open_end", False))
    for part in found.not_kept:
        print(f"not kept: {part}")
    if trace is not None:
        print(f"next: moetap info {args.output}")
    return 0


def _write_trace(path: Path, trace: Trace, force: bool, open_end: bool) -> None:
    from moetap.store import TraceWriter

    with TraceWriter(path, trace.model, trace.capture, force=force) as writer:
        for stream in trace.streams:
            writer.append(stream)
        writer.close(complete=trace.complete)
    streams, model = trace.streams, trace.model
    n_rows, n_decode = sum(s.n_rows for s in streams), sum(s.n_generated for s in streams)
    print(
        f"wrote {path}: {_many(len(streams), 'stream')}, {_many(n_rows, 'row')} "
        f"({n_rows - n_decode} prefill, {n_decode} decode)"
    )
    print(
        f"model: {_many(model.n_layers, 'MoE layer')} ({_ranges(model.layer_index.tolist())}), "
        f"top-{_span(model.top_k.tolist())} of {_span(model.n_experts.tolist())} experts"
    )
    if open_end:
        last = streams[-1]
        print(
            f"the last stream ends at position {last.first_position + last.n_rows - 1}: compare "
            "with the run, since the format\ndoes not show whether whole steps are missing"
        )


def _many(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def _span(values: list[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low}-{high}"


def _ranges(layers: list[int]) -> str:
    """0-7, or 1-3,5,9-11."""
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][-1] + 1:
            parts[-1].append(layer)
        else:
            parts.append([layer])
    # A model with an MoE layer in every other place has as many ranges as layers.
    text = ",".join(_span(part) for part in parts)
    return text if len(text) <= 40 else f"{len(layers)} of {layers[0]}-{layers[-1]}"


def _write_counts(path: Path, counts: Counts) -> None:
    """The counts as a table, and how even they are."""
    import numpy as np

    from moetap.analysis.locality.usage import usage
    from moetap.formats.base import save_lines

    lines = ["layer,expert,count"]
    for layer, row in zip(counts.layer_index.tolist(), counts.counts.tolist(), strict=True):
        lines.extend(f"{layer},{expert},{n}" for expert, n in enumerate(row))
    save_lines(path, lines)
    n_layers, n_experts = counts.counts.shape
    spread = usage(counts.counts, np.full(n_layers, n_experts))
    print(f"wrote {path}: {n_layers} MoE layers, {n_experts} experts, counts only")
    print("layer  selections  entropy  hottest   gini  never")
    for i, layer in enumerate(counts.layer_index.tolist()):
        print(
            f"{layer:5}  {counts.counts[i].sum():10,}  {spread.entropy[i]:7.3f}  "
            f"{100 * spread.max_share[i]:6.2f} %  {spread.gini[i]:5.3f}  {spread.never[i]:5}"
        )


def _layers(text: str) -> tuple[int, ...]:
    """1-47 or 1,3,5-9."""
    out: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"{part!r} is no layer or range of layers")
        if int(last or first) > MOST_LAYERS:
            raise argparse.ArgumentTypeError(f"layer {last or first} is none of any model")
        out.extend(range(int(first), int(last or first) + 1))
    if not out:
        raise argparse.ArgumentTypeError(f"{text!r} names no layer")
    return tuple(out)
