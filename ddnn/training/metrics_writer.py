"""Writes metrics.jsonl so that a full disk does not end a training. Needs no torch."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from ddnn.training.metrics import MetricsRow
from ddnn.util.errors import UserError
from ddnn.util.files import append_text, open_for_append, require_kind

log = logging.getLogger(__name__)

MAX_PENDING_ROWS = 10_000
"""Rows kept in memory while the disk is full, about 4 MB; beyond it the oldest are lost."""
_MAX_LINE = 1 << 20


class MetricsWriter:
    """Appends rows to metrics.jsonl. A full disk does not end a training: rows that cannot be written are kept in
    memory and written, in order, before the next one that can be."""

    def __init__(self, path: Path) -> None:
        """`path` need not exist."""
        self.path = path
        self._pending: deque[str] = deque(maxlen=MAX_PENDING_ROWS)
        self._failed = False

    def write(self, row: MetricsRow) -> None:
        """One row, now or as soon as there is space; one warning as long as there is none.

        Raises:
            UserError: the file is a link, a FIFO or a device.
        """
        self._pending.append(json.dumps(row.model_dump(), allow_nan=False) + "\n")
        try:
            self._write_pending()
        except OSError as error:
            if not self._failed:
                log.warning("cannot write %s: %s; its rows are kept in memory until it can", self.path, error.strerror)
            self._failed = True

    def _write_pending(self) -> None:
        if self._pending:
            append_text(self.path, "".join(self._pending))
            if self._failed:
                log.info("%s can be written again: %d pending rows are in it", self.path.name, len(self._pending))
            self._pending.clear()
        self._failed = False

    def flush(self) -> None:
        """Writes pending rows, and everything through to the disk.

        Raises:
            UserError: it cannot be written.
        """
        try:
            self._write_pending()
            descriptor = open_for_append(self.path)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def truncate(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Cuts the file before the first row that is not to be kept, since that row is about to be written again;
        pending rows alike. A last line that was cut off is removed.

        Args:
            keep: called with each line as JSON; what is no JSON object is kept.

        Raises:
            UserError: the file cannot be written.
        """
        pending = [line for line in self._pending if _kept(line, keep)]
        self._pending.clear()
        self._pending.extend(pending)
        if not self.path.exists():
            return
        require_kind(self.path, "file")
        try:
            with self.path.open("rb") as file:
                end = sum(map(len, _leading_rows(file, keep)))
            descriptor = open_for_append(self.path)
            try:
                os.ftruncate(descriptor, end)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _cannot_write(self.path, error) from error


def _leading_rows(file: BinaryIO, keep: Callable[[dict[str, Any]], bool]) -> Iterator[bytes]:
    for line in iter(lambda: file.readline(_MAX_LINE), b""):
        if not line.endswith(b"\n") or not _kept(line, keep):
            return
        yield line


def _kept(line: str | bytes, keep: Callable[[dict[str, Any]], bool]) -> bool:
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return not isinstance(row, dict) or keep(row)
    return True


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path.name}: {error.strerror}",
        location=path.parent,
        hint="check that there is space, quota and permission to write, then resume with --resume",
    )
