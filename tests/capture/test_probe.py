"""The probe reads what it says, each block once, and calls nothing cold that may have been cached.

No test depends on how fast anything is: runs end because their blocks are used up, or after one
block a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from headerkit import write_checkpoint

from moetap.capture import probe as module
from moetap.capture.probe import PAGE, enclosing, probe
from moetap.errors import MoetapError, UsageError

BLOCK = 4 * PAGE
N_BLOCKS = 95  # the last page belongs to no block
NEEDS = (8, 8, 32)
LONG = 3600.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """On the disk (not only in memory), so that its pages can be dropped from the cache."""
    path = tmp_path / "weights.bin"
    with path.open("wb") as out:
        out.write(os.urandom(BLOCK * N_BLOCKS + PAGE))
        out.flush()
        os.fsync(out.fileno())
    return path


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says which pages are cached, on a local disk, in place of the machine that runs the test."""

    def say(pages: Callable[[np.ndarray], None], name: str = "ext4", network: bool = False) -> None:
        def resident(file: module._File) -> np.ndarray:
            state = np.zeros(-(-file.size // PAGE), dtype=bool)
            state[file.size // PAGE - 1] = True  # the page that was just read
            pages(state)
            return state

        monkeypatch.setattr(module, "_resident", resident)
        monkeypatch.setattr(module, "_file_system", lambda path: (name, network))

    return say


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, length) of every read of a tile."""
    seen: list[tuple[int, int]] = []
    real = module._read

    def read(tile: module._Tile, buffer: memoryview) -> None:
        seen.append((tile.offset, tile.length))
        real(tile, buffer)

    monkeypatch.setattr(module, "_read", read)
    return seen


def nothing(state: np.ndarray) -> None:
    """No page is cached but the one that the probe has read."""


def refuse_uncached_open(monkeypatch: pytest.MonkeyPatch) -> None:
    real_open, real_fcntl = os.open, fcntl.fcntl

    def fake_open(path, flags, *args, **kwargs):
        if flags & getattr(os, "O_DIRECT", 0):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *args, **kwargs)

    def fake_fcntl(fd, command, *args):
        if command == getattr(fcntl, "F_NOCACHE", None):
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        return real_fcntl(fd, command, *args)

    monkeypatch.setattr(os, "open", fake_open)
    monkeypatch.setattr(fcntl, "fcntl", fake_fcntl)


# -- a real file, on whatever file system the tests run


def check_honest(result: module.Probe) -> None:
    """Cold with no reason against it, or warm with one; never cold in memory."""
    for reading in result.random:
        assert reading.cold == (reading.why_warm == "")
        assert reading.bandwidth_bps > 0 and reading.median_s <= reading.p95_s
        if result.file_system in ("tmpfs", "ramfs"):
            assert "memory" in reading.why_warm


def test_a_real_file(file, reads):
    before = file.read_bytes(), file.stat().st_mtime_ns
    result = probe(file, BLOCK, seconds=LONG)
    check_honest(result)
    assert [r.depth for r in result.random] == [1, 4, 16]
    assert all(r.blocks >= need for r, need in zip(result.random, NEEDS, strict=True))
    assert result.random[0].method in ("O_DIRECT", "F_NOCACHE", "buffered")
    assert (result.n_files, result.size_bytes) == (1, file.stat().st_size)
    assert sum(r.blocks for r in result.random) == len(reads) == len(set(reads))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert list(file.parent.iterdir()) == [file]


def test_a_file_that_is_wholly_cached_is_dropped_or_warm(file):
    file.read_bytes()
    result = probe(file, BLOCK, seconds=LONG)
    check_honest(result)
    if all(r.cold for r in result.random):
        assert any("dropped from the cache" in note for note in result.notes)


def test_uncached_reads_refused_at_open(file, monkeypatch):
    refuse_uncached_open(monkeypatch)
    result = probe(file, BLOCK, seconds=LONG)
    check_honest(result)
    assert {r.method for r in result.random} == {"buffered"}
    assert any("refuses uncached reads" in note for note in result.notes)


def test_o_direct_accepted_and_its_reads_refused(file, monkeypatch):
    real = os.preadv
    direct = getattr(os, "O_DIRECT", 0)

    def preadv(fd, buffers, offset):
        if direct and fcntl.fcntl(fd, fcntl.F_GETFL) & direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    result = probe(file, BLOCK, seconds=LONG)
    check_honest(result)
    assert {r.method for r in result.random} == {"buffered" if direct else "F_NOCACHE"}


def test_mlx_is_not_needed():
    code = "import sys, moetap.capture.probe; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- cold or warm


def warm_reasons(result: module.Probe) -> list[str]:
    return [reading.why_warm for reading in result.random]


def test_cold_where_no_page_was_cached(file, cached):
    cached(nothing)
    result = probe(file, BLOCK, seconds=LONG)
    assert warm_reasons(result) == ["", "", ""] and result.cold_range_bps is not None
    # 8, 8 and 32 parts of what is left each time.
    assert [r.blocks for r in result.random] == [15, 16, 64]
    assert not any("dropped" in note for note in result.notes)


def test_cached_blocks_are_not_read(file, cached, reads):
    def every_third_block(state):
        state[2 : 4 * N_BLOCKS : 12] = True  # one page of it is enough

    cached(every_third_block)
    result = probe(file, BLOCK, seconds=LONG)
    assert warm_reasons(result) == ["", "", ""]
    assert len(reads) == sum(r.blocks for r in result.random) == N_BLOCKS - 32
    assert not {offset // BLOCK % 3 for offset, _ in reads} & {0}


def test_everything_cached_is_warm(file, cached):
    cached(lambda state: state.fill(True))
    result = probe(file, BLOCK, seconds=LONG)
    assert all("too much of it is in the page cache (100% of" in r for r in warm_reasons(result))
    assert not any(r.cold for r in result.random) and result.cold_range_bps is None


def test_cached_while_the_probe_runs(file, cached):
    calls = []

    def later(state):
        calls.append(1)
        # One look to see whether mincore works, one to see whether there is enough, one per depth.
        if len(calls) > 3:
            state[:] = True

    cached(later)
    result = probe(file, BLOCK, seconds=LONG)
    assert [r.cold for r in result.random] == [True, False, False]
    assert result.cold_range_bps is None


def test_a_system_that_does_not_tell_is_not_believed(file, cached):
    cached(lambda state: state.fill(False), name="zfs")  # not even the page that was just read
    assert set(warm_reasons(probe(file, BLOCK, seconds=LONG))) == {
        "zfs does not tell what of the file is cached"
    }


def test_mincore_fails(file, cached, monkeypatch):
    cached(nothing)

    def resident(file):
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(module, "_resident", resident)
    assert all("(No such device)" in r for r in warm_reasons(probe(file, BLOCK, seconds=LONG)))


def test_linux_tells_only_the_owner(file, cached, monkeypatch):
    cached(nothing)
    monkeypatch.setattr(module, "_may_ask", lambda file: False)
    result = probe(file, BLOCK, seconds=LONG)
    expected = sys.platform == "linux"
    assert all(("owner" in reason) == expected for reason in warm_reasons(result))


@pytest.mark.parametrize(
    ("name", "network", "why"), [("nfs4", True, "server's cache"), ("tmpfs", False, "in memory")]
)
def test_file_systems_that_cannot_be_cold(file, cached, name, network, why):
    cached(nothing, name, network)
    assert all(why in reason for reason in warm_reasons(probe(file, BLOCK, seconds=LONG)))


def test_resident_sees_what_was_read(file):
    """The real mincore: after a buffered read of the whole file it must be there."""
    file.read_bytes()
    with module._opened([file]) as [opened]:
        assert module._resident(opened).all()


# -- macOS's calls, replaced where the machine that runs the tests lacks them


def test_f_nocache_evicts_nothing(file, cached, monkeypatch):
    calls = []
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(
        module, "fcntl", SimpleNamespace(F_NOCACHE=48, fcntl=lambda *args: calls.append(args[1:]))
    )
    if hasattr(os, "posix_fadvise"):
        monkeypatch.delattr(os, "posix_fadvise")
    cached(nothing, "apfs")
    result = probe(file, BLOCK, seconds=LONG)
    assert calls == [(48, 1)] and {r.method for r in result.random} == {"F_NOCACHE"}
    assert all(r.cold for r in result.random)
    cached(lambda state: state.fill(True), "apfs")
    result = probe(file, BLOCK, seconds=LONG)
    assert not any(r.cold for r in result.random)
    assert not any("dropped" in note for note in result.notes)


@pytest.mark.parametrize(("flags", "network"), [(0x1000, False), (0x0, True)])
def test_statfs_of_macos(tmp_path, monkeypatch, flags, network):
    def statfs(path, found):
        found[64:68] = flags.to_bytes(4, "little")
        found[72:80] = b"apfs\0\0\0\0"
        return 0

    monkeypatch.setattr(module, "sys", SimpleNamespace(platform="darwin"))
    monkeypatch.setattr(module, "_LIBC", SimpleNamespace(statfs=statfs))
    assert module._file_system(tmp_path) == ("apfs", network)


# -- arithmetic and reads


@pytest.mark.parametrize(
    ("offset", "length", "expected"),
    [
        (0, PAGE, (0, PAGE)),
        (0, 1, (0, PAGE)),
        (1, PAGE, (0, 2 * PAGE)),
        (PAGE - 1, 2, (0, 2 * PAGE)),
        (PAGE, PAGE, (PAGE, PAGE)),
        (3 * PAGE + 5, PAGE, (3 * PAGE, 2 * PAGE)),
    ],
)
def test_enclosing(offset, length, expected):
    assert enclosing(offset, length) == expected


def test_blocks_that_are_no_whole_pages(file, cached, reads):
    cached(nothing)
    result = probe(file, BLOCK - 100, seconds=LONG)
    assert all(offset % BLOCK == 0 and length == BLOCK for offset, length in reads)
    reading = result.random[0]
    assert reading.bandwidth_bps == pytest.approx(15 * (BLOCK - 100) / reading.time_s)


def test_each_thread_reads_a_block_when_time_is_up(file, cached):
    cached(nothing)
    assert [r.blocks for r in probe(file, BLOCK, seconds=1e-9).random] == [1, 4, 16]


def test_sequential_chunks_are_consecutive_and_apart(file, cached, reads, monkeypatch):
    monkeypatch.setattr(module, "SEQUENTIAL_BYTES", 4 * BLOCK)
    cached(nothing)
    result = probe(file, BLOCK, seconds=LONG)
    assert result.sequential is not None and result.sequential.cold
    assert (result.sequential.depth, result.sequential.block_bytes) == (1, 4 * BLOCK)
    chunks = reads[-result.sequential.blocks :]
    assert len(chunks) >= 4 and {length for _, length in chunks} == {4 * BLOCK}
    assert chunks == [(chunks[0][0] + i * 4 * BLOCK, 4 * BLOCK) for i in range(len(chunks))]
    assert all(offset + BLOCK <= chunks[0][0] for offset, _ in reads[: -len(chunks)])


@pytest.mark.parametrize("most", [PAGE, PAGE + 100, 3 * PAGE - 1, 10**9])
@pytest.mark.parametrize("alignment", [1, PAGE])
def test_short_reads(file, monkeypatch, most, alignment):
    real, offsets = os.preadv, []

    def preadv(fd, buffers, offset):
        offsets.append(offset)
        return real(fd, [buffers[0][:most]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    fd = os.open(file, os.O_RDONLY)
    try:
        opened = module._File(file, fd, file.stat().st_size, "buffered", alignment)
        buffer = module._buffer(BLOCK)
        module._read(module._Tile(opened, 5 * BLOCK, BLOCK), buffer)
    finally:
        os.close(fd)
    assert buffer == file.read_bytes()[5 * BLOCK : 6 * BLOCK]
    assert all(offset % alignment == 0 for offset in offsets)


def test_uncached_reads_bring_the_files_bytes(file):
    buffer = module._buffer(BLOCK)
    with module._opened([file]) as [opened]:
        module._read(module._Tile(opened, 7 * BLOCK, BLOCK), buffer)
    assert buffer == file.read_bytes()[7 * BLOCK : 8 * BLOCK]


# -- folders


def test_a_model_folder_gives_files_and_block(tmp_path):
    E, d = 64, 2 * PAGE
    tensors = {
        f"model.layers.0.mlp.switch_mlp.{name}.weight": ("U8", [E, 1, d])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    folder = write_checkpoint(tmp_path / "m", {}, tensors, shards=2, data=True)
    for shard in folder.glob("*.safetensors"):
        content = shard.read_bytes()
        shard.write_bytes(content)  # no longer sparse
    result = probe(folder, seconds=LONG)
    check_honest(result)
    assert (result.block_bytes, result.block_source) == (3 * d, "one expert of this checkpoint")
    assert result.n_files == 2


def test_a_folder_whose_experts_are_not_known(file, cached, monkeypatch):
    cached(nothing)
    monkeypatch.setattr(module, "DEFAULT_BLOCK_BYTES", BLOCK)
    file.rename(file.with_name("model.safetensors"))
    result = probe(file.parent, seconds=LONG)
    assert result.block_bytes == BLOCK
    assert "not known" in result.block_source and "config.json" in result.block_source


def test_of_many_shards_the_largest(file, cached, monkeypatch):
    cached(nothing)
    monkeypatch.setattr(module, "MAX_FILES", 2)
    content = file.read_bytes()
    file.unlink()
    for i in range(3):
        (file.parent / f"{i}.safetensors").write_bytes(content[i * BLOCK :])
    result = probe(file.parent, BLOCK, seconds=LONG)
    assert result.size_bytes == 2 * len(content) - BLOCK
    assert "Of 3 shards the 2 largest were read." in result.notes


# -- what is refused


def one_line(error: pytest.ExceptionInfo[MoetapError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text and all(part in text for part in parts), text


def test_too_small_says_what_fits(file):
    with pytest.raises(UsageError) as error:
        probe(file, 64 * PAGE)
    one_line(error, str(file), "room for 5 blocks", "48 are needed", "give a larger file, or a")
    fits = int(str(error.value).split("a block of ")[1].split()[0].replace(",", ""))
    assert probe(file, fits, seconds=1e-9).block_bytes == fits


@pytest.mark.parametrize("size", [0, 1, PAGE, 40 * PAGE])
def test_tiny_files(tmp_path, size):
    path = tmp_path / "tiny"
    path.write_bytes(bytes(size))
    with pytest.raises(UsageError, match=r"too small to measure.*give a larger file$") as error:
        probe(path)
    one_line(error, "1,769,472")


def test_sparse_files_are_refused(tmp_path):
    path = tmp_path / "sparse"
    with path.open("wb") as out:
        out.truncate(64 * 2**20)
    with pytest.raises(MoetapError, match="sparse") as error:
        probe(path, BLOCK)
    one_line(error, str(path), "byte 0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"block_bytes": 0}, "0 bytes"),
        ({"block_bytes": 2**40}, "1,099,511,627,776 bytes"),
        ({"depths": ()}, "queue depths"),
        ({"depths": (0,)}, "queue depths"),
        ({"depths": (1000,)}, "queue depths"),
        ({"seconds": 0}, "0 seconds"),
        ({"seconds": float("nan")}, "nan seconds"),
    ],
)
def test_arguments_that_make_no_sense(file, arguments, words):
    with pytest.raises(UsageError, match=words):
        probe(file, **arguments)


def test_no_such_file(tmp_path):
    with pytest.raises(UsageError, match="no such file or folder"):
        probe(tmp_path / "missing")


def test_a_shard_that_is_gone(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    with pytest.raises(UsageError, match=r"model\.safetensors: no such file"):
        probe(tmp_path)


def test_an_empty_folder(tmp_path):
    with pytest.raises(UsageError, match=r"no \*\.safetensors files"):
        probe(tmp_path)


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        probe(tmp_path / "pipe")


def test_no_permission(file, monkeypatch):
    def denied(path, flags, *args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(MoetapError) as error:
        probe(file, BLOCK)
    one_line(error, str(file), "cannot be opened (Permission denied)")


def test_a_disk_that_fails(file, cached, monkeypatch):
    cached(nothing)
    real, calls = os.preadv, []

    def preadv(fd, buffers, offset):
        calls.append(offset)
        if len(calls) > 20:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(MoetapError) as error:
        probe(file, BLOCK, seconds=LONG)
    one_line(error, str(file), "at byte", "Input/output error")


def test_cut_short_while_it_is_read(file, monkeypatch):
    with module._opened([file]) as [opened]:
        os.truncate(file, 3 * BLOCK)
        with pytest.raises(MoetapError, match="was changed while it was measured"):
            module._read(module._Tile(opened, 4 * BLOCK, BLOCK), module._buffer(BLOCK))
        with pytest.raises(MoetapError, match="was cut short while it was measured"):
            module._resident(opened)


def test_removed_while_it_is_measured(file, monkeypatch):
    def file_system(path):
        path.unlink()
        return "ext4", False

    monkeypatch.setattr(module, "_file_system", file_system)
    with pytest.raises(MoetapError, match="was removed while it was measured"):
        probe(file, BLOCK, seconds=LONG)


def test_files_are_closed(file, monkeypatch):
    opened, closed = [], []
    real_open, real_close = module._open, os.close
    monkeypatch.setattr(module, "_open", lambda path: opened.append(real_open(path)) or opened[-1])
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), real_close(fd)))
    with pytest.raises(UsageError):
        probe(file, 2**20 * 64)
    assert opened[0].fd in closed


def test_file_system_of_a_path(tmp_path, monkeypatch):
    name, network = module._file_system(tmp_path)
    assert name and isinstance(network, bool)
    if sys.platform != "linux":
        return  # the rest is how Linux lists mounts
    mounts = (
        "/dev/a / ext4 rw 0 0\n"
        "server:/x /mnt/with\\040space nfs4 rw 0 0\n"
        "/dev/b /mnt xfs rw 0 0\n"
        "x /data fuse.sshfs rw 0 0\n"
        "tmpfs /data tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda self, **_: mounts)
    for path, expected in {
        "/home/x": ("ext4", False),
        "/mnt/with space/m": ("nfs4", True),
        "/mnt/within": ("xfs", False),
        "/mntx": ("ext4", False),
        "/data/f": ("tmpfs", False),
    }.items():
        assert module._file_system(Path(path)) == expected
