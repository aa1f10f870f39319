"""Forward and backward against torch.autograd in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import biases, random_minibatch, twin_loss, weights

from ddnn.nn.layer import Parameter
from ddnn.nn.layers import Affine, mlp_layers, num_parameters
from ddnn.nn.loss import cross_entropy
from ddnn.nn.network import Network, Workspace, initialize


@settings(max_examples=25, deadline=None)
@given(
    dims=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    kinds=st.lists(st.sampled_from(["sigmoid", "tanh", "relu", "linear"]), min_size=4, max_size=4),
    frames=st.integers(1, 7),
    seed=st.integers(0, 1000),
)
def test_gradient_equals_autograd(dims: list[int], kinds: list[str], frames: int, seed: int) -> None:
    names = [*kinds[: len(dims) - 2], "softmax"]
    network = Network(tuple(Affine(a, b, k) for a, b, k in zip(dims[:-1], dims[1:], names, strict=True)))
    generator = torch.Generator().manual_seed(seed)
    network.parameters.copy_(torch.randn(network.parameters.shape, generator=generator))
    workspace = Workspace(network, 8).of(frames)
    labels = random_minibatch(workspace, dims[-1], generator)
    activations, loss, expected = twin_loss(network, network.parameters, workspace.x, labels)

    found = workspace.forward()
    torch.testing.assert_close(found.double(), activations, rtol=1e-4, atol=1e-5)
    summed, right = cross_entropy(found, labels, workspace.grad_outputs[-1])
    assert summed.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-5)
    assert right.item() == (activations.argmax(1) == labels).sum().item()
    workspace.backward()
    flat = workspace.gradient(torch.full_like(network.parameters, float("nan")))
    torch.testing.assert_close(flat.double(), expected, rtol=1e-3, atol=1e-4)


def test_initialisation_follows_make_nnet_proto() -> None:
    network = Network(mlp_layers(440, 2, 512, 616, "sigmoid"))
    initialize(network, seed=3)
    first, second, last = weights(network)
    assert first.std().item() == pytest.approx(3.5 * (2 / (440 + 512)) ** 0.5 * (1 / 12) ** 0.5, rel=0.02)
    assert second.std().item() == pytest.approx(3.5 * (2 / 1024) ** 0.5, rel=0.02)
    assert last.std().item() == pytest.approx(3.5 * (2 / (512 + 616)) ** 0.5, rel=0.02)
    assert -4 <= biases(network)[0].min() < -3.9 and -0.1 < biases(network)[0].max() <= 0
    assert not biases(network)[-1].any()
    assert network.layers[-1].parameters == {"weight": Parameter((616, 512), l2=True), "bias": Parameter((616,), 0.1)}
    again = Network(network.layers)
    initialize(again, seed=3)
    assert torch.equal(again.parameters, network.parameters)


@pytest.mark.parametrize("activation", ["tanh", "relu", "linear"])
def test_initial_weights_of_other_activations(activation: str) -> None:
    """He et al. (2015) for ReLU, and for what is below a parametric one; biases around 0."""
    network = Network(mlp_layers(440, 2, 512, 616, activation))
    initialize(network, seed=3)
    first, second, _ = weights(network)
    wide = (2 / 440) ** 0.5 if activation != "tanh" else 3.5 * (2 / (440 + 512)) ** 0.5 * (1 / 12) ** 0.5
    assert first.std().item() == pytest.approx(wide, rel=0.02)
    deep = (2 / 512) ** 0.5 if activation != "tanh" else 3.5 * (2 / 1024) ** 0.5
    assert second.std().item() == pytest.approx(deep, rel=0.02)
    assert not any(bias.any() for bias in biases(network))


def test_the_papers_network_has_its_number_of_parameters() -> None:
    layers = mlp_layers(440, 6, 2048, 8806, "sigmoid")
    assert num_parameters(layers) == Network(layers).num_parameters == 39_928_422
