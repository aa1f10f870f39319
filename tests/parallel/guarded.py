"""A worker with a guard, without MPI or torch. argv: how it goes on, and the folder for its guard's pid."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from ddnn.parallel.guard import Guard

TIMEOUT = 1.0
"""In seconds."""


def main(way: str, out: Path) -> None:
    guard = Guard(2, "n1", TIMEOUT)
    (out / "guard.tmp").write_text(str(guard.pid))
    (out / "guard.tmp").rename(out / "guard.pid")
    if way == "unarmed stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "unarmed":
        time.sleep(4 * TIMEOUT)
        return
    guard.arm()
    if way == "hangs":
        time.sleep(60)
    if way == "hangs in an exchange":
        with guard.busy(), guard.busy():
            time.sleep(60)
    if way == "exchanges":
        with guard.busy():
            time.sleep(2 * TIMEOUT)
    if way in ("works", "killed"):
        for _ in range(40):
            guard.tick()
            time.sleep(0.1 * TIMEOUT)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "disarmed":
        guard.disarm()
        time.sleep(4 * TIMEOUT)
    if way == "closed":
        guard.close()
        time.sleep(4 * TIMEOUT)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
