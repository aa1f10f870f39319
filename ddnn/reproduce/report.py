"""The report of `ddnn reproduce`: Markdown, HTML, PNG files, JSON. Its text is in ddnn/templates/report.j2."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ddnn.reproduce.cells import Cell, Metric, SpeedUp, base_cell, main_accuracy, metrics_of, table_cells
from ddnn.reproduce.comparison import Degradation, Estimate, HypothesisResult, compare, degradations
from ddnn.reproduce.corpus import ReproduceConfig
from ddnn.reproduce.plots import draw_accuracies, draw_learning, draw_speed_ups
from ddnn.reproduce.records import RunRecord, TimeBreakdown
from ddnn.reproduce.tables import Condition, Table, paper
from ddnn.util.files import ensure_directory, read_bytes_limited, write_text
from ddnn.util.text import environment, plural

MAX_BYTES = 16 << 20
"""Of a plot."""
NONE = "-"
"""Where there is no figure."""
AIM = 0.1
"""Percentage points of frame accuracy that many workers may lose."""


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
        templates = environment(html=name.endswith(".html"))
        templates.add_extension("jinja2.ext.do")
        templates.filters |= FILTERS
        text = templates.get_template(f"{name}.j2").render(**self.context, folder=folder)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def write(self, path: Path) -> list[Path]:
        """Writes PATH.md, PATH.html (which needs no other file) and the plots into the folder PATH; returns all.

        Raises:
            UserError: a file cannot be written, or matplotlib is missing.
        """
        ensure_directory(path.parent)
        plots = [picture.draw(path / picture.name) for picture in self.pictures]
        for picture, plot in zip(self.pictures, plots, strict=True):
            picture.base64 = b64encode(read_bytes_limited(plot, MAX_BYTES)).decode()
        markdown, html = path.with_name(f"{path.name}.md"), path.with_name(f"{path.name}.html")
        write_text(markdown, self.render("report.md", path.name))
        write_text(html, self.render("report.html"))
        return [markdown, html, *plots]


def build_report(
    config: ReproduceConfig,
    tables: Sequence[Table],
    records: Mapping[str, RunRecord],
    command: str,
    missing: Sequence[str],
    speed_ups: Sequence[SpeedUp],
) -> Report:
    """The report on these tables. What is missing is shown as missing.

    Args:
        records: name of a run -> its result.
        command: that makes them.
        missing: names of runs without a record.
        speed_ups: for the tables about speed.
    """
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
    context = {
        "title": f"{config.name}: the paper's tables, reproduced",
        "config": config,
        "source": paper().source,
        "missing": missing,
        "command": command,
        "hypotheses": hypotheses,
        "sections": sections,
        "metrics": metrics_of(config, records.values()),
        "degradation_metric": metric,
        **_degradation_view(config, records, losses),
        "runs": sorted(records.values(), key=lambda record: (record.condition, record.workers, record.seed)),
    }
    summary = {
        "hypotheses": [result.to_dict() for result in hypotheses],
        "degradations": [loss.to_dict() for loss in losses],
        "speed_ups": [vars(speed) for speed in speed_ups],
    }
    return Report(context, [picture for section in sections for picture in section["pictures"]], summary)


def _section(config: ReproduceConfig, table: Table, cells: list[Cell], speeds: list[SpeedUp]) -> dict[str, Any]:
    """One table."""
    times = [(cell.workers, run.time.cores) for cell in cells for run in cell.valid if run.time is not None]
    sizes = sorted({speed.workers for speed in speeds})
    values = {(s.label, s.kind, s.workers): s.speed_up for s in speeds}
    metrics = metrics_of(config, [run for cell in cells for run in cell.runs])
    return {
        "table": table,
        "cells": cells,
        "metrics": metrics,
        "num_missing": sum(max(0, cell.expected - len(cell.runs)) for cell in cells),
        "published_tests": list(dict.fromkeys(test for wers in table.published.values() for test in wers)),
        "time_rows": _time_rows(cells) if table.kind == "speed" or table.name == "reduce" else [],
        "oversubscribed": sorted({(workers, cores) for workers, cores in times if 0 < cores < workers}),
        "speed_columns": [plural(size, "worker") for size in sizes],
        "speed_rows": [
            [label, kind, *(_number(values.get((label, kind, size))) for size in sizes)]
            for label, kind in dict.fromkeys((speed.label, speed.kind) for speed in speeds)
        ],
        "pictures": _pictures(config, table, cells, metrics, speeds),
    }


def _time_rows(cells: Sequence[Cell]) -> list[list[str]]:
    """Where the time went, and what was sent; empty where no run says."""
    rows = []
    for cell in cells:
        times = [run.time for run in cell.valid if run.time is not None]
        sent = [t.bytes_sent / t.averagings for t in times if t.bytes_sent is not None and t.averagings]
        rows.append(
            [
                _label(cell.condition),
                str(cell.workers),
                _mean((time.averagings for time in times), 0),
                _mean((value / 1e6 for value in sent), 3),
                _mean((time.seconds for time in times), 1),
                *(_fraction(times, name) for name in ("compute_seconds", "comm_seconds", "wait_seconds")),
            ]
        )
    return rows if any(row[4] != NONE for row in rows) else []


def _fraction(times: Iterable[TimeBreakdown], name: str) -> str:
    parts = [(getattr(time, name), time.seconds) for time in times if time.seconds > 0]
    return _mean((100.0 * part / seconds for part, seconds in parts if part is not None), 1)


def _degradation_view(
    config: ReproduceConfig, records: Mapping[str, RunRecord], losses: Sequence[Degradation]
) -> dict[str, Any]:
    """What each condition and size loses against the base on one worker, and which lose no more than the aim."""
    base = [run.epochs for run in base_cell(config, records).valid]
    sizes = sorted({loss.cell.workers for loss in losses})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    within_aim = []
    for loss in losses:
        cell, points = loss.cell, _signed(loss.percentage_points)
        equal_epochs = fmean(run.epochs for run in cell.valid) == (fmean(base) if base else 0.0)
        text = f"{points} ({_interval(loss.estimate)})" if loss.estimate else points
        text += f", {cell.num_diverged} diverged" if cell.num_diverged else ""
        text += "" if equal_epochs else " ‡"
        rows.setdefault((cell.condition.name, _label(cell.condition)), {})[cell.workers] = text
        small = loss.percentage_points <= AIM and not cell.num_diverged
        if cell.workers == config.max_workers and equal_epochs and small:
            within_aim.append(f"{cell.condition.name} ({points}, {plural(loss.seeds, 'seed')})")
    return {
        "degradation_columns": [plural(size, "worker") for size in sizes],
        "degradation_rows": [[*names, *(row.get(size, NONE) for size in sizes)] for names, row in rows.items()],
        "aim": AIM,
        "within_aim": within_aim,
    }


def _pictures(
    config: ReproduceConfig, table: Table, cells: Sequence[Cell], metrics: Sequence[Metric], speeds: Sequence[SpeedUp]
) -> list[Picture]:
    """The plots of a table, as far as there are figures for them."""
    title = f"{config.name}, {table.name}: {table.title}"
    if speeds:
        caption = "Speed-up over one worker against workers, both axes logarithmic; dashed: the paper's, gray: ideal."
        draw = partial(draw_speed_ups, title, speeds)
        return [Picture(f"{table.name}-speed.png", f"Plot, {title}: speed-up", caption, draw)]
    pictures = []
    shown = [main_accuracy(metrics), next((metric for metric in metrics if metric.kind == "words"), None)]
    panels = [metric for metric in shown if metric is not None]
    if panels and table.kind == "accuracy":
        what = " and ".join(metric.label for metric in panels)
        caption = f"{what}: the mean over the seeds, each seed as a dot, a bar from the lowest to the highest. "
        caption += "Points that would cover each other are moved aside."
        draw = partial(draw_accuracies, title, cells, panels)
        pictures.append(Picture(f"{table.name}.png", f"Plot, {title}: {what}", caption, draw))
    ends = [cell for cell in cells if cell.workers in (1, config.max_workers)]
    if table.kind == "accuracy" and any(run.cv_by_epoch for cell in ends for run in cell.valid):
        caption = (
            "Frame accuracy on the cross-validation set after each epoch: the mean over the seeds and their range."
        )
        draw = partial(draw_learning, title, ends)
        pictures.append(Picture(f"{table.name}-learning.png", f"Plot, {title}: learning curves", caption, draw))
    return pictures


def _number(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return NONE if value is None else f"{round(value, 2) + 0.0:+.2f}"  # never -0.00


def _interval(estimate: Estimate | None) -> str:
    return NONE if estimate is None else f"{_signed(estimate.low)} to {_signed(estimate.high)}"


def _mean(values: Iterable[float], digits: int) -> str:
    found = list(values)
    return f"{fmean(found):.{digits}f}" if found else NONE


def _mean_std(values: Iterable[float]) -> str:
    """Mean and, of two values or more, standard deviation (n - 1)."""
    found = list(values)
    return _mean(found, 2) + (f" ± {stdev(found):.2f}" if len(found) > 1 else "")


def _label(condition: Condition) -> str:
    """Its label, with a dagger where it is not in the paper."""
    return condition.label + (" †" if condition.extension else "")


def _differences(result: HypothesisResult) -> str:
    """By each metric that counts."""
    shown = [by for by in result.results if by.metric.kind != "cv" and by.difference is not None]
    return ", ".join(f"{by.metric.label} {_signed(by.difference)}" for by in shown) or NONE


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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


def _headings(body: str) -> list[Any]:
    """Id and text of each heading of an HTML text; the text is HTML already."""
    return [(id_, type(body)(text)) for id_, text in re.findall(r'<h2 id="([a-z0-9-]*)">(.*?)</h2>', body)]


FILTERS: dict[str, Callable[..., Any]] = {
    "number": _number,
    "signed": _signed,
    "interval": _interval,
    "mean": _mean,
    "mean_std": _mean_std,
    "label": _label,
    "differences": _differences,
    "published_differences": _published_differences,
    "slug": _slug,
    "headings": _headings,
}
"""Of the templates."""
