"""Run by mpirun --with-ft ulfm: workers average, some die as argv[1] says, the others go on.

argv[1] is a list of deaths with commas between, each "number:when:how":
  compute, raise      killed between two exchanges, or by an exception, in round `when`
  any, stopped        killed, or stopped by SIGSTOP, `when` seconds after the start, wherever it is
  user-error, stop    ends the job in round `when`; number -1: all workers do
  call                lives, and calls the others to the meeting in round `when`, as one with an error of its own
  meeting             killed `when` seconds after it has come to the meeting of the survivors
argv[2] is the number of rounds, argv[3] a folder for what each worker reports.
"""

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
from ddnn.parallel.mean import mean
from ddnn.parallel.strategies import STRATEGIES
from ddnn.parallel.survive import WorkerLost, finish, survivors

PARAMETERS = 1_000_000
"""4 MB: exchanges take some milliseconds, and most deaths come in the middle of one."""
TIMEOUT = 3.0
"""Of the guard, in seconds."""


class Death(threading.Thread):
    """Ends this process after some seconds, whatever its main thread does."""

    def __init__(self, seconds: float, number: signal.Signals = signal.SIGKILL) -> None:
        super().__init__(daemon=True)
        self.seconds, self.number = seconds, number

    def run(self) -> None:
        time.sleep(self.seconds)
        os.kill(os.getpid(), self.number)


def end(how: str) -> None:
    if how == "raise":
        raise RuntimeError("boom of the test")
    if how == "user-error":
        raise UserError("the rate is -1", where="recipe.yaml")
    if how == "call":
        raise WorkerLost("nobody, but let us meet")
    if how == "stop":
        sys.exit(75)
    os.kill(os.getpid(), signal.SIGKILL)


class Worker:
    """Blocks of minibatches and averagings, as a training makes them.

    theta of worker r is r + 1 before each averaging: what is wrong in an exchange shows.
    """

    def __init__(self, exchange: Exchange, plan: str, rounds: int) -> None:
        self.exchange, self.rounds, self.number = exchange, rounds, exchange.number
        self.deaths = [death.split(":") for death in plan.split(",") if death]
        self.pool = ThreadPoolExecutor(1)
        self.theta = torch.empty(PARAMETERS)
        self.recoveries: list[dict[str, object]] = []
        self.round = 0

    def own_deaths(self, *hows: str) -> list[tuple[float, str]]:
        return [(float(when), how) for who, when, how in self.deaths if int(who) in (self.number, -1) and how in hows]

    def average(self) -> None:
        """One averaging by sum, one by Sendrecv, one on another thread; each checked."""
        members = [member.number + 1 for member in self.exchange.members]
        self.theta.fill_(float(self.number + 1))
        mean(self.exchange, self.theta, 10.0)
        expected = sum(members) / len(members)
        assert torch.allclose(self.theta, torch.tensor(expected)), (self.theta, expected)
        self.theta.fill_(float(self.number + 1))
        received = self.exchange.send_receive(
            self.theta, (self.exchange.rank + 1) % len(members), (self.exchange.rank - 1) % len(members)
        )
        assert bool((received == members[self.exchange.rank - 1]).all()), (received, members)
        self.pool.submit(STRATEGIES["hopping-ring"], self.exchange, self.theta, self.round, 10.0).result()

    def compute(self, seconds: float = 0.003) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.ones(1000).sum()
        if self.exchange.guard:
            self.exchange.guard.tick()

    def train(self) -> None:
        while self.exchange.agree_min(self.round) < self.rounds:
            for when, how in self.own_deaths("compute", "raise", "user-error", "stop", "call"):
                if self.round == int(when):
                    self.deaths = [death for death in self.deaths if death[2] != "call"]  # once
                    end(how)
            self.compute()
            self.average()
            self.round += 1

    def meet(self) -> None:
        for when, _ in self.own_deaths("meeting"):
            Death(when).start()
        since = time.perf_counter()
        before = self.exchange
        self.exchange, said, lost = survivors(self.exchange, {"number": self.number, "round": self.round})
        self.round = max(entry["round"] for entry in said)
        self.recoveries.append(
            {
                "lost": [before.members[rank].number for rank in lost],
                "left": [entry["number"] for entry in said],
                "seconds": time.perf_counter() - since,
            }
        )
        assert [entry["number"] for entry in said] == [member.number for member in self.exchange.members]


def main(plan: str, rounds: int, out: Path) -> None:
    exchange = connect()
    with all_stop_on_error(exchange) as job:
        exchange.guard = Guard(exchange.number, exchange.host, TIMEOUT)
        worker = Worker(exchange, plan, rounds)
        (out / f"{worker.number}.pid").write_text(str(os.getpid()))
        (out / f"{worker.number}.guard.pid").write_text(str(exchange.guard.pid))
        exchange.barrier()
        exchange.guard.arm()
        for when, how in worker.own_deaths("any", "stopped"):
            Death(when, signal.SIGKILL if how == "any" else signal.SIGSTOP).start()
        while True:
            try:
                worker.train()
                finish(worker.exchange)
                break
            except WorkerLost:
                worker.meet()
                job.exchange = worker.exchange
        exchange.guard.disarm()
        report = {"size": worker.exchange.size, "recoveries": worker.recoveries, "round": worker.round}
        (out / f"{worker.number}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
