"""The measured epochs that `ddnn scale` uses, from run dirs or from a file of published times."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, starmap
from pathlib import Path
from statistics import fmean, pvariance
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ddnn.distributed.cost import Layout, Size
from ddnn.recipe.section import Count, Section
from ddnn.recipe.source import configs_folder, read_yaml, validate
from ddnn.report.runs import Run, layout, read_run
from ddnn.report.scaling import CommScheme, Job, Measurement, averages_parameters, averagings
from ddnn.runs.rows import WorkerRow
from ddnn.runs.run_status import BEST, FINAL, RECIPE
from ddnn.util.errors import DataError, UserError

if TYPE_CHECKING:
    from ddnn.nn.layer import Layer
    from ddnn.recipe.schema import OptimizerConfig

SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
MAX_WORKERS = 10**6
_SIZES = re.compile(r"(?:\d{1,7}x)?\d{1,7}")

Time = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]
Frames = Annotated[float, Field(gt=0.0, le=1e15, allow_inf_nan=False)]
LargeCount = Annotated[Count, Field(le=10**9)]


class Published(Section):
    """A file of published times: how long an epoch took with a number of workers. docs/how-to/predict-speed-up.md has the keys."""

    network: str
    minibatch_size: LargeCount
    averaging_period: LargeCount
    strategy: Literal[
        "all-reduce", "butterfly", "ring", "hopping-ring", "gradient-all-reduce", "bmuf", "elastic", "1-bit"
    ] = "all-reduce"
    comm_dtype: Literal["float32", "bfloat16"] = "float32"
    frames: Frames
    unit: Literal["seconds", "minutes", "hours"] = "seconds"
    workers: Annotated[list[Annotated[Count, Field(le=MAX_WORKERS)]], Field(min_length=1, max_length=1000)]
    total: list[Annotated[Time, Field(gt=0.0)]]
    communication: list[Time]


def read_measured(path: Path) -> list[Measurement]:
    """The measurements of a run dir, or of a YAML file of published times (also one that comes with ddnn). DataError:
    it is neither, or damaged. RecipeError: the run dir's recipe is damaged."""
    if path.is_dir():
        return [_of_run(read_run(path))]
    shipped = configs_folder() / "measured" / path.name
    if not path.exists() and path.name == str(path) and shipped.is_file():
        path = shipped
    return _of_file(path)


def network_layers(text: str) -> list[Layer]:
    """The layers of a network like "440-6x2048-8806". UserError: not of this form, or with more than a hundred layers."""
    from ddnn.nn.layers import Affine

    dims: list[int] = []
    for part in text.split("-"):
        count, _, size = part.rpartition("x")
        if not _SIZES.fullmatch(part) or int(size) == 0 or not 1 <= int(count or 1) <= 100:
            break
        dims += [int(size)] * int(count or 1)
    else:
        if 2 <= len(dims) <= 102:
            return list(starmap(Affine, pairwise(dims)))
    raise UserError(f"{text[:100]!r} found, expected the dims of a network, as 440-6x2048-8806")


def network_cost(layers: Sequence[Layer]) -> tuple[int, float]:
    """Parameters, and floating-point operations per frame in the matrix products of a training step."""
    from ddnn.nn.layers import num_parameters, training_flop_per_frame

    return num_parameters(layers), float(training_flop_per_frame(layers))


def with_network(job: Job, text: str) -> Job:
    """The job with another network, like "440-6x2048-8806", and Fisher matrices of the same ranks. UserError: as
    `network_layers`."""
    layers = network_layers(text)
    parameters, operations = network_cost(layers)
    ranks = [max((size[side] for size in job.layers), default=0) for side in (2, 3)]
    dims = ([math.prod(layer.in_shape), math.prod(layer.out_shape)] for layer in layers)
    sizes = tuple(Size(n, m, min(ranks[0], n), min(ranks[1], m - 1)) for n, m in dims)
    return replace(job, parameters=parameters, operations=operations, layers=sizes)


def _of_file(path: Path) -> list[Measurement]:
    hint = "docs/how-to/predict-speed-up.md describes such a file"
    times = validate(Published, read_yaml(path), path, hint=hint)
    lengths = [len(times.workers), len(times.total), len(times.communication)]
    if len(set(lengths)) > 1:
        raise DataError("workers, total and communication differ in length: {}, {}, {}".format(*lengths), location=path)
    unit, scheme = SECONDS[times.unit], CommScheme(times.strategy, times.comm_dtype)
    job = with_network(Job(0, 0.0, times.minibatch_size, times.averaging_period, times.frames), times.network)
    measurements = []
    for workers, total, communication in zip(times.workers, times.total, times.communication, strict=True):
        if communication >= total:
            raise DataError(f"{workers} workers: communication is not below the total", location=path)
        rounds = averagings(job, times.strategy, workers) if workers > 1 else 0.0
        measurements.append(Measurement(str(path), workers, scheme, job, total * unit, communication * unit, rounds))
    return measurements


def _of_run(run: Run) -> Measurement:
    if run.recipe is None:
        hint = "train again with this version of ddnn"
        raise DataError(f"this run dir has no {RECIPE}", location=run.path, hint=hint)
    parallel, shape = run.recipe.parallel, layout(run)
    workers = shape.replicas * shape.shared_by
    rows = [row for row in run.metrics.workers if row.seconds and row.minibatches and row.frames]
    reported = Counter(row.epoch for row in rows)
    rows = [row for row in rows if reported[row.epoch] == workers and row.num_parameters and row.compute_fraction]
    if not rows:
        message = "no epoch has complete rows of all workers"
        raise DataError(message, location=run.path, hint="let it train an epoch first, with this version of ddnn")
    sizes = {row.epoch: row.minibatch_size for row in run.metrics.train if row.minibatch_size}
    if sizes:  # the minibatch may have grown: the epochs with the last size
        rows = [row for row in rows if sizes.get(row.epoch) == sizes[max(sizes)]] or rows

    def seconds(part: str) -> float:
        return fmean((row.seconds or 0.0) * (getattr(row, f"{part}_fraction") or 0.0) for row in rows)

    frames = sum(row.frames for row in rows)
    size = round(frames / sum(row.minibatches for row in rows))
    parameters, operations, layers = _network(run, rows[0].num_parameters or 0, run.recipe.optimizer)
    if shape.shared_by > 1 and not layers:
        message = "its workers share a model that is not written yet, or whose layers are not all affine"
        raise DataError(message, location=run.path, hint="predict from other runs, with --network and --layouts")
    epoch = frames / (shape.shared_by * len({row.epoch for row in rows}))
    activation_bytes = 2 if run.start and run.start.precision == "bf16" else 4
    period = min(parallel.averaging_minibatches(size), epoch / shape.replicas / size)
    job = Job(parameters, operations, size, max(1, round(period)), epoch, layers, activation_bytes)
    total, compute = fmean(row.seconds or 0.0 for row in rows), seconds("compute") + seconds("data")
    comm = fmean(row.comm_seconds or 0.0 for row in rows)
    overlap = parallel.overlap and workers > 1
    blocking = max(0.0, comm - compute) if overlap else comm
    return Measurement(
        source=run.name,
        workers=workers,
        scheme=CommScheme(parallel.strategy, parallel.comm_dtype, overlap),
        job=job,
        seconds=total,
        comm=comm,
        averagings=fmean(row.averagings for row in rows),
        compute=compute,
        rest=max(0.0, total - compute - seconds("wait") - blocking),
        block_std=_block_std(rows) if any(row.averagings for row in rows) else None,
        final_mean=averages_parameters(parallel.strategy),
        columns=shape.columns,
        stages=shape.stages,
        microbatches=shape.microbatches,
        shared_comm=compute - _without_messages(rows, shape),
    )


def _without_messages(rows: Sequence[WorkerRow], shape: Layout) -> float:
    """Seconds of compute and data of an epoch if messages within a model took no time: stages would wait for each other alone."""
    by_stage: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        messages = (row.column_seconds or 0.0) + (row.pipe_seconds or 0.0)
        busy = (row.seconds or 0.0) * ((row.compute_fraction or 0.0) + (row.data_fraction or 0.0)) - messages
        by_stage[row.rank // shape.columns % shape.stages].append(busy)
    stages = [fmean(busy) for busy in by_stage.values()]
    return (sum(stages) + (shape.microbatches - 1) * max(stages)) / shape.microbatches


def _block_std(rows: Sequence[WorkerRow]) -> float | None:
    """Of an interval: the variation between the intervals of an epoch, and between workers."""
    within = [row.interval_seconds_std**2 for row in rows if row.interval_seconds_std is not None]
    by_rank: defaultdict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.interval_seconds is not None:
            by_rank[row.rank].append(row.interval_seconds)
    if not within or not by_rank:
        return None
    return float((fmean(within) + pvariance([fmean(blocks) for blocks in by_rank.values()])) ** 0.5)


def _network(run: Run, parameters: int, optimizer: OptimizerConfig) -> tuple[int, float, tuple[Size, ...]]:
    """`network_cost` and layers of the run's model; of one that is not written yet about, and none."""
    from ddnn.nn.acoustic_model import load_model
    from ddnn.training.options import affine_sizes

    for path in (run.path / FINAL, run.path / BEST):
        if path.is_file():
            layers = load_model(path).network.layers
            return parameters, network_cost(layers)[1], affine_sizes(optimizer, layers)
    return parameters, 6.0 * parameters, ()
