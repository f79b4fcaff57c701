"""Streaming as a user meets it: capture, info, verify, repack."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from test_cli import assert_same_streams, fails, run_capture

from moetap import read
from moetap.analysis.measured import agreement
from moetap.capture import _machine
from moetap.capture.checkpoint import read_tensors
from moetap.capture.streaming import reads
from moetap.cli import main

TEXTS = ("def f(x):", "SELECT 1", "fn main() {")


@pytest.fixture
def options(prompts_file):
    return ("--prompts", prompts_file(*TEXTS), "--max-tokens", 70, "--temp", 1)


@pytest.mark.parametrize("how", [(4,), (7,), (16,), (7, "--cold")])
def test_a_streamed_capture_is_the_same_trace(model_dir, options, tmp_path, capsys, how):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    assert run_capture(model_dir, a, *options) == 0
    assert run_capture(model_dir, b, *options, "--slots", *how) == 0
    x, y = read(a), read(b)
    assert_same_streams(x, y)
    assert (y.capture.mode, y.capture.slots, y.capture.policy) == ("streaming", how[0], "lru")
    assert x.capture.expert_kernel == y.capture.expert_kernel == "row"
    found = agreement(y)
    assert found.different == 0 and found.cells == 3 * 70 * 3
    assert sum(s.io.read_bytes.sum() for s in y.streams) == found.measured * 2816

    capsys.readouterr()
    assert main(["info", str(b)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"streaming, {how[0]} slots a layer, lru" in text
    assert "equal in all 630 (step, layer) cells" in text
    assert "hit rate" in text and "past the page cache" in text if how[1:] else True


@pytest.mark.parametrize("policy", ["lfu-aging", "sieve"])
def test_another_policy(model_dir, options, tmp_path, policy):
    a, b = tmp_path / "a.h5", tmp_path / "b.h5"
    assert run_capture(model_dir, a, *options, "--slots", 6) == 0
    assert run_capture(model_dir, b, *options, "--slots", 6, "--policy", policy) == 0
    x, y = read(a), read(b)
    assert_same_streams(x, y)
    assert y.capture.policy == policy
    # The same routing, other misses, and again those of the policy's replay.
    assert agreement(y).different == 0
    assert agreement(y).measured != agreement(x).measured


@pytest.mark.parametrize(
    ("policy", "line"),
    [
        ("belady", "to know what will be requested"),
        ("static", "cannot decide online"),
        ("pinned:2", "cannot decide online"),
        ("none", "no policy is called 'none'"),
    ],
)
def test_a_policy_that_cannot_decide_online(model_dir, options, tmp_path, capsys, policy, line):
    out = tmp_path / "t.h5"
    said = fails(
        capsys, 2, "capture", "--model", model_dir, "-o", out, *options, "--policy", policy
    )
    assert line in said and not out.exists()


def test_resume(model_dir, options, tmp_path, capsys):
    whole, out = tmp_path / "whole.h5", tmp_path / "t.h5"
    assert run_capture(model_dir, whole, *options, "--slots", 5) == 0
    stop = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    from moetap.capture.streaming.engine import Engine

    take, calls = Engine.take, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Engine,
            "take",
            lambda s, n: stop() if len(calls) == 2 else calls.append(1) or take(s, n),
        )
        assert run_capture(model_dir, out, *options, "--slots", 5) == 1
    assert len(read(out).streams) == 2
    line = fails(capsys, 1, "capture", "--model", model_dir, "-o", out, *options, "--resume")
    assert "mode differs: 'streaming' in the trace, 'resident' now" in line
    assert run_capture(model_dir, out, *options, "--slots", 5, "--resume") == 0
    assert_same_streams(read(out), read(whole))


def test_the_machine_decides(model_dir, options, tmp_path, capsys, monkeypatch):
    out = tmp_path / "t.h5"
    assert run_capture(model_dir, out, *options) == 0
    assert "resident: " in capsys.readouterr().err
    model = read(out).model
    # Caches of 256 tokens, the ledger's allowances, and 11 of 16 slots in 3 layers.
    budget = model.resident_bytes + 256 * model.kv_bytes_per_token + 500_000_000 + 3 * 11 * 2816
    memory = ("--memory", f"{budget / 1e6:.6f}MB")
    assert run_capture(model_dir, out, *options, *memory, "--force") == 0
    assert "streaming: 11 of 16 expert slots" in capsys.readouterr().err
    assert run_capture(model_dir, out, *options, "--stream", "--force") == 0
    assert "streaming: 16 of 16 expert slots a layer" in capsys.readouterr().err
    monkeypatch.setattr(_machine, "ram_bytes", lambda: 2**30)
    line = fails(capsys, 1, "capture", "--model", model_dir, "-o", out, *options, "--force")
    assert "does not fit 1 GiB of memory even with 4 slots a layer" in line
    line = fails(
        capsys, 1, "capture", "--model", model_dir, "-o", out, *options, "--force", "--resident"
    )
    assert "does not fit 1 GiB" in line
    assert read(out).complete  # refused before anything was overwritten


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--slots", 3), "3 slots: tiny-random selects 4 of 16 experts"),
        (("--slots", 17), "give 4 to 16"),
        (("--memory", "1MB"), "with 4 slots a layer, the fewest"),
        (("--memory", "much"), "not a size like 6GB"),
        (("--slots", 5, "--memory", "1GB"), "choose one"),
        (("--resident", "--stream"), "--resident does not go with"),
    ],
)
def test_bad_input(model_dir, options, tmp_path, capsys, given, said):
    out = tmp_path / "t.h5"
    assert said in fails(capsys, 2, "capture", "--model", model_dir, "-o", out, *options, *given)
    assert not out.exists()


def sabotage(monkeypatch, after: int, action):
    """Call `action` once `after` reads were made, with the file descriptor and offset."""
    real, n = os.preadv, [0]

    def preadv(fd, buffers, offset):
        n[0] += 1
        if n[0] >= after:
            action()
        return real(fd, buffers, offset)

    monkeypatch.setattr(reads.os, "preadv", preadv)


def count_reads(monkeypatch, *args) -> int:
    n = []
    real = os.preadv
    with monkeypatch.context() as patch:
        patch.setattr(reads.os, "preadv", lambda *a: n.append(1) or real(*a))
        assert run_capture(*args) == 0
    return len(n)


def eio():
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("fault", ["eio", "truncated", "changed"])
def test_a_failing_disk_keeps_finished_streams(
    model_dir, options, tmp_path, capsys, monkeypatch, fault
):
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    (shard,) = folder.glob("*.safetensors")
    content = shard.read_bytes()
    whole, out = tmp_path / "whole.h5", tmp_path / "t.h5"
    n = count_reads(monkeypatch, folder, whole, *options, "--slots", 5)
    actions = {
        "eio": (eio, "failed twice (Input/output error)"),
        "truncated": (lambda: os.truncate(shard, 1000), "truncated while experts were read"),
        "changed": (lambda: os.utime(shard, (0, 0)), "was changed while experts were read"),
    }
    action, said = actions[fault]
    with monkeypatch.context() as patch:
        sabotage(patch, n * 2 // 3, action)
        line = fails(capsys, 1, "capture", "--model", folder, "-o", out, *options, "--slots", 5)
    assert said in line and shard.name in line
    kept = read(out)
    assert not kept.complete and 1 <= len(kept.streams) < 3
    shard.write_bytes(content)
    assert run_capture(folder, out, *options, "--slots", 5, "--resume") == 0
    assert_same_streams(read(out), read(whole))


def test_a_single_failure_is_survived(model_dir, options, tmp_path, monkeypatch):
    whole, out = tmp_path / "whole.h5", tmp_path / "t.h5"
    assert run_capture(model_dir, whole, *options) == 0
    left = [1]

    def once():
        if left[0]:
            left[0] -= 1
            eio()

    sabotage(monkeypatch, 50, once)
    assert run_capture(model_dir, out, *options, "--slots", 5) == 0
    assert left == [0]
    assert_same_streams(read(out), read(whole))


def test_experts_stored_fused_are_resident_only(model_dir, options, tmp_path, capsys, monkeypatch):
    from mlx_lm.models import qwen3_moe

    def scaled(self, weights):
        return {n: w * 1 if "switch_mlp" in n else w for n, w in weights.items()}

    monkeypatch.setattr(qwen3_moe.Model, "sanitize", scaled)
    out = tmp_path / "t.h5"
    line = fails(capsys, 1, "capture", "--model", model_dir, "-o", out, *options, "--stream")
    assert "gate_proj.weight" in line and "capture it resident" in line
    assert run_capture(model_dir, out, *options) == 0


@pytest.mark.parametrize(("growth", "flagged"), [(100_000_000, False), (100_000_001, True)])
def test_swap_growth_is_kept_and_flagged(
    model_dir, options, tmp_path, capsys, monkeypatch, growth, flagged
):
    grown = iter([7, 7 + growth])  # before the capture, and after its first stream; then it shrinks
    monkeypatch.setattr(_machine, "swap_bytes", lambda: next(grown, 7))
    out = tmp_path / "t.h5"
    assert run_capture(model_dir, out, *options) == 0
    assert read(out).capture.swap_growth_bytes == growth
    assert main(["info", str(out)]) == 0
    assert ("memory ran short" in " ".join(capsys.readouterr().out.split())) == flagged


@pytest.mark.parametrize(("growth", "flagged"), [(100_000_000, False), (100_000_001, True)])
def test_a_machine_that_swaps_is_told(
    model_dir, options, tmp_path, capsys, monkeypatch, growth, flagged
):
    in_use = iter([0])
    monkeypatch.setattr(_machine, "swap_bytes", lambda: next(in_use, growth))
    assert run_capture(model_dir, tmp_path / "t.h5", *options) == 0
    assert ("memory ran short: swap grew by 0.10 GB" in capsys.readouterr().err) == flagged


def test_a_system_that_tells_nothing_of_swap(model_dir, options, tmp_path, monkeypatch):
    monkeypatch.setattr(_machine, "swap_bytes", lambda: None)
    assert run_capture(model_dir, tmp_path / "t.h5", *options) == 0
    assert read(tmp_path / "t.h5").capture.swap_growth_bytes is None


def test_verify(model_dir, capsys, monkeypatch):
    args = ["verify", "--streaming", "--model", str(model_dir)]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "C = 4    prompt 300   prefill step 64    identical" in out
    assert "all 8 cases identical" in out
    assert "give --streaming" in fails(capsys, 2, "verify")
    assert "give 4 to 16" in fails(capsys, 2, *args, "--slots", "3")

    from moetap.capture.streaming.engine import Layer

    real = Layer._slots_of
    monkeypatch.setattr(Layer, "_slots_of", lambda *args: real(*args) * 0)
    assert main(args) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: routing, first at row" in out and "do not stream on this machine" in out


def test_repack(model_dir, options, tmp_path, capsys):
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    experts, whole, out = (tmp_path / n for n in ("m.experts", "whole.h5", "t.h5"))
    assert main(["repack", str(folder), "-o", str(experts)]) == 0
    assert "0.000 GB of experts, verified" in capsys.readouterr().out
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert "--force replaces it" in fails(capsys, 1, "repack", folder, "-o", experts)

    assert run_capture(folder, whole, *options) == 0
    for cold in ((), ("--cold",)):
        more = ("--slots", 5, "--experts", experts, "--force", *cold)
        assert run_capture(folder, out, *options, *more) == 0
        assert_same_streams(read(out), read(whole))
        assert agreement(read(out)).different == 0

    args = ("capture", "--model", folder, "-o", out, *options, "--force", "--experts", experts)
    content = experts.read_bytes()
    experts.write_bytes(content[:-1])
    assert "truncated, expected" in fails(capsys, 1, *args)
    experts.write_bytes(content.replace(b"moetap-experts 1", b"moetap-experts 2"))
    assert "not a file of moetap repack" in fails(capsys, 1, *args)
    experts.unlink()
    assert "m.experts: cannot be read (No such file" in fails(capsys, 1, *args)
    other = folder / "model.safetensors.index.json"
    experts.write_bytes(content)
    other.write_text(other.read_text() + " ")
    assert "holds the experts of other weights" in fails(capsys, 1, *args)


def test_an_expert_copy_of_a_fine_tune(model_dir, options, tmp_path, capsys):
    """The same names and places, so the same hash, but other weights."""
    folder, experts = Path(shutil.copytree(model_dir, tmp_path / "m")), tmp_path / "m.experts"
    assert main(["repack", str(folder), "-o", str(experts)]) == 0
    (shard,) = folder.glob("*.safetensors")
    content = bytearray(shard.read_bytes())
    for tensor in read_tensors(shard):
        if "switch_mlp.up_proj.weight" in tensor.name:
            content[tensor.begin : tensor.end] = content[tensor.begin : tensor.end][::-1]
    shard.write_bytes(content)
    args = ("capture", "--model", folder, "-o", tmp_path / "t.h5", *options, "--experts", experts)
    assert "holds the experts of other weights" in fails(capsys, 1, *args)


def test_repack_does_not_touch_the_model(model_dir, tmp_path, capsys):
    folder = Path(shutil.copytree(model_dir, tmp_path / "m"))
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    for name in (next(n for n in before if n.endswith(".safetensors")), "new.safetensors"):
        line = fails(capsys, 1, "repack", folder, "-o", folder / name, "--force")
        assert "would be taken for a shard" in line
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_weights_that_cannot_be_computed_here(tmp_path, options, capsys):
    """MLX's CPU backend has no float16 product of plain experts: one line, resident or streamed."""
    from modeldir import make_model_dir

    folder = make_model_dir(tmp_path / "m", quantization=None)
    import mlx.core as mx

    (shard,) = folder.glob("*.safetensors")
    half = {n: a.astype(mx.float16) for n, a in mx.load(str(shard)).items()}
    mx.eval(half)
    mx.save_safetensors(str(shard), half, metadata={"format": "mlx"})
    args = ("capture", "--model", folder, "-o", tmp_path / "t.h5", *options, "--force")
    for how in ((), ("--slots", 5)):
        assert "only supports float32" in fails(capsys, 1, *args, *how)


def test_one_read_an_expert(model_dir, options, tmp_path, monkeypatch):
    experts = tmp_path / "m.experts"
    assert main(["repack", str(model_dir), "-o", str(experts)]) == 0
    args = (model_dir, tmp_path / "t.h5", *options, "--slots", 5, "--force")
    apart = count_reads(monkeypatch, *args)
    together = count_reads(monkeypatch, *args, "--experts", experts)
    assert together * 5 < apart


def test_repack_notices_a_bad_copy(model_dir, tmp_path, capsys, monkeypatch):
    from moetap.capture import repack

    experts = tmp_path / "m.experts"
    monkeypatch.setattr(repack, "_digest", lambda *_: "0")
    assert "differs from what was written" in fails(capsys, 1, "repack", model_dir, "-o", experts)
    monkeypatch.setattr(repack.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 0))
    assert "GB are free there" in fails(capsys, 1, "repack", model_dir, "-o", experts)
    assert list(tmp_path.iterdir()) == []
