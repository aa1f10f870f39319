"""Naive float64 twins of what ddnn computes, and small pieces that several tests need."""

from __future__ import annotations

import torch
from torch import Tensor

from ddnn.model.network import Buffers, Network

FUNCTIONS = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "relu": torch.relu,
    "softmax": lambda x: x,
    "linear": lambda x: x,
}


def twin_loss(network: Network, parameters: Tensor, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pre-softmax activations, summed cross-entropy and its flat gradient by autograd, in float64."""
    flat = parameters.double().clone().requires_grad_()
    y, at = x.double(), 0
    for layer in network.layers:
        size = layer.inputs * layer.outputs
        weight = flat[at : at + size].view(layer.outputs, layer.inputs)
        bias = flat[at + size : at + size + layer.outputs]
        y = FUNCTIONS[layer.activation](y @ weight.t() + bias)
        at += size + layer.outputs
    loss = torch.nn.functional.cross_entropy(y, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, flat)
    return y.detach(), loss.detach(), gradient


def random_minibatch(buffers: Buffers, pdfs: int, generator: torch.Generator) -> Tensor:
    """Fills the input with noise and returns random labels."""
    buffers.x.copy_(torch.randn(buffers.x.shape, generator=generator))
    return torch.randint(0, pdfs, (len(buffers.x),), generator=generator)
