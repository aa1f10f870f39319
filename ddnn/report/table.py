"""`ddnn report`: compares runs, as text, JSON, CSV and plots."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ddnn.nn.figures import FIGURES
from ddnn.recipe.keys import keys
from ddnn.recipe.load import is_read
from ddnn.recipe.schema import Recipe
from ddnn.recipe.section import get_value
from ddnn.report.figures import draw_report
from ddnn.report.runs import Run, Summary, read_runs, remarks, shortest_ends, summarize
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import printable

CONTRAST = (
    "parallel.strategy", "parallel.averaging_period", "optimizer.name", "model.activation", "schedule.name", "seed",
)  # fmt: skip
"""Keys of the recipe that are always shown (with the number of workers); others are shown if they differ."""
MAX_DIFFERING = 12
WIDTH = 100  # of a table
RUNS_PER_TABLE = 4
EPOCH_PARTS = ("train", "cv", "workers")
SPEED_UP = "speed-up over one worker"
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")  # how what a spreadsheet computes begins
_START_ROWS = {"precision": "{precision}", "machine": "{machine}", "date": "{date:.16}"}
_MODEL_ROWS = {
    "epochs": "{epochs}",
    "ended": "{ended}",
    "warm-up training loss": "{warmup_loss:.4f}",
    "final model: epoch": "{model}",
    **{
        f"its {split} {figure.label}{'' if figure.percent else ' per frame'}": (
            f"{{model_{key}_{figure.name}:{'.2%' if figure.percent else '.4f'}}}"
        )
        for figure in FIGURES.values()
        for split, key in (("training", "train"), ("CV", "cv"))
    },
    "lower CV loss, not kept": "{lowest_cv_loss:.4f} (epoch {lowest_cv_loss_epoch})",
}
_TIME_ROWS = {
    "last learning rate, applied": "{learning_rate:.4g}",
    "training seconds": "{seconds:,.1f}",
    "frames/s": "{frames_per_second:,.0f}",
    "frames/s per worker": "{frames_per_second_per_worker:,.0f}",
    SPEED_UP: "{speed_up:.2f}",
    "efficiency: speed-up/workers": "{efficiency:.1%}",
    "compute time": "{compute_fraction_mean:.1%}",
    "compute time, least": "{compute_fraction_worst:.1%} (rank {compute_fraction_rank})",
    "data time": "{data_fraction_mean:.1%}",
    "data time, most": "{data_fraction_worst:.1%} (rank {data_fraction_rank})",
    "communication time": "{comm_fraction_mean:.1%}",
    "communication time, most": "{comm_fraction_worst:.1%} (rank {comm_fraction_rank})",
    "waiting time": "{wait_fraction_mean:.1%}",
    "waiting time, most": "{wait_fraction_worst:.1%} (rank {wait_fraction_rank})",
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
        for number, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True)):
            contrast = {_word(key): self.settings[key][number] for key in CONTRAST}
            start, events = run.start and run.start.model_dump(), [event.model_dump() for event in run.metrics.events]
            more = {"results": run.results[0], "start": start, "events": events}
            runs.append({"name": run.name, "path": str(run.path), **contrast, **summary, **more})
        differing = {key: values for key, values in self.settings.items() if key not in CONTRAST}
        return {
            "runs": runs,
            "differing": {key: [v if v is None else str(v) for v in values] for key, values in differing.items()},
            "remarks": remarks(self.runs, self.summaries),
            "plots": list(map(str, self.plots)),
            "tables": list(map(str, self.tables)),
        }

    def as_text(self) -> str:
        shown = {_word(key) if key in CONTRAST else key: _texts(values) for key, values in self.settings.items()}
        contrast, differing = list(shown.items())[: len(CONTRAST)], list(shown.items())[len(CONTRAST) :]
        rows = self._rows({"workers": "{workers}"}) | dict(contrast) | self._rows(_START_ROWS)
        rows |= dict(differing[:MAX_DIFFERING]) | self._rows(_MODEL_ROWS)
        results = [run.results[0] for run in self.runs]
        for name in dict.fromkeys(name for result in results for name in result):
            digits = 4 if name.endswith("frame") else 2
            rows[name] = [f"{result[name]:.{digits}f}" if name in result else "-" for result in results]
        lines = [_tables([run.name for run in self.runs], rows | self._rows(_TIME_ROWS))]
        if hidden := [key for key, _ in differing[MAX_DIFFERING:]]:
            lines.append(f"{len(hidden)} more keys differ: {', '.join(hidden)}")
        lines += remarks(self.runs, self.summaries)
        lines += [f"{run.name}: {event.as_text()}" for run in self.runs for event in run.metrics.events]
        lines += [f"plot: {path}" for path in self.plots] + [f"table: {path}" for path in self.tables]
        return "\n".join(lines)

    def _rows(self, formats: Mapping[str, str]) -> dict[str, list[str]]:
        """Label -> a cell for each run; "-" if a run does not have the figure."""
        figures = [_shown(summary) for summary in self.summaries]
        return {label: [_format(text, known) for known in figures] for label, text in formats.items()}

    def runs_csv(self) -> str:
        """A row for each run: recipe keys, and figures that are not rounded."""
        more = ("minibatch_size", "schedule.initial_learning_rate")
        rows = []
        for number, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True)):
            settings = {key: values[number] for key, values in self.settings.items()}
            settings |= {key: _setting(run.recipe, key) for key in more}
            rows.append({"run": run.name, "path": run.path, **settings, **summary, **run.results[0]})
        return _csv(rows)

    def epochs_csv(self) -> str:
        """The rows of metrics.jsonl of each run, of each epoch's training, cross-validation and workers."""
        rows = ((run, row) for run in self.runs for part in EPOCH_PARTS for row in getattr(run.metrics, part))
        return _csv([{"run": run.name, **row.model_dump()} for run, row in rows])


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


def _shown(summary: Summary) -> dict[str, Any]:
    """The figures of a run that its column of the table shows: with one worker, none that compare workers, no zeros."""
    model = summary["model_combination"] or summary["model_epoch"]
    figures = summary | {"model": model if summary["finished"] or model is None else f"{model} (so far)"}
    figures["excluded_averagings"] = figures["excluded_averagings"] or None
    if summary["workers"] == 1:
        for name, value in summary.items():
            if name.endswith(("_rank", "_per_worker")) or (name.endswith("_mean") and value == 0.0):
                del figures[name]
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
            if set(cells[part]) != {"-"}:
                table.add_row(*(printable(cell, "") for cell in (label, *cells[part])))
        console.print(*[""] * bool(first), table)
    return text.getvalue().rstrip()


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
