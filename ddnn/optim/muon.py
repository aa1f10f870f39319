"""Muon: Adam, but for the weights of hidden layers, whose direction takes the matrix as a whole.

Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024): of the Nesterov momentum
M = (1 - beta1) g + beta1 m = U S V^T the direction is about U V^T, by five Newton-Schulz iterations

    X <- X / |X|_F,    X <- a X + (b A + c A^2) X,  A = X X^T

times 0.2 sqrt(the longer side), so that its root mean square is about that of Adam's steps (Liu et al., "Muon is scalable for
LLM training", arXiv 2502.16982): one learning rate does for all. Biases and the output layer have Adam's, as the authors advise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ddnn.nn.network import Network
from ddnn.optim.adam import Adam, AdamOptions

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # a, b, c


@dataclass(frozen=True)
class MuonOptions(AdamOptions):
    """Options of Muon."""

    momentum: float = 0.95


class Muon(Adam):
    """Muon of the weights of hidden layers."""

    def __init__(self, network: Network, options: MuonOptions | None = None) -> None:
        super().__init__(network, options or MuonOptions())
        output = max((i for i, layer in enumerate(network.layers) if layer.gemm is not None), default=0)
        self.matrices = [(i, name) for i, name in self.weights() if i != output]

    def change_direction(self, i: int, name: str, gradient: Tensor, mean: Tensor, direction: Tensor) -> None:
        orthogonal = orthogonalize(gradient.lerp(mean, self.momentum))
        torch.mul(orthogonal, 0.2 * math.sqrt(max(direction.shape)), out=direction)


def orthogonalize(matrix: Tensor) -> Tensor:
    """About U V^T of a matrix U S V^T: singular values that are not tiny become 0.7 to 1.2."""
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    a, b, c = NEWTON_SCHULZ
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = torch.addmm(x, b * gram + c * gram @ gram, x, beta=a)
    return x.t() if matrix.shape[0] > matrix.shape[1] else x
