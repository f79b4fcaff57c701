"""Real routing that lies beside the checkout, for tests that compare with independent results.

The data are not part of the repository. Where they are missing, tests that want them are skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moetap.trace import CaptureInfo, ModelInfo, Stream, Trace

FOLDER = Path(__file__).resolve().parents[1].parent / "shared" / "real"


def path(name: str) -> Path:
    """A file of the data set; skips the test if it is not there."""
    found = FOLDER / name
    if not found.is_file():
        pytest.skip("data not present")
    return found


def load_json(name: str):
    """Contents of a JSON file of the data set."""
    return json.loads(path(name).read_text())


def gpt_oss_topk() -> tuple[np.ndarray, list[int]]:
    """(rows, 24, 4) ids as published, by descending weight, and the rows of each sequence."""
    facts = load_json("gpt-oss-20b.4x511.json")
    with np.load(path("gpt-oss-20b.4x511.npz")) as file:
        return file["topk"].astype(np.int64), [seq["n"] for seq in facts["seqs"]]


def gpt_oss(lengths: list[int] | None = None) -> Trace:
    """The four sequences as streams, or the rows cut into streams of other lengths.

    Row i is the pass over generated token i. Prompt tokens were not recorded, so the first row
    takes the place of the last prompt token.
    """
    topk, own = gpt_oss_topk()
    lengths = lengths or own
    n_layers, k = topk.shape[1:]
    n_experts = load_json("gpt-oss-20b.4x511.json")["num_experts"]
    rows = np.sort(topk, axis=2).astype(np.uint16)
    streams = []
    start = 0
    for i, n in enumerate(lengths):
        streams.append(
            Stream(
                prompt_id=f"s{i}",
                cls="",
                prompt_sha256="",
                n_prompt=1,
                n_generated=n,
                finish_reason="length",
                looped_from=-1,
                experts=rows[start : start + n],
                tokens=np.zeros(n, dtype=np.uint32),
                position=np.arange(n, dtype=np.uint32),
            )
        )
        start += n
    model = ModelInfo(
        id="openai/gpt-oss-20b",
        revision="",
        model_type="gpt_oss",
        config_json="{}",
        config_sha256="",
        weights_sha256="",
        quantization="",
        layer_index=np.arange(n_layers),
        n_experts=np.full(n_layers, n_experts),
        top_k=np.full(n_layers, k),
        expert_bytes=np.zeros(n_layers),
    )
    return Trace(model, CaptureInfo(moetap_version=""), tuple(streams), "", "", True)
