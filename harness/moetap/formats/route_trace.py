"""`route_trace v1`, the CSV of BigMoeOnEdge: one line a routed expert.

Knows the preamble and the nine or ten columns. A turn is a stream; a layer that has no line for a
position did not run there. The cache's view (residency, bytes read, dropped) has no place in a
trace.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from moetap.errors import MoetapError
from moetap.formats._text import Strings, chunks, gate_table, id_table, strings, text
from moetap.formats.base import (
    MISSING,
    Base,
    Options,
    Rows,
    check_rows_ran,
    chosen,
    lost,
    make_trace,
    refusing,
    save_text,
)
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream, Trace

_HEAD = "# route_trace v1"
_RUN = re.compile(
    r"# model=(?P<model>.*) arch=(?P<arch>\S*) n_layer=(?P<n_layer>\d{1,6}) "
    r"n_expert=(?P<n_expert>\d{1,6}) n_expert_used=(?P<n_expert_used>\d{1,6})"
)
_LAYER = re.compile(
    r"# layer=(?P<layer>\d{1,6}) expert_bytes=(?P<bytes>\d{1,18}) dense_bytes=\d{1,18}"
)
_COLUMNS = "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"


class RouteTrace(Base):
    name = "route-trace"
    summary = "route_trace v1 CSV of BigMoeOnEdge, with weights"
    write_options = ("stream",)
    read_options = ("model_id",)
    not_kept = (
        "residency, bytes read and drops of each routing",
        "dense bytes per layer",
        "rank order within a row (weights are kept)",
    )
    open_end = True

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        n_layer = int(model.layer_index[-1]) + 1
        per_layer = np.zeros(n_layer, dtype=np.int64)
        per_layer[model.layer_index] = model.expert_bytes
        streams = chosen(trace, options)
        ran = np.zeros(model.n_layers, dtype=bool)
        for stream in streams:
            check_rows_ran(stream, self.name)
            ran |= (stream.experts[:, :, 0] != NOT_EXECUTED).any(axis=0)
        # A layer with bytes and without rows would mean that the file is cut off.
        per_layer[model.layer_index[~ran]] = 0
        head = [
            _HEAD,
            f"# model={_word(model.id)} arch={_word(model.model_type) or 'unknown'} "
            f"n_layer={n_layer} n_expert={model.n_experts.max()} n_expert_used={model.max_top_k}",
            *(f"# layer={i} expert_bytes={b} dense_bytes=0" for i, b in enumerate(per_layer)),
            _COLUMNS,
        ]
        turns = (_turn(turn, stream, model) for turn, stream in enumerate(streams))
        save_text(path, chain(["\n".join(head) + "\n"], *turns))
        kept = ("layers", "ragged n_experts", "n_experts", "expert_bytes", "model id", "scores")
        extra = ["residency: every routing is written as a miss, since a trace knows no cache"]
        if len(set(model.n_experts.tolist())) > 1:
            extra.append("number of experts per layer (only the largest is kept)")
        return [*lost(trace, *kept, "n_prompt", "first_position"), *extra]

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            return _read(path, options)


def _turn(turn: int, stream: Stream, model: ModelInfo) -> Iterator[str]:
    layers, k = model.layer_index.tolist(), model.max_top_k
    places = strings([f"{layer},{slot}," for layer in layers for slot in range(k)])
    ends = strings([f",0,{size}\n" for size in model.expert_bytes.tolist()])
    for rows in chunks(stream.n_rows, model.n_layers * k):
        ids, scores = stream.experts[rows], None
        if stream.scores is not None:
            # NaN sorts last, and stays before the empty slots that follow it.
            by_weight = np.argsort(-stream.scores[rows], axis=2, kind="stable")
            ids = np.take_along_axis(ids, by_weight, axis=2)
            scores = np.take_along_axis(stream.scores[rows], by_weight, axis=2)
        row, order, slot = np.nonzero(ids != NOT_EXECUTED)
        heads = strings(
            [
                f"{turn},{int(position >= stream.n_prompt)},{position},"
                for position in stream.position[rows].tolist()
            ]
        )
        weights: str | Strings = ",nan"
        if scores is not None:
            weights = gate_table(_weight, ",")[scores[row, order, slot].view(np.uint16)]
        yield text(
            len(row),
            heads[row],
            places[order * k + slot],
            id_table("")[ids[row, order, slot]],
            weights,
            ends[order],
        )


def _weight(value: float) -> str:
    return f"{value:.6g}"


def _read(path: Path, options: Options) -> Trace:
    lines = path.read_text(encoding="utf-8").split("\n")
    if lines[0].rstrip("\r") != _HEAD:
        raise MoetapError(f"line 1: expected {_HEAD!r}")
    if lines.pop() != "":
        raise MoetapError(f"line {len(lines) + 1}: cut off, the last line has no end")
    run: dict[str, Any] = {}
    layer_bytes: dict[int, int] = {}
    n_columns = 0
    body: list[tuple[int, list[str]]] = []
    for at_line, line in enumerate(lines[1:], 2):
        line = line.rstrip("\r")
        if n_columns:
            cells = line.split(",")
            if len(cells) != n_columns:
                raise MoetapError(f"line {at_line}: {len(cells)} columns, expected {n_columns}")
            body.append((at_line, cells))
        elif found := _RUN.fullmatch(line):
            run = found.groupdict()
        elif found := _LAYER.fullmatch(line):
            layer_bytes[int(found["layer"])] = int(found["bytes"])
        elif line in (_COLUMNS, f"{_COLUMNS},dropped"):
            n_columns = line.count(",") + 1
        else:
            raise MoetapError(f"line {at_line}: {line!r:.60} is no part of the preamble")
    if not run:
        raise MoetapError("line 2: no line with model, n_layer, n_expert and n_expert_used")
    if not body:
        raise MoetapError("holds no rows")
    table = np.empty((len(body), 9), dtype=np.int64)
    weights = np.empty(len(body))
    for i, (at_line, cells) in enumerate(body):
        try:
            table[i] = [at_line, *map(_digits, cells[:6]), *map(_digits, cells[7:9])]
            weights[i] = float(cells[6])
        except (ValueError, OverflowError):
            raise MoetapError(f"line {at_line}: {','.join(cells)!r:.80} is not a routing") from None
        if np.isinf(weights[i]):
            raise MoetapError(f"line {at_line}: weight {cells[6]}")
    number, turn, phase, step, layer, slot, expert, _, _ = table.T
    n_layer, used = int(run["n_layer"]), int(run["n_expert_used"])
    _all(number, phase <= 1, "phase is neither 0 nor 1")
    _all(number, layer < n_layer, f"layer is not below n_layer={n_layer}")
    _all(number, slot < used, f"slot is not below n_expert_used={used}")
    _all(number, expert < int(run["n_expert"]), f"expert is not below n_expert={run['n_expert']}")
    layers = np.unique(layer)
    order = np.searchsorted(layers, layer)
    bare = sorted({i for i, size in layer_bytes.items() if size} - set(layers.tolist()))
    if bare:
        raise MoetapError(
            f"line {number[-1]}: cut off: layer {bare[0]} has expert_bytes in the preamble and no "
            "row"
        )
    if slot.max() + 1 < used:
        raise MoetapError(
            f"line {number[-1]}: cut off: no token has all n_expert_used={used} slots of a layer"
        )
    scored = bool(np.isfinite(weights).any())
    streams = []
    for this in np.unique(turn).tolist():
        mine = turn == this
        steps = np.unique(step[mine])
        first, n = int(steps[0]), len(steps)
        if steps[-1] != first + n - 1:
            gap = int(steps[np.flatnonzero(np.diff(steps) > 1)[0]])
            at = number[mine & (step > gap)].min()
            raise MoetapError(f"line {at}: turn {this} has no row for step {gap + 1}")
        last = mine & (step == steps[-1])
        if layer[last].max() != layers[-1]:
            raise MoetapError(
                f"line {number[last][-1]}: cut off: turn {this} ends in layer {layer[last].max()} "
                f"of step {steps[-1]}, the file has layers up to {layers[-1]}; what stands before "
                f"line {number[last][0]} is whole"
            )
        row = step[mine] - first
        cell = (row * len(layers) + order[mine]) * used + slot[mine]
        _, back = np.unique(cell, return_index=True)
        if len(back) != len(cell):
            again = np.setdiff1d(np.arange(len(cell)), back)[0]
            raise MoetapError(f"line {number[mine][again]}: this slot has been given before")
        ids = np.full((n, len(layers), used), MISSING, dtype=np.int64)
        scores = np.full(ids.shape, np.nan)
        place = np.zeros(ids.shape[:2], dtype=np.int64)
        ids[row, order[mine], slot[mine]] = expert[mine]
        scores[row, order[mine], slot[mine]] = weights[mine]
        place[row, order[mine]] = number[mine]
        prompt_steps = np.unique(step[mine & (phase == 0)])
        # Without prefill rows the first one takes the place of the last prompt token.
        n_prompt = int(prompt_steps[-1]) + 1 if len(prompt_steps) else first + 1
        late = mine & (phase == 1) & (step < n_prompt) & (len(prompt_steps) > 0)
        if late.any():
            raise MoetapError(f"line {number[late][0]}: decode before the prefill has ended")
        streams.append(
            Rows(
                prompt_id=f"turn-{this}",
                n_prompt=n_prompt,
                first_position=first,
                ids=ids,
                scores=scores if scored else None,
                # mypy cannot infer a lambda with a bound default.
                where=lambda r, m, place=place: f"line {place[r, m]}",  # type: ignore[misc]
            )
        )
    return make_trace(
        path,
        streams,
        layers,
        int(run["n_expert"]),
        model_id=options.model_id or run["model"],
        model_type="" if run["arch"] == "unknown" else run["arch"],
        expert_bytes=[layer_bytes.get(int(i), 0) for i in layers],
        scores_kind="weight as applied, from route_trace v1",
    )


def _digits(text: str) -> int:
    # int() takes signs, underscores and blanks, which no writer of the format emits.
    if not text.isascii() or not text.isdigit():
        raise ValueError(text)
    return int(text)


def _all(number: np.ndarray[Any, Any], good: np.ndarray[Any, Any], message: str) -> None:
    if not good.all():
        raise MoetapError(f"line {number[~good][0]}: {message}")


def _word(text: str) -> str:
    return "".join(text.split())


FORMAT = RouteTrace()
