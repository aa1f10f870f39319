"""Signals that end a training so that it can go on later: SIGTERM, SIGINT (Ctrl-C), SIGHUP, and Slurm's SIGUSR1."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from ddnn.parallel.mpirun import ENDING, INSISTING, STOPPED


class Stopped(SystemExit):
    """The training ends on a signal, with a checkpoint to go on from; exit code 75."""

    def __init__(self, received: str) -> None:
        """`received`: the signal's name."""
        super().__init__(STOPPED)
        self.received = received


class StoppedEarly(KeyboardInterrupt):
    """A signal before the training loop, which ends loading or pretraining at once.

    `code` is what a shell says of a process that the signal ended: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, received: str) -> None:
        """`received`: the signal's name."""
        super().__init__(received)
        self.received = received
        self.code = 128 + int(signal.Signals[received])


class StopRequest:
    """Whether this process was asked to stop. As a context manager it listens, and gives the old handlers back.

    Until `safe` is set, the first signal raises StoppedEarly where the main thread stands. Once it is set, the first
    signal only fills `received`, which the training loop reads at each minibatch, and says so on stderr. A SIGTERM or
    SIGINT after that ends the process at once.

    What is ignored on entry stays ignored (SIGHUP under nohup), except SIGUSR1: the launcher and the job script ignore
    it for their children, so that it does not kill them before they come to listen here. Threads other than the main
    one cannot listen; there nothing is done.

    Attributes:
        received: name of the first signal, as SIGTERM; None before.
        safe: whether the training loop runs, which reads `received` and writes a checkpoint.
    """

    def __init__(self, *, speaks: bool = True) -> None:
        """`speaks`: whether this worker says on stderr that the signal was heard; one of them is enough."""
        self.received: str | None = None
        self.safe = False
        self._speaks = speaks
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (*ENDING, signal.SIGUSR1):
                if number == signal.SIGUSR1 or signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.getsignal(number)
                    signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # From here to the end of the process a SIGUSR1 asks for what is already happening: it must not kill.
            if number == signal.SIGUSR1 and self.received is not None:
                handler = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.received is None:
            self.received = name
            if not self.safe:
                raise StoppedEarly(name)
            self._say(f"{name}: a checkpoint as soon as can be, then the end; another SIGTERM or Ctrl-C ends at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number in INSISTING:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _say(self, text: str) -> None:
        if self._speaks:
            with suppress(OSError):  # nobody listens, as after SIGHUP
                # Not through sys.stderr: the signal may have come in the middle of a write to it.
                os.write(2, f"\nddnn: {text}\n".encode())
