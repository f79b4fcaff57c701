"""Streams of one model, from one trace or several.

Knows which traces may be put together and what must be said about the result: what is incomplete,
what was left out. Knows no metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.errors import MoetapError, UsageError
from moetap.trace import ModelInfo, Stream, Trace


@dataclass(frozen=True)
class Origin:
    """One pooled trace: where it came from and how it was sampled."""

    source: str
    run_id: str
    complete: bool
    n_streams: int
    n_planned: int  # streams that a complete run has, 0 when not recorded
    temp: float
    top_p: float
    seed: int
    untraced_tokens_per_s: float | None  # decode rate of one resident stream, None if not known
    imported: bool  # of another tool's file: 0 and None mean "not recorded"
    prefill_step: int
    expert_kernel: str | None
    swap_growth_bytes: int | None

    @property
    def numerics(self) -> dict[str, str]:
        """What decides which way a near tie of the router falls, in words, as far as recorded. Of
        two traces that differ here neither is wrong, but they are not the same to the bit.
        """
        found = {}
        if not self.imported:
            found["expert kernel"] = self.expert_kernel or "mlx-lm's choice"
        if self.prefill_step:
            found["prefill step"] = str(self.prefill_step)
        return found


@dataclass(frozen=True)
class Difference:
    """Two pooled traces that were not computed alike. values: what it is, in the first and in the
    second trace."""

    first: Origin
    second: Origin
    values: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, eq=False)
class Pool:
    """The decode rows of all streams that have any.

    rows: per stream (steps, L, K) uint16, looped tails left out unless kept. classes: per stream.
    n_looped, n_looped_rows: streams with a looped tail, and the decode rows in those tails.
    n_empty: streams that have no decode row left.
    n_repeated: streams left out because an earlier one has the same prompt (by its hash): streams
        of one prompt share more than independent ones and would make every interval too narrow.
    """

    model: ModelInfo
    origins: tuple[Origin, ...]
    rows: tuple[NDArray[np.uint16], ...]
    classes: tuple[str, ...]
    keep_loops: bool
    n_looped: int
    n_looped_rows: int
    n_empty: int
    n_repeated: int

    @property
    def complete(self) -> bool:
        """False if any of the traces is incomplete."""
        return all(origin.complete for origin in self.origins)

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Traces that were not computed alike. Each trace is held against the first one that
        recorded the value in question, which finds every value that occurs without naming every
        pair. What a trace does not record is no difference.
        """
        first: dict[str, Origin] = {}
        found: dict[tuple[int, int], list[tuple[str, str, str]]] = {}
        for at, origin in enumerate(self.origins):
            for what, value in origin.numerics.items():
                earlier = first.setdefault(what, origin)
                other = earlier.numerics[what]
                if other != value:
                    key = (self.origins.index(earlier), at)
                    found.setdefault(key, []).append((what, other, value))
        return tuple(
            Difference(self.origins[i], self.origins[j], tuple(values))
            for (i, j), values in found.items()
        )

    @property
    def untraced_tokens_per_s(self) -> float | None:
        """The slowest of the traces' machines; None unless every trace knows its rate."""
        rates = [origin.untraced_tokens_per_s for origin in self.origins]
        return None if None in rates else min(rate for rate in rates if rate is not None)

    @property
    def n_streams(self) -> int:
        """N, the streams that groups are drawn from."""
        return len(self.rows)


def pool(traces: Sequence[Trace], keep_loops: bool = False) -> Pool:
    """Put the streams of traces of one model together.

    Streams are told apart by place, not by prompt id, which may mean different prompts in different
    traces. Of streams of one prompt the first counts.

    Raises:
        UsageError: the traces are of different models, or two are the same run.
        MoetapError: no stream has a decode row.
    """
    if not traces:
        raise UsageError("no trace given")
    for i, trace in enumerate(traces):
        _check_same_model(traces[0], trace)
        for earlier in traces[:i]:
            # The same streams twice would pose as independent ones that share everything.
            if trace.run_id and trace.run_id == earlier.run_id:
                raise UsageError(
                    f"{_name(earlier)} and {_name(trace)} are the same run ({trace.run_id}); "
                    "name it once"
                )
    everything = [stream for trace in traces for stream in trace.streams]
    streams = _first_of_each_prompt(everything)
    looped = [stream for stream in streams if stream.looped_from >= 0]
    decoded = [(stream.decode(keep_loops), stream.cls) for stream in streams]
    kept = [(rows, cls) for rows, cls in decoded if len(rows)]
    if not kept:
        raise MoetapError(f"{', '.join(map(_name, traces))}: no stream has a decode row to analyse")
    return Pool(
        model=traces[0].model,
        origins=tuple(_origin(trace) for trace in traces),
        rows=tuple(rows for rows, _ in kept),
        classes=tuple(cls for _, cls in kept),
        keep_loops=keep_loops,
        n_looped=len(looped),
        n_looped_rows=sum(stream.n_generated - stream.looped_from for stream in looped),
        n_empty=len(streams) - len(kept),
        n_repeated=len(everything) - len(streams),
    )


def _first_of_each_prompt(streams: Sequence[Stream]) -> list[Stream]:
    """Without later streams of a prompt seen before. Streams without a hash are all kept."""
    seen: set[str] = set()
    first = []
    for stream in streams:
        if not stream.prompt_sha256 or stream.prompt_sha256 not in seen:
            seen.add(stream.prompt_sha256)
            first.append(stream)
    return first


def _name(trace: Trace) -> str:
    return trace.source or f"trace {trace.run_id}"


def _origin(trace: Trace) -> Origin:
    return Origin(
        source=trace.source,
        run_id=trace.run_id,
        complete=trace.complete,
        n_streams=len(trace.streams),
        n_planned=trace.capture.n_prompts,
        temp=trace.capture.temp,
        top_p=trace.capture.top_p,
        seed=trace.capture.seed,
        untraced_tokens_per_s=trace.capture.untraced_tokens_per_s,
        imported=trace.capture.imported,
        prefill_step=trace.capture.prefill_step,
        expert_kernel=trace.capture.expert_kernel,
        swap_growth_bytes=trace.capture.swap_growth_bytes,
    )


def _check_same_model(a: Trace, b: Trace) -> None:
    for field, words in (
        ("config_sha256", "configs"),
        ("weights_sha256", "weights"),
        ("layer_index", "MoE layers"),
        ("n_experts", "numbers of experts"),
        ("top_k", "top-k"),
        ("expert_bytes", "expert sizes"),
    ):
        if not np.array_equal(getattr(a.model, field), getattr(b.model, field)):
            raise UsageError(
                f"{_name(a)} and {_name(b)} are of different models ({a.model.id} and {b.model.id} "
                f"differ in their {words}); analyse them one at a time, or with --by model"
            )
