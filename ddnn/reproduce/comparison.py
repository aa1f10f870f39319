"""Whether a corpus confirms what the paper says about two conditions: verdicts, by bootstrap intervals. Word error
rates: paired, over speakers and seeds (`ddnn.decoding.word_errors`). Frame accuracies: over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from ddnn.decoding.word_errors import MIN_SPEAKERS, REPLICATES, SEED, Estimate, bootstrap_wer, estimate_of
from ddnn.reproduce.entries import TableEntry, find_entry, main_accuracy, metrics_of
from ddnn.reproduce.runs import OF_PARAMETERS, Metric, RunRecord, WordErrors
from ddnn.reproduce.tables import BASE, Condition, Hypothesis, ReproduceConfig, Table
from ddnn.util.text import plural

MAX_ENUMERATED = 5  # seeds of which all n**n resamples are enumerated (3,125); of more, `REPLICATES` are drawn
MIN_SEEDS = 3  # two differences have the same sign one time in two: that says nothing
MAX_WORDS = 1 << 31  # of a run's utterances together: what 64 bits can still multiply

VerdictName = Literal[
    "confirmed",
    "expected direction, interval contains 0",
    "no difference",
    "opposite direction, interval contains 0",
    "contradicted",
    "inconclusive",
    "not tested",
    "not comparable",
]
NO_ERRORS = WordErrors(wer=0.0)
SIGNIFICANT: tuple[VerdictName, ...] = ("confirmed", "contradicted")  # by a metric whose interval does not contain 0


def bootstrap_seeds(differences: Sequence[float]) -> Estimate:
    """Bootstrap of the mean of differences in percentage points, two or more, that are paired by seed.

    Up to five seeds all resamples are enumerated. With two or three the interval reaches from the lowest to the highest
    difference: it does not contain 0 exactly if all differences have the same sign, which three that mean nothing have
    one time in four.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if n <= MAX_ENUMERATED:
        resampled = np.indices((n,) * n).reshape(n, -1).T
    else:
        resampled = np.random.default_rng(SEED).integers(0, n, size=(REPLICATES, n))
    return estimate_of(float(values.mean()), values[resampled].mean(axis=1))


@dataclass(frozen=True)
class Verdict:
    """One of a few words, and the reason if the figures do not show it."""

    verdict: VerdictName
    why: str = ""

    @property
    def text(self) -> str:
        if self.verdict == "not comparable":
            return f"{self.verdict}: {self.why}"
        return f"{self.verdict} ({self.why})" if self.why else self.verdict


@dataclass(frozen=True, kw_only=True)
class MetricResult(Verdict):
    """Two entries compared by one metric. The fields are those of `--json`."""

    metric: str  # its label
    better: float | None  # mean in percent over the common seeds; None without any
    worse: float | None
    seeds: int  # how many both have
    difference: float | None  # in percentage points, positive if `better` is better
    interval: tuple[float, float] | None  # of the difference, 95 %; None if it was not tested
    prob_improvement: float | None  # share of the replicates in which `better` is better
    resampled: str  # by the bootstrap: speakers, utterances or seeds; empty if it was not tested


@dataclass(frozen=True, kw_only=True)
class HypothesisResult(Verdict):
    """A hypothesis of a table, tested on a corpus."""

    table: Table
    hypothesis: Hypothesis
    better: TableEntry
    worse: TableEntry
    metrics: tuple[MetricResult, ...]
    differing_dbn_seeds: tuple[int, ...]  # both runs of these started from RBMs, but from different ones
    unknown_dbn_seeds: tuple[int, ...]  # the records do not show whether both runs started from the same RBMs
    mixed: tuple[str, ...]  # kinds of machine and precisions, where the runs have several, in words

    @property
    def was_tested(self) -> bool:
        return self.verdict not in ("not tested", "not comparable")

    def to_dict(self) -> dict[str, object]:
        return {
            "table": self.table.name,
            "statement": self.hypothesis.statement,
            "published": self.hypothesis.published,
            "expected_better": self.better.to_dict(),
            "expected_worse": self.worse.to_dict(),
            "metrics": [vars(result) for result in self.metrics],
            **{name: getattr(self, name) for name in ("verdict", "why", "mixed")},
        }


def compare(
    config: ReproduceConfig, table: Table, hypothesis: Hypothesis, records: Mapping[str, RunRecord]
) -> HypothesisResult:
    """Tests a hypothesis by everything that was measured: confirmed if the frame accuracy of the first test set with
    alignments or a word error rate confirms it and none contradicts it. If the cross-validation set says the opposite,
    the verdict mentions it. Figures are of the seeds with which neither run failed. If all runs of a side failed there
    is nothing to compare; the verdict then says which hypotheses were tested instead."""
    sides = hypothesis.expected_better, hypothesis.expected_worse
    better, worse = entries = [
        find_entry(config, records, table.condition(name), config.max_workers if size == "max" else size)
        for name, size in sides
    ]
    verdict = _untested(better, worse)
    results: list[MetricResult] = []
    if verdict is not None and verdict.verdict == "not comparable":
        failed = [side for side, entry in zip(sides, entries, strict=True) if not entry.valid]
        others = [compare(config, table, other, records) for other in table.hypotheses if other.instead_of in failed]
        why = [f"tested instead: {o.hypothesis.statement} ({o.verdict})" for o in others if o.was_tested]
    else:
        metrics = metrics_of(config, [*better.runs, *worse.runs])
        results = [_compare_by(metric, better, worse, verdict) for metric in metrics]
        main = main_accuracy(metrics)
        counting = [
            result for metric, result in zip(metrics, results, strict=True) if metric.kind == "words" or metric == main
        ]
        verdict = verdict or overall_verdict(counting)
        contrary = [result.metric for result in results if {result.verdict, verdict.verdict} == set(SIGNIFICANT)]
        why = [f"not by {', '.join(contrary)}"] if contrary else []
        for entry in entries:
            if entry.failed:
                seeds = ", ".join(str(run.seed) for run in entry.failed)
                runs = plural(len(entry.runs), "run")
                why.append(f"{len(entry.failed)} of {runs} of {entry.title} failed: seed {seeds}")
    differing, unknown = _dbn_differences(better, worse)
    return HypothesisResult(
        verdict.verdict,
        "; ".join(filter(None, [verdict.why, *why])),
        table=table,
        hypothesis=hypothesis,
        better=better,
        worse=worse,
        metrics=tuple(results),
        differing_dbn_seeds=differing,
        unknown_dbn_seeds=unknown,
        mixed=_mixed([*better.valid, *worse.valid]),
    )


def _dbn_differences(better: TableEntry, worse: TableEntry) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Seeds whose two runs started from different RBMs, and those of which only digests of the RBMs' files differ."""
    dbns = {run.seed: run.dbn for run in better.valid}
    pairs = {run.seed: (dbns.get(run.seed), run.dbn) for run in worse.valid}
    unequal = {seed: pair for seed, pair in pairs.items() if all(pair) and pair[0] != pair[1]}
    known = [seed for seed, pair in unequal.items() if all(str(dbn).startswith(OF_PARAMETERS) for dbn in pair)]
    return tuple(known), tuple(seed for seed in unequal if seed not in known)


def _mixed(runs: Sequence[RunRecord]) -> tuple[str, ...]:
    """What the compared runs do not share, as far as it is known: RBMs differ by machine, sums by precision."""
    kinds = {
        "on different kinds of machine": {run.kind_of_machine for run in runs if run.machine},
        "in different precisions": {run.precision for run in runs if run.precision},
    }
    return tuple(f"{name}: {', '.join(sorted(values))}" for name, values in kinds.items() if len(values) > 1)


def overall_verdict(results: Sequence[MetricResult]) -> Verdict:
    tested = [result for result in results if result.verdict != "not tested"]
    if not tested:
        return Verdict("not tested", results[0].why if results else "no figures")
    significant = [result for result in tested if result.verdict in SIGNIFICANT]
    words = {result.verdict for result in significant or tested}
    if len(words) > 1:
        why = "metrics contradict each other" if significant else "all intervals contain 0, the directions differ"
        return Verdict("inconclusive", why)
    return Verdict(words.pop(), f"by {', '.join(result.metric for result in significant)}" if significant else "")


def _untested(better: TableEntry, worse: TableEntry) -> Verdict | None:
    """The verdict, if it does not depend on figures."""
    if better.runs and better.runs == worse.runs:
        return Verdict("not tested", "the same runs on this corpus")
    failed = []
    for entry in (better, worse):
        if not entry.runs:
            return Verdict("not tested", f"no runs of: {entry.title}")
        if not entry.valid:
            first, runs = entry.runs[0], plural(len(entry.runs), "run")
            setting = f"{entry.condition.label} on {plural(entry.workers, 'worker')}"
            reason = f"{len(entry.runs)} of {runs}; seed {first.seed}: {str(first.failure)[:200]}"
            failed.append(f"{setting} did not train ({reason})")
    return Verdict("not comparable", "; ".join(failed)) if failed else None


def _compare_by(metric: Metric, better: TableEntry, worse: TableEntry, untested: Verdict | None) -> MetricResult:
    """Two entries by one metric. `untested`: the verdict, if it does not depend on figures, which are shown nevertheless."""
    values = better.values(metric), worse.values(metric)
    seeds = sorted(values[0].keys() & values[1].keys())
    means = [fmean(side[seed] for seed in seeds) if seeds else None for side in values]
    differences = paired_differences(*(values[::-1] if metric.kind == "words" else values))
    estimate, unit = None, ""
    why = f"{plural(len(seeds), 'common seed')}, expected {MIN_SEEDS} or more"
    if len(seeds) >= MIN_SEEDS:
        runs = [{run.seed: run for run in entry.valid} for entry in (worse, better)]
        errors = [[side[seed].wers.get(metric.name, NO_ERRORS) for seed in seeds] for side in runs]
        if not all(run.words for run in (*errors[0], *errors[1])):
            estimate, unit = bootstrap_seeds(differences), "seeds"
        elif not (why := _word_problem([*errors[0], *errors[1]])):
            estimate, unit = _bootstrap_words(*errors)
    verdict = untested or (_verdict(estimate) if estimate else Verdict("not tested", why))
    return MetricResult(
        verdict.verdict,
        verdict.why,
        metric=metric.label,
        better=means[0],
        worse=means[1],
        seeds=len(seeds),
        difference=estimate.difference if estimate else fmean(differences) if differences else None,
        interval=(estimate.low, estimate.high) if estimate else None,
        prob_improvement=estimate.prob_improvement if estimate else None,
        resampled=unit,
    )


def paired_differences(values: Mapping[int, float], subtracted: Mapping[int, float]) -> list[float]:
    """Differences for the seeds that both have."""
    return [values[seed] - subtracted[seed] for seed in sorted(values.keys() & subtracted.keys())]


def _verdict(estimate: Estimate) -> Verdict:
    if estimate.difference == 0.0:
        return Verdict("no difference")
    if estimate.difference > 0.0:
        return Verdict("confirmed" if estimate.significant else "expected direction, interval contains 0")
    return Verdict("contradicted" if estimate.significant else "opposite direction, interval contains 0")


def _word_problem(runs: Sequence[WordErrors]) -> str:
    """Why the errors of these runs by utterance cannot be compared; empty if they can."""
    words, speakers = runs[0].words, runs[0].speakers
    lengths = {len(counts) for run in runs for counts in (run.words, run.errors, run.speakers or run.words)}
    if len({(run.words, run.speakers) for run in runs}) > 1 or len(lengths) > 1:
        return "the runs were scored on other utterances or references"
    if not 0 < sum(words) < MAX_WORDS or any(sum(run.errors) >= MAX_WORDS for run in runs):
        return "no words in the reference, or too many"
    if speakers and len(set(speakers)) < MIN_SPEAKERS:
        return f"{plural(len(set(speakers)), 'speaker')}, expected {MIN_SPEAKERS} or more"
    return ""


def _bootstrap_words(worse: Sequence[WordErrors], better: Sequence[WordErrors]) -> tuple[Estimate, str]:
    """The estimate over seeds and speakers, or over utterances if the speakers are unknown."""
    words, speakers = worse[0].words, worse[0].speakers
    sides = ([run.errors for run in side] for side in (worse, better))
    errors, better_errors, weights, blocks = (
        np.array(values, np.int64) for values in (*sides, words, speakers or range(len(words)))
    )
    return bootstrap_wer(errors, better_errors, weights, blocks), "speakers" if speakers else "utterances"


@dataclass(frozen=True)
class Degradation:
    """Frame accuracy of `base` on one worker minus that of an entry, in percentage points, paired by seed."""

    entry: TableEntry
    percentage_points: float
    seeds: int
    interval: tuple[float, float] | None  # 95 %; None with fewer than `MIN_SEEDS`
    equal_epochs: bool

    def to_dict(self) -> dict[str, object]:
        figures = {name: getattr(self, name) for name in ("percentage_points", "seeds", "interval")}
        return {**self.entry.to_dict(), **figures}


def degradations(
    config: ReproduceConfig, entries: Iterable[TableEntry], records: Mapping[str, RunRecord]
) -> tuple[Metric | None, list[Degradation]]:
    """The metric, and how much worse each entry is than `base` on one worker, if they have a common seed."""
    base = find_entry(config, records, Condition(name=BASE, label=BASE), 1)
    metric = main_accuracy(metrics_of(config, records.values()))
    result: list[Degradation] = []
    if metric is None:
        return None, result
    for entry in entries:
        differences = paired_differences(base.values(metric), entry.values(metric))
        if differences and entry.runs != base.runs:
            estimate = bootstrap_seeds(differences)
            interval = (estimate.low, estimate.high) if len(differences) >= MIN_SEEDS else None
            epochs, base_epochs = (fmean(run.epochs for run in side.valid) for side in (entry, base))
            equal_epochs = epochs == base_epochs
            result.append(Degradation(entry, fmean(differences), len(differences), interval, equal_epochs))
    return metric, result
