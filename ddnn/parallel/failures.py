"""One worker fails, all stop, or the others go on; none waits for ever.

In a fault-tolerant job (`ddnn.parallel.launch.fault_tolerant`) the others see nothing but a process that is killed: one
that ends with a code, or by MPI_Abort, leaves them waiting. So a worker that fails there kills itself.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ddnn.errors import UserError
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.last_words import leave_exit_code, leave_last_words
from ddnn.parallel.launch import fault_tolerant
from ddnn.parallel.lost import WorkerLost, deaths_noticed, end_here, kill_this, print_through
from ddnn.parallel.mpirun import STOPPED

FIRST_SPEAKS = 1.0
"""Seconds that the others keep back a mistake of the user's: most are met by all at once, and one message is enough."""

ALL_COME = 5.0
"""Seconds in which all workers meet that are to end together."""


@dataclass
class Job:
    """The workers that this one belongs to. Whoever changes to the exchange of the survivors says so here."""

    exchange: Exchange


@contextmanager
def all_stop_on_error(exchange: Exchange) -> Iterator[Job]:
    """What runs in this block, on whichever worker it raises, ends every worker, with a message that names the one.

    A UserError prints its text and ends the job with 2, any other exception its traceback and 1, KeyboardInterrupt 130
    or its own `code`, `SystemExit(code)` other than 0 its code. Exceptions of threads count too. SystemExit(75) is for
    all workers to raise, and says nothing. With a single worker nothing is changed: the exception goes on to the
    caller.

    In a fault-tolerant job the errors that all workers are to raise alike are UserError, KeyboardInterrupt and
    SystemExit: they end the job as above. Any other is this worker's death: its message comes at once, and the others
    get a `WorkerLost`.
    """
    job = Job(exchange)
    if exchange.size == 1:
        yield job
        return
    previous = threading.excepthook
    threading.excepthook = lambda failed: _end(job, failed.exc_value) if failed.exc_value else None
    try:
        yield job
    except BaseException as error:
        _end(job, error)
        raise
    finally:
        threading.excepthook = previous


def message_and_code(exchange: Exchange, error: BaseException) -> tuple[str, int]:
    """What to print of an error in this worker, and the exit code of the job."""
    worker = f"ddnn: worker {exchange.number} on {exchange.host}: "
    if isinstance(error, UserError):
        return f"{worker}error: {error}\n", 2
    if isinstance(error, KeyboardInterrupt):
        return f"{worker}interrupted\n", int(getattr(error, "code", 130))
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        return "" if code == STOPPED else f"{worker}stopped with {error.code}\n", code
    if isinstance(error, WorkerLost):
        return f"{worker}another worker has died\n", 1
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{worker}{type(error).__name__}: {error}\n{trace}", 1


def _end(job: Job, error: BaseException) -> None:
    """Prints and ends this worker, and the others as they have to end; returns only from a SystemExit of success."""
    message, code = message_and_code(job.exchange, error)
    if code == 0:
        return
    if job.exchange.guard is not None:
        job.exchange.guard.disarm()  # the end takes its time, which is limited here
    sys.stdout.flush()
    alike = isinstance(error, (UserError, KeyboardInterrupt, SystemExit))
    if fault_tolerant():
        if alike:
            _end_alike(job, message, code)
        end_here(message)
    if code == STOPPED and alike:
        _end_alike(job, message, code)
    elif not leave_last_words(job.exchange.number, message):
        if isinstance(error, UserError) and job.exchange.rank > 0:
            time.sleep(FIRST_SPEAKS)
        print_through(message)
    job.exchange.communicator.Abort(code)


def _end_alike(job: Job, message: str, code: int) -> None:
    """Ends this worker by SystemExit where all others come here too; else returns, or kills it in a fault-tolerant job.

    The code goes by the launcher where there is one: mpirun writes six lines about one that is not 0.
    """
    exchange, survives = job.exchange, fault_tolerant()
    launched = leave_exit_code(code)
    if message and not (launched and leave_last_words(exchange.number, message)) and exchange.rank == 0:
        print_through(message)
    if threading.current_thread() is threading.main_thread() and _all_come(exchange):
        # What hangs on the way out, as a thread whose exchange never ends, does not keep it.
        last_resort = threading.Timer(2 * ALL_COME, kill_this)
        last_resort.daemon = True
        last_resort.start()
        sys.exit(0 if launched and not survives else code)
    if survives:
        kill_this()


def _all_come(exchange: Exchange) -> bool:
    """Whether all workers come to their end within `ALL_COME` seconds."""
    if exchange.communicator is None:
        return True
    deadline = time.monotonic() + ALL_COME
    try:
        with deaths_noticed():
            request = exchange.communicator.Ibarrier()
            while not request.Test():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.01)
    except (WorkerLost, RuntimeError):  # mpi4py's own: the communicator is gone
        return False
    return True
