"""The process of a `ddnn.parallel.guard.Guard`, started by the path of this file with nothing but Python's own modules.

Arguments: file descriptor of the shared words, pid, number and host of the worker, timeout in seconds and its name, its
multiple for busy blocks, number of workers on this host if none of them may end (else 0), folder for last words (empty:
none).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

ARMED = 1
"""Bit of the second shared word; the rest of it is twice the number of busy blocks."""


class Watch:
    """How long a worker has stood still, in time that the watching process has itself seen pass.

    Args:
        timeout: in seconds.
        name: of the timeout, for the message.
        patience: how many timeouts a busy block may take.
        interval: between two looks, in seconds. Where two looks are farther apart, as after the whole job was
            suspended, only twice this counts.
    """

    def __init__(self, timeout: float, name: str, patience: int, interval: float) -> None:
        self.timeout, self.name, self.patience, self.interval = timeout, name, patience, interval
        self.progress: int | None = None
        self.still = self.stopped = 0.0

    def look(self, passed: float, progress: int, state: int, stopped: bool) -> str | None:
        """What is wrong with the worker, if anything is.

        Args:
            passed: seconds since the last look.
            progress: first shared word.
            state: second shared word.
            stopped: whether the kernel says that the process is stopped.
        """
        passed = min(passed, 2 * self.interval)
        self.stopped = self.stopped + passed if stopped else 0.0
        self.still = self.still + passed if progress == self.progress and state & ARMED else 0.0
        self.progress = progress
        if self.stopped >= self.timeout:
            return f"was stopped (SIGSTOP) for {self.timeout:g} s ({self.name})"
        if state > ARMED and self.still >= self.patience * self.timeout:
            return f"hung in an exchange or a checkpoint for {self.patience} x {self.timeout:g} s ({self.name})"
        if state == ARMED and self.still >= self.timeout:
            return f"made no progress for {self.timeout:g} s ({self.name})"
        return None


class Siblings:
    """The workers of this host, children of one mpirun or daemon of it, none of which may end.

    Args:
        pid: of one of them.
        number: how many there are, or will be soon; 0 asks nothing.
    """

    PATIENCE = 3.0
    """Seconds in which they are all started."""

    def __init__(self, pid: int, number: int) -> None:
        self.number, self.missing = number, 0.0
        status = stat_fields(pid)
        self.parent = int(status[1]) if status else 0

    def look(self, passed: float) -> str | None:
        """What is wrong with one of them; `passed`: seconds since the last look."""
        if self.number:
            self.missing = self.missing + passed if 0 < self._alive() < self.number else 0.0
        if self.missing < self.PATIENCE:
            return None
        return "cannot meet the others, of which one has died,"

    def _alive(self) -> int:
        """How many there are; 0 where the kernel does not say."""
        try:
            tasks = list(Path(f"/proc/{self.parent}/task").iterdir())
            children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            return 0
        return sum(stat_fields(child)[:1] not in ([], [b"Z"]) for child in children)


def watch(words: memoryview, pid: int, judge: Watch, siblings: Siblings, say: Callable[[str], None]) -> None:
    """Returns when the worker is gone; says why and kills it where it stands still, or another must not have ended."""
    last = time.monotonic()
    while os.getppid() == pid:
        time.sleep(judge.interval)
        now = time.monotonic()
        why = judge.look(now - last, words[0], words[1], is_stopped(pid)) or siblings.look(now - last)
        last = now
        if why is not None and os.getppid() == pid:
            say(why)
            os.kill(pid, signal.SIGKILL)
            return


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped, by /proc; False where there is none."""
    return stat_fields(pid)[:1] == [b"T"]


def stat_fields(pid: int) -> list[bytes]:
    """State, parent and so on of a process, by /proc; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []


def main(descriptor: int, pid: int, number: int, host: str, judge: Watch, siblings: int, folder: str) -> None:
    """See the module."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG: dies with the worker, stopped or not
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # Slurm sends them to every process of a job
    shared = mmap.mmap(descriptor, 16, prot=mmap.PROT_READ)

    def say(why: str) -> None:
        text = f"ddnn: worker {number} on {host} (pid {pid}) {why} and was killed\n"
        if not (folder and leave(Path(folder, f"{number}.txt"), text)):
            print_now(text)

    watch(memoryview(shared).cast("q"), pid, judge, Siblings(pid, siblings), say)


def leave(file: Path, text: str) -> bool:
    """Writes the last words of a worker; False where its launcher does not run on this host."""
    try:
        file.with_suffix(".tmp").write_text(text, encoding="utf-8", errors="backslashreplace")
        file.with_suffix(".tmp").rename(file)
    except OSError:
        return False
    return True


def print_now(text: str) -> None:
    """Writes to stderr where it can be written to: the worker is killed in any case."""
    try:
        if select.select([], [2], [], 1.0)[1]:
            os.write(2, text.encode(errors="backslashreplace"))
    except OSError:
        return


if __name__ == "__main__":
    descriptor, pid, number, host, timeout, name, patience, siblings, folder = sys.argv[1:]
    judge = Watch(float(timeout), name, int(patience), interval=min(1.0, float(timeout) / 10))
    main(int(descriptor), int(pid), int(number), host, judge, int(siblings), folder)
