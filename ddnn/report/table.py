"""`ddnn report`: compares runs, as text, JSON, CSV and plots."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ddnn.recipe.keys import keys
from ddnn.recipe.load import is_read
from ddnn.recipe.schema import Recipe
from ddnn.recipe.section import get_value
from ddnn.report.figures import draw_report
from ddnn.report.runs import (
    Run,
    Spread,
    Summary,
    consensus_distances,
    read_results,
    read_runs,
    remarks,
    shortest_ends,
    summarise,
    training_seconds,
)
from ddnn.runs.run_status import FINAL
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import printable, table

CONTRAST = (
    "parallel.strategy", "parallel.averaging_period", "optimizer.name", "model.activation", "schedule.name", "seed",
)  # fmt: skip
"""Keys of the recipe that are always shown (with the number of workers); others are shown if they differ."""
MOST_DIFFERING = 12
WIDEST = 17  # of a cell
WIDTH = 100  # of a table: further runs are below it
LONG_NAME = 20  # runs with longer names have numbers in the table
SPEED_UP, EFFICIENCY = "speed-up over one worker", "efficiency: speed-up/workers"
_TIMES = {"compute": "compute", "data": "data", "comm": "communication", "wait": "waiting"}
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")  # how what a spreadsheet computes begins


@dataclass(frozen=True)
class Report:
    """Several runs, their results on test sets by name, and the files that were written."""

    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    results: tuple[dict[str, float], ...]
    plots: tuple[Path, ...]
    tables: tuple[Path, ...] = ()  # CSV
    of_other_models: tuple[list[str], ...] = ()  # results of each run that are not of its model, by name

    def remarks(self) -> list[str]:
        """What a reader must know, a sentence each."""
        lines = remarks(self.runs, self.summaries)
        for run, names in zip(self.runs, self.of_other_models, strict=True):
            if names:
                found = f"{run.name}: {', '.join(names)}: of another model than {FINAL} is now (was it trained longer?)"
                lines.append(f"{found}, not shown: evaluate or decode again")
        return lines

    def as_dict(self) -> dict[str, Any]:
        runs = []
        for run, summary, results in zip(self.runs, self.summaries, self.results, strict=True):
            contrast = {_word(key): run.recipe and get_value(run.recipe, key) for key in CONTRAST}
            events = [event.model_dump() for event in run.metrics.events]
            start = run.start and run.start.model_dump(exclude={"type", "epoch"})
            about = {"name": run.name, "path": str(run.path), **contrast, "start": start}
            runs.append({**about, **asdict(summary), "results": results, "events": events})
        recipes = [run.recipe for run in self.runs]
        differing = {key: [_setting(recipe, key) for recipe in recipes] for key in _differing(recipes)}
        settings = {key: [None if v is None else str(v) for v in values] for key, values in differing.items()}
        files = {"plots": [str(path) for path in self.plots], "tables": [str(path) for path in self.tables]}
        return {"runs": runs, "differing": settings, "remarks": self.remarks(), **files}

    def as_text(self) -> str:
        recipes, starts, outside = [run.recipe for run in self.runs], [run.start for run in self.runs], []
        rows = [("workers", [str(s.workers) for s in self.summaries])]
        rows += [(_word(key), _settings(recipes, key)) for key in CONTRAST]
        rows.append(("precision", [start.precision if start else "-" for start in starts]))
        rows.append(("machine", [printable(start.machine, "") if start else "-" for start in starts]))
        rows.append(("date", [start.date[:16].replace("T", " ") if start else "-" for start in starts]))
        differing = _differing(recipes)
        rows += [(key, _settings(recipes, key)) for key in differing[:MOST_DIFFERING]]
        tests = dict.fromkeys(name for results in self.results for name in results)
        results = [{name: found.get(name) for name in tests} for found in self.results]
        figures = [_figures(s, r) for s, r in zip(self.summaries, results, strict=True)]
        rows += [(label, [one[label] for one in figures]) for label in figures[0]]
        if all(s.workers == 1 for s in self.summaries):  # these say nothing of one worker
            rows = [row for row in rows if row[0] not in (SPEED_UP, "frames/s per worker")]
        names = [run.name for run in self.runs]
        if max(map(len, names)) > LONG_NAME:
            outside += [f"{number}: {name}" for number, name in enumerate(names, 1)]
            names = [str(number) for number in range(1, len(names) + 1)]
        for label, cells in rows:  # what is too long for a cell is printed below the table
            if max(map(len, cells)) > WIDEST:
                of_all = [f"{label}: {cells[0]}"] if len(set(cells)) == 1 else []
                outside += of_all or [f"{label}: {name}: {cell}" for name, cell in zip(names, cells, strict=True)]
        rows = [row for row in rows if max(map(len, row[1])) <= WIDEST]
        lines = ["\n\n".join(_blocks(names, rows)), *outside]
        if len(differing) > MOST_DIFFERING:
            lines.append(f"{len(differing) - MOST_DIFFERING} more keys differ: {', '.join(differing[MOST_DIFFERING:])}")
        lines += self.remarks()
        lines += [f"{run.name}: {event.as_text()}" for run in self.runs for event in run.metrics.events]
        lines += [f"plot: {path}" for path in self.plots] + [f"table: {path}" for path in self.tables]
        return "\n".join(lines)

    def runs_csv(self) -> str:
        """A row for each run: recipe keys, and figures that are not rounded."""
        recipes, rows = [run.recipe for run in self.runs], []
        settings = (*CONTRAST, "minibatch_size", "schedule.initial_learning_rate", *_differing(recipes))
        for run, summary, results in zip(self.runs, self.summaries, self.results, strict=True):
            row: dict[str, Any] = {"run": run.name, "path": run.path}
            row |= {key: _setting(run.recipe, key) for key in settings}
            row |= (
                run.start.model_dump(include={"date", "host", "machine", "precision", "version"}) if run.start else {}
            )
            for name, value in asdict(summary).items():
                parts = value if name == "shares" else {name: value} if name == "consensus_distance" else None
                for part, spread in (parts or {}).items():
                    label = f"{_TIMES[part]}_fraction" if name == "shares" else part
                    row |= {
                        f"{label}_{of}": x for of, x in (spread or dict.fromkeys(("mean", "worst", "rank"))).items()
                    }
                row |= {} if parts else {name: value}
            rows.append({**row, **results})
        return _csv(rows)

    def epochs_csv(self) -> str:
        """A row for each epoch of each run; fractions of time and consensus distance are means over the workers."""
        rows = []
        for run in self.runs:
            trained = {row.epoch: row for row in run.metrics.train}
            ends = dict(zip(trained, training_seconds(run), strict=True))
            validated = {row.epoch: row for row in run.metrics.cv}
            distances = dict(consensus_distances(run))
            for epoch in sorted({*trained, *validated}):
                row: dict[str, Any] = {"run": run.name, "epoch": epoch}
                train, cv = trained.get(epoch), validated.get(epoch)
                row["accepted"] = cv.accepted if cv else None
                for split, figures in (("train", train), ("cv", cv)):
                    row[f"{split}_loss"] = figures and figures.loss
                    row[f"{split}_frame_accuracy"] = figures and figures.frame_accuracy
                row |= {key: train and getattr(train, key) for key in ("learning_rate", "schedule_learning_rate")}
                row |= {"training_seconds": ends.get(epoch), "frames_per_second": train and train.frames_per_second}
                workers = [one for one in run.metrics.workers if one.epoch == epoch]
                for name, label in _TIMES.items():
                    known = [x for one in workers if (x := getattr(one, f"{name}_fraction")) is not None]
                    row[f"{label}_fraction"] = fmean(known) if known else None
                row["consensus_distance"] = fmean(distances[epoch]) if epoch in distances else None
                rows.append(row)
        return _csv(rows)


def report(
    paths: Sequence[Path], out: Path | None, runs_csv: Path | None = None, epochs_csv: Path | None = None
) -> Report:
    """Reads run dirs; if `out` is given, draws their plots into that folder; writes CSV files. DataError, RecipeError:
    a run dir is damaged, or none has metrics. UserError: matplotlib is missing, or a file cannot be written."""
    runs = read_runs(paths)
    plots = () if out is None else draw_report(runs, out)
    results, of_others = zip(*(read_results(run.path) for run in runs), strict=True)
    found = Report(tuple(runs), tuple(summarise(runs)), results, plots, of_other_models=of_others)
    wanted = {runs_csv: found.runs_csv, epochs_csv: found.epochs_csv}
    tables = tuple(path for path in wanted if path is not None)
    for path in tables:
        ensure_directory(path.parent)
        write_text(path, wanted[path]())
    return replace(found, tables=tables)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows of named values as CSV (RFC 4180, lines end with a line feed): numbers in full, true and false, nothing for
    None. Text that a spreadsheet would take for a formula is put behind an apostrophe."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = dict.fromkeys(name for row in rows for name in row)
    writer.writerow(map(_csv_cell, names))
    writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None or isinstance(value, (bool, int, float)):
        return "" if value is None else str(value).lower()
    text = printable(str(value), "")
    return f"'{text}" if _FORMULA.match(text) else text


def _blocks(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> Iterable[str]:
    """Tables of rows with a column for each run, with as many runs beside each other as fit; without rows of which
    nothing is known."""
    label = max(len(name) for name, _ in rows)
    widths = [2 + max(len(name), *(len(cells[run]) for _, cells in rows)) for run, name in enumerate(names)]
    first = 0
    while first < len(names):
        last = first + 1
        while last < len(names) and label + sum(widths[first : last + 1]) <= WIDTH:
            last += 1
        own = [(name, cells[first:last]) for name, cells in rows]
        known = [[name, *cells] for name, cells in own if set(cells) != {"-"} or name == SPEED_UP]
        lines = [["", *names[first:last]], *known]
        yield table(lines, align="lr")
        first = last


def _word(key: str) -> str:
    return key.removesuffix(".name").split(".")[-1]


def _figures(s: Summary, results: Mapping[str, float | None]) -> dict[str, str]:
    """Label and text of each figure; "-" for one that is not known."""
    figures: dict[str, tuple[object, str]] = {
        "epochs": (s.epochs, "{}"),
        "ended": (s.ended, "{}"),
        "warm-up training loss": (s.warmup_loss, "{:.4f}"),
        "final model: epoch": (s.model_combination or s.model_epoch, "{}" if s.finished else "{} (so far)"),
        "its training loss per frame": (s.model_train_loss, "{:.4f}"),
        "its CV loss per frame": (s.model_cv_loss, "{:.4f}"),
        "its training frame accuracy": (s.model_train_accuracy, "{:.2%}"),
        "its CV frame accuracy": (s.model_cv_accuracy, "{:.2%}"),
        "lower CV loss, not kept": (s.lowest_cv_loss, f"{{:.4f}} (epoch {s.lowest_cv_loss_epoch})"),
        **{name: (value, "{:.4f}" if name.endswith("frame") else "{:.2f}") for name, value in results.items()},
        "last learning rate, applied": (s.learning_rate, "{:.4g}"),
        "training seconds": (s.seconds, "{:,.1f}"),
        "frames/s": (s.frames_per_second, "{:,.0f}"),
        "frames/s per worker": (s.frames_per_second_per_worker, "{:,.0f}"),
        SPEED_UP: (s.speed_up, "{:.2f}"),
        EFFICIENCY: (s.efficiency, "{:.1%}"),
    }
    for name, label in _TIMES.items():
        spread, worst = s.shares[name], "least" if name == "compute" else "most"
        several = spread if s.workers > 1 else None
        some = spread if several or (spread and spread.worst > 0.0) else None
        figures[f"{label} time"] = (some and some.mean, "{:.1%}")
        figures[f"{label} time, {worst}"] = _worst(several, "{:.1%}")
    distance = s.consensus_distance if s.workers > 1 else None
    figures["consensus distance, last"] = (distance and distance.mean, "{:.3g}")
    figures["consensus distance, most"] = _worst(distance, "{:.3g}")
    figures["bytes sent per averaging"] = (s.bytes_per_averaging, "{:,.0f}")
    figures["excluded averagings"] = (s.excluded_averagings or None, "{}")
    return {k: "-" if v is None else form.format(v).replace("%", " %") for k, (v, form) in figures.items()}


def _worst(spread: Spread | None, form: str) -> tuple[float | None, str]:
    """The worst worker's value, and how it is shown with its rank."""
    return (None, "") if spread is None else (spread.worst, f"{form} (rank {spread.rank})")


def _setting(recipe: Recipe | None, key: str) -> Any:
    """The value of a dotted key, "not set" for None; None if it is not used, as the strategy with one worker."""
    alone = recipe is not None and recipe.parallel.workers == 1 and key.startswith("parallel.")
    if recipe is None or (alone and key != "parallel.cpu_threads") or not is_read(recipe, key):
        return None
    value = get_value(recipe, key)
    return "not set" if value is None else value


def _settings(recipes: Sequence[Recipe | None], key: str) -> list[str]:
    """The value of a dotted key in each recipe, paths without the folders that they share; "-" if it is not used."""
    values = [_setting(recipe, key) for recipe in recipes]
    paths = [value for value in values if isinstance(value, Path)]
    short = dict(zip(paths, shortest_ends(paths), strict=True))
    return ["-" if v is None else printable(short[v] if isinstance(v, Path) else str(v), "") for v in values]


def _differing(recipes: Sequence[Recipe | None]) -> list[str]:
    """Further keys in which the recipes that use them differ, or that only some use and that are not at their default."""
    shown_already = (*CONTRAST, "parallel.workers", "precision")
    differ = []
    for key, info in keys().items():
        known = [_setting(recipe, key) for recipe in recipes if recipe is not None]
        used = [value for value in known if value is not None]
        if key not in shown_already and (
            any(value != used[0] for value in used)
            or (0 < len(used) < len(known) and used[0] not in (info.default, "not set"))
        ):
            differ.append(key)
    return differ
