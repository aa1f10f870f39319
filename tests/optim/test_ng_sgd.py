"""The NG-SGD step of a whole network against its parts, put together naively."""

from __future__ import annotations

import pytest
import torch
from twins import random_minibatch

from ddnn.model.network import Buffers, Layer, Network, backward, cross_entropy, forward
from ddnn.optim.natural_gradient import NaturalGradient, NaturalGradientOptions
from ddnn.optim.sgd import make_optimizer
from ddnn.recipe.schema import Optimizer

LAYERS = (Layer(7, 6, "sigmoid"), Layer(6, 5, "tanh", weight_rate=0.5), Layer(5, 4, "softmax", bias_rate=0.1))


def network(seed: int) -> tuple[Network, torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    made = Network(LAYERS)
    made.parameters.copy_(torch.randn(made.parameters.shape, generator=generator))
    return made, generator


@pytest.mark.parametrize("mode", ["exact", "each-worker", "before-rate"])
@pytest.mark.parametrize(("l2", "max_change"), [(0.0, 0.0), (1e-3, 0.075), (0.0, 1e-3)])
def test_steps_equal_the_formulas(mode: str, l2: float, max_change: float) -> None:
    made, generator = network(1)
    recipe = Optimizer.model_validate(
        {
            "name": "ng-sgd", "rank_in": 3, "rank_out": 2, "l2": l2,
            "max_change_per_sample": max_change, "max_change_mode": mode,
        }
    )  # fmt: skip
    optimizer = make_optimizer(recipe, made)
    twin_in = [NaturalGradient(layer.inputs + 1, NaturalGradientOptions(3)) for layer in LAYERS]
    twin_out = [NaturalGradient(layer.outputs, NaturalGradientOptions(2)) for layer in LAYERS]
    whole, rate, clipped = Buffers(made, 9), 0.3, 0
    for t in range(15):
        frames = 6 if t % 5 == 3 else 9  # the last minibatch of an epoch is smaller
        buffers, norms = whole.of(frames), torch.empty(4, frames)
        labels = random_minibatch(buffers, 4, generator)
        cross_entropy(forward(made, buffers), labels, buffers.derivatives[-1])
        backward(made, buffers)
        expected = []
        for i, layer in enumerate(LAYERS):
            x = torch.cat([buffers.inputs()[i], torch.ones(frames, 1)], dim=1)
            y = buffers.derivatives[i].clone()
            gamma = x.norm() * y.norm()
            twin_in[i].precondition(x, norms[0], norms[1])
            twin_out[i].precondition(y, norms[2], norms[3])
            gamma /= x.norm() * y.norm()
            kappa = 1.0
            if max_change:
                changes = (x.norm(dim=1) * y.norm(dim=1)).sum() * gamma * (1.0 if mode == "before-rate" else rate)
                kappa = min(1.0, float(max_change * frames / changes))
                clipped += kappa < 1.0
            step = gamma * kappa * y.t() @ x
            weight = made.weights[i] * (1 - rate * layer.weight_rate * l2 * frames)
            expected += [(weight - rate * layer.weight_rate * step[:, :-1]).flatten()]
            expected += [made.biases[i] - rate * layer.bias_rate * step[:, -1]]
        optimizer.step(made, buffers, rate)
        torch.testing.assert_close(made.parameters, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert clipped > 0 or max_change == 0.0


def test_max_change_holds() -> None:
    """However large the rate, no layer moves by more than max_change per frame (mode exact)."""
    made, generator = network(2)
    optimizer = make_optimizer(Optimizer(name="ng-sgd", rank_in=3, rank_out=2, max_change_per_sample=0.01), made)
    buffers = Buffers(made, 20)
    for _ in range(5):
        before = made.parameters.clone()
        labels = random_minibatch(buffers, 4, generator)
        cross_entropy(forward(made, buffers), labels, buffers.derivatives[-1])
        backward(made, buffers)
        optimizer.step(made, buffers, 1e6)
        moved = Network(LAYERS, made.parameters - before)
        for weight, bias in zip(moved.weights, moved.biases, strict=True):
            assert torch.cat([weight.flatten(), bias]).norm() <= 0.01 * 20 * 1.001


@pytest.mark.parametrize("rate", [1e-3, 10.0])
def test_a_step_shared_by_workers_is_limited_as_one_at_the_rate_of_one(rate: float) -> None:
    """At N times the rate a worker moves N times as far as one alone, whether the limit holds it or not."""
    moved = []
    for workers in (1, 16):
        made, generator = network(3)
        recipe = Optimizer(name="ng-sgd", rank_in=3, rank_out=2, max_change_per_sample=0.01)
        optimizer = make_optimizer(recipe, made)
        optimizer.shared_by = workers
        buffers, before = Buffers(made, 20), made.parameters.clone()
        labels = random_minibatch(buffers, 4, generator)
        cross_entropy(forward(made, buffers), labels, buffers.derivatives[-1])
        backward(made, buffers)
        optimizer.step(made, buffers, workers * rate)
        moved.append((made.parameters - before) / workers)
    torch.testing.assert_close(moved[1], moved[0], rtol=1e-4, atol=1e-5)
