"""The one door to data: from a data dir and its alignments to the frames that this worker holds in memory. What is read
and held out is agreed on first, then shards, memory and device; only then are features loaded."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ddnn.data.cache import CacheFile, load_from_cache, open_or_create_cache
from ddnn.data.dataset import (
    STATISTICS_UTTERANCES,
    AcousticDataset,
    FrameSubset,
    InputTransform,
    estimate_normalization,
    splice_only,
)
from ddnn.data.index import (
    DEFAULT_FRACTION,
    UtteranceIndex,
    assign_shards,
    build_index,
    hold_out_fraction,
    hold_out_speakers,
    local_positions,
)
from ddnn.data.loading import DataConfig, load_dataset
from ddnn.data.memory import Estimate, TrainingFootprint, choose_feature_device, frame_bytes, require_host_memory
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.kaldi.alignments import Alignments, read_alignments
from ddnn.kaldi.data_dir import read_data_dir
from ddnn.util.errors import DataError, RecipeError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """What is held out for cross-validation: a data dir with alignments, or the speakers of a list, or a fraction."""

    data: Path | None = None
    alignments: Path | None = None
    speakers: Path | None = None
    fraction: float | None = None


@dataclass(frozen=True)
class TrainingDataConfig:
    """What a training reads."""

    # a Kaldi data dir, and an alignment dir or archive of pdf-ids
    data: Path
    alignments: Path
    reading: DataConfig
    held_out: HeldOut | None  # None: nothing, as for RBMs
    seed: int  # for the choice of speakers
    # (input dimension of the network, number of pdfs) -> what else needs memory
    footprint: Callable[[int, int], TrainingFootprint]
    normalize: bool = True  # whether the input is shifted and scaled to zero mean and unit variance
    feature_device: Literal["auto", "cpu"] = "auto"


@dataclass(frozen=True, eq=False)
class DataSource:
    """An indexed data dir, of which shards can be loaded."""

    index: UtteranceIndex
    config: DataConfig
    cache: CacheFile | None = None

    @property
    def width(self) -> int:
        return self.config.features.width(self.index.dim)

    def load(self, utterances: Sequence[int], comm: Communicator) -> AcousticDataset:
        """The frames of these utterances of the index, ascending. Collective; raises as `load_dataset`."""
        if self.cache is not None:
            return load_from_cache(self.cache, self.index, utterances)
        return load_dataset(self.index, self.config, utterances=utterances, comm=comm)

    def memory(self, utterances: Sequence[int], *, mapped: bool = True) -> Estimate:
        """What these utterances take in host memory: with `mapped`, the whole cache file is not loaded, but mapped."""
        features, lengths = self.config.features, self.index.num_frames[list(utterances)]
        mapped = mapped and self.cache is not None and len(utterances) == len(self.index.entries)
        rows = 0 if mapped else features.rows(lengths)
        size = frame_bytes(features.dtype, int(lengths.sum()), rows, self.width)
        return {f"frames in {features.dtype}": size}


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What this worker trains on, and its part of the cross-validation."""

    index: UtteranceIndex  # the whole data dir, of all workers
    shards: list[list[int]]  # for each rank the utterances of the index that it has in memory, those held out included
    dataset: AcousticDataset  # this worker's shard: on the device, or in host memory
    device: torch.device  # where this worker computes
    train_utterances: list[int]  # all workers' utterances to train on
    train_shards: list[list[int]]  # for each rank its part of them
    # this worker's frames; `cv` is empty where nothing is held out
    train: FrameSubset
    cv: FrameSubset
    # of the data dir for cross-validation; None where speakers of `index` are held out
    cv_index: UtteranceIndex | None = None
    normalize: bool = True

    def digest(self) -> str:
        """SHA-256 of the utterances to train on and to validate with, their lengths, and how often each pdf occurs."""
        digest = hashlib.sha256()
        self.index.update_digest(digest)
        digest.update(f"train {self.train_utterances}\n".encode())
        if self.cv_index is not None:
            self.cv_index.update_digest(digest, "held out ")
            digest.update(self.cv_index.pdf_counts.tobytes())
        digest.update(self.index.pdf_counts.tobytes())
        return digest.hexdigest()

    def input_transform(self, comm: Communicator, *, all_utterances: bool = False) -> InputTransform:
        """Splice and, if `normalize`, the normalization that the frames to train on give, or all frames. Collective."""
        transform = splice_only(self.dataset.dim, self.dataset.context)
        if not self.normalize:
            return transform
        chosen = list(range(len(self.index.entries))) if all_utterances else self.train_utterances
        local = local_positions(self.shards[comm.rank], chosen[:STATISTICS_UTTERANCES])
        return estimate_normalization(transform, self.dataset, local, comm)

    def require_minibatch(self, key: str, batch_size: int, shards: list[list[int]]) -> None:
        """RecipeError, which names the recipe's key, where the smallest of `shards` does not fill one minibatch."""
        smallest, several = min(int(self.index.num_frames[shard].sum()) for shard in shards), len(shards) > 1
        if smallest < batch_size:
            of_shard = f" of the smallest of {len(shards)} shards" if several else ""
            message = f"{smallest} frames{of_shard} do not fill one minibatch of {batch_size}"
            hint = "take a smaller minibatch" + (", fewer workers" if several else "") + " or more data"
            raise RecipeError(message, location=key, hint=hint)


def training_data(config: TrainingDataConfig, device: torch.device, comm: Communicator) -> TrainingData:
    """This worker's frames of a data dir and of what is held out, for training on `device`. Collective. DataError:
    damaged or unsuitable input; not enough memory. UserError: a loading process died."""
    source = open_data(config.data, config.alignments, config.reading, comm)
    index, held_out = source.index, config.held_out or HeldOut()
    train, cv = list(range(len(index.entries))), list[int]()
    if config.held_out is not None and held_out.data is None:
        if held_out.speakers is not None:
            train, cv = hold_out_speakers(index, held_out.speakers)
        else:
            train, cv = hold_out_fraction(index, held_out.fraction or DEFAULT_FRACTION, config.seed)
    train_shards, cv_shards = (assign_shards(index.num_frames, part, comm.world_size) for part in (train, cv))
    if comm.world_size > 1:
        sizes = [int(index.num_frames[shard].sum()) for shard in train_shards]
        log.info("shards of %d to %d frames for %d workers", min(sizes), max(sizes), comm.world_size)
    shards = [sorted(a + b) for a, b in zip(train_shards, cv_shards, strict=True)]
    dataset = _load(config, source, shards[comm.rank], device, comm)
    train_frames = dataset.subset(local_positions(shards[comm.rank], train))
    if held_out.data is None or held_out.alignments is None:
        cv_frames, cv_index = dataset.subset(local_positions(shards[comm.rank], cv)), None
    else:
        cv_source = open_data(held_out.data, held_out.alignments, config.reading, comm)
        cv_index = cv_source.index
        _check_same_kind(source, cv_source, config, held_out)
        shard = assign_shards(cv_index.num_frames, range(len(cv_index.entries)), comm.world_size)[comm.rank]
        cv_frames = _load(config, cv_source, shard, device, comm).subset(range(len(shard)))
    return TrainingData(
        index, shards, dataset, device, train, train_shards, train_frames, cv_frames, cv_index, config.normalize
    )


def open_data(data: Path, alignments: Path, config: DataConfig, comm: Communicator) -> DataSource:
    """Indexes a data dir: from its cache file where there is a valid one, else from its tables and headers; what is
    wrong with a cache file is a warning. Collective. DataError: damaged or unsuitable input."""
    directory = read_data_dir(data, allow_pipes=config.allow_pipes)
    index = cache = None
    if config.cache_dir is not None:
        index, cache = open_or_create_cache(directory, alignments, config, comm)
    if index is None:
        aligned = read_alignments(alignments, num_pdfs=config.num_pdfs)
        index = build_index(directory, aligned, comm, max_skipped_fraction=config.max_skipped_fraction)
    source = DataSource(index, config, cache)
    log.info("%s: %d utterances, %d frames of %d dims", data, len(index.entries), index.num_frames.sum(), source.width)
    return source


def load_data_dir(data: Path, alignments: Alignments | None, config: DataConfig) -> AcousticDataset:
    """A whole data dir in host memory, with its alignments if given: what is evaluated or decoded. DataError: damaged
    or unsuitable input; too many utterances that cannot be used; not enough memory."""
    directory, comm = read_data_dir(data, allow_pipes=config.allow_pipes), SingleProcess()
    index = build_index(directory, alignments, max_skipped_fraction=config.max_skipped_fraction)
    source, utterances = DataSource(index, config), range(len(index.entries))
    require_host_memory(source.memory(utterances), data, comm)
    return source.load(utterances, comm)


def _load(
    config: TrainingDataConfig, source: DataSource, shard: list[int], device: torch.device, comm: Communicator
) -> AcousticDataset:
    """This worker's shard, on the device where there is room for it, once all memory is known to suffice."""
    context, index = config.reading.features.splice, source.index
    footprint = config.footprint(source.width * (2 * context + 1), index.num_pdfs)
    comm.barrier()  # what was loaded before is there: all workers ask for memory together
    require_host_memory({**source.memory(shard), **footprint.on_host(device.type)}, index.directory.path, comm)
    size = sum(source.memory(shard, mapped=False).values())
    place = choose_feature_device(footprint, size, device, comm, on_host=config.feature_device == "cpu")
    return source.load(shard, comm).to(place)


def _check_same_kind(source: DataSource, cv: DataSource, config: TrainingDataConfig, held_out: HeldOut) -> None:
    """DataError where the data dir for cross-validation has other features, or more pdfs."""
    if cv.index.num_pdfs > source.index.num_pdfs:
        message = f"{cv.index.num_pdfs} pdfs for cross-validation, {source.index.num_pdfs} for training"
        raise DataError(message, location=held_out.alignments, hint="use alignments made with the same final.mdl")
    if cv.index.dim != source.index.dim:
        message = f"{cv.width} dims found, {source.width} expected as in {config.data}"
        raise DataError(message, location=held_out.data)
