"""Naive float64 twins of what ddnn computes, and small pieces that several tests need."""

from __future__ import annotations

import torch
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.data.dataset import AcousticDataset, InputTransform, labels_of
from ddnn.nn.arithmetic import Precision
from ddnn.nn.kernels import load_library
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace

FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softmax": lambda x: x,
    "linear": lambda x: x,
}


def kernels_for(precision: Precision) -> bool:
    """Whether there are compiled kernels for this precision that this processor can run."""
    kernels = load_library()
    return kernels is not None and precision in kernels.supported


def weights(network: Network) -> list[Tensor]:
    """The weight of each affine layer."""
    return [views["weight"] for views in network.views]


def biases(network: Network) -> list[Tensor]:
    """The bias of each affine layer."""
    return [views["bias"] for views in network.views]


def twin_loss(network: Network, parameters: Tensor, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pre-softmax activations, summed cross-entropy and its flat gradient by autograd, in float64."""
    flat = parameters.double().clone().requires_grad_()
    y, at = x.double(), 0
    for layer in network.layers:
        assert isinstance(layer, Affine)
        size = layer.in_features * layer.out_features
        weight = flat[at : at + size].view(layer.out_features, layer.in_features)
        bias = flat[at + size : at + size + layer.out_features]
        y = FUNCTIONS[layer.activation](y @ weight.t() + bias)
        at += size + layer.out_features
    loss = torch.nn.functional.cross_entropy(y, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, flat)
    return y.detach(), loss.detach(), gradient


def random_minibatch(workspace: Workspace, pdfs: int, generator: torch.Generator) -> Tensor:
    """Fills the input with noise and returns random labels."""
    workspace.x.copy_(torch.randn(workspace.x.shape, generator=generator))
    return torch.randint(0, pdfs, (len(workspace.x),), generator=generator)


def batch_of(workspace: Workspace, dataset: AcousticDataset, transform: InputTransform, rows: Tensor) -> Batch:
    """The minibatch of the frames at these rows, in `workspace.x`."""
    workspace = workspace.of(len(rows))
    workspace.arithmetic.gather(dataset, transform, rows, workspace.x)
    return Batch(workspace.x, labels_of(dataset, rows, workspace.x.device))
