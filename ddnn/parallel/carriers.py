"""What moves the bytes of an `Exchange`: MPI, or a process group of torch.distributed for NCCL between GPUs."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ddnn.parallel.exchange import Exchange


_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, but its stub does not say so
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


class Carrier(Protocol):
    """Collective calls on contiguous tensors of one device. A call returns when the data is there.

    `Exchange` checks what is handed in and allocates what is received: same dtype and device as what is sent.
    """

    def sum_in_place(self, buffer: Tensor) -> None:
        """buffer <- the sum over workers, the same bits on each; float32, float64 or int64."""

    def send_receive(self, buffer: Tensor, received: Tensor, to: int, source: int) -> None:
        """buffer goes to worker `to`, received <- what worker `source` sends here; never to itself."""

    def all_gather(self, buffer: Tensor, gathered: Tensor) -> None:
        """gathered <- the buffers of all workers, by rank."""

    def all_to_all(self, chunks: Tensor, swapped: Tensor) -> None:
        """The r-th of equal chunks goes to worker r; the r-th of swapped is what worker r sent here."""

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """buffer <- that of worker `root`."""


class OverMpi:
    """MPI on the tensors' own memory: of the host, or of a GPU where the MPI is CUDA-aware (not yet seen on a GPU)."""

    def __init__(self, communicator: Any) -> None:
        """`communicator` is mpi4py's."""
        from mpi4py import MPI

        self.communicator, self.in_place, self.plus = communicator, MPI.IN_PLACE, MPI.SUM

    def sum_in_place(self, buffer: Tensor) -> None:
        """See `Carrier`."""
        self.communicator.Allreduce(self.in_place, _memory(buffer), op=self.plus)

    def send_receive(self, buffer: Tensor, received: Tensor, to: int, source: int) -> None:
        """See `Carrier`."""
        self.communicator.Sendrecv(_memory(buffer), dest=to, recvbuf=_memory(received), source=source)

    def all_gather(self, buffer: Tensor, gathered: Tensor) -> None:
        """See `Carrier`."""
        self.communicator.Allgather(_memory(buffer), _memory(gathered))

    def all_to_all(self, chunks: Tensor, swapped: Tensor) -> None:
        """See `Carrier`."""
        self.communicator.Alltoall(_memory(chunks), _memory(swapped))

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """See `Carrier`."""
        self.communicator.Bcast(_memory(buffer), root=root)


def _memory(tensor: Tensor) -> Any:
    """What mpi4py takes as a buffer: a numpy view, or the GPU tensor itself (__cuda_array_interface__).

    MPI knows nothing of CUDA streams: all work that a GPU tensor waits for is finished first.
    """
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)  # per thread; an MPI may ask for the thread's current device
        torch.cuda.current_stream(tensor.device).synchronize()
        return tensor.detach()
    torch.autograd.graph.increment_version(tensor)  # MPI may write there, unseen by torch: it counts as changed
    return tensor.detach().numpy()


class OverGroup:
    """The default process group of torch.distributed, which this opens and `close` closes.

    Backend nccl for GPUs (not yet seen on a GPU); gloo runs the same calls on the CPU, in the tests. What is only moved
    goes as bytes: NCCL and gloo know no int16. Backends that run on a CUDA stream are waited for, as MPI is.
    """

    def __init__(self, exchange: Exchange, backend: str, device: torch.device, seconds: float = 600.0) -> None:
        """Collective. Rank 0 opens a store on a free port and tells the others by MPI where it is.

        Args:
            exchange: over MPI.
            backend: `nccl` or `gloo`.
            device: of the tensors that will be exchanged.
            seconds: after so long without an answer torch.distributed gives up a call.
        """
        hosts, patience = exchange.gather(exchange.host), timedelta(seconds=seconds)
        host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
        first, port = exchange.rank == 0, 0
        if first:
            store = _store(host, port, is_master=True, wait_for_workers=False, timeout=patience)
            port = store.port
        port = exchange.gather(port)[0]
        if not first:
            store = _store(host, port, is_master=False, timeout=patience)
        dist.init_process_group(
            backend,
            store=store,
            rank=exchange.rank,
            world_size=exchange.size,
            timeout=patience,
            device_id=device if device.type == "cuda" else None,
        )

    def sum_in_place(self, buffer: Tensor) -> None:
        """See `Carrier`."""
        dist.all_reduce(buffer.detach())
        _finish(buffer)

    def send_receive(self, buffer: Tensor, received: Tensor, to: int, source: int) -> None:
        """See `Carrier`."""
        both = [dist.P2POp(dist.isend, _bytes(buffer), to), dist.P2POp(dist.irecv, _bytes(received), source)]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        _finish(buffer)

    def all_gather(self, buffer: Tensor, gathered: Tensor) -> None:
        """See `Carrier`."""
        _all_gather(_bytes(gathered), _bytes(buffer))
        _finish(buffer)

    def all_to_all(self, chunks: Tensor, swapped: Tensor) -> None:
        """See `Carrier`."""
        dist.all_to_all_single(_bytes(swapped), _bytes(chunks))
        _finish(chunks)

    def broadcast(self, buffer: Tensor, root: int) -> None:
        """See `Carrier`."""
        dist.broadcast(_bytes(buffer), src=root)
        _finish(buffer)

    def close(self) -> None:
        """Collective: ends the group. Nothing may be sent over it any more."""
        dist.destroy_process_group()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
