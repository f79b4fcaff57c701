"""What `moetap analyze` refuses, and what it says is not available."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))

from unionkit import golden_trace, make_model, make_stream, make_trace

import moetap.store
from moetap.cli import main
from moetap.store import TraceWriter, read

SAMPLE = Path(__file__).parents[2] / "traces" / "sample" / "demo.h5"


@pytest.fixture
def analyze(monkeypatch, capsys):
    def run(trace, *options):
        monkeypatch.setattr(moetap.store, "read", lambda _: trace)
        code = main(["analyze", "t.h5", *options])
        out = capsys.readouterr()
        return code, " ".join(out.out.split()), out.err

    return run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-B", "2,5"], "B = 5 is more than the 4 streams that there are"),
        (["-B", "two"], "-B two: not a list like"),
        (["-B", "0"], "each must be at least 1"),
        (["-C", "1"], "C = 1: C is below k = 2"),
        (["-C", "x"], "-C x: not a list"),
        (["--context", "8192,1"], "one number of tokens"),
        (["--tier", "0"], "each must be at least 1"),
        (["--headroom", "-1"], "not a size in GB"),
        (["--ssd", "quick"], "neither a number in GB/s"),
        (["--ssd", "0"], "above 0"),
        (["--only", "unions"], "no part 'unions'; there are union, cache"),
        (["--groups", "0"], "0 groups to sample"),
        (["--seed", "-1"], "seed -1"),
        (["--criteria", "none.toml"], "cannot read the criteria"),
        (["--json", "no/such/u.json"], "does not exist"),
        (["--report", "."], "is a folder; name a file"),
        (["--csv", "no/such/folder"], "cannot be made"),
    ],
)
def test_refused_in_one_line(analyze, options, words):
    code, out, err = analyze(golden_trace(), *options)
    assert (code, out) == (2, "")
    assert words in err and err.count("\n") == 1 and err.startswith("moetap: error: ")


def test_csv_and_plots_want_a_folder(analyze, tmp_path):
    (tmp_path / "file").write_text("")
    for option in ("--csv", "--plots"):
        code, _, err = analyze(golden_trace(), option, str(tmp_path / "file"))
        assert code == 2 and "is a file; name a folder" in err


def test_one_stream(analyze):
    stream = make_stream("a", "", [[{0, 1}], [{1, 2}]], (2,))
    code, out, _ = analyze(make_trace(make_model((8,), (2,)), [stream]))
    assert code == 0
    assert "no interval, one stream" in out
    assert "no verdict: I/O reduction, overflow and the RAM ledger are not available" in out
    assert "RAM ledger: tiny Not available: tiny: the trace does not record" in out
    assert "Time of the expert reads, decode: tiny Not available: no SSD bandwidth given" in out
    assert "nan" not in out


def test_streams_shorter_than_the_window_and_no_prefill(analyze):
    trace = golden_trace()
    code, out, _ = analyze(trace, "--only", "overflow")
    assert code == 0 and "n/a: no group lasts W steps" in out
    import dataclasses

    bare = [
        dataclasses.replace(
            s,
            first_position=1,
            experts=s.experts[1:],
            tokens=s.tokens[1:],
            position=s.position[1:],
        )
        for s in trace.streams
    ]
    _, out, _ = analyze(dataclasses.replace(trace, streams=tuple(bare)), "--only", "overflow")
    assert "Prefill chunks: not available, no prefill rows." in out


def test_layer_that_never_ran(analyze):
    streams = [make_stream(n, "", [[{0, 1}, set()]] * 3, (2, 2)) for n in "abcdef"]
    trace = make_trace(make_model((8, 8), (2, 2), [10, 10]), streams)
    code, out, _ = analyze(trace, "--ssd", "3")
    assert code == 0
    assert "18 of 36 cells were not executed and are left out." in out
    assert "nan" not in out


def test_criteria_and_report(analyze, tmp_path):
    from moetap.criteria import DEFAULT

    mine = tmp_path / "mine.toml"
    mine.write_text(DEFAULT.read_text().replace("lanes = 4 ", "lanes = 2 "))
    report = tmp_path / "r.html"
    code, out, _ = analyze(golden_trace(), "--criteria", str(mine), "--report", str(report))
    assert code == 0
    assert "Criteria at 16 GiB, C = 4 (its default), B = 2" in out
    assert "mine.toml, sha256" in out
    assert "lanes = 2" in report.read_text()


def test_criteria_with_more_lanes_than_the_default_sizes(analyze, tmp_path):
    from moetap.criteria import DEFAULT

    mine = tmp_path / "mine.toml"
    mine.write_text(DEFAULT.read_text().replace("lanes = 4 ", "lanes = 6 "))
    streams = [make_stream(n, "", [[{0, 1}]] * 3, (2,)) for n in "abcdefg"]
    code, out, _ = analyze(make_trace(make_model((8,), (2,)), streams), "--criteria", str(mine))
    assert code == 0 and "B = 6" in out


def test_plots(analyze, tmp_path):
    code, _, _ = analyze(golden_trace(), "--plots", str(tmp_path / "p"), "--only", "union")
    assert code == 0
    names = {path.name for path in (tmp_path / "p").iterdir()}
    assert names == {
        f"union-{kind}{theme}.{ext}"
        for kind in ("cdf", "steps")
        for theme in ("", "-dark")
        for ext in ("png", "svg")
    }


def test_reads_beside_the_untraced_decode_rate(capsys, tmp_path):
    """By hand: 125 tokens/s are 8 ms a step. The cold step of one lane reads io_s seconds; with no
    overlap the step takes io_s + 8 ms, with full overlap the longer of the two.
    """
    sample = read(SAMPLE)
    known = replace(sample.capture, untraced_tokens_per_s=125.0)
    path = tmp_path / "t.h5"
    with TraceWriter(path, sample.model, known) as writer:
        for stream in sample.streams:
            writer.append(stream)
        writer.close(complete=True)
    for source, rate in ((path, 125.0), (SAMPLE, None)):
        out = tmp_path / "a.json"
        options = ["--only", "time", "--ssd", "0.01", "--json", str(out)]
        assert main(["analyze", str(source), *options]) == 0
        text = capsys.readouterr().out
        line = json.loads(out.read_text())["studies"][0]["time"]["lines"][0]["slow"]
        if rate is None:
            assert "no untraced decode rate" in text
            assert line["no_overlap_lane_tokens_per_s"] is None
            continue
        assert "beside the 125 tokens/s" in text
        io_s = line["step_s"]
        assert line["no_overlap_lane_tokens_per_s"] == pytest.approx(1 / (io_s + 0.008))
        assert line["full_overlap_lane_tokens_per_s"] == pytest.approx(1 / max(io_s, 0.008))
