"""Plots: what all of them share (matplotlib without a display, colors, labels, files written atomically), and those of
`ddnn report`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddnn.report.runs import SHARES, Run, consensus_distances, share, shares_by_rank, training_seconds
from ddnn.runs.metrics import EpochRow
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_write, ensure_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")
"""Okabe and Ito's, which colour-blind readers tell apart; yellow, which is faint on white, gives way to brown."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
LINES = ("-", "--", ":", "-.")
DPI = 120
LONGEST_LABEL = 40


def new_figure(width: float, height: float) -> Figure:
    """A figure of so many inches, of no window and no global state. UserError: matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        message = f"plots need the package matplotlib, which cannot be imported: {error}"
        raise UserError(message, hint="pip install 'ddnn[report]', or --no-plots") from error
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(number: int) -> tuple[str, str, str]:
    """Colour, marker and line of the curve with this number: they repeat only after 32."""
    return COLOURS[number % 8], MARKERS[number % 8], LINES[number // 8 % 4]


def label(name: str) -> str:
    """A name that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    short = name if len(name) <= LONGEST_LABEL else f"...{name[3 - LONGEST_LABEL :]}"
    return (" " if short.startswith("_") else "") + short.replace("$", r"\$")


def tidy(axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels of the axes with their units, a faint grid behind the curves."""
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, color="0.88", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def speed_up_panels(figure: Figure, sizes: Sequence[int], ticks: Sequence[int], ideal: str) -> tuple[Axes, Axes]:
    """Two panels for `plot_speed_up`, by numbers of workers: speed-up, both axes logarithmic, and efficiency; with the
    ideal, which the legend calls so."""
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


def legend_height(names: Sequence[str], width: float) -> float:
    """Inches that the legend of these curves takes under a figure of `width` inches."""
    return 0.22 * math.ceil(len(names) / _legend_columns(list(map(label, names)), width))


def legend_below(figure: Figure, axes: Axes) -> None:
    """One legend under all panels, of the curves in `axes`."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = _legend_columns(labels, figure.get_figwidth())
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def _legend_columns(labels: Sequence[str], width: float) -> int:
    return max(1, min(len(labels), int(12 * width / (max(map(len, labels), default=0) + 6))))


def save(figure: Figure, path: Path) -> Path:
    """Writes a PNG, whole or not at all; makes its folder. UserError: it cannot be written."""
    ensure_directory(path.parent)
    with atomic_write(path) as handle, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # a run's name in a script that the font lacks: boxes will do
        figure.savefig(handle, format="png")
    return path


LEARNING, TIME, CONSENSUS = "learning.png", "time.png", "consensus-distance.png"
_COLOURS = {"compute": "#0072B2", "data": "#56B4E9", "comm": "#D55E00", "wait": "#E69F00", "other": "0.8"}
ARROW = "\N{UPWARDS ARROW}"
_MANY_BARS = 30  # if there are more bars than this, they have no names


def draw_report(runs: Sequence[Run], out: Path) -> tuple[Path, ...]:
    """Draws the plots for which the runs have data into PNG files in `out`; returns those that were written. UserError:
    matplotlib is missing, or a file cannot be written."""
    drawn = [draw_learning(runs, out / LEARNING)]
    if any(run.metrics.workers for run in runs):
        drawn.append(draw_time(runs, out / TIME))
    if any(consensus_distances(run) for run in runs):
        drawn.append(draw_consensus_distance(runs, out / CONSENSUS))
    return tuple(drawn)


Point = tuple[float, float, bool]  # epoch or seconds, value (inf: not finite), whether the epoch was accepted


def highest_shown(series: Sequence[Sequence[float]], factor: float) -> float:
    """Up to which value an axis shows these curves, so that one that diverged does not flatten the others: `factor`
    times the largest median of a curve whose lowest value is not more than `factor` times that of a typical one."""
    known = [sorted(values) for values in series if any(map(math.isfinite, values))]
    if not known:
        return math.inf
    typical = sorted(values[0] for values in known)[(len(known) - 1) // 2]
    usual = [values[(len(values) - 1) // 2] for values in known if values[0] <= factor * typical]
    limit = factor * max((value for value in usual if math.isfinite(value)), default=0.0)
    return limit if limit > 0.0 else math.inf


def draw_learning(runs: Sequence[Run], path: Path) -> Path:
    """Cross-validation loss and frame accuracy, those of training as thin lines, and the applied learning rate against
    epochs and against time; rejected epochs are hollow. Values far above those of the other runs are arrows at the edge."""
    figure = new_figure(11, min(10.0 + legend_height([run.name for run in runs], 11), 16.0))
    panels = figure.subplots(3, 2, sharey="row", sharex="col")
    for row, (field, factor) in enumerate((("loss", 5.0), ("frame_accuracy", None), ("learning_rate", 1e4))):
        curves = [_learning_curves(run, field) for run in runs]
        trained = [[y for x, y, _ in cv if x > 0.0] or [y for _, y, _ in cv] for cv, _ in curves]
        limit = math.inf if factor is None else highest_shown(trained, factor)
        for number, (run, (cv, train)) in enumerate(zip(runs, curves, strict=True)):
            ends = dict(zip((float(one.epoch) for one in run.metrics.train), training_seconds(run), strict=True))
            for column, places in enumerate(({epoch: epoch for epoch, _, _ in (*cv, *train)}, {0.0: 0.0, **ends})):
                thick, thin = ([(places[x], y, ok) for x, y, ok in points if x in places] for points in (cv, train))
                _curve(panels[row][column], thick, number, label(run.name), limit)
                colour, _, line = style(number)
                x, y, _ = _inside(thin, limit).T
                panels[row][column].plot(x, y, line, color=colour, linewidth=0.8, alpha=0.7)
    _label_learning(figure, panels, runs)
    legend_below(figure, panels[0][0])
    return save(figure, path)


def _learning_curves(run: Run, field: str) -> tuple[list[Point], list[Point]]:
    """The points of cross-validation and of training, in epochs; those of the learning rate are all in the first."""
    percent = 100.0 if field == "frame_accuracy" else 1.0

    def points(rows: Sequence[EpochRow]) -> list[Point]:
        missing = math.inf if field == "loss" else None  # a loss that is null was not finite
        values = [(row, missing if getattr(row, field) is None else getattr(row, field)) for row in rows]
        return [(float(row.epoch), percent * value, row.accepted) for row, value in values if value is not None]

    if field == "learning_rate":
        return [point for point in points(run.metrics.train) if point[1] > 0.0], []
    return points(run.metrics.cv), points(run.metrics.train)


def _label_learning(figure: Figure, panels: Any, runs: Sequence[Run]) -> None:
    for column, (against, unit) in enumerate((("epoch", "epoch"), ("training time", "training time (seconds)"))):
        names = ("loss per frame (nats)", "frame accuracy (%)", "learning rate, as applied (log scale)")
        loss, accuracy, rate = ("", "", "") if column else names
        tidy(panels[0][column], f"Loss by {against}", "", loss)
        tidy(panels[1][column], f"Frame accuracy by {against}", "", accuracy)
        tidy(panels[2][column], f"Applied learning rate by {against}", unit, rate)
        panels[2][column].set_yscale("log")
    panels[2][0].locator_params(axis="x", integer=True)
    for axes in panels[2]:
        axes.set_xlim(left=-0.02 * axes.get_xlim()[1])
    heading = [label(runs[0].name)] if len(runs) == 1 else []
    heading.append("markers: cross-validation (epoch 0: before training), thin lines: training")
    if any(not cv.accepted for run in runs for cv in run.metrics.cv):
        heading.append("hollow: epoch rejected by the schedule")
    if any(line.get_gid() == ARROW for panel in panels.flat for line in panel.lines):
        heading.append(f"{ARROW}: beyond the axis, or not finite")
    figure.suptitle(", ".join(heading), fontsize=10, color="0.25")


def _curve(axes: Axes, points: Sequence[Point], number: int, name: str, limit: float) -> None:
    """Arrows at the upper edge stand for the values above `limit`. A first point before training, at 0, may double the
    range of the other epochs. If it is farther away, its line leaves the axes: the others would be one flat line."""
    from matplotlib.lines import Line2D

    colour, marker, line = style(number)
    beyond = [x for x, y, _ in points if y > limit or math.isinf(y)]
    if beyond:
        edge = axes.get_xaxis_transform()
        axes.plot(beyond, [0.97] * len(beyond), linestyle="none", color=colour, transform=edge, marker=r"$\uparrow$",
                  markersize=9, gid=ARROW)  # fmt: skip
    x, y, accepted = _inside(points, limit).T
    kept, rejected = accepted == 1.0, accepted == 0.0
    x_kept, y_kept = x[kept], y[kept]
    before = int(len(x_kept) > 1 and x_kept[0] == 0.0 and np.ptp(y_kept) > 2.0 * np.ptp(y_kept[1:]))
    drawn: dict[str, Any] = {"color": colour, "marker": marker, "markersize": 5, "linestyle": line, "linewidth": 1.6}
    axes.plot(x_kept[before:], y_kept[before:], label=name, **drawn)
    if before:
        axes.add_artist(Line2D(x_kept[:2], y_kept[:2], **drawn))
    axes.plot(x[rejected], y[rejected], marker, color=colour, markersize=5, markerfacecolor="white")


def _inside(points: Sequence[Point], limit: float) -> NDArray[np.float64]:
    """(points, 3): those that an axis up to `limit` shows."""
    inside = [point for point in points if math.isfinite(point[1]) and point[1] <= limit]
    return np.array(inside, np.float64).reshape(-1, 3)


def draw_time(runs: Sequence[Run], path: Path) -> Path:
    """Stacked bars of the fractions of time: for all workers of each run, or for each worker of a single run."""
    bars = _bars(runs)
    few = len(bars) <= _MANY_BARS
    figure = new_figure(11, max(2.8, 1.5 + 0.42 * len(bars)) if few else 9.0)
    axes = figure.subplots()
    left = np.zeros(len(bars))
    for name in (*SHARES, "other"):
        widths = np.array([100.0 * shares[name] for _, shares in bars])
        colour, message = _COLOURS[name], "waiting for other workers" if name == "wait" else name
        if few:
            drawn = axes.barh(range(len(bars)), widths, 0.72, left, color=colour, edgecolor="white", label=message)
            ink = "white" if name in ("compute", "comm") else "black"
            numbers = [f"{width:.1f}" if width >= 4.0 else "" for width in widths]  # where there is room for them
            axes.bar_label(drawn, numbers, label_type="center", color=ink, fontsize=9)
        else:
            span = left, left + widths
            axes.fill_betweenx(range(len(bars)), *span, step="mid", color=colour, linewidth=0, label=message)
        left = left + widths
    single = len(runs) == 1
    title = f"Time of each worker: {label(runs[0].name)}" if single else "Time of the workers"
    tidy(axes, title, "fraction of the training time (%)", "worker (rank)" if single else "")
    if few:
        axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(0.0, max(100.0, *left))
    legend_below(figure, axes)
    return save(figure, path)


def _bars(runs: Sequence[Run]) -> list[tuple[str, dict[str, float]]]:
    """Name of each bar and its fractions; `other` is the remainder."""
    if len(runs) == 1:
        by_name = {name: shares_by_rank(runs[0], name) for name in SHARES}
        bars = [(str(rank), {name: by_name[name][rank] or 0.0 for name in SHARES}) for rank in by_name["compute"]]
    else:
        means = [(run, {name: share(run, name) for name in SHARES}) for run in runs if run.metrics.workers]
        bars = [(label(r.name), {name: s.mean if s else 0.0 for name, s in shares.items()}) for r, shares in means]
    return [(name, {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}) for name, shares in bars]


def draw_consensus_distance(runs: Sequence[Run], path: Path) -> Path:
    """The relative distance of the workers' models from their mean, epoch by epoch; the band spans the workers."""
    figure = new_figure(9, min(4.7 + legend_height([run.name for run in runs], 9), 16.0))
    axes = figure.subplots()
    shown = [(number, run, found) for number, run in enumerate(runs) if (found := consensus_distances(run))]
    curves = [[(float(epoch), 100.0 * fmean(values), True) for epoch, values in found] for _, _, found in shown]
    limit = highest_shown([[mean for _, mean, _ in curve] for curve in curves], 10.0)
    for (number, run, found), curve in zip(shown, curves, strict=True):
        _curve(axes, curve, number, label(run.name), limit)
        band = [(epoch, 100.0 * min(values), 100.0 * max(values)) for epoch, values in found]
        epochs, lowest, highest = np.array([b for b in band if b[2] <= limit], np.float64).reshape(-1, 3).T
        axes.fill_between(epochs, lowest, highest, color=style(number)[0], alpha=0.15, linewidth=0)
    title = "Consensus distance of the workers' models before an averaging (band: lowest to highest worker)"
    if len(shown) == 1:
        title = f"{title}\n{label(shown[0][1].name)}"
    if any(line.get_gid() == ARROW for line in axes.lines):
        title = f"{title}\n{ARROW}: beyond the axis"
    tidy(axes, title, "epoch", "distance from the mean model (% of its norm)")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0.0)
    legend_below(figure, axes)
    return save(figure, path)


def draw_speeds(speeds: Sequence[tuple[str, int, float]], path: Path) -> Path:
    """Frames per second against the minibatch size, a curve for each name."""
    names = list(dict.fromkeys(name for name, _, _ in speeds))
    figure = new_figure(9, 5.0 + legend_height(names, 9))
    axes = figure.subplots()
    for number, name in enumerate(names):
        points = sorted((float(size), speed, True) for of, size, speed in speeds if of == name)
        _curve(axes, points, number, label(name), math.inf)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({size for _, size, _ in speeds}))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylim(bottom=0.0)
    tidy(axes, "Training speed", "frames in a minibatch", "frames/s")
    legend_below(figure, axes)
    return save(figure, path)
