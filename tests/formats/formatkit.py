"""Random traces for the tests of the formats, and files of each format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moetap.formats import get
from moetap.formats.base import Options
from moetap.trace import NOT_EXECUTED, CaptureInfo, ModelInfo, Stream, Trace


def a_trace(
    seed: int,
    *,
    n_streams: int = 2,
    n_layers: int = 3,
    ragged: bool = False,
    min_k: int = 1,
    missing: float = 0.2,
    scores: bool = True,
    first_positions: bool = True,
    cells: str = "any",
) -> Trace:
    """Dense layers lie between the MoE layers; every row and every layer runs at least once.

    ragged: top-k differs between layers. cells: "any" cell may not have run; "passes": only those
    that an engine skips, a layer for the first tokens of a prompt; "last": for all but the prompt's
    last token.
    """
    rng = np.random.default_rng(seed)
    layers = np.cumsum(rng.integers(1, 4, n_layers)) - int(rng.integers(0, 2))
    n_experts = int(rng.integers(5, 20))
    top_k = (
        rng.integers(min_k, 5, n_layers) if ragged else np.full(n_layers, rng.integers(min_k, 5))
    )
    model = ModelInfo(
        id="maker/model-1",
        revision="r",
        model_type="tiny_moe",
        config_json="{}",
        config_sha256="c",
        weights_sha256="w",
        quantization="",
        layer_index=layers,
        n_experts=np.full(n_layers, n_experts),
        top_k=top_k,
        expert_bytes=rng.integers(1, 5000, n_layers),
        resident_bytes=77,
    )
    streams = []
    for i in range(n_streams):
        n_prompt, n_generated = (int(n) for n in rng.integers(1, 6, 2))
        first = int(rng.integers(0, n_prompt)) if first_positions else 0
        rows = n_prompt - first + n_generated - 1
        ids = np.full((rows, n_layers, int(top_k.max())), NOT_EXECUTED, dtype=np.uint16)
        for layer, k in enumerate(top_k.tolist()):
            order = rng.random((rows, n_experts)).argsort(axis=1)[:, :k]
            ids[:, layer, :k] = np.sort(order, axis=1)
        if cells == "any":
            holes = rng.random((rows, n_layers)) < missing
            holes[np.arange(rows), rng.integers(0, n_layers, rows)] = False
            holes[-1] = False
            ids[holes] = NOT_EXECUTED
        else:
            for layer in range(1, n_layers):
                skipped = int(rng.integers(0, n_prompt - first))
                if cells == "last" and skipped:
                    skipped = n_prompt - first - 1
                ids[:skipped, layer] = NOT_EXECUTED
        gates = rng.integers(1, 17, ids.shape) / 16  # exact in four decimals and in float16
        streams.append(
            Stream(
                prompt_id=f"prompt {i}",
                cls="code",
                prompt_sha256=f"{i:064x}",
                n_prompt=n_prompt,
                n_generated=n_generated,
                finish_reason="length",
                looped_from=-1,
                experts=ids,
                tokens=rng.integers(0, 2**32, rows, dtype=np.uint32),
                position=np.arange(first, first + rows, dtype=np.uint32),
                scores=np.where(ids == NOT_EXECUTED, np.nan, gates).astype(np.float16)
                if scores
                else None,
                first_position=first,
            )
        )
    capture = CaptureInfo(
        moetap_version="0.1.0",
        n_prompts=n_streams,
        seed=7,
        scores_kind="softmax" if scores else "",
    )
    return Trace(model, capture, tuple(streams), "run", "2026-01-01T00:00:00+00:00", True)


seeds = st.integers(0, 2**32)

BOTH = ("npz", "route-trace", "vllm", "sglang", "mblt", "streamlx", "colibri", "mer", "lattice")
SUFFIX = {"npz": ".npz", "streamlx": ".npz", "route-trace": ".csv", "mblt": ".bin"} | dict.fromkeys(
    ("vllm", "sglang"), ".json"
)


def fitting_trace(name: str, seed: int, n_streams: int = 1) -> Trace:
    """A random trace that the format can hold."""
    shapes: dict[str, dict[str, Any]] = {
        "sglang": {"min_k": 2},
        "mblt": {"cells": "passes", "first_positions": False},
        "colibri": {"cells": "last", "first_positions": False},
    }
    ragged = name != "sglang" and seed % 2 == 1
    return a_trace(seed, n_streams=n_streams, ragged=ragged, **shapes.get(name, {}))


def read_options(name: str, trace: Trace) -> Options:
    """What has to be said so that the file of one stream becomes the trace again."""
    model = trace.model
    said: dict[str, Any] = {
        "n_experts": int(model.n_experts[0]),
        "top_k": model.max_top_k,
        "layers": tuple(model.layer_index.tolist()),
        "n_prompt": trace.streams[0].n_prompt,
        "model_id": model.id,
    }
    if name in ("npz", "colibri", "mblt"):
        said.pop("n_prompt")  # in the file, or found
    allowed = get(name).read_options
    return Options(**{key: value for key, value in said.items() if key in allowed})


def write(name: str, trace: Trace, folder: Path, **options: Any) -> Path:
    path = folder / f"file{SUFFIX.get(name, '.jsonl')}"
    get(name).write(trace, path, Options(**options))
    return path


def refusal(action: Callable[[], Any]) -> str:
    """The one line with which the action is refused."""
    from moetap.errors import MoetapError

    try:
        action()
    except MoetapError as error:
        assert "\n" not in str(error)
        return str(error)
    raise AssertionError("was not refused")


def golden_trace(cells: str) -> Trace:
    """A small trace made by arithmetic alone, so that the golden files never depend on a generator.

    Two streams, ragged top-k, gates of all magnitudes, some of them NaN, loops and prefill. cells:
    as in `a_trace`.
    """
    layers, top_k, n_experts = np.array([0, 2, 3, 11]), np.array([3, 1, 4, 2]), 60_000
    model = ModelInfo(
        id="maker/model one",
        revision="",
        model_type="tiny moe",
        config_json="",
        config_sha256="",
        weights_sha256="",
        quantization="",
        layer_index=layers,
        n_experts=np.full(4, n_experts),
        top_k=top_k,
        expert_bytes=np.array([7, 0, 123456, 9]),
    )
    streams = []
    for i, (n_prompt, n_generated) in enumerate(((4, 9), (1, 6))):
        rows = n_prompt + n_generated - 1
        r, m, k = np.ogrid[:rows, :4, :4]
        step = np.maximum(1, (r * r * 37 + m * 101) % (n_experts // 4 - 1))
        ids = ((r * 7919 + m * 31) % 97 + k * step).astype(np.uint16)
        ids[:, k[0] >= top_k[:, None]] = NOT_EXECUTED
        holes = (r + 2 * m) % 5 == 0 if cells == "any" else (r < m - 1) & (r < n_prompt - 1)
        holes[rows - 1 :] = False
        ids[holes[:, :, 0]] = NOT_EXECUTED
        gates = ((r * 13 + m * 5 + k * 3) % 17 / 7.0 - 0.4) * 10.0 ** ((r + k) % 8 - 4)
        gates = np.where((r * m + k) % 11 == 5, np.nan, gates)
        gates = np.where(ids == NOT_EXECUTED, np.nan, gates).astype(np.float16)
        streams.append(
            Stream(
                prompt_id=f"prompt {i}",
                cls="code",
                prompt_sha256="",
                n_prompt=n_prompt,
                n_generated=n_generated,
                finish_reason="length",
                looped_from=5 if i else -1,
                experts=ids,
                tokens=np.arange(rows, dtype=np.uint32),
                position=np.arange(rows, dtype=np.uint32),
                scores=gates,
            )
        )
    capture = CaptureInfo(moetap_version="", n_prompts=2, scores_kind="softmax")
    return Trace(model, capture, tuple(streams), "run", "2026-01-01T00:00:00+00:00", True)


# Format -> which cells of its golden trace did not run.
GOLDEN = dict.fromkeys(
    ("route-trace", "mer", "lattice", "moe-policylang", "libcachesim-csv", "per-agent"), "any"
) | {"colibri": "passes", "mblt": "passes"}


def golden_files(folder: Path) -> list[Path]:
    """Write each format with and without gates; returns the files."""
    for name, cells in GOLDEN.items():
        trace = golden_trace(cells)
        bare = replace(
            trace,
            capture=replace(trace.capture, scores_kind=""),
            streams=tuple(replace(s, scores=None) for s in trace.streams),
        )
        for kind, this in (("gates", trace), ("bare", bare)):
            get(name).write(this, folder / f"{name}-{kind}", Options())
    return sorted(p for p in folder.rglob("*") if p.is_file())
