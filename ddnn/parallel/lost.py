"""What a worker sees of another's death: MPI's errors for it, as one exception."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


class WorkerLost(Exception):
    """Another worker has died, or one that has noticed a death has called all to `ddnn.parallel.survive.survivors`.

    Raised out of any method of an `Exchange`, in an MPI job that is fault tolerant; not on all workers at once, and on
    some only at their next call. What the interrupted call was to receive or to sum in place is garbage then, a sum's
    buffer on every worker: who wants to go on from it keeps a copy.
    """


@contextmanager
def deaths_noticed() -> Iterator[None]:
    """MPI's errors of a dead worker or a revoked communicator become `WorkerLost`; others pass."""
    try:
        yield
    except RuntimeError as error:  # MPI.Exception is one, and mpi4py may be missing
        if not is_death(error):
            raise
        raise WorkerLost(str(error)) from error


def is_death(error: RuntimeError) -> bool:
    """Whether this is MPI's error of a dead worker or of a revoked communicator."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    return error.Get_error_class() in (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
