"""Learning-rate schedules. A schedule says the rate of the next epoch, judges the epoch, and says when to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ddnn.errors import DataError
from ddnn.recipe.schema import Schedule as ScheduleRecipe

State = float | int | bool


class Schedule(Protocol):
    """What the training loop asks of a schedule."""

    rate: float
    finished: bool
    max_epochs: int

    def start(self, loss: float, frame_accuracy: float) -> None:
        """Takes the cross-validation figures of the initial network."""

    def judge(self, loss: float, frame_accuracy: float) -> bool:
        """Takes those after an epoch; True where the epoch's network is kept. Moves `rate` and `finished` on."""

    def state(self) -> dict[str, State]:
        """What moves from epoch to epoch, for a checkpoint."""

    def load(self, state: Mapping[str, object]) -> None:
        """Takes up what `state` gave; DataError where it is none of this schedule's."""


class _Moving:
    """A schedule whose attributes `moving` change from epoch to epoch."""

    moving: tuple[str, ...] = ()

    def state(self) -> dict[str, State]:
        return {name: getattr(self, name) for name in self.moving}

    def load(self, state: Mapping[str, object]) -> None:
        if set(state) != set(self.moving):
            raise DataError(f"the schedule's state holds {sorted(state)}, expected {sorted(self.moving)}")
        for name in self.moving:
            if type(state[name]) is not type(getattr(self, name)):
                raise DataError(f"the schedule's state: {name} is {state[name]!r}")
        for name in self.moving:
            setattr(self, name, state[name])


class Newbob(_Moving):
    """Newbob with accept and reject, as Kaldi nnet1's steps/nnet/train_scheduler.sh.

    An epoch is accepted if cross-validation improved (or it is one of the first `keep_epochs` or `min_epochs`). The
    improvement r, 0 on rejection, is relative for the loss; for frame accuracy, as the paper words it, absolute. Once
    r < start_halving the rate is halved after every epoch; once halving is on and r < end_halving, training ends.
    """

    moving = ("rate", "finished", "epoch", "halving", "best")

    def __init__(self, recipe: ScheduleRecipe) -> None:
        by_loss = recipe.criterion == "loss"
        self.rate = recipe.initial
        self.finished = False
        self.by_loss = by_loss
        self.max_epochs = recipe.epochs or 20
        self.start_halving = recipe.start_halving if recipe.start_halving is not None else (0.01 if by_loss else 0.005)
        self.end_halving = recipe.end_halving if recipe.end_halving is not None else 0.001
        self.halving_factor = recipe.halving_factor
        self.keep_epochs = recipe.keep_epochs
        self.min_epochs = recipe.min_epochs
        self.epoch = 0
        self.halving = False
        self.best = float("nan")

    def start(self, loss: float, frame_accuracy: float) -> None:
        self.best = loss if self.by_loss else frame_accuracy

    def judge(self, loss: float, frame_accuracy: float) -> bool:
        self.epoch += 1
        before, now = self.best, loss if self.by_loss else frame_accuracy
        better = now < before if self.by_loss else now > before
        accepted = better or self.epoch <= max(self.keep_epochs, self.min_epochs)
        if accepted:
            self.best = now
        self.finished = self.epoch >= self.max_epochs
        if self.epoch <= self.keep_epochs:
            return accepted
        gain = abs(before - self.best)
        if self.by_loss and before:
            gain /= before
        if self.halving and gain < self.end_halving:
            self.finished = self.finished or self.epoch > self.min_epochs
            return accepted
        if gain < self.start_halving:
            self.halving = True
        if self.halving:
            self.rate *= self.halving_factor
        return accepted


class Exponential(_Moving):
    """rate_k = initial * (final / initial)^((k-1) / (n-1)) over n epochs; every epoch is kept."""

    moving = ("rate", "finished", "epoch")

    def __init__(self, recipe: ScheduleRecipe) -> None:
        self.initial = self.rate = recipe.initial
        self.final = recipe.final if recipe.final is not None else 0.01 * recipe.initial
        self.max_epochs = recipe.epochs or 15
        self.epoch = 0
        self.finished = False

    def start(self, loss: float, frame_accuracy: float) -> None:
        pass

    def judge(self, loss: float, frame_accuracy: float) -> bool:
        self.epoch += 1
        self.finished = self.epoch >= self.max_epochs
        if self.max_epochs > 1:
            self.rate = self.initial * (self.final / self.initial) ** (self.epoch / (self.max_epochs - 1))
        return True


SCHEDULES: dict[str, type[Newbob] | type[Exponential]] = {"newbob": Newbob, "exponential": Exponential}


def make_schedule(recipe: ScheduleRecipe) -> Schedule:
    """The schedule that the recipe names."""
    return SCHEDULES[recipe.name](recipe)
