"""The examples of docs/development/extending.md, run as they stand there."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import toy_trainer, train_to_end
from twins import cross_entropy_step
from variants import make_parallel_config

from ddnn.averaging import strategies
from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.nn import figures, layers
from ddnn.nn.acoustic_model import AcousticModel, load_model, save_model
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.optim import ng_sgd
from ddnn.recipe.load import load_recipe
from ddnn.training import options
from ddnn.training.network_layers import network_layers

PAGE = (Path(__file__).parents[1] / "docs/development/extending.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def example(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the example with this number; afterwards the tables are as before."""
    tables = {"median": strategies.STRATEGIES, "cosine": options.SCHEDULES, "gain": layers.LAYERS}
    tables |= {"sign-sgd": ng_sgd.OPTIMIZERS, "distance": figures.FIGURES}
    for name, table in tables.items():
        monkeypatch.setitem(table, name, None)  # type: ignore[arg-type]
        del table[name]
    path = tmp_path / f"example{request.param}.py"
    path.write_text(EXAMPLES[request.param])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, made)  # where dataclasses and pydantic look for names
    spec.loader.exec_module(made)
    return made


def test_there_are_five_examples() -> None:
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("example", [0], indirect=True)
def test_a_strategy(example: ModuleType) -> None:
    parallel = make_parallel_config(averaging_period=2).model_copy(update={"strategy": "median"})

    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        made = strategies.make_strategy(strategies.AveragingOptions(strategy="median"), comm)
        assert isinstance(made, example.Median)
        vector = torch.tensor([[1.0, 8.0], [2.0, -1.0], [9.0, math.nan]])[comm.rank]
        made.average(vector, 0, 0.0 if comm.rank == 2 else 10.0)
        trainer = toy_trainer(comm, parallel)
        rows = train_to_end(trainer)
        assert [row["loss"] for row in rows if row.get("split") == "cv"][-1] < 1.0
        return vector, trainer.model.network.parameters

    found = run_workers(3, work)
    for vector, parameters in found:
        assert vector.tolist() == [1.0, -1.0], "of the two that are not excluded the lower"
        assert torch.equal(parameters, found[0][1])


@pytest.mark.parametrize("example", [1], indirect=True)
def test_a_schedule(example: ModuleType) -> None:
    schedule = options.make_schedule(example.CosineConfig(initial_learning_rate=0.4, epochs=4))
    rates = []
    while not schedule.finished:
        rates.append(schedule.learning_rate)
        assert schedule.step({"loss": 1.0})
    assert not schedule.may_be_longer, "its rates depend on the number of epochs"
    assert rates == pytest.approx([0.4 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)])


@pytest.mark.parametrize("example", [2], indirect=True)
def test_an_optimizer(example: ModuleType) -> None:
    """A key of the recipe's section reaches it."""
    section = example.SignSgdConfig(threshold=0.2)
    assert options.optimizer_options(section) == example.SignSgdOptions(threshold=0.2)
    trainer = toy_trainer(SingleProcess(), make_parallel_config(), optimizer=section, learning_rate=0.01, epochs=3)
    assert isinstance(trainer.optimizer, example.SignSgd)
    network, batch = trainer.model.network, next(trainer.batches.epoch(1))
    before, workspace = network.parameters.clone(), Workspace(network, batch.num_frames)
    workspace.x.copy_(batch.x)
    workspace.forward()
    cross_entropy_step(workspace, batch.labels)
    workspace.backward()
    gradient = workspace.gradient(torch.empty_like(before))
    expected = before.clone()
    for views, gradients, layer in zip(network.split(expected), network.split(gradient), network.layers, strict=True):
        for name, about in layer.parameters.items():
            direction = gradients[name].sign() * (gradients[name].abs() > 0.2)
            views[name] -= 0.01 * about.learn_rate_coef * direction
    trainer.step(batch, 0.01)
    torch.testing.assert_close(network.parameters, expected)
    assert 0 < int((expected == before).sum()) < len(before), "some gradients are below the threshold"
    rows = train_to_end(trainer)
    losses = [row["loss"] for row in rows if row.get("split") == "cv"]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("example", [3], indirect=True)
def test_an_objective(example: ModuleType) -> None:
    trainer = toy_trainer(
        SingleProcess(), make_parallel_config(), epochs=6, learning_rate=0.05, make_objective=example.SquaredError
    )
    rows = train_to_end(trainer)
    distances = [row["distance"] for row in rows if row.get("split") == "cv"]
    assert distances[-1] < 0.5 * distances[0]


@pytest.mark.parametrize("example", [4], indirect=True)
def test_a_layer(example: ModuleType, tmp_path: Path) -> None:
    network = Network((Affine(6, 4, "tanh"), example.Gain(4), Affine(4, 3, "softmax")))
    initialize(network, 1)
    network.views[1]["scale"].copy_(torch.tensor([0.5, 1.0, 2.0, -1.0]))
    network.parameters_changed()
    x, labels = torch.randn(9, 6, generator=torch.Generator().manual_seed(1)), torch.arange(9) % 3
    workspace = Workspace(network, 9)
    workspace.x.copy_(x)
    logits = workspace.forward()
    loss, _ = cross_entropy_step(workspace, labels)
    workspace.backward()
    flat = network.parameters.clone().requires_grad_()
    below, scale, above = network.split(flat)
    hidden = torch.tanh(x @ below["weight"].t() + below["bias"]) * scale["scale"]
    expected = hidden @ above["weight"].t() + above["bias"]
    torch.testing.assert_close(logits, expected.detach())
    twin = torch.nn.functional.cross_entropy(expected, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(twin, flat)
    torch.testing.assert_close(workspace.gradient(torch.empty_like(flat)), gradient, rtol=1e-4, atol=1e-5)
    assert float(loss) == pytest.approx(twin.item(), rel=1e-5)
    save_model(tmp_path / "m.safetensors", AcousticModel(FeatureConfig(), splice_only(6, 0), network))
    assert load_model(tmp_path / "m.safetensors").network.layers == network.layers
    path = tmp_path / "r.yaml"
    path.write_text(
        "data: {train: ., alignments: ., splice: 1}\nmodel: {layers: [{stored: {kind: gain}}, {affine: 4}]}\n"
    )
    assert network_layers(load_recipe(path), 6, 3)[:-1] == (example.Gain(6), Affine(6, 4))
