"""What a streaming capture measured, summed up, and the same misses replayed.

Knows which figures the measurements of `trace.StreamIO` give, that a replay of the same decode rows
must miss exactly where the capture did, and when times are not to be trusted. Refuses to know how
the capture read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.lanes import PHASES
from moetap.analysis.replay import replay
from moetap.errors import MoetapError
from moetap.policies import StepSets, get
from moetap.trace import NOT_EXECUTED, Stream, StreamIO, Trace

SWAP_LIMIT_BYTES = 100_000_000
"""Swap growth beyond which the times of a capture are not those of a machine at ease."""


@dataclass(frozen=True)
class Phase:
    """Sums over the decode steps of one phase ("all", "cold", "steady") of all streams.

    steps: decode steps, which are tokens. requests: experts asked for. miss_bytes: what the misses
    alone take, sum over layers of misses x expert_bytes. read_s, wait_s, eval_s: sums over layers;
    step_s: over steps.
    """

    steps: int
    requests: int
    misses: int
    miss_bytes: int
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

    def per_token(self, total: float) -> float | None:
        """A sum over layers and steps, divided by the steps; None if there are none."""
        return total / self.steps if self.steps else None


def measured(trace: Trace, phase: str = "all", keep_loops: bool = False) -> Phase:
    """Sum up what the streams of `trace` measured, without looped tails unless `keep_loops`.

    Raises MoetapError if nothing was measured.

    By hand: two steps of one layer that asks for 2 experts of 10 bytes each time, with 2 misses and
    then 1: 3 misses of 4 requests, a hit rate of 25 %, 1.5 misses and 15 bytes a token.
    """
    span = PHASES[phase]
    pairs = [(io, s.decode(keep_loops)) for s, io in _with_io(trace)]

    def total(name: str) -> NDArray[np.float64]:
        """Over steps; (L,) or (), as the field has layers or not."""
        parts = [getattr(io, name)[: len(rows)][span] for io, rows in pairs]
        return np.asarray(sum(part.sum(axis=0, dtype=np.float64) for part in parts))

    misses = total("misses")
    return Phase(
        steps=sum(len(rows[span]) for _, rows in pairs),
        requests=sum(int((rows[span] != NOT_EXECUTED).sum()) for _, rows in pairs),
        misses=int(misses.sum()),
        miss_bytes=int(misses @ trace.model.expert_bytes),
        read_bytes=int(total("read_bytes").sum()),
        read_s=float(total("read_s").sum()),
        wait_s=float(total("wait_s").sum()),
        eval_s=float(total("eval_s").sum()),
        step_s=float(total("step_s")),
    )


def replayed_misses(trace: Trace, stream: Stream) -> NDArray[np.int32]:
    """(G, L) misses of the stream's decode rows, replayed from empty slots with the capture's
    policy and C.

    Raises MoetapError if the capture names none, or a policy that is not known or cannot have been
    at work in it.
    """
    capture = trace.capture
    where = f"{_name(trace)}: cannot be replayed with policy {capture.policy!r}"
    if capture.slots is None or capture.policy is None:
        raise MoetapError(f"{where} and C = {capture.slots}")
    try:
        policy = get(capture.policy)
    except MoetapError as error:
        raise MoetapError(f"{where}: {error}") from None
    if policy.offline or policy.fitted:
        raise MoetapError(f"{where}: it needs to be told what the capture could not know")
    rows = stream.decode(keep_loops=True).transpose(1, 0, 2)  # (L, G, K)
    selected = rows != NOT_EXECUTED
    starts = np.zeros(rows.shape[0] * rows.shape[1] + 1, dtype=np.int64)
    np.cumsum(selected.sum(axis=2).ravel(), out=starts[1:])
    sets = StepSets(
        n_steps=stream.n_generated,
        n_experts=trace.model.n_experts,
        starts=starts,
        ids=rows[selected],  # ascending already
        ran=selected.any(axis=2),
    )
    (found,) = replay(sets, [capture.slots], 1, policy)
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
    """Compare every cell of every stream, looped tails included. They MUST agree: the same policy
    saw the same requests.

    Raises MoetapError as `replayed_misses`, and if nothing was measured.
    """
    streams = _with_io(trace)
    return _agreement(streams, [replayed_misses(trace, stream) for stream, _ in streams])


@dataclass(frozen=True)
class Line:
    """One phase. replayed: misses, over the same steps as `measured`; None if not replayed."""

    phase: str
    measured: Phase
    replayed: int | None


@dataclass(frozen=True)
class Comparison:
    """What one trace measured, next to its replay with the same policy and C.

    agreement: of all cells; None if there is no replay, and `missing` says why.
    """

    source: str
    run_id: str
    policy: str | None
    slots: int | None
    cold_reads: bool | None
    swap_growth_bytes: int | None
    keep_loops: bool
    lines: tuple[Line, ...]
    agreement: Agreement | None
    missing: str


def compare(trace: Trace, keep_loops: bool = False) -> Comparison:
    """Every phase of `trace`, measured and replayed; looped tails count for the agreement, which is
    about the engine, but for no figure unless `keep_loops`.

    Raises MoetapError if nothing was measured.
    """
    streams = _with_io(trace)
    replays: list[NDArray[np.int32]] | None = None
    missing = ""
    try:
        replays = [replayed_misses(trace, stream) for stream, _ in streams]
    except MoetapError as error:
        missing = str(error)

    def replayed(phase: str) -> int | None:
        if replays is None:
            return None
        return sum(
            int(found[: len(stream.decode(keep_loops))][PHASES[phase]].sum(dtype=np.int64))
            for (stream, _), found in zip(streams, replays, strict=True)
        )

    capture = trace.capture
    return Comparison(
        source=trace.source,
        run_id=trace.run_id,
        policy=capture.policy,
        slots=capture.slots,
        cold_reads=capture.cold_reads,
        swap_growth_bytes=capture.swap_growth_bytes,
        keep_loops=keep_loops,
        lines=tuple(
            Line(phase, measured(trace, phase, keep_loops), replayed(phase)) for phase in PHASES
        ),
        agreement=None if replays is None else _agreement(streams, replays),
        missing=missing,
    )


def has_io(trace: Trace) -> bool:
    """The capture measured what its decode steps read, and has a stream."""
    return any(stream.io is not None for stream in trace.streams)


def _agreement(
    streams: Sequence[tuple[Stream, StreamIO]], replays: Sequence[NDArray[np.int32]]
) -> Agreement:
    pairs = [(io.misses, found) for (_, io), found in zip(streams, replays, strict=True)]
    return Agreement(
        cells=sum(a.size for a, _ in pairs),
        different=sum(int((a != b).sum()) for a, b in pairs),
        measured=sum(int(a.sum(dtype=np.int64)) for a, _ in pairs),
        replayed=sum(int(b.sum(dtype=np.int64)) for _, b in pairs),
    )


def _with_io(trace: Trace) -> list[tuple[Stream, StreamIO]]:
    found = [(stream, stream.io) for stream in trace.streams if stream.io is not None]
    if not found:
        raise MoetapError(f"{_name(trace)}: has no measured I/O; capture --stream")
    return found


def _name(trace: Trace) -> str:
    return trace.source or "the trace"
