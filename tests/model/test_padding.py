"""In bf16 an output layer with padding trains as one without. On a GPU that is the default, here it is asked for."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import random_minibatch

from ddnn.bench.step import Shape, matrix_products, random_setup
from ddnn.data.minibatches import shuffled_minibatches
from ddnn.model.initialise import initialise_randomly
from ddnn.model.loss import cross_entropy_in_place
from ddnn.model.network import Buffers, Network, backward, forward, gradient, hidden_stack, padded
from ddnn.optim.sgd import make_optimizer
from ddnn.recipe.schema import Optimizer
from ddnn.train.loop import train_minibatch


def network(pdfs: int, seed: int) -> Network:
    made = Network(hidden_stack(9, 2, 12, pdfs, "sigmoid"))
    initialise_randomly(made, seed)
    made.biases[-1].copy_(torch.randn(pdfs, generator=torch.Generator().manual_seed(seed)))
    return made


@settings(max_examples=40, deadline=None)
@given(
    pdfs=st.integers(1, 90), frames=st.integers(1, 20), multiple=st.sampled_from([2, 8, 64]), seed=st.integers(0, 1000)
)
def test_padding_changes_no_result(pdfs: int, frames: int, multiple: int, seed: int) -> None:
    """Without kernels, which do nothing where there is padding: they round elsewhere."""
    made = network(pdfs, seed)
    found = []
    for width in (1, multiple):
        buffers = Buffers(made, 24, "bf16", width, compiled=False).of(frames)
        labels = random_minibatch(buffers, pdfs, torch.Generator().manual_seed(seed))
        outputs = forward(made, buffers)
        assert outputs.shape == (frames, pdfs)
        loss, _ = cross_entropy_in_place(buffers, labels)
        backward(made, buffers)
        flat = gradient(made, buffers, torch.full_like(made.parameters, float("nan")))
        found.append((outputs.clone(), loss, flat, buffers.derivatives[0].clone()))
    for one, other in zip(*found, strict=True):
        # The sums may be in another order, after which a value may be rounded to bf16 the other way.
        size = float(one.abs().max())
        torch.testing.assert_close(other, one, rtol=2**-7, atol=2**-7 * size)


def test_rows_are_as_wide_as_asked_and_what_is_beyond_the_pdfs_has_no_derivative() -> None:
    made = network(10, seed=1)
    buffers = Buffers(made, 5, "bf16", 64)
    labels = random_minibatch(buffers, 10, torch.Generator().manual_seed(1))
    forward(made, buffers)
    cross_entropy_in_place(buffers, labels)
    backward(made, buffers)
    assert buffers.outputs[-1].shape == buffers.derivatives[-1].shape == (5, 10)
    assert buffers.padded_outputs[-1].shape == buffers.padded_derivatives[-1].shape == (5, 64)
    assert buffers.padded_outputs[-1].data_ptr() == buffers.outputs[-1].data_ptr()
    assert not buffers.padded_derivatives[-1][:, 10:].any()
    assert not buffers.padded_outputs[-1][:, 10:].any(), "weights and biases of the padding are 0"
    assert buffers.low is not None
    assert torch.equal(buffers.low.weights[-1][:10], made.weights[-1].bfloat16())
    assert torch.equal(buffers.low.biases[-1][:10], made.biases[-1].bfloat16())
    gradients = [torch.empty_like(weight, dtype=torch.bfloat16) for weight in made.weights]
    matrix_products(made, buffers, gradients)  # the bench's, of the same shapes


def test_padding_is_for_bf16_on_gpus_alone() -> None:
    made = network(10, seed=1)
    assert Buffers(made, 5, "bf16").padded_outputs[-1].shape == (5, 10)
    assert Buffers(made, 5, "float32", 64).padded_outputs[-1].shape == (5, 10)
    layers = hidden_stack(440, 6, 2048, 8806, "sigmoid")
    assert padded(layers, 64) == (*layers[:-1], replace(layers[-1], outputs=8832))
    assert padded(layers, 1) == layers


@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
def test_steps_with_padding_are_the_steps_without(optimizer: str) -> None:
    trained = []
    for multiple in (1, 64):
        setup = random_setup(Shape(2, 24, 21, 32), torch.device("cpu"), frames=1500)
        made, before = setup.model.network, setup.model.network.parameters.clone()
        recipe = Optimizer(name=optimizer, rank_in=5, rank_out=3, momentum=0.5, l2=1e-4)
        setup = replace(setup, optimizer=make_optimizer(recipe, made), precision="bf16")
        buffers = Buffers(made, setup.minibatch, "bf16", multiple)
        rows = shuffled_minibatches(setup.train, setup.minibatch, seed=1, epoch=1)
        losses = [train_minibatch(setup, buffers, one, 0.005)[0] for one in islice(rows, 30)]
        assert not buffers.padded_derivatives[-1][:, 21:].any()
        trained.append((torch.stack(losses), made.parameters - before))
    (losses, change), (padded_losses, padded_change) = trained
    torch.testing.assert_close(padded_losses, losses, rtol=1e-3, atol=0.0)
    assert torch.linalg.vector_norm(padded_change - change) < 0.02 * torch.linalg.vector_norm(change)
