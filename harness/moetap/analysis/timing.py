"""What expert reads cost in time, and the tokens/s that they leave possible.

Knows bytes, bandwidths and seconds. Refuses to know where the loads come from (the union of a cold
step, the misses of a replayed cache, a measurement) and which disk it is.

Of a decode step d of B lanes, with loads(d, l) experts read in layer l:

    step_bytes(d)  = sum over l of loads(d, l) x expert_bytes(l)
    io_s(d)        = step_bytes(d) / bandwidth_bps
    compute_s      = 1 / untraced tokens per second of one resident stream

A step gives each lane one token, so a lane waits a whole step for it: tokens/s per lane is
1 / step_s, in total B / step_s. Three bounds on step_s(d), averaged over the steps (a run takes the
sum of its steps' times, so times are averaged, never rates):

    io             io_s                      compute costs nothing
    full overlap   max(io_s, compute_s)      reads and compute hide each other wholly
    no overlap     io_s + compute_s          they take turns

Every tokens/s of `io` and of full overlap is an upper bound: io_s leaves out latencies, and
compute_s is that of one lane, while B lanes take at least as long. With no overlap it is the bound
for an engine that computes only while it does not read.

Mean loads may stand for loads of each step. `io` and no overlap are then the same; full overlap
gives a looser bound, since a mean of maxima is at least the maximum of the means. Times of `io` are
linear in the loads, so an interval of the loads, scaled, is one of the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moetap.errors import UsageError


@dataclass(frozen=True)
class Rate:
    """Mean time of a decode step and what follows from it. step_s is also the time that each lane
    waits for its token.
    """

    step_s: float
    n_lanes: int

    @property
    def token_s(self) -> float:
        """Time per token: step_s / B, each lane's share of the step."""
        return self.step_s / self.n_lanes

    @property
    def lane_tokens_per_s(self) -> float | None:
        """Tokens/s of one lane; None if the step takes no time (nothing is read): no bound."""
        return 1 / self.step_s if self.step_s else None

    @property
    def total_tokens_per_s(self) -> float | None:
        """Tokens/s of all lanes together; None as above."""
        return self.n_lanes / self.step_s if self.step_s else None


@dataclass(frozen=True)
class TimeBound:
    """Bounds on a decode step under one bandwidth. compute, full_overlap and no_overlap are None
    where no untraced rate is known.

    io_share: fraction of the steps in which reading takes longer than computing, None as well.
    """

    step_bytes: float  # mean
    io: Rate
    compute: Rate | None
    full_overlap: Rate | None
    no_overlap: Rate | None
    io_share: float | None


def step_bytes(loads: ArrayLike, expert_bytes: ArrayLike) -> NDArray[np.float64]:
    """Bytes read in a step.

    loads: (L,) expert loads per step in each MoE layer, a mean or of one step, or (steps, L).
    expert_bytes: (L,), or one number for all layers. Returns () or (steps,).
    """
    return np.asarray(layer_bytes(loads, expert_bytes).sum(axis=-1), dtype=np.float64)


def layer_bytes(loads: ArrayLike, expert_bytes: ArrayLike) -> NDArray[np.float64]:
    """Bytes read in a step and layer, in the shape of `loads`; divided by a bandwidth, the time
    that the layer's reads take.
    """
    experts = np.asarray(loads, dtype=np.float64)
    sizes = np.asarray(expert_bytes, dtype=np.float64)
    if experts.ndim not in (1, 2) or 0 in experts.shape:
        raise UsageError(f"loads have shape {experts.shape}, expected (L,) or (steps, L)")
    if sizes.shape not in ((), experts.shape[-1:]):
        raise UsageError(f"{sizes.shape} expert sizes for {experts.shape[-1]} layers")
    _check("loads", experts)
    _check("expert sizes", sizes)
    result: NDArray[np.float64] = experts * sizes
    return result


def time_bound(
    bytes_per_step: ArrayLike,
    n_lanes: int,
    bandwidth_bps: float,
    untraced_tokens_per_s: float | None = None,
) -> TimeBound:
    """Bounds on the decode rate of B = n_lanes.

    bytes_per_step: () mean, or (steps,) from `step_bytes`; for bytes per token, B times those.
    untraced_tokens_per_s: decode rate of one stream with the whole model in memory and nothing
    recorded. That of a streamed run contains reads already and must not be given.

    By hand: 2 lanes load 3 and 1 experts in two layers with experts of 1 MB and 2 MB, so 5 MB, in
    5 ms at 1 GB/s. With 125 tokens/s (8 ms) the step takes at least 8 ms with full overlap (125
    tokens/s a lane, 250 in total) and 13 ms with none (76.9 and 153.8).
    """
    sizes = np.asarray(bytes_per_step, dtype=np.float64)
    if sizes.ndim > 1 or sizes.size == 0:
        raise UsageError(f"bytes per step have shape {sizes.shape}, expected () or (steps,)")
    _check("bytes per step", sizes)
    if n_lanes < 1:
        raise UsageError(f"{n_lanes} lanes; at least one decodes")
    if not 0 < bandwidth_bps < math.inf:
        raise UsageError(f"a bandwidth of {bandwidth_bps:g} bytes per second; give a positive one")
    if untraced_tokens_per_s is not None and not 0 < untraced_tokens_per_s < math.inf:
        raise UsageError(f"{untraced_tokens_per_s:g} tokens/s untraced; give a positive rate")

    io_s = sizes / bandwidth_bps
    io = Rate(float(io_s.mean()), n_lanes)
    mean_bytes = float(sizes.mean())
    if untraced_tokens_per_s is None:
        return TimeBound(mean_bytes, io, None, None, None, None)
    compute_s = 1 / untraced_tokens_per_s
    return TimeBound(
        step_bytes=mean_bytes,
        io=io,
        compute=Rate(compute_s, n_lanes),
        full_overlap=Rate(float(np.maximum(io_s, compute_s).mean()), n_lanes),
        no_overlap=Rate(float((io_s + compute_s).mean()), n_lanes),
        io_share=float((io_s > compute_s).mean()),
    )


def _check(what: str, values: NDArray[np.float64]) -> None:
    if not np.all(np.isfinite(values) & (values >= 0)):
        raise UsageError(f"{what} must be finite and not negative")
