"""Fits the constants of the scaling model to measured epochs; docs/scaling.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ddnn.report.measured import Measurement
from ddnn.report.scaling import BYTES, Constants, fit_not_negative, messages, volume
from ddnn.util.errors import UserError


@dataclass(frozen=True)
class Calibration:
    """The constants, and what was assumed because the measurements do not show it: a sentence each."""

    constants: Constants
    assumed: tuple[str, ...]


def calibrate(
    measured: Sequence[Measurement], latency: float | None = None, byte_seconds: float | None = None
) -> Calibration:
    """Fits the constants to the measurements, except `latency` and `byte_seconds` if these are given.

    Raises:
        UserError: measurements of different networks or minibatches, or of different kinds; too few measurements.
    """
    first = measured[0]
    for other in measured:
        different = (other.job.parameters, other.job.minibatch) != (first.job.parameters, first.job.minibatch)
        if different or (other.compute is None) != (first.compute is None):
            message = f"{first.source} and {other.source} differ in network, minibatch size or kind of measurement"
            raise UserError(message, hint="give runs of one network and minibatch size, or one file")
    assumed: list[str] = []
    times = (_times_of_totals if first.compute is None else _times_of_runs)(measured, assumed)
    alpha, beta = _exchange(measured, latency, byte_seconds, assumed)
    deviations = [m.block_std / _block(m) ** 0.5 for m in measured if m.block_std is not None and m.workers > 1]
    if not deviations:
        assumed.append(
            "the variation of the workers' times was not measured: waiting for the slowest is part of g and h (sigma = 0)"
        )
    sigma = fmean(d * d for d in deviations) ** 0.5 * first.job.averaging_period**0.5 if deviations else 0.0
    constants = Constants(
        job=first.job,
        minibatch_seconds=times.compute,
        contention_seconds=times.stall,
        serial_seconds=times.serial,
        averaging_seconds=times.averaging,
        block_std=sigma,
        latency=alpha,
        byte_seconds=beta,
        final_mean=any(m.final_mean for m in measured),
    )
    return Calibration(constants, tuple(assumed))


def _block(m: Measurement) -> int:
    return 1 if m.way.strategy == "gradient-all-reduce" else m.job.averaging_period


@dataclass(frozen=True)
class _Times:
    """c, g, S and h, in seconds."""

    compute: float
    stall: float
    serial: float
    averaging: float


def _minibatches(m: Measurement) -> float:
    """Of one worker in an epoch."""
    return m.job.frames / (m.workers * m.job.minibatch)


def _times_of_totals(measured: Sequence[Measurement], assumed: list[str]) -> _Times:
    """From totals and communication only, if the computing time was not measured."""
    sizes = {m.workers for m in measured}
    if 1 not in sizes or len(sizes) < 2:
        message = f"times with {', '.join(map(str, sorted(sizes)))} workers found, expected times with 1 and with more"
        raise UserError(message, hint="give the total with one worker, and with two or more")
    columns = {
        "compute": [_minibatches(m) for m in measured],
        "stall": [_minibatches(m) * (m.workers > 1) for m in measured],
    }
    if len({m.job.averaging_period for m in measured if m.workers > 1}) > 1:
        columns["averaging"] = [m.averagings for m in measured]
    else:
        assumed.append(
            "only one averaging period was measured: additional time without messages is per minibatch (h = 0)"
        )
    if len(sizes) > 2:
        columns["serial"] = [m.job.frames / measured[0].job.frames for m in measured]
    else:
        assumed.append(
            "fewer than three numbers of workers were measured: the whole epoch is divided among them (S = 0)"
        )
    values = [m.seconds - m.comm for m in measured]
    found = dict(zip(columns, map(float, fit_not_negative(list(columns.values()), values, values)), strict=True))
    return _Times(found["compute"], found["stall"], found.get("serial", 0.0), found.get("averaging", 0.0))


def _times_of_runs(measured: Sequence[Measurement], assumed: list[str]) -> _Times:
    """From run dirs, which have the computing time."""

    def per_minibatch(some: Sequence[Measurement]) -> float:
        return sum(m.compute or 0.0 for m in some) / sum(map(_minibatches, some))

    alone, together = [m for m in measured if m.workers == 1], [m for m in measured if m.workers > 1]
    compute, stall = per_minibatch(measured), 0.0
    if not alone:
        assumed.append("no run with one worker: it would compute as fast as one of several workers (g = 0)")
    elif together and per_minibatch(together) > per_minibatch(alone):
        compute = per_minibatch(alone)
        stall = per_minibatch(together) - compute
    else:
        assumed.append(
            "only runs with one worker: several would compute as fast, and averagings cost only messages (g, h = 0)"
        )
    columns = [[m.averagings for m in measured]]
    if len({m.workers for m in measured}) > 1:
        columns.append([m.job.frames / measured[0].job.frames for m in measured])
    else:
        assumed.append("only one number of workers was measured: the whole epoch is divided among them (S = 0)")
    found = fit_not_negative(columns, [m.rest or 0.0 for m in measured], [m.seconds for m in measured])
    return _Times(compute, stall, float(found[1]) if len(found) > 1 else 0.0, float(found[0]))


def _exchange(
    measured: Sequence[Measurement], latency: float | None, byte_seconds: float | None, assumed: list[str]
) -> tuple[float, float]:
    """alpha and beta, from the communication of all measurements with several workers."""
    several = [m for m in measured if m.workers > 1 and m.comm > 0.0]
    if latency is not None and byte_seconds is not None:
        return latency, byte_seconds
    if not several:
        raise UserError(
            "no communication was measured: all runs have one worker",
            hint="add a run with two or more workers, or give --latency and --bandwidth",
        )
    of_messages, of_bytes = zip(*(_traffic(m) for m in several), strict=True)
    exchanges = [m.comm for m in several]
    if latency is None and byte_seconds is None and len({(m.workers, m.way.strategy) for m in several}) < 2:
        latency = 0.0
        assumed.append("communication of only one size was measured: its time is proportional to the bytes (alpha = 0)")
    if latency is not None:
        left = [max(0.0, e - latency * count) for e, count in zip(exchanges, of_messages, strict=True)]
        return latency, float(fit_not_negative([of_bytes], left, exchanges)[0])
    if byte_seconds is not None:
        left = [max(0.0, e - byte_seconds * size) for e, size in zip(exchanges, of_bytes, strict=True)]
        return float(fit_not_negative([of_messages], left, exchanges)[0]), byte_seconds
    alpha, beta = fit_not_negative([of_messages, of_bytes], exchanges, exchanges)
    return float(alpha), float(beta)


def _traffic(m: Measurement) -> tuple[float, float]:
    """Messages and bytes of one worker in an epoch, in the model."""
    n, size = m.workers, m.job.parameters
    count = m.averagings * messages(m.way.strategy, n)
    sent = m.averagings * volume(m.way.strategy, n) * size * BYTES[m.way.comm_dtype]
    if m.final_mean:
        count += messages("all-reduce", n)
        sent += volume("all-reduce", n) * size * BYTES["float32"]
    return count, sent
