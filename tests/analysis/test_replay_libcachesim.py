"""Exported traces replayed by libcachesim: the same misses as `--lookups sequential`."""

from __future__ import annotations

import numpy as np
import pytest
from lanekit import uniform_trace
from unionkit import make_model, make_stream, make_trace

from moetap import formats
from moetap.analysis.replay_study import Options, replay_study
from moetap.formats.base import Options as Export

libcachesim = pytest.importorskip("libcachesim")

PEERS = {
    "lru": "LRU",
    "belady": "Belady",
    "fifo": "FIFO",
    "lfu": "LFU",
    "clock": "Clock",
    "sieve": "Sieve",
}


def one_stream():
    """Two layers, 12 experts of which some are popular, 300 steps."""
    rng = np.random.default_rng(1)
    share = 1 / np.arange(1, 13)
    cells = [
        [set(rng.choice(12, 3, False, share / share.sum()).tolist()) for _ in range(2)]
        for _ in range(300)
    ]
    return make_trace(make_model([12, 12], [3, 3]), [make_stream("s", "", cells, (3, 3))])


def peer_misses(path, name, capacity) -> int:
    reader = libcachesim.TraceReader(str(path), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
    ratio, _ = getattr(libcachesim, name)(cache_size=capacity).process_trace(reader)
    return round(ratio * (path.stat().st_size // 24))


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("trace", [one_stream(), uniform_trace(1, 200, 2, 12, 3)])
def test_exported_requests_miss_as_often_there(trace, scope, tmp_path):
    path = tmp_path / "requests"
    formats.get("libcachesim").write(trace, path, Export(scope=scope, rows="decode"))
    files = [path] if scope == "global" else sorted(path.iterdir())
    slots = (2, 4, 7, 11)
    options = Options(tuple(PEERS), slots, scope=scope, rule="sequential")
    study = replay_study([trace], options)
    assert len(study.figures) == len(PEERS) * len(slots)
    for figure in study.figures:
        values = figure.phases["all"]
        found = [
            peer_misses(file, PEERS[figure.policy.name], int(figure.cache.slots[0]))
            for file in files
        ]
        expected = [values.misses.sum()] if scope == "global" else values.misses.tolist()
        assert found == expected, (figure.policy.name, figure.cache.label)
