"""Measured next to replayed misses: terminal, JSON, CSV and HTML; and what must be said loudly."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from unionkit import golden_trace, make_model, make_stream, make_trace

import moetap.store
from moetap.cli import main
from moetap.trace import Stream, StreamIO, Trace

CELLS = [[{0, 1}, {4, 5}], [{1, 2}, {4, 5}], [{0, 2}, {4, 6}]] + [[{0, 2}, {4, 6}]] * 65
# By hand, LRU with C = 2: layer 0 reads 2, then 2, then 0; layer 1 reads 4 and 5, then 6.
MISSES = np.array([[2, 2], [1, 0], [1, 1], *[[0, 0]] * 65], np.uint16)


def with_io(stream: Stream, misses: np.ndarray) -> Stream:
    """Experts of 1 and 2 kB; 2 GB/s; 1 ms of waiting in each layer that reads."""
    read = misses * np.array([1000, 2000])
    seconds = (read / 2e9).astype(np.float32)
    wait = np.where(misses > 0, 0.001, 0).astype(np.float32)
    step = np.full(len(misses), 0.01, np.float32)
    return replace(stream, io=StreamIO(misses, read, seconds, wait, wait, step))


def a_trace(misses=MISSES, source="s.h5", run_id="1", **settings) -> Trace:
    stream = with_io(make_stream("a", "code", CELLS, (2, 2)), misses)
    model = make_model((8, 8), (2, 2), [1000, 2000])
    trace = make_trace(model, [stream], source=source, run_id=run_id)
    how = {"moetap_version": "1", "mode": "streaming", "slots": 2, "policy": "lru"} | settings
    return replace(trace, capture=replace(trace.capture, **how))


@pytest.fixture
def analyze(monkeypatch, capsys):
    """Run a verb on traces by name; returns what was printed."""

    def run(traces, *options):
        monkeypatch.setattr(moetap.store, "read", traces.__getitem__)
        assert main(["analyze", *traces, *options]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def info(monkeypatch, capsys):
    def run(trace):
        monkeypatch.setattr(moetap.store, "read", lambda _: trace)
        assert main(["info", "t.h5"]) == 0
        return " ".join(capsys.readouterr().out.split())

    return run


def test_golden_lines(analyze):
    """64 cold steps: 7 misses, 256 requests, 4 x 1 + 3 x 2 = 10 kB, at 2 GB/s; 5 ms of waiting."""
    out = analyze({"t": a_trace()}, "--only", "measured", "-C", "2")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    cold = f"64 {7 / 64:.2f} {7 / 64:.2f} {100 - 100 * 7 / 256:.1f} 0.2 0.2 2.00 0.08"
    assert f"first 64 {cold}" in lines
    assert "rest 4 0.00 0.00 100.0 0.0 0.0 - 0.00" in lines
    assert "s.h5: lru, C = 2, one stream at a time (B = 1)" in lines
    assert (
        "Measured and replayed misses: equal in all 136 (step, layer) cells, as they must be."
        in lines
    )
    assert max(map(len, out.splitlines())) <= 100


def test_a_difference_is_said_loudly(analyze, info, tmp_path):
    wrong = MISSES.copy()
    wrong[1, 1], wrong[2, 0], wrong[67, 0] = 1, 0, 2
    report = tmp_path / "r.html"
    out = analyze({"t": a_trace(wrong)}, "--report", str(report))
    said = "DIFFERENT in 3 of 136 (step, layer) cells, 9 measured, 7 replayed."
    assert said in " ".join(out.split())
    assert "this is a bug of moetap, or the file was changed" in " ".join(out.split())
    page = report.read_text()
    assert re.search(rf'<p class="warning">[^<]*{re.escape(said)}', page)
    # Sums that agree by chance are not enough: 7 are measured in the cold phase too.
    assert re.search(r"rest 4 0\.50 0\.00 ", " ".join(out.split()))
    assert '<td class="n red">0.00</td>' in page
    assert said in info(a_trace(wrong))
    assert "DIFFERENT" not in analyze({"t": a_trace()})


def test_nothing_appears_without_measurements(analyze, tmp_path):
    trace = golden_trace()
    assert "measured and replayed" not in analyze({"t": trace}, "--csv", str(tmp_path))
    assert not (tmp_path / "measured.csv").exists()
    out = analyze({"t": trace}, "--only", "measured")
    assert "Not available: no trace measured its reads" in out


def test_what_cannot_be_replayed_is_shown_without(analyze, info):
    trace = a_trace(policy="future")
    out = " ".join(analyze({"t": trace}, "--only", "measured").split())
    assert "Measured and replayed misses: not compared, s.h5: cannot be replayed with" in out
    assert f"first 64 64 {7 / 64:.2f} - 97.3" in out
    assert "not compared, s.h5: cannot be replayed with policy 'future'" in info(trace)


def test_several_traces_and_files(analyze, tmp_path):
    bare = replace(a_trace(source="bare.h5", run_id="3", mode="resident"), streams=())
    other = make_stream("b", "code", CELLS, (2, 2))
    bare = replace(bare, streams=(other,))
    traces = {"s": a_trace(), "u": a_trace(source="u.h5", run_id="2", slots=4), "bare": bare}
    out = analyze(traces, "--json", str(tmp_path / "a.json"), "--csv", str(tmp_path))
    assert "s.h5: lru, C = 2" in out and "u.h5: lru, C = 4" in out
    assert "Without measured reads: bare.h5." in out
    # Four slots keep every expert: 3 and 3 misses, where the capture claims to have had 4 and 3.
    assert "DIFFERENT in 1 of 136 (step, layer) cells, 7 measured, 6 replayed." in " ".join(
        out.split()
    )
    study = json.loads((tmp_path / "a.json").read_text())["studies"][0]
    one, two = study["measured"]
    assert (one["source"], one["cells"], one["different_cells"]) == ("s.h5", 136, 0)
    assert (two["slots"], two["different_cells"]) == (4, 1)
    with open(tmp_path / "measured.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(x["source"], x["phase"]) for x in lines] == [
        (source, phase) for source in ("s.h5", "u.h5") for phase in ("all", "cold", "steady")
    ]
    for line, got in zip(lines, one["lines"] + two["lines"], strict=True):
        for name in ("misses", "replayed", "read_bytes", "miss_bytes", "steps"):
            assert int(line[name]) == got[name]
        assert line["bandwidth_bps"] == str(got["bandwidth_bps"] or "")
    cold = one["lines"][1]
    assert (cold["misses"], cold["replayed"], cold["requests"]) == (7, 7, 256)
    assert cold["read_bytes"] == cold["miss_bytes"] == 10_000
    assert cold["bytes_per_token"] == 10_000 / 64
    assert cold["hit_rate"] == 1 - 7 / 256
    assert cold["wait_s_per_token"] == pytest.approx(0.005 / 64)


def test_warnings_come_first_everywhere(analyze, info, tmp_path):
    first = a_trace(expert_kernel="row", prefill_step=2048)
    second = a_trace(source="u.h5", run_id="2", prefill_step=512, swap_growth_bytes=350_000_000)
    report = tmp_path / "r.html"
    out = analyze(
        {"a": first, "b": second}, "--report", str(report), "--json", str(tmp_path / "a.json")
    )
    alike = "s.h5 and u.h5 were not computed alike (expert kernel row against mlx-lm's choice, "
    assert " ".join(out.split()).startswith(alike)
    lines = json.loads((tmp_path / "a.json").read_text())["studies"][0]["warnings"]
    assert [line.split(":")[0] for line in lines][1:] == ["u.h5"]
    page = report.read_text()
    assert page.count('<p class="warning">u.h5: memory ran short, swap grew by 0.35 GB') == 1
    assert page.count('<p class="warning">s.h5 and u.h5 were not computed alike') == 1
    assert "swap growth memory ran short, swap grew by 0.35 GB" in info(second)
    assert "swap growth not recorded" in info(first)
    assert "swap growth 3.0 MB" in info(a_trace(swap_growth_bytes=3_000_000))


def test_info_of_an_imported_trace_claims_nothing(info):
    trace = golden_trace()
    bare = replace(
        trace,
        model=replace(trace.model, id="", config_json="", expert_bytes=np.zeros(2)),
        capture=replace(trace.capture, mode=""),
    )
    text = info(bare)
    for name in (
        "id", "type", "quantisation", "machine", "software", "prompts", "left out", "sampler",
        "thinking", "max tokens", "prefill", "expert kernel", "mode", "decode rate, untraced",
        "swap growth", "looping tails",
    ):  # fmt: skip
        assert f"{name} not recorded" in text, name
    assert "one expert not known all routed experts not known" in text
    for claim in ("greedy", "max tokens 0", "resident", "no such switch", "chunks of", "mlx"):
        assert claim not in text
    recorded = replace(trace, capture=replace(trace.capture, moetap_version="1", max_tokens=9))
    text = info(recorded)
    assert "sampler greedy" in text and "max tokens 9" in text and "mode resident" in text
