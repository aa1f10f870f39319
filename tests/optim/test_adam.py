"""Adam against PyTorch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from twins import cross_entropy_step, random_minibatch, twin_loss

from ddnn.nn.arithmetic import make_arithmetic
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace
from ddnn.optim.adam import Adam, AdamOptions
from ddnn.optim.ng_sgd import make_optimizer
from ddnn.util.errors import DataError

LAYERS = (Affine(7, 5, "sigmoid", learn_rate_coef=0.5), Affine(5, 6, "tanh"), Affine(6, 4, "softmax"))
OPTIONS = {
    "adam": AdamOptions(),
    "adam, other settings": AdamOptions(0.5, beta2=0.9, epsilon=0.3),
    "adam without momentum": AdamOptions(0.0),
}
LR = 0.02


class Training:
    """Steps on random minibatches."""

    def __init__(self, options: AdamOptions, precision: str = "float32") -> None:
        self.generator = torch.Generator().manual_seed(1)
        parameters = torch.randn(Network(LAYERS).num_parameters, generator=self.generator)
        self.network = Network(LAYERS, parameters)
        self.optimizer = make_optimizer(options, self.network)
        assert isinstance(self.optimizer, Adam)
        arithmetic = make_arithmetic(precision, torch.device("cpu"))  # type: ignore[arg-type]
        self.workspace = Workspace(self.network, 6, arithmetic)

    def minibatch(self) -> Tensor:
        """Its labels."""
        return random_minibatch(self.workspace, 4, self.generator)

    def step(self, labels: Tensor) -> Tensor:
        self.workspace.forward()
        cross_entropy_step(self.workspace, labels)
        self.workspace.backward()
        self.optimizer.step(self.workspace, LR)
        return self.network.parameters


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_pytorch(name: str) -> None:
    """In float64; the first layer's weight has half the learning rate."""
    options, made = OPTIONS[name], Training(OPTIONS[name])
    twin = made.network.parameters.double().requires_grad_()
    rates = torch.ones(len(twin)).double()
    rates[:35] = 0.5
    reference = torch.optim.Adam([twin], LR, (options.momentum, options.beta2), options.epsilon)
    for _ in range(12):
        labels, before = made.minibatch(), twin.detach().clone()
        twin.grad = twin_loss(made.network, twin.detach(), made.workspace.x, labels)[2]
        reference.step()
        with torch.no_grad():
            twin.copy_(before + rates * (twin - before))
        found = made.step(labels)
        torch.testing.assert_close(found.double(), twin.detach(), rtol=1e-4, atol=1e-4)
    assert (found - Training(options).network.parameters).abs().max() > LR


def test_weight_decay_is_that_of_sgd() -> None:
    decayed, plain = Training(AdamOptions(l2=0.1)), Training(AdamOptions())
    before = plain.network.parameters.clone()
    labels = [made.minibatch() for made in (decayed, plain)]
    difference = decayed.step(labels[0]) - plain.step(labels[1])
    expected = torch.zeros_like(before)
    for views, old, layer in zip(decayed.network.split(expected), plain.network.split(before), LAYERS, strict=True):
        views["weight"].copy_(-LR * layer.learn_rate_coef * 0.1 * 6 * old["weight"])
    torch.testing.assert_close(difference, expected)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_does_not_depend_on_the_scale_of_the_gradient(name: str) -> None:
    """But for epsilon, which is 0.3 in one of these."""
    found = []
    for scale in (1.0, 100.0):
        made = Training(OPTIONS[name])
        for seed in range(3):
            noise = torch.randn(len(made.optimizer.gradient), generator=torch.Generator().manual_seed(seed))
            made.optimizer.gradient.copy_(scale * noise)
            made.optimizer.update(LR, frames=6)
        found.append(made.network.parameters)
    assert torch.allclose(*found, atol=1e-5) == (OPTIONS[name].epsilon < 0.1)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_state_continues_to_the_same_bits(name: str) -> None:
    first, second = Training(OPTIONS[name]), Training(OPTIONS[name])
    for _ in range(5):
        first.step(first.minibatch())
    state = {key: value.clone() for key, value in first.optimizer.state_dict().items()}
    second.network.load_parameters(first.network.parameters)
    second.optimizer.load_state_dict(state)
    second.generator.set_state(first.generator.get_state())
    for _ in range(5):
        assert torch.equal(first.step(first.minibatch()), second.step(second.minibatch()))
    for key in state:
        with pytest.raises(DataError, match=key):
            second.optimizer.load_state_dict(state | {key: torch.zeros(3)})
    with pytest.raises(DataError, match="preconditioner"):
        second.optimizer.load_state_dict(state | {"preconditioner.0.w": torch.zeros(3)})


def test_where_momentum_is_cleared_its_mean_begins_again() -> None:
    """And that of squares does not: the step is g / sqrt(v) of unbiased means."""
    made = Training(AdamOptions(epsilon=1e-20))
    optimizer, gradients = made.optimizer, [torch.full((104,), float(value)) for value in (3, 5, -4)]
    assert isinstance(optimizer, Adam)
    for gradient in gradients:
        if gradient is gradients[-1]:
            optimizer.clear_momentum()
        optimizer.gradient.copy_(gradient)
        direction = optimizer.find_direction().clone()
    mean = (0.999**2 * 9 + 0.999 * 25 + 16) * 0.001 / (1 - 0.999**3)
    torch.testing.assert_close(direction[35:], torch.full((69,), -4 / mean**0.5))


@pytest.mark.parametrize("name", OPTIONS)
def test_after_a_minibatch_that_is_not_finite_it_begins_again(name: str) -> None:
    made, fresh = Training(OPTIONS[name]), Training(OPTIONS[name])
    parameters = made.network.parameters.clone()
    made.step(made.minibatch())
    made.optimizer.gradient.fill_(float("nan"))
    made.optimizer.update(LR, frames=6)
    assert bool(made.network.parameters.isnan().all()), "nothing hides it"
    made.network.load_parameters(parameters)
    made.optimizer.clear_momentum()
    made.generator.set_state(fresh.generator.get_state())
    assert torch.equal(made.step(made.minibatch()), fresh.step(fresh.minibatch()))


@pytest.mark.parametrize("name", OPTIONS)
def test_in_bf16_a_step_is_about_that_of_float32(name: str) -> None:
    found = []
    for precision in ("float32", "bf16"):
        made = Training(OPTIONS[name], precision)
        before = made.network.parameters.clone()
        for _ in range(5):
            made.step(made.minibatch())
        found.append(made.network.parameters - before)
    assert 0 < torch.linalg.vector_norm(found[1] - found[0]) < 0.2 * torch.linalg.vector_norm(found[0])


def test_it_is_not_applied_layer_by_layer() -> None:
    """As SGD without momentum may be."""
    made = Training(OPTIONS["adam without momentum"])
    made.workspace.arithmetic.updates_by_layer = True
    assert not made.optimizer.updates_by_layer(made.workspace)
