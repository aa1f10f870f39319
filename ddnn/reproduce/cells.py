"""The cells of a table: the runs of a setting at a size, what was measured of them, their mean and spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from ddnn.reproduce.corpus import CorpusPlan
from ddnn.reproduce.records import Record
from ddnn.reproduce.table import Setting, Table, sizes_of

NONE = "-"
"""Where there is no figure."""
BEYOND = " †"
"""Behind what is not in the paper."""


@dataclass(frozen=True)
class Measure:
    """A figure of a run.

    Attributes:
        kind: frame accuracy on the cross-validation set, frame accuracy of a test set, word error rate, or share of
            the runs that diverged.
        name: of the test set, or of test set and graph; "" where there is none.
    """

    kind: Literal["cv", "frames", "words", "diverged"]
    name: str = ""

    @property
    def title(self) -> str:
        """For headings, with the unit."""
        return {
            "cv": "CV frame accuracy (%)",
            "frames": f"{self.name} frame accuracy (%)",
            "words": f"{self.name} WER (%)",
            "diverged": "runs that diverged (%)",
        }[self.kind]

    @property
    def short(self) -> str:
        """The same without the unit."""
        return self.title.removesuffix(" (%)")

    def of(self, record: Record) -> float | None:
        """In percent; None where the run does not have it."""
        if self.kind == "diverged":
            return 0.0 if record.failed is None else 100.0
        if record.failed is not None:
            return None
        if self.kind == "words":
            words = record.wers.get(self.name)
            return None if words is None else words.wer
        figures = record.cv if self.kind == "cv" else record.tests.get(self.name)
        return None if figures is None else 100.0 * figures.frame_accuracy


DIVERGENCE = Measure("diverged")


@dataclass(frozen=True)
class Cell:
    """The runs of a setting with a number of workers.

    Attributes:
        setting: as of the table, before the corpus's `same`.
        runs: by seed, those that failed among them.
        expected: how many there should be.
    """

    setting: Setting
    workers: int
    runs: tuple[Record, ...]
    expected: int

    @property
    def sound(self) -> tuple[Record, ...]:
        """Those that ended with a model."""
        return tuple(run for run in self.runs if run.failed is None)

    @property
    def failed(self) -> int:
        """How many diverged."""
        return len(self.runs) - len(self.sound)

    @property
    def title(self) -> str:
        """Setting and size in words."""
        return f"{self.setting.label}, {counted(self.workers, 'worker')}"

    def values(self, measure: Measure) -> dict[int, float]:
        """Seed -> percent, of the runs that have it."""
        found = {run.seed: measure.of(run) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def number(self) -> str:
        """Of the runs there are, in words."""
        text = str(len(self.runs)) if len(self.runs) >= self.expected else f"{len(self.runs)} of {self.expected}"
        return f"{text}, {self.failed} diverged" if self.failed else text


def find_cell(plan: CorpusPlan, records: Mapping[str, Record], setting: Setting, workers: int) -> Cell:
    """The runs of a setting, which are those of another where the corpus says so."""
    name = plan.same.get(setting.name, setting.name)
    runs = [run for run in records.values() if (run.setting, run.workers) == (name, workers)]
    return Cell(setting, workers, tuple(sorted(runs, key=lambda run: run.seed)), len(plan.seeds))


def table_cells(
    plan: CorpusPlan, table: Table, records: Mapping[str, Record], missing: Sequence[str] = ()
) -> list[Cell]:
    """All cells of a table, row by row; without the rows beyond the paper that this corpus has no recipe for.

    Args:
        missing: names of runs that are still to be made.
    """
    awaited = {name.rsplit("-", 2)[0] for name in missing} | {record.setting for record in records.values()}
    return [
        find_cell(plan, records, setting, workers)
        for setting in table.settings
        if not setting.beyond or plan.same.get(setting.name, setting.name) in awaited
        for workers in sizes_of(setting, table, plan.workers, plan.many)
    ]


def measures(plan: CorpusPlan, records: Iterable[Record]) -> list[Measure]:
    """What these runs were measured by: CV, then frame accuracies, then word error rates, in the order of the tests."""
    runs = [run for run in records if run.failed is None]
    order = [name for test in plan.tests for name in (test.name, *(f"{test.name} {graph}" for graph in test.graphs))]
    tests = dict.fromkeys(name for run in runs for name in run.tests)
    words = dict.fromkeys(name for run in runs for name in run.wers)
    found = [Measure("cv")] if any(run.cv is not None for run in runs) else []
    found += [Measure("frames", name) for name in sorted(tests, key=lambda name: _place(order, name))]
    return found + [Measure("words", name) for name in sorted(words, key=lambda name: _place(order, name))]


def accuracy(found: Iterable[Measure]) -> Measure | None:
    """The frame accuracy that counts: of the first test set with alignments, else of the cross-validation set."""
    by_kind = sorted((m for m in found if m.kind != "words"), key=lambda measure: measure.kind != "frames")
    return by_kind[0] if by_kind else None


def _place(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order), name)


def spread(values: Sequence[float]) -> str:
    """Mean and, of two runs or more, standard deviation (n - 1)."""
    if not values:
        return NONE
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def counted(number: int, what: str) -> str:
    """A number with its noun: 1 worker, 2 workers."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def marked(setting: Setting) -> str:
    """Its label, with a dagger where it is beyond the paper."""
    return setting.label + (BEYOND if setting.beyond else "")


def figure(value: float | None) -> str:
    """With two digits."""
    return NONE if value is None else f"{value:.2f}"


def signed(value: float | None) -> str:
    """With two digits and its sign."""
    return NONE if value is None else f"{round(value, 2) + 0.0:+.2f}"  # never -0.00


def mean(values: Sequence[float], digits: int) -> str:
    """Mean alone."""
    return f"{fmean(values):.{digits}f}" if values else NONE
