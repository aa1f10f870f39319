"""Learning-rate schedules. A schedule gives the rate of the next epoch, decides whether an epoch is kept, and says when
training ends. And the minibatch size, which may grow from epoch to epoch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ddnn.util.errors import DataError
from ddnn.util.text import plural

State = float | int | bool


@dataclass
class Schedule(ABC):
    """What the training loop asks of a schedule. `learning_rate` is that of the next epoch; it multiplies the gradient
    summed over a minibatch."""

    state_fields: ClassVar[tuple[str, ...]] = ("learning_rate", "finished", "epoch")  # change from epoch to epoch

    initial_lr: float = 0.008  # of the first epoch
    max_epochs: int = 20  # after which training ends at the latest
    depends_on_length: bool = field(
        default=False, kw_only=True
    )  # whether the rates of all epochs depend on `max_epochs`
    finished: bool = field(default=False, init=False)
    epoch: int = field(default=0, init=False)  # how many have passed

    def __post_init__(self) -> None:
        self.learning_rate = self.initial_lr
        # Why training ended, once `finished`.
        self.end_reason, self.converged = f"{plural(self.max_epochs, 'epoch')} done", False
        self.still_improving = False  # whether it ended although the last epoch improved as much as the first ones

    @property
    def may_be_longer(self) -> bool:
        """Whether training has ended only because `max_epochs` have passed: with more it would have gone just so far."""
        return self.finished and not self.converged and not self.depends_on_length

    def initialize(self, figures: Mapping[str, float]) -> None:  # noqa: B027
        """Takes the cross-validation figures of the initial network, by name (`ddnn.nn.figures`)."""

    @abstractmethod
    def step(self, figures: Mapping[str, float]) -> bool:
        """Takes those after an epoch; True where the epoch's network is kept. Updates `learning_rate` and
        `finished`."""

    def state_dict(self) -> dict[str, State]:
        """What changes from epoch to epoch, for a checkpoint."""
        return {name: getattr(self, name) for name in self.state_fields}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes up what `state_dict` gave; DataError where it is none of this schedule's. Of a training that had ended
        (`may_be_longer`) and has more epochs now, the next epoch follows."""
        if set(state) != set(self.state_fields):
            raise DataError(f"the schedule's state holds {sorted(state)}, expected {sorted(self.state_fields)}")
        for name in self.state_fields:
            if type(state[name]) is not type(getattr(self, name)):
                raise DataError(f"the schedule's state: {name} is {state[name]!r}")
        vars(self).update(state)
        self.finished = self.finished and self.epoch >= self.max_epochs


@dataclass
class Newbob(Schedule):
    """Newbob with accept and reject, as Kaldi nnet1's steps/nnet/train_scheduler.sh.

    An epoch is accepted if cross-validation improved (or it is one of the first `keep_lr_epochs` or `min_epochs`). The
    improvement r, 0 on rejection and negative where an accepted epoch is worse, is relative for the loss; for frame
    accuracy, as the paper words it, absolute. Once r < start_halving_impr the rate is halved after every epoch; once
    halving is on and r < end_halving_impr, training ends.
    """

    state_fields: ClassVar[tuple[str, ...]] = (*Schedule.state_fields, "halving", "best")

    criterion: Literal["loss", "frame-accuracy"] = "loss"  # of cross-validation
    start_halving_impr: float = 0.01
    end_halving_impr: float = 0.001
    halving_factor: float = 0.5  # what the rate is multiplied by
    keep_lr_epochs: int = 0  # so many first epochs are accepted at the initial rate (`keep_lr_iters`)
    min_epochs: int = 0  # so many first epochs are accepted, and training does not end before (`min_iters`)
    halving: bool = field(default=False, init=False)
    best: float = field(default=float("nan"), init=False)

    def initialize(self, figures: Mapping[str, float]) -> None:
        self.best = self._figure(figures)

    def _figure(self, figures: Mapping[str, float]) -> float:
        """The criterion; the loss is the first figure of an objective, whatever it is called."""
        return next(iter(figures.values())) if self.criterion == "loss" else figures["frame_accuracy"]

    def step(self, figures: Mapping[str, float]) -> bool:
        self.epoch += 1
        by_loss = self.criterion == "loss"
        before, now = self.best, self._figure(figures)
        better = now < before if by_loss else now > before
        accepted = better or self.epoch <= max(self.keep_lr_epochs, self.min_epochs)
        if accepted:
            self.best = now
        self.finished = self.epoch >= self.max_epochs
        if self.epoch <= self.keep_lr_epochs:
            return accepted
        gain = before - self.best if by_loss else self.best - before
        if by_loss and before:
            gain /= before
        if self.halving and gain < self.end_halving_impr:
            if self.epoch > self.min_epochs:
                self.finished = self.converged = True
                improvement = (
                    f"improvement {gain:.6f}" if accepted else f"no improvement ({now:.4f} after {before:.4f})"
                )
                self.end_reason = f"{improvement}, less than end_halving_impr ({self.end_halving_impr:g})"
            return accepted
        if gain < self.start_halving_impr:
            self.halving = True
        elif self.finished and not self.halving:
            self.still_improving = True
            self.end_reason += f", and the last one still improved the {self.criterion} by {100 * gain:.1f} %"
        if self.halving:
            self.learning_rate *= self.halving_factor
        return accepted


@dataclass
class EpochSchedule(Schedule):
    """A rate that follows from the number of epochs passed alone; every epoch is kept."""

    max_epochs: int = 15

    @abstractmethod
    def factor(self, epoch: int) -> float:
        """What the initial rate is multiplied by once `epoch` epochs have passed."""

    def step(self, figures: Mapping[str, float]) -> bool:
        self.epoch += 1
        self.finished = self.epoch >= self.max_epochs
        self.learning_rate = self.initial_lr * self.factor(self.epoch)
        return True


@dataclass
class Passes(EpochSchedule):
    """The passes of a sequence training, as Kaldi nnet1's steps/nnet/train_mpe.sh: the rate is multiplied by `halving_factor`
    after each. Training ends early where cross-validation got worse in two passes, one after the other."""

    state_fields: ClassVar[tuple[str, ...]] = (*Schedule.state_fields, "last", "worse")

    max_epochs: int = 4
    halving_factor: float = 1.0
    last: float = field(default=float("nan"), init=False)  # loss in cross-validation
    worse: int = field(default=0, init=False)  # how many of the last passes made it worse

    def factor(self, epoch: int) -> float:
        return self.halving_factor**epoch

    def initialize(self, figures: Mapping[str, float]) -> None:
        self.last = next(iter(figures.values()))

    def step(self, figures: Mapping[str, float]) -> bool:
        accepted, before = super().step(figures), self.last
        self.initialize(figures)
        self.worse = self.worse + 1 if self.last > before else 0
        if self.worse == 2:
            self.finished = self.converged = True
            self.end_reason = "cross-validation got worse in two passes, one after the other"
        return accepted


@dataclass
class Constant(EpochSchedule):
    """The initial rate in every epoch."""

    def factor(self, epoch: int) -> float:
        return 1.0


@dataclass
class Exponential(EpochSchedule):
    """lr_k = initial * (final / initial)^((k-1) / (n-1)) over n = `max_epochs` epochs."""

    final_lr: float = 0.00008

    def factor(self, epoch: int) -> float:
        return (
            float((self.final_lr / self.initial_lr) ** (epoch / (self.max_epochs - 1))) if self.max_epochs > 1 else 1.0
        )


@dataclass
class Power(EpochSchedule):
    """lr(t) = initial * (1 + t/r)^-c after t epochs: power scheduling, as in Senior, Heigold, Ranzato and Yang, "An
    empirical study of learning rates in deep neural networks for speech recognition", ICASSP 2013, by epochs."""

    decay_epochs: float = 1.0  # r
    exponent: float = 1.0  # c

    def factor(self, epoch: int) -> float:
        return float((1.0 + epoch / self.decay_epochs) ** -self.exponent)


@dataclass(frozen=True)
class MinibatchSizes:
    """Frames in a minibatch of a worker, by epoch: geometric from `start` in the first epoch to `end` in epoch number
    `epochs`, rounded to multiples of `MULTIPLE` between the two, and `end` from then on. Rejected epochs count."""

    MULTIPLE: ClassVar[int] = 8  # that matrix products on GPUs and CPUs like

    start: int
    end: int
    epochs: int = 2

    def of_epoch(self, epoch: int) -> int:
        """Of epoch number `epoch`, from 1."""
        if epoch <= 1 or epoch >= self.epochs:
            return self.start if epoch <= 1 else self.end
        exact = self.start * math.pow(self.end / self.start, (epoch - 1) / (self.epochs - 1))
        # Rounded twice: machines whose powers differ in the last bit have the same size.
        return max(self.start, min(self.end, self.MULTIPLE * round(round(exact / self.MULTIPLE, 6))))
