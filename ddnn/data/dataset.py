"""The dataset: every frame of a data dir, or of a worker's shard of it, with its pdf-id, held in memory once.

Utterances are stored one after another in `features`, each with `context` copies of its first and last frame around it.
The input of frame t, spliced over t-context .. t+context, is then one contiguous piece of memory: no splice is ever
stored, and a frame outside the utterance repeats the first or last one, as in Kaldi nnet1's <Splice>.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.index import UtteranceIndex


@dataclass(frozen=True, eq=False)
class AcousticDataset:
    """Utterances in memory."""

    features: Tensor  # (rows, dim) float32 or float16; utterances with their `context` repeated edge frames
    labels: Tensor  # (rows,) int32, the pdf-id of each frame; -1 on the repeated edges and where there is no alignment
    utterances: tuple[str, ...]  # utterance ids in the order of the data dir
    speakers: tuple[str, ...] | None  # speaker of each utterance; None where the data dir has no utt2spk
    offsets: NDArray[np.int64]  # (utterances,) int64, the row of each utterance's first frame
    num_frames: NDArray[np.int64]  # (utterances,) int64
    context: int  # repeated edge frames on each side
    # how many utterances of the data dir are used, skipped (by reason) and trimmed
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def dim(self) -> int:
        """Feature dimension before splicing."""
        return int(self.features.shape[1])

    def rows_of(self, utterances: Iterable[int]) -> Tensor:
        """Rows, (frames,) int64, of all frames of the utterances with these indices."""
        pieces = [np.arange(self.offsets[u], self.offsets[u] + self.num_frames[u]) for u in utterances]
        return torch.from_numpy(np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64))

    def subset(self, utterances: Iterable[int]) -> FrameSubset:
        return FrameSubset(self, self.rows_of(utterances).to(self.features.device))

    def to(self, device: torch.device) -> AcousticDataset:
        return replace(self, features=self.features.to(device), labels=self.labels.to(device))


@dataclass(frozen=True)
class FrameSubset:
    """Some frames of a dataset: those to train on, or for cross-validation."""

    dataset: AcousticDataset
    indices: Tensor  # (frames,) int64, the dataset row of each, on the device of the features

    def __len__(self) -> int:
        return len(self.indices)


def make_dataset(index: UtteranceIndex, features: Tensor, labels: Tensor, context: int) -> AcousticDataset:
    """The dataset of all utterances of an index, whose features and labels are in memory."""
    offsets = utterance_offsets(index.num_frames, context)
    return AcousticDataset(
        features, labels, index.utterances, index.speakers, offsets, index.num_frames, context, index.counts
    )


def utterance_offsets(num_frames: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """(utterances,) int64, the row of each utterance's first frame."""
    ends = np.cumsum(num_frames + 2 * context)
    return np.asarray(ends - num_frames - context, dtype=np.int64)


def frame_labels(index: UtteranceIndex, context: int) -> Tensor:
    """The pdf-id of each row, int32; -1 on the repeated edges, and everywhere without alignments. Of a longer alignment
    the first `num_frames` pdf-ids are taken."""
    num_frames = index.num_frames
    labels = torch.full((int(num_frames.sum()) + 2 * context * len(num_frames),), -1, dtype=torch.int32)
    if index.alignments is not None:
        rows = labels.numpy()
        offsets = utterance_offsets(num_frames, context)
        for name, row, frames in zip(index.utterances, offsets, num_frames, strict=True):
            rows[row : row + frames] = index.alignments.pdfs[name][:frames]
    return labels
