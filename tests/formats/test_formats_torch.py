"""Files that torch wrote, read without it."""

from __future__ import annotations

import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from formatkit import refusal
from ptfile import torch_file

from moetap.errors import MoetapError
from moetap.formats import get
from moetap.formats.base import Options

DATA = Path(__file__).parents[1] / "data/formats"  # make_sglang_stat.py there says how it was made
STAT = get("sglang-stat")


def expected() -> np.ndarray:
    p, m, e = np.ogrid[:3, :5, :8]
    counts = (7 * p + 3 * m + 5 * e) % 11
    return counts.sum(axis=0)[[1, 2, 4]]


@pytest.mark.parametrize("name", ["sglang-stat.pt", "sglang-stat-view.pt"])
def test_counts(name):
    found = STAT.read_counts(DATA / name, Options())
    assert found.layer_index.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(found.counts, expected())


def again(path: Path, change) -> None:
    """Write the committed file once more, its members through `change`."""
    with zipfile.ZipFile(DATA / "sglang-stat.pt") as old, zipfile.ZipFile(path, "w") as new:
        for member in old.infolist():
            data = change(member.filename.split("/", 1)[1], old.read(member))
            if data is not None:
                new.writestr(member.filename, data)


def test_older_files_have_fewer_members(tmp_path):
    path = tmp_path / "old.pt"
    needed = ("data.pkl", "data/0", "version")
    again(path, lambda name, data: data if name in needed else None)
    np.testing.assert_array_equal(STAT.read_counts(path, Options()).counts, expected())


def test_byte_order(tmp_path):
    path = tmp_path / "big.pt"
    again(path, lambda name, data: b"big" if name == "byteorder" else data)
    assert "big-endian" in refusal(lambda: STAT.read_counts(path, Options()))


def test_storage_that_is_cut(tmp_path):
    path = tmp_path / "cut.pt"
    again(path, lambda name, data: data[:-4] if name == "data/0" else data)
    assert "has 119 values, expected 120" in refusal(lambda: STAT.read_counts(path, Options()))


def test_file_without_zip(tmp_path):
    path = tmp_path / "old.pt"
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2))  # how they begin
    assert "save it again" in refusal(lambda: STAT.read_counts(path, Options()))


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("place", ["value", "key", "inside a list"])
@pytest.mark.parametrize("function", [os.system, eval, getattr, shutil.rmtree])
def test_a_pickle_that_calls_something(place, function, tmp_path):
    mark = tmp_path / "mark"
    call = Call(function, f"touch {mark}")
    content = {"value": {"logical_count": call}, "key": {call: 1}, "inside a list": {"a": [call]}}
    path = tmp_path / "x.pt"
    path.write_bytes(torch_file(content[place]))
    message = refusal(lambda: STAT.read_counts(path, Options()))
    assert str(path) in message and function.__name__ in message and "not allowed" in message
    assert not mark.exists()


def test_layout(tmp_path):
    path = tmp_path / "t.pt"
    counts = np.zeros((3, 4, 6), dtype=np.int32)
    counts[:, 1:] = np.arange(3 * 3 * 6).reshape(3, 3, 6)
    path.write_bytes(torch_file({"rank": 0, "logical_count": counts, "average": None}))
    found = STAT.read_counts(path, Options())
    assert found.layer_index.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(found.counts, counts.sum(axis=0)[1:])
    assert "no rows" in refusal(lambda: STAT.read(path, Options()))
    path.write_bytes(torch_file({"records": [], "last_physical_to_logical_map": counts}))
    assert "detail" in refusal(lambda: STAT.read_counts(path, Options()))
    path.write_bytes(torch_file({"logical_count": -counts}))
    assert "negative" in refusal(lambda: STAT.read_counts(path, Options()))


def test_damage(tmp_path):
    path = tmp_path / "t.pt"
    raw = torch_file({"rank": 0, "logical_count": np.ones((2, 3, 4), dtype=np.int32)})
    rng = np.random.default_rng(3)
    for at in rng.integers(0, len(raw), 300).tolist():
        damaged = bytearray(raw)
        damaged[at] ^= 1 << int(rng.integers(0, 8))
        for data in (bytes(damaged), raw[:at]):
            path.write_bytes(data)
            try:
                counts = STAT.read_counts(path, Options())
            except MoetapError as error:
                assert str(path) in str(error)
            else:
                assert counts.counts.ndim == 2
