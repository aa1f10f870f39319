"""From measured epochs to the constants of the scaling model: docs/scaling.md has the formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ddnn.errors import UserError
from ddnn.report.measured import Measurement
from ddnn.report.scaling import BYTES, Constants, fit_not_negative, messages, volume


@dataclass(frozen=True)
class Calibration:
    """The constants, and what was assumed where the measurements do not say: a sentence each."""

    constants: Constants
    assumed: tuple[str, ...]


def calibrate(
    measured: Sequence[Measurement], latency: float | None = None, byte_seconds: float | None = None
) -> Calibration:
    """Fits the constants to the measurements; `latency` and `byte_seconds` are taken as given where they are.

    Raises:
        UserError: measurements of different networks or minibatches, or of different kinds; nothing to fit by.
    """
    first = measured[0]
    for other in measured:
        different = (other.job.parameters, other.job.minibatch) != (first.job.parameters, first.job.minibatch)
        if different or (other.compute is None) != (first.compute is None):
            what = f"{first.source} and {other.source} differ in network, minibatch or kind of measurement"
            raise UserError(what, mend="scale from runs of one network and minibatch, or from one file")
    assumed: list[str] = []
    times = (_times_of_totals if first.compute is None else _times_of_runs)(measured, assumed)
    alpha, beta = _exchange(measured, latency, byte_seconds, assumed)
    deviations = [m.block_std / _block(m) ** 0.5 for m in measured if m.block_std is not None and m.workers > 1]
    if not deviations:
        assumed.append(
            "no spread of the workers' times was measured: no waiting for the slowest beside g and h (sigma = 0)"
        )
    sigma = fmean(d * d for d in deviations) ** 0.5 * first.job.every**0.5 if deviations else 0.0
    constants = Constants(
        job=first.job,
        minibatch_seconds=times.compute,
        stall_seconds=times.stall,
        serial_seconds=times.serial,
        averaging_seconds=times.averaging,
        block_std=sigma,
        latency=alpha,
        byte_seconds=beta,
        final_mean=any(m.final_mean for m in measured),
    )
    return Calibration(constants, tuple(assumed))


def _block(m: Measurement) -> int:
    return 1 if m.way.strategy == "gradient" else m.job.every


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
    """From totals and exchanges alone, for which compute was not told apart."""
    sizes = {m.workers for m in measured}
    if 1 not in sizes or len(sizes) < 2:
        what = f"times on {', '.join(map(str, sorted(sizes)))} workers found, expected those on 1 and on more"
        raise UserError(what, mend="give the total on one worker, and on two or more")
    columns = {
        "compute": [_minibatches(m) for m in measured],
        "stall": [_minibatches(m) * (m.workers > 1) for m in measured],
    }
    if len({m.job.every for m in measured if m.workers > 1}) > 1:
        columns["averaging"] = [m.averagings for m in measured]
    else:
        assumed.append("one `every` only: what more workers lose beside messages goes by minibatches (h = 0)")
    if len(sizes) > 2:
        columns["serial"] = [m.job.frames / measured[0].job.frames for m in measured]
    else:
        assumed.append("fewer than three sizes: no part of an epoch is undivided (S = 0)")
    values = [m.seconds - m.exchange for m in measured]
    found = dict(zip(columns, map(float, fit_not_negative(list(columns.values()), values, values)), strict=True))
    return _Times(found["compute"], found["stall"], found.get("serial", 0.0), found.get("averaging", 0.0))


def _times_of_runs(measured: Sequence[Measurement], assumed: list[str]) -> _Times:
    """From run dirs, which tell compute apart."""

    def per_minibatch(some: Sequence[Measurement]) -> float:
        return sum(m.compute or 0.0 for m in some) / sum(map(_minibatches, some))

    alone, together = [m for m in measured if m.workers == 1], [m for m in measured if m.workers > 1]
    compute, stall = per_minibatch(measured), 0.0
    if not alone:
        assumed.append("no run of one worker: it would compute as fast as one of several does (g = 0)")
    elif together and per_minibatch(together) > per_minibatch(alone):
        compute = per_minibatch(alone)
        stall = per_minibatch(together) - compute
    else:
        assumed.append(
            "only one worker: several would compute as fast, averagings cost nothing but messages (g, h = 0)"
        )
    columns = [[m.averagings for m in measured]]
    if len({m.workers for m in measured}) > 1:
        columns.append([m.job.frames / measured[0].job.frames for m in measured])
    else:
        assumed.append("one number of workers only: no part of an epoch is undivided (S = 0)")
    found = fit_not_negative(columns, [m.rest or 0.0 for m in measured], [m.seconds for m in measured])
    return _Times(compute, stall, float(found[1]) if len(found) > 1 else 0.0, float(found[0]))


def _exchange(
    measured: Sequence[Measurement], latency: float | None, byte_seconds: float | None, assumed: list[str]
) -> tuple[float, float]:
    """alpha and beta, from the exchanges of all that have several workers."""
    several = [m for m in measured if m.workers > 1 and m.exchange > 0.0]
    if latency is not None and byte_seconds is not None:
        return latency, byte_seconds
    if not several:
        raise UserError(
            "no exchange was measured: all have one worker",
            mend="add a run of two or more workers, or give --latency and --bandwidth",
        )
    of_messages, of_bytes = zip(*(_traffic(m) for m in several), strict=True)
    exchanges = [m.exchange for m in several]
    if latency is None and byte_seconds is None and len({(m.workers, m.way.strategy) for m in several}) < 2:
        latency = 0.0
        assumed.append("exchanges of one size only were measured: all their time goes by bytes (alpha = 0)")
    if latency is not None:
        left = [max(0.0, e - latency * count) for e, count in zip(exchanges, of_messages, strict=True)]
        return latency, float(fit_not_negative([of_bytes], left, exchanges)[0])
    if byte_seconds is not None:
        left = [max(0.0, e - byte_seconds * size) for e, size in zip(exchanges, of_bytes, strict=True)]
        return float(fit_not_negative([of_messages], left, exchanges)[0]), byte_seconds
    alpha, beta = fit_not_negative([of_messages, of_bytes], exchanges, exchanges)
    return float(alpha), float(beta)


def _traffic(m: Measurement) -> tuple[float, float]:
    """Messages and bytes of one worker in an epoch, as the model counts them."""
    n, size = m.workers, m.job.parameters
    count = m.averagings * messages(m.way.strategy, n)
    sent = m.averagings * volume(m.way.strategy, n) * size * BYTES[m.way.wire]
    if m.final_mean:
        count += messages("all-reduce", n)
        sent += volume("all-reduce", n) * size * BYTES["float32"]
    return count, sent
