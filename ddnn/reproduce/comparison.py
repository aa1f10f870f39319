"""Whether what the paper says of two conditions is confirmed on a corpus: verdicts, by bootstrap intervals. Word error
rates: paired, over speakers and seeds (`ddnn.decoding.word_errors`). Frame accuracies: over seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ddnn.decoding.word_errors import MIN_SPEAKERS, REPLICATES, SEED, Estimate, bootstrap_wer, estimate_of
from ddnn.reproduce.cells import Cell, Metric, find_cell, main_accuracy, metrics_of
from ddnn.reproduce.runs import OF_PARAMETERS, RunRecord
from ddnn.reproduce.tables import BASE, Condition, Hypothesis, ReproduceConfig, Table
from ddnn.util.text import plural

MAX_ENUMERATED = 5  # seeds of which all n**n resamples are enumerated (3,125); of more, `REPLICATES` are drawn
MIN_SEEDS = 3  # two differences have the same sign one time in two: that says nothing
MAX_WORDS = 1 << 31  # of a run's utterances together: what 64 bits can still multiply

Resampled = Literal["speakers", "utterances", "seeds", ""]
Word = Literal[
    "confirmed",
    "expected direction, interval contains 0",
    "no difference",
    "opposite direction, interval contains 0",
    "contradicted",
    "inconclusive",
    "not tested",
    "not comparable",
]
SIGNIFICANT: tuple[Word, ...] = ("confirmed", "contradicted")  # by a metric whose interval does not contain 0


def bootstrap_seeds(differences: Sequence[float]) -> Estimate:
    """Bootstrap of the mean of differences in percentage points, two or more, that are paired by seed.

    Up to five seeds all resamples are enumerated. With two or three the interval reaches from the lowest to the highest
    difference: it does not contain 0 exactly where all differences have the same sign, which three that mean nothing
    have one time in four.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n <= MAX_ENUMERATED:
        resampled: npt.NDArray[Any] = np.indices((n,) * n).reshape(n, -1).T
    else:
        resampled = np.random.default_rng(SEED).integers(0, n, size=(REPLICATES, n))
    return estimate_of(float(values.mean()), values[resampled].mean(axis=1))


@dataclass(frozen=True)
class Verdict:
    """One of a few words, and why where the figures do not say it."""

    word: Word
    why: str = ""

    @property
    def text(self) -> str:
        if self.word == "not comparable":
            return f"{self.word}: {self.why}"
        return f"{self.word} ({self.why})" if self.why else self.word


@dataclass(frozen=True)
class MetricResult:
    """Two cells by one metric."""

    metric: Metric
    better: float | None  # mean in percent over the common seeds; None without any
    worse: float | None
    seeds: int  # how many both have
    difference: float | None  # in percentage points, positive where `better` is better
    estimate: Estimate | None  # None where it was not tested
    resampled: Resampled  # by the bootstrap
    verdict: Verdict

    def to_dict(self) -> dict[str, object]:
        return {
            "metric": self.metric.label,
            **{name: getattr(self, name) for name in ("better", "worse", "seeds", "difference")},
            "interval": [self.estimate.low, self.estimate.high] if self.estimate else None,
            "prob_improvement": self.estimate.prob_improvement if self.estimate else None,
            "resampled": self.resampled,
            "verdict": self.verdict.word,
            "why": self.verdict.why,
        }


@dataclass(frozen=True)
class HypothesisResult:
    """A hypothesis of a table on a corpus."""

    table: Table
    hypothesis: Hypothesis
    better: Cell
    worse: Cell
    results: tuple[MetricResult, ...]
    verdict: Verdict
    differing_dbn_seeds: tuple[int, ...]  # of which both runs began with RBMs, but with different ones
    unknown_dbn_seeds: tuple[int, ...]  # of which the records do not show whether they are the same ones
    mixed: tuple[str, ...]  # kinds of machine and precisions, where the runs have several, in words

    @property
    def was_tested(self) -> bool:
        return self.verdict.word not in ("not tested", "not comparable")

    def to_dict(self) -> dict[str, object]:
        return {
            "table": self.table.name,
            "statement": self.hypothesis.statement,
            "published": self.hypothesis.published,
            "expected_better": self.better.to_dict(),
            "expected_worse": self.worse.to_dict(),
            "verdict": self.verdict.word,
            "why": self.verdict.why,
            "mixed": list(self.mixed),
            "metrics": [result.to_dict() for result in self.results],
        }


def compare(
    config: ReproduceConfig, table: Table, hypothesis: Hypothesis, records: Mapping[str, RunRecord]
) -> HypothesisResult:
    """One hypothesis by everything that was measured: confirmed where the frame accuracy of the first test set with
    alignments or a word error rate confirms it and none contradicts it. Where the cross-validation set says the
    opposite, the verdict mentions it. Figures are of the seeds of which neither run failed. Where all runs of a side
    failed there is nothing to compare; the verdict then says which hypotheses were tested instead."""
    sides = hypothesis.expected_better, hypothesis.expected_worse
    better, worse = (
        find_cell(config, records, table.condition(name), config.max_workers if size == "max" else size)
        for name, size in sides
    )
    given = _untested(better, worse)
    comparable = given is None or given.word != "not comparable"
    metrics = metrics_of(config, [*better.runs, *worse.runs]) if comparable else []
    main = main_accuracy(metrics)
    results = tuple(_compare_by(metric, better, worse, given) for metric in metrics)
    counting = [result for result in results if result.metric == main or result.metric.kind == "words"]
    verdict = given or overall_verdict(counting)
    contrary = [r.metric.label for r in results if {r.verdict.word, verdict.word} == set(SIGNIFICANT)]
    why = [verdict.why] if verdict.why else []
    why += [f"not by {', '.join(contrary)}"] if contrary else []
    if comparable:
        why += [_failed_seeds(cell) for cell in (better, worse) if cell.failed]
    else:
        failed = {side for side, cell in zip(sides, (better, worse), strict=True) if not cell.valid}
        others = [compare(config, table, h, records) for h in table.hypotheses if h.instead_of in failed]
        why += [f"tested instead: {h.hypothesis.statement} ({h.verdict.word})" for h in others if h.was_tested]
    dbns = {run.seed: run.dbn for run in better.valid if run.dbn}
    unlike = [(run.seed, run.dbn) for run in worse.valid if run.dbn and dbns.get(run.seed, run.dbn) != run.dbn]
    known = {seed for seed, dbn in unlike if all(digest.startswith(OF_PARAMETERS) for digest in (dbns[seed], dbn))}
    differing, unknown = (tuple(seed for seed, _ in unlike if (seed in known) is so) for so in (True, False))
    verdict = replace(verdict, why="; ".join(why))
    return HypothesisResult(
        table, hypothesis, better, worse, results, verdict, differing, unknown, _mixed([*better.valid, *worse.valid])
    )


def _failed_seeds(cell: Cell) -> str:
    seeds = ", ".join(str(run.seed) for run in cell.failed)
    return f"{len(cell.failed)} of {plural(len(cell.runs), 'run')} of {cell.title} failed: seed {seeds}"


def _mixed(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """What figures that are compared do not share, as far as it is known: RBMs differ by machine, sums by precision."""
    kinds = {
        "on different kinds of machine": {run.kind_of_machine for run in runs if run.machine},
        "in different precisions": {run.precision for run in runs if run.precision},
    }
    return tuple(f"{name}: {', '.join(sorted(found))}" for name, found in kinds.items() if len(found) > 1)


def overall_verdict(results: Sequence[MetricResult]) -> Verdict:
    tested = [result for result in results if result.verdict.word != "not tested"]
    if not tested:
        return Verdict("not tested", results[0].verdict.why if results else "no figures")
    significant = [result for result in tested if result.verdict.word in SIGNIFICANT]
    words = {result.verdict.word for result in significant or tested}
    if len(words) > 1:
        why = "metrics contradict each other" if significant else "all intervals contain 0, the directions differ"
        return Verdict("inconclusive", why)
    return Verdict(words.pop(), f"by {', '.join(result.metric.label for result in significant)}" if significant else "")


def _untested(better: Cell, worse: Cell) -> Verdict | None:
    if better.runs and better.runs == worse.runs:
        return Verdict("not tested", "the same runs on this corpus")
    for cell in (better, worse):
        if not cell.runs:
            return Verdict("not tested", f"no runs of: {cell.title}")
    failed = "; ".join(_untrained(cell) for cell in (better, worse) if not cell.valid)
    return Verdict("not comparable", failed) if failed else None


def _untrained(cell: Cell) -> str:
    first, runs = cell.failed[0], plural(len(cell.runs), "run")
    setting = f"{cell.condition.label} on {plural(cell.workers, 'worker')}"
    return f"{setting} did not train ({len(cell.failed)} of {runs}; seed {first.seed}: {(first.failure or '')[:200]})"


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
    good_mean, bad_mean = (fmean(side[seed] for seed in common) if common else None for side in (good, bad))
    if estimate is None:
        resampled, verdict = "", Verdict("not tested", why)
    else:
        verdict = _verdict(estimate)
    return MetricResult(metric, good_mean, bad_mean, len(common), difference, estimate, resampled, given or verdict)


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
    """The estimate and what was drawn; "" where errors by utterance are unknown; else why they cannot be compared."""
    sides = [[run.wers[metric.name] for run in cell.valid if run.seed in seeds] for cell in (worse, better)]
    counts = [*sides[0], *sides[1]]
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


@dataclass(frozen=True)
class Degradation:
    """Frame accuracy of `base` on one worker minus that of a cell, in percentage points, paired by seed."""

    cell: Cell
    percentage_points: float
    seeds: int
    estimate: Estimate | None
    equal_epochs: bool

    def to_dict(self) -> dict[str, object]:
        interval = [self.estimate.low, self.estimate.high] if self.estimate else None
        figures = {"percentage_points": self.percentage_points, "seeds": self.seeds, "interval": interval}
        return {**self.cell.to_dict(), **figures}


def degradations(
    config: ReproduceConfig, cells: Iterable[Cell], records: Mapping[str, RunRecord]
) -> tuple[Metric | None, list[Degradation]]:
    """The metric, and how much worse each cell is than `base` on one worker; not of cells without a common seed."""
    base = find_cell(config, records, Condition(name=BASE, label=BASE), 1)
    metric = main_accuracy(metrics_of(config, records.values()))
    if metric is None:
        return None, []
    result = []
    for cell in cells:
        differences = _paired(base.values(metric), cell.values(metric))
        if differences and cell.runs != base.runs:
            epochs, base_epochs = (fmean(run.epochs for run in runs) for runs in (cell.valid, base.valid))
            found = fmean(differences), len(differences), _over_seeds(differences)
            result.append(Degradation(cell, *found, equal_epochs=epochs == base_epochs))
    return metric, result
