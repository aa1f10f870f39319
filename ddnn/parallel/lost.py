"""What a worker sees of another's death: MPI's errors for it, as one exception; how it dies so that they see it."""

from __future__ import annotations

import array
import fcntl
import os
import signal
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddnn.parallel.launch import fault_tolerant


class WorkerLost(Exception):
    """Another worker has died, or one that has noticed a death has called all to `ddnn.parallel.survive.survivors`.

    Raised out of any method of an `Exchange`, in an MPI job that is fault tolerant; not on all workers at once, and on
    some only at their next call. What the interrupted call was to receive or to sum in place is garbage then, a sum's
    buffer on every worker: who wants to go on from it keeps a copy.
    """


@contextmanager
def deaths_noticed(communicator: Any = None) -> Iterator[None]:
    """MPI's errors of a dead worker or a revoked communicator become `WorkerLost`; others pass."""
    try:
        yield
    except RuntimeError as error:  # MPI.Exception is one, and mpi4py may be missing
        if not is_death(error, communicator):
            raise
        raise WorkerLost(str(error)) from error


def is_death(error: RuntimeError, communicator: Any = None) -> bool:
    """Whether this is MPI's error of a dead worker or of a revoked communicator.

    Open MPI 5 also calls it "known error not in list", or else: any error counts once the communicator of mpi4py's is
    revoked, or holds a dead worker. Asked of this process alone.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    if error.Get_error_class() in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED):
        return True
    if communicator is None or not fault_tolerant():
        return False
    return bool(communicator.Is_revoked() or communicator.Get_failed().size)


def all_agree(communicator: Any, well: bool) -> bool:
    """Whether all say that all is well and none has died: the same answer on all that are left, over a revoked
    communicator too. Collective."""
    try:
        with deaths_noticed(communicator):
            return bool(communicator.Agree(int(well)))
    except WorkerLost:
        return False


def end_here(message: str) -> None:
    """Prints and kills this process."""
    print_through(message)
    kill_this()


def kill_this() -> None:
    """Kills this process by SIGKILL: the one death that the others of a fault-tolerant job see."""
    os.kill(os.getpid(), signal.SIGKILL)


def print_through(message: str) -> None:
    """Writes to stderr, in one write, so that the lines of two failing workers do not mix; returns when mpirun has read
    it."""
    sys.stderr.write(message)
    sys.stderr.flush()
    _wait_until_read()


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
