"""JSON lines of one (token, layer) each.

Knows how rows and streams are found in them: a token's lines follow each other with layers that
rise; a token index that does not go on by one begins a new stream if it goes back, and is an error
if it skips. The last token of a stream reaches the last layer, or the file is cut off. Refuses to
know the names of the fields.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import MISSING, Options, Rows, mapping, whole


@dataclass(frozen=True)
class Cell:
    """One line: the experts of one token in one layer."""

    token: int
    layer: int
    ids: list[int]
    weights: list[float] | None
    line: int


@dataclass
class _Group:
    first: int
    rows: list[list[Cell]] = field(default_factory=list)


def read_cells(path: Path, cell: Callable[[dict[str, Any], int], Cell]) -> list[Cell]:
    """All lines, each through `cell`. Call it within `refusing`."""
    text = path.read_text(encoding="utf-8")
    if text and not text.endswith("\n"):
        raise MoetapError("cut off: the last line has no end")
    cells = []
    for number, line in enumerate(text.split("\n")[:-1], 1):
        if not line.strip():
            continue
        try:
            cells.append(cell(mapping(json.loads(line), "the line"), number))
        except MoetapError as error:
            raise MoetapError(f"line {number}: {error}") from None
        except KeyError as error:
            raise MoetapError(f"line {number}: has no {error}") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise MoetapError(f"line {number}: {error}") from None
    if not cells:
        raise MoetapError("holds no line")
    return cells


def id_list(value: Any, what: str) -> list[int]:
    """A JSON list of expert ids, at least one."""
    if not isinstance(value, list) or not value:
        raise MoetapError(f"{what} must be a list of expert ids, is {value!r:.40}")
    return [whole(v, what) for v in value]


def weight_list(value: Any, n: int, what: str) -> list[float]:
    """A JSON list of n numbers."""
    if (
        not isinstance(value, list)
        or len(value) != n
        or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
    ):
        raise MoetapError(f"{what} must be a list of {n} numbers, is {value!r:.40}")
    return [float(v) for v in value]


def streams_of(cells: list[Cell], options: Options) -> tuple[list[Rows], NDArray[np.int64]]:
    """The streams of a file, and its MoE layers.

    Where the prompt ends is not in such a file: without --n-prompt the first row takes the place
    of the last prompt token.
    """
    groups: list[_Group] = []
    previous: Cell | None = None
    for cell in cells:
        if previous is not None and cell.token == previous.token and cell.layer > previous.layer:
            groups[-1].rows[-1].append(cell)
        elif previous is not None and cell.token == previous.token + 1:
            groups[-1].rows.append([cell])
        elif previous is None or cell.token <= previous.token:
            groups.append(_Group(cell.token, [[cell]]))
        else:
            raise MoetapError(
                f"line {cell.line}: token {cell.token} follows token {previous.token}"
            )
        previous = cell
    layers = np.unique([c.layer for c in cells]).astype(np.int64)
    for group in groups:
        last = group.rows[-1]
        if last[-1].layer != layers[-1]:
            raise MoetapError(
                f"line {last[-1].line}: cut off: the stream's last token ends in layer "
                f"{last[-1].layer}, the file has layers up to {layers[-1]}; what stands before "
                f"line {last[0].line} is whole"
            )
    if options.n_prompt is not None and len(groups) > 1:
        raise UsageError(f"--n-prompt goes with one stream, the file has {len(groups)}")
    if layers[-1] >= 2**20:
        raise MoetapError(f"layer {layers[-1]} is not a layer")
    order = {int(layer): i for i, layer in enumerate(layers)}
    k = max(len(c.ids) for c in cells)
    if k > 65535 or any(max(c.ids) >= 65535 for c in cells):
        line = next(c.line for c in cells if len(c.ids) > 65535 or max(c.ids) >= 65535)
        raise MoetapError(f"line {line}: expert id is out of range")
    return [_rows(f"s{i}", g, order, k, options.n_prompt) for i, g in enumerate(groups)], layers


def _rows(name: str, group: _Group, order: dict[int, int], k: int, n_prompt: int | None) -> Rows:
    ids = np.full((len(group.rows), len(order), k), MISSING, dtype=np.int64)
    scored = any(c.weights is not None for row in group.rows for c in row)
    scores = np.full(ids.shape, np.nan) if scored else None
    for r, row in enumerate(group.rows):
        for cell in row:
            ids[r, order[cell.layer], : len(cell.ids)] = cell.ids
            if scores is not None and cell.weights is not None:
                scores[r, order[cell.layer], : len(cell.ids)] = cell.weights

    def where(row: int, moe_order: int) -> str:
        return next(f"line {c.line}" for c in group.rows[row] if order[c.layer] == moe_order)

    return Rows(
        prompt_id=name,
        n_prompt=n_prompt or group.first + 1,
        first_position=group.first,
        ids=ids,
        scores=scores,
        where=where,
    )
