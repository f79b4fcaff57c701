"""Cold read bandwidth of a disk, measured with blocks of an expert's size.

Knows how to read a file past the page cache, how to find out which of its pages are in memory, and
when neither can be trusted. Refuses to know MLX, what the blocks hold and how the result is shown,
and never writes: it measures files that are there already.

A read is called cold only if every page of its block was seen to be outside the page cache before
the run, by mincore, on a file where mincore was seen to work; no block is read twice. How the read
is made (O_DIRECT, F_NOCACHE) does not make it cold: tmpfs accepts O_DIRECT and answers from memory,
some file systems accept and ignore it, and F_NOCACHE still returns what is cached. Whatever is not
known to be cold is reported as warm, with the reason. Out of sight are a cache in the drive and, on
a virtual machine, one in its host.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import math
import mmap
import os
import random
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from moetap.capture.checkpoint import classify, read_checkpoint
from moetap.errors import MoetapError, UsageError

DEFAULT_BLOCK_BYTES = 1_769_472
"""One expert of Qwen3.6-35B-A3B at 4 bits, group 64."""

DEPTHS = (1, 4, 16)
MAX_DEPTH = 64
MAX_BLOCK_BYTES = 256 * 2**20

SEQUENTIAL_BYTES = 8 * 2**20
SEQUENTIAL_NEED = 4
"""The sequential reference needs this many chunks, which lie in the last quarter of a file."""

MAX_FILES = 16
"""A folder of hundreds of shards would exceed macOS's default of 256 open files."""

MAX_TILES = 200_000

PAGE = mmap.PAGESIZE
"""Alignment of every offset, length and buffer: that of mincore, and at least O_DIRECT's."""


@dataclass(frozen=True)
class Reading:
    """One run of reads.

    kind: "random" or "sequential". depth: reads in flight. time_s: from the first read's start to
    the last one's end. cold: no byte came from the page cache; why_warm says why that is not known.
    method: O_DIRECT, F_NOCACHE or buffered. median_s, p95_s: latency of one block.
    """

    kind: str
    block_bytes: int
    depth: int
    blocks: int
    time_s: float
    cold: bool
    why_warm: str
    method: str
    median_s: float
    p95_s: float

    @property
    def bandwidth_bps(self) -> float:
        """Requested bytes per second; those read only for alignment do not count."""
        return self.blocks * self.block_bytes / self.time_s


@dataclass(frozen=True)
class Probe:
    """Readings of one file or model folder.

    n_files: files read from. block_source: where the block size comes from. sequential: None if the
    files are too small for it. notes: what else must be said beside the figures.
    """

    path: str
    n_files: int
    size_bytes: int
    file_system: str
    block_bytes: int
    block_source: str
    random: tuple[Reading, ...]
    sequential: Reading | None
    notes: tuple[str, ...]

    @property
    def cold_range_bps(self) -> tuple[float, float] | None:
        """Least and greatest bandwidth over the depths; None unless all of them are cold."""
        found = [reading.bandwidth_bps for reading in self.random]
        return (min(found), max(found)) if all(r.cold for r in self.random) else None


@dataclass(frozen=True)
class _File:
    path: Path
    fd: int
    size: int
    method: str
    alignment: int  # of the offset at which a short read may be continued


@dataclass(frozen=True)
class _Tile:
    """`length` bytes at `offset`, both multiples of PAGE; the block is its first bytes."""

    file: _File
    offset: int
    length: int

    @property
    def pages(self) -> slice:
        return slice(self.offset // PAGE, (self.offset + self.length) // PAGE)


def probe(
    path: str | Path,
    block_bytes: int | None = None,
    depths: Sequence[int] = DEPTHS,
    seconds: float = 3.0,
) -> Probe:
    """Read random blocks of a file, or of a model folder's shards, at each queue depth for up to
    `seconds`, then consecutive chunks of 8 MiB.

    block_bytes: default: the size of one expert of the folder's checkpoint, else
    DEFAULT_BLOCK_BYTES.

    Raises:
        UsageError: there is no such file, it is too small, or an argument makes no sense.
        MoetapError: the file cannot be read, is sparse, or changes while it is read.
    """
    path = Path(path)
    _check(block_bytes, depths, seconds)
    paths, notes = _files_of(path)
    block_source = "as asked"
    if block_bytes is None:
        block_bytes, block_source = _expert_bytes(path)
    with _opened(paths) as files:
        return _probe(path, files, block_bytes, block_source, depths, seconds, notes)


def _probe(
    path: Path,
    files: list[_File],
    block_bytes: int,
    block_source: str,
    depths: Sequence[int],
    seconds: float,
    notes: list[str],
) -> Probe:
    needs = [_need(depth) for depth in depths]
    tiles, chunks = _plan(files, block_bytes)
    if len(tiles) < sum(needs):
        raise UsageError(_too_small(path, files, block_bytes, len(tiles), sum(needs)))
    file_system, network = _file_system(files[0].path)
    blind = _why_blind(files, file_system, network)
    if not blind and (
        len(_cold(tiles)) < sum(needs) or (chunks and len(_cold(chunks)) < SEQUENTIAL_NEED)
    ):
        evicted = [_evict(file) for file in files]
        if all(evicted):
            notes.append("Much of it was cached, so its pages were first dropped from the cache.")

    readings = []
    for i, depth in enumerate(depths):
        chosen, why_warm = _choose(tiles, needs[i], sum(needs[i:]), blind)
        taken = set(chosen)
        tiles = [tile for tile in tiles if tile not in taken]
        readings.append(_run("random", chosen, block_bytes, depth, seconds, why_warm))
    sequential = None
    if chunks:
        chosen, why_warm = _choose(chunks, SEQUENTIAL_NEED, SEQUENTIAL_NEED, blind)
        sequential = _run("sequential", chosen, SEQUENTIAL_BYTES, 1, seconds, why_warm)
    else:
        least = _least_for_sequential() / 2**20
        notes.append(f"No sequential reference: it needs a file of {least:.0f} MiB.")
    if files[0].method == "buffered":
        notes.append(
            "The file system refuses uncached reads: these went through the page cache, without "
            "read-ahead."
        )
    return Probe(
        path=str(path),
        n_files=len(files),
        size_bytes=sum(file.size for file in files),
        file_system=file_system,
        block_bytes=block_bytes,
        block_source=block_source,
        random=tuple(readings),
        sequential=sequential,
        notes=tuple(notes),
    )


# -- what to read


def _check(block_bytes: int | None, depths: Sequence[int], seconds: float) -> None:
    if block_bytes is not None and not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        raise UsageError(
            f"a block of {block_bytes:,} bytes: give 1 to {MAX_BLOCK_BYTES:,}, an expert's size"
        )
    if not depths or not all(1 <= depth <= MAX_DEPTH for depth in depths):
        raise UsageError(f"queue depths {list(depths)}: give some between 1 and {MAX_DEPTH}")
    if not 0 < seconds < math.inf:
        raise UsageError(f"{seconds:g} seconds: give a positive number of seconds for each depth")


def _files_of(path: Path) -> tuple[list[Path], list[str]]:
    """The files behind the argument, and what to note about the choice."""
    if not path.is_dir():
        return [path], []
    try:
        shards = sorted(path.glob("*.safetensors"))
        if len(shards) <= MAX_FILES:
            notes = []
        else:
            notes = [f"Of {len(shards)} shards the {MAX_FILES} largest were read."]
            shards = sorted(shards, key=lambda shard: -shard.stat().st_size)[:MAX_FILES]
    except OSError as error:
        raise MoetapError(f"{error.filename or path}: {_reason(error)}") from error
    if not shards:
        raise UsageError(
            f"{path}: no *.safetensors files in this folder; give a model folder, or a large file "
            "on the disk to measure"
        )
    return shards, notes


def _expert_bytes(path: Path) -> tuple[int, str]:
    """Block size and its source: the largest expert of the folder's checkpoint, if it has any."""
    default = "one expert of Qwen3.6-35B-A3B at 4 bits"
    if not path.is_dir():
        return DEFAULT_BLOCK_BYTES, default
    try:
        layers = classify(read_checkpoint(path)).layers
    except (MoetapError, OSError) as error:
        return DEFAULT_BLOCK_BYTES, f"{default}, as this folder's own is not known: {error}"
    size = max(layer.expert_bytes for layer in layers)
    if not 1 <= size <= MAX_BLOCK_BYTES:
        return DEFAULT_BLOCK_BYTES, f"{default}, as this folder's experts have {size:,} bytes"
    return size, "one expert of this checkpoint"


@contextmanager
def _opened(paths: Sequence[Path]) -> Iterator[list[_File]]:
    """The files, open for uncached reads, the largest first."""
    files: list[_File] = []
    try:
        for path in paths:
            try:
                files.append(_open(path))
            except FileNotFoundError:
                raise UsageError(f"{path}: no such file or folder") from None
            except OSError as error:
                raise MoetapError(f"{path}: cannot be opened ({_reason(error)})") from error
        yield sorted(files, key=lambda file: -file.size)
    finally:
        for file in files:
            os.close(file.fd)


def _open(path: Path) -> _File:
    if not path.is_file():  # before opening: a pipe would block
        path.stat()
        raise UsageError(f"{path}: not a regular file; give a large file on the disk to measure")
    fd, method = _open_uncached(path)
    try:
        size = os.fstat(fd).st_size
        _refuse_holes(path, fd, size)
    except BaseException:
        os.close(fd)
        raise
    return _File(path, fd, size, method, alignment=1 if method == "buffered" else PAGE)


def _refuse_holes(path: Path, fd: int, size: int) -> None:
    """A hole, or space that was allocated and never written, is read without asking the disk."""
    try:
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
    except OSError:  # empty, or a file system that does not tell
        return
    if hole < size // PAGE * PAGE:
        raise MoetapError(
            f"{path}: nothing is stored from byte {hole:,} on (a sparse file), and reading that "
            "needs no disk; give a file whose data is all there, such as a copy of this one"
        )


def enclosing(offset: int, length: int) -> tuple[int, int]:
    """The least range (offset, length) of whole pages that holds the given one."""
    begin = offset // PAGE * PAGE
    end = -(-(offset + length) // PAGE) * PAGE
    return begin, end - begin


def _plan(files: list[_File], block_bytes: int) -> tuple[list[_Tile], list[_Tile]]:
    """Tiles for random reads, shuffled, and the chunks for the sequential ones, in order.

    No two overlap, and none contains a file's last whole page, which `_why_blind` reads.
    """
    stride = enclosing(0, block_bytes)[1]
    chunks: list[_Tile] = []
    tiles: list[_Tile] = []
    # A seed would make a second run read what the drive's own cache still has from the first.
    rng = random.Random()
    for i, file in enumerate(files):
        end = max(0, _last_page(file) * PAGE)
        if i == 0 and file.size >= _least_for_sequential():
            begin = end - enclosing(0, end // 4)[1]
            chunks = _tile(file, range((end - begin) // SEQUENTIAL_BYTES), SEQUENTIAL_BYTES, begin)
            end = begin
        count = end // stride
        chosen = rng.sample(range(count), min(count, MAX_TILES // len(files)))
        tiles += _tile(file, chosen, stride)
    rng.shuffle(tiles)
    return tiles, chunks


def _tile(file: _File, numbers: Iterable[int], length: int, begin: int = 0) -> list[_Tile]:
    return [_Tile(file, begin + i * length, length) for i in numbers]


def _least_for_sequential() -> int:
    """Bytes of the smallest file in which the last quarter holds enough chunks."""
    return 4 * SEQUENTIAL_NEED * SEQUENTIAL_BYTES + 2 * PAGE


def _last_page(file: _File) -> int:
    """The last whole page. The part of one after it is not trusted: virtiofs calls it absent."""
    return file.size // PAGE - 1


def _need(depth: int) -> int:
    """Least number of blocks at a depth: twice through the queue, and enough for a median."""
    return max(8, 2 * depth)


def _too_small(path: Path, files: list[_File], block_bytes: int, n_tiles: int, need: int) -> str:
    # A page for rounding, one for the last page; the sequential quarter is gone before.
    fits = (files[0].size * 3 // 4 // PAGE - 2) // need * PAGE
    remedy = f", or a block of {fits:,} bytes or less" if fits >= PAGE else ""
    return (
        f"{path}: too small to measure: room for {n_tiles:,} blocks of {block_bytes:,} bytes, and "
        f"{need:,} are needed, as none is read twice; give a larger file{remedy}"
    )


# -- cold or warm


def _why_blind(files: list[_File], file_system: str, network: bool) -> str:
    """Why no read of these files can be called cold, "" if some can.

    The test of mincore reads one page of each file through the cache: mincore must then see it.
    """
    if file_system in ("tmpfs", "ramfs", "devtmpfs"):
        return f"{file_system} keeps files in memory"
    if network:
        return f"{file_system} is a network file system, and its server's cache is out of sight"
    for file in files:
        try:
            # Not through file.fd, which reads past the cache.
            with file.path.open("rb", buffering=0) as cached:
                cached.seek(_last_page(file) * PAGE)
                cached.read(PAGE)
            seen = _resident(file)
        except FileNotFoundError:
            raise MoetapError(f"{file.path}: was removed while it was measured") from None
        except OSError as error:
            return f"the system does not tell what of the file is cached ({_reason(error)})"
        if not seen[_last_page(file)]:
            return f"{file_system or 'this file system'} does not tell what of the file is cached"
        if sys.platform == "linux" and not _may_ask(file):
            return "Linux tells only a file's owner, or who may write to it, what of it is cached"
    return ""


def _cold(tiles: Iterable[_Tile]) -> list[_Tile]:
    """The tiles of which no page is in the page cache now."""
    tiles = list(tiles)
    maps = {file: _resident(file) for file in {tile.file for tile in tiles}}
    return [tile for tile in tiles if not maps[tile.file][tile.pages].any()]


def _choose(tiles: list[_Tile], need: int, all_needs: int, blind: str) -> tuple[list[_Tile], str]:
    """Tiles to read now, and why they are warm, "" if they are all cold.

    A run gets its share of what there is: `need` parts of the `all_needs` still to be served.
    """
    cold = [] if blind else _cold(tiles)
    if len(cold) >= need:
        return cold[: max(need, len(cold) * need // all_needs)], ""
    if not blind:
        share = 1 - len(cold) / len(tiles)
        blind = f"too much of it is in the page cache ({share:.0%} of the blocks); {_REMEDY}"
    return tiles[: max(need, len(tiles) * need // all_needs)], blind


# -- reading


def _run(
    kind: str, tiles: list[_Tile], block_bytes: int, depth: int, seconds: float, why_warm: str
) -> Reading:
    """Read the tiles in their order, `depth` at a time, each thread at least one, until they or
    the time are used up.
    """
    todo = deque(tiles)
    latencies: list[float] = []
    stop = Event()
    buffers = [_buffer(tiles[0].length) for _ in range(depth)]

    def work(buffer: memoryview) -> float:
        end = started
        while not stop.is_set():
            try:
                tile = todo.popleft()
            except IndexError:
                break
            begin = perf_counter()
            try:
                _read(tile, buffer)
            except BaseException:
                stop.set()
                raise
            end = perf_counter()
            latencies.append(end - begin)
            if end - started >= seconds:
                break
        return end

    with ThreadPoolExecutor(depth) as pool:
        started = perf_counter()
        try:
            ends = [job.result() for job in [pool.submit(work, buffer) for buffer in buffers]]
        finally:
            stop.set()  # after an interrupt the pool would wait for the whole time
    methods = sorted({tile.file.method for tile in tiles})
    return Reading(
        kind=kind,
        block_bytes=block_bytes,
        depth=depth,
        blocks=len(latencies),
        time_s=max(ends) - started,
        cold=not why_warm,
        why_warm=why_warm,
        method=" and ".join(methods),
        median_s=float(np.median(latencies)),
        p95_s=float(np.quantile(latencies, 0.95)),
    )


def _buffer(length: int) -> memoryview:
    """Memory on a page boundary, touched, so that the first read does not pay for its pages."""
    buffer = memoryview(mmap.mmap(-1, length))
    buffer[:] = bytes(length)
    return buffer


def _read(tile: _Tile, buffer: memoryview) -> None:
    """Fill the buffer with the tile. Short reads are legal and happen."""
    file, done = tile.file, 0
    while done < tile.length:
        try:
            got = os.preadv(file.fd, [buffer[done : tile.length]], tile.offset + done)
        except OSError as error:
            raise MoetapError(
                f"{file.path}: reading at byte {tile.offset + done:,} failed ({_reason(error)})"
            ) from error
        # An uncached read must begin at a page; what a short one brought beyond that is read again.
        after = (done + got) // file.alignment * file.alignment
        if after <= done:
            raise MoetapError(
                f"{file.path}: ends at byte {tile.offset + done + got:,} of {file.size:,}; "
                "it was changed while it was measured"
            )
        done = after


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# -- what differs between systems
#
#                        Linux                              macOS
#   uncached reads       O_DIRECT, which some file          F_NOCACHE: caches nothing new, but still
#                        systems refuse                     returns what is cached already
#   dropping pages       posix_fadvise(DONTNEED),           none that is safe: msync(MS_INVALIDATE)
#                        clean pages only                   may discard what is not yet on disk
#   asking what is       mincore, which calls everything    mincore
#   cached               cached for who may not write
#   file system          /proc/self/mounts                  statfs

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_REMEDY = (
    "run `sudo purge` first, or give a larger file"
    if sys.platform == "darwin"
    else "end what uses the file, or give a larger one"
)

_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "virtiofs", "afs", "ceph", "lustre"}
_NETWORK |= {"glusterfs", "fuse.glusterfs", "fuse.sshfs", "fuse.s3fs", "fuse.rclone", "beegfs"}


def _open_uncached(path: Path) -> tuple[int, str]:
    """A descriptor that reads past the page cache, or one that does not where that is refused, and
    the name of the method.
    """
    if sys.platform == "darwin":
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
        except OSError:
            return fd, "buffered"
        return fd, "F_NOCACHE"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    else:
        # Some accept the flag and refuse the reads.
        try:
            os.preadv(fd, [_buffer(PAGE)], 0)
            return fd, "O_DIRECT"
        except OSError as error:
            os.close(fd)
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into blocks still to be read
    return fd, "buffered"


def _evict(file: _File) -> bool:
    """Ask for the file's pages to leave the cache; whether there is a way to ask."""
    if sys.platform != "linux":
        return False
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _resident(file: _File) -> NDArray[np.bool_]:
    """(pages,) Whether each page of the file is in memory. Mapping a file does not read it."""
    state = np.zeros(-(-file.size // PAGE), dtype=np.uint8)
    try:
        # For this moment only: while a file is mapped, macOS may prefer the cache.
        with mmap.mmap(file.fd, file.size, mmap.MAP_SHARED, mmap.PROT_READ) as mapped:
            memory = np.frombuffer(mapped, dtype=np.uint8)
            failed = _LIBC.mincore(memory.ctypes.data, file.size, state.ctypes.data)
            number = ctypes.get_errno()
            del memory
    except ValueError as error:
        raise MoetapError(f"{file.path}: was cut short while it was measured") from error
    if failed:
        raise OSError(number, os.strerror(number))
    resident: NDArray[np.bool_] = (state & 1).astype(np.bool_)
    return resident


def _may_ask(file: _File) -> bool:
    """Linux's rule for mincore on a file."""
    return os.fstat(file.fd).st_uid == os.geteuid() or os.access(file.path, os.W_OK)


def _file_system(path: Path) -> tuple[str, bool]:
    """Type of the file system, "" if unknown, and whether it is reached over a network."""
    real = os.path.realpath(path)
    if sys.platform == "darwin":
        # struct statfs on arm64: f_flags at byte 64, f_fstypename at 72; MNT_LOCAL is 0x1000.
        found = ctypes.create_string_buffer(4096)
        if _LIBC.statfs(os.fsencode(real), found) != 0:
            return "", False
        name = found.raw[72:88].split(b"\0")[0].decode(errors="replace")
        return name, not int.from_bytes(found.raw[64:68], "little") & 0x1000
    try:
        mounts = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return "", False
    best, name = -1, ""
    for line in mounts:
        _, point, kind, *_ = line.split(" ")
        point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), point).rstrip("/")
        # The last of several mounts on one point hides the others.
        if f"{real}/".startswith(f"{point}/") and len(point) >= best:
            best, name = len(point), kind
    return name, name in _NETWORK
