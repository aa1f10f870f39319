"""Entry point to data: from corpora and their alignments to the frames that this worker holds in memory. The workers first
agree on what to train on and what to hold out, then on shards, memory and device; features are loaded last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ddnn.data.dataset import (
    AcousticDataset,
    FrameSubset,
)
from ddnn.data.index import (
    DEFAULT_FRACTION,
    UtteranceIndex,
    assign_shards,
    fraction_of,
    fraction_reached,
    hold_out_by_default,
    hold_out_fraction,
    hold_out_listed,
    local_positions,
)
from ddnn.data.loading import Corpus, DataConfig, index_corpus, warn_of_contradictions
from ddnn.data.source import DataSource, IndexedCorpus, open_source, read_tables
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.kaldi.alignments import Alignments
from ddnn.util.text import plural

log = logging.getLogger(__name__)

Place = Callable[[DataSource, Sequence[int]], torch.device]
"""Chooses, before they are loaded, the device that keeps the frames of these utterances of this worker."""
Skips = Callable[[str, int], str | None]
"""By id and number of frames: why no worker has an utterance in its shard; None where one has."""


@dataclass(frozen=True)
class CvSelection:
    """What is held out for cross-validation: corpora of their own, the speakers or utterances of a list, or a
    fraction."""

    corpora: tuple[Corpus, ...] = ()
    speakers: Path | None = None
    utterances: Path | None = None
    fraction: float | None = None
    by: Literal["speaker", "utterance"] | None = None  # of the fraction; None: see `hold_out_by_default`


@dataclass(frozen=True)
class TrainingDataConfig:
    """What a training reads."""

    corpora: tuple[Corpus, ...]
    reading: DataConfig
    held_out: CvSelection | None  # None: nothing, as for RBMs
    seed: int  # for the choice of speakers
    normalize: bool = True  # whether the input is shifted and scaled to zero mean and unit variance
    skips: Skips = lambda utterance, frames: None

    def usable(self, index: UtteranceIndex, utterances: Iterable[int]) -> list[int]:
        """Those of `utterances`, indices in `index`, that are not skipped."""
        names, frames = index.utterances, index.num_frames.tolist()
        return [u for u in utterances if not self.skips(names[u], frames[u])]


@dataclass(frozen=True, eq=False)
class DataPlan:
    """Which utterances a training uses, known from tables and headers."""

    source: DataSource  # all corpora to train on, of all workers
    train_utterances: list[int]  # indices in the index of `source`
    held_out: list[int]  # from `train_utterances`; none where there is a `cv_source`, or no cross-validation
    cv_source: DataSource | None  # the corpora for cross-validation, if they are others
    train_shards: list[list[int]]  # for each rank its part of `train_utterances`, without those that are skipped
    held_out_shards: list[list[int]]

    @property
    def index(self) -> UtteranceIndex:
        return self.source.index

    @property
    def shards(self) -> list[list[int]]:
        """For each rank the utterances of the index that it has in memory, those held out included."""
        return [sorted(a + b) for a, b in zip(self.train_shards, self.held_out_shards, strict=True)]

    def cv_index(self) -> UtteranceIndex:
        """All workers' utterances for cross-validation."""
        return self.index.subset(self.held_out) if self.cv_source is None else self.cv_source.index


@dataclass(frozen=True, eq=False)
class TrainingData(DataPlan):
    """What this worker trains on, and its part of the cross-validation."""

    dataset: AcousticDataset  # this worker's shard: on the device, or in host memory
    device: torch.device  # where this worker computes
    # this worker's frames; `cv` is empty where nothing is held out
    train: FrameSubset
    cv: FrameSubset
    normalize: bool = True


def plan_data(config: TrainingDataConfig, workers: int, comm: Communicator) -> DataPlan:
    """What so many workers will read and hold out, each a shard. Collective. DataError: damaged or unsuitable input."""
    source = open_source(config.corpora, config.reading, comm)
    index, held_out = source.index, config.held_out or CvSelection()
    train, cv, cv_source = list(range(len(index.entries))), list[int](), None
    if held_out.corpora:
        cv_source = open_source(held_out.corpora, config.reading, comm)
        for part in cv_source.parts:
            source.check_fits(part, "for cross-validation", for_cv=True)
        if comm.rank == 0:
            _describe_cross_validation(source, cv_source)
    elif config.held_out is not None:
        train, cv = _hold_out(index, held_out, config.seed, comm)
    train_shards, cv_shards = (
        assign_shards(index.num_frames, config.usable(index, part), workers) for part in (train, cv)
    )
    return DataPlan(source, train, cv, cv_source, train_shards, cv_shards)


def training_data(
    config: TrainingDataConfig, device: torch.device, groups: Groups, place: Place | None = None
) -> TrainingData:
    """This worker's frames of all corpora and of what is held out, for training on `device`, where they are kept unless
    `place`, collective, says otherwise before they are loaded. Collective. DataError: damaged or unsuitable input; as
    `place`. UserError: a loading process died."""

    def load(source: DataSource, shard: list[int]) -> AcousticDataset:
        features_on = device if place is None else place(source, shard)
        return source.load(shard, groups.world).to(features_on)

    rank, num_shards = groups.data.rank, groups.data.world_size
    plan = plan_data(config, num_shards, groups.world)
    index, cv_source, shard = plan.index, plan.cv_source, plan.shards[rank]
    if num_shards > 1:
        sizes = [int(index.num_frames[shard].sum()) for shard in plan.train_shards]
        log.info("shards: %s to %s frames for %d workers", f"{min(sizes):,}", f"{max(sizes):,}", num_shards)
    dataset = load(plan.source, shard)
    train = dataset.subset(local_positions(shard, plan.train_utterances))
    if cv_source is None:
        cv = dataset.subset(local_positions(shard, plan.held_out))
    else:
        cv_frames = cv_source.index.num_frames
        cv_shard = assign_shards(cv_frames, config.usable(cv_source.index, range(len(cv_frames))), num_shards)[rank]
        cv = load(cv_source, cv_shard).subset(range(len(cv_shard)))
    return TrainingData(**vars(plan), dataset=dataset, device=device, train=train, cv=cv, normalize=config.normalize)


def open_data_dir(
    data: Path, alignments: Alignments | None, config: DataConfig, transforms: Path | None = None
) -> DataSource:
    """A data dir that is evaluated or decoded, with its alignments and through its transforms if given. DataError:
    damaged or unsuitable input; too many utterances that cannot be used."""
    corpus = Corpus(data, data if alignments is None else alignments.path, transforms=transforms)
    index = index_corpus(corpus, read_tables(data, config), alignments, config)
    warn_of_contradictions(corpus, config, index)
    return DataSource((IndexedCorpus(corpus, index),), config)


def _hold_out(
    index: UtteranceIndex, held_out: CvSelection, seed: int, comm: Communicator
) -> tuple[list[int], list[int]]:
    """The utterances to train on and those held out, which are logged: a warning where their fraction of the frames is
    not the one that the recipe asks for, and where they are of speakers of the training data without its asking for
    it."""
    wanted, reason = None, ""
    if held_out.speakers is not None:
        train, cv = hold_out_listed(index, held_out.speakers, "speaker")
    elif held_out.utterances is not None:
        train, cv = hold_out_listed(index, held_out.utterances, "utterance")
    else:
        wanted = held_out.fraction or DEFAULT_FRACTION
        if held_out.by is None:
            train, cv, reason = hold_out_by_default(index, wanted, seed)
        else:
            train, cv = hold_out_fraction(index, wanted, seed, held_out.by)
    fraction, asked = fraction_of(index, cv), "" if wanted is None else f" (asked for: {100 * wanted:.3g} %)"
    log.info("CV: %s, %.1f %% of the frames%s", index.subset(cv).size(), 100 * fraction, asked)
    if comm.rank != 0:
        return train, cv
    if reason:
        message = "CV: the training data %s. Utterances are held out instead (data.cv.by: utterance), of speakers who "
        message += "are also trained on: cross-validation looks better than it would with other speakers"
        log.warning(message, reason)
    elif shared := speakers_in_both(index, train, cv):
        level = logging.INFO if held_out.by == "utterance" else logging.WARNING
        log.log(level, "CV: %s also in the training data: the cross-validation will look too good", shared)
    if wanted is not None and not fraction_reached(fraction, wanted):
        units = "utterances" if reason or held_out.by == "utterance" else "speakers"
        message = "data.cv.fraction asks for %.3g %% of the frames, but %.1f %% are held out, since %s are held out "
        message += "whole; choose them with data.cv.%s, or give data.cv.data"
        log.warning(message, 100 * wanted, 100 * fraction, units, units)
    return train, cv


def speakers_in_both(index: UtteranceIndex, train: list[int], cv: list[int]) -> str:
    """Which speakers held out are also trained on: "its 3 speakers are"; empty where none are, or none are known."""
    trained, held_out = ({(index.speakers or "")[u] for u in part if index.speakers} for part in (train, cv))
    if common := len(trained & held_out):
        all_or_some = "" if common == len(held_out) else f"{common} of "
        return f"{all_or_some}its {plural(len(held_out), 'speaker')} {'is' if common == 1 else 'are'}"
    return ""


def _describe_cross_validation(source: DataSource, cv: DataSource) -> None:
    """Logs the corpora for cross-validation; common speakers, and pdfs that are not in the training data, are warnings."""
    log.info("CV: %s of %s", cv.index.size(), cv.data)
    speakers = set(cv.index.speakers or ())
    if shared := sorted(speakers & set(source.index.speakers or ())):
        message = "%s: %d of %d speakers are also in the training data (%s): the cross-validation will look too good"
        log.warning(message, cv.data, len(shared), len(speakers), ", ".join([*shared[:3], *["..."][: len(shared) - 3]]))
    counts = cv.index.pdf_counts
    unseen = counts[source.index.pdf_counts[: len(counts)] == 0]
    if 100 * unseen.sum() > counts.sum():
        message, pdfs = "%s: %d of %d frames are of %s that no frame of the training data has", (unseen > 0).sum()
        log.warning(message, cv.alignments, unseen.sum(), counts.sum(), plural(pdfs, "pdf"))
