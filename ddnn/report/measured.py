"""What `ddnn scale` starts from: epochs that were measured, from run dirs or from a file of published figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pvariance
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ddnn.errors import DataError, UserError
from ddnn.kaldi.alignments import read_pdf_counts
from ddnn.recipe.include import configs_folder
from ddnn.recipe.schema import Count, Section
from ddnn.recipe.yaml_tree import parse_file, read_file
from ddnn.report.runs import Run, number_of_workers, read_run
from ddnn.report.scaling import Job, Way, averagings
from ddnn.train.read_metrics import WorkerRow

COUNTS = "ali_train_pdf.counts"
SECONDS = {"seconds": 1.0, "minutes": 60.0, "hours": 3600.0}
LARGEST = 10**6
_SIZES = re.compile(r"(?:\d{1,7}x)?\d{1,7}")


@dataclass(frozen=True)
class Measurement:
    """An epoch on so many workers; times in seconds, means over workers and epochs.

    Attributes:
        source: the run dir or file.
        seconds: of the whole epoch.
        exchange: spent moving parameters in it.
        averagings: made in it.
        compute: spent in compute and data; None where it was not told apart.
        rest: what is neither compute, data, exchange nor waiting; None where compute is.
        block_std: standard deviation of a block between two averagings, over time and workers; None where not known.
        final_mean: whether `exchange` holds a last exact mean beside the averagings.
    """

    source: str
    workers: int
    way: Way
    job: Job
    seconds: float
    exchange: float
    averagings: float
    compute: float | None = None
    rest: float | None = None
    block_std: float | None = None
    final_mean: bool = False


Time = Annotated[float, Field(ge=0.0, le=1e12, allow_inf_nan=False)]


class Published(Section):
    """A file of published times: how long an epoch took on so many workers."""

    network: str
    """Dims of the network: 440-6x2048-8806."""
    minibatch: Annotated[int, Field(ge=1, le=10**9)]
    """Frames in a minibatch of one worker."""
    every: Annotated[int, Field(ge=1, le=10**9)]
    """Minibatches of each worker between two averagings."""
    reduce: Literal["all-reduce", "butterfly", "ring", "hopping-ring", "gradient", "bmuf"] = "all-reduce"
    """Strategy."""
    wire: Literal["float32", "bfloat16"] = "float32"
    """How parameters travelled."""
    frames: Annotated[float, Field(gt=0.0, le=1e15, allow_inf_nan=False)]
    """Frames of an epoch."""
    unit: Literal["seconds", "minutes", "hours"] = "seconds"
    """Of the times."""
    workers: Annotated[list[Annotated[Count, Field(le=LARGEST)]], Field(min_length=1, max_length=1000)]
    """Workers of each measurement."""
    total: list[Annotated[Time, Field(gt=0.0)]]
    """Time of an epoch of each."""
    communication: list[Time]
    """Time in it that went into moving parameters, of each."""


def read_measured(path: Path) -> list[Measurement]:
    """The measurements of a run dir, or of a YAML file of published times (also one that comes with ddnn).

    Raises:
        DataError: it is neither, or damaged. RecipeError: the run dir's recipe is damaged.
    """
    if path.is_dir():
        return [_of_run(read_run(path))]
    shipped = configs_folder() / "measured" / path.name
    if not path.exists() and path.name == str(path) and shipped.is_file():
        path = shipped
    return _of_file(path)


def network_dims(text: str) -> list[int]:
    """Dims of "440-6x2048-8806": [440, 2048, 2048, 2048, 2048, 2048, 2048, 8806].

    Raises:
        UserError: not of this form, or with more than a hundred layers.
    """
    parts = text.split("-")
    dims: list[int] = []
    for part in parts:
        count, _, size = part.rpartition("x")
        if not _SIZES.fullmatch(part) or int(size) == 0 or not 1 <= int(count or 1) <= 100:
            raise UserError(f"{text[:100]!r} found, expected the dims of a network, as 440-6x2048-8806")
        dims += [int(size)] * int(count or 1)
    if not 2 <= len(dims) <= 102:
        raise UserError(f"{text[:100]!r} found, expected the dims of a network, as 440-6x2048-8806")
    return dims


def parameters_of(dims: Sequence[int]) -> int:
    """Weights and biases."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(dims))


def operations_of(dims: Sequence[int]) -> float:
    """Floating-point operations per frame in the matrix products of a training step.

    Three products a layer, but two for the first: nobody needs the derivative of the input.
    """
    sizes = [inputs * outputs for inputs, outputs in pairwise(dims)]
    return 6.0 * sum(sizes) - 2.0 * sizes[0]


def _of_file(path: Path) -> list[Measurement]:
    text, problems = read_file(path, str(path))
    values, more = ({}, []) if text is None else parse_file(text, str(path))
    for problem in [*problems, *more]:
        raise DataError(problem.text, where=problem.source, mend="docs/scaling.md has the form of such a file")
    try:
        found = Published.model_validate({".".join(keys): given.value for keys, given in values.items()}, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        wrong = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in details[:5])
        raise DataError(wrong, where=path, mend="docs/scaling.md has the form of such a file") from error
    return _published(found, path)


def _published(found: Published, path: Path) -> list[Measurement]:
    lengths = [len(found.workers), len(found.total), len(found.communication)]
    if len(set(lengths)) > 1:
        raise DataError("workers, total and communication differ in length: {}, {}, {}".format(*lengths), where=path)
    unit, dims = SECONDS[found.unit], network_dims(found.network)
    job = Job(parameters_of(dims), operations_of(dims), found.minibatch, found.every, found.frames)
    way = Way(found.reduce, found.wire)
    measurements = []
    for workers, total, communication in zip(found.workers, found.total, found.communication, strict=True):
        if communication >= total:
            raise DataError(f"{workers} workers: communication is not below the total", where=path)
        rounds = averagings(job, found.reduce, workers) if workers > 1 else 0.0
        measurements.append(Measurement(str(path), workers, way, job, total * unit, communication * unit, rounds))
    return measurements


def _of_run(run: Run) -> Measurement:
    rows = [row for row in run.metrics.workers if row.seconds and row.minibatches and row.frames]
    if run.recipe is None or not rows:
        missing = "recipe.yaml" if run.recipe is None else "row of a worker in its metrics.jsonl"
        raise DataError(f"this run dir has no {missing}", where=run.path, mend="train again with this version of ddnn")
    parallel, workers = run.recipe.parallel, number_of_workers(run)
    of_epoch = Counter(row.epoch for row in rows)
    complete = [row for row in rows if of_epoch[row.epoch] == workers and row.parameters and row.compute_share]
    if not complete:
        raise DataError("no epoch has whole rows of all workers", where=run.path, mend="let it train an epoch first")
    parameters = complete[0].parameters or 0
    epochs = len({row.epoch for row in complete})
    frames = sum(row.frames for row in complete) / epochs
    job = Job(parameters, _operations(run, parameters), run.recipe.minibatch, parallel.every, frames)
    seconds = fmean(row.seconds or 0.0 for row in complete)
    compute = fmean((row.seconds or 0.0) * ((row.compute_share or 0.0) + (row.data_share or 0.0)) for row in complete)
    waiting = fmean((row.seconds or 0.0) * (row.waiting_share or 0.0) for row in complete)
    exchange = fmean(row.exchange_seconds or 0.0 for row in complete)
    overlap = parallel.overlap and workers > 1
    in_the_way = max(0.0, exchange - compute) if overlap else exchange
    return Measurement(
        source=run.name,
        workers=workers,
        way=Way(parallel.reduce, parallel.wire, overlap),
        job=job,
        seconds=seconds,
        exchange=exchange,
        averagings=fmean(row.averagings for row in complete),
        compute=compute,
        rest=max(0.0, seconds - compute - waiting - in_the_way),
        block_std=_block_std(complete),
        final_mean=parallel.reduce != "gradient",
    )


def _block_std(rows: Sequence[WorkerRow]) -> float | None:
    """Of a block: what varies from block to block within an epoch, and what lastingly sets workers apart."""
    within = [row.block_seconds_std**2 for row in rows if row.block_seconds_std is not None]
    by_rank: dict[int, list[float]] = {}
    for row in rows:
        if row.block_seconds is not None:
            by_rank.setdefault(row.rank, []).append(row.block_seconds)
    if not within or not by_rank:
        return None
    return float((fmean(within) + pvariance([fmean(blocks) for blocks in by_rank.values()])) ** 0.5)


def _operations(run: Run, parameters: int) -> float:
    """Of a training step per frame. The input dim follows from the parameters and the number of pdfs."""
    counts, model = run.path / COUNTS, run.recipe.model if run.recipe is not None else None
    if model is None or not model.hidden_layers or not counts.is_file():
        return 6.0 * parameters
    pdfs, units = len(read_pdf_counts(counts)), model.hidden_units
    above = [units] * model.hidden_layers + [pdfs]
    inputs, left = divmod(parameters - parameters_of(above), units)
    return 6.0 * parameters if left or inputs < 2 else operations_of([inputs - 1, *above])
