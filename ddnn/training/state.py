"""All that a training consists of at one moment, for checkpoints.

Three parts: `CheckpointMetadata` (plain values) and the global tensors, both the same on every worker, and the tensors
of each rank. Restored on as many workers, they are the training to the same bits. On another number of workers training
resumes from the mean of the workers' models: `LoadedCheckpoint.bitwise` says which of the two, and docs/reliability.md
what is not exact then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ddnn.averaging.averager import NoAveraging
from ddnn.nn.acoustic_model import AcousticModel, model_from_config, transform_tensors
from ddnn.nn.network import tensor_like
from ddnn.optim.schedule import Schedule
from ddnn.optim.sgd import Sgd
from ddnn.training.checkpoint import TrainerState
from ddnn.training.evaluation import EpochLosses
from ddnn.util.errors import DataError

Count = Annotated[int, Field(ge=0, le=2**53)]


class CheckpointMetadata(BaseModel):
    """Plain values of a checkpoint, from a file that anybody may have written.

    Attributes:
        epoch, minibatch: epochs finished, and minibatches of the next one that rank 0 has trained on.
        epoch_fraction: the same as a fraction of that epoch, 0 to 1.
        schedule: its `state_dict`.
        precision: that the training chose.
        model: `ddnn.nn.acoustic_model.model_config`.
        recipe: the resolved recipe.
        data: digest of the utterances, their lengths and their pdfs.
        seconds: that the epoch under way has taken.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", protected_namespaces=())

    epoch: Count
    minibatch: Count
    epoch_fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    schedule: dict[str, float | int | bool]
    precision: Literal["float32", "bf16"]
    model: dict[str, Any]
    recipe: str
    data: str
    seconds: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0

    def summary(self) -> str:
        """How far the training was."""
        after = f"after epoch {self.epoch}"
        percent = 100 * self.epoch_fraction
        return f"{after}, {self.minibatch} minibatches ({percent:.0f} %) into the next" if self.minibatch else after


def read_metadata(values: object, location: Path) -> CheckpointMetadata:
    """The metadata of a checkpoint of a training, validated; DataError where it is none."""
    try:
        return CheckpointMetadata.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"not a checkpoint of a training: {key}: {detail['msg']}", location=location) from error


@dataclass
class TrainingProgress:
    """Where a training is within its epochs, on this worker.

    Attributes:
        best: (num_parameters,) parameters of the last epoch that was accepted.
        started: whether the initial network was evaluated.
        epoch: finished epochs.
        minibatch: minibatches of the epoch under way that are done.
        num_minibatches: of that epoch; None between two epochs.
        seconds: that the epoch took before it was interrupted.
    """

    best: Tensor
    started: bool = False
    epoch: int = 0
    minibatch: int = 0
    num_minibatches: int | None = None
    seconds: float = 0.0
    _clock_started: float = field(default_factory=time.perf_counter)

    def start_clock(self) -> None:
        """The epoch starts, or continues, now."""
        self._clock_started = time.perf_counter() - self.seconds

    def elapsed(self) -> float:
        """Seconds that the epoch under way has taken; between two epochs 0, or what an interrupted one had taken."""
        return self.seconds if self.num_minibatches is None else time.perf_counter() - self._clock_started

    def end_epoch(self) -> None:
        """The epoch under way is finished."""
        self.epoch, self.minibatch, self.num_minibatches, self.seconds = self.epoch + 1, 0, None, 0.0


class Trainable(Protocol):
    """The parts of `ddnn.training.trainer.Trainer` of which a checkpoint consists."""

    model: AcousticModel
    optimizer: Sgd
    schedule: Schedule
    averager: NoAveraging
    losses: EpochLosses
    progress: TrainingProgress

    @property
    def epoch_length(self) -> int:
        """Minibatches in this worker's shard."""


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What a training resumes from, on this worker.

    Attributes:
        bitwise: whether the training continues to the same bits: on the same number of workers.
        location: the checkpoint, for messages.
    """

    metadata: CheckpointMetadata
    global_state: Mapping[str, Tensor]
    rank_state: Mapping[str, Tensor]
    bitwise: bool
    location: Path

    def model(self) -> AcousticModel:
        """The model with its best parameters, on the CPU."""
        tensors = {name: value for name, value in self.global_state.items() if name.startswith("transform.")}
        if "best" not in self.global_state:
            raise DataError("best: nothing found, parameters of a network expected", location=self.location)
        return model_from_config(
            self.metadata.model, {**tensors, "parameters": self.global_state["best"]}, self.location
        )


def capture(trainer: Trainable) -> TrainerState:
    """The state of a training after an averaging or between two epochs; tensors in use, not copies.

    Of each rank: `parameters` (num_parameters,) float32; `optimizer.*`, `averager.*`: their `state_dict`; `loss_sums`
    (2, 3) float64, loss, correct frames and frames of the epoch and of the interval; `progress` (2,) int64, minibatches
    done and in all, -1 between epochs; `seconds` 0-dim float64. Global: `best` (num_parameters,) float32,
    `transform.*` (input_dim,), and `strategy.*`.
    """
    progress, averager = trainer.progress, trainer.averager
    rank = {
        "parameters": trainer.model.network.parameters,
        "loss_sums": trainer.losses.to_tensor(),
        "progress": torch.tensor([progress.minibatch, progress.num_minibatches or -1], dtype=torch.int64),
        "seconds": torch.tensor(progress.elapsed(), dtype=torch.float64),
        **prefixed("optimizer", trainer.optimizer.state_dict()),
        **prefixed("averager", averager.state_dict()),  # waits for a pending averaging, which the strategy's is to have
    }
    strategy = prefixed("strategy", averager.shared_state_dict())
    return TrainerState({"best": progress.best, **transform_tensors(trainer.model), **strategy}, rank)


def merge_rank_states(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of rank 0 where there are fewer or more workers than before: mean model, all workers' loss sums.

    The mean counts every worker alike, as if each had trained on as many frames since the last averaging.
    """
    first: Mapping[str, Tensor] = {}
    workers = 0
    for state in states:
        workers += 1
        if not first:
            first, total, sums = state, state["parameters"].double(), state["loss_sums"].clone()
        else:
            total += state["parameters"]
            sums += state["loss_sums"]
    return {**first, "parameters": (total / workers).float(), "loss_sums": sums}


def restore(trainer: Trainable, loaded: LoadedCheckpoint) -> None:
    """Restores the training. Collective where not `bitwise`: all take the model of rank 0.

    Raises:
        DataError: the checkpoint does not fit this training.
    """
    metadata, rank, location = loaded.metadata, loaded.rank_state, loaded.location
    network, averager, progress = trainer.model.network, trainer.averager, trainer.progress
    trainer.schedule.load_state_dict(metadata.schedule)
    network.load_parameters(tensor_like(network.parameters, rank, "parameters", location))
    progress.best.copy_(tensor_like(network.parameters, loaded.global_state, "best", location))
    progress.started, progress.epoch = True, metadata.epoch
    sums = tensor_like(torch.zeros(2, 3, dtype=torch.float64), rank, "loss_sums", location)
    if not bool((sums.abs() < 2**53).all()):  # false for NaN too
        raise DataError("loss_sums: sums of an epoch expected, found others", location=location)
    trainer.losses.load_tensor(sums)
    optimizer = unprefixed("optimizer", rank)
    if not loaded.bitwise:
        # Fisher matrices of another worker are a better start than none; a momentum would not fit the mean model.
        if "momentum_buffer" in optimizer:
            optimizer["momentum_buffer"] = torch.zeros_like(network.parameters)
        trainer.optimizer.load_state_dict(optimizer)
        trainer.losses.commit()
        total = trainer.epoch_length
        progress.minibatch, progress.seconds = min(total, round(metadata.epoch_fraction * total)), metadata.seconds
        averager.broadcast()
        return
    trainer.optimizer.load_state_dict(optimizer)
    progress.minibatch, length = tensor_like(torch.zeros(2, dtype=torch.int64), rank, "progress", location).tolist()
    progress.num_minibatches = None if length < 0 else length
    progress.seconds = float(tensor_like(torch.zeros((), dtype=torch.float64), rank, "seconds", location))
    try:
        averager.load_state_dict(unprefixed("averager", rank))
        averager.load_shared_state_dict(unprefixed("strategy", loaded.global_state))
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise DataError(f"the averaging state of the checkpoint does not fit: {error}", location=location) from error


def prefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with `prefix.` before each name."""
    return {f"{prefix}.{name}": value for name, value in state.items()}


def unprefixed(prefix: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `prefixed` has named with `prefix`."""
    start = f"{prefix}."
    return {name.removeprefix(start): value for name, value in state.items() if name.startswith(start)}
