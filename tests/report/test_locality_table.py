from __future__ import annotations

import csv
import io
import json

import numpy as np
import pytest
from localitykit import locality_trace, trace_of
from unionkit import make_model, make_stream, make_trace

from moetap.analysis.locality import locality
from moetap.analysis.pool import pool
from moetap.report.locality_files import locality_csvs, locality_dict, locality_json
from moetap.report.locality_table import print_locality


@pytest.fixture(scope="module")
def golden():
    return locality(pool([locality_trace()]), capacities=(1, 2, 3), hot_sizes=(1, 2))


def printed(capsys, found, **options):
    print_locality(found, **options)
    return capsys.readouterr().out


def lines(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_golden_lines(golden, capsys):
    out = lines(printed(capsys, golden))
    # The figures are worked out in tests/analysis/test_locality.py.
    assert "all overlap 43.8 33.3 n/a n/a n/a n/a n/a" in out
    assert "3 overlap 50.0 33.3 n/a n/a n/a n/a n/a" in out
    # selections, first uses, others 50 75 90 95, steps 50 75 90 95
    assert "3 14 50.00 0 2 2 2 1 2 2 2" in out
    # C, cold, ±, steady, ±, all steps, ±, uniform
    assert "2 35.7 26.5 n/a - 35.7 26.5 50.0" in out
    assert "3 1 n/a - n/a - n/a - 25.0" in out
    assert "all fitted 45.0 80.0" in out
    assert "tested 45.0 70.0" in out
    assert "code > agentic 37.5 62.5" in out
    assert "code > code n/a n/a" in out
    assert "3 1.809 1.964 2.000 3.5 4 0.0 35.71 0.250" in out
    # cells, k guesses, ±, uniform, 2k guesses, ±, uniform
    assert any(x.startswith("next layer popularity 6 66.7 ") for x in out)
    assert any(x.startswith("used last 8 43.8 ") for x in out)


def test_says_what_it_is(golden, capsys):
    text = " ".join(printed(capsys, golden).split())
    for words in (
        "Locality of single streams (B = 1), decode: 2 streams, tiny",
        "Decode rows only, each stream by itself.",
        "2 streams (1 agentic, 1 code), 7 decode steps.",
        "delete-one jackknife interval over streams",
        "Sampler: not recorded.",
        "1 of 14 cells were not executed and are left out.",
        "C = 1 not available: a step needs k = 2 slots.",
        "split by stream, seed 0",
        "Cold: the first 64 decode steps",
        "mean of 1 pair: 1.35 on the other half of the streams",
        "1.78 on the same streams",
    ):
        assert words in text
    assert "INCOMPLETE" not in text


def test_incomplete_is_said(capsys):
    trace = locality_trace(complete=False, n_prompts=5)
    text = printed(capsys, locality(pool([trace])))
    assert text.splitlines()[1].strip() == "INCOMPLETE: 2 of 5 streams"


def test_one_stream_and_one_layer(capsys):
    cells = [[{0, 1}], [{0, 2}]]
    trace = make_trace(make_model((4,), (2,)), [make_stream("a", "", cells, (2,))])
    found = locality(pool([trace]))
    text = " ".join(printed(capsys, found).split())
    assert "No interval: one stream." in text
    assert "Not available: one stream: there is no other half to test on." in text
    assert "Lift from layer to layer: not available." in text
    assert "Next layer from popularity not available: no MoE layer before it." in text
    assert "nan" not in text
    json.loads(locality_json(found))
    assert "locality_lifts.csv" not in locality_csvs(found)


def test_sizes_that_hold_every_expert_are_printed_once(capsys):
    text = " ".join(printed(capsys, locality(pool([locality_trace()]))).split())
    assert "C = 128, 256: as C = 64, which holds every expert." in text
    assert "n = 16, 32, 64, 128: as n = 8, which holds every expert." in text
    assert "n experts 8 ─" in text


def test_plain_and_100_wide(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    # More layers, larger ids and longer names than any model there is.
    noise = np.random.default_rng(0).random((4, 3, 160, 512))
    trace = trace_of(noise.argpartition(22, axis=3)[..., :22], 512, ("a-long-class-name", "b"))
    found = locality(pool([trace]))
    for by_layer in (False, True):
        out = printed(capsys, found, by_layer=by_layer)
        assert "\x1b" not in out and "…" not in out
        assert max(map(len, out.splitlines())) <= 100


def test_json(golden):
    found = json.loads(locality_json(golden))
    assert found == locality_dict(golden)
    assert found["metric"] == "locality" and found["n_cells"] == 7
    lag = next(x for x in found["lags"] if x["layers"]["label"] == "3" and x["lag"] == 2)
    assert lag["overlap"]["value"] == pytest.approx(1 / 3)
    assert lag["n_pairs"] == 3
    missing = next(x for x in found["lags"] if x["lag"] == 64)
    assert missing["overlap"] is None and missing["uniform"] is None
    reuse = next(x for x in found["reuse"] if x["layers"]["label"] == "3")
    assert reuse["distance"] == [5, 0, 2, 0]
    assert reuse["lru"][0]["missing"] and reuse["lru"][0]["every"] is None
    assert found["usage"][1]["counts"] == [4, 1, 1, 0]
    assert found["usage"][1]["layer"] == 5
    assert found["lifts"] == [
        {
            "source": 3,
            "target": 5,
            "n_cells": 6,
            "plug_in": pytest.approx(1.78125),
            "tested": pytest.approx(146 / 108),
        }
    ]


def test_csv(golden):
    texts = locality_csvs(golden)
    assert sorted(texts) == [
        f"locality_{name}.csv"
        for name in ("hottest", "lags", "lifts", "predictions", "reuse", "transfers", "usage")
    ]
    rows = {name: list(csv.DictReader(io.StringIO(text))) for name, text in texts.items()}
    lags = rows["locality_lags.csv"]
    assert len(lags) == 3 * 64  # all layers and two depth groups
    assert float(lags[1]["overlap"]) == pytest.approx(1 / 3)
    assert lags[1]["complete"] == "true" and lags[1]["first_layer"] == "3"
    assert lags[63]["overlap"] == "" and lags[63]["n_pairs"] == "0"
    reuse = [x for x in rows["locality_reuse.csv"] if x["layers"] == "3"]
    assert [x["capacity"] for x in reuse] == ["1", "2", "3"]
    assert reuse[0]["every"] == "" and float(reuse[1]["every"]) == pytest.approx(5 / 14)
    assert reuse[1]["distance_q75"] == "2"
    assert all("nan" not in text for text in texts.values())


def test_csv_by_layer(golden):
    rows = list(csv.DictReader(io.StringIO(locality_csvs(golden, True)["locality_hottest.csv"])))
    assert {x["layers_kind"] for x in rows} == {"overall", "layer"}
