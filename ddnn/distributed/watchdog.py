"""Kills this worker where it hangs: a small process beside it, which watches a number grow. The process starts from
this file with nothing but Python's own modules. It shares a file with the worker: a counter of progress, a word of
which bit 0 says that progress is expected and the rest counts long operations under way, and behind these 16 bytes what
`faulthandler` writes there when the process asks where the worker hangs."""

from __future__ import annotations

import ctypes
import faulthandler
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ddnn.distributed.launcher_file import append

ENABLED = 1  # bit 0 of the second shared word; the rest of it is twice the number of long operations
LONG_OPERATION_FACTOR = 3
"""How many timeouts an exchange or a checkpoint may take: others may hang first, and be killed by their watchdogs."""
STACKS_SIGNAL = signal.SIGUSR2  # asks a worker where it is, which it tells by `faulthandler`
STACKS_SECONDS = 2.0  # that a hung worker has for it


class NoWatchdog:
    """What a worker by itself has: nobody waits for it."""

    def enable(self) -> None:
        """From here on there has to be progress."""

    def disable(self) -> None:
        """Nothing is expected for now."""

    def heartbeat(self) -> None:
        """Progress was made; costs less than a microsecond. To be called by one thread."""

    @contextmanager
    def long_operation(self) -> Iterator[None]:
        """Within this block there may be no progress for three times as long. May be nested, and on any thread."""
        yield


class Watchdog(NoWatchdog):
    """Watches this worker from a process of its own, and kills it with SIGKILL where it

    - makes no progress (`heartbeat`) for `timeout` seconds while enabled,
    - is inside one `long_operation` block for three times as long while enabled, or
    - is stopped (SIGSTOP), enabled or not, for `timeout` seconds.

    The process, which starts disabled, reports this to the launcher, else on stderr, with the stacks of all threads of
    the worker: also of one that waits in MPI, or holds the interpreter's lock. It ends with the worker, whatever ends
    that. Time in which the process itself did not run, as where a job or a laptop is suspended, does not count.

    `rank`, `host`: name the worker in the message. `timeout`: in seconds.
    """

    def __init__(self, rank: int, host: str, timeout: float) -> None:
        self._file = tempfile.TemporaryFile(prefix="ddnn-")  # noqa: SIM115 (open to the worker's end; has no name)
        self._file.truncate(16)
        self._file.seek(16)
        faulthandler.register(STACKS_SIGNAL, self._file)
        self._words = memoryview(mmap.mmap(self._file.fileno(), 16)).cast("q")
        self._lock = threading.Lock()
        package, number = str(Path(__file__).parents[2]), self._file.fileno()
        start = f"import sys; sys.path.insert(0, {package!r}); from {__name__} import main; main(*sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", start, *map(str, (number, os.getpid(), rank, host, timeout))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(number,),
            start_new_session=True,  # signals to the worker's process group are not for it
        )

    def enable(self) -> None:
        self.heartbeat()
        with self._lock:
            self._words[1] |= ENABLED

    def disable(self) -> None:
        with self._lock:
            self._words[1] &= ~ENABLED

    def heartbeat(self) -> None:
        self._words[0] += 1

    @contextmanager
    def long_operation(self) -> Iterator[None]:
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, operations: int) -> None:
        with self._lock:
            self._words[0] += 1
            self._words[1] += 2 * ENABLED * operations


class HangDetector:
    """How long a worker has made no progress, in time that the watching process has itself seen pass. `timeout`: in
    seconds. `interval`: between two checks, in seconds. Where two checks are farther apart, as after the whole job was
    suspended, only twice this counts."""

    def __init__(self, timeout: float, interval: float) -> None:
        self.timeout, self.interval = timeout, interval
        self.progress: int | None = None
        self.idle_seconds = self.stopped_seconds = 0.0

    def check(self, passed: float, progress: int, state: int, stopped: bool) -> str | None:
        """What is wrong with the worker, `passed` seconds after the last check, if anything is. `progress`, `state`:
        the shared words. `stopped`: whether the kernel says that the process is."""
        passed = min(passed, 2 * self.interval)
        self.stopped_seconds = self.stopped_seconds + passed if stopped else 0.0
        self.idle_seconds = self.idle_seconds + passed if progress == self.progress and state & ENABLED else 0.0
        self.progress = progress
        limit = f"{self.timeout:g} s (parallel.hang_timeout)"
        if self.stopped_seconds >= self.timeout:
            return f"was stopped (SIGSTOP) for {limit}"
        if state > ENABLED and self.idle_seconds >= LONG_OPERATION_FACTOR * self.timeout:
            return f"hung in an exchange or a checkpoint for {LONG_OPERATION_FACTOR} x {limit}"
        if state == ENABLED and self.idle_seconds >= self.timeout:
            return f"made no progress for {limit}"
        return None


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by /proc; False where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[:1] == [b"T"]
    except OSError:
        return False


def read_stacks(pid: int, descriptor: int) -> str:
    """The stacks of all threads of a worker, which writes them into the shared file when it is asked; empty where it
    does not in time."""
    stacks = b""
    tgkill = getattr(ctypes.CDLL(None), "tgkill", lambda _, *to: os.kill(*to))  # in glibc since 2.30
    with suppress(ProcessLookupError):
        tgkill(pid, pid, STACKS_SIGNAL)  # to the main thread, which, if stopped, would run on while another answers
        os.kill(pid, signal.SIGCONT)  # a worker that is stopped gets the first signal with this one
        for _ in range(int(10 * STACKS_SECONDS)):
            time.sleep(0.1)
            before, stacks = stacks, os.pread(descriptor, 1 << 16, 16)
            if stacks == before != b"":
                break
    return stacks.decode(errors="replace")


def main(descriptor: str, pid_: str, rank: str, host: str, timeout: str) -> None:
    """The process: returns when the worker is gone; where it hangs, reports why and kills it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: dies with the worker, stopped or not
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # Slurm sends them to every process of a job
    words = memoryview(mmap.mmap(int(descriptor), 16, prot=mmap.PROT_READ)).cast("q")
    pid, last = int(pid_), time.monotonic()
    detector = HangDetector(float(timeout), interval=min(1.0, float(timeout) / 10))
    while os.getppid() == pid:
        time.sleep(detector.interval)
        now = time.monotonic()
        error = detector.check(now - last, words[0], words[1], is_stopped(pid))
        last = now
        if error is not None and os.getppid() == pid:
            message = f"ddnn: worker {rank} on {host} (pid {pid}) {error} and was killed\n"
            stacks = (
                read_stacks(pid, int(descriptor))
                or f"not known: the worker did not report its calls within {STACKS_SECONDS:g} s\n"
            )
            stacks = f"where worker {rank} hung, innermost calls first:\n{stacks}"
            if not append(rank=int(rank), message=message, hung=stacks):
                with suppress(OSError):
                    if select.select([], [2], [], 1.0)[1]:  # else nobody reads it
                        os.write(2, (message + stacks).encode(errors="backslashreplace"))
            os.kill(pid, signal.SIGKILL)
            return
