"""SGD steps against a naive float64 twin."""

from __future__ import annotations

import pytest
import torch
from twins import cross_entropy_step, random_minibatch, twin_loss

from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace
from ddnn.optim.sgd import Sgd, SgdOptions


@pytest.mark.parametrize(
    ("momentum", "l2", "largest"),
    [(0.0, 0.0, 0.0), (0.9, 0.0, 0.0), (0.5, 1e-3, 0.0), (0.0, 1e-2, 0.0), (0.5, 1e-3, 0.3), (0.0, 0.0, 0.5)],
)
def test_steps_equal_the_twin(momentum: float, l2: float, largest: float) -> None:
    network = Network((Affine(7, 5, "sigmoid", learn_rate_coef=0.5), Affine(5, 4, "softmax", bias_learn_rate_coef=0.1)))
    generator = torch.Generator().manual_seed(1)
    network.parameters.copy_(torch.randn(network.parameters.shape, generator=generator))
    optimizer = Sgd(network, SgdOptions(momentum, l2, largest))
    workspace = Workspace(network, 6)
    twin = network.parameters.double().clone()
    correction = torch.zeros_like(twin)
    is_weight = torch.cat([torch.ones(35), torch.zeros(5), torch.ones(20), torch.zeros(4)]).double()
    rates = torch.cat([torch.full((35,), 0.5), torch.ones(5), torch.ones(20), torch.full((4,), 0.1)]).double()
    optimizer.clear_momentum()
    norms = list[float]()
    for _ in range(5):
        labels = random_minibatch(workspace, 4, generator)
        gradient = twin_loss(network, twin, workspace.x, labels)[2]
        norms.append(float(gradient.norm()) / 6)  # per frame
        if largest and norms[-1] > largest:
            gradient *= largest / norms[-1]
        correction = momentum * correction + gradient
        twin = twin - 0.02 * rates * l2 * 6 * twin * is_weight - 0.02 * rates * correction
        workspace.forward()
        cross_entropy_step(workspace, labels)
        workspace.backward()
        optimizer.step(workspace, 0.02)
        torch.testing.assert_close(network.parameters.double(), twin, rtol=1e-4, atol=1e-5)
    assert not largest or max(norms) > largest


def test_clipping_leaves_short_gradients_alone_and_hides_no_nan() -> None:
    network = Network((Affine(3, 2, "softmax"),))
    optimizer = Sgd(network, SgdOptions(max_gradient_norm=0.5))
    for gradient, expected in ((0.25, 0.25), (4.0, 2.0 / 8**0.5), (0.0, 0.0)):
        optimizer.gradient.fill_(gradient)
        optimizer.update(0.0, frames=4)
        torch.testing.assert_close(optimizer.gradient, torch.full((8,), expected))
    optimizer.gradient[0] = float("inf")
    optimizer.update(0.1, frames=4)
    assert bool(network.parameters.isnan().any())


def test_a_clipped_gradient_is_not_applied_layer_by_layer() -> None:
    """Its norm is that of all layers."""
    network = Network((Affine(3, 2, "softmax"),))
    workspace = Workspace(network, 4)
    workspace.arithmetic.updates_by_layer = True
    assert Sgd(network).updates_by_layer(workspace)
    assert not Sgd(network, SgdOptions(max_gradient_norm=0.5)).updates_by_layer(workspace)
