"""What a streaming capture measured, summed up, and the same misses replayed.

Knows which figures the measurements of `trace.StreamIO` give and that a replay of the same decode
rows must miss exactly where the capture did. Refuses to know how the capture read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.lanes import PHASES, Lanes
from moetap.analysis.replay import replay
from moetap.errors import MoetapError
from moetap.policies.lru import LRU
from moetap.trace import NOT_EXECUTED, Stream, StreamIO, Trace

_POLICIES = {"lru": LRU}


@dataclass(frozen=True)
class Phase:
    """Sums over the decode steps of one phase ("all", "cold", "steady") of all streams.

    steps: decode steps, which are tokens. requests: experts asked for. read_s, wait_s, eval_s: sums
    over layers; step_s: over steps.
    """

    steps: int
    requests: int
    misses: int
    read_bytes: int
    read_s: float
    wait_s: float
    eval_s: float
    step_s: float

    @property
    def hit_rate(self) -> float | None:
        """1 - misses / requests."""
        return 1 - self.misses / self.requests if self.requests else None

    @property
    def bandwidth_bps(self) -> float | None:
        """Bytes read per second in which a layer's reads were under way."""
        return self.read_bytes / self.read_s if self.read_s else None


def measured(trace: Trace, phase: str = "all") -> Phase:
    """Sum up what the streams of `trace` measured; looped tails are part of it.

    Raises MoetapError if nothing was measured.
    """
    span = PHASES[phase]
    pairs = [(io, s.decode(keep_loops=True)) for s in trace.streams if (io := s.io) is not None]
    if not pairs:
        raise MoetapError(f"{trace.source or 'the trace'}: has no measured I/O; capture --stream")

    def total(name: str) -> float:
        return float(sum(getattr(io, name)[span].sum(dtype=np.float64) for io, _ in pairs))

    return Phase(
        steps=sum(len(io.step_s[span]) for io, _ in pairs),
        requests=sum(int((rows[span] != NOT_EXECUTED).sum()) for _, rows in pairs),
        misses=int(total("misses")),
        read_bytes=int(total("read_bytes")),
        read_s=total("read_s"),
        wait_s=total("wait_s"),
        eval_s=total("eval_s"),
        step_s=total("step_s"),
    )


def replayed_misses(trace: Trace, stream: Stream) -> NDArray[np.int32]:
    """(G, L) misses of the stream's decode rows, replayed from empty slots with the capture's
    policy and C.

    Raises MoetapError if the capture names none, or a policy that is not known.
    """
    capture = trace.capture
    if capture.slots is None or capture.policy not in _POLICIES:
        raise MoetapError(
            f"{trace.source or 'the trace'}: cannot be replayed with policy {capture.policy!r} and "
            f"C = {capture.slots}"
        )
    rows = stream.decode(keep_loops=True)
    lane = Lanes(
        n_experts=trace.model.n_experts,
        ids=np.ascontiguousarray(rows.transpose(1, 0, 2)),
        first_row=np.zeros(1, np.int64),
        n_steps=np.array([len(rows)], np.int64),
    )
    sets = lane.merge(np.zeros(1, np.intp))
    (found,) = replay(sets, [capture.slots], 1, _POLICIES[capture.policy]())
    return found.misses


@dataclass(frozen=True)
class Agreement:
    """Measured against replayed misses: (step, layer) cells compared and how many differ, and the
    sums of both.
    """

    cells: int
    different: int
    measured: int
    replayed: int


def agreement(trace: Trace) -> Agreement:
    """Compare every cell of every stream. They MUST agree: the same policy saw the same requests.

    Raises MoetapError as `replayed_misses`, and if nothing was measured.
    """
    streams: list[tuple[Stream, StreamIO]] = [
        (s, io) for s in trace.streams if (io := s.io) is not None
    ]
    if not streams:
        raise MoetapError(f"{trace.source or 'the trace'}: has no measured I/O; capture --stream")
    pairs = [(io.misses, replayed_misses(trace, s)) for s, io in streams]
    return Agreement(
        cells=sum(a.size for a, _ in pairs),
        different=sum(int((a != b).sum()) for a, b in pairs),
        measured=sum(int(a.sum(dtype=np.int64)) for a, _ in pairs),
        replayed=sum(int(b.sum(dtype=np.int64)) for _, b in pairs),
    )
