"""`ddnn scale`: what more workers would bring, from what was measured. The model is `ddnn.report.scaling`'s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ddnn.errors import UserError
from ddnn.kaldi.features import FRAMES_PER_HOUR
from ddnn.report.calibrate import Calibration, calibrate
from ddnn.report.measured import LARGEST, Measurement, network_dims, operations_of, parameters_of, read_measured
from ddnn.report.scaling import (
    OVERLAPPING,
    SAME_COST,
    STRATEGIES,
    Constants,
    Job,
    Way,
    averagings,
    epoch_seconds,
    scaled,
)

PLOT = "scaling.png"


@dataclass(frozen=True)
class ScaleOptions:
    """What to predict; None takes what was measured.

    Attributes:
        workers: sizes.
        network: dims, as 440-6x2048-8806.
        minibatch, every, frames, hours: of the job to predict; frames or hours are of an epoch, at 100 frames a second.
        fit: sizes to fit by; the others only stand beside the prediction.
        latency: seconds of a message, instead of the fitted one.
        bandwidth: bytes a second, instead of the fitted one.
        wire: type on the wire.
    """

    workers: tuple[int, ...]
    network: str | None = None
    minibatch: int | None = None
    every: int | None = None
    frames: float | None = None
    hours: float | None = None
    fit: tuple[int, ...] | None = None
    latency: float | None = None
    bandwidth: float | None = None
    wire: str | None = None


@dataclass(frozen=True)
class Prediction:
    """One strategy on so many workers: seconds of an epoch, T(1) / T(n), and that over n."""

    strategy: str
    overlap: bool
    wire: str
    workers: int
    epoch_seconds: float
    speed_up: float
    efficiency: float


@dataclass(frozen=True)
class Check:
    """A measured speed-up beside what the model makes of the same job; `fitted`: it was among those to fit to."""

    source: str
    strategy: str
    workers: int
    fitted: bool
    measured: float
    predicted: float
    error: float


@dataclass(frozen=True)
class Scaling:
    """All predictions; the constants are those of the `job` to predict, `as_measured` or another."""

    job: Job
    as_measured: bool
    wire: str
    constants: Constants
    notes: tuple[str, ...]
    checks: tuple[Check, ...]
    predictions: tuple[Prediction, ...]
    plots: tuple[Path, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {**asdict(self), "plots": [str(path) for path in self.plots]}

    def speed_up(self, way: Way, workers: int) -> float:
        """T(1) / T(n)."""
        way = replace(way, wire=self.wire)
        return epoch_seconds(self.constants, way, 1) / epoch_seconds(self.constants, way, workers)

    def as_text(self) -> str:
        """The constants, the measurements beside the model, a column of speed-ups for each cost."""
        job, c = self.job, self.constants
        rate = "infinite" if c.byte_seconds == 0.0 else f"{1e-6 / c.byte_seconds:,.1f} MB/s"
        ms = {
            name: f"{1e3 * getattr(c, name):.4g} ms"
            for name in ("minibatch_seconds", "stall_seconds", "latency", "averaging_seconds", "block_std")
        }
        lines = [
            f"to predict: {job.parameters:,} parameters, minibatch {job.minibatch}, every {job.every}, "
            f"{job.frames:,.0f} frames an epoch, {self.wire} on the wire",
            f"minibatch: {ms['minibatch_seconds']} alone (c), {ms['stall_seconds']} more among others (g); "
            f"{c.serial_seconds:.4g} s of an epoch undivided (S)",
            f"averaging: {ms['latency']} a message (alpha), {rate} (1 / beta), {ms['averaging_seconds']} beside "
            f"messages (h); a block varies by {ms['block_std']} (sigma)",
            *(f"assumed: {note}" for note in self.notes),
        ]
        if self.checks:
            lines += ["", "speed-up of what was measured    workers  measured  model   error"]
            for k in self.checks:
                what = f"{_end(k.source)}, {k.strategy}"
                lines.append(
                    f"{what:<33}{k.workers:>7}  {k.measured:>8.2f}  {k.predicted:>5.2f}  {100 * k.error:>+5.1f} %"
                    f"{'  (fitted)' if k.fitted else ''}"
                )
        names = [name for name, _ in SAME_COST]
        lines += ["", f"speed-up  {'  '.join(names)}"]
        for n in dict.fromkeys(p.workers for p in self.predictions):
            cells = [f"{self.speed_up(way, n):>{len(name)}.2f}" for name, way in SAME_COST]
            lines.append(f"{n:>8}  {'  '.join(cells)}")
        return "\n".join([*lines, *(f"plot: {path}" for path in self.plots)])


def scale(sources: Sequence[Path], options: ScaleOptions, out: Path | None) -> Scaling:
    """Reads measurements, fits the model, predicts; draws a plot into the folder `out` where it is given.

    Raises:
        UserError: an option that cannot be; measurements that do not fit together, or are too few.
        DataError: a run dir or file of measurements is damaged.
    """
    _check(options)
    measured = [m for source in sources for m in read_measured(source)]
    used = [m for m in measured if options.fit is None or m.workers in options.fit]
    if not used:
        sizes = ", ".join(map(str, sorted({m.workers for m in measured})))
        raise UserError(f"none of the sizes to fit by was measured; measured are {sizes}", where="--fit")
    beta = None if options.bandwidth is None else 1.0 / options.bandwidth
    calibration = calibrate(used, options.latency, beta)
    job = _job(calibration.constants.job, options)
    constants = scaled(calibration.constants, job)
    wire = options.wire or measured[0].way.wire
    found = Scaling(
        job=job,
        as_measured=replace(job, frames=0) == replace(calibration.constants.job, frames=0),
        wire=wire,
        constants=constants,
        notes=(*calibration.assumed, *_notes(constants, options)),
        checks=tuple(_checks(measured, used, calibration)),
        predictions=tuple(_predictions(constants, options.workers, wire)),
    )
    if out is None:
        return found
    from ddnn.report.scale_plot import draw_scaling  # the table does without matplotlib

    return replace(found, plots=(draw_scaling(found, out / PLOT),))


def _check(options: ScaleOptions) -> None:
    for sizes, option in ((options.workers, "--workers"), (options.fit or (), "--fit")):
        wrong = [n for n in sizes if not 1 <= n <= LARGEST]
        if wrong:
            raise UserError(f"{wrong[0]} workers found, expected 1 to {LARGEST:,}", where=option)
    for value, option in (
        *((options.minibatch, "--minibatch"), (options.every, "--every"), (options.frames, "--frames")),
        *((options.hours, "--hours"), (options.bandwidth, "--bandwidth")),
    ):
        if value is not None and not 1e-3 <= value <= 1e15:
            raise UserError(f"{value:g} found, expected a number above 0", where=option)
    if options.latency is not None and not 0.0 <= options.latency < 1e6:
        raise UserError(f"{options.latency:g} found, expected seconds", where="--latency")
    if options.frames is not None and options.hours is not None:
        raise UserError("--frames and --hours both given", mend="give one of them")


def _job(measured: Job, options: ScaleOptions) -> Job:
    frames = options.frames if options.hours is None else options.hours * FRAMES_PER_HOUR
    job = Job(
        parameters=measured.parameters,
        operations=measured.operations,
        minibatch=options.minibatch or measured.minibatch,
        every=options.every or measured.every,
        frames=frames or measured.frames,
    )
    if options.network is None:
        return job
    dims = network_dims(options.network)
    return replace(job, parameters=parameters_of(dims), operations=operations_of(dims))


def _notes(constants: Constants, options: ScaleOptions) -> list[str]:
    """What the prediction takes for granted beyond the measurements."""
    notes = []
    if options.network is not None:
        notes.append("compute grows with the operations of the network, bytes with its parameters")
    if options.minibatch is not None:
        notes.append("a frame takes as long in a minibatch of another size")
    few = [n for n in options.workers if n > 1 and averagings(constants.job, "all-reduce", n) < 1.0]
    if few:
        notes.append(f"an epoch has frames for a part of an averaging only, from {min(few)} workers on")
    return notes


def _checks(measured: Sequence[Measurement], used: Sequence[Measurement], calibration: Calibration) -> list[Check]:
    """Every measurement on several workers beside the model, each at its own `every` and frames."""
    reference = calibration.constants
    alone = [m for m in measured if m.workers == 1]
    checks = []
    for m in measured:
        if m.workers == 1:
            continue
        constants = scaled(reference, replace(m.job, operations=reference.job.operations))
        model_alone = epoch_seconds(constants, m.way, 1)
        one = alone[0].seconds * m.job.frames / alone[0].job.frames if alone else model_alone
        real, predicted = one / m.seconds, model_alone / epoch_seconds(constants, m.way, m.workers)
        name = m.way.strategy + (", overlap" if m.way.overlap else "")
        checks.append(Check(m.source, name, m.workers, m in used, real, predicted, predicted / real - 1.0))
    return checks


def _predictions(constants: Constants, sizes: Sequence[int], wire: str) -> list[Prediction]:
    found = []
    for n in sizes:
        ways = [Way(name, wire) for name in STRATEGIES] + [Way(name, wire, overlap=True) for name in OVERLAPPING]
        for way in ways:
            seconds = epoch_seconds(constants, way, n)
            speed_up = epoch_seconds(constants, way, 1) / seconds
            found.append(Prediction(way.strategy, way.overlap, wire, n, seconds, speed_up, speed_up / n))
    return found


def _end(source: str) -> str:
    return source if len(source) <= 20 else f"...{source[-17:]}"
