"""What a worker holds of its network, and what is between two layers. Here one worker holds a whole network, and nothing
is sent; `ddnn.nn.columns` has networks whose layers are split over workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Layer
from ddnn.nn.loss import SoftmaxCrossEntropy


class Link:
    """What is between a layer and the one above it: where the lower one's outputs are read, and where their derivative
    comes from. Here both layers use the same memory, and nothing is moved; another link gathers the outputs of layers that
    are split over workers, or sends them to another worker. All of its methods get tensors of (frames, features)."""

    def memory(self, outputs: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the upper layer's inputs and their derivatives, from that of the lower layer."""
        return outputs, derivatives

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        """inputs <- what the upper layer reads, after the lower one's forward pass."""
        if inputs.data_ptr() != outputs.data_ptr():
            inputs.copy_(outputs)

    def backward(self, input_derivatives: Tensor, derivatives: Tensor) -> None:
        """derivatives <- those of the lower layer's outputs, after the upper one's backward pass."""


class Partition:
    """How the workers of a replica share its network. Here one worker holds all of it: each method gives back what it is
    given, and nothing is sent. All methods are collective over the replica unless they say otherwise."""

    def layers(self, own: Sequence[Layer]) -> tuple[Layer, ...]:
        """Those of the whole network, of which `own` are this worker's. Not collective."""
        return tuple(own)

    def own_layers(self, whole: Sequence[Layer]) -> tuple[Layer, ...]:
        """This worker's part of the layers of the whole network. Not collective."""
        return tuple(whole)

    def own(self, whole: Tensor) -> Tensor:
        """This worker's part, (own parameters,), of a flat vector of the whole network. Not collective."""
        return whole

    def whole(self, own: Tensor) -> Tensor:
        """The flat vector of the whole network, on each worker, from the part that each has."""
        return own

    def num_parameters(self, own: int) -> int:
        """Of the whole network, where this worker has `own`. Not collective."""
        return own

    def links(self, own: Sequence[Layer]) -> list[Link]:
        """What is between each of these consecutive layers of this worker and the next. Not collective."""
        return [Link() for _ in own[1:]]

    def cross_entropy(self, arithmetic: Float32, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        """The loss of training, on this worker's logits; arguments as of `SoftmaxCrossEntropy`. Not collective."""
        return arithmetic.cross_entropy(like, pdfs, frames)

    def norm(self, own: Tensor) -> Tensor:
        """The Euclidean norm, 0-dim, of the whole vector of which each worker has a part."""
        made: Tensor = torch.linalg.vector_norm(own)
        return made
