"""Train the tiny qwen3_5_moe model on one GPU, within a wall-clock budget.

Knows the model's shape, the schedule and the balance loss. The schedules of learning rate and
sequence length are driven by elapsed time, so that the run ends cleanly when the budget does.
Reads the token shards of prepare.py; writes bf16 safetensors shards, config.json and log.jsonl.
Two slow pieces of transformers' reference code are replaced by equal, faster ones.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

VOCAB_SIZE = 8192
TOKENS_PER_STEP = 65_536
PEAK_RATE = 3e-3
WARMUP_STEPS = 150
WEIGHT_DECAY = 0.05
LONG_FROM = 0.6  # share of the budget after which sequences grow from 1024 to 4096 and 8192
BALANCE_FIRST, BALANCE_LAST = 0.004, 0.0008
CHUNK = 64  # tokens of a delta-rule chunk
SAVE_EVERY_S = 100.0
HELD_ROWS = 64
SHARD_BYTES = 15_000_000


def model_config(small: bool) -> Qwen3_5MoeTextConfig:
    """Return the shipped shape, or one that trains on a CPU in seconds."""
    return Qwen3_5MoeTextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=4 if small else 8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.03,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        num_experts=16 if small else 256,
        num_experts_per_tok=8,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100_000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        tie_word_embeddings=False,
        router_aux_loss_coef=BALANCE_LAST,
        eos_token_id=2,
        pad_token_id=0,
    )


def shifted_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Causal depthwise convolution (B, C, T) as a sum of shifts; fuses, unlike cuDNN's.

    The model has neither a bias nor an activation other than SiLU.
    """
    width, length = weight.shape[-1], hidden_states.shape[-1]
    padded = F.pad(hidden_states, (width - 1, 0))
    out = sum(padded[..., i : i + length] * weight[:, i, None] for i in range(width))
    return F.silu(out)


def chunked(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> tuple[Tensor, ...]:
    """Return what the delta rule needs inside each chunk, all chunks at once, in fp32.

    query, key, value (B, T, H, D), g (log decay) and beta (B, T, H); T a multiple of CHUNK.
    Returns the triangular system (B, H, N, C, C) and its right side (B, H, N, C, 2 D), the
    attention inside a chunk, decayed queries and keys, and the decay of whole chunks.
    """

    def split(x: Tensor) -> Tensor:
        x = x.float().transpose(1, 2)
        return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])

    query, key, value, g, beta = map(split, (query, key, value, g, beta))
    query, key = hf.l2norm(query) * query.shape[-1] ** -0.5, hf.l2norm(key)
    decay = g.cumsum(-1)
    pairs = decay[..., :, None] - decay[..., None, :]
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    pairs = pairs.masked_fill(upper, -torch.inf).exp()
    scaled = key * beta[..., None]
    system = (scaled @ key.mT) * pairs
    grown = decay.exp()[..., None]
    right = torch.cat([value * beta[..., None], scaled * grown], dim=-1)
    faded = key * (decay[..., -1:] - decay).exp()[..., None]
    return system, right, (query @ key.mT) * pairs, query * grown, faded, grown[..., -1:, :]


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: object
) -> tuple[Tensor, None]:
    """Gated delta rule, equal to transformers' chunked one and 2 to 5 times faster to train.

    With heads as small as these the state's step over a chunk, S -> M S + N, is cheap to form,
    so that the only sequential work is one small product a chunk.
    """
    system, right, attention, query_in, key_out, whole = chunked(query, key, value, g, beta)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new, seen = solved.split(value.shape[-1], dim=-1)
    identity = torch.eye(key.shape[-1], device=key.device)
    steps = (identity * whole - key_out.mT @ seen).unbind(2)
    additions = (key_out.mT @ new).unbind(2)
    states = [torch.zeros_like(additions[0])]
    for multiply, add in zip(steps[:-1], additions[:-1], strict=True):
        states.append(add + multiply @ states[-1])
    state = torch.stack(states, dim=2)
    out = query_in @ state + attention @ (new - seen @ state)
    return out.flatten(2, 3).transpose(1, 2).to(query.dtype), None


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in nats of (N, V) logits against (N,) targets."""
    return F.cross_entropy(logits.float(), targets)


def balance_loss(logits: Tensor, chosen: Tensor) -> Tensor:
    """Switch-style balance loss of one layer over the whole batch: 1 when uniform, more if not.

    logits (N, E), chosen (N, k). Counted over all sequences of the batch, so that experts may
    still specialise by domain.
    """
    experts = logits.shape[-1]
    flat = chosen.reshape(-1)
    load = torch.zeros(experts, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat, dtype=torch.float32)
    )
    probability = logits.float().softmax(-1).mean(0)
    return experts * (load / flat.numel() * probability).sum()


def compile_hot_spots() -> None:
    """Fuse the memory-bound pieces; compiling the whole model would cost minutes."""
    global chunked, token_loss, balance_loss
    torch._dynamo.config.recompile_limit = 64  # three sequence lengths, with and without gradients

    def fused(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=False)

    hf.causal_conv1d_fn = fused(shifted_conv1d)
    for block in (hf.Qwen3_5MoeRMSNorm, hf.Qwen3_5MoeRMSNormGated, hf.Qwen3_5MoeMLP):
        block.forward = fused(block.forward)
    hf.apply_rotary_pos_emb = fused(hf.apply_rotary_pos_emb)
    chunked, token_loss, balance_loss = fused(chunked), fused(token_loss), fused(balance_loss)


class RouterTap:
    """Collects (logits, chosen) of every router during a forward pass."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        for module in model.modules():
            if isinstance(module, hf.Qwen3_5MoeTopKRouter):
                module.register_forward_hook(self._note)

    def _note(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, ...]) -> None:
        self.seen.append((output[0], output[2]))

    def take(self) -> list[tuple[Tensor, Tensor]]:
        """Return what was collected, one pair a layer, and forget it."""
        seen, self.seen = self.seen, []
        return seen


class MasterAdam:
    """AdamW over fp32 masters of a model whose matrices are bf16 (vectors stay fp32)."""

    def __init__(self, model: nn.Module) -> None:
        self.live = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().clone().float() for p in self.live]
        matrices = [m for m in self.masters if m.ndim >= 2]
        vectors = [m for m in self.masters if m.ndim < 2]
        self.adam = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=PEAK_RATE,
            betas=(0.9, 0.95),
            fused=self.live[0].is_cuda,
        )
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        for live in self.live:
            if live.ndim >= 2:
                live.data = live.data.to(torch.bfloat16)

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Clip, update the masters, copy them into the live parameters, clear gradients."""
        grads = [master.grad for master in self.masters]
        torch._foreach_copy_(grads, [p.grad for p in self.live])
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0, foreach=True)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        torch._foreach_copy_(self.live, self.masters)
        for live in self.live:
            live.grad = None


class Streams:
    """Random crops of the flat token streams, kept on the device."""

    def __init__(self, folder: Path, split: str, device: str) -> None:
        self.streams = []
        for kind in ("source", "chat"):
            tokens = np.fromfile(folder / f"{split}_{kind}.bin", dtype=np.uint16)
            self.streams.append(torch.from_numpy(tokens.astype(np.int16)).to(device))
        self.device = device

    def crops(self, kind: int, count: int, length: int, seed: int | None = None) -> Tensor:
        """Return (count, length + 1) int64 crops of one stream."""
        stream = self.streams[kind]
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(seed)
        start = torch.randint(
            stream.numel() - length - 1, (count, 1), device=self.device, generator=generator
        )
        return stream[start + torch.arange(length + 1, device=self.device)].long()

    def batch(self, length: int) -> Tensor:
        """Return one step's batch, half source and half transcripts."""
        count = max(2, TOKENS_PER_STEP // length)
        return torch.cat([self.crops(0, count // 2, length), self.crops(1, count // 2, length)])


def learning_rate(step: int, share: float) -> float:
    """Warm up by steps, then a cosine over the share of the budget, down to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * cosine


def balance_weight(share: float) -> float:
    """Weight of the balance loss: strong until every expert has learnt something, then weak.

    A strong weight to the end would make routing uniform and leave nothing to measure.
    """
    return BALANCE_FIRST + (BALANCE_LAST - BALANCE_FIRST) * min(1.0, share / 0.25)


def sequence_length(step: int, share: float) -> int:
    """Short sequences first; after LONG_FROM three steps of 4096 to one of 8192."""
    if share < LONG_FROM:
        return 1024
    return 8192 if step % 4 == 3 else 4096


@torch.no_grad()
def evaluate(model: nn.Module, tap: RouterTap, data: Streams, length: int) -> dict[str, object]:
    """Held-out loss (nats a token) by stream, and the balance of each layer.

    ``union``: distinct experts of four unrelated rows at the same position, mean by layer.
    """
    report: dict[str, object] = {}
    layers: list[list[Tensor]] = []
    for kind, name in enumerate(("source", "chat")):
        tokens = data.crops(kind, HELD_ROWS, length, seed=0)
        logits = model(tokens[:, :-1], use_cache=False).logits
        loss = token_loss(logits.flatten(0, 1), tokens[:, 1:].flatten())
        layers.append([chosen.view(HELD_ROWS, length, -1) for _, chosen in tap.take()])
        report[f"held_{name}"] = round(loss.item(), 4)
    experts = model.config.num_experts
    report["used"], report["entropy"], report["union"] = [], [], []
    for chosen in zip(*layers, strict=True):
        rows = torch.cat(list(chosen))
        share = torch.bincount(rows.flatten(), minlength=experts).float()
        share /= share.sum()
        hit = torch.zeros(*rows.shape[:2], experts, dtype=torch.bool, device=rows.device)
        hit.scatter_(2, rows, True)
        # Rows i, i + n/4, i + n/2, i + 3n/4: two of each stream, from unrelated places.
        union = hit.view(4, -1, length, experts).any(0).sum(-1).float().mean()
        entropy = -(share * share.clamp_min(1e-12).log2()).sum()
        report["used"].append(round((share > 0).float().mean().item(), 4))
        report["entropy"].append(round(entropy.item(), 3))
        report["union"].append(round(union.item(), 2))
    return report


def save(folder: Path, model: Qwen3_5MoeForCausalLM, optimiser: MasterAdam) -> None:
    """Write the masters as bf16 safetensors (vectors fp32), in shards, and the config."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, master in zip(names, optimiser.masters, strict=True):
        tensor = master.to(torch.bfloat16) if master.ndim >= 2 else master
        if size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"model-{number:02d}.safetensors", metadata={"format": "pt"})
    model.config.to_json_file(folder / "config.json")


def main() -> None:
    """Train until the budget is spent."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the token shards")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock budget")
    parser.add_argument("--small", action="store_true", help="a few layers, for a try on a CPU")
    options = parser.parse_args()
    began = time.monotonic()
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = Qwen3_5MoeForCausalLM(model_config(options.small)).to(device)
    model.set_experts_implementation("grouped_mm")
    model.set_attn_implementation("sdpa")
    hf.torch_chunk_gated_delta_rule = delta_rule
    optimiser = MasterAdam(model)
    tap = RouterTap(model)
    train, held = Streams(options.data, "train", device), Streams(options.data, "held", device)
    if device == "cuda":
        compile_hot_spots()
    budget = options.minutes * 60
    step, tokens_seen, saved_at = 0, 0, time.monotonic()
    window = [time.monotonic(), 0]
    with (options.out / "log.jsonl").open("w") as log:
        while True:
            elapsed = time.monotonic() - began
            last = elapsed >= budget
            if last or time.monotonic() - saved_at > SAVE_EVERY_S:
                save(options.out, model, optimiser)
                report = evaluate(model, tap, held, 1024 if device == "cuda" else 128)
                log.write(json.dumps({"step": step, "tokens": tokens_seen, **report}) + "\n")
                log.flush()
                print(step, report, flush=True)
                saved_at = time.monotonic()
            if last:
                break
            share = elapsed / budget
            length = sequence_length(step, share) if device == "cuda" else 128
            batch = train.batch(length) if device == "cuda" else train.crops(1, 4, length)
            inputs, targets = batch[:, :-1], batch[:, 1:]
            logits = model(inputs, use_cache=False).logits
            loss = token_loss(logits.flatten(0, 1), targets.flatten())
            balance = torch.stack([balance_loss(*pair) for pair in tap.take()]).mean()
            (loss + balance_weight(share) * balance).backward()
            optimiser.step(learning_rate(step, share))
            step += 1
            tokens_seen += inputs.numel()
            window[1] += inputs.numel()
            if step % 50 == 0:
                entry = {
                    "step": step,
                    "seconds": round(time.monotonic() - began, 1),
                    "tokens": tokens_seen,
                    "length": length,
                    "loss": round(loss.item(), 4),
                    "balance": round(balance.item(), 4),
                    "rate": round(learning_rate(step, share), 6),
                    "tokens_per_s": round(window[1] / (time.monotonic() - window[0])),
                }
                window = [time.monotonic(), 0]
                log.write(json.dumps(entry) + "\n")
                print(entry, flush=True)


if __name__ == "__main__":
    main()
