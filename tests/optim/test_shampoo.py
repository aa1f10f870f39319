"""Shampoo against its formulas in float64."""

from __future__ import annotations

import pytest
import torch
from optim.test_adam import LAYERS, LR, Training
from optim.test_muon import gradients, weights
from torch import Tensor

from ddnn.optim import shampoo as module
from ddnn.optim.adam import AdamOptions
from ddnn.optim.shampoo import ShampooOptions, inverse_root

RIDGE = 1e-3  # with the usual one, sums of six frames in float32 would differ


def power(matrix: Tensor, exponent: float) -> Tensor:
    """Of a symmetric matrix, with `RIDGE`."""
    ridge = RIDGE * torch.linalg.matrix_norm(matrix, 2) * torch.eye(len(matrix)).double()
    values, vectors = torch.linalg.eig(matrix + ridge)
    return (vectors * values**exponent @ torch.linalg.inv(vectors)).real


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("update_period", [1, 3])
@pytest.mark.parametrize("max_dimension", [1024, 5])  # the layers are 7-5-6-4
def test_steps_of_weights_are_those_of_the_formulas(
    momentum: float, update_period: int, max_dimension: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RIDGE", RIDGE)
    beta2 = 0.9
    options = ShampooOptions(momentum, beta2=beta2, update_period=update_period, max_dimension=max_dimension)
    shampoo, adam = Training(options), Training(AdamOptions(momentum, beta2=beta2))
    means = [torch.zeros_like(weight) for weight in weights(shampoo)]
    scatters = [[torch.zeros(dim, dim).double() for dim in weight.shape] for weight in means]
    roots = [[torch.eye(dim).double() for dim in weight.shape] for weight in means]
    for step in range(7):
        labels, before = shampoo.minibatch(), weights(shampoo)
        adam.network.load_parameters(shampoo.network.parameters)
        adam.step(adam.minibatch())  # the same one
        for i, gradient in enumerate(gradients(shampoo, labels)):
            means[i] = momentum * means[i] + (1 - momentum) * gradient
            used = [side for side, dim in enumerate(gradient.shape) if dim <= max_dimension]
            for side in used:
                product = gradient.T @ gradient if side else gradient @ gradient.T
                scatters[i][side] = beta2 * scatters[i][side] + (1 - beta2) * product
                if step % update_period == 0:
                    roots[i][side] = power(scatters[i][side], -0.5 / len(used))
        shampoo.step(labels)
        for i, (now, by_adam) in enumerate(zip(weights(shampoo), weights(adam), strict=True)):
            direction = roots[i][0] @ means[i] @ roots[i][1]
            length = torch.linalg.matrix_norm(by_adam - before[i])
            change = -length * direction / torch.linalg.matrix_norm(direction)
            torch.testing.assert_close(now - before[i], change, rtol=1e-3, atol=1e-3 * LR)
            assert torch.equal(shampoo.network.views[i]["bias"], adam.network.views[i]["bias"])


def test_a_matrix_of_two_long_sides_has_the_step_of_adam() -> None:
    shampoo, adam = Training(ShampooOptions(max_dimension=4)), Training(AdamOptions())  # the layers are 7-5-6-4
    for made in (shampoo, adam):
        made.step(made.minibatch())
    same = [torch.equal(now, by_adam) for now, by_adam in zip(weights(shampoo), weights(adam), strict=True)]
    assert same == [True, True, False]


@pytest.mark.parametrize("p", [2, 4])
def test_inverse_root(p: int) -> None:
    rows = torch.randn(6, 20, generator=torch.Generator().manual_seed(1))
    matrix = rows @ rows.T
    root = inverse_root(matrix, p)
    torch.testing.assert_close(
        torch.linalg.matrix_power(root, p) @ matrix.double(), torch.eye(6).double(), rtol=0.0, atol=1e-3
    )
    assert inverse_root(torch.zeros(3, 3), p).isfinite().all()
    matrix[0, 1] = torch.inf
    assert inverse_root(matrix, p).isnan().all()


def test_a_state_continues_to_the_same_bits() -> None:
    """Between two computations of the roots."""
    options = ShampooOptions(update_period=4)
    first, second = Training(options), Training(options)
    for _ in range(6):
        first.step(first.minibatch())
    second.network.load_parameters(first.network.parameters)
    second.optimizer.load_state_dict({key: value.clone() for key, value in first.optimizer.state_dict().items()})
    second.generator.set_state(first.generator.get_state())
    for _ in range(5):
        assert torch.equal(first.step(first.minibatch()), second.step(second.minibatch()))


def test_a_minibatch_that_is_not_finite_does_not_stay() -> None:
    made = Training(ShampooOptions(update_period=1))
    made.step(made.minibatch())
    made.optimizer.gradient.fill_(torch.nan)
    made.optimizer.update(LR, frames=6)
    made.optimizer.clear_momentum()
    made.network.load_parameters(Training(ShampooOptions()).network.parameters)
    assert made.step(made.minibatch()).isfinite().all()


def test_memory_is_that_of_its_tensors() -> None:
    options = ShampooOptions(max_dimension=6)
    made = Training(options)
    state = {name: value for name, value in made.optimizer.state_dict().items() if name != "momentum_buffer"}
    own = sum(value.numel() * 4 for name, value in state.items() if name != "steps") + 4 * len(made.optimizer.gradient)
    assert own <= options.num_bytes(LAYERS, 6) <= own + 32 * 6**2
