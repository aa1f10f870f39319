"""`ddnn report`: compares runs, as text, JSON, CSV and plots."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from ddnn.nn.figures import FIGURES
from ddnn.recipe.keys import keys
from ddnn.recipe.load import is_read
from ddnn.recipe.schema import Recipe
from ddnn.recipe.section import get_value
from ddnn.report.figures import draw_report
from ddnn.report.runs import (
    Run,
    Summary,
    figure,
    key_of,
    name_of,
    read_runs,
    remarks,
    shortest_ends,
    summarize,
    training_seconds,
)
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import printable

CONTRAST = (
    "parallel.strategy", "parallel.averaging_period", "optimizer.name", "model.activation", "schedule.name", "seed",
)  # fmt: skip
"""Keys of the recipe that are always shown (with the number of workers); others are shown if they differ."""
MAX_DIFFERING = 12
WIDTH = 100  # of a table
RUNS_PER_TABLE = 4
SPEED_UP, SPEED_PER_WORKER = "speed-up over one worker", "frames/s per worker"
_TIMES = {"compute": "compute", "data": "data", "comm": "communication", "wait": "waiting"}
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")  # how what a spreadsheet computes begins
_START_ROWS = {"precision": "{precision}", "machine": "{machine}", "date": "{date}"}
_MODEL_ROWS = {
    "epochs": "{epochs}",
    "ended": "{ended}",
    "warm-up training loss": "{warmup_loss:.4f}",
    "final model: epoch": "{model}",
    **{
        f"its {split} {name_of(kind)}": f"{{model_{key}_{key_of(kind)}:{'.2%' if kind.percent else '.4f'}}}"
        for kind in FIGURES.values()
        for split, key in (("training", "train"), ("CV", "cv"))
    },
    "lower CV loss, not kept": "{lowest_cv_loss:.4f} (epoch {lowest_cv_loss_epoch})",
}
_TIME_ROWS = {
    "last learning rate, applied": "{learning_rate:.4g}",
    "training seconds": "{seconds:,.1f}",
    "frames/s": "{frames_per_second:,.0f}",
    SPEED_PER_WORKER: "{frames_per_second_per_worker:,.0f}",
    SPEED_UP: "{speed_up:.2f}",
    "efficiency: speed-up/workers": "{efficiency:.1%}",
    "compute time": "{compute_fraction_mean:.1%}",
    "compute time, least": "{compute_fraction_worst:.1%} (rank {compute_fraction_rank})",
    "data time": "{data_fraction_mean:.1%}",
    "data time, most": "{data_fraction_worst:.1%} (rank {data_fraction_rank})",
    "communication time": "{communication_fraction_mean:.1%}",
    "communication time, most": "{communication_fraction_worst:.1%} (rank {communication_fraction_rank})",
    "waiting time": "{waiting_fraction_mean:.1%}",
    "waiting time, most": "{waiting_fraction_worst:.1%} (rank {waiting_fraction_rank})",
    "consensus distance, last": "{consensus_distance_mean:.3g}",
    "consensus distance, most": "{consensus_distance_worst:.3g} (rank {consensus_distance_rank})",
    "bytes sent per averaging": "{bytes_per_averaging:,.0f}",
    "excluded averagings": "{excluded_averagings}",
}


@dataclass(frozen=True)
class Report:
    """Several runs, their summaries, and the files that were written."""

    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    plots: tuple[Path, ...]
    tables: tuple[Path, ...] = ()  # CSV

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        return _settings([run.recipe for run in self.runs])

    def as_dict(self) -> dict[str, Any]:
        runs = []
        for run, summary in zip(self.runs, self.summaries, strict=True):
            start = run.start and run.start.model_dump(exclude={"type", "epoch"})
            contrast = {_word(key): run.recipe and get_value(run.recipe, key) for key in CONTRAST}
            events = [event.model_dump() for event in run.metrics.events]
            runs.append(
                {"name": run.name, "path": str(run.path), **contrast, "start": start, **summary, "events": events}
            )
        differing = {key: values for key, values in self.settings.items() if key not in CONTRAST}
        return {
            "runs": runs,
            "differing": {key: [v if v is None else str(v) for v in values] for key, values in differing.items()},
            "remarks": remarks(self.runs, self.summaries),
            "plots": list(map(str, self.plots)),
            "tables": list(map(str, self.tables)),
        }

    def as_text(self) -> str:
        settings = [(_word(key) if key in CONTRAST else key, _texts(v)) for key, v in self.settings.items()]
        contrast, differing = settings[: len(CONTRAST)], settings[len(CONTRAST) :]
        rows = {"workers": [str(summary["workers"]) for summary in self.summaries], **dict(contrast)}
        rows |= self._rows(_START_ROWS) | dict(differing[:MAX_DIFFERING]) | self._rows(_MODEL_ROWS)
        for name in dict.fromkeys(name for summary in self.summaries for name in summary["results"]):
            values = [summary["results"].get(name) for summary in self.summaries]
            digits = 4 if name.endswith("frame") else 2
            rows[name] = ["-" if value is None else f"{value:.{digits}f}" for value in values]
        rows |= self._rows(_TIME_ROWS)
        if set(rows["workers"]) == {"1"}:  # these say nothing of one worker
            del rows[SPEED_UP], rows[SPEED_PER_WORKER]
        lines = [_tables([run.name for run in self.runs], rows)]
        if hidden := [key for key, _ in differing[MAX_DIFFERING:]]:
            lines.append(f"{len(hidden)} more keys differ: {', '.join(hidden)}")
        lines += remarks(self.runs, self.summaries)
        lines += [f"{run.name}: {event.as_text()}" for run in self.runs for event in run.metrics.events]
        lines += [f"plot: {path}" for path in self.plots] + [f"table: {path}" for path in self.tables]
        return "\n".join(lines)

    def _rows(self, formats: Mapping[str, str]) -> dict[str, list[str]]:
        """Label -> a cell for each run; "-" if a run does not have the figure."""
        figures = [_shown(run, summary) for run, summary in zip(self.runs, self.summaries, strict=True)]
        return {label: [_format(text, known) for known in figures] for label, text in formats.items()}

    def runs_csv(self) -> str:
        """A row for each run: recipe keys, and figures that are not rounded."""
        return _csv(
            [
                {"run": run.name, "path": run.path}
                | {key: values[number] for key, values in self.settings.items()}
                | {key: _setting(run.recipe, key) for key in ("minibatch_size", "schedule.initial_learning_rate")}
                | _flat(run, summary)
                for number, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True))
            ]
        )

    def epochs_csv(self) -> str:
        """A row for each epoch of each run; fractions of time and consensus distance are means over the workers."""
        rows = []
        for run in self.runs:
            trained, validated = ({row.epoch: row for row in split} for split in (run.metrics.train, run.metrics.cv))
            seconds = dict(zip(trained, training_seconds(run), strict=True))
            for epoch in sorted({*trained, *validated}):
                train, cv = trained.get(epoch), validated.get(epoch)
                workers = [row for row in run.metrics.workers if row.epoch == epoch]
                rows.append(
                    {
                        "run": run.name,
                        "epoch": epoch,
                        "accepted": cv and cv.accepted,
                        **{f"train_{kind.name}": figure(train, kind) for kind in FIGURES.values()},
                        **{f"cv_{kind.name}": figure(cv, kind) for kind in FIGURES.values()},
                        "learning_rate": train and train.learning_rate,
                        "schedule_learning_rate": train and train.schedule_learning_rate,
                        "training_seconds": seconds.get(epoch),
                        "frames_per_second": train and train.frames_per_second,
                        **{f"{label}_fraction": _mean(workers, f"{name}_fraction") for name, label in _TIMES.items()},
                        "consensus_distance": _mean(workers, "consensus_distance"),
                    }
                )
        return _csv(rows)


def report(
    paths: Sequence[Path], out: Path | None, runs_csv: Path | None = None, epochs_csv: Path | None = None
) -> Report:
    """Reads run dirs; if `out` is given, draws their plots into that folder; writes CSV files. DataError, RecipeError:
    a run dir is damaged, or none has metrics. UserError: matplotlib is missing, or a file cannot be written."""
    runs = read_runs(paths)
    plots = () if out is None else draw_report(runs, out)
    result = Report(tuple(runs), tuple(summarize(runs)), plots)
    texts = {runs_csv: result.runs_csv, epochs_csv: result.epochs_csv}
    tables = tuple(path for path in texts if path is not None)
    for path in tables:
        ensure_directory(path.parent)
        write_text(path, texts[path]())
    return replace(result, tables=tables)


def _flat(run: Run, summary: Summary) -> dict[str, Any]:
    """The figures of a run by column of the CSV file."""
    start = run.start.model_dump(include={"date", "host", "machine", "precision", "version"}) if run.start else {}
    spreads = {f"{label}_fraction": summary["shares"][name] for name, label in _TIMES.items()}
    spreads["consensus_distance"] = summary["consensus_distance"]
    figures = {
        name: value for name, value in summary.items() if name not in ("shares", "consensus_distance", "results")
    }
    for name, spread in spreads.items():
        figures |= {f"{name}_{part}": spread and spread[part] for part in ("mean", "worst", "rank")}
    return {**start, **figures, **summary["results"]}


def _shown(run: Run, summary: Summary) -> dict[str, Any]:
    """The figures of a run that its column of the table shows: with one worker, none that compare workers, no zeros."""
    figures = _flat(run, summary)
    model = summary["model_combination"] or summary["model_epoch"]
    figures |= {
        "excluded_averagings": figures["excluded_averagings"] or None,
        "model": model if summary["finished"] or model is None else f"{model} (so far)",
        "date": run.start and run.start.date[:16].replace("T", " "),
    }
    if summary["workers"] == 1:
        means = {name: value or None for name, value in figures.items() if name.endswith("_mean")}
        figures |= means | {name: None for name in figures if name.endswith("_rank")}
    return {name: value for name, value in figures.items() if value is not None}


def _format(text: str, figures: Mapping[str, Any]) -> str:
    try:
        return text.format_map(figures).replace("%", " %")
    except KeyError:
        return "-"


def _tables(names: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Tables with a column for each run; without rows in which nothing is known."""
    console = Console(
        file=(text := io.StringIO()), width=WIDTH, markup=False, emoji=False, highlight=False, color_system=None
    )
    for first in range(0, len(names), RUNS_PER_TABLE):
        part = slice(first, first + RUNS_PER_TABLE)
        table = Table.grid(padding=(0, 0, 0, 2), pad_edge=False)
        table.add_column(no_wrap=True)
        for _ in names[part]:
            table.add_column(justify="right", overflow="fold")
        for label, cells in {"": names, **rows}.items():
            if set(cells[part]) != {"-"} or label == SPEED_UP:
                table.add_row(*(printable(cell, "") for cell in (label, *cells[part])))
        console.print(*[""] * bool(first), table)
    return text.getvalue().rstrip()


def _mean(rows: Iterable[object], field: str) -> float | None:
    known = [value for row in rows if (value := getattr(row, field)) is not None]
    return fmean(known) if known else None


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of named values as CSV (RFC 4180, lines end with a line feed): numbers in full, true and false, nothing for
    None. Text that a spreadsheet would take for a formula is put behind an apostrophe."""
    text = io.StringIO()
    cells = [{_csv_cell(name): _csv_cell(value) for name, value in row.items()} for row in rows]
    writer = csv.DictWriter(text, dict.fromkeys(name for row in cells for name in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return "" if value is None else str(value).lower()
    text = printable(str(value), "")
    return f"'{text}" if _FORMULA.match(text) else text


def _word(key: str) -> str:
    return key.removesuffix(".name").split(".")[-1]


def _setting(recipe: Recipe | None, key: str) -> Any:
    """The value of a dotted key, "not set" for None; None if it is not used, as the strategy with one worker."""
    alone = recipe is not None and recipe.parallel.workers == 1 and key.startswith("parallel.")
    if recipe is None or (alone and key != "parallel.cpu_threads") or not is_read(recipe, key):
        return None
    value = get_value(recipe, key)
    return "not set" if value is None else value


def _settings(recipes: Sequence[Recipe | None]) -> dict[str, list[Any]]:
    """Values of each recipe by dotted key: those of `CONTRAST`, then further keys in which the recipes that use them
    differ, or that only some use and that are not at their default."""
    settings = {key: [_setting(recipe, key) for recipe in recipes] for key in CONTRAST}
    for key, info in keys().items():
        values = [_setting(recipe, key) for recipe in recipes]
        used = [value for value in values if value is not None]
        only_some = len(used) < sum(map(bool, recipes)) and used[:1] not in (
            [info.default],
            ["not set"],
        )
        differ = used and (only_some or any(value != used[0] for value in used))
        if differ and key not in ("parallel.workers", "precision"):
            settings.setdefault(key, values)
    return settings


def _texts(values: Sequence[Any]) -> list[str]:
    """Values of a key as text, paths without the folders that they share; "-" if it is not used."""
    paths = [value for value in values if isinstance(value, Path)]
    short = dict(zip(paths, shortest_ends(paths), strict=True))
    return ["-" if value is None else short[value] if isinstance(value, Path) else str(value) for value in values]
