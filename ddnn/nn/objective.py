"""What a training minimizes: from the outputs of a network for a minibatch to their derivative and the figures by which
models compare. The training step, cross-validation, logs and reports know no more of an objective than this."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.nn.figures import FRAME_ACCURACY, LOSS, Figure
from ddnn.nn.network import Workspace

Sums = tuple[Tensor, ...]
"""An objective's figures summed over the frames of a minibatch: 0-dim, on the device, in the order of `figures`."""


class Objective(ABC):
    """An objective for minibatches in one workspace, whose precision and memory it uses.

    Attributes:
        figures: what it measures; the first is what schedules and validation go by.
        updates: whether the network is to be updated by the derivative of the last minibatch.
    """

    figures: tuple[Figure, ...]
    updates = True

    @abstractmethod
    def __call__(self, outputs: Tensor, batch: Batch, derivative: Tensor) -> Sums:
        """Fills `derivative` (frames, outputs), of the type of the outputs, with the derivative of the objective, summed
        over the minibatch, with respect to `outputs` (frames, outputs), the last layer's before its softmax."""


MakeObjective = Callable[[Workspace], Objective]


class CrossEntropy(Objective):
    """Softmax and cross-entropy against the aligned pdf of each frame."""

    figures = (LOSS, FRAME_ACCURACY)

    def __init__(self, workspace: Workspace) -> None:
        (frames, pdfs), network = workspace.derivative.shape, workspace.network
        self.loss = network.partition.cross_entropy(workspace.output_arithmetic, network.parameters, pdfs, frames)

    def __call__(self, outputs: Tensor, batch: Batch, derivative: Tensor) -> Sums:
        return self.loss(outputs, batch.labels, derivative)
