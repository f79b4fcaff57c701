"""Text of many lines at once.

Knows how a table of strings becomes text without a Python loop over its lines: every number is
looked up in a table of strings made beforehand, NumPy puts them side by side, and one join makes
the text of a chunk. Refuses to know what the lines mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from moetap.trace import NOT_EXECUTED

Strings = NDArray[np.object_]

_CELLS = 16384  # of a chunk: large enough for NumPy, small enough for the processor's caches


def chunks(n_rows: int, cells_per_row: int) -> Iterator[slice]:
    """Rows in portions of some thousand cells."""
    size = max(1, _CELLS // cells_per_row)
    for start in range(0, n_rows, size):
        yield slice(start, min(start + size, n_rows))


def strings(texts: list[str]) -> Strings:
    """A table to look strings up in."""
    out = np.empty(len(texts), dtype=object)
    out[:] = texts
    return out


def text(n: int, *columns: str | Strings) -> str:
    """n lines from left to right. A column is one string for all, (n,) or (n, several) strings."""
    widths = [1 if isinstance(c, str) or c.ndim == 1 else c.shape[1] for c in columns]
    table = np.empty((n, sum(widths)), dtype=object)
    at = 0
    for column, width in zip(columns, widths, strict=True):
        if isinstance(column, str) or column.ndim == 1:
            table[:, at] = column
        else:
            table[:, at : at + width] = column
        at += width
    return "".join(table.ravel().tolist())


def id_list(ids: NDArray[np.uint16], separator: str) -> Strings:
    """Ids with a separator before each but the first; nothing where there is no id.

    ids: (n, K), in which "no id" comes last.
    """
    out = np.empty(ids.shape, dtype=object)
    out[:, 0] = id_table("")[ids[:, 0]]
    out[:, 1:] = id_table(separator)[ids[:, 1:]]
    return out


@cache
def id_table(before: str) -> Strings:
    """Text of each id, with `before` in front; "" for no id."""
    return strings([f"{before}{i}" for i in range(NOT_EXECUTED)] + [""])


def gate_list(ids: NDArray[np.uint16], gates: NDArray[np.float16], separator: str) -> Strings:
    """The gates of these ids as JSON has them; nothing in a line that has one it cannot write.

    ids, gates: (n, K).
    """
    there = ids != NOT_EXECUTED
    bits = gates.view(np.uint16)
    out = np.empty(ids.shape, dtype=object)
    out[:, 0] = gate_table(repr)[bits[:, 0]]
    out[:, 1:] = gate_table(repr, separator)[bits[:, 1:]]
    out[~there | ~finite_lines(ids, gates)[:, None]] = ""
    return out


def finite_lines(ids: NDArray[np.uint16], gates: NDArray[np.float16]) -> NDArray[np.bool_]:
    """Lines in which every id has a finite gate."""
    fine: NDArray[np.bool_] = (np.isfinite(gates) | (ids == NOT_EXECUTED)).all(axis=1)
    return fine


@cache
def gate_table(write: Callable[[float], str], before: str = "") -> Strings:
    """Text of every float16, with `before` in front, in the order of their bits."""
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    return strings([before + write(value) for value in every.astype(np.float64).tolist()])


def integers(values: NDArray[np.int64]) -> tuple[Strings, str | Strings]:
    """Two columns that together are the decimal digits of numbers of at least -1.

    Numbers of which most occur once need no table of their own: four digits and the rest do.
    """
    high, low = np.divmod(values, 10_000)
    if high.max(initial=0) >= 10_000:
        return strings([str(value) for value in values.tolist()]), ""
    front, plain, padded = _digits()
    return front[high], np.where(high > 0, padded[low], np.where(high < 0, "", plain[low]))


@cache
def _digits() -> tuple[Strings, Strings, Strings]:
    plain = [str(i) for i in range(10_000)]
    # -1 is -1 * 10 000 + 9999, and an index of -1 is the last.
    front = ["", *plain[1:], "-1"]
    return strings(front), strings(plain), strings([f"{i:04d}" for i in range(10_000)])
