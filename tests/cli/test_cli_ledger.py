"""`moetap ledger` as a user meets it: tables, JSON, and one clear line for what cannot be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import pytest
from families import CONFIGS, make_model
from headerkit import described, write_checkpoint
from mlx_lm.utils import save_model

import moetap.capture.checkpoint as checkpoint_module
from moetap.capture.checkpoint import read_checkpoint
from moetap.cli import main
from moetap.cli.ledger import find_sizes
from moetap.errors import MoetapError

GOLDEN = ("--model", "qwen3.6-35b-a3b", "-B", "4", "-C", "128", "--context", "8192", "--tier", "16")


def run(*args: object) -> int:
    return main(["ledger", *map(str, args)])


def dense(folder: Path) -> Path:
    return write_checkpoint(
        folder, {"model_type": "llama"}, {"model.norm.weight": ("BF16", [8])}, data=True
    )


@pytest.fixture
def no_mac(monkeypatch):
    monkeypatch.setattr("moetap.cli.ledger.this_mac", lambda: None)


@pytest.fixture
def tiny(tmp_path) -> Path:
    model = make_model("qwen3_next")
    folder = tmp_path / "tiny"
    save_model(folder, model)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_next"} | CONFIGS["qwen3_next"])
    )
    return folder


def test_the_known_case_says_that_it_hangs_on_the_rule(no_mac, capsys):
    assert run(*GOLDEN) == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for words in (
        "RAM ledger: Qwen3.6-35B-A3B, 8,192 tokens of context a lane",
        "resident weights 1,389,394,176 1.389",
        "1,769,472 bytes an expert",
        "expert slots, C = 128 9,059,696,640 9.060",
        "KV of a lane 167,772,160 0.168 20,480 a token",
        "constant state of a lane 64,389,120 0.064",
        "16 GiB 128* 4 11.878 +1.084 -0.424 +0.835 working set depends on the rule",
        "16 GiB, C = 128 (default), B = 4: depends on the rule: 424.5 MB short (working set, older "
        "rule); 835.4 MB left (working set, newer rule).",
        "Before activations and overhead the nets are 75.5 MB (older) and 1.34 GB (newer)",
        "rounded up to steps of 256 tokens",
        "assumed: Python, MLX, tokenizer",
    ):
        assert words in flat, words
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_before_activations_and_overhead_exactly(no_mac, tmp_path):
    out = tmp_path / "ledger.json"
    assert run(*GOLDEN, "--activations", 0, "--overhead", 0, "--json", out) == 0
    content = json.loads(out.read_text())
    (line,) = content["lines"]
    assert line["total_bytes"] == line["model_bytes"] == 11_377_735_936
    assert [net["working_set_bytes"] for net in line["nets"]] == [75_514_064, 1_335_384_064]
    assert content["activations"] == {"bytes": 0, "source": "given on the command line"}
    (tier,) = content["tiers"]
    assert tier["limits"][0]["rule"] == "older" and tier["default_slots"] == 128
    assert tier["largest_slots"] == {"4": {"older": 129, "newer": 146}}
    assert len(content["layers"]) == len(content["caches"]) == 40


def test_headers_and_card_of_qwen36_give_the_same_ledger(no_mac, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "qwen36", *described(), shards=3)
    monkeypatch.setattr(
        checkpoint_module, "read_checkpoint", lambda path: read_checkpoint(path, header_only=True)
    )
    headers, card = find_sizes(str(folder), None), find_sizes("Qwen3.6-35B-A3B", None)
    assert headers.layers == card.layers
    assert headers.resident_bytes == card.resident_bytes
    for bits, tokens in ((None, 8192), (8, 1), (4, 300)):
        a, b = find_sizes(str(folder), bits), find_sizes("Qwen3.6-35B-A3B", bits)
        assert a.kv_bytes(tokens) == b.kv_bytes(tokens) > 0
        assert a.state_bytes == b.state_bytes
    assert headers.notes[0].startswith("Not loaded by mlx-lm and not counted: ")
    assert "3 files of model.safetensors.index.json" in headers.source


def test_a_folder_is_read_without_its_weights(no_mac, tiny, tmp_path, capsys):
    out = tmp_path / "l.json"
    assert run("--model", tiny, "-C", "4,16,99", "-B", "1,2", "--tier", "8,18", "--json", out) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "safetensors headers, 1 file of model.safetensors.index.json" in text
    assert "lazy forward of mlx-lm" in text and "activations F32" in text
    content = json.loads(out.read_text())
    # More slots than experts hold nothing: 99 is 16.
    assert {line["slots"] for line in content["lines"]} == {4, 16}
    total = sum(t.nbytes for t in read_checkpoint(tiny).tensors)
    whole = next(line for line in content["lines"] if line["slots"] == 16)
    assert whole["resident_bytes"] + whole["arena_bytes"] == total
    assert content["model"] == "tiny"


def test_wide_questions_stay_within_100_columns(no_mac, capsys):
    many = ",".join(str(n) for n in range(1, 11))
    assert run("--model", "gpt-oss-120b", "-B", many, "-C", "4,32,64,96,128", "--tier", "512") == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text
    assert "windows of 128 tokens" in text and "B, C = 128" in text
    headings = [x.strip() for x in text.splitlines() if "Largest C for B lanes" in x]
    title = "Largest C for B lanes, largest B for C slots"
    assert headings == [title, f"{title}, continued", f"{title}, continued"]


def test_the_closing_sentences_are_of_the_slots_asked_for(no_mac, capsys):
    card = ("--model", "qwen3.6-35b-a3b", "--tier", "16", "-B", "4")
    assert run(*card, "-C", "96") == 0
    text = " ".join(capsys.readouterr().out.split())
    # Net in the table: +1.840 and +3.100.
    assert "16 GiB, C = 96, B = 4: fits: 1.84 GB left" in text and "(default)" not in text
    assert run(*card, "-C", "96,128") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "16 GiB, C = 128 (default), B = 4: " in text and "C = 96, B = 4" not in text


def test_all_cards_print(no_mac, capsys):
    from moetap.models import card_names

    for name in card_names():
        assert run("--model", name) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_quantised_kv(no_mac, tmp_path, capsys):
    out = tmp_path / "l.json"
    assert run(*GOLDEN, "--kv-bits", 8, "--json", out) == 0
    content = json.loads(out.read_text())
    assert (content["kv_bits"], content["kv_bytes_per_token"]) == (8, 10_880)
    assert "10,880 a token, 8-bit" in capsys.readouterr().out
    assert run("--model", "gpt-oss-20b", "--kv-bits", 4) == 1
    assert "cannot quantise the KV of sliding attention" in capsys.readouterr().err


def test_this_mac(monkeypatch, capsys):
    from moetap.analysis.ledger import Device

    monkeypatch.setattr("moetap.cli.ledger.this_mac", lambda: Device(2**34, 12_000_000_000))
    assert run(*GOLDEN[:-1], "16,24") == 0
    text = capsys.readouterr().out
    assert "reported by this machine" in text and "working set, device" in text
    assert "16 GiB, C = 128 (default), B = 4: fits" in text
    assert max(map(len, text.splitlines())) <= 100 and "…" not in text


def test_headroom_in_gb(no_mac, tmp_path):
    out = tmp_path / "l.json"
    assert run(*GOLDEN, "--headroom", "5.5", "--json", out) == 0
    (tier,) = json.loads(out.read_text())["tiers"]
    assert tier["physical_bytes"] == 2**34 - 5_500_000_000


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("-C", "7"), 2, "C = 7 is less than the 8 experts that a token of Qwen3.6-35B-A3B"),
        (("-B", "0"), 2, "-B 0: each must be at least 1"),
        (("-B", "1,x"), 2, "-B 1,x: not a list like"),
        (("-C", ""), 2, "-C : not a list like"),
        (("--tier", "0"), 2, "--tier 0: each must be at least 1"),
        (("--tier", "sixteen"), 2, "--tier sixteen: not a list like 8,16,24"),
        (("--context", "0"), 2, "--context 0: each must be at least 1"),
        (("--context", "1,2"), 2, "--context 1,2: one number of tokens"),
        (("--headroom", "-1"), 2, "--headroom -1: not a size in GB"),
        (("--overhead", "nan"), 2, "--overhead nan: not a size in GB"),
        (("--headroom", "1e400"), 2, "--headroom 1e400: at most 1,000 GB"),
        (("--headroom", "1e999999999"), 2, "--headroom 1e999999999: at most 1,000 GB"),
        (("--headroom", "inf"), 2, "--headroom inf: not a size in GB"),
        (("--activations", "1e400"), 2, "--activations 1e400: at most 1,000 GB"),
        (("--context", "1000000001"), 2, "--context 1000000001: at most 1,000,000,000"),
        (("--tier", "8,100001"), 2, "--tier 8,100001: at most 100,000"),
        (("-B", "1" + 400 * "0"), 2, ": at most 1,000,000,000"),
        (("-C", "1" + 5000 * "0"), 2, ": not a list like"),
        (("--json", "/no/such/folder/x.json"), 2, "folder /no/such/folder does not exist"),
        (("--model", "no-such-card"), 1, "no model card; model cards: deepseek-v3, glm-4.5-air"),
        (("--model", "./no/such"), 1, "no such model folder, and no model card"),
    ],
)
def test_one_clear_line(args, code, message, capsys):
    assert run(*GOLDEN, *args) == code
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


def test_folders_that_are_no_moe_checkpoint(tmp_path, capsys):
    assert run("--model", tmp_path) == 1
    assert "no config.json" in capsys.readouterr().err
    assert run("--model", dense(tmp_path / "dense")) == 1
    err = capsys.readouterr().err
    assert "no routed experts" in err and len(err.splitlines()) == 1


def test_a_repository_that_is_not_to_be_had(no_mac, monkeypatch, capsys):
    def offline(repo_id: str) -> None:
        raise MoetapError(f"{repo_id}: not to be had")

    monkeypatch.setattr(checkpoint_module, "read_repository", offline)
    assert run("--model", "some/model") == 1
    assert "some/model: not to be had; model cards: deepseek-v3" in capsys.readouterr().err
    # A checkpoint that a card describes is shown by the card, which says so.
    assert run("--model", "mlx-community/Qwen3.6-35B-A3B-4bit", "--tier", 16) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Weights: model card" in text and "4bit itself was not read (" in text
    assert "the figures are those of the card's quantisation, 4 bits" in text
    assert "whatever that of mlx-community/Qwen3.6-35B-A3B-4bit is" in text


def test_without_mlx_caches_come_from_the_card_of_the_same_shape(no_mac, tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "qwen36", *described())
    monkeypatch.setattr(
        checkpoint_module, "read_checkpoint", lambda path: read_checkpoint(path, header_only=True)
    )
    monkeypatch.setitem(sys.modules, "moetap.capture.geometry", None)  # import fails
    sizes = find_sizes(str(folder), None)
    assert "model card Qwen3.6-35B-A3B (MLX is not installed)" in sizes.cache_source
    assert (sizes.kv_bytes_per_token, sizes.state_bytes, sizes.top_k) == (20_480, 64_389_120, 8)
    tensors = {"model.layers.0.mlp.switch_mlp.fc1.weight": ("BF16", [4, 8, 8])}
    other = write_checkpoint(tmp_path / "other", {"model_type": "x"}, tensors)
    with pytest.raises(MoetapError, match="MLX is not installed and no model card"):
        find_sizes(str(other), None)


def test_the_card_needs_no_mlx_lm_model(no_mac, monkeypatch):
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("evaluated"))
    assert find_sizes("gpt-oss-20b", None).kv_bytes(10**5) == 12 * 2048 * (128 + 100_096)
