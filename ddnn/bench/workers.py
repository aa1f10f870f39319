"""`ddnn bench --workers N`: N workers that average against one of them alone, by the trainer's own steps.

In turn: the first worker trains alone while the others wait, then all train and average. A machine that drifts slows
both, and the speed-up is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError

from ddnn.bench.step import NETWORKS, RATE, ROUNDS, WARM_UP, Shape, cpu_name, random_setup
from ddnn.data.minibatches import shuffled_minibatches
from ddnn.device import choose_device
from ddnn.errors import UserError
from ddnn.model.network import Buffers, Precision
from ddnn.optim.sgd import make_optimizer
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Optimizer, Parallel
from ddnn.train.averaging import Averaging, no_averaging
from ddnn.train.loop import Setup, train_minibatch
from ddnn.train.telemetry import worker_row
from ddnn.train.workers import run_together


@dataclass(frozen=True)
class WorkersBench:
    """What several workers reached.

    Attributes:
        alone: frames/s of the first worker alone, median over the rounds.
        together: frames/s of all workers, median over the rounds.
        speed_up, spread: the second over the first, median over the rounds, and smallest and largest.
        communication_share, waiting_share: of the workers' time, mean over workers and rounds, 0 to 1.
    """

    machine: dict[str, str]
    network: str
    optimizer: str
    precision: Precision
    workers: int
    reduce: str
    every: int
    alone: float
    together: float
    speed_up: float
    spread: tuple[float, float]
    communication_share: float
    waiting_share: float

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def as_text(self) -> str:
        """A few lines."""
        return (
            f"{', '.join(f'{k} {v}' for k, v in self.machine.items())}\n"
            f"{self.network} {self.optimizer} {self.precision}, {self.workers} workers, {self.reduce} "
            f"every {self.every}: {self.together:.0f} frames/s, one alone {self.alone:.0f}: {self.speed_up:.2f} times "
            f"({self.spread[0]:.2f} .. {self.spread[1]:.2f})\n"
            f"communication {100 * self.communication_share:.1f} %, waiting for the slowest "
            f"{100 * self.waiting_share:.1f} % of the workers' time"
        )


def run_bench_workers(
    networks: Sequence[str],
    options: Mapping[str, Any],
    device: str,
    seconds: float,
    precisions: Sequence[Precision],
    json_: bool,
    show: Callable[[WorkersBench], None],
) -> None:
    """Starts the workers and shows what each network reached in each precision.

    Args:
        options: keys of `parallel`, as a recipe gives them.
        seconds: for each of them.
        precisions: to measure; if none is given, float32.

    Raises:
        UserError: one of them is out of range.
    """
    try:
        parallel = Parallel.model_validate(dict(options))
    except ValidationError as error:
        bad = error.errors()[0]
        raise UserError(f"{bad['input']} found: {bad['msg']}", where=f"--{bad['loc'][0]}") from error
    arguments = ["bench", "--device", device, "--seconds", str(seconds), "--workers", str(parallel.workers)]
    arguments += ["--reduce", parallel.reduce, "--every", str(parallel.every), "--threads", str(parallel.threads)]
    arguments += ["--overlap"] * parallel.overlap + ["--json"] * json_
    arguments += [word for network in networks for word in ("--network", network)]
    arguments += [word for precision in precisions for word in ("--precision", precision)]

    def work(exchange: Exchange) -> None:
        for network, precision in itertools.product(networks, precisions or ("float32",)):
            result = bench_workers(exchange, network, parallel, device, seconds, precision)
            if exchange.rank == 0:
                show(result)

    run_together(parallel.workers, arguments, lambda job: work(job.exchange))


def bench_workers(
    exchange: Exchange,
    network: str,
    options: Parallel,
    device: str = "auto",
    seconds: float = 20.0,
    precision: Precision = "float32",
) -> WorkersBench:
    """Measures for about `seconds`. Collective; the same figures on every worker."""
    logging.getLogger("ddnn").setLevel(logging.WARNING)
    on = choose_device(device, exchange.local_rank, threads=options.threads)
    shape = NETWORKS[network]
    setup = random_setup(shape, on)
    optimizer = make_optimizer(Optimizer(name="ng-sgd"), setup.model.network)
    setup = replace(setup, optimizer=optimizer, precision=precision)
    parameters = setup.model.network.parameters
    by_itself = replace(setup, averaging=no_averaging(parameters, optimizer, shape.minibatch))
    with_others = replace(setup, averaging=Averaging(exchange, options, parameters, optimizer, shape.minibatch))
    run = _Steps(shape, setup)
    each = exchange.gather(run.seconds(by_itself, WARM_UP) / WARM_UP)
    blocks = max(1, int(seconds / ROUNDS / 2 / max(each) / options.every))
    minibatches = blocks * options.every
    alone, together, rows = [], [], []
    for _ in range(ROUNDS):
        exchange.barrier()
        took = run.seconds(by_itself, minibatches) if exchange.rank == 0 else 0.0
        alone.append(minibatches * shape.minibatch / exchange.gather(took)[0])
        exchange.barrier()
        took = run.seconds(with_others, minibatches)
        clock, counts = with_others.averaging.clock, with_others.averaging.counts
        row = worker_row(0, exchange, on, clock, counts, parameters=parameters.numel(), overlap=options.overlap)
        rows += exchange.gather(row)
        together.append(exchange.size * minibatches * shape.minibatch / max(exchange.gather(took)))
    with_others.averaging.close()
    ratios = [both / one for both, one in zip(together, alone, strict=True)]
    return WorkersBench(
        machine={"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "device": str(on), "torch": torch.__version__},
        network=network,
        optimizer="ng-sgd",
        precision=precision,
        workers=exchange.size,
        reduce=options.reduce + (" overlapped" if options.overlap else ""),
        every=options.every,
        alone=statistics.median(alone),
        together=statistics.median(together),
        speed_up=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        communication_share=statistics.fmean(row["communication_share"] for row in rows),
        waiting_share=statistics.fmean(row["waiting_share"] for row in rows),
    )


class _Steps:
    """Trains on minibatches of random frames, over and over."""

    def __init__(self, shape: Shape, setup: Setup) -> None:
        self.buffers = Buffers(setup.model.network, shape.minibatch, setup.precision)
        self.rows = itertools.cycle(shuffled_minibatches(setup.train, shape.minibatch, seed=1, epoch=1))

    def seconds(self, setup: Setup, minibatches: int) -> float:
        """Time of so many steps, with what averaging goes with them."""
        setup.averaging.start_epoch(minibatches)
        started = time.perf_counter()
        for rows in itertools.islice(self.rows, minibatches):
            train_minibatch(setup, self.buffers, rows, RATE)
            setup.averaging.after_minibatch(len(rows))
        setup.averaging.arrive()
        if self.buffers.x.is_cuda:
            torch.cuda.synchronize(self.buffers.x.device)
        return time.perf_counter() - started
