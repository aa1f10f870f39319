"""Networks each of whose layers is split by its outputs over the workers of a group: the columns of a replica.

Worker j of k has the rows [o_j, o_(j+1)) of W and b of each layer. Its part of the output is (N, D/k); an all-gather gives
each worker the whole of it, which the next layer reads. Backward, d W^T of the own rows is a partial sum of the input's
derivative: each worker gets the partial sums of its own columns from all others and adds them up in float32, by rank,
so that the bits do not depend on the MPI, which never sums bf16. The loss needs only four values per frame of each worker."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator
from ddnn.nn.arithmetic import Float32
from ddnn.nn.layer import Layer
from ddnn.nn.layout import Interval, Part, columns_of, cut
from ddnn.nn.loss import SoftmaxCrossEntropy
from ddnn.nn.partition import Link, SharedPartition


class ColumnLink(Link):
    """Between two layers that are split by columns: gathers the lower one's outputs, and sums their derivative. A row of
    outputs may have several places, each with units of its own, of which every worker has the same ones (`Layer.units`)."""

    def __init__(self, comm: Communicator, cuts: Sequence[Interval]) -> None:
        """`cuts`: the units of a place that each worker has."""
        self.comm, self.widths = comm, [end - start for start, end in cuts]

    def _places(self, own: Tensor) -> int:
        """Of all rows."""
        return own.numel() // self.widths[self.comm.rank]

    def memory(self, outputs: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
        whole = len(outputs), outputs.shape[1] // self.widths[self.comm.rank] * sum(self.widths)
        return outputs.new_zeros(whole), outputs.new_zeros(whole)

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        sizes = [self._places(outputs) * width for width in self.widths]
        gathered = self.comm.workspace("columns", sum(sizes), outputs.dtype, outputs.device)
        self.comm.all_gather_into(outputs.contiguous(), gathered, sizes)  # of which some may be padding
        columns = torch.split(inputs.view(-1, sum(self.widths)), self.widths, dim=1)
        for block, of_inputs in zip(torch.split(gathered, sizes), columns, strict=True):
            of_inputs.copy_(block.view_as(of_inputs))

    def backward(self, input_derivatives: Tensor, derivatives: Tensor) -> None:
        comm, places, dtype = self.comm, self._places(derivatives), input_derivatives.dtype
        sizes, own = [places * width for width in self.widths], derivatives.numel()
        packed = comm.workspace("partial sums", sum(sizes), dtype, derivatives.device)
        received = comm.workspace("own columns", own * comm.world_size, dtype, derivatives.device)
        columns = torch.split(input_derivatives.view(-1, sum(self.widths)), self.widths, dim=1)
        for chunk, partial in zip(torch.split(packed, sizes), columns, strict=True):
            chunk.view_as(partial).copy_(partial)
        comm.all_to_all_into(packed, received, sizes, [own] * comm.world_size)
        summed = torch.float32 if dtype == torch.bfloat16 else dtype
        derivatives.copy_(received.view(comm.world_size, *derivatives.shape).sum(dim=0, dtype=summed))


class ColumnCrossEntropy(SoftmaxCrossEntropy):
    """Softmax and cross-entropy over outputs that are split by columns. Each worker tells the others, for each frame, its
    largest logit m_j, where that is, sum exp(z - m_j), and its logit of the label, if it has that; all merge the same numbers
    in the same order. Of equal logits the one of the lowest pdf-id counts, NaN is larger than all. The reference is
    `ddnn.nn.loss.cross_entropy` of all outputs."""

    def __init__(self, comm: Communicator, first: int, like: Tensor, pdfs: int, frames: int) -> None:
        """`first`: number of the first own pdf; `pdfs`: how many this worker has."""
        super().__init__(like, pdfs, frames)
        self._comm, self._first, self._pdfs = comm, first, pdfs
        self._values = like.new_empty(4, frames)
        self._exponentials = like.new_empty(0)

    def __call__(self, logits: Tensor, labels: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        frames = len(labels)
        values = self._values[:, :frames].contiguous()
        own = labels - self._first
        is_own = (own >= 0) & (own < self._pdfs)
        own = own.clamp(0, self._pdfs - 1)[:, None]
        exponentials = grad if grad.dtype == values.dtype else self._float32(grad)
        exponentials.copy_(logits)
        largest, where = exponentials.max(dim=1)
        target = exponentials.gather(1, own)[:, 0].masked_fill(~is_own, float("-inf"))
        exponentials.sub_(largest[:, None]).exp_()
        # A pdf-id is below 2^24, which float32 holds exactly.
        for row, value in zip(values, (largest, where + self._first, exponentials.sum(dim=1), target), strict=True):
            row.copy_(value)
        everyone = self._comm.all_gather(values)
        maxima, best, sums, targets = everyone.unbind(dim=1)
        maximum, winner = maxima.max(dim=0)  # the first of equal ones, or a NaN
        total = (sums * (maxima - maximum).exp_()).sum(dim=0)
        exponentials.mul_(((largest - maximum).exp_() / total)[:, None])
        exponentials.scatter_add_(1, own, -is_own[:, None].to(values.dtype))
        if exponentials is not grad:
            grad.copy_(exponentials)
        loss = (maximum - targets.max(dim=0).values + total.log_()).sum(dtype=torch.float64)
        return loss, (best.gather(0, winner[None])[0] == labels).sum()

    def _float32(self, grad: Tensor) -> Tensor:
        """Memory for the derivative in float32."""
        if self._exponentials.shape[0] < len(grad):
            self._exponentials = self._values.new_empty(grad.shape)
        return self._exponentials[: len(grad)]


class ColumnPartition(SharedPartition):
    """This worker's column of consecutive layers, among the workers of `comm`, which hold them together.

    Args:
        layers: these layers, whole.
        granule: cuts are at multiples of so many outputs.
        parts: of the columns, where the layers are some of a network; else as `columns_of` gives them.

    ValueError: as `columns_of`."""

    def __init__(
        self, layers: Sequence[Layer], comm: Communicator, granule: int = 1, parts: Sequence[Part] | None = None
    ) -> None:
        super().__init__(layers, parts or columns_of(layers, comm.world_size, granule), comm)
        self.granule = granule

    def gather(self, own: Tensor, whole: Tensor) -> None:
        """whole (rows, columns of all workers) <- `own` (rows, own columns) of each. Collective."""
        ColumnLink(self.comm, self.cuts(whole.shape[1])).forward(own, whole)

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Each tensor <- the sum of those of all workers, in one message. They have one dtype. Collective."""
        sizes = [tensor.numel() for tensor in tensors]
        together = self.comm.workspace("sums", sum(sizes), tensors[0].dtype, tensors[0].device)
        parts = [part.view(tensor.shape) for part, tensor in zip(torch.split(together, sizes), tensors, strict=True)]
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor)
        self.comm.all_reduce(together)
        for part, tensor in zip(parts, tensors, strict=True):
            tensor.copy_(part)

    def cuts(self, width: int) -> list[Interval]:
        """Of a layer of `width` outputs. Not collective."""
        return cut(width, self.comm.world_size, self.granule)

    def links(self, own: Sequence[Layer], dtype: torch.dtype) -> list[Link]:
        links, units = [Link()], 0
        for lower, upper in pairwise(own):
            units = units if lower.units is None else lower.units
            if upper.units is None:
                links.append(Link())
            else:
                places = lower.output_dim // units
                links.append(ColumnLink(self.comm, self.cuts(upper.input_dim // places)))
        return [*links, Link()]

    def cross_entropy(self, arithmetic: Float32, like: Tensor, pdfs: int, frames: int) -> SoftmaxCrossEntropy:
        first, _ = self.cuts(self._layers[-1].output_dim)[self.comm.rank]
        return ColumnCrossEntropy(self.comm, first, like, pdfs, frames)
