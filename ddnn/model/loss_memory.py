"""Memory that `ddnn.model.loss` works in, taken once with the other buffers of a minibatch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_VALUES = (1 << 18, 1 << 22)
"""Values of the output layer that the loss works on at a time, on a CPU and on a GPU: they stay in its cache."""


class LossMemory:
    """What the loss needs besides the derivative it fills.

    Args:
        parameters: float32, for the device.
        pdfs: outputs of the network.
        frames: of a minibatch at most.
        low: whether the outputs are bf16.

    Attributes:
        rows: frames worked on at a time.
        log_posteriors: (frames,) float32, of each frame's label.
        best: (frames,) int64, the most probable pdf.
        minus_one: (1, 1) float32.
        blocks: in bf16 two float32 blocks of (rows, pdfs); else None.
        row: (pdfs,) float32.
    """

    def __init__(self, parameters: Tensor, pdfs: int, frames: int, low: bool) -> None:
        new = parameters.new_empty
        self.log_posteriors = new(frames)
        self.best = new(frames, dtype=torch.int64)
        self.minus_one = parameters.new_full((1, 1), -1.0)
        self.rows = max(1, min(frames, BLOCK_VALUES[parameters.device.type == "cuda"] // pdfs))
        self.row = new(pdfs)
        self.blocks = (new(self.rows, pdfs), new(self.rows, pdfs)) if low else None
