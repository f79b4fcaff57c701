"""What the tap costs: decode rate and prefill memory with and without it, in pairs.

Each pair generates the same tokens twice in one process, tapped and untapped in random order, so
that drift of the machine's speed hits both. Printed are the median and quartiles of the pairwise
ratios of decode rates, an untapped/untapped control, and the peak of MLX's memory during the
prefill of a long prompt. Targets: rate ratio >= 0.97, memory ratio <= 1.05.

    python benchmarks/tap_overhead.py [--model DIR_OR_ID] [--pairs 20] [--tokens 128]
"""

from __future__ import annotations

import argparse
import random
import time

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import moetap
from moetap.capture import _mlx
from moetap.models import DEMO_MODEL, bundled_model


def decode_rate(model, prompt: mx.array, n: int, tapped: bool, **options: bool) -> float:
    """Tokens per second from the first to the last of n generated tokens."""

    def timed() -> float:
        stamps = []
        for _ in generate_step(prompt, model, max_tokens=n):
            stamps.append(time.perf_counter())
        return (n - 1) / (stamps[-1] - stamps[0])

    if not tapped:
        return timed()
    with moetap.tap(model, **options) as rows:
        rate = timed()
        assert rows.experts.shape[0] == prompt.size + n - 1
    return rate


def prefill_peak(model, n_tokens: int, tapped: bool) -> int:
    """Peak bytes of MLX's allocator while `n_tokens` are prefilled in chunks of 2048."""
    prompt = mx.array(np.random.default_rng(0).integers(0, 1000, n_tokens))
    cache = make_prompt_cache(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    steps = generate_step(prompt, model, max_tokens=1, prompt_cache=cache)
    if tapped:
        with moetap.tap(model):
            list(steps)
    else:
        list(steps)
    return int(mx.get_peak_memory())


def report(name: str, ratios: list[float]) -> None:
    low, median, high = np.percentile(ratios, [25, 50, 75])
    print(f"{name:<34}{median:.3f}  [{low:.3f}, {high:.3f}]  {len(ratios)} pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEMO_MODEL)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=8192)
    args = parser.parse_args()
    model = _mlx.load(str(bundled_model(args.model) or args.model)).model
    prompt = mx.array(np.random.default_rng(1).integers(0, 1000, 64))
    decode_rate(model, prompt, args.tokens, tapped=True)  # warm up

    modes = {"untapped (control)": None, "tapped": {}, "tapped, scores kept": {"scores": True}}
    ratios: dict[str, list[float]] = {name: [] for name in modes}
    plain_rates = []
    for _ in range(args.pairs):
        for name, options in modes.items():
            runs = [("a", False, {}), ("b", options is not None, options or {})]
            random.shuffle(runs)
            rate = {
                key: decode_rate(model, prompt, args.tokens, tapped, **opts)
                for key, tapped, opts in runs
            }
            plain_rates.append(rate["a"])
            ratios[name].append(rate["b"] / rate["a"])
    print(f"{args.model}: untapped {np.median(plain_rates):.1f} tokens/s, {_mlx.backend()} backend")
    print("decode rate / untapped            median [quartiles]")
    for name, values in ratios.items():
        report(name, values)

    pairs = []
    for _ in range(3):
        peaks = {tapped: prefill_peak(model, args.prefill, tapped) for tapped in (False, True)}
        pairs.append(peaks[True] / peaks[False])
    print(
        f"peak memory of a {args.prefill}-token prefill: untapped {peaks[False] / 2**20:.1f} MiB, "
        f"tapped {peaks[True] / 2**20:.1f} MiB, ratio {np.median(pairs):.4f} (3 pairs)"
    )


if __name__ == "__main__":
    main()
