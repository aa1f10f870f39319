"""A worker with a watchdog, without MPI or torch. argv: what it does, and the folder for its watchdog's pid."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ddnn.distributed.watchdog import Watchdog

TIMEOUT = 1.0
"""In seconds."""


def another_thread() -> None:
    time.sleep(900)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_interpreter() -> None:
    """No other thread runs, and no handler of a signal that is written in Python."""
    while True:
        ctypes.PyDLL(None).sleep(900)


def main(way: str, out: Path) -> None:
    for _ in range(4):
        threading.Thread(target=another_thread, daemon=True).start()
    watchdog = Watchdog(2, "n1", TIMEOUT)
    (out / "watchdog.tmp").write_text(str(watchdog.process.pid))
    (out / "watchdog.tmp").rename(out / "watchdog.pid")
    if way == "disabled stopped":
        stop()
        time.sleep(900)  # it is continued for its stacks
    if way == "disabled":
        time.sleep(4 * TIMEOUT)
        return
    watchdog.enable()
    if way == "hangs":
        time.sleep(900)
    if way == "holds the interpreter":
        hold_the_interpreter()
    if way == "hangs in an exchange":
        with watchdog.long_operation(), watchdog.long_operation():
            time.sleep(900)
    if way == "exchanges":
        with watchdog.long_operation():
            time.sleep(2 * TIMEOUT)
    if way in ("works", "killed"):
        for _ in range(40):
            watchdog.heartbeat()
            time.sleep(0.1 * TIMEOUT)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "disabled again":
        watchdog.disable()
        time.sleep(4 * TIMEOUT)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
