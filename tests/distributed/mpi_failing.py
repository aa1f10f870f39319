"""Run by mpirun: worker 1 fails in the way that argv[1] names, or nobody does; the others wait for its message."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from distributed.mpi_checks import PLAIN, strategy

from ddnn.distributed.communicator import Communicator
from ddnn.distributed.failures import abort_all_on_error
from ddnn.distributed.mpi import init_communicator
from ddnn.distributed.signals import GracefulShutdown
from ddnn.distributed.watchdog import Watchdog
from ddnn.util.errors import UserError

AVERAGINGS = 4


def fail(way: str) -> None:
    if way == "raise":
        raise RuntimeError("boom of the test")
    if way == "user-error":
        raise UserError("the rate is -1", location="recipe.yaml", hint="take a positive one")
    if way == "exit":
        sys.exit(7)
    if way == "hung":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "thread":
        threading.Thread(target=fail, args=("raise",)).start()
        time.sleep(900)


def average_for_ever(comm: Communicator, name: str, beside: bool = False) -> None:
    """Averages until worker 1 raises after its third time; beside: while its own exchange hangs on a second thread."""
    theta = torch.ones(1_000_000)
    # No with statement: at an error its end would wait for an exchange that may never end.
    pool = ThreadPoolExecutor(1)
    averaging = strategy(comm, name)
    for number in range(1_000_000):
        if comm.rank == 1 and number == 3:
            if beside:
                pool.submit(comm.sendrecv, theta, 1, 0)
                time.sleep(0.2)
            fail("raise")
        pool.submit(averaging.average, theta, number, 1.0).result()


def one_is_slow(comm: Communicator, out: Path) -> None:
    """Worker 1 takes three times as long for a block as the others; every strategy, then what each worker waited."""
    waited, theta = {}, {}
    for name in PLAIN:
        comm.barrier()
        averaging = strategy(comm, name)
        before, theta[name] = comm.stats.copy(), torch.full((1000,), float(comm.rank))
        for number in range(AVERAGINGS):
            time.sleep(0.12 if comm.rank == 1 else 0.04)
            averaging.average(theta[name], number, 1.0)
        waited[name] = comm.all_gather_object((comm.stats - before).wait_seconds)
    mean = {name: float(comm.all_gather(values).mean()) for name, values in theta.items()}
    if comm.rank == 0:
        (out / "slow.json").write_text(json.dumps({"waited": waited, "mean": mean}))


def main(way: str, out: Path) -> None:
    comm = init_communicator()
    with abort_all_on_error(comm):
        print(f"worker {comm.rank} of {comm.world_size}", flush=True)
        comm.watchdog = Watchdog(comm.rank, comm.host, 2.0) if way.startswith("hung") else comm.watchdog
        comm.barrier()
        temporary = out / f"{comm.rank}.tmp"
        temporary.write_text(f"{os.getpid()} {os.getppid()} {time.time()}")
        temporary.rename(out / f"{comm.rank}.pid")
        if way == "slow":
            one_is_slow(comm, out)
            return
        if way == "stop":
            time.sleep(0.5 * comm.rank)
            sys.exit(75)
        way, _, listening = way.partition(", ")
        name, _, beside = way.partition(" ")
        if name in PLAIN:
            average_for_ever(comm, name, beside == "beside")
        if comm.rank == 1:
            fail(way)
        if way == "hung in MPI":
            comm.watchdog.enable() if comm.rank == 1 else time.sleep(900)
            comm.barrier()
        if listening:  # as those that load data: SIGTERM raises here
            with GracefulShutdown():
                time.sleep(900)
        buffer = torch.ones(4)
        comm.sendrecv(buffer, 1, 1) if comm.rank != 1 else time.sleep(900)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
