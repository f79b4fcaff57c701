"""kill -9 at every step: a prefix of the streams survives, at most the one in progress is lost."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from storekit import a_capture, a_model, a_stream, content, plain

from moetap.errors import MoetapError
from moetap.store import TraceWriter, disk, parts, read

MODEL = a_model()
CAPTURE = a_capture(n_prompts=3)
STREAMS = [a_stream(i, MODEL, rows=30) for i in range(3)]


class Steps:
    """Counts the steps that change the disk, and dies just before step `fatal`.

    A write is two steps: nothing of it is done, half of it is done.
    """

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.count = 0

    def step(self) -> None:
        self.count += 1
        if self.count == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return function(*args, **kwargs)

        return wrapper

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("replace", "fsync", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, self.before(getattr(os, name)))
        write = disk.Sink.write
        writes = itertools.count()

        def half_sink(sink: disk.Sink, data: Any) -> int:
            # Some of the many: a half merged file is a half merged file.
            if next(writes) % 8 == 0:
                write(sink, memoryview(data)[: len(data) // 2])
                self.step()
                sink.seek(-(len(data) // 2), os.SEEK_CUR)
            return write(sink, data)

        def half_file(path: Path, data: Any) -> int:
            self.step()
            with path.open("wb", buffering=0) as file:
                file.write(data[: len(data) // 2])
                self.step()
                file.write(data[len(data) // 2 :])
            return len(data)

        patch.setattr(disk.Sink, "write", half_sink)
        patch.setattr(Path, "write_bytes", half_file)


def capture(path: Path, resume: bool, told: Callable[[], object] = lambda: None) -> None:
    """A whole run; `told` is called after each stream that the writer says is stored."""
    with TraceWriter(path, MODEL, CAPTURE, resume=resume) as writer:
        for stream in STREAMS:
            if stream.prompt_id not in writer.finished:
                writer.append(stream)
                told()
        writer.close(complete=True)


def interrupted_after(n: int, path: Path) -> None:
    with TraceWriter(path, MODEL, CAPTURE) as writer:
        for stream in STREAMS[:n]:
            writer.append(stream)


def start(work: Callable[[Callable[[], object]], None]) -> tuple[int, int]:
    """Runs `work` in a child. Its pid, and a descriptor with a byte for each call of `told`."""
    get, put = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            write = os.write
            work(lambda: write(put, b"."))
            status = 0
        finally:
            os._exit(status)
    os.close(put)
    return pid, get


def end(pid: int, get: int) -> tuple[int, int]:
    """Wait status of the child, and how often it called `told`."""
    status = os.waitpid(pid, 0)[1]
    told = len(os.read(get, 1000))
    os.close(get)
    return status, told


def check(path: Path, stored: int, expected: dict[str, Any]) -> None:
    """After a kill with `stored` streams known to be stored: all that is promised."""
    leftovers = parts.listing(path)
    if not leftovers and not path.exists():
        assert stored == 0
        with pytest.raises(MoetapError, match="no such file"):
            read(path)
    else:
        trace = read(path)
        assert stored <= len(trace.streams) <= stored + 1
        assert [plain(s) for s in trace.streams] == expected["streams"][: len(trace.streams)]
        if trace.complete:
            assert len(trace.streams) == len(STREAMS)
            with pytest.raises(MoetapError, match="already complete"):
                capture(path, resume=True)
            assert content(trace, ("run_id", "created")) == expected
            return
    capture(path, resume=bool(leftovers or path.exists()))
    assert content(read(path), ("run_id", "created")) == expected
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an uninterrupted run writes."""
    path = tmp_path_factory.mktemp("whole") / "t.h5"
    capture(path, resume=False)
    return content(read(path), ("run_id", "created"))


@pytest.mark.parametrize("before", [None, 1], ids=["new", "resumed"])
def test_a_kill_at_every_step(tmp_path: Path, expected: dict[str, Any], before: int | None) -> None:
    if before is not None:
        interrupted_after(before, tmp_path / "t.h5")
    for fatal in itertools.count(1):
        folder = tmp_path / str(fatal)
        folder.mkdir()
        path = folder / "t.h5"
        if before is not None:
            shutil.copy(tmp_path / "t.h5", path)

        def work(told: Callable[[], object], path: Path = path, fatal: int = fatal) -> None:
            with pytest.MonkeyPatch.context() as patch:
                Steps(fatal).patch(patch)
                capture(path, before is not None, told)

        status, told = end(*start(work))
        if status == 0:
            break
        assert status == signal.SIGKILL
        check(path, (before or 0) + told, expected)
    assert fatal > 25


def test_twenty_kills_at_random_moments(tmp_path: Path, expected: dict[str, Any]) -> None:
    def run(number: int, wait: float) -> tuple[bool, float]:
        folder = tmp_path / str(number)
        folder.mkdir()
        begin = time.perf_counter()
        pid, get = start(lambda told: capture(folder / "t.h5", False, told))
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
        status, told = end(pid, get)
        check(folder / "t.h5", told, expected)
        return status == signal.SIGKILL, time.perf_counter() - begin

    begin = time.perf_counter()
    capture(tmp_path / "whole.h5", resume=False)
    length = time.perf_counter() - begin
    rng = random.Random(2)
    hits = sum(run(number, rng.uniform(0, length))[0] for number in range(20))
    assert hits >= 5


def test_a_kill_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "t.h5"

    def work(told: Callable[[], object]) -> None:
        with TraceWriter(path, MODEL, CAPTURE) as writer:
            writer.append(STREAMS[0])
            told()
            time.sleep(60)

    pid, get = start(work)
    assert os.read(get, 1) == b"."
    with pytest.raises(MoetapError, match="another capture"):
        TraceWriter(path, MODEL, CAPTURE, resume=True)
    os.kill(pid, signal.SIGKILL)
    end(pid, get)
    with TraceWriter(path, MODEL, CAPTURE, resume=True) as writer:
        assert writer.finished == {"prompt-0"}
