"""Measure the shipped model: balance of its routers, union of four streams, loss, speed.

    check.py MODEL HELD     HELD: folder with held_source.bin and held_chat.bin of prepare.py

Prints Markdown. Balance and loss are taken on held-out text; the union on sampled streams that
answer held-out transcripts, at matched decode steps; rates on whatever machine this runs on.
"""

from __future__ import annotations

import argparse
import math
import time
from math import comb
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx import nn
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.sample_utils import make_sampler

END, TURN_START = 0, 1  # <|endoftext|>, <|im_start|>
CROPS, CROP_TOKENS = 8, 512
STREAMS, STREAM_TOKENS = 16, 160


class NotingSwitch(SwitchGLU):
    """A SwitchGLU that appends the (T, k) ids of each call to ``rows``."""

    def __call__(self, x: mx.array, indices: mx.array, *args: object, **kwargs: object) -> mx.array:
        NotingSwitch.notes[id(self)].append(indices.reshape(-1, indices.shape[-1]))
        return super().__call__(x, indices, *args, **kwargs)

    notes: dict[int, list[mx.array]] = {}


def tap(model: nn.Module) -> list[list[mx.array]]:
    """Note the routing of every MoE layer; returns one growing list a layer."""
    NotingSwitch.notes = {}
    for _, module in model.named_modules():
        if type(module) is SwitchGLU:
            module.__class__ = NotingSwitch
        if isinstance(module, NotingSwitch):
            NotingSwitch.notes[id(module)] = []
    layers = [layer.mlp.switch_mlp for layer in model.layers]
    return [NotingSwitch.notes[id(switch)] for switch in layers]


def crops(stream: np.ndarray) -> np.ndarray:
    """Return (CROPS, CROP_TOKENS + 1) evenly spaced crops of a token stream."""
    starts = np.linspace(0, stream.size - CROP_TOKENS - 1, CROPS).astype(int)
    return np.stack([stream[start : start + CROP_TOKENS + 1] for start in starts]).astype(np.int64)


def held_out(model: nn.Module, notes: list[list[mx.array]], folder: Path) -> list[np.ndarray]:
    """Print the loss on both streams; return the (N, k) rows of each layer."""
    for name in ("source", "chat"):
        total = 0.0
        for crop in crops(np.fromfile(folder / f"held_{name}.bin", dtype=np.uint16)):
            tokens = mx.array(crop)[None]
            logits = model(tokens[:, :-1]).astype(mx.float32)
            total += nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean").item()
        print(f"- held-out loss, {name}: {total / CROPS:.3f} nats a token")
    return [np.concatenate([np.array(rows) for rows in layer]) for layer in notes]


def mean_union(picks: np.ndarray, experts: int, lanes: int = 4) -> float:
    """Mean distinct experts of all groups of ``lanes`` streams; picks (S, D, k), exact."""
    streams, steps, _ = picks.shape
    total = 0.0
    for step in range(steps):
        counts = np.bincount(picks[:, step].reshape(-1), minlength=experts)
        missed = np.array([comb(streams - n, lanes) for n in range(streams + 1)])
        total += (1 - missed[counts] / comb(streams, lanes)).sum()
    return total / steps


def sampled_streams(
    model: nn.Module, tokenizer: object, notes: list[list[mx.array]], folder: Path
) -> tuple[list[np.ndarray], list[float]]:
    """Sample STREAMS answers to held-out transcripts.

    Returns (S, D, k) picks of each layer and each stream's share of distinct 4-grams. The end of
    the turn is banned, so that all streams have the same length.
    """
    chat = np.fromfile(folder / "held_chat.bin", dtype=np.uint16).astype(int)
    ends = np.flatnonzero(chat == END)
    prompts = []
    for first, last in zip(ends[:-1], ends[1:], strict=True):
        talk = chat[first + 1 : last]
        turns = np.flatnonzero(talk == TURN_START)
        cut = turns[2 if len(turns) > 3 else -1] if len(turns) else 0
        if 30 < cut < 900:
            # <|im_start|>, "assistant" and the newline, as the template's prompt ends
            head = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
            prompts.append([*talk[:cut].tolist(), *head])
    ban = mx.zeros(8192)
    ban[mx.array([0, 2])] = -math.inf
    picks: list[list[np.ndarray]] = [[] for _ in notes]
    distinct = []
    mx.random.seed(0)
    for prompt in prompts[:: max(1, len(prompts) // STREAMS)][:STREAMS]:
        for layer in notes:
            layer.clear()
        made = [
            response.token
            for response in mlx_lm.stream_generate(
                model, tokenizer, prompt, max_tokens=STREAM_TOKENS,
                sampler=make_sampler(temp=0.8),
                logits_processors=[lambda _, logits: logits + ban],
            )
        ]  # fmt: skip
        grams = {tuple(made[i : i + 4]) for i in range(len(made) - 3)}
        distinct.append(len(grams) / (len(made) - 3))
        for layer, rows in zip(picks, notes, strict=True):
            single = [np.array(row)[0] for row in rows if row.shape[0] == 1]
            layer.append(np.stack(single[: STREAM_TOKENS - 1]))
    return [np.stack(layer) for layer in picks], distinct


def rates(model: nn.Module, tokenizer: object, stream: np.ndarray) -> None:
    """Print prefill and decode rates without a tap."""
    prompt = stream[:2000].astype(int).tolist()
    began = time.perf_counter()
    for response in mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=100):
        last = response
    print(f"- prefill of 2000 tokens: {last.prompt_tps:.0f} tokens/s")
    print(f"- decode behind it: {last.generation_tps:.1f} tokens/s")
    print(f"- together {time.perf_counter() - began:.1f} s; peak {last.peak_memory:.2f} GB")


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("held", type=Path)
    options = parser.parse_args()
    model, tokenizer = mlx_lm.load(str(options.model))
    rates(model, tokenizer, np.fromfile(options.held / "held_source.bin", dtype=np.uint16))
    notes = tap(model)
    rows = held_out(model, notes, options.held)
    picks, distinct = sampled_streams(model, tokenizer, notes, options.held)
    experts = model.language_model.args.num_experts
    print(f"- distinct 4-grams of a sampled stream: median {np.median(distinct):.2f}, "
          f"lowest {min(distinct):.2f}; streams under 0.5: {sum(d < 0.5 for d in distinct)}"
          f" of {len(distinct)}")  # fmt: skip
    print("\n| layer | experts used | entropy, bits of 8 | U_4, sampled streams |")
    print("|--:|--:|--:|--:|")
    unions = []
    for number, (layer, stream) in enumerate(zip(rows, picks, strict=True)):
        share = np.bincount(layer.reshape(-1), minlength=experts) / layer.size
        entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
        unions.append(mean_union(stream, experts))
        print(f"| {number} | {(share > 0).mean():.3f} | {entropy:.2f} | {unions[-1]:.2f} |")
    uniform = experts * (1 - (1 - 8 / experts) ** 4)
    print(f"\nMean U_4 {np.mean(unions):.2f} of 32; independent uniform routing {uniform:.2f}.")


if __name__ == "__main__":
    main()
