"""colibri's ROUTE_TRACE: a text line per MoE call and batch row, with gates to four digits.

Knows `<call> <row> <layer> <id>:<gate> ...`, where calls count from 0 and rows within a call. A
prompt and a stream are not marked; `_passes` finds them.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from moetap.errors import MoetapError
from moetap.formats._passes import Record, passes_of, streams_of
from moetap.formats.base import (
    Base,
    Options,
    lost,
    make_trace,
    need_n_experts,
    one_file_per_stream,
    refusing,
    save_lines,
)
from moetap.trace import Trace

_LINE = re.compile(r"(\d{1,9}) (\d{1,9}) (\d{1,6})((?: \d{1,6}:-?\d{1,9}\.\d{1,9})+)")


class Colibri(Base):
    name = "colibri"
    summary = "colibri ROUTE_TRACE text, gates to four digits"
    write_options = ("stream",)
    read_options = ("n_experts", "model_id", "n_prompt")
    not_kept = ("rank order within a row (gates are kept)",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        model = trace.model
        for stream, file in one_file_per_stream(trace, path, options, ".txt"):
            lines: list[str] = []
            call = 0
            for this in passes_of(stream, model, "ROUTE_TRACE"):
                for order, at in this:
                    k = int(model.top_k[order])
                    for row, ids in enumerate(stream.experts[at, order, :k].tolist()):
                        gates = [0.0] * k
                        if stream.scores is not None:
                            # "nan" would be refused by colibri's own tools.
                            found = stream.scores[at, order, :k][row].astype(np.float64)
                            gates = np.nan_to_num(found, nan=0.0).tolist()
                        pairs = sorted(zip(ids, gates, strict=True), key=lambda pair: -pair[1])
                        text = " ".join(f"{e}:{g:.4f}" for e, g in pairs)
                        lines.append(f"{call} {row} {model.layer_index[order]} {text}")
                    call += 1
            save_lines(file, lines)
        gates_lost = (
            "gate weights beyond four decimal places"
            if trace.capture.scores_kind
            else "that no gate weights were recorded (written as 0.0000)"
        )
        return [*lost(trace, "layers", "n_prompt", "scores"), gates_lost]

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


FORMAT = Colibri()
