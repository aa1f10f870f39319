"""Training with the compiled kernels is training without them; and the bf16 copy is always of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from twins import random_minibatch

from ddnn.kernels import Kernels, load_kernels
from ddnn.model.initialise import initialise_randomly
from ddnn.model.loss import cross_entropy_in_place
from ddnn.model.network import Buffers, Layer, Network, Precision, backward, forward, hidden_stack
from ddnn.optim.sgd import Sgd, make_optimizer
from ddnn.parallel.carriers import _memory
from ddnn.recipe.schema import Optimizer

needs_kernels = pytest.mark.skipif(load_kernels() is None, reason="no compiled kernels that this processor can run")

SIGMOIDS = hidden_stack(20, 2, 33, 5, "sigmoid")
AN4 = hidden_stack(440, 4, 512, 616, "sigmoid")
OPTIMIZERS = {
    "sgd": Optimizer(),
    "l2": Optimizer(l2=1e-3),
    "momentum": Optimizer(momentum=0.5, l2=1e-3),
    "ng-sgd": Optimizer(name="ng-sgd", rank_in=5, rank_out=3),
    "ng-sgd held back": Optimizer(name="ng-sgd", rank_in=5, rank_out=3, max_change_per_sample=0.002, l2=1e-3),
    "ng-sgd momentum": Optimizer(name="ng-sgd", rank_in=5, rank_out=3, max_change_per_sample=0.01, momentum=0.5),
}
RATED = (
    Layer(20, 33, "sigmoid", weight_rate=0.5, bias_rate=2.0),
    Layer(33, 17, "tanh", bias_rate=0.0),
    Layer(17, 5, "softmax", weight_rate=1.5, bias_rate=0.1),
)


RUNS: tuple[tuple[Precision, bool], ...] = (("float32", False), ("bf16", False), ("bf16", True))
"""Precision, and whether compiled."""


def network_of(layers: tuple[Layer, ...], seed: int = 1) -> Network:
    made = Network(layers)
    initialise_randomly(made, seed)
    return made


def learn(network: Network, buffers: Buffers, optimizer: Sgd, labels: Tensor, rate: float) -> Tensor:
    """A step on what is in `buffers.x`, as the training loop makes it; returns its loss."""
    forward(network, buffers)
    loss, _ = cross_entropy_in_place(buffers, labels)
    backward(network, buffers)
    optimizer.step(network, buffers, rate)
    return loss


def train(
    layers: tuple[Layer, ...],
    recipe: Optimizer,
    precision: Precision,
    compiled: bool,
    minibatches: int = 200,
    frames: int = 32,
    rate: float = 0.01,
) -> tuple[Tensor, Network]:
    """Losses per frame of each minibatch, and what was trained: on frames that tell their label, the largest of the
    first dims. Every fifth minibatch is smaller."""
    network = network_of(layers)
    optimizer = make_optimizer(recipe, network)
    whole, generator = Buffers(network, frames, precision, compiled=compiled), torch.Generator().manual_seed(1)
    data = torch.randn(40 * frames, network.input_dim, generator=generator)
    labels = data[:, : network.output_dim].argmax(1)
    found = []
    for t in range(minibatches):
        n = frames - 3 if t % 5 == 4 else frames
        rows = torch.randint(0, len(data), (n,), generator=generator)
        buffers = whole.of(n)
        buffers.x.copy_(data[rows])
        found.append(learn(network, buffers, optimizer, labels[rows], rate) / n)
    return torch.stack(found), network


def changes(layers: tuple[Layer, ...], network: Network) -> list[Tensor]:
    """By how much each weight and bias has changed in the training."""
    moved = Network(layers, network.parameters - network_of(layers).parameters)
    return moved.weights + moved.biases


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
    recipe, calls = OPTIMIZERS[optimizer], Calls(monkeypatch)
    plain = train(SIGMOIDS, recipe, "bf16", False)[0].view(-1, 20).mean(1)
    assert not any(calls.of.values())
    found = train(SIGMOIDS, recipe, "bf16", True)[0].view(-1, 20).mean(1)
    assert calls.of["sigmoid_"] == calls.of["sigmoid_backward_"] == 400 and calls.of["cross_entropy"] == 200
    # Momentum wants the gradient of all layers; else a layer is taken up as one, or weight and bias by themselves.
    assert calls.of["descend"] == 0 if recipe.momentum else calls.of["descend"] >= 600
    assert calls.of["sum_rows"] > 0
    in_float32 = train(SIGMOIDS, recipe, "float32", False)[0].view(-1, 20).mean(1)
    assert in_float32[-1] < 0.7 * in_float32[0], "it has to learn, or nothing is compared"
    torch.testing.assert_close(found, plain, rtol=0.003, atol=0.0)
    torch.testing.assert_close(found, in_float32, rtol=0.01, atol=0.002)


@needs_kernels
@pytest.mark.parametrize("hidden", ["tanh", "relu"])
def test_other_activations_train_with_them_too(hidden: str) -> None:
    layers = hidden_stack(20, 2, 33, 5, hidden)
    plain, found = (train(layers, Optimizer(), "bf16", c, rate=0.002)[0].view(-1, 20).mean(1) for c in (False, True))
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
    recipe = Optimizer(name=name, rank_in=5, rank_out=3, max_change_mode="before-rate")  # that limits any rate alike
    moved = []
    for rate, average in ((0.02, None), (0.01, lambda gradient: gradient.mul_(2.0))):
        network = network_of(RATED)
        buffers, step = Buffers(network, 32, "bf16"), make_optimizer(recipe, network).step
        labels = random_minibatch(buffers, 5, torch.Generator().manual_seed(1))
        forward(network, buffers)
        cross_entropy_in_place(buffers, labels)
        backward(network, buffers)
        step(network, buffers, rate, average)
        moved.append(torch.cat([change.flatten() for change in changes(RATED, network)]))
    assert moved[0].any()
    torch.testing.assert_close(moved[1], moved[0], rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["momentum", "ng-sgd"])
def test_float32_knows_no_kernels(optimizer: str) -> None:
    recipe = OPTIMIZERS[optimizer]
    (plain_losses, plain), (losses, found) = (train(SIGMOIDS, recipe, "float32", c, 20) for c in (False, True))
    assert torch.equal(losses, plain_losses)
    assert torch.equal(found.parameters, plain.parameters)
    assert Buffers(plain, 4, "float32", compiled=True).kernels is None


def test_padding_or_a_wish_keeps_the_kernels_away() -> None:
    network = network_of(SIGMOIDS)
    for buffers in (Buffers(network, 4, "bf16", multiple=64), Buffers(network, 4, "bf16", compiled=False)):
        assert buffers.kernels is None and not buffers.scratch
        assert buffers.x.dtype == torch.float32


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
        self.buffers = Buffers(self.network, 8, "bf16")
        self.optimizer = Sgd(self.network)
        self.generator = torch.Generator().manual_seed(seed)
        self.step(self.buffers)
        self.input = torch.randn(self.buffers.x.shape, generator=self.generator)

    def step(self, buffers: Buffers) -> None:
        labels = random_minibatch(buffers, self.network.output_dim, self.generator)
        learn(self.network, buffers, self.optimizer, labels, 0.1)

    def seen_by(self, buffers: Buffers) -> Tensor:
        """The network's outputs."""
        buffers.x.copy_(self.input[: len(buffers.x)])
        return forward(self.network, buffers).clone()

    def check(self, buffers: Buffers | None = None) -> None:
        """The buffers must have the outputs that new ones have."""
        buffers = self.buffers if buffers is None else buffers
        assert torch.equal(self.seen_by(buffers), self.seen_by(Buffers(self.network, len(buffers.x), "bf16")))


@needs_kernels
def test_after_a_step_nothing_is_cast() -> None:
    trained = Trained()
    trained.buffers.x.copy_(trained.input)
    with Casts() as casts:
        found = forward(trained.network, trained.buffers).clone()
    assert casts.count == 0
    assert torch.equal(found, trained.seen_by(Buffers(trained.network, 8, "bf16")))
    new = Buffers(trained.network, 8, "bf16")
    with Casts() as casts:
        forward(trained.network, new)
    assert casts.count > 0, "or they are not seen"


@needs_kernels
def test_a_step_of_some_rows_counts_for_all() -> None:
    trained = Trained()
    trained.step(trained.buffers.of(5))
    with Casts() as casts:
        forward(trained.network, trained.buffers)
    assert casts.count == 0
    trained.check()
    part = trained.buffers.of(3)
    trained.step(trained.buffers)
    trained.check(part)


def by_torch(network: Network) -> None:
    network.parameters.mul_(1.5)


def by_a_view(network: Network) -> None:
    network.weights[0][3].add_(0.5)


def by_a_bias(network: Network) -> None:
    network.biases[-1].zero_().add_(1.0)


def by_mpi(network: Network) -> None:
    _memory(network.parameters)[:] *= 1.5


def by_mpi_on_a_view(network: Network) -> None:
    _memory(network.weights[1])[0] += 1.0


def by_a_copy(network: Network) -> None:
    network.parameters.copy_(torch.linspace(-1.0, 1.0, len(network.parameters)))


def by_others(network: Network) -> None:
    """Which have no part in the first buffers."""
    buffers = Buffers(network, 6, "bf16")
    assert buffers.kernels is not None
    labels = random_minibatch(buffers, network.output_dim, torch.Generator().manual_seed(9))
    learn(network, buffers, Sgd(network), labels, 0.5)


def in_float32(network: Network) -> None:
    buffers = Buffers(network, 6)
    labels = random_minibatch(buffers, network.output_dim, torch.Generator().manual_seed(9))
    learn(network, buffers, Sgd(network, momentum=0.5), labels, 0.5)


CHANGES = [by_torch, by_a_view, by_a_bias, by_mpi, by_mpi_on_a_view, by_a_copy, by_others, in_float32]


@needs_kernels
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_parameters_is_seen(change: Callable[[Network], None]) -> None:
    trained = Trained()
    before = trained.seen_by(trained.buffers)
    change(trained.network)
    assert not torch.equal(trained.seen_by(trained.buffers), before)
    trained.check()
    trained.step(trained.buffers)
    change(trained.network)
    trained.check()


@needs_kernels
def test_networks_take_turns_in_the_same_memory() -> None:
    one, other = Trained(seed=1), Trained(seed=2)
    part = one.buffers.of(5)
    for first, second in ((one.buffers, one.buffers), (one.buffers, part), (part, one.buffers)):
        one.step(first)
        other.check(second)
        one.check(first)


@needs_kernels
def test_more_threads_than_kernels_have_use_for_take_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Network(hidden_stack(4, 1, 8, 5, "sigmoid"))
    for threads, kernels in ((1, True), (2, True), (3, False)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert (Buffers(made, 2, "bf16").kernels is not None) == kernels
