"""The entries of a table, each the runs of a condition with a number of workers; and speed-ups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ddnn.report.runs import OVERLOADED
from ddnn.report.scaling import Measurement, calibrate, epoch_seconds, fit_not_negative
from ddnn.reproduce.runs import ACCURACY, CV_ACCURACY, WER, MeasuredEpoch, RunRecord
from ddnn.reproduce.tables import Condition, ReproduceConfig, SharedTimes, Table, paper
from ddnn.util.errors import UserError
from ddnn.util.text import plural

SpeedUp = dict[str, Any]
"""Condition, label, workers, speed-up, and its kind: measured, predicted or paper."""
DAY = 86_400.0  # seconds
SLOW = 1.5  # times the compute time of the fastest similar run: then other load took the cores


@dataclass(frozen=True)
class TableEntry:
    """The runs of a condition with a number of workers, by seed, including those that failed, that is, did not train."""

    condition: Condition
    workers: int
    runs: tuple[RunRecord, ...]

    @property
    def valid(self) -> list[RunRecord]:
        return [run for run in self.runs if run.failure is None]

    @property
    def failed(self) -> list[RunRecord]:
        return [run for run in self.runs if run.failure is not None]

    @property
    def title(self) -> str:
        return f"{self.condition.label}, {plural(self.workers, 'worker')}"

    def values(self, metric: str) -> dict[int, float]:
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
    return TableEntry(condition, workers, tuple(sorted(runs, key=lambda run: run.seed)))


def table_entries(
    config: ReproduceConfig, table: Table, records: Mapping[str, RunRecord], missing: Iterable[str] = ()
) -> list[TableEntry]:
    """All entries of a table, row by row; without extensions that have neither a record nor a `missing` run."""
    known = {name.rsplit("-", 2)[0] for name in (*missing, *records)}
    return [
        find_entry(config, records, condition, workers)
        for condition, workers in table.settings(config)
        if not condition.extension or config.recipe_name(condition.name) in known
    ]


def metrics_of(config: ReproduceConfig, runs: Iterable[RunRecord]) -> list[str]:
    """The metrics of these runs: CV, then frame accuracies, then word error rates, in the order of the tests."""
    words = [f"{name} {graph}{WER}" for name, test in config.tests.items() for graph in test.graphs]
    order = [CV_ACCURACY, *(name + ACCURACY for name in config.tests), *words]
    known = {metric for run in runs if run.failure is None for metric in run.percentages}
    return [metric for metric in order if metric in known] + sorted(known - set(order))


def main_accuracy(metrics: Sequence[str]) -> str | None:
    """The frame accuracy that counts: of the first test set with alignments, else of the cross-validation set."""
    accuracies = [metric for metric in metrics if metric.endswith(ACCURACY)]
    return next((metric for metric in accuracies if metric != CV_ACCURACY), accuracies[0] if accuracies else None)


def overloaded_runs(records: Mapping[str, RunRecord]) -> set[str]:
    """Names of the runs that other load slowed down, so that their times say nothing: by their CPU time, as `ddnn report`
    warns, if their workers had a core each and the record has it; or because they computed `SLOW` times as long as
    another run of as many workers in the same group."""
    compute: defaultdict[object, dict[str, float]] = defaultdict(dict)
    slow = set[str]()
    for name, record in records.items():
        if record.measured is not None and record.time is not None:
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


def speed_ups(config: ReproduceConfig, table: Table, records: Mapping[str, RunRecord]) -> list[SpeedUp]:
    """T(1) / T(workers) of each condition: the paper's; measured, by medians over the seeds; and for the other sizes
    predicted by the scaling model (docs/explanation/scaling-model.md). Only runs of one `_group` are compared: of that with most runs, which
    trained, whose workers had a core each, and which no other load slowed down."""
    slow = overloaded_runs(records)
    groups: defaultdict[object, defaultdict[tuple[str, int], list[Measurement]]]
    groups = defaultdict(lambda: defaultdict(list))
    for name, record in records.items():
        has_cores = record.time is not None and record.time.cores >= record.workers
        if record.measured and has_cores and record.failure is None and name not in slow:
            epoch = record.measured.to_measurement(record.workers)
            replicas = record.workers // record.measured.columns
            size = record.measured.minibatch_size * (replicas if table.divides_minibatch else 1)
            compared = record.measured.model_copy(update={"minibatch_size": size})
            groups[_group(record, compared)][record.condition, record.workers].append(epoch)
    with_base = [group for group in groups.values() if (table.base, 1) in group]
    epochs = max(with_base, key=lambda group: sum(map(len, group.values())), default=None)
    result = list[SpeedUp]()
    for condition in table.conditions:
        name = condition.name
        curves = {"paper": paper().published_speed_ups.get(name, {})}
        if epochs:
            measured = {n: epochs[name if n > 1 else table.base, n] for n in config.workers}
            seconds = {n: median(epoch.seconds for epoch in known) for n, known in measured.items() if known}
            curves["measured"] = {n: seconds[1] / value for n, value in seconds.items()}
            if not table.divides_minibatch:
                curves["predicted"] = _predicted(
                    [n for n in measured if n not in seconds], [epoch for known in measured.values() for epoch in known]
                )
        for kind, curve in curves.items():
            row: SpeedUp = {"condition": name, "label": condition.label, "kind": kind}
            result += [{**row, "workers": n, "speed_up": value} for n, value in curve.items()]
    return result


def _predicted(sizes: Sequence[int], measured: Sequence[Measurement]) -> dict[int, float]:
    """Workers -> speed-up by the scaling model; empty if it cannot be fitted to these measurements."""
    try:
        constants = calibrate(measured).constants
    except UserError:  # one worker alone, or runs of different networks or minibatches: one model does not fit them
        return {}
    seconds = {n: epoch_seconds(constants, measured[-1].scheme, n) for n in (1, *sizes)}
    return {n: seconds[1] / seconds[n] for n in sizes}


@dataclass(frozen=True)
class SharedFit:
    """The model of the cost of workers that share a model, fitted to the first rows of published times."""

    num_fitted: int
    image_seconds: float
    update_seconds: float  # not divided among workers
    byte_seconds: float
    days: tuple[float, ...]  # of all rows


def fit_shared_times(times: SharedTimes) -> list[SharedFit]:
    """Fitted to all rows, and to the first `num_fitted`. An update takes what its images take, divided among replicas and
    columns, a part that is not divided, and the bytes: activations (forward) and derivatives (backward) between columns;
    between replicas gradients and parameters, through the link of one of them (a star). 4 bytes a value. UserError: scipy is
    missing."""
    terms: dict[str, list[float]] = {"image": [], "update": [], "byte": []}
    for row in times.rows:
        images = times.minibatch / row.replicas
        activations = 2 * times.exchanged * images * (row.columns - 1)
        averaged = 2 * (row.replicas - 1) * times.parameters / row.columns
        for name, value in zip(terms, (images / row.columns, 1.0, 4.0 * (activations + averaged)), strict=True):
            terms[name].append(value)
    seconds = [row.days * DAY / times.updates for row in times.rows]
    fits = []
    for n in (len(seconds), times.num_fitted):
        fitted = fit_not_negative({name: column[:n] for name, column in terms.items()}, seconds[:n], seconds[:n])
        updates = (sum(fitted[name] * terms[name][i] for name in terms) for i in range(len(seconds)))
        days = tuple(update * times.updates / DAY for update in updates)
        fits.append(SharedFit(n, fitted["image"], fitted["update"], fitted["byte"], days))
    return fits
