"""The communicator: what one worker can say to the others. MPI's buffer calls on tensors, nothing pickled.

Sums are MPI's own for float32, float64 and int64 only. 16-bit numbers travel as int16 views and are never handed to MPI
to sum: Open MPI 5 sums bfloat16 wrongly and silently.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ddnn.errors import UserError
from ddnn.parallel.launch import announced_workers, die_with_launcher, inside_mpi_job

SUMMED = (torch.float32, torch.float64, torch.int64)
SENT = (*SUMMED, torch.int16, torch.uint8)

Wire = Literal["float32", "bfloat16"]


@dataclass
class Traffic:
    """What this worker sent so far and how long it took; only ever grows.

    Attributes:
        bytes_sent: what this worker handed to the network. A sum or an all-gather counts its own buffer once, whatever
            the MPI makes of it (a ring all-reduce moves 2 (n - 1) / n times as much), an all-to-all the chunks for
            others, a broadcast the root's buffer.
        transfer_seconds: in messages that move data.
        waiting_seconds: in small messages that cannot end before the slowest worker is there: `Exchange.waiting`.
    """

    bytes_sent: int = 0
    transfer_seconds: float = 0.0
    waiting_seconds: float = 0.0

    def copy(self) -> Traffic:
        """As it is now."""
        return Traffic(self.bytes_sent, self.transfer_seconds, self.waiting_seconds)

    def __sub__(self, earlier: Traffic) -> Traffic:
        """What came since `earlier`."""
        return Traffic(
            self.bytes_sent - earlier.bytes_sent,
            self.transfer_seconds - earlier.transfer_seconds,
            self.waiting_seconds - earlier.waiting_seconds,
        )


@dataclass
class Exchange:
    """One worker's way to the others. All methods but the attributes are collective unless they say otherwise.

    Tensors handed in are contiguous, on the CPU, of dtype float32, float64 or int64 (int16 and uint8 may be sent, not
    summed); anything else is a TypeError. What a method returns is a buffer that is kept: it is allocated once per
    role, size and dtype, and valid until the next call of the same method with the same size and dtype.

    Attributes:
        rank: number of this worker, from 0.
        size: number of workers.
        local_rank: number of this worker among those of its host, from 0: the GPU to take.
        local_size: number of workers on this host.
        host: name of the host.
        wire: how parameters travel, see `ddnn.parallel.mean` and `ddnn.parallel.strategies`.
        communicator: mpi4py's communicator; None for a single worker, which needs no MPI.
        traffic: what was sent and how long it took. One thread at a time may use an exchange, any thread may read this.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    wire: Wire = "float32"
    communicator: Any = None
    traffic: Traffic = field(default_factory=Traffic)
    _waiting: bool = field(default=False, repr=False)
    _kept: dict[tuple[str, int, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    def keep(self, role: str, size: int, dtype: torch.dtype) -> Tensor:
        """A flat buffer that is allocated at the first call and handed out again at later ones. Not collective."""
        key = (role, size, dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype)
        return self._kept[key]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time of the messages in this block as waiting for the slowest worker. Not collective."""
        before, self._waiting = self._waiting, True
        try:
            yield
        finally:
            self._waiting = before

    @contextmanager
    def _counted(self, sent: int) -> Iterator[None]:
        """Counts one call: `sent` bytes, and its time."""
        since = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - since
            self.traffic.bytes_sent += sent
            if self._waiting:
                self.traffic.waiting_seconds += seconds
            else:
                self.traffic.transfer_seconds += seconds

    def sum_in_place(self, buffer: Tensor) -> None:
        """buffer <- the sum of all workers' buffers: the same bits on each."""
        array = _array(buffer, SUMMED)
        if self.communicator is not None:
            from mpi4py import MPI

            with self._counted(array.nbytes):
                self.communicator.Allreduce(MPI.IN_PLACE, array, op=MPI.SUM)

    def send_receive(self, buffer: Tensor, to: int, source: int) -> Tensor:
        """Sends `buffer` to worker `to` while worker `source` sends one of the same size and dtype here.

        Who sends to whom must fit over all workers; workers that take no part in a round do not call.
        """
        array = _array(buffer, SENT)
        received = self.keep("received", buffer.numel(), buffer.dtype)
        if self.communicator is None or to == source == self.rank:
            received.copy_(buffer.detach().view(-1))
        else:
            with self._counted(array.nbytes):
                self.communicator.Sendrecv(array, dest=to, recvbuf=received.numpy(), source=source)
        return received.view(buffer.shape)

    def all_gather(self, buffer: Tensor) -> Tensor:
        """Every worker's buffer, (size, *buffer.shape), the same on each."""
        array = _array(buffer, SENT)
        gathered = self.keep("gathered", self.size * buffer.numel(), buffer.dtype)
        if self.communicator is None:
            gathered.copy_(buffer.detach().view(-1))
        else:
            with self._counted(array.nbytes):
                self.communicator.Allgather(array, gathered.numpy())
        return gathered.view(self.size, *buffer.shape)

    def all_to_all(self, chunks: Tensor) -> Tensor:
        """Sends chunks[r] to worker r; row r of the answer is what worker r sent here. (size, chunk) both."""
        array = _array(chunks, SENT)
        if chunks.shape[:1] != (self.size,):
            raise ValueError(f"one chunk for each of {self.size} workers, not {tuple(chunks.shape)}")
        swapped = self.keep("swapped", chunks.numel(), chunks.dtype)
        if self.communicator is None:
            swapped.copy_(chunks.detach().view(-1))
        else:
            with self._counted(array.nbytes - array.nbytes // self.size):
                self.communicator.Alltoall(array, swapped.numpy())
        return swapped.view(chunks.shape)

    def broadcast(self, buffer: Tensor, root: int = 0) -> None:
        """buffer <- that of worker `root`."""
        array = _array(buffer, SENT)
        if self.communicator is not None:
            with self._counted(array.nbytes if self.rank == root else 0):
                self.communicator.Bcast(array, root=root)

    def agree_min(self, value: int) -> int:
        """The smallest of all workers' values (as of the averagings that each has data for). Counts as waiting."""
        with self.waiting():
            return int(self.all_gather(torch.tensor([value], dtype=torch.int64)).min())

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker. Travels as JSON: dicts, lists, strings, numbers, None.
        Counts as waiting."""
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        if self.communicator is None:
            return [json.loads(text.tobytes())]
        with self.waiting():
            lengths = [int(n) for n in self.all_gather(torch.tensor([len(text)], dtype=torch.int64)).view(-1)]
            together = np.empty(sum(lengths), dtype=np.uint8)
            with self._counted(text.nbytes):
                self.communicator.Allgatherv(text, [together, lengths])
        ends = np.cumsum(lengths)
        return [json.loads(together[end - n : end].tobytes()) for end, n in zip(ends, lengths, strict=True)]

    def barrier(self) -> None:
        """Waits until every worker is here, and counts as waiting."""
        if self.communicator is not None:
            with self.waiting(), self._counted(0):
                self.communicator.Barrier()


def connect(environment: Mapping[str, str] = os.environ, wire: Wire = "float32") -> Exchange:
    """Joins the MPI job that this process was started in; a single worker where there is none, without any MPI.

    Raises:
        UserError: mpi4py or its MPI is missing, or the job has several workers of which MPI sees only one.
    """
    if not inside_mpi_job(environment):
        return Exchange(wire=wire)
    die_with_launcher(environment)
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"mpi4py cannot be used: {error}", mend="pip install 'ddnn[mpi]', or load the cluster's MPI module"
        ) from error
    announced, seen = announced_workers(environment), MPI.COMM_WORLD.size
    if seen == 1 and announced > 1:
        raise UserError(
            f"{announced} workers were started, but each sees only itself: what started them and mpi4py's MPI "
            f"({MPI.Get_library_version().splitlines()[0].strip()}) do not belong together",
            mend="under Slurm use `srun --mpi=pmix`, or mpirun inside sbatch; else the mpirun of the same MPI",
        )
    return over(MPI.COMM_WORLD.Dup(), wire)


def over(communicator: Any, wire: Wire = "float32") -> Exchange:
    """An exchange over a communicator of mpi4py, which becomes its own: nobody else may send over it."""
    from mpi4py import MPI

    local = communicator.Split_type(MPI.COMM_TYPE_SHARED, key=communicator.rank)
    local_rank, local_size = local.rank, local.size
    local.Free()
    return Exchange(
        rank=communicator.rank,
        size=communicator.size,
        local_rank=local_rank,
        local_size=local_size,
        host=MPI.Get_processor_name(),
        wire=wire,
        communicator=communicator,
    )


def _array(buffer: Tensor, allowed: tuple[torch.dtype, ...]) -> np.ndarray[Any, Any]:
    """The tensor's own memory for MPI. Refuses what MPI would misread: strides, other devices, bfloat16."""
    if buffer.dtype not in allowed or buffer.device.type != "cpu" or not buffer.is_contiguous():
        raise TypeError(
            f"a contiguous CPU tensor of {', '.join(str(dtype) for dtype in allowed)} is needed, not {buffer.dtype} "
            f"on {buffer.device} with strides {buffer.stride()}"
        )
    array: np.ndarray[Any, Any] = buffer.detach().numpy()
    return array
