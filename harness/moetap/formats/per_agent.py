"""Steps of several agents that decode together: JSON [{layer, per_agent: [[ids], ...]}, ...].

Knows that lane i is stream i, that steps are matched decode steps and that the group ends at its
shortest stream.
"""

from __future__ import annotations

import json
from pathlib import Path

from moetap.errors import MoetapError, UsageError
from moetap.formats.base import Base, Options, lost, save
from moetap.trace import NOT_EXECUTED, Trace


class PerAgent(Base):
    name = "per-agent"
    direction = "export"
    summary = "per-agent decode steps as JSON; B lanes at matched steps"
    write_options = ("lanes",)

    def write(self, trace: Trace, path: Path, options: Options) -> list[str]:
        n = options.lanes or len(trace.streams)
        if not 1 <= n <= len(trace.streams):
            raise UsageError(f"--lanes {n}: the trace has {len(trace.streams)} streams")
        lanes = [s.decode() for s in trace.streams[:n]]
        steps = min(len(lane) for lane in lanes)
        if not steps:
            raise MoetapError(f"{trace.source or 'trace'}: a lane has no decode step")
        out = [
            {
                "layer": layer,
                "per_agent": [
                    [e for e in lane[step, order].tolist() if e != NOT_EXECUTED] for lane in lanes
                ],
            }
            for step in range(steps)
            for order, layer in enumerate(trace.model.layer_index.tolist())
        ]
        save(path, json.dumps(out, separators=(",", ":")).encode())
        beyond = sum(len(s.decode()) - steps for s in trace.streams[:n])
        left = len(trace.streams) - n
        return [
            *lost(trace, "layers"),
            "prefill rows, and decode rows in loops",
            *([f"{beyond} decode rows after the shortest lane's end"] if beyond else []),
            *([f"{left} streams beyond the {n} lanes"] if left else []),
        ]


FORMAT = PerAgent()
