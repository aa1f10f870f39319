"""Whether what the paper says of two conditions is confirmed on a corpus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from ddnn.reproduce.bootstrap import Estimate, bootstrap_seeds, bootstrap_wer
from ddnn.reproduce.cells import DIVERGED, Cell, Metric, find_cell, main_accuracy, metrics_of
from ddnn.reproduce.corpus import ReproduceConfig
from ddnn.reproduce.records import RunRecord, WordErrors
from ddnn.reproduce.tables import BASE, Condition, Hypothesis, Side, Table
from ddnn.util.text import plural

MIN_SEEDS = 3
"""Two differences have the same sign one time in two: that says nothing."""
MIN_SPEAKERS = 5
"""Of fewer, an interval over speakers says nothing about others."""
MAX_WORDS = 1 << 31
"""Of a run's utterances together: what 64 bits can still multiply."""

Resampled = Literal["speakers", "utterances", "seeds", ""]
Word = Literal[
    "confirmed",
    "expected direction, interval contains 0",
    "no difference",
    "opposite direction, interval contains 0",
    "contradicted",
    "inconclusive",
    "not tested",
]
SIGNIFICANT: tuple[Word, ...] = ("confirmed", "contradicted")
"""Verdicts by a metric whose interval does not contain 0."""


@dataclass(frozen=True)
class Verdict:
    """One of a few words, and why where the figures do not say it."""

    word: Word
    why: str = ""

    @property
    def text(self) -> str:
        """For a reader."""
        return f"{self.word} ({self.why})" if self.why else self.word


@dataclass(frozen=True)
class MetricResult:
    """Two cells by one metric.

    Attributes:
        better, worse: mean in percent over the common seeds; None without any.
        seeds: how many both have.
        difference: in percentage points, positive where `better` is better.
        estimate: its interval; None where it was not tested.
        resampled: what the bootstrap drew.
    """

    metric: Metric
    better: float | None
    worse: float | None
    seeds: int
    difference: float | None
    estimate: Estimate | None
    resampled: Resampled
    verdict: Verdict

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        estimate = self.estimate
        return {
            "metric": self.metric.label,
            "better": self.better,
            "worse": self.worse,
            "seeds": self.seeds,
            "difference": self.difference,
            "interval": [estimate.low, estimate.high] if estimate else None,
            "prob_improvement": estimate.prob_improvement if estimate else None,
            "resampled": self.resampled,
            "verdict": self.verdict.word,
            "why": self.verdict.why,
        }


@dataclass(frozen=True)
class HypothesisResult:
    """A hypothesis of a table on a corpus.

    Attributes:
        differing_dbn_seeds: seeds of which the two runs began with different RBMs; runs that did not both begin with
            RBMs are not among them.
    """

    table: Table
    hypothesis: Hypothesis
    better: Cell
    worse: Cell
    results: tuple[MetricResult, ...]
    verdict: Verdict
    differing_dbn_seeds: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "table": self.table.name,
            "statement": self.hypothesis.statement,
            "published": self.hypothesis.published,
            "expected_better": self.better.to_dict(),
            "expected_worse": self.worse.to_dict(),
            "verdict": self.verdict.word,
            "why": self.verdict.why,
            "metrics": [result.to_dict() for result in self.results],
        }


@dataclass(frozen=True)
class Degradation:
    """Frame accuracy of `base` on one worker minus that of a cell, in percentage points, paired by seed."""

    cell: Cell
    percentage_points: float
    seeds: int
    estimate: Estimate | None

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        interval = [self.estimate.low, self.estimate.high] if self.estimate else None
        figures = {"percentage_points": self.percentage_points, "seeds": self.seeds, "interval": interval}
        return {**self.cell.to_dict(), **figures}


def compare(
    config: ReproduceConfig, table: Table, hypothesis: Hypothesis, records: Mapping[str, RunRecord]
) -> HypothesisResult:
    """One hypothesis by everything that was measured.

    The overall verdict follows from the frame accuracy of the first test set with alignments and from the word error
    rates: the hypothesis is confirmed where one of them confirms it and none contradicts it. Where the cross-validation
    set says the opposite, the verdict mentions it. Figures are of the seeds of which neither run diverged.
    Divergence is one more metric, by seed as frame accuracy is; where its interval contains 0 it does not count: a
    single diverged run gives no direction.
    """
    better, worse = (
        _find_side(config, table, side, records) for side in (hypothesis.expected_better, hypothesis.expected_worse)
    )
    metrics = metrics_of(config, [*better.runs, *worse.runs])
    main = main_accuracy(metrics)
    diverged = [cell for cell in (better, worse) if cell.num_diverged]
    given = _untested(better, worse)
    results = tuple(
        _compare_by(metric, better, worse, given) for metric in (*metrics, *([DIVERGED] if diverged else []))
    )
    counting = [
        result
        for result in results
        if result.metric == main
        or result.metric.kind == "words"
        or (result.metric == DIVERGED and result.verdict.word in SIGNIFICANT)
    ]
    verdict = given or overall_verdict(counting)
    contrary = [r.metric.label for r in results if {r.verdict.word, verdict.word} == set(SIGNIFICANT)]
    why = [verdict.why] if verdict.why else []
    why += [f"not by {', '.join(contrary)}"] if contrary else []
    if not given:
        why += [f"{cell.num_diverged} of {plural(len(cell.runs), 'run')} of {cell.title} diverged" for cell in diverged]
    verdict = replace(verdict, why="; ".join(why))
    return HypothesisResult(table, hypothesis, better, worse, results, verdict, _differing_dbn_seeds(better, worse))


def _find_side(config: ReproduceConfig, table: Table, side: Side, records: Mapping[str, RunRecord]) -> Cell:
    name, size = side
    return find_cell(config, records, table.condition(name), config.max_workers if size == "max" else size)


def overall_verdict(results: Sequence[MetricResult]) -> Verdict:
    """One verdict of those by several metrics."""
    tested = [result for result in results if result.verdict.word != "not tested"]
    if not tested:
        return Verdict("not tested", results[0].verdict.why if results else "no figures")
    significant = [result for result in tested if result.verdict.word in SIGNIFICANT]
    words = {result.verdict.word for result in significant or tested}
    if len(words) > 1:
        why = "metrics contradict each other" if significant else "all intervals contain 0, the directions differ"
        return Verdict("inconclusive", why)
    return Verdict(words.pop(), f"by {', '.join(result.metric.label for result in significant)}" if significant else "")


def degradations(
    config: ReproduceConfig, cells: Iterable[Cell], records: Mapping[str, RunRecord]
) -> tuple[Metric | None, list[Degradation]]:
    """How much worse each cell is than `base` on one worker; cells without a common seed do not appear.

    Returns:
        The metric, and the degradations.
    """
    base = find_cell(config, records, Condition(name=BASE, label=BASE), 1)
    metric = main_accuracy(metrics_of(config, records.values()))
    if metric is None:
        return None, []
    result = []
    for cell in cells:
        differences = _paired(base.values(metric), cell.values(metric))
        if differences and cell.runs != base.runs:
            result.append(Degradation(cell, fmean(differences), len(differences), _over_seeds(differences)))
    return metric, result


def _untested(better: Cell, worse: Cell) -> Verdict | None:
    """The verdict where there is nothing to test."""
    if better.runs and better.runs == worse.runs:
        return Verdict("not tested", "the same runs on this corpus")
    for cell in (better, worse):
        if not cell.runs:
            return Verdict("not tested", f"no runs of: {cell.title}")
    return None


def _differing_dbn_seeds(better: Cell, worse: Cell) -> tuple[int, ...]:
    dbns = {run.seed: run.dbn for run in better.runs if run.dbn}
    return tuple(run.seed for run in worse.runs if run.dbn and dbns.get(run.seed, run.dbn) != run.dbn)


def _compare_by(metric: Metric, better: Cell, worse: Cell, given: Verdict | None) -> MetricResult:
    """Args: given: the verdict, where it does not depend on figures; those that exist are shown still."""
    sign = -1.0 if metric.lower_is_better else 1.0
    good, bad = better.values(metric), worse.values(metric)
    common = sorted(good.keys() & bad.keys())
    differences = [sign * difference for difference in _paired(good, bad)]
    difference = fmean(differences) if differences else None
    estimate = _over_seeds(differences)
    resampled: Resampled = "seeds"
    why = f"{plural(len(common), 'common seed')}, expected {MIN_SEEDS} or more"
    if metric.kind == "words" and len(common) >= MIN_SEEDS:
        pooled = _over_speakers(metric, better, worse, common)
        if isinstance(pooled, tuple):
            estimate, resampled = pooled
            difference = estimate.difference
        elif pooled:
            estimate, why = None, pooled
    return MetricResult(
        metric,
        fmean(good[seed] for seed in common) if common else None,
        fmean(bad[seed] for seed in common) if common else None,
        len(common),
        difference,
        estimate,
        resampled if estimate is not None else "",
        given or (Verdict("not tested", why) if estimate is None else _verdict(estimate)),
    )


def _verdict(estimate: Estimate) -> Verdict:
    if estimate.difference == 0.0:
        return Verdict("no difference")
    if estimate.difference > 0.0:
        return Verdict("confirmed" if estimate.significant else "expected direction, interval contains 0")
    return Verdict("contradicted" if estimate.significant else "opposite direction, interval contains 0")


def _paired(minuend: Mapping[int, float], subtrahend: Mapping[int, float]) -> list[float]:
    return [minuend[seed] - subtrahend[seed] for seed in sorted(minuend.keys() & subtrahend.keys())]


def _over_seeds(differences: Sequence[float]) -> Estimate | None:
    return bootstrap_seeds(differences) if len(differences) >= MIN_SEEDS else None


def _over_speakers(metric: Metric, better: Cell, worse: Cell, seeds: Sequence[int]) -> tuple[Estimate, Resampled] | str:
    """The estimate and what was drawn; "" where the errors by utterance are unknown; else why they cannot be compared."""
    sides = [[run.wers[metric.name] for run in cell.valid if run.seed in seeds] for cell in (worse, better)]
    counts: list[WordErrors] = [*sides[0], *sides[1]]
    first = counts[0]
    if any(not count.words for count in counts):
        return ""
    lengths = {len(values) for count in counts for values in (count.words, count.errors, count.speakers or count.words)}
    if len({(count.words, count.speakers) for count in counts}) > 1 or len(lengths) > 1:
        return "the runs were scored on other utterances or references"
    if not 0 < sum(first.words) < MAX_WORDS or any(sum(count.errors) >= MAX_WORDS for count in counts):
        return "no words in the reference, or too many"
    speakers = first.speakers or range(len(first.words))
    if first.speakers and len(set(speakers)) < MIN_SPEAKERS:
        return f"{plural(len(set(speakers)), 'speaker')}, expected {MIN_SPEAKERS} or more"
    worse_errors, better_errors = (np.array([count.errors for count in side], dtype=np.int64) for side in sides)
    words, blocks = (np.array(values, dtype=np.int64) for values in (first.words, speakers))
    return bootstrap_wer(worse_errors, better_errors, words, blocks), "speakers" if first.speakers else "utterances"
