"""The communicator: what one worker can send to the others. Tensors and JSON, nothing pickled.

Names are those of torch.distributed. Sums are made for float32, float64 and int64 only; 16-bit numbers travel as int16
views and are never summed by the MPI: Open MPI 5 sums bfloat16 wrongly and silently.
"""

from __future__ import annotations

import json
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddnn.distributed.watchdog import NoWatchdog

SUMMED = (torch.float32, torch.float64, torch.int64)
SENT = (*SUMMED, torch.int16, torch.uint8)

CPU = torch.device("cpu")


@dataclass
class CommStats:
    """What a worker has sent so far and how long it took; only ever grows.

    Attributes:
        bytes_sent: what this worker handed to the network. A sum or an all-gather counts its own buffer once, whatever
            the MPI makes of it (a ring all-reduce moves 2 (n - 1) / n times as much), an all-to-all the chunks for
            others, a broadcast the buffer of its source.
        comm_seconds: in messages that move data.
        wait_seconds: in small messages that cannot end before the slowest worker is there: `time_as_wait`.
    """

    bytes_sent: int = 0
    comm_seconds: float = 0.0
    wait_seconds: float = 0.0

    def copy(self) -> CommStats:
        """As it is now."""
        return replace(self)

    def __sub__(self, earlier: CommStats) -> CommStats:
        """What came since `earlier`."""
        return CommStats(
            self.bytes_sent - earlier.bytes_sent,
            self.comm_seconds - earlier.comm_seconds,
            self.wait_seconds - earlier.wait_seconds,
        )


class Communicator(ABC):
    """One worker's connection to those of its group. All methods are collective unless they say otherwise.

    Tensors handed in are contiguous, of dtype float32, float64 or int64 (int16 and uint8 may be sent, not summed), on
    the CPU, or on this worker's GPU once `ddnn.distributed.transport.choose_transport` has opened a way for them;
    anything else is a TypeError. What a method returns is a workspace on the same device: it is allocated once for each
    name, size, dtype and device, and valid until the next call of the same method with the same of these.

    Attributes:
        rank, world_size: number of this worker, from 0, and number of workers.
        local_rank, local_size: the same among the workers of this host: `local_rank` is the GPU to take.
        host: name of the host.
        watchdog: what kills this worker should it hang. Told when a call begins and ends.
        stats: what was sent and how long it took. One thread at a time may use a communicator, any may read this.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, host: str | None = None) -> None:
        self.rank, self.world_size = rank, world_size
        self.local_rank, self.local_size = 0, 1
        self.host = socket.gethostname() if host is None else host
        self.watchdog = NoWatchdog()
        self.stats = CommStats()
        self._waits = False
        self._workspaces: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """tensor <- the sum of all workers' tensors: the same bits on each."""

    @abstractmethod
    def sendrecv(self, tensor: Tensor, dest: int, source: int) -> Tensor:
        """Sends `tensor` to worker `dest` while worker `source` sends one of the same size and dtype here.

        Who sends to whom must fit over all workers; workers that take no part in a round do not call.
        """

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every worker's tensor, (world_size, *tensor.shape), the same on each."""

    @abstractmethod
    def all_to_all(self, chunks: Tensor) -> Tensor:
        """Sends chunks[r] to worker r; row r of the answer is what worker r sent here. (world_size, chunk) both."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """tensor <- that of worker `src`."""

    @abstractmethod
    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker. Travels as JSON: dicts, lists, strings, numbers, None.
        Counts as waiting."""

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every worker is here. Counts as waiting."""

    @abstractmethod
    def try_barrier(self, timeout: float) -> bool:
        """Whether every worker comes here within so many seconds."""

    @abstractmethod
    def abort(self, exit_code: int) -> None:
        """Ends all workers of the job at once. Not collective."""

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all workers' values. Counts as waiting."""
        with self.time_as_wait():
            return int(self.all_gather(torch.tensor([value], dtype=torch.int64)).min())

    def workspace(self, name: str, size: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A flat tensor that is allocated at the first call and handed out again at later ones. Not collective."""
        key = (name, size, dtype, device)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(size, dtype=dtype, device=device)
        return self._workspaces[key]

    @contextmanager
    def time_as_wait(self) -> Iterator[None]:
        """Counts the time of the messages in this block as waiting for the slowest worker. Not collective."""
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    @contextmanager
    def _timed(self, bytes_sent: int) -> Iterator[None]:
        """One call: counts its bytes and its time, and tells the watchdog."""
        since = time.perf_counter()
        try:
            with self.watchdog.long_operation():
                yield
        finally:
            seconds = time.perf_counter() - since
            self.stats.bytes_sent += bytes_sent
            if self._waits:
                self.stats.wait_seconds += seconds
            else:
                self.stats.comm_seconds += seconds

    def _check_chunks(self, chunks: Tensor) -> None:
        if chunks.shape[:1] != (self.world_size,):
            raise ValueError(f"one chunk for each of {self.world_size} workers, not {tuple(chunks.shape)}")


def check_tensor(tensor: Tensor, dtypes: tuple[torch.dtype, ...], device_types: str) -> None:
    """TypeError where a tensor would be misread: strides, bfloat16."""
    if tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.device.type not in device_types.split(" or "):
        raise TypeError(
            f"a contiguous tensor of {', '.join(str(dtype) for dtype in dtypes)} on {device_types} is needed, not "
            f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
        )


class SingleProcess(Communicator):
    """A group of one worker: nothing is sent, and no MPI is needed."""

    def all_reduce(self, tensor: Tensor) -> None:
        check_tensor(tensor, SUMMED, tensor.device.type)

    def sendrecv(self, tensor: Tensor, dest: int, source: int) -> Tensor:
        return self._copy("received", tensor).view(tensor.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._copy("gathered", tensor).view(1, *tensor.shape)

    def all_to_all(self, chunks: Tensor) -> Tensor:
        self._check_chunks(chunks)
        return self._copy("all_to_all_recv", chunks).view(chunks.shape)

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        check_tensor(tensor, SENT, tensor.device.type)

    def all_gather_object(self, value: Any) -> list[Any]:
        return [json.loads(json.dumps(value))]

    def barrier(self) -> None:
        return

    def try_barrier(self, timeout: float) -> bool:
        return True

    def abort(self, exit_code: int) -> None:
        raise SystemExit(exit_code)

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        check_tensor(tensor, SENT, tensor.device.type)
        return self.workspace(name, tensor.numel(), tensor.dtype, tensor.device).copy_(tensor.detach().view(-1))
