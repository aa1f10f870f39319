"""The figures of a table: its cells, which are the runs of a condition with a number of workers; metrics; speed-ups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ddnn.report.runs import OVERLOADED
from ddnn.report.scaling import calibrate, epoch_seconds
from ddnn.reproduce.runs import MeasuredEpoch, RunRecord
from ddnn.reproduce.tables import BASE, Condition, ReproduceConfig, Table, paper
from ddnn.util.errors import UserError
from ddnn.util.text import plural


@dataclass(frozen=True)
class Metric:
    """A result of a run, in percent: frame accuracy on the cross-validation set or a test set, or word error rate."""

    kind: Literal["cv", "frames", "words"]
    name: str = ""  # of the test set, or of test set and graph

    @property
    def label(self) -> str:
        return {"cv": "CV frame accuracy", "frames": f"{self.name} frame accuracy"}.get(self.kind, f"{self.name} WER")

    @property
    def title(self) -> str:
        return f"{self.label} (%)"

    @property
    def lower_is_better(self) -> bool:
        return self.kind == "words"

    def value(self, record: RunRecord) -> float | None:
        """In percent; None where the run does not have it."""
        if self.kind == "words":
            return record.wers[self.name].wer if self.name in record.wers else None
        metrics = record.cv if self.kind == "cv" else record.tests.get(self.name)
        return None if metrics is None else 100.0 * metrics.frame_accuracy


@dataclass(frozen=True)
class Cell:
    """The runs of a condition (as of the table) with a number of workers, by seed, including those that failed, that
    is, did not train; and how many are expected."""

    condition: Condition
    workers: int
    runs: tuple[RunRecord, ...]
    expected: int

    @property
    def valid(self) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.runs if run.failure is None)

    @property
    def failed(self) -> tuple[RunRecord, ...]:
        return tuple(run for run in self.runs if run.failure is not None)

    @property
    def num_failed(self) -> int:
        return len(self.failed)

    @property
    def title(self) -> str:
        return f"{self.condition.label}, {plural(self.workers, 'worker')}"

    def values(self, metric: Metric) -> dict[int, float]:
        """Seed -> percent, of the runs that trained and have it."""
        return {run.seed: value for run in self.valid if (value := metric.value(run)) is not None}

    def to_dict(self) -> dict[str, object]:
        runs = {"runs": len(self.runs), "failed": self.num_failed}
        return {"condition": self.condition.name, "workers": self.workers, **runs}


def find_cell(config: ReproduceConfig, records: Mapping[str, RunRecord], condition: Condition, workers: int) -> Cell:
    """The runs of a condition, which are those of another where the corpus says so."""
    name = config.recipe_name(condition.name)
    runs = [run for run in records.values() if (run.condition, run.workers) == (name, workers)]
    return Cell(condition, workers, tuple(sorted(runs, key=lambda run: run.seed)), len(config.seeds))


def table_cells(
    config: ReproduceConfig, table: Table, records: Mapping[str, RunRecord], missing: Iterable[str] = ()
) -> list[Cell]:
    """All cells of a table, row by row; without extensions that have neither a record nor a `missing` run."""
    known = {name.rsplit("-", 2)[0] for name in missing} | {record.condition for record in records.values()}
    return [
        find_cell(config, records, condition, workers)
        for condition in table.conditions
        if not condition.extension or config.recipe_name(condition.name) in known
        for workers in table.columns(condition, config.workers, config.max_workers)
    ]


def metrics_of(config: ReproduceConfig, records: Iterable[RunRecord]) -> list[Metric]:
    """What these runs have: CV, then frame accuracies, then word error rates, in the order of the tests."""
    runs = [run for run in records if run.failure is None]
    order = [name for test in config.tests for name in (test.name, *(f"{test.name} {graph}" for graph in test.graphs))]
    frames = {Metric("frames", name) for run in runs for name in run.tests}
    words = {Metric("words", name) for run in runs for name in run.wers}

    def place(metric: Metric) -> tuple[int, str]:
        return order.index(metric.name) if metric.name in order else len(order), metric.name

    cv = [Metric("cv")] if any(run.cv is not None for run in runs) else []
    return [*cv, *sorted(frames, key=place), *sorted(words, key=place)]


def main_accuracy(metrics: Sequence[Metric]) -> Metric | None:
    """The frame accuracy that counts: of the first test set with alignments, else of the cross-validation set."""
    return next((metric for kind in ("frames", "cv") for metric in metrics if metric.kind == kind), None)


SLOWED = 1.5  # times the computing time of the fastest like run: then other load took the cores
TIMES = ("seconds", "comm_seconds", "averagings", "compute_seconds", "other_seconds", "interval_seconds_std")


def overloaded_runs(records: Mapping[str, RunRecord]) -> frozenset[str]:
    """Names of the runs that other load slowed down, so that their times say nothing. By their CPU time, as `ddnn report`
    warns, where their workers had a core each and the record has it; or they computed `SLOWED` times as long as another
    run of as many workers in the same group."""
    fastest: dict[tuple[object, ...], float] = {}
    computing: dict[str, tuple[tuple[object, ...], float]] = {}
    slow = set[str]()
    for name, record in records.items():
        if record.measured is None or record.time is None:
            continue
        seconds = record.measured.compute_seconds or record.measured.seconds
        key = (*_group(record, record.measured), record.workers)
        computing[name] = key, seconds
        fastest[key] = min(fastest.get(key, seconds), seconds)
        fraction = record.time.compute_cpu_fraction
        if fraction is not None and fraction < OVERLOADED and record.time.cores >= record.workers:
            slow.add(name)
    return frozenset(slow | {name for name, (key, seconds) in computing.items() if seconds > SLOWED * fastest[key]})


def _group(record: RunRecord, epoch: MeasuredEpoch) -> tuple[str, ...]:
    """What runs must share if their times are to compare."""
    shared = (epoch.num_parameters, epoch.flop_per_frame, epoch.minibatch_size)
    return (record.kind_of_machine, record.precision, record.optimizer, record.train_digest, *map(str, shared))


@dataclass(frozen=True)
class SpeedUp:
    """T(1) / T(workers) of a condition: measured, between runs that compare; predicted by the scaling model
    (docs/scaling.md) from times of runs in which no two workers shared a core; or the paper's."""

    condition: str
    label: str
    workers: int
    speed_up: float
    kind: Literal["measured", "predicted", "paper"]

    @property
    def efficiency(self) -> float:
        """Speed-up divided by workers, 0 to 1: the scaling factor of papers."""
        return self.speed_up / self.workers


def speed_ups(
    conditions: Iterable[Condition], workers: Sequence[int], records: Mapping[str, RunRecord]
) -> list[SpeedUp]:
    """Of all conditions with figures: the paper's, those measured, and the model's for the other sizes. Only runs of
    one group of `_median_epochs` are compared: of the group that has most of a condition's sizes."""
    result: list[SpeedUp] = []
    groups = _median_epochs(records)
    for condition in conditions:
        name, label = condition.name, condition.label
        published = paper().published_speed_ups.get(name, {})
        result += [SpeedUp(name, label, n, value, "paper") for n, value in published.items()]
        sizes = [n for n in workers if n > 1]
        compared = [
            (epochs[BASE, 1], {n: epochs[name, n] for n in sizes if (name, n) in epochs})
            for epochs in groups
            if (BASE, 1) in epochs
        ]
        if not compared:
            continue
        single, several = max(compared, key=lambda found: len(found[1]))
        speeds = {1: 1.0, **{n: single.seconds / epoch.seconds for n, epoch in several.items()}}
        result += [SpeedUp(name, label, n, value, "measured") for n, value in speeds.items()]
        predicted = _predicted([n for n in sizes if n not in several], single, several)
        result += [SpeedUp(name, label, n, value, "predicted") for n, value in predicted.items()]
    return result


def _median_epochs(records: Mapping[str, RunRecord]) -> list[dict[tuple[str, int], MeasuredEpoch]]:
    """For each `_group` the median epochs of the seeds by condition and workers, of runs that trained, in which every
    worker had a core of its own, and that no other load slowed down."""
    groups: dict[tuple[str, ...], dict[tuple[str, int], list[MeasuredEpoch]]] = {}
    slow = overloaded_runs(records)
    for name, record in records.items():
        epoch, cell = record.measured, (record.condition, record.workers)
        alone = record.time is not None and record.time.cores >= record.workers
        if epoch and alone and record.failure is None and name not in slow:
            groups.setdefault(_group(record, epoch), {}).setdefault(cell, []).append(epoch)
    return [{cell: _median(epochs) for cell, epochs in cells.items()} for _, cells in sorted(groups.items())]


def _median(epochs: Sequence[MeasuredEpoch]) -> MeasuredEpoch:
    times = {name: [t for epoch in epochs if (t := getattr(epoch, name)) is not None] for name in TIMES}
    return epochs[0].model_copy(update={name: median(known) for name, known in times.items() if known})


def _predicted(sizes: Sequence[int], single: MeasuredEpoch, several: Mapping[int, MeasuredEpoch]) -> dict[int, float]:
    """Workers -> speed-up by the scaling model; empty where it cannot be fitted."""
    if not several:
        return {}
    measured = [single.to_measurement(1), *(epoch.to_measurement(n) for n, epoch in several.items())]
    try:
        parameters = calibrate(measured).constants
    except UserError:  # runs of different networks or minibatches: one model does not fit them
        return {}
    one, *others = (epoch_seconds(parameters, measured[-1].way, n) for n in (1, *sizes))
    return {n: one / seconds for n, seconds in zip(sizes, others, strict=True)}
