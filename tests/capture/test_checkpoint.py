"""Headers, shards and classification: against live modules, a naive recount, and broken files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from families import CONFIGS, FAMILIES, divisible, make_model
from headerkit import described, nbytes, write_checkpoint, write_headers
from mlx.utils import tree_flatten
from mlx_lm.utils import save_model

from moetap.capture.checkpoint import (
    INDEX,
    classify,
    default_dtype,
    read_checkpoint,
    read_repository,
)
from moetap.capture.tap import find_switches
from moetap.errors import MoetapError


def saved(folder: Path, family: str, quantised: bool) -> tuple[nn.Module, Path]:
    model = make_model(family)
    model.set_dtype(mx.bfloat16)
    if quantised:
        nn.quantize(model, 32, 4, class_predicate=divisible)
    mx.eval(model.parameters())
    save_model(folder, model)
    (folder / "config.json").write_text(json.dumps({"model_type": family} | CONFIGS[family]))
    return model, folder


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("quantised", [False, True])
def test_classification_equals_the_live_modules(family, quantised, tmp_path):
    model, folder = saved(tmp_path, family, quantised)
    inventory = classify(read_checkpoint(folder))
    switches = find_switches(model)
    assert [(s.layer_index, s.n_experts, s.expert_bytes) for s in switches] == [
        (layer.layer_index, layer.n_experts, layer.expert_bytes) for layer in inventory.layers
    ]
    total = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    routed = sum(s.expert_bytes * s.n_experts for s in switches)
    assert inventory.resident_bytes == total - routed
    assert inventory.unrecognised == () and inventory.dropped == ()
    assert inventory.checkpoint.listing == f"1 file of {INDEX}"
    assert default_dtype(inventory.checkpoint.tensors)[0] == "BF16"


def test_the_parts_of_an_expert_lie_where_the_table_says(tmp_path):
    model, folder = saved(tmp_path, "qwen3_moe", True)
    inventory = classify(read_checkpoint(folder))
    arrays = dict(tree_flatten(model.parameters()))
    parts = [p for p in inventory.experts if p.layer == 2]
    assert {(p.projection, p.parameter) for p in parts} == {
        ("gate_proj", "weight"), ("gate_proj", "scales"), ("gate_proj", "biases"),
        ("up_proj", "weight"), ("up_proj", "scales"), ("up_proj", "biases"),
        ("down_proj", "weight"),
    }  # fmt: skip
    for part in parts:
        stored = part.path.read_bytes()
        for expert in (0, 7, 15):
            begin = part.begin + expert * part.bytes_per_expert
            live = bytes(memoryview(arrays[part.tensor.name][expert].view(mx.uint8)))
            assert stored[begin : begin + part.bytes_per_expert] == live


# -- the described checkpoint


@pytest.fixture(scope="module")
def qwen36(tmp_path_factory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen36"), *described(), shards=4)


def test_qwen36_by_hand(qwen36):
    inventory = classify(read_checkpoint(qwen36, header_only=True))
    # Three matrices of 2048 x 512 at 4 bits, and a bf16 scale and bias for each 64 of them.
    expert = 3 * (2048 * 512 // 2 + 2 * 2 * 2048 * 512 // 64)
    assert expert == 1_769_472
    assert [(x.layer_index, x.n_experts, x.expert_bytes) for x in inventory.layers] == [
        (i, 256, expert) for i in range(40)
    ]
    assert inventory.resident_bytes == 1_389_394_176
    assert [40 * c * expert for c in (64, 128, 192, 256)] == [
        4_529_848_320, 9_059_696_640, 13_589_544_960, 18_119_393_280,
    ]  # fmt: skip
    assert set(inventory.dropped_by_reason) == {"vision tower", "multi-token prediction"}
    assert inventory.unrecognised == ()
    # Embedding and head: 248,320 x 2048 x 4.5 bits each, and the last norm.
    assert inventory.resident_by_layer[None] == 2 * (248_320 * 2048 * 9 // 16) + 2048 * 2
    assert sum(inventory.resident_by_module.values()) == inventory.resident_bytes


def test_a_naive_recount_agrees(qwen36):
    """The headers once more with nothing but json, and the rule in one line."""
    sizes = {"resident": 0, "routed": 0}
    for file in qwen36.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        for name, entry in header.items():
            if name == "__metadata__" or name.startswith(("vision_tower", "mtp")):
                continue
            kind = "routed" if ".switch_mlp." in name else "resident"
            sizes[kind] += entry["data_offsets"][1] - entry["data_offsets"][0]
    inventory = classify(read_checkpoint(qwen36, header_only=True))
    assert sizes["resident"] == inventory.resident_bytes
    assert sizes["routed"] == sum(x.n_experts * x.expert_bytes for x in inventory.layers)
    assert sizes["routed"] == sum(p.bytes_per_expert * p.n_experts for p in inventory.experts)


def test_header_only_is_asked_for_and_never_assumed(qwen36):
    with pytest.raises(MoetapError, match="truncated, expected [0-9,]+ bytes, found [0-9,]+"):
        read_checkpoint(qwen36)


# -- other layouts

BF16 = "BF16"


def write(tmp_path: Path, tensors, **config) -> Path:
    return write_checkpoint(tmp_path / "m", {"model_type": "x"} | config, tensors, data=True)


def test_numbered_experts_of_hugging_face(tmp_path):
    tensors = {
        f"model.layers.1.mlp.experts.{e}.{p}_proj.weight": (BF16, [4, 8])
        for e in range(3)
        for p in ("gate", "up", "down")
    }
    tensors |= {
        "model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv": ("F32", [1]),
        "model.layers.1.mlp.experts.1.gate_proj.weight_scale_inv": ("F32", [1]),
        "model.layers.1.mlp.experts.2.gate_proj.weight_scale_inv": ("F32", [1]),
        "model.layers.1.mlp.shared_experts.gate_proj.weight": (BF16, [4, 8]),
        "model.layers.1.mlp.gate.e_score_correction_bias": ("F32", [3]),
    }
    inventory = classify(read_checkpoint(write(tmp_path, tensors)))
    (layer,) = inventory.layers
    assert (layer.layer_index, layer.n_experts, layer.expert_bytes) == (1, 3, 3 * 64 + 4)
    assert inventory.resident_bytes == 64 + 12
    assert {p.expert for p in inventory.experts} == {0, 1, 2}


def test_fused_experts_of_hugging_face(tmp_path):
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": ("U8", [4, 16, 2, 16]),
        "model.layers.0.mlp.experts.gate_up_proj_scales": ("U8", [4, 16, 2]),
        "model.layers.0.mlp.experts.gate_up_proj_bias": (BF16, [4, 16]),
        "model.layers.0.mlp.experts.down_proj": (BF16, [4, 8, 8]),
        "model.layers.0.mlp.router.weight": (BF16, [4, 8]),
    }
    inventory = classify(read_checkpoint(write(tmp_path, tensors)))
    assert inventory.layers[0].expert_bytes == 16 * 32 + 16 * 2 + 16 * 2 + 128
    assert {(p.projection, p.parameter) for p in inventory.experts} == {
        ("gate_up_proj", "blocks"), ("gate_up_proj", "scales"), ("gate_up_proj", "bias"),
        ("down_proj", "weight"),
    }  # fmt: skip
    assert inventory.resident_bytes == 64


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("model.visual.blocks.0.attn.qkv.weight", True),
        ("vision_tower.blocks.0.attn.qkv.weight", True),
        ("multi_modal_projector.linear_1.weight", True),
        ("mtp.layers.0.mlp.experts.gate_up_proj", True),
        ("model.mtp_block.0.norm.weight", True),
        ("model.layers.2.mlp.switch_mlp.gate_proj.weight", True),  # layer = num_hidden_layers
        ("model.layers.1.self_attn.rotary_emb.inv_freq", True),
        ("lm_head.weight", True),  # tied
        ("model.layers.1.mlp.shared_expert.gate_proj.weight", False),
        ("model.layers.1.mlp.experts.e_score_correction_bias", False),
        ("model.layers.1.mlp.router.experts.weight", False),
        ("model.attempt.weight", False),  # "mtp" is a segment, not a part of a word
        ("model.something.visual.weight", False),
    ],
)
def test_what_is_left_out_and_what_is_not(name, dropped, tmp_path):
    tensors = {
        "model.layers.0.mlp.switch_mlp.fc1.weight": (BF16, [4, 8, 8]),
        name: (BF16, [4, 8, 8]),
    }
    config = {"text_config": {"num_hidden_layers": 2, "tie_word_embeddings": True}}
    inventory = classify(read_checkpoint(write(tmp_path, tensors, **config)))
    assert [t.name for t, _ in inventory.dropped] == ([name] if dropped else [])
    assert [t.name for t in inventory.resident] == ([] if dropped else [name])


def test_what_is_not_recognised_is_resident_and_listed(tmp_path):
    tensors = {
        "model.layers.0.mlp.switch_mlp.fc1.weight": (BF16, [4, 8, 8]),
        "model.layers.0.mlp.lorem.weight": (BF16, [4, 8, 8]),  # stacked over E under another name
        "model.ipsum.weight": (BF16, [8]),
        "model.norm.weight": (BF16, [8]),
    }
    inventory = classify(read_checkpoint(write(tmp_path, tensors)))
    assert [t.name for t in inventory.unrecognised] == [
        "model.ipsum.weight",
        "model.layers.0.mlp.lorem.weight",
    ]
    assert inventory.resident_bytes == 512 + 16 + 16


def test_a_dense_model_and_experts_that_contradict_each_other(tmp_path):
    with pytest.raises(MoetapError, match="no routed experts among 1 tensors"):
        classify(read_checkpoint(write(tmp_path, {"model.norm.weight": (BF16, [8])})))
    name = "model.layers.0.mlp.experts.{}.w1.weight"
    uneven = {name.format(0): (BF16, [8]), name.format(1): (BF16, [9])}
    with pytest.raises(MoetapError, match="experts of different sizes, 16 to 18 bytes"):
        classify(read_checkpoint(write(tmp_path, uneven)))
    gap = {name.format(0): (BF16, [8]), name.format(2): (BF16, [8])}
    with pytest.raises(MoetapError, match="not numbered from 0 to 1"):
        classify(read_checkpoint(write(tmp_path, gap)))


# -- files

TENSORS = {f"model.layers.0.mlp.switch_mlp.fc{i}.weight": (BF16, [4, 8, 8]) for i in range(4)}


def folder_of(tmp_path: Path, **options) -> Path:
    return write_checkpoint(tmp_path / "m", {}, TENSORS, shards=2, data=True, **options)


def test_which_files_are_counted_is_said(tmp_path):
    folder = folder_of(tmp_path)
    assert read_checkpoint(folder).listing == f"2 files of {INDEX}"
    index = folder / INDEX
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.0.mlp.switch_mlp.fc3.weight"]
    index.write_text(json.dumps(content))
    checkpoint = read_checkpoint(folder)
    assert "all 2 model*.safetensors files" in checkpoint.listing
    assert "incomplete: it lacks 1 tensors" in checkpoint.listing
    assert len(checkpoint.tensors) == 4
    index.write_text("{")
    assert "no usable" in read_checkpoint(folder).listing
    index.unlink()
    assert "no usable" in read_checkpoint(folder).listing


def test_a_file_outside_a_complete_index(tmp_path):
    folder = folder_of(tmp_path)
    some = dict(list(TENSORS.items())[:1])
    write_headers(folder / "model-old.safetensors", some, data=True)
    assert "left out: model-old.safetensors" in read_checkpoint(folder).listing
    (folder / INDEX).unlink()
    with pytest.raises(MoetapError, match="is both in .* and in model-old.safetensors"):
        read_checkpoint(folder)


@pytest.mark.parametrize("index", [True, False])
def test_a_missing_shard(index, tmp_path):
    folder = folder_of(tmp_path, index=index)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        MoetapError, match="model-00002-of-00002.safetensors missing, 1 of 2 shards"
    ):
        read_checkpoint(folder)


def test_truncated_and_broken_shards(tmp_path):
    folder = folder_of(tmp_path)
    shard = folder / "model-00001-of-00002.safetensors"
    whole = shard.read_bytes()
    size = len(whole)
    for data, message in (
        (whole[:-1], f"truncated, expected {size:,} bytes, found {size - 1:,}"),
        (whole + b"x", f"longer than its header says, expected {size:,} bytes"),
        (whole[:50], "truncated in its header"),
        (b"abc", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        ((2).to_bytes(8, "little") + b"[}", "header is broken"),
        ((2).to_bytes(8, "little") + b"[]", "header is broken"),
        (whole.replace(b'"shape": [4', b'"shape": [5'), "512 bytes for BF16"),
        (whole.replace(b"[512, 1024]", b"[511, 1023]"), "overlap"),
    ):
        shard.write_bytes(data)
        with pytest.raises(MoetapError, match=re.escape(message)) as caught:
            read_checkpoint(folder)
        assert shard.name in str(caught.value) and "\n" not in str(caught.value)


def test_a_shard_that_cannot_be_read(tmp_path):
    folder = folder_of(tmp_path)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("gone")  # what an interrupted download leaves in Hugging Face's cache
    with pytest.raises(MoetapError, match="00002-of-00002.safetensors: cannot be read"):
        read_checkpoint(folder)


def test_no_config_or_no_weights(tmp_path):
    with pytest.raises(MoetapError, match="no config.json"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(MoetapError, match="not valid JSON"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MoetapError, match="no model\\*.safetensors"):
        read_checkpoint(tmp_path)


def test_a_repository_is_read_by_its_headers(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    read: list[int] = []

    class Files:
        """As much of HfFileSystem as is used, over a folder."""

        def ls(self, repo_id, detail):
            entries = [
                {"name": f"{repo_id}/{p.name}", "size": p.stat().st_size, "type": "file"}
                for p in folder.iterdir()
            ]
            return [*entries, {"name": f"{repo_id}/original", "size": 0, "type": "directory"}]

        def open(self, name, mode, block_size):
            file = (folder / name.rpartition("/")[2]).open(mode)
            read.append(block_size)
            return file

    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Files)
    remote = read_repository("owner/name")
    local = read_checkpoint(folder)
    assert [(t.name, t.begin, t.end) for t in remote.tensors] == [
        (t.name, t.begin, t.end) for t in local.tensors
    ]
    assert len(read) == 4 and remote.name == "owner/name"


def test_sizes_of_the_description_add_up():
    _, tensors = described()
    text = {n: e for n, e in tensors.items() if n.startswith("language_model")}
    assert sum(map(nbytes, text.values())) == 19_508_787_456
