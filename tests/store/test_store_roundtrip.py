"""What goes in comes out, and takes no more room than promised."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from storekit import a_capture, a_model, a_stream, content, plain, write

from moetap.errors import MoetapError
from moetap.store import TraceWriter, read, spec
from moetap.trace import NOT_EXECUTED, CaptureInfo, ModelInfo, Stream

text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
count = st.integers(0, 2**62)
maybe = st.none() | count
sure = {"allow_nan": False}


@st.composite
def models(draw: st.DrawFn) -> ModelInfo:
    n = draw(st.integers(1, 4))
    experts = draw(st.lists(st.integers(1, 40) | st.just(65535), min_size=n, max_size=n))
    return ModelInfo(
        **{name: draw(text) for name in ("id", "revision", "model_type", "config_json")},
        **{name: draw(text) for name in ("config_sha256", "weights_sha256", "quantization")},
        layer_index=np.cumsum(draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))),
        n_experts=np.array(experts),
        top_k=np.array([draw(st.integers(1, min(e, 9))) for e in experts]),
        expert_bytes=np.array(draw(st.lists(count, min_size=n, max_size=n))),
        resident_bytes=draw(maybe),
        kv_bytes_per_token=draw(maybe),
        state_bytes_per_stream=draw(maybe),
    )


@st.composite
def captures(draw: st.DrawFn) -> CaptureInfo:
    by_type: dict[str, Any] = {
        "utf-8": text,
        "int64": st.integers(-(2**63), 2**63 - 1),
        "float64": st.floats(**sure),
        "uint8": st.booleans(),
    }
    values = {
        item.name: draw(st.none() | by_type[item.dtype] if item.optional else by_type[item.dtype])
        for item in spec.ATTRIBUTES["/capture"]
    }
    values["mode"] = draw(st.sampled_from(("", "resident")))
    return CaptureInfo(**values)


@st.composite
def a_few_streams(draw: st.DrawFn, model: ModelInfo, scores: bool) -> list[Stream]:
    streams = []
    for name in draw(st.lists(text, unique=True, max_size=4)):
        stream = a_stream(draw(count), model, rows=draw(st.integers(1, 12)), scores=scores)
        first = draw(st.integers(0, stream.n_prompt))
        streams.append(
            replace(
                stream,
                prompt_id=name,
                cls=draw(text),
                finish_reason=draw(text),
                looped_from=draw(st.integers(-1, stream.n_generated - 1)),
                n_prompt=stream.n_prompt + first,
                first_position=first,
                position=stream.position + np.uint32(first),
            )
        )
    return streams


@settings(max_examples=25, deadline=None)
@given(st.data(), models(), captures(), st.booleans())
def test_round_trip(
    data: st.DataObject, model: ModelInfo, capture: CaptureInfo, complete: bool
) -> None:
    streams = data.draw(a_few_streams(model, bool(capture.scores_kind)))
    complete = complete and capture.n_prompts in (0, len(streams))
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace ä.h5"
        with TraceWriter(path, model, capture) as writer:
            for stream in streams:
                writer.append(stream)
            half_way = read(path)
            writer.close(complete)
        trace = read(path)
        assert [p.name for p in Path(folder).iterdir()] == [path.name]
    assert not half_way.complete
    assert trace.complete == complete
    assert trace.source == str(path)
    assert content(trace, ("complete",)) == content(half_way, ("complete",))
    assert plain(trace.model) == plain(model)
    assert trace.capture == capture
    assert [plain(s) for s in trace.streams] == [plain(s) for s in streams]


def test_a_long_config_is_kept(tmp_path: Path) -> None:
    """More than the 64 KiB that old HDF5 files allow an attribute."""
    model = a_model(config_json="é" * 100_000)
    with TraceWriter(tmp_path / "t.h5", model, a_capture()):
        pass
    assert read(tmp_path / "t.h5").model.config_json == model.config_json


def test_stream_arrays_are_views(tmp_path: Path) -> None:
    write(tmp_path / "t.h5", [a_stream(i, a_model()) for i in range(3)])
    first, *others = read(tmp_path / "t.h5").streams
    assert first.experts.base is not None
    assert all(s.experts.base is first.experts.base for s in others)


def uniform(streams: int, rows: int) -> tuple[ModelInfo, list[Stream]]:
    """40 layers, top-8 of 256, every set of ids as likely as any other: what compresses worst."""
    model = a_model(
        layer_index=np.arange(40),
        n_experts=np.full(40, 256),
        top_k=np.full(40, 8),
        expert_bytes=np.full(40, 1),
    )
    rng = np.random.default_rng(1)
    made = []
    for number in range(streams):
        random = rng.random((rows, 40, 256), dtype=np.float32)
        made.append(
            replace(
                a_stream(number, a_model(), rows),
                experts=np.sort(random.argpartition(8, axis=2)[:, :, :8], axis=2).astype(np.uint16),
                tokens=rng.integers(0, 151_936, rows, dtype=np.uint32),
            )
        )
    return model, made


def test_ten_thousand_rows_take_at_most_330_bytes_each(tmp_path: Path) -> None:
    model, streams = uniform(10, 1000)
    path = tmp_path / "t.h5"
    with TraceWriter(path, model, a_capture(n_prompts=10)) as writer:
        for stream in streams:
            writer.append(stream)
        writer.close(complete=True)
    assert sum(s.n_rows for s in read(path).streams) == 10_000
    assert path.stat().st_size / 10_000 <= 330


def test_closing_needs_memory_for_blocks_not_for_the_trace(tmp_path: Path) -> None:
    model, streams = uniform(1, 1000)
    writer = TraceWriter(tmp_path / "t.h5", model, a_capture(n_prompts=0))
    for number in range(30):
        writer.append(replace(streams[0], prompt_id=str(number)))
    tracemalloc.start()
    writer.close(complete=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One block has 640 kB, the trace 19 MB. HDF5's own buffers are bounded by its chunk cache.
    assert peak < 5_000_000


def test_h5py_alone_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    write(path, [a_stream(0, a_model(), scores=True)], scores_kind="softmax, renormalised")
    with h5py.File(path) as f:
        assert [d.label for d in f["experts"].dims] == ["row", "moe_layer", "slot"]
        assert f["experts"].fillvalue == NOT_EXECUTED
        assert f["streams/prompt_id"].asstr()[0] == "prompt-0"
        assert f["scores"].attrs["kind"].decode() == "softmax, renormalised"
        used: set[str] = set()

        def look(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                assert item.dtype.names is None and item.dtype.kind in "uifS", name
                used.update(item._filters)

        f.visititems(look)
        assert used == {"shuffle", "gzip", "fletcher32"}


@pytest.mark.parametrize("length", [1, 1023, 1024, 1025, 2500])
def test_lengths_around_a_chunk(tmp_path: Path, length: int) -> None:
    streams = [a_stream(0, a_model(), length), a_stream(1, a_model(), 3)]
    write(tmp_path / "t.h5", streams)
    assert [plain(s) for s in read(tmp_path / "t.h5").streams] == [plain(s) for s in streams]


def test_measured_io_goes_through_parts_merge_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"
    streams = [a_stream(i, a_model(), rows=700 * i + 9, io=True) for i in range(4)]
    capture = a_capture(mode="streaming", slots=8, policy="lru", cold_reads=True)
    with TraceWriter(path, a_model(), capture) as writer:
        for stream in streams[:2]:
            writer.append(stream)
        assert [plain(s) for s in read(path).streams] == [plain(s) for s in streams[:2]]
    with TraceWriter(path, a_model(), capture, resume=True) as writer:
        for stream in streams[2:]:
            writer.append(stream)
        writer.close(complete=True)
    trace = read(path)
    assert [plain(s) for s in trace.streams] == [plain(s) for s in streams]
    assert (trace.capture.policy, trace.capture.cold_reads) == ("lru", True)


@pytest.mark.parametrize(("mode", "io"), [("streaming", False), ("resident", True)])
def test_io_belongs_to_streaming_captures(tmp_path: Path, mode: str, io: bool) -> None:
    with (
        TraceWriter(tmp_path / "t.h5", a_model(), a_capture(mode=mode)) as writer,
        pytest.raises(MoetapError, match="measured I/O"),
    ):
        writer.append(a_stream(0, a_model(), io=io))
