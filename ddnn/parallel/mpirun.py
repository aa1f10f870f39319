"""mpirun as a child process: what signals mean for it, and how it ended."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from ddnn.errors import UserError

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a training to stop, as SIGUSR1 does."""
INSISTING = (signal.SIGTERM, signal.SIGINT)
"""One of these after the first ends at once. SIGUSR1 does not: the launcher, the job script and mpirun may pass on the
same one several times. Nor does SIGHUP: a terminal that is closed sends it twice."""
STOPPED = 75
"""Exit code of a training that was stopped and can go on: EX_TEMPFAIL of sysexits.h. All workers end with it."""


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
            self.ask()
        elif self.second is None and number in INSISTING:
            self.second = number, time.monotonic()
            self.insist()

    def ask(self) -> None:
        """Hands on the first; once a second, since mpirun and the workers do not listen from the beginning."""
        if self.process is not None and self.first is not None and self.second is None:
            self.process.send_signal(signal.SIGUSR1)

    def insist(self) -> None:
        """Hands on the second; once, since another one would make mpirun leave in haste."""
        if self.process is not None and self.second is not None:
            self.process.send_signal(signal.SIGTERM)

    def overdue(self, grace: float, patience: float) -> bool:
        """Whether mpirun should have ended by now."""
        now = time.monotonic()
        if self.second is not None:
            return now - self.second[1] > grace
        return self.first is not None and now - self.first[1] > patience


def run_mpirun(command: Sequence[str], variables: Mapping[str, str], grace: float, patience: float) -> int:
    """Runs `command` with the environment `variables` and waits; returns and raises what `run_workers` does."""
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
            preexec_fn=_as_child(os.getpid()),
        )
        signals.insist()  # what was heard meanwhile; the loop asks
        while True:
            try:
                code = signals.process.wait(timeout=1.0)
                break
            except subprocess.TimeoutExpired:
                if signals.overdue(grace, patience):
                    killed = True
                    signals.process.kill()
                else:
                    signals.ask()
    except OSError as error:
        raise UserError(f"cannot start mpirun: {error.strerror}", where=command[0]) from error
    finally:
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    code = code if code >= 0 else 128 - code
    unheard = killed or code == 128 + signal.SIGUSR1  # what the workers were told instead of the first
    ended_by = signals.second or (signals.first if unheard else None)
    return 128 + ended_by[0] if ended_by is not None else code


def _as_child(parent: int) -> Callable[[], None]:
    """What mpirun's process does first: it ends with its parent, and SIGUSR1 does not kill it before it listens."""
    end_with_parent = ends_with_parent(signal.SIGTERM, parent)

    def become() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        end_with_parent()

    return become


def ends_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None]:
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
