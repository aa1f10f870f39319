"""The report of `ddnn reproduce`: from records to Markdown, HTML and PNG files, and to JSON."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from ddnn.reproduce.cells import Cell, Metric, find_cell, main_accuracy, metrics_of, table_cells
from ddnn.reproduce.comparison import Degradation, HypothesisResult, MetricResult, compare, degradations
from ddnn.reproduce.corpus import ReproduceConfig
from ddnn.reproduce.measure import SpeedUp
from ddnn.reproduce.plots import draw_accuracies, draw_learning, draw_speed_ups
from ddnn.reproduce.records import RunRecord, TimeBreakdown
from ddnn.reproduce.tables import BASE, Condition, Hypothesis, Table, paper
from ddnn.util.files import ensure_directory, read_bytes_limited, write_text
from ddnn.util.text import environment, plural

MAX_BYTES = 16 << 20
"""Of a plot."""
NONE = "-"
"""Where there is no figure."""
EXTENSION, OTHER_EPOCHS = " †", " ‡"
AIM = 0.1
"""Percentage points of frame accuracy that many workers may lose."""

Rows = list[list[str]]


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
    """What the templates show.

    Attributes:
        context: names of the templates -> values.
        pictures: in their order.
        summary: the same figures for `--json`.
    """

    context: dict[str, Any]
    pictures: list[Picture] = field(default_factory=list)
    summary: Mapping[str, object] = field(default_factory=dict)

    def render(self, name: str, folder: str = "") -> str:
        """`name` is report.md or report.html; `folder` has the pictures, relative to the Markdown file."""
        templates = environment(html=name.endswith(".html"))
        templates.filters |= {"result_rows": result_rows, "headings": _headings, "slug": _slug}
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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower())


def _headings(body: str) -> list[Any]:
    """Id and text of each heading of an HTML text; the text is HTML already."""
    return [(id_, type(body)(text)) for id_, text in re.findall(r'<h2 id="([a-z0-9-]*)">(.*?)</h2>', body)]


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
    for table in tables:
        for cell in table_cells(config, table, records, missing) if table.kind == "accuracy" else ():
            cells.setdefault((config.recipe_name(cell.condition.name), cell.workers), cell)
    metric, losses = degradations(config, cells.values(), records)
    sections = [
        _section(config, table, records, missing, [h for h in hypotheses if h.table is table], speed_ups)
        for table in tables
    ]
    metrics = metrics_of(config, records.values())
    context = {
        "title": f"{config.name}: the paper's tables, reproduced",
        "config": config,
        "source": paper().source,
        "num_records": len(records),
        "missing": missing,
        "command": command,
        "hypotheses": hypotheses,
        "summary_rows": [_summary_row(result) for result in hypotheses],
        "sections": sections,
        "metrics": metrics,
        **_degradation_view(config, records, metric, losses),
        **_run_view(records, metrics),
    }
    pictures = [picture for section in sections for picture in section["pictures"]]
    summary = {
        "hypotheses": [result.to_dict() for result in hypotheses],
        "degradations": [loss.to_dict() for loss in losses],
        "speed_ups": [vars(speed) for speed in speed_ups],
    }
    return Report(context, pictures, summary)


def fmt_number(value: float | None) -> str:
    """With two digits."""
    return NONE if value is None else f"{value:.2f}"


def fmt_signed(value: float | None) -> str:
    """With two digits and its sign."""
    return NONE if value is None else f"{round(value, 2) + 0.0:+.2f}"  # never -0.00


def fmt_mean(values: Sequence[float], digits: int) -> str:
    """Mean alone."""
    return f"{fmean(values):.{digits}f}" if values else NONE


def fmt_mean_std(values: Sequence[float]) -> str:
    """Mean and, of two values or more, standard deviation (n - 1)."""
    return fmt_mean(values, 2) + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def fmt_label(condition: Condition) -> str:
    """Its label, with a dagger where it is not in the paper."""
    return condition.label + (EXTENSION if condition.extension else "")


def _section(
    config: ReproduceConfig, table: Table, records: Mapping[str, RunRecord], missing: Sequence[str],
    hypotheses: Sequence[HypothesisResult], speed_ups: Sequence[SpeedUp],
) -> dict[str, Any]:  # fmt: skip
    """One table."""
    cells = table_cells(config, table, records, missing)
    metrics = metrics_of(config, [run for cell in cells for run in cell.runs])
    tests = list(dict.fromkeys(test for wers in table.published.values() for test in wers))
    names = {condition.name for condition in table.conditions}
    speeds = [speed for speed in speed_ups if speed.condition in names] if table.kind == "speed" else []
    sizes = sorted({speed.workers for speed in speeds})
    timed = table.kind == "speed" or table.name == "reduce"
    return {
        "table": table,
        "metrics": metrics,
        "result_rows": [_result_row(cell, metrics) for cell in cells],
        "num_missing": sum(max(0, cell.expected - len(cell.runs)) for cell in cells),
        "has_extensions": any(cell.condition.extension for cell in cells),
        "published_tests": tests,
        "published_rows": [
            [table.condition(name).label, str(gpus), *(f"{wers[test]:.1f}" if test in wers else NONE for test in tests)]
            for (name, gpus), wers in table.published.items()
        ],
        "hypotheses": hypotheses,
        "time_rows": _time_rows(cells) if timed else [],
        "oversubscribed": _oversubscribed(cells),
        "speed_columns": [plural(size, "worker") for size in sizes],
        "speed_rows": _speed_rows(speeds, sizes),
        "pictures": _pictures(config, table, cells, speeds),
    }


def _result_row(cell: Cell, metrics: Sequence[Metric]) -> list[str]:
    runs = str(len(cell.runs)) if len(cell.runs) >= cell.expected else f"{len(cell.runs)} of {cell.expected}"
    return [
        fmt_label(cell.condition),
        str(cell.workers),
        f"{runs}, {cell.num_diverged} diverged" if cell.num_diverged else runs,
        fmt_mean([run.epochs for run in cell.valid], 1).removesuffix(".0"),
        *(fmt_mean_std(list(cell.values(metric).values())) for metric in metrics),
    ]


def result_rows(found: HypothesisResult) -> Rows:
    """The two sides of a hypothesis by each metric."""
    return [_metric_row(result) for result in found.results]


def _metric_row(result: MetricResult) -> list[str]:
    estimate = result.estimate
    seeds = plural(result.seeds, "seed")
    return [
        result.metric.title,
        fmt_number(result.better),
        fmt_number(result.worse),
        fmt_signed(result.difference),
        NONE if estimate is None else f"{fmt_signed(estimate.low)} to {fmt_signed(estimate.high)}",
        NONE if estimate is None else f"{100.0 * estimate.prob_improvement:.1f} %",
        {"": NONE, "seeds": seeds}.get(result.resampled, f"{result.resampled}, {seeds}"),
        result.verdict.text,
    ]


def _summary_row(result: HypothesisResult) -> list[str]:
    asked = result.hypothesis
    differences = [
        f"{by.metric.label} {fmt_signed(by.difference)}"
        for by in result.results
        if by.metric.kind != "cv" and by.difference is not None
    ]
    published = published_differences(result.table, asked) if asked.published else "not in the paper"
    return [result.table.name, asked.statement, published, ", ".join(differences) or NONE, result.verdict.text]


def published_differences(table: Table, asked: Hypothesis) -> str:
    """The paper's differences, + as expected; of "many" the most GPUs that it has both conditions on."""
    better, worse = (
        {n: wers for (of, n), wers in table.published.items() if of == name and (n > 1) == (size == "max")}
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


def _degradation_view(
    config: ReproduceConfig, records: Mapping[str, RunRecord], metric: Metric | None, losses: Sequence[Degradation]
) -> dict[str, Any]:
    """What each condition and size loses against the base on one worker, and which lose no more than the aim."""
    base = [run.epochs for run in find_cell(config, records, Condition(name=BASE, label=BASE), 1).valid]
    base_epochs = fmean(base) if base else 0.0
    sizes = sorted({loss.cell.workers for loss in losses})
    rows: dict[tuple[str, str], dict[int, str]] = {}
    within_aim = []
    for loss in losses:
        cell, estimate = loss.cell, loss.estimate
        equal_epochs = fmean(run.epochs for run in cell.valid) == base_epochs
        text = fmt_signed(loss.percentage_points)
        text += f" ({fmt_signed(estimate.low)} to {fmt_signed(estimate.high)})" if estimate else ""
        text += f", {cell.num_diverged} diverged" if cell.num_diverged else ""
        text += "" if equal_epochs else OTHER_EPOCHS
        rows.setdefault((cell.condition.name, fmt_label(cell.condition)), {})[cell.workers] = text
        small = loss.percentage_points <= AIM and not cell.num_diverged
        if cell.workers == config.max_workers and equal_epochs and small:
            seeds = plural(loss.seeds, "seed")
            within_aim.append(f"{cell.condition.name} ({fmt_signed(loss.percentage_points)}, {seeds})")
    return {
        "degradation_metric": metric,
        "degradation_columns": [plural(size, "worker") for size in sizes],
        "degradation_rows": [[*names, *(row.get(size, NONE) for size in sizes)] for names, row in rows.items()],
        "aim": AIM,
        "within_aim": within_aim,
    }


def _time_rows(cells: Sequence[Cell]) -> Rows:
    """Where the time went, and what was sent; empty where no run says."""
    rows = []
    for cell in cells:
        times = [run.time for run in cell.valid if run.time is not None]
        sent = [t.bytes_sent / t.averagings for t in times if t.bytes_sent is not None and t.averagings]
        rows.append(
            [
                fmt_label(cell.condition),
                str(cell.workers),
                fmt_mean([time.averagings for time in times], 0),
                fmt_mean([value / 1e6 for value in sent], 3),
                fmt_mean([time.seconds for time in times], 1),
                *(_fraction(times, name) for name in ("compute_seconds", "comm_seconds", "wait_seconds")),
            ]
        )
    return rows if any(row[4] != NONE for row in rows) else []


def _fraction(times: Iterable[TimeBreakdown], name: str) -> str:
    parts = [(getattr(time, name), time.seconds) for time in times if time.seconds > 0]
    return fmt_mean([100.0 * part / seconds for part, seconds in parts if part is not None], 1)


def _oversubscribed(cells: Sequence[Cell]) -> list[tuple[int, int]]:
    """Workers and cores, where there were more workers."""
    times = [(cell.workers, run.time.cores) for cell in cells for run in cell.valid if run.time is not None]
    return sorted({(workers, cores) for workers, cores in times if 0 < cores < workers})


def _speed_rows(speeds: Sequence[SpeedUp], sizes: Sequence[int]) -> Rows:
    """A row for each condition and kind, a column for each size."""
    values = {(s.label, s.kind, s.workers): s.speed_up for s in speeds}
    return [
        [label, kind, *(fmt_number(values.get((label, kind, size))) for size in sizes)]
        for label, kind in dict.fromkeys((s.label, s.kind) for s in speeds)
    ]


def _run_view(records: Mapping[str, RunRecord], metrics: Sequence[Metric]) -> dict[str, Any]:
    """Where and when, and every run."""
    runs = sorted(records.values(), key=lambda record: (record.condition, record.workers, record.seed))
    dates = sorted({run.date for run in runs if run.date})
    facts = {
        "runs": f"{len(runs)}, of which {sum(run.failed is not None for run in runs)} diverged",
        "machine": "; ".join(sorted({run.machine for run in runs if run.machine})),
        "versions": "; ".join(sorted({run.version for run in runs if run.version})),
        "recorded": " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "",
    }
    rows = [
        [
            run.name,
            str(run.epochs),
            *(fmt_number(metric.value(run)) for metric in metrics),
            f"{run.time.seconds:.1f}" if run.time else NONE,
            (run.failed or NONE)[:200],
        ]
        for run in runs
    ]
    return {"facts": [f"{name}: {value or 'unknown'}" for name, value in facts.items()], "run_rows": rows}


def _pictures(config: ReproduceConfig, table: Table, cells: Sequence[Cell], speeds: Sequence[SpeedUp]) -> list[Picture]:
    """The plots of a table, as far as there are figures for them."""
    metrics = metrics_of(config, [run for cell in cells for run in cell.runs])
    shown = [main_accuracy(metrics), next((metric for metric in metrics if metric.kind == "words"), None)]
    panels = [metric for metric in shown if metric is not None]
    title = f"{config.name}, {table.name}: {table.title}"
    if speeds:
        caption = "Speed-up over one worker against workers, both axes logarithmic; dashed: the paper's, gray: ideal."
        draw = partial(draw_speed_ups, title, speeds)
        return [Picture(f"{table.name}-speed.png", f"Plot, {title}: speed-up", caption, draw)]
    pictures = []
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
