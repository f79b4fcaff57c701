"""The compiled loops of lanes and footprints.

Knows arrays only; `lanes` and `overflow` say what they mean. A file of its own because importing
Numba takes longer than `moetap --help` may. Compiled code lets go of the interpreter lock, so that
groups of streams run in threads.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from moetap.trace import NOT_EXECUTED

# Place of a word's only bit: multiplying by a de Bruijn sequence brings a different 6 bits to the
# top for each of the 64 places.
_DE_BRUIJN = np.uint64(0x03F79D71B4CB0A89)
_PLACE = np.zeros(64, dtype=np.int64)
for _bit in range(64):
    _PLACE[((int(_DE_BRUIJN) << _bit) & (2**64 - 1)) >> 58] = _bit


@njit(cache=True, nogil=True)
def merge(
    rows: NDArray[np.uint16], n_experts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint16], NDArray[np.bool_]]:
    """Union of the lanes' ids at each (layer, step), ascending, as compressed rows.

    rows: (B, steps, L, K) of the lanes.

    The ids set bits in a mask and are read back in order, which both sorts them and drops repeats.
    """
    n_lanes, n_steps, n_layers, width = rows.shape
    starts = np.zeros(n_layers * n_steps + 1, dtype=np.int64)
    found = np.empty(n_layers * n_steps * min(n_lanes * width, n_experts.max()), dtype=np.uint16)
    ran = np.ones((n_layers, n_steps), dtype=np.bool_)
    mask = np.zeros((n_experts.max() + 63) // 64, dtype=np.uint64)
    one, top = np.uint64(1), np.uint64(58)
    end = 0
    for layer in range(n_layers):
        for step in range(n_steps):
            for lane in range(n_lanes):
                if rows[lane, step, layer, 0] == NOT_EXECUTED:
                    ran[layer, step] = False
                for slot in range(width):
                    expert = rows[lane, step, layer, slot]
                    if expert == NOT_EXECUTED:
                        break
                    mask[expert >> 6] |= one << np.uint64(expert & 63)
            for word in range(len(mask)):
                bits = mask[word]
                mask[word] = 0
                if ran[layer, step]:
                    while bits != 0:
                        rest = bits & (bits - one)
                        found[end] = (word << 6) + _PLACE[((bits ^ rest) * _DE_BRUIJN) >> top]
                        end += 1
                        bits = rest
            starts[layer * n_steps + step + 1] = end
    return starts, found[:end].copy(), ran


@njit(cache=True, nogil=True)
def footprints(
    n_steps: int,
    n_experts: NDArray[np.int64],
    starts: NDArray[np.int64],
    ids: NDArray[np.uint16],
    ran: NDArray[np.bool_],
    windows: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Histograms (n_W, L, E + 1) of the footprints, and windows left out (n_W, L).

    windows: (n_W,) lengths in steps, rising.

    An expert is in the window (d - W, d] exactly if its last use is, so one table of last uses
    serves all windows. An expert used at step d whose last use was at s enters the windows with
    W < d - s (with W = d - s it was in until step d - 1 and stays); those whose last use is still
    d - W after the step leave window W.
    """
    n_layers, n_windows = len(n_experts), len(windows)
    most = int(n_experts.max())
    histogram = np.zeros((n_windows, n_layers, most + 1), dtype=np.int32)
    left_out = np.zeros((n_windows, n_layers), dtype=np.int32)
    longest = windows[n_windows - 1]
    # Windows that an expert enters, by the time since its last use: the first `entered[age]`.
    entered = np.zeros(longest + 2, dtype=np.int64)
    for age in range(longest + 2):
        for w in range(n_windows):
            if windows[w] < age:
                entered[age] = w + 1
    last = np.empty(most, dtype=np.int64)
    n_last = np.empty(n_steps, dtype=np.int64)  # experts whose last use is step s
    entering = np.empty(n_windows + 1, dtype=np.int64)
    size = np.empty(n_windows, dtype=np.int64)
    for layer in range(n_layers):
        last[:] = -longest - 1  # never
        n_last[:] = 0
        size[:] = 0
        missing = -longest  # the last step that did not run
        for step in range(n_steps):
            cell = layer * n_steps + step
            entering[:] = 0
            for i in range(starts[cell], starts[cell + 1]):
                expert = ids[i]
                before = last[expert]
                if before >= 0:
                    n_last[before] -= 1
                last[expert] = step
                entering[entered[min(step - before, longest + 1)]] += 1
            n_last[step] = starts[cell + 1] - starts[cell]
            if not ran[layer, step]:
                missing = step
            new = 0
            for w in range(n_windows - 1, -1, -1):
                length = windows[w]
                new += entering[w + 1]
                size[w] += new
                if step >= length:
                    size[w] -= n_last[step - length]
                if step >= length - 1:
                    if step - missing >= length:
                        histogram[w, layer, size[w]] += 1
                    else:
                        left_out[w, layer] += 1
    return histogram, left_out


@njit(cache=True, nogil=True)
def distinct(rows: NDArray[np.uint16], n_experts: int) -> NDArray[np.int64]:
    """Distinct ids per layer over all rows, (L,). rows: (rows, L, K)."""
    n_rows, n_layers, width = rows.shape
    seen = np.zeros((n_layers, n_experts), dtype=np.uint8)
    for row in range(n_rows):
        for layer in range(n_layers):
            for slot in range(width):
                expert = rows[row, layer, slot]
                if expert == NOT_EXECUTED:
                    break
                seen[layer, expert] = 1
    sizes = np.zeros(n_layers, dtype=np.int64)
    for layer in range(n_layers):
        for expert in range(n_experts):
            sizes[layer] += seen[layer, expert]
    return sizes


@njit(cache=True, nogil=True)
def step_unions(
    ids: NDArray[np.uint16],
    first_rows: NDArray[np.int64],
    lengths: NDArray[np.int64],
    n_experts: NDArray[np.int64],
    choose: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum of the union over all groups of the given streams, and their number, per decode step.

    ids: (L, rows, K). first_rows, lengths: (S,) of the streams. choose: (n_B, S + 1), C(n, B) for
    n = 0 .. S in any scale. Returns two (n_B, steps), each summed over the layers.
    """
    n_layers, _, width = ids.shape
    n_sizes = len(choose)
    longest = lengths.max()
    union = np.zeros((n_sizes, longest))
    weight = np.zeros((n_sizes, longest))
    count = np.zeros(n_experts.max(), dtype=np.int64)
    for layer in range(n_layers):
        for step in range(longest):
            alive = 0
            count[:] = 0
            for stream in range(len(lengths)):
                row = first_rows[stream] + step
                if step >= lengths[stream] or ids[layer, row, 0] == NOT_EXECUTED:
                    continue
                alive += 1
                for slot in range(width):
                    expert = ids[layer, row, slot]
                    if expert == NOT_EXECUTED:
                        break
                    count[expert] += 1
            for b in range(n_sizes):
                weight[b, step] += choose[b, alive]
                for expert in range(n_experts[layer]):
                    union[b, step] += choose[b, alive] - choose[b, alive - count[expert]]
    return union, weight
