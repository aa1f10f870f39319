"""Which frames make up each minibatch of an epoch.

A sampler is an object with `batch_size`, `len()` (minibatches in an epoch), `epoch(number, skip)`, which gives the
dataset rows (n,) int64 of one minibatch after another, n <= batch_size, and `close()`. One that gives the rows of one
utterance after another is all that a criterion over whole utterances needs; see `AcousticDataset.rows_of`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from ddnn.data.dataset import FrameSubset


class Sampler(Protocol):
    """See the module."""

    batch_size: int

    def __len__(self) -> int:
        """Minibatches in an epoch."""

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor]:
        """The minibatches of an epoch, without the first `skip`."""

    def close(self) -> None:
        """Ends what works in the background."""


class SequentialSampler:
    """Consecutive frames; the last minibatch may be short."""

    def __init__(self, frames: FrameSubset, batch_size: int) -> None:
        self.frames, self.batch_size = frames, batch_size

    def __len__(self) -> int:
        return -(-len(self.frames) // self.batch_size)

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor]:
        """The same in every epoch."""
        for start in range(skip * self.batch_size, len(self.frames), self.batch_size):
            yield self.frames.indices[start : start + self.batch_size]

    def close(self) -> None:
        """Nothing works in the background."""


class ShuffledSampler:
    """All frames in one random order per epoch, which depends on seed, epoch and the worker's rank only.

    Kaldi nnet1 shuffles within 32,768 frames over a shuffled utterance list; a dataset in memory is shuffled whole. A
    remainder smaller than a minibatch is dropped, as in nnet-train-frmshuff.

    Args:
        prefetch: draw each epoch's order in a thread during the epoch before. 100 million frames take the host seconds,
            in which a GPU would wait.
    """

    def __init__(
        self, frames: FrameSubset, batch_size: int, *, seed: int, rank: int = 0, prefetch: bool = False
    ) -> None:
        self.frames, self.batch_size, self.seed, self.rank, self.prefetch = frames, batch_size, seed, rank, prefetch
        self._thread: ThreadPoolExecutor | None = None
        self._drawn: dict[int, Future[Tensor]] = {}

    def __len__(self) -> int:
        return len(self.frames) // self.batch_size

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Tensor]:
        """The minibatches of an epoch, without the first `skip`."""
        drawn = self._drawn.pop(number, None)
        order = self._draw(number) if drawn is None else drawn.result()
        if self.prefetch:
            self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="shuffle")
            self._drawn = {number + 1: self._thread.submit(self._draw, number + 1)}
        return self._minibatches(order, skip)

    def close(self) -> None:
        """Ends the thread; the next epoch starts another."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread, self._drawn = None, {}

    def _draw(self, epoch: int) -> Tensor:
        return permutation(len(self.frames), seed=self.seed, epoch=epoch, rank=self.rank)

    def _minibatches(self, order: Tensor, skip: int) -> Iterator[Tensor]:
        order = order.to(self.frames.indices.device)
        for batch in range(skip, len(self)):
            yield self.frames.indices[order[batch * self.batch_size : (batch + 1) * self.batch_size]]


def permutation(frames: int, *, seed: int, epoch: int, rank: int = 0) -> Tensor:
    """(frames,) int64 on the host: the numbers below `frames` in random order."""
    # torch's generator on the CPU uses the lower 32 bits of its seed alone: an odd factor keeps ranks apart in them.
    mixed = (seed * 1_000_003 + epoch + rank * 2_654_435_761) % 2**63
    return torch.randperm(frames, generator=torch.Generator().manual_seed(mixed))
