"""The command line as a user meets it: whole commands, exit codes, one line per error."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from moetap import read
from moetap.cli import main
from moetap.trace import Trace


def moetap(*args: object) -> list[str]:
    return [sys.executable, "-m", "moetap", *map(str, args)]


def run_capture(model_dir: Path, output: Path, *options: object) -> int:
    return main(["capture", "--model", str(model_dir), "-o", str(output), *map(str, options)])


def assert_same_streams(a: Trace, b: Trace) -> None:
    assert [s.prompt_id for s in a.streams] == [s.prompt_id for s in b.streams]
    for x, y in zip(a.streams, b.streams, strict=True):
        assert np.array_equal(x.experts, y.experts)
        assert np.array_equal(x.tokens, y.tokens)
        assert (x.n_prompt, x.n_generated, x.finish_reason) == (
            y.n_prompt,
            y.n_generated,
            y.finish_reason,
        )


def test_capture_info_analyze(model_dir, prompts_file, tmp_path, capsys):
    out = tmp_path / "t.h5"
    prompts = prompts_file("def f(x):", "SELECT 1", "fn main() {", "hello")
    options = ("--prompts", prompts, "--max-tokens", 10, "--temp", 1, "--scores")
    assert run_capture(model_dir, out, *options) == 0
    err = capsys.readouterr().err
    assert "[4/4] p3" in err and "traced" in err and "next: moetap analyze" in err

    trace = read(out)
    assert trace.complete and [s.prompt_id for s in trace.streams] == ["p0", "p1", "p2", "p3"]
    scores = trace.streams[0].scores[trace.streams[0].decode_start :]
    np.testing.assert_allclose(scores.sum(axis=2), 1, atol=4e-3)  # norm_topk_prob

    assert main(["info", str(out)]) == 0
    text = capsys.readouterr().out
    for expected in (
        "complete, 4 streams",
        "tiny-random",
        "temperature 1",
        "0, 2-3",
        "2,816 bytes",
    ):
        assert expected in text
    prefill = sum(s.n_prompt - 1 for s in trace.streams)
    assert f"layer 3 not executed    {prefill} rows" in text

    assert main(["analyze", str(out)]) == 0
    assert "union" in capsys.readouterr().out


def test_interrupt_keeps_finished_streams_and_resume_continues(model_dir, prompts_file, tmp_path):
    prompts = prompts_file(*(f"prompt number {i}" for i in range(5)))
    options = ("--prompts", prompts, "--max-tokens", 150, "--temp", 1)
    whole, out = tmp_path / "whole.h5", tmp_path / "t.h5"
    assert run_capture(model_dir, whole, *options) == 0

    command = moetap("capture", "--model", model_dir, "-o", out, *options)
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("[2/5]"):
            process.send_signal(signal.SIGINT)
            break
    rest = process.stderr.read()
    assert process.wait(60) == 1
    assert "stopping after this token" in rest and "--resume continues" in rest
    assert "Traceback" not in rest
    trace = read(out)
    assert not trace.complete and 2 <= len(trace.streams) < 5

    assert run_capture(model_dir, out, *options, "--resume") == 0
    assert read(out).complete
    assert_same_streams(read(out), read(whole))


def test_kills_lose_the_stream_in_progress_at_most(model_dir, prompts_file, tmp_path):
    """SIGKILL at moments spread over the run, from the first stream to the merge; then resume."""
    prompts = prompts_file(*(f"prompt number {i}" for i in range(6)))
    options = ("--prompts", prompts, "--max-tokens", 60, "--temp", 1)
    whole, out = tmp_path / "whole.h5", tmp_path / "t.h5"
    assert run_capture(model_dir, whole, *options) == 0
    rng = np.random.default_rng(0)
    saved = 0
    for _ in range(6):
        resume = ("--resume",) if saved else ("--force",)
        command = moetap("capture", "--model", model_dir, "-o", out, *options, *resume)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        begun = saved
        for line in process.stderr:
            if line.startswith("["):  # printed when the next stream has begun
                begun = int(line[1])
                if rng.random() < 0.7:
                    break
        time.sleep(rng.uniform(0, 0.1))
        process.kill()
        process.wait()
        process.stderr.close()
        # `begun` streams were reported finished; at most the one in progress is missing.
        saved = len(read(out).streams) if begun else saved
        assert saved >= begun
        if saved == 6:
            break
    if not (out.exists() and read(out).complete):
        assert run_capture(model_dir, out, *options, "--resume") == 0
    assert_same_streams(read(out), read(whole))


def fails(capsys, code: int, *args: object) -> str:
    assert main([str(a) for a in args]) == code
    err = capsys.readouterr().err.strip().splitlines()
    last = err[-1]
    assert last.startswith("moetap: error: "), err
    return last


@pytest.fixture
def broken(model_dir, tmp_path):
    """A copy of the model folder to damage."""
    return Path(shutil.copytree(model_dir, tmp_path / "broken"))


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestModelErrors:
    def check(self, capsys, tmp_path, model, code=1):
        out = tmp_path / "t.h5"
        line = fails(capsys, code, "capture", "--model", model, "-o", out, "--quick")
        assert not out.exists()
        return line

    def test_dense(self, capsys, tmp_path, broken):
        edit_config(broken, mlp_only_layers=[0, 1, 2, 3])
        for shard in broken.glob("model*"):
            shard.unlink()
        import mlx.core as mx
        from families import CONFIGS, make_model
        from mlx_lm.utils import save_model

        dense = CONFIGS["qwen3_moe"] | {"vocab_size": 257, "mlp_only_layers": [0, 1, 2, 3]}
        model = make_model("qwen3_moe", config=dense)
        mx.eval(model.parameters())
        save_model(broken, model)
        config = json.loads((broken / "config.json").read_text())
        del config["quantization"]
        (broken / "config.json").write_text(json.dumps(config))
        assert "no routed experts found in" in self.check(capsys, tmp_path, broken)

    def test_unknown_type(self, capsys, tmp_path, broken):
        edit_config(broken, model_type="nosuch")
        line = self.check(capsys, tmp_path, broken)
        assert "cannot load this model" in line and "nosuch" in line

    def test_config_lacks_a_key(self, capsys, tmp_path, broken):
        config = json.loads((broken / "config.json").read_text())
        del config["hidden_size"]
        (broken / "config.json").write_text(json.dumps(config))
        assert "hidden_size" in self.check(capsys, tmp_path, broken)

    def test_no_config(self, capsys, tmp_path, broken):
        (broken / "config.json").unlink()
        assert "no usable config.json" in self.check(capsys, tmp_path, broken)

    def test_config_is_not_json(self, capsys, tmp_path, broken):
        (broken / "config.json").write_text("{")
        assert "no usable config.json" in self.check(capsys, tmp_path, broken)

    def test_no_tokenizer(self, capsys, tmp_path, broken):
        for file in broken.glob("token*"):
            file.unlink()
        assert "no tokenizer files" in self.check(capsys, tmp_path, broken)

    def test_broken_tokenizer(self, capsys, tmp_path, broken):
        (broken / "tokenizer.json").write_text("{}")
        assert "cannot load the tokenizer" in self.check(capsys, tmp_path, broken)

    def test_no_weights(self, capsys, tmp_path, broken):
        for file in broken.glob("*.safetensors"):
            file.unlink()
        assert "model.safetensors missing, 0 of 1 shards" in self.check(capsys, tmp_path, broken)

    def test_truncated_weights(self, capsys, tmp_path, broken):
        (shard,) = broken.glob("*.safetensors")
        content = shard.read_bytes()
        shard.write_bytes(content[:-1000])
        line = self.check(capsys, tmp_path, broken)
        assert f"{shard}: truncated, expected {len(content):,} bytes, found" in line
        shard.write_bytes(b"")
        assert str(shard) in self.check(capsys, tmp_path, broken)

    def test_no_such_folder(self, capsys, tmp_path):
        assert "no such model folder" in self.check(capsys, tmp_path, tmp_path / "none")

    def test_a_file(self, capsys, tmp_path, broken):
        assert "is a file" in self.check(capsys, tmp_path, broken / "config.json")

    def test_unknown_id_without_network(self, tmp_path):
        """In a process of its own: huggingface_hub reads the variable when it is imported."""
        result = subprocess.run(
            moetap("capture", "--model", "nobody/nothing", "-o", tmp_path / "t.h5", "--quick"),
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert result.returncode == 1
        assert "nobody/nothing: no such folder, and not to be had" in result.stderr
        assert "Traceback" not in result.stderr


class TestOutputAndPromptErrors:
    """All found before the model is loaded: the model named here does not exist."""

    def check(self, capsys, code, *args):
        return fails(capsys, code, "capture", "--model", "/none", *args)

    def test_existing_output(self, capsys, model_dir, prompts_file, tmp_path):
        out, prompts = tmp_path / "t.h5", prompts_file("a")
        assert run_capture(model_dir, out, "--prompts", prompts, "--max-tokens", 2) == 0
        before = out.read_bytes()
        line = self.check(capsys, 1, "-o", out, "--prompts", prompts)
        assert str(out) in line and "--force" in line
        assert out.read_bytes() == before
        assert "complete" in self.check(capsys, 1, "-o", out, "--prompts", prompts, "--resume")
        assert main(["capture", "--model", "/none", "-o", str(out), "--resume", "--force"]) == 2

    def test_folder_that_cannot_be_written(self, capsys, prompts_file, tmp_path):
        (tmp_path / "file").write_text("")
        out = tmp_path / "file" / "t.h5"
        assert str(tmp_path / "file") in self.check(capsys, 1, "-o", out, "--quick")
        assert "none" in self.check(capsys, 1, "-o", tmp_path / "none" / "t.h5", "--quick")

    def test_prompt_files(self, capsys, tmp_path):
        out = tmp_path / "t.h5"
        path = tmp_path / "p.jsonl"
        path.write_text("")
        assert "p.jsonl" in self.check(capsys, 2, "-o", out, "--prompts", path)
        path.write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": \n')
        assert "line 2" in self.check(capsys, 2, "-o", out, "--prompts", path)

    @pytest.mark.parametrize(
        "option",
        [
            ("--max-tokens", "0"),
            ("--prefill-step", "0"),
            ("--temp", "-1"),
            ("--top-p", "1.5"),
            ("--seed", "-1"),
            ("--seed", str(2**63)),
            ("--max-tokens", "99999999999999999999"),
            ("--temp", "inf"),
            ("--prompts", "x.jsonl", "--quick"),
        ],
    )
    def test_options(self, capsys, option):
        assert option[0].strip("-") in self.check(capsys, 2, *option)


@pytest.mark.parametrize("verb", ["info", "analyze"])
def test_what_is_not_a_trace(capsys, verb, tmp_path):
    path = tmp_path / "x.h5"
    assert "x.h5" in fails(capsys, 1, verb, path)
    assert "names no file" in fails(capsys, 1, verb, "")
    path.write_bytes(b"not a trace")
    assert "x.h5" in fails(capsys, 1, verb, path)


class TestNothingIsLost:
    def test_an_output_of_analyze_never_replaces_a_trace_or_device(self, capsys, tmp_path):
        sample = Path(__file__).parents[2] / "traces" / "sample" / "demo.h5"
        trace = Path(shutil.copy(sample, tmp_path / "t.h5"))
        (tmp_path / "link.json").symlink_to(trace)
        for target in (trace, tmp_path / "link.json", "/dev/null"):
            assert "name" in fails(capsys, 2, "analyze", trace, "--json", target)
        assert trace.read_bytes() == sample.read_bytes()
        assert not Path("/dev/null").is_file()

    def test_outputs_are_neither_inputs_nor_each_other(self, capsys, tmp_path):
        sample = Path(__file__).parents[2] / "traces" / "sample" / "demo.h5"
        both = tmp_path / "out"
        line = fails(capsys, 2, "analyze", sample, "--json", both, "--report", both)
        assert "named twice" in line and not both.exists()
        criteria = tmp_path / "criteria.toml"
        from moetap.criteria import DEFAULT

        criteria.write_text(DEFAULT.read_text())
        fails(capsys, 2, "analyze", sample, "--criteria", criteria, "--json", criteria)
        assert criteria.read_text() == DEFAULT.read_text()

    def test_reports_are_written_although_nobody_reads_the_tables(self, tmp_path):
        sample = Path(__file__).parents[2] / "traces" / "sample" / "demo.h5"
        process = subprocess.Popen(
            moetap("analyze", sample, "--only", "union", "--json", tmp_path / "a.json"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        process.stderr.close()
        assert process.wait() == 0
        assert json.loads((tmp_path / "a.json").read_text())

    @pytest.mark.parametrize("n", [3, 20])  # from 9 on the untraced rate is measured first
    def test_a_forced_capture_that_fails_at_once_leaves_the_old_trace(
        self, capsys, model_dir, prompts_file, tmp_path, monkeypatch, n
    ):
        from moetap.capture import _mlx

        out, prompts = tmp_path / "t.h5", prompts_file("a", "b")
        options = ("--prompts", prompts, "--max-tokens", n)
        assert run_capture(model_dir, out, *options) == 0
        before = out.read_bytes()

        def out_of_memory(*_args, **_options):
            raise RuntimeError("[METAL] Insufficient Memory\nmore")

        monkeypatch.setattr(_mlx, "generate", out_of_memory)
        capsys.readouterr()
        line = fails(capsys, 1, "capture", "--model", model_dir, "-o", out, *options, "--force")
        assert "stream 'p0': generation failed" in line and "Insufficient Memory" in line
        assert out.read_bytes() == before and read(out).complete

    def test_only_traces_are_replaced(self, capsys, prompts_file, tmp_path):
        notes = tmp_path / "notes.txt"
        notes.write_text("mine")
        line = fails(capsys, 1, "capture", "--model", "/none", "-o", notes, "--quick", "--force")
        assert "is no trace" in line and notes.read_text() == "mine"


def test_an_empty_prompt_is_left_out_and_the_rest_captured(tmp_path, capsys):
    from modeldir import make_model_dir

    folder = make_model_dir(
        tmp_path / "m", template="{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    prompts = tmp_path / "p.jsonl"
    lines = [json.dumps({"messages": [{"role": "user", "content": c}]}) for c in ("", "abc")]
    prompts.write_text("\n".join(lines))
    assert run_capture(folder, tmp_path / "t.h5", "--prompts", prompts, "--max-tokens", 2) == 0
    assert "left out line-1: the chat template makes no tokens" in capsys.readouterr().err
    trace = read(tmp_path / "t.h5")
    assert trace.complete and trace.capture.left_out == "line-1"


def test_all_experts_selected_is_no_broken_hook(tmp_path, prompts_file):
    from modeldir import make_model_dir

    folder = make_model_dir(tmp_path / "m", num_experts_per_tok=16)
    out = tmp_path / "t.h5"
    assert run_capture(folder, out, "--prompts", prompts_file("a b c d e f g h i j k")) == 0
    assert (read(out).streams[0].decode() == np.arange(16)).all()


def test_output_that_cannot_be_written_is_one_line(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full on this system")
    sample = Path(__file__).parents[2] / "traces" / "sample" / "demo.h5"
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            moetap("info", sample), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1 and "No space left" in result.stderr
    closed = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m moetap info {sample} >&-"], capture_output=True
    )
    assert closed.returncode == 0 and closed.stderr == b""


def test_usage_errors_exit_with_2(capsys):
    for args in ([], ["nosuch"], ["capture"], ["info"], ["capture", "--temp", "x"]):
        with pytest.raises(SystemExit) as exit_:
            main(args)
        assert exit_.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    """Answering in under 100 ms rests on this; the time itself depends on the machine."""
    code = (
        "import sys; from moetap.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'numpy', 'mlx', 'mlx_lm', 'h5py', 'rich', 'scipy'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error(model_dir, prompts_file, tmp_path):
    out = tmp_path / "t.h5"
    run_capture(model_dir, out, "--prompts", prompts_file("a", "b"), "--max-tokens", 4)
    process = subprocess.Popen(
        moetap("info", out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 0
