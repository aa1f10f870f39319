"""One worker fails, all stop: else the others would wait for its next message for ever."""

from __future__ import annotations

import array
import fcntl
import sys
import termios
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from ddnn.errors import UserError
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.last_words import leave_last_words

FIRST_SPEAKS = 1.0
"""Seconds that the others keep back a mistake of the user's: most are met by all at once, and one message is enough."""


@contextmanager
def all_stop_on_error(exchange: Exchange) -> Iterator[None]:
    """What runs in this block, on whichever worker it raises, ends every worker, with a message that names the one.

    A UserError prints its text and ends the job with 2, any other exception its traceback and 1, KeyboardInterrupt 130,
    `SystemExit(code)` other than 0 its code. Exceptions of threads count too. With a single worker nothing is changed:
    the exception goes on to the caller.
    """
    if exchange.size == 1:
        yield
        return
    previous = threading.excepthook
    threading.excepthook = lambda failed: _stop(exchange, failed.exc_value) if failed.exc_value else None
    try:
        yield
    except BaseException as error:
        _stop(exchange, error)
        raise
    finally:
        threading.excepthook = previous


def message_and_code(exchange: Exchange, error: BaseException) -> tuple[str, int]:
    """What to print of an error in this worker, and the exit code of the job."""
    worker = f"ddnn: worker {exchange.rank} on {exchange.host}: "
    if isinstance(error, UserError):
        return f"{worker}error: {error}\n", 2
    if isinstance(error, KeyboardInterrupt):
        return f"{worker}interrupted\n", getattr(error, "code", 130)  # StoppedEarly knows which signal it was
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return f"{worker}stopped with {error.code}\n", code
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{worker}{type(error).__name__}: {error}\n{trace}", 1


def _stop(exchange: Exchange, error: BaseException) -> None:
    """Prints and ends all workers; returns only from a SystemExit that says success."""
    message, code = message_and_code(exchange, error)
    if code == 0:
        return
    sys.stdout.flush()
    if not leave_last_words(exchange.rank, message):
        if isinstance(error, UserError) and exchange.rank > 0:
            time.sleep(FIRST_SPEAKS)
        # One write, so that the lines of two failing workers do not mix.
        sys.stderr.write(message)
        sys.stderr.flush()
        _wait_until_read()
    exchange.communicator.Abort(code)


def _wait_until_read(seconds: float = 3.0) -> None:
    """Waits until mpirun has read what this worker wrote: once it is told to abort, it drops what still stands in the
    pipes (seen on a loaded machine: the message was lost)."""
    deadline = time.monotonic() + seconds
    unread = array.array("i", [0])
    for stream in (sys.stdout, sys.stderr):
        try:
            while time.monotonic() < deadline:
                fcntl.ioctl(stream.fileno(), termios.FIONREAD, unread)
                if unread[0] == 0:
                    break
                time.sleep(0.02)
        except OSError:  # not a pipe, or closed: nothing to wait for
            continue
    time.sleep(0.3)  # read is not yet passed on
