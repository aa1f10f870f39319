"""The plots of `ddnn reproduce`: accuracies against workers or conditions, learning curves, speed-ups.

All raise UserError where matplotlib is missing, or the file cannot be written."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ddnn.report.figures import legend_below, legend_height, log2_axes, new_figure, save, style, tidy
from ddnn.reproduce.cells import Cell, Metric, SpeedUp
from ddnn.util.text import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 11.0
OFFSET = 0.14
"""Distance of series beside each other, in conditions; along workers, in octaves."""
_KINDS = {
    "measured": ("-", True, "measured"),
    "predicted": (":", True, "predicted by the scaling model"),
    "paper": ("--", False, "the paper's, on GPUs"),
}
"""Kind of a speed-up -> its line, whether its markers are filled, its name."""


def draw_accuracies(title: str, cells: Sequence[Cell], metrics: Sequence[Metric], path: Path) -> Path:
    """A panel for each metric: mean over the seeds, a bar from the lowest to the highest, a dot for each seed.

    Workers run along the axis where there are more than two sizes, else conditions do.
    """
    sizes = list(dict.fromkeys(cell.workers for cell in cells))
    labels = list(dict.fromkeys(cell.condition.label for cell in cells))
    by_size = len(sizes) > 2
    names = [cell.condition.label if by_size else plural(cell.workers, "worker") for cell in cells]
    series = list(dict.fromkeys(names))
    figure = new_figure(WIDTH, 4.8 + legend_height(series, WIDTH))
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        positions = [cell.workers if by_size else labels.index(cell.condition.label) for cell in cells]
        offsets = _offsets(positions, cells, metric)
        xs = [at * 2.0**by if by_size else at + by for at, by in zip(positions, offsets, strict=True)]
        for number, name in enumerate(series):
            points = [(cell, x) for cell, x, own in zip(cells, xs, names, strict=True) if own == name]
            _draw_series(axes, points, metric, number, _escape(name), joined=by_size)
        better = "lower" if metric.lower_is_better else "higher"
        x_label = "workers" if by_size else f"condition, {series[0]}" if len(series) == 1 else "condition"
        tidy(axes, f"{_escape(metric.label)}: {better} is better", x_label, _escape(metric.title))
        if any(cell.num_diverged for cell in cells):
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.3 * (high - low), high)  # room for the text
        if by_size:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes)
            axes.xaxis.set_major_formatter("{x:g}")
            axes.tick_params(axis="x", which="minor", length=0)
        else:
            rotation, side = (20, "right") if sum(map(len, labels)) > 40 else (0, "center")
            axes.set_xticks(range(len(labels)), list(map(_escape, labels)), rotation=rotation, ha=side)
            axes.set_xlim(-0.6, len(labels) - 0.4)
    figure.suptitle(f"{_escape(title)} (large: mean over the seeds; dots: seeds; bar: lowest to highest)", fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def _offsets(positions: Sequence[object], cells: Sequence[Cell], metric: Metric) -> list[float]:
    """How far each cell's points are moved aside, so that all at one position are visible."""
    shown = [bool(cell.values(metric) or cell.num_diverged) for cell in cells]
    offsets = []
    for number, position in enumerate(positions):
        beside = [other for other, its in enumerate(positions) if its == position and shown[other]]
        index = beside.index(number) if shown[number] else 0
        offsets.append(min(OFFSET, 0.7 / max(1, len(beside))) * (index - (len(beside) - 1) / 2))
    return offsets


def _draw_series(
    axes: Axes, points: Sequence[tuple[Cell, float]], metric: Metric, number: int, name: str, joined: bool
) -> None:
    """One series, and below it how many of its runs diverged. A line ends where runs are missing."""
    color, marker, _ = style(number)
    values = [(x, list(cell.values(metric).values())) for cell, x in points]
    means = [fmean(v) if v else nan for _, v in values]
    line = "-" if joined else "none"
    axes.plot([x for x, _ in values], means, linestyle=line, color=color, marker=marker, markersize=8, linewidth=1.2,
              label=name)  # fmt: skip
    values = [(x, v) for x, v in values if v]
    axes.vlines([x for x, _ in values], [min(v) for _, v in values], [max(v) for _, v in values], color=color,
                linewidth=1.6)  # fmt: skip
    dots = [(x, value) for x, v in values for value in v]
    axes.plot([x for x, _ in dots], [y for _, y in dots], linestyle="none", marker="o", markersize=3.5, color="black",
              markeredgecolor="white", markeredgewidth=0.5, zorder=3)  # fmt: skip
    for cell, x in points:
        if cell.num_diverged:
            axes.text(x, 0.02, f"{cell.num_diverged} diverged", transform=axes.get_xaxis_transform(), rotation=90,
                      ha="center", va="bottom", fontsize=9, color=color)  # fmt: skip


def draw_learning(title: str, cells: Sequence[Cell], path: Path) -> Path:
    """Cross-validation frame accuracy by epoch: a panel for each size, a curve for each condition (mean over seeds)."""
    sizes = list(dict.fromkeys(cell.workers for cell in cells))
    labels = list(dict.fromkeys(cell.condition.label for cell in cells))
    figure = new_figure(WIDTH, 4.8 + legend_height(labels, WIDTH))
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        for number, label in enumerate(labels):
            color, marker, line = style(number)
            curves = [_learning_curve(c) for c in cells if (c.workers, c.condition.label) == (size, label)]
            points = curves[0] if curves else []
            epochs, means = [epoch for epoch, _ in points], [fmean(values) for _, values in points]
            name = _escape(label)
            axes.plot(epochs, means, line, color=color, marker=marker, markersize=4, linewidth=1.5, label=name)
            lowest, highest = ([extreme(values) for _, values in points] for extreme in (min, max))
            axes.fill_between(epochs, lowest, highest, color=color, alpha=0.15, linewidth=0)
        tidy(axes, plural(size, "worker"), "epoch", "CV frame accuracy (%)" if size == sizes[0] else "")
        axes.locator_params(axis="x", integer=True)
    figure.suptitle(f"{_escape(title)}: learning curves (mean over the seeds; band: lowest to highest)", fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def _learning_curve(cell: Cell) -> list[tuple[int, list[float]]]:
    """Epoch -> frame accuracies in percent, of the epochs that all valid runs have."""
    runs = [run.cv_by_epoch for run in cell.valid if run.cv_by_epoch]
    points = []
    for epoch, metrics in enumerate(zip(*runs, strict=False), 1):
        values = [100.0 * by_run.frame_accuracy for by_run in metrics if by_run is not None]
        if len(values) == len(metrics):
            points.append((epoch, values))
    return points


def draw_speed_ups(title: str, speeds: Sequence[SpeedUp], path: Path) -> Path:
    """Speed-up against workers, both logarithmic: the ideal, ours (measured or predicted), the paper's dashed."""
    figure = new_figure(8.5, 7.2)
    axes = figure.subplots()
    powers = [2**q for q in range(max([speed.workers for speed in speeds], default=1).bit_length())]
    axes.plot(powers, powers, color="0.6", linewidth=1.2, label="ideal: as many times as workers")
    conditions = list(dict.fromkeys(speed.condition for speed in speeds))
    by_size = sorted(speeds, key=lambda speed: speed.workers)
    for kind, (line, filled, words) in _KINDS.items():
        for number, condition in enumerate(conditions):
            own = [s for s in by_size if (s.condition, s.kind) == (condition, kind)]
            if not own or own[-1].workers == 1:
                continue
            measured = [s for s in by_size if (s.condition, s.kind) == (condition, "measured")]
            start = [s for s in measured if s.workers < own[0].workers][-1:]
            points = [*start, *own]
            color, marker, _ = style(number)
            axes.plot([s.workers for s in points], [s.speed_up for s in points], line, color=color, marker=marker,
                      markersize=max(5, 12 - 4 * number),  # equally fast ones appear inside each other
                      markerfacecolor=color if filled else "white", markevery=range(len(start), len(points)),
                      linewidth=1.6, label=f"{_escape(own[0].label)}: {words}")  # fmt: skip
    log2_axes(axes, powers)
    tidy(axes, _escape(title), "workers", "speed-up over one worker (times)")
    legend_below(figure, axes)
    return save(figure, path)


def _escape(text: str) -> str:
    """Text that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
