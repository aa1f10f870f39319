"""From a run dir to its record: the final model evaluated, decoded and scored. The program `ddnn.reproduce.measure DRAFT
CORPUS DEVICE` does so in a process of its own, which can be stopped or killed without harm to others."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from ddnn.decoding.word_errors import speaker_numbers
from ddnn.nn.figures import FRAME_ACCURACY
from ddnn.recipe.keys import keys
from ddnn.report.measured import read_measured
from ddnn.report.runs import Run, compute_cpu_fraction, read_results, read_run
from ddnn.reproduce.runs import (
    ADDED_KEYS,
    OF_PARAMETERS,
    FrameMetrics,
    MeasuredEpoch,
    RunRecord,
    TestMetrics,
    TimeBreakdown,
    WordErrors,
    read_record,
    write_record,
)
from ddnn.reproduce.tables import TestSet, load_config, test_digest
from ddnn.runs.metrics import Metrics
from ddnn.runs.rows import WorkerRow
from ddnn.runs.run_status import DBN, FINAL
from ddnn.slurm.job import read_job
from ddnn.util.errors import DataError, UserError
from ddnn.util.text import log_to_stderr, plural

MODULE = "ddnn.reproduce.measure"
EVALUATION = "evaluation"  # folder in a run dir while it is evaluated: the record, log-likelihoods


def main(draft: Path, corpus: Path, device: str) -> int:
    """Completes the draft of a record, which is in the folder `EVALUATION` of its run dir, by an evaluation of the run.
    Returns the exit code."""
    log_to_stderr()
    try:
        write_record(
            draft.parent, evaluate_run(read_record(draft), draft.parents[1], load_config(corpus).tests, device)
        )
    except UserError as error:
        print(f"ddnn: error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate_run(record: RunRecord, run_dir: Path, tests: Mapping[str, TestSet], device: str) -> RunRecord:
    """The record of a finished training, with the results of its model. UserError: a test set is damaged or does not
    fit the model."""
    import torch

    from ddnn.training.model_evaluation import evaluate_run as evaluate

    torch.set_num_threads(1)
    run = read_run(run_dir)
    figures, wers = training_figures(run), dict[str, WordErrors]()
    for name, test in tests.items():
        if test.alignments is not None:
            by: Literal["speaker"] | None = "speaker" if (test.data / "utt2spk").exists() else None
            result = evaluate(run_dir, test.data, test.alignments, device=device, by=by)
            parts = [(part.frames, part.figures[FRAME_ACCURACY.name]) for part in result.parts.values()]
            counts = {
                "frames": tuple(frames for frames, _ in parts),
                "errors": tuple(round(frames * (1.0 - accuracy)) for frames, accuracy in parts),
            }
            figures["tests"][name] = TestMetrics.model_validate({**result.figures, **counts})
        wers |= {f"{name} {graph}": errors for graph, errors in _word_errors(run_dir, test, device).items()}
    with suppress(UserError):  # the metrics may not say what the scaling model starts from
        figures["measured"] = MeasuredEpoch.of(read_measured(run_dir)[0])
    dbn = run.recipe and run.recipe.pretrain.dbn and run.recipe.pretrain.dbn / DBN
    if dbn and dbn.is_file() and dbn.stat().st_mtime <= (run_dir / FINAL).stat().st_mtime:  # else trained since
        figures["dbn"] = dbn_parameters(dbn)
    figures |= {"wers": wers, "test_digest": test_digest(tests), "date": time.strftime("%Y-%m-%d")}
    return record.model_copy(update={**figures, "version": f"ddnn {version('ddnn')}, torch {torch.__version__}"})


def training_figures(run: Run) -> dict[str, Any]:
    """The fields of a record that come from the metrics and the recipe of a training."""
    metrics, job, final = run.metrics, read_job(run.path), run.metrics.last_accepted
    by_epoch = {row.epoch: _frame_metrics(row.figures) for row in metrics.cv}
    # Several values if starts of the training differ.
    joined = {
        field: "; ".join(dict.fromkeys(getattr(row, field) for row in metrics.starts))
        for field in ("machine", "precision", "train_digest")
    }
    joined["machine"] += f", Slurm, {plural(job.nodes, 'node')}" if job else ""
    return {
        **joined,
        "tests": {},
        "initial_cv": by_epoch.pop(0, None),
        "epochs": len(by_epoch),
        "cv": _frame_metrics(final.figures) if final else None,
        "cv_by_epoch": tuple(by_epoch.values()),
        "baseline": next(filter(None, (_frame_metrics(row.baseline) for row in metrics.starts)), None),  # all are equal
        "time": time_breakdown(metrics),
        "optimizer": ", ".join(
            f"{key} {value}"
            for key, value in (run.recipe.optimizer if run.recipe else ())
            # As in records that are older than a key, if it has its default.
            if f"optimizer.{key}" not in ADDED_KEYS or value != keys()[f"optimizer.{key}"].default
        ),
    }


def _frame_metrics(figures: Mapping[str, float | None]) -> FrameMetrics | None:
    return None if not figures or None in figures.values() else FrameMetrics.model_validate(figures)


def time_breakdown(metrics: Metrics) -> TimeBreakdown:
    def per_worker(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / metrics.num_workers if known else None

    def seconds(row: WorkerRow, *fractions: float | None) -> float:
        return (row.seconds or 0.0) * sum(filter(None, fractions))

    rows = metrics.workers
    return TimeBreakdown(
        seconds=sum(row.seconds or 0.0 for row in metrics.train if row.epoch > 0),
        compute_seconds=per_worker(seconds(row, row.compute_fraction, row.data_fraction) for row in rows),
        comm_seconds=per_worker(row.comm_seconds for row in rows),
        wait_seconds=per_worker(seconds(row, row.wait_fraction) for row in rows),
        averagings=sum(row.averagings for row in rows if row.rank == 0),
        bytes_sent=per_worker(row.bytes_sent for row in rows),
        cores=round(min((row.world_size * (row.cores_per_worker or 0.0) for row in metrics.starts), default=0.0)),
        compute_cpu_fraction=compute_cpu_fraction(metrics),
    )


def dbn_parameters(path: Path) -> str:
    """Identifies RBMs, whatever file they are in: `OF_PARAMETERS` and 12 digits of the SHA-256 of their parameters."""
    from ddnn.nn.acoustic_model import load_model

    parameters = load_model(path).network.parameters.numpy()
    return OF_PARAMETERS + hashlib.sha256(parameters.tobytes()).hexdigest()[:12]


def _word_errors(run_dir: Path, test: TestSet, device: str) -> dict[str, WordErrors]:
    """Word errors with each graph."""
    from ddnn.decoding.options import DecodeOptions
    from ddnn.decoding.prepare import prepare_decoding
    from ddnn.decoding.score import score

    word_errors: dict[str, WordErrors] = {}
    if test.model is None or test.text is None or not test.graphs:
        return word_errors
    with tempfile.TemporaryDirectory(dir=run_dir / EVALUATION) as folder:
        prepare_decoding(run_dir, test.data, Path(folder), device=device)
        for name, graph in test.graphs.items():
            options = DecodeOptions(test.acoustic_scales)
            result = score(Path(folder), graph_dir=graph, model=test.model, text=test.text, options=options)
            best = result.scales[result.best]
            word_errors[name] = WordErrors(
                wer=best.wer,
                acoustic_scale=best.acoustic_scale,
                words=tuple(len(u.reference) for u in best.utterances),
                errors=tuple(u.insertions + u.deletions + u.substitutions for u in best.utterances),
                speakers=speaker_numbers(test.data / "utt2spk", [u.utterance for u in best.utterances]),
            )
    return word_errors


def with_other_wers(record: RunRecord, run_dir: Path, tests: Mapping[str, TestSet]) -> RunRecord:
    """The record with the word error rates of another scorer that the run dir has in files decode-TEST/NAME.json, as
    `ddnn report` reads them. DataError: two test sets have the same NAME."""
    wers: dict[str, WordErrors] = {}
    for label, rate in read_results(run_dir)[0].items() if record.failed is None else ():
        folder, _, name = label.removesuffix(": WER (%)").rpartition("/")
        test = tests.get(folder.removeprefix("decode-"))
        if test is not None and not test.graphs and label.endswith(": WER (%)"):
            if name in wers:
                raise DataError(f"two test sets have a {name}.json", location=run_dir, hint="rename one of them")
            wers[name] = WordErrors(wer=rate)
    return record.model_copy(update={"wers": {**record.wers, **wers}})


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
