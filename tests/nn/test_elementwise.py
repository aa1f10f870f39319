"""Layers without a product against what section 2 to 4 of the specification say, and dropout."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from torch import Tensor
from twins import kernels_for

from ddnn.averaging.averager import Averager
from ddnn.data.batches import Batch
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.nn.arithmetic import Precision, make_arithmetic
from ddnn.nn.convolution import Convolution
from ddnn.nn.elementwise import Activation, Copy, Dropout, LengthNorm, ParametricRelu, Scale, Shift
from ddnn.nn.layer import Layer, limit_row_norms
from ddnn.nn.layers import Affine, Parallel, check_layers, layer_from_config
from ddnn.nn.network import Network, Workspace, initialize, noise_generator
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.run_dir import load_run
from ddnn.training import options
from ddnn.training.job import run_training
from ddnn.training.model_evaluation import evaluate_run
from ddnn.training.step import EagerStep
from ddnn.util.errors import DataError

CPU = torch.device("cpu")


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def passed(layers: tuple[Layer, ...], x: Tensor, d: Tensor, generator: torch.Generator | None = None) -> Workspace:
    """A workspace after both passes through these layers, the first of which has parameters, from x and d."""
    network = Network(layers)
    initialize(network, 1)
    network.load_parameters(network.parameters + 0.3 * noise(network.num_parameters, seed=5))
    workspace = Workspace(network, len(x), generator=generator)
    workspace.x.copy_(x)
    workspace.forward()
    workspace.grad_outputs[-1].copy_(d)
    workspace.backward()
    return workspace


BELOW = Affine(6, 5, "linear")


def test_length_norm_leaves_the_norm_out_of_the_derivative() -> None:
    x, d = noise(7, 6), noise(7, 5, seed=2)
    workspace = passed((BELOW, LengthNorm(5)), x, d)
    given = workspace.activations[0].double()
    norms = given.square().sum(1, keepdim=True).sqrt()
    torch.testing.assert_close(workspace.activations[1], (given / norms).float())
    torch.testing.assert_close(workspace.grad_outputs[0], (d.double() / norms).float())


def test_nothing_passes_down_through_copy() -> None:
    columns = (4, 0, 0, 2)
    workspace = passed((BELOW, Copy(5, columns)), noise(7, 6), noise(7, 4, seed=2))
    assert torch.equal(workspace.activations[1], workspace.activations[0][:, list(columns)])
    assert not workspace.grad_outputs[0].any()
    gradient = workspace.gradient(torch.ones(workspace.network.num_parameters))
    assert not gradient.any()


def test_slopes_above_and_below_zero() -> None:
    layer = ParametricRelu(5, 0.5, 2.0, alpha=1.5, beta=0.25)
    network = Network((BELOW, layer))
    initialize(network, 1)
    assert network.views[1]["alpha"].eq(1.5).all() and network.views[1]["beta"].eq(0.25).all()
    x, d = noise(7, 6), noise(7, 5, seed=2)
    workspace = passed((BELOW, layer), x, d)
    given, (alpha, beta) = workspace.activations[0], workspace.network.views[1].values()
    torch.testing.assert_close(workspace.activations[1], given * torch.where(given >= 0, alpha, beta))
    torch.testing.assert_close(workspace.grad_outputs[0], d * torch.where(given >= 0, alpha, beta))
    gradient = workspace.network.split(workspace.gradient(torch.empty(workspace.network.num_parameters)))[1]
    torch.testing.assert_close(gradient["alpha"], (d * given.clamp(min=0)).sum(0))
    torch.testing.assert_close(gradient["beta"], (d * given.clamp(max=0)).sum(0))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_slopes_without_a_rate_stay_as_they_are(momentum: float) -> None:
    network = Network((BELOW, ParametricRelu(5, alpha=1.1, beta=0.3), Affine(5, 3, "softmax")))
    initialize(network, 1)
    before = {name: value.clone() for name, value in network.views[1].items()}
    step = EagerStep(Workspace(network, 7), Sgd(network, SgdOptions(momentum, 1e-3)))
    for seed in range(5):
        step(Batch(noise(7, 6, seed=seed), torch.arange(7) % 3), 0.1)
    assert all(torch.equal(before[name], value) for name, value in network.views[1].items())


def test_scale_and_shift_have_no_momentum_and_their_own_rates() -> None:
    """Two steps of SGD with momentum and weight decay, against the formulas in float64."""
    layers = (BELOW, Scale(5, 0.5), Shift(5, 2.0), Affine(5, 3, "softmax"))
    network = Network(layers)
    initialize(network, 1)
    network.load_parameters(network.parameters + 0.3 * noise(network.num_parameters, seed=5))
    expected = {"scale": network.views[1]["scale"].double(), "shift": network.views[2]["shift"].double()}
    workspace, optimizer = Workspace(network, 7), Sgd(network, SgdOptions(momentum=0.9, l2=1e-2))
    for seed in (1, 2):
        EagerStep(workspace, optimizer)(Batch(noise(7, 6, seed=seed), torch.arange(7) % 3), 0.1)
        d, x = workspace.grad_outputs, workspace.inputs
        expected["scale"] = expected["scale"] - 0.1 * 0.5 * (d[1] * x[1]).double().sum(0)
        expected["shift"] = expected["shift"] - 0.1 * 2.0 * d[2].double().sum(0)
    torch.testing.assert_close(network.views[1]["scale"].double(), expected["scale"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(network.views[2]["shift"].double(), expected["shift"], rtol=1e-5, atol=1e-6)


def test_natural_gradient_limits_the_step_of_scale_shift_and_slopes() -> None:
    """kappa = min(1, max_change N / (lr * sum of the frames' norms)), by the terms of each kind."""
    layers = (BELOW, Scale(5), Shift(5), ParametricRelu(5, 1.0, 1.0), Affine(5, 3, "softmax"))
    network = Network(layers)
    initialize(network, 1)
    before = [{name: value.clone() for name, value in views.items()} for views in network.views]
    optimizer = NgSgd(network, NgSgdOptions(rank_in=2, rank_out=2, max_change_per_sample=0.01))
    workspace = Workspace(network, 7)
    EagerStep(workspace, optimizer)(Batch(noise(7, 6), torch.arange(7) % 3), 4.0)
    d, x = workspace.grad_outputs, workspace.inputs
    slopes = [d[3] * x[3].clamp(min=0), d[3] * x[3].clamp(max=0)]
    terms = {1: {"scale": d[1] * x[1]}, 2: {"shift": d[2]}, 3: dict(zip(("alpha", "beta"), slopes, strict=True))}
    for i, parts in terms.items():
        size = torch.stack([part.norm(dim=1) for part in parts.values()]).norm(dim=0).sum()
        kappa = min(1.0, 0.01 * 7 / (4.0 * float(size)))
        assert kappa < 1.0, "the limit has to be reached, or nothing is tested"
        for name, part in parts.items():
            torch.testing.assert_close(network.views[i][name], before[i][name] - 4.0 * kappa * part.sum(0))


def test_max_norm_scales_rows_down_after_the_update_and_leaves_the_bias() -> None:
    network = Network((Affine(6, 5, "sigmoid", max_norm=1.0), Affine(5, 3, "softmax")))
    initialize(network, 1)
    free = Network((Affine(6, 5, "sigmoid"), Affine(5, 3, "softmax")), network.parameters.clone())
    for one in (network, free):
        one.views[0]["weight"].mul_(torch.tensor([0.1, 1.0, 2.0, 3.0, 4.0])[:, None])
        EagerStep(Workspace(one, 7), Sgd(one))(Batch(noise(7, 6), torch.arange(7) % 3), 0.1)
    norms = free.views[0]["weight"].norm(dim=1, keepdim=True)
    assert (norms < 1.0).any() and (norms > 1.0).any()
    torch.testing.assert_close(network.views[0]["weight"], free.views[0]["weight"] / norms.clamp(min=1.0))
    assert torch.equal(network.views[0]["weight"][0], free.views[0]["weight"][0])  # within the limit: the same bits
    assert torch.equal(network.views[0]["bias"], free.views[0]["bias"])
    assert not limit_row_norms(free.views[0]["weight"], 0.0)
    rows = torch.zeros(1, 3)
    assert limit_row_norms(rows, 1.0) and not rows.any()


INSIDE = (Affine(4, 3, "tanh"), Scale(3), Shift(3)), (Affine(2, 2, "sigmoid"),)


def test_networks_side_by_side_are_the_networks() -> None:
    both = (Affine(7, 6, "tanh"), Parallel(INSIDE), Affine(5, 3, "softmax"))
    x, d = noise(9, 7), noise(9, 3, seed=2)
    workspace = passed(both, x, d)
    gradient = workspace.network.split(workspace.gradient(torch.empty(workspace.network.num_parameters)))[1]
    given, below, start = workspace.inputs[1], workspace.grad_outputs[1], 0
    for n, (layers, columns) in enumerate(zip(INSIDE, (slice(0, 3), slice(3, 5)), strict=True)):
        values = [v.flatten() for name, v in workspace.network.views[1].items() if name.startswith(f"{n}.")]
        one = Network((Affine(layers[0].input_dim, layers[0].input_dim, "linear"), *layers))
        one.views[0]["weight"].copy_(torch.eye(layers[0].input_dim))
        one.parameters[one.layers[0].num_parameters :].copy_(torch.cat(values))
        alone = Workspace(one, 9)
        alone.x.copy_(given[:, start : start + layers[0].input_dim])
        alone.forward()
        torch.testing.assert_close(workspace.activations[1][:, columns], alone.activations[-1])
        alone.grad_outputs[-1].copy_(below[:, columns])
        alone.backward()
        torch.testing.assert_close(
            workspace.grad_outputs[0][:, start : start + layers[0].input_dim] * 1.0,
            alone.grad_outputs[0] * (1 - given[:, start : start + layers[0].input_dim] ** 2),
        )
        expected = one.split(alone.gradient(torch.empty(one.num_parameters)))[1:]
        for i, views in enumerate(expected):
            for name, value in views.items():
                torch.testing.assert_close(gradient[f"{n}.{i}.{name}"], value)
        start += layers[0].input_dim


def test_networks_side_by_side_keep_rates_momentum_and_norms_of_their_layers() -> None:
    layer = Parallel(((Affine(4, 3, "tanh", 0.5, 0.1, max_norm=0.2), Scale(3, 0.3)),))
    about = layer.parameters
    assert [(one.learn_rate_coef, one.l2, one.momentum) for one in about.values()] == [
        (0.5, True, True),
        (0.1, False, True),
        (0.3, False, False),
    ]
    network = Network((layer, Affine(3, 2, "softmax")))
    initialize(network, 1)
    assert layer.after_update(network.views[0])
    assert float(network.views[0]["0.0.weight"].norm(dim=1).max()) <= 0.2 + 1e-6
    assert layer_from_config(layer.config()) == layer


def test_what_is_no_layer_is_refused() -> None:
    nested: tuple[Layer, ...] = (Affine(2, 2),)
    for _ in range(8):
        nested = (Parallel((nested,)),)
    for make, said in (
        (lambda: Parallel(()), "no networks side by side"),
        (lambda: Parallel(((Affine(4, 3), Affine(4, 3)),)), "network 0: layer 1 reads 4 dims, the one before gives 3"),
        (
            lambda: Parallel(((Affine(4, 3, "softmax"),),)),
            "network 0: softmax, which only the last layer of all can be",
        ),
        (lambda: Parallel((nested,)), "networks within networks, 9 deep, expected at most 8"),
        (lambda: Dropout(4, 1.0), "dropout rate 1.0, expected 0 or more and less than 1"),
        (lambda: Dropout(4, float("nan")), "dropout rate nan"),
        (lambda: Copy(4, (0, 4)), "column 4 to copy, expected 0 to 3"),
        (lambda: Copy(4, ()), "column 'none' to copy"),
        (lambda: Activation(4, "softmax"), "activation 'softmax', expected one of sigmoid, tanh, relu"),
        (lambda: Scale(0), "width 0, expected 1 to"),
        (lambda: Shift(3, float("inf")), "learning rate coefficients and other numbers"),
    ):
        with pytest.raises(ValueError, match=said):
            make()


def test_dropout_drops_in_training_alone_and_keeps_the_mean() -> None:
    layers = (Affine(6, 400, "linear"), Dropout(400, 0.2))
    x, d = noise(50, 6), noise(50, 400, seed=2)
    workspace = passed(layers, x, d, torch.Generator().manual_seed(3))
    given, found = workspace.activations
    kept = found != 0
    torch.testing.assert_close(found[kept], given[kept] / 0.8)
    assert 0.78 < float(kept.float().mean()) < 0.82
    torch.testing.assert_close(workspace.grad_outputs[0], d * kept / 0.8)
    mask = kept.clone()
    workspace.forward()
    assert not torch.equal(mask, workspace.activations[1] != 0), "another minibatch, another mask"
    outside = passed(layers, x, d)
    assert torch.equal(*outside.activations) and torch.equal(outside.grad_outputs[0], d)


def test_workers_drop_differently_and_a_state_draws_on() -> None:
    network = Network((Affine(6, 8), Parallel(((Dropout(8, 0.5),),)), Affine(8, 3, "softmax")))
    generators = [noise_generator(network, 1, rank) for rank in (0, 1, 0)]
    assert all(generators) and noise_generator(Network((Affine(3, 2), Dropout(2, 0.0))), 1, 0) is None
    masks = []
    for generator in generators:
        workspace = Workspace(network, 5, make_arithmetic("bf16", CPU, use_kernels=False), generator)
        workspace.x.fill_(1.0)
        workspace.forward()
        state = workspace.state_dict()
        workspace.forward()
        masks.append(workspace.activations[1].clone())
        workspace.forward()
        workspace.load_state_dict(state)
        workspace.forward()
        assert torch.equal(workspace.activations[1], masks[-1])
    assert torch.equal(masks[0], masks[2]) and not torch.equal(masks[0], masks[1])
    with pytest.raises(DataError, match="generator: nothing found"):
        workspace.load_state_dict({})
    with pytest.raises(DataError, match="generator"):
        workspace.load_state_dict({"generator": torch.full_like(state["generator"], 255)})


def dropout_network(recipe: Recipe, input_dim: int, num_pdfs: int, *, on_dbn: bool = False) -> tuple[Layer, ...]:
    layers = (Affine(input_dim, 12), Dropout(12, 0.3), Affine(12, 7, "tanh"), Scale(7), Dropout(7, 0.1))
    check_layers((*layers, Affine(7, num_pdfs, "softmax")))
    return (*layers, Affine(7, num_pdfs, "softmax"))


@pytest.mark.parametrize("optimizer", ["momentum: 0.5", "name: ng-sgd, rank_in: 3"])
def test_a_training_with_dropout_resumes_to_the_same_bits(
    optimizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "network_layers", dropout_network)
    monkeypatch.setattr("ddnn.training.initial_model.network_layers", dropout_network)
    features, labels = labelled_utterances()
    data, pdfs = write_data_dir(tmp_path / "data", features), write_pdfs(tmp_path / "pdfs.txt", labels)
    recipe = load_recipe(write_recipe(tmp_path / "recipe.yaml", data, pdfs, f"optimizer: {{{optimizer}}}\n"))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_training(recipe, whole, "cpu")
    after, left = Averager.after_minibatch, [20]

    def counting(self: Averager, frames: int) -> bool:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return after(self, frames)

    monkeypatch.setattr(Averager, "after_minibatch", counting)
    with pytest.raises(TrainingInterrupted):
        run_training(recipe, stopped, "cpu")
    monkeypatch.setattr(Averager, "after_minibatch", after)
    run_training(recipe, stopped, "cpu", resume=True)
    assert torch.equal(load_run(whole).network.parameters, load_run(stopped).network.parameters)
    first, again = (evaluate_run(whole, data, pdfs, "cpu") for _ in range(2))
    assert first.loss == again.loss, "nothing is drawn in an evaluation"


@pytest.mark.parametrize(("precision", "kernels"), [("float32", False), ("bf16", False), ("bf16", True)])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_natural_gradient_of_networks_side_by_side_is_that_of_their_layers(
    momentum: float, precision: Precision, kernels: bool
) -> None:
    """A network in a network: the same bits as its layers above each other; but for rounding with compiled kernels, which
    scale where they update."""
    if kernels and not kernels_for("bf16"):
        pytest.skip("no compiled kernels that this processor can run")
    inside = (Convolution.of_pieces(12, 3, 1, 6, 5), Scale(20), Activation(20, "tanh"), Affine(20, 6, "sigmoid"))
    steps = []
    for layers in (inside, (Parallel((inside,)),), (Parallel(((Parallel((inside,)),),)),)):
        network = Network((Affine(9, 12, "linear"), *layers, Affine(6, 3, "softmax")))
        initialize(network, 1)
        options = NgSgdOptions(rank_in=3, rank_out=2, momentum=momentum, max_change_per_sample=0.05)
        optimizer = NgSgd(network, options)
        workspace = Workspace(network, 16, make_arithmetic(precision, CPU, use_kernels=kernels))
        for seed in range(4):
            EagerStep(workspace, optimizer)(Batch(noise(16, 9, seed=seed), torch.arange(16) % 3), 0.5)
        states = [value for name, value in sorted(optimizer.state_dict().items()) if name != "momentum_buffer"]
        steps.append((network.parameters, len(optimizer.preconditioners), states))
        assert options.num_bytes(network.layers, 16) > 0
    for parameters, count, states in steps[1:]:
        assert count == steps[0][1] == 8
        if kernels:
            torch.testing.assert_close(parameters, steps[0][0], rtol=0.01, atol=0.002)
        else:
            assert torch.equal(parameters, steps[0][0])
            assert all(torch.equal(*pair) for pair in zip(states, steps[0][2], strict=True))
