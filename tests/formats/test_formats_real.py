"""Traces that other tools recorded."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import real

from moetap import policies
from moetap.formats import get
from moetap.formats.base import Options
from moetap.trace import NOT_EXECUTED


@pytest.fixture(scope="module")
def qwen():
    return get("route-trace").read(real.path("qwen3-30b-a3b.route.csv"), Options())


def test_route_trace_of_a_phone(qwen):
    (stream,) = qwen.streams
    model = qwen.model
    assert stream.n_prompt == 28
    # Step 0 is the last prompt token's row, which the engine fed with the prompt.
    assert stream.n_rows - stream.n_prompt == 128
    assert (model.n_layers, set(model.top_k.tolist())) == (48, {6})
    assert set(model.n_experts.tolist()) == {128}
    assert set(model.expert_bytes.tolist()) == {3059712, 2654208}
    ran = (stream.experts != NOT_EXECUTED).any(axis=2)
    assert ran[:28].sum(axis=0).tolist() == [28] * 47 + [1]
    assert ran[28:].all() and ran[27, 47]


def test_route_trace_against_the_csv_module(qwen):
    found = {}
    with real.path("qwen3-30b-a3b.route.csv").open() as file:
        for line in csv.DictReader(line for line in file if not line.startswith("#")):
            cell = found.setdefault((int(line["step"]), int(line["layer"])), {})
            cell[int(line["expert"])] = np.float16(line["weight"])
    (stream,) = qwen.streams
    for (step, layer), cell in found.items():
        ids = stream.experts[step, layer].tolist()
        assert ids == sorted(cell)
        assert stream.scores[step, layer].tolist() == [cell[e] for e in ids]
    assert (stream.experts != NOT_EXECUTED).sum() == sum(map(len, found.values()))


@pytest.mark.parametrize("name", ["route-trace", "mblt", "colibri", "vllm", "mer", "lattice"])
def test_it_goes_through_other_formats(qwen, name, tmp_path):
    path = tmp_path / "out"
    get(name).write(qwen, path, Options())
    options = {"n_experts": 128, "n_prompt": 28}
    allowed = get(name).read_options
    if name in ("mblt", "colibri"):
        options.pop("n_prompt")  # found in the log
    back = get(name).read(path, Options(**{k: v for k, v in options.items() if k in allowed}))
    np.testing.assert_array_equal(back.streams[0].experts, qwen.streams[0].experts)
    assert back.streams[0].n_prompt == 28


def test_libcachesim_counts_the_misses_that_moetap_counts(qwen, tmp_path):
    lcs = pytest.importorskip("libcachesim")
    path = tmp_path / "q.bin"
    get("libcachesim").write(qwen, path, Options())
    ids = qwen.streams[0].decode()
    objects = (np.arange(48)[None, :, None] * 128 + ids).ravel()
    look_ups = policies.LookUps(
        np.arange(len(objects) + 1), objects.astype(np.uint16), np.ones(48 * 128, dtype=np.int64)
    )
    for capacity in (300, 1000, 2500):
        for name in ("LRU", "Belady"):
            params = lcs.ReaderInitParam(ignore_obj_size=True)
            reader = lcs.TraceReader(str(path), lcs.TraceType.ORACLE_GENERAL_TRACE, params)
            ratio, _ = getattr(lcs, name)(cache_size=capacity).process_trace(reader)
            own = policies.get(name.lower()).missed(look_ups, capacity).sum()
            assert round(ratio * len(objects)) == own, (name, capacity)


def test_npz_of_moe_cache_eval():
    trace = get("npz").read(real.path("gpt-oss-20b.4x511.npz"), Options())
    expected = real.gpt_oss()
    assert trace.model.id == "openai/gpt-oss-20b"
    np.testing.assert_array_equal(trace.model.n_experts, expected.model.n_experts)
    assert [s.first_position for s in trace.streams] == [101, 198, 153, 270]
    for a, b in zip(trace.streams, expected.streams, strict=True):
        np.testing.assert_array_equal(a.decode(), b.decode())
        assert a.n_generated == b.n_generated
