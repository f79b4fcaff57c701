"""Reading experts: worker threads that fill slots from the checkpoint's files.

Knows files, ranges, short reads, retries and reads past the page cache. Refuses to know MLX and
what is in a slot: it gets writable buffers.

Workers call preadv only, which releases the interpreter's lock. One task is one expert, adjacent
slices in one call; where few experts are missing, a part of one.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread, current_thread, local
from time import perf_counter
from typing import NamedTuple, TypeAlias

from moetap.capture.probe import PAGE, _file_system, _open_uncached, enclosing
from moetap.errors import MoetapError

N_THREADS = 8
"""Most reads in flight."""

ENOUGH = 4
"""Reads in flight that are wanted: where fewer experts miss, each is read in parts. (An M5 Max was
seen to give one reader 4 GB/s, several 12.6.) More parts would cost more Python than they save.
"""


class Done(NamedTuple):
    """What a batch of reads took. read_s: from its start to the end of its last read. wait_s: how
    long the caller waited for it, its own waking up included.
    """

    n_bytes: int
    read_s: float
    wait_s: float


class Batch:
    """Reads in flight; `wait` before anything uses the buffers."""

    def __init__(self, n_tasks: int) -> None:
        self._started = self._ended = perf_counter()
        self._left, self._n_bytes = n_tasks, 0
        self._error: BaseException | None = None
        self._counting = Lock()
        self._over = Lock()  # held until the last task has ended
        self._over.acquire()

    def ended(self, n_bytes: int, error: BaseException | None = None) -> None:
        """A task has ended; called by its worker."""
        with self._counting:
            self._ended = perf_counter()
            self._n_bytes += n_bytes
            self._error = self._error or error
            self._left -= 1
            if not self._left:
                self._over.release()

    def wait(self) -> Done:
        """Wait for all of them, also if one fails. MoetapError if one does."""
        begin = perf_counter()
        with self._over:
            wait_s = perf_counter() - begin
        if self._error:
            raise self._error
        return Done(self._n_bytes, self._ended - self._started, wait_s)


class Reader:
    """Open files and threads to read them. `close` it.

    cold: read past the page cache. Raises MoetapError if a file cannot be opened.
    """

    def __init__(self, paths: Iterable[Path], cold: bool = False) -> None:
        self._files: dict[Path, _File] = {}
        # Not a ThreadPoolExecutor, whose futures cost the caller four times as much.
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads: list[Thread] = []
        # Also at exit, or a read in flight would write into memory that is gone.
        self._end = weakref.finalize(self, _end, self._tasks, self._threads, self._files)
        for _ in range(N_THREADS):
            thread = Thread(target=_work, args=(self._tasks,), name="moetap-read", daemon=True)
            thread.start()
            self._threads.append(thread)
        try:
            for path in paths:
                self._files[path] = _File(path, cold)
        except OSError as error:
            self.close()
            raise MoetapError(f"{path}: cannot be opened ({error.strerror})") from error

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

    def runs(self, pieces: Iterable[tuple[Path, int, int]]) -> tuple[Run, ...]:
        """The pieces of an expert, each (file, first byte, bytes) of the buffer of its number;
        those that follow each other in a file together.
        """
        runs: list[Run] = []
        last, end = None, -1
        numbered = sorted((path, begin, i, size) for i, (path, begin, size) in enumerate(pieces))
        for path, begin, number, size in numbered:
            if (path, begin) == (last, end):
                file, first, numbers = runs[-1]
                runs[-1] = file, first, (*numbers, number)
            else:
                runs.append((self._files[path], begin, (number,)))
            last, end = path, begin + size
        return tuple(runs)

    def submit(self, experts: Sequence[tuple[Sequence[Run], Sequence[memoryview]]]) -> Batch:
        """Start reading some experts, at least one, each given by its runs and the buffers of its
        slot.
        """
        share = max(1, ENOUGH // len(experts))
        tasks = [
            (runs[i::share], buffers)
            for runs, buffers in experts
            for i in range(min(share, len(runs)))
        ]
        batch = Batch(len(tasks))
        for runs, buffers in tasks:
            self._tasks.put((batch, runs, buffers))
        return batch

    def check(self) -> None:
        """MoetapError if a file is not the one that was opened, or was changed since, or if the
        reader is closed.
        """
        if not self._end.alive:
            raise MoetapError("the checkpoint's files were closed; load the model again")
        for file in self._files.values():
            file.check()

    def close(self) -> None:
        """End the threads, after what they have to read, and close the files."""
        self._end()


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    """What a thread does until it gets None."""
    while task := tasks.get():
        batch, runs, buffers = task
        n_bytes, failed = 0, None
        try:
            for file, begin, numbers in runs:
                n_bytes += file.fill(begin, [buffers[number] for number in numbers])
        except BaseException as error:
            failed = error
        batch.ended(n_bytes, failed)
        # Or they would live until the next task; an error, with all that its traceback refers to.
        del task, batch, runs, buffers, failed


def _end(tasks: SimpleQueue[_Task | None], threads: list[Thread], files: dict[Path, _File]) -> None:
    for _ in threads:
        tasks.put(None)
    if current_thread() in threads:
        return  # it collects garbage, in the middle of a task
    for thread in threads:
        thread.join()
    for file in files.values():
        os.close(file.fd)
    files.clear()


class _File:
    def __init__(self, path: Path, cold: bool) -> None:
        self.path, self.cold = path, cold
        if cold:
            self.fd, self.method = _open_uncached(path)
        else:
            self.fd, self.method = os.open(path, os.O_RDONLY), "buffered"
        self._identity = _identity(os.fstat(self.fd))
        self.size = self._identity[2]
        self._bounce = local()

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


Run: TypeAlias = tuple[_File, int, tuple[int, ...]]
"""Bytes of a file: the file, the first byte, and the numbers of the buffers that they go to, one
after the other."""

_Task: TypeAlias = tuple[Batch, Sequence[Run], Sequence[memoryview]]
