"""`moetap replay` as a user meets it."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from moetap import policies
from moetap.analysis.replay_study import Options, curve, replay_study
from moetap.cli import main
from moetap.policies import BUILT_IN, Policy
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
    assert "the cache is empty at decode step 0" in " ".join(text.split())
    assert "Not possible without room besides the slots: static" in " ".join(text.split())
    bound = "Knows the future, so a bound of those that load every miss into a slot: belady."
    assert bound in " ".join(text.split())
    text = replay(
        capsys, trace_path, "-C", 3, "-B", 2, "--scope", "global", "--lookups", "sequential",
        "--prefill", "--policy", "lru",
    )  # fmt: skip
    assert "sequential look-ups, one cache for all layers, B = 2" in text
    assert "Prefill, replayed before decode" in text and "% of B=1" in text
    # Two lanes select at most 2 x 3 experts.
    text = replay(capsys, trace_path, "-C", 6, "-B", 2, "--policy", "lru")
    assert "No set is larger than its cache: no extra passes." in " ".join(text.split())
    assert "extra\n" not in text
    text = replay(capsys, trace_path, "-C", "2,6", "-B", 2, "--policy", "lru")
    assert "Extra passes: forced, per layer and step" in " ".join(text.split())
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
    assert f" {span[1]} " in chosen and "extra" not in chosen
    below = replay(capsys, trace_path, "--curve", "-C", 1)
    assert "several passes" in " ".join(below.split())


def test_curve_of_lanes_says_where_passes_are_forced(trace_path, tmp_path, capsys):
    js, table, plots = tmp_path / "c.json", tmp_path / "c.csv", tmp_path / "plots"
    text = replay(
        capsys,
        trace_path,
        "--curve",
        "-B",
        2,
        "-C",
        "3,4,5",
        "--json",
        js,
        "--csv",
        table,
        "--plots",
        plots,
    )
    study = replay_study([read(trace_path)], Options(("lru",), (3, 4, 5), b=2))
    content = json.loads(js.read_text())
    for label in ("3", "4", "5"):
        values = study.find("lru", label).phases["cold"]
        at = content["capacities"].index(int(label))
        extra = [layer[at] for layer in content["extra_passes"][0]]
        assert extra == values.extra_passes.tolist()
        (row,) = (line.split() for line in text.splitlines() if line.split()[:1] == [label])
        assert row[-1] == f"{sum(extra) / (values.tokens.sum() / 2):.2f}"
    found = curve([read(trace_path)], Options(b=2))
    largest = found.largest_set(("cold", "steady"))
    assert f"The largest set of a layer and step has {largest} experts" in " ".join(text.split())
    with open(table, newline="") as file:
        assert sum(int(li["extra_passes"]) for li in csv.DictReader(file)) == 2 * np.sum(
            content["extra_passes"]
        )
    assert "extra passes forced" in (plots / "curve.svg").read_text()


def test_curve_of_one_cache_for_all_layers(trace_path, tmp_path, capsys):
    js, table, plots = tmp_path / "c.json", tmp_path / "c.csv", tmp_path / "plots"
    text = replay(
        capsys, trace_path, "--curve", "--scope", "global", "--json", js, "--csv", table,
        "--plots", plots,
    )  # fmt: skip
    model = read(trace_path).model
    total = int(model.n_experts.sum())
    assert "one cache for all layers" in text and f"{total:,}" in text
    content = json.loads(js.read_text())
    assert content["capacities"][-1] == total
    study = replay_study([read(trace_path)], Options(("lru",), (3,), scope="global"))
    slots = 3 * model.n_layers
    at = content["capacities"].index(slots)
    missed = study.find("lru", f"3 x {model.n_layers}").phases["cold"].misses.sum()
    assert content["misses"]["lru"][0][0][at] == missed
    with open(table, newline="") as file:
        lines = [li for li in csv.DictReader(file) if li["policy"] == "lru"]
    (line,) = (li for li in lines if (li["phase"], li["capacity"]) == ("cold", str(slots)))
    assert (line["layer"], int(line["misses"])) == ("all", missed)
    assert int(line["tokens"]) == np.sum(content["tokens"][0])
    assert "shared by all layers" in (plots / "curve.svg").read_text()
    chosen = replay(capsys, trace_path, "--curve", "--scope", "global", "-C", 3)
    assert f" {slots} " in chosen


def test_room_for_every_expert_is_said(trace_path, capsys):
    for scope in ("layer", "global"):
        text = replay(capsys, trace_path, "--policy", "lru", "-C", "3,999", "--scope", scope)
        assert "Room for every expert: 999" in " ".join(text.split())


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


@pytest.mark.parametrize("how", [("--policy", "lru"), ("--curve",)])
def test_traces_that_were_not_computed_alike(tmp_path, capsys, how):
    trace = random_trace(3, 4, max_steps=8, missing=0.05)
    for name, step in (("a", 64), ("b", 99)):
        capture = replace(trace.capture, prefill_step=step)
        with TraceWriter(tmp_path / f"{name}.h5", trace.model, capture) as writer:
            writer.append(replace(trace.streams[0], prompt_id=name, prompt_sha256=f"{step:064}"))
            writer.close(complete=True)
    one, other = tmp_path / "a.h5", tmp_path / "b.h5"
    text = " ".join(replay(capsys, one, other, "-C", 4, *how).split())
    assert f"{one} and {other} were not computed alike (prefill step 64 against 99)" in text
    assert "not computed alike" not in replay(capsys, one, "-C", 4, *how)


class Raises(Policy):
    name = "raises"

    def missed(self, look_ups, capacity):
        raise ValueError("who knows")


class Wrong(Policy):
    name = "wrong"

    def missed(self, look_ups, capacity):
        return look_ups.starts > 0


def test_a_plug_in_that_fails(trace_path, capsys, monkeypatch):
    points = [
        EntryPoint(k.name, f"{__name__}:{k.__name__}", policies.GROUP) for k in (Raises, Wrong)
    ]
    monkeypatch.setattr(policies, "entry_points", lambda group: points)
    for name, says in (("raises", "failed: ValueError('who knows')"), ("wrong", "did not say")):
        assert main(["replay", str(trace_path), "-C", "4", "--policy", name]) == 1
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert f"policy {name} ({__name__}:{name.title()})" in err and says in err


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
        (("--budget-gib", "1e15"), "not a list"),
        (("--budget-gib", "0.00000001"), "does not hold an expert"),
        (("-B", "9"), "more than the 4 streams"),
        (("-B", "0"), "at least one stream"),
        (("--curve", "--policy", "lru"), "leave --policy out"),
        (("--curve", "--budget-gib", "1"), "leave --budget-gib out"),
        (("--curve", "--by-layer"), "leave --by-layer out"),
        (("--plots", tmp_path), "add --curve"),
        (("--json", tmp_path / "no" / "r.json"), "make it first"),
    ):
        assert match in refused(capsys, trace_path, *args)
    assert main(["replay", str(tmp_path / "missing.h5")]) == 1


def test_defaults(trace_path, capsys):
    text = replay(capsys, trace_path)
    for policy in ("lru", "lfu", "static", "belady"):
        assert f" {policy} " in text
