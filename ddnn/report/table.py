"""`ddnn report`: compares runs, as text, JSON, CSV and plots."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from pathlib import Path
from shutil import get_terminal_size
from typing import Any

from rich.cells import cell_len
from rich.console import Console, JustifyMethod
from rich.table import Table

from ddnn.nn.figures import FIGURES
from ddnn.recipe.keys import keys
from ddnn.recipe.load import is_read
from ddnn.recipe.schema import Recipe
from ddnn.recipe.section import get_value
from ddnn.report.figures import draw_report
from ddnn.report.runs import Run, Summary, read_runs, remarks, shortest_ends, summarize
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import printable, render

CONTRAST = (
    "parallel.strategy", "parallel.averaging_period", "optimizer.name", "model.activation", "schedule.name", "seed",
)  # fmt: skip
"""Keys of the recipe that are always shown (with the number of workers); others are shown if they differ."""
MAX_DIFFERING = 12
WIDTH = 100  # of a table, where neither a terminal nor COLUMNS says it
RUNS_AS_ROWS = 4  # from so many runs on each has a row, fewer have a column each
MAX_COLUMN_WIDTH = 30
EPOCH_PARTS = ("train", "cv", "workers")
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")  # how what a spreadsheet computes begins


@dataclass(frozen=True)
class Report:
    """Several runs, their summaries, and the files that were written."""

    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    plots: tuple[Path, ...]
    tables: tuple[Path, ...] = ()  # CSV
    pages: tuple[Path, ...] = ()  # HTML

    @cached_property
    def settings(self) -> dict[str, list[Any]]:
        return _settings([run.recipe for run in self.runs])

    def as_dict(self) -> dict[str, Any]:
        runs = []
        for number, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True)):
            settings = {key: v if v is None else str(v) for key, v in self._settings_of(number).items()}
            start, events = run.start and run.start.model_dump(), [event.model_dump() for event in run.metrics.events]
            more = {"settings": settings, "results": run.results[0], "start": start, "events": events}
            runs.append({"name": run.name, "path": str(run.path), **summary, **more})
        kinds = {"plots": self.plots, "tables": self.tables, "pages": self.pages}
        files = {kind: list(map(str, paths)) for kind, paths in kinds.items()}
        return {"runs": runs, "remarks": remarks(self.runs, self.summaries), **files}

    def _settings_of(self, number: int) -> dict[str, Any]:
        return {key: values[number] for key, values in self.settings.items()}

    @cached_property
    def texts(self) -> dict[str, list[str | None]]:
        """Of each recipe key in `settings`: its value in each run as text, None if it is not used."""
        return {key: _texts(values) for key, values in self.settings.items()}

    @cached_property
    def columns(self) -> list[dict[str, str]]:
        """Of each run its settings and figures, texts by their labels; "-" is not known. All runs have the same labels."""
        keys = list(self.texts)
        contrast, differing = keys[: len(CONTRAST)], keys[len(CONTRAST) :][:MAX_DIFFERING]
        results = dict.fromkeys(name for run in self.runs for name in run.results[0])
        columns = []
        for number, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True)):
            text = render(
                "report.txt.j2",
                **{"s": summary, "figures": FIGURES.values(), "printable": printable},
                keys={_word(key): self.texts[key][number] for key in contrast},
                differing={key: self.texts[key][number] for key in differing},
                results=results | run.results[0],
            )
            columns.append(dict(line.split("\t", 1) for line in text.splitlines() if line))
        return columns

    @cached_property
    def events(self) -> list[str]:
        """Resumes and restarts, a sentence each."""
        return [f"{run.name}: {event.as_text()}" for run in self.runs for event in run.metrics.events]

    def as_text(self) -> str:
        lines = [_tables([run.name for run in self.runs], self.columns)]
        if hidden := list(self.settings)[len(CONTRAST) + MAX_DIFFERING :]:
            lines.append(f"{len(hidden)} more keys differ: {', '.join(hidden)}")
        lines += [*remarks(self.runs, self.summaries), *self.events]
        for kind, paths in (("plot", self.plots), ("table", self.tables), ("page", self.pages)):
            lines += [f"{kind}: {path}" for path in paths]
        return "\n".join(lines)

    def runs_csv(self) -> str:
        """A row for each run: recipe keys, and figures that are not rounded."""
        more = ("minibatch_size", "schedule.initial_learning_rate")
        rows = []
        for number, (run, summary) in enumerate(zip(self.runs, self.summaries, strict=True)):
            settings = self._settings_of(number) | {key: _setting(run.recipe, key) for key in more}
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


def _tables(names: Sequence[str], columns: Sequence[Mapping[str, str]]) -> str:
    """A table with a column for each run; of many runs what all have in common, and tables with a row for each. As wide
    as the terminal, without figures that no run has."""
    room = get_terminal_size((WIDTH, 1)).columns
    figures = {label: [column[label] for column in columns] for label in columns[0]}
    figures = {label: cells for label, cells in figures.items() if {*cells} != {"-"}}
    if len(names) < RUNS_AS_ROWS:
        return _table(["", *names], ([label, *cells] for label, cells in figures.items()), room)
    common = {label: cells[0] for label, cells in figures.items() if len({*cells}) == 1}
    blocks = [{"": _column_width(*names)}]  # the width of each column
    for label, cells in figures.items():
        width = _column_width(*cells, *label.split())
        if label not in common:
            if len(blocks[-1]) > 1 and sum(blocks[-1].values()) + 2 * len(blocks[-1]) + width > room:
                blocks.append({"": blocks[-1][""]})
            blocks[-1][label] = width
    tables = [_table(["all runs", ""], common.items(), room, side="left")] if common else []
    for block in blocks:
        cells_of_runs = zip(names, *(figures[label] for label in block if label), strict=True)
        tables.append(_table(list(block), cells_of_runs, room, block.values()))
    return "\n\n".join(tables)


def _column_width(*texts: str) -> int:
    return min(max(map(cell_len, texts)), MAX_COLUMN_WIDTH)


def _table(
    header: Sequence[str], rows: Iterable[Sequence[str]], room: int,
    widths: Iterable[int | None] = repeat(None), side: JustifyMethod = "right",
) -> str:  # fmt: skip
    """Lines of at most `room` columns, broken between words. `side`: of the cells right of the first column."""
    options: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False, "color_system": None}
    console = Console(file=(text := io.StringIO()), width=room, **options)
    table = Table(box=None, padding=(0, 0, 0, 2), pad_edge=False)
    for label, width in zip(header, widths, strict=False):
        justify: JustifyMethod = side if table.columns else "left"
        whole = not label and width is None  # the labels beside columns of runs
        table.add_column(label, justify=justify, overflow="fold", width=width, no_wrap=whole)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


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
    by_frames = key == "parallel.averaging_period" and recipe.parallel.averaging_frames is not None
    value = recipe.parallel.period if by_frames else get_value(recipe, key)
    return "not set" if value is None else value


def _settings(recipes: Sequence[Recipe | None]) -> dict[str, list[Any]]:
    """Values of each recipe by dotted key: those of `CONTRAST`, then further keys in which the recipes that use them
    differ, or that only some use and that are not at their default. What the log does changes no training."""
    settings = {key: [_setting(recipe, key) for recipe in recipes] for key in CONTRAST}
    for key, info in keys().items():
        values = [_setting(recipe, key) for recipe in recipes]
        used = [value for value in values if value is not None]
        only_some = len(used) < sum(map(bool, recipes)) and used[:1] not in (
            [info.default],
            ["not set"],
        )
        differ = used and (only_some or any(value != used[0] for value in used))
        if differ and key not in ("parallel.workers", "precision") and not key.startswith("log."):
            settings.setdefault(key, values)
    return settings


def _texts(values: Sequence[Any]) -> list[str | None]:
    """Values of a key as text, paths without the folders that they share; None if it is not used."""
    paths = [value for value in values if isinstance(value, Path)]
    short = dict(zip(paths, shortest_ends(paths), strict=True))
    return [None if value is None else short[value] if isinstance(value, Path) else str(value) for value in values]
