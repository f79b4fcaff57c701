"""`route_trace v1`, the CSV of BigMoeOnEdge: one line a routed expert.

Knows the preamble and the nine or ten columns. A turn is a stream; a layer that has no line for a
position did not run there. The cache's view (residency, bytes read, dropped) has no place in a
trace.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from moetap.errors import MoetapError
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
    save,
)
from moetap.trace import NOT_EXECUTED, Trace

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
    summary = "route_trace v1 CSV of BigMoeOnEdge; a turn a stream, with gate weights"
    write_options = ("stream",)
    read_options = ("model_id",)
    not_kept = (
        "residency, bytes read and drops of each routing",
        "dense bytes per layer",
        "rank order within a row (weights are kept)",
    )

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        n_layer = int(model.layer_index[-1]) + 1
        per_layer = np.zeros(n_layer, dtype=np.int64)
        per_layer[model.layer_index] = model.expert_bytes
        lines = [
            _HEAD,
            f"# model={_word(model.id)} arch={_word(model.model_type) or 'unknown'} "
            f"n_layer={n_layer} n_expert={model.n_experts.max()} n_expert_used={model.max_top_k}",
            *(f"# layer={i} expert_bytes={b} dense_bytes=0" for i, b in enumerate(per_layer)),
            _COLUMNS,
        ]
        for turn, stream in enumerate(chosen(trace, options)):
            check_rows_ran(stream, self.name)
            scores = stream.scores
            for row, position in enumerate(stream.position.tolist()):
                phase = int(position >= stream.n_prompt)
                for order, layer in enumerate(model.layer_index.tolist()):
                    ids = stream.experts[row, order]
                    ids = ids[ids != NOT_EXECUTED]
                    slots = np.arange(len(ids))
                    if scores is not None:
                        slots = np.argsort(-scores[row, order, : len(ids)], kind="stable")
                    for slot, at in enumerate(slots):
                        weight = np.nan if scores is None else float(scores[row, order, at])
                        lines.append(
                            f"{turn},{phase},{position},{layer},{slot},{ids[at]},{weight:.6g},"
                            f"0,{per_layer[layer]}"
                        )
        save(path, ("\n".join(lines) + "\n").encode())
        kept = ("layers", "ragged n_experts", "n_experts", "expert_bytes", "model id", "scores")
        extra = ["residency: every routing is written as a miss, since a trace knows no cache"]
        if len(set(model.n_experts.tolist())) > 1:
            extra.append("number of experts per layer (only the largest is kept)")
        return [*lost(trace, *kept, "n_prompt", "first_position"), *extra]

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            return _read(path, options)


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
