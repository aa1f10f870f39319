"""The plots of `ddnn reproduce`, as SVG whose texts are text: all hypotheses, accuracies with the spread of the seeds,
learning curves, speed-ups."""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from ddnn.report.figures import (
    COLORS,
    MARKERS,
    label,
    legend_below,
    new_figure,
    plot_speed_up,
    speed_up_panels,
    style,
    tidy,
)
from ddnn.reproduce.clusters import CLUSTERS, Cost
from ddnn.reproduce.comparison import HypothesisResult, VerdictName
from ddnn.reproduce.entries import SpeedUp, TableEntry, main_accuracy
from ddnn.reproduce.runs import CV_ACCURACY, WER
from ddnn.reproduce.tables import BASE, ReproduceConfig, Table
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import plural

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Plot

FOREST = "summary.svg"
VERDICT_COLORS: dict[VerdictName, str] = {
    "confirmed": COLORS[2],
    "contradicted": COLORS[1],
    "not tested": "#888888",
    "not comparable": "#888888",
}
UNDECIDED = COLORS[0]  # of any other verdict
DARK = (
    "svg{color:#1f2328;--back:#fff}svg text{fill:currentColor}"
    "@media(prefers-color-scheme:dark){svg{color:#e6edf3;--back:#0d1117;filter:brightness(1.3)}}"
)
"""What makes an SVG file readable on a dark page; the colors are those of page.css."""
WIDTH = 11.0
LINES = {
    "measured": ("-", "measured"),
    "predicted": (":", "predicted by the scaling model"),
    "paper": ("--", "the paper's, on GPUs"),
}
"""Kind of a speed-up -> its line and its name."""


def table_pictures(
    config: ReproduceConfig,
    table: Table,
    entries: list[TableEntry],
    metrics: list[str],
    speeds: list[SpeedUp],
    known_costs: Sequence[Cost] = (),
) -> Mapping[str, Callable[[Path], Path]]:
    """The plots of a table, as far as there are figures for them: names of SVG files, and what draws them to a path."""
    title, pictures = f"{config.name}, {table.name}: {table.title}", dict[str, Callable[[Path], Path]]()
    if table.kind == "speed":
        return {f"{table.name}-speed.svg": partial(draw_speed_ups, title, speeds)} if speeds else {}
    shown = [main_accuracy(metrics), next((metric for metric in metrics if metric.endswith(WER)), None)]
    if panels := list(filter(None, shown)):
        pictures[f"{table.name}.svg"] = partial(draw_accuracies, title, entries, panels)
    if known_costs:
        pictures[f"{table.name}-costs.svg"] = partial(draw_costs, title, known_costs, panels[0])
    ends = [entry for entry in entries if entry.workers in (1, config.max_workers)]
    if any(run.cv_by_epoch for entry in ends for run in entry.valid):
        pictures[f"{table.name}-learning.svg"] = partial(draw_learning, title, ends)
    return pictures


def draw_costs(title: str, results: Sequence[Cost], metric: str, path: Path) -> Path:
    """Accuracy against what a training costs: a panel for the bytes that a worker sends and for the time on each cluster, a curve for
    each condition through its numbers of workers; the base on one worker, which sends nothing, is a line."""
    from matplotlib.ticker import LogLocator, NullFormatter

    conditions = list(dict.fromkeys(cost.entry.condition.label for cost in results if cost.entry.workers > 1))
    values: dict[str, Callable[[Cost], float]] = {"GB sent by a worker": lambda cost: cost.gigabytes}
    values |= {f"seconds: {name}": (lambda cost, name=name: cost.seconds[name]) for name in CLUSTERS}  # type: ignore[misc]
    figure = new_figure(WIDTH, 7.4)
    *panels, unused = figure.subplots(2, 3, sharey=True).flat
    unused.set_axis_off()
    for axes, (name, value) in zip(panels, values.items(), strict=True):
        tidy(axes, name, "", f"{label(metric)} (%)")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(NullFormatter())
        for cost in results:
            if (cost.entry.condition.name, cost.entry.workers) == (BASE, 1):
                axes.axhline(cost.accuracy, color="0.6", linewidth=1.2)
        for number, condition in enumerate(conditions):
            own = [cost for cost in results if cost.entry.condition.label == condition and cost.entry.workers > 1]
            color, marker, line = style(number)
            fill = "white" if number >= len(COLORS) else color  # where colors and markers repeat
            looks = {"color": color, "marker": marker, "markerfacecolor": fill}
            axes.plot([], [], line, **looks, label=condition)
            axes.plot([value(cost) for cost in own], [cost.accuracy for cost in own], line, color=color)
            for cost in own:  # larger: more workers
                size = 2.0 + 1.6 * cost.entry.workers.bit_length()
                axes.plot(value(cost), cost.accuracy, **looks, markersize=size)
    figure.suptitle(f"{title} (larger markers: more workers; gray: the base on one worker)", fontsize=12)
    legend_below(figure, panels[0])
    return save_svg(figure, path)


def save_svg(figure: Plot, path: Path) -> Path:
    """Writes an SVG, the same of the same figures: transparent, black is the text's color and white that of the page.
    UserError: it cannot be written."""
    import matplotlib

    ensure_directory(path.parent)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ddnn"}):
        figure.savefig(drawn := io.StringIO(), format="svg", transparent=True)
    text = re.sub("^.*?(?=<svg)|<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.DOTALL)
    text = text.replace("#000000", "currentColor").replace("#ffffff", "var(--back)")
    write_text(path, text.replace(">", f"><style>{DARK}</style>", 1))
    return path


def draw_forest(results: Sequence[HypothesisResult], path: Path) -> Path:
    """A row for each hypothesis: the differences with their 95 % intervals, by the accuracies and word error rates that its
    verdict is from, and the verdict, which colors them."""
    from matplotlib.ticker import FixedLocator

    metrics = list(dict.fromkeys(by.metric for result in results for by in result.metrics if by.interval))
    metrics = [metric for metric in metrics if metric != CV_ACCURACY] or metrics
    figure = new_figure(WIDTH, 1.3 + 0.52 * len(results))
    axes = figure.subplots()
    for row, result in enumerate(results):
        color = VERDICT_COLORS.get(result.verdict, UNDECIDED)
        for by in result.metrics:
            if by.interval and by.difference is not None and by.metric in metrics:
                number = metrics.index(by.metric)
                y = row + 0.22 * (number - (len(metrics) - 1) / 2)
                axes.hlines(y, *by.interval, color=color, linewidth=2.2 if number == 0 else 1.2)
                axes.plot(by.difference, y, MARKERS[number], color=color, markersize=7 if number == 0 else 4.5)
        place, gid = axes.get_yaxis_transform(), f"verdict-{row}"
        axes.text(1.03, row, textwrap.fill(result.verdict, 24), transform=place, va="center", weight="bold", gid=gid)
    for number, metric in enumerate(metrics):
        axes.plot([], [], MARKERS[number], color="0.5", markersize=7 if number == 0 else 4.5, label=metric)
    axes.axvline(0.0, color="black", linewidth=0.8)
    tidy(
        axes,
        "opposite  \N{LEFTWARDS ARROW}   \N{RIGHTWARDS ARROW}  as expected",
        "difference (percentage points; logarithmic beyond \N{PLUS-MINUS SIGN}1)",
        "",
    )
    axes.set_xscale("symlog", linthresh=1.0)
    ticks = [sign * tick for sign in (-1, 1) for tick in (0, 0.5, 1, 2, 5, 10, 20, 50)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:+g}" if x else "0")
    axes.set_ylim(len(results) - 0.5, -0.5)  # the first above
    statements = [textwrap.fill(f"{r.table.name}: {r.hypothesis.statement}", 56) for r in results]
    axes.set_yticks(range(len(results)), statements, ha="left")
    axes.tick_params("y", length=0, pad=335)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    legend_below(figure, axes)
    return save_svg(figure, path)


def draw_accuracies(title: str, entries: Sequence[TableEntry], metrics: Sequence[str], path: Path) -> Path:
    """A panel for each metric, a row for each entry: mean over the seeds, a bar from the lowest to the highest, a dot for
    each seed."""
    sizes = list(dict.fromkeys(entry.workers for entry in entries))
    figure = new_figure(WIDTH, 1.6 + 0.3 * len(entries))
    panels = figure.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for row, entry in enumerate(entries):
            color, marker, _ = style(sizes.index(entry.workers))
            if seeds := list(entry.values(metric).values()):
                axes.hlines(row, min(seeds), max(seeds), color=color)
                axes.plot(fmean(seeds), row, marker, color=color, markersize=8)
                axes.plot(seeds, [row] * len(seeds), "k.", markersize=4)
        tidy(axes, f"{'lower' if metric.endswith(WER) else 'higher'} is better", f"{label(metric)} (%)", "")
    failed = [f", {len(entry.failed)} failed" if entry.failed else "" for entry in entries]
    names = [f"{entry.title}{text}" for entry, text in zip(entries, failed, strict=True)]
    panels[0].set_yticks(range(len(entries)), names)
    panels[0].set_ylim(len(entries) - 0.5, -0.5)  # the first above
    figure.suptitle(f"{title} (large: mean over the seeds; dots: seeds; bar: lowest to highest)", fontsize=12)
    return save_svg(figure, path)


def draw_learning(title: str, entries: Sequence[TableEntry], path: Path) -> Path:
    """Cross-validation frame accuracy by epoch: a panel for each size, a curve for each condition (mean over seeds)."""
    sizes = list(dict.fromkeys(entry.workers for entry in entries))
    conditions = list(dict.fromkeys(entry.condition.label for entry in entries))
    figure = new_figure(WIDTH, 4.8)
    panels = figure.subplots(1, len(sizes), squeeze=False, sharey=True)[0]
    for axes, size in zip(panels, sizes, strict=True):
        tidy(axes, plural(size, "worker"), "epoch", f"{CV_ACCURACY} (%)")
        axes.locator_params(axis="x", integer=True)
    for entry in entries:
        runs = [[row.frame_accuracy if row else nan for row in run.cv_by_epoch] for run in entry.valid]
        if by_epoch := list(zip(*filter(None, runs), strict=False)):  # of the epochs that all runs have
            axes, values = panels[sizes.index(entry.workers)], 100.0 * np.array(by_epoch)
            color, marker, line = style(conditions.index(entry.condition.label))
            epochs = range(1, len(values) + 1)
            looks = {"color": color, "marker": marker, "markersize": 4, "label": entry.condition.label}
            axes.plot(epochs, values.mean(axis=1), line, **looks)
            axes.fill_between(epochs, values.min(axis=1), values.max(axis=1), color=color, alpha=0.15, linewidth=0)
    figure.suptitle(f"{title}: learning curves (mean over the seeds; band: lowest to highest)", fontsize=12)
    legend_below(figure, max(panels, key=lambda axes: len(axes.lines)))
    return save_svg(figure, path)


def draw_speed_ups(title: str, speeds: Sequence[SpeedUp], path: Path) -> Path:
    """Speed-up against workers, both logarithmic, and efficiency: the ideal, ours (measured or predicted), the paper's
    dashed. Only what was measured has full markers."""
    conditions = list(dict.fromkeys(speed["label"] for speed in speeds))
    figure = new_figure(WIDTH, 5.6)
    powers = [2**q for q in range(max(speed["workers"] for speed in speeds).bit_length())]
    panels = speed_up_panels(figure, powers, powers, "ideal: as many times as workers")
    for kind, (line, name) in LINES.items():
        for number, condition in enumerate(conditions):
            own = [speed for speed in speeds if (speed["label"], speed["kind"]) == (condition, kind)]
            points = sorted((speed["workers"], speed["speed_up"]) for speed in own)
            if points and points[-1][0] > 1:
                color, marker, _ = style(number)
                looks = {"color": color, "marker": marker, "markerfacecolor": color if kind == "measured" else "white"}
                workers, values = zip(*points, strict=True)
                plot_speed_up(panels, workers, values, line, **looks, label=f"{condition}: {name}")
    figure.suptitle(title, fontsize=12)
    legend_below(figure, panels[0])
    return save_svg(figure, path)
