"""The report of `ddnn reproduce`: Markdown, the same as HTML, PNG files, JSON. Its text is in
ddnn/templates/reproduce.md.j2."""

from __future__ import annotations

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import quote

from ddnn.reproduce.comparison import HypothesisResult, VerdictName, compare, degradations
from ddnn.reproduce.entries import SpeedUp, TableEntry, metrics_of, overloaded_runs, table_entries
from ddnn.reproduce.plots import Picture, table_pictures
from ddnn.reproduce.runs import RunRecord
from ddnn.reproduce.tables import ReproduceConfig, Table, paper
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import environment, plural, without_controls

if TYPE_CHECKING:
    import jinja2

FEW = 2  # tables that the title names
ALL_TABLES = "the paper's tables, reproduced"
AIM = 0.1  # percentage points of frame accuracy that many workers may lose


@dataclass(frozen=True)
class Report:
    """What the template shows, by its names for it; the pictures in their order; the same figures for `--json`."""

    context: dict[str, Any]
    pictures: Sequence[Picture]
    summary: Mapping[str, object]

    def markdown(self, folder: str) -> str:
        """`folder` has the pictures, relative to the Markdown file."""
        text = report_templates().get_template("reproduce.md.j2").render(**self.context, folder=folder)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def html(self, folder: str, images: Mapping[str, bytes]) -> str:
        """The Markdown as a page that needs no other file. `images`: PNG files by name."""
        from markdown_it import MarkdownIt
        from markupsafe import Markup

        parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
        tokens = parser.parse(self.markdown(folder))
        headings = {}
        for token, content in pairwise(tokens):
            if token.type == "heading_open" and token.tag == "h2":
                title = "".join(part.content for part in content.children or ())
                anchor = re.sub(r"[^a-z0-9]+", "-", title.lower())
                token.attrSet("id", anchor)
                headings[anchor] = title
        body = parser.renderer.render(tokens, parser.options, {})
        for name, image in images.items():
            body = body.replace(
                f'src="{quote(folder)}/{name}"', f'src="data:image/png;base64,{b64encode(image).decode()}"'
            )
        page = environment(html=True).get_template("page.html.j2")
        return page.render(title=self.context["title"], headings=headings, body=Markup(body))

    def write(self, path: Path) -> list[Path]:
        """Writes PATH.md, PATH.html (which needs no other file) and the plots into the folder PATH; returns all.
        UserError: a file cannot be written, or matplotlib is missing."""
        ensure_directory(path.parent)
        drawn = [picture.draw(path / picture.name) for picture in self.pictures]
        images = {plot.name: plot.read_bytes() for plot in drawn}
        texts = {".md": self.markdown(path.name), ".html": self.html(path.name, images)}
        for suffix, text in texts.items():
            write_text(path.with_name(path.name + suffix), text)
        return [*(path.with_name(path.name + suffix) for suffix in texts), *drawn]


def report_templates() -> jinja2.Environment:
    """The templates with `FILTERS`, and with statements that give no text (`do`)."""
    templates = environment()
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
    """The report on these tables, which `command` writes, from the records of runs by their names; the names of missing
    ones are shown as missing. Speed-ups are for the tables about speed."""
    hypotheses = [compare(config, table, hypothesis, records) for table in tables for hypothesis in table.hypotheses]
    entries: dict[tuple[str, int], TableEntry] = {}
    sections, pictures = [], list[Picture]()
    for table in tables:
        own = table_entries(config, table, records, missing)
        for entry in own if table.kind == "accuracy" else ():
            entries.setdefault((config.recipe_name(entry.condition.name), entry.workers), entry)
        metrics = metrics_of(config, [run for entry in own for run in entry.runs])
        names = [condition.name for condition in table.conditions if table.kind == "speed"]
        speeds = [speed for speed in speed_ups if speed.condition in names]
        drawn = table_pictures(config, table, own, metrics, speeds)
        section = {"table": table, "entries": own, "metrics": metrics, "speed_ups": speeds, "pictures": drawn}
        sections.append({**section, "hypotheses": [result for result in hypotheses if result.table is table]})
        pictures += drawn
    metric, losses = degradations(config, entries.values(), records)
    counts = Counter(result.verdict for result in hypotheses)
    verdicts = {name: counts[name] for name in get_args(VerdictName) if counts[name]}
    few = len(tables) <= FEW  # then the title says which
    context = {
        "title": f"{config.name}: {'; '.join(table.title for table in tables) if few else ALL_TABLES}",
        "config": config,
        "source": paper().source,
        "missing": missing,
        "command": command,
        "hypotheses": hypotheses,
        "verdicts": verdicts,
        "sections": sections,
        "metrics": metrics_of(config, records.values()),
        "degradation_metric": metric,
        "degradations": losses,
        "failed_entries": [entry for entry in entries.values() if entry.failed],
        "aim": AIM,
        "overloaded": overloaded_runs(records),
        "runs": sorted(records.values(), key=lambda record: (record.condition, record.workers, record.seed)),
    }
    summary = {
        "hypotheses": [result.to_dict() for result in hypotheses],
        "verdicts": verdicts,
        "degradations": [loss.to_dict() for loss in losses],
        "speed_ups": [vars(speed) for speed in speed_ups],
    }
    return Report(context, pictures, summary)


def published_differences(result: HypothesisResult) -> str:
    """The paper's differences, + as expected; for "many" on the most GPUs that it has both conditions on."""
    hypothesis = result.hypothesis
    if not hypothesis.published:
        return "not in the paper"
    sides = [
        {
            gpus: wers
            for (row, gpus), wers in result.table.published.items()
            if row == name and (gpus > 1) == (size == "max")
        }
        for name, size in (hypothesis.expected_better, hypothesis.expected_worse)
    ]
    if hypothesis.expected_better[1] == hypothesis.expected_worse[1]:
        common = sides[0].keys() & sides[1].keys()
        sides = [{gpus: wers for gpus, wers in side.items() if gpus in common} for side in sides]
    if not all(sides):
        return "-"
    (good, better), (bad, worse) = ((max(side), side[max(side)]) for side in sides)
    points = ", ".join(f"{test} {wer - better[test]:+.1f}" for test, wer in worse.items() if test in better)
    return f"{points} ({plural(good, 'GPU') if good == bad else f'{good} and {bad} GPUs'})"


def _average(values: Iterable[float | None], digits: int, average: Callable[[list[float]], float] = fmean) -> str:
    known = [value for value in values if value is not None]
    return f"{average(known):.{digits}f}" if known else "-"


def _mean_std(values: Iterable[float]) -> str:
    """Mean and, of two values or more, standard deviation (n - 1)."""
    known = list(values)
    return _average(known, 2) + (f" ± {stdev(known):.2f}" if len(known) > 1 else "")


def _escape_markdown(text: object) -> str:
    """Text within a line or a table cell: nothing in it is markup, HTML or the end of a cell."""
    return re.sub(r"([\\`*_\[\]<>|~&$#!]|:(?=//))", r"\\\1", " ".join(without_controls(str(text)).split()))


def _escape_line(text: object) -> str:
    """Text that begins a line: it starts no list, no rule, and no heading of the line before."""
    return re.sub(r"^(\d*)([-+=.)])", r"\1\\\2", _escape_markdown(text))


def _fence(text: str) -> str:
    """A row of backquotes longer than any in the text."""
    return "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))


FILTERS: dict[str, Callable[..., str]] = {
    "md": _escape_markdown,
    "md_line": _escape_line,
    "fence": _fence,
    "published_differences": published_differences,
    "mean": _average,
    "median": partial(_average, average=median),
    "mean_std": _mean_std,
}
