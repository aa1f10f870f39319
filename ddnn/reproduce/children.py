"""Commands of ddnn run as processes of their own; all are told to stop when this one is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from ddnn.files import make_directory

TAIL_BYTES = 4000
GRACE = 300.0
"""Seconds that a training has for its checkpoint."""


class Children:
    """The processes that run now."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stopping = False

    def run(self, arguments: Sequence[str], output: Path) -> tuple[int, str]:
        """`ddnn` with these arguments, its output appended to a file: the exit code, and the end of what it said.

        One thread computes in each process: as many as the cores run side by side.
        """
        make_directory(output.parent)
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with output.open("ab") as said:
            before = said.tell()
            with self._lock:
                if self._stopping:
                    return 128 + signal.SIGTERM, "not begun"
                child = subprocess.Popen(
                    [sys.executable, "-m", "ddnn.cli", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    env=environment,
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
