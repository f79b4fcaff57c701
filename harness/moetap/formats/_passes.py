"""Logs of forward passes: for each pass, layer by layer, the experts of the tokens in it.

Knows how streams are found in such a log and cut into one. Refuses to know how a record is stored.

A pass ends where the layer index does not rise. A pass over several tokens is prefill; one that
follows a pass over a single token begins a new stream. An engine may run its last layers only for
the last tokens of a prefill pass (llama.cpp drops outputs that nobody reads), so a record of fewer
tokens than its pass stands for the last ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def passes_of(stream: Stream, model: ModelInfo, name: str) -> list[list[tuple[int, slice]]]:
    """The stream as passes: the prompt in one, then a token each.

    Per pass and layer that ran: moe_order, and the rows of the record.

    Raises:
        MoetapError: a reader would put the stream together differently.
    """
    n_prompt = stream.n_prompt - stream.first_position
    cuts = [0, *range(n_prompt, stream.n_rows + 1)]
    ran = (stream.experts != NOT_EXECUTED).any(axis=2)
    out: list[list[tuple[int, slice]]] = []
    for start, end in pairwise(cuts):
        this = []
        for order in range(model.n_layers):
            cells = ran[start:end, order]
            n = int(cells.sum())
            if not cells[len(cells) - n :].all():
                raise MoetapError(
                    f"stream {stream.prompt_id!r}: layer {model.layer_index[order]} ran for some "
                    f"prompt tokens but not for all after them; {name} has no place for that"
                )
            if n:
                this.append((order, slice(end - n, end)))
        if not any(at.start == start for _, at in this):
            raise MoetapError(
                f"stream {stream.prompt_id!r}: no layer ran in row {start}, {name} has no place "
                "for such a row"
            )
        if out and this[0][0] > out[-1][-1][0]:
            raise MoetapError(
                f"stream {stream.prompt_id!r}: the layers that ran in rows {start - 1} and "
                f"{start} look like one pass in {name}"
            )
        out.append(this)
    return out
