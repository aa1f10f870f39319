"""Minibatches as the network reads them: which frames, in which order; gathered, spliced and normalized; their labels.

If the features are in host memory and training runs on a GPU, a host thread splices each minibatch into one of a few
pinned buffers, in the dataset's dtype, and starts its copy to the GPU on a separate stream. On a CPU (in tests) the thread
does the same without pinning or copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ddnn.data.dataset import (
    AcousticDataset,
    FrameSubset,
    GatherKernel,
    InputTransform,
    gather,
    labels_of,
    normalize_,
    splice,
)
from ddnn.util.system import use_device

EVAL_BATCH = 1024  # frames in a block of cross-validation: full GEMM speed, and they stay in a CPU's cache
NUM_BUFFERS = 4  # one or two are being used by the GPU, one is ready and one is being filled
MAX_IN_FLIGHT = 2  # minibatches that the GPU may still be working on when the next one is requested


class UtteranceRows(NamedTuple):
    """A minibatch of whole utterances, one after another."""

    rows: Tensor  # (n,) int64: dataset rows, as by `AcousticDataset.rows_of`
    utterances: tuple[int, ...]  # the utterances' indices in the dataset


class Sampler(Protocol):
    """Which frames make up each minibatch of an epoch. A sampler of whole utterances yields `UtteranceRows`, which is all
    that a criterion over utterances needs."""

    batch_size: int  # maximum rows of a minibatch; may change between two epochs

    def __len__(self) -> int:
        """Minibatches in an epoch."""

    def num_frames(self, skip: int = 0) -> int:
        """Frames of an epoch without its first `skip` minibatches."""

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor | UtteranceRows]:
        """The dataset rows (n,) int64 of each minibatch of an epoch, without the first `skip`."""

    def close(self) -> None:
        """Stops background work."""


class SequentialSampler:
    """Consecutive frames, the same in every epoch; the last minibatch may be short."""

    def __init__(self, frames: FrameSubset, batch_size: int) -> None:
        self.frames, self.batch_size = frames, batch_size

    def __len__(self) -> int:
        return -(-len(self.frames) // self.batch_size)

    def num_frames(self, skip: int = 0) -> int:
        return len(self.frames) - skip * self.batch_size

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor]:
        for start in range(skip * self.batch_size, len(self.frames), self.batch_size):
            yield self.frames.indices[start : start + self.batch_size]

    def close(self) -> None:
        return


class ShuffledSampler:
    """All frames in one random order per epoch, which depends on seed, epoch and the worker's rank only. A remainder
    smaller than a minibatch is dropped, as in nnet-train-frmshuff. `randomizer_size`: shuffle as nnet-train-frmshuff
    does on a shuffled list: the utterances keep one random order in all epochs, and blocks of about so many frames are
    shuffled. `prefetch`: draw each epoch's order in a thread during the epoch before, as 100 million frames take
    seconds."""

    def __init__(
        self,
        frames: FrameSubset,
        batch_size: int,
        seed: int,
        rank: int = 0,
        randomizer_size: int | None = None,
        *,
        prefetch: bool = False,
    ) -> None:
        self.frames, self.batch_size, self.seed, self.rank, self.prefetch = frames, batch_size, seed, rank, prefetch
        self.randomizer_size = randomizer_size
        self._thread: ThreadPoolExecutor | None = None
        self._drawn: dict[int, Future[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.frames) // self.batch_size

    def num_frames(self, skip: int = 0) -> int:
        return (len(self) - skip) * self.batch_size

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor]:
        drawn = self._drawn.pop(number, None)
        order = self._draw(number) if drawn is None else drawn.result()
        if self.prefetch:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="shuffle")
            self._drawn = {number + 1: self._thread.submit(self._draw, number + 1)}
        order = order.to(self.frames.indices.device)
        size = self.batch_size
        return (self.frames.indices[order[n * size : (n + 1) * size]] for n in range(skip, len(self)))

    def close(self) -> None:
        """Ends the thread; the next epoch starts another."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread, self._drawn = None, {}

    def _draw(self, epoch: int) -> Tensor:
        generator = _generator(self.seed, self.rank, epoch)
        if self.randomizer_size is None:
            return torch.randperm(len(self.frames), generator=generator)
        rows = self.frames.indices.cpu().numpy()
        first = np.append(np.flatnonzero(np.isin(rows, self.frames.dataset.offsets)), len(rows))  # of each utterance
        utterances = torch.randperm(len(first) - 1, generator=_generator(self.seed, self.rank)).numpy()
        positions = np.concatenate([np.arange(first[u], first[u + 1]) for u in utterances])
        begin = 0  # of a block; unlike Kaldi's, none keeps a rest for the next: minibatches may grow
        for end in np.cumsum(np.diff(first)[utterances]).tolist():
            if end - begin > self.randomizer_size or end == len(rows):
                block = torch.randperm(end - begin, generator=generator).numpy()
                positions[begin:end], begin = positions[begin:end][block], end
        return torch.from_numpy(positions)


class UtteranceSampler:
    """Whole utterances, `per_minibatch` at once, in the order of `utterances`, indices in the dataset, and in all epochs the
    same; the last minibatch may have fewer."""

    def __init__(self, dataset: AcousticDataset, utterances: Sequence[int], per_minibatch: int = 1) -> None:
        self.dataset = dataset
        starts = range(0, len(utterances), per_minibatch)
        self.minibatches = [tuple(utterances[start : start + per_minibatch]) for start in starts]
        self.sizes = [int(dataset.num_frames[list(part)].sum()) for part in self.minibatches]
        self.batch_size = max(self.sizes, default=1)

    def __len__(self) -> int:
        return len(self.minibatches)

    def num_frames(self, skip: int = 0) -> int:
        return sum(self.sizes[skip:])

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[UtteranceRows]:
        return (UtteranceRows(self.dataset.rows_of(part), part) for part in self.minibatches[skip:])

    def close(self) -> None:
        return


def utterances_of(frames: FrameSubset) -> list[int]:
    """Indices in the dataset, ascending, of the utterances whose first frames are among `frames`."""
    first: list[int] = np.flatnonzero(np.isin(frames.dataset.offsets, frames.indices.cpu().numpy())).tolist()
    return first


def shuffled(utterances: Sequence[int], seed: int, rank: int = 0) -> list[int]:
    """In a random order, which depends on seed and rank only."""
    return [utterances[n] for n in torch.randperm(len(utterances), generator=_generator(seed, rank)).tolist()]


def _generator(seed: int, rank: int, epoch: int = 0) -> torch.Generator:
    # torch's generator on the CPU uses the lower 32 bits of its seed alone: an odd factor keeps ranks apart in them.
    mixed = (seed * 1_000_003 + epoch + rank * 2_654_435_761) % 2**63
    return torch.Generator().manual_seed(mixed)


class Batch(NamedTuple):
    """One minibatch, on the device that computes; valid until the next one is requested."""

    x: Tensor  # (n, input_dim): the network's input
    labels: Tensor  # (n,) int64: pdf-ids, -1 where there is no alignment
    utterances: tuple[int, ...] = ()  # indices in the dataset, from a sampler of whole utterances; else empty

    @property
    def num_frames(self) -> int:
        return len(self.labels)


def _rows_and_utterances(selection: Tensor | UtteranceRows) -> tuple[Tensor, tuple[int, ...]]:
    return selection if isinstance(selection, UtteranceRows) else (selection, ())


def make_batch_loader(
    frames: FrameSubset,
    transform: InputTransform,
    sampler: Sampler,
    *,
    device: torch.device | None = None,
    out: Tensor | None = None,
    gather_kernel: GatherKernel | None = None,
    mark: Callable[[str], None] = lambda part: None,
    labels_only: bool = False,
) -> BatchLoader:
    """The loader for a device: it gathers features that are in the device's memory, or prefetches those in host memory.

    `out`: (rows, input_dim) float32 or bf16, the memory for `Batch.x`, with rows for the largest minibatch; else allocated on `device`. `gather_kernel`:
    see `gather`. `labels_only`: nobody reads `Batch.x`, which is not filled. `mark` is told what the time since its last call was spent on: `data`,
    or `compute` where the host waited for the GPU to finish an earlier minibatch.
    """
    if out is None:
        out = torch.empty(sampler.batch_size, transform.output_dim, device=device)
    resident = frames.dataset.features.device.type == out.device.type
    kind = LabelLoader if labels_only else BatchLoader if resident else PrefetchLoader
    return kind(frames, transform, sampler, out, gather_kernel, mark)


@dataclass(eq=False)
class BatchLoader:
    """The minibatches of one epoch after another. The attributes are the arguments of `make_batch_loader`."""

    frames: FrameSubset
    transform: InputTransform
    sampler: Sampler
    out: Tensor
    gather_kernel: GatherKernel | None = None
    mark: Callable[[str], None] = lambda part: None
    _epoch: Generator[Batch, None, None] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.sampler)

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Batch]:
        """The minibatches of epoch `number`, without the first `skip`. Ends an epoch that is under way."""
        self._end_epoch()
        self._epoch = self._batches(self.sampler.epoch(number, skip))
        return self._epoch

    def sample(self, count: int) -> list[Batch]:
        """Copies of `count` full minibatches from the start of the data, repeated where it is short."""
        size = self.sampler.batch_size
        full = min(NUM_BUFFERS, len(self.frames) // size)
        self._end_epoch()
        batches = self._batches(islice(SequentialSampler(self.frames, size).epoch(), full))
        copies = [Batch(batch.x.clone(), batch.labels.clone()) for batch in batches]
        self._end_epoch()
        return list(islice(cycle(copies), count))

    def close(self) -> None:
        """Ends the epoch and stops background work; to be called when no more minibatches are needed."""
        self._end_epoch()
        self.sampler.close()

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
        self._epoch = None

    def _batches(self, order: Iterator[Tensor | UtteranceRows]) -> Generator[Batch, None, None]:
        for selection in order:
            rows, utterances = _rows_and_utterances(selection)
            x = self._gather(rows)
            labels = labels_of(self.frames.dataset, rows, self.out.device)
            self.mark("data")
            yield Batch(x, labels, utterances)

    def _gather(self, rows: Tensor) -> Tensor:
        return gather(self.frames.dataset, self.transform, rows, self.out[: len(rows)], self.gather_kernel)


class LabelLoader(BatchLoader):
    """Of a worker whose network's input comes from another worker."""

    def _gather(self, rows: Tensor) -> Tensor:
        return self.out[: len(rows)]


class _PinnedBatch:
    """Memory for one minibatch, on the host and on the device. On a CPU both are the same."""

    def __init__(
        self, batch_size: int, dataset: AcousticDataset, transform: InputTransform, device: torch.device
    ) -> None:
        gpu = device.type == "cuda"
        self.host_x = torch.empty(batch_size, transform.output_dim, dtype=dataset.features.dtype, pin_memory=gpu)
        self.host_labels = torch.empty(batch_size, dtype=dataset.labels.dtype, pin_memory=gpu)
        self.x, self.labels = self.host_x, self.host_labels
        self.num_frames, self.utterances = 0, tuple[int, ...]()
        self.copied = self.used = None
        if gpu:
            self.x, self.labels = torch.empty_like(self.x, device=device), torch.empty_like(self.labels, device=device)
            self.copied, self.used = torch.cuda.Event(), torch.cuda.Event()  # type: ignore[no-untyped-call]


@dataclass(eq=False)
class PrefetchLoader(BatchLoader):
    """Prefetches minibatches in a thread. Its errors reach the trainer after the minibatches that were read before
    them."""

    _reader: ThreadPoolExecutor | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.device = self.out.device
        dataset, size = self.frames.dataset, len(self.out)
        self._buffers = [_PinnedBatch(size, dataset, self.transform, self.device) for _ in range(NUM_BUFFERS)]
        gpu = self.device.type == "cuda"
        self._copies = torch.cuda.Stream(self.device) if gpu else None  # type: ignore[no-untyped-call]
        self._wide = self.out if self.out.dtype == torch.float32 else torch.empty_like(self.out, dtype=torch.float32)

    def _batches(self, order: Iterator[Tensor | UtteranceRows]) -> Generator[Batch, None, None]:
        if self.device.type == "cuda":  # an epoch that ended early may have copies under way
            torch.cuda.synchronize(self.device)
        in_flight: deque[_PinnedBatch] = deque()
        reader = self._reader = ThreadPoolExecutor(1, "prefetch", use_device, (self.device,))
        ready: deque[Future[_PinnedBatch | None]] = deque()
        try:
            ready.extend(reader.submit(self._fill, buffer, order) for buffer in self._buffers)
            self.mark("compute")
            while (buffer := ready[0].result()) is not None:
                ready.popleft()
                batch = self._take(buffer)
                self.mark("data")
                yield batch
                in_flight.append(buffer)
                if len(in_flight) > MAX_IN_FLIGHT:
                    oldest = in_flight.popleft()
                    if oldest.used is not None:
                        oldest.used.synchronize()
                    ready.append(reader.submit(self._fill, oldest, order))
                self.mark("compute")
        finally:
            # Waits for the reads under way. The thread is waited for in `_end_epoch` only: the garbage collector may close
            # this generator while another thread starts, which holds the lock that a thread needs to end.
            reader.shutdown(wait=False, cancel_futures=True)
            for future in ready:
                if not future.cancelled():
                    future.exception()

    def _end_epoch(self) -> None:
        super()._end_epoch()
        if self._reader is not None:
            self._reader.shutdown()

    def _take(self, buffer: _PinnedBatch) -> Batch:
        """The minibatch in `buffer`, normalized in float32 in `out`; queued on the device, not waited for."""
        n = buffer.num_frames
        if buffer.copied is not None:
            torch.cuda.current_stream(self.device).wait_event(buffer.copied)
        x = normalize_(self._wide[:n].copy_(buffer.x[:n]), self.transform)
        if self._wide is not self.out:
            x = self.out[:n].copy_(x)
        labels = buffer.labels[:n].long()
        if buffer.used is not None:
            buffer.used.record(torch.cuda.current_stream(self.device))
        return Batch(x, labels, buffer.utterances)

    def _fill(self, buffer: _PinnedBatch, order: Iterator[Tensor | UtteranceRows]) -> _PinnedBatch | None:
        """In the thread: the buffer with the next minibatch, on its way to the device; None at the end of `order`."""
        selection = next(order, None)
        if selection is None:
            return None
        rows, buffer.utterances = _rows_and_utterances(selection)
        n = buffer.num_frames = len(rows)
        if n > len(buffer.host_labels):
            raise ValueError(f"{n} rows in a minibatch, at most {len(buffer.host_labels)} expected")
        splice(self.frames.dataset, self.transform, rows, buffer.host_x[:n])
        torch.index_select(self.frames.dataset.labels, 0, rows, out=buffer.host_labels[:n])
        if buffer.copied is not None and self._copies is not None:
            with torch.cuda.stream(self._copies):
                buffer.x[:n].copy_(buffer.host_x[:n], non_blocking=True)
                buffer.labels[:n].copy_(buffer.host_labels[:n], non_blocking=True)
                buffer.copied.record(self._copies)
        return buffer
