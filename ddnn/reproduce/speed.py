"""Speed-ups of a table: measured where each worker had a core of its own, else predicted by the scaling model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ddnn.errors import UserError
from ddnn.report.calibrate import calibrate
from ddnn.report.measured import Measurement
from ddnn.report.scaling import Job, Way, epoch_seconds
from ddnn.reproduce.records import MeasuredEpoch, Record
from ddnn.reproduce.table import Setting
from ddnn.reproduce.tables import PAPER_SPEED_UPS


@dataclass(frozen=True)
class SpeedUp:
    """T(1) / T(workers) of a setting.

    Attributes:
        kind: "measured" on machines of one kind; "predicted" by the scaling model (docs/scaling.md) from compute and
            exchange times of runs in which no two workers shared a core; "paper": the paper's.
    """

    setting: str
    label: str
    workers: int
    speed_up: float
    kind: Literal["measured", "predicted", "paper"]


def speed_ups(settings: Iterable[Setting], workers: Sequence[int], records: Mapping[str, Record]) -> list[SpeedUp]:
    """Of all settings that can be told: the paper's, those measured, and the model's for the other sizes.

    Only runs of one kind of machine are held against each other: of the kind that has most of a setting's sizes.
    """
    found: list[SpeedUp] = []
    kinds = sorted({_kind(record) for record in records.values()})
    for setting in settings:
        published = PAPER_SPEED_UPS.get(setting.name, {})
        found += [SpeedUp(setting.name, setting.label, n, value, "paper") for n, value in published.items()]
        measured = [
            (_epochs(records, "base", 1, kind), {n: _epochs(records, setting.name, n, kind) for n in workers if n > 1})
            for kind in kinds
        ]
        measured = [(alone, several) for alone, several in measured if alone]
        if not measured:
            continue
        alone, own_cores = max(measured, key=lambda one: sum(map(bool, one[1].values())))
        found.append(SpeedUp(setting.name, setting.label, 1, 1.0, "measured"))
        base = alone[0].seconds
        for n, epochs in own_cores.items():
            if epochs:
                value = base / epochs[0].seconds
                found.append(SpeedUp(setting.name, setting.label, n, value, "measured"))
        found += _predicted(setting, [n for n in workers if n > 1 and not own_cores[n]], alone, own_cores)
    return found


def _kind(record: Record) -> str:
    """Of machine: its processor, or Slurm."""
    return record.machine.split(",")[0]


def _epochs(records: Mapping[str, Record], setting: str, workers: int, kind: str) -> list[MeasuredEpoch]:
    """Of the fastest run of a setting in which every worker had a core of its own; none where there is no such run.

    The fastest: the others may have shared the machine with other work.
    """
    found = [
        record.measured
        for record in records.values()
        if (record.setting, record.workers, _kind(record)) == (setting, workers, kind)
        and record.measured is not None
        and record.time is not None
        and record.time.cores >= workers
    ]
    return sorted(found, key=lambda epoch: epoch.seconds)[:1]


def _predicted(
    setting: Setting, sizes: Sequence[int], alone: Sequence[MeasuredEpoch], several: Mapping[int, list[MeasuredEpoch]]
) -> list[SpeedUp]:
    measured = [_measurement(epoch, 1) for epoch in alone]
    measured += [_measurement(epoch, n) for n, epochs in several.items() for epoch in epochs]
    if len(measured) == len(alone):
        return []
    try:
        constants = calibrate(measured).constants
    except UserError:  # runs of another network or minibatch: no model of these
        return []
    way = measured[-1].way
    one = epoch_seconds(constants, way, 1)
    return [SpeedUp(setting.name, setting.label, n, one / epoch_seconds(constants, way, n), "predicted") for n in sizes]


def _measurement(epoch: MeasuredEpoch, workers: int) -> Measurement:
    job = Job(epoch.parameters, epoch.operations, epoch.minibatch, epoch.every, epoch.frames)
    return Measurement(
        source="record",
        workers=workers,
        way=Way(epoch.strategy, epoch.wire, epoch.overlap),
        job=job,
        seconds=epoch.seconds,
        exchange=epoch.exchange,
        averagings=epoch.averagings,
        compute=epoch.compute,
        rest=epoch.rest,
        block_std=epoch.block_std,
        final_mean=epoch.final_mean,
    )
