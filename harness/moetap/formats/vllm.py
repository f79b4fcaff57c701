"""vLLM's `routed_experts`: a JSON response with the routing of prompt and generated tokens.

Knows base64 of a .npy (prompt and generated rows in the choice, the last generated token has none),
and the older nested lists with the prompt's rows beside the choices. -1 is a position that a prefix
cache held. Refuses to know the server.
"""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError
from moetap.formats.base import (
    MISSING,
    Base,
    Options,
    Rows,
    drop_dense,
    input_files,
    int_array,
    load_json,
    lost,
    make_trace,
    mapping,
    need_n_experts,
    one_file_per_stream,
    refusing,
    routing,
    save,
    token_array,
    whole,
)
from moetap.trace import ModelInfo, Stream, Trace


class Vllm(Base):
    name = "vllm"
    summary = "vLLM response with routed_experts (base64 .npy, lists)"
    write_options = ("stream", "hidden_layers")
    read_options = ("n_experts", "model_id", "layers", "start_len")
    not_kept = ("text and log probabilities",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for stream, file in one_file_per_stream(trace, path, options, ".json"):
            answer = _answer(stream, trace.model, options)
            save(file, json.dumps(answer, indent=1).encode())
        kept = ("model id", "layers", "prompt ids", "tokens", "n_prompt", "first_position")
        return [
            *lost(trace, *kept, "finish reasons", "ragged n_experts"),
            "the last generated token, which a trace does not hold (written as -1)",
        ]

    def read(self, path: Path, options: Options) -> Trace:
        found = []
        model_id = ""
        for file in input_files(path, ".json"):
            with refusing(file):
                answer = mapping(load_json(file), "the response")
                model_id = model_id or str(answer.get("model") or "")
                found.extend(_choices(file, answer, options.start_len or 0))
        with refusing(path):
            if not found:
                raise MoetapError("has no choice with routed_experts")
            shapes = {rows.ids.shape[1:] for rows in found}
            if len(shapes) > 1:
                raise MoetapError(f"responses of different models, with layers and k {shapes}")
            cleaned, layers = drop_dense(path, [rows.ids for rows in found], options)
            streams = [
                _without_cached(rows, ids, layers) for rows, ids in zip(found, cleaned, strict=True)
            ]
            return make_trace(
                path,
                streams,
                layers,
                need_n_experts(options),
                model_id=options.model_id or model_id,
                fallback_k=found[0].ids.shape[2],
            )


def all_layers(stream: Stream, model: ModelInfo, options: Options, fill: int) -> NDArray[np.int64]:
    """(rows, hidden layers, K) as engines have it: dense layers zero, `fill` for no expert."""
    needed = int(model.layer_index[-1]) + 1
    n_layers = options.hidden_layers or needed
    if n_layers < needed:
        raise MoetapError(f"--hidden-layers {n_layers} does not reach layer {needed - 1}")
    out = np.zeros((stream.n_rows, n_layers, model.max_top_k), dtype=np.int64)
    ids = routing(stream)
    out[:, model.layer_index] = np.where(ids == MISSING, fill, ids)
    return out


def _answer(stream: Stream, model: ModelInfo, options: Options) -> dict[str, Any]:
    rows = all_layers(stream, model, options, MISSING)
    first = stream.first_position
    rows = np.concatenate([np.full((first, *rows.shape[1:]), MISSING), rows])
    # A position that a cache held has no known token, nor has the last generated one.
    tokens = [*[-1] * first, *stream.tokens.tolist(), -1]
    buffer = io.BytesIO()
    np.save(buffer, rows.astype(np.int32), allow_pickle=False)
    return {
        "id": stream.prompt_id,
        "model": model.id,
        "choices": [
            {
                "index": 0,
                "finish_reason": stream.finish_reason or None,
                "token_ids": tokens[stream.n_prompt :],
                "routed_experts": base64.b64encode(buffer.getvalue()).decode(),
            }
        ],
        "usage": {
            "prompt_tokens": stream.n_prompt,
            "completion_tokens": stream.n_generated,
            "total_tokens": stream.n_prompt + stream.n_generated,
        },
        "prompt_token_ids": tokens[: stream.n_prompt],
    }


def _choices(file: Path, answer: dict[str, Any], start: int) -> list[Rows]:
    choices = answer.get("choices")
    if not isinstance(choices, list):
        raise MoetapError("has no list of choices")
    usage = mapping(answer.get("usage") or {}, "usage")
    prompt_tokens = answer.get("prompt_token_ids")
    shared = answer.get("prompt_routed_experts")
    before = None if shared is None else _decode(shared, "prompt_routed_experts")
    found = []
    for i, choice in enumerate(choices):
        what = f"choices[{i}]"
        choice = mapping(choice, what)
        if choice.get("routed_experts") is None:
            raise MoetapError(f"{what} has no routed_experts; start vLLM with the option for it")
        ids = _decode(choice["routed_experts"], f"{what}.routed_experts")
        own_prompt = choice.get("prompt_token_ids") or prompt_tokens
        if own_prompt is not None:
            n_prompt = len(int_array(own_prompt, 1, "prompt_token_ids"))
        elif "prompt_tokens" in usage:
            n_prompt = whole(usage["prompt_tokens"], "usage.prompt_tokens", 1)
        elif before is not None:
            n_prompt = len(before)
        else:
            raise MoetapError("neither prompt_token_ids nor usage.prompt_tokens is given")
        if before is not None:
            if len(before) != n_prompt or before.shape[1:] != ids.shape[1:]:
                raise MoetapError(
                    f"prompt_routed_experts is {before.shape}, the prompt has {n_prompt} tokens "
                    f"and {what}.routed_experts is {ids.shape}"
                )
            ids = np.concatenate([before, ids])
        # Rows that the request left out (routed_experts_prompt_start) were not recorded either.
        ids = np.concatenate([np.full((start, *ids.shape[1:]), MISSING), ids])
        generated = choice.get("token_ids")
        if generated is not None:
            n_generated = len(int_array(generated, 1, f"{what}.token_ids"))
        elif len(choices) == 1 and "completion_tokens" in usage:
            n_generated = whole(usage["completion_tokens"], "usage.completion_tokens", 1)
        else:
            n_generated = len(ids) - n_prompt + 1
        if n_generated < 1 or len(ids) != n_prompt + n_generated - 1:
            raise MoetapError(
                f"{what}.routed_experts: {len(ids)} rows for {n_prompt} prompt and "
                f"{n_generated} generated tokens, expected {n_prompt + n_generated - 1}"
            )
        tokens = None
        if own_prompt is not None and generated is not None:
            tokens = token_array([*own_prompt, *generated[:-1]], len(ids), f"{what} token ids")
        name = str(answer.get("id") or file.stem)
        found.append(
            Rows(
                prompt_id=name if len(choices) == 1 else f"{name}#{i}",
                n_prompt=n_prompt,
                ids=ids,
                tokens=tokens,
                finish_reason=str(choice.get("finish_reason") or ""),
                # mypy cannot infer a lambda with a bound default.
                where=lambda row, layer, what=what: f"{what}, row {row}",  # type: ignore[misc]
            )
        )
    return found


def _decode(value: Any, what: str) -> NDArray[np.int64]:
    if isinstance(value, str):
        raw = base64.b64decode(value, validate=True)
        if not raw.startswith(b"\x93NUMPY"):
            raise MoetapError(f"{what} is no base64 of a .npy file")
        stream = io.BytesIO(raw)
        value = np.load(stream, allow_pickle=False)
        if stream.read(1):
            raise MoetapError(f"{what}: bytes follow the array")
    ids = int_array(value, 3, what)
    if ids.shape[1] == 0 or ids.shape[2] == 0:
        if len(ids) == 0:
            # An empty list: no rows, of which nobody knows the width.
            raise MoetapError(f"{what} is empty")
        raise MoetapError(f"{what} has shape {ids.shape}")
    return ids


def _without_cached(rows: Rows, ids: NDArray[np.int64], layers: NDArray[np.int64]) -> Rows:
    """Leading positions that a cache held are rows that were not fed."""
    absent = (rows.ids == MISSING).all(axis=(1, 2))
    # The last prompt token is always fed.
    first = min(int(np.argmin(absent)) if not absent.all() else len(ids), rows.n_prompt - 1)
    return Rows(
        prompt_id=rows.prompt_id,
        n_prompt=rows.n_prompt,
        first_position=first,
        ids=ids[first:],
        tokens=None if rows.tokens is None else rows.tokens[first:],
        finish_reason=rows.finish_reason,
        where=lambda row, order: f"{rows.where(row + first, order)}, layer {layers[order]}",
    )


FORMAT = Vllm()
