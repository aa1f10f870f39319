"""When a training writes a checkpoint, and when it stops at one after a signal."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from ddnn.averaging.averager import NoAveraging, Request
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.signals import GracefulShutdown, TrainingInterrupted
from ddnn.training.checkpoint import CheckpointStore, TrainerState
from ddnn.training.run_dir import RunDir
from ddnn.util.errors import UserError

log = logging.getLogger(__name__)


class Progress(Protocol):
    """Where a training is: finished epochs, minibatches of the next one that are done, and in all (None: between two
    epochs)."""

    epoch: int
    minibatch: int
    num_minibatches: int | None


class Checkpointable(Protocol):
    """What is checkpointed: a `ddnn.training.trainer.Trainer`, or the training of an RBM."""

    averager: NoAveraging

    @property
    def progress(self) -> Progress:
        """Where the training is."""

    @property
    def finished(self) -> bool:
        """Whether no epoch follows."""

    def check_loss(self) -> None:
        """DivergedError where the model must not be saved."""

    def capture(self) -> tuple[dict[str, Any], TrainerState]:
        """Metadata and state to be saved."""


class CheckpointPolicy:
    """Writes checkpoints after each epoch, at the intervals of the recipe, and when the training is asked to stop.

    Rank 0's clock decides; all workers learn of it by `NoAveraging.requested`, at an averaging.

    Args:
        rank: rank 0's clock decides.
        clock: seconds.
    """

    def __init__(
        self,
        store: CheckpointStore,
        shutdown: GracefulShutdown,
        run: RunDir,
        *,
        interval_minutes: float,
        interval_minibatches: int | None,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.shutdown, self.run = store, shutdown, run
        self.interval_seconds, self.interval_minibatches = 60.0 * interval_minutes, interval_minibatches
        self.rank, self._clock = rank, clock
        self._minibatch = 0
        self._saved_at, self._saved_minibatch = clock(), 0

    def begin(self, trainer: Checkpointable) -> None:
        """Training begins: from here on a signal is deferred until a checkpoint is written, and hangs are noticed."""
        self._saved_at, self._saved_minibatch = self._clock(), trainer.progress.minibatch
        self._minibatch = trainer.progress.minibatch
        trainer.averager.local_request = self._request
        self.shutdown.deferred = True
        trainer.averager.comm.watchdog.enable()

    def end(self, comm: Communicator) -> None:
        """Training has ended: what follows (files, loading) may take its time, and a signal ends it at once."""
        self.shutdown.deferred = False
        comm.watchdog.disable()

    def after_minibatch(self, trainer: Checkpointable) -> None:
        """Saves if the workers have agreed to; raises as `_save`."""
        self._minibatch = trainer.progress.minibatch
        if trainer.averager.requested:
            trainer.check_loss()
            self._save(trainer)

    def after_epoch(self, trainer: Checkpointable) -> None:
        """Saves, unless the training has ended; raises as `_save`."""
        if not trainer.finished:
            trainer.averager.sync_requests()
            self._save(trainer)

    def _request(self) -> Request:
        if self.shutdown.signal_name is not None:
            return Request.STOP
        if self.rank != 0:
            return Request.NONE
        if self._clock() - self._saved_at >= self.interval_seconds:
            return Request.CHECKPOINT
        interval = self.interval_minibatches
        due = interval is not None and self._minibatch - self._saved_minibatch >= interval
        return Request.CHECKPOINT if due else Request.NONE

    def _save(self, trainer: Checkpointable) -> None:
        """Writes a checkpoint. Collective.

        Raises:
            TrainingInterrupted: a worker was asked to stop.
            UserError: a worker was asked to stop, but there is no checkpoint to resume from.
        """
        averager, progress = trainer.averager, trainer.progress
        stop, started = averager.requested is Request.STOP, self._clock()
        with averager.comm.watchdog.long_operation():
            self.run.flush()
            self.run.set_status(epoch=progress.epoch, minibatch=progress.minibatch)
            saved = self.store.save(*trainer.capture())
        self._saved_at, self._saved_minibatch = self._clock(), progress.minibatch
        averager.requested = Request.NONE
        if saved and progress.num_minibatches is not None:
            log.info(
                "checkpoint in epoch %d after %d of %d minibatches, %.1f s",
                *(progress.epoch + 1, progress.minibatch, progress.num_minibatches, self._saved_at - started),
            )
        if not stop:
            averager.begin_interval()
            return
        if not saved and self.store.latest() is None:
            raise UserError(
                "the training was asked to stop, but no checkpoint could be written: it is lost",
                location=self.store.directory,
            )
        raise TrainingInterrupted(self.shutdown.signal_name or "a signal to another worker")
