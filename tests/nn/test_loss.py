"""The cross-entropy of training against its reference, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ddnn.data.batches import Batch
from ddnn.nn.arithmetic import Precision, make_arithmetic
from ddnn.nn.layers import Affine
from ddnn.nn.loss import BLOCK_VALUES, cross_entropy
from ddnn.nn.network import Network, Workspace
from ddnn.nn.objective import CrossEntropy, Sums


def workspace_with(
    frames: int, pdfs: int, rows: int, precision: Precision, scale: float, seed: int, compiled: bool = False
) -> tuple[Workspace, CrossEntropy]:
    """A workspace of which the logits are noise, and its loss, which works through them in blocks of `rows`."""
    arithmetic = make_arithmetic(precision, torch.device("cpu"), use_kernels=compiled)
    workspace = Workspace(Network((Affine(1, pdfs, "softmax"),)), frames, arithmetic)
    objective = CrossEntropy(workspace)
    objective.loss.block_rows = min(rows, objective.loss.block_rows)
    generator = torch.Generator().manual_seed(seed)
    workspace.activations[-1].copy_(scale * torch.randn(frames, pdfs, generator=generator))
    workspace.grad_outputs[-1].fill_(float("nan"))
    return workspace, objective


def apply(objective: CrossEntropy, workspace: Workspace, labels: torch.Tensor) -> Sums:
    return objective(workspace.activations[-1], Batch(workspace.x, labels), workspace.derivative)


SHAPES = {
    "frames": st.integers(1, 40),
    "pdfs": st.integers(1, 70),
    "rows": st.integers(1, 50),
    "scale": st.sampled_from([0.0, 1.0, 30.0]),
    "seed": st.integers(0, 1000),
}


@settings(max_examples=40, deadline=None)
@given(**SHAPES)
def test_float32_has_the_bits_of_the_reference(frames: int, pdfs: int, rows: int, scale: float, seed: int) -> None:
    workspace, objective = workspace_with(frames + 3, pdfs, rows, "float32", scale, seed)
    workspace = workspace.of(frames)
    labels = torch.randint(0, pdfs, (frames,), generator=torch.Generator().manual_seed(seed))
    expected = torch.empty(frames, pdfs)
    loss, right = cross_entropy(workspace.activations[-1], labels, expected)
    found = apply(objective, workspace, labels)
    assert (found[0].item(), found[1].item()) == (loss.item(), right.item())
    assert torch.equal(workspace.grad_outputs[-1], expected)


@settings(max_examples=40, deadline=None)
@given(**SHAPES, compiled=st.booleans())
def test_bf16_rounds_the_derivative_alone(
    frames: int, pdfs: int, rows: int, scale: float, seed: int, compiled: bool
) -> None:
    workspace, objective = workspace_with(frames + 3, pdfs, rows, "bf16", scale, seed, compiled)
    workspace = workspace.of(frames)
    labels = torch.randint(0, pdfs, (frames,), generator=torch.Generator().manual_seed(seed))
    log_posteriors = torch.log_softmax(workspace.activations[-1].double(), dim=1)
    derivative = log_posteriors.exp() - torch.nn.functional.one_hot(labels, pdfs)
    loss, _ = apply(objective, workspace, labels)
    of_labels = log_posteriors.gather(1, labels[:, None])
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(-of_labels.sum().item(), rel=1e-5, abs=1e-4)
    # 2^-8 is half a unit in the last of bf16's 8 bits; the rest is float32's.
    torch.testing.assert_close(workspace.grad_outputs[-1].double(), derivative, rtol=2**-7.99, atol=1e-6)


class LargestFloat32(TorchDispatchMode):
    """The most values that any operation gave in float32."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.found = max(self.found, result.numel())
        return result


def test_bf16_widens_a_block_not_a_minibatch() -> None:
    arithmetic = make_arithmetic("bf16", torch.device("cpu"), use_kernels=False)
    workspace = Workspace(Network((Affine(1, 8806, "softmax"),)), 256, arithmetic)
    assert workspace.activations[-1].dtype == workspace.grad_outputs[-1].dtype == torch.bfloat16
    workspace.activations[-1].zero_()
    objective = CrossEntropy(workspace)
    with LargestFloat32() as largest:
        apply(objective, workspace, torch.arange(256))
    assert largest.found == objective.loss.block_rows * 8806 <= BLOCK_VALUES[0]
    assert BLOCK_VALUES[True] < 1024 * 8806 / 2, "on a GPU"
