"""The cells of a table: the runs of a condition with a number of workers, and their metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ddnn.reproduce.corpus import ReproduceConfig
from ddnn.reproduce.records import RunRecord
from ddnn.reproduce.tables import Condition, Table
from ddnn.util.text import plural


@dataclass(frozen=True)
class Metric:
    """A result of a run, in percent.

    Attributes:
        kind: frame accuracy on the cross-validation set, frame accuracy on a test set, word error rate, or share of
            the runs that diverged.
        name: of the test set, or of test set and graph; "" where there is none.
    """

    kind: Literal["cv", "frames", "words", "diverged"]
    name: str = ""

    @property
    def title(self) -> str:
        """For headings, with the unit."""
        return f"{self.label} (%)"

    @property
    def label(self) -> str:
        """The same without the unit."""
        return {
            "cv": "CV frame accuracy",
            "frames": f"{self.name} frame accuracy",
            "words": f"{self.name} WER",
            "diverged": "runs that diverged",
        }[self.kind]

    @property
    def lower_is_better(self) -> bool:
        """True of error rates."""
        return self.kind in ("words", "diverged")

    def value(self, record: RunRecord) -> float | None:
        """In percent; None where the run does not have it."""
        if self.kind == "diverged":
            return 0.0 if record.failed is None else 100.0
        if record.failed is not None:
            return None
        if self.kind == "words":
            words = record.wers.get(self.name)
            return None if words is None else words.wer
        metrics = record.cv if self.kind == "cv" else record.tests.get(self.name)
        return None if metrics is None else 100.0 * metrics.frame_accuracy


DIVERGED = Metric("diverged")


@dataclass(frozen=True)
class Cell:
    """The runs of a condition with a number of workers.

    Attributes:
        condition: as of the table, before the corpus's `aliases`.
        runs: by seed, including those that diverged.
        expected: how many there should be.
    """

    condition: Condition
    workers: int
    runs: tuple[RunRecord, ...]
    expected: int

    @property
    def valid(self) -> tuple[RunRecord, ...]:
        """Those that ended with a model."""
        return tuple(run for run in self.runs if run.failed is None)

    @property
    def num_diverged(self) -> int:
        """How many ended without."""
        return len(self.runs) - len(self.valid)

    @property
    def title(self) -> str:
        """Condition and number of workers in words."""
        return f"{self.condition.label}, {plural(self.workers, 'worker')}"

    def values(self, metric: Metric) -> dict[int, float]:
        """Seed -> percent, of the runs that have it."""
        values = {run.seed: metric.value(run) for run in self.runs}
        return {seed: value for seed, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        runs = {"runs": len(self.runs), "diverged": self.num_diverged}
        return {"condition": self.condition.name, "workers": self.workers, **runs}


def find_cell(config: ReproduceConfig, records: Mapping[str, RunRecord], condition: Condition, workers: int) -> Cell:
    """The runs of a condition, which are those of another where the corpus says so."""
    name = config.recipe_name(condition.name)
    runs = [run for run in records.values() if (run.condition, run.workers) == (name, workers)]
    return Cell(condition, workers, tuple(sorted(runs, key=lambda run: run.seed)), len(config.seeds))


def table_cells(
    config: ReproduceConfig, table: Table, records: Mapping[str, RunRecord], missing: Iterable[str] = ()
) -> list[Cell]:
    """All cells of a table, row by row; without extensions that this corpus has no recipe for.

    Args:
        missing: names of runs without a record.
    """
    known = {name.rsplit("-", 2)[0] for name in missing} | {record.condition for record in records.values()}
    return [
        find_cell(config, records, condition, workers)
        for condition in table.conditions
        if not condition.extension or config.recipe_name(condition.name) in known
        for workers in table.columns(condition, config.workers, config.max_workers)
    ]


def metrics_of(config: ReproduceConfig, records: Iterable[RunRecord]) -> list[Metric]:
    """What these runs have: CV, then frame accuracies, then word error rates, in the order of the tests."""
    runs = [run for run in records if run.failed is None]
    order = [name for test in config.tests for name in (test.name, *(f"{test.name} {graph}" for graph in test.graphs))]

    def ordered(names: Iterable[str]) -> list[str]:
        return sorted(set(names), key=lambda name: (order.index(name) if name in order else len(order), name))

    return [
        *([Metric("cv")] if any(run.cv is not None for run in runs) else []),
        *(Metric("frames", name) for name in ordered(name for run in runs for name in run.tests)),
        *(Metric("words", name) for name in ordered(name for run in runs for name in run.wers)),
    ]


def main_accuracy(metrics: Iterable[Metric]) -> Metric | None:
    """The frame accuracy that counts: of the first test set with alignments, else of the cross-validation set."""
    by_kind = sorted((m for m in metrics if m.kind in ("frames", "cv")), key=lambda metric: metric.kind != "frames")
    return by_kind[0] if by_kind else None
