"""Frozen layers keep their bits, take no part in a step, and what is above them is trained as if it were alone."""

from __future__ import annotations

import pytest
import torch
from twins import cross_entropy_step

from ddnn.nn.arithmetic import make_arithmetic
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.optim import shampoo
from ddnn.optim.muon import MuonOptions
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.optim.shampoo import ShampooOptions

LAYERS = (Affine(7, 6), Affine(6, 5, "tanh"), Affine(5, 5), Affine(5, 4, "softmax", bias_learn_rate_coef=0.1))
OPTIONS = {
    "sgd": SgdOptions(),
    "sgd with momentum": SgdOptions(0.9, 1e-2),
    "muon": MuonOptions(),
    "shampoo": ShampooOptions(),
    "ng-sgd": NgSgdOptions(0.5, 1e-2, rank_in=3, rank_out=3, max_change_per_sample=0.01),
}
FRAMES = 16


def network(frozen: tuple[int, ...] = ()) -> Network:
    made = Network(LAYERS)
    initialize(made, 3)
    return made.with_frozen(frozen)


def train(
    made: Network, options: SgdOptions, inputs: torch.Tensor, arithmetic: str = "float32", *, kernels: bool = True
) -> tuple[Workspace, Sgd]:
    """Ten steps on the same minibatches; the workspace and optimizer."""
    optimizer = make_optimizer(options, made)
    workspace = Workspace(made, FRAMES, make_arithmetic(arithmetic, torch.device("cpu"), use_kernels=kernels))  # type: ignore[arg-type]
    labels = torch.randint(0, 4, (len(inputs),), generator=torch.Generator().manual_seed(5))
    for x, y in zip(inputs.split(FRAMES), labels.split(FRAMES), strict=True):
        workspace.x.copy_(x)
        workspace.forward()
        cross_entropy_step(workspace, y)
        workspace.backward()
        optimizer.step(workspace, 0.1)
    return workspace, optimizer


INPUTS = torch.randn(10 * FRAMES, 7, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("arithmetic", "kernels"), [("float32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1), (3,), (0, 2, 3)])
def test_frozen_layers_keep_their_bits_and_the_others_do_not(
    name: str, arithmetic: str, kernels: bool, frozen: tuple[int, ...]
) -> None:
    made, before = network(frozen), network()
    _, optimizer = train(made, OPTIONS[name], INPUTS, arithmetic, kernels=kernels)
    for i, (now, then) in enumerate(zip(made.views, before.views, strict=True)):
        for key in now:
            assert torch.equal(now[key], then[key]) == (i in frozen), (i, key)
    states = [optimizer.momentum_buffer, *optimizer.state_dict().values()]
    assert all(bool(part.isfinite().all()) for part in states)
    for i in frozen:
        assert not any(part.any() for part in made.split(optimizer.momentum_buffer)[i].values())


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("frozen", [1, 2])
def test_what_is_above_frozen_layers_is_trained_as_if_it_were_the_network(
    name: str, frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounding: NG-SGD has no statistics of frozen layers, nor does its largest change count them."""
    monkeypatch.setattr(shampoo, "RIDGE", 1.0)  # a smaller one makes rounding larger, where a matrix is singular
    made = network(tuple(range(frozen)))
    below = Workspace(
        Network(LAYERS[:frozen], made.parameters[: sum(one.num_parameters for one in LAYERS[:frozen])]), 160
    )
    below.x.copy_(INPUTS)
    upper = Network(LAYERS[frozen:], made.parameters[below.network.num_parameters :].clone())
    workspace, optimizer = train(made, OPTIONS[name], INPUTS)
    _, alone = train(upper, OPTIONS[name], below.forward().clone())
    torch.testing.assert_close(made.parameters[below.network.num_parameters :], upper.parameters, rtol=1e-5, atol=1e-6)
    if isinstance(optimizer, NgSgd):
        assert list(optimizer.preconditioners_of) == list(range(frozen, 4))
        assert len(optimizer.preconditioners) == len(alone.preconditioners) == 2 * (4 - frozen)
    assert optimizer.state_dict().keys() == alone.state_dict().keys()
    for i, grad in enumerate(workspace.grad_outputs):
        assert bool(grad.any()) == (i >= frozen), f"the backward pass ends above the frozen layers, not at layer {i}"


def test_what_sets_parameters_leaves_frozen_layers_as_they_are() -> None:
    """Such as the mean over three workers, whose rounding changes bits."""
    made = network((0, 2))
    before = [{name: value.clone() for name, value in views.items()} for views in made.views]
    made.parameters.mul_(3.0).div_(3.0).add_(1e-8)
    made.parameters_changed()
    assert all(torch.equal(made.views[i][name], before[i][name]) for i in (0, 2) for name in before[i])
    assert made.to(torch.device("cpu")).frozen == made.frozen
