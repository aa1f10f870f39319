"""The final model as a mean of models along the training: against float64, on several workers, chosen by
cross-validation."""

from __future__ import annotations

import math
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Result
from distributed.threads import run_workers
from jobs import RunCli, make_job
from torch import Tensor
from training.test_outcome import ScriptedTrainer
from training.toy import toy_trainer, train_to_end, with_combination
from variants import make_parallel_config

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.inspection.path import describe_path
from ddnn.inspection.status import read_status
from ddnn.nn.acoustic_model import load_model
from ddnn.optim.schedule import Exponential, Newbob
from ddnn.report.table import report
from ddnn.runs.metrics import read_metrics
from ddnn.training.combination import MeanOfEpochs
from ddnn.training.evaluation import EvalResult
from ddnn.training.trainer import Trainer
from ddnn.util.errors import DataError


def keep_models(trainer: Trainer) -> list[Tensor]:
    """The parameters after each accepted epoch, as they come."""
    models, keep = list[Tensor](), trainer.combination.keep

    def keeping(epoch: int, loss: float) -> None:
        keep(epoch, loss)
        models.append(trainer.model.network.parameters.double())

    trainer.combination.keep = keeping  # type: ignore[method-assign]
    return models


@pytest.mark.parametrize(("most", "counts"), [(1, []), (2, [2]), (3, [2, 3]), (9, [2, 3, 4])])
def test_means_of_epochs_are_those_of_float64(most: int, counts: list[int]) -> None:
    """To the last bit; of as many epochs as there are."""
    trainer = toy_trainer(SingleProcess(), make_parallel_config(), epochs=4, learning_rate=0.05)
    trainer.combination = MeanOfEpochs(trainer.model.network, most)
    models = keep_models(trainer)
    train_to_end(trainer)
    found = list(trainer.combination.candidates())
    assert [name for name, _ in found] == [f"mean of epochs {5 - n} {'to' if n > 2 else 'and'} 4" for n in counts]
    for n, (_, candidate) in zip(counts, found, strict=True):
        assert torch.equal(candidate, torch.stack(models[-n:]).mean(0).float())


def moving_average(models: list[tuple[float, Tensor]], epochs: float) -> Tensor:
    """By its definition; of (how long it stands for, in epochs; model), oldest first."""
    end = sum(time for time, _ in models)
    total, weights, now = torch.zeros_like(models[0][1]), 0.0, 0.0
    for time, model in models:
        now += time
        weight = time * math.exp((now - end) / epochs)
        total, weights = total + weight * model, weights + weight
    return total / weights


PARALLEL: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "ring": {"strategy": "ring"},
    "bmuf": {"strategy": "bmuf"},
    "gradients": {"strategy": "gradient-all-reduce"},
    "16 bits": {"comm_dtype": "bfloat16"},
}


@pytest.mark.parametrize("name", ["one worker", *PARALLEL])
def test_the_moving_average_is_that_of_the_workers_mean_model(name: str) -> None:
    """20 minibatches an epoch, with one more for each further worker; they average after 3, and so does one alone."""
    workers, lengths = (1, (20,)) if name == "one worker" else (3, (20, 21, 22))

    def work(comm: Communicator) -> tuple[list[list[tuple[float, Tensor]]], Tensor]:
        config = make_parallel_config(averaging_period=3, **PARALLEL.get(name, {}))
        frames = 16 * lengths[comm.rank]
        trainer = with_combination(toy_trainer(comm, config, frames=frames, epochs=2, learning_rate=0.02), most=1)
        seen, of_epochs = list[tuple[float, Tensor]](), list[list[tuple[float, Tensor]]]()
        after, end, count = trainer.combination.after_minibatch, trainer.combination.end_epoch, [0]

        def add() -> None:
            seen.append((count[0] / lengths[comm.rank], trainer.model.network.parameters.double()))
            count[0] = 0

        def after_minibatch() -> None:
            after()
            count[0] += 1
            if count[0] == 3:
                add()

        def end_epoch() -> None:
            if count[0]:
                add()
            end()
            of_epochs.append([*seen])

        trainer.combination.after_minibatch = after_minibatch  # type: ignore[method-assign]
        trainer.combination.end_epoch = end_epoch  # type: ignore[method-assign]
        train_to_end(trainer)
        ((_, candidate),) = list(trainer.combination.candidates())
        return of_epochs, candidate.clone()

    found = run_workers(workers, work) if workers > 1 else [work(SingleProcess())]
    candidate = found[0][1]
    assert all(torch.equal(candidate, other) for _, other in found), "the same bits on every worker"
    # After the first epoch all go on from the mean; the second alone is weighed against it.
    first = torch.stack([moving_average(of_epochs[0], 0.7) for of_epochs, _ in found]).mean(0)
    expected = []
    for (one, both), _ in found:
        times = [time for time, _ in one]
        start = sum(t * math.exp((sum(times[: i + 1]) - sum(times)) / 0.7) for i, t in enumerate(times))
        later = both[len(one) :]
        end = sum(time for time, _ in later)
        weight = start * math.exp(-end / 0.7)
        total, now = weight * first, 0.0
        for time, model in later:
            now += time
            w = time * math.exp((now - end) / 0.7)
            total, weight = total + w * model, weight + w
        expected.append(total / weight)
    torch.testing.assert_close(candidate.double(), torch.stack(expected).mean(0), rtol=1e-6, atol=1e-7)


def test_a_rejected_epoch_leaves_no_trace() -> None:
    trainer = with_combination(toy_trainer(SingleProcess(), make_parallel_config()))
    combination, parameters = trainer.combination, trainer.model.network.parameters
    generator = torch.Generator().manual_seed(1)

    def epoch(number: int, *, accepted: bool) -> None:
        for _ in range(20):
            parameters.copy_(torch.randn(parameters.shape, generator=generator))
            combination.after_minibatch()
        combination.end_epoch()
        combination.keep(number, 1.0) if accepted else combination.revert()

    epoch(1, accepted=True)
    state = generator.get_state()
    epoch(2, accepted=True)
    expected = [parameters.clone() for _, parameters in combination.candidates()]
    again = with_combination(toy_trainer(SingleProcess(), make_parallel_config()))
    combination, parameters = again.combination, again.model.network.parameters
    generator.manual_seed(1)
    epoch(1, accepted=True)
    epoch(2, accepted=False)
    generator.set_state(state)
    epoch(3, accepted=True)
    found = dict(again.combination.candidates())
    assert list(found) == ["mean of epochs 1 and 3", "moving average over about 0.7 epochs"]
    for one, other in zip(found.values(), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_a_worker_whose_model_was_not_finite_does_not_spoil_the_moving_average() -> None:
    def work(comm: Communicator) -> Tensor:
        trainer = with_combination(toy_trainer(comm, make_parallel_config()), most=1)
        parameters = trainer.model.network.parameters
        mean = parameters.double()
        for minibatch in range(6):
            if comm.rank == 1 and minibatch == 2:
                parameters.fill_(math.nan)
            trainer.combination.after_minibatch()
        parameters.copy_(mean)
        trainer.combination.end_epoch()
        trainer.combination.keep(1, 1.0)
        ((_, candidate),) = trainer.combination.candidates()
        trainer.averager.close()
        torch.testing.assert_close(candidate.double(), mean, rtol=1e-6, atol=1e-7)
        return candidate.clone()

    assert len({tuple(candidate.tolist()) for candidate in run_workers(2, work)}) == 1


CHOICES = {
    "the better mean": ([1.3, 1.1, 1.4], "mean of epochs 1 to 3", 1.1),
    "the moving average": ([1.3, 1.1, 1.05], "moving average over about 0.7 epochs", 1.05),
    "as good": ([1.2, 1.5, 1.5], "mean of epochs 2 and 3", 1.2),
    "none is as good": ([1.2001, 1.5, math.nan], "", 1.2),
}


@pytest.mark.parametrize("name", CHOICES)
def test_the_best_in_cross_validation_is_delivered(name: str) -> None:
    figures, expected, loss = CHOICES[name]
    scripted = ScriptedTrainer(
        Exponential(max_epochs=3), [(2.0, 0.1), (1.5, 0.2), (1.3, 0.25), (1.2, 0.3), *((x, 0.4) for x in figures)]
    )
    trainer = with_combination(scripted.trainer)
    model, _ = scripted.train()
    row = trainer.end_row()
    assert (row.combination, row.loss, row.kept["loss"], row.kept_epoch) == (expected, loss, 1.2, 3)
    alone = "; epoch 3 alone 1.2000" if expected else ""
    accuracy = "40.00" if expected else "30.00"
    what = expected or "epoch 3"
    summary = f"{what}, CV loss {loss:.4f}, frame accuracy {accuracy} %{alone} (3 epochs done)"
    assert row.summary == summary
    models = dict(trainer.combination.candidates())
    kept = list(trainer.combination.parts["last"].models)[-1][1]  # type: ignore[attr-defined]
    assert torch.equal(model.network.parameters, models.get(expected, kept))


def test_means_with_newbob_are_of_accepted_epochs() -> None:
    figures = [(2.0, 0.1), (1.5, 0.2), (1.6, 0.2), (1.2, 0.3), (1.1, 0.3), (1.1, 0.3), *[(1.0, 0.3)] * 9]
    scripted = ScriptedTrainer(Newbob(max_epochs=5), figures)
    with_combination(scripted.trainer)
    scripted.train()
    names = [name for name, _ in scripted.trainer.combination.candidates()]
    assert names[:2] == ["mean of epochs 3 and 4", "mean of epochs 1, 3 and 4"]


@pytest.mark.parametrize("damage", ["epochs", "model.2", "mean", "kept", "numbers", "too many"])
def test_a_state_is_restored_and_a_damaged_one_is_refused(damage: str) -> None:
    trainer = with_combination(toy_trainer(SingleProcess(), make_parallel_config(), epochs=2))
    with closing(trainer.averager):
        train_to_end(trainer)
    shared, own = trainer.combination.shared_state_dict(), trainer.combination.state_dict()
    whole = with_combination(toy_trainer(SingleProcess(), make_parallel_config()))
    whole.combination.load_shared_state_dict(shared)
    whole.combination.load_state_dict(own)
    for (name, found), (_, expected) in zip(
        whole.combination.candidates(), trainer.combination.candidates(), strict=True
    ):
        assert torch.equal(found, expected), name
    part = "moving" if damage in ("mean", "kept", "numbers") else "last"
    if damage == "too many":
        shared["last.epochs"] = torch.arange(4)
    elif damage == "numbers":
        own["moving.numbers"] = torch.tensor([math.nan, 0.0, 0.0], dtype=torch.float64)
    else:
        del (own if damage == "mean" else shared)[f"{part}.{damage}"]
    again = with_combination(toy_trainer(SingleProcess(), make_parallel_config()))
    with pytest.raises(DataError):
        again.combination.load_shared_state_dict(shared)
        again.combination.load_state_dict(own)


def test_the_final_model_is_what_everything_uses_and_says(tmp_path: Path, run_cli: RunCli) -> None:
    """A learning rate at which it jumps: the mean is better, and the model that is evaluated is the one written."""
    job = make_job(tmp_path)
    settings = ("schedule={name: constant, initial_learning_rate: 1.0, epochs: 4, average_last: 3}",)
    settings = (*settings, "schedule.max_epochs=null", "schedule.moving_average_epochs=1")
    options = [word for setting in settings for word in ("--set", setting)]
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *options)
    assert result.exit_code == 0, result.stderr
    metrics = read_metrics(job.run / "metrics.jsonl")
    end, model = metrics.end, metrics.last_accepted
    assert end is not None and model is not None and end.loss is not None and end.kept
    assert end.combination and end.loss < (end.kept["loss"] or 0.0) == metrics.cv[-1].loss
    assert (model.epoch, model.figures) == (4, end.figures)
    log = (job.run / "train.log").read_text()
    assert f"final.safetensors, {end.summary}" in log and f"{end.combination}: CV loss {end.loss:.4f}" in log
    shown = f"{end.combination}: cross-validation loss {end.loss:.4f}"
    assert re.search(f"final model +{re.escape(shown)}", read_status(job.run).as_text())
    assert describe_path(job.run / "metrics.jsonl").fields["last_accepted"].startswith(shown)
    summary = report([job.run], None).as_dict()["runs"][0]
    assert (summary["model_combination"], summary["model_cv_loss"]) == (end.combination, end.loss)
    recipe = job.recipe.read_text()
    assert "data:" in recipe and load_model(job.run / "final.safetensors").network.parameters.isfinite().all()
    for wrong in ("schedule.average_last=0", "schedule.average_last=101", "schedule.moving_average_epochs=0"):
        refused: Result = run_cli("train", job.recipe, "--run-dir", tmp_path / "b", "--set", wrong)
        assert refused.exit_code == 2 and wrong.partition("=")[0] in refused.stderr


def test_defaults_deliver_the_last_accepted_epoch() -> None:
    trainer = toy_trainer(SingleProcess(), make_parallel_config())
    assert list(trainer.combination.candidates()) == [] and trainer.combination.shared_state_dict() == {}
    train_to_end(trainer)
    assert isinstance(trainer.accepted, EvalResult) and trainer.final is trainer.accepted and trainer.final_source == ""
