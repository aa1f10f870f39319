"""Networks whose layers are divided among the stages of a pipeline: worker s of p has consecutive layers.

A worker receives the outputs of the layer below its own from the stage before and sends those of its last layer to the
next; derivatives with respect to them travel the other way, and nothing else does. Where the layers of a stage are also
split by columns (`ddnn.nn.columns`), worker j sends its own columns to worker j of the next stage, which gathers them there;
what comes back is the derivative of these columns alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from safetensors.torch import load, save
from torch import Tensor

from ddnn.distributed.communicator import Communicator, Handle
from ddnn.distributed.groups import Groups
from ddnn.nn.arithmetic import Float32
from ddnn.nn.columns import ColumnPartition
from ddnn.nn.layer import Layer
from ddnn.nn.layout import stages_of
from ddnn.nn.loss import SoftmaxCrossEntropy
from ddnn.nn.partition import Link, Partition, SharedPartition


class _StageLink(Link):
    """Between this worker's layers and those of another stage, `other`. What is sent is a copy, and nobody waits for it before
    `wait`: two stages that send to each other at the same time would wait for ever."""

    def __init__(self, comm: Communicator, other: int) -> None:
        self.comm, self.other = comm, other
        self._sent = list[tuple[Handle, Tensor]]()

    def send(self, tensor: Tensor) -> None:
        copy = tensor.clone()
        self._sent.append((self.comm.isend(copy, self.other), copy))

    def receive(self, tensor: Tensor) -> None:
        self.comm.irecv(tensor, self.other).wait()

    def wait(self) -> None:
        for handle, _ in self._sent:
            handle.wait()
        self._sent.clear()


class LinkBelow(_StageLink):
    """To the stage before. `link`: what is between its last layer and the first one here, were they one worker's."""

    def __init__(self, comm: Communicator, link: Link, columns: int, dtype: torch.dtype) -> None:
        super().__init__(comm, comm.rank - 1)
        self.link, self.received = link, (columns, dtype)

    def memory(self, outputs: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
        return self.link.memory(outputs, derivatives)

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        self.receive(outputs)
        self.link.forward(outputs, inputs)

    def backward(self, input_derivatives: Tensor, derivatives: Tensor) -> None:
        self.link.backward(input_derivatives, derivatives)
        self.send(derivatives)


class LinkAbove(_StageLink):
    """To the next stage."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm, comm.rank + 1)

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        self.send(outputs)

    def backward(self, input_derivatives: Tensor, derivatives: Tensor) -> None:
        self.receive(derivatives)


class NoLoss(SoftmaxCrossEntropy):
    """Of a stage below the last, which has no logits."""

    def __call__(self, logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Zeros; `grad` is received."""
        return torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)


class StagePartition(SharedPartition):
    """This worker's stage of a network, or its column of that.

    Args:
        layers: of the whole network.
        sizes: how many of them each stage has, as `ddnn.nn.layout.stage_sizes` gives them.
        groups: this worker's.

    ValueError: as `columns_of`."""

    def __init__(self, layers: Sequence[Layer], sizes: Sequence[int], groups: Groups) -> None:
        columns, self.stage = groups.column.world_size, groups.stage
        by_stage, number = stages_of(layers, sizes, columns), groups.stage.rank
        super().__init__(layers, list(chain.from_iterable(by_stage)), groups.replica)
        self.first_layer, self.is_last = sum(sizes[:number]), number == len(sizes) - 1
        self._of_column = [layer for parts in by_stage for layer in parts[groups.column.rank].layers]
        self._within = Partition()
        if columns > 1:
            own = layers[self.first_layer : self.first_layer + sizes[number]]
            self._within = ColumnPartition(own, groups.column, parts=by_stage[number])

    @property
    def within_stage(self) -> Partition:
        return self._within

    def links(self, own: Sequence[Layer], dtype: torch.dtype) -> list[Link]:
        first = self.first_layer
        links = self._within.links(self._of_column, dtype)[first : first + len(own) + 1]
        if first:
            links[0] = LinkBelow(self.stage, links[0], self._of_column[first - 1].output_dim, dtype)
        if not self.is_last:
            links[-1] = LinkAbove(self.stage)
        return links

    def cross_entropy(self, arithmetic: Float32, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        within = self._within
        return within.cross_entropy(arithmetic, like, pdfs, frames) if self.is_last else NoLoss(like, pdfs, frames)

    def of_last_stage(self, figures: Tensor) -> Tensor:
        self.stage.broadcast(figures, self.stage.world_size - 1)
        return figures

    def numbers(self, counts: Sequence[int]) -> tuple[list[int], int]:
        by_list = list(zip(*self.stage.all_gather_object(list(counts)), strict=True))
        numbers, first = list[int](), 0
        for of_stages in by_list:
            start = first + sum(of_stages[: self.stage.rank])
            numbers.extend(range(start, start + of_stages[self.stage.rank]))
            first += sum(of_stages)
        return numbers, first

    def of_all_stages(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sent = torch.frombuffer(bytearray(save(dict(own))), dtype=torch.uint8)
        sizes = self.stage.all_gather_object(len(sent))
        received = torch.empty(sum(sizes), dtype=torch.uint8)
        self.stage.all_gather_into(sent, received, sizes)
        parts = [load(part.numpy().tobytes()) for part in torch.split(received, sizes)]
        return {name: tensor for part in parts for name, tensor in part.items()}
