"""Files: written atomically (under a temporary name beside them, flushed, renamed), appended to safely, locked; regular
files only."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import logging
import os
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ddnn.util.errors import UserError
from ddnn.util.text import EscapingFormatter

_CHUNK = 4 << 20  # bytes read at once


def is_full_disk(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is that there is no space or quota."""
    cause = error.__cause__ if isinstance(error, UserError) else error
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def _explain(error: OSError, path: Path) -> UserError:
    if is_full_disk(error):
        hint = "free disk space or quota, then run again"
        return UserError(f"no space left while writing {path.name}", location=path.parent, hint=hint)
    hint = "check that the directory exists and is writable"
    return UserError(f"cannot write {path.name}: {error.strerror}", location=path, hint=hint)


def open_regular(path: Path, *, follow_symlinks: bool = True) -> BinaryIO:
    """Opens a regular file to be read. A pipe or a device in its place is neither waited for nor touched. OSError: it
    cannot be opened, or is no regular file; without `follow_symlinks`, it is a symbolic link."""
    _refuse_irregular(path.stat(follow_symlinks=follow_symlinks).st_mode, path)
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow_symlinks else os.O_NOFOLLOW)
    handle = os.fdopen(os.open(path, flags), "rb")
    try:
        _refuse_irregular(os.fstat(handle.fileno()).st_mode, path)  # it may have been exchanged meanwhile
    except OSError:
        handle.close()
        raise
    return handle


def _refuse_irregular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory, not a regular file", str(path))
    if stat.S_ISLNK(mode):
        raise OSError(errno.ELOOP, "is a symbolic link", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bytes_limited(path: Path, most: int) -> bytes:
    """The bytes of a regular file, as many as its size says. OSError: it cannot be read, is no regular file, has more
    than `most` bytes, or does not fit into memory."""
    with open_regular(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {most}", str(path))
        try:
            return handle.read(size)
        except MemoryError:
            raise OSError(errno.ENOMEM, f"its {size} bytes do not fit into memory", str(path)) from None


def has_content(path: Path, data: bytes, *, follow_symlinks: bool = True) -> bool:
    """Whether `path` is a regular file with exactly these bytes."""
    try:
        with open_regular(path, follow_symlinks=follow_symlinks) as handle:
            return handle.read(len(data) + 1) == data
    except OSError:
        return False


@contextmanager
def atomic_write(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """A binary file that is renamed to `path` only when the block ends without an error; else nothing is left behind.
    Without `sync` it may be lost where the machine goes down soon after. UserError: the file cannot be written (no
    permission, disk full)."""
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as handle:  # made here: never through a link that somebody left under that name
            yield handle
            handle.flush()
            if sync:
                os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _explain(error, path) from error
    finally:
        with suppress(OSError):  # what went wrong first is what the user is told
            temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, whose content appears in `path` only when the block ends without an error: in one step where
    `path` does not exist, entry by entry where it is an empty directory. UserError: `path` is not empty, or cannot be
    written."""
    exists = path.exists()
    temporary = path / f".tmp{os.getpid()}" if exists else path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        if exists and (not path.is_dir() or any(path.iterdir())):
            message = f"{path.name} exists already and is not empty"
            raise UserError(message, location=path, hint="name another directory, or remove it")
        temporary.mkdir(parents=True)
        yield temporary
        if not exists:
            temporary.rename(path)
        else:
            for entry in sorted(temporary.iterdir()):
                entry.rename(path / entry.name)
    except OSError as error:
        raise _explain(error, path) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to `path`, whole or not at all."""
    with atomic_write(path) as handle:
        handle.write(text.encode())


def ensure_directory(path: Path) -> None:
    """Makes `path` and its parents; raises UserError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path}: {error.strerror}", location=path) from error


def require_kind(path: Path, kind: Literal["file", "directory"]) -> None:
    """Does nothing if `path` does not exist, or is what `kind` says; a symbolic link is neither file nor directory.
    UserError: it is something else."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot look at {path.name}: {error.strerror}", location=path) from error
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFLNK: "a symbolic link"}
    actual = kinds.get(stat.S_IFMT(mode), "a special file")
    if actual != f"a {kind}":
        expected = "regular file" if kind == "file" else kind
        raise UserError(f"{path.name} is {actual}, expected a {expected}", location=path, hint="remove or rename it")


def open_for_append(path: Path) -> int:
    """The descriptor of a regular file, opened for reading and appending, created if it does not exist. UserError: it
    is a symbolic link, a FIFO or a device. OSError: it cannot be opened."""
    require_kind(path, "file")
    # O_NOFOLLOW, O_NONBLOCK and fstat: it may have become something else since.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path.name} is not a regular file", location=path, hint="remove or rename it")
    return descriptor


def append_bytes(path: Path, data: bytes) -> None:
    """Appends `data` completely or not at all; creates the file if it does not exist. UserError: see
    `open_for_append`. OSError: it cannot be written."""
    descriptor = open_for_append(path)
    size = os.fstat(descriptor).st_size
    try:
        write_all(descriptor, data)
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, size)
        raise
    finally:
        os.close(descriptor)


def write_verified(path: Path, pieces: Callable[[], Iterable[Any]]) -> tuple[int, str]:
    """Writes a new file, flushes it to the disk, and reads it back past the page cache; returns its size and SHA-256.
    `pieces` gives buffers of bytes; it is called to write, to compare, and in a thread for the SHA-256. OSError: the
    file exists, cannot be written, or what was read back is something else."""
    from concurrent.futures import ThreadPoolExecutor

    with path.open("x+b", buffering=0) as file, ThreadPoolExecutor(1) as thread:
        digest = thread.submit(_sha256, pieces)  # as slow as the disk, and needs no more than a core
        for piece in pieces():
            write_all(file.fileno(), piece)
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        if not all(_reads(file, piece) for piece in pieces()) or file.read(1):
            raise OSError(errno.EIO, "what was read back is not what was written", str(path))
        return file.tell(), digest.result()


def _sha256(pieces: Callable[[], Iterable[Any]]) -> str:
    digest = hashlib.sha256()
    for piece in pieces():
        digest.update(piece)
    return digest.hexdigest()


def _reads(file: io.RawIOBase, piece: Any) -> bool:
    """Whether the next bytes of a file are those of `piece`."""
    import numpy as np  # compares several times as fast as a second SHA-256 would

    expected = np.frombuffer(piece, np.uint8)
    chunks = (expected[start : start + _CHUNK] for start in range(0, len(expected), _CHUNK))
    return all(np.array_equal(np.frombuffer(file.read(len(chunk)) or b"", np.uint8), chunk) for chunk in chunks)


def write_all(descriptor: int, data: Any, offset: int | None = None) -> None:
    remaining = memoryview(data)
    while remaining:
        at = None if offset is None else offset + len(data) - len(remaining)
        remaining = remaining[os.write(descriptor, remaining) if at is None else os.pwrite(descriptor, remaining, at) :]


def fsync_directory(path: Path, *, strict: bool = False) -> None:
    """Flushes names created in a directory to the disk, if the file system can do so; `strict`: OSError if it fails."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if strict and error.errno not in (errno.EINVAL, errno.ENOTSUP):  # these: the file system cannot do it
            raise


class FileLock:
    """An exclusive advisory lock (flock) on a regular file, which is created if it does not exist. It ends with the
    process that holds it, however that ends; child processes do not inherit it unless they are given `fileno()`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    def acquire(self, timeout: float = 0.0) -> bool:
        """Takes the lock, trying for `timeout` seconds, and at least twice if that is not 0; False where the file
        system has no locks. BlockingIOError: another process holds it. UserError: the path is not a regular file.
        OSError: it cannot be opened or locked."""
        descriptor = open_for_append(self.path)
        try:
            locked = _flock(descriptor, time.monotonic() + timeout)
            if not os.path.samestat(os.fstat(descriptor), self.path.stat()):
                raise BlockingIOError(errno.EWOULDBLOCK, "the file was replaced meanwhile", str(self.path))
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return locked

    def fileno(self) -> int:
        assert self._descriptor is not None, "not acquired"
        return self._descriptor

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _flock(descriptor: int, deadline: float) -> bool:
    while True:
        last = time.monotonic() >= deadline
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if last:
                raise
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS):
                raise
            return False
        time.sleep(0.2)


def is_locked(path: Path) -> bool | None:
    """Whether a process holds the `FileLock` of a file; None if that cannot be found out: no regular file, or no locks.
    Where another machine holds it, some network file systems do not tell."""
    try:
        with open_regular(path) as handle:
            fcntl.flock(handle.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


class LogFile(logging.FileHandler):
    """A log that may find no space: that is printed once, and is no reason to end a training of days."""

    failed = False

    def __init__(self, path: Path, append: bool) -> None:
        """If it is appended to, a last line that was cut off is ended. UserError: no regular file. OSError."""
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace")
        self.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
        assert self.stream is not None
        descriptor = self.stream.fileno()
        with suppress(OSError):  # no space for the line break
            size = os.fstat(descriptor).st_size
            if not append:
                os.ftruncate(descriptor, 0)
            elif size and os.pread(descriptor, 1, size - 1) != b"\n":
                os.write(descriptor, b"\n")

    def _open(self) -> io.TextIOWrapper:
        descriptor = open_for_append(Path(self.baseFilename))
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)  # noqa: PTH123 (a descriptor)

    def handleError(self, record: logging.LogRecord) -> None:
        if not self.failed:  # logging's own prints a traceback for each line
            self.failed = True
            print(f"ddnn: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        with suppress(OSError):  # what finds no space is lost
            super().close()
