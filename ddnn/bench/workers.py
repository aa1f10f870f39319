"""`ddnn bench --workers N`: compares N workers that average with one of them alone, with the trainer's own steps.
Alternately, rank 0 trains alone while the others wait, then all train and average. A change of the machine's speed
affects both, and the speed-up is the median over the rounds of the ratio within a round."""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from ddnn.averaging.averager import NoAveraging, make_averager
from ddnn.bench.step import LR, NETWORKS, ROUNDS, WARM_UP, RandomTask, endless, machine_facts, random_task
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.launcher import run_distributed
from ddnn.nn.arithmetic import Precision, make_arithmetic
from ddnn.nn.network import Workspace
from ddnn.nn.precision import seconds_per_call
from ddnn.optim.ng_sgd import NgSgd
from ddnn.optim.sgd import Sgd
from ddnn.recipe.schema import AveragingConfig, BmufConfig, ParallelConfig
from ddnn.training.options import averaging_options
from ddnn.training.step import EagerStep
from ddnn.training.trainer import worker_row
from ddnn.util.errors import UserError
from ddnn.util.system import choose_device
from ddnn.util.text import render


@dataclass(frozen=True)
class WorkersBench:
    """The result of several workers; medians over the rounds."""

    machine: dict[str, str]
    network: str
    optimizer: str
    precision: Precision
    workers: int
    strategy: str
    averaging_period: int
    single_worker_fps: float  # frames/s of rank 0 alone
    aggregate_fps: float  # of all workers
    speed_up: float  # the second over the first
    spread: tuple[float, float]  # of it, smallest and largest
    comm_fraction: float  # of the workers' time, mean over workers and rounds, 0 to 1
    wait_fraction: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        return render("bench-workers.txt.j2", r=self)


def run_bench_workers(
    networks: Sequence[str],
    options: Mapping[str, Any],
    device: str,
    seconds: float,
    precisions: Sequence[Precision],
    json_: bool,
    show: Callable[[WorkersBench], None],
) -> None:
    """Starts the workers and shows the result of each network in each precision (float32 if none is given), `seconds`
    for each. `options`: keys of `parallel`, as a recipe gives them; UserError where one is out of range."""
    try:
        model = BmufConfig if options["strategy"] == "bmuf" else AveragingConfig
        parallel: ParallelConfig = model.model_validate(dict(options))
    except ValidationError as error:
        bad = error.errors()[0]
        raise UserError(f"{bad['input']} found: {bad['msg']}", location=f"--{bad['loc'][0]}") from error
    given = [("device", device), ("seconds", seconds), ("workers", parallel.workers), ("strategy", parallel.strategy)]
    given += [("averaging-period", parallel.averaging_period), ("threads", parallel.cpu_threads)]
    given += [("network", network) for network in networks] + [("precision", precision) for precision in precisions]
    arguments = ["bench", *(word for name, value in given for word in (f"--{name}", str(value)))]
    arguments += ["--overlap"] * parallel.overlap + ["--json"] * json_

    def work(comm: Communicator) -> None:
        for network, precision in itertools.product(networks, precisions or ("float32",)):
            result = bench_workers(comm, network, parallel, device, seconds, precision)
            if comm.rank == 0:
                show(result)

    run_distributed(parallel.workers, arguments, work)


def bench_workers(
    comm: Communicator,
    network: str,
    options: ParallelConfig,
    device: str = "auto",
    seconds: float = 20.0,
    precision: Precision = "float32",
) -> WorkersBench:
    """Measures for about `seconds`. Collective; every worker returns the same result."""
    logging.getLogger("ddnn").setLevel(logging.WARNING)
    on = choose_device(device, comm.local_rank, threads=options.cpu_threads)
    shape = NETWORKS[network]
    task = random_task(shape, on)
    trained = task.model.network
    optimizer = NgSgd(trained)
    by_itself = NoAveraging(SingleProcess(), trained, optimizer)
    with_others = make_averager(averaging_options(options), comm, trained, optimizer, shape.minibatch)
    run_seconds = _timed_steps(task, optimizer, precision)
    each = comm.all_gather_object(run_seconds(by_itself, WARM_UP) / WARM_UP)
    minibatches = max(1, int(seconds / ROUNDS / 2 / max(each) / options.averaging_period)) * options.averaging_period
    alone, together, rows = [], [], []
    for _ in range(ROUNDS):
        comm.barrier()
        took = run_seconds(by_itself, minibatches) if comm.rank == 0 else 0.0
        alone.append(minibatches * shape.minibatch / comm.all_gather_object(took)[0])
        comm.barrier()
        took = run_seconds(with_others, minibatches)
        rows += comm.all_gather_object(worker_row(0, with_others).model_dump())
        together.append(comm.world_size * minibatches * shape.minibatch / max(comm.all_gather_object(took)))
    with_others.close()
    ratios = [both / one for both, one in zip(together, alone, strict=True)]
    return WorkersBench(
        machine=machine_facts(on),
        network=network,
        optimizer="ng-sgd",
        precision=precision,
        workers=comm.world_size,
        strategy=options.strategy + (" overlapped" if options.overlap else ""),
        averaging_period=options.averaging_period,
        single_worker_fps=statistics.median(alone),
        aggregate_fps=statistics.median(together),
        speed_up=statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        comm_fraction=statistics.fmean(row["comm_fraction"] for row in rows),
        wait_fraction=statistics.fmean(row["wait_fraction"] for row in rows),
    )


def _timed_steps(task: RandomTask, optimizer: Sgd, precision: Precision) -> Callable[[NoAveraging, int], float]:
    """Trains on so many more minibatches of random frames, and tells the seconds."""
    network = task.model.network
    workspace = Workspace(network, task.minibatch, make_arithmetic(precision, network.parameters.device))
    batches = endless(task.batches(workspace))

    def seconds(averager: NoAveraging, minibatches: int) -> float:
        step = EagerStep(workspace, optimizer, averager.average_gradient)
        averager.begin_epoch(minibatches)

        def run() -> None:
            for batch in itertools.islice(batches, minibatches):
                averager.timer.mark("data")
                step(batch, LR)
                averager.after_minibatch(len(batch.labels))
            averager.wait()

        return seconds_per_call(run, 1, workspace.x.device)

    return seconds
