"""`moetap replay` as a user meets it."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from moetap.analysis.replay_study import Options, curve, replay_study
from moetap.cli import main
from moetap.policies import BUILT_IN
from moetap.store import TraceWriter, read

sys.path.insert(0, str(Path(__file__).parents[1] / "analysis"))
from unionkit import random_trace  # noqa: E402


@pytest.fixture(scope="module")
def trace_path(tmp_path_factory):
    trace = random_trace(3, 4, max_steps=8, missing=0.05)
    path = tmp_path_factory.mktemp("traces") / "t.h5"
    with TraceWriter(path, trace.model, trace.capture) as writer:
        for stream in trace.streams:
            writer.append(stream)
        writer.close(complete=True)
    return path


def replay(capsys, *args) -> str:
    assert main(["replay", *map(str, args)]) == 0
    return capsys.readouterr().out


def refused(capsys, *args) -> str:
    assert main(["replay", *map(str, args)]) == 2
    return capsys.readouterr().err


def test_table_names_its_rules(trace_path, capsys):
    text = replay(capsys, trace_path, "--policy", "lru,belady,static", "-C", "3,6")
    assert "step-atomic look-ups, one cache per layer, B = 1" in text
    assert "the cache is empty at decode step 0" in text
    assert "Not possible without room besides the slots: static" in " ".join(text.split())
    assert "Knows the future, so a bound: belady" in " ".join(text.split())
    text = replay(
        capsys, trace_path, "-C", 3, "-B", 2, "--scope", "global", "--lookups", "sequential",
        "--prefill", "--policy", "lru",
    )  # fmt: skip
    assert "sequential look-ups, one cache for all layers, B = 2" in text
    assert "Prefill, replayed before decode" in text and "% of B=1" in text
    assert "All 6 groups of 2 streams." in text


def test_files_hold_what_the_analysis_found(trace_path, tmp_path, capsys):
    js, table = tmp_path / "r.json", tmp_path / "r.csv"
    replay(
        capsys, trace_path, "--policy", "lru,pinned:2", "-C", "4", "--json", js, "--csv", table,
        "-B", 2, "--by-layer",
    )  # fmt: skip
    study = replay_study([read(trace_path)], Options(("lru", "pinned:2"), (4,), b=2))
    found = json.loads(js.read_text())
    assert (found["lookups"], found["scope"], found["b"]) == ("step", "layer", 2)
    with open(table, newline="") as file:
        lines = list(csv.DictReader(file))
    for figure in found["figures"]:
        values = study.find(figure["policy"], "4").phases["all"]
        every = figure["phases"]["all"]
        assert every["misses"] == values.misses.tolist()
        assert every["per_token"]["value"] == values.per_token.value
        assert every["relative"]["value"] == values.relative.value
        (line,) = (
            li
            for li in lines
            if (li["policy"], li["phase"], li["layer"]) == (figure["policy"], "all", "all")
        )
        assert int(line["misses"]) == values.misses.sum()
        assert float(line["hit_rate"]) == values.hit_rate.value
        assert figure["phases"]["steady"] is None  # 8 steps at most


def test_curve(trace_path, tmp_path, capsys):
    js, table, plots = tmp_path / "c.json", tmp_path / "c.csv", tmp_path / "plots"
    text = replay(
        capsys, trace_path, "--curve", "--json", js, "--csv", table, "--plots", plots, "--prefill"
    )
    assert "Miss-rate curve: step-atomic look-ups, one cache per layer, B = 1" in text
    found = curve([read(trace_path)], Options(prefill=True))
    content = json.loads(js.read_text())
    span = content["capacities"]
    assert span == list(found.capacities)
    for at, policy in enumerate(content["policies"]):
        assert np.array_equal(content["misses"][policy], found.misses[at][..., span])
    with open(table, newline="") as file:
        lines = list(csv.DictReader(file))
    n_layers = len(content["layer_index"])
    assert len(lines) == 2 * 3 * n_layers * len(span)
    assert sum(int(li["misses"]) for li in lines if li["policy"] == "lru") == np.sum(
        content["misses"]["lru"]
    )
    names = ["curve-dark.png", "curve-dark.svg", "curve.png", "curve.svg"]
    assert sorted(p.name for p in plots.iterdir()) == names
    assert (plots / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "lru all" in (plots / "curve.svg").read_text()
    chosen = replay(capsys, trace_path, "--curve", "-C", span[1])
    assert f" {span[1]} " in chosen


def test_budget_in_bytes(trace_path, tmp_path, capsys):
    js = tmp_path / "r.json"
    budget = "0.000001"  # 1073 bytes
    replay(
        capsys, trace_path, "--policy", "lru", "--budget-gib", budget, "--scope", "global",
        "--json", js,
    )  # fmt: skip
    (figure,) = json.loads(js.read_text())["figures"]
    assert (figure["budget"], figure["budget_bytes"]) == (f"{budget} GiB", 1073)
    size = read(trace_path).model.expert_bytes
    assert figure["slots"] == (1073 // size).tolist()


def test_list(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["replay", "--list"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.split() == list(BUILT_IN)


def test_refusals(trace_path, tmp_path, capsys):
    for args, match in (
        (("--policy", "nope"), "no policy is called 'nope'"),
        (("--policy", ""), "no policy is called ''"),
        (("-C", "0"), "each must be at least 1"),
        (("-C", "x"), "not a list"),
        (("--budget-gib", "x"), "--budget-gib x: not a list"),
        (("--budget-gib", "0"), "not a list"),
        (("--budget-gib", "nan"), "not a list"),
        (("--budget-gib", "0.00000001"), "does not hold an expert"),
        (("-B", "9"), "more than the 4 streams"),
        (("-B", "0"), "at least one stream"),
        (("--curve", "--policy", "lru"), "leave --policy out"),
        (("--curve", "--budget-gib", "1"), "leave --budget-gib out"),
        (("--curve", "--by-layer"), "leave --by-layer out"),
        (("--curve", "--scope", "global"), "leave --scope out"),
        (("--plots", tmp_path), "add --curve"),
        (("--json", tmp_path / "no" / "r.json"), "make it first"),
    ):
        assert match in refused(capsys, trace_path, *args)
    assert main(["replay", str(tmp_path / "missing.h5")]) == 1


def test_defaults(trace_path, capsys):
    text = replay(capsys, trace_path)
    for policy in ("lru", "lfu", "static", "belady"):
        assert f" {policy} " in text
