"""Training with the compiled kernels is training without them; and the bf16 copy is always of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins import biases, cross_entropy_step, kernels_for, random_minibatch, weights

from ddnn.nn.arithmetic import BFloat16Kernels, Float32, Precision, make_arithmetic
from ddnn.nn.kernels import Kernels
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine, mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions

needs_kernels = pytest.mark.skipif(not kernels_for("bf16"), reason="no compiled kernels that this processor can run")

SIGMOIDS = mlp_layers(20, 2, 33, 5, "sigmoid")
AN4 = mlp_layers(440, 4, 512, 616, "sigmoid")
OPTIMIZERS = {
    "sgd": SgdOptions(),
    "l2": SgdOptions(l2=1e-3),
    "momentum": SgdOptions(momentum=0.5, l2=1e-3),
    "ng-sgd": NgSgdOptions(rank_in=5, rank_out=3),
    "ng-sgd held back": NgSgdOptions(rank_in=5, rank_out=3, max_change_per_sample=0.002, l2=1e-3),
    "ng-sgd momentum": NgSgdOptions(rank_in=5, rank_out=3, max_change_per_sample=0.01, momentum=0.5),
}
RATED = (
    Affine(20, 33, "sigmoid", learn_rate_coef=0.5, bias_learn_rate_coef=2.0),
    Affine(33, 17, "tanh", bias_learn_rate_coef=0.0),
    Affine(17, 5, "softmax", learn_rate_coef=1.5, bias_learn_rate_coef=0.1),
)


RUNS: tuple[tuple[Precision, bool], ...] = (("float32", False), ("bf16", False), ("bf16", True))
"""Precision, and whether compiled."""


def network_of(layers: tuple[Layer, ...], seed: int = 1) -> Network:
    made = Network(layers)
    initialize(made, seed)
    return made


def arithmetic(precision: Precision, compiled: bool = True) -> Float32:
    return make_arithmetic(precision, torch.device("cpu"), use_kernels=compiled)


def learn(workspace: Workspace, optimizer: Sgd, labels: Tensor, rate: float) -> Tensor:
    """A step on what is in `workspace.x`, as the training loop makes it; returns its loss."""
    workspace.forward()
    loss, _ = cross_entropy_step(workspace, labels)
    workspace.backward()
    optimizer.step(workspace, rate)
    return loss


def train(
    layers: tuple[Layer, ...],
    options: SgdOptions,
    precision: Precision,
    compiled: bool,
    minibatches: int = 200,
    frames: int = 32,
    rate: float = 0.01,
) -> tuple[Tensor, Network]:
    """Losses per frame of each minibatch, and what was trained: on frames that tell their label, the largest of the
    first dims. Every fifth minibatch is smaller."""
    network = network_of(layers)
    optimizer = make_optimizer(options, network)
    whole = Workspace(network, frames, arithmetic(precision, compiled))
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(40 * frames, network.input_dim, generator=generator)
    labels = data[:, : network.output_dim].argmax(1)
    found = []
    for t in range(minibatches):
        n = frames - 3 if t % 5 == 4 else frames
        rows = torch.randint(0, len(data), (n,), generator=generator)
        workspace = whole.of(n)
        workspace.x.copy_(data[rows])
        found.append(learn(workspace, optimizer, labels[rows], rate) / n)
    return torch.stack(found), network


def changes(layers: tuple[Layer, ...], network: Network) -> list[Tensor]:
    """By how much each weight and bias has changed in the training."""
    moved = Network(layers, network.parameters - network_of(layers).parameters)
    return weights(moved) + biases(moved)


class Calls:
    """Counts the calls of the kernels by name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, int] = {}
        for name, function in vars(Kernels).items():
            if not name.startswith("_"):
                monkeypatch.setattr(Kernels, name, self.counting(name, function))

    def counting(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self.of[name] = 0

        def call(*args: Any, **kwargs: Any) -> Any:
            self.of[name] += 1
            return function(*args, **kwargs)

        return call


@needs_kernels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_200_minibatches_have_the_same_losses_with_and_without(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options, calls = OPTIMIZERS[optimizer], Calls(monkeypatch)
    plain = train(SIGMOIDS, options, "bf16", False)[0].view(-1, 20).mean(1)
    assert not any(calls.of.values())
    found = train(SIGMOIDS, options, "bf16", True)[0].view(-1, 20).mean(1)
    assert calls.of["sigmoid_"] == calls.of["sigmoid_backward_"] == 400 and calls.of["cross_entropy"] == 200
    # Momentum wants the gradient of all layers; else weight and bias of a layer are updated by themselves.
    assert calls.of["sgd_update"] == 0 if options.momentum else calls.of["sgd_update"] >= 600
    assert calls.of["column_sums"] > 0
    in_float32 = train(SIGMOIDS, options, "float32", False)[0].view(-1, 20).mean(1)
    assert in_float32[-1] < 0.7 * in_float32[0], "it has to learn, or nothing is compared"
    torch.testing.assert_close(found, plain, rtol=0.003, atol=0.0)
    torch.testing.assert_close(found, in_float32, rtol=0.01, atol=0.002)


@needs_kernels
@pytest.mark.parametrize("hidden", ["tanh", "relu"])
def test_other_activations_train_with_them_too(hidden: str) -> None:
    layers = mlp_layers(20, 2, 33, 5, hidden)
    plain, found = (train(layers, SgdOptions(), "bf16", c, rate=0.002)[0].view(-1, 20).mean(1) for c in (False, True))
    assert found[-1] < 0.5 * found[0], "it has to learn, or nothing is compared"
    torch.testing.assert_close(found, plain, rtol=0.01, atol=0.0)


@needs_kernels
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("layers", "frames"), [(RATED, 32), (AN4, 64)], ids=["rates by layer", "an4"])
def test_a_few_steps_change_every_layer_alike(layers: tuple[Layer, ...], frames: int, optimizer: str) -> None:
    """Rates by layer and l2 included, the kernels are as near to float32 as PyTorch's bf16 is."""
    moved, losses = [], []
    for precision, compiled in RUNS:
        found, network = train(layers, OPTIMIZERS[optimizer], precision, compiled, 5, frames, rate=0.005)
        moved.append(changes(layers, network))
        losses.append(found)
    torch.testing.assert_close(losses[2], losses[1], rtol=0.005, atol=0.0)
    for exact, plain, found in zip(*moved, strict=True):
        size, off_by, may_be = (float(torch.linalg.vector_norm(t)) for t in (exact, found - exact, plain - exact))
        assert off_by <= 1.5 * may_be + 0.003 * size
        assert off_by <= 0.05 * size


@needs_kernels
@pytest.mark.parametrize("name", ["sgd", "ng-sgd"])
def test_gradients_that_workers_average_are_averaged(name: str) -> None:
    """As if there were another with the same gradient, and both were summed: each goes twice as far."""
    options = SgdOptions()
    if name == "ng-sgd":
        options = NgSgdOptions(rank_in=5, rank_out=3, max_change_scope="unscaled")  # that limits any rate alike
    moved = []
    for rate, average in ((0.02, None), (0.01, lambda gradient: gradient.mul_(2.0))):
        network = network_of(RATED)
        workspace, step = Workspace(network, 32, arithmetic("bf16")), make_optimizer(options, network).step
        labels = random_minibatch(workspace, 5, torch.Generator().manual_seed(1))
        workspace.forward()
        cross_entropy_step(workspace, labels)
        workspace.backward()
        step(workspace, rate, average)
        moved.append(torch.cat([change.flatten() for change in changes(RATED, network)]))
    assert moved[0].any()
    torch.testing.assert_close(moved[1], moved[0], rtol=0.01, atol=1e-6)


@needs_kernels
@pytest.mark.parametrize("optimizer", ["momentum", "ng-sgd"])
@pytest.mark.parametrize("exact", [False, True])
def test_in_float32_kernels_precondition_and_nothing_else(
    optimizer: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, calls = OPTIMIZERS[optimizer], Calls(monkeypatch)
    if isinstance(options, NgSgdOptions):
        options = replace(options, exact=exact)
    (plain_losses, plain), (losses, found) = (train(SIGMOIDS, options, "float32", c, 20) for c in (False, True))
    expected = {"remove_projection_": 2 * 3 * 20} if optimizer == "ng-sgd" and not exact else {}
    assert {name: count for name, count in calls.of.items() if count} == expected
    torch.testing.assert_close(losses, plain_losses, rtol=1e-5, atol=0.0)
    assert torch.equal(found.parameters, plain.parameters) != bool(expected)


def test_padding_or_an_option_keeps_the_kernels_away() -> None:
    network = network_of(SIGMOIDS)
    for one in (make_arithmetic("bf16", torch.device("cpu"), pad_to=64), arithmetic("bf16", compiled=False)):
        workspace = Workspace(network, 4, one)
        assert not isinstance(one, BFloat16Kernels) and not one.updates_by_layer
        assert workspace.x.dtype == torch.float32


class Casts(TorchDispatchMode):
    """Counts the copies of float32 parameters to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.count += args[0].dtype == torch.bfloat16 and args[1].dtype == torch.float32
        return func(*args, **(kwargs or {}))


class Trained:
    """A network that has just made a step with the kernels, and a minibatch to look at it with."""

    def __init__(self, layers: tuple[Layer, ...] = RATED, seed: int = 1) -> None:
        self.network = network_of(layers, seed)
        self.workspace = Workspace(self.network, 8, arithmetic("bf16"))
        self.optimizer = Sgd(self.network)
        self.generator = torch.Generator().manual_seed(seed)
        self.step(self.workspace)
        self.input = torch.randn(self.workspace.x.shape, generator=self.generator)

    def step(self, workspace: Workspace) -> None:
        labels = random_minibatch(workspace, self.network.output_dim, self.generator)
        learn(workspace, self.optimizer, labels, 0.1)

    def seen_by(self, workspace: Workspace) -> Tensor:
        """The network's outputs."""
        workspace.x.copy_(self.input[: len(workspace.x)])
        return workspace.forward().clone()

    def check(self, workspace: Workspace | None = None) -> None:
        """The workspace must have the outputs that new ones have."""
        workspace = self.workspace if workspace is None else workspace
        assert torch.equal(
            self.seen_by(workspace), self.seen_by(Workspace(self.network, len(workspace.x), arithmetic("bf16")))
        )


@needs_kernels
def test_after_a_step_nothing_is_cast() -> None:
    trained = Trained()
    trained.workspace.x.copy_(trained.input)
    with Casts() as casts:
        found = trained.workspace.forward().clone()
    assert casts.count == 0
    assert torch.equal(found, trained.seen_by(Workspace(trained.network, 8, arithmetic("bf16"))))
    new = Workspace(trained.network, 8, arithmetic("bf16"))
    with Casts() as casts:
        new.forward()
    assert casts.count > 0, "or they are not seen"


@needs_kernels
def test_a_step_of_some_rows_counts_for_all() -> None:
    trained = Trained()
    trained.step(trained.workspace.of(5))
    with Casts() as casts:
        trained.workspace.forward()
    assert casts.count == 0
    trained.check()
    part = trained.workspace.of(3)
    trained.step(trained.workspace)
    trained.check(part)


def by_torch(network: Network) -> None:
    network.parameters.mul_(1.5)


def by_a_view(network: Network) -> None:
    weights(network)[0][3].add_(0.5)


def by_a_bias(network: Network) -> None:
    biases(network)[-1].zero_().add_(1.0)


def by_mpi(network: Network) -> None:
    network.parameters.numpy()[:] *= 1.5


def by_mpi_on_a_view(network: Network) -> None:
    weights(network)[1].numpy()[0] += 1.0


def by_a_copy(network: Network) -> None:
    network.parameters.copy_(torch.linspace(-1.0, 1.0, len(network.parameters)))


def by_others(network: Network) -> None:
    """Which have no part in the first workspace."""
    workspace = Workspace(network, 6, arithmetic("bf16"))
    assert isinstance(workspace.arithmetic, BFloat16Kernels)
    labels = random_minibatch(workspace, network.output_dim, torch.Generator().manual_seed(9))
    learn(workspace, Sgd(network), labels, 0.5)


def in_float32(network: Network) -> None:
    workspace = Workspace(network, 6)
    labels = random_minibatch(workspace, network.output_dim, torch.Generator().manual_seed(9))
    learn(workspace, Sgd(network, SgdOptions(momentum=0.5)), labels, 0.5)


CHANGES = [by_torch, by_a_view, by_a_bias, by_mpi, by_mpi_on_a_view, by_a_copy, by_others, in_float32]


@needs_kernels
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_parameters_is_seen(change: Callable[[Network], None]) -> None:
    trained = Trained()
    before = trained.seen_by(trained.workspace)
    change(trained.network)
    trained.network.parameters_changed()
    assert not torch.equal(trained.seen_by(trained.workspace), before)
    trained.check()
    trained.step(trained.workspace)
    change(trained.network)
    trained.network.parameters_changed()
    trained.check()


@needs_kernels
def test_more_threads_than_kernels_have_use_for_take_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads, kernels in ((1, True), (2, True), (3, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert isinstance(arithmetic("bf16"), BFloat16Kernels) == kernels


@pytest.mark.parametrize(
    ("precision", "compiled"), [RUNS[1], pytest.param(*RUNS[2], marks=needs_kernels)], ids=["bf16", "compiled"]
)
@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_a_step_shared_by_workers_is_limited_as_one_at_the_rate_of_one(
    precision: Precision, compiled: bool, rate: float
) -> None:
    """As `tests/optim/test_ng_sgd.py` has it of float32; with compiled kernels each layer is updated by itself."""
    moved = []
    for workers in (1, 16):
        network = network_of(SIGMOIDS)
        optimizer = make_optimizer(NgSgdOptions(rank_in=5, rank_out=3, max_change_per_sample=0.01), network)
        optimizer.included_lr_scale = workers
        workspace, before = Workspace(network, 32, arithmetic(precision, compiled)), network.parameters.clone()
        labels = random_minibatch(workspace, 5, torch.Generator().manual_seed(1))
        learn(workspace, optimizer, labels, workers * rate)
        moved.append((network.parameters - before) / workers)
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-3, atol=1e-4 * float(moved[0].abs().max()))
