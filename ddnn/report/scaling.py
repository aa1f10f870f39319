"""How fast a training would be with n workers: a latency-bandwidth model, fitted to measured epochs. See docs/scaling.md.

Symbols, times in seconds:
    F     frames of an epoch                    n     workers
    m     frames in a minibatch                 k     minibatches between two averagings, 1 for gradients
    W     bytes of the parameters as sent       A     averagings of an epoch, F / (n m k)
    c     compute (and data) of a minibatch     g     its additional time if there is more than one worker
    h     of an averaging without its messages: host copies, sums
    sigma standard deviation of the time of an interval of k minibatches
    alpha latency of a message                  beta  time of a byte
    S     part of an epoch that is not divided among the workers

An epoch on one worker:
    T(1) = S + F c / m
On n > 1 workers:
    T(n) = S + A (k (c + g) + w(n) + x(n) + h) + E x_all-reduce(n)
with `overlap`, if an interval is trained during the communication:
    T(n) = S + A (max(k (c + g) + w(n), x(n)) + h) + E x_all-reduce(n)
E is 1 if every epoch ends with the exact mean over all workers, as in ddnn (not for gradients), else 0.

Communication of an averaging:
    x(n) = alpha L(n) + beta W V(n)
    all-reduce, bmuf, gradients     L = 2 ceil(log2 n)   V = 2 (n - 1) / n   recursive halving, then doubling
    butterfly, ring, hopping-ring   L = 1                V = 1               one message each way
A ring all-reduce has the same V, but L = 2 (n - 1).

Waiting for the slowest of n workers, whose interval times are normal variables:
    w(n) = sigma e(n),  e(n) the expected largest of n standard normal variables
for all strategies: a worker that waits for a single partner waits, through the partner's partners, for all of them.

For another job: c and g are proportional to the operations of a frame and to m, h to the number of parameters, sigma to c
and sqrt(k), S to F. The speed-up is T(1) / T(n).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

STRATEGIES = ("all-reduce", "butterfly", "ring", "hopping-ring", "gradient-all-reduce", "bmuf")
OVERLAPPING = ("all-reduce", "butterfly", "ring", "hopping-ring")
ONE_MESSAGE = ("butterfly", "ring", "hopping-ring")
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        parameters: of the network.
        operations: floating-point operations of a training step per frame.
        minibatch: m, frames.
        averaging_period: k, minibatches of a worker between two averagings.
        frames: F, of an epoch.
    """

    parameters: int
    operations: float
    minibatch: int
    averaging_period: int
    frames: float


@dataclass(frozen=True)
class Way:
    """How parameters are averaged: one of `STRATEGIES`, the type that is sent, whether training continues meanwhile."""

    strategy: str
    comm_dtype: str = "float32"
    overlap: bool = False


SAME_COST = (
    ("all-reduce, bmuf", Way("all-reduce")),
    ("butterfly, rings", Way("butterfly")),
    ("gradient-all-reduce", Way("gradient-all-reduce")),
    ("all-reduce, overlap", Way("all-reduce", overlap=True)),
    ("butterfly, rings, overlap", Way("butterfly", overlap=True)),
)
"""Strategies that cost the same in the model, one column each."""


@dataclass(frozen=True)
class Constants:
    """The constants of the model for a `job`; the module's docstring has the symbols.

    Attributes:
        minibatch_seconds: c.
        contention_seconds: g.
        serial_seconds: S.
        averaging_seconds: h.
        block_std: sigma, of job.averaging_period minibatches.
        latency: alpha, seconds per message.
        byte_seconds: beta, seconds per byte.
        final_mean: E.
    """

    job: Job
    minibatch_seconds: float
    contention_seconds: float
    serial_seconds: float
    averaging_seconds: float
    block_std: float
    latency: float
    byte_seconds: float
    final_mean: bool


def scaled(constants: Constants, job: Job) -> Constants:
    """The constants for another job on the same machines."""
    old = constants.job
    compute = job.operations * job.minibatch / (old.operations * old.minibatch)
    return Constants(
        job=job,
        minibatch_seconds=constants.minibatch_seconds * compute,
        contention_seconds=constants.contention_seconds * compute,
        serial_seconds=constants.serial_seconds * job.frames / old.frames,
        averaging_seconds=constants.averaging_seconds * job.parameters / old.parameters,
        block_std=constants.block_std * compute * math.sqrt(job.averaging_period / old.averaging_period),
        latency=constants.latency,
        byte_seconds=constants.byte_seconds,
        final_mean=constants.final_mean,
    )


def epoch_seconds(constants: Constants, way: Way, workers: int) -> float:
    """T(n)."""
    job, c = constants.job, constants.minibatch_seconds
    if workers == 1:
        return constants.serial_seconds + job.frames / job.minibatch * c
    averaging_period = 1 if way.strategy == "gradient-all-reduce" else job.averaging_period
    comm = comm_seconds(constants, way.strategy, way.comm_dtype, workers)
    waiting = constants.block_std * math.sqrt(averaging_period / job.averaging_period) * largest_of(workers)
    block = averaging_period * (c + constants.contention_seconds) + waiting
    block = max(block, comm) if way.overlap else block + comm
    mean = 0.0
    if constants.final_mean and way.strategy != "gradient-all-reduce":
        mean = comm_seconds(constants, "all-reduce", "float32", workers)
    rounds = averagings(job, way.strategy, workers)
    return constants.serial_seconds + rounds * (block + constants.averaging_seconds) + mean


def comm_seconds(constants: Constants, strategy: str, comm_dtype: str, workers: int) -> float:
    """x(n): the messages of one averaging."""
    size = constants.job.parameters * BYTES[comm_dtype]
    return constants.latency * messages(strategy, workers) + constants.byte_seconds * size * volume(strategy, workers)


def averagings(job: Job, strategy: str, workers: int) -> float:
    """A: averagings of an epoch."""
    return job.frames / (workers * job.minibatch * (1 if strategy == "gradient-all-reduce" else job.averaging_period))


def messages(strategy: str, workers: int) -> int:
    """L: messages of an averaging, one after the other."""
    if workers == 1:
        return 0
    return 1 if strategy in ONE_MESSAGE else 2 * (workers - 1).bit_length()


def volume(strategy: str, workers: int) -> float:
    """V: what a worker sends in an averaging, in models."""
    if workers == 1:
        return 0.0
    return 1.0 if strategy in ONE_MESSAGE else 2.0 * (workers - 1) / workers


@cache
def largest_of(n: int) -> float:
    """e(n): the expected largest of n standard normal variables: 0, 0.564, 0.846, 1.029, ... 3.2 for 1000.

    The integral of x n phi(x) Phi(x)^(n-1), by Simpson's rule; good to 1e-6 up to a million.
    """
    x = np.linspace(-9.0, 9.0, 3601)
    phi = np.exp(-x * x / 2.0) / math.sqrt(2.0 * math.pi)
    cumulative = np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in x])
    weights = np.ones_like(x)
    weights[1:-1:2], weights[2:-1:2] = 4.0, 2.0
    return float((weights * x * n * phi * cumulative ** (n - 1)).sum() * (x[1] - x[0]) / 3.0)


def fit_not_negative(
    columns: Sequence[Sequence[float]], values: Sequence[float], scale: Sequence[float]
) -> NDArray[np.float64]:
    """The coefficients >= 0 for which sum_j coefficient_j columns_j is closest to `values`, errors divided by `scale`.

    Least squares over every subset of the columns, the others 0: the best solution without a negative coefficient is the
    optimum. There are four columns at most. `scale` is > 0.
    """
    by = np.asarray(scale, np.float64)
    matrix, wanted = np.asarray(columns, np.float64).T / by[:, None], np.asarray(values, np.float64) / by
    best, smallest = np.zeros(len(columns)), float((wanted**2).sum())
    for size in range(1, len(columns) + 1):
        for chosen in map(list, combinations(range(len(columns)), size)):
            norms = np.sqrt((matrix[:, chosen] ** 2).sum(axis=0))
            if not norms.all():
                continue
            found, _, rank, _ = np.linalg.lstsq(matrix[:, chosen] / norms, wanted, rcond=None)
            error = float(((matrix[:, chosen] / norms @ found - wanted) ** 2).sum())
            if rank == size and (found >= 0.0).all() and error < smallest - 1e-15:
                best, smallest = np.zeros(len(columns)), error
                best[chosen] = found / norms
    return best
