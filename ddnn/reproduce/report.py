"""The report of `ddnn reproduce`: Markdown, HTML, PNG files, JSON. Its text is in ddnn/templates/report.j2."""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, get_args

from ddnn.report.figures import (
    legend_below,
    new_figure,
    plot_speed_up,
    save,
    speed_up_panels,
    style,
    tidy,
)
from ddnn.reproduce.cells import Cell, Metric, SpeedUp, main_accuracy, metrics_of, overloaded_runs, table_cells
from ddnn.reproduce.comparison import HypothesisResult, Word, compare, degradations
from ddnn.reproduce.runs import RunRecord, TimeBreakdown
from ddnn.reproduce.tables import ReproduceConfig, Table, paper
from ddnn.util.files import ensure_directory, read_bytes_limited, write_text
from ddnn.util.text import environment, plural, without_controls

if TYPE_CHECKING:
    import jinja2
    from matplotlib.axes import Axes

MAX_BYTES = 16 << 20  # of a plot
NONE = "-"  # where there is no figure
FEW = 2  # tables that the title names
AIM = 0.1  # percentage points of frame accuracy that many workers may lose
FAILED = " Runs that failed are not shown."
WIDTH = 11.0
OFFSET = 0.14  # distance of series beside each other, in conditions; along workers, in octaves
_KINDS = {
    "measured": ("-", True, "measured"),
    "predicted": (":", True, "predicted by the scaling model"),
    "paper": ("--", False, "the paper's, on GPUs"),
}
"""Kind of a speed-up -> its line, whether its markers are filled, its name."""


@dataclass
class Picture:
    """A plot: name of its PNG, what it shows for those who do not see it, its caption, what draws it to a path."""

    name: str
    alt: str
    caption: str
    draw: Callable[[Path], Path]
    base64: str = ""


@dataclass
class Report:
    """What the templates show, by their names for it; the pictures in their order; the same figures for `--json`."""

    context: dict[str, Any]
    pictures: list[Picture]
    summary: Mapping[str, object]

    def render(self, name: str, folder: str = "") -> str:
        """`name` is report.md or report.html; `folder` has the pictures, relative to the Markdown file."""
        text = (
            report_templates(html=name.endswith(".html"))
            .get_template(f"{name}.j2")
            .render(**self.context, folder=folder)
        )
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def write(self, path: Path) -> list[Path]:
        """Writes PATH.md, PATH.html (which needs no other file) and the plots into the folder PATH; returns all.
        UserError where a file cannot be written, or matplotlib is missing."""
        ensure_directory(path.parent)
        plots = [picture.draw(path / picture.name) for picture in self.pictures]
        for picture, plot in zip(self.pictures, plots, strict=True):
            picture.base64 = b64encode(read_bytes_limited(plot, MAX_BYTES)).decode()
        markdown, html = path.with_name(f"{path.name}.md"), path.with_name(f"{path.name}.html")
        write_text(markdown, self.render("report.md", path.name))
        write_text(html, self.render("report.html"))
        return [markdown, html, *plots]


def report_templates(*, html: bool = False) -> jinja2.Environment:
    """The templates with `FILTERS`, and with statements that give no text (`do`)."""
    templates = environment(html=html)
    templates.add_extension("jinja2.ext.do")
    templates.filters |= FILTERS
    return templates


def build_report(
    config: ReproduceConfig,
    tables: Sequence[Table],
    records: Mapping[str, RunRecord],
    command: str,
    missing: Sequence[str],
    speed_ups: Sequence[SpeedUp],
) -> Report:
    """The report on these tables, which `command` makes, from the records of runs by their names; the names of those
    that are missing are shown as missing. Speed-ups are for the tables about speed."""
    hypotheses = [compare(config, table, asked, records) for table in tables for asked in table.hypotheses]
    cells: dict[tuple[str, int], Cell] = {}
    sections = []
    for table in tables:
        own = table_cells(config, table, records, missing)
        for cell in own if table.kind == "accuracy" else ():
            cells.setdefault((config.recipe_name(cell.condition.name), cell.workers), cell)
        conditions = {condition.name for condition in table.conditions}
        speeds = [speed for speed in speed_ups if table.kind == "speed" and speed.condition in conditions]
        section = _section(config, table, own, speeds)
        sections.append({**section, "hypotheses": [result for result in hypotheses if result.table is table]})
    metric, losses = degradations(config, cells.values(), records)
    verdicts = Counter(result.verdict.word for result in hypotheses)
    context = {
        "title": f"{config.name}: {_subject(tables)}",
        "config": config,
        "source": paper().source,
        "missing": missing,
        "command": command,
        "hypotheses": hypotheses,
        "verdicts": {word: verdicts[word] for word in get_args(Word) if verdicts[word]},
        "sections": sections,
        "metrics": metrics_of(config, records.values()),
        "degradation_metric": metric,
        "degradations": losses,
        "failed_cells": [cell for cell in cells.values() if cell.failed],
        "aim": AIM,
        "overloaded": overloaded_runs(records),
        "runs": sorted(records.values(), key=lambda record: (record.condition, record.workers, record.seed)),
    }
    summary = {
        "hypotheses": [result.to_dict() for result in hypotheses],
        "verdicts": context["verdicts"],
        "degradations": [loss.to_dict() for loss in losses],
        "speed_ups": [vars(speed) for speed in speed_ups],
    }
    return Report(context, [picture for section in sections for picture in section["pictures"]], summary)


def _subject(tables: Sequence[Table]) -> str:
    """In the title, which tells the report on a few tables from that on all."""
    few = len(tables) <= FEW
    return "; ".join(table.title for table in tables) if few else "the paper's tables, reproduced"


def _section(config: ReproduceConfig, table: Table, cells: list[Cell], speeds: list[SpeedUp]) -> dict[str, Any]:
    times = [(cell.workers, run.time.cores) for cell in cells for run in cell.valid if run.time is not None]
    metrics = metrics_of(config, [run for cell in cells for run in cell.runs])
    return {
        "table": table,
        "cells": cells,
        "metrics": metrics,
        "num_missing": sum(max(0, cell.expected - len(cell.runs)) for cell in cells),
        "published_tests": list(dict.fromkeys(test for wers in table.published.values() for test in wers)),
        "timed": bool(times) and (table.kind == "speed" or table.name == "reduce"),
        "oversubscribed": sorted({(workers, cores) for workers, cores in times if 0 < cores < workers}),
        "speed_ups": speeds,
        "pictures": _pictures(config, table, cells, metrics, speeds),
    }


def _pictures(
    config: ReproduceConfig, table: Table, cells: Sequence[Cell], metrics: Sequence[Metric], speeds: Sequence[SpeedUp]
) -> list[Picture]:
    """The plots of a table, as far as there are figures for them."""
    title = f"{config.name}, {table.name}: {table.title}"
    if speeds:
        caption = (
            "Speed-up over one worker against workers, both axes logarithmic, and speed-up divided by workers; dashed: "
        )
        caption += "the paper's, gray: ideal."
        draw = partial(draw_speed_ups, title, speeds)
        return [Picture(f"{table.name}-speed.png", f"Plot, {title}: speed-up", caption, draw)]
    pictures = []
    shown = [main_accuracy(metrics), next((metric for metric in metrics if metric.kind == "words"), None)]
    panels = [metric for metric in shown if metric is not None]
    if panels and table.kind == "accuracy":
        what = " and ".join(metric.label for metric in panels)
        caption = f"{what}: the mean over the seeds, each seed as a dot, a bar from the lowest to the highest. "
        caption += "Points that would cover each other are moved aside."
        caption += FAILED if any(cell.failed for cell in cells) else ""
        draw = partial(draw_accuracies, title, cells, panels)
        pictures.append(Picture(f"{table.name}.png", f"Plot, {title}: {what}", caption, draw))
    ends = [cell for cell in cells if cell.workers in (1, config.max_workers)]
    if table.kind == "accuracy" and any(run.cv_by_epoch for cell in ends for run in cell.valid):
        caption = (
            "Frame accuracy on the cross-validation set after each epoch: the mean over the seeds and their range."
        )
        caption += FAILED if any(cell.failed for cell in ends) else ""
        draw = partial(draw_learning, title, ends)
        pictures.append(Picture(f"{table.name}-learning.png", f"Plot, {title}: learning curves", caption, draw))
    return pictures


def draw_accuracies(title: str, cells: Sequence[Cell], metrics: Sequence[Metric], path: Path) -> Path:
    """A panel for each metric: mean over the seeds, a bar from the lowest to the highest, a dot for each seed. Workers
    run along the axis where there are more than two sizes, else conditions do."""
    sizes = list(dict.fromkeys(cell.workers for cell in cells))
    labels = list(dict.fromkeys(cell.condition.label for cell in cells))
    by_size = len(sizes) > 2
    names = [cell.condition.label if by_size else plural(cell.workers, "worker") for cell in cells]
    series = list(dict.fromkeys(names))
    figure = new_figure(WIDTH, 4.8)
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
        if any(cell.failed for cell in cells):
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
    shown = [bool(cell.values(metric) or cell.failed) for cell in cells]
    offsets = []
    for number, position in enumerate(positions):
        beside = [other for other, its in enumerate(positions) if its == position and shown[other]]
        index = beside.index(number) if shown[number] else 0
        offsets.append(min(OFFSET, 0.7 / max(1, len(beside))) * (index - (len(beside) - 1) / 2))
    return offsets


def _draw_series(
    axes: Axes, points: Sequence[tuple[Cell, float]], metric: Metric, number: int, name: str, joined: bool
) -> None:
    """One series, and below it how many of its runs failed. A line ends where runs are missing."""
    color, marker, _ = style(number)
    values = [(x, list(cell.values(metric).values())) for cell, x in points]
    xs, means = [x for x, _ in values], [fmean(v) if v else nan for _, v in values]
    axes.plot(
        xs,
        means,
        linestyle="-" if joined else "none",
        color=color,
        marker=marker,
        markersize=8,
        linewidth=1.2,
        label=name,
    )
    there = [(x, v) for x, v in values if v]
    lowest, highest = ([extreme(v) for _, v in there] for extreme in (min, max))
    axes.vlines([x for x, _ in there], lowest, highest, color=color, linewidth=1.6)
    dots = [(x, value) for x, v in values for value in v]
    axes.plot([x for x, _ in dots], [y for _, y in dots], linestyle="none", marker="o", markersize=3.5, color="black",
              markeredgecolor="white", markeredgewidth=0.5, zorder=3)  # fmt: skip
    for cell, x in points:
        if cell.failed:
            axes.text(x, 0.02, f"{len(cell.failed)} failed", transform=axes.get_xaxis_transform(), rotation=90,
                      ha="center", va="bottom", fontsize=9, color=color)  # fmt: skip


def draw_learning(title: str, cells: Sequence[Cell], path: Path) -> Path:
    """Cross-validation frame accuracy by epoch: a panel for each size, a curve for each condition (mean over seeds)."""
    sizes = list(dict.fromkeys(cell.workers for cell in cells))
    labels = list(dict.fromkeys(cell.condition.label for cell in cells))
    figure = new_figure(WIDTH, 4.8)
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
        failed = [
            f"{c.condition.label} ({c.num_failed} of {len(c.runs)})" for c in cells if c.workers == size and c.failed
        ]
        name = _escape(plural(size, "worker") + (f"; failed: {', '.join(failed)}" if failed else ""))
        tidy(axes, name, "epoch", "CV frame accuracy (%)" if size == sizes[0] else "")
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
    """Speed-up against workers, both logarithmic, and efficiency: the ideal, ours (measured or predicted), the paper's
    dashed."""
    conditions = list(dict.fromkeys(speed.condition for speed in speeds))
    figure = new_figure(WIDTH, 5.6)
    powers = [2**q for q in range(max([speed.workers for speed in speeds], default=1).bit_length())]
    panels = speed_up_panels(figure, powers, powers, "ideal: as many times as workers")
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
            workers, values = [s.workers for s in points], [s.speed_up for s in points]
            plot_speed_up(panels, workers, values, line, color=color, marker=marker,
                          markersize=max(5, 12 - 4 * number),  # equally fast ones appear inside each other
                          markerfacecolor=color if filled else "white", markevery=range(len(start), len(points)),
                          linewidth=1.6, label=f"{_escape(own[0].label)}: {words}")  # fmt: skip
    figure.suptitle(_escape(title), fontsize=12)
    legend_below(figure, panels[0])
    return save(figure, path)


def _escape(text: str) -> str:
    """Text that matplotlib shows as it is: no formula between dollars, not hidden for its underscore."""
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


def _number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{round(value, 2) + 0.0:+.2f}"  # never -0.00


def _mean(values: Iterable[float | None], digits: int) -> str:
    found = [value for value in values if value is not None]
    return f"{fmean(found):.{digits}f}" if found else NONE


def _median(values: Iterable[float | None], digits: int) -> str:
    found = [value for value in values if value is not None]
    return f"{median(found):.{digits}f}" if found else NONE


def _mean_std(values: Iterable[float]) -> str:
    """Mean and, of two values or more, standard deviation (n - 1)."""
    found = list(values)
    return _mean(found, 2) + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def _percent(time: TimeBreakdown, part: str) -> float | None:
    seconds = getattr(time, part)
    return None if seconds is None or time.seconds <= 0.0 else 100.0 * float(seconds) / time.seconds


def _megabytes(time: TimeBreakdown) -> float | None:
    """Sent by one worker in an averaging."""
    return time.bytes_sent / time.averagings / 1e6 if time.bytes_sent is not None and time.averagings else None


def _published_differences(result: HypothesisResult) -> str:
    """The paper's differences, + as expected; of "many" the most GPUs that it has both conditions on."""
    asked = result.hypothesis
    if not asked.published:
        return "not in the paper"
    better, worse = (
        {n: wers for (of, n), wers in result.table.published.items() if of == name and (n > 1) == (size == "max")}
        for name, size in (asked.expected_better, asked.expected_worse)
    )
    if asked.expected_better[1] == asked.expected_worse[1]:
        common = better.keys() & worse.keys()
        better, worse = ({n: wers for n, wers in side.items() if n in common} for side in (better, worse))
    if not better or not worse:
        return NONE
    good, bad = max(better), max(worse)
    points = [f"{test} {value - better[good][test]:+.1f}" for test, value in worse[bad].items() if test in better[good]]
    return f"{', '.join(points)} ({plural(good, 'GPU') if good == bad else f'{good} and {bad} GPUs'})"


def _headings(body: str) -> list[Any]:
    """Id and text of each heading of an HTML text; the text is HTML already."""
    return [(id_, type(body)(text)) for id_, text in re.findall(r'<h2 id="([a-z0-9-]*)">(.*?)</h2>', body)]


def _escape_markdown(text: object) -> str:
    """Text within a line or a table cell: nothing in it is markup, HTML or the end of a cell."""
    return re.sub(r"([\\`*_\[\]<>|~&$#!]|:(?=//))", r"\\\1", " ".join(without_controls(str(text)).split()))


def _escape_line(text: object) -> str:
    """Text that begins a line: it starts no list, no rule, and no heading of the line before."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _escape_markdown(text))


def _fence(text: str) -> str:
    """A row of backquotes longer than any in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


FILTERS: dict[str, Callable[..., Any]] = {
    "number": _number,
    "signed": _signed,
    "mean": _mean,
    "median": _median,
    "mean_std": _mean_std,
    "percent": _percent,
    "megabytes": _megabytes,
    "published_differences": _published_differences,
    "slug": lambda text: re.sub(r"[^a-z0-9]+", "-", text.lower()),
    "headings": _headings,
    "md": _escape_markdown,
    "md_line": _escape_line,
    "fence": _fence,
}
