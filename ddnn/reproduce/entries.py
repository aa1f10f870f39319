"""The entries of a table, each the runs of a condition with a number of workers; and speed-ups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ddnn.report.runs import OVERLOADED
from ddnn.report.scaling import calibrate, epoch_seconds
from ddnn.reproduce.runs import MeasuredEpoch, Metric, RunRecord
from ddnn.reproduce.tables import BASE, Condition, ReproduceConfig, Table, paper
from ddnn.util.errors import UserError
from ddnn.util.text import plural

Kind = Literal["measured", "predicted", "paper"]
SLOW = 1.5  # times the compute time of the fastest similar run: then other load took the cores
TIMES = ("seconds", "comm_seconds", "averagings", "compute_seconds", "other_seconds", "interval_seconds_std")


@dataclass(frozen=True)
class TableEntry:
    """The runs of a condition with a number of workers, by seed, including those that failed, that is, did not train;
    and how many are expected."""

    condition: Condition
    workers: int
    runs: tuple[RunRecord, ...]
    expected: int

    @property
    def valid(self) -> list[RunRecord]:
        return [run for run in self.runs if run.failure is None]

    @property
    def failed(self) -> list[RunRecord]:
        return [run for run in self.runs if run.failure is not None]

    @property
    def title(self) -> str:
        return f"{self.condition.label}, {plural(self.workers, 'worker')}"

    def values(self, metric: Metric) -> dict[int, float]:
        """Seed -> percent, of the runs that trained and have the metric."""
        return {run.seed: run.percentages[metric] for run in self.valid if metric in run.percentages}

    def to_dict(self) -> dict[str, object]:
        runs = {"runs": len(self.runs), "failed": len(self.failed)}
        return {"condition": self.condition.name, "workers": self.workers, **runs}


def find_entry(
    config: ReproduceConfig, records: Mapping[str, RunRecord], condition: Condition, workers: int
) -> TableEntry:
    """The runs of a condition, which are those of another one if the corpus has an alias."""
    setting = config.recipe_name(condition.name), workers
    runs = [run for run in records.values() if (run.condition, run.workers) == setting]
    return TableEntry(condition, workers, tuple(sorted(runs, key=lambda run: run.seed)), len(config.seeds))


def table_entries(
    config: ReproduceConfig, table: Table, records: Mapping[str, RunRecord], missing: Iterable[str] = ()
) -> list[TableEntry]:
    """All entries of a table, row by row; without extensions that have neither a record nor a `missing` run."""
    known = {name.rsplit("-", 2)[0] for name in missing} | {record.condition for record in records.values()}
    return [
        find_entry(config, records, condition, workers)
        for condition in table.conditions
        if not condition.extension or config.recipe_name(condition.name) in known
        for workers in table.columns(condition, config.workers, config.max_workers)
    ]


def metrics_of(config: ReproduceConfig, records: Iterable[RunRecord]) -> list[Metric]:
    """The metrics of these runs: CV, then frame accuracies, then word error rates, in the order of the tests."""
    order = [name for test in config.tests for name in (test.name, *(f"{test.name} {graph}" for graph in test.graphs))]
    metrics = {metric for run in records if run.failure is None for metric in run.percentages}

    def position(metric: Metric) -> tuple[str, int, str]:
        return metric.kind, order.index(metric.name) if metric.name in order else len(order), metric.name

    return sorted(metrics, key=position)


def main_accuracy(metrics: Sequence[Metric]) -> Metric | None:
    """The frame accuracy that counts: of the first test set with alignments, else of the cross-validation set."""
    return next((metric for kind in ("frames", "cv") for metric in metrics if metric.kind == kind), None)


def overloaded_runs(records: Mapping[str, RunRecord]) -> set[str]:
    """Names of the runs that other load slowed down, so that their times say nothing: by their CPU time, as `ddnn report`
    warns, if their workers had a core each and the record has it; or because they computed `SLOW` times as long as
    another run of as many workers in the same group."""
    compute: defaultdict[object, dict[str, float]] = defaultdict(dict)
    slow = set[str]()
    for name, record in records.items():
        if record.measured is None or record.time is None:
            continue
        group = _group(record, record.measured), record.workers
        compute[group][name] = record.measured.compute_seconds or record.measured.seconds
        fraction = record.time.compute_cpu_fraction
        if fraction is not None and fraction < OVERLOADED and record.time.cores >= record.workers:
            slow.add(name)
    for seconds in compute.values():
        slow |= {name for name in seconds if seconds[name] > SLOW * min(seconds.values())}
    return slow


def _group(record: RunRecord, epoch: MeasuredEpoch) -> tuple[str, ...]:
    """What runs must share if their times are to be compared."""
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
    kind: Kind

    @property
    def efficiency(self) -> float:
        """Speed-up divided by workers, 0 to 1: the scaling factor of papers."""
        return self.speed_up / self.workers


def speed_ups(
    conditions: Iterable[Condition], workers: Sequence[int], records: Mapping[str, RunRecord]
) -> list[SpeedUp]:
    """For each condition the paper's speed-ups, those measured, and the model's for the other sizes. Only runs of one
    group of `_median_epochs` are compared: of the group that has most of a condition's sizes."""
    groups = [epochs for epochs in _median_epochs(records) if (BASE, 1) in epochs]
    sizes, result = [n for n in workers if n > 1], list[SpeedUp]()
    for condition in conditions:
        name = condition.name
        curves: dict[Kind, dict[int, float]] = {"paper": paper().published_speed_ups.get(name, {})}
        epochs = max(groups, key=lambda group: sum((name, n) in group for n in sizes), default=None)
        if epochs is not None:
            single, several = epochs[BASE, 1], {n: epochs[name, n] for n in sizes if (name, n) in epochs}
            curves["measured"] = {1: 1.0, **{n: single.seconds / epoch.seconds for n, epoch in several.items()}}
            curves["predicted"] = _predicted([n for n in sizes if n not in several], single, several)
        for kind, curve in curves.items():
            result += [SpeedUp(name, condition.label, n, value, kind) for n, value in curve.items()]
    return result


def _median_epochs(records: Mapping[str, RunRecord]) -> list[dict[tuple[str, int], MeasuredEpoch]]:
    """For each `_group` the median epochs over the seeds by condition and workers, of runs that trained, in which every
    worker had a core of its own, and that no other load slowed down."""
    groups: defaultdict[tuple[str, ...], defaultdict[tuple[str, int], list[MeasuredEpoch]]]
    groups = defaultdict(lambda: defaultdict(list))
    slow = overloaded_runs(records)
    for name, record in records.items():
        has_cores = record.time is not None and record.time.cores >= record.workers
        if record.measured and has_cores and record.failure is None and name not in slow:
            groups[_group(record, record.measured)][record.condition, record.workers].append(record.measured)
    return [{entry: _median(epochs) for entry, epochs in group.items()} for _, group in sorted(groups.items())]


def _median(epochs: Sequence[MeasuredEpoch]) -> MeasuredEpoch:
    times = {name: [t for epoch in epochs if (t := getattr(epoch, name)) is not None] for name in TIMES}
    return epochs[0].model_copy(update={name: median(known) for name, known in times.items() if known})


def _predicted(sizes: Sequence[int], single: MeasuredEpoch, several: Mapping[int, MeasuredEpoch]) -> dict[int, float]:
    """Workers -> speed-up by the scaling model; empty if it cannot be fitted."""
    if not several:
        return {}
    measured = [single.to_measurement(1), *(epoch.to_measurement(n) for n, epoch in several.items())]
    try:
        constants = calibrate(measured).constants
    except UserError:  # runs of different networks or minibatches: one model does not fit them
        return {}
    seconds = {n: epoch_seconds(constants, measured[-1].scheme, n) for n in (1, *sizes)}
    return {n: seconds[1] / seconds[n] for n in sizes}
