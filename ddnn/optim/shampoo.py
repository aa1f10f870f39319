"""Shampoo (Gupta, Koren and Singer, "Shampoo: preconditioned stochastic tensor optimization", ICML 2018): Adam, but for weight
matrices. With the gradient g, the momentum m of Adam, and

    L <- beta2 L + (1 - beta2) g g^T,    R <- beta2 R + (1 - beta2) g^T g

the direction of a matrix is L^(-1/4) m R^(-1/4), scaled to the norm of Adam's ("grafting"; Anil et al., arXiv 2002.09018), which
also makes up for running means in place of the paper's sums.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddnn.nn.layer import Layer
from ddnn.nn.network import Network
from ddnn.optim.adam import Adam, AdamOptions

RIDGE = 1e-6  # added to all eigenvalues, relative to the largest: of fewer frames than dimensions, some are 0


@dataclass(frozen=True)
class ShampooOptions(AdamOptions):
    """Options of Shampoo."""

    update_period: int = 20  # minibatches between two computations of the roots
    max_dimension: int = 1024  # a longer side has no root, the other one's exponent is -1/2; two: Adam

    def num_bytes(self, layers: Sequence[Layer], minibatch: int) -> int:
        """As Adam's, and L, R, their roots, and the largest eigendecomposition in float64."""
        shapes = [about.shape for layer in layers for about in layer.parameters.values() if len(about.shape) == 2]
        dims = [dim for shape in shapes for dim in shape if dim <= self.max_dimension]
        return super().num_bytes(layers, minibatch) + 8 * sum(dim**2 for dim in dims) + 32 * max(dims, default=0) ** 2


class Shampoo(Adam):
    """Shampoo of all weights; biases have the steps of Adam. Each worker has its own L and R."""

    def __init__(self, network: Network, options: ShampooOptions | None = None) -> None:
        options = options or ShampooOptions()
        super().__init__(network, options)
        self.update_period = options.update_period
        self.matrices = [
            (i, name) for i, name in self.weights() if min(network.views[i][name].shape) <= options.max_dimension
        ]
        # By layer and name: side (0 or 1) -> L or R, and its root.
        self._sides = dict[tuple[int, str], dict[int, tuple[Tensor, Tensor]]]()
        for k, (i, name) in enumerate(self.matrices):
            sides = self._sides[i, name] = {}
            for side, dim in enumerate(network.views[i][name].shape):
                if dim <= options.max_dimension:
                    sides[side] = self.gradient.new_zeros(dim, dim), self.gradient.new_zeros(dim, dim)
                    self._state |= zip((f"matrix.{k}.{side}.mean", f"matrix.{k}.{side}.root"), sides[side], strict=True)

    def phase(self, frames: int) -> Hashable | None:
        return None  # eigendecompositions wait for the device

    def change_direction(self, i: int, name: str, gradient: Tensor, mean: Tensor, direction: Tensor) -> None:
        sides, x = self._sides[i, name], mean
        for side, (scatter, root) in sides.items():
            rows = gradient.t() if side else gradient
            scatter.lerp_(rows @ rows.t(), 1.0 - self.beta2)
            if int(self.steps[1] - 1.0) % self.update_period == 0:
                root.copy_(inverse_root(scatter, 2 * len(sides)))
            x = x @ root if side else root @ x
        scale = torch.linalg.matrix_norm(direction) / torch.linalg.matrix_norm(x).clamp_(min=1e-30)
        torch.mul(x, scale, out=direction)


def inverse_root(matrix: Tensor, p: int) -> Tensor:
    """(n, n) float64: a symmetric, positive semidefinite matrix to the power of -1/p; NaN where it is not finite."""
    if not bool(matrix.isfinite().all()):
        return torch.full_like(matrix, torch.nan)
    values, vectors = torch.linalg.eigh(matrix.double())
    roots = (values + RIDGE * values[-1]).clamp_(min=1e-30) ** (-1.0 / p)
    return torch.mm(vectors * roots, vectors.t())
