"""The order of frames within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from ddnn.data.corpus import Corpus


@dataclass(frozen=True)
class FrameSet:
    """Frames to train on or to judge by: a corpus, and the store rows (frames,) int64 of the frames chosen from it."""

    corpus: Corpus
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)


def frame_set(corpus: Corpus, utterances: list[int]) -> FrameSet:
    """All frames of the utterances with these indices, in order."""
    return FrameSet(corpus, corpus.rows_of(utterances).to(corpus.store.device))


def num_minibatches(frames: FrameSet, minibatch: int) -> int:
    """How many minibatches an epoch has: `shuffled_minibatches` drops the tail."""
    return len(frames) // minibatch


def shuffled_minibatches(frames: FrameSet, minibatch: int, *, seed: int, epoch: int, rank: int = 0) -> Iterator[Tensor]:
    """Store rows (minibatch,) int64 of one minibatch after another; the frames of the whole set in one random order.

    Kaldi nnet1 shuffles within 32,768 frames over a shuffled utterance list; a corpus in memory is shuffled whole. The
    order depends on seed, epoch and the worker's rank only. A tail shorter than a minibatch is dropped, as in
    nnet-train-frmshuff.
    """
    return _in_minibatches(frames, minibatch, frame_order(len(frames), seed=seed, epoch=epoch, rank=rank))


def frame_order(frames: int, *, seed: int, epoch: int, rank: int = 0) -> Tensor:
    """(frames,) int64 on the host: the numbers below `frames` in the random order of `shuffled_minibatches`."""
    # torch's generator on the CPU uses the lower 32 bits of its seed alone: an odd factor keeps ranks apart in them.
    mixed = (seed * 1_000_003 + epoch + rank * 2_654_435_761) % 2**63
    return torch.randperm(frames, generator=torch.Generator().manual_seed(mixed))


class Orders:
    """`shuffled_minibatches` of one epoch after another.

    Args:
        ahead: draw each epoch's order in a thread while the one before is trained on. 100 million frames take the host
            seconds, in which a GPU would wait.
    """

    def __init__(self, frames: FrameSet, minibatch: int, *, seed: int, rank: int = 0, ahead: bool = False) -> None:
        self.frames, self.minibatch, self.seed, self.rank = frames, minibatch, seed, rank
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="order") if ahead else None
        self._drawn: dict[int, Future[Tensor]] = {}

    def of(self, epoch: int, after: int = 0) -> Iterator[Tensor]:
        """The minibatches of an epoch, without the first `after`."""
        drawn = self._drawn.pop(epoch, None)
        order = self._draw(epoch) if drawn is None else drawn.result()
        if self._thread is not None:
            self._drawn = {epoch + 1: self._thread.submit(self._draw, epoch + 1)}
        return _in_minibatches(self.frames, self.minibatch, order, after)

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _draw(self, epoch: int) -> Tensor:
        return frame_order(len(self.frames), seed=self.seed, epoch=epoch, rank=self.rank)


def _in_minibatches(frames: FrameSet, minibatch: int, order: Tensor, after: int = 0) -> Iterator[Tensor]:
    order = order.to(frames.rows.device)
    for start in range(after * minibatch, len(frames) - minibatch + 1, minibatch):
        yield frames.rows[order[start : start + minibatch]]


def in_order(frames: FrameSet, block: int) -> Iterator[Tensor]:
    """Store rows of consecutive blocks of at most `block` frames; nothing is dropped."""
    for start in range(0, len(frames), block):
        yield frames.rows[start : start + block]
