"""Cross-entropy over many pdfs, without a float32 copy of a whole minibatch's activations and without allocations.

The rows are worked through in blocks that fit into a cache. In float32 the log-posteriors are made where the
derivative goes. In bf16 a block is widened to float32, and only its derivative is rounded, once. The reference is
`ddnn.model.network.cross_entropy`: in float32 the derivative and both sums have its very bits. Where the buffers have
compiled kernels, those do it row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddnn.model.network import Buffers


def cross_entropy_in_place(buffers: Buffers, labels: Tensor) -> tuple[Tensor, Tensor]:
    """From the last layer's output to its derivative; returns what `cross_entropy` does.

    Args:
        buffers: after the forward pass; the last of its derivatives is filled with softmax - target.
        labels: (frames,) int64 pdf-ids.

    Returns:
        Summed cross-entropy (float64) and the number of frames classified rightly (int64), both 0-dim, on the device.
    """
    activations, derivative, memory = buffers.outputs[-1], buffers.derivatives[-1], buffers.losses
    frames, target = len(labels), labels[:, None]
    if buffers.kernels is not None:
        loss, right = buffers.kernels.cross_entropy(activations, labels, derivative, memory.row)
        return torch.tensor(loss, dtype=torch.float64), torch.tensor(right)
    best, log_posteriors = memory.best[:frames], memory.log_posteriors[:frames]
    for start in range(0, frames, memory.rows):
        rows = slice(start, min(start + memory.rows, frames))
        made, labelled = derivative[rows], target[rows]
        values = activations[rows]
        if memory.blocks is not None:
            wide, made = (block[: len(labelled)] for block in memory.blocks)
            values = wide.copy_(values)
        torch.argmax(values, dim=1, out=best[rows])
        torch.ops.aten._log_softmax.out(values, 1, False, out=made)
        torch.gather(made, 1, labelled, out=log_posteriors[rows, None])
        made.exp_()
        made.scatter_add_(1, labelled, memory.minus_one.expand_as(labelled))
        if memory.blocks is not None:
            derivative[rows].copy_(made)
    return -log_posteriors.sum(dtype=torch.float64), (best == labels).sum()
