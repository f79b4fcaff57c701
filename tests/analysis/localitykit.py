"""A small trace for the locality figures, and the figures worked out with Python sets."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
from unionkit import make_model, make_stream, make_trace

from moetap.trace import NOT_EXECUTED, Trace


def locality_trace(**fields) -> Trace:
    """Top-2 of 4 and top-1 of 4; y ends after three steps and skips layer 1 at step 1."""
    x = [[{0, 1}, {0}], [{0, 2}, {0}], [{1, 2}, {1}], [{0, 1}, {0}]]
    y = [[{0, 1}, {0}], [{0, 1}, set()], [{2, 3}, {2}]]
    streams = [make_stream("x", "code", x, (2, 1)), make_stream("y", "agentic", y, (2, 1))]
    return make_trace(make_model((4, 4), (2, 1), layer_index=[3, 5]), streams, **fields)


def trace_of(ids: np.ndarray, n_experts: int, classes=("code", "agentic")) -> Trace:
    """A trace of ids (S, steps, L, k)."""
    n, _, n_layers, k = ids.shape
    streams = [
        make_stream(
            f"s{i}", classes[i % len(classes)], [[set(c) for c in row] for row in s], [k] * n_layers
        )
        for i, s in enumerate(ids.tolist())
    ]
    assert len(streams) == n
    return make_trace(make_model([n_experts] * n_layers, [k] * n_layers), streams)


class LocalityTwin:
    """Every locality figure, selection by selection."""

    def __init__(self, trace: Trace, half) -> None:
        self.model = trace.model
        self.classes = [s.cls for s in trace.streams]
        self.half = half
        self.cells = [
            [[set(c.tolist()) - {NOT_EXECUTED} for c in row] for row in s.decode()]
            for s in trace.streams
        ]
        self.n = len(self.cells)

    def pairs(self, lag: int, layers: slice):
        """(stream, layer, overlap / k) of every pair of executed steps."""
        for s, steps in enumerate(self.cells):
            for layer in range(self.model.n_layers)[layers]:
                for d in range(lag, len(steps)):
                    a, b = steps[d - lag][layer], steps[d][layer]
                    if a and b:
                        yield s, layer, len(a & b) / len(a)

    def overlap(self, lag: int, layers: slice, without=None):
        found = [o for s, _, o in self.pairs(lag, layers) if s != without]
        return sum(found) / len(found) if found else None

    def shuffled(self, layer: int, stream=None):
        """Mean overlap / k over all ordered pairs of different cells of a layer, or of a stream."""
        cells = [
            step[layer]
            for s, steps in enumerate(self.cells)
            for step in steps
            if step[layer] and stream in (None, s)
        ]
        found = [len(a & b) / len(a) for a, b in permutations(cells, 2)]
        return sum(found) / len(found)

    def baselines(self, lag: int, layers: slice):
        """Shuffled over all streams, and within each, over the pairs of `overlap`."""
        found = [(s, layer) for s, layer, _ in self.pairs(lag, layers)]
        popular = {layer: self.shuffled(layer) for layer in {la for _, la in found}}
        own = {key: self.shuffled(key[1], key[0]) for key in set(found)}
        return (
            sum(popular[layer] for _, layer in found) / len(found),
            sum(own[key] for key in found) / len(found),
        )

    def reuse(self, layers: slice):
        """First uses, and Counters of distance and time."""
        first, distance, time = 0, Counter(), Counter()
        for steps in self.cells:
            for layer in range(self.model.n_layers)[layers]:
                for d, step in enumerate(steps):
                    for e in step[layer]:
                        uses = [b for b in range(d) if e in steps[b][layer]]
                        if not uses:
                            first += 1
                            continue
                        between = steps[uses[-1] + 1 : d]
                        distance[len(set().union(*(b[layer] for b in between)))] += 1
                        time[d - uses[-1]] += 1
        return first, distance, time

    def lru(self, capacity: int, layers: slice, phase: slice):
        """Hits and look-ups of step-atomic LRU, slot by slot; larger ids of a step are younger."""
        hits = lookups = 0
        for steps in self.cells:
            for layer in range(self.model.n_layers)[layers]:
                held: list[int] = []  # oldest first
                for d, step in enumerate(steps):
                    want = sorted(step[layer])
                    if d in range(len(steps))[phase]:
                        hits += len(set(held) & set(want))
                        lookups += len(want)
                    for e in want:
                        if e not in held:
                            if len(held) == capacity:
                                held.remove(next(h for h in held if h not in want))
                            held.append(e)
                    held = [h for h in held if h not in want] + want
        return hits, lookups

    def counts(self, streams, layer: int) -> Counter:
        return Counter(e for s in streams for step in self.cells[s] for e in step[layer])

    def hot(self, n: int, layers: slice, sides):
        """Hits and selections, chosen on the first and tested on the second of each of `sides`."""
        hits = total = 0
        for layer in range(self.model.n_layers)[layers]:
            fits = [(self.counts(a, layer), self.counts(b, layer)) for a, b in sides]
            if not all(fit and test for fit, test in fits):
                continue
            for fit, test in fits:
                chosen = sorted(range(self.model.n_experts[layer]), key=lambda e: (-fit[e], e))[:n]
                hits += sum(test[e] for e in chosen)
                total += sum(test.values())
        return hits, total

    def halves(self, cls=None):
        return [
            [s for s in range(self.n) if self.half[s] == h and cls in (None, self.classes[s])]
            for h in (0, 1)
        ]

    def neighbours(self, target: str, layer: int, streams):
        """(source cell, guessed cell) of a layer."""
        found = []
        for s in streams:
            steps = self.cells[s]
            for d in range(len(steps)):
                if target == "next layer":
                    pair = (steps[d][layer - 1], steps[d][layer])
                elif d:
                    pair = (steps[d - 1][layer], steps[d][layer])
                else:
                    continue
                if all(pair):
                    found.append(pair)
        return found

    def lift(self, layer: int, fit, test):
        """Sum of the lifts of `fit` over the selected pairs of `test`, and their number."""
        total, pairs = 0.0, 0
        for a, b in test:
            for e in a:
                for f in b:
                    n_e = sum(e in x for x, _ in fit)
                    n_f = sum(f in y for _, y in fit)
                    both = sum(e in x and f in y for x, y in fit)
                    total += both * len(fit) / (n_e * n_f) if n_e * n_f else 1.0
                    pairs += 1
        return total, pairs

    def repeats(self, layer: int):
        """As `guesses`, for the experts that the stream used last."""
        found = []
        for steps in self.cells:
            last: dict[int, int] = {}
            for d, step in enumerate(steps):
                b = step[layer]
                if d and b and steps[d - 1][layer]:
                    order = sorted(last, key=lambda e: (-last[e], -e))
                    found.append(tuple(len(b & set(order[: m * len(b)])) / len(b) for m in (1, 2)))
                last |= dict.fromkeys(b, d)
        return found

    def guesses(self, target: str, method: str, layer: int):
        """(share of the cell among k guesses, among 2k) of every guessed cell."""
        sides = [self.neighbours(target, layer, side) for side in self.halves()]
        if not all(sides):
            return []
        experts = range(self.model.n_experts[layer])
        found = []
        for fit, test in (sides, sides[::-1]):
            q = [sum(f in y for _, y in fit) / len(fit) for f in experts]
            for a, b in test:
                score = [np.float32(0)] * len(experts)
                for e in sorted(a):
                    n_e = sum(e in x for x, _ in fit)
                    for f in experts:
                        both = sum(e in x and f in y for x, y in fit)
                        score[f] += np.float32((both + q[f]) / (n_e + 1))
                if method == "popularity":
                    score = q
                order = sorted(experts, key=lambda f: (-score[f], f))
                found.append(tuple(len(b & set(order[: m * len(b)])) / len(b) for m in (1, 2)))
        return found


def entropy(counts: Counter) -> float:
    n = sum(counts.values())
    return -sum(c / n * math.log2(c / n) for c in counts.values())
