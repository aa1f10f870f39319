"""Whether a corpus confirms what the paper says about two conditions: verdicts, by bootstrap intervals. Word error
rates and frame accuracies of test sets: paired, over speakers and seeds (`ddnn.decoding.word_errors`); where the speakers are
unknown, over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

import numpy as np

from ddnn.decoding.word_errors import MIN_SPEAKERS, REPLICATES, SEED, Estimate, bootstrap_wer, estimate_of
from ddnn.reproduce.entries import TableEntry, find_entry, main_accuracy, metrics_of
from ddnn.reproduce.runs import ACCURACY, OF_PARAMETERS, WER, RunRecord, WordErrors
from ddnn.reproduce.tables import BASE, Condition, Hypothesis, ReproduceConfig, Table
from ddnn.util.text import plural

MAX_ENUMERATED = 5  # seeds of which all n**n resamples are enumerated (3,125); of more, `REPLICATES` are drawn
MIN_SEEDS = 3  # two differences have the same sign one time in two: that says nothing

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

    metric: str
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
    metrics: Sequence[MetricResult]
    differing_dbn_seeds: Sequence[int]  # both runs of these started from RBMs, but from different ones
    mixed: Sequence[str]  # kinds of machine and precisions, where the runs have several, in words

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
    verdict, results = _untested(better, worse), list[MetricResult]()
    if verdict is not None and verdict.verdict == "not comparable":
        failed = [side for side, entry in zip(sides, entries, strict=True) if not entry.valid]
        others = [compare(config, table, other, records) for other in table.hypotheses if other.instead_of in failed]
        tested = [other for other in others if other.verdict not in ("not tested", "not comparable")]
        why = [f"tested instead: {other.hypothesis.statement} ({other.verdict})" for other in tested]
    else:
        metrics = metrics_of(config, [*better.runs, *worse.runs])
        results = [_compare_by(metric, better, worse, verdict) for metric in metrics]
        main = main_accuracy(metrics)
        verdict = verdict or overall_verdict([r for r in results if r.metric.endswith(WER) or r.metric == main])
        contrary = [result.metric for result in results if {result.verdict, verdict.verdict} == set(SIGNIFICANT)]
        why = [f"not by {', '.join(contrary)}"] if contrary else []
        for entry in entries:
            if entry.failed:
                seeds = ", ".join(str(run.seed) for run in entry.failed)
                runs = plural(len(entry.runs), "run")
                why.append(f"{len(entry.failed)} of {runs} of {entry.title} failed: seed {seeds}")
    valid, dbns = [*better.valid, *worse.valid], {run.seed: run.dbn for run in better.valid}
    # RBMs differ by machine, sums by precision.
    kinds = {
        "on different kinds of machine": {run.kind_of_machine for run in valid if run.machine},
        "in different precisions": {run.precision for run in valid if run.precision},
    }
    return HypothesisResult(
        verdict.verdict,
        "; ".join(filter(None, [verdict.why, *why])),
        table=table,
        hypothesis=hypothesis,
        better=better,
        worse=worse,
        metrics=results,
        differing_dbn_seeds=[run.seed for run in worse.valid if _differ(run.dbn, dbns.get(run.seed, ""))],
        mixed=[f"{name}: {', '.join(sorted(values))}" for name, values in kinds.items() if len(values) > 1],
    )


def _differ(*dbns: str) -> bool:
    """Whether runs started from different RBMs; if that is not known, they may have been the same."""
    return len(set(dbns)) > 1 and all(dbn.startswith(OF_PARAMETERS) for dbn in dbns)


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


def _compare_by(metric: str, better: TableEntry, worse: TableEntry, untested: Verdict | None) -> MetricResult:
    """Two entries by one metric. `untested`: the verdict, if it does not depend on figures, which are shown nevertheless."""
    of_better, of_worse = better.values(metric), worse.values(metric)
    seeds = sorted(of_better.keys() & of_worse.keys())
    sign = -1.0 if metric.endswith(WER) else 1.0
    differences = [sign * (of_better[seed] - of_worse[seed]) for seed in seeds]
    errors = [[_errors(run, metric) for run in entry.valid if run.seed in seeds] for entry in (worse, better)]
    estimate, resampled = _estimate(differences, *errors)
    verdict = untested or (Verdict("not tested", resampled) if estimate is None else _verdict(estimate))
    means = [fmean(values[seed] for seed in seeds) if seeds else None for values in (of_better, of_worse)]
    return MetricResult(
        verdict.verdict,
        verdict.why,
        metric=metric,
        better=means[0],
        worse=means[1],
        seeds=len(seeds),
        difference=fmean(differences) if seeds else None,
        interval=(estimate.low, estimate.high) if estimate else None,
        prob_improvement=estimate.prob_improvement if estimate else None,
        resampled=resampled if estimate else "",
    )


def _errors(run: RunRecord, metric: str) -> WordErrors:
    """Errors by utterance and speaker, of words or, for a frame accuracy, of frames; none where they or enough speakers are unknown."""
    frames = run.tests.get(metric.removesuffix(ACCURACY))
    if frames is None or len(frames.frames) < MIN_SPEAKERS:
        return run.wers.get(metric.removesuffix(WER), NO_ERRORS)
    speakers = tuple(range(len(frames.frames)))
    return WordErrors.model_construct(wer=0.0, words=frames.frames, errors=frames.errors, speakers=speakers)


def _verdict(estimate: Estimate) -> Verdict:
    if estimate.difference == 0.0:
        return Verdict("no difference")
    if estimate.difference > 0.0:
        return Verdict("confirmed" if estimate.significant else "expected direction, interval contains 0")
    return Verdict("contradicted" if estimate.significant else "opposite direction, interval contains 0")


def _estimate(
    differences: Sequence[float], worse: Sequence[WordErrors], better: Sequence[WordErrors]
) -> tuple[Estimate | None, str]:
    """The mean of the differences between runs of a seed with its interval, and what was drawn: speakers or utterances, if
    the errors of each utterance are known, else seeds; or None, and why there is no interval."""
    if len(differences) < MIN_SEEDS:
        return None, f"{plural(len(differences), 'common seed')}, expected {MIN_SEEDS} or more"
    runs, first = [*worse, *better], worse[0]
    if not all(run.words for run in runs):
        return bootstrap_seeds(differences), "seeds"
    lengths = {len(counts) for run in runs for counts in (run.words, run.errors, run.speakers or run.words)}
    if len({(run.words, run.speakers) for run in runs}) > 1 or len(lengths) > 1 or not sum(first.words):
        return None, "the runs were scored on other utterances or references"
    speakers = first.speakers or range(len(first.words))
    if len(set(speakers)) < MIN_SPEAKERS and first.speakers:
        return None, f"{plural(len(set(speakers)), 'speaker')}, expected {MIN_SPEAKERS} or more"
    errors, better_errors = (np.array([run.errors for run in side]) for side in (worse, better))
    estimate = bootstrap_wer(errors, better_errors, np.array(first.words), np.array(speakers))
    return estimate, "speakers" if first.speakers else "utterances"


def bootstrap_seeds(differences: Sequence[float]) -> Estimate:
    """Bootstrap of the mean of differences in percentage points that are paired by seed.

    Up to five seeds all resamples are enumerated. With two or three the interval reaches from the lowest to the highest
    difference: it does not contain 0 exactly if all differences have the same sign, which three that mean nothing have
    one time in four.
    """
    values, n = np.asarray(differences), len(differences)
    if n <= MAX_ENUMERATED:
        resampled = np.indices((n,) * n).reshape(n, -1).T
    else:
        resampled = np.random.default_rng(SEED).integers(0, n, size=(REPLICATES, n))
    return estimate_of(float(values.mean()), values[resampled].mean(axis=1))


def degradations(
    config: ReproduceConfig, entries: Iterable[TableEntry], records: Mapping[str, RunRecord]
) -> list[tuple[TableEntry, MetricResult]]:
    """How much worse each entry is than `base` on one worker by the main accuracy, if they have a common seed."""
    base = find_entry(config, records, Condition(name=BASE, label=BASE), 1)
    metric = main_accuracy(metrics_of(config, records.values()))
    compared = [(e, _compare_by(metric, base, e, None)) for e in entries if metric and e.runs != base.runs]
    return [(entry, loss) for entry, loss in compared if loss.seeds]
