from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
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


def real_trace(complete=True, n_prompts=0, **fields):
    """Six streams of 70 steps, two layers, top-2 of 40; every size of the model is known."""
    rng = np.random.default_rng(3)
    streams = []
    for i in range(6):
        ids = rng.random((70, 2, 40)).argpartition(2, axis=2)[:, :, :2]
        cells = [[set(layer) for layer in step] for step in ids.tolist()]
        streams.append(make_stream(f"s{i}", ("code", "agentic")[i % 2], cells, (2, 2)))
    model = make_model((40, 40), (2, 2), [1_000_000, 1_000_000], **fields)
    model = dataclasses.replace(
        model, resident_bytes=5_000, kv_bytes_per_token=10, state_bytes_per_stream=100
    )
    return make_trace(model, streams, complete=complete, n_prompts=n_prompts, run_id="run-1")


def test_golden_line(analyze):
    code, out, _ = analyze({"t": golden_trace()}, "--only", "union")
    assert code == 0
    line = next(" ".join(x.split()) for x in out.splitlines() if " 3.06 " in x)
    # B, union ±, 5 25 50 75 95 max, uniform, k, loads/token, saved ±; 165.7 bytes are 0.2 kB.
    assert line == "2 3.06 1.08 2 3 3 3 4 4 3.00 2 1.53 23.4 27.0 0.2"


def test_every_table_says_what_it_is(analyze):
    _, out, _ = analyze({"t": golden_trace()}, "--groups", "5", "--seed", "3", "--only", "union")
    text = " ".join(out.split())
    for words in (
        "Decode rows only, at matched decode steps",
        "4 streams; groups x steps: 4 x 2 (B = 1), 6 x 2 (B = 2), 4 x 2 (B = 3), 1 x 1 (B = 4).",
        "delete-one jackknife interval over streams",
        "over 5 sampled groups for each B, seed 3",
        "nothing survives from one step to the next",
        "Sampler: not recorded.",
        "1 of 14 cells were not executed and are left out.",
        "code, B = 3: not available, 2 streams.",
        "all, B = 4: no interval, without one of the 4 streams no group is left.",
        "mixed, B = 1: not available, a single stream is of one class.",
    ):
        assert words in text
    assert text.count("Decode rows only") == 1
    assert "INCOMPLETE" not in text


@pytest.mark.parametrize("trace", [golden_trace(), real_trace()])
def test_pipe_is_plain_and_100_wide(analyze, monkeypatch, trace):
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = analyze({"t": trace}, "--ssd", "2.5-3.1")
    assert "\x1b" not in out and "…" not in out
    assert max(len(line.rstrip()) for line in out.splitlines()) <= 100
    assert "nan" not in out


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
    trace = real_trace(complete=False, n_prompts=48)
    _, out, _ = analyze({"t": trace}, "--json", str(tmp_path / "u.json"), "--csv", str(tmp_path))
    assert out.count("INCOMPLETE: 6 of 48 streams") == 7  # one for each section
    assert out.count("(INCOMPLETE TRACE)") > 15  # one for each table
    content = json.loads((tmp_path / "u.json").read_text())["studies"][0]
    assert content["complete"] is False
    assert content["union"]["traces"][0]["n_planned"] == 48
    files = list(tmp_path.glob("*.csv"))
    assert len(files) > 12
    for path in files:
        with open(path, newline="") as file:
            lines = list(csv.DictReader(file))
        assert {line["complete"] for line in lines} == {"false"}, path
        assert {line["streams_planned"] for line in lines} == {"48"}, path


def test_incomplete_names_the_trace_among_several(analyze):
    cut = golden_trace(complete=False, source="x/cut.h5", run_id="2")
    _, out, _ = analyze({"a": golden_trace(run_id="1"), "b": cut})
    assert "INCOMPLETE: cut.h5 has 4 streams" in out


def read_csv(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_terminal_json_and_csv_have_the_same_numbers(analyze, tmp_path):
    folder = tmp_path / "c"
    _, out, _ = analyze(
        {"t": real_trace()}, "--ssd", "3", "--json", str(tmp_path / "u.json"), "--csv", str(folder)
    )
    found = json.loads((tmp_path / "u.json").read_text())["studies"][0]
    text = [" ".join(line.split()) for line in out.splitlines()]

    # unions: every printed line, at full precision
    printed = [f for f in found["union"]["figures"] if f["layers"]["kind"] != "layer"]
    lines = read_csv(folder / "unions.csv")
    assert len(lines) == len(printed)
    for line, got in zip(lines, printed, strict=True):
        if got["missing"]:
            assert line["union"] == line["max"] == ""
        else:
            assert float(line["union"]) == got["union"]["value"]
            low = got["union"]["low"]
            assert line["union_low"] == ("" if low is None else repr(low))
    four = next(f for f in printed if f["b"] == 4)
    start = f"4 {four['union']['value']:.2f} {four['union']['high'] - four['union']['value']:.2f} "
    assert any(line.startswith(start) for line in text)

    # cache
    figures = found["cache"]["figures"]
    lines = read_csv(folder / "cache.csv")
    assert [float(x["loads"]) if x["loads"] else None for x in lines] == [
        f["loads"]["value"] if "loads" in f else None for f in figures
    ]
    key = {"stratum": "all", "b": 4, "capacity": 10}
    of = {f["phase"]: f for f in figures if key.items() <= f.items()}
    start = f"4 {four['loads_per_token']['value']:.2f} {100 - 100 * four['saved']['value']:.1f} "
    shown = next(
        x for x in text if x.startswith(start) and f" {of['all']['loads']['value']:.3f} " in x
    )
    assert f" {100 * of['all']['relative']['value']:.1f} " in shown
    rates = [f"{100 * of[phase]['hit_rate']['value']:.1f}" for phase in ("cold", "steady")]
    assert shown.endswith(" " + " ".join(rates))
    control = [f for f in figures if f["kind"] == "control" and f["phase"] == "all"]
    assert control and all(f["relative"]["value"] == pytest.approx(1 / f["b"]) for f in control)

    # overflow
    lines = read_csv(folder / "overflow.csv")
    assert [x["state"] for x in lines] == [x["state"] for x in found["overflow"]["lines"]]
    impossible = [x for x in lines if x["state"] == "impossible by construction"]
    assert impossible and all(x["fraction"] == "" for x in impossible)
    assert any("imposs." in line for line in text)
    line = next(
        x
        for x in found["overflow"]["lines"]
        if (x["stratum"], x["b"], x["window"], x["capacity"]) == ("all", 4, 8, 20)
    )
    assert any(f" {100 * line['fraction']['value']:.1f} " in x for x in text if x.startswith("4 "))

    # ledger, time, verdict
    book = read_csv(folder / "ledger.csv")
    assert {int(x["total_bytes"]) for x in book} == {
        x["total_bytes"] for x in found["ledger"]["lines"]
    }
    assert len(read_csv(folder / "time.csv")) == len(found["time"]["lines"])
    time = next(x for x in found["time"]["lines"] if x["b"] == 4 and x["capacity"] is None)
    assert time["slow"]["step_s"] == pytest.approx(4 * four["bytes_per_token"]["value"] / 3e9)
    decisions = [x for x in read_csv(folder / "verdict.csv") if x["criterion"] == "decision"]
    for line, decision in zip(decisions, found["verdict"]["decisions"], strict=True):
        assert line["why"] == decision["sentence"]
        assert decision["sentence"] in " ".join(out.split())
    assert len(found["verdict"]["criteria"]["sha256"]) == 64


def test_verdict_is_last_and_only_selects(analyze):
    _, out, _ = analyze({"t": real_trace()})
    starts = [x for x in out.splitlines() if x and x[0] != " "]
    assert [x.split()[0] for x in starts] == [
        "Union", "Expert", "Overflow", "RAM", "Time", "Locality", "Verdict:",
    ]  # fmt: skip
    _, out, _ = analyze({"t": real_trace()}, "--only", "ledger,verdict")
    starts = [x for x in out.splitlines() if x and x[0] != " "]
    assert [x.split()[0] for x in starts] == ["RAM", "Verdict:"]


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


def test_several_models(analyze, tmp_path):
    other = golden_trace(run_id="2")
    code, out, err = analyze({"a": real_trace(config_sha256="x"), "b": other})
    assert code == 2 and "different models" in err and "--by model" in err
    target = tmp_path / "u.json"
    traces = {"a": real_trace(config_sha256="x", id="org/first"), "b": other}
    code, out, _ = analyze(
        traces, "--by", "model", "--json", str(target), "--csv", str(tmp_path / "c")
    )
    assert code == 0
    assert out.count("Verdict: ") == 2
    assert "Models side by side" in out and "org/first" in out
    content = json.loads(target.read_text())
    assert [line["model"] for line in content["comparison"]] == ["org/first", "tiny"]
    saved = content["studies"][0]["union"]["figures"][3]["saved"]["value"]
    assert content["comparison"][0]["saved_cold"] == saved
    assert (tmp_path / "c" / "first" / "unions.csv").is_file()
    lines = read_csv(tmp_path / "c" / "comparison.csv")
    assert [line["complete"] for line in lines] == ["true", "true"]


def test_output_is_replaced_whole(analyze, tmp_path):
    target = tmp_path / "u.json"
    target.write_text("old")
    analyze({"t": golden_trace()}, "--json", str(target))
    json.loads(target.read_text())
    assert [p.name for p in tmp_path.iterdir()] == ["u.json"]


def test_verb_imports_nothing_heavy():
    heavy = ("numpy", "rich", "scipy", "h5py", "mlx", "matplotlib", "jinja2")
    code = f"import sys, moetap.cli.analyze; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_notes_name_the_layers_and_the_missing_bytes(analyze):
    steps = [[{0, 1}, set()], [{1, 2}, set()]]
    streams = [make_stream(name, "", steps, (2, 2)) for name in "abc"]
    never = make_trace(make_model([8, 8], [2, 2], [100, 100], [3, 5]), streams)
    _, out, _ = analyze({"t": never}, "--only", "union,cache", "-C", "2", "-B", "2")
    text = " ".join(out.split())
    assert "all, layer 5, B = 1: not available, at no step did 1 stream execute these" in text
    assert "all, layer 5, B = 2: not available, at no step did 2 streams execute these" in text
    assert (
        "No bytes per token (all, B = 1; all, B = 2): one of the layers was never executed." in text
    )
    assert "No bytes per token (-): one of the layers was never executed." in text
    unknown = make_trace(make_model([8, 8], [2, 2]), streams)
    _, out, _ = analyze({"t": unknown}, "--only", "cache", "-C", "2")
    assert "No bytes per token (-): the size of an expert is not recorded." in out


def test_forced_passes_are_said(analyze):
    # Steps of 3, 4 and 3 experts at C = 2, one of two at C = 3 (golden_trace, streams a and b).
    trace = make_trace(golden_trace().model, golden_streams()[:2])
    _, out, _ = analyze({"t": trace}, "--only", "cache", "-B", "2", "-C", "2,3,4")
    text = " ".join(out.split())
    assert "Passes per step and layer, all streams: 1.75 at C = 2, B = 2; 1.25 at C = 3, B" in text
    assert "so experts beyond C are read again each step" in text
    assert "Both sides count only the matched decode steps" in text
    _, out, _ = analyze({"t": trace}, "--only", "cache", "-B", "2", "-C", "4")
    assert "Passes per step" not in out


def test_control_characters_do_not_reach_the_terminal(analyze):
    cells = [[{0, 1}, {0, 1}]]
    streams = [make_stream(n, f"{n}\x1b[2J\nVerdict", cells * 2, (2, 2)) for n in "abcd"]
    model = make_model((40, 40), (2, 2), id="evil\x1b]0;x\x07\nVerdict: go")
    _, out, _ = analyze({"t": make_trace(model, streams)}, "-B", "2")
    assert not set(map(chr, range(32))) - {"\n"} & set(out)
    assert r"evil\x1b]0;x\x07\nVerdict: go" in out and r"a\x1b[2J\nVerdict" in out
    assert not any(line.strip().startswith("Verdict: go") for line in out.splitlines())
    other = dataclasses.replace(model, id="other\x1b[2J", config_sha256="d")
    traces = {"t": make_trace(model, streams), "u": make_trace(other, streams)}
    code, _, err = analyze(traces)
    assert code == 2 and "\x1b" not in err


def test_ascii_terminal(tmp_path):
    # In a process of its own: the encoding is that of the real standard output.
    out = subprocess.run(
        [sys.executable, "-m", "moetap", "ledger", "--model", "qwen3.6-35b-a3b"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert b"RAM ledger" in out.stdout
    sample = Path(__file__).parents[2] / "traces" / "sample" / "demo.h5"
    out = subprocess.run(
        [sys.executable, "-m", "moetap", "analyze", str(sample), "--only", "union"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True,
    )  # fmt: skip
    assert b"|   ? |5 % |" in out.stdout  # the column "±", in a box of ASCII


def test_intervals_of_shares_end_at_0_and_100_where_shown(analyze, tmp_path):
    target = tmp_path / "u.json"
    sample = moetap.store.read(Path(__file__).parents[2] / "traces" / "sample" / "demo.h5")
    _, out, _ = analyze({"t": sample}, "--only", "verdict", "--json", str(target))
    assert "16.8 %, 0.0 to 34.7 %" in out and "99.9 %, 99.7 to 100.0 %" in out
