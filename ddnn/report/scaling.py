"""How fast a training would be with n workers: a latency-bandwidth model, and its fit to measured epochs.
docs/explanation/scaling-model.md has the formulas and the symbols that docstrings name. Times are in seconds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddnn.distributed.cost import (
    PASS_FLOP,
    Layout,
    Machine,
    Prediction,
    Size,
    divide,
    minibatch_seconds,
    predictions,
)
from ddnn.util.errors import UserError

if TYPE_CHECKING:
    from ddnn.averaging.strategy import AveragingStrategy


@dataclass(frozen=True)
class Job:
    """What is trained: a network of so many parameters; `operations` are those of a training step per frame, floating
    point. m frames in a minibatch, k minibatches of a worker between two averagings, F frames in an epoch."""

    parameters: int
    operations: float
    minibatch: int
    averaging_period: int
    frames: float
    layers: tuple[Size, ...] = ()  # empty where they are not known, or not affine
    activation_bytes: int = 4


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
    EXACT_MEAN: "all-reduce, bmuf, elastic",
    CommScheme("butterfly"): "butterfly, rings",
    CommScheme("gradient-all-reduce"): "gradient-all-reduce",
    CommScheme("1-bit"): "1-bit",
    CommScheme("all-reduce", overlap=True): "all-reduce, overlap",
    CommScheme("butterfly", overlap=True): "butterfly, rings, overlap",
    CommScheme("1-bit", overlap=True): "1-bit, overlap",
}
"""Strategies that cost the same in the model, one column each."""


@dataclass(frozen=True)
class Constants:
    """The constants of the model for a `job`."""

    job: Job
    minibatch_seconds: float  # c, compute and data time of a minibatch, with tau'
    contention_seconds: float  # g, its additional time if there is more than one worker
    serial_seconds: float  # S, part of an epoch that is not divided among the workers
    averaging_seconds: float  # h, of an averaging without its messages
    block_std: float  # sigma, of job.averaging_period minibatches
    latency: float  # alpha, seconds per message
    byte_seconds: float  # beta, seconds per byte
    final_mean: bool  # E, whether every epoch ends with the exact mean over all workers
    fixed_seconds: float = 0.0  # tau', part of c that does not depend on the number of frames
    shared_latency: float = 0.0  # alpha' and beta', of messages between workers that share a model
    shared_byte_seconds: float = 0.0


def scaled(constants: Constants, job: Job) -> Constants:
    old = constants.job
    compute = job.operations * job.minibatch / (old.operations * old.minibatch)
    known = job.layers and old.layers
    fixed = constants.fixed_seconds * (_units(job, ALONE)["tau"] / _units(old, ALONE)["tau"] if known else 1.0)
    return replace(
        constants,
        job=job,
        minibatch_seconds=fixed + (constants.minibatch_seconds - constants.fixed_seconds) * compute,
        fixed_seconds=fixed,
        contention_seconds=constants.contention_seconds * compute,
        serial_seconds=constants.serial_seconds * job.frames / old.frames,
        averaging_seconds=constants.averaging_seconds * job.parameters / old.parameters,
        block_std=constants.block_std * compute * math.sqrt(job.averaging_period / old.averaging_period),
    )


ALONE = Layout()
_UNITS = {
    "flops": Machine(1.0, 0.0, math.inf, 0.0, 0.0),
    "tau": Machine(math.inf, 1.0, math.inf, 0.0, 0.0),
    "alpha": Machine(math.inf, 0.0, math.inf, 1.0, 0.0),
    "beta": Machine(math.inf, 0.0, math.inf, 0.0, 1.0),
}
"""Machines on which a minibatch takes one unit for each operation, product, message or byte."""
_DIVIDES = Machine(1.0, 0.0, 24 / PASS_FLOP, 0.0, 0.0)
"""A machine that divides layers into stages as every training does."""


def _units(job: Job, layout: Layout) -> dict[str, float]:
    """How many of each a minibatch of a replica has."""
    machines = {name: unit._replace(activation_bytes=job.activation_bytes) for name, unit in _UNITS.items()}
    stages = divide(_DIVIDES, [Size(*layer[:2]) for layer in job.layers], 1, Layout(stages=layout.stages))[1]
    return {name: minibatch_seconds(unit, job.layers, job.minibatch, layout, stages) for name, unit in machines.items()}


def machine(constants: Constants) -> Machine:
    """A worker that takes c for a minibatch of known layers, all of it in matrix products."""
    job, units = constants.job, _units(constants.job, ALONE)
    flops = units["flops"] / max(constants.minibatch_seconds - constants.fixed_seconds, 1e-12)
    tau, messages = constants.fixed_seconds / units["tau"], (constants.shared_latency, constants.shared_byte_seconds)
    return Machine(flops, tau, math.inf, *messages, job.activation_bytes)


def fastest(constants: Constants, fixed: Mapping[str, int]) -> Prediction | None:
    """Of the layouts with the `fixed` fields, which say how many workers there are. None: there is none."""
    job, workers = constants.job, math.prod(fixed[name] for name in Layout._fields[:3])
    possible = predictions(machine(constants), job.layers, job.minibatch, workers, lambda _: 0.0, fixed)
    return min(possible, key=lambda prediction: prediction.minibatch_seconds, default=None)


def shared(constants: Constants, prediction: Prediction) -> Constants:
    """The constants of a replica in place of one worker: C takes the place of c, and a worker averages its own part of the
    parameters. A single replica of several workers has the contention of several workers, too."""
    layout, job = prediction.layout, constants.job
    contention = constants.contention_seconds if layout.replicas == 1 < layout.shared_by else 0.0
    return replace(
        constants,
        job=replace(job, parameters=math.ceil(job.parameters / layout.shared_by)),
        minibatch_seconds=prediction.minibatch_seconds + contention,
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
    if (
        strategies()[scheme.strategy].unit == "changes"
    ):  # waits for no worker, but for a server that answers each in turn
        block = max(block - waiting, workers * comm)
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
    traffic = strategies()[scheme.strategy].traffic(workers)
    return np.array([traffic.messages, traffic.num_bytes(job.parameters, scheme.comm_dtype)])


def _period(job: Job, strategy: str) -> int:
    """k: minibatches of a worker between two averagings."""
    return 1 if strategies()[strategy].unit == "gradients" else job.averaging_period


def averagings(job: Job, strategy: str, workers: int) -> float:
    """A: averagings of an epoch."""
    return job.frames / (workers * job.minibatch * _period(job, strategy))


def strategies() -> dict[str, type[AveragingStrategy]]:
    """The classes of all strategies, whose `traffic` has L and V. Loads torch."""
    from ddnn.averaging.strategies import STRATEGIES

    return STRATEGIES


def averages_parameters(strategy: str) -> bool:
    """After each interval, and at the end of an epoch."""
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
    columns: int = 1  # workers that share a model, and stages of them
    stages: int = 1
    microbatches: int = 1
    shared_comm: float = 0.0  # part of `compute` that messages to them take, without waiting for other stages

    @property
    def layout(self) -> Layout:
        replicas = self.workers // (self.columns * self.stages)
        return Layout(replicas, self.columns, self.stages, self.microbatches)

    @property
    def minibatches(self) -> float:
        """Of one worker in the epoch."""
        return self.job.frames / (self.layout.replicas * self.job.minibatch)


@dataclass(frozen=True)
class Calibration:
    """The constants, and what was assumed because the measurements do not show it: a sentence each."""

    constants: Constants
    assumed: tuple[str, ...]


CONSTANTS = ("c", "g", "S", "h", "alpha", "beta", "tau", "alpha'", "beta'")  # those that are fitted; c is without tau'


def calibrate(
    measured: Sequence[Measurement], latency: float | None = None, byte_seconds: float | None = None
) -> Calibration:
    """Fits the constants to the measurements, except `latency` and `byte_seconds` if these are given; of workers that
    share a model to the times of their messages alone. UserError: measurements of different networks, or of different
    kinds; too few measurements."""
    first = measured[0]
    for other in measured:
        kinds = [(m.job.parameters, m.compute is None) for m in (first, other)]
        if kinds[0] != kinds[1]:
            message = f"{first.source} and {other.source} differ in network or kind of measurement"
            raise UserError(message, hint="give runs of one network, or one file")
    options = {"alpha": latency, "beta": byte_seconds}
    given = {name: value for name, value in options.items() if value is not None}
    given |= {f"{name}'": value for name, value in given.items()}
    sharing, measured = ([m for m in measured if (m.layout.shared_by > 1) == several] for several in (True, False))
    if not measured:
        raise UserError("all runs have workers that share a model", hint="add a run with one worker")
    first = measured[0]
    absent = _absent(measured, sharing, given)
    given |= dict.fromkeys(absent, 0.0)
    equations = [equation for m in (*measured, *sharing) for equation in _equations(m, first.job)]
    names = [name for name in CONSTANTS if name not in given]
    columns = {name: [terms.get(name, 0.0) for *_, terms in equations] for name in names}
    explained = [sum(given.get(name, 0.0) * factor for name, factor in terms.items()) for *_, terms in equations]
    values = [max(0.0, value - known) for (value, *_), known in zip(equations, explained, strict=True)]
    fitted = given | fit_not_negative(columns, values, [scale for _, scale, _ in equations])
    several = [m for m in measured if m.workers > 1 and m.block_std is not None]
    stds = [(m.block_std or 0.0) * first.job.minibatch / m.job.minibatch for m in several]
    variances = [std**2 / _period(m.job, m.scheme.strategy) for std, m in zip(stds, several, strict=True)]
    sigma = (fmean(variances) * first.job.averaging_period) ** 0.5 if variances else 0.0
    if not variances:
        absent["sigma"] = (
            "the variation of the workers' times was not measured: waiting for the slowest is part of g and h"
        )
    c, g, serial, h, alpha, beta, fixed, *within = (fitted[name] for name in CONSTANTS)
    notes = [f"{reason} ({name} = 0)" for name, reason in absent.items()]
    if not sharing:
        within = [alpha, beta]
    elif latency is byte_seconds is None and not any(m.comm for m in measured):
        alpha, beta = within
        notes.append("no averaging was measured: its messages are as fast as those within a model")
    job = replace(first.job, layers=max((m.job.layers for m in (*measured, *sharing)), key=len))
    final_mean = any(m.final_mean for m in measured)
    constants = Constants(job, c + fixed, g, serial, h, sigma, alpha, beta, final_mean, fixed, *within)
    return Calibration(constants, tuple(notes))


def _absent(
    measured: Sequence[Measurement], sharing: Sequence[Measurement], given: Mapping[str, float]
) -> dict[str, str]:
    """The constants that the measurements do not show, which are taken for 0, with the reason; in `sharing` workers share
    models. `given`: those of messages that are known. UserError: others cannot do without them."""
    sizes, totals = {m.workers for m in measured}, measured[0].compute is None
    minibatches = {(m.workers > 1, m.job.minibatch) for m in measured}
    several = [m for m in measured if m.workers > 1]
    sent = {(m.workers, m.scheme.strategy) for m in several if m.comm > 0.0}
    if totals and (1 not in sizes or not several):
        message = f"times with {', '.join(map(str, sorted(sizes)))} workers found, expected times with 1 and with more"
        raise UserError(message, hint="give the total with one worker, and with two or more")
    if len(given) < 4 and not sent and not sharing:
        message = "no communication was measured: all runs have one worker"
        raise UserError(message, hint="add a run with two or more workers, or give --latency and --bandwidth")
    absent = {}
    if len(minibatches) == len({several for several, _ in minibatches}):
        absent["tau"] = "only one size of minibatch was measured: a product costs nothing beside its operations"
    if 1 not in sizes or not several:
        absent["g"] = "not both one worker and several were measured: several compute as fast as one"
    if not several:
        absent["h"] = "only runs with one worker: averagings cost only messages"
    elif totals and len({m.job.averaging_period for m in several}) == 1:
        absent["h"] = "only one averaging period was measured: additional time without messages is per minibatch"
    if len(sizes) < 2 + totals:
        absent["S"] = f"fewer than {2 + totals} numbers of workers were measured: the whole epoch is divided among them"
    if not given and len({(m.job.minibatch, m.layout) for m in sharing}) == 1:
        absent["alpha'"] = (
            "messages of only one size within a model were measured: their time is in proportion to the bytes"
        )
    if not given and len(sent) == 1:
        absent["alpha"] = "communication of only one size was measured: its time is proportional to the bytes"
    return absent


Equation = tuple[float, float, dict[str, float]]
"""Measured seconds, the seconds that their error is relative to, and how often each constant is in them."""


def _equations(m: Measurement, job: Job) -> Iterator[Equation]:
    """c, g and S are those of `job`. Of workers that share a model only their messages count."""
    if m.layout.shared_by > 1:
        units = _units(m.job, m.layout)
        yield m.shared_comm, m.seconds, {f"{name}'": m.minibatches * units[name] for name in ("alpha", "beta")}
        return
    whole = m.minibatches * m.job.minibatch / job.minibatch
    divided = {"c": whole, "g": whole * (m.workers > 1), "tau": m.minibatches}
    rest = {"S": m.job.frames / job.frames, "h": m.averagings}
    if m.compute is None:
        yield m.seconds - m.comm, m.seconds - m.comm, divided | rest
    else:
        yield m.compute, m.seconds, divided
        yield m.rest or 0.0, m.seconds, rest
    if m.workers > 1 and m.comm > 0.0:
        traffic = m.averagings * _traffic(m.scheme, m.job, m.workers)
        traffic += m.final_mean * _traffic(EXACT_MEAN, m.job, m.workers)
        yield m.comm, m.comm, dict(zip(("alpha", "beta"), traffic, strict=True))


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
