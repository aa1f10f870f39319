"""`ddnn report`: compares runs, as text, JSON and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddnn.recipe.keys import keys
from ddnn.recipe.load import get_value, is_read
from ddnn.recipe.schema import Recipe
from ddnn.report.figures import draw_report
from ddnn.report.runs import SHARES, Run, Spread, Summary, read_runs, remarks, shortest_ends, summarise
from ddnn.util.text import printable, table

CONTRAST = (
    "parallel.strategy", "parallel.averaging_period", "optimizer.name", "model.activation", "schedule.name", "seed",
)  # fmt: skip
"""Keys of the recipe that are always shown (with the number of workers); others are shown if they differ."""
MOST_DIFFERING = 12
WIDEST = 28
SPEED_UP = "speed-up over one worker"


@dataclass(frozen=True)
class Report:
    """Several runs; `plots` are the files that were drawn."""

    runs: tuple[Run, ...]
    summaries: tuple[Summary, ...]
    plots: tuple[Path, ...]

    def as_dict(self) -> dict[str, Any]:
        runs = []
        for run, summary in zip(self.runs, self.summaries, strict=True):
            contrast = {_word(key): run.recipe and get_value(run.recipe, key) for key in CONTRAST}
            events = [event.model_dump() for event in run.metrics.events]
            start = run.start and run.start.model_dump(exclude={"type", "epoch"})
            about = {"name": run.name, "path": str(run.path), **contrast, "start": start}
            runs.append({**about, **asdict(summary), "events": events})
        recipes = [run.recipe for run in self.runs]
        differing = {key: [_setting(recipe, key) for recipe in recipes] for key in _differing(recipes)}
        settings = {key: [None if v is None else str(v) for v in values] for key, values in differing.items()}
        plots = [str(path) for path in self.plots]
        return {"runs": runs, "differing": settings, "remarks": remarks(self.runs, self.summaries), "plots": plots}

    def as_text(self) -> str:
        rows = [("", [_short(run.name) for run in self.runs])]
        rows.append(("workers", [str(s.workers) for s in self.summaries]))
        recipes = [run.recipe for run in self.runs]
        rows += [(_word(key), _settings(recipes, key)) for key in CONTRAST]
        starts = [run.start for run in self.runs]
        rows.append(("precision", [start.precision if start else "-" for start in starts]))
        rows.append(("machine", [_short(printable(start.machine, "")) if start else "-" for start in starts]))
        rows.append(("date", [start.date[:16].replace("T", " ") if start else "-" for start in starts]))
        differing = _differing(recipes)
        rows += [(key, _settings(recipes, key)) for key in differing[:MOST_DIFFERING]]
        figures = [_figures(summary) for summary in self.summaries]
        labels = [name for name in figures[0] if name == SPEED_UP or any(one[name] != "-" for one in figures)]
        rows += [(label, [one[label] for one in figures]) for label in labels]
        lines = [table([[name, *cells] for name, cells in rows], align="lr")]
        if any(s.shares["compute"] is not None for s in self.summaries):
            lines.append(
                "times: mean over workers / worst worker, with the least compute or the most of the others (its rank)"
            )
        if len(differing) > MOST_DIFFERING:
            lines.append(f"{len(differing) - MOST_DIFFERING} more keys differ: {', '.join(differing[MOST_DIFFERING:])}")
        lines += remarks(self.runs, self.summaries)
        lines += [f"{run.name}: {event.as_text()}" for run in self.runs for event in run.metrics.events]
        lines += [f"plot: {path}" for path in self.plots]
        return "\n".join(lines)


def report(paths: Sequence[Path], out: Path | None) -> Report:
    """Reads run dirs and, if `out` is given, draws their plots into that folder. DataError, RecipeError: a run dir is
    damaged. UserError: matplotlib is missing, or `out` cannot be written."""
    runs = read_runs(paths)
    plots = () if out is None else draw_report(runs, out)
    return Report(tuple(runs), tuple(summarise(runs)), plots)


def _word(key: str) -> str:
    return key.removesuffix(".name").split(".")[-1]


def _figures(s: Summary) -> dict[str, str]:
    """Label and text of each figure; "-" for one that is not known."""
    spread = "{0.mean:.3g} / {0.worst:.3g} ({0.rank})"
    shares = {name: x and Spread(100 * x.mean, 100 * x.worst, x.rank) for name, x in s.shares.items()}
    figures: dict[str, tuple[object, str]] = {
        "epochs": (s.epochs, "{}"),
        "ended": (s.ended, "{}"),
        "warm-up training loss": (s.warmup_loss, "{:.4f}"),
        "final model: epoch": (s.model_epoch, "{}" if s.finished else "{} (so far)"),
        "its CV loss per frame": (s.model_cv_loss, "{:.4f}"),
        "its CV frame accuracy": (s.model_cv_accuracy, "{:.2%}"),
        "lower CV loss, model not kept": (s.lowest_cv_loss, f"{{:.4f}} (epoch {s.lowest_cv_loss_epoch})"),
        "applied learning rate, last epoch": (s.learning_rate, "{:.4g}"),
        "training seconds": (s.seconds, "{:,.1f}"),
        "frames/s": (s.frames_per_second, "{:,.0f}"),
        "frames/s per worker": (s.frames_per_second_per_worker, "{:,.0f}"),
        SPEED_UP: (s.speed_up, "{:.2f}"),
        **{f"{name} time": (shares[name], "{0.mean:.1f} / {0.worst:.1f}% ({0.rank})") for name in SHARES},
        "consensus distance, last epoch": (s.consensus_distance, spread),
        "bytes sent per averaging": (s.bytes_per_averaging, "{:,.0f}"),
        "excluded averagings": (s.excluded_averagings, "{}"),
    }
    return {k: "-" if v is None else form.format(v).replace("%", " %") for k, (v, form) in figures.items()}


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
    return ["-" if v is None else _short(printable(short[v] if isinstance(v, Path) else str(v), "")) for v in values]


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


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"...{text[3 - WIDEST :]}"
