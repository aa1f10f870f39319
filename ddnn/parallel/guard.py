"""Kills this worker where it hangs: a small process beside it, that watches a number grow."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddnn.parallel.last_words import LAST_WORDS
from ddnn.parallel.launch import fault_tolerant
from ddnn.parallel.watch import ARMED

PATIENCE = 3
"""How many timeouts an exchange or a checkpoint may take: others may hang first, and be killed by their own guards."""


class Guard:
    """Watches this worker from a process of its own, and kills it with SIGKILL where it

    - makes no progress (`tick`) for `timeout` seconds while armed,
    - is inside one `busy` block for three times as long while armed, or
    - is stopped (SIGSTOP), armed or not, for `timeout` seconds.

    The process says so on stderr, and for the launcher's last line. It ends with the worker, whatever ends that.
    Time in which the guard itself did not run, as where a job or a laptop is suspended, does not count.
    """

    def __init__(self, rank: int, host: str, timeout: float, name: str = "parallel.timeout", siblings: int = 0) -> None:
        """Starts the process, unarmed.

        Args:
            rank, host: name the worker in the message.
            timeout: in seconds.
            name: of the timeout, for the message.
            siblings: number of workers on this host, to kill this one as soon as one of them has ended; 0: no matter.
        """
        with tempfile.TemporaryFile(prefix="ddnn-") as file:  # no name: nothing is left behind
            file.truncate(16)
            self._map = mmap.mmap(file.fileno(), 16)
            # Progress; then 1 where armed, and 2 more for each busy block.
            self._words = memoryview(self._map).cast("q")
            self._lock = threading.Lock()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", str(Path(__file__).with_name("watch.py"))),
                    *(
                        str(file.fileno()),
                        str(os.getpid()),
                        str(rank),
                        host,
                        str(timeout),
                        name,
                        str(PATIENCE),
                        str(siblings),
                    ),
                    # Where the job outlives the worker, its message is for now, not for the launcher's end.
                    "" if fault_tolerant() else os.environ.get(LAST_WORDS, ""),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(file.fileno(),),
                start_new_session=True,  # signals to the worker's process group are not for it
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def arm(self) -> None:
        """From here on there has to be progress."""
        self.tick()
        with self._lock:
            self._words[1] |= ARMED

    def disarm(self) -> None:
        """Nothing is expected for now."""
        with self._lock:
            self._words[1] &= ~ARMED

    def tick(self) -> None:
        """Progress was made; costs less than a microsecond. To be called by one thread."""
        self._words[0] += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Within this block there may be no progress for three times as long. May be nested, and on any thread."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, blocks: int) -> None:
        with self._lock:
            self._words[0] += 1
            self._words[1] += 2 * ARMED * blocks

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
