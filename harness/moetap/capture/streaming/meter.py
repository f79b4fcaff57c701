"""What the decode steps of a stream missed, read and waited for.

Knows how a step's figures are collected, layer by layer. Refuses to know where they come from.
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from moetap.capture.streaming.reads import Done
from moetap.trace import StreamIO


class Meter:
    """Collects the decode steps of one stream over `n_layers` MoE layers."""

    def __init__(self, n_layers: int) -> None:
        self._n_layers = n_layers
        self.start()

    def start(self) -> None:
        """Forget what was collected: a stream begins."""
        self._steps: list[list[tuple[int, int, float, float, float]]] = []
        self._begins: list[float] = []

    def step(self) -> None:
        """A decode step begins."""
        self._begins.append(perf_counter())
        self._steps.append([(0, 0, 0.0, 0.0, 0.0)] * self._n_layers)

    def note(self, layer: int, eval_s: float, misses: int, done: Done | None) -> None:
        """Of the step's `layer`: the time for which its indices were waited for, and its reads."""
        read = (done.n_bytes, done.read_s, done.wait_s) if done else (0, 0.0, 0.0)
        self._steps[-1][layer] = (misses, *read, eval_s)

    def take(self, n_steps: int) -> StreamIO:
        """The first n_steps steps. mlx-lm runs one more, whose output nobody sees; its beginning
        ends the last step.
        """
        begins = [*self._begins, perf_counter()][: n_steps + 1]
        cells = list(zip(*(c for step in self._steps[:n_steps] for c in step), strict=True))
        shape = (n_steps, self._n_layers)
        dtypes = (np.uint16, np.int64, np.float32, np.float32, np.float32)
        columns = [np.array(c, t).reshape(shape) for c, t in zip(cells, dtypes, strict=True)]
        misses, n_bytes, read_s, wait_s, eval_s = columns
        steps = np.diff(begins).astype(np.float32)
        return StreamIO(misses, n_bytes, read_s, wait_s, eval_s, steps)
