"""Names, types and shapes of format version 1, as tables.

Knows what a trace file holds; `docs/FORMAT.md` says the same in words, and a test keeps the two
equal. Refuses to know how it is read or written (`reader`, `writer`) and which file holds what
while a capture runs (`parts`).

History:
    1   first version
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moetap.trace import CaptureInfo, ModelInfo

FORMAT = "moe-routing-trace"
FORMAT_VERSION = 1

TEXT = "utf-8"
"""The dtype name of a string: fixed-length, null-padded UTF-8. Fixed, because HDF5 keeps
variable-length strings in a heap that no checksum covers, and a flipped bit there would be read as
data."""

CHUNK_ROWS = 1024
"""Rows of a chunk. Measured on uniform top-8 of 256 in 40 layers, bytes per row of /experts: 321.6
with chunks (1024, L, K), 283.7 with (1024, L, 1), where each slot's ids are compressed apart and
the narrow range of the k-th smallest id pays; 282.8 with 4096 rows, 289.9 with 128."""

GZIP_LEVEL = 4
"""286.4 bytes per row at level 1, 283.7 at 4, 6 and 9."""


class Attribute(NamedTuple):
    """A scalar attribute. Absent means "unknown" (None) where `optional`."""

    name: str
    dtype: str
    optional: bool = False


class Dataset(NamedTuple):
    """A dataset; `dims` are its dimensions in words, and the HDF5 dimension labels."""

    name: str
    dtype: str
    dims: tuple[str, ...]
    optional: bool = False


ATTRIBUTES: dict[str, tuple[Attribute, ...]] = {
    "/": (
        Attribute("format", TEXT),
        Attribute("format_version", "int64"),
        Attribute("creator", TEXT),
        Attribute("created", TEXT),
        Attribute("run_id", TEXT),
        Attribute("complete", "uint8"),
    ),
    "/model": (
        Attribute("id", TEXT),
        Attribute("revision", TEXT),
        Attribute("model_type", TEXT),
        Attribute("config_json", TEXT),
        Attribute("config_sha256", TEXT),
        Attribute("weights_sha256", TEXT),
        Attribute("quantization", TEXT),
        Attribute("resident_bytes", "int64", optional=True),
        Attribute("kv_bytes_per_token", "int64", optional=True),
        Attribute("state_bytes_per_stream", "int64", optional=True),
    ),
    "/capture": (
        Attribute("moetap_version", TEXT),
        Attribute("mlx_version", TEXT),
        Attribute("mlx_lm_version", TEXT),
        Attribute("backend", TEXT),
        Attribute("device_json", TEXT),
        Attribute("chip", TEXT),
        Attribute("ram_bytes", "int64", optional=True),
        Attribute("os", TEXT),
        Attribute("temp", "float64"),
        Attribute("top_p", "float64"),
        Attribute("seed", "int64"),
        Attribute("max_tokens", "int64"),
        Attribute("prefill_step", "int64"),
        Attribute("full_prefill", "uint8"),
        Attribute("mode", TEXT),
        Attribute("slots", "int64", optional=True),
        Attribute("policy", TEXT, optional=True),
        Attribute("cold_reads", "uint8", optional=True),
        Attribute("expert_kernel", TEXT, optional=True),
        Attribute("mix_name", TEXT),
        Attribute("mix_version", TEXT),
        Attribute("mix_sha256", TEXT),
        Attribute("n_prompts", "int64"),
        Attribute("left_out", TEXT),
        Attribute("chat_template_sha256", TEXT),
        Attribute("thinking", "uint8", optional=True),
        Attribute("untraced_tokens_per_s", "float64", optional=True),
        Attribute("swap_growth_bytes", "int64", optional=True),
        Attribute("scores_kind", TEXT),
    ),
    "/scores": (Attribute("kind", TEXT),),
}

MODEL_DATASETS = (
    Dataset("layer_index", "int64", ("moe_layer",)),
    Dataset("n_experts", "int64", ("moe_layer",)),
    Dataset("top_k", "int64", ("moe_layer",)),
    Dataset("expert_bytes", "int64", ("moe_layer",)),
)

STREAM_DATASETS = (
    Dataset("prompt_id", TEXT, ("stream",)),
    Dataset("class", TEXT, ("stream",)),
    Dataset("prompt_sha256", TEXT, ("stream",)),
    Dataset("first_row", "int64", ("stream",)),
    Dataset("n_rows", "int64", ("stream",)),
    Dataset("n_prompt", "int64", ("stream",)),
    Dataset("n_generated", "int64", ("stream",)),
    Dataset("first_position", "int64", ("stream",)),
    Dataset("finish_reason", TEXT, ("stream",)),
    Dataset("looped_from", "int64", ("stream",)),
)

ROW_DATASETS = (
    Dataset("experts", "uint16", ("row", "moe_layer", "slot")),
    Dataset("tokens", "uint32", ("row",)),
    Dataset("position", "uint32", ("row",)),
    Dataset("scores", "float16", ("row", "moe_layer", "slot"), optional=True),
)

# The group is there as a whole or not at all. Fields are named as in `trace.StreamIO`.
IO_DATASETS = (
    Dataset("misses", "uint16", ("decode_step", "moe_layer"), optional=True),
    Dataset("read_bytes", "int64", ("decode_step", "moe_layer"), optional=True),
    Dataset("read_s", "float32", ("decode_step", "moe_layer"), optional=True),
    Dataset("wait_s", "float32", ("decode_step", "moe_layer"), optional=True),
    Dataset("eval_s", "float32", ("decode_step", "moe_layer"), optional=True),
    Dataset("step_s", "float32", ("decode_step",), optional=True),
)

DATASETS: dict[str, tuple[Dataset, ...]] = {
    "/": ROW_DATASETS,
    "/model": MODEL_DATASETS,
    "/streams": STREAM_DATASETS,
    "/io": IO_DATASETS,
}

STREAM_FIELD = {"class": "cls"}
"""Column of /streams -> field of `trace.Stream`, where the two differ."""


@dataclass(frozen=True)
class Header:
    """What a file says about all of its streams."""

    model: ModelInfo
    capture: CaptureInfo
    run_id: str
    created: str  # ISO 8601, UTC


class Record(NamedTuple):
    """One line of the /streams table. Fields are named as in `trace.Stream`."""

    prompt_id: str
    cls: str
    prompt_sha256: str
    first_row: int
    n_rows: int
    n_prompt: int
    n_generated: int
    first_position: int
    finish_reason: str
    looped_from: int


class Rows(NamedTuple):
    """Consecutive rows as stored; shapes and dtypes as in ROW_DATASETS."""

    experts: NDArray[np.uint16]
    tokens: NDArray[np.uint32]
    position: NDArray[np.uint32]
    scores: NDArray[np.float16] | None
