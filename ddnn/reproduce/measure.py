"""From a finished run dir to its record: the final model judged, decoded and scored."""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from ddnn.errors import UserError
from ddnn.reproduce.corpus import TestSet, judged_by
from ddnn.reproduce.records import FrameFigures, MeasuredEpoch, Record, Time, WordErrors
from ddnn.train.read_metrics import EpochRow, Metrics, WorkerRow, read_metrics
from ddnn.train.run_dir_files import METRICS

DECODE = "decode-"
"""Folder in a run dir: decode-TEST, where Kaldi decodes a test set that has no graph here, and scores it."""


def measure_run(run_dir: Path, empty: Record, tests: Sequence[TestSet], device: str, scratch: Path) -> Record:
    """The record of a finished training; runs in a process of its own.

    Args:
        empty: which run it is; what was found is added.
        scratch: folder for the log-likelihoods of a test set while it is decoded.

    Returns:
        As if it had been trained on this machine, but for `time.cores`, which is 0: not known.

    Raises:
        UserError: a test set is damaged or does not fit the model.
    """
    import torch

    torch.set_num_threads(1)
    metrics = read_metrics(run_dir / METRICS)
    figures: dict[str, FrameFigures] = {}
    words: dict[str, WordErrors] = {}
    for test in tests:
        figures |= _frames(run_dir, test, device)
        words |= _decoded(run_dir, test, device, scratch)
    accepted = [row for row in metrics.cv if row.accepted and row.epoch > 0]
    return empty.model_copy(
        update={
            "judged": judged_by(tests),
            "epochs": len([row for row in metrics.cv if row.epoch > 0]),
            "cv": _figures(accepted[-1]) if accepted else None,
            "cv_by_epoch": tuple(_figures(row) for row in metrics.cv if row.epoch > 0),
            "tests": figures,
            "wers": words,
            "time": spent(metrics),
            "measured": measured_epoch(run_dir),
            "machine": machine(device),
            "date": time.strftime("%Y-%m-%d"),
            "version": f"ddnn {version('ddnn')}, torch {torch.__version__}",
        }
    )


def refuse_lost(run_dir: Path) -> None:
    """UserError where workers died in a training and the others went on: it is no run of so many workers."""
    path = run_dir / METRICS
    lost = [event for event in read_metrics(path).events if event.split == "lost"] if path.is_file() else []
    if lost:
        raise UserError(
            lost[0].as_text(), where=run_dir, mend="delete this run dir: the run is then made anew with all its workers"
        )


def _figures(row: EpochRow) -> FrameFigures | None:
    if row.loss is None or row.frame_accuracy is None:
        return None
    return FrameFigures(loss=row.loss, frame_accuracy=row.frame_accuracy)


def _frames(run_dir: Path, test: TestSet, device: str) -> dict[str, FrameFigures]:
    if test.alignments is None:
        return {}
    from ddnn.train.evaluate import evaluate_run

    found = evaluate_run(run_dir, test.data, test.alignments, device=device)
    return {test.name: FrameFigures(loss=found.loss, frame_accuracy=found.frame_accuracy)}


def _decoded(run_dir: Path, test: TestSet, device: str, scratch: Path) -> dict[str, WordErrors]:
    """Word errors with each graph; of a test set without graphs what Kaldi's scoring has left, if it has."""
    if not test.graphs or test.model is None or test.text is None:
        return words_by_kaldi(run_dir, test)
    from ddnn.decode.decoder import DecodeOptions
    from ddnn.decode.prepare import prepare_decoding
    from ddnn.decode.score import score

    found = {}
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        prepare_decoding(run_dir, test.data, Path(folder), device=device)
        for name, graph in test.graphs.items():
            options = DecodeOptions(test.acoustic_scales)
            result = score(Path(folder), graph_dir=graph, model=test.model, text=test.text, options=options)
            best = result.scales[result.best]
            found[f"{test.name} {name}"] = WordErrors(
                wer=best.wer,
                acoustic_scale=best.acoustic_scale,
                words=tuple(len(u.reference) for u in best.utterances),
                errors=tuple(u.insertions + u.deletions + u.substitutions for u in best.utterances),
            )
    return found


def words_by_kaldi(run_dir: Path, test: TestSet) -> dict[str, WordErrors]:
    """What sclite counted of a decoding by Kaldi in the run dir's decode-TEST; none where it has not run.

    Raises:
        DataError: a summary of sclite's is damaged.
    """
    from ddnn.reproduce.sclite import read_sclite

    return {name: WordErrors(wer=wer) for name, wer in read_sclite(run_dir / f"{DECODE}{test.name}").items()}


def spent(metrics: Metrics) -> Time:
    """Where the time of a training went, over all its epochs."""
    rows = metrics.workers
    ranks = max(1, len({row.rank for row in rows}))

    def share(*names: str) -> float:
        parts = ((row.seconds or 0.0) * (getattr(row, f"{name}_share") or 0.0) for row in rows for name in names)
        return sum(parts) / ranks

    first = [row for row in rows if row.rank == 0]
    return Time(
        seconds=sum(row.seconds or 0.0 for row in metrics.train if row.epoch > 0),
        compute_seconds=share("compute", "data") if rows else None,
        exchange_seconds=sum(row.exchange_seconds or 0.0 for row in rows) / ranks if rows else None,
        waiting_seconds=share("waiting") if rows else None,
        averagings=sum(row.averagings for row in first),
        bytes_sent=_bytes(rows),
    )


def _bytes(rows: Sequence[WorkerRow]) -> float | None:
    known = [row.bytes_sent for row in rows if row.bytes_sent is not None]
    return fmean(known) * len({row.epoch for row in rows}) if known else None


def measured_epoch(run_dir: Path) -> MeasuredEpoch | None:
    """What the scaling model starts from; None where the metrics do not say."""
    from ddnn.report.measured import read_measured

    try:
        found = read_measured(run_dir)[0]
    except UserError:
        return None
    return MeasuredEpoch(
        strategy=found.way.strategy,
        wire=found.way.wire,
        overlap=found.way.overlap,
        **vars(found.job),
        **{k: v for k, v in vars(found).items() if k not in ("source", "workers", "way", "job")},
    )


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(device: str) -> str:
    """The GPU's name, or the processor's."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return f"{found or platform.machine()}, {cores()} cores"
