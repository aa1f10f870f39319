"""Learning-rate schedules. A schedule gives the rate of the next epoch, decides whether an epoch is kept, and says when
training ends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ddnn.util.errors import DataError

State = float | int | bool


@dataclass(frozen=True)
class NewbobOptions:
    """Options of `Newbob`.

    Args:
        initial_lr: of the first epoch.
        max_epochs: after which training ends at the latest.
        criterion: cross-validation loss (relative gains) or frame accuracy (absolute ones).
        start_halving_impr: gain under which halving starts.
        end_halving_impr: gain under which training ends, once halving has started.
        halving_factor: what the rate is multiplied by.
        keep_lr_epochs: so many first epochs are accepted at the initial rate (`keep_lr_iters`).
        min_epochs: so many first epochs are accepted, and training does not end before (`min_iters`).
    """

    initial_lr: float = 0.008
    max_epochs: int = 20
    criterion: Literal["loss", "frame-accuracy"] = "loss"
    start_halving_impr: float = 0.01
    end_halving_impr: float = 0.001
    halving_factor: float = 0.5
    keep_lr_epochs: int = 0
    min_epochs: int = 0


@dataclass(frozen=True)
class ExponentialOptions:
    """Options of `Exponential`.

    Args:
        initial_lr, final_lr: of the first and the last epoch.
        epochs: of the training.
    """

    initial_lr: float = 0.008
    final_lr: float = 0.00008
    epochs: int = 15


class Schedule(ABC):
    """What the training loop asks of a schedule.

    Attributes:
        learning_rate: of the next epoch; multiplies the gradient summed over a minibatch.
        finished: whether training has ended.
        max_epochs: after which it will have, at the latest.
        state_fields: names of the attributes that change from epoch to epoch.
    """

    learning_rate: float
    finished: bool
    max_epochs: int
    state_fields: tuple[str, ...] = ("learning_rate", "finished", "epoch")

    def initialize(self, loss: float, frame_accuracy: float) -> None:  # noqa: B027
        """Takes the cross-validation figures of the initial network."""

    @abstractmethod
    def step(self, loss: float, frame_accuracy: float) -> bool:
        """Takes those after an epoch; True where the epoch's network is kept. Updates `learning_rate` and
        `finished`."""

    def state_dict(self) -> dict[str, State]:
        """What changes from epoch to epoch, for a checkpoint."""
        return {name: getattr(self, name) for name in self.state_fields}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes up what `state_dict` gave; DataError where it is none of this schedule's."""
        if set(state) != set(self.state_fields):
            raise DataError(f"the schedule's state holds {sorted(state)}, expected {sorted(self.state_fields)}")
        for name in self.state_fields:
            if type(state[name]) is not type(getattr(self, name)):
                raise DataError(f"the schedule's state: {name} is {state[name]!r}")
        for name in self.state_fields:
            setattr(self, name, state[name])


class Newbob(Schedule):
    """Newbob with accept and reject, as Kaldi nnet1's steps/nnet/train_scheduler.sh.

    An epoch is accepted if cross-validation improved (or it is one of the first `keep_lr_epochs` or `min_epochs`). The
    improvement r, 0 on rejection, is relative for the loss; for frame accuracy, as the paper words it, absolute. Once
    r < start_halving_impr the rate is halved after every epoch; once halving is on and r < end_halving_impr, training
    ends.
    """

    state_fields = ("learning_rate", "finished", "epoch", "halving", "best")

    def __init__(self, options: NewbobOptions) -> None:
        self.options = options
        self.learning_rate = options.initial_lr
        self.finished = False
        self.by_loss = options.criterion == "loss"
        self.max_epochs = options.max_epochs
        self.epoch = 0
        self.halving = False
        self.best = float("nan")

    def initialize(self, loss: float, frame_accuracy: float) -> None:
        self.best = loss if self.by_loss else frame_accuracy

    def step(self, loss: float, frame_accuracy: float) -> bool:
        self.epoch += 1
        options, before, now = self.options, self.best, loss if self.by_loss else frame_accuracy
        better = now < before if self.by_loss else now > before
        accepted = better or self.epoch <= max(options.keep_lr_epochs, options.min_epochs)
        if accepted:
            self.best = now
        self.finished = self.epoch >= self.max_epochs
        if self.epoch <= options.keep_lr_epochs:
            return accepted
        gain = abs(before - self.best)
        if self.by_loss and before:
            gain /= before
        if self.halving and gain < options.end_halving_impr:
            self.finished = self.finished or self.epoch > options.min_epochs
            return accepted
        if gain < options.start_halving_impr:
            self.halving = True
        if self.halving:
            self.learning_rate *= options.halving_factor
        return accepted


class Exponential(Schedule):
    """lr_k = initial * (final / initial)^((k-1) / (n-1)) over n epochs; every epoch is kept."""

    def __init__(self, options: ExponentialOptions) -> None:
        self.options = options
        self.learning_rate = options.initial_lr
        self.max_epochs = options.epochs
        self.epoch = 0
        self.finished = False

    def step(self, loss: float, frame_accuracy: float) -> bool:
        self.epoch += 1
        self.finished = self.epoch >= self.max_epochs
        if self.max_epochs > 1:
            initial, final = self.options.initial_lr, self.options.final_lr
            self.learning_rate = initial * (final / initial) ** (self.epoch / (self.max_epochs - 1))
        return True


def make_schedule(options: NewbobOptions | ExponentialOptions) -> Schedule:
    """The schedule of these options."""
    return Newbob(options) if isinstance(options, NewbobOptions) else Exponential(options)
