"""Naive float64 twins of what ddnn computes, and small pieces that several tests need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.data.dataset import AcousticDataset, InputTransform, gather, labels_of
from ddnn.nn.arithmetic import Precision
from ddnn.nn.kernels import load_library
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace
from ddnn.nn.objective import CrossEntropy

Matrix = NDArray[np.float64]

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


def quantized(vector: Tensor, shapes: Iterable[Sequence[int]]) -> Tensor:
    """Each value of an output unit <- the mean of those of its sign, as 1-bit averaging sends it. `vector`: float64, of tensors of
    these shapes."""
    shapes = list(map(torch.Size, shapes))
    parts = torch.split(vector, [shape.numel() for shape in shapes])
    rows = [row for part, shape in zip(parts, shapes, strict=True) for row in part.view(shape[0], -1)]
    return torch.cat([torch.where(row >= 0, row[row >= 0].mean(), row[row < 0].mean()) for row in rows])


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


def cross_entropy_step(workspace: Workspace, labels: Tensor) -> tuple[Tensor, ...]:
    """From the logits in a workspace to their derivative; summed loss and number of correctly classified frames."""
    batch = Batch(workspace.x, labels)
    return CrossEntropy(workspace)(workspace.activations[-1], batch, workspace.derivative)


def random_minibatch(workspace: Workspace, pdfs: int, generator: torch.Generator) -> Tensor:
    """Fills the input with noise and returns random labels."""
    workspace.x.copy_(torch.randn(workspace.x.shape, generator=generator))
    return torch.randint(0, pdfs, (len(workspace.x),), generator=generator)


def batch_of(workspace: Workspace, dataset: AcousticDataset, transform: InputTransform, rows: Tensor) -> Batch:
    """The minibatch of the frames at these rows, in `workspace.x`."""
    workspace = workspace.of(len(rows))
    gather(dataset, transform, rows, workspace.x, workspace.arithmetic.gather_kernel)
    return Batch(workspace.x, labels_of(dataset, rows, workspace.x.device))


class NaturalGradientTwin:
    """Online natural gradient as the textbook has it: F, R, d, rho in float64, nothing saved, nothing in place."""

    def __init__(self, dim: int, rank: int, alpha: float, history: float, period: int, delta: float = 5e-4) -> None:
        self.dim, self.r, self.alpha, self.history = dim, min(rank, dim - 1), alpha, history
        self.period, self.delta, self.t = period, delta, 0
        self.rho, self.d = 1e-10, np.full(self.r, 1e-10)
        self.rows = np.zeros((self.r, dim))
        for k in range(self.r):
            self.rows[k, k :: self.r] = 1.0
            self.rows[k, k] = 1.1
            self.rows[k] /= np.sqrt((self.rows[k] ** 2).sum())

    def e(self) -> Matrix:
        beta = self.rho * (1 + self.alpha) + self.alpha * self.d.sum() / self.dim
        return 1 / (beta / self.d + 1)

    def update(self, x: Matrix) -> None:
        n = len(x)
        eta = min(1 - np.exp(-n / self.history), 0.9)
        fisher = self.rows.T @ np.diag(self.d) @ self.rows + self.rho * np.eye(self.dim)
        smoothed = eta / n * x.T @ x + (1 - eta) * fisher
        y = self.rows @ smoothed
        z = y @ y.T
        c, u = np.linalg.eigh((z + z.T) / 2)
        c, u = c[::-1], u[:, ::-1]
        floor = (self.rho * (1 - eta)) ** 2
        doubtful = c[0] > 1e6 * c[-1] or (c < floor).any()
        root = np.sqrt(np.maximum(c, floor))
        trace = eta / n * (x**2).sum() + (1 - eta) * (self.dim * self.rho + self.d.sum())
        rho = (trace - root.sum()) / (self.dim - self.r)
        low = max(1e-10, self.delta * root.max())
        self.d, self.rho = np.maximum(root - rho, low), max(rho, low)
        self.rows = np.diag(1 / root) @ u.T @ y
        gram = self.rows @ self.rows.T
        if doubtful and abs(gram - np.eye(self.r)).max() > 1e-3:
            self.orthonormalise(gram)

    def orthonormalise(self, gram: Matrix) -> None:
        try:
            inverse = np.linalg.inv(np.linalg.cholesky(gram))
            if inverse.max() < 100:
                self.rows = inverse @ self.rows
                return
        except np.linalg.LinAlgError:
            pass
        w = self.rows * np.sqrt(self.e())[:, None]
        q, upper = np.linalg.qr(w.T)
        self.rows = (q * np.where(np.diag(upper) < 0, -1.0, 1.0)).T

    def step(self, x: Matrix) -> tuple[Matrix, float]:
        if self.t == 0:
            for _ in range(3 if len(x) > self.r else 1):
                self.update(x)
        out = x - x @ self.rows.T @ np.diag(self.e()) @ self.rows
        if self.t <= 10 or (self.t - 10) % self.period == 0:
            self.update(x)
        self.t += 1
        total = (x**2).sum()
        return out, 1.0 if total == 0 else float(np.sqrt(total / (out**2).sum()))
