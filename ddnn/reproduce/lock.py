"""Only one call of `ddnn reproduce` at a time makes runs into a folder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddnn.errors import UserError
from ddnn.files import make_directory

LOCK = "jobs.lock"
"""In OUT: held while runs are made or submitted, so that two calls at once do not make the same."""


@contextmanager
def alone(out: Path) -> Iterator[int]:
    """Holds OUT's lock for the block. Where the file system has no locks, nobody notices a second call.

    Yields:
        The lock's file descriptor: processes that keep it open hold the lock too, as long as they run.

    Raises:
        UserError: another call holds it, or OUT cannot be made.
    """
    make_directory(out)
    with (out / LOCK).open("ab") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                "another call is making these runs, or trainings of one that was killed write their checkpoints",
                where=out,
                mend="wait until they end",
            ) from error
        except OSError:
            pass
        yield held.fileno()
