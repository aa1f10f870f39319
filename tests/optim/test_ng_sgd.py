"""The NG-SGD step of a whole network against its parts, put together naively."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from twins import biases, random_minibatch, weights

from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions

LAYERS = (
    Affine(7, 6, "sigmoid"),
    Affine(6, 5, "tanh", learn_rate_coef=0.5),
    Affine(5, 4, "softmax", bias_learn_rate_coef=0.1),
)


def network(seed: int) -> tuple[Network, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    made = Network(LAYERS)
    made.parameters.copy_(torch.randn(made.parameters.shape, generator=generator))
    return made, generator


@pytest.mark.parametrize("scope", ["global", "local", "unscaled"])
@pytest.mark.parametrize(("l2", "max_change"), [(0.0, 0.0), (1e-3, 0.075), (0.0, 1e-3)])
def test_steps_equal_the_formulas(scope: Any, l2: float, max_change: float) -> None:
    made, generator = network(1)
    options = NgSgdOptions(rank_in=3, rank_out=2, l2=l2, max_change=max_change, max_change_scope=scope)
    optimizer = NgSgd(made, options)
    twin_in = [NaturalGradient(layer.in_features + 1, NaturalGradientOptions(3)) for layer in LAYERS]
    twin_out = [NaturalGradient(layer.out_features, NaturalGradientOptions(2)) for layer in LAYERS]
    whole, rate, clipped = Workspace(made, 9), 0.3, 0
    for t in range(15):
        frames = 6 if t % 5 == 3 else 9  # the last minibatch of an epoch is smaller
        workspace = whole.of(frames)
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        workspace.cross_entropy(labels)
        workspace.backward()
        expected = []
        for i, layer in enumerate(LAYERS):
            x = torch.cat([workspace.inputs[i], torch.ones(frames, 1)], dim=1)
            y = workspace.grad_outputs[i].clone()
            gamma = x.norm() * y.norm()
            twin_in[i].apply(x, x.norm(dim=1))
            twin_out[i].apply(y, y.norm(dim=1))
            gamma /= x.norm() * y.norm()
            kappa = 1.0
            if max_change:
                changes = (x.norm(dim=1) * y.norm(dim=1)).sum() * gamma * (1.0 if scope == "unscaled" else rate)
                kappa = min(1.0, float(max_change * frames / changes))
                clipped += kappa < 1.0
            step = gamma * kappa * y.t() @ x
            weight = weights(made)[i] * (1 - rate * layer.learn_rate_coef * l2 * frames)
            expected += [(weight - rate * layer.learn_rate_coef * step[:, :-1]).flatten()]
            expected += [biases(made)[i] - rate * layer.bias_learn_rate_coef * step[:, -1]]
        optimizer.step(workspace, rate)
        torch.testing.assert_close(made.parameters, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert clipped > 0 or max_change == 0.0


def test_max_change_holds() -> None:
    """However large the rate, no layer moves by more than max_change per frame (scope global)."""
    made, generator = network(2)
    optimizer = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, max_change=0.01))
    workspace = Workspace(made, 20)
    for _ in range(5):
        before = made.parameters.clone()
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        workspace.cross_entropy(labels)
        workspace.backward()
        optimizer.step(workspace, 1e6)
        moved = Network(LAYERS, made.parameters - before)
        for weight, bias in zip(weights(moved), biases(moved), strict=True):
            assert torch.cat([weight.flatten(), bias]).norm() <= 0.01 * 20 * 1.001


@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_a_step_shared_by_workers_is_limited_as_one_at_the_rate_of_one(rate: float) -> None:
    """At N times the rate a worker moves N times as far as one alone, whether the limit holds it or not."""
    moved = []
    for workers in (1, 16):
        made, generator = network(3)
        optimizer = NgSgd(made, NgSgdOptions(rank_in=3, rank_out=2, max_change=0.01))
        optimizer.included_lr_scale = workers
        workspace, before = Workspace(made, 20), made.parameters.clone()
        labels = random_minibatch(workspace, 4, generator)
        workspace.forward()
        workspace.cross_entropy(labels)
        workspace.backward()
        optimizer.step(workspace, workers * rate)
        moved.append((made.parameters - before) / workers)
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-5)
