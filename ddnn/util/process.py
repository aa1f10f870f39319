"""Child processes: short commands, long ones with a log that are stopped together, and the end of the parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ddnn.util.files import ensure_directory

TAIL_BYTES = 4000
_PR_SET_PDEATHSIG = 1

WITHOUT_CWD = "import sys; sys.path[:1] == [''] and sys.path.pop(0); "
"""Begins what `python -c` runs: a module of the working directory, which may be a stranger's, is not imported."""
_RUN_MODULE = WITHOUT_CWD + "import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def python_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENTS`, but modules are not looked for in the working directory, where -m would look first.
    (Python's own option for it, -P, is younger than Python 3.10.)"""
    return [sys.executable, "-c", _RUN_MODULE, module, *arguments]


def run(
    argv: Sequence[str], *, timeout: float, env: Mapping[str, str] | None = None, text: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a short command with `text` as its input, captures its output as text, and kills it after `timeout` seconds.
    OSError: it cannot be started. subprocess.TimeoutExpired: it took too long."""
    return subprocess.run(
        argv, env=env, input=text or "", capture_output=True, encoding="utf-8", errors="replace", timeout=timeout
    )


def end_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None]:
    """A function that a child calls to get signal `number` when its parent dies, at once if `parent` is already gone;
    on Linux only. It may be called between fork and exec, also where the parent has threads: it takes no locks."""
    if not sys.platform.startswith("linux"):
        return lambda: None
    prctl = ctypes.CDLL(None).prctl

    def request_death_signal() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)

    return request_death_signal


closed_at_start: set[str] = set()
"""Those of stdin, stdout and stderr that `open_missing_streams` found closed."""


def open_missing_streams() -> None:
    """Opens those of stdin, stdout and stderr that are closed, as daemons leave them: what is written to them is lost,
    and no other file gets their number, into which a child process would then write its messages."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            closed_at_start.add(name)
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the smallest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (a descriptor, never closed)


def signal_name(number: int) -> str:
    """SIGTERM, ...; "signal 40" for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class ProcessGroup:
    """Programs of Python modules that run as processes of their own, and are stopped together."""

    def __init__(self, inherited_fds: Sequence[int] = ()) -> None:
        """`inherited_fds`: file descriptors that they keep open (a lock, which they then hold too)."""
        self._inherited_fds = tuple(inherited_fds)
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._terminating = False

    def run(
        self, module: str, arguments: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """The program `module` with these arguments to its end, its output appended to `log`; called from several
        threads at once. Returns its exit code, negative where a signal ended it, and the end of its output. Where this
        process is killed with -9, the child gets SIGUSR1 (on Linux), which a training takes as the request to write a
        checkpoint and end, and never as the second request. After `terminate` nothing is started."""
        ensure_directory(log.parent)
        set_death_signal = end_with_parent(signal.SIGUSR1, os.getpid())

        def prepare() -> None:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # the parent may have been told to ignore it
            set_death_signal()

        with log.open("ab") as output:
            start = output.tell()
            with self._lock:
                if self._terminating:
                    return 128 + signal.SIGTERM, "not started"
                # The parent whose death counts is to the kernel this thread, which waits below.
                child = subprocess.Popen(
                    python_command(module, *arguments),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=env,
                    pass_fds=self._inherited_fds,
                    start_new_session=True,  # a terminal's Ctrl-C reaches it once, through terminate()
                    preexec_fn=prepare,
                )
                self._running.add(child)
            code = child.wait()
            with self._lock:
                self._running.discard(child)
        with log.open("rb") as written:
            written.seek(max(start, written.seek(0, os.SEEK_END) - TAIL_BYTES))
            return code, written.read(TAIL_BYTES).decode(errors="replace")

    def terminate(self, grace: float) -> None:
        """Sends SIGTERM to all, starts no more, waits; kills what has not ended `grace` seconds later."""
        with self._lock:
            self._terminating = True
            running = list(self._running)
        for child in running:
            child.send_signal(signal.SIGTERM)
        for child in running:
            try:
                child.wait(grace)
            except subprocess.TimeoutExpired:
                child.kill()
