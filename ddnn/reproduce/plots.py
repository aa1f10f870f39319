"""The plots of `ddnn reproduce`: accuracies against workers or settings, learning curves, speed-ups."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from ddnn.report.figures import COLOURS, MARKERS, legend_below, legend_height, new_figure, save, style, tidy
from ddnn.reproduce.cells import Cell, Measure, counted
from ddnn.reproduce.speed import SpeedUp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 11.0
APART = 0.14
"""Distance of series beside each other, in settings; along workers, in octaves."""
_KINDS = {
    "measured": ("-", True, "measured"),
    "predicted": (":", True, "predicted by the scaling model"),
    "paper": ("--", False, "the paper's, on GPUs"),
}
"""Kind of a speed-up -> its line, whether its markers are filled, its name."""


def draw_accuracies(title: str, cells: Sequence[Cell], shown: Sequence[Measure], path: Path) -> Path:
    """A panel for each measure: mean over the seeds, a bar from the lowest to the highest, a dot for each seed.

    Workers run along the axis where there are more than two sizes, else settings do.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    sizes = list(dict.fromkeys(cell.workers for cell in cells))
    rows = list(dict.fromkeys(cell.setting.label for cell in cells))
    by_size = len(sizes) > 2
    series = [_plain(row) for row in rows] if by_size else [counted(size, "worker") for size in sizes]
    figure = new_figure(WIDTH, 4.8 + legend_height(series, WIDTH))
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    for axes, measure in zip(panels, shown, strict=True):
        aside = _aside([cell.workers if by_size else cell.setting.label for cell in cells], cells, measure)
        for number, name in enumerate(series):
            if by_size:
                mine = [(c, c.workers * 2.0**moved) for c, moved in zip(cells, aside, strict=True)]
                mine = [(c, place) for c, place in mine if c.setting.label == rows[number]]
            else:
                mine = [(c, rows.index(c.setting.label) + moved) for c, moved in zip(cells, aside, strict=True)]
                mine = [(c, place) for c, place in mine if c.workers == sizes[number]]
            own, places = [cell for cell, _ in mine], [place for _, place in mine]
            _points(axes, places, own, measure, number, name, joined=by_size)
        better = "lower" if measure.kind == "words" else "higher"
        x = "workers" if by_size else f"setting, {series[0]}" if len(series) == 1 else "setting"
        tidy(axes, f"{_plain(measure.short)}: {better} is better", x, _plain(measure.title))
        if any(cell.failed for cell in cells):
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.3 * (high - low), high)  # room to say so
        _ticks(axes, sizes if by_size else [_plain(row) for row in rows])
    figure.suptitle(f"{_plain(title)} (large: mean over the seeds; dots: seeds; bar: lowest to highest)", fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def _aside(at: Sequence[object], cells: Sequence[Cell], measure: Measure) -> list[float]:
    """How far the points of each cell are moved aside, that all at one place may be seen; who is alone there is not.

    Args:
        at: place of each cell.
    """
    shown = [bool(cell.values(measure) or cell.failed) for cell in cells]
    found = []
    for number, place in enumerate(at):
        beside = [other for other, its in enumerate(at) if its == place and shown[other]]
        position = beside.index(number) if shown[number] else 0
        found.append(min(APART, 0.7 / max(1, len(beside))) * (position - (len(beside) - 1) / 2))
    return found


def _points(
    axes: Axes, places: Sequence[float], cells: Sequence[Cell], measure: Measure, number: int, name: str, joined: bool
) -> None:
    """One series, and below it how many of its runs diverged. A line ends where runs are missing."""
    colour, marker, _ = style(number)
    found = [(x, list(cell.values(measure).values())) for x, cell in zip(places, cells, strict=True)]
    found = [(x, values) for x, values in found if values]
    xs = [x for x, _ in found]
    means = [fmean(values) if values else nan for values in (list(cell.values(measure).values()) for cell in cells)]
    line = "-" if joined else "none"
    axes.plot(places, means, linestyle=line, color=colour, marker=marker, markersize=8, linewidth=1.2, label=name)
    axes.vlines(xs, [min(v) for _, v in found], [max(v) for _, v in found], color=colour, linewidth=1.6)
    dots = [(x, value) for x, values in found for value in values]
    axes.plot(*_columns(dots), linestyle="none", marker="o", markersize=3.5, color="black", markeredgecolor="white",
              markeredgewidth=0.5, zorder=3)  # fmt: skip
    for x, cell in zip(places, cells, strict=True):
        if cell.failed:
            axes.text(x, 0.02, f"{cell.failed} diverged", transform=axes.get_xaxis_transform(), rotation=90,
                      ha="center", va="bottom", fontsize=9, color=colour)  # fmt: skip


def _ticks(axes: Axes, names: Sequence[str] | Sequence[int]) -> None:
    """Workers on a logarithmic axis, or settings side by side."""
    sizes = [name for name in names if isinstance(name, int)]
    if sizes:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.tick_params(axis="x", which="minor", length=0)
        return
    words = [str(name) for name in names]
    slanted = sum(map(len, words)) > 40
    axes.set_xticks(range(len(words)), words, rotation=20 if slanted else 0, ha="right" if slanted else "center")
    axes.set_xlim(-0.6, len(words) - 0.4)


def draw_learning(title: str, cells: Sequence[Cell], path: Path) -> Path:
    """Cross-validation frame accuracy by epoch: a panel for each size, a curve for each setting (mean over the seeds).

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    sizes = list(dict.fromkeys(cell.workers for cell in cells))
    rows = list(dict.fromkeys(cell.setting.label for cell in cells))
    figure = new_figure(WIDTH, 4.8 + legend_height(rows, WIDTH))
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        for number, row in enumerate(rows):
            colour, marker, line = style(number)
            curves = [_curve(c) for c in cells if (c.workers, c.setting.label) == (size, row)]
            points = curves[0] if curves else []
            epochs = [epoch for epoch, _ in points]
            means = [fmean(values) for _, values in points]
            axes.plot(epochs, means, line, color=colour, marker=marker, markersize=4, linewidth=1.5, label=_plain(row))
            lowest, highest = ([of(values) for _, values in points] for of in (min, max))
            axes.fill_between(epochs, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        tidy(axes, counted(size, "worker"), "epoch", "CV frame accuracy (%)" if size == sizes[0] else "")
        axes.locator_params(axis="x", integer=True)
    figure.suptitle(f"{_plain(title)}: learning curves (mean over the seeds; band: lowest to highest)", fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def _curve(cell: Cell) -> list[tuple[int, list[float]]]:
    """Epoch -> frame accuracies in percent, of the epochs that all sound runs have."""
    runs = [run.cv_by_epoch for run in cell.sound if run.cv_by_epoch]
    points = []
    for epoch, figures in enumerate(zip(*runs, strict=False), 1):
        values = [100.0 * figure.frame_accuracy for figure in figures if figure is not None]
        if len(values) == len(figures):
            points.append((epoch, values))
    return points


def draw_speed_ups(title: str, speeds: Sequence[SpeedUp], path: Path) -> Path:
    """Speed-up against workers, both logarithmic: the ideal, ours (measured or predicted), the paper's dashed.

    Raises:
        UserError: matplotlib is missing, or the file cannot be written.
    """
    figure = new_figure(8.5, 7.2)
    axes = figure.subplots()
    largest = max([speed.workers for speed in speeds], default=1)
    powers = [2**q for q in range(largest.bit_length())]
    axes.plot(powers, powers, color="0.6", linewidth=1.2, label="ideal: as many times as workers")
    settings = list(dict.fromkeys(speed.setting for speed in speeds))
    for kind, (line, filled, words) in _KINDS.items():
        for number, setting in enumerate(settings):
            own = sorted((s for s in speeds if (s.setting, s.kind) == (setting, kind)), key=lambda s: s.workers)
            if not own or own[-1].workers == 1:
                continue
            ours = [s for s in speeds if (s.setting, s.kind) == (setting, "measured") and s.workers < own[0].workers]
            start = sorted(ours, key=lambda s: s.workers)[-1:]
            points = [(s.workers, s.speed_up) for s in (*start, *own)]
            colour = COLOURS[number % len(COLOURS)]
            axes.plot(*_columns(points), line, color=colour, marker=MARKERS[number % len(MARKERS)],
                      markersize=max(5, 12 - 4 * number),  # those of several that are as fast lie in each other
                      markerfacecolor=colour if filled else "white", markevery=range(len(start), len(points)),
                      linewidth=1.6, label=f"{_plain(own[0].label)}: {words}")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(powers)
        axis.set_major_formatter("{x:g}")
        axis.set_tick_params(which="minor", length=0)
    tidy(axes, _plain(title), "workers", "speed-up over one worker (times)")
    legend_below(figure, axes)
    return save(figure, path)


def _plain(text: str) -> str:
    """Text that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
