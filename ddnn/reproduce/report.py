"""The report of `ddnn reproduce`: Markdown, the same as HTML, SVG files, JSON. Its text is in
ddnn/templates/reproduce.md.j2."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any, get_args
from urllib.parse import unquote

from ddnn.reproduce.clusters import costs
from ddnn.reproduce.comparison import VerdictName, compare, degradations
from ddnn.reproduce.entries import (
    TableEntry,
    fit_shared_times,
    main_accuracy,
    metrics_of,
    overloaded_runs,
    speed_ups,
    table_entries,
)
from ddnn.reproduce.plots import FOREST, UNDECIDED, VERDICT_COLORS, draw_forest, table_pictures
from ddnn.reproduce.runs import RunRecord
from ddnn.reproduce.tables import Hypothesis, ReproduceConfig, Table, paper
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.text import environment, plural, without_controls

if TYPE_CHECKING:
    import jinja2

FEW = 2  # tables that the title names
FOLDED = ("Method", "Runs")  # sections of the page


@dataclass(frozen=True)
class Report:
    """What the template shows, by its names for it; what draws the pictures, by file names; figures for `--json`."""

    context: dict[str, Any]
    pictures: Mapping[str, Callable[[Path], Path]]
    summary: Mapping[str, object]

    def markdown(self, folder: str) -> str:
        """`folder` has the pictures, relative to the Markdown file."""
        text = report_templates().get_template("reproduce.md.j2").render(**self.context, folder=folder)
        return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"

    def html(self, folder: str, images: Mapping[str, str]) -> str:
        """The Markdown as a page that needs no other file. `images`: SVG by file name."""
        from markdown_it import MarkdownIt
        from markupsafe import Markup

        headings = {}

        def section(html: re.Match[str]) -> str:
            title = Markup(html[1]).striptags()
            anchor = re.sub(r"[^a-z0-9]+", "-", title.lower())
            headings[anchor] = title
            heading = f'<h2 id="{anchor}">{html[1]}</h2>'
            return f"<details><summary>{heading}</summary>{html[2]}</details>" if title in FOLDED else heading + html[2]

        def picture(html: re.Match[str]) -> str:
            drawn = images.get(unquote(html[1]).rpartition("/")[2], "")
            return f'<div class="plot" role="img" aria-label="{html[2]}" tabindex="0">{drawn}</div>'

        def verdict(html: re.Match[str]) -> str:
            return f'{html[1]}<b style="--hue: {hues[html[2]]}">{html[2]}</b>'

        hues: dict[str, str] = {name: VERDICT_COLORS.get(name, UNDECIDED) for name in get_args(VerdictName)}
        parser = MarkdownIt("commonmark", {"html": False, "xhtmlOut": False}).enable("table")
        body = re.sub(f"(<td>|Here: )({'|'.join(hues)})", verdict, parser.render(self.markdown(folder)))
        body = re.sub("<h2>(.*?)</h2>(.*?)(?=<h2>|$)", section, body, flags=re.DOTALL)
        body = re.sub('<p><img src="([^"]*)" alt="([^"]*)"></p>', picture, body)
        page = environment(html=True).get_template("page.html.j2")
        return page.render(title=self.context["title"], headings=headings, body=Markup(body))

    def write(self, path: Path) -> list[Path]:
        """Writes PATH.md, PATH.html (which needs no other file) and the plots into the folder PATH; returns all.
        UserError: a file cannot be written, or matplotlib is missing."""
        ensure_directory(path.parent)
        drawn = [draw(path / name) for name, draw in self.pictures.items()]
        page = self.html(path.name, {plot.name: plot.read_text() for plot in drawn})
        files = {path.parent / f"{path.name}.md": self.markdown(path.name), path.parent / f"{path.name}.html": page}
        for file, text in files.items():
            write_text(file, text)
        return [*files, *drawn]


@cache
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
) -> Report:
    """The report on these tables, which `command` writes, from the records of runs by their names; the names of missing
    ones are shown as missing."""
    tables = [config.labeled(table) for table in tables]
    entries: dict[tuple[str, int], TableEntry] = {}
    sections, pictures = list[dict[str, Any]](), dict[str, Callable[[Path], Path]]()
    for table in tables:
        own = table_entries(config, table, records, missing)
        for entry in own if table.kind == "accuracy" else ():
            entries.setdefault((config.recipe_name(entry.condition.name), entry.workers), entry)
        section, drawn = _section(config, table, own, records)
        sections.append(section)
        pictures |= drawn
    results = [result for section in sections for result in section["hypotheses"]]
    pictures |= {FOREST: partial(draw_forest, results)} if results else {}
    losses = degradations(config, entries.values(), records)
    counts = Counter(result.verdict for result in results)
    verdicts = {name: counts[name] for name in get_args(VerdictName) if counts[name]}
    titles = "; ".join(table.title for table in tables) if len(tables) <= FEW else "the paper's tables, reproduced"
    context = {
        "title": f"{config.name}: {titles}",
        "config": config,
        "paper": paper(),
        "missing": missing,
        "command": command,
        "hypotheses": results,
        "verdicts": verdicts,
        "sections": sections,
        "metrics": metrics_of(config, records.values()),
        "degradations": losses,
        "failed_entries": [entry for entry in entries.values() if entry.failed],
        "overloaded": overloaded_runs(records),
        "runs": sorted(records.values(), key=lambda record: (record.condition, record.workers, record.seed)),
    }
    summary = {
        "hypotheses": [result.to_dict() for result in results],
        "verdicts": verdicts,
        "degradations": [
            {**entry.to_dict(), "percentage_points": loss.difference, "seeds": loss.seeds, "interval": loss.interval}
            for entry, loss in losses
        ],
        "speed_ups": [speed for section in sections for speed in section["speed_ups"]],
    }
    return Report(context, pictures, summary)


def _section(
    config: ReproduceConfig, table: Table, entries: list[TableEntry], records: Mapping[str, RunRecord]
) -> tuple[dict[str, Any], Mapping[str, Callable[[Path], Path]]]:
    """What the template shows of a table, and its pictures."""
    metrics = metrics_of(config, [run for entry in entries for run in entry.runs])
    speeds = speed_ups(config, table, records) if table.kind == "speed" else []
    known_costs = costs(entries, main_accuracy(metrics), table.network)
    drawn = table_pictures(config, table, entries, metrics, speeds, known_costs)
    return {
        "table": table,
        "entries": entries,
        "metrics": metrics,
        "speed_ups": speeds,
        "pictures": list(drawn),
        "costs": known_costs,
        "fits": [] if table.times is None else fit_shared_times(table.times),
        "hypotheses": [compare(config, table, hypothesis, records) for hypothesis in table.hypotheses],
    }, drawn


def published_differences(hypothesis: Hypothesis, table: Table) -> str:
    """The paper's differences, + as expected; for "many" on the most GPUs that it has both conditions on."""
    if not hypothesis.published:
        return "not in the paper"
    sides = hypothesis.expected_better, hypothesis.expected_worse
    gpus = [{n for n in table.published.get(name, ()) if (n > 1) == (size == "max")} for name, size in sides]
    if sides[0][1] == sides[1][1]:
        gpus = [gpus[0] & gpus[1]] * 2
    if not all(gpus):
        return "-"
    better, worse = (paper().published_wer[name][max(n)] for (name, _), n in zip(sides, gpus, strict=True))
    points = ", ".join(f"{test} {wer - better[test]:+.1f}" for test, wer in worse.items() if test in better)
    good, bad = map(max, gpus)
    return f"{points} ({plural(good, 'GPU') if good == bad else f'{good} and {bad} GPUs'})"


def _average(values: Iterable[float | None], digits: int, average: Callable[[list[float]], float]) -> str:
    known = [value for value in values if value is not None]
    return f"{average(known):.{digits}f}" if known else "-"


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
    "mean": partial(_average, average=fmean),
    "median": partial(_average, average=median),
    "stdev": partial(_average, average=stdev),
}
