"""Run by mpirun: worker 1 fails in the way that argv[1] names, or nobody does; the others wait for its message."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from ddnn.errors import UserError
from ddnn.parallel.exchange import connect
from ddnn.parallel.failures import all_stop_on_error


def fail(way: str) -> None:
    if way == "raise":
        raise RuntimeError("boom of the test")
    if way == "user-error":
        raise UserError("the rate is -1", where="recipe.yaml", mend="take a positive one")
    if way == "exit":
        sys.exit(7)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "thread":
        threading.Thread(target=fail, args=("raise",)).start()
        time.sleep(60)


def main(way: str, out: Path) -> None:
    exchange = connect()
    with all_stop_on_error(exchange):
        print(f"worker {exchange.rank} of {exchange.size}", flush=True)
        exchange.barrier()
        temporary = out / f"{exchange.rank}.tmp"
        temporary.write_text(f"{os.getpid()} {os.getppid()} {time.time()}")
        temporary.rename(out / f"{exchange.rank}.pid")
        if exchange.rank == 1:
            fail(way)
        buffer = torch.ones(4)
        exchange.send_receive(buffer, 1, 1) if exchange.rank != 1 else time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
