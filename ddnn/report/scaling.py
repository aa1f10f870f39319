"""How fast a training would be with n workers: a latency-bandwidth model, and its fit to measured epochs.
docs/scaling.md has the formulas and the symbols that docstrings name. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddnn.util.errors import UserError

if TYPE_CHECKING:
    from ddnn.averaging.strategies import AveragingStrategy

BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Job:
    """What is trained: a network of so many parameters; `operations` are those of a training step per frame, floating
    point. m frames in a minibatch, k minibatches of a worker between two averagings, F frames in an epoch."""

    parameters: int
    operations: float
    minibatch: int
    averaging_period: int
    frames: float


@dataclass(frozen=True)
class CommScheme:
    """How parameters are averaged: a key of `strategies()`, the type that is sent, whether training continues meanwhile."""

    strategy: str
    comm_dtype: str = "float32"
    overlap: bool = False

    def __str__(self) -> str:
        return self.strategy + (", overlap" if self.overlap else "")


EXACT_MEAN = CommScheme("all-reduce")
"""How the mean at the end of an epoch is computed."""
SAME_COST = {
    EXACT_MEAN: "all-reduce, bmuf",
    CommScheme("butterfly"): "butterfly, rings",
    CommScheme("gradient-all-reduce"): "gradient-all-reduce",
    CommScheme("all-reduce", overlap=True): "all-reduce, overlap",
    CommScheme("butterfly", overlap=True): "butterfly, rings, overlap",
}
"""Strategies that cost the same in the model, one column each."""


@dataclass(frozen=True)
class Constants:
    """The constants of the model for a `job`."""

    job: Job
    minibatch_seconds: float  # c, compute and data time of a minibatch
    contention_seconds: float  # g, its additional time if there is more than one worker
    serial_seconds: float  # S, part of an epoch that is not divided among the workers
    averaging_seconds: float  # h, of an averaging without its messages
    block_std: float  # sigma, of job.averaging_period minibatches
    latency: float  # alpha, seconds per message
    byte_seconds: float  # beta, seconds per byte
    final_mean: bool  # E, whether every epoch ends with the exact mean over all workers


def scaled(constants: Constants, job: Job) -> Constants:
    old = constants.job
    compute = job.operations * job.minibatch / (old.operations * old.minibatch)
    return replace(
        constants,
        job=job,
        minibatch_seconds=constants.minibatch_seconds * compute,
        contention_seconds=constants.contention_seconds * compute,
        serial_seconds=constants.serial_seconds * job.frames / old.frames,
        averaging_seconds=constants.averaging_seconds * job.parameters / old.parameters,
        block_std=constants.block_std * compute * math.sqrt(job.averaging_period / old.averaging_period),
    )


def epoch_seconds(constants: Constants, scheme: CommScheme, workers: int) -> float:
    """T(n)."""
    job, c = constants.job, constants.minibatch_seconds
    if workers == 1:
        return constants.serial_seconds + job.frames / job.minibatch * c
    period = _period(job, scheme.strategy)
    comm = comm_seconds(constants, scheme, workers)
    waiting = constants.block_std * math.sqrt(period / job.averaging_period) * expected_max_normal(workers)
    block = period * (c + constants.contention_seconds) + waiting
    block = max(block, comm) if scheme.overlap else block + comm
    has_mean = constants.final_mean and averages_parameters(scheme.strategy)
    mean = comm_seconds(constants, EXACT_MEAN, workers) if has_mean else 0.0
    rounds = averagings(job, scheme.strategy, workers)
    return constants.serial_seconds + rounds * (block + constants.averaging_seconds) + mean


def comm_seconds(constants: Constants, scheme: CommScheme, workers: int) -> float:
    """x(n): the messages of one averaging."""
    messages, size = _traffic(scheme, constants.job, workers)
    return float(constants.latency * messages + constants.byte_seconds * size)


def _traffic(scheme: CommScheme, job: Job, workers: int) -> NDArray[np.float64]:
    """Messages, one after the other, and bytes that a worker sends in an averaging."""
    messages, models = strategies()[scheme.strategy].traffic(workers)
    return np.array([messages, models * job.parameters * BYTES[scheme.comm_dtype]])


def _period(job: Job, strategy: str) -> int:
    """k: minibatches of a worker between two averagings."""
    return job.averaging_period if averages_parameters(strategy) else 1


def averagings(job: Job, strategy: str, workers: int) -> float:
    """A: averagings of an epoch."""
    return job.frames / (workers * job.minibatch * _period(job, strategy))


def strategies() -> dict[str, type[AveragingStrategy]]:
    """The classes of all strategies, whose `traffic` has L and V. Loads torch."""
    from ddnn.averaging.strategies import STRATEGIES

    return STRATEGIES


def averages_parameters(strategy: str) -> bool:
    """After each interval, and at the end of an epoch; else the gradient of every minibatch."""
    return strategies()[strategy].unit == "parameters"


@cache
def expected_max_normal(n: int) -> float:
    """e(n): the expected largest of n standard normal variables: 0, 0.564, 0.846, 1.029, ... 3.2 for 1000."""
    from scipy.integrate import quad
    from scipy.special import ndtr

    return float(quad(lambda x: 1.0 - ndtr(x) ** n - ndtr(-x) ** n, 0.0, 9.0)[0])


@dataclass(frozen=True)
class Measurement:
    """An epoch with a number of workers; times are means over workers and epochs."""

    source: str  # the run dir or file
    workers: int
    scheme: CommScheme
    job: Job
    seconds: float  # of the whole epoch
    comm: float  # spent sending parameters in it
    averagings: float  # made in it
    compute: float | None = None  # spent in compute and data; None if it was not measured
    rest: float | None = None  # neither compute, data, communication nor waiting; None if compute is None
    # standard deviation of the interval between two averagings, over time and workers; None if not known
    block_std: float | None = None
    final_mean: bool = False  # whether `comm` includes the exact mean at the end of the epoch

    @property
    def minibatches(self) -> float:
        """Of one worker in the epoch."""
        return self.job.frames / (self.workers * self.job.minibatch)


@dataclass(frozen=True)
class Calibration:
    """The constants, and what was assumed because the measurements do not show it: a sentence each."""

    constants: Constants
    assumed: tuple[str, ...]


def calibrate(
    measured: Sequence[Measurement], latency: float | None = None, byte_seconds: float | None = None
) -> Calibration:
    """Fits the constants to the measurements, except `latency` and `byte_seconds` if these are given. UserError:
    measurements of different networks or minibatches, or of different kinds; too few measurements."""
    first = measured[0]
    for other in measured:
        kinds = [(m.job.parameters, m.job.minibatch, m.compute is None) for m in (first, other)]
        if kinds[0] != kinds[1]:
            message = f"{first.source} and {other.source} differ in network, minibatch size or kind of measurement"
            raise UserError(message, hint="give runs of one network and minibatch size, or one file")
    assumed: list[str] = []
    times = (_times_of_totals if first.compute is None else _times_of_runs)(measured, assumed)
    alpha, beta = _message_times(measured, latency, byte_seconds, assumed)
    variances = [
        m.block_std**2 / _period(m.job, m.scheme.strategy)
        for m in measured
        if m.workers > 1 and m.block_std is not None
    ]
    sigma = (fmean(variances) * first.job.averaging_period) ** 0.5 if variances else 0.0
    if not variances:
        slowest = "waiting for the slowest is part of g and h (sigma = 0)"
        assumed.append(f"the variation of the workers' times was not measured: {slowest}")
    final_mean = any(m.final_mean for m in measured)
    return Calibration(Constants(first.job, *times, sigma, alpha, beta, final_mean), tuple(assumed))


Times = tuple[float, float, float, float]  # c, g, S and h
ALL_DIVIDED = "the whole epoch is divided among them (S = 0)"


def _times_of_totals(measured: Sequence[Measurement], assumed: list[str]) -> Times:
    """From totals and communication only, if the computing time was not measured."""
    sizes = {m.workers for m in measured}
    if 1 not in sizes or len(sizes) < 2:
        message = f"times with {', '.join(map(str, sorted(sizes)))} workers found, expected times with 1 and with more"
        raise UserError(message, hint="give the total with one worker, and with two or more")
    columns = {"c": [m.minibatches for m in measured], "g": [m.minibatches * (m.workers > 1) for m in measured]}
    if len({m.job.averaging_period for m in measured if m.workers > 1}) > 1:
        columns["h"] = [m.averagings for m in measured]
    else:
        per_minibatch = "additional time without messages is per minibatch (h = 0)"
        assumed.append(f"only one averaging period was measured: {per_minibatch}")
    if len(sizes) > 2:
        columns["S"] = _relative_frames(measured)
    else:
        assumed.append(f"fewer than three numbers of workers were measured: {ALL_DIVIDED}")
    values = [m.seconds - m.comm for m in measured]
    fitted = fit_not_negative(columns, values, values)
    return fitted["c"], fitted["g"], fitted.get("S", 0.0), fitted.get("h", 0.0)


def _times_of_runs(measured: Sequence[Measurement], assumed: list[str]) -> Times:
    """From run dirs, which have the computing time."""

    def per_minibatch(part: Sequence[Measurement]) -> float:
        return sum(m.compute or 0.0 for m in part) / sum(m.minibatches for m in part)

    alone, together = [m for m in measured if m.workers == 1], [m for m in measured if m.workers > 1]
    compute, contention = per_minibatch(measured), 0.0
    if not alone:
        assumed.append("no run with one worker: it would compute as fast as one of several workers (g = 0)")
    elif not together:
        as_fast = "several would compute as fast, and averagings cost only messages (g, h = 0)"
        assumed.append(f"only runs with one worker: {as_fast}")
    elif per_minibatch(together) > per_minibatch(alone):
        compute = per_minibatch(alone)
        contention = per_minibatch(together) - compute
    columns = {"h": [m.averagings for m in measured]}
    if len({m.workers for m in measured}) > 1:
        columns["S"] = _relative_frames(measured)
    else:
        assumed.append(f"only one number of workers was measured: {ALL_DIVIDED}")
    fitted = fit_not_negative(columns, [m.rest or 0.0 for m in measured], [m.seconds for m in measured])
    return compute, contention, fitted.get("S", 0.0), fitted["h"]


def _relative_frames(measured: Sequence[Measurement]) -> list[float]:
    return [m.job.frames / measured[0].job.frames for m in measured]


def _message_times(
    measured: Sequence[Measurement], latency: float | None, byte_seconds: float | None, assumed: list[str]
) -> tuple[float, float]:
    """alpha and beta, from the communication of all measurements with several workers."""
    if latency is not None and byte_seconds is not None:
        return latency, byte_seconds
    several = [m for m in measured if m.workers > 1 and m.comm > 0.0]
    if not several:
        message = "no communication was measured: all runs have one worker"
        raise UserError(message, hint="add a run with two or more workers, or give --latency and --bandwidth")
    if latency is None and byte_seconds is None and len({(m.workers, m.scheme.strategy) for m in several}) < 2:
        latency = 0.0
        assumed.append("communication of only one size was measured: its time is proportional to the bytes (alpha = 0)")
    messages, sizes = np.array(
        [
            m.averagings * _traffic(m.scheme, m.job, m.workers) + m.final_mean * _traffic(EXACT_MEAN, m.job, m.workers)
            for m in several
        ]
    ).T
    comm = np.array([m.comm for m in several])
    if latency is not None:
        rest = np.maximum(0.0, comm - latency * messages)
        return latency, fit_not_negative({"beta": sizes}, rest, comm)["beta"]
    if byte_seconds is not None:
        rest = np.maximum(0.0, comm - byte_seconds * sizes)
        return fit_not_negative({"alpha": messages}, rest, comm)["alpha"], byte_seconds
    fitted = fit_not_negative({"alpha": messages, "beta": sizes}, comm, comm)
    return fitted["alpha"], fitted["beta"]


def fit_not_negative(columns: Mapping[str, ArrayLike], values: ArrayLike, scale: ArrayLike) -> dict[str, float]:
    """The coefficients >= 0 for which the sum of coefficient times column is closest to `values`, errors divided by
    `scale`, which is > 0; by the columns' names. UserError: scipy is missing."""
    try:
        from scipy.optimize import nnls
    except ImportError as error:
        message = f"the fit needs the package scipy, which cannot be imported: {error}"
        raise UserError(message, hint="pip install 'ddnn[report]'") from error
    by = np.asarray(scale, np.float64)
    matrix = np.array(list(columns.values()), np.float64).T / by[:, None]
    norms: NDArray[np.float64] = np.sqrt((matrix**2).sum(axis=0))
    norms[norms == 0.0] = 1.0  # a column of zeros gets the coefficient 0
    fitted = nnls(matrix / norms, np.asarray(values, np.float64) / by)[0] / norms
    return dict(zip(columns, map(float, fitted), strict=True))
