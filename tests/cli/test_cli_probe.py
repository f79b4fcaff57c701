"""`moetap probe` as a user meets it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from moetap.capture import probe as module
from moetap.cli import main

BLOCK = 4 * module.PAGE


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(os.urandom(96 * BLOCK))
    return path


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local disk on which nothing is cached but the page that the probe has read."""

    def resident(file: module._File) -> np.ndarray:
        state = np.zeros(-(-file.size // module.PAGE), dtype=bool)
        state[-1] = True
        return state

    monkeypatch.setattr(module, "_resident", resident)
    monkeypatch.setattr(module, "_file_system", lambda path: ("apfs", False))


def run(*args: object) -> int:
    return main(["probe", *map(str, args)])


def test_table(file, local, capsys):
    assert run(file, "--block", BLOCK) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    rows = [line.split() for line in lines if line.strip().startswith("random")]
    assert [(row[1], row[2]) for row in rows] == [(f"{BLOCK:,}", d) for d in ("1", "4", "16")]
    assert all("cold" in row and row[-1] == "apfs" for row in rows)
    assert "next: moetap analyze TRACE --ssd " in text and "cannot measure" not in text
    assert "GB = 10^9" in text


def test_the_hint_is_accepted(file, local, capsys):
    from moetap.machines import parse_ssd

    assert run(file, "--block", BLOCK) == 0
    parse_ssd(capsys.readouterr().out.splitlines()[-1].split("--ssd ")[1])


def test_warm_is_said_first_and_never_offered(file, local, capsys, monkeypatch):
    monkeypatch.setattr(module, "_file_system", lambda path: ("nfs", True))
    assert run(file, "--block", BLOCK) == 0
    text = capsys.readouterr().out
    assert "cannot measure cold reads here: nfs is a network file system" in text.splitlines()[1]
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("random")]
    assert len(rows) == 3 and all("warm" in row and "cold" not in row for row in rows)
    assert "--ssd" not in text and "Warm: some or all may have come from memory" in text


def test_json(file, local, capsys):
    assert run(file, "--block", BLOCK, "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["block_bytes"] == BLOCK and content["file_system"] == "apfs"
    assert [r["depth"] for r in content["random"]] == [1, 4, 16]
    for reading in content["random"]:
        expected = reading["blocks"] * BLOCK / reading["time_s"]
        assert reading["bandwidth_bps"] == pytest.approx(expected)
        assert reading["cold"] is True and reading["method"]


def test_without_argument(capsys):
    with pytest.raises(SystemExit) as error:
        run()
    assert error.value.code == 2 and "FILE|DIR" in capsys.readouterr().err


@pytest.mark.parametrize("options", [("--block", "x"), ("--seconds", "x")])
def test_malformed_options(file, options):
    with pytest.raises(SystemExit) as error:
        run(file, *options)
    assert error.value.code == 2


def test_one_line_per_error(file, tmp_path, capsys):
    for args in ((tmp_path / "missing",), (file,), (file, "--block", 0), (file, "--seconds", -1)):
        assert run(*args) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("moetap: error: ") and err.count("\n") == 1


def test_a_failing_disk_is_not_wrong_use(file, local, capsys, monkeypatch):
    def preadv(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    assert run(file, "--block", BLOCK) == 1
    err = capsys.readouterr().err
    assert "Input/output error" in err and err.count("\n") == 1
