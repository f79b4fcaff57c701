"""Files for other tools, read by those tools or by hand."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from formatkit import a_trace, golden_files, refusal

from moetap import policies
from moetap.formats import get
from moetap.formats.base import Options
from moetap.trace import NOT_EXECUTED


def long_trace():
    """Enough requests for caches to differ."""
    from dataclasses import replace

    rng = np.random.default_rng(5)
    trace = a_trace(9, n_streams=2, min_k=2, scores=False)
    model = trace.model
    streams = []
    for stream in trace.streams:
        rows = 120
        ids = np.full((rows, model.n_layers, model.max_top_k), NOT_EXECUTED, dtype=np.uint16)
        for layer in range(model.n_layers):
            weights = rng.random((rows, int(model.n_experts[layer]))) ** 3
            order = np.argsort(-weights * np.linspace(1, 2, weights.shape[1]), axis=1)
            ids[:, layer] = np.sort(order[:, : model.top_k[layer]], axis=1)
        ids[:10, -1] = NOT_EXECUTED
        streams.append(
            replace(
                stream,
                experts=ids,
                tokens=np.zeros(rows, dtype=np.uint32),
                position=np.arange(rows, dtype=np.uint32),
                n_prompt=12,
                n_generated=rows - 11,
                first_position=0,
            )
        )
    return replace(trace, streams=tuple(streams))


def lru_misses(objects: list[int], capacity: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for key in objects:
        if key in cache:
            cache.move_to_end(key)
            continue
        misses += 1
        if len(cache) >= capacity:
            cache.popitem(last=False)
        cache[key] = None
    return misses


def belady_misses(objects: list[int], capacity: int) -> int:
    """Forced admission; the object that is wanted last leaves."""
    following: dict[int, list[int]] = {}
    for i, key in enumerate(objects):
        following.setdefault(key, []).append(i)
    cache: dict[int, float] = {}
    misses = 0
    for key in objects:
        following[key].pop(0)
        upcoming = following[key][0] if following[key] else float("inf")
        if key not in cache:
            misses += 1
            if len(cache) >= capacity:
                del cache[max(cache, key=lambda k: cache[k])]
        cache[key] = upcoming
    return misses


def own_misses(name: str, objects: list[int], capacity: int) -> int:
    """moetap's own replay under the sequential rule."""
    look_ups = policies.LookUps(
        starts=np.arange(len(objects) + 1),
        ids=np.array(objects, dtype=np.uint16),
        size=np.ones(max(objects) + 1, dtype=np.int64),
    )
    return int(policies.get(name.lower()).missed(look_ups.sequential, capacity).sum())


def objects_of(trace, layers=None) -> list[int]:
    n_experts = int(trace.model.n_experts.max())
    return [
        order * n_experts + int(expert)
        for stream in trace.streams
        for row in stream.decode()
        for order in (range(trace.model.n_layers) if layers is None else layers)
        for expert in row[order]
        if expert != NOT_EXECUTED
    ]


@pytest.fixture
def replay():
    lcs = pytest.importorskip("libcachesim")

    def run(policy: str, path, capacity: int, trace_type: str, n: int) -> int:
        params = lcs.ReaderInitParam(ignore_obj_size=True)
        if trace_type == "CSV_TRACE":
            params = lcs.ReaderInitParam(
                ignore_obj_size=True, has_header=True, delimiter=",", obj_id_is_num=True
            )
            params.time_field, params.obj_id_field, params.obj_size_field = 1, 2, 3
            params.next_access_vtime_field = 4
        reader = lcs.TraceReader(str(path), getattr(lcs.TraceType, trace_type), params)
        assert reader.get_num_of_req() == n
        miss_ratio, _ = getattr(lcs, policy)(cache_size=capacity).process_trace(reader)
        return round(miss_ratio * n)

    return run


@pytest.mark.parametrize("capacity", [2, 5, 9, 17, 30])
def test_libcachesim_replays_the_same_misses(capacity, replay, tmp_path):
    trace = long_trace()
    path = tmp_path / "t.oracleGeneral.bin"
    lost = get("libcachesim").write(trace, path, Options())
    assert any("prefill" in part for part in lost)
    objects = objects_of(trace)
    assert path.stat().st_size == 24 * len(objects)
    for name, by_hand in (("LRU", lru_misses), ("Belady", belady_misses)):
        found = replay(name, path, capacity, "ORACLE_GENERAL_TRACE", len(objects))
        assert found == by_hand(objects, capacity) == own_misses(name, objects, capacity)


def test_libcachesim_csv(replay, tmp_path):
    trace = long_trace()
    path = tmp_path / "t.csv"
    get("libcachesim-csv").write(trace, path, Options())
    objects = objects_of(trace)
    assert replay("LRU", path, 9, "CSV_TRACE", len(objects)) == lru_misses(objects, 9)
    lines = path.read_text().splitlines()
    assert lines[0] == "time,obj_id,obj_size,next_access_vtime"
    assert [int(line.split(",")[1]) for line in lines[1:]] == objects


def test_libcachesim_per_layer(replay, tmp_path):
    trace = long_trace()
    get("libcachesim").write(trace, tmp_path / "out", Options(scope="layer"))
    files = sorted((tmp_path / "out").iterdir())
    assert len(files) == trace.model.n_layers
    for order, file in enumerate(files):
        assert f"{trace.model.layer_index[order]:03d}" in file.name
        objects = objects_of(trace, [order])
        found = replay("LRU", file, 4, "ORACLE_GENERAL_TRACE", len(objects))
        assert found == lru_misses(objects, 4)


def test_next_access_is_the_request_number_from_one(tmp_path):
    from moetap.formats.libcachesim import RECORD

    trace = long_trace()
    path = tmp_path / "t.bin"
    get("libcachesim").write(trace, path, Options(rows="all"))
    records = np.fromfile(path, dtype=RECORD)
    assert RECORD.itemsize == 24
    objects = records["object"].tolist()
    for i, following in enumerate(records["next_access"].tolist()[:500]):
        expected = next((j + 1 for j in range(i + 1, len(objects)) if objects[j] == objects[i]), -1)
        assert following == expected
    assert set(records["size"].tolist()) == set(trace.model.expert_bytes.tolist())


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.feather"])
def test_long_table(name, tmp_path):
    pytest.importorskip("pyarrow")
    trace = a_trace(11, n_streams=3, ragged=True)
    path = tmp_path / name
    get("parquet").write(trace, path, Options())
    if name == "t.parquet":
        duckdb = pytest.importorskip("duckdb")
        query = (
            "select prompt_id, position, layer, expert, score, decode_step, token, class "
            f"from '{path}' order by prompt_id, position, moe_order, expert"
        )
        rows = duckdb.sql(query).fetchall()
    else:
        from pyarrow import feather

        table = feather.read_table(path).to_pylist()
        columns = ("prompt_id", "position", "layer", "expert", "score", "decode_step", "token")
        rows = [tuple(line[c] for c in (*columns, "class")) for line in table]
    expected = [
        (
            s.prompt_id,
            int(s.position[r]),
            int(trace.model.layer_index[m]),
            int(s.experts[r, m, k]),
            float(s.scores[r, m, k]),
            r - s.decode_start if r >= s.decode_start else None,
            int(s.tokens[r]),
            "code",
        )
        for s in trace.streams
        for r, m, k in np.argwhere(s.experts != NOT_EXECUTED)
    ]
    assert rows == expected


def test_policylang(tmp_path):
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    trace = a_trace(7, n_streams=2, scores=False)
    get("moe-policylang").write(trace, tmp_path / "t.jsonl", Options())
    header, *lines = map(json.loads, (tmp_path / "t.jsonl").read_text().splitlines())
    assert header["num_entries"] == len(lines) and header["model_name"] == "maker/model-1"
    ran = sum((s.experts != NOT_EXECUTED).any(axis=2).sum() for s in trace.streams)
    assert len(lines) == ran
    first = trace.streams[0].experts[0]
    assert lines[0]["t"] == 0 and lines[0]["s"] is None
    assert lines[0]["e"] == first[(first != NOT_EXECUTED).any(axis=1).argmax()].tolist()
    get("moe-policylang").write(trace, tmp_path / "t.parquet", Options())
    assert parquet.read_table(tmp_path / "t.parquet").to_pylist() == lines


def counted(trace) -> np.ndarray:
    out = np.zeros((trace.model.n_layers, int(trace.model.n_experts.max())), dtype=np.int64)
    for stream in trace.streams:
        rows = stream.decode()
        for r, m, k in np.argwhere(rows != NOT_EXECUTED):
            out[m, rows[r, m, k]] += 1
    return out


def test_counts(tmp_path):
    trace = a_trace(13, n_streams=3)
    expected = counted(trace)
    get("eplb").write(trace, tmp_path / "w.npy", Options())
    np.testing.assert_array_equal(np.load(tmp_path / "w.npy", allow_pickle=False), expected)
    get("moe-infinity").write(trace, tmp_path / "m.npy", Options(hidden_layers=40))
    matrices = np.load(tmp_path / "m.npy", allow_pickle=False)
    assert matrices.shape[:2] == (3, 40) and matrices.dtype == np.float32
    np.testing.assert_array_equal(matrices.sum(axis=0)[trace.model.layer_index], expected)
    dense = np.setdiff1d(np.arange(40), trace.model.layer_index)
    assert not matrices[:, dense].any()


def test_imatrix_is_gguf(tmp_path):
    trace = a_trace(13, n_streams=3)
    path = tmp_path / "i.gguf"
    get("imatrix").write(trace, path, Options())
    values, tensors = read_gguf(path.read_bytes())
    assert values["general.type"] == "imatrix" and values["imatrix.chunk_count"] == 3
    expected = counted(trace)
    assert len(tensors) == 3 * trace.model.n_layers
    for order, layer in enumerate(trace.model.layer_index.tolist()):
        for part in ("up", "gate", "down"):
            dims, data = tensors[f"blk.{layer}.ffn_{part}_exps.weight.counts"]
            assert dims == (1, expected.shape[1])
            np.testing.assert_array_equal(data, expected[order])


def read_gguf(raw: bytes):
    """Metadata and F32 tensors, from the description of the format alone."""
    at = 0

    def take(fmt: str):
        nonlocal at
        found = struct.unpack_from("<" + fmt, raw, at)
        at += struct.calcsize("<" + fmt)
        return found if len(found) > 1 else found[0]

    def text() -> str:
        nonlocal at
        n = take("Q")
        at += n
        return raw[at - n : at].decode()

    assert raw[:4] == b"GGUF"
    at = 4
    version, n_tensors, n_values = take("IQQ")
    assert version == 3
    values = {}
    for _ in range(n_values):
        key, kind = text(), take("I")
        if kind == 9:
            inner, n = take("IQ")
            assert inner == 8
            values[key] = [text() for _ in range(n)]
        else:
            values[key] = text() if kind == 8 else take({4: "I"}[kind])
    infos = []
    for _ in range(n_tensors):
        name, n_dims = text(), take("I")
        assert n_dims == 2
        infos.append((name, take("QQ"), take("IQ")))
    start = -(-at // 32) * 32
    tensors = {}
    for name, dims, (kind, offset) in infos:
        assert kind == 0 and offset % 32 == 0
        tensors[name] = dims, np.frombuffer(raw, "<f4", dims[0] * dims[1], start + offset)
    return values, tensors


def test_per_agent(tmp_path):
    trace = a_trace(21, n_streams=4)
    lost = get("per-agent").write(trace, tmp_path / "p.json", Options(lanes=3))
    steps = json.loads((tmp_path / "p.json").read_text())
    lanes = [s.decode() for s in trace.streams[:3]]
    shortest = min(map(len, lanes))
    assert len(steps) == shortest * trace.model.n_layers
    for i, step in enumerate(steps):
        d, order = divmod(i, trace.model.n_layers)
        assert step["layer"] == trace.model.layer_index[order]
        for lane, ids in zip(lanes, step["per_agent"], strict=True):
            assert ids == [e for e in lane[d, order].tolist() if e != NOT_EXECUTED]
    assert any("1 streams" in part for part in lost)
    assert "--lanes 9" in refusal(
        lambda: get("per-agent").write(trace, tmp_path / "p.json", Options(lanes=9))
    )


def test_text_is_what_it_always_was(tmp_path):
    """Bytes of the writers that looped over lines, before tables of strings took over."""
    golden = Path(__file__).parents[1] / "data/formats/golden"
    written = {str(p.relative_to(tmp_path)): p.read_bytes() for p in golden_files(tmp_path)}
    kept = sorted(str(p.relative_to(golden)) for p in golden.rglob("*") if p.is_file())
    assert len(kept) == 18
    for name in kept:
        assert written[name] == (golden / name).read_bytes(), name
    # Without gates these are the same.
    for name in ("mer", "mblt", "libcachesim-csv", "per-agent"):
        for file, data in written.items():
            if file.startswith(f"{name}-bare"):
                assert data == written[file.replace("-bare", "-gates")]


def test_chunks_join_without_a_seam(tmp_path, monkeypatch):
    """The same bytes whatever the size of a chunk."""
    from moetap.formats import _text

    (tmp_path / "a").mkdir()
    whole = [p.read_bytes() for p in golden_files(tmp_path / "a")]
    for cells in (1, 9, 50):
        monkeypatch.setattr(_text, "_CELLS", cells)
        (tmp_path / str(cells)).mkdir()
        assert [p.read_bytes() for p in golden_files(tmp_path / str(cells))] == whole


def test_digits_of_numbers():
    from moetap.formats._text import integers

    for values in ([-1, 0, 9, 9_999, 10_000, 10_001, 99_999_999], [5, 100_000_000, 2**62, -1]):
        front, back = integers(np.array(values))
        backs = [back] * len(values) if isinstance(back, str) else back.tolist()
        assert [a + b for a, b in zip(front, backs, strict=True)] == list(map(str, values))
