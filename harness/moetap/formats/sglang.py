"""SGLang's `routed_experts`: base64 of raw int32 [T - 1, hidden layers, k] in the meta_info.

Knows the fields around it that say how many rows there are and where they start. The bytes carry no
shape, and dense layers are zeros. Refuses to know the server.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import (
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
    save,
    token_array,
    whole,
)
from moetap.formats.vllm import all_layers
from moetap.trace import NOT_EXECUTED, Stream, Trace


class Sglang(Base):
    name = "sglang"
    summary = "SGLang response with routed_experts (base64 int32)"
    write_options = ("stream", "hidden_layers", "start_len")
    read_options = ("n_experts", "top_k", "hidden_layers", "layers", "start_len", "model_id")
    not_kept = ("text and log probabilities",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        if len(set(model.top_k.tolist())) > 1:
            raise MoetapError("layers with different top-k cannot be told apart in this format")
        for stream, file in one_file_per_stream(trace, path, options, ".json"):
            if model.max_top_k == 1 and (stream.experts == NOT_EXECUTED).any():
                raise MoetapError(
                    f"stream {stream.prompt_id!r}: with one expert per token a layer that did "
                    "not run looks like expert 0"
                )
            rows = all_layers(stream, model, options, 0)
            save(file, json.dumps(_answer(stream, rows, options), indent=1).encode())
        kept = ("layers", "prompt ids", "n_prompt", "first_position", "finish reasons")
        extra = ["tokens of the prompt"] if any(s.tokens.any() for s in trace.streams) else []
        return [
            *lost(trace, *kept, "tokens", "ragged n_experts"),
            *extra,
            "top-k and the number of layers (give --top-k when reading)",
            "the last generated token, which a trace does not hold (written as -1)",
        ]

    def read(self, path: Path, options: Options) -> Trace:
        found: list[Rows] = []
        for file in input_files(path, ".json"):
            with refusing(file):
                answers = load_json(file)
                many = answers if isinstance(answers, list) else [answers]
                for i, answer in enumerate(many):
                    name = file.stem if len(many) == 1 else f"{file.stem}#{i}"
                    found.append(_rows(name, mapping(answer, f"response {i}"), options))
        with refusing(path):
            if not found:
                raise MoetapError("has no response")
            if len({rows.ids.shape[1:] for rows in found}) > 1:
                raise MoetapError("responses have different numbers of layers")
            cleaned, layers = drop_dense(path, [rows.ids for rows in found], options)
            streams = [
                Rows(
                    prompt_id=rows.prompt_id,
                    n_prompt=rows.n_prompt,
                    first_position=rows.first_position,
                    ids=ids,
                    tokens=rows.tokens,
                    finish_reason=rows.finish_reason,
                    # mypy cannot infer a lambda with a bound default.
                    where=lambda row, order, rows=rows: (  # type: ignore[misc]
                        f"{rows.where(row, order)}, layer {layers[order]}"
                    ),
                )
                for rows, ids in zip(found, cleaned, strict=True)
            ]
            return make_trace(
                path,
                streams,
                layers,
                need_n_experts(options),
                model_id=options.model_id or "",
                fallback_k=found[0].ids.shape[2],
            )


def _answer(stream: Stream, rows: NDArray[np.int64], options: Options) -> dict[str, Any]:
    start = stream.first_position
    if options.start_len is not None:
        if not start <= options.start_len < stream.n_prompt:
            raise UsageError(
                f"--start-len {options.start_len}: stream {stream.prompt_id!r} has rows from "
                f"{start}, and decode step 0 is row {stream.n_prompt - 1}"
            )
        rows = rows[options.start_len - start :]
        start = options.start_len
    generated = stream.tokens[stream.n_prompt - stream.first_position :].tolist()
    return {
        "output_ids": [*generated, -1],
        "meta_info": {
            "id": stream.prompt_id,
            "finish_reason": {"type": stream.finish_reason} if stream.finish_reason else None,
            "prompt_tokens": stream.n_prompt,
            "completion_tokens": stream.n_generated,
            "routed_experts_start_len": start,
            "routed_experts": base64.b64encode(rows.astype("<i4").tobytes()).decode(),
        },
    }


def _from_openai(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer of the OpenAI-compatible routes in the shape of one of /generate."""
    if "choices" not in answer:
        return answer
    choices = answer["choices"]
    if not isinstance(choices, list) or len(choices) != 1:
        raise MoetapError("usage does not tell several choices apart; ask for one")
    choice = mapping(choices[0], "choices[0]")
    usage = mapping(answer.get("usage"), "usage")
    extra = mapping(choice.get("sgl_ext"), "choices[0].sgl_ext")
    return {
        "meta_info": {
            "id": answer.get("id"),
            "finish_reason": choice.get("finish_reason"),
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "routed_experts": extra.get("routed_experts"),
        }
    }


def _rows(name: str, answer: dict[str, Any], options: Options) -> Rows:
    answer = _from_openai(answer)
    meta = mapping(answer.get("meta_info"), "meta_info")
    raw = meta.get("routed_experts")
    if not isinstance(raw, str):
        raise MoetapError("meta_info has no routed_experts; ask for return_routed_experts")
    flat = np.frombuffer(base64.b64decode(raw, validate=True), dtype="<i4").astype(np.int64)
    n_prompt = whole(meta["prompt_tokens"], "meta_info.prompt_tokens", 1)
    n_generated = whole(meta["completion_tokens"], "meta_info.completion_tokens", 1)
    start = options.start_len
    if start is None:
        start = whole(meta.get("routed_experts_start_len", 0), "routed_experts_start_len")
    if start >= n_prompt:
        raise MoetapError(
            f"routed_experts start at position {start}, after the last prompt token: decode step "
            f"0 (position {n_prompt - 1}) is missing; ask for a smaller routed_experts_start_len"
        )
    n = n_prompt + n_generated - 1 - start
    if len(flat) % n:
        raise MoetapError(
            f"routed_experts: {len(flat)} numbers are no {n} rows, as {n_prompt} prompt and "
            f"{n_generated} generated tokens from position {start} need"
        )
    cells = len(flat) // n
    if options.top_k:
        n_layers, k = divmod(cells, options.top_k)[0], options.top_k
    elif options.hidden_layers:
        n_layers, k = options.hidden_layers, cells // options.hidden_layers
    else:
        raise UsageError("the bytes have no shape; give --top-k or --hidden-layers")
    if not cells or n_layers * k != cells or options.hidden_layers not in (None, n_layers):
        raise MoetapError(
            f"routed_experts: {cells} numbers a row do not go with top-k {options.top_k} and "
            f"{options.hidden_layers} hidden layers"
        )
    tokens = None
    if answer.get("output_ids") is not None:
        generated = int_array(answer["output_ids"], 1, "output_ids")
        if len(generated) != n_generated:
            raise MoetapError(f"{len(generated)} output_ids, completion_tokens={n_generated}")
        # The prompt's tokens are not in the response.
        unknown = np.zeros(n_prompt - start, dtype=np.int64)
        tokens = token_array(np.concatenate([unknown, generated[:-1]]), n, "output_ids")
    reason = meta.get("finish_reason")
    return Rows(
        prompt_id=str(meta.get("id") or name),
        n_prompt=n_prompt,
        first_position=start,
        ids=flat.reshape(n, n_layers, k),
        tokens=tokens,
        finish_reason=str(reason.get("type", "") if isinstance(reason, dict) else reason or ""),
        where=lambda row, order: f"{name}, row {row}",
    )


FORMAT = Sglang()
