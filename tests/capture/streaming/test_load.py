"""What loading reads, keeps and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from families import CONFIGS, make_model
from mlx.utils import tree_flatten
from modeldir import make_model_dir

from moetap.capture import _mlx
from moetap.capture.streaming import arena, load
from moetap.capture.streaming.load import stream
from moetap.capture.streaming.selfcheck import arbitrary_tokens, difference, run
from moetap.errors import MoetapError, UsageError


def unstack(folder: Path, family: str, rename: dict[str, str], block: str) -> None:
    """Replace the weights by ones stored expert by expert, as Hugging Face has them."""
    model = make_model(family, config=CONFIGS[family] | {"vocab_size": 257})
    tensors = {}
    for name, array in tree_flatten(model.parameters()):
        before, found, after = name.partition(f"{block}.switch_mlp.")
        if not found:
            tensors[name] = array
            continue
        projection, parameter = after.split(".")
        for e in range(array.shape[0]):
            stored = f"{before}{block}.experts.{e}.{rename.get(projection, projection)}.{parameter}"
            tensors[stored] = mx.contiguous(array[e])
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    names = sorted(tensors)  # 10 before 2: not in the experts' order
    mx.save_safetensors(str(folder / "model.safetensors"), {n: tensors[n] for n in names})


@pytest.mark.parametrize(
    ("family", "rename", "block"),
    [
        ("qwen3_moe", {}, "mlp"),
        ("mixtral", {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}, "block_sparse_moe"),
    ],
)
def test_experts_stored_one_by_one(tmp_path, family, rename, block):
    folder = make_model_dir(tmp_path / "m", family, quantization=None)
    unstack(folder, family, rename, block)
    resident = _mlx.load(str(folder))
    streamed = stream(_mlx.open_model(str(folder)), resident.info.max_top_k)
    prompt = arbitrary_tokens(resident, 40)
    assert difference(run(resident, prompt, 16), run(streamed, prompt, 16)) == ""


def test_wrongly_named_experts_are_found_out(tmp_path):
    """Names swapped on disk after mlx-lm read them: what is located is not what mlx-lm computed."""
    folder = make_model_dir(tmp_path / "m", "mixtral", quantization=None)
    rename = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    unstack(folder, "mixtral", rename, "block_sparse_moe")
    opened = _mlx.open_model(str(folder))
    shard = folder / "model.safetensors"
    before = shard.stat()
    data = shard.read_bytes()
    shard.write_bytes(
        data.replace(b".experts.0.w1", b".experts.0.wX")
        .replace(b".experts.1.w1", b".experts.0.w1")
        .replace(b".experts.0.wX", b".experts.1.w1")
    )
    assert shard.stat().st_size == before.st_size
    with pytest.raises(MoetapError, match="expert 0 is not what model.safetensors stores"):
        stream(opened, 4)


def test_what_mlx_lm_computes_is_refused_by_name(tmp_path, monkeypatch):
    from mlx_lm.models import qwen3_moe

    folder = make_model_dir(tmp_path / "m", quantization=None)

    def doubled(self, weights):
        return {n: w * 2 if "up_proj" in n else w for n, w in weights.items()}

    monkeypatch.setattr(qwen3_moe.Model, "sanitize", doubled)
    with pytest.raises(
        MoetapError, match=r"layers\.0\.mlp\.switch_mlp\.up_proj\.weight: mlx-lm comp"
    ):
        stream(_mlx.open_model(str(folder)), 4)


@pytest.mark.parametrize("slots", [3, 17, 0, -1])
def test_slots_out_of_range(model_dir, slots):
    with pytest.raises(UsageError, match=f"{slots} slots: .* selects 4 of 16 .*; give 4 to 16"):
        stream(_mlx.open_model(str(model_dir)), slots)


def test_truncated_shard(tmp_path):
    folder = make_model_dir(tmp_path / "m")
    opened = _mlx.open_model(str(folder))
    (shard,) = folder.glob("*.safetensors")
    size = shard.stat().st_size
    os.truncate(shard, size - 10)
    with pytest.raises(
        MoetapError, match=f"truncated, expected {size:,} bytes, found {size - 10:,}"
    ):
        stream(opened, 4)


def test_no_memory_ends_with_advice(model_dir, monkeypatch):
    def fail(*_):
        raise RuntimeError("[metal::malloc] Attempting to allocate too much")

    monkeypatch.setattr(load, "Arena", fail)
    with pytest.raises(MoetapError, match="no memory for 16 slots .* try --slots 8"):
        stream(_mlx.open_model(str(model_dir)), 16)


def test_arenas_that_are_replaced_are_noticed(model_dir):
    streamed = stream(_mlx.open_model(str(model_dir)), 5)
    run(streamed, [1, 2, 3], 16)
    streamed.model.set_dtype(mx.bfloat16)
    with pytest.raises(MoetapError, match="moved or replaced"):
        run(streamed, [1, 2, 3], 16)


def test_an_arena_that_is_not_contiguous_is_refused(model_dir, monkeypatch):
    opened = _mlx.open_model(str(model_dir))
    one = mx.zeros(())

    def broadcast(shape, dtype):
        return mx.broadcast_to(one.astype(dtype), shape)

    monkeypatch.setattr(arena.mx, "zeros", broadcast)
    with pytest.raises(MoetapError, match="not contiguous"):
        stream(opened, 5)


def test_slots_hold_what_the_files_hold(model_dir):
    streamed = stream(_mlx.open_model(str(model_dir)), 6)
    run(streamed, arbitrary_tokens(streamed, 30), 16)
    whole = _mlx.load(str(model_dir))
    arrays = dict(tree_flatten(whole.model.parameters()))
    checked = 0
    for layer in streamed.engine.layers:
        for arena_ in layer._arenas:
            full = np.frombuffer(arrays[arena_.path], np.uint8).reshape(16, -1)
            for expert, slot in layer.table.slot_of.items():
                assert bytes(arena_.slot(slot)) == full[expert].tobytes()
                checked += 1
    assert checked > 100


_CHILD = """
import sys
from moetap.capture import _mlx
from moetap.capture.streaming.load import stream
def peak():
    (line,) = (l for l in open("/proc/self/status") if l.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
opened = _mlx.open_model(sys.argv[1])
before = peak()
loaded = stream(opened, int(sys.argv[2])) if int(sys.argv[2]) else opened.resident()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs the peak of a process of its own")
def test_memory_of_loading(tmp_path):
    """150 MB of experts: the peak grows by resident weights and slots, not by experts."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64}
    folder = make_model_dir(tmp_path / "m", quantization=None, **sizes)
    experts = 3 * 64 * 3 * 256 * 256 * 4
    assert sum(f.stat().st_size for f in folder.glob("*.safetensors")) > experts

    def peak(slots: int) -> int:
        code = [sys.executable, "-c", _CHILD, str(folder), str(slots)]
        return int(subprocess.run(code, capture_output=True, text=True, check=True).stdout)

    resident_weights = _mlx.open_model(str(folder)).info.resident_bytes
    noise = 20_000_000
    arena_bytes = experts * 8 // 64
    assert peak(8) < 1.1 * (resident_weights + arena_bytes) + noise
    assert peak(0) > experts
