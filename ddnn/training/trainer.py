"""The training of a network: all its parts, and what `ddnn.training.loop` asks of them."""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from ddnn.averaging.averager import Averager
from ddnn.data.batches import Batch, BatchLoader
from ddnn.distributed.groups import Groups
from ddnn.nn.acoustic_model import AcousticModel, model_config, transform_tensors
from ddnn.nn.arithmetic import Float32, Precision
from ddnn.nn.figures import describe
from ddnn.nn.objective import Sums
from ddnn.optim.schedule import MinibatchSizes, Schedule
from ddnn.optim.sgd import Sgd
from ddnn.runs.checkpoint import unprefixed
from ddnn.runs.rows import EndReason, EndRow, EpochRow, WarmupRow, WorkerRow, throughput
from ddnn.runs.run_dir import RunDir
from ddnn.training.combination import Combination
from ddnn.training.data_identity import DataIdentity
from ddnn.training.evaluation import (
    EpochFigures,
    EvalResult,
    Validation,
    learning_rate_hint,
    no_result,
    raise_if_diverged,
)
from ddnn.training.state import (
    CheckpointMetadata,
    CheckpointPolicy,
    LoadedCheckpoint,
    SharedState,
    Stateful,
    TensorState,
    TrainingProgress,
    VectorState,
    restore_state,
)
from ddnn.training.step import EagerStep, Step
from ddnn.util.errors import DivergedError

log = logging.getLogger(__name__)

CHECKS = (
    "lower schedule.initial_learning_rate if the loss rose, raise it if the loss hardly moved, and check that the "
    "alignments belong to the features"
)

WORKER_PARTS = ("averager", "workspace")  # those of `Trainer.parts` that fit no other worker than the one they are of


@dataclass
class Trainer:
    """All parts of a training on this worker, each chosen once by `ddnn.training.job`.

    Attributes:
        initial: figures of the initial network in validation.
        accepted, accepted_epoch, accepted_parameters: figures, number and (num_parameters,) parameters of the last epoch
            that was accepted; of the initial network, with number 0, before there is one.
        final, final_source: figures of the model that is delivered; in words the mean that it is, or empty.
    """

    model: AcousticModel  # trained in place
    optimizer: Sgd
    schedule: Schedule
    batches: BatchLoader  # this worker's shard of the training set
    validation: Validation  # by which the schedule accepts or rejects an epoch
    minibatch_sizes: MinibatchSizes  # of this worker
    eager_step: EagerStep  # the training step as PyTorch runs it
    step: Step  # the same, or a faster form of it that was checked against it (a CUDA graph)
    averager: Averager  # averages the models of all workers
    checkpoints: CheckpointPolicy
    run: RunDir  # in which rank 0 records
    combination: Combination = field(default_factory=Combination)  # what the final model may be a mean of
    warmup: Literal["none", "single-worker", "all-reduce"] = "none"  # on rank 0 alone, or averaged after each minibatch
    warmup_minibatches: int = 0
    recipe: str = ""  # resolved; with the next two, by which a resume recognizes the same training
    data: DataIdentity = field(default_factory=lambda: DataIdentity(contents={}, features={}))
    may_keep_initial: bool = False  # the initial network was trained before: it is kept where no epoch is accepted

    def __post_init__(self) -> None:
        parameters = self.model.network.parameters
        self.progress, self.accepted_parameters = TrainingProgress(), parameters.clone()
        figures = self.eager_step.objective.figures
        trainer = weakref.proxy(self)  # no cycle of references: the memory of a training is free when it has ended
        self.losses = EpochFigures(
            parameters.device, figures, lambda result: trainer._check_training(result), excludes=self.averager.excludes
        )
        self.initial = self.accepted = self.final = no_result(self.losses.committed.names)
        self.accepted_epoch, self.final_source = 0, ""
        self._training_seconds = self._validation_seconds = 0.0  # of the epoch

    @property
    def groups(self) -> Groups:
        return self.averager.groups

    @property
    def arithmetic(self) -> Float32:
        """Of training, and of its cross-validation."""
        return self.eager_step.workspace.arithmetic

    @property
    def precision(self) -> Precision:
        return self.arithmetic.precision

    @property
    def minibatch_size(self) -> int:
        """Of this worker, in the epoch under way."""
        return self.batches.sampler.batch_size

    @property
    def finished(self) -> bool:
        return self.schedule.finished

    @property
    def may_be_longer(self) -> bool:
        return self.schedule.may_be_longer

    @property
    def hint(self) -> str:
        """Advice to print where the training has diverged."""
        return learning_rate_hint(self.schedule.initial_lr, self.minibatch_size, self.averager.lr_scale)

    @property
    def improved(self) -> bool:
        """Whether the last model that was accepted is better than the initial network."""
        return self.validation.is_better(self.accepted, self.initial)

    @property
    def learned_nothing(self) -> bool:
        """Whether the model that is delivered is no better than one that ignores its input."""
        return self.validation.learned_nothing(self.final)

    def end_row(self, reason: EndReason | None = None, detail: str = "") -> EndRow:
        """How the training has ended since its start or resume; without a `reason`, for that of the schedule."""
        if reason is None:
            reason = "converged" if self.schedule.converged else "epochs-exhausted"
            detail = self.schedule.end_reason
        return EndRow(
            reason=reason,
            detail=detail[:1000],
            epoch=self.progress.epoch,
            kept_epoch=self.accepted_epoch,
            figures=dict(self.final.figures),
            combination=self.final_source,
            precision=self.precision,
            kept=dict(self.accepted.figures),
        )

    def begin_warmup(self) -> None:
        """Validates before the warm-up, so that one that makes the network worse is noticed. Collective."""
        self.initial = self.accepted = self.final = self.validate()
        log.info("before the warm-up: %s", self.initial.as_text())

    def end_warmup(self, lr_scale: float) -> None:
        """Records the warm-up, whose learning rate was `lr_scale` times the schedule's. Collective. DivergedError: its loss
        is not finite."""
        result, learning_rate = self.losses.committed.result(self.groups.data), self.schedule.learning_rate
        raise_if_diverged("warm-up", result, 0, learning_rate, self.hint)
        seconds = self.progress.elapsed()
        self.run.record(WarmupRow(**self._row_fields(0, result, learning_rate, seconds, lr_scale)))
        self.losses.reset()
        self.progress.end_warmup()
        self.checkpoints.begin(self)

    def start_schedule(self) -> None:
        """Evaluates the network that the first epoch starts from, which is epoch 0, and to which a rejected first epoch
        returns. `initial` is the better one where a warm-up came before."""
        validation, learning_rate = self.validate(), self.schedule.learning_rate
        raise_if_diverged("cross-validation", validation, 0, learning_rate, self.hint)
        self.accepted_parameters.copy_(self.model.network.parameters)
        self.accepted = self.final = validation
        if not self.initial.loss <= validation.loss:  # it is NaN without a warm-up
            self.initial = validation
        self._record_validation(0, validation, learning_rate)
        self.schedule.initialize(validation.figures)
        self.progress.started = True

    def begin_epoch(self) -> None:
        progress = self.progress
        progress.start_clock()
        self.resize_minibatches()
        if progress.num_minibatches is None:
            self.optimizer.clear_momentum()
            self.align_fisher_updates()
            remaining = len(self.batches) - progress.minibatch
            frames = self.batches.sampler.num_frames(progress.minibatch)
            progress.num_minibatches = progress.minibatch + self.averager.begin_epoch(remaining, frames)
            if progress.epoch == 0:
                self.averager.log_averagings()
        details = progress.epoch + 1, progress.num_minibatches, self.minibatch_size, self.schedule.learning_rate
        log.debug("epoch %d: %d minibatches of %d frames, schedule's learning rate %g", *details)

    def align_fisher_updates(self) -> None:
        """Lets all workers update their Fisher matrices at the same minibatches of the epoch, so that none waits for
        another's update. Shards differ in size: all continue from the largest count of minibatches. Where a worker has
        had none, as after a warm-up on another, all count from 0, since each needs the frequent updates of the start."""
        preconditioners = self.optimizer.preconditioners
        own = [preconditioner.t if len(self.batches) else -1 for preconditioner in preconditioners]
        counts = zip(*self.groups.data.all_gather_object(own), strict=True)
        for preconditioner, of_workers in zip(preconditioners, counts, strict=True):
            preconditioner.count_from(0 if 0 in of_workers else max(of_workers))

    def resize_minibatches(self) -> None:
        """Gives the minibatches the size of the next epoch, or of the one under way."""
        size = self.minibatch_sizes.of_epoch(self.progress.epoch + 1)
        if size != self.minibatch_size:
            log.info("minibatches of %d frames of each worker from epoch %d on", size, self.progress.epoch + 1)
        self.batches.sampler.batch_size = size

    def epoch_batches(self) -> Iterator[Batch]:
        epoch = self.progress.epoch + 1
        batches = self.batches.epoch(epoch, skip=self.progress.minibatch)
        return self.progress.remaining(batches, self.run, f"epoch {epoch}", self.losses)

    def train_minibatch(self, batch: Batch) -> Sums:
        return self.step(batch, self.schedule.learning_rate * self.averager.lr_scale)

    def _check_training(self, result: EvalResult) -> None:
        """DivergedError where the loss of the epoch under way, 0 in the warm-up, is not finite."""
        epoch = self.progress.epoch + self.progress.started
        raise_if_diverged("training", result, epoch, self.schedule.learning_rate, self.hint)

    def training_result(self, learning_rate: float) -> EvalResult:
        """The objective's figures in the epoch's training, over all workers; records what each worker did."""
        epoch = self.progress.epoch + 1
        self.combination.end_epoch()
        for values in self.groups.world.all_gather_object(
            worker_row(epoch, self.averager, self.eager_step.microbatches).model_dump()
        ):
            self.run.record(WorkerRow.model_validate(values))
        training = self.losses.committed.result(self.groups.data)
        raise_if_diverged("training", training, epoch, learning_rate, self.hint)
        self._training_seconds = self.progress.elapsed()
        return training

    def validate(self) -> EvalResult:
        """Validation of the current model; the same result on every worker."""
        started = time.perf_counter()
        result = self.validation.evaluate(self.model)
        self._validation_seconds = time.perf_counter() - started
        return result

    def accept(self, validation: EvalResult, learning_rate: float) -> None:
        """The epoch was accepted: training continues from its model."""
        epoch = self.progress.epoch + 1
        raise_if_diverged("cross-validation", validation, epoch, learning_rate, self.hint)
        self.accepted_parameters.copy_(self.model.network.parameters)
        self.accepted, self.accepted_epoch, self.final = validation, epoch, validation
        self.combination.keep(epoch, validation.loss)
        if not self.improved:
            figures = f"the cross-validation loss {validation.loss:.6g} is not below that of the initial network"
            self._warn(
                f"epoch {epoch}: {figures} ({self.initial.loss:.6g}): the training may have diverged; {self.hint}"
            )
        with self.groups.world.watchdog.long_operation():
            self.run.save_best(self.whole_model() if self.improved else None)

    def reject(self) -> None:
        """The epoch was rejected: training continues from the model of the last accepted one."""
        self.model.network.load_parameters(self.accepted_parameters)
        self.averager.reset()
        self.combination.revert()

    def record_epoch(self, training: EvalResult, validation: EvalResult, lr: float, accepted: bool) -> None:
        epoch = self.progress.epoch + 1
        trained = self._row_fields(epoch, training, lr, self._training_seconds)
        self.run.record(EpochRow(split="train", accepted=accepted, **trained))
        self._record_validation(epoch, validation, lr, accepted)
        self.losses.reset()

    def _record_validation(self, epoch: int, result: EvalResult, lr: float, accepted: bool = True) -> None:
        if result.figures:
            fields = self._row_fields(epoch, result, lr, self._validation_seconds)
            self.run.record(EpochRow(split="cv", accepted=accepted, **fields))

    def _row_fields(
        self, epoch: int, result: EvalResult, lr: float, seconds: float, lr_scale: float | None = None
    ) -> dict[str, Any]:
        """Fields of a row; `lr_scale`: what `lr` was multiplied by, where that is not the averager's."""
        scale = self.averager.lr_scale if lr_scale is None else lr_scale
        return {
            "epoch": epoch,
            "figures": result.figures,
            "learning_rate": lr * scale,
            "schedule_learning_rate": lr,
            "minibatch_size": self.minibatch_size,
            "precision": self.precision,
            **throughput(result.frames, seconds),
        }

    def finish(self) -> AcousticModel:
        """The model with the best parameters, or a combination that is no worse. DivergedError: its cross-validation loss
        is not below that of the initial network."""
        kept, baseline = self.accepted, self.validation.baseline
        if self.may_keep_initial and not self.accepted_epoch and kept.loss == self.initial.loss:
            self._warn(
                f"no epoch was better in cross-validation than the initial network ({self.initial.loss:.6g}), which is "
                "kept unchanged: change schedule.initial_learning_rate, to a lower one unless the loss hardly moved; or, if "
                "the network was trained on utterances that are now for cross-validation, hold out others "
                "(docs/how-to/finetuning.md)"
            )
        elif not self.improved:
            message = (
                "the training learned nothing: no epoch was accepted, since none was better in cross-validation than "
            )
            if self.accepted_epoch:
                figures = f"{kept.loss:.6g} after epoch {self.accepted_epoch}, not below that of "
                message = f"the training diverged: the cross-validation loss of its last model is {figures}"
            message += f"the initial network ({self.initial.loss:.6g})"
            raise DivergedError(message, location=self.run.path, hint=f"{self.hint}; {CHECKS}")
        self._combine()
        if self.final.loss >= baseline.loss > 0.0:
            message = (
                f"the training learned next to nothing: its cross-validation loss {self.final.loss:.6g} is not below "
            )
            message += f"that of the relative frequencies of the pdfs alone, {baseline.loss:.6g}"
            self._warn(f"{message}: {self.hint}; {CHECKS}")
        if self.schedule.still_improving:
            log.info(
                "not converged: %s: more epochs or a higher learning rate train it further", self.schedule.end_reason
            )
        self.model.network.load_parameters(self.accepted_parameters)
        return self.whole_model()

    def whole_model(self) -> AcousticModel:
        """The current model, all of it on each worker. Collective."""
        return replace(self.model, network=self.model.network.whole())

    def _warn(self, message: str) -> None:
        """Warns on rank 0 only, since warnings of all workers are shown."""
        if self.groups.world.rank == 0:
            log.warning(message)

    def _combine(self) -> None:
        """Evaluates the combinations; the best takes the place of the last accepted epoch's parameters, where its loss
        is no higher. Equal on all workers, since the figures are."""
        for name, parameters in self.combination.candidates():
            self.model.network.load_parameters(parameters)
            result = self.validate()
            log.info("%s: CV %s", name, describe(result.figures))
            if result.loss <= self.final.loss:
                self.accepted_parameters.copy_(parameters)
                self.final, self.final_source = result, name

    @property
    def parts(self) -> dict[str, Stateful]:
        """What each replica saves for itself; a resume from it gives the same bits."""
        return {
            "network": self.model.network,
            "averager": self.averager,
            "losses": self.losses,
            "progress": self.progress,
            "optimizer": self.optimizer,
            "workspace": self.eager_step.workspace,
            "combination": self.combination,
        }

    @property
    def shared_parts(self) -> dict[str, Stateful]:
        return {
            "best": VectorState(self.model.network, parameters=self.accepted_parameters),
            "transform": TensorState(**unprefixed("transform", transform_tensors(self.model))),
            "strategy": SharedState(self.averager),
            "combination": SharedState(self.combination),
        }

    def metadata(self) -> dict[str, Any]:
        places = self.groups.data.all_gather(torch.tensor([self.progress.minibatch, len(self.batches)]))
        done, total = places.sum(dim=0).tolist()
        return CheckpointMetadata(
            started=self.progress.started,
            epoch=self.progress.epoch,
            minibatch=int(places[0, 0]),
            epoch_fraction=min(1.0, done / max(total, 1)),
            schedule=self.schedule.state_dict(),
            precision=self.precision,
            model=model_config(self.model),
            recipe=self.recipe,
            data=self.data,
            initial=dict(self.initial.figures),
            kept_epoch=self.accepted_epoch,
            kept=dict(self.accepted.figures),
        ).model_dump()

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Restores what `ddnn.training.state.capture` gave; DataError where it does not fit this training. Collective where
        not `bitwise`: all take the model of rank 0, and what belongs to one worker alone starts afresh."""
        metadata, parts, shared = loaded.metadata, self.parts, self.shared_parts
        self.progress.started = metadata.started
        self.schedule.load_state_dict(metadata.schedule)
        self.initial, self.accepted_epoch = EvalResult(metadata.initial, 0), metadata.kept_epoch
        self.accepted = self.final = EvalResult(metadata.kept, 0)
        if not loaded.bitwise:
            parts = {name: part for name, part in parts.items() if name not in WORKER_PARTS}
            del shared["strategy"]
        restore_state(shared, loaded.global_state, loaded.location)
        restore_state(parts, loaded.rank_state, loaded.location)
        self.resize_minibatches()
        if not loaded.bitwise:
            self.optimizer.clear_momentum()  # it belongs to another model than the mean
            self.losses.commit()
            total = len(self.batches)
            done = min(total, round(metadata.epoch_fraction * total))
            self.progress.minibatch = done if metadata.started else metadata.minibatch
            self.progress.num_minibatches = None
            self.averager.broadcast()


def worker_row(epoch: int, averager: Averager, microbatches: int = 1) -> WorkerRow:
    groups, timer, counters, parameters = (
        averager.groups,
        averager.timer,
        averager.counters,
        averager.network.parameters,
    )
    seconds = max(time.perf_counter() - timer.started, 1e-9)
    traffic, averaging = groups.data.stats - counters.stats, timer.seconds["averaging"]
    shared, piped = groups.column.stats - counters.column_stats, groups.stage.stats - counters.stage_stats
    pipe_seconds = piped.comm_seconds or None
    waiting = 0.0 if averager.overlapped else min(traffic.wait_seconds, averaging)
    return WorkerRow(
        epoch=epoch,
        rank=groups.world.rank,
        host=groups.world.host,
        device=str(parameters.device),
        minibatches=counters.minibatches,
        **throughput(counters.frames, seconds),
        compute_fraction=min(timer.seconds["compute"] / seconds, 1.0),
        compute_cpu_seconds=timer.compute_cpu_seconds,
        data_fraction=min(timer.seconds["data"] / seconds, 1.0),
        comm_fraction=min((averaging - waiting) / seconds, 1.0),
        wait_fraction=min(waiting / seconds, 1.0),
        averagings=counters.averagings,
        excluded_averagings=counters.excluded_averagings,
        consensus_distance=_mean(counters.consensus_distances),
        bytes_sent=traffic.bytes_sent,
        comm_seconds=traffic.comm_seconds,
        num_parameters=averager.network.partition.num_parameters(parameters.numel()),
        columns=groups.column.world_size,
        column_seconds=shared.comm_seconds or None,
        column_bytes=shared.bytes_sent or None,
        stages=groups.stage.world_size,
        microbatches=microbatches,
        pipe_seconds=pipe_seconds,
        pipe_bytes=piped.bytes_sent or None,
        bubble_share=pipe_seconds and min(pipe_seconds / seconds, 1.0),
        staleness=_mean(counters.staleness),
        interval_seconds=_mean(counters.interval_seconds),
        interval_seconds_std=statistics.pstdev(counters.interval_seconds) if counters.interval_seconds else None,
    )


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
