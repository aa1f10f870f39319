"""Trainings of a small network on made-up frames, assembled from their parts in this process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from variants import make_optimizer_config

from ddnn.averaging.choice import make_averager
from ddnn.data.batches import ShuffledSampler, make_batch_loader
from ddnn.data.dataset import AcousticDataset, FrameSubset, splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.arithmetic import Float32
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, initialize
from ddnn.nn.objective import CrossEntropy, MakeObjective
from ddnn.optim.schedule import Exponential, MinibatchSizes
from ddnn.recipe.schema import OptimizerConfig, ParallelConfig
from ddnn.runs.rows import MetricsRow
from ddnn.runs.run_dir import NullRunDir
from ddnn.training.combination import Combination, MeanOfEpochs, MovingAverage
from ddnn.training.evaluation import CrossValidation
from ddnn.training.loop import train
from ddnn.training.options import averaging_options, make_partition, optimizer_of
from ddnn.training.pipeline import make_eager_step
from ddnn.training.state import Checkpointable, CheckpointPolicy
from ddnn.training.trainer import Trainer

DIM, PDFS, MINIBATCH = 6, 5, 16
SIZES = MinibatchSizes(MINIBATCH, MINIBATCH)


class Recorder(NullRunDir):
    """A run dir that only keeps the rows that were recorded."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self.rows: list[dict[str, Any]] = []

    def record(self, row: MetricsRow) -> None:
        self.rows.append(row.model_dump())


class NoCheckpoints(CheckpointPolicy):
    """Writes no checkpoint and never stops a training."""

    def __init__(self) -> None: ...

    def begin(self, trainer: Checkpointable) -> None: ...

    def end(self) -> None: ...

    def after_minibatch(self, trainer: Checkpointable) -> None: ...

    def after_epoch(self, trainer: Checkpointable) -> None: ...


def toy_shard(rank: int, frames: int) -> FrameSubset:
    """Frames of five classes; those of each rank differ, and are the same wherever they are made."""
    generator = torch.Generator().manual_seed(100 + rank)
    labels = torch.randint(0, PDFS, (frames,), generator=generator, dtype=torch.int32)
    means = torch.randn(PDFS, DIM, generator=torch.Generator().manual_seed(7))
    features = means[labels.long()] + 0.5 * torch.randn(frames, DIM, generator=generator)
    dataset = AcousticDataset(features, labels, ("u",), ("s",), np.array([0]), np.array([frames]), 0)
    return FrameSubset(dataset, torch.arange(frames))


def toy_model() -> AcousticModel:
    """Two hidden layers of 8 units, the same parameters wherever it is made."""
    network = Network(mlp_layers(DIM, 2, 8, PDFS, "sigmoid"))
    initialize(network, 3)
    return AcousticModel(FeatureConfig(), splice_only(DIM, 0), network)


def toy_trainer(
    comm: Communicator | Groups,
    parallel: ParallelConfig,
    *,
    frames: int = 20 * MINIBATCH,
    optimizer: OptimizerConfig | None = None,
    epochs: int = 3,
    learning_rate: float = 0.01,
    checkpoints: CheckpointPolicy | None = None,
    run: Recorder | None = None,
    sizes: MinibatchSizes = SIZES,
    frozen: tuple[int, ...] = (),
    make_objective: MakeObjective = CrossEntropy,
) -> Trainer:
    """A training by the sections `parallel` and `optimizer` of a recipe, ready to begin; without groups, all workers of `comm` share the
    data. Collective."""
    groups = comm if isinstance(comm, Groups) else Groups.data_parallel(comm)
    model, config = toy_model(), optimizer or make_optimizer_config()
    network = model.network.with_frozen(frozen).part_of(make_partition(model.network.layers, groups))
    model = replace(model, network=network)
    sgd = optimizer_of(config, network)
    averager = make_averager(averaging_options(parallel, config.momentum), groups, network, sgd)
    averager.broadcast()
    train_frames = toy_shard(groups.data.rank, frames)
    sampler = ShuffledSampler(train_frames, sizes.start, seed=1, rank=groups.data.rank)
    step = make_eager_step(
        *(network, sizes, Float32(), sgd, averager.average_gradient, make_objective),
        schedule=parallel.pipeline, microbatches=parallel.microbatches,
    )  # fmt: skip
    batches = make_batch_loader(
        *(train_frames, model.transform, sampler),
        out=step.inputs, mark=averager.timer.mark, labels_only=step.workspace.receives,
    )  # fmt: skip
    return Trainer(
        model=model,
        optimizer=sgd,
        schedule=Exponential(learning_rate, epochs, learning_rate),
        batches=batches,
        validation=CrossValidation(toy_shard(50 + groups.data.rank, 40), groups.data, Float32(), make_objective),
        minibatch_sizes=sizes,
        eager_step=step,
        step=step,
        averager=averager,
        checkpoints=checkpoints or NoCheckpoints(),
        run=run or Recorder(),
        warmup=parallel.warmup if groups.data.world_size > 1 else "none",
        warmup_minibatches=parallel.warmup_minibatches,
    )


def with_combination(trainer: Trainer, *, most: int = 3, epochs: float = 0.7, period: int = 3) -> Trainer:
    """The trainer, whose final model may be a mean of the last epochs, or a moving average."""
    network = trainer.model.network
    moving = MovingAverage(network, trainer.groups, trainer.batches, epochs=epochs, period=period)
    trainer.combination = Combination(last=MeanOfEpochs(network, most), moving=moving)
    return trainer


def train_to_end(trainer: Trainer) -> list[dict[str, Any]]:
    """Trains until the schedule ends, or an exception; returns the recorded rows. Ends all background threads."""
    trainer.checkpoints.begin(trainer)
    with closing(trainer.averager), closing(trainer.batches):
        train(trainer)
    assert isinstance(trainer.run, Recorder)
    return trainer.run.rows
