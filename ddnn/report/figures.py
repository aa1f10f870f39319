"""Plots of `ddnn report`, and what all plots share: matplotlib without a display, colors, labels, files written
atomically."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median_low
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddnn.nn.figures import FIGURES, LOSS
from ddnn.report.runs import SHARES, Run, means_by_rank, training_seconds
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
    axes.grid(True, color="0.5", alpha=0.25, linewidth=0.8)
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
    panels: tuple[Axes, Axes], workers: Sequence[int], speed_ups: Sequence[float], line: Any, **style: Any
) -> None:
    """A curve in the first panel, and divided by the workers in the second."""
    efficiencies = [100.0 * s / n for s, n in zip(speed_ups, workers, strict=True)]
    for axes, values in zip(panels, (speed_ups, efficiencies), strict=True):
        axes.plot(workers, values, linestyle=line, **style)
    panels[1].set_ylim(0.0, max(panels[1].get_ylim()[1], 1.05 * max(efficiencies, default=0.0)))


def legend_below(figure: Plot, axes: Axes) -> None:
    """One legend under all panels, of the curves in `axes`, for which the figure becomes higher."""
    handles, labels = axes.get_legend_handles_labels()
    if handles:
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


SHARE_COLORS = {"compute": "#0072B2", "data": "#56B4E9", "comm": "#D55E00", "wait": "#E69F00", "other": "#CCCCCC"}
MAX_NAMED_BARS = 30
Points = NDArray[np.float64]
RATE = "learning_rate"
LABELS = {name: figure.axis for name, figure in FIGURES.items()}
LABELS[RATE] = "applied learning rate (log scale)"
OUTLIERS = {name: 1e4 if name == RATE else 2.0 for name in LABELS}  # the factor of each panel's `outlier_limit`


def draw_report(runs: Sequence[Run], out: Path) -> tuple[Path, ...]:
    """Draws the plots for which the runs have data into PNG files in `out`; returns those that were written. UserError:
    matplotlib is missing, or a file cannot be written."""
    plots = [draw_learning(runs, out / "learning.png")]
    rows = [row for run in runs for row in run.metrics.workers]
    if rows:
        plots.append(draw_time(runs, out / "time.png"))
    if any(row.consensus_distance is not None for row in rows):
        plots.append(draw_consensus_distance(runs, out / "consensus-distance.png"))
    return tuple(plots)


def curve(axes: Axes, points: Points, number: int, name: str) -> None:
    color, marker, line = style(number)
    axes.plot(*points.T, color=color, marker=marker, markersize=5, linestyle=line, linewidth=1.6, label=label(name))


def outlier_limit(curves: Iterable[Points], factor: float) -> float:
    """`factor` times the median of a typical curve: where an axis ends, so that one that diverged, or the network before
    training, does not flatten the others. `curves`: the values of each."""
    medians = [np.nanmedian(values) for values in curves if np.isfinite(values).any()]
    return factor * median_low(medians) if medians else math.inf


def clip_outliers(axes: Axes, curves: Iterable[Points], factor: float) -> None:
    """Ends an axis at the `outlier_limit`; a marker within it is drawn as a whole, one beyond it not at all."""
    if axes.dataLim.y1 > (limit := outlier_limit(curves, factor)) > axes.dataLim.y0:
        axes.dataLim.intervaly = (axes.dataLim.y0, limit)
    for line in axes.lines:
        line.set_markevery((np.asarray(line.get_ydata(), np.float64) <= limit).tolist())


def draw_learning(runs: Sequence[Run], path: Path) -> Path:
    """The objective's figures in cross-validation, and those of training as thin lines, against epochs and against time, and
    the applied learning rate; rejected epochs are hollow. Values far above those of the other runs are outside the axes."""
    plot = new_figure(11, 10)
    names = panel_names(runs)
    panels = plot.subplots(len(names), 2, sharey="row", sharex="col")
    for pair, name in zip(panels, names, strict=True):
        for column, (axes, against) in enumerate(zip(pair, ("epoch", "training time (seconds)"), strict=True)):
            if (name, column) == (RATE, 1):
                continue
            curves = []
            for number, run in enumerate(runs):
                cv, train = (learning_points(run, rows, name) for rows in (run.metrics.cv, run.metrics.train))
                xy, (color, marker, line) = [column, 2], style(number)
                if name == RATE:  # that of a whole epoch
                    axes.step(*np.vstack([train[:1] * [0, 0, 1, 1], train])[:, xy].T, line, color=color, linewidth=1.6)
                else:
                    curve(axes, cv[:, xy], number, run.name)
                    rejected = cv[cv[:, 3] == 0.0][:, xy]
                    axes.plot(*rejected.T, marker, color=color, markerfacecolor="white", markersize=5)
                    axes.plot(*train[:, xy].T, line, color=color, linewidth=0.8, alpha=0.7)
                curves.append(train[:, 2] if name == RATE else cv[:, 2])
            clip_outliers(axes, curves, OUTLIERS[name])
            tidy(axes, LABELS[name].partition(" (")[0].capitalize(), against, LABELS[name])
            axes.label_outer()
        if name != RATE and FIGURES[name].percent:
            pair[0].yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    last, unused = panels[-1]
    last.set_yscale("log")
    last.locator_params(axis="x", integer=True)
    last.set_xlim(left=-0.02 * last.get_xlim()[1])
    panels[-2][1].set_xlim(left=-0.02 * panels[-2][1].get_xlim()[1])
    panels[-2][1].set_xlabel("training time (seconds)")
    panels[-2][1].tick_params(labelbottom=True)
    _name_lines(unused)
    legend_below(plot, panels[0][0])
    return save(plot, path)


def _name_lines(axes: Axes) -> None:
    """Turns a panel into what the lines of the others are."""
    for name, line, marker, face in (
        ("cross-validation (epoch 0: before training)", "-", "o", "0.4"),
        ("epoch that the schedule rejected", "none", "o", "white"),
        ("training, while the parameters changed", "-", "none", "0.4"),
    ):
        width = 0.8 if marker == "none" else 1.6
        axes.plot([], [], color="0.4", linestyle=line, linewidth=width, marker=marker, markerfacecolor=face, label=name)
    axes.legend(loc="center", frameon=False)
    axes.set_axis_off()


def panel_names(runs: Sequence[Run]) -> list[str]:
    """What learning curves show: the figures of cross-validation that are known, and the learning rate; as in `LABELS`."""
    recorded = dict.fromkeys(name for run in runs for row in run.metrics.cv for name in row.figures)
    return [*(recorded or [LOSS.name]), RATE]


def learning_points(run: Run, rows: Sequence[EpochRow], name: str) -> Points:
    """Epoch, seconds of training up to its end, the value and whether the epoch was accepted. Without a finite value, or
    where the seconds are not known, there is NaN, which is not drawn."""
    seconds = {0: 0.0} | dict(zip((row.epoch for row in run.metrics.train), training_seconds(run), strict=True))
    values = ({**row.figures, RATE: row.learning_rate or None}.get(name) for row in rows)
    points = [(row.epoch, seconds.get(row.epoch), y, row.accepted) for row, y in zip(rows, values, strict=True)]
    return np.array(points, np.float64).reshape(-1, 4)


def time_bars(runs: Sequence[Run]) -> tuple[list[str], Points]:
    """Percent of the time that each of `SHARE_COLORS` took, (shares, bars), and the names of the bars: of all workers of
    each run, or of each worker of a single run."""
    bars: dict[str, list[float]] = {}
    for run in runs:
        shares = [means_by_rank(run.metrics.workers, f"{name}_fraction") for name in SHARES]
        if len(runs) == 1:
            bars |= {f"worker {rank}": [share.get(rank, 0.0) for share in shares] for rank in shares[0]}
        elif run.metrics.workers:
            bars[run.name] = [fmean(share.values() or [0.0]) for share in shares]
    widths = 100.0 * np.array(list(bars.values())).reshape(-1, len(SHARES)).T
    return list(bars), np.vstack([widths, np.maximum(0.0, 100.0 - widths.sum(axis=0))])


def draw_time(runs: Sequence[Run], path: Path) -> Path:
    """Stacked bars of the fractions of time."""
    bars, widths = time_bars(runs)
    few = len(bars) <= MAX_NAMED_BARS
    plot = new_figure(11, max(2.8, 1.5 + 0.42 * min(len(bars), MAX_NAMED_BARS)))
    axes = plot.subplots()
    for name, width, left in zip(SHARE_COLORS, widths, widths.cumsum(axis=0) - widths, strict=True):
        if not width.any():
            continue
        drawn = axes.barh(range(len(bars)), width, 0.72 if few else 1.0, left, color=SHARE_COLORS[name], label=name)
        if few:  # numbers where there is room for them
            text = "white" if name == "compute" else "black"
            axes.bar_label(
                drawn, fmt=lambda value: f"{value:.1f}" if value >= 4.0 else "", label_type="center", color=text
            )
    tidy(axes, "Time of the workers (wait: for other workers)", "fraction of the training time (%)", "")
    axes.set_yticks(range(len(bars)), list(map(label, bars))) if few else axes.set_yticks([])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    legend_below(plot, axes)
    return save(plot, path)


def draw_consensus_distance(runs: Sequence[Run], path: Path) -> Path:
    """The relative distance of the workers' models from their mean, epoch by epoch; the band spans the workers."""
    plot = new_figure(9, 4.7)
    axes = plot.subplots()
    curves = []
    for number, run in enumerate(runs):
        by_epoch: defaultdict[int, list[float]] = defaultdict(list)
        for row in run.metrics.workers:
            if row.consensus_distance is not None:
                by_epoch[row.epoch].append(100.0 * row.consensus_distance)
        if by_epoch:
            points = np.array([(epoch, fmean(v), min(v), max(v)) for epoch, v in by_epoch.items()])
            curve(axes, points[:, :2], number, run.name)
            axes.fill_between(*points[:, [0, 2, 3]].T, color=style(number)[0], alpha=0.15, linewidth=0)
            curves.append(points[:, 1])
    clip_outliers(axes, curves, 10.0)
    title = "Consensus distance of the workers' models before an averaging (band: lowest to highest worker)"
    tidy(axes, title, "epoch", "distance from the mean model (% of its norm)")
    axes.locator_params(axis="x", integer=True)
    legend_below(plot, axes)
    return save(plot, path)


def draw_speeds(speeds: Sequence[tuple[str, int, float]], path: Path) -> Path:
    """Frames per second against the minibatch size, a curve for each name."""
    plot = new_figure(9, 5.0)
    axes = plot.subplots()
    for number, name in enumerate(dict.fromkeys(name for name, _, _ in speeds)):
        curve(axes, np.array(sorted(point for other, *point in speeds if other == name)), number, name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({size for _, size, _ in speeds}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0.0)
    tidy(axes, "Training speed", "frames in a minibatch", "frames/s")
    legend_below(plot, axes)
    return save(plot, path)
