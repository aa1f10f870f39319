"""The plots of `ddnn reproduce`: accuracies with the spread of the seeds, learning curves, speed-ups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import log2, nan
from pathlib import Path
from statistics import fmean

from ddnn.report.figures import (
    legend_below,
    new_figure,
    plot_speed_up,
    save,
    speed_up_panels,
    style,
    tidy,
)
from ddnn.reproduce.entries import SpeedUp, TableEntry, main_accuracy
from ddnn.reproduce.runs import Metric
from ddnn.reproduce.tables import ReproduceConfig, Table
from ddnn.util.text import plural

WIDTH = 11.0
FAILED = " Runs that failed are not shown."
OFFSET = 0.14  # distance of series beside each other, in conditions; along workers, in octaves
LINES = {
    "measured": ("-", "measured"),
    "predicted": (":", "predicted by the scaling model"),
    "paper": ("--", "the paper's, on GPUs"),
}
"""Kind of a speed-up -> its line and its name."""


@dataclass(frozen=True)
class Picture:
    """A plot: name of its PNG, what it shows for those who do not see it, its caption, what draws it to a path."""

    name: str
    alt: str
    caption: str
    draw: Callable[[Path], Path]


def table_pictures(
    config: ReproduceConfig, table: Table, entries: list[TableEntry], metrics: list[Metric], speeds: list[SpeedUp]
) -> list[Picture]:
    """The plots of a table, as far as there are figures for them."""
    title = f"{config.name}, {table.name}: {table.title}"
    if speeds:
        caption = "Speed-up over one worker against workers, both axes logarithmic, and speed-up divided by workers; "
        caption += "dashed: the paper's, gray: ideal."
        draw = partial(draw_speed_ups, title, speeds)
        return [Picture(f"{table.name}-speed.png", f"Plot, {title}: speed-up", caption, draw)]
    if table.kind == "speed":
        return []
    pictures = []
    shown = [main_accuracy(metrics), next((metric for metric in metrics if metric.kind == "words"), None)]
    if panels := [metric for metric in shown if metric is not None]:
        labels = " and ".join(metric.label for metric in panels)
        caption = f"{labels}: the mean over the seeds, each seed as a dot, a bar from the lowest to the highest. "
        caption += "Points that would cover each other are moved aside."
        caption += FAILED if any(entry.failed for entry in entries) else ""
        draw = partial(draw_accuracies, title, entries, panels)
        pictures.append(Picture(f"{table.name}.png", f"Plot, {title}: {labels}", caption, draw))
    ends = [entry for entry in entries if entry.workers in (1, config.max_workers)]
    if any(run.cv_by_epoch for entry in ends for run in entry.valid):
        caption = (
            "Frame accuracy on the cross-validation set after each epoch: the mean over the seeds and their range."
        )
        caption += FAILED if any(entry.failed for entry in ends) else ""
        draw = partial(draw_learning, title, ends)
        pictures.append(Picture(f"{table.name}-learning.png", f"Plot, {title}: learning curves", caption, draw))
    return pictures


def draw_accuracies(title: str, entries: Sequence[TableEntry], metrics: Sequence[Metric], path: Path) -> Path:
    """A panel for each metric: mean over the seeds, a bar from the lowest to the highest, a dot for each seed. Workers
    run along the axis, by their logarithm, if there are more than two sizes, else conditions do."""
    sizes = {str(entry.workers): log2(entry.workers) for entry in entries}
    conditions = list(dict.fromkeys(entry.condition.label for entry in entries))
    by_size = len(sizes) > 2
    ticks = sizes if by_size else {label: float(index) for index, label in enumerate(conditions)}
    series: defaultdict[str, list[tuple[str, TableEntry]]] = defaultdict(list)  # name -> ticks and entries
    for entry in entries:
        tick, name = entry.condition.label, plural(entry.workers, "worker")
        if by_size:
            tick, name = str(entry.workers), entry.condition.label
        series[name].append((tick, entry))
    x_label = "workers" if by_size else "condition" + (f", {next(iter(series))}" if len(series) == 1 else "")
    figure = new_figure(WIDTH, 4.8)
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        better = "lower" if metric.kind == "words" else "higher"
        tidy(axes, f"{_escape(metric.label)}: {better} is better", x_label, _escape(metric.title))
        for number, (name, own) in enumerate(series.items()):
            color, marker, _ = style(number)
            values = [list(entry.values(metric).values()) or [nan] for _, entry in own]
            xs = []
            for tick, _ in own:  # moved aside from the other series at this tick
                beside = [other for other, points in series.items() if any(tick == theirs for theirs, _ in points)]
                step = min(OFFSET, 0.7 / len(beside))
                xs.append(ticks[tick] + step * (beside.index(name) - (len(beside) - 1) / 2))
            line, means = "-" if by_size else "none", [fmean(seeds) for seeds in values]
            axes.plot(xs, means, linestyle=line, color=color, marker=marker, markersize=8, label=_escape(name))
            axes.vlines(xs, [min(seeds) for seeds in values], [max(seeds) for seeds in values], color=color)
            for x, (_, entry), seeds in zip(xs, own, values, strict=True):
                axes.plot(
                    [x] * len(seeds), seeds, "o", color="black", markersize=3.5, markeredgecolor="white", zorder=3
                )
                if entry.failed:
                    text = f"{len(entry.failed)} failed"
                    axes.annotate(
                        text, (x, 0.02), xycoords=("data", "axes fraction"), rotation=90, ha="center", color=color
                    )
        if any(entry.failed for entry in entries):
            low, high = axes.get_ylim()
            axes.set_ylim(low - 0.3 * (high - low), high)  # room for the text
        rotation, side = (20, "right") if sum(map(len, ticks)) > 40 else (0, "center")
        axes.set_xticks(list(ticks.values()), list(map(_escape, ticks)), rotation=rotation, ha=side)
        axes.set_xlim(-0.6, max(ticks.values()) + 0.6)
    figure.suptitle(f"{_escape(title)} (large: mean over the seeds; dots: seeds; bar: lowest to highest)", fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def draw_learning(title: str, entries: Sequence[TableEntry], path: Path) -> Path:
    """Cross-validation frame accuracy by epoch: a panel for each size, a curve for each condition (mean over seeds)."""
    sizes = list(dict.fromkeys(entry.workers for entry in entries))
    conditions = list(dict.fromkeys(entry.condition.label for entry in entries))
    figure = new_figure(WIDTH, 4.8)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        failed = []
        for entry in entries:
            if entry.workers == size:
                color, marker, line = style(conditions.index(entry.condition.label))
                curve = learning_curve(entry)
                epochs, means = list(curve), [fmean(seeds) for seeds in curve.values()]
                label = _escape(entry.condition.label)
                axes.plot(epochs, means, line, color=color, marker=marker, markersize=4, label=label)
                lowest, highest = ([extreme(seeds) for seeds in curve.values()] for extreme in (min, max))
                axes.fill_between(epochs, lowest, highest, color=color, alpha=0.15, linewidth=0)
                if entry.failed:
                    failed.append(f"{entry.condition.label} ({len(entry.failed)} of {len(entry.runs)})")
        name = plural(size, "worker") + (f"; failed: {', '.join(failed)}" if failed else "")
        tidy(axes, _escape(name), "epoch", "CV frame accuracy (%)" if size == sizes[0] else "")
        axes.locator_params(axis="x", integer=True)
    figure.suptitle(f"{_escape(title)}: learning curves (mean over the seeds; band: lowest to highest)", fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def learning_curve(entry: TableEntry) -> dict[int, list[float]]:
    """Epoch -> frame accuracies in percent, of the epochs that all valid runs have."""
    curves = [run.cv_by_epoch for run in entry.valid if run.cv_by_epoch]
    epochs = enumerate(zip(*curves, strict=False), 1)
    return {epoch: [100.0 * row.frame_accuracy for row in rows if row] for epoch, rows in epochs if all(rows)}


def draw_speed_ups(title: str, speeds: Sequence[SpeedUp], path: Path) -> Path:
    """Speed-up against workers, both logarithmic, and efficiency: the ideal, ours (measured or predicted), the paper's
    dashed."""
    conditions = list(dict.fromkeys(speed.label for speed in speeds))
    figure = new_figure(WIDTH, 5.6)
    powers = [2**q for q in range(max(speed.workers for speed in speeds).bit_length())]
    panels = speed_up_panels(figure, powers, powers, "ideal: as many times as workers")
    for kind, (line, name) in LINES.items():
        for number, label in enumerate(conditions):
            shown = [speed for speed in speeds if (speed.label, speed.kind) == (label, kind)]
            if max((speed.workers for speed in shown), default=1) > 1:
                if kind == "predicted":  # continues what was measured
                    shown += [speed for speed in speeds if (speed.label, speed.kind) == (label, "measured")]
                workers, values = zip(*sorted((speed.workers, speed.speed_up) for speed in shown), strict=True)
                color, marker, _ = style(number)
                fill, size = "white" if kind == "paper" else color, max(5, 12 - 4 * number)
                looks = {"color": color, "marker": marker, "markersize": size, "markerfacecolor": fill}
                plot_speed_up(panels, workers, values, line, **looks, label=f"{_escape(label)}: {name}")
    figure.suptitle(_escape(title), fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def _escape(text: str) -> str:
    """Text that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")
