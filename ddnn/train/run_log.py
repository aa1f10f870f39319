"""train.log: written for as long as it can be, and locked by the training that owns the run dir. Needs no torch."""

from __future__ import annotations

import errno
import fcntl
import io
import logging
import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, TextIO

from ddnn.train.run_files import open_regular

log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS)


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


def training_holds(log: Path) -> bool | Literal["unknown"]:
    """Whether a training holds the lock of its train.log now; "unknown" on a file system without locks.

    Where another machine holds it, some network file systems do not tell.
    """
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return "unknown"
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return "unknown"
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return "unknown"
    finally:
        os.close(handle)
    return False
