"""Routing without structure, and the numbers inside a result."""

from __future__ import annotations

import dataclasses

import numpy as np
from unionkit import make_model, make_stream, make_trace


def uniform_trace(n_streams, n_steps, n_layers, n_experts, k, seed=0):
    """What shuffling the ids of each cell gives: every set of k is equally likely."""
    rng = np.random.default_rng(seed)
    streams = []
    for i in range(n_streams):
        ids = rng.random((n_steps, n_layers, n_experts)).argpartition(k, axis=2)[:, :, :k]
        cells = [[set(layer) for layer in step] for step in ids.tolist()]
        streams.append(make_stream(f"s{i}", ("x", "y")[i % 2], cells, (k,) * n_layers))
    return make_trace(make_model([n_experts] * n_layers, [k] * n_layers), streams)


def numbers(value):
    """Every number inside a result."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from numbers(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, np.ndarray) and value.dtype.kind in "fiu":
        yield from value.ravel().tolist()
    elif isinstance(value, (int, float)):
        yield value
