"""`moetap export`, `import` and `formats` as a user meets them."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from moetap import formats
from moetap.cli import main
from moetap.errors import MoetapError
from moetap.formats.base import Counts, CountsFormat
from moetap.store import TraceWriter, read
from moetap.trace import NOT_EXECUTED

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
    assert max(map(len, lines)) <= 80


def test_every_export(trace_file, tmp_path, capsys):
    for name in formats.BUILT_IN:
        if formats.get(name).direction == "import":
            continue
        out = tmp_path / ("x.npz" if name in ("npz", "streamlx") else f"out-{name}")
        assert run("export", trace_file, "--to", name, "-o", out, "--force") == 0, name
        text = capsys.readouterr().out
        beside = {"npz": "x.json", "streamlx": "x.meta.json"}.get(name)
        assert text.startswith(f"wrote {out}{f', {tmp_path / beside}' if beside else ''} ({name})")
        assert ("not kept: " in text) == (name != "npz")
        assert out.exists()


def test_there_and_back(trace_file, tmp_path, capsys):
    out, back = tmp_path / "out.npz", tmp_path / "back.h5"
    assert run("export", trace_file, "--to", "npz", "-o", out) == 0
    assert run("import", out, "--from", "npz", "-o", back) == 0
    text = capsys.readouterr().out
    streams = read(trace_file).streams
    n, d = (
        sum(values) for values in zip(*((s.n_rows, s.n_generated) for s in streams), strict=True)
    )
    assert f"2 streams, {n} rows ({n - d} prefill, {d} decode)" in text and "3 MoE layers" in text
    assert "compare with the run" not in text
    a, b = read(trace_file), read(back)
    assert a.capture == b.capture and b.complete
    for x, y in zip(a.streams, b.streams, strict=True):
        np.testing.assert_array_equal(x.experts, y.experts)
        np.testing.assert_array_equal(x.scores, y.scores)
    assert run("info", back) == 0


def test_an_export_never_replaces_a_trace(trace_file, tmp_path, capsys):
    content = trace_file.read_bytes()
    link = tmp_path / "link"
    link.symlink_to(trace_file)
    for out in (trace_file, link):
        assert run("export", trace_file, "--to", "eplb", "-o", out, "--force") == 2
        assert "is an HDF5 file, maybe a trace" in capsys.readouterr().err
    assert link.is_symlink() and trace_file.read_bytes() == content


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("colibri", "gates that are no numbers, in 1 cells (written as 0.0000)"),
        ("lattice", "gates that are no numbers, in 1 cells (the cell has no gates)"),
        ("moe-policylang", "gates that are no numbers, in 1 cells (the cell has no scores)"),
    ],
)
def test_gates_that_are_no_numbers(name, says, tmp_path, capsys):
    trace = a_trace(2, n_streams=2, min_k=2, cells="passes", first_positions=False)
    path = tmp_path / "t.h5"
    scores = np.where(np.isfinite(trace.streams[0].scores), trace.streams[0].scores, 0)
    row, layer, at = np.argwhere(trace.streams[0].experts != NOT_EXECUTED)[0]
    for there in (False, True):
        if there:
            scores[row, layer, at] = np.nan
        with TraceWriter(path, trace.model, trace.capture, force=True) as writer:
            writer.append(replace(trace.streams[0], scores=scores))
            writer.close(complete=False)
        assert run("export", path, "--to", name, "-o", tmp_path / f"{name}-{there}") == 0
        assert (f"not kept: {says}" in capsys.readouterr().out) == there


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
        (("export", "T", "--to", "vllm", "-o", "T"), "is an HDF5 file, maybe a trace"),
        (("export", "T", "--to", "npz", "-o", "O"), "error: O: give the archive a name"),
        (("export", "T", "--to", "per-agent", "-o", "O", "--lanes", 0), "--lanes 0: must be"),
        (("export", "T", "--to", "vllm", "-o", "O", "--hidden-layers", 10**8), "from 1 to 10,000"),
        (("export", "T", "--to", "npz", "-o", "none/O"), "does not exist"),
        (("export", "T", "--to", "mer", "-o", "/dev/null", "--force"), "no regular file"),
        (
            ("export", "T", "--to", "npz", "-o", "a.npz", "--dtype", "foo"),
            "no type that NumPy knows",
        ),
        (("export", "T", "--to", "nzp", "-o", "O"), "did you mean npz"),
        (("import", "T", "--from", "", "-o", "O"), "no format is called ''"),
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


def listing(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_a_file_beside_the_output_is_in_the_way(trace_file, tmp_path, capsys):
    (tmp_path / "prompts.json").write_text("mine")
    args = ("export", trace_file, "--to", "npz", "-o", tmp_path / "prompts.npz")
    assert run(*args) == 2
    assert f"{tmp_path / 'prompts.json'}: already exists" in capsys.readouterr().err
    assert (tmp_path / "prompts.json").read_text() == "mine"
    assert not (tmp_path / "prompts.npz").exists()
    assert run(*args, "--force") == 0
    assert listing(tmp_path) == ["prompts.json", "prompts.npz", "t.h5"]


@pytest.mark.parametrize(
    "failing", [MoetapError("no"), OSError(28, "No space left"), KeyboardInterrupt()]
)
def test_a_failure_leaves_nothing(failing, trace_file, tmp_path, monkeypatch, capsys):
    """Also of a folder of several files of which the first one is there."""
    from moetap.formats import mer

    real, calls = mer.save_text, []

    def save(path, parts):
        calls.append(path)
        if len(calls) == 2:
            raise failing
        real(path, parts)

    monkeypatch.setattr(mer, "save_text", save)
    assert run("export", trace_file, "--to", "mer", "-o", tmp_path / "out") == 1
    assert len(calls) == 2 and listing(tmp_path) == ["t.h5"]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_folder_where_a_file_is_and_the_other_way_round(trace_file, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert run("export", trace_file, "--to", "mer", "-o", tmp_path / "file", "--force") == 2
    assert "is a file, the export makes a folder" in capsys.readouterr().err
    assert run("export", trace_file, "--to", "eplb", "-o", tmp_path / "folder") == 2
    assert "is a folder, the export makes a file" in capsys.readouterr().err
    assert run("export", trace_file, "--to", "mer", "-o", tmp_path / "folder") == 0
    assert len(listing(tmp_path / "folder")) == 2 and (tmp_path / "file").read_text() == "mine"


BOTH = [name for name in formats.BUILT_IN if formats.get(name).direction == "both"]


@pytest.mark.parametrize("name", [*BOTH, "sglang-stat"])
def test_files_that_are_not_what_they_should_be(name, trace_file, tmp_path, capsys):
    """One line that says what and where, and nothing is left."""
    out = tmp_path / "back.h5"
    options = {"n_experts": 4, "top_k": 2}
    said = [
        word
        for key, value in options.items()
        if key in formats.get(name).read_options
        for word in (f"--{key.replace('_', '-')}", value)
    ]
    empty, noise, folder = tmp_path / "empty", tmp_path / "noise", tmp_path / "folder"
    empty.write_bytes(b"")
    noise.write_bytes(np.random.default_rng(1).bytes(4000))
    folder.mkdir()
    before = listing(tmp_path)
    for path, says in (
        (empty, "is empty"),
        (noise, ""),
        (trace_file, ""),
        (folder, "folder"),
        (tmp_path / "none", "no such file"),
    ):
        assert run("import", path, "--from", name, "-o", out, *said) == 1
        text = capsys.readouterr()
        (line,) = text.err.splitlines()
        assert line.startswith(f"moetap: error: {path}: ") and says in line and not text.out
        assert "pickle" not in line
    assert listing(tmp_path) == before


def test_messages_name_the_place_that_the_user_named(trace_file, tmp_path, capsys):
    one = ("--to", "npz", "-o", tmp_path / "x.bin")
    assert run("export", trace_file, *one) == 2
    err = capsys.readouterr().err
    assert f"{tmp_path / 'x.bin'}: give the archive a name that ends in .npz" in err
    assert run("export", trace_file, "--to", "mer", "-o", "/proc/out") == 1
    assert "/proc/out: cannot be written" in capsys.readouterr().err


def test_an_open_end_is_said(trace_file, tmp_path, capsys):
    out = tmp_path / "one.bin"
    assert run("export", trace_file, "--to", "mblt", "-o", out, "--stream", "prompt 1") == 0
    capsys.readouterr()
    assert run("import", out, "--from", "mblt", "-o", tmp_path / "b.h5") == 0
    text = capsys.readouterr().out
    last = read(trace_file).streams[1].position[-1]
    assert f"the last stream ends at position {last}: compare with the run" in text
    assert "1 stream, " in text
    assert max(map(len, text.replace(str(tmp_path), "").splitlines())) <= 80


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


class CountsPlug(Plug):
    """A third party's format whose files hold counts only."""

    direction = "import"
    read_options = ("n_experts",)

    def read_counts(self, path, options):
        return Counts(np.array([2, 5]), np.full((2, options.n_experts), 3))

    def read(self, path, options):
        raise MoetapError(f"{path}: holds counts, no rows; write a table instead: -o counts.csv")


COUNTS_PLUG = CountsPlug()


def test_plug_in_of_counts(tmp_path, monkeypatch, capsys):
    points = [
        EntryPoint("counts", f"{__name__}:COUNTS_PLUG", formats.GROUP),
        EntryPoint("plug", f"{__name__}:PLUG", formats.GROUP),
    ]
    monkeypatch.setattr(formats, "entry_points", lambda group: points)
    file, out = tmp_path / "x", tmp_path / "c.csv"
    said = ("--from", "counts", "--n-experts", 4)
    assert run("import", file, *said, "-o", out) == 0
    text = capsys.readouterr().out
    assert "2 MoE layers, 4 experts, counts only" in text and "entropy" in text
    lines = [f"{layer},{expert},3" for layer in (2, 5) for expert in range(4)]
    assert out.read_text().splitlines() == ["layer,expert,count", *lines]
    assert run("import", file, *said, "-o", tmp_path / "t.h5") == 1
    assert "-o counts.csv" in capsys.readouterr().err
    # A format without counts makes a trace, whatever the name of the output.
    assert not isinstance(PLUG, CountsFormat)


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
