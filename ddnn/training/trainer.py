"""The training loop: one function that reads like the paper, the same for one worker and for many."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any, Literal

from ddnn.averaging.averager import NoAveraging
from ddnn.data.batches import Batch, BatchLoader
from ddnn.data.dataset import FrameSubset
from ddnn.distributed.communicator import Communicator
from ddnn.nn.acoustic_model import AcousticModel, model_config
from ddnn.nn.arithmetic import Precision
from ddnn.optim.schedule import Schedule
from ddnn.optim.sgd import Sgd
from ddnn.training.checkpoint import TrainerState
from ddnn.training.checkpoint_policy import CheckpointPolicy
from ddnn.training.evaluation import EpochLosses, EvalResult, evaluate, raise_if_diverged
from ddnn.training.metrics import EpochRow, WarmupRow, WorkerRow, throughput, worker_row
from ddnn.training.run_dir import RunDir
from ddnn.training.state import CheckpointMetadata, TrainingProgress, capture
from ddnn.training.step import EagerStep, Step
from ddnn.util.progress import frame_counter

WARMUP_EPOCH = 10**6
"""The first epoch number of the warm-up's shuffles, which no epoch of training reaches."""


@dataclass(frozen=True)
class Warmup:
    """`parallel.warmup`: minibatches before the first epoch, on rank 0 alone or averaged after each of them."""

    mode: Literal["none", "single-worker", "all-reduce"] = "none"
    minibatches: int = 0


@dataclass
class Trainer:
    """All parts of a training on this worker, each chosen once by `ddnn.training.job`.

    Attributes:
        model: trained in place.
        batches: this worker's shard of the training set, a `Batch` at a time.
        cv: this worker's shard of the cross-validation set.
        eager_step: the training step as PyTorch runs it.
        step: the same, or a faster form of it that was checked against it (a CUDA graph).
        averager: averages the models of all workers; of a single worker `NoAveraging`.
        checkpoints: writes checkpoints when they are due.
        run: the run dir, in which rank 0 records.
        progress: where the training is; restored from a checkpoint when it is resumed.
        recipe, data_digest, precision: the resolved recipe, a digest of the data and the precision of the arithmetic,
            by which a resume recognizes the same training.
    """

    model: AcousticModel
    optimizer: Sgd
    schedule: Schedule
    batches: BatchLoader
    cv: FrameSubset
    minibatch_size: int
    eager_step: EagerStep
    step: Step
    averager: NoAveraging
    checkpoints: CheckpointPolicy
    run: RunDir
    progress: TrainingProgress
    warmup: Warmup = field(default_factory=Warmup)
    recipe: str = ""
    data_digest: str = ""
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        self.losses = EpochLosses(self.model.network.parameters.device, excludes=self.averager.excludes)

    @property
    def comm(self) -> Communicator:
        """The communicator of the workers that train together."""
        return self.averager.comm

    @property
    def finished(self) -> bool:
        """Whether no epoch follows."""
        return self.schedule.finished

    def check_loss(self) -> None:
        """DivergedError where the loss is not finite and no other worker can make up for it."""
        self.losses.check()

    def capture(self) -> tuple[dict[str, Any], TrainerState]:
        """Metadata and state for a checkpoint; tensors in use, not copies."""
        progress, total = self.progress, len(self.batches)
        metadata = CheckpointMetadata(
            epoch=progress.epoch,
            minibatch=progress.minibatch,
            epoch_fraction=progress.minibatch / total if total else 0.0,
            schedule=self.schedule.state_dict(),
            precision=self.precision,
            model=model_config(self.model),
            recipe=self.recipe,
            data=self.data_digest,
            seconds=progress.elapsed(),
        )
        return metadata.model_dump(), capture(self)

    @property
    def epoch_length(self) -> int:
        """Minibatches in this worker's shard."""
        return len(self.batches)

    def warm_up(self) -> None:
        """Trains on the minibatches of `parallel.warmup` before the first epoch, and gives all workers one model."""
        if self.warmup.mode == "none":
            return
        single, started = self.warmup.mode == "single-worker", time.perf_counter()
        step, averager, losses = self.eager_step, self.averager, EpochLosses(self.losses.device, excludes=True)
        learning_rate = self.schedule.learning_rate
        lr_scale, optimizer_scale = averager.lr_scale, self.optimizer.lr_scale
        if single:  # the other workers take no part, not even where gradients are averaged
            step, lr_scale = EagerStep(step.workspace, self.optimizer), 1.0
            self.optimizer.lr_scale = 1.0
            losses.excludes = False
        if not single or self.comm.rank == 0:
            batches = (batch for number in count() for batch in self.batches.epoch(WARMUP_EPOCH + number))
            for batch in islice(batches, self.warmup.minibatches):
                losses.add(*step(batch, learning_rate * lr_scale), len(batch.labels))
                if not single:
                    averager.average_now()
                    losses.commit()
        losses.commit()
        self.optimizer.lr_scale = optimizer_scale
        averager.broadcast()
        result = losses.reduce(self.comm)
        raise_if_diverged("warm-up", result, 0, learning_rate)
        self.run.record(
            WarmupRow(
                epoch=0,
                loss=result.loss,
                frame_accuracy=result.frame_accuracy,
                learning_rate=learning_rate,
                **throughput(result.frames, time.perf_counter() - started),
            )
        )

    def start_schedule(self) -> None:
        """Evaluates the initial network, which is epoch 0."""
        validation = self.validate()
        raise_if_diverged("cross-validation", validation, 0, self.schedule.learning_rate)
        self._record(0, "cv", validation, self.schedule.learning_rate, self._validation_seconds(), accepted=True)
        self.schedule.initialize(validation.loss, validation.frame_accuracy)
        self.progress.started = True

    def begin_epoch(self, learning_rate: float) -> None:
        """Starts the next epoch, or continues the one in which a checkpoint was written."""
        progress = self.progress
        progress.start_clock()
        self.losses.epoch, self.losses.learning_rate = progress.epoch + 1, learning_rate
        if progress.num_minibatches is None:
            self.optimizer.clear_momentum()
            remaining = len(self.batches) - progress.minibatch
            progress.num_minibatches = progress.minibatch + self.averager.begin_epoch(remaining)

    def epoch_batches(self) -> Iterator[Batch]:
        """The batches of the epoch that are still to be trained on; each is valid until the next."""
        progress, epoch, size = self.progress, self.progress.epoch + 1, self.minibatch_size
        total = progress.num_minibatches or 0
        batches = self.batches.epoch(epoch, skip=progress.minibatch)
        with frame_counter(f"epoch {epoch}", total * size, done=progress.minibatch * size) as advance:
            for batch in islice(batches, total - progress.minibatch):
                yield batch
                advance(size)
                self.run.set_progress(progress.epoch, progress.minibatch)

    def end_training(self, learning_rate: float) -> EvalResult:
        """Training loss and frame accuracy of the epoch, over all workers; records what each worker did."""
        self._record_workers(self.progress.epoch + 1)
        self.losses.commit()
        training = self.losses.reduce(self.comm)
        raise_if_diverged("training", training, self.progress.epoch + 1, learning_rate)
        self._training_seconds = self.progress.elapsed()
        return training

    def validate(self) -> EvalResult:
        """Cross-validation of the present model; the same result on every worker."""
        self._validation_started = time.perf_counter()
        return evaluate(self.model, self.cv, self.comm)

    def keep_best(self, validation: EvalResult, learning_rate: float) -> None:
        """The epoch was accepted: its parameters are the best so far."""
        raise_if_diverged("cross-validation", validation, self.progress.epoch + 1, learning_rate)
        self.progress.best.copy_(self.model.network.parameters)
        with self.comm.watchdog.long_operation():
            self.run.save_best(self.model)

    def revert_to_best(self) -> None:
        """The epoch was rejected: training continues from the best parameters."""
        self.model.network.load_parameters(self.progress.best)
        self.averager.reset()

    def record_epoch(self, training: EvalResult, validation: EvalResult, lr: float, accepted: bool) -> None:
        """Rows of metrics for the epoch's training and cross-validation."""
        epoch = self.progress.epoch + 1
        self._record(epoch, "train", training, lr, self._training_seconds, accepted)
        self._record(epoch, "cv", validation, lr, self._validation_seconds(), accepted)
        self.losses.reset()

    def _validation_seconds(self) -> float:
        return time.perf_counter() - self._validation_started

    def _record_workers(self, epoch: int) -> None:
        """A row of metrics for every worker."""
        parameters, averager = self.model.network.parameters, self.averager
        row = worker_row(epoch, averager, str(parameters.device), parameters.numel(), overlap=averager.overlapped)
        for values in self.comm.all_gather_object(row.model_dump()):
            self.run.record(WorkerRow.model_validate(values))

    def _record(
        self, epoch: int, split: Literal["train", "cv"], result: EvalResult, lr: float, seconds: float, accepted: bool
    ) -> None:
        self.run.record(
            EpochRow(
                epoch=epoch,
                split=split,
                loss=result.loss,
                frame_accuracy=result.frame_accuracy,
                learning_rate=lr,
                accepted=accepted,
                **throughput(result.frames, seconds),
            )
        )


def train(trainer: Trainer) -> AcousticModel:
    """Trains until the schedule ends; returns the model with the best cross-validation result.

    All workers run it together: each trains on its shard, all evaluate and keep the same averaged model.

    Raises:
        DivergedError: the loss, or the model of every worker, is not finite.
        TrainingInterrupted: the training was asked to stop; a checkpoint was written.
    """
    t, progress = trainer, trainer.progress
    if not progress.started:
        t.warm_up()
        t.start_schedule()
    while not t.schedule.finished:
        lr = t.schedule.learning_rate
        t.begin_epoch(lr)
        for batch in t.epoch_batches():
            loss, num_correct = t.step(batch, lr * t.averager.lr_scale)  # forward, backward, precondition, update
            t.losses.add(loss, num_correct, t.minibatch_size)
            progress.minibatch += 1
            if t.averager.after_minibatch(t.minibatch_size):  # averages the models when an interval is complete
                t.losses.commit()
            t.checkpoints.after_minibatch(t)  # saves if due; raises TrainingInterrupted after a signal
        t.averager.end_epoch()  # from here every worker has the same model
        training = t.end_training(lr)
        validation = t.validate()
        accepted = t.schedule.step(validation.loss, validation.frame_accuracy)
        t.keep_best(validation, lr) if accepted else t.revert_to_best()
        t.record_epoch(training, validation, lr, accepted)
        progress.end_epoch()
        t.checkpoints.after_epoch(t)
    t.model.network.load_parameters(progress.best)
    return t.model
