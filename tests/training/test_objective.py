"""Another objective than cross-entropy trains through the same loop, step and cross-validation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from training.toy import toy_trainer, train_to_end
from variants import make_parallel_config

from ddnn.data.batches import Batch
from ddnn.distributed.communicator import SingleProcess
from ddnn.nn.figures import FIGURES, Figure, describe
from ddnn.nn.network import Workspace
from ddnn.nn.objective import Objective, Sums
from ddnn.training.evaluation import Validation, evaluate

DISTANCE = Figure("distance", "distance", "lower")
WITHIN = Figure("within", "share within 1", "higher", percent=True)


class SquaredError(Objective):
    """Half the squared distance of the outputs from the one-hot vector of the label."""

    figures = (DISTANCE, WITHIN)

    def __init__(self, workspace: Workspace) -> None:
        self.pdfs = workspace.derivative.shape[1]

    def __call__(self, outputs: Tensor, batch: Batch, derivative: Tensor) -> Sums:
        torch.sub(outputs, torch.nn.functional.one_hot(batch.labels, self.pdfs), out=derivative)
        distances = 0.5 * derivative.square().sum(dim=1)
        return distances.sum(dtype=torch.float64), (distances < 0.5).sum()


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they stood in the table."""
    for figure in SquaredError.figures:
        monkeypatch.setitem(FIGURES, figure.name, figure)


def test_a_toy_objective_trains_through_the_unchanged_loop() -> None:
    trainer = toy_trainer(
        SingleProcess(), make_parallel_config(), epochs=6, learning_rate=0.05, make_objective=SquaredError
    )
    before = trainer.validate()
    assert list(before.figures) == ["distance", "within"]
    train_to_end(trainer)
    after = trainer.validate()
    assert after.loss < 0.5 * before.loss and after.figures["within"] > before.figures["within"]
    assert trainer.accepted.figures == after.figures


def test_a_training_without_validation_accepts_every_epoch_and_delivers_the_last() -> None:
    validated, alone = (toy_trainer(SingleProcess(), make_parallel_config(), epochs=4) for _ in range(2))
    alone.validation = Validation()
    train_to_end(validated)
    rows = train_to_end(alone)
    assert torch.equal(alone.accepted_parameters, validated.model.network.parameters) and alone.accepted_epoch == 4
    assert [(row["split"], row["epoch"], row["accepted"]) for row in rows if row["type"] == "epoch"] == [
        ("train", epoch, True) for epoch in (1, 2, 3, 4)
    ]
    end = alone.end_row()
    assert end.figures == {} and end.loss is None and end.summary == "epoch 4 (4 epochs done)"
    assert not alone.learned_nothing


def test_a_training_that_ends_before_its_first_evaluation_has_figures_that_are_not_known() -> None:
    trainer = toy_trainer(SingleProcess(), make_parallel_config())
    row = trainer.end_row("stopped", "on SIGTERM")
    assert row.figures == {"loss": None, "frame_accuracy": None} and "CV loss nan" in row.summary


def test_its_figures_are_means_over_all_frames() -> None:
    trainer = toy_trainer(SingleProcess(), make_parallel_config(), make_objective=SquaredError)
    found = evaluate(trainer.model, trainer.validation.frames, make_objective=SquaredError)
    x, labels = trainer.validation.frames.dataset.features, trainer.validation.frames.dataset.labels.long()
    workspace = Workspace(trainer.model.network, len(labels))
    workspace.x.copy_(x)
    error = workspace.forward().double() - torch.nn.functional.one_hot(labels, 5)
    expected = 0.5 * error.square().sum(dim=1)
    assert found.figures == pytest.approx(
        {"distance": float(expected.mean()), "within": float((expected < 0.5).double().mean())}
    )
    assert describe(found.figures) == f"distance {found.loss:.4f}, share within 1 {100 * found.figures['within']:.2f} %"
