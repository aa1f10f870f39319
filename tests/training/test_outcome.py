"""How a training ends: with a model that has learned something, or as diverged."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Result
from distributed.threads import run_workers
from jobs import RunCli, assert_refused, make_job
from training.toy import MINIBATCH, NoCheckpoints, toy_shard, toy_trainer, with_combination
from variants import make_parallel_config

from ddnn.data.dataset import FrameSubset
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.inspection.status import read_status
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.optim.schedule import Exponential, Newbob, Schedule
from ddnn.training.evaluation import EvalResult, baseline_result, learning_rate_hint
from ddnn.training.metrics import read_metrics
from ddnn.training.run_dir import RunDir
from ddnn.training.state import Checkpointable, CheckpointMetadata, LoadedCheckpoint
from ddnn.training.trainer import Trainer, train
from ddnn.util.errors import DivergedError

NUM_PDFS = 7
"""Two of them, 5 and 6, have no frame in `toy_shard`."""


def expected_baseline(train: list[int], cv: list[int]) -> tuple[float, float]:
    counts = Counter(train)
    losses = [-math.log((counts[pdf] + 0.5) / (len(train) + 0.5 * NUM_PDFS)) for pdf in cv]
    return sum(losses) / len(cv), max(map(cv.count, cv)) / len(cv)


def labels(*shards: FrameSubset) -> list[int]:
    return [int(label) for shard in shards for label in shard.dataset.labels[shard.indices]]


def test_the_baseline_is_the_relative_frequencies_of_the_training_labels() -> None:
    train, cv = toy_shard(0, 333), toy_shard(1, 40)
    cv.dataset.labels[:20] = 6  # a pdf that training has not seen: the best constant answer here
    train.dataset.labels[300:] = 6  # and which is not among the training frames, but in their dataset
    train = FrameSubset(train.dataset, train.indices[:300])
    found = baseline_result(train, cv, NUM_PDFS, SingleProcess())
    assert (found.loss, found.frame_accuracy) == pytest.approx(expected_baseline(labels(train), labels(cv)), rel=1e-12)
    assert found.frames == 40


def test_the_baseline_is_that_of_all_workers_frames() -> None:
    sizes, cv_sizes = (7, 300, 53), (90, 3, 20)

    def work(comm: Communicator) -> EvalResult:
        return baseline_result(
            toy_shard(comm.rank, sizes[comm.rank]), toy_shard(50 + comm.rank, cv_sizes[comm.rank]), NUM_PDFS, comm
        )

    train = labels(*(toy_shard(rank, size) for rank, size in enumerate(sizes)))
    cv = labels(*(toy_shard(50 + rank, size) for rank, size in enumerate(cv_sizes)))
    for found in run_workers(3, work):
        assert (found.loss, found.frame_accuracy) == pytest.approx(expected_baseline(train, cv), rel=1e-12)


def test_each_start_records_the_baseline(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path)
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    (start,) = read_metrics(job.run / "metrics.jsonl").starts
    assert start.baseline_loss is not None and start.baseline_frame_accuracy is not None
    # Three pdfs, about equally frequent.
    assert 1.0 < start.baseline_loss < 1.3 and 0.2 < start.baseline_frame_accuracy < 0.6
    assert f"without looking at the input: loss {start.baseline_loss:.4f} by" in (job.run / "train.log").read_text()


class ScriptedTrainer:
    """A training of a toy network whose cross-validation figures are those of the script, (loss, frame accuracy) of the
    initial network and of each epoch."""

    def __init__(self, schedule: Schedule, figures: list[tuple[float, float]], run: RunDir | None = None) -> None:
        self.trainer = toy_trainer(SingleProcess(), make_parallel_config(), frames=2 * MINIBATCH)
        self.trainer.schedule, self.trainer.run = schedule, run or self.trainer.run
        results = iter(figures)

        def validate() -> EvalResult:
            self.trainer._validation_started = 0.0
            return EvalResult(*next(results), 40)

        self.trainer.validate = validate  # type: ignore[method-assign]

    def train(self) -> tuple[AcousticModel, Trainer]:
        with closing(self.trainer.averager), closing(self.trainer.batches):
            return train(self.trainer), self.trainer


NEWBOB_BY_ACCURACY = partial(Newbob, criterion="frame-accuracy")
DIVERGED: dict[str, tuple[Callable[..., Schedule], list[float], list[float], str]] = {
    "no epoch was accepted": (Newbob, [2.0, 3.0, 2.5], [0.1] * 3, "no epoch was accepted"),
    "no epoch was better": (Newbob, [2.0, 2.0, 2.0], [0.1] * 3, "no epoch was accepted"),
    "min_epochs": (partial(Newbob, min_epochs=3), [2.0, 1.5, 1.4, 2.1, 2.2], [0.1] * 5, "2.1 after epoch 3, not below"),
    "keep_lr_epochs": (partial(Newbob, keep_lr_epochs=1), [2.0, 2.1, 2.2, 2.2], [0.1] * 4, "2.1 after epoch 1"),
    "exponential": (partial(Exponential, max_epochs=2), [2.0, 1.5, 112.0], [0.1] * 3, "112 after epoch 2"),
    "as the initial one": (partial(Exponential, max_epochs=1), [2.0, 2.0], [0.1] * 2, "2 after epoch 1"),
    "huge": (partial(Exponential, max_epochs=1), [2.0, 2e31], [0.1] * 2, "2e+31 after epoch 1"),
    "frame accuracy": (NEWBOB_BY_ACCURACY, [2.0, 2.5, 2.6, 2.6], [0.1, 0.2, 0.2, 0.2], "2.5 after epoch 1, not below"),
}


@pytest.mark.parametrize("name", DIVERGED)
def test_a_training_that_ends_worse_than_it_began_has_diverged(name: str, tmp_path: Path) -> None:
    schedule, losses, accuracies, message = DIVERGED[name]
    run = RunDir.open(tmp_path / "run")
    with pytest.raises(DivergedError, match=re.escape(message)) as caught, closing(run):
        ScriptedTrainer(schedule(), list(zip(losses, accuracies, strict=True)), run).train()
    assert "the initial network (2)" in caught.value.message and caught.value.location == str(run.path)
    assert caught.value.exit_code == 3 and "16 frames" in (caught.value.hint or "")
    assert not (run.path / "best.safetensors").exists()


def test_the_kept_epoch_is_the_last_that_was_accepted() -> None:
    figures = [(2.0, 0.1), (1.5, 0.2), (1.2, 0.3), (1.4, 0.31), (1.3, 0.32)]
    _, trainer = ScriptedTrainer(Newbob(), figures).train()
    figures_of_2 = "epoch 2, CV loss 1.2000, frame accuracy 30.00 %"
    assert trainer.end_row().summary.startswith(f"{figures_of_2} (converged: improvement 0.000000, less than")
    _, trainer = ScriptedTrainer(Exponential(max_epochs=4), figures).train()
    expected = "epoch 4, CV loss 1.3000, frame accuracy 32.00 % (epochs-exhausted: 4 epochs done)"
    assert trainer.end_row().summary == expected


def test_the_network_that_is_kept_where_no_epoch_is_accepted_is_no_moving_average() -> None:
    scripted = ScriptedTrainer(Newbob(), [(2.0, 0.1)] * 4)
    with_combination(scripted.trainer).keeps_initial = True
    before = scripted.trainer.model.network.parameters.clone()
    model, trainer = scripted.train()
    assert trainer.end_row().combination == "" and torch.equal(model.network.parameters, before)


def test_the_best_model_is_removed_when_training_is_worse_than_at_its_beginning(tmp_path: Path) -> None:
    """In between, too: a training that is killed there leaves nothing that looks like a result."""
    run, found = RunDir.open(tmp_path / "run"), list[bool]()
    scripted = ScriptedTrainer(Exponential(max_epochs=3), [(2.0, 0.1), (1.5, 0.1), (2.5, 0.1), (1.4, 0.1)], run)

    class Looking(NoCheckpoints):
        def after_epoch(self, trainer: Checkpointable) -> None:
            found.append((run.path / "best.safetensors").exists())

    scripted.trainer.checkpoints = Looking()
    with closing(run):
        scripted.train()
    assert found == [True, False, True]


def test_a_resumed_training_knows_what_it_began_with() -> None:
    """The initial network is evaluated only once; a checkpoint holds its loss, and which epoch was kept."""
    figures = [(2.0, 0.1), (1.5, 0.2), (1.9, 0.3)]
    first = ScriptedTrainer(Newbob(), figures)

    class Stopping(NoCheckpoints):
        def after_epoch(self, trainer: Checkpointable) -> None:
            raise TrainingInterrupted("SIGTERM")

    first.trainer.checkpoints = Stopping()
    with pytest.raises(TrainingInterrupted):
        first.train()
    metadata, shared, rank = first.trainer.capture()
    loaded = LoadedCheckpoint(CheckpointMetadata.model_validate(metadata), shared, rank, True, Path("checkpoint"))
    second = ScriptedTrainer(Newbob(), [(1.9, 0.3), (1.9, 0.3)])
    second.trainer.restore(loaded)
    _, trainer = second.train()
    assert trainer.initial.loss == 2.0
    assert trainer.end_row().summary.startswith("epoch 1, CV loss 1.5000, frame accuracy 20.00 %")


@pytest.mark.parametrize(
    ("baseline", "warned"),
    [((1.3, 0.2), False), ((1.2, 0.2), True), ((1.1, 0.2), True), ((1.3, 0.25), True), ((math.nan, math.nan), False)],
)
def test_a_network_no_better_than_the_relative_frequencies_is_a_warning(
    baseline: tuple[float, float], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scripted = ScriptedTrainer(Exponential(max_epochs=1), [(2.0, 0.1), (1.2, 0.25)])
    scripted.trainer.baseline = EvalResult(*baseline, 40)
    with caplog.at_level("WARNING", "ddnn"):
        scripted.train()
    assert ("no better than the relative frequencies of the pdfs alone" in caplog.text) == warned
    if warned:
        assert f"loss 1.2000 (relative frequencies: {baseline[0]:.4f})" in caplog.text
        assert f"frame accuracy 25.00 % (most frequent pdf: {100 * baseline[1]:.2f} %)" in caplog.text


def test_the_hint_counts_the_frames_that_a_learning_rate_multiplies() -> None:
    hint = learning_rate_hint(10, 64, 1.0)
    assert "10 is 640 on the mean gradient of 64 frames; if 10 was meant for mean gradients, use 10/64 = 0.156;" in hint
    hint = learning_rate_hint(0.1, 64, 4.0)
    assert (
        "0.1 times 4 (workers) is 25.6 on the mean gradient of 64 frames" in hint and "use 0.1/256 = 0.000391" in hint
    )


@pytest.mark.parametrize(("scaled", "rate"), [(True, "0.5/64 = 0.00781"), (False, "0.5/16 = 0.0312")])
def test_the_hint_is_right_with_several_workers(scaled: bool, rate: str) -> None:
    def work(comm: Communicator) -> str:
        parallel = make_parallel_config(scale_learning_rate=scaled)
        return toy_trainer(comm, parallel, learning_rate=0.5).hint

    assert all(rate in hint for hint in run_workers(4, work))


DIVERGING = {
    "A1": ("schedule.initial_learning_rate=1000",),
    "A2": ("schedule.initial_learning_rate=100", "schedule.min_epochs=3"),
    "A4": ("schedule={name: exponential, initial_learning_rate: 1e30, epochs: 3}", "schedule.max_epochs=null"),
}


@pytest.mark.parametrize("name", DIVERGING)
def test_a_training_that_diverged_ends_with_exit_code_3_and_no_model(
    name: str, tmp_path: Path, run_cli: RunCli
) -> None:
    job = make_job(tmp_path)
    options = [word for setting in DIVERGING[name] for word in ("--set", setting)]
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *options)
    assert result.exit_code == 3, result.stderr
    assert "ddnn: error: the training " in result.stderr and "gradient of 16 frames" in result.stderr
    assert not list(job.run.glob("*.safetensors"))
    status = read_status(job.run)
    assert status.state == "diverged" and "the initial network (" in (status.error or "")
    text = run_cli("status", job.run).stdout
    assert "--resume" not in text and "a resume begins" not in text and status.resume_command is None
    assert "start again in another run dir with a lower learning rate" in " ".join(text.split())
    end = read_metrics(job.run / "metrics.jsonl").end
    assert end is not None and (end.reason, status.lines()["ended"]) == ("diverged", "diverged")
    assert end.detail in (status.error or "") and json.loads((job.run / "status.json").read_text())["end"]["detail"]
    assert not re.search(r"\d{9}", status.as_text()), "2e31 is not written with all its digits"
    result = run_cli("evaluate", job.run, "--data", job.data, "--alignments", job.ali, "--device", "cpu")
    assert_refused(result, "this training diverged: there is no final.safetensors", "gradient of 16 frames")


def test_the_end_of_a_training_says_which_model_was_kept(tmp_path: Path, run_cli: RunCli) -> None:
    """Labels that have nothing to do with the features: it finishes, with a warning that status and info repeat."""
    job = make_job(tmp_path)
    rng = np.random.default_rng(5)
    job = replace(job, features={name: rng.normal(size=x.shape).astype(np.float32) for name, x in job.features.items()})
    job.write()
    settings = ("--set", "schedule.initial_learning_rate=0.002", "--set", "schedule.max_epochs=2")
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *settings)
    assert result.exit_code == 0, result.stderr
    last = read_metrics(job.run / "metrics.jsonl").cv[-1]
    assert last.loss is not None and last.frame_accuracy is not None
    kept = f"final.safetensors, epoch 2, CV loss {last.loss:.4f}, frame accuracy {100 * last.frame_accuracy:.2f} % ("
    log = (job.run / "train.log").read_text()
    assert kept in log and "WARNING the network is no better than the relative frequencies of the pdfs alone" in log
    for command in ("status", "info"):
        shown = run_cli(command, job.run).stdout
        assert "the network is no better than the relative frequencies of the pdfs alone" in shown
        assert f"loss {last.loss:.4f} (relative" in shown
