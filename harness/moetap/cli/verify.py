"""`moetap verify`: does what moetap promises hold on this machine?

Knows the command line of the verb. Today it checks one promise: streamed captures equal resident
ones to the bit.
"""

from __future__ import annotations

import argparse
from typing import Any

from moetap.errors import UsageError


def add_parser(verbs: Any) -> None:
    """Register the verb and its options."""
    parser = verbs.add_parser(
        "verify",
        help="check on this machine that streamed captures equal resident ones to the bit",
        description="Run a few tokens of a model resident and streamed, with several numbers of "
        "slots, prompt lengths and prefill steps, and compare tokens, log-probabilities and "
        "routing bit by bit. The model must fit in memory. Exit code 1 if anything differs.",
    )
    parser.add_argument("--streaming", action="store_true", help="the check of streamed captures")
    parser.add_argument(
        "--model",
        default="tiny-qwen3_5-moe",
        metavar="DIR_OR_ID",
        help="default: the model that ships with moetap",
    )
    parser.add_argument(
        "--slots", metavar="C,C", help="numbers of expert slots (default: k, E/4 and E)"
    )
    parser.add_argument(
        "--long", action="store_true", help="also a prompt of 4096 tokens (takes minutes)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Compare and print; 1 if anything differs."""
    if not args.streaming:
        raise UsageError("nothing to verify: give --streaming")
    try:
        slots = [int(c) for c in args.slots.split(",")] if args.slots else None
    except ValueError:
        raise UsageError(f"--slots {args.slots}: not a list like 16,64") from None
    from moetap.capture import _mlx
    from moetap.capture.streaming.selfcheck import own_kernel_agrees, selfcheck
    from moetap.models import bundled_model

    name = str(bundled_model(args.model) or args.model)
    prompts = (1, 64, 300, 4096) if args.long else (1, 64, 300)
    print(f"mlx {_mlx.MLX_VERSION} ({_mlx.backend()}), mlx-lm {_mlx.MLX_LM_VERSION}, {args.model}")
    n = failed = 0
    for case in selfcheck(name, slots, prompts):
        n += 1
        failed += bool(case.difference)
        print(
            f"C = {case.slots:<4} prompt {case.n_prompt:<5} prefill step {case.prefill_step:<5} "
            + (f"DIFFERENT: {case.difference}" if case.difference else "identical"),
            flush=True,
        )
    kind = "the same" if own_kernel_agrees(name) else "other"
    print(f"for comparison, mlx-lm's own kernel for long chunks here gives {kind} bits")
    if failed:
        print(f"{failed} of {n} cases differ: do not stream on this machine, and please report")
        return 1
    print(f"all {n} cases identical")
    return 0
