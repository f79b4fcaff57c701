"""Trace, the one value type between the parts of moetap.

Knows what a routing trace consists of and which combinations are impossible; every object is
checked when it is built. Knows nothing about files (`moetap.store`), models (`moetap.capture`) or
statistics (`moetap.analysis`).

Shapes use R rows, L MoE layers and K = the largest top-k over the layers. A row is the routing of
one fed token. A stream of P prompt tokens and G generated ones has P + G - 1 rows: the last
generated token is never fed. The last prompt token's row is decode step 0, since the pass over it
produces the first generated token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError

NOT_EXECUTED = 65535
"""Id of a slot that holds no expert: the layer did not run for this token, or its top-k is below K.
Never a real id.
"""

RESIDENT, STREAMING = "resident", "streaming"
MODES = ("", RESIDENT, STREAMING)
"""How a capture held the experts; "" if that was not recorded."""


@dataclass(frozen=True, eq=False)
class ModelInfo:
    """The model that was traced, as read from what ran.

    Arrays have one entry per MoE layer, shape (L,), int64. Byte counts are the stored (quantised)
    bytes. A count that is not known is None.
    """

    id: str
    revision: str
    model_type: str
    config_json: str
    config_sha256: str
    weights_sha256: (
        str  # of the weight index, or of the safetensors headers where there is no index
    )
    quantization: str  # JSON, "" when the weights are plain
    layer_index: NDArray[np.int64]  # absolute decoder layer
    n_experts: NDArray[np.int64]
    top_k: NDArray[np.int64]
    expert_bytes: NDArray[np.int64]  # one routed expert of the layer
    resident_bytes: int | None = None  # everything that is not a routed expert
    kv_bytes_per_token: int | None = None
    state_bytes_per_stream: int | None = None

    def __post_init__(self) -> None:
        n = len(self.layer_index)
        if n == 0:
            raise MoetapError(f"{self.id}: a trace needs at least one MoE layer")
        for name in ("layer_index", "n_experts", "top_k", "expert_bytes"):
            value = np.asarray(getattr(self, name), dtype=np.int64)
            if value.shape != (n,):
                raise MoetapError(f"{self.id}: {name} has shape {value.shape}, expected ({n},)")
            object.__setattr__(self, name, value)
        if np.any(np.diff(self.layer_index) <= 0):
            raise MoetapError(f"{self.id}: layer_index must rise, got {self.layer_index.tolist()}")
        if np.any(self.top_k < 1) or np.any(self.top_k > self.n_experts):
            raise MoetapError(f"{self.id}: top_k must lie between 1 and n_experts in every layer")
        if np.any(self.n_experts > NOT_EXECUTED):
            raise MoetapError(
                f"{self.id}: more than {NOT_EXECUTED} experts in a layer do not fit uint16 ids"
            )

    @property
    def n_layers(self) -> int:
        """L, the number of MoE layers."""
        return len(self.layer_index)

    @property
    def max_top_k(self) -> int:
        """K, the width of a row."""
        return int(self.top_k.max())


@dataclass(frozen=True)
class CaptureInfo:
    """How the trace was made: software, machine, sampler, prompts. Empty strings and None mean "not
    recorded"; of an imported trace 0 does so too.
    """

    moetap_version: str
    mlx_version: str = ""
    mlx_lm_version: str = ""
    backend: str = ""  # metal | cuda | cpu
    device_json: str = ""  # mx.device_info()
    chip: str = ""
    ram_bytes: int | None = None
    os: str = ""
    temp: float = 0.0  # 0 = greedy
    top_p: float = 0.0  # 0 = off, as in mlx-lm
    seed: int = 0
    max_tokens: int = 0
    prefill_step: int = 0
    full_prefill: bool = False
    mode: str = RESIDENT  # of MODES
    slots: int | None = None  # C, streaming only
    policy: str | None = None  # which experts leave their slots, streaming only
    cold_reads: bool | None = None  # experts read past the page cache, streaming only
    expert_kernel: str | None = None  # "row": one product a row, whatever the chunk
    mix_name: str = ""
    mix_version: str = ""
    mix_sha256: str = ""
    n_prompts: int = 0  # streams that a complete run has
    left_out: str = ""  # ids of prompts that the chat template refused, separated by commas
    chat_template_sha256: str = ""
    thinking: bool | None = None  # None: the chat template has no such switch
    untraced_tokens_per_s: float | None = None  # decode rate of one resident stream, not tapped
    swap_growth_bytes: int | None = None  # the most that swap grew in a session, 0 if it did not
    scores_kind: str = ""  # "" when no scores were kept, else what they are

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise MoetapError(f"mode is {self.mode!r:.80}, expected {RESIDENT} or {STREAMING}")

    @property
    def imported(self) -> bool:
        """No recorder made the trace: it comes from another tool's file."""
        return not self.moetap_version


@dataclass(frozen=True, eq=False)
class StreamIO:
    """What the decode steps of a streaming capture read, one row per step d = 0 .. G-1.

    misses: (G, L) uint16, experts that were in no slot. read_bytes: (G, L) int64. (G, L) float32:
    read_s, from the start of a layer's reads to the end of the last one; wait_s, for how long
    the model waited for them; eval_s, the wait for the router's choice, that is for everything
    computed since the layer before. step_s: (G,) float32, from the step's first MoE layer to that
    of the next step. Slots are empty when step 0 begins.
    """

    misses: NDArray[np.uint16]
    read_bytes: NDArray[np.int64]
    read_s: NDArray[np.float32]
    wait_s: NDArray[np.float32]
    eval_s: NDArray[np.float32]
    step_s: NDArray[np.float32]

    @property
    def n_steps(self) -> int:
        """G."""
        return len(self.step_s)


@dataclass(frozen=True, eq=False)
class Stream:
    """One prompt and the tokens generated from it.

    experts: (rows, L, K) uint16, ids ascending in each cell, NOT_EXECUTED after them.
    tokens, position: (rows,) uint32, the token fed at the row and its absolute position.
    scores: (rows, L, K) float16 or None, the gate weights in the order of the ids, NaN where there
    is no id. looped_from: decode step from which the stream only repeats itself, -1 if it does not.
    """

    prompt_id: str
    cls: str
    prompt_sha256: str
    n_prompt: int
    n_generated: int
    finish_reason: str
    looped_from: int
    experts: NDArray[np.uint16]
    tokens: NDArray[np.uint32]
    position: NDArray[np.uint32]
    scores: NDArray[np.float16] | None = None
    first_position: int = 0
    io: StreamIO | None = None  # streaming captures only

    def __post_init__(self) -> None:
        rows = self.n_prompt - self.first_position + self.n_generated - 1
        who = f"stream {self.prompt_id!r}"
        if self.n_generated < 1 or not 0 <= self.first_position < self.n_prompt:
            raise MoetapError(
                f"{who}: needs a fed prompt token and a generated one, "
                f"has n_prompt={self.n_prompt}, "
                f"first_position={self.first_position}, n_generated={self.n_generated}"
            )
        if self.experts.ndim != 3 or self.experts.dtype != np.uint16:
            raise MoetapError(f"{who}: experts must be (rows, L, K) uint16")
        for name in ("experts", "tokens", "position"):
            got = len(getattr(self, name))
            if got != rows:
                raise MoetapError(f"{who}: {got} rows in {name}, expected P + G - 1 = {rows}")
        if self.scores is not None and self.scores.shape != self.experts.shape:
            raise MoetapError(
                f"{who}: scores have shape {self.scores.shape}, experts {self.experts.shape}"
            )
        if not np.array_equal(
            self.position, np.arange(self.first_position, self.first_position + rows)
        ):
            raise MoetapError(f"{who}: positions must run from {self.first_position} without a gap")
        if not -1 <= self.looped_from < self.n_generated:
            raise MoetapError(f"{who}: looped_from={self.looped_from} is not a decode step")
        for name, value in vars(self.io).items() if self.io is not None else ():
            expected = (self.n_generated, self.experts.shape[1])[: 1 if name == "step_s" else 2]
            if value.shape != expected:
                raise MoetapError(f"{who}: {name} has shape {value.shape}, expected {expected}")

    @property
    def n_rows(self) -> int:
        """P + G - 1, less the rows before first_position."""
        return len(self.experts)

    @property
    def decode_start(self) -> int:
        """Row of decode step 0 (the last prompt token)."""
        return self.n_prompt - 1 - self.first_position

    def decode(self, keep_loops: bool = False) -> NDArray[np.uint16]:
        """Rows of the decode steps, (steps, L, K), without the looped tail unless `keep_loops`."""
        end = self.n_generated if keep_loops or self.looped_from < 0 else self.looped_from
        return self.experts[self.decode_start : self.decode_start + end]

    def prefill(self) -> NDArray[np.uint16]:
        """Rows before decode step 0, (rows, L, K)."""
        return self.experts[: self.decode_start]


@dataclass(frozen=True, eq=False)
class Trace:
    """Streams of one model under one set of capture settings.

    `complete` is False when the capture did not reach its end; every table made from such a trace
    says so.
    """

    model: ModelInfo
    capture: CaptureInfo
    streams: tuple[Stream, ...]
    run_id: str
    created: str  # ISO 8601, UTC
    complete: bool
    source: str = ""  # where it came from, for messages

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for stream in self.streams:
            check_stream(stream, self.model)
            if stream.prompt_id in seen:
                raise MoetapError(
                    f"{self.source or 'trace'}: prompt {stream.prompt_id!r} occurs twice"
                )
            seen.add(stream.prompt_id)


def check_stream(stream: Stream, model: ModelInfo) -> None:
    """Raise MoetapError unless the stream's ids are possible for this model.

    Each cell must hold exactly the layer's top-k ids or none at all, ascending without repeats and
    below n_experts.
    """
    who = f"stream {stream.prompt_id!r}"
    ids = stream.experts
    expected = (stream.n_rows, model.n_layers, model.max_top_k)
    if ids.shape != expected:
        raise MoetapError(
            f"{who}: experts have shape {ids.shape}, expected (rows, L, K) = {expected}"
        )
    valid = ids != NOT_EXECUTED
    if np.any(valid & (ids >= model.n_experts[None, :, None])):
        row, layer, _ = np.argwhere(valid & (ids >= model.n_experts[None, :, None]))[0]
        raise MoetapError(
            f"{who}: row {row}, MoE layer {layer}: expert id "
            f"{int(ids[row, layer].max(where=valid[row, layer], initial=0))} "
            f"is out of range, the layer has {int(model.n_experts[layer])}"
        )
    count = valid.sum(axis=2)
    wrong = (count != 0) & (count != model.top_k[None, :])
    if np.any(wrong):
        row, layer = np.argwhere(wrong)[0]
        raise MoetapError(
            f"{who}: row {row}, MoE layer {layer} has {int(count[row, layer])} ids, "
            f"expected {int(model.top_k[layer])} or none"
        )
    # 65535 is the largest uint16, so missing slots sort last and only they may repeat.
    steps = np.diff(ids.astype(np.int32), axis=2)
    if np.any((steps <= 0) & valid[:, :, 1:]):
        row, layer, _ = np.argwhere((steps <= 0) & valid[:, :, 1:])[0]
        raise MoetapError(f"{who}: row {row}, MoE layer {layer}: ids must rise without repeats")
