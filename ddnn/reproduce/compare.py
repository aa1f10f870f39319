"""Whether what the paper says of two settings holds on a corpus, and what each setting loses against one worker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from ddnn.reproduce.cells import DIVERGENCE, Cell, Measure, accuracy, counted, find_cell, measures
from ddnn.reproduce.corpus import CorpusPlan
from ddnn.reproduce.records import Record, WordErrors
from ddnn.reproduce.statistics import Estimate, bootstrap_seeds, bootstrap_words
from ddnn.reproduce.table import BASE, Contrast, Table

FEWEST_SEEDS = 3
"""Two differences agree in sign one time in two: that says nothing."""
MOST_WORDS = 1 << 31
"""Of a run's utterances together: what 64 bits can still multiply."""

Word = Literal[
    "reproduces",
    "same direction, not significant",
    "no difference",
    "opposite direction, not significant",
    "opposite",
    "mixed",
    "not tested",
]
SURE: tuple[Word, ...] = ("reproduces", "opposite")
"""Verdicts of a measure whose interval leaves 0 out."""


@dataclass(frozen=True)
class Verdict:
    """A word, and in brackets why, where that is not the figures."""

    word: Word
    why: str = ""

    def text(self, published: bool) -> str:
        """For a reader; what nobody has published cannot reproduce, but hold."""
        word = "holds" if self.word == "reproduces" and not published else self.word
        return f"{word} ({self.why})" if self.why else word


@dataclass(frozen=True)
class Result:
    """Two settings by one measure.

    Attributes:
        better, worse: mean in percent over the common seeds; None without any.
        seeds: how many both have.
        difference: in percent points, positive where `better` is better.
        estimate: its interval; None where it was not tested.
        over: what was drawn.
    """

    measure: Measure
    better: float | None
    worse: float | None
    seeds: int
    difference: float | None
    estimate: Estimate | None
    over: Literal["seeds", "utterances", ""]
    verdict: Verdict


@dataclass(frozen=True)
class Comparison:
    """A contrast of a table on a corpus.

    Attributes:
        apart: seeds of which the two runs began with different stacks of RBMs; two that did not both begin with RBMs
            are not among them.
    """

    table: Table
    contrast: Contrast
    better: Cell
    worse: Cell
    results: tuple[Result, ...]
    verdict: Verdict
    apart: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """The verdict for a reader."""
        return self.verdict.text(self.contrast.published)


@dataclass(frozen=True)
class Loss:
    """Frame accuracy of `base` on one worker minus that of a setting, in percent points, paired by seed."""

    cell: Cell
    points: float
    seeds: int
    estimate: Estimate | None


def compare(plan: CorpusPlan, table: Table, contrast: Contrast, records: Mapping[str, Record]) -> Comparison:
    """One contrast by everything that was measured.

    The verdict on all is that of the frame accuracy of the first test set with alignments and of the word error rates:
    it reproduces where one of them does and none is opposite. Where the cross-validation set says the opposite, it is
    said beside. These are of the seeds of which neither run diverged.
    Divergence is one more measure, by seed as frame accuracy is; without an interval that leaves 0 out it counts for
    nothing: a single diverged run gives no direction.
    """
    better, worse = (
        find_cell(plan, records, next(s for s in table.settings if s.name == name), 1 if size == "one" else plan.many)
        for name, size in (contrast.better, contrast.worse)
    )
    known = measures(plan, [*better.runs, *worse.runs])
    same = bool(better.runs) and better.runs == worse.runs
    given = Verdict("not tested", "the same runs on this corpus") if same else _without_runs(better, worse)
    counts = accuracy(known)
    diverged = [cell for cell in (better, worse) if cell.failed]
    results = tuple(_by(measure, better, worse, given) for measure in (*known, *([DIVERGENCE] if diverged else [])))
    main = [
        result
        for result in results
        if result.measure == counts
        or result.measure.kind == "words"
        or (result.measure == DIVERGENCE and result.verdict.word in SURE)
    ]
    verdict = given or overall(main)
    contrary = [r.measure.short for r in results if {r.verdict.word, verdict.word} == set(SURE)]
    if contrary:
        verdict = replace(verdict, why=f"{verdict.why}; not by {', '.join(contrary)}")
    if diverged and not given:
        why = [verdict.why] if verdict.why else []
        verdict = replace(verdict, why="; ".join([*why, *(f"{_share(cell)} diverged" for cell in diverged)]))
    return Comparison(table, contrast, better, worse, results, verdict, _apart(better, worse))


def overall(results: Sequence[Result]) -> Verdict:
    """One verdict of those by several measures."""
    tested = [result for result in results if result.verdict.word != "not tested"]
    if not tested:
        return Verdict("not tested", results[0].verdict.why if results else "no figures")
    sure = [result for result in tested if result.verdict.word in SURE]
    found = {result.verdict.word for result in sure or tested}
    if len(found) > 1:
        why = "measures contradict each other" if sure else "no measure is significant, their directions differ"
        return Verdict("mixed", why)
    return Verdict(found.pop(), f"by {', '.join(result.measure.short for result in sure)}" if sure else "")


def losses(plan: CorpusPlan, cells: Iterable[Cell], records: Mapping[str, Record]) -> tuple[Measure | None, list[Loss]]:
    """What each cell loses against `base` on one worker; cells without a seed in common with it are left out.

    Returns:
        What it was measured by, and the losses.
    """
    base = find_cell(plan, records, BASE, 1)
    measure = accuracy(measures(plan, records.values()))
    if measure is None:
        return None, []
    found = []
    for cell in cells:
        differences = _paired(base.values(measure), cell.values(measure))
        if differences and cell.runs != base.runs:
            found.append(Loss(cell, fmean(differences), len(differences), _over_seeds(differences)))
    return measure, found


def _without_runs(better: Cell, worse: Cell) -> Verdict | None:
    """The verdict where a setting has no runs."""
    for cell in (better, worse):
        if not cell.runs:
            return Verdict("not tested", f"no runs of: {cell.title}")
    return None


def _apart(better: Cell, worse: Cell) -> tuple[int, ...]:
    stacks = {run.seed: run.stack for run in better.runs if run.stack}
    return tuple(run.seed for run in worse.runs if run.stack and stacks.get(run.seed, run.stack) != run.stack)


def _share(cell: Cell) -> str:
    return f"{cell.failed} of {counted(len(cell.runs), 'run')} of {cell.title}"


def _by(measure: Measure, better: Cell, worse: Cell, given: Verdict | None) -> Result:
    """Args: given: the verdict, where it is settled without figures; those that there are are shown still."""
    sign = -1.0 if measure.kind in ("words", "diverged") else 1.0
    good, bad = better.values(measure), worse.values(measure)
    common = sorted(good.keys() & bad.keys())
    differences = [sign * difference for difference in _paired(good, bad)]
    difference = fmean(differences) if differences else None
    estimate = _over_seeds(differences)
    over: Literal["seeds", "utterances", ""] = "seeds"
    why = f"{counted(len(common), 'common seed')}, expected {FEWEST_SEEDS} or more"
    if measure.kind == "words" and len(common) >= FEWEST_SEEDS:
        pooled = _over_utterances(measure, better, worse, common)
        if isinstance(pooled, Estimate):
            estimate, over, difference = pooled, "utterances", pooled.difference
        elif pooled:
            estimate, why = None, pooled
    verdict = given or (Verdict("not tested", why) if estimate is None else _judge(estimate))
    return Result(
        measure,
        _mean(good, common),
        _mean(bad, common),
        len(common),
        difference,
        estimate,
        over if estimate is not None else "",
        verdict,
    )


def _mean(values: Mapping[int, float], seeds: Sequence[int]) -> float | None:
    return fmean(values[seed] for seed in seeds) if seeds else None


def _judge(estimate: Estimate) -> Verdict:
    if estimate.difference == 0.0:
        return Verdict("no difference")
    if estimate.difference > 0.0:
        return Verdict("reproduces" if estimate.significant else "same direction, not significant")
    return Verdict("opposite" if estimate.significant else "opposite direction, not significant")


def _paired(minuend: Mapping[int, float], subtrahend: Mapping[int, float]) -> list[float]:
    return [minuend[seed] - subtrahend[seed] for seed in sorted(minuend.keys() & subtrahend.keys())]


def _over_seeds(differences: Sequence[float]) -> Estimate | None:
    return bootstrap_seeds(differences) if len(differences) >= FEWEST_SEEDS else None


def _over_utterances(measure: Measure, better: Cell, worse: Cell, seeds: Sequence[int]) -> Estimate | str:
    """The estimate; "" where the errors of the utterances are not known; else why they cannot be compared."""
    sides = [[run.wers[measure.name] for run in cell.sound if run.seed in seeds] for cell in (worse, better)]
    counts: list[WordErrors] = [*sides[0], *sides[1]]
    if any(not count.words for count in counts):
        return ""
    if len({count.words for count in counts}) > 1 or any(len(c.errors) != len(c.words) for c in counts):
        return "the runs were scored on other utterances or references"
    if not 0 < sum(counts[0].words) < MOST_WORDS or any(sum(count.errors) >= MOST_WORDS for count in counts):
        return "no words in the reference, or too many"
    errors = [np.array([count.errors for count in side], dtype=np.int64) for side in sides]
    return bootstrap_words(errors[0], errors[1], np.array(counts[0].words, dtype=np.int64))
