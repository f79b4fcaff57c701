"""`moetap export`, `import` and `formats` as a user meets them."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from moetap import formats
from moetap.cli import main
from moetap.store import TraceWriter, read

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from formatkit import a_trace  # noqa: E402
from ptfile import torch_file  # noqa: E402


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    trace = a_trace(2, n_streams=2, min_k=2, cells="passes", first_positions=False)
    path = tmp_path / "t.h5"
    with TraceWriter(path, trace.model, trace.capture) as writer:
        for stream in trace.streams:
            writer.append(stream)
        writer.close(complete=True)
    return path


def run(*args: object) -> int:
    return main([str(a) for a in args])


def test_list(capsys):
    assert run("formats") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(formats.BUILT_IN)
    assert max(map(len, lines)) <= 100


def test_every_export(trace_file, tmp_path, capsys):
    for name in formats.BUILT_IN:
        if formats.get(name).direction == "import":
            continue
        out = tmp_path / ("x.npz" if name in ("npz", "streamlx") else f"out-{name}")
        assert run("export", trace_file, "--to", name, "-o", out, "--force") == 0, name
        text = capsys.readouterr().out
        assert text.startswith(f"wrote {out} ({name})")
        assert ("not kept: " in text) == (name != "npz")
        assert out.exists()


def test_there_and_back(trace_file, tmp_path, capsys):
    out, back = tmp_path / "out.npz", tmp_path / "back.h5"
    assert run("export", trace_file, "--to", "npz", "-o", out) == 0
    assert run("import", out, "--from", "npz", "-o", back) == 0
    assert "2 streams" in capsys.readouterr().out
    a, b = read(trace_file), read(back)
    assert a.capture == b.capture and b.complete
    for x, y in zip(a.streams, b.streams, strict=True):
        np.testing.assert_array_equal(x.experts, y.experts)
        np.testing.assert_array_equal(x.scores, y.scores)
    assert run("info", back) == 0


def test_one_stream_with_options(trace_file, tmp_path, capsys):
    out, back = tmp_path / "a.json", tmp_path / "back.h5"
    one = ("--stream", "prompt 1", "--hidden-layers", 20)
    assert run("export", trace_file, "--to", "vllm", "-o", out, *one) == 0
    assert "not kept: 1 other streams" in capsys.readouterr().out
    trace = read(trace_file)
    layers = ",".join(map(str, trace.model.layer_index))
    said = ("--n-experts", trace.model.n_experts[0], "--layers", layers)
    assert run("import", out, "--from", "vllm", "-o", back, *said) == 0
    assert "not kept: text" in capsys.readouterr().out
    np.testing.assert_array_equal(read(back).streams[0].experts, trace.streams[1].experts)
    assert run("info", back) == 0


def test_counts_only(tmp_path, capsys):
    dump = tmp_path / "d.pt"
    dump.write_bytes(torch_file({"logical_count": np.arange(24, dtype=np.int32).reshape(2, 3, 4)}))
    assert run("import", dump, "--from", "sglang-stat", "-o", tmp_path / "t.h5") == 1
    assert "no rows" in capsys.readouterr().err
    out = tmp_path / "c.csv"
    assert run("import", dump, "--from", "sglang-stat", "-o", out) == 0
    assert "entropy" in capsys.readouterr().out
    assert out.read_text().splitlines()[:2] == ["layer,expert,count", "0,0,12"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("export", "T", "--to", "nonsense", "-o", "O"), "no format is called 'nonsense'"),
        (("export", "T", "--to", "sglang-stat", "-o", "O"), "can only be imported"),
        (("export", "T", "--to", "eplb", "-o", "O", "--lanes", 2), "no use for --lanes"),
        (("export", "T", "--to", "vllm", "-o", "O", "--stream", "x"), "no stream is called"),
        (("export", "T", "--to", "vllm", "-o", "T"), "already exists"),
        (("export", "T", "--to", "npz", "-o", "O"), "ends in .npz"),
        (("export", "T", "--to", "npz", "-o", "none/O"), "does not exist"),
        (("import", "T", "--from", "eplb", "-o", "O"), "can only be exported"),
        (("import", "T", "--from", "mer", "-o", "O", "--top-k", 2), "no use for --top-k"),
        (("import", "T", "--from", "mer", "-o", "O", "--n-experts", 0), "at least 1"),
    ],
)
def test_wrong_use(args, says, trace_file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(*(trace_file.name if a == "T" else a for a in args)) == 2
    assert says in capsys.readouterr().err


def test_damaged_file(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text("nonsense\n")
    assert run("import", path, "--from", "route-trace", "-o", tmp_path / "t.h5") == 1
    err = capsys.readouterr().err
    assert str(path) in err and "line 1" in err and len(err.splitlines()) == 1
    assert not (tmp_path / "t.h5").exists()


class Plug:
    """A third party's format."""

    name = "plug"
    direction = "export"
    summary = "a plug-in"
    write_options: tuple[str, ...] = ()
    read_options: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()

    def write(self, trace, path, options):
        path.write_text(str(len(trace.streams)))
        return ["nearly everything"]

    def read(self, path, options):
        raise AssertionError


PLUG = Plug()


def test_plug_ins(trace_file, tmp_path, monkeypatch, capsys):
    points = [
        EntryPoint("plug", f"{__name__}:PLUG", formats.GROUP),
        EntryPoint("npz", f"{__name__}:PLUG", formats.GROUP),
        EntryPoint("broken", "no_such_module:X", formats.GROUP),
    ]
    monkeypatch.setattr(formats, "entry_points", lambda group: points)
    assert run("export", trace_file, "--to", "plug", "-o", tmp_path / "p") == 0
    assert "not kept: nearly everything" in capsys.readouterr().out
    assert (tmp_path / "p").read_text() == "2"
    assert formats.get("npz") is not PLUG
    assert run("formats") == 0
    text = capsys.readouterr().out
    assert "ignored: plug-in npz" in text and "cannot be loaded" in text
    assert run("export", trace_file, "--to", "broken", "-o", tmp_path / "b") == 1
