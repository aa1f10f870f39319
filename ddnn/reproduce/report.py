"""The report of `ddnn reproduce`: from records to a document, and to Markdown, HTML and PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from ddnn.files import make_directory, read_regular, write_text
from ddnn.reproduce.cells import Cell, accuracy, counted, find_cell, measures, table_cells
from ddnn.reproduce.compare import Comparison, Loss, compare, losses
from ddnn.reproduce.corpus import CorpusPlan
from ddnn.reproduce.document import Block, Code, Document, Heading, Paragraph, Picture
from ddnn.reproduce.facts import runs, speed_ups, times
from ddnn.reproduce.plots import draw_accuracies, draw_learning, draw_speed_ups
from ddnn.reproduce.records import Record
from ddnn.reproduce.render import to_html, to_markdown
from ddnn.reproduce.sections import contrast, lost, method, paper_figures, results, summary
from ddnn.reproduce.speed import SpeedUp
from ddnn.reproduce.table import BASE, Table

MOST_BYTES = 16 << 20
"""Of a plot."""


def build_report(
    plan: CorpusPlan,
    tables: Sequence[Table],
    records: Mapping[str, Record],
    command: str,
    missing: Sequence[str],
    scaling: Sequence[SpeedUp],
) -> Document:
    """The report on these tables. What is missing is shown as missing.

    Args:
        records: name of a run -> what it came to.
        command: that made them.
        missing: names of runs without a record.
        scaling: speed-ups for the tables about speed.
    """
    comparisons = [compare(plan, table, asked, records) for table in tables for asked in table.contrasts]
    cells: dict[tuple[str, int], Cell] = {}
    for table in tables:
        for cell in table_cells(plan, table, records, missing) if table.kind == "accuracy" else ():
            cells.setdefault((plan.same.get(cell.setting.name, cell.setting.name), cell.workers), cell)
    measure, found = losses(plan, cells.values(), records)
    blocks: list[Block] = [
        Paragraph(
            f'The tables of "Experiments on Parallel Training of Deep Neural Network using Model Averaging" (arXiv '
            f"1507.01239), trained again on {plan.name}: {counted(len(records), 'run')}, {len(missing)} missing, seeds "
            f"{', '.join(map(str, plan.seeds))}; many workers are {plan.many}. Made by:"
        ),
        Code(command),
    ]
    if missing:
        some = ", ".join(missing[:10]) + (", ..." if len(missing) > 10 else "")
        said = f"{counted(len(missing), 'run')} missing: {some}. Figures are of the runs there are"
        blocks.append(Paragraph(f"{said}; the command trains the others."))
    blocks += [Paragraph(plan.notes["all"])] if "all" in plan.notes else []
    overview = summary(comparisons)
    blocks += [Heading(2, "Summary"), *overview] if overview else []
    for table in tables:
        own = [comparison for comparison in comparisons if comparison.table is table]
        blocks += _chapter(plan, table, records, missing, own, scaling)
    base = [run.epochs for run in find_cell(plan, records, BASE, 1).sound]
    loss_blocks = lost(measure, found, fmean(base) if base else 0.0, plan.many)
    blocks += [Heading(2, "Loss against one worker"), *loss_blocks] if loss_blocks else []
    blocks += [Heading(2, "How it was tested"), *method()]
    blocks += [Heading(2, "Runs"), *runs(records, measures(plan, records.values()))]
    return Document(
        f"{plan.name}: the paper's tables, trained again", tuple(blocks), as_dict(comparisons, found, scaling)
    )


def write_report(document: Document, out: Path) -> list[Path]:
    """Writes OUT.md, OUT.html (which needs no other file) and the plots into the folder OUT; returns all of them.

    Raises:
        UserError: a file cannot be written, or matplotlib is missing.
    """
    make_directory(out.parent)
    pictures = {picture.name: picture.draw(out / picture.name) for picture in document.pictures}
    markdown, html = out.with_name(f"{out.name}.md"), out.with_name(f"{out.name}.html")
    write_text(markdown, to_markdown(document, out.name))
    write_text(html, to_html(document, {name: read_regular(path, MOST_BYTES) for name, path in pictures.items()}))
    return [markdown, html, *pictures.values()]


def as_dict(comparisons: Sequence[Comparison], found: Sequence[Loss], scaling: Sequence[SpeedUp]) -> dict[str, object]:
    """The contrasts, losses and speed-ups for `--json`."""
    return {
        "contrasts": [_contrast_as_dict(comparison) for comparison in comparisons],
        "losses": [
            {
                **_cell_as_dict(loss.cell),
                "points": loss.points,
                "seeds": loss.seeds,
                "interval": [loss.estimate.low, loss.estimate.high] if loss.estimate else None,
            }
            for loss in found
        ],
        "speed_ups": [vars(speed) for speed in scaling],
    }


def _contrast_as_dict(found: Comparison) -> dict[str, object]:
    return {
        "table": found.table.name,
        "claim": found.contrast.claim,
        "published": found.contrast.published,
        "better": _cell_as_dict(found.better),
        "worse": _cell_as_dict(found.worse),
        "verdict": found.verdict.word,
        "why": found.verdict.why,
        "measures": [
            {
                "measure": result.measure.short,
                "better": result.better,
                "worse": result.worse,
                "seeds": result.seeds,
                "difference": result.difference,
                "interval": [result.estimate.low, result.estimate.high] if result.estimate else None,
                "probability": result.estimate.probability if result.estimate else None,
                "drawn": result.over,
                "verdict": result.verdict.word,
                "why": result.verdict.why,
            }
            for result in found.results
        ],
    }


def _cell_as_dict(cell: Cell) -> dict[str, object]:
    return {"setting": cell.setting.name, "workers": cell.workers, "runs": len(cell.runs), "diverged": cell.failed}


def _chapter(
    plan: CorpusPlan,
    table: Table,
    records: Mapping[str, Record],
    missing: Sequence[str],
    comparisons: Sequence[Comparison],
    scaling: Sequence[SpeedUp],
) -> list[Block]:
    """One table."""
    cells = table_cells(plan, table, records, missing)
    shown = measures(plan, [run for cell in cells for run in cell.runs])
    blocks: list[Block] = [Heading(2, f"{table.name}: {table.title}")]
    blocks += [Paragraph(note) for note in (table.note, plan.notes.get(table.name, "")) if note]
    for setting in table.settings:
        if setting.name in plan.same:
            text = f"On {plan.name} the setting {setting.label} is {plan.same[setting.name]} and shares its runs."
            blocks.append(Paragraph(text))
    blocks += [*results(cells, shown), *paper_figures(table)]
    for comparison in comparisons:
        blocks += contrast(comparison)
    names = {setting.name for setting in table.settings}
    speeds = [speed for speed in scaling if speed.setting in names] if table.kind == "speed" else []
    if table.kind == "speed" or table.name == "reduce":
        blocks += [*times(cells), *speed_ups(speeds)]
    return blocks + _pictures(plan, table, cells, speeds)


def _pictures(plan: CorpusPlan, table: Table, cells: Sequence[Cell], speeds: Sequence[SpeedUp]) -> list[Block]:
    """The plots of a table, as far as there are figures for them."""
    shown = measures(plan, [run for cell in cells for run in cell.runs])
    panels = [m for m in (accuracy(shown), next((m for m in shown if m.kind == "words"), None)) if m is not None]
    title = f"{plan.name}, {table.name}: {table.title}"
    blocks: list[Block] = []
    if speeds:
        text = "Speed-up over one worker against workers, both axes logarithmic; the paper's dashed, the ideal grey."
        draw = partial(draw_speed_ups, title, speeds)
        blocks.append(Picture(f"{table.name}-speed.png", f"Plot, {title}: speed-up", text, draw))
    if panels and table.kind == "accuracy":
        what = " and ".join(measure.short for measure in panels)
        text = f"{what}: the mean over the seeds, each seed as a dot, a bar from the lowest to the highest. "
        text += "Points that would cover each other are moved aside."
        blocks.append(
            Picture(f"{table.name}.png", f"Plot, {title}: {what}", text, partial(draw_accuracies, title, cells, panels))
        )
    few = [cell for cell in cells if cell.workers in (1, plan.many)]
    if table.kind == "accuracy" and any(run.cv_by_epoch for cell in few for run in cell.sound):
        text = "Frame accuracy on the cross-validation set after each epoch: the mean over the seeds and their range."
        draw = partial(draw_learning, title, few)
        blocks.append(Picture(f"{table.name}-learning.png", f"Plot, {title}: learning curves", text, draw))
    return blocks
