"""Runs as a page: one file that needs no other, no network and no library. A browser draws its curves by
`ddnn/templates/report.js`; its table can be read without."""

from __future__ import annotations

import hashlib
import math
import re
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddnn import __version__
from ddnn.nn.figures import FIGURES
from ddnn.recipe.load import dump_recipe
from ddnn.report.figures import (
    LABELS,
    OUTLIERS,
    RATE,
    SHARE_COLORS,
    Points,
    learning_points,
    outlier_limit,
    panel_names,
    style,
    time_bars,
)
from ddnn.report.runs import WER, Run, compares, remarks, warnings
from ddnn.report.table import Report
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import environment

_BEST_OF_CV = {f"CV {figure.label}": min if figure.better == "lower" else max for figure in FIGURES.values()}
_BEST = {f": {WER}": min, ": loss per frame": min, ": frame accuracy (%)": max, "speed-up over one worker": max}
"""Which number of a column is the best, by the label or its end."""
_NUMBER = re.compile(r"(-?[\d,]+(?:\.\d+)?(?:e[-+]?\d+)?)(?: %| \(.*\))?")
MAX_CARDS = 6  # of a kind


def write_page(found: Report, path: Path) -> Report:
    """Writes the page; returns the report, which then names it. UserError: the file cannot be written."""
    ensure_directory(path.parent)
    write_text(path, render_page(found))
    return replace(found, pages=(path,))


def render_page(found: Report) -> str:
    runs, alike = found.runs, compares(found.runs)
    templates = environment(html=True)
    assert templates.loader is not None
    script = templates.loader.get_source(templates, "report.js")[0]
    columns = {label: _column(label, [column[label] for column in found.columns], alike) for label in found.columns[0]}
    columns = {label: cells for label, cells in columns.items() if any(cell["text"] != "-" for cell in cells)}
    own = [label for label, cells in columns.items() if len(runs) > 1 and _differ(label, cells)]
    names, widths = time_bars(runs)
    differing = {key: values for key, values in found.texts.items() if len({*values}) > 1}
    return templates.get_template("report.html.j2").render(
        runs=runs,
        cards=list(_cards(found, alike)),
        shared={label: cells[0]["text"] for label, cells in columns.items() if label not in own},
        columns={label: columns[label] for label in sorted(own, key=lambda label: _chooser(label) is None)},
        differing=differing,
        bars=dict(zip(names, widths.T.tolist(), strict=True)),
        shares=SHARE_COLORS,
        remarks=remarks(runs, found.summaries),
        events=found.events,
        recipes={run.name: dump_recipe(run.recipe) for run in runs if run.recipe is not None},
        data=_curves(runs),
        script=script,
        digest=b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        version=__version__,
    )


def _chooser(label: str) -> Any:
    """`min` or `max`, which finds the best number of a column; None: none is better than another."""
    suffixes = (choose for end, choose in _BEST.items() if label.endswith(end))
    return max if label == "frames/s" else _BEST_OF_CV.get(label) or next(suffixes, None)


def _column(label: str, texts: Sequence[str], alike: bool) -> list[dict[str, Any]]:
    """A cell for each run: its text, the number that it shows (None: it is no number), whether it is the best."""
    matches = [_NUMBER.fullmatch(text) for text in texts]
    numbers = [float(match[1].replace(",", "")) if match else None for match in matches]
    known = [number for number in numbers if number is not None]
    choose = _chooser(label) if alike or label not in _BEST_OF_CV else None
    best = choose(known) if choose and len(known) > 1 else None
    cells = zip(texts, numbers, strict=True)
    return [{"text": text, "number": n, "best": n is not None and n == best} for text, n in cells]


def _differ(label: str, cells: Sequence[dict[str, Any]]) -> bool:
    return _chooser(label) is not None or len({cell["text"] for cell in cells}) > 1


def _cards(found: Report, alike: bool) -> Iterator[tuple[str, str, str]]:
    """What a reader looks for first: title, value, remark."""
    several = len(found.runs) > 1
    results = list(zip([run.name for run in found.runs], found.summaries, strict=True))
    failures = [(run.failure, run.name) for run in found.runs if run.failure is not None]
    for end, name in failures[:MAX_CARDS]:
        yield "ended", end.reason, "\n".join([name] * several + [end.detail])
    models = [(run.metrics.last_accepted, run.name) for run in found.runs]
    known = [(model, name) for model, name in models if model is not None and model.loss is not None]
    if known and alike:
        model, name = min(known, key=lambda pair: pair[0].loss or 0.0)
        figure = FIGURES[next(iter(model.figures))]
        where = f"epoch {model.epoch}" + f" of {name}" * several
        yield "lowest " * several + f"CV {figure.label}", figure.format(model.loss or 0.0), where
    elif known:
        yield "CV loss", "-", "the CV sets or the criteria differ: losses do not compare"
    labels = dict.fromkeys(label for run in found.runs for label in run.results[0] if label.endswith(f": {WER}"))
    for label in list(labels)[:MAX_CARDS]:
        rates = ((run.results[0][label], number) for number, run in enumerate(found.runs) if label in run.results[0])
        rate, number = min(rates)
        run, details = found.runs[number], [label.removesuffix(f": {WER}")]
        details += [run.name] * several
        if (interval := run.results[2].get(label)) is not None:
            details.append(f"95 % interval {interval[0]:.2f} .. {interval[1]:.2f}")
        yield "best " * several + "WER", f"{rate:.2f} %", "\n".join(details)
    speeds = [(s["frames_per_second"], name, s["workers"]) for name, s in results if s["frames_per_second"]]
    if speeds:
        speed, name, workers = max(speeds)
        workers_text = f"{workers} worker{'s' * (workers > 1)}"
        yield "fastest" if several else "speed", f"{speed:,.0f} frames/s", f"{name}, " * several + workers_text
    problems = [warnings(run) for run in found.runs]
    which = f"of {sum(map(bool, problems))} of the runs" if several else "of this run"
    count = sum(map(len, problems))
    yield "warnings", str(count) if count else "none", f"{which}: see the remarks below" if count else ""


def _curves(runs: Sequence[Run]) -> dict[str, Any]:
    """What report.js draws: panels, each with the curves of all runs, of points (epoch, seconds, value, accepted)."""
    panels = []
    for name in panel_names(runs):
        splits = [[learning_points(run, rows, name) for rows in (run.metrics.train, run.metrics.cv)] for run in runs]
        limit = outlier_limit([cv[:, 2] for _, cv in splits], OUTLIERS[name])
        curves = [{"train": _json(train), "cv": _json(cv)} for train, cv in splits]
        percent = name in FIGURES and FIGURES[name].percent
        kind = {"label": LABELS[name], "percent": percent, "log": name == RATE}
        panels.append({**kind, "limit": limit if math.isfinite(limit) else None, "curves": curves})
    styles = [style(number) for number in range(len(runs))]
    return {
        "panels": panels,
        "runs": [
            {"name": run.name, "color": color, "line": line} for run, (color, _, line) in zip(runs, styles, strict=True)
        ],
    }


def _json(points: Points) -> list[list[float | None]]:
    return [[value if math.isfinite(value) else None for value in point] for point in points.tolist()]
