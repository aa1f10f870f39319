"""The communicator: what one worker can say to the others. Buffer calls on tensors, nothing pickled.

Sums are MPI's own for float32, float64 and int64 only. 16-bit numbers travel as int16 views and are never handed to MPI
to sum: Open MPI 5 sums bfloat16 wrongly and silently.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ddnn.parallel.carriers import Carrier
from ddnn.parallel.guard import Guard
from ddnn.parallel.lost import WorkerLost, all_agree, deaths_noticed
from ddnn.parallel.traffic import Traffic

SUMMED = (torch.float32, torch.float64, torch.int64)
SENT = (*SUMMED, torch.int16, torch.uint8)

CPU = torch.device("cpu")

Wire = Literal["float32", "bfloat16"]


class Member(NamedTuple):
    """One of the workers of an exchange."""

    number: int
    """Its rank when the job began, which it keeps where others die: what messages call it by."""
    host: str
    """The host it runs on."""
    node: int
    """The same for all workers that share the memory of a host."""


@dataclass
class Exchange:
    """One worker's way to the others. All methods but the attributes are collective unless they say otherwise.

    Tensors handed in are contiguous, of dtype float32, float64 or int64 (int16 and uint8 may be sent, not summed), on
    the CPU, or on this worker's GPU once `ddnn.parallel.transport.open_transport` has found a way for them; anything
    else is a TypeError. What a method returns is a buffer on the same device that is kept: it is allocated once per
    role, size, dtype and device, and valid until the next call of the same method with the same of these.

    In a fault-tolerant MPI job the collective methods raise `ddnn.parallel.lost.WorkerLost` where a worker has died;
    `ddnn.parallel.survive.survivors` then gives the exchange to go on with.

    Attributes:
        rank: number of this worker, from 0.
        size: number of workers.
        local_rank: number of this worker among those of its host, from 0: the GPU to take.
        local_size: number of workers on this host.
        host: name of the host.
        members: all workers, by rank.
        guard: what kills this worker should it hang; None without one. Told when a call begins and ends.
        outlives: whether the job outlives its workers. Then every collective call ends with an agreement that all is
            well: what Open MPI 5 says itself is not to be relied on, its Allgatherv returns rubbish and no error.
        lost: whether such an agreement has failed.
        before: the exchange that this one has followed after a death. It is not used any more, but its buffers are
            kept: what was under way may still be written there.
        wire: how parameters travel, see `ddnn.parallel.mean` and `ddnn.parallel.strategies`.
        communicator: mpi4py's communicator; None for a single worker, which needs no MPI.
        carriers: type of device -> what moves the tensors there. Empty for a single worker.
        traffic: what was sent and how long it took. One thread at a time may use an exchange, any thread may read this.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    host: str = field(default_factory=socket.gethostname)
    members: list[Member] = field(default_factory=list)
    guard: Guard | None = None
    outlives: bool = False
    lost: bool = False
    before: Exchange | None = field(default=None, repr=False)
    wire: Wire = "float32"
    communicator: Any = None
    carriers: dict[str, Carrier] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)
    _waiting: bool = field(default=False, repr=False)
    _kept: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @property
    def number(self) -> int:
        """This worker's rank when the job began: see `Member`. Not collective."""
        return self.members[self.rank].number if self.members else self.rank

    def become(self, members: list[Member]) -> None:
        """Takes up who the workers are, by rank. Not collective."""
        self.members, own = members, members[self.rank]
        together = [rank for rank, member in enumerate(members) if member.node == own.node]
        self.host, self.local_rank, self.local_size = own.host, together.index(self.rank), len(together)

    def keep(self, role: str, size: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A flat buffer that is allocated at the first call and handed out again at later ones. Not collective."""
        key = (role, size, dtype, device)
        if key not in self._kept:
            self._kept[key] = torch.empty(size, dtype=dtype, device=device)
        return self._kept[key]

    def _carrier(self, buffer: Tensor, allowed: tuple[torch.dtype, ...]) -> Carrier | None:
        """What moves this tensor, None for a single worker. Refuses what would be misread: strides, bfloat16."""
        carrier = self.carriers.get(buffer.device.type)
        if buffer.dtype not in allowed or not buffer.is_contiguous() or (carrier is None and self.size > 1):
            raise TypeError(
                f"a contiguous tensor of {', '.join(str(dtype) for dtype in allowed)} on "
                f"{' or '.join(self.carriers) or 'one device'} is needed, not {buffer.dtype} on {buffer.device} with "
                f"strides {buffer.stride()}"
            )
        return carrier

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
        """One call: counts `sent` bytes and its time, tells the guard, names deaths."""
        since = time.perf_counter()
        try:
            with deaths_noticed(self.communicator), self.guard.busy() if self.guard else nullcontext():
                yield
        finally:
            seconds = time.perf_counter() - since
            self.traffic.bytes_sent += sent
            if self._waiting:
                self.traffic.waiting_seconds += seconds
            else:
                self.traffic.transfer_seconds += seconds

    @contextmanager
    def _together(self, sent: int) -> Iterator[None]:
        """One call of all workers: as `_counted`, and where workers may die all agree that none has."""
        with self._counted(sent):
            yield
            self.agree()

    def agree(self) -> None:
        """Agrees with all workers that all is well, where the job outlives them; else nothing.

        Raises:
            WorkerLost: a worker has died; on all that are left.
        """
        if self.outlives and self.communicator is not None and not all_agree(self.communicator, True):
            self.lost = True
            raise WorkerLost("a worker has died")

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """In this block the guard wants to see this worker get on: `tick`. Not collective."""
        if self.guard is not None:
            self.guard.arm()
        try:
            yield
        finally:
            if self.guard is not None:
                self.guard.disarm()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """In this block the guard does not expect this worker to get on for some time, as on a slow disk."""
        with self.guard.busy() if self.guard is not None else nullcontext():
            yield

    def tick(self) -> None:
        """Tells the guard that this worker gets on. Not collective."""
        if self.guard is not None:
            self.guard.tick()

    def sum_in_place(self, buffer: Tensor) -> None:
        """buffer <- the sum of all workers' buffers: the same bits on each."""
        carrier = self._carrier(buffer, SUMMED)
        if carrier is not None:
            with self._together(buffer.nbytes):
                carrier.sum_in_place(buffer)

    def send_receive(self, buffer: Tensor, to: int, source: int) -> Tensor:
        """Sends `buffer` to worker `to` while worker `source` sends one of the same size and dtype here.

        Who sends to whom must fit over all workers; workers that take no part in a round do not call.
        """
        carrier = self._carrier(buffer, SENT)
        received = self.keep("received", buffer.numel(), buffer.dtype, buffer.device)
        if carrier is None or to == source == self.rank:
            received.copy_(buffer.detach().view(-1))
        else:
            with self._counted(buffer.nbytes):
                carrier.send_receive(buffer, received, to, source)
        return received.view(buffer.shape)

    def all_gather(self, buffer: Tensor) -> Tensor:
        """Every worker's buffer, (size, *buffer.shape), the same on each."""
        carrier = self._carrier(buffer, SENT)
        gathered = self.keep("gathered", self.size * buffer.numel(), buffer.dtype, buffer.device)
        if carrier is None:
            gathered.copy_(buffer.detach().view(-1))
        else:
            with self._together(buffer.nbytes):
                carrier.all_gather(buffer, gathered)
        return gathered.view(self.size, *buffer.shape)

    def all_to_all(self, chunks: Tensor) -> Tensor:
        """Sends chunks[r] to worker r; row r of the answer is what worker r sent here. (size, chunk) both."""
        carrier = self._carrier(chunks, SENT)
        if chunks.shape[:1] != (self.size,):
            raise ValueError(f"one chunk for each of {self.size} workers, not {tuple(chunks.shape)}")
        swapped = self.keep("swapped", chunks.numel(), chunks.dtype, chunks.device)
        if carrier is None:
            swapped.copy_(chunks.detach().view(-1))
        else:
            with self._together(chunks.nbytes - chunks.nbytes // self.size):
                carrier.all_to_all(chunks, swapped)
        return swapped.view(chunks.shape)

    def broadcast(self, buffer: Tensor, root: int = 0) -> None:
        """buffer <- that of worker `root`."""
        carrier = self._carrier(buffer, SENT)
        if carrier is not None:
            with self._together(buffer.nbytes if self.rank == root else 0):
                carrier.broadcast(buffer, root)

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
            with self._together(text.nbytes):
                self.communicator.Allgatherv(text, [together, lengths])
        ends = np.cumsum(lengths)
        return [json.loads(together[end - n : end].tobytes()) for end, n in zip(ends, lengths, strict=True)]

    def barrier(self) -> None:
        """Waits until every worker is here, and counts as waiting."""
        if self.communicator is not None:
            with self.waiting(), self._together(0):
                self.communicator.Barrier()
