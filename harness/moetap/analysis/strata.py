"""Which groups of streams and which layers a figure is about.

Knows classes, strata and depth groups. Knows no metric: every table of moetap is split the same
way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moetap.analysis.pool import Pool

MAX_DEPTH_GROUPS = 4


@dataclass(frozen=True, eq=False)
class Stratum:
    """A set of groups of B streams.

    kind: "all" (any streams), "class" (all of one class) or "mixed" (of two classes at least).
    members: (n,) indices into the pool's streams.
    class_sizes: streams per class among the members.
    """

    name: str
    kind: str
    members: NDArray[np.intp]
    class_sizes: tuple[int, ...]

    @property
    def n_streams(self) -> int:
        """Streams that the groups are made of."""
        return len(self.members)

    def n_groups(self, b: int) -> int:
        """C(n, b) groups of `b` distinct streams; mixed ones without those inside one class."""
        inside = sum(math.comb(n, b) for n in self.class_sizes) if self.kind == "mixed" else 0
        return math.comb(self.n_streams, b) - inside

    def why_none(self, b: int) -> str:
        """Why there is no group of `b` streams, "" if there is one."""
        if self.n_groups(b):
            return ""
        if self.n_streams >= b:
            return "a single stream is of one class"
        return f"{self.n_streams} stream{'s' if self.n_streams != 1 else ''}"


def strata(pool: Pool) -> tuple[Stratum, ...]:
    """All streams; then each class by name; then mixed groups if there are several classes."""
    classes = class_names(pool)
    members = [np.flatnonzero(np.array(pool.classes) == cls) for cls in classes]
    sizes = tuple(len(m) for m in members)
    every = np.arange(pool.n_streams)
    found = [Stratum("all", "all", every, sizes)]
    for cls, own in zip(classes, members, strict=True):
        # The names of the other strata are taken.
        name = f"class {cls}" if cls in ("all", "mixed", "") else cls
        found.append(Stratum(name.strip(), "class", own, (len(own),)))
    if len(classes) > 1:
        found.append(Stratum("mixed", "mixed", every, sizes))
    return tuple(found)


def class_names(pool: Pool) -> list[str]:
    """Distinct classes of the pool's streams, sorted."""
    return sorted(set(pool.classes))


@dataclass(frozen=True)
class Layers:
    """A contiguous range of MoE layers, [start, stop) by ordinal. kind: "overall", "group" or
    "layer"."""

    label: str  # absolute decoder layers, "10-19"
    kind: str
    start: int
    stop: int

    @property
    def span(self) -> slice:
        """Index into an array over the MoE layers."""
        return slice(self.start, self.stop)


def layer_groups(layer_index: NDArray[np.int64]) -> tuple[Layers, ...]:
    """All MoE layers; at most MAX_DEPTH_GROUPS depth groups of near-equal size; each layer.

    layer_index: (L,) absolute decoder layers, used for the labels.
    """
    n = len(layer_index)
    found = [Layers("all", "overall", 0, n)]
    for part in np.array_split(np.arange(n), min(MAX_DEPTH_GROUPS, n)):
        first, last = layer_index[part[0]], layer_index[part[-1]]
        label = f"{first}" if first == last else f"{first}-{last}"
        found.append(Layers(label, "group", int(part[0]), int(part[-1]) + 1))
    found += [Layers(str(index), "layer", i, i + 1) for i, index in enumerate(layer_index)]
    return tuple(found)
