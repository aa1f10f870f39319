"""One worker fails, all stop: none waits for ever."""

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

import torch.distributed as dist

from ddnn.distributed.communicator import Communicator
from ddnn.distributed.error_file import report_error, report_exit_code
from ddnn.distributed.mpirun import EXIT_KILLED, EXIT_RESUMABLE
from ddnn.util.errors import UserError

DUPLICATE_MESSAGE_DELAY = 1.0
"""Seconds that the other workers keep back an error of the user's: most are met by all at once, and one message is
enough."""

EXIT_BARRIER_TIMEOUT = 5.0
"""Seconds in which all workers that are to end together must arrive at their end."""


@contextmanager
def all_stop_on_error(comm: Communicator) -> Iterator[None]:
    """What runs in this block, on whichever worker it raises, ends every worker, with a message that names the one.

    A UserError prints its text and ends the job with its exit code, any other exception its traceback and 1,
    KeyboardInterrupt 130 or its own `code`, `SystemExit(code)` other than 0 its code. A connection that breaks, since
    another worker or its node has died, ends it as that one's death does: with 137. Exceptions of threads count too. SystemExit(75) is for
    all workers to raise, and prints nothing. With a single worker nothing is changed: the exception passes on to the
    caller.
    """
    if comm.world_size == 1:
        yield
        return
    previous = threading.excepthook
    threading.excepthook = lambda failed: _abort(comm, failed.exc_value) if failed.exc_value else None
    try:
        yield
    except BaseException as error:
        _abort(comm, error)
        raise
    finally:
        threading.excepthook = previous


def message_and_code(comm: Communicator, error: BaseException) -> tuple[str, int]:
    """What to print of an error in this worker, and the exit code of the job."""
    worker = f"ddnn: worker {comm.rank} on {comm.host}: "
    if isinstance(error, UserError):
        return f"{worker}error: {error}\n", error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return f"{worker}interrupted\n", int(getattr(error, "code", 130))
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return "" if code == EXIT_RESUMABLE else f"{worker}stopped with {error.code}\n", code
    if _is_communication_error(error):
        return f"{worker}lost its connection to another worker: {error}\n", EXIT_KILLED
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{worker}{type(error).__name__}: {error}\n{trace}", 1


def _is_communication_error(error: BaseException) -> bool:
    """Whether the MPI or torch.distributed has failed, not this worker."""
    mpi = sys.modules.get("mpi4py.MPI")
    return isinstance(error, dist.DistError) or (mpi is not None and isinstance(error, mpi.Exception))


def _abort(comm: Communicator, error: BaseException) -> None:
    """Prints the error and ends this worker and all others; returns only from a SystemExit of success."""
    message, code = message_and_code(comm, error)
    if code == 0:
        return
    comm.watchdog.disable()  # the end takes its time, which is limited here
    sys.stdout.flush()
    if code == EXIT_RESUMABLE and isinstance(error, SystemExit):
        _exit_together(comm, code)
    elif not report_error(comm.rank, message, None if code == EXIT_KILLED else code):
        if isinstance(error, UserError) and comm.rank > 0:
            time.sleep(DUPLICATE_MESSAGE_DELAY)
        write_stderr_and_drain(message)
    comm.abort(code)


def _exit_together(comm: Communicator, code: int) -> None:
    """Ends this worker by SystemExit where all others come here too; else returns.

    The code goes by the launcher where there is one: mpirun writes six lines about one that is not 0.
    """
    launched = report_exit_code(code)
    if threading.current_thread() is threading.main_thread() and comm.try_barrier(EXIT_BARRIER_TIMEOUT):
        sys.exit(0 if launched else code)


def write_stderr_and_drain(message: str, seconds: float = 3.0) -> None:
    """Writes to stderr, in one write, so that the lines of two failing workers do not mix; returns when mpirun has read
    it. Once mpirun is told to abort it drops what is left in the pipes (seen on a loaded machine)."""
    sys.stderr.write(message)
    sys.stderr.flush()
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
