"""The parts of a report about accuracy: what was measured, the paper's figures, contrasts, losses."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from ddnn.reproduce.cells import BEYOND, NONE, Cell, Measure, counted, figure, marked, mean, signed, spread
from ddnn.reproduce.compare import Comparison, Loss, Result
from ddnn.reproduce.document import Block, Bullets, Grid, Paragraph
from ddnn.reproduce.table import Contrast, Table
from ddnn.reproduce.tables import PAPER_SOURCE

OTHER_EPOCHS = " ‡"
AIM = 0.1
"""Percent points of frame accuracy that many workers may lose."""


def results(cells: Sequence[Cell], shown: Sequence[Measure]) -> list[Block]:
    """A row for each setting and size: epochs, mean and spread of each measure."""
    header = ("setting", "workers", "runs", "epochs", *(measure.title for measure in shown))
    rows = [
        (
            marked(cell.setting),
            str(cell.workers),
            cell.number(),
            mean([run.epochs for run in cell.sound], 1).removesuffix(".0"),
            *(spread(list(cell.values(measure).values())) for measure in shown),
        )
        for cell in cells
    ]
    notes = "Mean ± standard deviation over the seeds."
    absent = sum(max(0, cell.expected - len(cell.runs)) for cell in cells)
    if absent:
        notes += f" {counted(absent, 'run')} of this table {'is' if absent == 1 else 'are'} missing."
    if any(cell.setting.beyond for cell in cells):
        notes += f"{BEYOND}: beyond the paper."
    return [Grid(header, tuple(rows), "lrlr" + "r" * len(shown)), Paragraph(notes)]


def paper_figures(table: Table) -> list[Block]:
    """The paper's word error rates; nothing where it has none."""
    if not table.paper:
        return []
    labels = {setting.name: setting.label for setting in table.settings}
    tests = tuple(dict.fromkeys(test for figures in table.paper.values() for test in figures))
    rows = [
        (labels[name], str(workers), *(f"{figures[test]:.1f}" if test in figures else NONE for test in tests))
        for (name, workers), figures in table.paper.items()
    ]
    grid = Grid(("the paper's setting", "GPUs", *tests), tuple(rows), "lr" + "r" * len(tests))
    return [Paragraph(f"The paper's figures ({PAPER_SOURCE}):"), grid]


def contrast(found: Comparison) -> list[Block]:
    """Claim and verdict, then the figures by each measure."""
    source = "The paper" if found.contrast.published else "Asked here, not in the paper"
    said = Paragraph(f"{source}: {found.contrast.claim}. Here: {found.text}.")
    if not found.results:
        return [said]
    sides = (found.better.title, found.worse.title)
    header = ("measure", *sides, "difference", "95 % interval", "improvement", "drawn", "verdict")
    rows = []
    for result in found.results:
        estimate = result.estimate
        rows.append(
            (
                result.measure.title,
                figure(result.better),
                figure(result.worse),
                signed(result.difference),
                NONE if estimate is None else f"{signed(estimate.low)} to {signed(estimate.high)}",
                NONE if estimate is None else f"{100.0 * estimate.probability:.1f} %",
                _drawn(result),
                result.verdict.text(found.contrast.published),
            )
        )
    return [said, Grid(header, tuple(rows), "lrrrrrll"), *_stacks(found)]


def _stacks(found: Comparison) -> list[Block]:
    """A warning where the two settings do not share the stack of a seed."""
    if not found.apart:
        return []
    seeds = f"seed{'s' * (len(found.apart) > 1)} {', '.join(map(str, found.apart))}"
    return [
        Paragraph(
            f"Of {seeds} the two began with different stacks of RBMs: the difference is also one between the stacks."
        )
    ]


def _drawn(result: Result) -> str:
    seeds = counted(result.seeds, "seed")
    return {"utterances": f"utterances, {seeds}", "seeds": seeds, "": NONE}[result.over]


def summary(comparisons: Sequence[Comparison]) -> list[Block]:
    """A line for each contrast: what the paper found, what was found here, the verdict."""
    rows = [
        (
            c.table.name,
            c.contrast.claim,
            paper_points(c.table, c.contrast) if c.contrast.published else "not in the paper",
            ", ".join(
                f"{result.measure.short} {signed(result.difference)}"
                for result in c.results
                if result.measure.kind != "cv" and result.difference is not None
            )
            or NONE,
            c.text,
        )
        for c in comparisons
    ]
    if not rows:
        return []
    return [
        Grid(("table", "claim", "the paper, points of WER", "here, points", "verdict"), tuple(rows), "lllll"),
        Paragraph(
            "Differences are in percent points; + is as claimed: more frames right, fewer words wrong. What a verdict "
            "means is said under: How it was tested."
        ),
    ]


def paper_points(table: Table, asked: Contrast) -> str:
    """The paper's differences, as claimed is +; of "many" the most GPUs that it has both settings on."""
    sides = []
    for name, size in (asked.better, asked.worse):
        own = {n: figures for (of, n), figures in table.paper.items() if of == name}
        sides.append({n: figures for n, figures in own.items() if (n > 1) == (size == "many")})
    better, worse = sides
    if asked.better[1] == asked.worse[1]:
        common = better.keys() & worse.keys()
        better, worse = ({n: figures for n, figures in side.items() if n in common} for side in sides)
    if not better or not worse:
        return NONE
    good, bad = max(better), max(worse)
    points = [f"{test} {value - better[good][test]:+.1f}" for test, value in worse[bad].items() if test in better[good]]
    return f"{', '.join(points)} ({counted(good, 'GPU') if good == bad else f'{good} and {bad} GPUs'})"


def lost(measure: Measure | None, losses: Sequence[Loss], base_epochs: float, many: int) -> list[Block]:
    """What each setting and size loses against the base on one worker, and which lose no more than the aim."""
    if measure is None or not losses:
        return []
    sizes = sorted({loss.cell.workers for loss in losses})
    cells: dict[tuple[str, str], dict[int, str]] = {}
    met = []
    for loss in losses:
        cell = loss.cell
        equal = fmean(run.epochs for run in cell.sound) == base_epochs
        text = signed(loss.points)
        text += f" ({signed(loss.estimate.low)} to {signed(loss.estimate.high)})" if loss.estimate else ""
        text += f", {cell.failed} diverged" if cell.failed else ""
        cells.setdefault((cell.setting.name, marked(cell.setting)), {})[cell.workers] = (
            text if equal else text + OTHER_EPOCHS
        )
        if cell.workers == many and equal and not cell.failed and loss.points <= AIM:
            met.append(f"{cell.setting.name} ({signed(loss.points)}, {counted(loss.seeds, 'seed')})")
    rows = [(*names, *(by_size.get(n, NONE) for n in sizes)) for names, by_size in cells.items()]
    aim = f"At equal epochs, {counted(many, 'worker')} lose at most {AIM:.1f} points (mean over the seeds)"
    return [
        Paragraph(
            f"The base's {measure.short} on one worker minus that of each setting, in percent points, mean over the "
            f"common seeds with its 95 % interval (bootstrap over seeds).{BEYOND}: beyond the paper.{OTHER_EPOCHS}: "
            "another number of epochs than the base."
        ),
        Grid(("setting", "what", *(counted(n, "worker") for n in sizes)), tuple(rows), "ll" + "r" * len(sizes)),
        Paragraph(f"{aim} in: {'; '.join(met)}." if met else f"{aim} in none of these settings."),
    ]


def method() -> list[Block]:
    """How it was tested."""
    return [
        Bullets(
            (
                "Word error rates: paired bootstrap over utterances and seeds, 10,000 draws (after Bisani and Ney "
                "2004), of the seeds that both settings have; three at least. The "
                "acoustic scale is the best of those tried for each run. Without errors by utterance: over seeds.",
                "Frame accuracies: bootstrap over the differences of the common seeds. With three seeds the interval "
                "leaves 0 out just where all three differences agree in sign. Three that mean nothing do so one time "
                "in four.",
                "improvement: share of the draws in which the first setting is better.",
                "reproduces: the difference is as the paper's and its interval leaves 0 out. A contrast reproduces "
                "where the test frame accuracy or a word error rate does and none of them is significantly opposite. "
                "holds: the same for what is not in the paper. No correction is made for testing many contrasts.",
                "A run that diverged has no figures: the others are of the seeds of which neither run did. How many "
                "diverged is a measure of its own, by seed as frame accuracies are, and counts for the contrast where "
                "its interval leaves 0 out: one diverged run of three settles nothing.",
            )
        )
    ]
