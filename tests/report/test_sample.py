"""The committed sample trace: the tables beside it are what the analysis makes of it today."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest

from moetap.analysis.pool import pool
from moetap.analysis.unions import union_table
from moetap.cli import main
from moetap.store import read

SAMPLE = Path(__file__).parents[2] / "traces" / "sample"


def test_tables_are_those_beside_the_trace(capsys, monkeypatch):
    monkeypatch.chdir(SAMPLE.parents[1])
    assert main(["analyze", "traces/sample/demo.h5"]) == 0
    assert capsys.readouterr().out == (SAMPLE / "demo.txt").read_text()


@pytest.mark.parametrize("b", [2, 4])
def test_mean_union_equals_enumeration_with_sets(b):
    """Every group of b streams, every common decode step, every layer, as Python sets."""
    trace = read(SAMPLE / "demo.h5")
    rows = [stream.decode().tolist() for stream in trace.streams]
    total = n = 0
    for group in combinations(rows, b):
        for cells in zip(*group, strict=False):  # ends at the shortest stream
            for ids in zip(*cells, strict=True):
                total += len(set().union(*ids))
                n += 1
    table = union_table(pool([trace]), sizes=[b])
    (line,) = [f for f in table.select(table.strata[0], ("overall",)) if f.b == b]
    assert line.values is not None
    assert line.values.union.value == pytest.approx(total / n, rel=1e-12)
