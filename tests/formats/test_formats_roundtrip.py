"""What a format can hold comes back as it was; what it cannot hold is said."""

from __future__ import annotations

import base64
import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formatkit import (
    BOTH,
    a_trace,
    fitting_trace,
    read_options,
    refusal,
    seeds,
    write,
)
from hypothesis import given, settings

from moetap.formats import get
from moetap.formats.base import Options
from moetap.trace import NOT_EXECUTED, Trace

WITH_SCORES = ("npz", "route-trace", "colibri", "lattice")
WITH_TOKENS = ("npz", "vllm")
WITH_BYTES = ("npz", "route-trace", "streamlx")


def there_and_back(name: str, trace: Trace) -> Trace:
    with tempfile.TemporaryDirectory() as folder:
        path = write(name, trace, Path(folder))
        return get(name).read(path, read_options(name, trace))


@pytest.mark.parametrize("name", BOTH)
@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_one_stream(name, seed):
    trace = fitting_trace(name, seed)
    back = there_and_back(name, trace)
    (a,), (b,) = trace.streams, back.streams
    np.testing.assert_array_equal(a.experts, b.experts)
    np.testing.assert_array_equal(a.position, b.position)
    assert (a.n_prompt, a.n_generated) == (b.n_prompt, b.n_generated)
    assert a.first_position == b.first_position
    for field in ("layer_index", "n_experts", "top_k"):
        np.testing.assert_array_equal(getattr(trace.model, field), getattr(back.model, field))
    if name in WITH_SCORES:
        np.testing.assert_array_equal(a.scores, b.scores)
    else:
        assert b.scores is None and back.capture.scores_kind == ""
    if name in WITH_TOKENS:
        np.testing.assert_array_equal(a.tokens, b.tokens)
    if name in WITH_BYTES:
        np.testing.assert_array_equal(trace.model.expert_bytes, back.model.expert_bytes)


@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_npz_holds_everything(seed):
    trace = a_trace(seed, n_streams=3, ragged=True, scores=bool(seed % 2))
    back = there_and_back("npz", trace)
    assert (back.run_id, back.created, back.complete) == (trace.run_id, trace.created, True)
    assert back.capture == trace.capture
    for a, b in zip(trace.streams, back.streams, strict=True):
        for field, value in vars(a).items():
            np.testing.assert_array_equal(value, getattr(b, field), err_msg=field)
    for field, value in vars(trace.model).items():
        np.testing.assert_array_equal(value, getattr(back.model, field), err_msg=field)


@pytest.mark.parametrize("dtype", ["int16", "int32", "uint32", "int64", "uint16"])
def test_npz_dtypes(dtype, tmp_path):
    trace = a_trace(3)
    path = write("npz", trace, tmp_path, dtype=dtype)
    with np.load(path) as archive:
        assert archive["experts"].dtype == dtype
        holes = np.concatenate([s.experts for s in trace.streams]) == NOT_EXECUTED
        assert (archive["experts"][holes] == (-1 if dtype == "int16" else 65535)).all()
    back = get("npz").read(path, Options())
    np.testing.assert_array_equal(back.streams[1].experts, trace.streams[1].experts)


def test_npz_refuses_a_dtype_that_would_mix_an_id_with_none(tmp_path):
    assert "255" not in refusal(lambda: write("npz", a_trace(1), tmp_path, dtype="uint8"))
    assert "choose" in refusal(lambda: write("npz", a_trace(1), tmp_path, missing=3))
    assert "integer" in refusal(lambda: write("npz", a_trace(1), tmp_path, dtype="float32"))


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_route_trace_and_streamlx_hold_several_streams(seed):
    trace = a_trace(seed, n_streams=3, ragged=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("route-trace", "streamlx"):
            back = get(name).read(write(name, trace, Path(folder)), Options())
            for a, b in zip(trace.streams, back.streams, strict=True):
                np.testing.assert_array_equal(a.experts, b.experts)
                np.testing.assert_array_equal(a.position, b.position)


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_several_streams_go_to_a_folder_and_come_back(name, tmp_path):
    trace = fitting_trace(name, 12, n_streams=3)
    get(name).write(trace, tmp_path / "out", Options())
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["0-prompt-0.json", "1-prompt-1.json", "2-prompt-2.json"]
    back = get(name).read(tmp_path / "out", read_options(name, trace))
    assert [s.prompt_id for s in back.streams] == [s.prompt_id for s in trace.streams]
    for a, b in zip(trace.streams, back.streams, strict=True):
        np.testing.assert_array_equal(a.experts, b.experts)
        assert (a.n_prompt, a.finish_reason) == (b.n_prompt, b.finish_reason)


def test_vllm_payload_is_what_numpy_and_base64_read(tmp_path):
    trace = fitting_trace("vllm", 8)
    answer = json.loads(write("vllm", trace, tmp_path).read_text())
    (choice,) = answer["choices"]
    rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    (stream,) = trace.streams
    n_tokens = len(answer["prompt_token_ids"]) + len(choice["token_ids"])
    assert rows.shape[0] == n_tokens - 1 == stream.n_prompt + stream.n_generated - 1
    assert rows.dtype == np.int32 and (rows[: stream.first_position] == -1).all()
    dense = np.setdiff1d(np.arange(rows.shape[1]), trace.model.layer_index)
    assert (rows[stream.first_position :, dense] == 0).all()
    fed = rows[stream.first_position :, trace.model.layer_index]
    np.testing.assert_array_equal(np.where(fed == -1, NOT_EXECUTED, fed), stream.experts)


def test_vllm_older_nested_lists(tmp_path):
    rng = np.random.default_rng(0)
    rows = np.stack(
        [np.stack([rng.permutation(8)[:2] for _ in range(3)]) for _ in range(5)]
    )  # 3 prompt and 3 generated tokens
    rows[:, 0] = 0  # a dense layer
    answer = {
        "model": "m",
        "prompt_routed_experts": rows[:3].tolist(),
        "choices": [{"routed_experts": rows[3:].tolist(), "token_ids": [7, 8, 9]}],
        "prompt_token_ids": [1, 2, 3],
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(answer))
    trace = get("vllm").read(path, Options(n_experts=8))
    assert trace.model.layer_index.tolist() == [1, 2] and trace.model.id == "m"
    (stream,) = trace.streams
    np.testing.assert_array_equal(stream.experts, np.sort(rows[:, 1:], axis=2))
    assert stream.tokens.tolist() == [1, 2, 3, 7, 8]
    answer["prompt_routed_experts"].pop()
    path.write_text(json.dumps(answer))
    assert "prompt has 3 tokens" in refusal(lambda: get("vllm").read(path, Options(n_experts=8)))


def test_vllm_cached_positions(tmp_path):
    rows = np.array([[[-1, -1]], [[-1, -1]], [[3, 1]], [[0, 2]], [[-1, -1]], [[2, 1]]])
    buffer = io.BytesIO()
    np.save(buffer, rows.astype(np.int16))
    answer = {
        "choices": [{"routed_experts": base64.b64encode(buffer.getvalue()).decode()}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 3},
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(answer))
    (stream,) = get("vllm").read(path, Options(n_experts=4)).streams
    assert (stream.first_position, stream.n_prompt, stream.n_generated) == (2, 4, 3)
    missing = [NOT_EXECUTED, NOT_EXECUTED]
    assert stream.experts[:, 0].tolist() == [[1, 3], [0, 2], missing, [1, 2]]


def test_sglang_payload_is_raw_int32(tmp_path):
    trace = fitting_trace("sglang", 6)
    (stream,) = trace.streams
    layers = int(trace.model.layer_index[-1]) + 3
    answer = json.loads(write("sglang", trace, tmp_path, hidden_layers=layers).read_text())
    meta = answer["meta_info"]
    flat = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
    rows = flat.reshape(-1, layers, trace.model.max_top_k)
    assert len(rows) == stream.n_rows
    assert meta["routed_experts_start_len"] == stream.first_position
    dense = np.setdiff1d(np.arange(layers), trace.model.layer_index)
    assert not rows[:, dense].any()
    ids = rows[:, trace.model.layer_index]
    expected = np.where(stream.experts == NOT_EXECUTED, 0, stream.experts)
    np.testing.assert_array_equal(ids, expected)


def test_sglang_start_len(tmp_path):
    trace = a_trace(2, n_streams=1, min_k=2, first_positions=False, missing=0)
    stream = trace.streams[0]
    assert stream.n_prompt > 1
    path = write("sglang", trace, tmp_path, start_len=1)
    back = get("sglang").read(path, read_options("sglang", trace)).streams[0]
    assert back.first_position == 1 and back.n_prompt == stream.n_prompt
    np.testing.assert_array_equal(back.experts, stream.experts[1:])
    late = Options(start_len=stream.n_prompt, n_experts=20, top_k=2)
    assert "decode step 0" in refusal(lambda: get("sglang").read(path, late))
    assert "decode step 0" in refusal(
        lambda: write("sglang", trace, tmp_path, start_len=stream.n_prompt)
    )


def test_sglang_openai_route(tmp_path):
    trace = fitting_trace("sglang", 6)
    path = write("sglang", trace, tmp_path)
    meta = json.loads(path.read_text())["meta_info"]
    (stream,) = trace.streams
    answer = {
        "id": "cmpl-1",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "sgl_ext": {"routed_experts": meta["routed_experts"]},
            }
        ],
        "usage": {"prompt_tokens": stream.n_prompt, "completion_tokens": stream.n_generated},
    }
    path.write_text(json.dumps(answer))
    options = replace(read_options("sglang", trace), start_len=stream.first_position)
    (back,) = get("sglang").read(path, options).streams
    np.testing.assert_array_equal(back.experts, stream.experts)
    assert (back.prompt_id, back.finish_reason) == ("cmpl-1", "stop")


def test_vllm_without_the_start_of_the_prompt(tmp_path):
    trace = a_trace(2, n_streams=1, min_k=2, first_positions=False, missing=0)
    (stream,) = trace.streams
    buffer = io.BytesIO()
    np.save(buffer, stream.experts[1:].astype(np.int32))
    answer = {
        "choices": [{"routed_experts": base64.b64encode(buffer.getvalue()).decode()}],
        "usage": {"prompt_tokens": stream.n_prompt, "completion_tokens": stream.n_generated},
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps(answer))
    options = Options(n_experts=20, start_len=1)
    (back,) = get("vllm").read(path, options).streams
    assert back.first_position == 1
    np.testing.assert_array_equal(back.experts, stream.experts[1:])
    assert "expected" in refusal(lambda: get("vllm").read(path, Options(n_experts=20)))


def test_what_does_not_fit_is_refused(tmp_path):
    ragged = a_trace(1, n_layers=3, n_streams=1, ragged=True)
    assert len(set(ragged.model.top_k.tolist())) > 1
    assert "top-k" in refusal(lambda: write("sglang", ragged, tmp_path))
    trace = a_trace(1, n_streams=1, missing=0)
    ids = trace.streams[0].experts.copy()
    ids[0] = NOT_EXECUTED
    scores = np.where(ids == NOT_EXECUTED, np.nan, trace.streams[0].scores)
    scores = scores.astype(np.float16)
    holed = replace(trace, streams=(replace(trace.streams[0], experts=ids, scores=scores),))
    for name in ("route-trace", "mblt", "colibri", "mer", "lattice"):
        assert "row 0" in refusal(lambda name=name: write(name, holed, tmp_path))
    assert not list(tmp_path.iterdir())


def test_losses_are_said(tmp_path):
    trace = a_trace(4, n_streams=1, cells="passes", first_positions=False)
    for name in BOTH:
        lost = get(name).write(trace, write_path(name, tmp_path), Options())
        assert ("gate weights" in lost) == (name not in WITH_SCORES), name
        assert ("prompt hashes" in lost) == (name != "npz"), name
        assert ("bytes per expert" in lost) == (name not in WITH_BYTES), name
    assert get("npz").write(trace, tmp_path / "x.npz", Options()) == []


def write_path(name: str, folder: Path) -> Path:
    return folder / ("x.npz" if name in ("npz", "streamlx") else f"{name}.out")
