"""Starts the workers of a job, and starts them again where one was killed or hung.

A worker that a signal or its watchdog kills (out of memory, a failed node, `kill -9`) ends the job, and the launcher
starts it again from the newest checkpoint. An error that a worker reports itself (bad data, a diverged training, a bug)
ends the job for good, with that worker's exit code. Needs no torch, which takes seconds to import.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

from ddnn.distributed.failures import abort_all_on_error, read_reports
from ddnn.distributed.launcher_file import LauncherFile, entries
from ddnn.distributed.mpirun import (
    IGNORING_SIGUSR1,
    SignalForwarder,
    find_mpirun,
    in_mpi_job,
    mpirun_command,
)
from ddnn.distributed.signals import (
    EXIT_CODES,
    EXIT_DIVERGED,
    EXIT_KILLED,
    EXIT_RESUMABLE,
    STOP_SIGNALS,
    GracefulShutdown,
)
from ddnn.util.errors import UserError
from ddnn.util.process import python_command, signal_name
from ddnn.util.progress import LAUNCHER_TERMINAL
from ddnn.util.system import usable_cores
from ddnn.util.text import plural, show, terminal_level

UNLOCK_TIMEOUT = 60.0  # seconds in which the workers of a job that has ended must let go of the run dir
RESTART = "DDNN_RESTART"  # environment variable of the workers of a job that was started again: a `Restart` as JSON


@dataclass(frozen=True)
class Restart:
    """Why the workers were started again. `number`: of restarts so far, from 1."""

    number: int
    reason: str


class RunMonitor:
    """What the launcher asks about the run dir that the workers write; of work that leaves none."""

    def newest_checkpoint(self) -> object:
        """A value that changes with each new checkpoint; None where there is none."""
        return None

    def is_locked(self) -> bool:
        return False

    def is_complete(self) -> bool:
        """Whether the work was done, asked where mpirun says so."""
        return True

    def failure_hint(self) -> str | None:
        """What the user can do now, printed last where a signal has ended a worker for good."""
        return None

    def record_failure(self, message: str) -> None:
        """Records why the job ended, for the case that rank 0 could not."""


class NodeRecovery:
    """What the launcher asks about the nodes of its job; the base, which knows of none: `ddnn.slurm.recovery` knows
    those of an allocation. `remaining`: the only ones to use, once some have been lost; empty before. `times_requeued`:
    how often the job was queued again."""

    remaining: Sequence[str] = ()
    times_requeued = 0

    def lost(self) -> list[str]:
        """Names of the nodes that no longer answer."""
        return []

    def leave_lost(self, workers: int) -> bool:
        """Goes on without the nodes that are lost; False where the others cannot run the same number of workers (with
        it the training's result stays; workers with a GPU each find none elsewhere): the job is to be queued again."""
        return True


def read_restart(environment: Mapping[str, str] = os.environ) -> Restart | None:
    """Why this worker was started again; None where it was not."""
    return Restart(**json.loads(environment[RESTART])) if RESTART in environment else None


def run_distributed(
    workers: int,
    arguments: Sequence[str],
    work: Callable[[Any], None],
    *,
    restart_arguments: Callable[[], Sequence[str]] | None = None,
    max_restarts: int = 0,
    run: RunMonitor | None = None,
    nodes: NodeRecovery | None = None,
) -> None:
    """Calls `work` on every worker, with its `ddnn.distributed.communicator.Communicator`.

    - Inside an MPI job (mpirun, srun) this process is one of its workers.
    - Else, for more than one worker, `ddnn` with `arguments` is started so many times by mpirun; returns when all have
      ended well, and exits with the code of the first that has not. The options are those of `launch_workers`.
    - Else this process is the only worker, and no MPI is touched.
    """
    # Some imports are here since they need torch, which takes seconds: the launcher does without.
    if in_mpi_job():
        # At once: the launcher has made this process deaf to SIGUSR1, by which it asks to stop.
        with GracefulShutdown():
            from ddnn.distributed.mpi import init_communicator

            comm = init_communicator()
            with abort_all_on_error(comm):
                work(comm)
    elif workers > 1:
        environment = dict(os.environ)
        cores = usable_cores()
        if workers > 2 * cores and "SLURM_JOB_ID" not in environment:
            print_status(f"starting {workers} workers on the {cores} cores of this machine")
        if sys.stderr.isatty():
            environment["COLUMNS"] = str(shutil.get_terminal_size().columns)
            environment[LAUNCHER_TERMINAL] = f"{platform.node()} /proc/{os.getpid()}/fd/2"
        ddnn = python_command("ddnn.cli")
        code = launch_workers(
            workers,
            [*ddnn, *arguments],
            environment,
            restart_argv=restart_arguments and (lambda: [*ddnn, *restart_arguments()]),
            max_restarts=max_restarts,
            run=run,
            nodes=nodes,
        )
        if code not in EXIT_CODES:
            print_status(
                f"mpirun ended with exit code {code}: its messages say why, such as a program that a node lacks"
            )
            code = UserError.exit_code
        if code:
            sys.exit(code)
    else:
        from ddnn.distributed.communicator import SingleProcess

        work(SingleProcess())


def launch_workers(
    workers: int,
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    restart_argv: Callable[[], Sequence[str]] | None = None,
    max_restarts: int = 0,
    run: RunMonitor | None = None,
    nodes: NodeRecovery | None = None,
) -> int:
    """Runs `workers` copies of `argv` by mpirun and waits; their output goes where this process's goes.

    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches the workers as SIGUSR1, which leaves them five minutes for a
    checkpoint (mpirun would kill them within a second of the first three); they are to end by themselves. A second
    SIGINT or SIGTERM ends them, and after ten seconds mpirun is killed, and the workers with it. They end too when this
    process is killed with -9. UserError: there is no mpirun, or it cannot be started.

    `restart_argv` gives what takes the place of `argv` where the job is started again, `max_restarts` times at most
    without a newer checkpoint in between. Returns the exit code of the worker that failed first, else 0; 128 + the
    signal's number where that ended the job. 137 (killed) where mpirun seems to have ended well but the work is not
    done. 75 (resumable) in a Slurm job that has lost a node, where the remaining ones cannot run the workers: the job
    is to be queued again."""
    # Open MPI does not start without HOME, which cron, services and containers may lack.
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home() raises for a user that has none)
    environment = {"HOME": home, **(os.environ if environment is None else environment)}
    with closing(LauncherFile()) as file, SignalForwarder(file) as signals:
        launcher = _Launcher(workers, environment, max_restarts, run or RunMonitor(), nodes or NodeRecovery(), signals)
        code, reason = launcher.attempt(argv)
        while reason is not None and launcher.may_restart(reason):
            if not launcher.nodes.leave_lost(workers):
                return launcher.requeue_code(code)
            code, reason = launcher.attempt(argv if restart_argv is None else restart_argv())
        if code not in (0, EXIT_RESUMABLE) and signals.first is None:
            launcher.run.record_failure(launcher.message)
            if launcher.nodes.remaining and code != EXIT_DIVERGED:  # too little memory on the remaining nodes, for one
                return launcher.requeue_code(code)
    hint = launcher.run.failure_hint() if _was_killed(code) else None
    if hint:
        print_status(hint)
    return code


def _was_killed(code: int) -> bool:
    """Whether an exit code says that a signal has ended a process, other than those that ask it to stop."""
    return code > 128 and code - 128 not in STOP_SIGNALS


@dataclass
class _Launcher:
    """The attempts of one job. `message`: why the last one ended."""

    workers: int
    environment: Mapping[str, str]
    max_restarts: int
    run: RunMonitor
    nodes: NodeRecovery
    signals: SignalForwarder

    def __post_init__(self) -> None:
        self.mpirun = find_mpirun(self.environment)
        self.message = ""
        self._without_checkpoint = 0
        self._restart: Restart | None = None
        self._first_checkpoint = self._checkpoint = self.run.newest_checkpoint()

    def attempt(self, argv: Sequence[str]) -> tuple[int, str | None]:
        """Runs the workers once. Returns the exit code, and why they should be started again; None if not."""
        argv = [*IGNORING_SIGUSR1, *argv]
        command, variables = mpirun_command(self.workers, argv, self.environment, self.mpirun, self.nodes.remaining)
        file = self.signals.file
        variables |= file.environment
        if self._restart is not None:
            variables[RESTART] = json.dumps(asdict(self._restart))
        code = self.signals.run(command, variables)
        killed = self.signals.first is None and _was_killed(code) and code - 128 != signal.SIGUSR1
        reports = read_reports(entries(file.environment), killed)
        file.clear()
        explained = reports.exit_code is not None or reports.hung is not None or self.signals.first is not None
        if not explained or terminal_level() <= logging.DEBUG:
            sys.stderr.write(self.signals.own_messages.decode(errors="backslashreplace"))
        messages = "".join([*reports.messages, reports.stacks])
        if messages:  # on a terminal below a progress bar, whose line does not end
            show("\n" * sys.stderr.isatty() + messages.rstrip("\n"), sys.stderr, "red")
        sys.stderr.flush()
        if reports.exit_code is not None:
            code = reports.exit_code
        reason = reports.hung and reports.hung.removeprefix("ddnn: ").strip()
        self.message = "".join(reports.messages).strip() or reason or f"mpirun ended with exit code {code}"
        # mpirun says 0 where it and its daemons on other nodes are sent SIGTERM, and where a node is lost.
        if code == 0 and not self.run.is_complete():
            print_status("no worker is left, and the work is not done")
            code, reason = EXIT_KILLED, reason or "mpirun ended before the work was done"
        if self.signals.first is not None or reports.exit_code is not None or code in (0, EXIT_RESUMABLE):
            return code, None
        if _was_killed(code):
            return code, reason or f"a worker was killed by {signal_name(code - 128)}"
        lost = self.nodes.lost()
        return code, f"{', '.join(lost)} no longer answers" if lost else None

    def may_restart(self, reason: str) -> bool:
        """Counts the restart and waits until the run dir is free; False where it is one too many."""
        newest = self.run.newest_checkpoint()
        self._without_checkpoint = 1 if newest != self._checkpoint else self._without_checkpoint + 1
        self._checkpoint = newest
        if self._without_checkpoint > self.max_restarts:
            tried = f"; not started again after {plural(self.max_restarts, 'restart')} without a newer checkpoint"
            print_status(f"{reason}{tried if self.max_restarts else ''}")
            return False
        self._restart = Restart(self._restart.number + 1 if self._restart else 1, reason)
        start = "the newest checkpoint" if newest is not None else "the beginning"
        print_status(
            f"{reason}; restart {self._restart.number}, from {start} ({self._without_checkpoint} of at most "
            f"{self.max_restarts} without a newer checkpoint)"
        )
        until = time.monotonic() + UNLOCK_TIMEOUT
        while self.run.is_locked() and time.monotonic() < until and self.signals.first is None:
            time.sleep(0.1)
        return self.signals.first is None

    def requeue_code(self, code: int) -> int:
        """75, so that the Slurm job is queued again; `code` once that was done as often as restarts are allowed without
        a newer checkpoint."""
        progress = self.run.newest_checkpoint() != self._first_checkpoint
        return EXIT_RESUMABLE if progress or self.nodes.times_requeued < self.max_restarts else code


def print_status(text: str) -> None:
    print(f"ddnn: {text}", file=sys.stderr, flush=True)
