"""Run by mpirun: worker 1 fails in the way that argv[1] names, or nobody does; the others wait for its message."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from ddnn.errors import UserError
from ddnn.parallel.connect import connect
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.failures import all_stop_on_error
from ddnn.parallel.guard import Guard
from ddnn.parallel.strategies import STRATEGIES

AVERAGINGS = 4


def fail(way: str) -> None:
    if way == "raise":
        raise RuntimeError("boom of the test")
    if way == "user-error":
        raise UserError("the rate is -1", where="recipe.yaml", mend="take a positive one")
    if way == "exit":
        sys.exit(7)
    if way == "hung":
        os.kill(os.getpid(), signal.SIGSTOP)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "thread":
        threading.Thread(target=fail, args=("raise",)).start()
        time.sleep(60)


def average_for_ever(exchange: Exchange, name: str, beside: bool = False) -> None:
    """Averages until worker 1 raises after its third time; beside: while its own exchange hangs on a second thread."""
    theta = torch.ones(1_000_000)
    # No with statement: at an error its end would wait for an exchange that may never end.
    pool = ThreadPoolExecutor(1)
    for number in range(1_000_000):
        if exchange.rank == 1 and number == 3:
            if beside:
                pool.submit(exchange.send_receive, theta, 1, 0)
                time.sleep(0.2)
            fail("raise")
        pool.submit(STRATEGIES[name], exchange, theta, number, 1.0).result()


def one_is_slow(exchange: Exchange, out: Path) -> None:
    """Worker 1 takes three times as long for a block as the others; every strategy, then what each worker waited."""
    waited, theta = {}, {}
    for name, strategy in STRATEGIES.items():
        exchange.barrier()
        before, theta[name] = exchange.traffic.copy(), torch.full((1000,), float(exchange.rank))
        for number in range(AVERAGINGS):
            time.sleep(0.12 if exchange.rank == 1 else 0.04)
            strategy(exchange, theta[name], number, 1.0)
        waited[name] = exchange.gather((exchange.traffic - before).waiting_seconds)
    mean = {name: float(exchange.all_gather(values).mean()) for name, values in theta.items()}
    if exchange.rank == 0:
        (out / "slow.json").write_text(json.dumps({"waited": waited, "mean": mean}))


def main(way: str, out: Path) -> None:
    exchange = connect()
    with all_stop_on_error(exchange):
        print(f"worker {exchange.rank} of {exchange.size}", flush=True)
        exchange.guard = Guard(exchange.number, exchange.host, 2.0) if way == "hung" else None
        exchange.barrier()
        temporary = out / f"{exchange.rank}.tmp"
        temporary.write_text(f"{os.getpid()} {os.getppid()} {time.time()}")
        temporary.rename(out / f"{exchange.rank}.pid")
        if way == "slow":
            one_is_slow(exchange, out)
            return
        if way == "stop":
            time.sleep(0.5 * exchange.rank)
            sys.exit(75)
        name, _, beside = way.partition(" ")
        if name in STRATEGIES:
            average_for_ever(exchange, name, beside == "beside")
        if exchange.rank == 1:
            fail(way)
        buffer = torch.ones(4)
        exchange.send_receive(buffer, 1, 1) if exchange.rank != 1 else time.sleep(60)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
