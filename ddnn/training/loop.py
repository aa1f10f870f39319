"""The training loop: functions that read like the paper, the same for one worker and for many. A network, the warm-up
before its first epoch and each RBM of a pretraining go through the same minibatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ddnn.averaging.averager import Averager
from ddnn.data.batches import Batch
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.objective import Sums
from ddnn.training.combination import Combination
from ddnn.training.evaluation import EpochFigures
from ddnn.training.state import Checkpointable, CheckpointPolicy
from ddnn.training.trainer import Trainer
from ddnn.training.warmup import WarmUp


class Training(Checkpointable, Protocol):
    """What the loop trains, on this worker: a network (`Trainer`), its warm-up (`WarmUp`) or an RBM (`RbmTrainer`)."""

    averager: Averager
    losses: EpochFigures
    combination: Combination
    checkpoints: CheckpointPolicy

    def begin_epoch(self) -> None:
        """Starts the next epoch, or continues the one in which a checkpoint was written. Collective."""

    def epoch_batches(self) -> Iterator[Batch]:
        """The minibatches of the epoch that are still to be trained on; each is valid until the next."""

    def train_minibatch(self, batch: Batch) -> Sums:
        """Updates the model; returns the sums of the objective's figures over the minibatch."""


def train_epoch(training: Training) -> None:
    """One pass over this worker's minibatches, with an averaging whenever an interval is complete and one at the end:
    afterwards all workers have the same model. Collective. Raises as `train`."""
    t = training
    t.begin_epoch()
    for batch in t.epoch_batches():
        sums = t.train_minibatch(batch)  # forward, objective, backward, precondition, update
        t.progress.minibatch += 1
        t.losses.add(sums, batch.num_frames, t.progress.minibatch)
        if t.averager.after_minibatch(batch.num_frames):  # averages the models when an interval is complete
            t.losses.commit()
        t.combination.after_minibatch()
        t.checkpoints.after_minibatch(t)  # saves if due; raises TrainingInterrupted after a signal
    t.averager.end_epoch()
    t.losses.commit()


def warm_up(trainer: Trainer) -> None:
    """Runs the warm-up (`parallel.warmup`), if any, then gives all workers the same model. Raises as `train`."""
    if trainer.warmup != "none":
        warmup = WarmUp(trainer)
        train_epoch(warmup)
        warmup.finish()


def train(trainer: Trainer) -> AcousticModel:
    """Trains until the schedule ends; returns the final model, that of the last accepted epoch or a mean that is no worse.
    All workers run it together: each trains on its shard, all evaluate and keep the same averaged model. DivergedError:
    the loss, or the model of every worker, is not finite, or for the reasons of `Trainer.finish`. TrainingInterrupted: the
    training was asked to stop; a checkpoint was written."""
    t = trainer
    if not t.progress.started:
        warm_up(t)
        t.start_schedule()
    while not t.schedule.finished:
        lr = t.schedule.learning_rate
        train_epoch(t)
        trained = t.training_result(lr)
        validated = t.validate()
        accepted = t.schedule.step(validated.figures)
        if accepted:
            t.accept(validated, lr)
        else:
            t.reject()
        t.record_epoch(trained, validated, lr, accepted)
        t.progress.end_epoch()
        t.checkpoints.after_epoch(t)
    return t.finish()
