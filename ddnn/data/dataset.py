"""The dataset: every frame of a data dir, or of a worker's shard of it, with its pdf-id, held in memory once.

Utterances are stored one after another in `features`, each with `context` copies of its first and last frame around it.
The input of frame t, spliced over t-context .. t+context, is then one contiguous piece of memory: no splice is ever
stored, and a frame outside the utterance repeats the first or last one, as in Kaldi nnet1's <Splice>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.index import UtteranceIndex

STATISTICS_UTTERANCES = 10_000  # nnet1 takes its statistics from so many utterances of the training set


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


@dataclass(frozen=True)
class InputTransform:
    """x = (splice(frame) + shift) * scale. The values of a spliced frame are ordered [offset][delta order][dim], as
    Kaldi's add-deltas and splice-feats write them."""

    offsets: tuple[int, ...]  # frames to splice, relative to the frame itself; (-5, ..., 5) for splice 5
    dim: int  # feature dimension before splicing
    shift: Tensor | None = None  # (len(offsets) * dim,) float32, or None
    scale: Tensor | None = None  # (len(offsets) * dim,) float32, or None

    @property
    def output_dim(self) -> int:
        return self.dim * len(self.offsets)

    @cached_property
    def context(self) -> int:
        """Repeated edge frames that a dataset needs for this splice."""
        return max(abs(offset) for offset in self.offsets)

    @cached_property
    def is_consecutive(self) -> bool:
        """Whether no frame between the first and the last is missing."""
        first = self.offsets[0]
        return self.offsets == tuple(range(first, first + len(self.offsets)))

    def to(self, device: torch.device) -> InputTransform:
        shift, scale = (None if vector is None else vector.to(device) for vector in (self.shift, self.scale))
        return InputTransform(self.offsets, self.dim, shift, scale)


GatherKernel = Callable[[Tensor, Tensor, int, Tensor | None, Tensor | None, Tensor], None]
"""Fills `out` in one pass from features (float32, on the CPU), rows, the first offset of a splice, shift and scale."""


def gather(
    dataset: AcousticDataset, transform: InputTransform, rows: Tensor, out: Tensor, kernel: GatherKernel | None = None
) -> Tensor:
    """Fills `out` (n, output_dim) with the network's input for the frames at `rows` (n,), computed in float32. On a GPU
    the host waits for nothing, unless the features are in host memory (`ddnn.data.batches` reads ahead there).
    `kernel`: a compiled one for the dtype of `out`, which is used where it can be. ValueError: the dataset has other
    dims, or fewer repeated edge frames, than the transform needs."""
    features = dataset.features
    if kernel is not None and features.is_cpu and features.dtype == torch.float32 and transform.is_consecutive:
        check_fits(dataset, transform)
        kernel(features, rows, transform.offsets[0], transform.shift, transform.scale, out)
        return out
    if out.dtype != torch.float32:
        return out.copy_(gather(dataset, transform, rows, out.new_empty(out.shape, dtype=torch.float32)))
    return normalize_(splice(dataset, transform, rows, out), transform)


def splice(dataset: AcousticDataset, transform: InputTransform, rows: Tensor, out: Tensor) -> Tensor:
    """out (n, output_dim) <- each frame of `rows` (n,) and its neighbors at `transform.offsets`, side by side, not yet
    shifted and scaled. At the edges of an utterance the dataset holds its first and last frame repeated."""
    check_fits(dataset, transform)
    offsets, features = transform.offsets, dataset.features
    rows = rows.to(features.device)
    if not transform.is_consecutive:
        for part, offset in zip(out.view(len(rows), -1, transform.dim).unbind(1), offsets, strict=True):
            part.copy_(features.index_select(0, rows + offset))  # a tensor of the offsets would be copied to the GPU
        return out
    if len(rows) == 0:  # the dataset may have fewer rows than a splice
        return out
    # Consecutive offsets are one contiguous piece of memory per frame: a single gather.
    windows = features.as_strided((len(features) - len(offsets) + 1, transform.output_dim), (features.shape[1], 1))
    if features.dtype == out.dtype and features.device == out.device:
        return torch.index_select(windows, 0, rows + offsets[0], out=out)
    return out.copy_(windows.index_select(0, rows + offsets[0]))


def check_fits(dataset: AcousticDataset, transform: InputTransform) -> None:
    """ValueError where the dataset has other dims, or fewer repeated edge frames, than the transform needs."""
    if dataset.features.shape[1] != transform.dim or dataset.context < transform.context:
        found = f"{dataset.features.shape[1]} dims with context {dataset.context}"
        raise ValueError(f"the dataset has {found}, the transform needs {transform.dim} with {transform.context}")


def labels_of(dataset: AcousticDataset, rows: Tensor, device: torch.device) -> Tensor:
    """The pdf-ids (n,) int64 of the frames at `rows` (n,), on `device`."""
    return dataset.labels.index_select(0, rows.to(dataset.labels.device)).to(device).long()


def normalize_(x: Tensor, transform: InputTransform) -> Tensor:
    """Shifts and scales spliced frames (n, output_dim) in place."""
    if transform.shift is not None:
        x.add_(transform.shift)
    if transform.scale is not None:
        x.mul_(transform.scale)
    return x


def splice_only(dim: int, context: int) -> InputTransform:
    """Splices `context` frames on each side and leaves the values as they are."""
    return InputTransform(tuple(range(-context, context + 1)), dim)
