"""Signals that end a training so that it can be resumed: SIGTERM, SIGINT (Ctrl-C), SIGHUP, and Slurm's SIGUSR1."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from ddnn.distributed.mpirun import EXIT_RESUMABLE, FORCE_SIGNALS, STOP_SIGNALS


class TrainingInterrupted(SystemExit):
    """The training ends on a signal, with a checkpoint to resume from; exit code 75."""

    def __init__(self, signal_name: str) -> None:
        """`signal_name`: the signal's name."""
        super().__init__(EXIT_RESUMABLE)
        self.signal_name = signal_name


class InterruptedBeforeTraining(KeyboardInterrupt):
    """A signal before the training loop, which ends loading or pretraining at once.

    `code` is what a shell says of a process that the signal ended: 143 for SIGTERM, 130 for SIGINT.
    """

    def __init__(self, signal_name: str) -> None:
        """`signal_name`: the signal's name."""
        super().__init__(signal_name)
        self.signal_name = signal_name
        self.code = 128 + int(signal.Signals[signal_name])


class GracefulShutdown:
    """Whether this process was asked to stop. As a context manager it listens, and gives the old handlers back.

    Until `deferred` is set, the first signal raises InterruptedBeforeTraining in the main thread. Once it is set, the
    first signal only fills `signal_name`, which the training loop reads at each minibatch, and says so on stderr. A
    SIGTERM or SIGINT after that ends the process at once.

    What is ignored on entry stays ignored (SIGHUP under nohup), except SIGUSR1: the launcher and the job script ignore
    it for their children, so that it does not kill them before they come to listen here. Threads other than the main
    one cannot listen; there nothing is done.

    Attributes:
        signal_name: name of the first signal, as SIGTERM; None before.
        deferred: whether the training loop runs, which reads `signal_name` and writes a checkpoint.
    """

    def __init__(self, *, verbose: bool = True) -> None:
        """`verbose`: whether this worker says on stderr that the signal was heard; one of them is enough."""
        self.signal_name: str | None = None
        self.deferred = False
        self._verbose = verbose
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> GracefulShutdown:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGUSR1):
                if number == signal.SIGUSR1 or signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.getsignal(number)
                    signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # From here to the end of the process a SIGUSR1 asks for what is already happening: it must not kill.
            if number == signal.SIGUSR1 and self.signal_name is not None:
                handler = signal.SIG_IGN
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal_name is None:
            self.signal_name = name
            if not self.deferred:
                raise InterruptedBeforeTraining(name)
            self._print(f"{name}: a checkpoint as soon as can be, then the end; another SIGTERM or Ctrl-C ends at once")
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number in FORCE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _print(self, text: str) -> None:
        if self._verbose:
            with suppress(OSError):  # nobody listens, as after SIGHUP
                # Not through sys.stderr: the signal may have come in the middle of a write to it.
                os.write(2, f"\nddnn: {text}\n".encode())
