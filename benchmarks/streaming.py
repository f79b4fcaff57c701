"""Memory and speed of streamed experts at the true layer geometry of Qwen3.6-35B-A3B.

    python benchmarks/streaming.py                     8 layers, 4.2 GB, C = 16, 64 and 128
    python benchmarks/streaming.py --layers 40 --slots 64 --no-resident      20 GB on disk

Makes a checkpoint of random weights (kept with --checkpoint DIR, else deleted afterwards): hidden
2048, 256 experts, top-8, 4 bits in groups of 64, gated delta nets and full attention in turn. Each
figure comes from a process of its own. It prints

    RSS           peak of the run against the ledger's weights and slots, with two measurements in
                  place of its assumed allowances: what the process has before it reads a weight,
                  and what MLX allocated beyond the weights in the resident run (KV, activations)
    ms a token    mean of the steady decode steps against max(resident compute, missed bytes /
                  bandwidth), bandwidth being the probed one for cold reads, and for warm ones what
                  the run's own reads had
    Python        processor time of the calling thread in a streamed layer's call, less what MLX
                  takes of it to launch what is evaluated there

Random weights would route almost evenly, so that C = 64 hits one time in four. Trained routers
don't: LRU with C = E / 4 hits 0.62 of gpt-oss-20b's look-ups and 0.64 of the bundled model's. So
the routers' rows differ in length, which gives 0.66 at C = 64 and 0.87 at 128; --skew 0 is the
worst case.

Scales are float32, because MLX's CPU backend is twelve times slower with bfloat16 ones. That makes
an expert 1,966,080 bytes instead of 1,769,472.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "model_type": "qwen3_5_moe",
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
    "text_config": {
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "rms_norm_eps": 1e-6,
        "vocab_size": 8192,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "type": "default"},
    },
}
EXPERT_BYTES = 1_966_080
MADE_LAYERS = 8


def make_checkpoint(folder: Path, n_layers: int, skew: float) -> None:
    """One shard per layer and one for the rest, made a layer at a time. Layers from the ninth on
    are copies: random weights take a minute each.

    skew: each router row is multiplied by exp(skew z), z normally distributed.
    """
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten
    from mlx_lm.models import qwen3_5_moe

    config = json.loads(json.dumps(CONFIG))
    made = min(n_layers, MADE_LAYERS)
    config["text_config"]["num_hidden_layers"] = made
    mx.random.seed(0)
    model = qwen3_5_moe.Model(qwen3_5_moe.ModelArgs.from_dict(config))
    for layer in model.layers:
        gate = layer.mlp.gate
        gate.weight *= mx.exp(skew * mx.random.normal((gate.weight.shape[0], 1)))
    nn.quantize(model, 64, 4)
    groups: dict[str, dict[str, mx.array]] = {}
    for name, array in tree_flatten(model.parameters()):
        layer = name.partition(".layers.")[2].partition(".")[0] or "rest"
        groups.setdefault(layer, {})[name] = array
    del model, array
    weight_map = {}
    for i, layer in enumerate(list(groups)):
        file = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        tensors = groups.pop(layer)
        mx.save_safetensors(str(folder / file), tensors, metadata={"format": "mlx"})
        weight_map |= dict.fromkeys(tensors, file)
        del tensors
    for layer in range(made, n_layers):
        weight_map |= copy_layer(folder, weight_map, layer % made, layer)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config["text_config"]["num_hidden_layers"] = n_layers
    (folder / "config.json").write_text(json.dumps(config))
    _make_tokenizer(folder, config["text_config"]["vocab_size"])


def copy_layer(folder: Path, weight_map: dict[str, str], old: int, new: int) -> dict[str, str]:
    """Copy the shard of layer `old` under the names of layer `new`; its part of the index."""
    source = next(file for name, file in weight_map.items() if f".layers.{old}." in name)
    target = f"model-layer-{new:02d}.safetensors"
    with (folder / source).open("rb") as read, (folder / target).open("wb") as write:
        header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        names = {n: n.replace(f".layers.{old}.", f".layers.{new}.") for n in header}
        text = json.dumps({names[n]: entry for n, entry in header.items()}).encode()
        write.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(read, write, 2**23)
    return {n: target for n in names.values() if n != "__metadata__"}


def _make_tokenizer(folder: Path, n: int) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(n)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2").save_pretrained(folder)


# -- one measurement, in a process of its own


def measure(folder: Path, slots: int, cold: bool, n_prompt: int, n_tokens: int) -> None:
    """Print one line of JSON. slots: 0 for resident."""
    from time import perf_counter

    import mlx.core as mx
    import numpy as np
    from mlx_lm.generate import stream_generate

    from moetap.analysis.ledger import trace_sizes
    from moetap.capture import _mlx
    from moetap.capture.streaming.load import stream

    mx.eval(mx.random.normal((64, 64)) @ mx.random.normal((64, 64)))
    opened = _mlx.open_model(str(folder))
    before = _peak()
    loaded = stream(opened, slots, cold=cold) if slots else opened.resident()
    after_load = _peak()
    mx.reset_peak_memory()
    active = mx.get_active_memory()
    sizes = trace_sizes(loaded.info)
    if loaded.engine:
        loaded.engine.start(n_prompt, full_prefill=False)
    prompt = np.random.default_rng(0).integers(0, 8192, n_prompt).tolist()
    times = []
    inside = _time_calls() if loaded.engine else []
    # Sampled: greedy decoding of random weights falls into a loop, which hits too often.
    for _ in stream_generate(
        loaded.model,
        loaded.tokenizer,
        mx.array(prompt),
        max_tokens=n_tokens,
        sampler=lambda x: mx.random.categorical(x, key=mx.random.key(len(times))),
    ):
        times.append(perf_counter())
    weights = sizes.resident_bytes + sizes.arena_bytes(slots or sizes.n_experts)
    result = {
        "weights": weights,
        "activations": mx.get_peak_memory() - active,
        "before": before,
        "loaded": after_load,
        "peak": _peak(),
        "token_s": float(np.diff(times)[len(times) // 3 :].mean()),
    }
    if loaded.engine:
        io = loaded.engine.take(n_tokens)
        late = slice(n_tokens // 3, None)
        # The last forward runs ahead and has no figures.
        n_layers = len(loaded.engine.layers)
        calls = inside[-n_layers * (n_tokens - n_tokens // 3 + 1) : -n_layers]
        result |= {
            "python_s": float(np.mean(calls)),
            "misses": float(io.misses[late].sum(axis=1).mean()),
            "bytes": float(io.read_bytes[late].sum(axis=1).mean()),
            "read_s": float(io.read_s[late].sum(axis=1).mean()),
            "wait_s": float(io.wait_s[late].sum(axis=1).mean()),
            "eval_s": float(io.eval_s[late].sum(axis=1).mean()),
            "step_s": float(io.step_s[late].mean()),
        }
    print(json.dumps(result))


def _time_calls() -> list[float]:
    """From now on, the processor time that each call of a streamed layer takes its thread, without
    what it takes in MLX's `eval` and `async_eval`.
    """
    from time import thread_time

    import mlx.core as mx

    from moetap.capture.streaming.engine import Layer

    inside, times = 0.0, []

    def evaluating(function):
        def timed(*arrays):
            nonlocal inside
            begin = thread_time()
            function(*arrays)
            inside += thread_time() - begin

        return timed

    mx.eval, mx.async_eval = evaluating(mx.eval), evaluating(mx.async_eval)
    original = Layer._run

    def timed(self, x, indices):
        begin, before = thread_time(), inside
        out = original(self, x, indices)
        times.append(thread_time() - begin - (inside - before))
        return out

    Layer._run = timed
    return times


def _peak() -> int:
    """Bytes; ru_maxrss would count the parent's memory, too."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


# -- the table


def child(folder: Path, slots: int, cold: bool, args: argparse.Namespace) -> dict[str, float]:
    """Run `measure` in a new process."""
    code = [sys.executable, __file__, "--measure", str(folder), "--slots", str(slots)]
    code += ["--prompt", str(args.prompt), "--tokens", str(args.tokens), *["--cold"] * cold]
    out = subprocess.run(code, stdout=subprocess.PIPE, text=True, check=True).stdout
    result: dict[str, float] = json.loads(out.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description="memory and speed of streamed experts")
    parser.add_argument("--layers", type=int, default=8, help="a multiple of 4")
    parser.add_argument("--slots", default="16,64,128")
    parser.add_argument("--prompt", type=int, default=64, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=60, help="generated tokens")
    parser.add_argument(
        "--skew",
        type=float,
        default=0.5,
        help="how unevenly the routers select; 0.5 gives the hit rates of real models, 0 the worst",
    )
    parser.add_argument("--no-resident", action="store_true", help="for models larger than memory")
    parser.add_argument(
        "--checkpoint", type=Path, help="keep the checkpoint in this folder, or use the one there"
    )
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cold", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure, int(args.slots), args.cold, args.prompt, args.tokens)
        return
    from moetap.capture.probe import probe

    with contextlib.ExitStack() as stack:
        folder = args.checkpoint
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moetap-")))
        folder.mkdir(exist_ok=True)
        if not (folder / "config.json").exists():
            what = [str(Path(__file__).parent), str(folder), str(args.layers), str(args.skew)]
            subprocess.run([sys.executable, "-c", _MAKE, *what], check=True)
        size = sum(f.stat().st_size for f in folder.glob("*.safetensors"))
        print(f"{args.layers} layers, {size / 1e9:.2f} GB on disk")
        disk = probe(folder, EXPERT_BYTES, seconds=2.0)
        for reading in disk.random:
            state = "cold" if reading.cold else f"warm: {reading.why_warm}"
            print(
                f"probe: depth {reading.depth}, {reading.bandwidth_bps / 1e9:.2f} GB/s ({state})",
                flush=True,
            )
        probed = max(reading.bandwidth_bps for reading in disk.random)
        compute = activations = None
        if not args.no_resident:
            resident = child(folder, 0, False, args)
            compute, activations = resident["token_s"], resident["activations"]
            print(
                f"resident: RSS {resident['peak'] / 1e9:.2f} GB, {compute * 1e3:.0f} ms a token",
                flush=True,
            )
        print(
            "   C reads   hit  RSS GB  ledger  diff   MB/token  ms/token  bound  ratio  "
            "wait ms  Python ms/layer"
        )
        for slots in (int(c) for c in args.slots.split(",")):
            for cold in (True, False):
                r = child(folder, slots, cold, args)
                held = r["activations"] if activations is None else activations
                print(_line(slots, cold, r, compute, held, probed, args), flush=True)


_MAKE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from streaming import make_checkpoint
make_checkpoint(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
"""


def _line(
    slots: int,
    cold: bool,
    r: dict[str, float],
    compute: float | None,
    activations: float,
    probed: float,
    args: argparse.Namespace,
) -> str:
    predicted = r["before"] + r["weights"] + activations
    # Warm reads have no probe: their bandwidth is that of the run's own reads.
    bandwidth = probed if cold else r["bytes"] / max(r["read_s"], 1e-9)
    # Without a resident run, compute is what the streamed one waited for it.
    bound = max(compute or r["eval_s"], r["bytes"] / bandwidth)
    return (
        f"{slots:4d} {'cold' if cold else 'warm'}  {1 - r['misses'] / (8 * args.layers):5.2f}"
        f"  {r['peak'] / 1e9:6.2f}  {predicted / 1e9:6.2f}  {r['peak'] / predicted - 1:+5.1%}"
        f"  {r['bytes'] / 1e6:8.1f}  {r['token_s'] * 1e3:8.0f}  {bound * 1e3:5.0f}"
        f"  {r['token_s'] / bound:5.2f}  {r['wait_s'] * 1e3:7.1f}  {r['python_s'] * 1e3:15.2f}"
    )


if __name__ == "__main__":
    main()
