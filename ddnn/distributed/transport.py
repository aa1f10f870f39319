"""How the parameters of GPUs travel: through host memory, by a CUDA-aware MPI, or by NCCL (`parallel.gpu_transport`).
Opened once a job, by all workers alike. On the CPU there is nothing to choose: MPI reads the parameters where
they are. None of what concerns GPUs has been seen on a GPU yet, but for the calls of `ProcessGroupBackend` on gloo."""

from __future__ import annotations

import copy
import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ddnn.distributed.communicator import Communicator, TensorBackend, Transport, Wait
from ddnn.distributed.groups import Groups
from ddnn.distributed.mpi import MpiCommunicator
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.util.errors import UserError
from ddnn.util.system import device_identity

_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # public, but its stub does not say so
_new_groups: Any = dist.new_subgroups_by_enumeration
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def choose_transport(name: str, device: torch.device, comm: Communicator, columns: int = 1) -> Transport:
    """Chooses the way for this training's parameters, on `device`, and for outputs of layers that `columns` workers of
    `comm` share. Collective; the same answer on every worker. UserError: what is asked for (`parallel.gpu_transport`) cannot be had; on all workers alike.

    Returns `host`: tensors of the host's memory by MPI, the CPU's only way, a single worker's too; `device`: tensors of
    the GPU's memory by MPI, which says that it is CUDA-aware; `nccl`: those by NCCL, where small messages still go by
    MPI.
    """
    if not isinstance(comm, MpiCommunicator):
        return "host"
    aware, asked = cuda_aware(comm.mpi_comm) if device.type == "cuda" else (False, "")
    everyone = comm.all_gather_object([device_identity(device), aware, dist.is_nccl_available()])
    chosen = select_transport(name, [row[0] for row in everyone], all(row[1] for row in everyone), asked, columns)
    if chosen == "nccl" and not all(row[2] for row in everyone):
        raise _unsupported("nccl", "this torch is built without NCCL")
    return chosen


@contextmanager
def open_transport(name: str, device: torch.device, groups: Groups) -> Iterator[None]:
    """Within the block all `groups` move tensors on `device` in the way of `choose_transport`. One block serves all that a job
    trains. Collective; UserError as there. After an error a process group is left as it is: to close it all workers
    would have to come."""
    world = groups.world
    chosen = choose_transport(name, device, world, groups.column.world_size)
    group = ProcessGroupBackend(world, "nccl", device) if chosen == "nccl" else None
    # All workers make the process groups in this order, of which those of one kind are made together.
    for comm in dict.fromkeys((world, groups.replica, groups.column, groups.stage, groups.data)):
        if chosen != "host" and comm.world_size > 1:
            comm.backends[device.type] = group.of(comm, world) if group else comm.backends["cpu"]
            comm.transport = chosen
    try:
        yield
    except TrainingInterrupted:  # which all workers raise
        _close(group)
        raise
    _close(group)


def _close(group: ProcessGroupBackend | None) -> None:
    if group is not None:
        group.close()


def select_transport(name: str, devices: Sequence[str], aware: bool, how_detected: str, columns: int = 1) -> Transport:
    """What `choose_transport` decides, from the `device_identity` of every worker's device, and whether every worker's
    MPI says that it takes GPU memory (`how_detected`: how it was asked). Pure."""
    if columns > 1 and set(devices) != {"cpu"}:  # what they exchange in each minibatch is on the GPUs
        if name == "host":
            raise _unsupported(name, f"parallel.columns is {columns}, and outputs of layers go from GPU to GPU")
        if name == "auto":
            name = "device" if aware else "nccl"
    elif name == "host" or (name == "auto" and ("cpu" in devices or not aware)):
        return "host"
    if "cpu" in devices:
        raise _unsupported(name, f"worker {devices.index('cpu')} computes on the CPU")
    if name == "nccl":
        if len(set(devices)) < len(devices):
            raise _unsupported(name, "NCCL takes one worker for each GPU, and here workers share one")
        return "nccl"
    if not aware:
        raise _unsupported("device", f"this MPI does not say that it takes GPU memory ({how_detected})")
    return "device"


def _unsupported(name: str, why: str) -> UserError:
    return UserError(
        f"parameters cannot travel by {name}: {why}",
        location=f"parallel.gpu_transport: {name}",
        hint="set parallel.gpu_transport to auto, or without columns to host; device needs an MPI with CUDA, nccl a CUDA "
        "build of torch",
    )


def cuda_aware(communicator: Any, environment: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Whether the MPI says that it takes GPU memory, and what was asked. Not collective.

    Asked in this order, the first that answers counts: MPI 4.1's `mpi_memory_alloc_kinds` of the communicator,
    `MPIX_Query_cuda_support` (Open MPI, MPICH, MVAPICH) and `MPIX_GPU_query_support` (MPICH, Cray) of the library that
    mpi4py has loaded. Cray's says yes also where it will not: it needs MPICH_GPU_SUPPORT_ENABLED=1.
    """
    from mpi4py import MPI

    version = MPI.Get_library_version().splitlines()[0].strip("\0 ")
    if "CRAY" in version.upper() and environment.get("MPICH_GPU_SUPPORT_ENABLED", "0") != "1":
        return False, f"{version}: MPICH_GPU_SUPPORT_ENABLED is not 1"
    info = communicator.Get_info()
    kinds = info.get("mpi_memory_alloc_kinds")
    info.Free()
    if kinds and any(kind.split(":")[0].strip() == "cuda" for kind in kinds.split(",")):
        return True, f"{version}: mpi_memory_alloc_kinds is {kinds}"
    # mpi4py's own module: a search there continues in the MPI library that it is linked with.
    library = ctypes.CDLL(MPI.__file__)
    if hasattr(library, "MPIX_Query_cuda_support"):
        answer = int(library.MPIX_Query_cuda_support())
        return answer == 1, f"{version}: MPIX_Query_cuda_support() is {answer}"
    if hasattr(library, "MPIX_GPU_query_support"):
        flag, cuda = ctypes.c_int(0), 0  # MPIX_GPU_SUPPORT_CUDA
        failed = int(library.MPIX_GPU_query_support(cuda, ctypes.byref(flag)))
        return failed == 0 and flag.value == 1, f"{version}: MPIX_GPU_query_support(CUDA) is {flag.value}"
    return False, f"{version}: has no way to ask"


class ProcessGroupBackend(TensorBackend):
    """The default process group of torch.distributed, which this opens (by a store of rank 0, told over MPI) and
    `close` closes; `of` makes further ones of some of its workers, of the same backend. Backend nccl for GPUs (not yet seen on a GPU); gloo runs the same calls on the CPU, in the tests.
    What is only moved goes as bytes: NCCL and gloo know no int16. Backends that run on a CUDA stream are waited for.
    After `seconds` without an answer torch.distributed gives up a call."""

    def __init__(
        self, comm: Communicator, backend: Literal["nccl", "gloo"], device: torch.device, seconds: float = 600.0
    ) -> None:
        hosts, timeout = comm.all_gather_object(comm.host), timedelta(seconds=seconds)
        host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
        if comm.rank == 0:
            store = _store(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        port = comm.all_gather_object(store.port if comm.rank == 0 else None)[0]
        if comm.rank != 0:
            store = _store(host, port, is_master=False, timeout=timeout)
        gpu = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=comm.rank, world_size=comm.world_size, timeout=timeout, device_id=gpu
        )
        self._group: Any = None  # the default one
        self._timeout = timeout

    def of(self, comm: Communicator, world: Communicator) -> ProcessGroupBackend:
        """That of `comm`, a group split from `world`, for which this one is, with its workers in the order of `world`. All
        of `world` take part, each with its group of as many workers."""
        if comm.world_size == world.world_size:
            return self
        members = world.all_gather_object(comm.all_gather_object(world.rank))
        split = copy.copy(self)
        groups = [list(ranks) for ranks in dict.fromkeys(map(tuple, members))]
        split._group, _ = _new_groups(groups, timeout=self._timeout)
        return split

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor.detach(), group=self._group)
        _finish(tensor)

    def sendrecv(self, tensor: Tensor, received: Tensor, dest: int, source: int) -> None:
        group = self._group
        both = [
            dist.P2POp(dist.isend, _bytes(tensor), group=group, group_peer=dest),
            dist.P2POp(dist.irecv, _bytes(received), group=group, group_peer=source),
        ]
        for request in dist.batch_isend_irecv(both):
            request.wait()
        _finish(tensor)

    def all_gather(self, tensor: Tensor, gathered: Tensor) -> None:
        _all_gather(_bytes(gathered), _bytes(tensor), group=self._group)
        _finish(tensor)

    def all_to_all(self, chunks: Tensor, received: Tensor) -> None:
        dist.all_to_all_single(_bytes(received), _bytes(chunks), group=self._group)
        _finish(chunks)

    def all_gather_into(self, block: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
        if len(set(sizes)) == 1:
            self.all_gather(block, gathered)
            return
        for src, part in enumerate(torch.split(gathered, list(sizes))):  # gloo gathers only blocks of one size
            if src == dist.get_rank(self._group):
                part.copy_(block.detach().view(-1))
            dist.broadcast(_bytes(part), group=self._group, group_src=src)
        _finish(block)

    def all_to_all_into(
        self, chunks: Tensor, received: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> None:
        came, sent = ([size * chunks.itemsize for size in sizes] for sizes in (received_sizes, sent_sizes))
        dist.all_to_all_single(_bytes(received), _bytes(chunks), came, sent, group=self._group)
        _finish(chunks)

    def isend(self, tensor: Tensor, dest: int) -> Wait:
        return self._begin(dist.isend(_bytes(tensor), group=self._group, group_dst=dest), tensor)

    def irecv(self, received: Tensor, source: int) -> Wait:
        return self._begin(dist.irecv(_bytes(received), group=self._group, group_src=source), received)

    def _begin(self, request: Any, tensor: Tensor) -> Wait:
        def wait() -> None:
            request.wait()
            _finish(tensor)

        return wait

    def broadcast(self, tensor: Tensor, src: int) -> None:
        dist.broadcast(_bytes(tensor), group=self._group, group_src=src)
        _finish(tensor)

    def close(self) -> None:
        """Collective: ends the group, and all made of it. Nothing may be sent over them any more."""
        dist.destroy_process_group()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def _finish(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
