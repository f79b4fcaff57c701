"""Intervals over streams.

Knows an estimate and what it would have been without each stream. Refuses to know (layer, step)
pairs: those of one stream are correlated, so resampling them would make every interval far too
narrow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95 % interval over streams. `low` and `high` are None where there is none;
    `why` says why."""

    value: float
    low: float | None
    high: float | None
    why: str = ""

    @property
    def half_width(self) -> float | None:
        """Half the interval (it is symmetric), None where there is none."""
        return None if self.low is None or self.high is None else (self.high - self.low) / 2

    def scaled(self, factor: float) -> Estimate:
        """The estimate of `factor` times the figure, for a positive factor."""
        low = None if self.low is None else self.low * factor
        high = None if self.high is None else self.high * factor
        return Estimate(self.value * factor, low, high, self.why)


def jackknife(value: float, left_out: NDArray[np.float64]) -> Estimate:
    """Delete-one jackknife over n streams.

    left_out: (n,) the same figure computed without stream i; NaN where no group is left without it.

        variance = (n - 1) / n x sum_i (left_out_i - mean(left_out))^2,    value -+ t(0.975, n - 1)
        x sqrt(variance)

    The figure goes in as the ratio of sums that it is, not as a mean of per-stream ratios: streams
    differ in length and a group of B streams belongs to B of them at once. Student's t, because n
    is often a few dozen or less.

    Two limits. Where routing does not differ between streams at all, a mean over groups is a
    degenerate U-statistic and the interval is too wide (it holds the true mean 99 times in 100).
    With few streams of rare kinds it is somewhat narrow, as any interval from few samples is.
    """
    from scipy.special import stdtrit

    n = len(left_out)
    if n < 2:
        return Estimate(value, None, None, "one stream")
    if np.isnan(left_out).any():
        return Estimate(value, None, None, f"without one of the {n} streams no group is left")
    variance = (n - 1) / n * float(np.sum((left_out - left_out.mean()) ** 2))
    half = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * math.sqrt(variance)
    return Estimate(value, value - half, value + half)
