"""The data of a training: loaded on every worker, or described without reading any features (`ddnn train --dry-run`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from ddnn.data.index import fraction_of
from ddnn.data.pipeline import (
    Skips,
    TrainingData,
    plan_data,
    speakers_in_both,
    training_data,
)
from ddnn.data.source import DataSource
from ddnn.distributed.communicator import SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.layers import describe_sizes
from ddnn.recipe.schema import Recipe, SequenceConfig
from ddnn.runs.run_status import Kind
from ddnn.training import options
from ddnn.training.initial_model import check_initial_model, warn_of_known_utterances
from ddnn.training.memory import describe_memory, place_features
from ddnn.training.network_layers import describe_parameters, network_layers
from ddnn.util.text import duration, plural


def load_data(
    recipe: Recipe,
    device: torch.device,
    groups: Groups,
    *,
    held_out: bool = True,
    skips: Skips = lambda *utterance: None,
) -> TrainingData:
    """What this worker trains on, computing on `device`. `held_out`: see `options.data_config`. Collective. Raises
    as `training_data` and `place_features`."""
    on_host = recipe.data.feature_device == "cpu"

    def place(source: DataSource, utterances: Sequence[int]) -> torch.device:
        input_dim = source.width * (2 * recipe.data.splice + 1)
        memory = options.estimate_memory(recipe, input_dim, source.index.num_pdfs, groups.data.world_size)
        return place_features(memory, source, utterances, device, groups.world, on_host=on_host)

    config = replace(options.data_config(recipe, held_out=held_out), skips=skips)
    return training_data(config, device, groups, place)


def describe_data(recipe: Recipe, kind: Kind, device: str, trained: AcousticModel | None = None) -> list[str]:
    """What a recipe would read and hold out, and the network and memory that this makes, in a line each; from tables and
    headers, writing nothing. `trained`: the network of `init.model`. UserError: what the training would refuse before
    it reads features, on this machine and with as many workers on it."""
    options.check_packages(recipe)
    workers, sizes = recipe.parallel.replicas, options.minibatch_sizes(recipe)
    config = options.data_config(recipe, held_out=kind == "training")
    config = replace(config, reading=replace(config.reading, cache_dir=None))
    ours = logging.getLogger("ddnn")
    level = ours.level
    ours.setLevel(logging.WARNING)  # the lines below say the rest
    try:
        plan = plan_data(config, workers, SingleProcess())
    finally:
        ours.setLevel(level)
    source, index, width = plan.source, plan.source.index, plan.source.width
    if kind == "training":
        if recipe.criterion == "ce":
            options.require_minibatch(index, "minibatch_size", sizes.end, plan.train_shards)
        check_initial_model(recipe, trained, source)
        warn_of_known_utterances(recipe, source, plan.cv_source, plan.cv_index().utterances)
    else:
        options.check_pretrains(recipe)
    input_dim, frames = width * (2 * recipe.data.splice + 1), int(index.num_frames.sum())
    counts = index.counts
    skipped = f"{counts['no_alignment']} without an alignment, {counts['length_differs']} of another length, {counts['empty']} empty"
    lines = [
        f"data: {source.data}: {index.size()} ({duration(frames / 100)} at 10 ms a frame) of {width} dims",
        f"skipped: {plural(len(index.directory.entries) - counts['used'], 'utterance')} ({skipped}); trimmed: {counts['trimmed']}",
        f"alignments: {source.alignments}: {index.num_pdfs} pdfs, {int((index.pdf_counts > 0).sum())} of them with frames",
    ]
    if plan.cv_source is not None:
        lines.append(f"cross-validation: {plan.cv_source.data}: {plan.cv_source.index.size()}")
    elif config.held_out is not None:
        held_out = f"{plan.cv_index().size()}, {100 * fraction_of(index, plan.held_out):.1f} % of the frames"
        shared = speakers_in_both(index, plan.train_utterances, plan.held_out)
        lines.append(f"cross-validation: {held_out}" + (f"; {shared} also trained on" if shared else ""))
    layers, trained_on = network_layers(recipe, input_dim, index.num_pdfs), plan.train_utterances
    updates = int(index.num_frames[trained_on].sum()) // (sizes.start * workers)
    if isinstance(recipe.criterion, SequenceConfig):
        updates = len(trained_on) // (recipe.criterion.utterances_per_update * workers)
    return [
        *lines,
        f"network: {describe_sizes(layers)}, {describe_parameters(recipe, layers)}; about "
        f"{updates} minibatches an epoch for each worker",
        describe_memory(
            options.estimate_memory(recipe, input_dim, index.num_pdfs, workers), source, plan.shards, device
        ),
    ]
