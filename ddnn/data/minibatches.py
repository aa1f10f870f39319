"""The order of frames within an epoch."""

from __future__ import annotations

from collections.abc import Iterator
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
    # torch's generator on the CPU uses the lower 32 bits of its seed alone: an odd factor keeps ranks apart in them.
    mixed = (seed * 1_000_003 + epoch + rank * 2_654_435_761) % 2**63
    order = torch.randperm(len(frames), generator=torch.Generator().manual_seed(mixed)).to(frames.rows.device)
    for start in range(0, len(frames) - minibatch + 1, minibatch):
        yield frames.rows[order[start : start + minibatch]]


def in_order(frames: FrameSet, block: int) -> Iterator[Tensor]:
    """Store rows of consecutive blocks of at most `block` frames; nothing is dropped."""
    for start in range(0, len(frames), block):
        yield frames.rows[start : start + block]
