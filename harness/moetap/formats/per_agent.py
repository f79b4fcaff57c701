"""Steps of several agents that decode together: JSON [{layer, per_agent: [[ids], ...]}, ...].

Knows that lane i is stream i, that steps are matched decode steps and that the group ends at its
shortest stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.formats._text import Strings, chunks, id_list, strings, text
from moetap.formats.base import Base, Options, lost, save_text
from moetap.trace import ModelInfo, Trace


class PerAgent(Base):
    name = "per-agent"
    direction = "export"
    summary = "decode steps of B lanes side by side, as JSON"
    write_options = ("lanes",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        n = len(trace.streams) if options.lanes is None else options.lanes
        if n < 1:
            raise UsageError(f"--lanes {n}: must be at least 1")
        if not 1 <= n <= len(trace.streams):
            raise UsageError(f"--lanes {n}: the trace has {len(trace.streams)} streams")
        lanes = [s.decode() for s in trace.streams[:n]]
        steps = min(len(lane) for lane in lanes)
        if not steps:
            raise MoetapError(f"{trace.source or 'trace'}: a lane has no decode step")
        save_text(path, _steps([lane[:steps] for lane in lanes], trace.model))
        beyond = sum(len(s.decode()) - steps for s in trace.streams[:n])
        left = len(trace.streams) - n
        return [
            *lost(trace, "layers"),
            "prefill rows, and decode rows in loops",
            *([f"{beyond} decode rows after the shortest lane's end"] if beyond else []),
            *([f"{left} streams beyond the {n} lanes"] if left else []),
        ]


def _steps(lanes: list[NDArray[np.uint16]], model: ModelInfo) -> Iterator[str]:
    """The JSON list. lanes: each (steps, L, K)."""
    layers = strings([f'{{"layer":{layer},"per_agent":[[' for layer in model.layer_index.tolist()])
    before = "["
    for steps in chunks(len(lanes[0]), model.n_layers * len(lanes)):
        n = (steps.stop - steps.start) * model.n_layers
        columns: list[str | Strings] = ["],["] * (2 * len(lanes) + 1)
        columns[0] = np.tile(layers, steps.stop - steps.start)
        columns[1::2] = [id_list(lane[steps].reshape(n, -1), ",") for lane in lanes]
        columns[-1] = "]]},"
        yield before + text(n, *columns)[:-1]
        before = ","
    yield "]"


FORMAT = PerAgent()
