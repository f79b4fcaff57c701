"""Damaged and hostile files: refused with the file and the place, never a traceback."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formatkit import BOTH, a_trace, fitting_trace, read_options, refusal, write

from moetap.errors import MoetapError
from moetap.formats import get
from moetap.formats.base import Counts, Options
from moetap.trace import NOT_EXECUTED

# A cut between two steps leaves a shorter file that looks whole.
OPEN_END = ("route-trace", "mblt", "colibri", "mer", "lattice")
SEEDS = (2, 5)


def attempt(name: str, path: Path, options: Options) -> bool:
    """Whether the file is accepted; a refusal is one line with the path."""
    try:
        trace = get(name).read(path, options)
    except MoetapError as error:
        # A .npz's sidecar is another file.
        assert str(path.parent) in str(error) or "--" in str(error), error
        assert "\n" not in str(error)
        return False
    model = trace.model
    for stream in trace.streams:
        assert stream.experts.shape == (stream.n_rows, model.n_layers, model.max_top_k)
    return True


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("seed", SEEDS)
def test_truncations(name, seed, tmp_path):
    trace = fitting_trace(name, seed)
    path = write(name, trace, tmp_path)
    raw = path.read_bytes()
    options = read_options(name, trace)
    for size in sorted({*np.linspace(0, len(raw) - 1, 60).astype(int).tolist(), len(raw) - 1}):
        path.write_bytes(raw[:size])
        assert not attempt(name, path, options) or name in OPEN_END, size


@pytest.mark.parametrize("name", OPEN_END)
@pytest.mark.parametrize("seed", range(6))
def test_a_cut_between_records_shows_within_a_step(name, seed, tmp_path):
    """What is accepted is the beginning of the stream, in whole rows."""
    trace = fitting_trace(name, seed)
    (stream,) = trace.streams
    path = write(name, trace, tmp_path)
    raw = path.read_bytes()
    options = replace(read_options(name, trace), n_prompt=None)
    assert get(name).open_end
    for size in range(len(raw) - 1):
        if name != "mblt" and raw[size - 1 : size] != b"\n":
            continue
        path.write_bytes(raw[:size])
        if attempt(name, path, options):
            (back,) = get(name).read(path, options).streams
            # A layer's only cell may have lost a part, and so may colibri's first pass: with
            # nothing to compare it with, this cannot be known.
            if name == "colibri" and back.n_rows <= stream.n_prompt:
                continue
            layers = get(name).read(path, options).model.layer_index
            known = np.flatnonzero((back.experts[:, :, 0] != NOT_EXECUTED).sum(axis=0) > 1)
            seen = np.searchsorted(trace.model.layer_index, layers[known])
            rows = stream.experts[: back.n_rows, seen, : back.experts.shape[2]]
            np.testing.assert_array_equal(back.experts[:, known], rows)


@pytest.mark.parametrize("name", OPEN_END)
def test_a_step_without_its_last_layer_is_refused(name, tmp_path):
    trace = a_trace(3, n_streams=1, cells="passes", first_positions=False)
    assert trace.streams[0].n_generated > 1
    path = write(name, trace, tmp_path)
    options = read_options(name, trace)
    raw = path.read_bytes()
    if name == "mblt":
        path.write_bytes(raw[: -4 * (3 + int(trace.model.top_k[-1]))])
    else:
        lines = raw.splitlines(keepends=True)
        n = int(trace.model.top_k[-1]) if name == "route-trace" else 1
        path.write_bytes(b"".join(lines[:-n]))
    message = refusal(lambda: get(name).read(path, options))
    assert "cut off" in message and "is whole" in message
    assert ("offset " if name == "mblt" else "line ") in message
    # What the message says is whole can be read.
    place = int(message.split("before ")[1].split()[1])
    kept = raw[:place] if name == "mblt" else b"".join(lines[: place - 1])
    path.write_bytes(kept)
    (back,) = get(name).read(path, options).streams
    np.testing.assert_array_equal(back.experts, trace.streams[0].experts[:-1])


@pytest.mark.parametrize("name", OPEN_END)
def test_a_trace_whose_end_looks_cut_is_not_written(name, tmp_path):
    trace = a_trace(3, n_streams=1, cells="passes", first_positions=False)
    (stream,) = trace.streams
    ids, scores = stream.experts.copy(), stream.scores.copy()
    ids[-1, -1], scores[-1, -1] = NOT_EXECUTED, np.nan
    holed = replace(trace, streams=(replace(stream, experts=ids, scores=scores),))
    assert "cut off" in refusal(lambda: write(name, holed, tmp_path))
    assert not list(tmp_path.iterdir())


def test_route_trace_layers_without_a_row(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("".join(CSV.splitlines(keepends=True)[:9]))  # two steps, layer 0 alone
    message = refusal(lambda: get("route-trace").read(path, Options()))
    assert "line 9: cut off: layer 1 has expert_bytes in the preamble and no row" in message


def test_colibri_cut_within_a_call(tmp_path):
    path = tmp_path / "t.txt"
    rows = [f"{call} {row} {call} 1:0.5000" for call in range(2) for row in range(4)]
    for n, says in ((8, ""), (7, "3 rows"), (6, "2 rows"), (5, "")):
        path.write_text("".join(f"{line}\n" for line in rows[:n]))
        if says:
            message = refusal(lambda: get("colibri").read(path, Options(n_experts=4)))
            assert "line 5 (call 1): cut off" in message and says in message
        else:
            get("colibri").read(path, Options(n_experts=4))


@pytest.mark.parametrize("name", BOTH)
def test_byte_flips(name, tmp_path):
    trace = fitting_trace(name, 6)
    path = write(name, trace, tmp_path)
    raw = path.read_bytes()
    options = read_options(name, trace)
    rng = np.random.default_rng(1)
    for at in rng.integers(0, len(raw), 250).tolist():
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        path.write_bytes(damaged)
        attempt(name, path, options)


@pytest.mark.parametrize("name", ["npz", "streamlx"])
def test_damaged_sidecars(name, tmp_path):
    trace = fitting_trace(name, 6)
    path = write(name, trace, tmp_path)
    side = next(p for p in tmp_path.iterdir() if p != path)
    raw = side.read_bytes()
    rng = np.random.default_rng(2)
    for at in rng.integers(0, len(raw), 150).tolist():
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        side.write_bytes(damaged)
        attempt(name, path, Options(n_experts=20))
        side.write_bytes(raw[:at])
        assert not attempt(name, path, Options(n_experts=20))


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("model", "id", []),
        ("model", "revision", None),
        ("model", "n_experts", 5),
        ("model", "resident_bytes", 2**70),
        ("model", "quantization", "\ud800"),
        ("capture", "seed", True),
        ("capture", "os", "a\0b"),
        ("capture", "colour", "red"),
        ("streams", "finish_reason", None),
        ("streams", "n_prompt", 1.0),
    ],
)
def test_sidecar_values_of_the_wrong_type(part, field, value, tmp_path):
    path = write("npz", fitting_trace("npz", 6), tmp_path)
    side = path.with_suffix(".json")
    header = json.loads(side.read_text())
    target = header[part][0] if part == "streams" else header[part]
    target[field] = value
    side.write_text(json.dumps(header))
    assert str(path) in refusal(lambda: get("npz").read(path, Options()))


@pytest.mark.parametrize("name", BOTH)
def test_other_files(name, tmp_path):
    path = tmp_path / "x"
    options = Options(n_experts=4, top_k=2)
    assert "no such file" in refusal(lambda: get(name).read(path, options))
    for raw in (b"", b"\0" * 64, b"[]", b"{}", b"null\n", b"\xff\xfe\n", b"[" * 100_000 + b"\n"):
        path.write_bytes(raw)
        assert not attempt(name, path, options), raw[:10]
    (tmp_path / "folder").mkdir()
    assert not attempt(name, tmp_path / "folder", options)


CSV = """# route_trace v1
# model=m arch=a n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=10 dense_bytes=1
# layer=1 expert_bytes=20 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,5,0.5,0,10
0,0,0,0,1,2,0.25,0,10
0,0,1,0,0,1,0.5,1,0
0,0,1,0,1,7,0.25,0,10
0,0,1,1,0,3,0.5,0,20
0,0,1,1,1,4,0.5,0,20
0,1,2,0,0,1,0.5,1,0
0,1,2,0,1,2,0.25,1,0
0,1,2,1,0,6,0.5,0,20
0,1,2,1,1,0,0.5,0,20
"""


def test_route_trace_by_hand(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(CSV)
    trace = get("route-trace").read(path, Options())
    (stream,) = trace.streams
    assert (stream.n_prompt, stream.n_generated) == (2, 2)
    none = [65535, 65535]
    assert stream.experts.tolist() == [[[2, 5], none], [[1, 7], [3, 4]], [[1, 2], [0, 6]]]
    assert stream.scores[0, 0].tolist() == [0.25, 0.5]
    assert trace.model.expert_bytes.tolist() == [10, 20]
    dropped = CSV.replace("expert_bytes\n", "expert_bytes,dropped\n", 1)
    head, body = dropped.split("dropped\n")
    path.write_text(head + "dropped\n" + body.replace("\n", ",0\n"))
    again = get("route-trace").read(path, Options()).streams[0]
    np.testing.assert_array_equal(again.experts, stream.experts)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("# route_trace v1", "# route_trace v2", "line 1"),
        ("0,0,0,0,1,2,", "0,0,0,0,1,8,", "line 7: expert is not below"),
        ("0,0,0,0,1,2,", "0,0,0,0,1,5,", "expert 5 occurs twice"),
        ("0,0,0,0,1,2,", "0,0,0,0,0,2,", "line 7: this slot"),
        ("0,0,0,0,1,2,", "0,0,0,0,2,2,", "line 7: slot"),
        ("0,0,0,0,1,2,", "0,0,0,2,1,2,", "line 7: layer"),
        ("0,0,0,0,1,2,", "0,2,0,0,1,2,", "line 7: phase"),
        ("0,0,0,0,1,2,", "0,0,-1,0,1,2,", "line 7: "),
        ("0,0,0,0,1,2,", "0,0,0,0,1,2,0,", "line 7: 10 columns"),
        ("0,0,0,0,1,2,0.25,0,10\n", "", "1 experts, other rows of the layer have 2"),
        ("0.25", "inf", "line 7: weight"),
        ("0.25", "1e9", "float16"),
        ("n_expert=8", "n_expert=x", "line 2"),
        ("0,1,2,0,0,1,0.5", "0,1,9,0,0,1,0.5", "has no row for step"),
        ("0,0,0,0,0,5,0.5", "0,1,0,0,0,5,0.5", "decode before"),
    ],
)
def test_route_trace_names_the_line(old, new, says, tmp_path):
    path = tmp_path / "t.csv"
    assert old in CSV
    path.write_text(CSV.replace(old, new, 1))
    message = refusal(lambda: get("route-trace").read(path, Options()))
    assert str(path) in message and says in message


def words(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i4").tobytes()


MAGIC = 0x544C424D


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (words(1, 1, 8), "offset 0: no MBLT magic"),
        (words(MAGIC, 2, 8), "offset 4: version 2"),
        (words(MAGIC, 1, 0), "offset 8"),
        (words(MAGIC, 1, 8), "holds no record"),
        (words(MAGIC, 1, 8, 0, 2), "offset 12"),
        (words(MAGIC, 1, 8, 0, 2, 2, 1, 2, 3), "offset 12: a record of 2 tokens"),
        (words(MAGIC, 1, 8, 0, 2, 1, 1, 8), "offset 12: expert id 8 is out of range"),
        (words(MAGIC, 1, 8, 0, 2, 1, 3, 3), "offset 12: expert 3 occurs twice"),
        (words(MAGIC, 1, 8, 0, 2, 1, 1, 2, 1, 1, 1, 4, 0, 1, 1, 4, 1, 1, 1, 4), "offset 48: 1 exp"),
        (words(MAGIC, 1, 8, -1, 2, 1, 1, 2), "offset 12"),
        (words(MAGIC, 1, 8) + b"\1", "offset 13"),
    ],
)
def test_mblt_names_the_offset(raw, says, tmp_path):
    path = tmp_path / "t.bin"
    path.write_bytes(raw)
    message = refusal(lambda: get("mblt").read(path, Options()))
    assert str(path) in message and says in message


def test_mblt_finds_prompts_and_the_ragged_last_layer(tmp_path):
    path = tmp_path / "t.bin"
    first = [0, 2, 3, *(1, 2), *(3, 4), *(5, 6), 2, 2, 1, *(0, 1)]
    step = [0, 2, 1, *(7, 1), 2, 2, 1, *(3, 2)]
    second = [0, 2, 2, *(1, 2), *(3, 4), 2, 2, 2, *(0, 1), *(4, 5)]
    path.write_bytes(words(MAGIC, 1, 8, *first, *step, *step, *second, *step))
    trace = get("mblt").read(path, Options())
    assert trace.model.layer_index.tolist() == [0, 2]
    assert [(s.n_prompt, s.n_generated) for s in trace.streams] == [(3, 3), (2, 2)]
    none = [65535, 65535]
    assert trace.streams[0].experts[:, 1].tolist() == [none, none, [0, 1], [2, 3], [2, 3]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0 0 3 1:0.5000 2:0.5000\n1 1 3 1:0.5000 2:0.5000\n", "line 2: row 1 of call 1"),
        ("0 0 3 1:0.5000 2:0.5000\n2 0 4 1:0.5000 2:0.5000\n", "line 2: call 2 follows call 0"),
        ("0 0 3 1:0.5000 1:0.5000\n", "line 1 (call 0): expert 1 occurs twice"),
        ("0 0 3 1:0.5000 9:0.5000\n", "line 1 (call 0): expert id 9 is out of range"),
        ("0 0 3 1:nan\n", "line 1"),
        ("0 0 3\n", "line 1"),
        ("0 0 3 1:0.5000", "cut off"),
        ("0 0 3 1:0.5000 2:0.5000\n0 1 3 1:0.5000\n", "differ in length"),
    ],
)
def test_colibri_names_the_line(text, says, tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(text)
    message = refusal(lambda: get("colibri").read(path, Options(n_experts=8)))
    assert str(path) in message and says in message


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([(0, 0, [1, 2]), (2, 0, [1, 2])], "line 2: token 2 follows token 0"),
        ([(0, 0, [1, 1])], "line 1: expert 1 occurs twice"),
        ([(0, 0, [1, 9])], "line 1: expert id 9"),
        ([(0, 0, [1, -1])], "line 1: experts must be an integer"),
        ([(0, 0, [1, True])], "line 1: experts must be an integer"),
        ([(0, 0, [])], "line 1: experts must be a list"),
        ([(0, 0, [1, 2]), (1, 0, [1])], "line 2: 1 experts, other rows of the layer have 2"),
    ],
)
def test_mer_names_the_line(records, says, tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [json.dumps({"token": t, "layer": la, "experts": e}) for t, la, e in records]
    path.write_text("\n".join(lines) + "\n")
    message = refusal(lambda: get("mer").read(path, Options(n_experts=8)))
    assert str(path) in message and says in message


def test_lattice_weights_must_fit(tmp_path):
    path = tmp_path / "t.jsonl"
    line = {"layer_idx": 0, "token_idx": 0, "selected_ids": [1, 2], "gate_weights": [0.5]}
    path.write_text(json.dumps(line) + "\n")
    message = refusal(lambda: get("lattice").read(path, Options(n_experts=8)))
    assert "line 1: gate_weights must be a list of 2 numbers" in message


def test_rows_that_do_not_add_up(tmp_path):
    trace = fitting_trace("vllm", 4)
    path = write("vllm", trace, tmp_path)
    answer = json.loads(path.read_text())
    answer["choices"][0]["token_ids"].append(5)
    path.write_text(json.dumps(answer))
    assert "expected" in refusal(lambda: get("vllm").read(path, read_options("vllm", trace)))
    trace = fitting_trace("sglang", 4)
    path = write("sglang", trace, tmp_path)
    answer = json.loads(path.read_text())
    raw = base64.b64decode(answer["meta_info"]["routed_experts"])
    answer["meta_info"]["routed_experts"] = base64.b64encode(raw[:-4]).decode()
    path.write_text(json.dumps(answer))
    message = refusal(lambda: get("sglang").read(path, read_options("sglang", trace)))
    assert "are no" in message or "do not go with" in message


def test_what_the_file_does_not_say_is_asked_for(tmp_path):
    for name in ("vllm", "sglang", "colibri", "mer", "lattice"):
        trace = fitting_trace(name, 4)
        path = write(name, trace, tmp_path)
        said = {"top_k": trace.model.max_top_k} if name == "sglang" else {}
        assert "--n-experts" in refusal(
            lambda name=name, path=path, said=said: get(name).read(path, Options(**said))
        )
    path = write("sglang", fitting_trace("sglang", 4), tmp_path)
    assert "--top-k" in refusal(lambda: get("sglang").read(path, Options(n_experts=8)))


def test_counts_must_add_up():
    for layers, counts in (
        ([0, 1], np.ones((3, 4), dtype=np.int64)),
        ([1, 0], np.ones((2, 4), dtype=np.int64)),
        ([0, 1], -np.ones((2, 4), dtype=np.int64)),
        ([0, 1], np.ones((2, 4))),
        ([], np.ones((0, 4), dtype=np.int64)),
    ):
        refusal(lambda layers=layers, counts=counts: Counts(np.array(layers, int), counts))
