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
from ddnn.report.runs import SHARES, Run, Spread, Summary, read_runs, summarise
from ddnn.util.text import table

CONTRAST = ("parallel.strategy", "parallel.averaging_period", "optimizer.name")
"""Keys of the recipe that are always shown (with the number of workers); others are shown if they differ."""
MOST_DIFFERING = 12
WIDEST = 28


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
            about = {"name": run.name, "path": str(run.path), **contrast}
            runs.append({**about, **asdict(summary), "events": events})
        return {"runs": runs, "plots": [str(path) for path in self.plots]}

    def as_text(self) -> str:
        rows = [("", [_short(run.name) for run in self.runs])]
        rows.append(("workers", [str(s.workers) for s in self.summaries]))
        recipes = [run.recipe for run in self.runs]
        rows += [(_word(key), _settings(recipes, key)) for key in CONTRAST]
        rows += [(key, _settings(recipes, key)) for key in _differing(recipes)]
        figures = [_figures(summary) for summary in self.summaries]
        rows += [(label, [one[label] for one in figures]) for label in figures[0]]
        lines = [table([[name, *cells] for name, cells in rows], align="lr")]
        if any(s.shares["compute"] is not None for s in self.summaries):
            lines.append(
                "times: mean over workers / worst worker, with the least compute or the most of the others (its rank)"
            )
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
        "warm-up training loss": (s.warmup_loss, "{:.4f}"),
        "best CV loss per frame": (s.best_loss, "{:.4f}"),
        "its CV frame accuracy": (s.best_accuracy, "{:.2%}"),
        "training seconds": (s.seconds, "{:,.1f}"),
        "frames/s": (s.frames_per_second, "{:,.0f}"),
        "frames/s per worker": (s.frames_per_second_per_worker, "{:,.0f}"),
        "speed-up over one worker": (s.speed_up, "{:.2f}"),
        **{f"{name} time": (shares[name], "{0.mean:.1f} / {0.worst:.1f}% ({0.rank})") for name in SHARES},
        "consensus distance, last epoch": (s.consensus_distance, spread),
        "bytes sent per averaging": (s.bytes_per_averaging, "{:,.0f}"),
        "excluded averagings": (s.excluded_averagings, "{}"),
    }
    return {k: "-" if v is None else form.format(v).replace("%", " %") for k, (v, form) in figures.items()}


def _settings(recipes: Sequence[Recipe | None], key: str) -> list[str]:
    """The value of a dotted key in each recipe; "-" if it is not used, as the strategy with one worker."""
    shown = []
    for recipe in recipes:
        alone = recipe is not None and recipe.parallel.workers == 1 and key.startswith("parallel.")
        value = None if recipe is None or alone or not is_read(recipe, key) else get_value(recipe, key)
        shown.append("-" if value is None else _short(str(value)))
    return shown


def _differing(recipes: Sequence[Recipe | None]) -> list[str]:
    """Further keys in which the recipes that use them differ."""
    shown_already = (*CONTRAST, "parallel.workers")
    differ = [key for key in keys() if key not in shown_already and len(set(_settings(recipes, key)) - {"-"}) > 1]
    return differ[:MOST_DIFFERING]


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else f"...{text[3 - WIDEST :]}"
