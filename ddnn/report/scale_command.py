"""`ddnn scale`: predicts the speed-up of more workers from measured epochs, by the model of `ddnn.report.scaling`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from ddnn.distributed.cost import Layout
from ddnn.kaldi.data_dir import FRAMES_PER_HOUR
from ddnn.report.figures import COLORS, MARKERS, legend_below, new_figure, plot_speed_up, save, speed_up_panels
from ddnn.report.measured import MAX_WORKERS, read_measured, with_network
from ddnn.report.runs import Run, incomparable, overload, read_runs, shortest_ends
from ddnn.report.scaling import (
    EXACT_MEAN,
    SAME_COST,
    CommScheme,
    Constants,
    Job,
    Measurement,
    averagings,
    calibrate,
    epoch_seconds,
    fastest,
    scaled,
    shared,
    strategies,
)
from ddnn.util.errors import UserError
from ddnn.util.text import render, table

PLOT = "scaling.png"


@dataclass(frozen=True)
class ScaleOptions:
    """What to predict; None: as measured."""

    workers: tuple[int, ...]
    network: str | None = None  # dims, as 440-6x2048-8806
    minibatch_size: int | None = None
    averaging_period: int | None = None
    frames: float | None = None  # of an epoch
    hours: float | None = None  # the same, at 100 frames per second
    fit: tuple[int, ...] | None = None  # to these numbers of workers; the others are only compared with the prediction
    latency: float | None = None  # seconds per message, instead of the fitted latency
    bandwidth: float | None = None  # bytes per second, instead of the fitted bandwidth
    comm_dtype: str | None = None  # type in which parameters are sent
    layouts: str | None = None  # of workers that share a model, as 1x2x1,2x2x1
    allow_overloaded: bool = False  # also predict from runs whose cores other processes used


@dataclass(frozen=True)
class Prediction:
    """One strategy on so many workers: seconds of an epoch, T(1) / T(n), and that over n."""

    strategy: str
    overlap: bool
    comm_dtype: str
    workers: int
    epoch_seconds: float
    speed_up: float
    efficiency: float


@dataclass(frozen=True)
class SharedPrediction:
    """A layout of workers that share a model, with the fastest number of microbatches; speed-ups over one worker by
    strategy."""

    layout: str
    microbatches: int
    minibatch_seconds: float
    worker_bytes: float
    received_bytes: float
    speed_ups: dict[str, float]


@dataclass(frozen=True)
class Check:
    """A measured speed-up, over the fastest run with one worker, and the model's for the same training; `fitted`: the
    constants were fitted to it."""

    source: str
    strategy: str
    workers: int
    layout: str  # replicas x columns x stages
    fitted: bool
    measured: float
    predicted: float
    error: float


@dataclass(frozen=True)
class Scaling:
    """All predictions; the constants are those of the `job` to predict, which is `as_measured` or another."""

    job: Job
    as_measured: bool
    comm_dtype: str
    constants: Constants
    notes: tuple[str, ...]
    checks: tuple[Check, ...]
    predictions: tuple[Prediction, ...]
    shared: tuple[SharedPrediction, ...] = ()
    plots: tuple[Path, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "plots": [str(path) for path in self.plots]}

    def speed_up(self, scheme: CommScheme, workers: int) -> float:
        scheme = replace(scheme, comm_dtype=self.comm_dtype)
        return epoch_seconds(self.constants, scheme, 1) / epoch_seconds(self.constants, scheme, workers)

    def as_text(self) -> str:
        """The constants, the measurements compared with the model, a column of speed-ups and efficiencies for each
        cost."""
        sources = shortest_ends([Path(check.source) for check in self.checks])
        return render(
            "scale.txt.j2",
            scaling=self,
            checks=list(zip(sources, self.checks, strict=True)),
            speed_ups={p.workers: [self.speed_up(scheme, p.workers) for scheme in SAME_COST] for p in self.predictions},
            costs=list(map(str, SAME_COST)),
            table=table,
        )


def scale(sources: Sequence[Path], options: ScaleOptions, out: Path | None) -> Scaling:
    """Reads measurements, fits the model, predicts, and draws a plot into the folder `out` if it is given. UserError:
    an invalid option; measurements that cannot be combined, or too few of them. DataError: a run dir or file of
    measurements is damaged."""
    _check(options)
    measured = [m for source in sources for m in read_measured(source)]
    overloaded = _check_runs(read_runs([source for source in sources if source.is_dir()]), options)
    used = [m for m in measured if options.fit is None or m.workers in options.fit]
    if not used:
        sizes = ", ".join(map(str, sorted({m.workers for m in measured})))
        raise UserError(f"none of these numbers of workers was measured, only {sizes}", location="--fit")
    calibration = calibrate(used, options.latency, options.bandwidth and 1.0 / options.bandwidth)
    reference = calibration.constants
    job, comm_dtype = _job(reference.job, options), options.comm_dtype or measured[0].scheme.comm_dtype
    constants = scaled(reference, job)
    scaling = Scaling(
        job=job,
        as_measured=replace(job, frames=reference.job.frames) == reference.job,
        comm_dtype=comm_dtype,
        constants=constants,
        notes=(*calibration.assumed, *_notes(constants, options), *(f"{run}; its times count" for run in overloaded)),
        checks=tuple(_check_of(m, measured, m in used, reference) for m in measured if m.workers > 1),
        predictions=tuple(_predictions(constants, options.workers, comm_dtype)),
        shared=tuple(_shared_predictions(constants, options, comm_dtype)),
    )
    return scaling if out is None else replace(scaling, plots=(draw_scaling(scaling, out / PLOT),))


def _check(options: ScaleOptions) -> None:
    limits = {"workers": (1, MAX_WORKERS), "fit": (1, MAX_WORKERS), "latency": (0.0, 1e6)}
    limits |= dict.fromkeys(("minibatch_size", "averaging_period", "frames", "hours", "bandwidth"), (1e-3, 1e15))
    for name, (low, high) in limits.items():
        value = getattr(options, name)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not low <= number <= high:
                option = f"--{name.replace('_', '-')}"
                raise UserError(f"{number:g} found, expected a number from {low:g} to {high:g}", location=option)
    if options.frames is not None and options.hours is not None:
        raise UserError("--frames and --hours both given", hint="give one of them")


def _check_runs(runs: Sequence[Run], options: ScaleOptions) -> list[str]:
    """UserError: the constants would be fitted to runs whose speeds do not compare, or whose cores were overloaded.
    Returns the warnings of the latter if they are allowed."""
    for run in runs:
        alone = len(runs) == 1 and run.start is None  # of an older version, but compared with no other run
        if (reason := incomparable(run, runs[0], ("minibatch_size", "minibatch_scope"))) is not None and not alone:
            hint = "leave it out, or measure all runs under the same conditions: docs/how-to/predict-speed-up.md"
            raise UserError(f"{run.name}: {reason}", location="--measured", hint=hint)
    overloaded = [f"{run.name}: {warning}" for run in runs if (warning := overload(run)) is not None]
    if overloaded and not options.allow_overloaded:
        hint = "measure again without other load, or predict from these times anyway with --allow-overloaded"
        raise UserError(overloaded[0], location="--measured", hint=hint)
    return overloaded


def _job(measured: Job, options: ScaleOptions) -> Job:
    frames = options.frames if options.hours is None else options.hours * FRAMES_PER_HOUR
    job = replace(
        measured,
        minibatch=options.minibatch_size or measured.minibatch,
        averaging_period=options.averaging_period or measured.averaging_period,
        frames=frames or measured.frames,
    )
    return job if options.network is None else with_network(job, options.network)


def _notes(constants: Constants, options: ScaleOptions) -> list[str]:
    """What the prediction assumes beyond the measurements."""
    notes = []
    if options.network is not None:
        notes.append("computing time is proportional to the operations of the network, bytes to its parameters")
    if options.minibatch_size is not None:
        notes.append("a frame takes the same time in a minibatch of another size")
    if options.layouts is not None:
        messages = (
            ", and send as fast as they average" if constants.shared_byte_seconds == constants.byte_seconds else ""
        )
        notes.append(f"workers that share a model spend all of a minibatch in matrix products{messages}")
    few = [n for n in options.workers if n > 1 and averagings(constants.job, "all-reduce", n) < 1.0]
    if few:
        notes.append(f"with {min(few)} or more workers, an epoch has fewer frames than one averaging interval")
    return notes


def _check_of(m: Measurement, measured: Sequence[Measurement], fitted: bool, reference: Constants) -> Check:
    """A measurement with several workers, compared with the model at its own averaging period and frames."""
    constants = scaled(reference, replace(m.job, operations=reference.job.operations, layers=reference.job.layers))
    alone = [other for other in measured if other.workers == 1]
    base = min(alone, key=lambda other: (other.job.minibatch != m.job.minibatch, _frame_seconds(other)), default=None)
    minibatch = m.job.minibatch if base is None else base.job.minibatch
    model_alone = epoch_seconds(scaled(constants, replace(constants.job, minibatch=minibatch)), m.scheme, 1)
    seconds = model_alone if base is None else _frame_seconds(base) * m.job.frames
    if replica := fastest(constants, m.layout._asdict()) if m.layout.shared_by > 1 else None:
        constants = shared(constants, replica)
    speed_up, predicted = seconds / m.seconds, model_alone / epoch_seconds(constants, m.scheme, m.layout.replicas)
    error = predicted / speed_up - 1.0
    return Check(m.source, str(m.scheme), m.workers, str(m.layout), fitted, speed_up, predicted, error)


def _frame_seconds(m: Measurement) -> float:
    return m.seconds / m.job.frames


def _predictions(constants: Constants, sizes: Sequence[int], comm_dtype: str) -> Iterator[Prediction]:
    schemes = [
        CommScheme(name, comm_dtype, overlap)
        for overlap in (False, True)
        for name, strategy in strategies().items()
        if strategy.overlaps or not overlap
    ]
    for n, scheme in product(sizes, schemes):
        seconds = epoch_seconds(constants, scheme, n)
        speed_up = epoch_seconds(constants, scheme, 1) / seconds
        yield Prediction(scheme.strategy, scheme.overlap, comm_dtype, n, seconds, speed_up, speed_up / n)


def _shared_predictions(constants: Constants, options: ScaleOptions, comm_dtype: str) -> Iterator[SharedPrediction]:
    """UserError: a layout is not of the form 2x2x1, or the network cannot be split like this."""
    if options.layouts is None:
        return
    layers = constants.job.layers
    if not layers:
        raise UserError("--layouts without --network", hint="add the widths of the layers, as 440-6x2048-8806")
    alone = epoch_seconds(constants, EXACT_MEAN, 1)
    for text in options.layouts.split(","):
        sizes = [int(size) for size in text.split("x")] if re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5}){2}", text) else []
        fixed = dict(zip(Layout._fields, sizes, strict=False))
        best = fastest(constants, fixed) if sizes else None
        if best is None:
            narrowest = min(layer.out_features for layer in layers)
            expected = f"replicas x columns (at most {narrowest}) x stages (at most {len(layers)}), as 2x2x1"
            raise UserError(f"{text[:100]!r} found, expected {expected}", location="--layouts")
        replica = shared(constants, best)
        schemes = [replace(scheme, comm_dtype=comm_dtype) for scheme in SAME_COST if not scheme.overlap]
        speed_ups = {s.strategy: alone / epoch_seconds(replica, s, best.layout.replicas) for s in schemes}
        yield SharedPrediction(
            text, best.layout.microbatches, best.minibatch_seconds, best.worker_bytes, best.received_bytes, speed_ups
        )


def draw_scaling(scaling: Scaling, path: Path) -> Path:
    """Speed-up and efficiency against workers: the ideal, a curve for each cost, and the measurements. UserError:
    matplotlib is missing, or the file cannot be written."""
    figure = new_figure(12, 6.0)
    shown = {1, *(p.workers for p in scaling.predictions), *(check.workers for check in scaling.checks)}
    powers = [2**q for q in range(max(shown).bit_length())]
    sizes = sorted(shown.union(powers))
    panels = speed_up_panels(figure, sizes, powers[:: 1 + len(powers) // 12], "ideal: proportional to the workers")
    colors = dict(zip(dict.fromkeys(scheme.strategy for scheme in SAME_COST), COLORS, strict=False))
    overlapped = [scheme for scheme in SAME_COST if scheme.overlap]
    for scheme, name in SAME_COST.items():
        speed_ups = [scaling.speed_up(scheme, n) for n in sizes]
        # Dashes in turn, since with overlap strategies often cost the same.
        line = (6 * overlapped.index(scheme), (4, 6 * len(overlapped) - 4)) if scheme.overlap else "-"
        plot_speed_up(
            panels, sizes, speed_ups, line, color=colors[scheme.strategy], linewidth=1.8, label=f"model: {name}"
        )
    checks = scaling.checks if scaling.as_measured else ()
    for number, strategy in enumerate(dict.fromkeys(check.strategy for check in checks)):
        workers, measured = zip(*((c.workers, c.measured) for c in checks if c.strategy == strategy), strict=True)
        plot_speed_up(panels, workers, measured, "none", marker=MARKERS[number], markersize=8, markerfacecolor="none",
                      markeredgecolor="black", markeredgewidth=1.4, label=f"measured: {strategy}")  # fmt: skip
    job = scaling.job
    title = f"{job.parameters:,} parameters, minibatch size {job.minibatch}, averaging period {job.averaging_period}, "
    figure.suptitle(title + scaling.comm_dtype, fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)
