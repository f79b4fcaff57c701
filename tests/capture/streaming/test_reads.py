"""Reads fill exactly their buffers, whatever the system does to them."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys

import numpy as np
import pytest

from moetap.capture.streaming import reads
from moetap.capture.streaming.reads import Reader
from moetap.errors import MoetapError

SIZE = 300_001


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()


@pytest.fixture
def path(tmp_path, content):
    path = tmp_path / "shard"
    path.write_bytes(content)
    return path


@pytest.fixture(params=[False, True], ids=["buffered", "cold"])
def reader(request, path):
    reader = Reader([path], cold=request.param)
    yield reader
    reader.close()


def read(reader, path, begin, sizes):
    memory = bytearray(sum(sizes) + 2)
    ends = np.cumsum([1, *sizes])
    view = memoryview(memory)
    buffers = [view[a:b] for a, b in zip(ends, ends[1:], strict=False)]
    starts = begin + np.cumsum([0, *sizes[:-1]])
    runs = reader.runs((path, int(b), size) for b, size in zip(starts, sizes, strict=True))
    assert [run[1:] for run in runs] == [(begin, tuple(range(len(sizes))))]
    done = reader.submit([(runs, buffers)]).wait()
    assert (memory[0], memory[-1]) == (0, 0)
    assert done.n_bytes == sum(sizes) and min(done.wait_s, done.read_s) >= 0
    return bytes(memory[1:-1])


RANGES = [(0, [1]), (4095, [2, 4096]), (8192, [4096]), (SIZE - 5, [5]), (1000, [100_000, 7, 50])]


@pytest.mark.parametrize(("begin", "sizes"), RANGES)
def test_ranges(reader, path, content, begin, sizes):
    assert read(reader, path, begin, sizes) == content[begin : begin + sum(sizes)]


@pytest.mark.parametrize(("begin", "sizes"), RANGES)
def test_short_reads(reader, path, content, begin, sizes, monkeypatch):
    real, cold = os.preadv, reader._files[path].method == "O_DIRECT"
    at_once = 8192 if cold else 3

    def short(fd, buffers, offset):
        return real(fd, [buffers[0][:at_once]], offset)

    sizes = [min(s, 1000) for s in sizes]
    monkeypatch.setattr(reads.os, "preadv", short)
    assert read(reader, path, begin, sizes) == content[begin : begin + sum(sizes)]


def test_one_failure_is_retried_and_two_are_not(reader, path, content, monkeypatch):
    real, left = os.preadv, [1]

    def failing(fd, buffers, offset):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(reads.os, "preadv", failing)
    assert read(reader, path, 5, [10]) == content[5:15]
    left[0] = 2
    with pytest.raises(MoetapError, match=r"shard: reading at byte .* failed twice \(Input/output"):
        read(reader, path, 5, [10])
    assert read(reader, path, 5, [10]) == content[5:15]


def test_truncated_and_changed_files(reader, path, content):
    reader.check()
    os.truncate(path, 50_000)
    with pytest.raises(MoetapError, match="expected 300,001 bytes, nothing from byte"):
        read(reader, path, 60_000, [10])
    with pytest.raises(MoetapError, match=r"was changed .* \(300,001 bytes then, 50,000 now\)"):
        reader.check()
    path.unlink()
    with pytest.raises(MoetapError, match="has gone"):
        reader.check()


def test_replaced_file(reader, path, content):
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").replace(path)
    with pytest.raises(MoetapError, match="was changed"):
        reader.check()


def test_missing_file_and_permission(tmp_path, path, monkeypatch):
    with pytest.raises(MoetapError, match="none: cannot be opened"):
        Reader([path, tmp_path / "none"])
    # As root, permissions do not refuse: refuse in their place.
    monkeypatch.setattr(
        reads.os, "open", lambda *a: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
    )
    with pytest.raises(MoetapError, match="shard: cannot be opened .Permission denied"):
        Reader([path])


def test_threads_and_files_go_with_a_reader_that_nobody_closes(path):
    reader = Reader([path])
    threads, fd = reader._threads, reader._files[path].fd
    assert all(thread.is_alive() for thread in threads)
    del reader
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_exit_waits_for_reads_in_flight(path):
    """A read that ends after the interpreter has taken its memory apart would write anywhere."""
    code = f"""
import os, time
from pathlib import Path
from moetap.capture.streaming.reads import Reader
real = os.preadv
def slow(*args):
    time.sleep(0.5)
    n = real(*args)
    print("read", n, flush=True)
    return n
os.preadv = slow
path = Path({str(path)!r})
reader = Reader([path])
reader.submit([(reader.runs([(path, 0, 10)]), [memoryview(bytearray(10))])])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (out.stdout, out.stderr) == ("read 10\n", "")
