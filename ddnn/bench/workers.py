"""`ddnn bench --workers N`: the trainer's own steps in N processes.

In each round rank 0 trains alone while the others wait, then all train at the same time, each by itself, then all train
and average. The efficiency is the third speed over the second: what averaging costs, whatever the workers share of the
machine. The speed-up is the third over the first. Both are medians of the ratio within a round.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError

from ddnn.averaging.averager import Averager
from ddnn.averaging.choice import make_averager
from ddnn.bench.step import (
    LR,
    ROUNDS,
    WARM_UP,
    machine_facts,
    median,
    rounds,
    seconds_per_call,
    settle,
    spread,
)
from ddnn.bench.step import log as step_log
from ddnn.bench.task import NETWORKS, RandomTask, endless, random_task
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.distributed.launcher import run_distributed
from ddnn.distributed.mpirun import count_of, in_mpi_job
from ddnn.distributed.transport import open_transport
from ddnn.nn.arithmetic import Precision, make_arithmetic
from ddnn.nn.network import Workspace
from ddnn.optim.ng_sgd import NgSgd
from ddnn.optim.sgd import Sgd
from ddnn.recipe.schema import AsyncConfig, AveragingConfig, BmufConfig, ElasticConfig, ParallelConfig
from ddnn.training.options import averaging_options
from ddnn.training.step import EagerStep
from ddnn.training.trainer import worker_row
from ddnn.util.errors import UserError
from ddnn.util.system import choose_device, usable_cores
from ddnn.util.text import plural, render

MAX_WORKERS_PER_CORE = 4


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
    independent_fps: float  # of all workers at the same time, each by itself
    aggregate_fps: float  # of all workers that average
    speed_up: float  # the third over the first
    spread: tuple[float, float]  # of it, smallest and largest
    efficiency: float  # the third over the second
    efficiency_spread: tuple[float, float]
    comm_fraction: float  # of the workers' time, mean over workers and rounds, 0 to 1
    wait_fraction: float

    as_dict = asdict

    def as_text(self) -> str:
        return render("bench-workers.txt.j2", r=self)


def run_bench_workers(
    options: Mapping[str, Any],
    arguments: Sequence[str],
    show: Callable[[WorkersBench], None],
    networks: Sequence[str],
    device: str,
    seconds: float,
    precisions: Sequence[Precision],
) -> None:
    """Starts the workers and shows the result of each network in each precision (float32 if none is given), `seconds`
    for each. `options`: keys of `parallel`, as a recipe gives them. `arguments`: of the command `ddnn` that calls this,
    which every worker runs. UserError: an option is out of range, or there are too few cores."""
    try:
        models: dict[str, type[ParallelConfig]] = {
            "bmuf": BmufConfig,
            "elastic": ElasticConfig,
            "async": AsyncConfig,
        }
        model = models.get(options["strategy"], AveragingConfig)
        parallel: ParallelConfig = model.model_validate(dict(options))
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][0]).removeprefix("cpu_").replace("_", "-")
        raise UserError(f"{problem['input']} found: {problem['msg']}", location=f"--{option}") from error
    if not in_mpi_job():
        cores = usable_cores() * max(1, count_of(os.environ, "SLURM_JOB_NUM_NODES"))
        if parallel.workers > MAX_WORKERS_PER_CORE * cores:
            message = f"{parallel.workers} workers on {plural(cores, 'core')}, expected at most {MAX_WORKERS_PER_CORE} on each"
            raise UserError(message, location="--workers", hint="take fewer workers, or a Slurm job on more nodes")

    def work(comm: Communicator) -> None:
        for network, precision in itertools.product(networks, precisions or ("float32",)):
            on = choose_device(device, comm.local_rank, threads=parallel.cpu_threads)
            with open_transport(parallel.gpu_transport, on, Groups.data_parallel(comm)):
                result = bench_workers(comm, network, parallel, on, seconds, precision)
            if comm.rank == 0:
                show(result)

    run_distributed(parallel.workers, arguments, work)


def bench_workers(
    comm: Communicator, network: str, options: ParallelConfig, on: torch.device, seconds: float, precision: Precision
) -> WorkersBench:
    """Measures for about `seconds`, on the device `on`. Collective; every worker returns the same result."""
    logging.getLogger("ddnn").setLevel(logging.WARNING)
    step_log.setLevel(logging.WARNING if comm.rank else logging.INFO)
    task = random_task(NETWORKS[network], on)
    optimizer = NgSgd(task.model.network)
    groups = Groups.data_parallel(comm)
    alone = Averager(Groups.data_parallel(groups.replica), task.model.network, optimizer)
    averaging = make_averager(averaging_options(options), groups, task.model.network, optimizer)
    run_seconds = _timed_steps(task, optimizer, precision)
    slowest = max(comm.all_gather_object(run_seconds(alone, WARM_UP) / WARM_UP))
    # In a training all workers update their Fisher matrices in the same minibatch, also after rank 0 was alone.
    unit = math.lcm(options.averaging_period, settle(optimizer))
    minibatches = max(1, int(seconds / ROUNDS / 3 / slowest / unit)) * unit
    speeds: list[tuple[float, float, float]] = []  # of rank 0 alone, of all independently, of all that average
    rows: list[dict[str, Any]] = []

    def measure(averager: Averager, workers: int) -> list[float]:
        """Frames/s of the first workers, all at once, while the others wait."""
        comm.barrier()
        seconds = comm.all_gather_object(run_seconds(averager, minibatches) if comm.rank < workers else 0.0)
        return [minibatches * task.minibatch / each for each in seconds[:workers]]

    for _ in rounds(f"{network}, {comm.world_size} workers", 3 * minibatches * slowest, seconds):
        single, independent = measure(alone, 1)[0], sum(measure(alone, comm.world_size))
        speeds.append((single, independent, comm.world_size * min(measure(averaging, comm.world_size))))
        rows += comm.all_gather_object(worker_row(0, averaging).model_dump())
    averaging.close()
    single_fps, independent_fps, aggregate_fps = np.array(speeds).T
    speed_up, efficiency = aggregate_fps / single_fps, aggregate_fps / independent_fps
    return WorkersBench(
        machine=machine_facts(on),
        network=network,
        optimizer="ng-sgd",
        precision=precision,
        workers=comm.world_size,
        strategy=options.strategy + (" overlapped" if options.overlap else ""),
        averaging_period=options.averaging_period,
        single_worker_fps=median(single_fps),
        independent_fps=median(independent_fps),
        aggregate_fps=median(aggregate_fps),
        speed_up=median(speed_up),
        spread=spread(speed_up),
        efficiency=median(efficiency),
        efficiency_spread=spread(efficiency),
        comm_fraction=statistics.fmean(row["comm_fraction"] for row in rows),
        wait_fraction=statistics.fmean(row["wait_fraction"] for row in rows),
    )


def _timed_steps(task: RandomTask, optimizer: Sgd, precision: Precision) -> Callable[[Averager, int], float]:
    """A function that trains on so many more minibatches of random frames, and returns the seconds."""
    network = task.model.network
    workspace = Workspace(network, task.minibatch, make_arithmetic(precision, network.parameters.device))
    batches = endless(task.batches(workspace))

    def seconds(averager: Averager, minibatches: int) -> float:
        step = EagerStep(workspace, optimizer, averager.average_gradient)
        averager.begin_epoch(minibatches, minibatches * task.minibatch)

        def run() -> None:
            for batch in itertools.islice(batches, minibatches):
                averager.timer.mark("data")
                step(batch, LR)
                averager.after_minibatch(batch.num_frames)
            averager.wait()

        return seconds_per_call(run, 1, workspace.x.device)

    return seconds
