"""Plots: what all of them share (matplotlib without a display, colors, labels, files written atomically), and those of
`ddnn report`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from ddnn.report.runs import SHARES, Run, consensus_distances, share, shares_by_rank, training_seconds
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_write, ensure_directory

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import XAxis, YAxis
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


def log2_axis(axis: XAxis | YAxis, ticks: Sequence[int]) -> None:
    set_scale = axis.axes.set_xscale if axis.axis_name == "x" else axis.axes.set_yscale
    set_scale("log", base=2)
    axis.set_ticks(ticks)
    axis.set_major_formatter("{x:g}")
    axis.set_tick_params(which="minor", length=0)


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


def draw_learning(runs: Sequence[Run], path: Path) -> Path:
    """Cross-validation loss, frame accuracy and the applied learning rate against epochs and against time; rejected
    epochs are hollow."""
    figure = new_figure(11, min(10.0 + legend_height([run.name for run in runs], 11), 16.0))
    panels = figure.subplots(3, 2, sharey="row", sharex="col")
    for number, run in enumerate(runs):
        until = dict(zip((row.epoch for row in run.metrics.train), training_seconds(run), strict=True))
        until[0] = 0.0
        for row, (name, factor) in enumerate((("loss", 1.0), ("frame_accuracy", 100.0))):
            # Epoch 0, the network before training, would take most of the loss's axis.
            shown = [cv for cv in run.metrics.cv if cv.epoch > 0] or run.metrics.cv
            known = [
                (cv.epoch, factor * getattr(cv, name), cv.accepted) for cv in shown if getattr(cv, name) is not None
            ]
            _curve(panels[row][0], known, number, label(run.name))
            timed = [(until[epoch], value, ok) for epoch, value, ok in known if epoch in until]
            _curve(panels[row][1], timed, number, label(run.name))
        rates = [(row.epoch, row.learning_rate or 0.0, row.accepted) for row in run.metrics.train]
        rates = [point for point in rates if point[1] > 0.0]
        _curve(panels[2][0], rates, number, label(run.name))
        _curve(panels[2][1], [(until[epoch], rate, ok) for epoch, rate, ok in rates], number, label(run.name))
    for column, (against, unit) in enumerate((("epoch", "epoch"), ("training time", "training time (seconds)"))):
        names = ("loss per frame (nats)", "frame accuracy (%)", "learning rate, as applied (log scale)")
        loss, accuracy, rate = ("", "", "") if column else names
        tidy(panels[0][column], f"Cross-validation loss by {against}", "", loss)
        tidy(panels[1][column], f"Cross-validation frame accuracy by {against}", "", accuracy)
        tidy(panels[2][column], f"Applied learning rate by {against}", unit, rate)
        panels[2][column].set_yscale("log")
    panels[2][0].locator_params(axis="x", integer=True)
    panels[2][1].set_xlim(left=0.0)
    heading = [label(runs[0].name)] if len(runs) == 1 else []
    if any(not cv.accepted for run in runs for cv in run.metrics.cv):
        heading.append("hollow: epoch rejected by the schedule")
    if heading:
        figure.suptitle(", ".join(heading), fontsize=10, color="0.25")
    legend_below(figure, panels[0][0])
    return save(figure, path)


def _curve(axes: Axes, points: Sequence[tuple[float, float, bool]], number: int, name: str) -> None:
    colour, marker, line = style(number)
    x, y, accepted = np.array(points, np.float64).reshape(-1, 3).T
    kept, rejected = accepted == 1.0, accepted == 0.0
    axes.plot(x[kept], y[kept], line, color=colour, marker=marker, markersize=5, linewidth=1.6, label=name)
    axes.plot(x[rejected], y[rejected], marker, color=colour, markersize=5, markerfacecolor="white")


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
    for number, run, found in shown:
        colour, marker, line = style(number)
        epochs = [epoch for epoch, _ in found]
        means = [100.0 * fmean(values) for _, values in found]
        axes.plot(epochs, means, line, color=colour, marker=marker, markersize=5, linewidth=1.6, label=label(run.name))
        lowest, highest = ([100.0 * of(values) for _, values in found] for of in (min, max))
        axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.15, linewidth=0)
    title = "Consensus distance of the workers' models before an averaging (band: lowest to highest worker)"
    if len(shown) == 1:
        title = f"{title}\n{label(shown[0][1].name)}"
    tidy(axes, title, "epoch", "distance from the mean model (% of its norm)")
    axes.locator_params(axis="x", integer=True)
    axes.set_ylim(bottom=0.0)
    legend_below(figure, axes)
    return save(figure, path)
