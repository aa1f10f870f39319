"""From a run dir to its record: the final model evaluated, decoded and scored. The program `ddnn.reproduce.measure
FOLDER` does so in a process of its own, which can be stopped or killed without harm to others."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from ddnn.decoding.word_errors import speaker_numbers
from ddnn.recipe.keys import keys
from ddnn.recipe.schema import Recipe
from ddnn.report.measured import read_measured
from ddnn.report.runs import compute_cpu_fraction, read_run
from ddnn.reproduce.runs import (
    ADDED_KEYS,
    FrameMetrics,
    MeasuredEpoch,
    RunRecord,
    TimeBreakdown,
    WordErrors,
    write_record,
)
from ddnn.reproduce.tables import FrozenModel, TestSet, test_digest
from ddnn.runs.metrics import EpochRow, Metrics
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited
from ddnn.util.system import device_name
from ddnn.util.text import log_to_stderr

MODULE = "ddnn.reproduce.measure"
TASK = "task.json"
MAX_BYTES = 1 << 20  # of sclite's summary, which has a line of some hundred bytes for each speaker
PAPER_NAMES = {("eval2000", "swbd"): "SWB", ("eval2000", "callhm"): "CH"}
"""Kaldi's data dir and subset -> the paper's name. Other test sets have a `swbd` too: it is not the paper's SWB."""

_N = r"[0-9]{1,9}(?:\.[0-9]{1,4})?"
_FOLDER = re.compile(r"score_[0-9]{1,4}(?:_[0-9]{1,4}(?:\.[0-9]{1,4})?)?")
_SUMMARY = re.compile(r"([A-Za-z0-9_-]{1,60})\.ctm(?:\.([A-Za-z0-9_-]{1,60}))?\.filt\.(sys|raw)")
_TOTALS_LINE = re.compile(r"[ \t]*\|?[ \t]*(Sum/Avg|Sum)[ \t]*(?:\|.*)?")
_TOTALS = re.compile(
    rf"[ \t]*\|?[ \t]*(Sum/Avg|Sum)[ \t]*\|[ \t]*{_N}[ \t]+({_N})[ \t]*"
    rf"\|[ \t]*{_N}(?:[ \t]+{_N}){{3}}[ \t]+({_N})[ \t]+{_N}[ \t]*(?:\|.*)?"
)
"""sentences and words | correct, sub, del, ins, all errors, sentence errors: in `.sys` (Sum/Avg) percentages."""
_HINT = "score again with Kaldi's local/score.sh, or remove the file"


class EvaluationTask(FrozenModel):
    """A finished training to be evaluated; the results are added to its `record`."""

    record: RunRecord
    run_dir: Path
    tests: tuple[TestSet, ...]
    device: str


def main(folder: Path) -> int:
    """Evaluates the run of the task in `folder`, and leaves its record there. Returns the exit code."""
    log_to_stderr()
    try:
        task = EvaluationTask.model_validate_json((folder / TASK).read_bytes())
        write_record(folder, evaluate_run(task, folder))
    except UserError as error:
        print(f"ddnn: error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate_run(task: EvaluationTask, scratch: Path) -> RunRecord:
    """The record of a finished training, as if it had been trained on this machine where its metrics do not say on
    which; `time.cores` is 0: unknown. UserError where a test set is damaged or does not fit the model. Log-likelihoods
    are in `scratch` meanwhile."""
    import torch

    from ddnn.training.evaluation import evaluate_run as evaluate

    torch.set_num_threads(1)
    run_dir, run = task.run_dir, read_run(task.run_dir)
    metrics = run.metrics
    tests: dict[str, FrameMetrics] = {}
    wers: dict[str, WordErrors] = {}
    for test in task.tests:
        if test.alignments is not None:
            result = evaluate(run_dir, test.data, test.alignments, device=task.device)
            tests[test.name] = FrameMetrics.model_validate(result.figures)
        wers |= _word_errors(run_dir, test, task.device, scratch)
    measured_epoch = None
    with suppress(UserError):  # the metrics may not say what the scaling model starts from
        measured_epoch = MeasuredEpoch.of(read_measured(run_dir)[0])
    initial = next((row for row in metrics.cv if row.epoch == 0), None)
    epochs = [row for row in metrics.cv if row.epoch > 0]
    return task.record.model_copy(
        update={
            "test_digest": test_digest(task.tests),
            "epochs": len(epochs),
            "cv": _frame_metrics(metrics.last_accepted),
            "cv_by_epoch": tuple(map(_frame_metrics, epochs)),
            "initial_cv": _frame_metrics(initial),
            "baseline": _baseline(metrics),
            "tests": tests,
            "wers": wers,
            "time": time_breakdown(metrics),
            "measured": measured_epoch,
            "machine": _joined(row.machine for row in metrics.starts) or device_name(task.device),
            "precision": _joined(row.precision for row in metrics.starts),
            "optimizer": _settings(run.recipe),
            "train_digest": _joined(row.train_digest for row in metrics.starts),
            "date": time.strftime("%Y-%m-%d"),
            "version": f"ddnn {version('ddnn')}, torch {torch.__version__}",
        }
    )


def _settings(recipe: Recipe | None) -> str:
    """As in the records of before a key was added, where it has its default."""
    if recipe is None:
        return ""
    neutral = {
        key: keys()[f"optimizer.{key}"].default for key, _ in recipe.optimizer if f"optimizer.{key}" in ADDED_KEYS
    }
    return ", ".join(f"{key} {value}" for key, value in recipe.optimizer if (key, value) not in neutral.items())


def _joined(values: Iterable[str]) -> str:
    """Those of the starts of a training; several where one found another value than the one before."""
    return "; ".join(dict.fromkeys(values))


def _baseline(metrics: Metrics) -> FrameMetrics | None:
    for row in metrics.starts:  # each finds the same
        if row.baseline and None not in row.baseline.values():
            return FrameMetrics.model_validate(row.baseline)
    return None


def _frame_metrics(row: EpochRow | None) -> FrameMetrics | None:
    if row is None or row.loss is None or row.frame_accuracy is None:
        return None
    return FrameMetrics(loss=row.loss, frame_accuracy=row.frame_accuracy)


def time_breakdown(metrics: Metrics) -> TimeBreakdown:
    rows = metrics.workers
    ranks = max(1, len({row.rank for row in rows}))

    def seconds(*names: str) -> float | None:
        parts = ((row.seconds or 0.0) * (getattr(row, f"{name}_fraction") or 0.0) for row in rows for name in names)
        return sum(parts) / ranks if rows else None

    sent = [row.bytes_sent for row in rows if row.bytes_sent is not None]
    return TimeBreakdown(
        seconds=sum(row.seconds or 0.0 for row in metrics.train if row.epoch > 0),
        compute_seconds=seconds("compute", "data"),
        comm_seconds=sum(row.comm_seconds or 0.0 for row in rows) / ranks if rows else None,
        wait_seconds=seconds("wait"),
        averagings=sum(row.averagings for row in rows if row.rank == 0),
        bytes_sent=fmean(sent) * len({row.epoch for row in rows}) if sent else None,
        compute_cpu_fraction=compute_cpu_fraction(metrics),
    )


def _word_errors(run_dir: Path, test: TestSet, device: str, scratch: Path) -> dict[str, WordErrors]:
    """Word errors with each graph; of a test set without graphs what Kaldi's scoring has left, if it has run."""
    if not test.graphs or test.model is None or test.text is None:
        return _kaldi_word_errors(run_dir, test)
    from ddnn.decoding.options import DecodeOptions
    from ddnn.decoding.prepare import prepare_decoding
    from ddnn.decoding.score import score

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
                speakers=speaker_numbers(test.data / "utt2spk", [u.utterance for u in best.utterances]),
            )
    return word_errors


def with_kaldi_wer(
    records: Mapping[str, RunRecord], run_dirs: Mapping[str, Path], folder: Path, tests: Iterable[TestSet]
) -> dict[str, RunRecord]:
    """The records of `folder` with the word error rates that Kaldi's scoring has left in the run dirs since; they are
    written. DataError where a summary of sclite is damaged, or two test sets have scores of the same name."""
    result = dict(records)
    by_kaldi = [test for test in tests if not test.graphs]
    for name, record in records.items():
        wers: dict[str, WordErrors] = {}
        for test in by_kaldi if record.failed is None else []:
            more = _kaldi_word_errors(run_dirs[name], test)
            if both := wers.keys() & more.keys():
                message = f"two test sets have a {min(both)}"
                raise DataError(message, location=run_dirs[name], hint="rename one of them")
            wers |= more
        if wers and wers != record.wers:
            result[name] = record.model_copy(update={"wers": {**record.wers, **wers}})
            write_record(folder, result[name])
    return result


def _kaldi_word_errors(run_dir: Path, test: TestSet) -> dict[str, WordErrors]:
    """What sclite counted of a decoding by Kaldi in the run dir's decode-TEST; empty where it has not run."""
    return {name: WordErrors(wer=wer) for name, wer in best_scores(run_dir / f"decode-{test.name}").items()}


def best_scores(decode_dir: Path) -> dict[str, float]:
    """The lowest word error rates, in percent, of what Kaldi's `local/score_sclite.sh` (egs/swbd) leaves:

        score_LMWT/NAME.ctm[.SUBSET].filt.{sys,raw}             s5b
        score_LMWT_PENALTY/NAME.ctm[.SUBSET].filt.{sys,raw}     s5c, with a word insertion penalty

    NAME is that of the data dir; eval2000 has the subsets `swbd` and `callhm`, rt03 `swbd` and `fsh`. `.sys` has
    percentages with one decimal, `.raw` counts of words, which are preferred. The best weight counts for each subset by
    itself, as in `utils/best_wer.sh`. DataError: a directory or a summary cannot be read, a summary is malformed, or
    two data dirs have been scored into one directory.

    Returns:
        By test set: NAME for the whole of it, SWB and CH for subsets of eval2000, "NAME SUBSET" for those of others.
        Empty where nothing has been scored, or there is no such directory.
    """
    scores: dict[str, float] = {}
    owner = ""
    for folder in filter(lambda entry: _FOLDER.fullmatch(entry.name), _entries(decode_dir)):
        summaries: dict[tuple[str, str], Path] = {}  # data dir and subset ("" for all of it) -> file
        for path in _entries(folder):
            match = _SUMMARY.fullmatch(path.name)
            if match is not None and (match[3] == "raw" or (match[1], match[2] or "") not in summaries):
                summaries[match[1], match[2] or ""] = path
        for (data, subset), summary in sorted(summaries.items()):
            owner = owner or data
            if data != owner:
                message = f"two data dirs have been scored here, {owner} and {data}"
                raise DataError(message, location=decode_dir, hint="decode each into a directory of its own")
            name = PAPER_NAMES.get((data, subset), f"{data} {subset}".rstrip())
            wer = read_summary(summary)
            scores[name] = min(scores.get(name, wer), wer)
    return dict(sorted(scores.items()))


def read_summary(path: Path) -> float:
    """The word error rate of a `.sys` or `.raw`, in percent; DataError where it is not what sclite writes."""
    try:
        text = read_bytes_limited(path, MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"cannot read sclite's summary: {error.strerror}", location=path, hint=_HINT) from error
    lines = [line for line in text.splitlines() if _TOTALS_LINE.fullmatch(line)]
    totals = _TOTALS.fullmatch(lines[0]) if len(lines) == 1 else None
    if totals is None:
        shown = f"the totals {lines[0].strip()[:200]!r}" if len(lines) == 1 else f"{len(lines)} lines of totals"
        expected = "expected 2 and then 6 numbers" if len(lines) == 1 else "expected one (Sum/Avg or Sum)"
        raise DataError(f"not a summary of sclite: {shown} found, {expected}", location=path, hint=_HINT)
    words, errors = float(totals[2]), float(totals[3])
    if words < 1:
        raise DataError("the reference has no words", location=path, hint="check the stm file that was scored against")
    return 100.0 * errors / words if totals[1] == "Sum" else errors


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"cannot list it: {error.strerror}", location=folder) from error


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
