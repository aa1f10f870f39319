"""Signals that end a training so that it can be resumed, and the exit codes of a job."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

from ddnn.distributed.launcher_file import entries

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a training to stop, as SIGUSR1 does, which is Slurm's."""
FORCE_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""One of these after the first ends at once. SIGUSR1 does not: the launcher, the job script and mpirun may pass on the
same one several times. Nor does SIGHUP: a terminal that is closed sends it twice."""
EXIT_RESUMABLE = 75
"""Exit code of a training that was stopped and can be resumed: EX_TEMPFAIL of sysexits.h. All workers end with it."""
EXIT_DIVERGED = 3  # exit code of a training that diverged or learned nothing
EXIT_KILLED = 128 + signal.SIGKILL  # what a shell says of a process that was killed with -9
EXIT_CODES = frozenset((0, 1, 2, EXIT_DIVERGED, EXIT_RESUMABLE, *range(129, 129 + 64)))
"""That `ddnn` may end with: README.md says what they mean. Over 128: the number of a signal."""


def forwarded_signal() -> str | None:
    """The signal for which the launcher has sent SIGUSR1; None without a launcher on this host."""
    return next((entry["signal"] for entry in entries() if "signal" in entry), None)


class TrainingInterrupted(SystemExit):
    """The training ends on a signal, with a checkpoint to resume from; exit code 75."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(EXIT_RESUMABLE)
        self.signal_name = signal_name


class InterruptedBeforeTraining(KeyboardInterrupt):
    """A signal before the training loop, which ends loading or pretraining at once. `code` is what a shell says of a
    process that the signal ended: 143 for SIGTERM, 130 for SIGINT."""

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name
        self.code = 128 + int(signal.Signals[signal_name])


Listener = TypeVar("Listener", bound="SignalListener")


class SignalListener:
    """Handles the signals that ask to stop within a `with` block of the main thread; on others nothing is done. What is
    ignored on entry stays ignored (SIGHUP under nohup), except SIGUSR1: the launcher and the job script ignore it for
    their children, so that it does not kill them before they come to listen here."""

    def __init__(self) -> None:
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self: Listener) -> Listener:
        if threading.current_thread() is threading.main_thread():
            for number in (*STOP_SIGNALS, signal.SIGUSR1):
                if number == signal.SIGUSR1 or signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        raise NotImplementedError


class GracefulShutdown(SignalListener):
    """Whether this process was asked to stop: `signal_name` is that of the first signal, as SIGTERM; None before.

    Until `deferred` is set, the first signal raises InterruptedBeforeTraining in the main thread. Once it is set, the
    first signal only fills `signal_name`, which the training loop reads at each minibatch to write a checkpoint, and
    says so on stderr. A SIGTERM or SIGINT after that ends the process at once.
    """

    def __init__(self, *, verbose: bool = True) -> None:
        """`verbose`: whether this worker says on stderr that the signal was heard; one of them is enough."""
        super().__init__()
        self.signal_name: str | None = None
        self.deferred = False
        self._verbose = verbose

    def __exit__(self, *error: object) -> None:
        if self.signal_name is not None and signal.SIGUSR1 in self._previous:
            # From here to the end of the process a SIGUSR1 asks for what is already happening: it must not kill.
            self._previous[signal.SIGUSR1] = signal.SIG_IGN
        super().__exit__(*error)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self.signal_name is None:
            name = forwarded_signal() or name if number == signal.SIGUSR1 else name
            self.signal_name = name
            if not self.deferred:
                raise InterruptedBeforeTraining(name)
            if self._verbose:
                text = f"{name}: writing a checkpoint, then exiting; a second SIGTERM or Ctrl-C exits immediately"
                with suppress(OSError):  # nobody listens, as after SIGHUP
                    # Not through sys.stderr: the signal may have come in the middle of a write to it.
                    os.write(2, f"\nddnn: {text}\n".encode())
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        elif number in FORCE_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
