"""From a run dir to its record: the final model evaluated, decoded and scored. The program `ddnn.reproduce.measure DRAFT
CORPUS DEVICE` does so in a process of its own, which can be stopped or killed without harm to others."""

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
from typing import Any

from ddnn.decoding.word_errors import speaker_numbers
from ddnn.recipe.keys import keys
from ddnn.recipe.schema import Recipe
from ddnn.report.measured import read_measured
from ddnn.report.runs import Run, compute_cpu_fraction, read_run
from ddnn.reproduce.runs import (
    ADDED_KEYS,
    FrameMetrics,
    MeasuredEpoch,
    RunRecord,
    TimeBreakdown,
    WordErrors,
    dbn_parameters,
    read_record,
    write_record,
)
from ddnn.reproduce.tables import TestSet, load_config, test_digest
from ddnn.runs.metrics import Metrics
from ddnn.runs.run_status import DBN, FINAL
from ddnn.slurm.job import read_job
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import log_to_stderr, plural

MODULE = "ddnn.reproduce.measure"
EVALUATION = "evaluation"  # folder in a run dir while it is evaluated: the record, log-likelihoods
MAX_BYTES = 1 << 20  # of sclite's summary, which has a line of some hundred bytes for each speaker
PAPER_NAMES = {("eval2000", "swbd"): "SWB", ("eval2000", "callhm"): "CH"}
"""Kaldi's data dir and subset -> the paper's name. Other test sets have a `swbd` too: it is not the paper's SWB."""

_FOLDER = re.compile(r"score_\d+(_\d+(\.\d+)?)?")
_SUMMARY = re.compile(r"([A-Za-z0-9_-]+)\.ctm(?:\.([A-Za-z0-9_-]+))?\.filt\.(?:sys|raw)")
_N = rb"[0-9]{1,9}(?:\.[0-9]{1,4})?"
_TOTALS = re.compile(
    rb"^[ \t|]*(Sum/Avg|Sum)[ \t]*\|[ \t]*%b[ \t]+(%b)[ \t]*\|(?:[ \t]*%b){4}[ \t]+(%b)[ \t]+%b[ \t]*(?:\|.*)?$"
    % (_N, _N, _N, _N, _N),
    re.MULTILINE,
)
"""Sentences and words | correct, sub, del, ins, all errors, sentence errors; of Sum/Avg (`.sys`) percentages."""


def main(draft: Path, corpus: Path, device: str) -> int:
    """Completes the draft of a record, which is in the folder `EVALUATION` of its run dir, by an evaluation of the run.
    Returns the exit code."""
    log_to_stderr()
    try:
        run_dir, tests = draft.parents[1], load_config(corpus).tests
        write_record(draft.parent, evaluate_run(read_record(draft), run_dir, tests, device, draft.parent))
    except UserError as error:
        print(f"ddnn: error: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate_run(record: RunRecord, run_dir: Path, tests: tuple[TestSet, ...], device: str, scratch: Path) -> RunRecord:
    """The record of a finished training, with the results of its model. UserError: a test set is damaged or does not
    fit the model. Log-likelihoods are in `scratch` meanwhile."""
    import torch

    from ddnn.training.evaluation import evaluate_run as evaluate

    torch.set_num_threads(1)
    run = read_run(run_dir)
    results: dict[str, FrameMetrics] = {}
    wers: dict[str, WordErrors] = {}
    for test in tests:
        if test.alignments is not None:
            result = evaluate(run_dir, test.data, test.alignments, device=device)
            results[test.name] = FrameMetrics.model_validate(result.figures)
        wers |= _word_errors(run_dir, test, device, scratch)
    known = training_figures(run)
    with suppress(UserError):  # the metrics may not say what the scaling model starts from
        known["measured"] = MeasuredEpoch.of(read_measured(run_dir)[0])
    if run.recipe is not None and run.recipe.init == "rbm" and run.recipe.pretrain.dbn is not None:
        dbn = run.recipe.pretrain.dbn / DBN
        if dbn.is_file() and dbn.stat().st_mtime <= (run_dir / FINAL).stat().st_mtime:  # else others, trained since
            known["dbn"] = dbn_parameters(dbn)
    return record.model_copy(
        update={
            **known,
            "test_digest": test_digest(tests),
            "tests": results,
            "wers": wers,
            "date": time.strftime("%Y-%m-%d"),
            "version": f"ddnn {version('ddnn')}, torch {torch.__version__}",
        }
    )


def training_figures(run: Run) -> dict[str, Any]:
    """The fields of a record that come from the metrics and the recipe of a training."""
    metrics, starts, job = run.metrics, run.metrics.starts, read_job(run.path)
    epochs = [row for row in metrics.cv if row.epoch > 0]
    initial = [_frame_metrics(row.figures) for row in metrics.cv if row.epoch == 0]
    baselines = [_frame_metrics(row.baseline) for row in starts]  # all are equal
    final = metrics.last_accepted

    def joined(field: str) -> str:
        """The value of a field; several values if starts of the training differ."""
        return "; ".join(dict.fromkeys(getattr(row, field) for row in starts))

    return {
        "epochs": len(epochs),
        "cv": _frame_metrics(final.figures) if final else None,
        "cv_by_epoch": tuple(_frame_metrics(row.figures) for row in epochs),
        "initial_cv": next(iter(initial), None),
        "baseline": next(filter(None, baselines), None),
        "time": time_breakdown(metrics),
        "machine": joined("machine") + (f", Slurm, {plural(job.nodes, 'node')}" if job else ""),
        "precision": joined("precision"),
        "optimizer": _settings(run.recipe),
        "train_digest": joined("train_digest"),
    }


def _frame_metrics(figures: Mapping[str, float | None]) -> FrameMetrics | None:
    return None if not figures or None in figures.values() else FrameMetrics.model_validate(figures)


def _settings(recipe: Recipe | None) -> str:
    """As in records that are older than a key, if it has its default."""
    if recipe is None:
        return ""
    added = {key: keys()[f"optimizer.{key}"].default for key, _ in recipe.optimizer if f"optimizer.{key}" in ADDED_KEYS}
    return ", ".join(f"{key} {value}" for key, value in recipe.optimizer if (key, value) not in added.items())


def time_breakdown(metrics: Metrics) -> TimeBreakdown:
    rows = metrics.workers
    ranks = max(1, metrics.num_workers or 1)
    cores = min((row.world_size * (row.cores_per_worker or 0.0) for row in metrics.starts), default=0.0)

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
        cores=round(cores),
        compute_cpu_fraction=compute_cpu_fraction(metrics),
    )


def _word_errors(run_dir: Path, test: TestSet, device: str, scratch: Path) -> dict[str, WordErrors]:
    """Word errors with each graph; for a test set without graphs those that Kaldi's scoring counted, if it has run."""
    if not test.graphs or test.model is None or test.text is None:
        return kaldi_word_errors(run_dir, test)
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


def with_kaldi_wer(record: RunRecord, run_dir: Path, tests: Iterable[TestSet]) -> RunRecord:
    """The record with the word error rates that Kaldi's scoring has left in the run dir since. DataError: a summary of
    sclite is damaged, or two test sets have scores of the same name."""
    wers: dict[str, WordErrors] = {}
    for test in tests:
        if not test.graphs and record.failed is None:
            scores = kaldi_word_errors(run_dir, test)
            if common := wers.keys() & scores.keys():
                message = f"two test sets have a {min(common)}"
                raise DataError(message, location=run_dir, hint="rename one of them")
            wers |= scores
    return record.model_copy(update={"wers": {**record.wers, **wers}})


def kaldi_word_errors(run_dir: Path, test: TestSet) -> dict[str, WordErrors]:
    """The word error rates that sclite counted in the run dir's decode-TEST; empty if Kaldi has not scored there."""
    return {name: WordErrors(wer=wer) for name, wer in best_scores(run_dir / f"decode-{test.name}").items()}


def best_scores(decode_dir: Path) -> dict[str, float]:
    """The lowest word error rates, in percent, among the files of Kaldi's `local/score_sclite.sh` (egs/swbd):

        score_LMWT/NAME.ctm[.SUBSET].filt.{sys,raw}             s5b
        score_LMWT_PENALTY/NAME.ctm[.SUBSET].filt.{sys,raw}     s5c, with a word insertion penalty

    NAME is that of the data dir; eval2000 has the subsets `swbd` and `callhm`, rt03 `swbd` and `fsh`. `.sys` has
    percentages with one decimal, `.raw` counts of words, which are preferred. The best weight counts for each subset by
    itself, as in `utils/best_wer.sh`. DataError: a summary cannot be read or is malformed, or two data dirs have been
    scored into one directory.

    Returns:
        By test set: NAME for the whole of it, SWB and CH for subsets of eval2000, "NAME SUBSET" for those of others.
        Empty if nothing has been scored, or there is no such directory.
    """
    summaries: dict[tuple[str, str, str], Path] = {}  # score folder, data dir, subset ("" for all of it)
    for path in sorted(decode_dir.glob("*/*.filt.*")):  # .raw comes before .sys
        match = _SUMMARY.fullmatch(path.name)
        if match and _FOLDER.fullmatch(path.parent.name):
            summaries.setdefault((path.parent.name, match[1], match[2] or ""), path)
    data_dirs = {data for _, data, _ in summaries}
    if len(data_dirs) > 1:
        message = f"two data dirs have been scored here, {' and '.join(sorted(data_dirs))}"
        raise DataError(message, location=decode_dir, hint="decode each into a directory of its own")
    scores: dict[str, float] = {}
    for (_, data, subset), path in sorted(summaries.items()):
        name, wer = PAPER_NAMES.get((data, subset), f"{data} {subset}".rstrip()), read_summary(path)
        scores[name] = min(scores.get(name, wer), wer)
    return dict(sorted(scores.items()))


def read_summary(path: Path) -> float:
    """The word error rate of a `.sys` or `.raw`, in percent. DataError: it is not what sclite writes."""
    hint = "score again with Kaldi's local/score.sh, or remove the file"
    try:
        totals = _TOTALS.findall(read_bytes_limited(path, MAX_BYTES))
    except OSError as error:
        raise DataError(f"cannot read sclite's summary: {error.strerror}", location=path, hint=hint) from error
    if len(totals) != 1:
        message = f"{len(totals)} lines of totals with 8 numbers found, expected one (Sum/Avg or Sum)"
        raise DataError(f"not a summary of sclite: {message}", location=path, hint=hint)
    name, words, errors = totals[0][0], float(totals[0][1]), float(totals[0][2])
    if words < 1:
        raise DataError("the reference has no words", location=path, hint="check the stm file that was scored against")
    return 100.0 * errors / words if name == b"Sum" else errors


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
