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
from typing import Any

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
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import no_better_than_baseline
from ddnn.runs.run_dir import RunDir
from ddnn.training.combination import BestEpoch, Combination
from ddnn.training.evaluation import EvalResult, baseline_result, learning_rate_hint
from ddnn.training.loop import train
from ddnn.training.state import Checkpointable, CheckpointMetadata, LoadedCheckpoint, capture
from ddnn.training.trainer import Trainer
from ddnn.util.errors import DataError, DivergedError

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
    assert (found.loss, found.figures["frame_accuracy"]) == pytest.approx(
        expected_baseline(labels(train), labels(cv)), rel=1e-12
    )
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
        assert (found.loss, found.figures["frame_accuracy"]) == pytest.approx(expected_baseline(train, cv), rel=1e-12)


def test_each_start_records_the_baseline(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path)
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    (start,) = read_metrics(job.run / "metrics.jsonl").starts
    loss, frame_accuracy = start.baseline["loss"], start.baseline["frame_accuracy"]
    assert loss is not None and frame_accuracy is not None
    # Three pdfs, about equally frequent.
    assert 1.0 < loss < 1.3 and 0.2 < frame_accuracy < 0.6
    assert f"baselines: CV loss {loss:.4f} (pdf priors), CV frame" in (job.run / "train.log").read_text()
    rows = [line for line in (job.run / "train.log").read_text().splitlines() if " cv     loss " in line]
    assert "learning rate" not in rows[0] and all("  learning rate 0." in row for row in rows[1:]), "none was applied"


def result(loss: float, frame_accuracy: float) -> EvalResult:
    return EvalResult({"loss": loss, "frame_accuracy": frame_accuracy}, 40)


class ScriptedTrainer:
    """A training of a toy network whose cross-validation figures are those of the script, (loss, frame accuracy) of the
    initial network and of each epoch."""

    def __init__(self, schedule: Schedule, figures: list[tuple[float, float]], run: RunDir | None = None) -> None:
        self.trainer = toy_trainer(SingleProcess(), make_parallel_config(), frames=2 * MINIBATCH)
        self.trainer.schedule, self.trainer.run = schedule, run or self.trainer.run
        results = iter(figures)

        def validate() -> EvalResult:
            return result(*next(results))

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
    assert trainer.end_row().summary.startswith(
        f"{figures_of_2} (converged: no improvement (1.3000 after 1.2000), less than"
    )
    _, trainer = ScriptedTrainer(Exponential(max_epochs=4), figures).train()
    expected = "epoch 4, CV loss 1.3000, frame accuracy 32.00 % (4 epochs done)"
    assert trainer.end_row().summary == expected


def test_the_network_that_is_kept_where_no_epoch_is_accepted_is_no_moving_average() -> None:
    scripted = ScriptedTrainer(Newbob(), [(2.0, 0.1)] * 4)
    with_combination(scripted.trainer).may_keep_initial = True
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
    metadata, shared, rank = capture(first.trainer)
    loaded = LoadedCheckpoint(CheckpointMetadata.model_validate(metadata), shared, rank, True, Path("checkpoint"))
    second = ScriptedTrainer(Newbob(), [(1.9, 0.3), (1.9, 0.3)])
    second.trainer.restore(loaded)
    _, trainer = second.train()
    assert trainer.initial.loss == 2.0
    assert trainer.end_row().summary.startswith("epoch 1, CV loss 1.5000, frame accuracy 20.00 %")


@pytest.mark.parametrize(
    ("baseline", "warned"), [(1.3, False), (1.2, True), (1.1, True), (0.0, False), (math.nan, False)]
)
def test_a_network_no_better_than_the_relative_frequencies_is_a_warning_with_the_learning_rate(
    baseline: float, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Of one pdf the loss is 0 with any network."""
    scripted = ScriptedTrainer(Exponential(max_epochs=1), [(2.0, 0.1), (1.2, 0.25)])
    scripted.trainer.validation.baseline = result(baseline, 0.2)
    with caplog.at_level("WARNING", "ddnn"):
        scripted.train()
    assert (f"1.2 is not below that of the relative frequencies of the pdfs alone, {baseline}" in caplog.text) == warned
    assert ("0.008 is 0.128 on the mean gradient of 16 frames" in caplog.text) == warned
    assert ("raise it if the loss hardly moved" in caplog.text) == warned


def test_only_the_figure_that_is_no_better_is_named() -> None:
    """With a figure that is not known there is nothing to say."""
    start = "the network is no better than one that ignores its input: "
    loss = "loss 1.2000, 1.1000 by the relative frequencies of the pdfs alone"
    accuracy = "frame accuracy 25.00 %, 25.00 % by always choosing the most frequent pdf"

    def problem(loss: float | None, accuracy: float | None, *baseline: float | None) -> str:
        names = ("loss", "frame_accuracy")
        reached = dict(zip(names, (loss, accuracy), strict=True))
        return no_better_than_baseline(reached, dict(zip(names, baseline, strict=True)), where="")

    assert problem(1.2, 0.25, 1.1, 0.2) == start + loss
    assert problem(1.2, 0.25, 1.2, 0.2)
    assert problem(1.2, 0.25, 1.3, 0.25) == start + accuracy
    assert problem(1.2, 0.25, 1.1, 0.25) == f"{start}{loss}; {accuracy}"
    for known in (
        (1.2, 0.25, 1.3, 0.2),
        (1.2, 0.25, math.nan, math.nan),
        (None, None, 1.3, 0.2),
        (1.2, 0.2, None, None),
    ):
        assert problem(*known) == ""


@pytest.mark.parametrize(
    ("figures", "warned"), [([2.0, 1.5, 2.1, 1.4], [2]), ([2.0, 2.0, 1.9, 1.8], [1]), ([2.0, 1.5, 1.9, 1.8], [])]
)
def test_an_epoch_worse_than_the_initial_network_is_warned_of_at_once(
    figures: list[float], warned: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "ddnn"):
        ScriptedTrainer(Exponential(max_epochs=3), [(loss, 0.1) for loss in figures]).train()
    found = re.findall(
        r"epoch (\d): the cross-validation loss .* is not below that of the initial network", caplog.text
    )
    assert [int(epoch) for epoch in found] == warned


@pytest.mark.parametrize(
    ("losses", "warned"), [([4.0, 3.9, 3.8], True), ([4.0, 3.9, 3.89], False), ([4.0, 3.99, 3.8], False)]
)
def test_a_training_that_still_improves_is_called_not_converged(
    losses: list[float], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has not halved its rate yet."""
    with caplog.at_level("INFO", "ddnn"):
        _, trainer = ScriptedTrainer(Newbob(max_epochs=2), [(loss, 0.1) for loss in losses]).train()
    text = "2 epochs done, and the last one still improved the loss by 2.6 %"
    assert (f"not converged: {text}" in caplog.text) == warned == (text in trainer.end_row().summary)


def test_the_best_epoch_is_kept_where_the_recipe_says_so() -> None:
    figures = [2.0, 1.5, 1.2, 1.3, 1.4]
    for last, name in ((1.2, "epoch 2"), (1.45, "")):  # the second: not so good when it is evaluated again
        scripted = ScriptedTrainer(Exponential(max_epochs=4), [(loss, 0.1) for loss in [*figures, last]])
        scripted.trainer.combination = Combination(best=BestEpoch(scripted.trainer.model.network))
        models = list[torch.Tensor]()
        record = scripted.trainer.record_epoch

        def record_and_copy(
            *row: Any, record: Any = record, models: Any = models, network: Any = scripted.trainer.model.network
        ) -> None:
            models.append(network.parameters.clone())
            record(*row)

        scripted.trainer.record_epoch = record_and_copy  # type: ignore[method-assign]
        model, trainer = scripted.train()
        assert torch.equal(model.network.parameters, models[1 if name else 3])
        assert trainer.end_row().combination == name and trainer.final.loss == (1.2 if name else 1.4)


def test_the_best_epoch_is_resumed_and_a_damaged_one_is_refused() -> None:
    network = toy_trainer(SingleProcess(), make_parallel_config()).model.network
    first, second = BestEpoch(network), BestEpoch(network)
    for epoch, loss in enumerate((1.3, 1.2, 1.4), 1):
        network.parameters.fill_(epoch)
        first.keep(epoch, loss)
    state = first.shared_state_dict()
    second.load_shared_state_dict(state)
    ((name, parameters),) = second.candidates()
    assert name == "epoch 2" and bool((parameters == 2).all()) and not first.state_dict()
    network.parameters.fill_(4)
    second.keep(4, 1.1)
    assert not list(second.candidates())  # it is the last one
    state["numbers"][1] = math.nan
    with pytest.raises(DataError, match="an epoch and its loss"):
        second.load_shared_state_dict(state)


def test_a_final_model_much_worse_than_an_earlier_epochs_is_warned_of(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path)
    settings = "schedule={name: constant, initial_learning_rate: 1.0, epochs: 4}"
    words = ("train", job.recipe, "--device", "cpu", "--set", settings, "--set", "schedule.max_epochs=null")
    result: Result = run_cli(*words, "--run-dir", job.run)
    assert result.exit_code == 0, result.stderr
    metrics = read_metrics(job.run / "metrics.jsonl")
    lowest, model = metrics.lowest_loss, metrics.last_accepted
    assert lowest is not None and model is not None and (model.loss or 0) > 1.02 * (lowest.loss or 0), "as chosen here"
    warning = f"above that of epoch {lowest.epoch}, {lowest.loss:.4f}: with schedule.keep: best"
    assert warning in (job.run / "train.log").read_text() and warning in metrics.warning
    best = tmp_path / "best"
    result = run_cli(*words, "--run-dir", best, "--set", "schedule.keep=best")
    assert result.exit_code == 0, result.stderr
    end = read_metrics(best / "metrics.jsonl").end
    assert end is not None and (end.combination, end.loss) == (f"epoch {lowest.epoch}", lowest.loss)
    assert "schedule.keep" not in (best / "train.log").read_text()


def test_the_hint_counts_the_frames_that_a_learning_rate_multiplies() -> None:
    hint = learning_rate_hint(10, 64, 1.0)
    assert "10 is 640 on the mean gradient of 64 frames; one that was meant for mean gradients" in hint
    assert hint.endswith("has to be divided by 64")
    hint = learning_rate_hint(0.1, 64, 4.0)
    assert "0.1 times 4 (workers) is 25.6 on the mean gradient of 64 frames" in hint and hint.endswith("by 256")


@pytest.mark.parametrize(("scaled", "rate"), [(True, "divided by 64"), (False, "divided by 16")])
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
    assert "start again in another run dir with another learning rate" in " ".join(text.split())
    end = read_metrics(job.run / "metrics.jsonl").end
    assert end is not None and end.reason == "diverged" and re.search(r"ended +diverged\n", status.as_text())
    assert end.detail in (status.error or "") and json.loads((job.run / "status.json").read_text())["end"]["detail"]
    assert not re.search(r"\d{9}", status.as_text()), "2e31 is not written with all its digits"
    result = run_cli("evaluate", job.run, "--data", job.data, "--alignments", job.ali, "--device", "cpu")
    assert_refused(result, "this training diverged: there is no final.safetensors", "gradient of 16 frames")


def test_labels_that_have_nothing_to_do_with_the_features_are_not_learned(tmp_path: Path, run_cli: RunCli) -> None:
    """It finishes with exit code 3 and a model; the error names the learning rate, and status and info warn of the model.
    One that started from another network is only warned of."""
    job = make_job(tmp_path)
    rng = np.random.default_rng(5)
    job = replace(job, features={name: rng.normal(size=x.shape).astype(np.float32) for name, x in job.features.items()})
    job.write()
    settings = ("--set", "schedule.initial_learning_rate=0.002", "--set", "schedule.max_epochs=2")
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *settings)
    assert result.exit_code == 3, result.stderr
    assert "error: the training learned nothing: its model is no better than one that ignores" in result.stderr
    assert "0.002 is 0.032 on the mean gradient of 16 frames" in result.stderr.partition("error: ")[2]
    end = read_metrics(job.run / "metrics.jsonl").end
    assert end is not None and end.reason == "epochs-exhausted" and (job.run / "final.safetensors").exists()
    log = (job.run / "train.log").read_text()
    assert "is not below that of the relative frequencies of the pdfs alone" in log
    assert "check that the alignments belong to the features" in log
    for command in ("status", "info"):
        assert "the network is no better than one that ignores its input: " in run_cli(command, job.run).stdout
    recipe = job.recipe.with_name("tuned.yaml")
    recipe.write_text(
        re.sub(r"(?m)^model:.*\n( .*\n)*", "", job.recipe.read_text()) + f"init: {{model: '{job.run}'}}\n"
    )
    result = run_cli("train", recipe, "--run-dir", job.run.with_name("tuned"), "--device", "cpu", *settings)
    assert result.exit_code == 0, result.stderr
    tuned = (job.run.with_name("tuned") / "train.log").read_text()
    assert "is not below that of the relative frequencies of the pdfs alone" in tuned


@pytest.mark.parametrize(
    ("baseline", "nothing"),
    [((1.1, 0.3), True), ((1.2, 0.25), True), ((1.1, 0.2), False), ((1.3, 0.3), False), ((0.0, 1.0), False),
     ((math.nan, math.nan), False)],
)  # fmt: skip
def test_nothing_was_learned_where_neither_figure_is_better(baseline: tuple[float, float], nothing: bool) -> None:
    scripted = ScriptedTrainer(Exponential(max_epochs=1), [(2.0, 0.1), (1.2, 0.25)])
    scripted.trainer.validation.baseline = result(*baseline)
    scripted.train()
    assert scripted.trainer.learned_nothing == nothing
