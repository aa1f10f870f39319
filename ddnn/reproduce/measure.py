"""From run dirs to records: the final model evaluated, decoded and scored; speed-ups from the times of records.

`python -m ddnn.reproduce.measure FOLDER` evaluates a run in a process of its own, which can be stopped or killed
without harm to others.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Literal

from pydantic import ValidationError

from ddnn.report.measured import read_measured
from ddnn.report.scaling import Job, Measurement, Way, calibrate, epoch_seconds
from ddnn.reproduce.corpus import TestSet, test_digest
from ddnn.reproduce.records import FrameMetrics, MeasuredEpoch, RunRecord, TimeBreakdown, WordErrors, write_record
from ddnn.reproduce.runs import OutputLayout, PlannedRun
from ddnn.reproduce.sclite import best_scores
from ddnn.reproduce.tables import BASE, Condition, FrozenModel, paper
from ddnn.training.metrics import EpochRow, Metrics, WorkerRow, read_metrics
from ddnn.training.run_status import METRICS
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited
from ddnn.util.system import device_name

MODULE = "ddnn.reproduce.measure"
TASK = "task.json"
MAX_BYTES = 1 << 20
"""Of a task: thousands of paths."""
DECODE_PREFIX = "decode-"
"""Folder in a run dir: decode-TEST, where Kaldi decodes a test set that has no graph here, and scores it."""


class EvaluationTask(FrozenModel):
    """A finished training to be evaluated."""

    record: RunRecord
    """Which run it is; the results are added."""
    run_dir: Path
    tests: tuple[TestSet, ...]
    device: str


def main(folder: Path) -> int:
    """Evaluates the run of the task in `folder`, and leaves its record there. Returns the exit code."""
    logging.basicConfig(stream=sys.stderr, format="%(message)s")
    try:
        write_record(folder, evaluate_run(_read_task(folder / TASK), folder))
    except UserError as error:
        print(f"ddnn: error: {error}", file=sys.stderr)
        return 2
    return 0


def _read_task(path: Path) -> EvaluationTask:
    try:
        return EvaluationTask.model_validate_json(read_bytes_limited(path, MAX_BYTES))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path) from error
    except ValidationError as error:
        raise DataError("not an evaluation task", location=path, hint="`ddnn reproduce` writes it") from error


def evaluate_run(task: EvaluationTask, scratch: Path) -> RunRecord:
    """The record of a finished training.

    Args:
        scratch: folder for the log-likelihoods of a test set while it is decoded.

    Returns:
        As if it had been trained on this machine, but `time.cores` is 0: unknown.

    Raises:
        UserError: a test set is damaged or does not fit the model.
    """
    import torch

    from ddnn.training.evaluation import evaluate_run as evaluate

    torch.set_num_threads(1)
    run_dir, metrics = task.run_dir, read_metrics(task.run_dir / METRICS)
    tests: dict[str, FrameMetrics] = {}
    wers: dict[str, WordErrors] = {}
    for test in task.tests:
        if test.alignments is not None:
            result = evaluate(run_dir, test.data, test.alignments, device=task.device)
            tests[test.name] = FrameMetrics(loss=result.loss, frame_accuracy=result.frame_accuracy)
        wers |= _word_errors(run_dir, test, task.device, scratch)
    epochs = [row for row in metrics.cv if row.epoch > 0]
    accepted = [row for row in epochs if row.accepted]
    return task.record.model_copy(
        update={
            "test_digest": test_digest(task.tests),
            "epochs": len(epochs),
            "cv": _frame_metrics(accepted[-1]) if accepted else None,
            "cv_by_epoch": tuple(map(_frame_metrics, epochs)),
            "tests": tests,
            "wers": wers,
            "time": time_breakdown(metrics),
            "measured": measured_epoch(run_dir),
            "machine": device_name(task.device),
            "date": time.strftime("%Y-%m-%d"),
            "version": f"ddnn {version('ddnn')}, torch {torch.__version__}",
        }
    )


def _frame_metrics(row: EpochRow) -> FrameMetrics | None:
    if row.loss is None or row.frame_accuracy is None:
        return None
    return FrameMetrics(loss=row.loss, frame_accuracy=row.frame_accuracy)


def _word_errors(run_dir: Path, test: TestSet, device: str, scratch: Path) -> dict[str, WordErrors]:
    """Word errors with each graph; of a test set without graphs what Kaldi's scoring has left, if it has run."""
    if not test.graphs or test.model is None or test.text is None:
        return read_kaldi_wer(run_dir, test)
    from ddnn.decoding.decoder import DecodeOptions
    from ddnn.decoding.prepare import prepare_decoding
    from ddnn.decoding.scoring import score

    word_errors = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        prepare_decoding(run_dir, test.data, Path(folder), device=device)
        for name, graph in test.graphs.items():
            options = DecodeOptions(test.acoustic_scales)
            result = score(Path(folder), graph_dir=graph, model=test.model, text=test.text, options=options)
            best = result.scales[result.best]
            word_errors[f"{test.name} {name}"] = WordErrors(
                wer=best.wer,
                acoustic_scale=best.acoustic_scale,
                words=tuple(len(u.reference) for u in best.utterances),
                errors=tuple(u.insertions + u.deletions + u.substitutions for u in best.utterances),
                speakers=speaker_numbers(test.data, [u.utterance for u in best.utterances]),
            )
    return word_errors


def speaker_numbers(data: Path, utterances: Sequence[str]) -> tuple[int, ...]:
    """Number of each utterance's speaker, in order of their appearance; empty where there is no utt2spk.

    Raises:
        DataError: utt2spk is malformed, or lacks an utterance.
    """
    path = data / "utt2spk"
    if not path.exists():
        return ()
    from ddnn.kaldi.data_dir import read_utt2spk

    speakers = read_utt2spk(path)
    missing = [utterance for utterance in utterances if utterance not in speakers]
    if missing:
        raise DataError(f"utterance {missing[0]} has no speaker", location=path, hint="add it to utt2spk")
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(speakers[utterance], len(numbers)) for utterance in utterances)


def read_kaldi_wer(run_dir: Path, test: TestSet) -> dict[str, WordErrors]:
    """What sclite counted of a decoding by Kaldi in the run dir's decode-TEST; empty where it has not run.

    Raises:
        DataError: sclite's summary is damaged.
    """
    scores = best_scores(run_dir / f"{DECODE_PREFIX}{test.name}")
    return {name: WordErrors(wer=score.wer) for name, score in scores.items()}


def with_kaldi_wer(
    records: Mapping[str, RunRecord], runs: Iterable[PlannedRun], layout: OutputLayout, tests: Iterable[TestSet]
) -> dict[str, RunRecord]:
    """The records with the word error rates that Kaldi's scoring has left in the run dirs since; they are written."""
    result = dict(records)
    by_kaldi = [test for test in tests if not test.graphs]
    for run in runs if by_kaldi else []:
        record, run_dir = result.get(run.name), layout.run_dir(run)
        if record is None or record.failed is not None:
            continue
        wers: dict[str, WordErrors] = {}
        for test in by_kaldi:
            more = read_kaldi_wer(run_dir, test)
            if both := wers.keys() & more.keys():
                raise DataError(f"two test sets have a {min(both)}", location=run_dir, hint="rename one of them")
            wers |= more
        if wers and wers != record.wers:
            result[run.name] = record.model_copy(update={"wers": {**record.wers, **wers}})
            write_record(layout.records, result[run.name])
    return result


def time_breakdown(metrics: Metrics) -> TimeBreakdown:
    """Where the time of a training went, over all its epochs."""
    rows = metrics.workers
    ranks = max(1, len({row.rank for row in rows}))

    def seconds(*names: str) -> float:
        parts = ((row.seconds or 0.0) * (getattr(row, f"{name}_fraction") or 0.0) for row in rows for name in names)
        return sum(parts) / ranks

    return TimeBreakdown(
        seconds=sum(row.seconds or 0.0 for row in metrics.train if row.epoch > 0),
        compute_seconds=seconds("compute", "data") if rows else None,
        comm_seconds=sum(row.comm_seconds or 0.0 for row in rows) / ranks if rows else None,
        wait_seconds=seconds("wait") if rows else None,
        averagings=sum(row.averagings for row in rows if row.rank == 0),
        bytes_sent=_bytes_sent(rows),
    )


def _bytes_sent(rows: Sequence[WorkerRow]) -> float | None:
    known = [row.bytes_sent for row in rows if row.bytes_sent is not None]
    return fmean(known) * len({row.epoch for row in rows}) if known else None


def measured_epoch(run_dir: Path) -> MeasuredEpoch | None:
    """What the scaling model starts from; None where the metrics do not say."""
    try:
        epoch = read_measured(run_dir)[0]
    except UserError:
        return None
    return MeasuredEpoch(
        strategy=epoch.way.strategy,
        comm_dtype=epoch.way.comm_dtype,
        overlap=epoch.way.overlap,
        num_parameters=epoch.job.parameters,
        flop_per_frame=epoch.job.operations,
        minibatch_size=epoch.job.minibatch,
        averaging_period=epoch.job.averaging_period,
        frames=epoch.job.frames,
        seconds=epoch.seconds,
        comm_seconds=epoch.comm,
        averagings=epoch.averagings,
        compute_seconds=epoch.compute,
        other_seconds=epoch.rest,
        interval_seconds_std=epoch.block_std,
        final_mean=epoch.final_mean,
    )


def _measurement(epoch: MeasuredEpoch, workers: int) -> Measurement:
    return Measurement(
        source="record",
        workers=workers,
        way=Way(epoch.strategy, epoch.comm_dtype, epoch.overlap),
        job=Job(epoch.num_parameters, epoch.flop_per_frame, epoch.minibatch_size, epoch.averaging_period, epoch.frames),
        seconds=epoch.seconds,
        comm=epoch.comm_seconds,
        averagings=epoch.averagings,
        compute=epoch.compute_seconds,
        rest=epoch.other_seconds,
        block_std=epoch.interval_seconds_std,
        final_mean=epoch.final_mean,
    )


@dataclass(frozen=True)
class SpeedUp:
    """T(1) / T(workers) of a condition.

    Attributes:
        kind: "measured" on machines of one kind; "predicted" by the scaling model (docs/scaling.md) from compute and
            exchange times of runs in which no two workers shared a core; "paper": the paper's.
    """

    condition: str
    label: str
    workers: int
    speed_up: float
    kind: Literal["measured", "predicted", "paper"]


def speed_ups(
    conditions: Iterable[Condition], workers: Sequence[int], records: Mapping[str, RunRecord]
) -> list[SpeedUp]:
    """Of all conditions with figures: the paper's, those measured, and the model's for the other sizes.

    Only runs on one kind of machine are compared: on the kind that has most of a condition's sizes.
    """
    result: list[SpeedUp] = []
    kinds = sorted({_machine_kind(record) for record in records.values()})
    for condition in conditions:
        name, label = condition.name, condition.label
        published = paper().published_speed_ups.get(name, {})
        result += [SpeedUp(name, label, n, value, "paper") for n, value in published.items()]
        by_kind = [
            (_fastest(records, BASE, 1, kind), {n: _fastest(records, name, n, kind) for n in workers if n > 1})
            for kind in kinds
        ]
        measured = [(single, several) for single, several in by_kind if single is not None]
        if not measured:
            continue
        single, several = max(measured, key=lambda item: sum(epoch is not None for epoch in item[1].values()))
        known = {n: epoch for n, epoch in several.items() if epoch is not None}
        result.append(SpeedUp(name, label, 1, 1.0, "measured"))
        result += [SpeedUp(name, label, n, single.seconds / epoch.seconds, "measured") for n, epoch in known.items()]
        predicted = _predicted([n for n in several if n not in known], single, known)
        result += [SpeedUp(name, label, n, value, "predicted") for n, value in predicted.items()]
    return result


def _machine_kind(record: RunRecord) -> str:
    """Its processor, or Slurm."""
    return record.machine.split(",")[0]


def _fastest(records: Mapping[str, RunRecord], condition: str, workers: int, kind: str) -> MeasuredEpoch | None:
    """Of the runs of a condition in which every worker had a core of its own; None where there is no such run.

    The fastest: the others may have shared the machine with other work.
    """
    epochs = [
        record.measured
        for record in records.values()
        if (record.condition, record.workers, _machine_kind(record)) == (condition, workers, kind)
        and record.measured is not None
        and record.time is not None
        and record.time.cores >= workers
    ]
    return min(epochs, key=lambda epoch: epoch.seconds, default=None)


def _predicted(sizes: Sequence[int], single: MeasuredEpoch, several: Mapping[int, MeasuredEpoch]) -> dict[int, float]:
    """Workers -> speed-up by the scaling model; empty where it cannot be fitted."""
    measured = [_measurement(single, 1), *(_measurement(epoch, n) for n, epoch in several.items())]
    if len(measured) == 1:
        return {}
    try:
        parameters = calibrate(measured).constants
    except UserError:  # runs of different networks or minibatches: one model does not fit them
        return {}
    way = measured[-1].way
    base = epoch_seconds(parameters, way, 1)
    return {n: base / epoch_seconds(parameters, way, n) for n in sizes}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
