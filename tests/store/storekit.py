"""Small models and streams for the tests of the store, and the equality of traces."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from moetap.store import TraceWriter
from moetap.trace import NOT_EXECUTED, CaptureInfo, ModelInfo, Stream, StreamIO, Trace

COLUMNS = tuple(f.name for f in fields(Stream))


def a_model(**changes: Any) -> ModelInfo:
    """Three MoE layers with ragged E and k."""
    values: dict[str, Any] = {
        "id": "tiny/ragged",
        "revision": "r1",
        "model_type": "tiny_moe",
        "config_json": '{"name": "äöü"}',
        "config_sha256": "c" * 64,
        "weights_sha256": "w" * 64,
        "quantization": "",
        "layer_index": np.array([1, 2, 5]),
        "n_experts": np.array([16, 300, 8]),
        "top_k": np.array([4, 6, 1]),
        "expert_bytes": np.array([1000, 2000, 3000]),
        "resident_bytes": 12345,
    }
    return ModelInfo(**(values | changes))


def a_capture(**changes: Any) -> CaptureInfo:
    return CaptureInfo(**({"moetap_version": "0.1.0", "n_prompts": 4, "seed": 7} | changes))


def an_io(number: int, n_steps: int, n_layers: int) -> StreamIO:
    """Measurements that depend on the number only."""
    rng = np.random.default_rng(number)
    cell = (n_steps, n_layers)
    return StreamIO(
        misses=rng.integers(0, 9, cell, dtype=np.uint16),
        read_bytes=rng.integers(0, 2**40, cell, dtype=np.int64),
        **{n: rng.random(cell, dtype=np.float32) for n in ("read_s", "wait_s", "eval_s")},
        step_s=rng.random(n_steps, dtype=np.float32),
    )


def a_stream(
    number: int, model: ModelInfo, rows: int = 9, scores: bool = False, io: bool = False
) -> Stream:
    """A stream that depends on its number only; some of its cells have not executed."""
    rng = np.random.default_rng(number)
    shape = (rows, model.n_layers, model.max_top_k)
    ids = np.full(shape, NOT_EXECUTED, np.uint16)
    for layer, (n, k) in enumerate(zip(model.n_experts, model.top_k, strict=True)):
        order = rng.random((rows, n)).argsort(axis=1)[:, :k]
        ids[:, layer, :k] = np.sort(order, axis=1)
    ids[rng.random(shape[:2]) < 0.1] = NOT_EXECUTED
    gates = np.where(ids == NOT_EXECUTED, np.nan, rng.random(shape)).astype(np.float16)
    n_prompt = rows // 2 + 1
    return Stream(
        prompt_id=f"prompt-{number}",
        cls="code",
        prompt_sha256=f"{number:064x}",
        n_prompt=n_prompt,
        n_generated=rows + 1 - n_prompt,
        finish_reason="length",
        looped_from=-1,
        experts=ids,
        tokens=rng.integers(0, 2**32, rows, dtype=np.uint32),
        position=np.arange(rows, dtype=np.uint32),
        scores=gates if scores else None,
        io=an_io(number, rows + 1 - n_prompt, model.n_layers) if io else None,
    )


def write(path: Path, streams: list[Stream], complete: bool = True, **capture: Any) -> None:
    """A closed trace of `a_model`."""
    info = a_capture(n_prompts=len(streams) if complete else 0, **capture)
    with TraceWriter(path, a_model(), info) as writer:
        for stream in streams:
            writer.append(stream)
        writer.close(complete=complete)


def plain(value: Any) -> Any:
    """Something that == compares to the bit; arrays with their dtype and shape."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.shape, value.tobytes())
    if hasattr(value, "__dataclass_fields__"):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    return value


def content(trace: Trace, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """All that a trace says, comparable; the place it came from is no part of it."""
    names = {f.name for f in fields(Trace)} - {"source", "streams", *without}
    return {n: plain(getattr(trace, n)) for n in names} | {
        "streams": [plain(s) for s in trace.streams]
    }
