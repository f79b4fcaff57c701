"""Logs of forward passes: for each pass, layer by layer, the experts of the tokens in it.

Knows how streams are found in such a log and cut into one. Refuses to know how a record is stored.

A pass ends where the layer index does not rise. A pass over several tokens is prefill; one that
follows a pass over a single token begins a new stream. An engine may run its last layers only for
the last tokens of a prefill pass (llama.cpp drops outputs that nobody reads), so a record of fewer
tokens than its pass stands for the last ones. The last pass of a stream reaches the last layer, or
the log is cut off.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import MISSING, Options, Rows
from moetap.trace import NOT_EXECUTED, ModelInfo, Stream


@dataclass(frozen=True, eq=False)
class Record:
    """A layer's routing in one pass. ids, scores: (tokens, k). where: its place in the file."""

    layer: int
    ids: NDArray[np.int64]
    scores: NDArray[np.float64] | None
    where: str


def streams_of(records: Sequence[Record], options: Options) -> tuple[list[Rows], NDArray[np.int64]]:
    """The streams of a log, and its MoE layers."""
    layers = np.unique([r.layer for r in records]).astype(np.int64)
    order = {int(layer): i for i, layer in enumerate(layers)}
    k = max(r.ids.shape[1] for r in records)
    groups: list[list[list[Record]]] = []
    previous = 0
    for this in _passes(records):
        n = max(len(r.ids) for r in this)
        if not groups or (n > 1 and previous == 1):
            groups.append([])
        groups[-1].append(this)
        previous = n
    for group in groups:
        last = group[-1]
        if last[-1].layer != layers[-1]:
            raise MoetapError(
                f"{last[-1].where}: cut off: the stream's last pass ends in layer "
                f"{last[-1].layer}, the file has layers up to {layers[-1]}; what stands before "
                f"{last[0].where} is whole"
            )
    if options.n_prompt is not None and len(groups) > 1:
        raise UsageError(f"--n-prompt goes with one stream, the file has {len(groups)}")
    return [
        _rows(f"s{i}", group, order, k, options.n_prompt) for i, group in enumerate(groups)
    ], layers


def _passes(records: Sequence[Record]) -> Iterator[list[Record]]:
    current: list[Record] = []
    for record in records:
        if current and record.layer <= current[-1].layer:
            yield current
            current = []
        current.append(record)
    if current:
        yield current


def _rows(
    name: str, passes: list[list[Record]], order: dict[int, int], k: int, n_prompt: int | None
) -> Rows:
    lengths = [max(len(r.ids) for r in this) for this in passes]
    ends = np.cumsum(lengths)
    ids = np.full((int(ends[-1]), len(order), k), MISSING, dtype=np.int64)
    scored = any(r.scores is not None for this in passes for r in this)
    scores = np.full(ids.shape, np.nan) if scored else None
    for this, end in zip(passes, ends.tolist(), strict=True):
        for record in this:
            at = slice(end - len(record.ids), end)
            width = record.ids.shape[1]
            ids[at, order[record.layer], :width] = record.ids
            if scores is not None and record.scores is not None:
                scores[at, order[record.layer], :width] = record.scores

    def where(row: int, moe_order: int) -> str:
        this = passes[int(np.searchsorted(ends, row, side="right"))]
        return next(r.where for r in this if order[r.layer] == moe_order)

    prompt_passes = max(1, next((i for i, n in enumerate(lengths) if n == 1), len(lengths)))
    return Rows(
        prompt_id=name,
        n_prompt=n_prompt or int(ends[prompt_passes - 1]),
        ids=ids,
        scores=scores,
        where=where,
    )


def prompt_pass(stream: Stream, model: ModelInfo, name: str) -> list[tuple[int, slice]]:
    """The stream's first pass, which is the prompt: per layer that ran, moe_order and rows.

    Each row after it is a pass of its own, of the layers that ran.

    Raises:
        MoetapError: a reader would put the stream together differently.
    """
    n_prompt = stream.n_prompt - stream.first_position
    ran = stream.experts[:, :, 0] != NOT_EXECUTED
    rows_of = ran[:n_prompt].sum(axis=0)
    out = []
    for order, n in enumerate(rows_of.tolist()):
        if not ran[n_prompt - n : n_prompt, order].all():
            raise MoetapError(
                f"stream {stream.prompt_id!r}: layer {model.layer_index[order]} ran for some "
                f"prompt tokens but not for all after them; {name} has no place for that"
            )
        if n:
            out.append((order, slice(n_prompt - n, n_prompt)))
    empty = ~ran.any(axis=1)
    # Within the prompt only its first row shows: layers run for its last rows.
    empty[1:n_prompt] = False
    if empty.any():
        raise MoetapError(
            f"stream {stream.prompt_id!r}: no layer ran in row {empty.argmax()}, {name} has no "
            "place for such a row"
        )
    first = ran[n_prompt:].argmax(axis=1)
    last = model.n_layers - 1 - ran[:, ::-1].argmax(axis=1)
    last[n_prompt - 1] = out[-1][0]
    joined = first > last[n_prompt - 1 : -1]
    if joined.any():
        row = n_prompt + int(joined.argmax())
        raise MoetapError(
            f"stream {stream.prompt_id!r}: the layers that ran in rows {row - 1} and {row} look "
            f"like one pass in {name}"
        )
    if last[-1] != np.flatnonzero(ran.any(axis=0))[-1]:
        raise MoetapError(
            f"stream {stream.prompt_id!r}: the last layer did not run in the last row, which "
            f"{name} would take for a file that is cut off"
        )
    return out
