"""One worker fails, all stop, none waits for ever; and what failing workers report to their launcher, which prints it
below mpirun's own lines once mpirun has ended. Workers that share no file with the launcher print to stderr."""

from __future__ import annotations

import array
import fcntl
import sys
import termios
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddnn.distributed.launcher_file import append
from ddnn.distributed.signals import EXIT_KILLED, EXIT_RESUMABLE
from ddnn.util.errors import exit_code, user_message

if TYPE_CHECKING:  # it imports torch, which the launcher does without
    from ddnn.distributed.communicator import Communicator

DUPLICATE_MESSAGE_DELAY = 1.0
"""Seconds that the other workers keep back an error of the user's: most are met by all at once, and one message is
enough."""

EXIT_BARRIER_TIMEOUT = 5.0  # seconds in which all workers that are to end together must arrive at their end


@dataclass(frozen=True)
class WorkerReports:
    """What the workers of one attempt have reported."""

    # of workers that failed, by rank; what several report alike once, from the lowest rank
    messages: tuple[str, ...] = ()
    hung: str | None = None  # why a watchdog has killed its worker; None where none has
    stacks: str = ""  # where that worker hung
    # that the job is to end with, the first that a worker reports, 75 (all stop together) only where none reports
    # another; None where no worker has reported one
    exit_code: int | None = None


def read_reports(entries: Iterable[Mapping[str, Any]], killed: bool = False) -> WorkerReports:
    """What the entries of the launcher's file say. `killed`: whether it is known that a worker was killed. The first
    worker that fails ends the others by SIGTERM, so what a worker says of a signal counts only where nothing else has
    ended it before. An entry has the `exit_code` that the job is to end with, omitted where the launcher is to start it
    again; of a worker that fails `rank` and `message`, with its stacks as `hung` where its watchdog kills it."""
    failures: list[tuple[int, str]] = []
    codes: list[int] = []
    hung, stacks = None, ""
    for entry in entries:
        code = entry.get("exit_code")
        by_signal = code is not None and (code == EXIT_RESUMABLE or code > 128)
        if "signal" in entry or (by_signal and killed):
            continue
        killed = killed or not by_signal
        if code is not None:
            codes.append(code)
        if "hung" in entry:
            hung, stacks = hung or entry["message"], stacks or entry["hung"]
        elif "message" in entry:
            failures.append((entry["rank"], entry["message"]))
    messages: dict[str, str] = {}
    for _, message in sorted(failures, key=lambda failure: failure[0]):
        messages.setdefault(message.split(": ", 2)[-1], message)  # "ddnn: worker 1 on host: what went wrong"
    first = min(codes, key=lambda code: code == EXIT_RESUMABLE, default=None)
    return WorkerReports(tuple(messages.values()), hung, stacks, first)


@contextmanager
def abort_all_on_error(comm: Communicator) -> Iterator[None]:
    """What runs in this block, on whichever worker it raises, ends every worker, with a message that names the one.

    An error of the user's prints its `user_message` and ends the job with its exit code, any other its traceback and 1,
    KeyboardInterrupt 130 or its own `code`, `SystemExit(code)` other than 0 its code. A connection that breaks, since
    another worker or its node has died, ends it as that one's death does: with 137. Exceptions of threads count too.
    SystemExit(75) is for all workers to raise, and prints nothing. With a single worker nothing is changed: the
    exception passes on to the caller.
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
    if isinstance(error, KeyboardInterrupt):
        return f"{worker}interrupted\n", int(getattr(error, "code", 130))
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return "" if code == EXIT_RESUMABLE else f"{worker}stopped with {error.code}\n", code
    mpi, dist = (sys.modules.get(name) for name in ("mpi4py.MPI", "torch.distributed"))
    if (mpi is not None and isinstance(error, mpi.Exception)) or (
        dist is not None and isinstance(error, dist.DistError)
    ):
        return f"{worker}lost its connection to another worker: {error}\n", EXIT_KILLED
    known = user_message(error)
    if known is not None:
        return f"{worker}error: {known}\n", exit_code(error)
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{worker}{type(error).__name__}: {error}\n{trace}", 1


def _abort(comm: Communicator, error: BaseException) -> None:
    """Prints the error and ends this worker and all others; returns only from a SystemExit of success."""
    message, code = message_and_code(comm, error)
    if code == 0:
        return
    comm.watchdog.disable()  # the end takes its time, which is limited here
    sys.stdout.flush()
    if code == EXIT_RESUMABLE and isinstance(error, SystemExit):
        # The code goes by the launcher where there is one: mpirun writes six lines about one that is not 0.
        launched = append(exit_code=code)
        if threading.current_thread() is threading.main_thread() and comm.try_barrier(EXIT_BARRIER_TIMEOUT):
            sys.exit(0 if launched else code)
    elif not append(rank=comm.rank, message=message, **({} if code == EXIT_KILLED else {"exit_code": code})):
        if user_message(error) is not None and comm.rank > 0:
            time.sleep(DUPLICATE_MESSAGE_DELAY)
        write_stderr_and_drain(message)
    comm.abort(code)


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
