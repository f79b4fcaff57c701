"""`moetap capture`: run the prompt mix through a model and write the routing to a trace file."""

from __future__ import annotations

import argparse
import math
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moetap.errors import MoetapError, UsageError

if TYPE_CHECKING:
    from moetap.capture._mlx import Loaded, Opened
    from moetap.capture.run import Watcher


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser(
        "capture",
        help="run prompts through a model, one stream at a time, and record its routing",
        description="Run prompts through a model, one stream at a time, and write which experts "
        "each MoE layer selected for each token to a trace file. Ctrl-C keeps the finished "
        "streams; --resume continues.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR_OR_ID",
        help="folder or Hugging Face id of an MLX model, "
        "or tiny-qwen3_5-moe, which ships with moetap",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="default: traces/<model>.h5"
    )
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="your own prompts instead of the mix"
    )
    parser.add_argument("--quick", action="store_true", help="the mix's 8 short prompts only")
    parser.add_argument(
        "--max-tokens", type=int, default=512, metavar="N", help="per stream (default 512)"
    )
    parser.add_argument(
        "--temp", type=float, default=0.0, help="sampling temperature (default 0: greedy)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.0, help="nucleus sampling (default 0: off)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the sampler (default 0); each stream's own seed is made of it and the prompt",
    )
    parser.add_argument(
        "--prefill-step",
        type=int,
        default=2048,
        metavar="N",
        help="tokens per prefill chunk (2048)",
    )
    parser.add_argument(
        "--full-prefill",
        action="store_true",
        help="also compute the prefill routing that mlx-lm leaves out",
    )
    parser.add_argument("--scores", action="store_true", help="keep the gate weights too")
    parser.add_argument(
        "--thinking", action="store_true", help="let the chat template open a thinking block"
    )
    parser.add_argument(
        "--stream",
        action="store_true",
        help="leave the experts on disk and read those that a step needs into slots, as many as "
        "fit this machine (default: only if the model does not fit)",
    )
    parser.add_argument(
        "--slots", type=int, metavar="C", help="stream, with C expert slots per MoE layer"
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="stream unless all fits into SIZE, such as 6GB"
    )
    parser.add_argument(
        "--resident", action="store_true", help="keep all experts in memory, or fail"
    )
    parser.add_argument(
        "--cold", action="store_true", help="read experts past the page cache when streaming"
    )
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="which experts leave their slots when streaming: lru (default) or another policy of "
        "moetap replay that needs no look ahead",
    )
    parser.add_argument(
        "--experts",
        type=Path,
        metavar="FILE",
        help="stream the experts from this copy, made by moetap repack",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing output file")
    parser.add_argument("--resume", action="store_true", help="continue an interrupted capture")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Capture; 0 when every prompt has its stream, 1 when it was interrupted."""
    _check(args)
    from moetap.prompts import load_jsonl, load_mix
    from moetap.store import TraceWriter, check_target

    mix = load_jsonl(args.prompts) if args.prompts else load_mix(quick=args.quick)
    output = args.output or _default_output(args.model)
    check_target(output, resume=args.resume, force=args.force)
    say(f"opening {args.model}")

    from moetap.capture import _machine, _mlx
    from moetap.capture.run import Settings, capture, describe, prepare, untraced_rate
    from moetap.models import bundled_model

    opened = _mlx.open_model(str(bundled_model(args.model) or args.model))
    settings = Settings(
        max_tokens=args.max_tokens,
        temp=args.temp,
        top_p=args.top_p,
        seed=args.seed,
        prefill_step=args.prefill_step,
        full_prefill=args.full_prefill,
        scores=args.scores,
        thinking=args.thinking,
    )
    tasks, refused = prepare(opened, mix.prompts, settings.thinking)
    for prompt_id, reason in refused:
        say(f"left out {prompt_id}: {reason}")
    loaded = _load(args, opened, max(len(t.tokens) for t in tasks) + args.max_tokens)
    # The shortest prompt: only decoding is timed. A resumed trace keeps the rate it began with.
    shortest = min(tasks, key=lambda task: len(task.tokens))
    rate = None if args.resume else untraced_rate(loaded, shortest, settings)
    about = describe(loaded, settings, mix, tasks, rate)
    swap = _machine.swap_bytes()
    try:
        with TraceWriter(
            output, loaded.info, about, resume=args.resume, force=args.force
        ) as writer:
            todo = [t for t in tasks if t.prompt.id not in writer.finished]
            with _watching(len(tasks), len(tasks) - len(todo), args.max_tokens) as watcher:
                for stream in capture(loaded, todo, settings, watcher):
                    writer.note_swap(_machine.swap_growth(swap))
                    writer.append(stream)
            growth = _machine.swap_growth(swap)
            writer.note_swap(growth)
            writer.close(complete=True)
            n_streams = len(writer.finished)
    except _Stopped as stop:
        raise MoetapError(
            f"stopped; finished streams are in {output}, --resume continues"
        ) from stop
    _warn_of_swapping(growth)
    say(f"{n_streams} streams in {output}; next: moetap analyze {output}")
    return 0


def _load(args: argparse.Namespace, opened: Opened, context: int) -> Loaded:
    """Resident or streamed, as asked or as the ledger says; says which and why."""
    from moetap.analysis.ledger import make_tier
    from moetap.capture import _machine
    from moetap.capture.geometry import this_mac
    from moetap.capture.streaming.choice import choose, parse_memory
    from moetap.capture.streaming.load import stream

    choice = choose(
        opened.info,
        make_tier(round(_machine.ram_bytes() / 2**30), device=this_mac()),
        context,
        stream=args.stream or args.cold or (args.experts, args.policy) != (None, None),
        slots=args.slots,
        memory_bytes=None if args.memory is None else parse_memory(args.memory),
        resident=args.resident,
    )
    if choice.why:
        say(choice.why)
    if choice.slots is None:
        return opened.resident()
    loaded = stream(
        opened,
        choice.slots,
        cold=args.cold,
        experts=args.experts,
        policy=args.policy or "lru",
    )
    for warning in loaded.engine.warnings if loaded.engine else ():
        say(warning)
    return loaded


def _warn_of_swapping(growth_bytes: int | None) -> None:
    """The routing is right all the same; measured times are not those of a machine at ease."""
    from moetap.analysis.measured import SWAP_LIMIT_BYTES

    if growth_bytes is not None and growth_bytes > SWAP_LIMIT_BYTES:
        say(
            f"memory ran short: swap grew by {growth_bytes / 1e9:.2f} GB while this ran; do "
            "not trust its times, and use fewer --slots or a smaller --memory"
        )


def _check(args: argparse.Namespace) -> None:
    for name, ok in (
        ("max-tokens", 1 <= args.max_tokens < 2**31),
        ("prefill-step", 1 <= args.prefill_step < 2**31),
        ("temp", 0 <= args.temp < math.inf),
        ("top-p", 0 <= args.top_p <= 1),
        ("seed", 0 <= args.seed < 2**63),
    ):
        if not ok:
            value = getattr(args, name.replace("-", "_"))
            raise UsageError(f"--{name} {value} is out of range")
    if not args.model:
        raise UsageError("--model is empty; give a folder or a Hugging Face id")
    if args.policy is not None:
        from moetap.policies import get

        get(args.policy).online(1, 1)  # before anything is opened
    if args.prompts and args.quick:
        raise UsageError("--quick selects from the bundled mix; it does not go with --prompts")


def _default_output(model: str) -> Path:
    folder = Path("traces")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise MoetapError(f"cannot make the folder {folder} ({error.strerror}); use -o") from error
    return folder / (re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model).resolve().name) + ".h5")


def say(line: str) -> None:
    """One line for the person at the terminal; standard output is left to results."""
    print(line, file=sys.stderr, flush=True)


class _Stopped(KeyboardInterrupt):
    """The user asked to stop; raised between two tokens, never inside a write."""


_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C, kill, the terminal closed


class _Signals:
    """Turns these signals into a flag, so that a write in progress finishes. A second Ctrl-C
    interrupts at once.
    """

    def __init__(self) -> None:
        self.stop = False

    def handle(self, number: int, _frame: object) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True
        say("stopping after this token; once more to stop at once")

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = {n: signal.signal(n, self.handle) for n in _STOP}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _watching(n_streams: int, n_done: int, max_tokens: int) -> Iterator[Watcher]:
    """Progress on standard error: a live line with rate and time left on a terminal, a line per
    stream otherwise.
    """
    from moetap.cli._progress import LiveProgress, PlainProgress

    signals = _Signals()

    def check() -> None:
        if signals.stop:
            raise _Stopped

    kind = LiveProgress if sys.stderr.isatty() else PlainProgress
    with signals.installed(), kind(n_streams, n_done, max_tokens, check) as watcher:
        yield watcher
