"""Commands of ddnn run as processes of their own; all are told to stop when this one is, or when it is killed."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ddnn.errors import UserError
from ddnn.files import make_directory

TAIL_BYTES = 4000
GRACE = 300.0
"""Seconds that a training has for its checkpoint."""
DDNN = "ddnn.cli"
"""The module that is the command `ddnn`."""
CHILD = "ddnn.reproduce.child"


class CommandFailed(UserError):
    """A process that ended with another code than 0.

    Attributes:
        said: the end of its output.
    """

    def __init__(self, words: Sequence[str], code: int, said: str, output: Path) -> None:
        """`words` are the command as the user would give it; `code` is negative where a signal ended it."""
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        told = [line for line in lines if line.startswith("ddnn: error:")]
        last = (told or lines or ["it said nothing"])[-1]
        ended = f"ended by {_signal(-code)}" if code < 0 else f"exit code {code}"
        self.said = said
        mend = f"see there, then again; it ran: {shlex.join(words)}"
        super().__init__(f"{ended}: {last[:300]}", where=output, mend=mend)


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of the real-time signals
        return f"signal {number}"


class Children:
    """The processes that run now.

    Args:
        held: file descriptors that they keep open.
    """

    def __init__(self, held: Sequence[int] = ()) -> None:
        self._held = tuple(held)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def call(self, arguments: Sequence[str], output: Path, module: str = DDNN) -> None:
        """As `run`, for a process that must succeed.

        Raises:
            CommandFailed: it did not, or all have been told to stop.
        """
        code, said = self.run(arguments, output, module)
        if code:
            program = ["ddnn"] if module == DDNN else ["python", "-m", module]
            raise CommandFailed([*program, *arguments], code, said, output)

    def run(self, arguments: Sequence[str], output: Path, module: str = DDNN) -> tuple[int, str]:
        """`python -m MODULE` with these arguments, its output appended to a file: exit code, and the end of the output.

        One thread computes in each process: as many as the cores run side by side. Where this process is killed with
        -9, the child gets a SIGUSR1 (on Linux).
        """
        make_directory(output.parent)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with output.open("ab") as said:
            before = said.tell()
            with self._lock:
                if self._stopping:
                    return 128 + signal.SIGTERM, "not begun"
                # The parent that must not die is to the kernel this thread, which waits below.
                child = subprocess.Popen(
                    [sys.executable, "-m", CHILD, str(os.getpid()), module, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=self._held,
                    start_new_session=True,  # Ctrl-C reaches it through stop(), once
                )
                self._running.add(child)
            code = child.wait()
            with self._lock:
                self._running.discard(child)
        with output.open("rb") as said:
            said.seek(max(before, said.seek(0, os.SEEK_END) - TAIL_BYTES))
            return code, said.read(TAIL_BYTES).decode(errors="replace")

    def stop(self) -> None:
        """Asks all to end (trainings write a checkpoint) and begins no more; waits for them."""
        with self._lock:
            self._stopping = True
            running = list(self._running)
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in running:
            try:
                child.wait(GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
