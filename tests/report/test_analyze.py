from __future__ import annotations

import csv
import json
import subprocess
import sys

import pytest
from unionkit import golden_streams, golden_trace, make_model, make_stream, make_trace

import moetap.store
from moetap.analysis.pool import pool
from moetap.analysis.unions import union_table
from moetap.cli import main
from moetap.report.union_table import print_union_table


@pytest.fixture
def analyze(monkeypatch, capsys):
    """Run `moetap analyze` on traces by name; returns the exit code and what was printed."""

    def run(traces, *options):
        monkeypatch.setattr(moetap.store, "read", traces.__getitem__)
        code = main(["analyze", *traces, *options])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def titles(text):
    return [line for line in text.splitlines() if line.startswith("Union and")]


def test_golden_line(analyze):
    code, out, _ = analyze({"t": golden_trace()})
    assert code == 0
    (line,) = [" ".join(x.split()) for x in out.splitlines() if " 3.06 " in x]
    # B, union ±, 5 25 50 75 95 max, uniform, k, loads/token, saved ±; 165.7 bytes are 0.2 kB.
    assert line == "2 3.06 1.08 2 3 3 3 4 4 3.00 2 1.53 23.4 27.0 0.2"


def test_every_table_says_what_it_is(analyze):
    _, out, _ = analyze({"t": golden_trace()}, "--groups", "5", "--seed", "3")
    assert len(titles(out)) == 2
    text = " ".join(out.split())
    for words in (
        "Decode rows only, at matched decode steps",
        "4 streams; groups x steps: 4 x 2 (B = 1), 6 x 2 (B = 2), 4 x 2 (B = 3), 1 x 1 (B = 4).",
        "delete-one jackknife interval over streams",
        "over 5 sampled groups for each B, seed 3",
        "nothing survives from one step to the next",
        "Sampler: greedy (temperature 0).",
        "1 of 14 cells were not executed and are left out.",
        "code, B = 3: not available, 2 streams.",
        "all, B = 4: no interval, without one of the 4 streams no group is left.",
        "mixed, B = 1: not available, a single stream is of one class.",
    ):
        assert words in text
    assert text.count("Decode rows only") == 1
    assert "INCOMPLETE" not in text


def test_pipe_is_plain_and_100_wide(analyze, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = analyze({"t": golden_trace()})
    assert "\x1b" not in out and "…" not in out
    assert max(map(len, out.splitlines())) <= 100


def test_large_numbers_fit_in_100_columns(capsys):
    # 160 layers, top-22 of 512, experts of 30 MB: more than any model there is.
    n = 160
    cells = [[set(range(i * 22, i * 22 + 22)) for _ in range(n)] for i in range(8)]
    model = make_model((512,) * n, (22,) * n, [30_000_000] * n)
    streams = [make_stream(f"s{i}", "code", [c], (22,) * n) for i, c in enumerate(cells)]
    print_union_table(union_table(pool([make_trace(model, streams)]), [2, 8]))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "…" not in out
    assert "176.00" in out and "105,600.0" in out


def test_incomplete_is_in_every_title_and_file(analyze, tmp_path):
    trace = golden_trace(complete=False, n_prompts=48)
    _, out, _ = analyze({"t": trace}, "--json", str(tmp_path / "u.json"), "--csv", str(tmp_path))
    assert out.count("INCOMPLETE: 4 of 48 streams") == len(titles(out)) == 2
    content = json.loads((tmp_path / "u.json").read_text())
    assert content["complete"] is False
    assert content["traces"][0]["n_planned"] == 48
    with open(tmp_path / "unions.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["complete"] for line in lines} == {"false"}
    assert {line["streams_planned"] for line in lines} == {"48"}


def test_incomplete_names_the_trace_among_several(analyze):
    cut = golden_trace(complete=False, source="x/cut.h5", run_id="2")
    _, out, _ = analyze({"a": golden_trace(run_id="1"), "b": cut})
    assert "INCOMPLETE: cut.h5 has 4 streams" in out


def test_files_hold_the_same_numbers(analyze, tmp_path):
    analyze({"t": golden_trace()}, "--json", str(tmp_path / "u.json"), "--csv", str(tmp_path / "c"))
    table = union_table(pool([golden_trace()]))
    figures = json.loads((tmp_path / "u.json").read_text())["figures"]
    assert len(figures) == len(table.figures) == 4 * 5 * 4  # strata, layers, B
    for got, line in zip(figures, table.figures, strict=True):
        assert (got["stratum"], got["b"]) == (line.stratum.name, line.b)
        if line.values is None:
            assert got["missing"] and "union" not in got
        else:
            assert got["union"]["value"] == line.values.union.value
            assert got["saved"]["low"] == line.values.saved.low
            assert got["bytes_per_token"]["value"] == line.values.bytes_per_token.value
            assert got["distribution"]["q50"] == line.values.distribution.quantile(0.5)
    assert figures[4]["layers"] == {"label": "3", "kind": "group", "first": 3, "last": 3}

    with open(tmp_path / "c", newline="") as file:
        lines = list(csv.DictReader(file))
    printed = [f for f in figures if f["layers"]["kind"] != "layer"]
    assert len(lines) == len(printed)
    for line, got in zip(lines, printed, strict=True):
        if got["missing"]:
            assert line["union"] == line["max"] == ""
        else:
            assert float(line["union"]) == got["union"]["value"]
            assert line["union_low"] == (
                "" if got["union"]["low"] is None else repr(got["union"]["low"])
            )
            assert int(line["q95"]) == got["distribution"]["q95"]


def test_by_layer(analyze, tmp_path):
    model = make_model((4,) * 9, (1,) * 9)
    streams = [make_stream(n, "code", [[{i}] * 9], (1,) * 9) for i, n in enumerate("ab")]
    trace = make_trace(model, streams)
    _, out, _ = analyze({"t": trace}, "-B", "2", "--csv", str(tmp_path))
    assert "0-2" in out
    _, out, _ = analyze({"t": trace}, "-B", "2", "--by-layer", "--csv", str(tmp_path))
    assert "0-2" not in out
    with open(tmp_path / "unions.csv", newline="") as file:
        labels = list(dict.fromkeys(line["layers"] for line in csv.DictReader(file)))
    assert labels == ["all", *map(str, range(9))]


def test_loops_are_said(analyze):
    streams = golden_streams()
    streams[0] = make_stream("a", "code", [[{0, 1}] * 2] * 3, (2, 2), looped_from=1)
    trace = make_trace(golden_trace().model, streams, temp=0.7)
    _, out, _ = analyze({"t": trace})
    text = " ".join(out.split())
    assert "2 looped rows of 1 stream left out." in text
    assert "Sampler: temperature 0.7." in text
    _, out, _ = analyze({"t": trace}, "--keep-loops")
    assert "2 looped rows of 1 stream kept." in " ".join(out.split())


def test_usage_errors_are_one_line(analyze, tmp_path):
    code, out, err = analyze({"t": golden_trace()}, "-B", "2,5")
    assert (code, out) == (2, "")
    assert "B = 5" in err and "4 streams" in err and err.count("\n") == 1
    for options in (["--json", str(tmp_path)], ["--json", str(tmp_path / "no" / "u.json")]):
        code, out, err = analyze({"t": golden_trace()}, *options)
        assert (code, out) == (2, "")
    assert "does not exist" in err


@pytest.mark.parametrize("sizes", ["two", "2,", "0"])
def test_bad_list_of_lanes(sizes):
    with pytest.raises(SystemExit) as stop:
        main(["analyze", "t", "-B", sizes])
    assert stop.value.code == 2


def test_output_is_replaced_whole(analyze, tmp_path):
    target = tmp_path / "u.json"
    target.write_text("old")
    analyze({"t": golden_trace()}, "--json", str(target))
    json.loads(target.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["u.json"]


def test_verb_imports_nothing_heavy():
    heavy = ("numpy", "rich", "scipy", "h5py", "mlx")
    code = f"import sys, moetap.cli.analyze; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
