"""One command, several workers: run here, in the MPI job that this process belongs to, or in one started for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddnn.parallel.launch import SAFE_PATH, inside_mpi_job, run_workers
from ddnn.progress import SHOWN_BY_LAUNCHER
from ddnn.train.stopping import StopRequest

if TYPE_CHECKING:
    from ddnn.parallel.failures import Job


def run_together(
    workers: int,
    arguments: Sequence[str],
    work: Callable[[Job], None],
    *,
    fault_tolerant: bool = False,
    done: Callable[[], bool] | None = None,
    advice: Callable[[], str | None] | None = None,
) -> None:
    """Calls `work` on every worker.

    - Inside an MPI job (mpirun, srun) this process is one of its workers.
    - Else, for more than one worker, `ddnn` with `arguments` is started so many times by mpirun; returns when all have
      ended well, and exits with the code of the first that has not.
    - Else this process is the only worker, and no MPI is touched.

    The options are those of `run_workers`.
    """
    if inside_mpi_job():
        # From the beginning: the launcher has made this process deaf to SIGUSR1, by which it asks to stop.
        with StopRequest():
            # Here, since these need torch, which takes seconds to import: the launcher does without.
            from ddnn.parallel.connect import connect
            from ddnn.parallel.failures import all_stop_on_error

            exchange = connect()
            with all_stop_on_error(exchange) as job:
                work(job)
    elif workers > 1:
        environment = {**os.environ, **SAFE_PATH}
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if workers > 2 * cores and "SLURM_JOB_ID" not in environment:
            print(f"ddnn: starting {workers} workers on the {cores} cores of this machine", file=sys.stderr, flush=True)
        if sys.stderr.isatty():
            environment[SHOWN_BY_LAUNCHER] = "1"
        command = [sys.executable, "-m", "ddnn.cli", *arguments]
        code = run_workers(workers, command, environment, fault_tolerant=fault_tolerant, done=done, advice=advice)
        if code:
            sys.exit(code)
    else:
        from ddnn.parallel.exchange import Exchange
        from ddnn.parallel.failures import Job

        work(Job(Exchange()))
