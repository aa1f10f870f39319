"""Files that a training appends to: never through a symbolic link, never waiting on a FIFO, since
a run dir may come from a stranger. Needs no torch."""

from __future__ import annotations

import json
import logging
import math
import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddnn.errors import UserError

log = logging.getLogger(__name__)

MOST_KEPT = 10_000
"""Rows kept in memory while the disk is full, some 4 MB; beyond it the oldest are lost."""
_BLOCK = 1 << 16
_LONGEST = 1 << 20
"""Bytes of a row; nobody but a stranger writes longer ones."""


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

    def flush(self) -> None:
        """Writes what was kept, and all down to the disk.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._write()
            descriptor = open_regular(self.path, os.O_WRONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(self.path, error, "go on with --resume") from error

    def waiting(self) -> list[str]:
        """The lines that wait for space."""
        return list(self._kept)

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

    def cut_after_epoch(self, epoch: int) -> None:
        """Keeps the lines before the first row of a later epoch, those kept in memory among them.

        Raises:
            UserError: the file cannot be written.
        """
        self._kept = deque((line for line in self._kept if _epoch_of(line) <= epoch), maxlen=MOST_KEPT)
        kept, offset = list(self._kept), 0
        if not self.path.exists():
            return
        refuse_what_is_not(self.path, "file")
        with self.path.open("rb") as file:
            for line in iter(lambda: file.readline(_LONGEST), b""):
                if not line.endswith(b"\n") or _epoch_of(line) > epoch:
                    break
                offset += len(line)
        self.cut(offset)
        self._kept.extend(kept)


def _epoch_of(line: str | bytes) -> int:
    """The epoch of a row; -1 where it has none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return -1
    found = row.get("epoch") if isinstance(row, dict) else None
    return found if type(found) is int else -1


def _end_of_lines(descriptor: int, end: int) -> int:
    """Where the last whole line among the first `end` bytes ends."""
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def flush_directory(path: Path) -> None:
    """Names that were made in a directory are on the disk after this, where the file system can say so."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
