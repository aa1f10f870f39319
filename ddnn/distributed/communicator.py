"""The communicator: what one worker can send to the others. Tensors and JSON, nothing pickled. Names are those of
torch.distributed. Sums are made for float32, float64 and int64 only; 16-bit numbers are moved as they are and never
summed by the MPI: Open MPI 5 sums bfloat16 wrongly and silently."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ddnn.distributed.watchdog import NoWatchdog
from ddnn.util.system import use_device

SUMMED = (torch.float32, torch.float64, torch.int64)
SENT = (*SUMMED, torch.bfloat16, torch.int16, torch.uint8)

CPU = torch.device("cpu")

Transport = Literal["host", "device", "nccl"]
"""How tensors of a GPU travel: see `ddnn.distributed.transport`."""


@dataclass
class CommStats:
    """What a worker has sent so far and how long it took; only ever grows."""

    # what this worker handed to the network. A sum or an all-gather counts its own buffer once, whatever the MPI makes
    # of it (a ring all-reduce moves 2 (n - 1) / n times as much), an all-to-all the chunks for others, a broadcast the
    # buffer of its source.
    bytes_sent: int = 0
    comm_seconds: float = 0.0  # in messages that move data
    wait_seconds: float = 0.0  # in small messages that cannot end before the slowest worker is there: `time_as_wait`
    bytes_gathered: int = 0  # received from others in an `all_gather_into`
    bytes_exchanged: int = 0  # received from others in an `all_to_all_into`
    bytes_summed: int = 0  # of the tensors that `all_reduce` was given
    bytes_posted: int = 0  # sent by `isend`

    def copy(self) -> CommStats:
        return replace(self)

    def __sub__(self, earlier: CommStats) -> CommStats:
        return CommStats(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


class TensorBackend:
    """Collective calls on contiguous tensors of one device. A call returns when the data is there. This is the base:
    the tensors of a worker by itself. `Communicator` checks what is handed in and allocates what is received: same
    dtype and device as what is sent."""

    def all_reduce(self, tensor: Tensor) -> None:
        """tensor <- the sum over workers."""

    def sendrecv(self, tensor: Tensor, received: Tensor, dest: int, source: int) -> None:
        """tensor goes to worker `dest`, received <- what worker `source` sends here; never to itself."""

    def all_gather(self, tensor: Tensor, gathered: Tensor) -> None:
        """gathered <- the tensors of all workers, by rank."""
        gathered.copy_(tensor.detach().view(-1))

    def all_to_all(self, chunks: Tensor, received: Tensor) -> None:
        """The r-th of equal chunks goes to worker r; the r-th of received is what worker r sent here."""
        received.copy_(chunks.detach().view(-1))

    def all_gather_into(self, block: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
        """gathered <- the blocks of all workers, by rank; `sizes`: elements of each."""
        gathered.copy_(block.detach().view(-1))

    def all_to_all_into(
        self, chunks: Tensor, received: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> None:
        """The r-th of chunks, which have `sent_sizes` elements, goes to worker r; the r-th of received, of
        `received_sizes`, is what worker r sent here."""
        received.copy_(chunks.detach().view(-1))

    def isend(self, tensor: Tensor, dest: int) -> Wait:
        """Begins to send `tensor` to worker `dest`, another one."""
        raise NotImplementedError("a worker by itself has nobody to send to")

    def irecv(self, received: Tensor, source: int) -> Wait:
        """Begins to receive what worker `source`, another one, sends here."""
        raise NotImplementedError("a worker by itself has nobody to receive from")

    def broadcast(self, tensor: Tensor, src: int) -> None:
        """tensor <- that of worker `src`."""


Wait = Callable[[], object]
"""Returns when a message that was begun has been sent, or is there."""


class Handle:
    """A message that was begun. Until `wait` has returned, what is sent may not be changed, what is received not read."""

    def __init__(self, comm: Communicator, wait: Wait) -> None:
        self._comm, self._wait = comm, wait

    def wait(self) -> None:
        """Returns when the tensor may be used again. Counts as communication."""
        with self._comm._timed():
            self._wait()


class Communicator:
    """One worker's connection to those of its group; the base, of which a worker by itself uses everything as it is.
    All methods are collective unless they say otherwise. One thread at a time may use it; any may read `stats`.

    Tensors handed in are contiguous, of dtype float32, float64 or int64 (bfloat16, int16 and uint8 may be sent, not summed), on
    the CPU, or on this worker's GPU within `ddnn.distributed.transport.open_transport`;
    anything else is a TypeError. What a method returns is a workspace on the same device: it is allocated once for each
    name, size, dtype and device, and valid until the next call of the same method with the same of these.

    Attributes:
        rank, world_size: number of this worker, from 0, and number of workers.
        local_rank, local_size: the same among the workers of this `host`: `local_rank` is the GPU to take.
        backends: type of device -> what moves the tensors there. Small messages go by `cpu`.
        transport: the way of a GPU's parameters.
        watchdog: what kills this worker should it hang. Told when a call begins and ends.
    """

    def __init__(self, rank: int, world_size: int, host: str, backends: dict[str, TensorBackend]) -> None:
        self.rank, self.world_size, self.host, self.backends = rank, world_size, host, backends
        self.local_rank, self.local_size = 0, 1
        self.transport: Transport = "host"
        self.watchdog = NoWatchdog()
        self.stats = CommStats()
        self._waits = False
        self._workspaces: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}

    def split(self, color: int, key: int) -> Communicator:
        """The workers that pass the same `color`, as a group of their own: ranked by `key`, where it is equal by their
        rank here. It has the watchdog that this one has now, and counts what it sends in `stats` of its own, so that
        averaging can be told from what the workers of a network exchange. Counts as waiting."""
        with self.time_as_wait(), self._timed():
            group = self._split(color, key)
        group.watchdog = self.watchdog
        return group

    def _split(self, color: int, key: int) -> Communicator:
        return SingleProcess(self.host)

    def all_reduce(self, tensor: Tensor) -> None:
        """tensor <- the sum of all workers' tensors: the same bits on each."""
        backend = self._backend(tensor, SUMMED)
        with self._timed(tensor.nbytes, "bytes_summed"):
            backend.all_reduce(tensor)

    def sendrecv(self, tensor: Tensor, dest: int, source: int) -> Tensor:
        """Sends `tensor` to worker `dest` while worker `source` sends one of the same size and dtype here. Who sends to
        whom must fit over all workers; workers that take no part in a round do not call."""
        backend = self._backend(tensor, SENT)
        received = self.workspace("received", tensor.numel(), tensor.dtype, tensor.device)
        if dest == source == self.rank:
            received.copy_(tensor.detach().view(-1))
        else:
            with self._timed(tensor.nbytes):
                backend.sendrecv(tensor, received, dest, source)
        return received.view(tensor.shape)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every worker's tensor, (world_size, *tensor.shape), the same on each."""
        backend = self._backend(tensor, SENT)
        gathered = self.workspace("gathered", self.world_size * tensor.numel(), tensor.dtype, tensor.device)
        with self._timed(tensor.nbytes):
            backend.all_gather(tensor, gathered)
        return gathered.view(self.world_size, *tensor.shape)

    def all_to_all(self, chunks: Tensor) -> Tensor:
        """Sends chunks[r] to worker r; row r of the answer is what worker r sent here. (world_size, chunk) both."""
        backend = self._backend(chunks, SENT)
        if chunks.shape[:1] != (self.world_size,):
            raise ValueError(f"one chunk for each of {self.world_size} workers, not {tuple(chunks.shape)}")
        received = self.workspace("all_to_all_recv", chunks.numel(), chunks.dtype, chunks.device)
        with self._timed(chunks.nbytes - chunks.nbytes // self.world_size):
            backend.all_to_all(chunks, received)
        return received.view(chunks.shape)

    def all_gather_into(self, block: Tensor, gathered: Tensor, sizes: Sequence[int]) -> None:
        """gathered <- the blocks of all workers one after another, by rank, the same on each. `sizes`: elements of each
        worker's block, in all those of `gathered`, which has the dtype of `block`."""
        backend = self._backend(block, SENT)
        _check_sizes(block, sizes[self.rank : self.rank + 1])
        _check_sizes(gathered, sizes)
        with self._timed(block.nbytes, "bytes_gathered", gathered.nbytes - block.nbytes):
            backend.all_gather_into(block, gathered.view(-1), sizes)

    def all_to_all_into(
        self, chunks: Tensor, received: Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> None:
        """Sends the first sent_sizes[0] elements of `chunks` to worker 0, the next sent_sizes[1] to worker 1, and so on;
        `received`, of the same dtype, <- what worker 0 sent here, received_sizes[0] elements, then what worker 1 sent."""
        backend = self._backend(chunks, SENT)
        _check_sizes(chunks, sent_sizes)
        _check_sizes(received, received_sizes)
        sent, others = chunks.numel() - sent_sizes[self.rank], received.numel() - received_sizes[self.rank]
        with self._timed(sent * chunks.itemsize, "bytes_exchanged", others * chunks.itemsize):
            backend.all_to_all_into(chunks, received.view(-1), sent_sizes, received_sizes)

    def isend(self, tensor: Tensor, dest: int) -> Handle:
        """Begins to send `tensor` to another worker, which must `irecv` as much. Not collective: only these two call.
        What one worker sends to another is received in the order in which it was sent. Messages may move only while one
        of these two is in a call."""
        backend = self._backend(tensor, SENT)
        with self._timed(tensor.nbytes, "bytes_posted"):
            return Handle(self, backend.isend(tensor, dest))

    def irecv(self, received: Tensor, source: int) -> Handle:
        """Begins to receive what another worker sends here by `isend`, of the size and dtype of `received`."""
        backend = self._backend(received, SENT)
        with self._timed():
            return Handle(self, backend.irecv(received, source))

    def poll(self) -> int | None:
        """A worker whose message by `isend` can be received now, None where there is none. Not collective."""

    def broadcast(self, tensor: Tensor, src: int = 0) -> None:
        """tensor <- that of worker `src`."""
        backend = self._backend(tensor, SENT)
        with self._timed(tensor.nbytes if self.rank == src else 0):
            backend.broadcast(tensor, src)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of all workers' values. Counts as waiting."""
        with self.time_as_wait():
            return int(self.all_gather(torch.tensor([value], dtype=torch.int64)).min())

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every worker's value, by rank, on every worker. Travels as JSON: dicts, lists, strings, numbers, None.
        Counts as waiting."""
        return [json.loads(json.dumps(value))]

    def barrier(self) -> None:
        """Waits until every worker is here. Counts as waiting."""

    def try_barrier(self, timeout: float) -> bool:
        """Whether every worker comes here within so many seconds."""
        return True

    def abort(self, exit_code: int) -> None:
        """Ends all workers of the job at once. Not collective."""
        raise SystemExit(exit_code)

    def workspace(self, name: str, size: int, dtype: torch.dtype, device: torch.device = CPU) -> Tensor:
        """A flat tensor that is allocated at the first call and handed out again at later ones. Not collective."""
        key = (name, size, dtype, device)
        if key not in self._workspaces:
            self._workspaces[key] = torch.empty(size, dtype=dtype, device=device)
        return self._workspaces[key]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time in this block as waiting for another worker, and tells the watchdog. Not collective."""
        with self.time_as_wait(), self._timed():
            yield

    @contextmanager
    def time_as_wait(self) -> Iterator[None]:
        """Counts the time of the messages in this block as waiting for the slowest worker. Not collective."""
        before, self._waits = self._waits, True
        try:
            yield
        finally:
            self._waits = before

    @contextmanager
    def _timed(self, bytes_sent: int = 0, kind: str = "", size: int | None = None) -> Iterator[None]:
        """One call: counts its bytes and its time, and tells the watchdog. `kind`: the field of `CommStats` that counts
        `size` bytes, those sent where it is not given."""
        since = time.perf_counter()
        try:
            with self.watchdog.long_operation():
                yield
        finally:
            seconds = time.perf_counter() - since
            self.stats.bytes_sent += bytes_sent
            if kind:
                setattr(self.stats, kind, getattr(self.stats, kind) + (bytes_sent if size is None else size))
            if self._waits:
                self.stats.wait_seconds += seconds
            else:
                self.stats.comm_seconds += seconds

    def _backend(self, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> TensorBackend:
        """TypeError where a tensor would be misread: strides, bfloat16."""
        backend = self.backends.get(tensor.device.type)
        if backend is None or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise TypeError(
                f"a contiguous tensor of {', '.join(map(str, dtypes))} on {' or '.join(self.backends)} is needed, not "
                f"{tensor.dtype} on {tensor.device} with strides {tensor.stride()}"
            )
        return backend


class SingleProcess(Communicator):
    """A group of one worker: nothing is sent, and no MPI is needed."""

    def __init__(self, host: str | None = None) -> None:
        super().__init__(0, 1, host or socket.gethostname(), dict.fromkeys(("cpu", "cuda"), TensorBackend()))

    @contextmanager
    def _timed(self, bytes_sent: int = 0, kind: str = "", size: int | None = None) -> Iterator[None]:
        yield


def _check_sizes(tensor: Tensor, sizes: Sequence[int]) -> None:
    if tensor.numel() != sum(sizes) or not tensor.is_contiguous():
        raise ValueError(f"contiguous, {' + '.join(map(str, sizes))} elements expected, not {tuple(tensor.shape)}")


class StagingBuffer:
    """Between a worker's parameters and the tensor that the strategies work on and that is exchanged.

    On the CPU, and where GPU memory is exchanged itself, the two are the same tensor, nothing is copied, and `buffer`
    is None, unless an own one is wanted, for an exchange beside training. By transport host a GPU's parameters go
    through a buffer in pinned host memory."""

    def __init__(self, parameters: Tensor, transport: Transport, own_buffer: bool = False) -> None:
        """`parameters`: (num_parameters,), of the size, dtype and device of all that will be copied in and out."""
        self.device = parameters.device
        self.buffer: Tensor | None = None
        if parameters.is_cuda and transport == "host":
            self.buffer = torch.empty(parameters.shape, dtype=parameters.dtype, pin_memory=True)
        elif own_buffer:
            self.buffer = torch.empty_like(parameters)
        self._stream: torch.cuda.Stream | None = None

    def copy_in(self, parameters: Tensor) -> Tensor:
        """The tensor to work on, holding the parameters: their copy once it is complete, or they themselves."""
        if self.buffer is None:
            return parameters
        self.buffer.copy_(parameters.detach(), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return self.buffer

    @torch.no_grad()
    def copy_out(self, parameters: Tensor) -> None:
        """parameters <- what the strategies made of the buffer; it may be changed once this has returned."""
        if self.buffer is not None:
            parameters.copy_(self.buffer)

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """For a thread that exchanges what was copied in while another trains: its GPU work in this block goes into a
        stream of its own, else both would wait for each other, and is done at the end. On the CPU: nothing."""
        if self.device.type != "cuda":
            yield
            return
        use_device(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()

    @contextmanager
    def staged(self, parameters: Tensor) -> Iterator[Tensor]:
        """The tensor to work on in a block, at whose end the parameters become what it then holds."""
        vector = self.copy_in(parameters)
        yield vector
        self.copy_out(parameters)
