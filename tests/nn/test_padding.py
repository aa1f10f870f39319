"""In bf16 an output layer with padding trains as one without. On a GPU that is the default, here it is asked for."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import batch_of, biases, cross_entropy_step, random_minibatch, weights

from ddnn.bench.step import matrix_products
from ddnn.bench.task import Shape, random_task
from ddnn.data.batches import ShuffledSampler
from ddnn.nn.arithmetic import BFloat16, Float32, make_arithmetic
from ddnn.nn.layers import Affine, mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.products import matmul_out
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.sgd import SgdOptions
from ddnn.training.step import EagerStep

CPU = torch.device("cpu")


def network(pdfs: int, seed: int) -> Network:
    made = Network(mlp_layers(9, 2, 12, pdfs, "sigmoid"))
    initialize(made, seed)
    biases(made)[-1].copy_(torch.randn(pdfs, generator=torch.Generator().manual_seed(seed)))
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
        workspace = Workspace(made, 24, BFloat16(CPU, pad_to=width)).of(frames)
        labels = random_minibatch(workspace, pdfs, torch.Generator().manual_seed(seed))
        outputs = workspace.forward()
        assert outputs.shape == (frames, pdfs)
        loss, _ = cross_entropy_step(workspace, labels)
        workspace.backward()
        flat = workspace.gradient(torch.full_like(made.parameters, float("nan")))
        found.append((outputs.clone(), loss, flat, workspace.grad_outputs[0].clone()))
    for one, other in zip(*found, strict=True):
        # The sums may be in another order, after which a value may be rounded to bf16 the other way.
        size = float(one.abs().max())
        torch.testing.assert_close(other, one, rtol=2**-7, atol=2**-7 * size)


def test_rows_are_as_wide_as_asked_and_what_is_beyond_the_pdfs_has_no_derivative() -> None:
    made = network(10, seed=1)
    workspace = Workspace(made, 5, BFloat16(CPU, pad_to=64))
    labels = random_minibatch(workspace, 10, torch.Generator().manual_seed(1))
    workspace.forward()
    cross_entropy_step(workspace, labels)
    workspace.backward()
    assert workspace.activations[-1].shape == workspace.grad_outputs[-1].shape == (5, 10)
    assert workspace.calls[-1].y.shape == workspace.calls[-1].grad.shape == (5, 64)
    assert workspace.calls[-1].y.data_ptr() == workspace.activations[-1].data_ptr()
    assert not workspace.calls[-1].grad[:, 10:].any()
    assert not workspace.calls[-1].y[:, 10:].any(), "weights and biases of the padding are 0"
    assert workspace.compute is not made
    assert torch.equal(weights(workspace.compute)[-1][:10], weights(made)[-1].bfloat16())
    assert torch.equal(biases(workspace.compute)[-1][:10], biases(made)[-1].bfloat16())
    for factors in matrix_products(workspace):  # the bench's, of the same shapes
        matmul_out(*factors)


def test_padding_is_for_bf16_on_gpus_alone() -> None:
    made = network(10, seed=1)
    for arithmetic in (make_arithmetic("bf16", CPU), make_arithmetic("float32", CPU, pad_to=64), Float32()):
        assert Workspace(made, 5, arithmetic).calls[-1].y.shape == (5, 10)
    last = mlp_layers(440, 6, 2048, 8806, "sigmoid")[-1]
    assert last.padded(64) == Affine(2048, 8832, "softmax", bias_learn_rate_coef=0.1)
    assert last.padded(1) == last


@pytest.mark.parametrize(
    "options",
    [SgdOptions(momentum=0.5, l2=1e-4), NgSgdOptions(momentum=0.5, l2=1e-4, rank_in=5, rank_out=3)],
    ids=["sgd", "ng-sgd"],
)
def test_steps_with_padding_are_the_steps_without(options: SgdOptions) -> None:
    trained = []
    for multiple in (1, 64):
        task = random_task(Shape(2, 24, 21, 32), CPU, frames=1500)
        made, before = task.model.network, task.model.network.parameters.clone()
        workspace = Workspace(made, task.minibatch, make_arithmetic("bf16", CPU, pad_to=multiple))
        step = EagerStep(workspace, make_optimizer(options, made))
        rows = ShuffledSampler(task.train, task.minibatch, seed=1).epoch(1)
        losses = [
            step(batch_of(workspace, task.train.dataset, task.model.transform, one), 0.005)[0]
            for one in islice(rows, 30)
        ]
        assert not workspace.calls[-1].grad[:, 21:].any()
        trained.append((torch.stack(losses), made.parameters - before))
    (losses, change), (padded_losses, padded_change) = trained
    torch.testing.assert_close(padded_losses, losses, rtol=1e-3, atol=0.0)
    assert torch.linalg.vector_norm(padded_change - change) < 0.02 * torch.linalg.vector_norm(change)
