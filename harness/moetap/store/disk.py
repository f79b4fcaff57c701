"""Getting bytes onto the disk for good, and keeping a second writer away.

Knows fsync, atomic replacement, flock and full disks. Refuses to know what is written: nothing here
imports h5py.
"""

from __future__ import annotations

import fcntl
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

from moetap.errors import MoetapError


def sync(path: Path) -> None:
    """Return when the file's bytes, or the folder's entries, would survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # On macOS fsync stops at the drive's own cache.
        if sys.platform == "darwin" and path.is_file():
            try:
                fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
                return
            except OSError:  # network and foreign file systems do not have it
                pass
        os.fsync(fd)
    finally:
        os.close(fd)


def publish(temporary: Path, final: Path) -> None:
    """Give a finished temporary its final name; `final` is never half a file, power cut or not."""
    sync(temporary)
    os.replace(temporary, final)
    sync(final.parent)


class Sink(io.RawIOBase):
    """A file for HDF5 to write to that never fails.

    `error` holds the first failure; later writes are dropped.

    HDF5 keeps a file open whose flush failed, and then crashes the interpreter at exit (measured
    with HDF5 2.0 on a full
    disk: segmentation fault). It therefore never sees the error; whoever uses the sink looks at
    `error`.
    """

    def __init__(self, path: Path) -> None:
        self.error: OSError | None = None
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 - closed in close()

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: object, /) -> int | None:
        # Python has no type for buffers before 3.12.
        return self._file.readinto(buffer)  # type: ignore[arg-type]

    def write(self, data: object, /) -> int:
        # As in readinto.
        rest = memoryview(data)  # type: ignore[arg-type]
        size = rest.nbytes
        if self.error is None:
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                self.error = error
        return size

    def truncate(self, size: int | None = None, /) -> int:
        size = self.tell() if size is None else size
        if self.error is None:
            try:
                self._file.truncate(size)
            except OSError as error:
                self.error = error
        return size

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # some network file systems tell of a full disk only here
            self.error = self.error or error
        super().close()


class Lock:
    """The right to write into `folder`, which is created. A kill releases it.

    Raises MoetapError when another process, or another writer of this one, holds it, and OSError
    when the folder cannot be created or locked.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        while True:
            folder.mkdir(exist_ok=True)
            try:
                self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:  # its holder finished and removed the folder just now
                continue
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_open_at(self._fd, folder / "lock"):
                    return
            except BlockingIOError:
                os.close(self._fd)
                raise MoetapError(_held(folder)) from None
            except BaseException:
                os.close(self._fd)
                raise
            os.close(
                self._fd
            )  # a lock on a file that its former holder has deleted protects nothing

    def release(self) -> None:
        """Let the next writer in. The folder goes too if nothing but the lock is left in it."""
        with suppress(OSError):
            if [p.name for p in self.folder.iterdir()] == ["lock"]:
                (self.folder / "lock").unlink()
                self.folder.rmdir()
        os.close(self._fd)


def check_unlocked(folder: Path) -> None:
    """Raise MoetapError if a writer is at work in `folder`."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR)
    except OSError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MoetapError(_held(folder)) from None
    finally:
        os.close(fd)


def _held(folder: Path) -> str:
    return (
        f"{folder}: another capture is writing to this trace; "
        "wait for it to end, or choose another output"
    )


def _is_open_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
