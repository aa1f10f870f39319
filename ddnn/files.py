"""Files that appear whole: written under a temporary name in the same directory, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import json
import os
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
