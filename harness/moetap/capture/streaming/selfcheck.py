"""Resident and streamed runs of one model, compared to the bit on the machine at hand.

Knows how to run a few tokens and what must be equal: tokens, log-probabilities, routing. Refuses to
explain a difference: docs/STREAMING.md says why there must be none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import stream_generate
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.sample_utils import make_sampler
from numpy.typing import NDArray

from moetap.capture import _mlx
from moetap.capture.streaming.load import stream
from moetap.capture.tap import find_switches, tap
from moetap.errors import UsageError

N_TOKENS = 8


@dataclass(frozen=True, eq=False)
class Run:
    """One greedy stream: tokens, their log-probabilities as bytes, and experts (R, L, K)."""

    tokens: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    experts: NDArray[np.uint16]


@dataclass(frozen=True)
class Case:
    """One comparison. slots: C. difference: what differs first, "" if nothing does."""

    slots: int
    n_prompt: int
    prefill_step: int
    difference: str


def run(
    loaded: _mlx.Loaded, prompt: Sequence[int], prefill_step: int, n_tokens: int = N_TOKENS
) -> Run:
    """Generate n_tokens after `prompt`."""
    if loaded.engine:
        loaded.engine.start(len(prompt), full_prefill=False)
    tokens, logprobs = [], []
    with tap(loaded.model) as rows:
        for response in stream_generate(
            loaded.model,
            loaded.tokenizer,
            mx.array(prompt),
            max_tokens=n_tokens,
            sampler=make_sampler(temp=0.0),
            prefill_step_size=prefill_step,
        ):
            tokens.append(int(response.token))
            logprobs.append(np.frombuffer(response.logprobs, np.uint8).tobytes())
        return Run(tuple(tokens), tuple(logprobs), rows.take().experts)


def difference(a: Run, b: Run) -> str:
    """What differs between two runs, "" if nothing does."""
    if a.experts.shape != b.experts.shape:
        return f"{len(a.experts)} rows against {len(b.experts)}"
    if not np.array_equal(a.experts, b.experts):
        row, layer, _ = np.argwhere(a.experts != b.experts)[0]
        return f"routing, first at row {row}, MoE layer {layer}"
    for step, (x, y) in enumerate(zip(a.logprobs, b.logprobs, strict=True)):
        if x != y:
            return f"log-probabilities, first at decode step {step}"
    return "" if a.tokens == b.tokens else "tokens"


def selfcheck(
    name: str,
    slots: Sequence[int] | None = None,
    prompts: Sequence[int] = (1, 64, 300),
    prefill_steps: Sequence[int] = (64, 2048),
) -> Iterator[Case]:
    """Compare the resident run of a model with streamed ones, case by case.

    slots: default: k, a quarter of E, and E. prompts: their lengths; their tokens are arbitrary.

    Raises MoetapError as `open_model` and `stream`.
    """
    resident = _mlx.load(name)
    k, n = resident.info.max_top_k, int(resident.info.n_experts.max())
    texts = {length: arbitrary_tokens(resident, length) for length in prompts}
    # One pass over a prompt that fits one chunk says all about larger chunks.
    cases = [
        (length, step)
        for length in prompts
        for i, step in enumerate(sorted(prefill_steps))
        if i == 0 or length - 1 > sorted(prefill_steps)[i - 1]
    ]
    expected = {case: run(resident, texts[case[0]], case[1]) for case in cases}
    del resident
    for c in sorted({k, max(k, n // 4), n}) if slots is None else slots:
        if not k <= c <= n:
            raise UsageError(f"{c} slots: give {k} to {n}")
        streamed = stream(_mlx.open_model(name), c)
        assert streamed.engine is not None
        for length, step in cases:
            got = run(streamed, texts[length], step)
            yield Case(c, length, step, difference(expected[length, step], got))
        streamed.engine.close()


def arbitrary_tokens(loaded: _mlx.Loaded, length: int) -> list[int]:
    """Always the same tokens of the vocabulary, none of them special in most tokenizers."""
    n = len(loaded.tokenizer.vocab)
    drawn = np.random.default_rng(length).integers(n // 10, n // 2, length)
    return [int(token) for token in drawn]


def own_kernel_agrees(name: str) -> bool:
    """Whether mlx-lm's own choice of kernel for a long chunk gives the bits of the row kernel here.

    Where it does not, traces of the two are not comparable, which is why captures fix the kernel.
    """
    model = _mlx.open_model(name).model
    (projection, *_) = (
        m
        for _, m in find_switches(model)[0].module.named_modules()
        if isinstance(m, SwitchLinear | QuantizedSwitchLinear)
    )
    original: Any = type(projection)
    n = projection.weight.shape[0]
    dtype = projection.scales.dtype if "scales" in projection else projection.weight.dtype
    dtype = dtype if mx.issubdtype(dtype, mx.floating) else mx.bfloat16
    indices = mx.repeat(mx.arange(n, dtype=mx.uint32), 16)
    x = mx.random.normal((indices.size, 1, projection.input_dims), key=mx.random.key(0))
    x = x.astype(dtype)
    outputs = [original.__call__(projection, x, indices, sorted_indices=s) for s in (True, False)]
    mx.eval(outputs)
    return bool(mx.array_equal(*outputs).item())
