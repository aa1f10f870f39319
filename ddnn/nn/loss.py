"""Softmax and cross-entropy over many pdfs, without a float32 copy of a whole minibatch's logits and without
allocations.

The rows are processed in blocks that fit into a cache. In float32 the log-posteriors are made where the derivative
goes. In bf16 a block is converted to float32, and only its derivative is rounded, once. The reference is
`cross_entropy`: in float32 the derivative and both sums have its very bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_VALUES = (1 << 18, 1 << 22)
"""Values of the output layer that the loss works on at a time, on a CPU and on a GPU: they stay in its cache."""


def cross_entropy(logits: Tensor, labels: Tensor, grad: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy over a minibatch and the number of correctly classified frames, both 0-dim, on the device.
    `logits`: (frames, pdfs) before softmax. `labels`: (frames,) int64 pdf-ids. `grad`: filled with softmax - target,
    (frames, pdfs), where given."""
    target = labels[:, None]
    num_correct = (logits.argmax(dim=1) == labels).sum()
    log_posteriors = torch.log_softmax(logits, dim=1)
    loss = -log_posteriors.gather(1, target).sum(dtype=torch.float64)
    if grad is not None:
        torch.exp(log_posteriors, out=grad)
        grad.scatter_add_(1, target, grad.new_full((1, 1), -1.0).expand_as(target))
    return loss, num_correct


class SoftmaxCrossEntropy:
    """`cross_entropy` of training, and the memory that it works in. For logits in float32.

    Args:
        like: a tensor on the device.
        pdfs: outputs of the network.
        frames: of a minibatch at most.

    Attributes:
        block_rows: frames worked on at a time.
    """

    def __init__(self, like: Tensor, pdfs: int, frames: int) -> None:
        self.block_rows = max(1, min(frames, BLOCK_VALUES[like.device.type == "cuda"] // pdfs))
        self._log_posteriors = like.new_empty(frames)
        self._argmax = like.new_empty(frames, dtype=torch.int64)
        self._minus_one = like.new_full((1, 1), -1.0)

    def __call__(self, logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """As `cross_entropy`; fills `grad` with softmax - target."""
        frames, target = len(labels), labels[:, None]
        argmax, log_posteriors = self._argmax[:frames], self._log_posteriors[:frames]
        for start in range(0, frames, self.block_rows):
            rows = slice(start, min(start + self.block_rows, frames))
            self._block(logits[rows], target[rows], grad[rows], argmax[rows], log_posteriors[rows, None])
        return -log_posteriors.sum(dtype=torch.float64), (argmax == labels).sum()

    def _block(self, logits: Tensor, target: Tensor, grad: Tensor, argmax: Tensor, log_posteriors: Tensor) -> None:
        torch.argmax(logits, dim=1, out=argmax)
        torch.ops.aten._log_softmax.out(logits, 1, False, out=grad)
        torch.gather(grad, 1, target, out=log_posteriors)
        grad.exp_()
        grad.scatter_add_(1, target, self._minus_one.expand_as(target))


class SoftmaxCrossEntropyBFloat16(SoftmaxCrossEntropy):
    """The same for logits and derivative in bf16: each block is computed in float32."""

    def __init__(self, like: Tensor, pdfs: int, frames: int) -> None:
        super().__init__(like, pdfs, frames)
        self._blocks = like.new_empty(2, self.block_rows, pdfs).unbind()

    def _block(self, logits: Tensor, target: Tensor, grad: Tensor, argmax: Tensor, log_posteriors: Tensor) -> None:
        logits_float32, grad_float32 = (block[: len(target)] for block in self._blocks)
        super()._block(logits_float32.copy_(logits), target, grad_float32, argmax, log_posteriors)
        grad.copy_(grad_float32)
