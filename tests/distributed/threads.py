"""Workers that are threads of this process: what they send goes through memory, and no MPI is started."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import permutations
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddnn.distributed.communicator import Communicator

Result = TypeVar("Result")

TIMEOUT = 60.0
"""Seconds that a worker waits for the others: one that sends less often than they do fails, and does not hang."""


class _Room:
    """What the threads of one group share. `all_rooms`: those of all groups, of which an error ends every one."""

    def __init__(self, size: int, all_rooms: list[_Room], timeout: float) -> None:
        self.posted: list[Any] = [None] * size
        self.together, self.timeout = threading.Barrier(size, timeout=timeout), timeout
        self.mail: dict[tuple[int, int], queue.SimpleQueue[tuple[Tensor, threading.Event]]] = {
            pair: queue.SimpleQueue() for pair in permutations(range(size), 2)
        }
        self.all_rooms = all_rooms
        all_rooms.append(self)

    def abort(self) -> None:
        for room in self.all_rooms:
            room.together.abort()


class _Memory:
    """What `ddnn.distributed.mpi.MpiBackend` does, of one thread. Sums are made in the order of the ranks."""

    def __init__(self, rank: int, room: _Room) -> None:
        self.rank, self.room = rank, room

    def of_all(self, value: Any) -> list[Any]:
        """Every worker's value, by rank."""
        posted, together = self.room.posted, self.room.together
        posted[self.rank] = value.detach().clone() if isinstance(value, Tensor) else value
        together.wait()
        everything = list(posted)
        together.wait()
        return everything

    def all_reduce(self, tensor: Tensor) -> None:
        first, *others = self.of_all(tensor)
        tensor.copy_(sum(others, first))

    def sendrecv(self, tensor: Tensor, received: Tensor, dest: int, source: int) -> None:
        received.copy_(self.of_all(tensor)[source].view(-1))

    def all_gather(self, tensor: Tensor, gathered: Tensor) -> None:
        gathered.copy_(torch.stack(self.of_all(tensor)).view(-1))

    def all_to_all(self, chunks: Tensor, received: Tensor) -> None:
        received.copy_(torch.stack([one[self.rank] for one in self.of_all(chunks)]).view(-1))

    def all_gather_into(self, block: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
        blocks = self.of_all(block)
        assert [each.numel() for each in blocks] == list(sizes)
        gathered.copy_(torch.cat([each.view(-1) for each in blocks]))

    def all_to_all_into(
        self, chunks: Tensor, received: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> None:
        everything = self.of_all(chunks.detach().clone().view(-1).split(list(sent_sizes)))
        assert [len(chunks[self.rank]) for chunks in everything] == list(received_sizes)
        received.copy_(torch.cat([chunks[self.rank] for chunks in everything]))

    def isend(self, tensor: Tensor, dest: int) -> Callable[[], object]:
        """As the MPI sends what is large: it is read where it is once the other worker receives."""
        arrived = threading.Event()
        self.room.mail[self.rank, dest].put((tensor, arrived))
        return lambda: self._until(lambda: arrived.wait(0.05) or None)

    def irecv(self, received: Tensor, source: int) -> Callable[[], object]:
        def wait() -> None:
            tensor, arrived = self._until(lambda: self._next_from(source))
            received.view(-1).copy_(tensor.detach().view(-1))
            arrived.set()

        return wait

    def _next_from(self, source: int) -> tuple[Tensor, threading.Event] | None:
        with suppress(queue.Empty):
            return self.room.mail[source, self.rank].get(timeout=0.05)
        return None

    def _until(self, act: Callable[[], Result | None]) -> Result:
        """What `act` returns once that is something."""
        deadline = time.monotonic() + self.room.timeout
        while time.monotonic() < deadline and not self.room.together.broken:
            if (result := act()) is not None:
                return result
        raise threading.BrokenBarrierError

    def broadcast(self, tensor: Tensor, src: int) -> None:
        tensor.copy_(self.of_all(tensor)[src])


class ThreadCommunicator(Communicator):
    """One of several workers, each of which runs in a thread of its own."""

    def __init__(self, rank: int, room: _Room) -> None:
        self._memory = _Memory(rank, room)
        super().__init__(rank, len(room.posted), "here", dict.fromkeys(("cpu", "cuda"), self._memory))
        self.local_rank, self.local_size = self.rank, self.world_size

    def _split(self, color: int, key: int) -> Communicator:
        pairs = self._memory.of_all((color, key))
        members = [rank for rank, (other, _) in enumerate(pairs) if other == color]
        members.sort(key=lambda rank: pairs[rank][1])
        first = members[0] == self.rank
        rooms = self._memory.of_all(
            _Room(len(members), self._memory.room.all_rooms, self._memory.room.timeout) if first else None
        )
        return ThreadCommunicator(members.index(self.rank), rooms[members[0]])

    def all_gather_object(self, value: Any) -> list[Any]:
        with self.time_as_wait(), self._timed():
            return [json.loads(text) for text in self._memory.of_all(json.dumps(value))]

    def barrier(self) -> None:
        self.all_gather_object(None)

    def try_barrier(self, timeout: float) -> bool:
        self.barrier()
        return True

    def poll(self) -> int | None:
        mail = self._memory.room.mail
        return next(
            (source for source, dest in list(mail) if dest == self.rank and not mail[source, dest].empty()), None
        )

    def abort(self, exit_code: int) -> None:
        self._memory.room.abort()


def run_workers(world_size: int, work: Callable[[Communicator], Result], timeout: float = TIMEOUT) -> list[Result]:
    """What `work` returns on each of so many workers. The error of one that fails ends all, and is raised. `timeout`: seconds that a
    worker waits for the others."""
    room = _Room(world_size, [], timeout)

    def worker(rank: int) -> Result:
        try:
            return work(ThreadCommunicator(rank, room))
        except BaseException:
            room.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(worker, rank) for rank in range(world_size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [future.result() for future in futures]
