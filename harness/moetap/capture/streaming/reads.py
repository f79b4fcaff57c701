"""Reading experts: worker threads that fill slots from the checkpoint's files.

Knows files, ranges, short reads, retries and reads past the page cache. Refuses to know MLX and
what is in a slot: it gets writable buffers.

Workers call preadv only, which releases the interpreter's lock. One task is one expert, adjacent
slices in one call; where few experts are missing, a part of one.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TypeAlias

from moetap.capture.probe import PAGE, _file_system, _open_uncached, enclosing
from moetap.errors import MoetapError

N_THREADS = 8
"""Most reads in flight."""

ENOUGH = 4
"""Reads in flight that are wanted: where fewer experts miss, each is read in parts. (An M5 Max was
seen to give one reader 4 GB/s, several 12.6.) More parts would cost more Python than they save.
"""


Run: TypeAlias = tuple[Path, int, list[int]]
"""Bytes of a file: the file, the first byte, and the numbers of the buffers that they go to, one
after the other."""


@dataclass(frozen=True)
class Done:
    """What a batch of reads took. read_s: from its start to the end of its last read. wait_s: how
    long the caller waited for it, its own waking up included.
    """

    n_bytes: int
    read_s: float
    wait_s: float


class Batch:
    """Reads in flight; `wait` before anything uses the buffers."""

    def __init__(self, started: float, tasks: list[Future[tuple[int, float]]]) -> None:
        self._started, self._tasks = started, tasks

    def wait(self) -> Done:
        """Wait for all of them, also if one fails. MoetapError if one does."""
        begin = perf_counter()
        for task in self._tasks:
            task.exception()  # waits
        waited = perf_counter() - begin
        results = [task.result() for task in self._tasks]
        end = max((r[1] for r in results), default=self._started)
        return Done(sum(r[0] for r in results), end - self._started, waited)


class Reader:
    """Open files and threads to read them. `close` it.

    cold: read past the page cache. Raises MoetapError if a file cannot be opened.
    """

    def __init__(self, paths: Iterable[Path], cold: bool = False) -> None:
        self._files: dict[Path, _File] = {}
        try:
            for path in paths:
                self._files[path] = _File(path, cold)
        except OSError as error:
            self.close()
            raise MoetapError(f"{path}: cannot be opened ({error.strerror})") from error
        self._pool = ThreadPoolExecutor(N_THREADS, thread_name_prefix="moetap-read")

    @property
    def warnings(self) -> list[str]:
        """What a person should know about where the files are and how they are read."""
        found = []
        for path in self._files:
            kind, network = _file_system(path)
            if network:
                found.append(f"{path.parent}: on a network volume ({kind}); reads will be slow")
                break
        if any(file.method == "buffered" and file.cold for file in self._files.values()):
            found.append("the file system refuses reads past the page cache; they are not cold")
        return found

    def submit(self, experts: Sequence[tuple[Sequence[Run], Sequence[memoryview]]]) -> Batch:
        """Start reading some experts, each given by its runs and the buffers of its slot."""
        started = perf_counter()
        share = max(1, ENOUGH // max(1, len(experts)))
        tasks = [
            self._pool.submit(self._read, runs[i::share], buffers)
            for runs, buffers in experts
            for i in range(min(share, len(runs)))
        ]
        return Batch(started, tasks)

    def _read(self, runs: Sequence[Run], buffers: Sequence[memoryview]) -> tuple[int, float]:
        n_bytes = sum(
            self._files[path].fill(begin, [buffers[number] for number in numbers])
            for path, begin, numbers in runs
        )
        return n_bytes, perf_counter()

    def check(self) -> None:
        """MoetapError if a file is not the one that was opened, or was changed since."""
        for file in self._files.values():
            file.check()

    def close(self) -> None:
        """Close the files."""
        if hasattr(self, "_pool"):
            self._pool.shutdown()
        for file in self._files.values():
            os.close(file.fd)
        self._files.clear()


class _File:
    def __init__(self, path: Path, cold: bool) -> None:
        self.path, self.cold = path, cold
        if cold:
            self.fd, self.method = _open_uncached(path)
        else:
            self.fd, self.method = os.open(path, os.O_RDONLY), "buffered"
        self._identity = _identity(os.fstat(self.fd))
        self.size = self._identity[2]
        self._bounce = threading.local()

    def check(self) -> None:
        try:
            now = _identity(os.stat(self.path))
        except OSError as error:
            raise MoetapError(
                f"{self.path}: has gone while experts were read from it ({error.strerror}); "
                "restore it, then --resume"
            ) from error
        if now != self._identity:
            how = f"{self.size:,} bytes then, {now[2]:,} now"
            if now[2] == self.size:
                how = "replaced, or written to"
            raise MoetapError(
                f"{self.path}: was changed while experts were read from it ({how}); restore it, "
                "then --resume"
            )

    def fill(self, begin: int, buffers: list[memoryview]) -> int:
        """Fill the buffers from `begin` on; returns their bytes."""
        n_bytes = sum(len(b) for b in buffers)
        if self.method == "O_DIRECT":
            # Offsets, lengths and memory must be whole pages, which slots are not.
            start, length = enclosing(begin, n_bytes)
            bounce = self._bounce_buffer(length)
            # The last page of a file is read short.
            self._pread(start, [bounce[:length]], begin - start + n_bytes, PAGE)
            at = begin - start
            for buffer in buffers:
                buffer[:] = bounce[at : at + len(buffer)]
                at += len(buffer)
        else:
            self._pread(begin, buffers, n_bytes, 1)
        return n_bytes

    def _pread(self, begin: int, buffers: list[memoryview], needed: int, alignment: int) -> None:
        """Read until `needed` bytes are there. Short reads are legal and happen; one that fails is
        tried once more.
        """
        done, failed = 0, False
        while done < needed:
            try:
                got = os.preadv(self.fd, buffers, begin + done)
            except OSError as error:
                if not failed:
                    failed = True
                    continue
                self.check()  # a better reason, if there is one
                raise MoetapError(
                    f"{self.path}: reading at byte {begin + done:,} failed twice "
                    f"({error.strerror or error})"
                ) from error
            failed = False
            if done + got < needed:
                # An aligned read goes on where its last whole page ended.
                got -= (done + got) % alignment
            if got <= 0:
                raise MoetapError(
                    f"{self.path}: truncated while experts were read from it, expected "
                    f"{self.size:,} bytes, nothing from byte {begin + done:,} on; restore it, "
                    "then --resume"
                )
            done += got
            buffers = _after(buffers, got)

    def _bounce_buffer(self, length: int) -> memoryview:
        held: memoryview | None = getattr(self._bounce, "buffer", None)
        if held is None or len(held) < length:
            held = memoryview(mmap.mmap(-1, length))
            self._bounce.buffer = held
        return held


def _after(buffers: list[memoryview], n_bytes: int) -> list[memoryview]:
    """The buffers without their first n_bytes."""
    for i, buffer in enumerate(buffers):
        if n_bytes < len(buffer):
            return [buffer[n_bytes:], *buffers[i + 1 :]]
        n_bytes -= len(buffer)
    return []


def _identity(status: os.stat_result) -> tuple[int, int, int, int]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
