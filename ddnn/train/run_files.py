"""Files that a training appends to, its lock, and what it removes: never through a symbolic link, never waiting on a
FIFO, since a run dir may come from a stranger. Needs no torch."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import math
import os
import re
import stat
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from ddnn.errors import UserError

log = logging.getLogger(__name__)

MOST_KEPT = 10_000
"""Rows kept in memory while the disk is full, some 4 MB; beyond it the oldest are lost."""
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)
_BLOCK = 1 << 16
_CHECKPOINT_DIR = re.compile(r"(?:\.tmp-)?\d{8,}")
_CHECKPOINT_FILE = re.compile(r"\.?(?:checkpoint\.json|shared\.safetensors|worker\d{4,}\.safetensors)(?:\.tmp\d+)?")


def refuse_what_is_not(path: Path, kind: str) -> None:
    """UserError where `path` is there, but is no regular file (`kind` "file") or no real directory ("directory")."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"cannot look at {path.name}: {error.strerror}", where=path) from error
    if stat.S_ISREG(mode) if kind == "file" else stat.S_ISDIR(mode):
        return
    found = "a symbolic link" if stat.S_ISLNK(mode) else "a directory" if stat.S_ISDIR(mode) else "a special file"
    found = "a file" if stat.S_ISREG(mode) else found
    raise UserError(
        f"{path.name} is {found}; a training writes only into a {'regular file' if kind == 'file' else kind} here",
        where=path,
        mend="remove it, or name another run dir",
    )


def open_regular(path: Path, flags: int) -> int:
    """The descriptor of a regular file, made where it is missing.

    Raises:
        UserError: it is a symbolic link, a FIFO, a device. OSError: it cannot be opened.
    """
    refuse_what_is_not(path, "file")
    # Between the look and the opening it may have become something else.
    careful = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags | careful, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(f"{path.name} is no regular file", where=path, mend="remove it, or name another run dir")
    return descriptor


def _append(path: Path, text: str) -> None:
    """Appends `text` whole or not at all; raises OSError."""
    descriptor = open_regular(path, os.O_WRONLY | os.O_APPEND)
    try:
        before = os.fstat(descriptor).st_size
        left = memoryview(text.encode())
        try:
            while left:
                left = left[os.write(descriptor, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)


def _line(metrics: dict[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
    return json.dumps(finite, allow_nan=False) + "\n"


def _cannot_write(path: Path, error: OSError, then: str) -> UserError:
    return UserError(
        f"cannot write {path.name}: {error.strerror}",
        where=path.parent,
        mend=f"check that there is space, quota and permission to write, then {then}",
    )


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Appends one JSON object as a line, whole or not at all; null stands for what is not finite.

    Raises:
        UserError: the file cannot be written (no permission, disk full), or is no regular one.
    """
    try:
        _append(path, _line(metrics))
    except OSError as error:
        raise _cannot_write(path, error, "run again") from error


class MetricsFile:
    """metrics.jsonl of a training, which a full disk does not end: rows that find no space are kept in memory and
    written, in order, before the next one that does."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist."""
        self.path = path
        self._kept: deque[str] = deque(maxlen=MOST_KEPT)
        self._full = False

    def append(self, metrics: dict[str, Any]) -> None:
        """One row, now or as soon as there is space; one warning for as long as there is none."""
        self._kept.append(_line(metrics))
        try:
            self._write()
        except OSError as error:
            if not self._full:
                log.warning("cannot write %s: %s; its rows are kept in memory until it can", self.path, error.strerror)
            self._full = True

    def _write(self) -> None:
        if self._kept:
            _append(self.path, "".join(self._kept))
            if self._full:
                log.info("%s can be written again: %d rows that were kept are in it", self.path.name, len(self._kept))
            self._kept.clear()
        self._full = False

    def flush(self) -> int:
        """Writes what was kept, down to the disk; the size of the file in bytes.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._write()
            descriptor = open_regular(self.path, os.O_WRONLY)
            try:
                os.fsync(descriptor)
                return os.fstat(descriptor).st_size
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(self.path, error, "go on with --resume") from error

    def cut(self, offset: int | None = None) -> None:
        """Keeps the whole lines, those among the first `offset` bytes only where that is given.

        Raises:
            UserError: the file cannot be written.
        """
        self._kept.clear()
        try:
            descriptor = open_regular(self.path, os.O_RDWR)
            try:
                size = os.fstat(descriptor).st_size
                end = _end_of_lines(descriptor, size if offset is None else min(offset, size))
                if offset is not None and end < offset:
                    log.warning("%s has lost rows: %d bytes found, %d expected", self.path, end, offset)
                os.ftruncate(descriptor, end)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(self.path, error, "run again") from error


def _end_of_lines(descriptor: int, end: int) -> int:
    """Where the last whole line among the first `end` bytes ends."""
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


class RunLog(logging.FileHandler):
    """The log as a file. Where it cannot be written, that is said once: no reason to end a training of days."""

    failed = False

    def __init__(self, path: Path) -> None:
        """Opens the file, to append. UserError where it is no regular file, OSError where it cannot be opened."""
        super().__init__(path, mode="a", encoding="utf-8", errors="backslashreplace")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def _open(self) -> io.TextIOWrapper:
        descriptor = open_regular(Path(self.baseFilename), os.O_RDWR | os.O_APPEND)
        return open(descriptor, "a", encoding=self.encoding, errors=self.errors)  # noqa: PTH123 (a descriptor)

    def begin(self, *, anew: bool) -> None:
        """Empties the file, or makes the next line begin on one of its own after one that was torn."""
        stream = self.stream or self._open()
        with suppress(OSError):  # no space for the line break
            if anew:
                stream.truncate(0)
            elif (size := os.fstat(stream.fileno()).st_size) and os.pread(stream.fileno(), 1, size - 1) != b"\n":
                os.write(stream.fileno(), b"\n")

    def claim(self, wait: float) -> None:
        """Takes the lock of the file, trying for `wait` seconds; it goes with this process. A file system without
        locks is warned about.

        Raises:
            BlockingIOError: another process holds it. OSError: it cannot be taken.
        """
        stream = self.stream or self._open()
        try:
            _lock(stream, wait)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            log.warning(
                "%s lies on a file system without locks (%s): nobody notices a second training into this run dir",
                *(self.baseFilename, error.strerror),
            )
        if not os.path.samestat(os.fstat(stream.fileno()), os.stat(self.baseFilename)):  # noqa: PTH116 (is a string)
            raise BlockingIOError("it was replaced meanwhile")

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where a line could not be written; logging's own prints a traceback for each."""
        if not self.failed:
            self.failed = True
            print(f"ddnn: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        """Closes the file; what finds no space is lost."""
        with suppress(OSError):
            super().close()


def _lock(stream: TextIO, wait: float) -> None:
    """Tries at least twice, since `ddnn status` holds the lock while it looks."""
    until = time.monotonic() + wait
    while True:
        last = time.monotonic() >= until
        try:
            return fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if last:
                raise
        time.sleep(0.2)


def remove_checkpoints(directory: Path) -> None:
    """Removes what a training leaves in its checkpoints folder, and the folder if nothing else is in it. What cannot be
    removed is warned about."""
    try:
        outer = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s is left: %s", directory, error.strerror)
        return
    try:
        for name in os.listdir(outer):  # noqa: PTH208 (by descriptor: the folder may be swapped for a link)
            if _CHECKPOINT_DIR.fullmatch(name):
                _remove_checkpoint(outer, name)
        directory.rmdir()
    except OSError as error:
        log.warning("something is left in %s: %s", directory, error.strerror)
    finally:
        os.close(outer)


def _remove_checkpoint(outer: int, name: str) -> None:
    """Of one checkpoint, the regular files with names of ours, the manifest first: without it, it is none."""
    try:
        inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=outer)
    except NotADirectoryError:
        return
    try:
        for file in sorted(os.listdir(inner)):  # noqa: PTH208
            if _CHECKPOINT_FILE.fullmatch(file) and stat.S_ISREG(os.lstat(file, dir_fd=inner).st_mode):
                os.unlink(file, dir_fd=inner)
    finally:
        os.close(inner)
    with suppress(OSError):  # not empty: something of others is in it
        os.rmdir(name, dir_fd=outer)
