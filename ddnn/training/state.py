"""Where a training is, what a checkpoint of it holds, and when one is written. A checkpoint has plain values (of a training
`CheckpointMetadata`) and tensors. All values and some tensors are the same on every worker; the other tensors are those of
each rank. Tensors come from the parts of a training that are `Stateful`, and go back to them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from torch import Tensor

from ddnn.averaging.averager import Averager, Request
from ddnn.data.batches import Batch
from ddnn.distributed.signals import GracefulShutdown, TrainingInterrupted
from ddnn.nn.acoustic_model import AcousticModel, model_from_config
from ddnn.nn.figures import check_known
from ddnn.nn.network import Network, tensor_like
from ddnn.runs.checkpoint import CheckpointStore, prefixed, unprefixed
from ddnn.runs.rows import Count
from ddnn.runs.run_dir import RunDir
from ddnn.training.combination import Combination
from ddnn.training.data_identity import DataIdentity
from ddnn.training.evaluation import EpochFigures
from ddnn.util.errors import DataError, UserError
from ddnn.util.progress import frame_counter
from ddnn.util.text import duration

log = logging.getLogger(__name__)


@dataclass
class TrainingProgress:
    """Where a training, or that of an RBM, is within its epochs, on this worker."""

    started: bool = False  # whether a warm-up has ended and the initial network was evaluated
    epoch: int = 0  # finished epochs
    minibatch: int = 0  # minibatches of the epoch under way that are done
    num_minibatches: int | None = None  # of that epoch; None between two epochs
    seconds: float = 0.0  # that the epoch took before it was interrupted
    _clock_started: float = field(default_factory=time.perf_counter)

    def start_clock(self) -> None:
        self._clock_started = time.perf_counter() - self.seconds

    def elapsed(self) -> float:
        """Seconds that the epoch under way has taken; between two epochs 0, or what an interrupted one had taken."""
        return self.seconds if self.num_minibatches is None else time.perf_counter() - self._clock_started

    def remaining(
        self, batches: Iterable[Batch], run: RunDir, name: str, losses: EpochFigures, more: str = ""
    ) -> Iterator[Batch]:
        """Those of `batches` that the epoch `name` is still to be trained on. Shows how far it is: with a progress bar, which
        says `more` too, and with lines of the log; both have the speed and the figures so far, the bar the first."""
        total = self.num_minibatches or 0

        def speed() -> str:
            return f"{losses.frames / max(self.elapsed(), 1e-9):.0f} frames/s"

        def describe() -> str:
            done = self.minibatch
            left = duration(self.elapsed() * (total - done) / max(done, 1))
            return f"{name}: {100 * done / total:.0f} % done, {speed()}, about {left} left, {losses.so_far()}"

        def beside_bar() -> str:
            return f"{speed()}, {losses.so_far().partition(',')[0]}"  # the first figure alone, for 80 columns

        with frame_counter(name + more, total, self.minibatch, "minibatches", beside_bar) as advance:
            for batch in islice(batches, total - self.minibatch):
                yield batch
                advance(1)
                run.set_progress(self.epoch, self.minibatch, describe)

    def end_warmup(self) -> None:
        self.minibatch, self.num_minibatches, self.seconds = 0, None, 0.0

    def end_epoch(self) -> None:
        self.epoch, self.minibatch, self.num_minibatches, self.seconds = self.epoch + 1, 0, None, 0.0

    def state_dict(self) -> dict[str, Tensor]:
        """`epoch` 0-dim int64, finished epochs; `minibatches` (2,) int64, those of the epoch under way that are done and in
        all, -1 between epochs; `seconds` 0-dim float64."""
        length = -1 if self.num_minibatches is None else self.num_minibatches
        return {
            "epoch": torch.tensor(self.epoch),
            "minibatches": torch.tensor([self.minibatch, length]),
            "seconds": torch.tensor(self.elapsed(), dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`; DataError where the state is of another form."""
        self.epoch = int(tensor_like(torch.tensor(0), state, "epoch"))
        self.minibatch, length = tensor_like(torch.tensor([0, 0]), state, "minibatches").tolist()
        if min(self.epoch, self.minibatch) < 0:
            message = f"epoch {self.epoch}, minibatch {self.minibatch} found, expected numbers from 0 on"
            raise DataError(message)
        self.num_minibatches = None if length < 0 else length
        self.seconds = float(tensor_like(torch.zeros((), dtype=torch.float64), state, "seconds"))
        if not 0.0 <= self.seconds <= 1e9:
            raise DataError(f"seconds: {self.seconds} found, expected those of an epoch")


class Stateful(Protocol):
    """A part of a training that a checkpoint restores."""

    def state_dict(self) -> Mapping[str, Tensor]:
        """Its state by name; tensors in use, not copies. May be collective."""

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores it to the same bits. DataError, KeyError, ValueError, TypeError, IndexError, OverflowError or RuntimeError
        where it does not fit."""


class SharedState:
    """What a part of a training keeps that is the same on all workers."""

    def __init__(self, part: Averager | Combination) -> None:
        self.state_dict, self.load_state_dict = part.shared_state_dict, part.load_shared_state_dict


class TensorState:
    """Tensors whose values a checkpoint keeps, by name."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def state_dict(self) -> Mapping[str, Tensor]:
        return self.tensors

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(tensor_like(tensor, state, name))


class VectorState:
    """A flat vector of a network's parameters, which a checkpoint keeps whole."""

    def __init__(self, network: Network, **vectors: Tensor) -> None:
        self.network, self.vectors = network, vectors

    def state_dict(self) -> Mapping[str, Tensor]:
        return {name: self.network.partition.whole(vector) for name, vector in self.vectors.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, vector in self.vectors.items():
            vector.copy_(self.network.own_vector(state, name, vector))


def collect_state(parts: Mapping[str, Stateful]) -> dict[str, Tensor]:
    """The state of all parts, in their order, each under its name and a dot."""
    return {key: value for name, part in parts.items() for key, value in prefixed(name, part.state_dict()).items()}


def restore_state(parts: Mapping[str, Stateful], state: Mapping[str, Tensor], location: Path) -> None:
    """Restores what `collect_state` gave; DataError, with the checkpoint as its location, where a part's state does not
    fit."""
    for name, part in parts.items():
        try:
            part.load_state_dict(unprefixed(name, state))
        except DataError as error:
            raise DataError(f"{name}: {error.message}", location=location, hint=error.hint) from error
        except (KeyError, ValueError, TypeError, IndexError, OverflowError, RuntimeError) as error:
            message = f"the state of {name} in the checkpoint does not fit: {error}"
            raise DataError(message, location=location) from error


class Checkpointable(Protocol):
    """What is saved: a `ddnn.training.trainer.Trainer`, or the training of an RBM."""

    averager: Averager
    progress: TrainingProgress

    @property
    def parts(self) -> Mapping[str, Stateful]:
        """What each rank saves its own state of."""

    @property
    def shared_parts(self) -> Mapping[str, Stateful]:
        """What has the same state on all ranks."""

    def metadata(self) -> dict[str, Any]:
        """Plain values, the same on all ranks: where the training is, and what it is a training of. Collective."""


class HasEpochs(Checkpointable, Protocol):
    """What is saved between two epochs too."""

    @property
    def finished(self) -> bool:
        """No epoch follows."""

    @property
    def may_be_longer(self) -> bool:
        """None follows, but only because the recipe asks for no more."""


def capture(trainer: Checkpointable) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """What a checkpoint is made of, after an averaging or between two epochs: metadata and shared tensors, equal on all
    ranks, and the tensors of this rank. Collective. DivergedError where they must not be saved."""
    own = collect_state(trainer.parts)  # first: the averager waits for a pending averaging, which its strategy includes
    return trainer.metadata(), collect_state(trainer.shared_parts), own


class CheckpointPolicy:
    """Writes checkpoints after each epoch, at the intervals of the recipe, and when the training is asked to stop. Rank
    0's clock decides; all workers learn of it by `Averager.requested`, at an averaging."""

    def __init__(
        self,
        store: CheckpointStore,
        shutdown: GracefulShutdown,
        run: RunDir,
        interval_minutes: float = 2.0,
        interval_minibatches: int | None = None,
    ) -> None:
        self.store, self.comm, self.shutdown, self.run = store, store.comm, shutdown, run
        self.interval_seconds, self.interval_minibatches = 60.0 * interval_minutes, interval_minibatches
        self._saved_at, self._saved_minibatch, self._progress = time.monotonic(), 0, TrainingProgress()

    def begin(self, trainer: Checkpointable) -> None:
        """Training begins: from here on a signal is deferred until a checkpoint is written, and hangs are noticed."""
        self._saved_at, self._saved_minibatch = time.monotonic(), trainer.progress.minibatch
        self._progress, trainer.averager.local_request = trainer.progress, self._request
        self.shutdown.deferred = True
        self.comm.watchdog.enable()

    def end(self) -> None:
        """Training has ended: what follows (files, loading) may take its time, and a signal ends it at once."""
        self.shutdown.deferred = False
        self.comm.watchdog.disable()

    def after_minibatch(self, trainer: Checkpointable) -> None:
        """Saves if the workers have agreed to; raises as `_save`."""
        if trainer.averager.requested:
            self._save(trainer)

    def after_epoch(self, trainer: HasEpochs) -> None:
        """Saves, unless nothing can follow; raises as `_save`. A training that has ended is not stopped any more."""
        if not trainer.finished:
            trainer.averager.sync_requests()
            self._save(trainer)
        elif trainer.may_be_longer:
            trainer.averager.requested = Request.NONE
            self._save(trainer)

    def _request(self) -> Request:
        if self.shutdown.signal_name is not None:
            return Request.STOP
        interval = self.interval_minibatches
        due = time.monotonic() - self._saved_at >= self.interval_seconds
        due = due or (interval is not None and self._progress.minibatch - self._saved_minibatch >= interval)
        return Request.CHECKPOINT if due and self.comm.rank == 0 else Request.NONE

    def _save(self, trainer: Checkpointable) -> None:
        """Writes a checkpoint. Collective. TrainingInterrupted where a worker was asked to stop, UserError where it was
        and there is no checkpoint to resume from."""
        averager, progress = trainer.averager, trainer.progress
        stop, started = averager.requested is Request.STOP, time.monotonic()
        with self.comm.watchdog.long_operation():
            self.run.flush()
            self.run.set_status(epoch=progress.epoch, minibatch=progress.minibatch)
            saved = self.store.save(*capture(trainer))
        self._saved_at, self._saved_minibatch = time.monotonic(), progress.minibatch
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
            message = "the training was asked to stop, but no checkpoint could be written: it is lost"
            raise UserError(message, location=self.store.directory)
        raise TrainingInterrupted(self.shutdown.signal_name or "a signal to another worker")


Figures = Annotated[dict[str, float], AfterValidator(check_known)]


class CheckpointMetadata(BaseModel):
    """Plain values of a checkpoint, from a file that anybody may have written."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())

    started: bool  # False: within the warm-up
    epoch: Count  # epochs finished
    minibatch: Count  # minibatches of the next one, or of the warm-up, that rank 0 has trained on
    epoch_fraction: Annotated[
        float, Field(ge=0.0, le=1.0)
    ]  # of the minibatches of an epoch, of all workers; meaningless in a warm-up
    schedule: dict[str, float | int | bool]  # its `state_dict`
    precision: Literal["float32", "bf16"]  # that the training chose
    model: dict[str, Any]  # `ddnn.nn.acoustic_model.model_config`
    recipe: str  # the resolved recipe
    data: DataIdentity
    initial: Figures  # of the initial network in cross-validation
    kept_epoch: Count  # the last that was accepted, 0 if none
    kept: Figures

    def summary(self) -> str:
        after, percent = f"after epoch {self.epoch}", 100 * self.epoch_fraction
        if not self.started:
            return f"{self.minibatch} minibatches into the warm-up"
        return f"{after}, {self.minibatch} minibatches ({percent:.0f} %) into the next" if self.minibatch else after


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a training resumes from, on this worker."""

    metadata: CheckpointMetadata
    global_state: Mapping[str, Tensor]
    rank_state: Mapping[str, Tensor]
    bitwise: bool  # whether the training continues to the same bits: on the same number of workers
    location: Path  # the checkpoint, for messages

    def model(self) -> AcousticModel:
        """The model with its best parameters, on the CPU."""
        tensors = {name: value for name, value in self.global_state.items() if name.startswith("transform.")}
        if "best.parameters" not in self.global_state:
            raise DataError("best: nothing found, parameters of a network expected", location=self.location)
        tensors["parameters"] = self.global_state["best.parameters"]
        return model_from_config(self.metadata.model, tensors, self.location)
