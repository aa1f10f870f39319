"""Minibatches as the network reads them: frames gathered, spliced and normalized, and their labels.

Where the features are in host memory and a GPU computes, a thread of the host splices each minibatch, in the dtype of
the dataset, into one of a few pinned buffers and starts its copy to the GPU on a stream of its own. Of the four buffers
one or two are being used by the GPU, one is ready and one is being filled. On a CPU (in tests) the same thread does the
same, and nothing is pinned or copied. This has not yet been run on a GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle, islice
from queue import SimpleQueue
from threading import Event
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from ddnn.data.dataset import AcousticDataset, FrameSubset
from ddnn.data.sampler import Sampler, SequentialSampler
from ddnn.data.transform import InputTransform, gather, labels_of, normalize_, splice

NUM_BUFFERS = 4
MAX_IN_FLIGHT = 2
"""Minibatches that the GPU may still be working on when the next one is requested."""

Gather = Callable[[AcousticDataset, InputTransform, Tensor, Tensor], Tensor]
"""`ddnn.data.transform.gather`, or a faster implementation of the same."""


class Batch(NamedTuple):
    """One minibatch, on the device that computes; valid until the next one is requested."""

    x: Tensor
    """(n, input_dim): the network's input."""
    labels: Tensor
    """(n,) int64: pdf-ids, -1 where there is no alignment."""


def _no_timer(part: str) -> None:
    """Takes no time."""


def make_batch_loader(
    frames: FrameSubset,
    transform: InputTransform,
    sampler: Sampler,
    *,
    device: torch.device | None = None,
    out: Tensor | None = None,
    gather: Gather = gather,
    mark: Callable[[str], None] = _no_timer,
) -> BatchLoader:
    """The loader for a device: it gathers from features in the memory of the device, or reads ahead from the host's.

    Args:
        frames: those of the sampler.
        transform: on the device.
        device: where the minibatches are needed; that of `out` where it is given.
        out: (batch_size, input_dim) float32 or bf16, the memory for `Batch.x`; allocated where it is not given.
        gather: fills `out` from features in the memory of the device.
        mark: told what the time since its last call was spent on: `data`, or `compute` where the host waited for the
            GPU to finish an earlier minibatch.
    """
    if out is None:
        out = torch.empty(sampler.batch_size, transform.output_dim, device=device)
    resident = frames.dataset.features.device.type == out.device.type
    kind = BatchLoader if resident else PrefetchLoader
    return kind(frames, transform, sampler, out, gather, mark)


@dataclass(eq=False)
class BatchLoader:
    """The minibatches of one epoch after another. A context manager, which ends what works in the background.

    Attributes: as the arguments of `make_batch_loader`.
    """

    frames: FrameSubset
    transform: InputTransform
    sampler: Sampler
    out: Tensor
    gather: Gather = gather
    mark: Callable[[str], None] = _no_timer
    _epoch: Generator[Batch, None, None] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.sampler)

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Batch]:
        """The minibatches of epoch `number`, without the first `skip`. Ends an epoch that is under way."""
        self._end_epoch()
        self._epoch = self._batches(self.sampler.epoch(number, skip))
        return self._epoch

    def sample(self, count: int) -> list[Batch]:
        """Copies of `count` full minibatches from the start of the data, repeated where it is short."""
        full = min(NUM_BUFFERS, len(self.frames) // len(self.out))
        self._end_epoch()
        batches = self._batches(islice(SequentialSampler(self.frames, len(self.out)).epoch(), full))
        return list(islice(cycle([Batch(x.clone(), labels.clone()) for x, labels in batches]), count))

    def close(self) -> None:
        """Ends the epoch and its thread, and the sampler's."""
        self._end_epoch()
        self.sampler.close()

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def _batches(self, order: Iterable[Tensor]) -> Generator[Batch, None, None]:
        for rows in order:
            x = self.gather(self.frames.dataset, self.transform, rows, self.out[: len(rows)])
            labels = labels_of(self.frames.dataset, rows, self.out.device)
            self.mark("data")
            yield Batch(x, labels)


class _PinnedBatch:
    """Memory for one minibatch, on the host and on the device. On a CPU both are the same."""

    def __init__(
        self, batch_size: int, dataset: AcousticDataset, transform: InputTransform, device: torch.device
    ) -> None:
        gpu = device.type == "cuda"
        x, labels = (batch_size, transform.output_dim), (batch_size,)
        self.host_x = torch.empty(x, dtype=dataset.features.dtype, pin_memory=gpu)
        self.host_labels = torch.empty(labels, dtype=dataset.labels.dtype, pin_memory=gpu)
        self.x, self.labels, self.frames = self.host_x, self.host_labels, 0
        self.copied = self.used = None
        if gpu:
            self.x, self.labels = torch.empty_like(self.x, device=device), torch.empty_like(self.labels, device=device)
            self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class PrefetchLoader(BatchLoader):
    """A loader that reads minibatches ahead in a thread, from features in host memory.

    Errors of the thread reach the trainer after the minibatches that were read before.
    """

    def __post_init__(self) -> None:
        self.device = self.out.device
        dataset, size = self.frames.dataset, len(self.out)
        self._buffers = [_PinnedBatch(size, dataset, self.transform, self.device) for _ in range(NUM_BUFFERS)]
        gpu = self.device.type == "cuda"
        self._copies = torch.cuda.Stream(self.device) if gpu else None  # type: ignore[no-untyped-call]
        self._wide = self.out if self.out.dtype == torch.float32 else torch.empty_like(self.out, dtype=torch.float32)

    def _batches(self, order: Iterable[Tensor]) -> Generator[Batch, None, None]:
        if self.device.type == "cuda":  # an epoch that ended early may have copies under way
            torch.cuda.synchronize(self.device)
        free: SimpleQueue[_PinnedBatch | None] = SimpleQueue()
        ready: SimpleQueue[_PinnedBatch | None] = SimpleQueue()
        for empty in self._buffers:
            free.put(empty)
        in_flight: deque[_PinnedBatch] = deque()
        closed = Event()
        with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as reader:
            reading = reader.submit(self._read, order, free, ready, closed)
            try:
                self.mark("compute")
                while (buffer := ready.get()) is not None:
                    batch = self._take(buffer)
                    self.mark("data")
                    yield batch
                    in_flight.append(buffer)
                    if len(in_flight) > MAX_IN_FLIGHT:
                        oldest = in_flight.popleft()
                        if oldest.used is not None:
                            oldest.used.synchronize()
                        free.put(oldest)
                    self.mark("compute")
                reading.result()
            finally:
                closed.set()
                free.put(None)

    def _take(self, buffer: _PinnedBatch) -> Batch:
        """The minibatch in `buffer`, normalized in float32 in `out`; queued on the device, not waited for."""
        n = buffer.frames
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)
        x = normalize_(self._wide[:n].copy_(buffer.x[:n]), self.transform)
        if self._wide is not self.out:
            x = self.out[:n].copy_(x)
        labels = buffer.labels[:n].long()
        if buffer.used is not None:
            buffer.used.record(torch.cuda.current_stream(self.device))
        return Batch(x, labels)

    def _read(
        self,
        order: Iterable[Tensor],
        free: SimpleQueue[_PinnedBatch | None],
        ready: SimpleQueue[_PinnedBatch | None],
        closed: Event,
    ) -> None:
        """The thread: fills free buffers until `order` ends, the epoch is closed, or something fails."""
        stream: AbstractContextManager[object] = nullcontext()
        if self._copies is not None:
            stream = torch.cuda.stream(self._copies)
        try:
            with stream:
                for rows in order:
                    buffer = free.get()
                    if buffer is None or closed.is_set():
                        return
                    self._fill(buffer, rows)
                    ready.put(buffer)
        finally:
            ready.put(None)

    def _fill(self, buffer: _PinnedBatch, rows: Tensor) -> None:
        n = buffer.frames = len(rows)
        if n > len(buffer.host_labels):
            raise ValueError(f"{n} rows in a minibatch, at most {len(buffer.host_labels)} expected")
        splice(self.frames.dataset, self.transform, rows, buffer.host_x[:n])
        torch.index_select(self.frames.dataset.labels, 0, rows, out=buffer.host_labels[:n])
        if buffer.copied is not None and self._copies is not None:
            buffer.x[:n].copy_(buffer.host_x[:n], non_blocking=True)
            buffer.labels[:n].copy_(buffer.host_labels[:n], non_blocking=True)
            buffer.copied.record(self._copies)
