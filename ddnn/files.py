"""Files that appear whole: written under a temporary name in the same directory, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from ddnn.errors import UserError


def _explain(error: OSError, path: Path) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"no space left while writing {path.name}",
            where=path.parent,
            mend="free disk space or quota, then run again",
        )
    return UserError(
        f"cannot write {path.name}: {error.strerror}",
        where=path,
        mend="check that the directory exists and is writable",
    )


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file to be read. A pipe or a device in its place is neither waited for nor touched.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    _refuse_irregular(path.stat().st_mode, path)
    handle = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    try:
        _refuse_irregular(os.fstat(handle.fileno()).st_mode, path)  # it may have been exchanged meanwhile
    except OSError:
        handle.close()
        raise
    return handle


def _refuse_irregular(mode: int, path: Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "Is a directory, not a regular file", str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a regular file, as many as its size says.

    Raises:
        OSError: it cannot be read, is no regular file, has more than `most` bytes, or does not fit into memory.
    """
    with open_regular(path) as handle:
        size = os.fstat(handle.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"it has {size} bytes, expected at most {most}", str(path))
        try:
            return handle.read(size)
        except MemoryError:
            raise OSError(errno.ENOMEM, f"its {size} bytes do not fit into memory", str(path)) from None


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A binary file that is renamed to `path` only when the block ends without an error; else nothing is left behind.

    Raises:
        UserError: the file cannot be written (no permission, disk full).
    """
    temporary = path.with_name(f".{path.name}.tmp{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as handle:  # made here: never through a link that somebody left under that name
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except OSError as error:
        raise _explain(error, path) from error
    finally:
        with suppress(OSError):  # what went wrong first is what the user is told
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` (UTF-8) to `path`, whole or not at all."""
    with written_whole(path) as handle:
        handle.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as indented JSON to `path`, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def make_directory(path: Path) -> None:
    """Makes `path` and its parents; raises UserError where that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path}: {error.strerror}", where=path) from error
