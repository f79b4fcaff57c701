"""Time the union table on a synthetic trace beside plain Python sets.

Knows one geometry (200 streams x 512 decode steps x 40 layers, top-8 of 256) and one made-up
routing: Zipf-like popularity with temporal structure. Refuses to judge sharing: the routing is
invented, only the times mean something.

    PYTHONPATH=harness python benchmarks/unions.py [--streams N] [--steps D] [--groups G]
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

import numpy as np

from moetap.analysis.pool import pool
from moetap.analysis.sampling import draw_groups, union_histograms
from moetap.analysis.strata import strata
from moetap.analysis.unions import union_table
from moetap.trace import CaptureInfo, ModelInfo, Stream, Trace

SIZES = (2, 3, 4, 8)
LAYERS, EXPERTS, TOP_K = 40, 256, 8
STAY = 0.4  # chance that a token re-uses the routing weights of the token before it


def synthetic_trace(n_streams: int, n_steps: int, seed: int = 0) -> Trace:
    """Streams of `n_steps` decode steps, two classes, Zipf popularity, temporal structure."""
    rng = np.random.default_rng(seed)
    popularity = np.log(1 / np.arange(1, EXPERTS + 1) ** 0.8)
    log_share = np.stack([rng.permutation(popularity) for _ in range(LAYERS)]).astype(np.float32)
    streams = []
    for i in range(n_streams):
        # The top k of log share + Gumbel noise is a draw without replacement. Keeping the noise
        # keeps the experts.
        noise = rng.gumbel(size=(LAYERS, EXPERTS)).astype(np.float32)
        experts = np.empty((n_steps, LAYERS, TOP_K), dtype=np.uint16)
        for step in range(n_steps):
            fresh = rng.random(noise.shape, dtype=np.float32) > STAY
            draw = -np.log(rng.standard_exponential(int(fresh.sum()), dtype=np.float32) + 1e-30)
            noise[fresh] = draw
            top = np.argpartition(log_share + noise, -TOP_K, axis=1)[:, -TOP_K:]
            experts[step] = np.sort(top, axis=1)
        streams.append(
            Stream(
                prompt_id=f"p{i}",
                cls=("code", "agentic")[i % 2],
                prompt_sha256="",
                n_prompt=1,
                n_generated=n_steps,
                finish_reason="length",
                looped_from=-1,
                experts=experts,
                tokens=np.zeros(n_steps, dtype=np.uint32),
                position=np.arange(n_steps, dtype=np.uint32),
            )
        )
    model = ModelInfo(
        id="synthetic",
        revision="",
        model_type="",
        config_json="{}",
        config_sha256="",
        weights_sha256="",
        quantization="",
        layer_index=np.arange(LAYERS),
        n_experts=np.full(LAYERS, EXPERTS),
        top_k=np.full(LAYERS, TOP_K),
        expert_bytes=np.full(LAYERS, 1_769_472),
    )
    return Trace(model, CaptureInfo(moetap_version=""), tuple(streams), "", "", True)


def sets_pairs_per_s(trace: Trace, n_pairs: int) -> float:
    """(pair, step, layer) unions per second with Python sets, over the first `n_pairs` pairs."""
    some = [stream.decode().tolist() for stream in trace.streams[:9]]
    rows = [[[set(cell) for cell in step] for step in steps] for steps in some]
    pairs = [(a, b) for a in range(len(rows)) for b in range(a)][:n_pairs]
    start = time.perf_counter()
    done = total = 0
    for a, b in pairs:
        for one, other in zip(rows[a], rows[b], strict=True):
            for x, y in zip(one, other, strict=True):
                total += len(x | y)
                done += 1
    assert total
    return done / (time.perf_counter() - start)


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description="Time the union table.")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--groups", type=int, default=1000)
    args = parser.parse_args()

    start = time.perf_counter()
    trace = synthetic_trace(args.streams, args.steps)
    print(
        f"{args.streams} streams x {args.steps} steps x {LAYERS} layers, top-{TOP_K} of {EXPERTS}, "
        f"made in {time.perf_counter() - start:.1f} s; peak memory {peak_bytes() / 1e9:.2f} GB"
    )
    streams = pool([trace])

    sets = sets_pairs_per_s(trace, n_pairs=10)
    print(f"Python sets:   {sets:12,.0f} (pair, step, layer)/s")

    pair = [draw_groups(streams, strata(streams)[0], 2, args.groups, seed=0)]
    start = time.perf_counter()
    (histogram,) = union_histograms(streams, pair)
    took = time.perf_counter() - start
    print(
        f"sampled pairs: {histogram.sum() / took:12,.0f} (pair, step, layer)/s, "
        f"{len(pair[0].members)} groups in {took:.2f} s, {histogram.sum() / took / sets:.0f} x sets"
    )

    start = time.perf_counter()
    union_table(streams, [2], n_groups=1)
    took = time.perf_counter() - start
    triples = args.streams * (args.streams - 1) // 2 * args.steps * LAYERS
    print(
        f"exact, B = 2:  {triples / took:12,.0f} (pair, step, layer)/s, all pairs with the "
        f"interval in {took:.2f} s, {triples / took / sets:.0f} x sets"
    )

    start = time.perf_counter()
    union_table(streams, SIZES, n_groups=1)
    exact = time.perf_counter() - start
    start = time.perf_counter()
    union_table(streams, SIZES, n_groups=args.groups)
    whole = time.perf_counter() - start
    print(f"exact means, intervals, every stratum, B in {{1, 2, 3, 4, 8}}: {exact:.1f} s")
    print(f"the same and {args.groups} sampled groups for each stratum and B: {whole:.1f} s")
    print(f"peak memory {peak_bytes() / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
