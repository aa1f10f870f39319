"""NG-SGD of a network whose layers are split by columns over workers, exactly.

The input of a layer is whole on every worker, and so is its Fisher matrix, of which every worker has a copy. Of the output
derivative a worker has the columns Y^(j) of its own outputs, and of W the same columns. Sums over all columns are

    H = Y W^T                             of all layers in one message, between the two calls of a `Projection`
    |y_i|^2 summed, |y^_i|^2, K, L        of all layers in one message after them: squares of norms, before their roots

so that gamma, kappa and the update of the Fisher matrix are those of one worker. J^(j) = (eta/N) H^T Y^(j) and Y^(j) - H W^(j)
need nothing from others. The r x r part of an update is computed by one worker, of each layer by another, which sends it to
all: two machines need not round alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator
from ddnn.nn.columns import ColumnPartition
from ddnn.nn.layer import Gemm, Layer, LayerCall
from ddnn.nn.layout import Interval
from ddnn.nn.network import Network, Workspace
from ddnn.optim.natural_gradient import (
    FisherUpdate,
    NaturalGradient,
    NaturalGradientOptions,
    Side,
    Vector,
    orthonormalize,
)
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions


class ColumnNaturalGradient(NaturalGradient):
    """The preconditioner of one side of a layer that is split by columns.

    Args:
        dim, options: as of `NaturalGradient`; `dim` counts all columns.
        like: a tensor of the device and dtype of all that it has.
        partition: among which workers.
        owner: the worker that computes the r x r part of its updates.
        columns: those that this worker has of its minibatches; None: all.
    """

    def __init__(
        self,
        dim: int,
        options: NaturalGradientOptions,
        like: Tensor,
        partition: ColumnPartition,
        owner: int,
        columns: Interval | None = None,
    ) -> None:
        super().__init__(dim, options, like.device, like.dtype, slice(*(columns or (None,))))
        self.partition, self.owner, self.is_split = partition, owner, columns is not None
        self._summed_n = 0  # rows of the minibatch of whose statistics this worker has only its columns' part

    def initial_updates(self, n: int) -> int:
        return 0 if self.is_split else super().initial_updates(n)

    def update_initially(self, side: Side, x: Tensor) -> None:
        """The updates that the first minibatch makes before it is preconditioned. Collective."""
        for _ in range(super().initial_updates(len(x))):
            rows, h = side.rows.load(x, self.w)
            self.partition.sum_([h])
            self.update_from_rows(rows, h, side.rows.before)
            self.partition.sum_(self.statistics)
            self.statistics_are_summed()
            self.finish_update()

    def update_from_rows(self, x: Tensor, h: Tensor, row_norms: Tensor) -> None:
        """L is J W^T in any case: H^T H would have to be told from a sum of all columns."""
        if not self.is_split:
            super().update_from_rows(x, h, row_norms)
            return
        torch.mm(h.t(), x, out=self.j)
        self.update_from_j(row_norms)

    def _send_statistics(self, row_norms: Tensor) -> None:
        super()._send_statistics(row_norms)
        if self.is_split:
            self._summed_n, self._pending_n = self._pending_n, 0
            self._norm.square_()

    @property
    def statistics(self) -> list[Tensor]:
        """K, L and |X|_F^2 of this minibatch's own columns, to be summed; empty where no update has begun."""
        return [self._stats] if self._summed_n else []

    def statistics_are_summed(self) -> None:
        """To be called once `statistics` are those of all columns."""
        if self._summed_n:
            self._norm.sqrt_()
            self._send_to_host()
            self._pending_n, self._summed_n = self._summed_n, 0

    def finish_update(self) -> None:
        finish_updates([self], self.partition.comm)

    @property
    def packed_sizes(self) -> list[int]:
        """Bytes of A and the factors of W, and of d, e, rho, whether R may be skewed and whether there is an update."""
        return [self._back_host.nbytes, 8 * (2 * self.rank + 3)]

    def pack(self) -> Tensor:
        """The r x r part of the update that is pending, for all workers: uint8, in `packed_sizes`."""
        self.factor()
        update, self._update = self._update, None
        found = update or FisherUpdate(self.d, self.rho, self.d, False)
        numbers = [*found.d, *found.e, found.rho, found.may_be_skewed, update is not None]
        return torch.cat(
            [self._back_host.view(torch.uint8), torch.tensor(numbers, dtype=torch.float64).view(torch.uint8)]
        )

    def unpack(self, packed: Tensor) -> None:
        """Makes the update that the owner has packed."""
        self._pending_n = 0
        back, rest = torch.split(packed, self.packed_sizes)
        numbers = torch.empty(len(rest) // 8, dtype=torch.float64)
        numbers.view(torch.uint8).copy_(rest)
        d, e, (rho, may_be_skewed, is_finite) = np.split(numbers.numpy(), [self.rank, 2 * self.rank])
        if is_finite:
            self._back_host.view(torch.uint8).copy_(back)
            self._update = FisherUpdate(d.copy(), float(rho), e, bool(may_be_skewed))
        self.apply()

    def _orthonormalize(self, e: Vector) -> None:
        whole, comm = self._whole_w(), self.partition.comm
        if comm.rank == self.owner:
            orthonormalize(whole, e)
        comm.broadcast(whole, self.owner)
        self.w.copy_(whole[:, self.columns])

    def _whole_w(self) -> Tensor:
        """W of all columns. Collective."""
        if not self.is_split:
            return self.w.clone()
        whole = self.w.new_empty(self.rank, self.dim)
        self.partition.gather(self.w, whole)
        return whole

    def _state(self) -> dict[str, Tensor]:
        return super()._state() | {"w": self._whole_w()}


def finish_updates(sides: Iterable[ColumnNaturalGradient], comm: Communicator) -> None:
    """Finishes the updates that are pending: of each its owner computes the r x r part, and tells all. Collective."""
    pending = [side for side in sides if side.pending]
    if not pending:
        return
    if pending[0].device.type == "cuda":
        torch.cuda.current_stream(pending[0].device).synchronize()  # K and L are on the host then
    by_owner = [[side for side in pending if side.owner == rank] for rank in range(comm.world_size)]
    sizes = [sum(sum(side.packed_sizes) for side in owned) for owned in by_owner]
    own = torch.cat([torch.empty(0, dtype=torch.uint8), *(side.pack() for side in by_owner[comm.rank])])
    packed = torch.empty(sum(sizes), dtype=torch.uint8)
    comm.all_gather_into(own, packed, sizes)
    in_order = [side for owned in by_owner for side in owned]
    for side, part in zip(in_order, torch.split(packed, [sum(side.packed_sizes) for side in in_order]), strict=True):
        side.unpack(part)


class _OutputSide(Side):
    """That of an output derivative; H is that of all columns between `project` and `remove`."""

    def remove(self) -> Tensor:
        ng, rows = self.preconditioner, self.rows
        if not self._updates or rows.gives_j:
            return super().remove()
        x, _ = rows.rows_and_h(ng.w)
        ng.update_from_rows(x, rows.h, rows.before)
        return rows.remove(ng.w)


class ColumnNgSgd(NgSgd):
    """NG-SGD on this worker's columns."""

    output_side = _OutputSide
    fused = False

    def __init__(self, network: Network, partition: ColumnPartition, options: NgSgdOptions | None = None) -> None:
        self.partition, self._whole_layers = partition, partition.layers(network.layers)
        self._inputs, self._outputs = dict[int, ColumnNaturalGradient](), dict[int, ColumnNaturalGradient]()
        super().__init__(network, options)

    def whole_gemm(self, k: int) -> Gemm:
        gemm = self._whole_layers[k].gemm
        assert gemm is not None
        return gemm

    def new_preconditioners(self, k: int, *sides: tuple[int, NaturalGradientOptions]) -> list[NaturalGradient]:
        partition, like = self.partition, self.network.parameters
        of_input, of_output = sides
        own = partition.cuts(of_output[0])[partition.comm.rank]
        owner = k % partition.comm.world_size
        self._inputs[k] = ColumnNaturalGradient(*of_input, like, partition, owner)
        self._outputs[k] = ColumnNaturalGradient(*of_output, like, partition, owner, own)
        return [self._inputs[k], self._outputs[k]]

    def gradient_norms(self, layer: Layer, call: LayerCall) -> Tensor:
        norms = super().gradient_norms(layer, call).square_()
        self.partition.comm.all_reduce(norms)
        return norms.sqrt_()

    def finish_updates(self) -> None:
        finish_updates([*self._inputs.values(), *self._outputs.values()], self.partition.comm)
        self._take_w()

    def precondition(self, workspace: Workspace) -> None:
        self._fit_memory(workspace)
        numbers = list(self._memory.sides)
        # Where rows are preconditioned in float32 beside the bf16 ones, all layers share that memory.
        for together in [[k] for k in numbers] if self.options.exact else [numbers]:
            self._precondition(together, workspace)

    def _precondition(self, numbers: Sequence[int], workspace: Workspace) -> None:
        sides, x_hats = [self._memory.sides[k] for k in numbers], list[Tensor]()
        outputs = [(self._memory.sides[k][1].rows, self._outputs[k]) for k in numbers]
        for k, (inputs, grads), (_, ng) in zip(numbers, sides, outputs, strict=True):
            x, grad = self._statistics(k, workspace)
            x_hats.append(inputs.precondition(x))
            ng.update_initially(grads, grad)
            grads.project(grad)
        self.partition.sum_([rows.h for rows, _ in outputs])
        for k, x_hat, (_, grads) in zip(numbers, x_hats, sides, strict=True):
            self._rows[k] = x_hat, grads.remove()
        totals = torch.stack([rows.before.square_().sum() for rows, _ in outputs])
        afters = [rows.after.square_() for rows, _ in outputs]
        statistics = [tensor for _, ng in outputs for tensor in ng.statistics]
        self.partition.sum_([totals, *afters, *statistics])
        for (rows, ng), total in zip(outputs, totals.sqrt_(), strict=True):
            rows.after.sqrt_()
            rows.before.zero_()
            rows.before[0] = total  # of which only the norm is wanted: that of all rows
            ng.statistics_are_summed()
