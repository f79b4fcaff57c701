"""colibri's ROUTE_TRACE: a text line per MoE call and batch row, with gates to four digits.

Knows `<call> <row> <layer> <id>:<gate> ...`, where calls count from 0 and rows within a call. A
prompt and a stream are not marked; `_passes` finds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError
from moetap.formats._passes import Record, prompt_pass, streams_of
from moetap.formats._text import Strings, chunks, gate_table, id_table, strings, text
from moetap.formats.base import (
    Base,
    Options,
    gates_unknown,
    lost,
    make_trace,
    need_n_experts,
    one_file_per_stream,
    refusing,
    save_text,
)
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream, Trace

_LINE = re.compile(r"(\d{1,9}) (\d{1,9}) (\d{1,6})((?: \d{1,6}:-?\d{1,9}\.\d{1,9})+)")


class Colibri(Base):
    name = "colibri"
    summary = "colibri ROUTE_TRACE text, gates to four digits"
    write_options = ("stream",)
    read_options = ("n_experts", "model_id", "n_prompt")
    not_kept = ("rank order within a row (gates are kept)",)
    open_end = True

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        for stream, file in one_file_per_stream(trace, path, options, ".txt"):
            prompt = prompt_pass(stream, trace.model, "ROUTE_TRACE")
            sizes = [rows.stop - rows.start for _, rows in prompt]
            if stream.n_generated == 1 and _cut(*sizes[-2:]):
                raise MoetapError(
                    f"stream {stream.prompt_id!r}: the last layer ran for {sizes[-1]} prompt "
                    "tokens, which ROUTE_TRACE would take for a file that is cut off"
                )
            save_text(file, _lines(stream, prompt, trace.model))
        gates_lost = (
            "gate weights beyond four decimal places"
            if trace.capture.scores_kind
            else "that no gate weights were recorded (written as 0.0000)"
        )
        return [
            *lost(trace, "layers", "n_prompt", "scores"),
            gates_lost,
            *gates_unknown(trace, options, "written as 0.0000"),
        ]

    def read(self, path: Path, options: Options) -> Trace:
        with refusing(path):
            records: list[Record] = []
            rows: list[tuple[list[int], list[float]]] = []
            key = (-1, -1)
            first_line = 0

            def close(call: int, layer: int) -> None:
                if len({len(ids) for ids, _ in rows}) > 1:
                    raise MoetapError(f"line {first_line}: rows of one call differ in length")
                records.append(
                    Record(
                        layer,
                        np.array([ids for ids, _ in rows], dtype=np.int64),
                        np.array([gates for _, gates in rows]),
                        f"line {first_line} (call {call})",
                    )
                )

            text = path.read_text(encoding="utf-8")
            if not text.endswith("\n"):
                raise MoetapError("cut off: the last line has no end")
            for number, line in enumerate(text[:-1].split("\n"), 1):
                found = _LINE.fullmatch(line.rstrip("\r"))
                if not found:
                    raise MoetapError(
                        f"line {number}: {line!r:.60} is not call, row, layer and id:gate pairs"
                    )
                call, row, layer = (int(found[i]) for i in (1, 2, 3))
                if row == 0:
                    if key[0] >= 0:
                        close(*key)
                    if call != key[0] + 1:
                        raise MoetapError(f"line {number}: call {call} follows call {key[0]}")
                    key, first_line, rows = (call, layer), number, []
                elif (call, layer) != key or row != len(rows):
                    raise MoetapError(
                        f"line {number}: row {row} of call {call} follows row {len(rows) - 1} of "
                        f"call {key[0]}"
                    )
                pairs = [pair.split(":") for pair in found[4].split()]
                rows.append(([int(e) for e, _ in pairs], [float(g) for _, g in pairs]))
            close(*key)
            if len(records) > 1 and records[-2].layer < records[-1].layer:
                n_before, n = (len(r.ids) for r in records[-2:])
                if _cut(n_before, n):
                    raise MoetapError(
                        f"{records[-1].where}: cut off: the last call has {n} rows, the one "
                        f"before {n_before}"
                    )
            if not any(r.scores is not None and r.scores.any() for r in records):
                records = [Record(r.layer, r.ids, None, r.where) for r in records]
            streams, layers = streams_of(records, options)
            return make_trace(
                path,
                streams,
                layers,
                need_n_experts(options),
                model_id=options.model_id or "",
                scores_kind="gate as applied, four decimals, from ROUTE_TRACE",
            )


def _cut(n_before: int, n: int = 0) -> bool:
    """Whether the rows of a log's last call show that some are missing.

    An engine runs its last layer for all rows, or for the prompt's last one.
    """
    return 1 < n < n_before


def _lines(stream: Stream, prompt: list[tuple[int, slice]], model: ModelInfo) -> Iterator[str]:
    layers = [f" {layer}" for layer in model.layer_index.tolist()]
    for call, (layer, rows) in enumerate(prompt):
        for part in chunks(rows.stop - rows.start, 1):
            at = slice(rows.start + part.start, rows.start + part.stop)
            gates = None if stream.scores is None else stream.scores[at, layer]
            heads = strings(
                [f"{call} {row}{layers[layer]}" for row in range(part.start, part.stop)]
            )
            yield _text(heads, stream.experts[at, layer], gates)
    n_calls = len(prompt)
    for part in chunks(stream.n_rows - prompt[0][1].stop, model.n_layers):
        at = slice(prompt[0][1].stop + part.start, prompt[0][1].stop + part.stop)
        ids = stream.experts[at]
        row, order = np.nonzero(ids[:, :, 0] != NOT_EXECUTED)
        gates = None if stream.scores is None else stream.scores[at][row, order]
        calls = range(n_calls, n_calls + len(row))
        heads = strings([f"{c} 0{layers[m]}" for c, m in zip(calls, order.tolist(), strict=True)])
        yield _text(heads, ids[row, order], gates)
        n_calls += len(row)


def _text(heads: Strings, ids: NDArray[np.uint16], gates: NDArray[np.float16] | None) -> str:
    """Lines of these heads, experts by falling gate. ids, gates: (n, K)."""
    there = ids != NOT_EXECUTED
    if gates is None:
        weights: str | Strings = np.where(there, ":0.0000", "")
    else:
        # "nan" would be refused by colibri's own tools.
        gates = np.nan_to_num(gates, nan=0.0, posinf=np.inf, neginf=-np.inf)
        key = np.where(there, -gates.astype(np.float32), np.inf)
        order = np.argsort(key, axis=1, kind="stable")
        ids = np.take_along_axis(ids, order, axis=1)
        gates = np.take_along_axis(gates, order, axis=1)
        weights = np.where(ids != NOT_EXECUTED, gate_table(_gate)[gates.view(np.uint16)], "")
    pairs = np.stack([id_table(" ")[ids], weights], axis=2).reshape(len(ids), -1)
    return text(len(heads), heads, pairs, "\n")


def _gate(value: float) -> str:
    return f":{value:.4f}"


FORMAT = Colibri()
