"""A synthetic trace of the geometry that moetap promises to analyse in a minute.

Knows one geometry (200 streams x 512 decode steps x 40 layers, top-8 of 256) and one made-up
routing: Zipf popularity per layer, and temporal structure, since a token often keeps the experts of
the one before. Refuses to say anything about models: the routing is invented, only what analysing
it costs means something.

    PYTHONPATH=harness python benchmarks/synthetic.py --out FILE [--streams N] [--steps D]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

from moetap.trace import CaptureInfo, ModelInfo, Stream, Trace

STREAMS, STEPS, LAYERS, EXPERTS, TOP_K = 200, 512, 40, 256, 8
PROMPT = 33  # tokens; all but the last are prefill rows
ZIPF = 0.8  # share of the r-th most popular expert of a layer: r^-ZIPF
STAY = 0.4  # chance that a token keeps an expert's waiting time of the token before


@njit(parallel=True, cache=True)
def _route(
    share: NDArray[np.float64], n_streams: int, n_rows: int, top_k: int, stay: float, seed: int
) -> NDArray[np.uint16]:
    """(streams, rows, L, k) ids, ascending.

    Each expert waits an exponential time at the rate of its share; the k that come first are a draw
    without replacement by share. An expert that keeps its time tends to stay in or out.
    """
    n_layers, n_experts = share.shape
    out = np.empty((n_streams, n_rows, n_layers, top_k), dtype=np.uint16)
    for stream in prange(n_streams):
        np.random.seed(seed * 1_000_003 + stream)
        times = np.empty(n_experts)
        left = np.empty(n_experts)
        for layer in range(n_layers):
            for row in range(n_rows):
                for expert in range(n_experts):
                    if row == 0 or np.random.random() > stay:
                        times[expert] = -np.log(1 - np.random.random()) / share[layer, expert]
                    left[expert] = times[expert]
                for slot in range(top_k):
                    first = np.argmin(left)
                    out[stream, row, layer, slot] = first
                    left[first] = np.inf
                out[stream, row, layer] = np.sort(out[stream, row, layer])
    return out


def synthetic_trace(n_streams: int = STREAMS, n_steps: int = STEPS, seed: int = 0) -> Trace:
    """Streams of `n_steps` decode steps in two classes, each after a short prefill."""
    rng = np.random.default_rng(seed)
    zipf = np.arange(1, EXPERTS + 1) ** -ZIPF
    share = np.stack([rng.permutation(zipf) for _ in range(LAYERS)])
    rows = PROMPT - 1 + n_steps
    experts = _route(share, n_streams, rows, TOP_K, STAY, seed)
    streams = tuple(
        Stream(
            prompt_id=f"p{i}",
            cls=("code", "agentic")[i % 2],
            prompt_sha256="",
            n_prompt=PROMPT,
            n_generated=n_steps,
            finish_reason="length",
            looped_from=-1,
            experts=ids,
            tokens=np.zeros(rows, dtype=np.uint32),
            position=np.arange(rows, dtype=np.uint32),
        )
        for i, ids in enumerate(experts)
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
    capture = CaptureInfo(moetap_version="", n_prompts=n_streams)
    return Trace(model, capture, streams, "", "", True, source="synthetic")


def main() -> None:
    """Write the trace to a file."""
    from moetap.store import TraceWriter

    parser = argparse.ArgumentParser(description="Write the synthetic trace to a file.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trace = synthetic_trace(args.streams, args.steps, args.seed)
    with TraceWriter(args.out, trace.model, trace.capture, force=True) as writer:
        for stream in trace.streams:
            writer.append(stream)
        writer.close(complete=True)
    print(f"{args.out}: {len(trace.streams)} streams, {args.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
