"""From a recipe to this worker's frames: plan, what is held out, shards, and only then the features."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from ddnn.data.cached import Options
from ddnn.data.corpus import Corpus, FeaturePipeline
from ddnn.data.loaders import usable_processes
from ddnn.data.minibatches import FrameSet, frame_set
from ddnn.data.needs import frames_needs, require_for_training, training_needs
from ddnn.data.plan import CorpusPlan
from ddnn.data.residency import place_of_corpus, require_on_gpu
from ddnn.data.shards import positions, shards
from ddnn.data.source import Source, open_source
from ddnn.data.split import DEFAULT_FRACTION, split_by_fraction, split_by_speakers_file
from ddnn.data.transform import STATISTICS_UTTERANCES, InputTransform, normalising, plain_splice
from ddnn.errors import DataError, RecipeError
from ddnn.parallel.exchange import Exchange
from ddnn.progress import progress_bar
from ddnn.recipe.schema import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Frames:
    """The whole data dir `data.train` as planned, and of it what this worker holds in memory.

    Attributes:
        plan: all utterances of all workers.
        shard: this worker's, indices into the plan; in the order of `corpus`.
        corpus: the frames of the shard: on the device, or in host memory (`ddnn.data.residency`).
        device: where this worker computes.
    """

    plan: CorpusPlan
    shard: list[int]
    corpus: Corpus
    device: torch.device

    def here(self, utterances: list[int]) -> list[int]:
        """Which of the plan's `utterances` this worker holds: their indices in `corpus`."""
        return positions(self.shard, utterances)


@dataclass(frozen=True)
class TrainingData:
    """What this worker trains on and judges by.

    Attributes:
        frames: of `data.train`, those held out among them.
        train_utterances: all workers' utterances to train on, indices into `frames.plan`.
        train, cv: this worker's shards.
        source: the whole of `data.train`, with the number of pdfs and how often each is.
        cv_source: of `data.cv.data`; None where the frames to judge by are held out of `data.train`.
    """

    frames: Frames
    train_utterances: list[int]
    train: FrameSet
    cv: FrameSet
    source: Source
    cv_source: Source | None = None


def load_training_data(recipe: Recipe, device: torch.device, exchange: Exchange | None = None) -> TrainingData:
    """Reads alignments and this worker's features, and holds out the cross-validation set; for training on `device`."""
    exchange = exchange or Exchange()
    source = _open(recipe, recipe.data.train, recipe.data.alignments, exchange)
    plan, cv = source.plan, recipe.data.cv
    if cv.data is not None and cv.alignments is not None:
        train, held_out = list(range(len(plan.entries))), None
    elif cv.speakers_file is not None:
        train, held_out = split_by_speakers_file(plan, cv.speakers_file)
    else:
        train, held_out = split_by_fraction(plan, cv.fraction or DEFAULT_FRACTION, recipe.seed)
    frames = _load(recipe, source, [train, held_out or []], device, exchange)
    train_set = frame_set(frames.corpus, frames.here(train))
    if held_out is not None:
        return TrainingData(frames, train, train_set, frame_set(frames.corpus, frames.here(held_out)), source)
    cv_source = _open_cv(recipe, source, exchange)
    cv_frames = _load(recipe, cv_source, [list(range(len(cv_source.plan.entries)))], device, exchange)
    cv_set = frame_set(cv_frames.corpus, list(range(len(cv_frames.shard))))
    return TrainingData(frames, train, train_set, cv_set, source, cv_source)


def load_everything(recipe: Recipe, device: torch.device, exchange: Exchange) -> Frames:
    """All of `data.train`, shared out over the workers of `exchange`, nothing held out: what RBMs are trained on."""
    source = _open(recipe, recipe.data.train, recipe.data.alignments, exchange)
    return _load(recipe, source, [list(range(len(source.plan.entries)))], device, exchange)


def _open(recipe: Recipe, data: Path, alignments: Path, exchange: Exchange) -> Source:
    of = recipe.data
    options = Options(
        context=of.splice,
        pipeline=FeaturePipeline(of.cmvn, of.deltas),
        store=of.store,
        pdfs=of.pdfs,
        allow_pipes=of.allow_pipes,
        max_missing=of.max_missing,
        cache=of.cache,
        processes=of.loaders or usable_processes(exchange.local_size),
        progress=progress_bar("loading"),
    )
    source = open_source(data, alignments, options, exchange)
    plan = source.plan
    log.info(
        "%s: %d utterances, %d frames of %d dims",
        *(data, len(plan.entries), plan.num_frames.sum(), plan.dim * (of.deltas + 1)),
    )
    return source


def _load(recipe: Recipe, source: Source, parts: list[list[int]], device: torch.device, exchange: Exchange) -> Frames:
    """Each part of the plan is shared out by itself, balanced by frames."""
    plan = source.plan
    shares = [shards(plan.num_frames, part, exchange.size) for part in parts]
    if exchange.size > 1:
        sizes = [int(plan.num_frames[share].sum()) for share in shares[0]]
        log.info("shards of %d to %d frames for %d workers", min(sizes), max(sizes), exchange.size)
    shard = sorted(u for share in shares for u in share[exchange.rank])
    exchange.barrier()  # what was loaded before is there: memory is asked for together
    _require_memory(recipe, source, shard, device, exchange)
    corpus = source.load(shard, exchange)
    place = place_of_corpus(recipe, corpus, source.num_pdfs, device, exchange)
    return Frames(plan, shard, corpus.to(place), device)


def _require_memory(recipe: Recipe, source: Source, shard: list[int], device: torch.device, exchange: Exchange) -> None:
    """DataError where this shard's frames and the training do not fit into the host, or the training into the GPU."""
    plan, width = source.plan, source.plan.dim * (recipe.data.deltas + 1)
    frames = int(plan.num_frames[shard].sum())
    mapped = source.cached is not None and len(shard) == len(plan.entries)
    rows = 0 if mapped else frames + 2 * recipe.data.splice * len(shard)
    needs = {
        **frames_needs(recipe.data.store, frames, rows, width),
        **training_needs(recipe, width, source.num_pdfs, exchange.size, device.type),
    }
    require_for_training(needs, plan.directory.path, exchange)
    require_on_gpu(recipe, width, source.num_pdfs, device, exchange)


def _open_cv(recipe: Recipe, train: Source, exchange: Exchange) -> Source:
    """The data dir that is held out, with its own alignment."""
    cv = recipe.data.cv
    assert cv.data is not None and cv.alignments is not None
    source = _open(recipe, cv.data, cv.alignments, exchange)
    if source.num_pdfs > train.num_pdfs:
        raise DataError(
            f"{source.num_pdfs} pdfs for cross-validation, {train.num_pdfs} for training",
            where=cv.alignments,
            mend="use alignments made with the same final.mdl",
        )
    if source.plan.dim != train.plan.dim:
        width = recipe.data.deltas + 1
        raise DataError(
            f"{source.plan.dim * width} dims found, {train.plan.dim * width} expected as in {recipe.data.train}",
            where=cv.data,
        )
    return source


def input_transform(recipe: Recipe, frames: Frames, utterances: list[int], exchange: Exchange) -> InputTransform:
    """Splice, and the normalisation that the recipe asks for with the statistics of the plan's `utterances`."""
    transform = plain_splice(frames.corpus.dim, recipe.data.splice)
    if not recipe.data.normalise:
        return transform
    return normalising(transform, frames.corpus, frames.here(utterances[:STATISTICS_UTTERANCES]), exchange)


def check_size(key: str, minibatch: int, utterances: list[int], frames: Frames, exchange: Exchange) -> None:
    """RecipeError where the smallest shard of the plan's `utterances` does not fill one minibatch."""
    sizes = [
        int(frames.plan.num_frames[share].sum()) for share in shards(frames.plan.num_frames, utterances, exchange.size)
    ]
    if min(sizes) < minibatch:
        of = f" of the smallest of {exchange.size} shards" if exchange.size > 1 else ""
        raise RecipeError(
            f"{min(sizes)} frames{of} do not fill one minibatch of {minibatch}",
            where=key,
            mend="take a smaller minibatch" + (", fewer workers" if exchange.size > 1 else "") + " or more data",
        )
