"""Plots of `ddnn report`, and what all plots share: matplotlib without a display, colors, labels, files written
atomically."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddnn.nn.figures import FIGURES, LOSS, Figure
from ddnn.report.runs import (
    SHARES,
    Run,
    consensus_distances,
    figure,
    share,
    shares_by_rank,
    training_seconds,
)
from ddnn.runs.rows import EpochRow
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_write, ensure_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Plot

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, which color-blind readers tell apart; yellow, which is faint on white, gives way to brown."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
MAX_LABEL_LENGTH = 40
MAX_HEIGHT = 16.0  # inches


def new_figure(width: float, height: float) -> Plot:
    """A figure of so many inches, without a window. UserError: matplotlib is missing."""
    try:
        from matplotlib.figure import Figure as Plot
    except ImportError as error:
        message = f"plots need the package matplotlib, which cannot be imported: {error}"
        raise UserError(message, hint="pip install 'ddnn[report]', or --no-plots") from error
    return Plot(figsize=(width, height), dpi=120, layout="constrained")


def style(number: int) -> tuple[str, str, str]:
    """Color, marker and line of the curve with this number: they repeat only after 32."""
    return COLORS[number % 8], MARKERS[number % 8], LINES[number // 8 % 4]


def label(name: str) -> str:
    """A name that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    short = name if len(name) <= MAX_LABEL_LENGTH else f"...{name[3 - MAX_LABEL_LENGTH :]}"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels of the axes with their units, a faint grid behind the curves."""
    axes.set_title(title, fontsize=11)
    axes.set(xlabel=x, ylabel=y, axisbelow=True)
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def speed_up_panels(figure: Plot, sizes: Sequence[int], ticks: Sequence[int], ideal: str) -> tuple[Axes, Axes]:
    """Two panels for `plot_speed_up`, by numbers of workers: speed-up, both axes logarithmic, and efficiency; with the
    ideal under this name in the legend."""
    left, right = figure.subplots(1, 2)
    plot_speed_up((left, right), sizes, sizes, "-", color="0.6", linewidth=1.2, label=ideal)
    left.set_yscale("log", base=2)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
    for axis in (left.xaxis, left.yaxis, right.xaxis):
        axis.set_ticks(ticks)
        axis.set_major_formatter("{x:g}")
        axis.set_tick_params(which="minor", length=0)
    tidy(left, "Speed-up", "workers", "speed-up over one worker (times)")
    tidy(right, "Efficiency", "workers", "speed-up divided by workers (%)")
    return left, right


def plot_speed_up(
    panels: tuple[Axes, Axes], workers: Sequence[int], speed_ups: Sequence[float], line: str, **style: Any
) -> None:
    """A curve in the first panel, and divided by the workers in the second."""
    efficiencies = [100.0 * s / n for s, n in zip(speed_ups, workers, strict=True)]
    for axes, values in zip(panels, (speed_ups, efficiencies), strict=True):
        axes.plot(workers, values, linestyle=line, **style)
    panels[1].set_ylim(0.0, max(panels[1].get_ylim()[1], 1.05 * max(efficiencies, default=0.0)))


def legend_below(figure: Plot, axes: Axes) -> None:
    """One legend under all panels, of the curves in `axes`, for which the figure becomes higher."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = max(1, int(12 * figure.get_figwidth() / (max(map(len, labels)) + 6)))
        figure.set_figheight(min(MAX_HEIGHT, figure.get_figheight() + 0.22 * math.ceil(len(labels) / columns)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def save(figure: Plot, path: Path) -> Path:
    """Writes a PNG, whole or not at all; makes its folder. UserError: it cannot be written."""
    ensure_directory(path.parent)
    with atomic_write(path) as handle, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a run's name in a script that the font lacks: boxes will do
        figure.savefig(handle, format="png")
    return path


SHARE_COLORS = {"compute": "#0072B2", "data": "#56B4E9", "comm": "#D55E00", "wait": "#E69F00", "other": "0.8"}
ARROW = "\N{UPWARDS ARROW}"
MAX_NAMED_BARS = 30


def draw_report(runs: Sequence[Run], out: Path) -> tuple[Path, ...]:
    """Draws the plots for which the runs have data into PNG files in `out`; returns those that were written. UserError:
    matplotlib is missing, or a file cannot be written."""
    plots = [draw_learning(runs, out / "learning.png")]
    if any(run.metrics.workers for run in runs):
        plots.append(draw_time(runs, out / "time.png"))
    if any(consensus_distances(run) for run in runs):
        plots.append(draw_consensus_distance(runs, out / "consensus-distance.png"))
    return tuple(plots)


Points = NDArray[np.float64]
"""(points, 4): epoch, seconds of training up to its end (NaN if unknown), value, 1 if the epoch was accepted, else 0."""


def y_limit(curves: Iterable[Iterable[float]], factor: float) -> float:
    """Up to which value an axis shows these curves, so that one that diverged does not flatten the others: `factor`
    times the largest median of a curve whose lowest value is not more than `factor` times that of a typical one."""
    known = [values for values in map(list, curves) if any(map(math.isfinite, values))]
    if not known:
        return math.inf
    typical = median_low(map(min, known))
    usual = [median_low(values) for values in known if min(values) <= factor * typical]
    limit = factor * max(filter(math.isfinite, usual), default=0.0)
    return limit if limit > 0.0 else math.inf


def draw_learning(runs: Sequence[Run], path: Path) -> Path:
    """The objective's figures in cross-validation, those of training as thin lines, and the applied learning rate against
    epochs and against time; rejected epochs are hollow. Values far above those of the other runs are arrows at the edge."""
    plot = new_figure(11, 10)
    recorded = {name for run in runs for row in (*run.metrics.cv, *run.metrics.train) for name in row.figures}
    kinds = [kind for name, kind in FIGURES.items() if name in recorded] or [LOSS]
    panels = plot.subplots(len(kinds) + 1, 2, sharey="row", sharex="col")
    for pair, kind in zip(panels, kinds, strict=False):
        curves = [
            [
                _points(run, [(row, figure(row, kind)) for row in rows], kind)
                for rows in (run.metrics.cv, run.metrics.train)
            ]
            for run in runs
        ]
        y_label = f"{kind.label} (%)" if kind.percent else f"{kind.label} per frame (nats)"
        _draw_learning(pair, runs, curves, kind.label.capitalize(), y_label, None if kind.percent else 5.0)
    rates = [
        [_points(run, [(row, row.learning_rate) for row in run.metrics.train if row.learning_rate])] for run in runs
    ]
    y_label = "learning rate, as applied (log scale)"
    _draw_learning(panels[-1], runs, rates, "Applied learning rate", y_label, 1e4)
    panels[-1][0].set_yscale("log")
    panels[-1][0].locator_params(axis="x", integer=True)
    for axes in panels[-1]:
        axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    heading = [label(runs[0].name)] if len(runs) == 1 else []
    heading.append("markers: cross-validation (epoch 0: before training), thin lines: training")
    if any(not row.accepted for run in runs for row in run.metrics.cv):
        heading.append("hollow: epoch rejected by the schedule")
    if any(map(_has_arrows, panels.flat)):
        heading.append(f"{ARROW}: beyond the axis, or not finite")
    plot.suptitle(", ".join(heading), fontsize=10, color="0.25")
    legend_below(plot, panels[0][0])
    return save(plot, path)


def _points(run: Run, values: Sequence[tuple[EpochRow, float | None]], kind: Figure = LOSS) -> Points:
    """A percentage that is missing is not drawn, another figure that is missing was not finite."""
    seconds = {0: 0.0} | dict(zip((row.epoch for row in run.metrics.train), training_seconds(run), strict=True))
    scale, missing = (100.0, math.nan) if kind.percent else (1.0, math.inf)
    points = [
        (row.epoch, seconds.get(row.epoch, math.nan), missing if value is None else scale * value, row.accepted)
        for row, value in values
    ]
    return np.array(points, np.float64).reshape(-1, 4)


def _draw_learning(
    pair: Sequence[Axes],
    runs: Sequence[Run],
    curves: Sequence[Sequence[Points]],
    title: str,
    y_label: str,
    outlier_factor: float | None,
) -> None:
    """Against epochs and against time. `curves`: of each run, the first with markers, the second as a thin line."""
    trained = [points[points[:, 0] > 0.0, 2] if points[:, 0].any() else points[:, 2] for points, *_ in curves]
    limit = math.inf if outlier_factor is None else y_limit(trained, outlier_factor)
    for column, (axes, against) in enumerate(zip(pair, ("epoch", "training time (seconds)"), strict=True)):
        for number, (run, (thick, *more)) in enumerate(zip(runs, curves, strict=True)):
            _curve(axes, thick[:, [column, 2, 3]], number, label(run.name), limit)
            color, _, line = style(number)
            for thin in more:
                inside = thin[thin[:, 2] <= limit]
                axes.plot(inside[:, column], inside[:, 2], line, color=color, linewidth=0.8, alpha=0.7)
        tidy(axes, f"{title} by {against.partition(' (')[0]}", against, y_label)
        axes.label_outer()


def _has_arrows(axes: Axes) -> bool:
    return any(line.get_gid() == ARROW for line in axes.lines)


def _curve(axes: Axes, points: Points, number: int, name: str, limit: float) -> None:
    """`points`: (points, 3), x, y, and whether the epoch was accepted. Arrows at the upper edge stand for the values above
    `limit`. The network before training, at 0, is drawn without changing the axes if it would more than double the range
    of the epochs: they would be one flat line."""
    from matplotlib.lines import Line2D

    color, marker, line = style(number)
    beyond = (points[:, 1] > limit) | np.isinf(points[:, 1])
    if beyond.any():
        axes.plot(points[beyond, 0], [0.97] * beyond.sum(), linestyle="none", color=color, marker=r"$\uparrow$",
                  markersize=9, transform=axes.get_xaxis_transform(), gid=ARROW)  # fmt: skip
    x, y, accepted = points[~beyond].T
    rejected = accepted == 0.0
    x_kept, y_kept = x[~rejected], y[~rejected]
    before = int(len(x_kept) > 1 and x_kept[0] == 0.0 and np.ptp(y_kept) > 2.0 * np.ptp(y_kept[1:]))
    look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "linestyle": line, "linewidth": 1.6}
    axes.plot(x_kept[before:], y_kept[before:], label=name, **look)
    if before:
        axes.add_artist(Line2D(x_kept[:2], y_kept[:2], **look))
    axes.plot(x[rejected], y[rejected], marker, color=color, markersize=5, markerfacecolor="white")


def draw_time(runs: Sequence[Run], path: Path) -> Path:
    """Stacked bars of the fractions of time: for all workers of each run, or for each worker of a single run."""
    single = len(runs) == 1
    if single:
        by_rank = [shares_by_rank(runs[0], name) for name in SHARES]
        names = [str(rank) for rank in by_rank[0]]
        fractions = [[value or 0.0 for value in shares.values()] for shares in by_rank]
    else:
        timed = [run for run in runs if run.metrics.workers]
        names = [label(run.name) for run in timed]
        fractions = [[spread["mean"] if (spread := share(run, name)) else 0.0 for run in timed] for name in SHARES]
    few = len(names) <= MAX_NAMED_BARS
    plot = new_figure(11, max(2.8, 1.5 + 0.42 * len(names)) if few else 9.0)
    axes = plot.subplots()
    widths = 100.0 * np.array(fractions)  # (shares, bars)
    left = np.zeros(len(names))
    for name, width in zip((*SHARES, "other"), [*widths, np.maximum(0.0, 100.0 - widths.sum(axis=0))], strict=True):
        message = "waiting for other workers" if name == "wait" else name
        bars = axes.barh(range(len(names)), width, 0.72 if few else 1.0, left, color=SHARE_COLORS[name], label=message)
        left = left + width
        if few:  # numbers where there is room for them
            numbers = [f"{value:.1f}" if value >= 4.0 else "" for value in width]
            ink = "white" if name in ("compute", "comm") else "black"
            axes.bar_label(bars, numbers, label_type="center", color=ink, fontsize=9)
    title = f"Time of each worker: {label(runs[0].name)}" if single else "Time of the workers"
    tidy(axes, title, "fraction of the training time (%)", "worker (rank)" if single else "")
    if few:
        axes.set_yticks(range(len(names)), names)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(0.0, max(100.0, *left))
    legend_below(plot, axes)
    return save(plot, path)


def draw_consensus_distance(runs: Sequence[Run], path: Path) -> Path:
    """The relative distance of the workers' models from their mean, epoch by epoch; the band spans the workers."""
    plot = new_figure(9, 4.7)
    axes = plot.subplots()
    curves = {}
    for number, run in enumerate(runs):
        points = [(n, 100 * fmean(v), 1, 100 * min(v), 100 * max(v)) for n, v in consensus_distances(run).items()]
        if points:
            curves[number] = np.array(points)
    limit = y_limit([curve[:, 1] for curve in curves.values()], 10.0)
    for number, curve in curves.items():
        _curve(axes, curve[:, :3], number, label(runs[number].name), limit)
        epochs, _, _, lowest, highest = curve[curve[:, 4] <= limit].T
        axes.fill_between(epochs, lowest, highest, color=style(number)[0], alpha=0.15, linewidth=0)
    title = "Consensus distance of the workers' models before an averaging (band: lowest to highest worker)"
    if len(curves) == 1:
        title += f"\n{label(runs[min(curves)].name)}"
    if _has_arrows(axes):
        title += f"\n{ARROW}: beyond the axis"
    tidy(axes, title, "epoch", "distance from the mean model (% of its norm)")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0.0)
    legend_below(plot, axes)
    return save(plot, path)


def draw_speeds(speeds: Sequence[tuple[str, int, float]], path: Path) -> Path:
    """Frames per second against the minibatch size, a curve for each name."""
    plot = new_figure(9, 5.0)
    axes = plot.subplots()
    for number, name in enumerate(dict.fromkeys(name for name, _, _ in speeds)):
        points = sorted((size, speed, True) for other, size, speed in speeds if other == name)
        _curve(axes, np.array(points, np.float64), number, label(name), math.inf)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({size for _, size, _ in speeds}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0.0)
    tidy(axes, "Training speed", "frames in a minibatch", "frames/s")
    legend_below(plot, axes)
    return save(plot, path)
