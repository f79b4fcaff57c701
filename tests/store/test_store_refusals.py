"""Whatever is not a sound trace is refused with one line; damage is never read as data."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from storekit import a_model, a_stream, content, write

from moetap.errors import MoetapError
from moetap.store import read

KIND = "softmax"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three streams with scores, closed as complete. Not to be changed."""
    path = tmp_path_factory.mktemp("sound") / "t.h5"
    streams = [a_stream(i, a_model(), rows=40, scores=True) for i in range(3)]
    write(path, streams, scores_kind=KIND, chip="Apple M4", device_json='{"memory": 17179869184}')
    return path


def refusal(path: Path) -> str:
    """The one line that `read` refuses `path` with, less the path that it must start with."""
    with pytest.raises(MoetapError) as caught:
        read(path)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{path}: ")
    return line.removeprefix(f"{path}: ")


def test_not_existing(tmp_path: Path) -> None:
    assert "no such file" in refusal(tmp_path / "t.h5")


def test_a_folder(tmp_path: Path) -> None:
    assert "is a folder" in refusal(tmp_path)


def test_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "t.h5").touch()
    assert "is empty" in refusal(tmp_path / "t.h5")


def test_not_hdf5(tmp_path: Path) -> None:
    (tmp_path / "t.h5").write_text("expert,layer\n1,2\n")
    assert "not an HDF5 file" in refusal(tmp_path / "t.h5")


def test_hdf5_but_not_ours(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "t.h5", "w") as f:
        f["weights"] = np.zeros(3)
    assert "not a trace of moetap" in refusal(tmp_path / "t.h5")


def test_unreadable(tmp_path: Path, sound: Path) -> None:
    path = Path(shutil.copy(sound, tmp_path))
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "cannot be read: Permission denied" in refusal(path)


def drop(name: str) -> Callable[[h5py.File], None]:
    def change(f: h5py.File) -> None:
        del f[name]

    return change


def drop_attribute(owner: str, name: str) -> Callable[[h5py.File], None]:
    def change(f: h5py.File) -> None:
        del f[owner].attrs[name]

    return change


def attribute(owner: str, name: str, value: Any) -> Callable[[h5py.File], None]:
    def change(f: h5py.File) -> None:
        f[owner].attrs[name] = value

    return change


def dataset(name: str, change: Callable[[Any], Any]) -> Callable[[h5py.File], None]:
    """Replaces a dataset by what `change` makes of its values."""

    def replace(f: h5py.File) -> None:
        old = f[name][...]
        del f[name]
        f[name] = change(old)

    return replace


def cell(name: str, at: Any, value: Any) -> Callable[[h5py.File], None]:
    def change(f: h5py.File) -> None:
        f[name][at] = value

    return change


REFUSED: list[tuple[str, Callable[[h5py.File], None], str]] = [
    (
        "newer version",
        attribute("/", "format_version", 2),
        "has format version 2, this moetap reads up to 1: upgrade moetap",
    ),
    ("no version", drop_attribute("/", "format_version"), "unknown format version"),
    ("version 0", attribute("/", "format_version", 0), "unknown format version"),
    ("version as text", attribute("/", "format_version", "1"), "unknown format version"),
    ("another format", attribute("/", "format", "routing"), "not a trace of moetap"),
    ("format as number", attribute("/", "format", 3), "not a trace of moetap"),
    ("no run id", drop_attribute("/", "run_id"), "attribute run_id of / is missing"),
    ("complete=2", attribute("/", "complete", 2), "attribute complete of / is no uint8"),
    ("seed as text", attribute("/capture", "seed", "7"), "attribute seed of /capture is no int64"),
    ("seed as array", attribute("/capture", "seed", [7]), "is no int64"),
    ("chip as number", attribute("/capture", "chip", 4), "is no utf-8"),
    (
        "unknown mode",
        attribute("/capture", "mode", "batched"),
        "mode is 'batched', expected resident",
    ),
    ("no model", drop("model"), "group /model is missing"),
    ("no capture", drop("capture"), "group /capture is missing"),
    ("no streams", drop("streams"), "group /streams is missing"),
    ("no experts", drop("experts"), "dataset /experts is missing"),
    ("no top_k", drop("model/top_k"), "dataset /model/top_k is missing"),
    ("no n_rows", drop("streams/n_rows"), "dataset /streams/n_rows is missing"),
    ("no scores", drop("scores"), "/scores does not agree"),
    ("unknown scores", attribute("/capture", "scores_kind", ""), "/scores does not agree"),
    ("other scores", attribute("/scores", "kind", "sigmoid"), "disagree"),
    (
        "group for a dataset",
        lambda f: (drop("tokens")(f), f.create_group("tokens"))[0],
        "dataset /tokens is missing",
    ),
    ("empty dataspace", dataset("tokens", lambda v: h5py.Empty("u4")), "/tokens has shape None"),
    (
        "uint8 experts",
        dataset("experts", lambda v: v.astype("u1")),
        "/experts has dtype uint8, expected uint16",
    ),
    ("signed tokens", dataset("tokens", lambda v: v.astype("i8")), "/tokens has dtype int64"),
    ("big-endian experts", dataset("experts", lambda v: v.astype(">u2")), "/experts has dtype >u2"),
    ("float64 scores", dataset("scores", lambda v: v.astype("f8")), "/scores has dtype float64"),
    ("numbers for ids", dataset("streams/prompt_id", lambda v: np.arange(3)), "expected utf-8"),
    (
        "text for counts",
        dataset("streams/n_rows", lambda v: np.array([b"4"] * 3)),
        "expected int64",
    ),
    ("flat experts", dataset("experts", lambda v: v.reshape(len(v), -1)), "/experts has shape"),
    ("fewer layers", dataset("experts", lambda v: v[:, :2]), "/experts has shape"),
    ("fewer slots", dataset("experts", lambda v: v[:, :, :5]), "/experts has shape"),
    ("fewer rows", dataset("experts", lambda v: v[:-1]), "/experts has shape"),
    ("more rows", dataset("tokens", lambda v: np.append(v, v)), "/tokens has shape"),
    ("short column", dataset("streams/n_prompt", lambda v: v[:-1]), "/streams/n_prompt has shape"),
    ("gap", cell("streams/first_row", 1, 41), "expected at least one from 40"),
    ("overlap", cell("streams/first_row", 2, 79), "expected at least one from 80"),
    ("negative", cell("streams/n_rows", 0, -40), "has -40 rows"),
    ("absurd count", cell("streams/n_rows", 2, 2**62), "has shape"),
    ("wrong P", cell("streams/n_prompt", 1, 22), "expected P + G - 1"),
    ("wrong loop", cell("streams/looped_from", 1, 999), "is not a decode step"),
    ("same id twice", cell("streams/prompt_id", 1, b"prompt-0"), "occurs twice"),
    ("id not UTF-8", cell("streams/prompt_id", 1, b"\xff\xfe"), "damaged"),
    ("position gap", cell("position", 3, 9), "without a gap"),
    ("id out of range", cell("experts", (3, 0, 3), 16), "is out of range"),
    ("ids fall", cell("experts", (3, 0), [9, 3, 2, 1, 65535, 65535]), "must rise"),
    ("ids repeat", cell("experts", (3, 0), [1, 1, 2, 3, 65535, 65535]), "must rise"),
    ("too few ids", cell("experts", (3, 0), [1, 2, 65535, 65535, 65535, 65535]), "has 2 ids"),
    ("layers fall", cell("model/layer_index", 0, 3), "layer_index must rise"),
    ("k above E", cell("model/top_k", 2, 9), "top_k must lie"),
]


@pytest.mark.parametrize(
    ("change", "expected"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_inconsistent(
    tmp_path: Path, sound: Path, change: Callable[[h5py.File], None], expected: str
) -> None:
    path = Path(shutil.copy(sound, tmp_path))
    with h5py.File(path, "r+") as f:
        change(f)
    assert expected in refusal(path)


def test_unknown_groups_and_attributes_are_ignored(tmp_path: Path, sound: Path) -> None:
    path = Path(shutil.copy(sound, tmp_path))
    with h5py.File(path, "r+") as f:
        f["future/misses"] = np.zeros((3, 4))
        f["notes"] = "mine"
        f.attrs["extra"] = 5
    assert content(read(path)) == content(read(sound))


def test_variable_length_strings_are_read(tmp_path: Path, sound: Path) -> None:
    """What other writers produce without asking for fixed lengths."""
    path = Path(shutil.copy(sound, tmp_path))
    with h5py.File(path, "r+") as f:
        f["capture"].attrs["chip"] = "Apple M4"
        ids = list(f["streams/prompt_id"].asstr()[...])
        del f["streams/prompt_id"]
        f["streams/prompt_id"] = ids
    assert content(read(path)) == content(read(sound))


def reads_equal_or_refuses(path: Path, expected: dict[str, Any]) -> bool:
    """True if `path` was refused; fails if it was read as something else."""
    try:
        trace = read(path)
    except MoetapError as error:
        assert str(error).startswith(f"{path}: ")
        assert "\n" not in str(error)
        return True
    assert content(trace) == expected
    return False


def test_truncations_are_refused(tmp_path: Path, sound: Path) -> None:
    data = sound.read_bytes()
    for size in np.linspace(0, len(data) - 1, 50).astype(int):
        (tmp_path / "t.h5").write_bytes(data[:size])
        refusal(tmp_path / "t.h5")


def test_flipped_bytes_are_found(tmp_path: Path, sound: Path) -> None:
    """Every byte that means something is under a checksum, of the metadata or of a chunk."""
    expected = content(read(sound))
    data = sound.read_bytes()
    rng = random.Random(5)
    refused = 0
    for _ in range(200):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= rng.randrange(1, 256)
        (tmp_path / "t.h5").write_bytes(damaged)
        refused += reads_equal_or_refuses(tmp_path / "t.h5", expected)
    assert refused > 50  # the rest hit unused space


def test_flipped_bytes_in_a_chunk_are_always_found(tmp_path: Path, sound: Path) -> None:
    with h5py.File(sound) as f:
        chunks = [
            (info.byte_offset, info.size)
            for name in ("experts", "tokens", "position", "scores", "streams/prompt_id")
            for info in map(f[name].id.get_chunk_info, range(f[name].id.get_num_chunks()))
        ]
    data = sound.read_bytes()
    for offset, size in chunks:
        damaged = bytearray(data)
        damaged[offset + size // 2] ^= 1
        (tmp_path / "t.h5").write_bytes(damaged)
        assert "damaged" in refusal(tmp_path / "t.h5")
