"""What a worker holds of its network, and what is between two layers. Here one worker holds a whole network, and nothing
is sent; `ddnn.nn.columns` has networks whose layers are split over workers, `ddnn.nn.stages` those of which workers have
consecutive layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator
from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Layer
from ddnn.nn.layers import num_parameters
from ddnn.nn.layout import Part
from ddnn.nn.loss import SoftmaxCrossEntropy


class Link:
    """What is between a layer and the one above it: where the lower one's outputs are read, and where their derivative
    comes from. Here both layers use the same memory, and nothing is moved; another link gathers the outputs of layers that
    are split over workers, or sends them to another worker. All of its methods get tensors of (frames, features).

    Attributes:
        received: where the layer below is another worker's, how many of its outputs arrive here, and their type.
    """

    received: tuple[int, torch.dtype] | None = None

    def memory(self, outputs: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for the upper layer's inputs and their derivatives, from that of the lower layer."""
        return outputs, derivatives

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        """inputs <- what the upper layer reads, after the lower one's forward pass."""
        if inputs.data_ptr() != outputs.data_ptr():
            inputs.copy_(outputs)

    def backward(self, input_derivatives: Tensor, derivatives: Tensor) -> None:
        """derivatives <- those of the lower layer's outputs, after the upper one's backward pass."""

    def wait(self) -> None:
        """Returns once all that was sent has arrived."""


class Partition:
    """How the workers of a replica share its network. Here one worker holds all of it: each method gives back what it is
    given, and nothing is sent. All methods are collective over the replica unless they say otherwise.

    Attributes:
        first_layer: number of this worker's first layer in the whole network.
        is_last: whether it has the last layer, or its part of that.
    """

    first_layer, is_last = 0, True

    @property
    def within_stage(self) -> Partition:
        """How workers that have parts of the same layers as this one share these. Not collective."""
        return self

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

    def links(self, own: Sequence[Layer], dtype: torch.dtype) -> list[Link]:
        """What is below each of this worker's consecutive layers, and above the last, where activations are of `dtype`. Not
        collective."""
        return [Link() for _ in range(len(own) + 1)]

    def cross_entropy(self, arithmetic: Float32, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        """The loss of training, on this worker's logits; arguments as of `SoftmaxCrossEntropy`. Not collective."""
        return arithmetic.cross_entropy(like, pdfs, frames)

    def norm(self, own: Tensor) -> Tensor:
        """The Euclidean norm, 0-dim, of the whole vector of which each worker has a part."""
        made: Tensor = torch.linalg.vector_norm(own)
        return made

    def of_last_stage(self, figures: Tensor) -> Tensor:
        """What the workers that have the outputs of the whole network have made of them."""
        return figures

    def numbers(self, counts: Sequence[int]) -> tuple[list[int], int]:
        """Of lists that each go over the layers of the whole network, this worker having `counts` items of each: the numbers of
        its items where the lists follow each other, and how many items there are."""
        return list(range(sum(counts))), sum(counts)

    def of_all_stages(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The named tensors, on the CPU, that the workers have for their layers."""
        return dict(own)


class SharedPartition(Partition):
    """Of a network of which each worker of `comm` has one of `parts`, by rank. `layers`: of the whole network."""

    def __init__(self, layers: Sequence[Layer], parts: Sequence[Part], comm: Communicator) -> None:
        self._layers, self.parts, self.comm = tuple(layers), parts, comm
        self.part = parts[comm.rank]

    def layers(self, own: Sequence[Layer]) -> tuple[Layer, ...]:
        return self._layers

    def own_layers(self, whole: Sequence[Layer]) -> tuple[Layer, ...]:
        return self.part.layers

    def own(self, whole: Tensor) -> Tensor:
        return self.part.take(whole)

    def whole(self, own: Tensor) -> Tensor:
        sizes = [sum(end - start for start, end in part.intervals) for part in self.parts]
        gathered, whole = own.new_empty(sum(sizes)), own.new_empty(sum(sizes))
        self.comm.all_gather_into(own.contiguous(), gathered, sizes)
        for part, vector in zip(self.parts, torch.split(gathered, sizes), strict=True):
            part.put(vector, whole)
        return whole

    def num_parameters(self, own: int) -> int:
        return num_parameters(self._layers)

    def norm(self, own: Tensor) -> Tensor:
        square: Tensor = torch.linalg.vector_norm(own).square()
        self.comm.all_reduce(square)
        return square.sqrt()
