"""The warm-up before the first epoch (`parallel.warmup`): minibatches that only settle the network, so that workers which
start from random parameters do not move apart before their first averaging."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, count, repeat
from typing import Any

import torch

from ddnn.averaging.choice import make_warmup_averager
from ddnn.data.batches import Batch
from ddnn.nn.objective import Sums
from ddnn.training.combination import Combination
from ddnn.training.state import Stateful
from ddnn.training.trainer import Trainer

FIRST_SHUFFLE = 10**6  # the number of the first order of the frames, which no epoch of training reaches


class WarmUp:
    """The warm-up of `trainer`, for the training loop. `all-reduce`: the models are averaged after each minibatch.
    `single-worker`: rank 0 trains alone; the other workers step through as many empty minibatches, and hear of checkpoints
    and signals once per averaging period. Checkpoints are those of the trainer."""

    def __init__(self, trainer: Trainer) -> None:
        """Collective."""
        t = self.trainer = trainer
        self.progress, self.losses, self.checkpoints = t.progress, t.losses, t.checkpoints
        self.combination = Combination()  # no mean begins before the first epoch
        single = t.warmup == "single-worker"
        self.averager = make_warmup_averager(t.averager, single=single)
        self.losses.excludes = self.averager.excludes
        self.idle = single and t.groups.data.rank != 0
        self.step = t.eager_step.averaged_by(self.averager.average_gradient)
        self.learning_rate = t.schedule.learning_rate * self.averager.lr_scale
        t.optimizer.set_lr_scale(self.averager.lr_scale)

    def begin_epoch(self) -> None:
        t, progress = self.trainer, self.progress
        if not progress.minibatch:
            t.begin_warmup()
        progress.start_clock()
        remaining = t.warmup_minibatches - progress.minibatch
        frames = remaining * t.minibatch_size
        progress.num_minibatches = progress.minibatch + self.averager.begin_epoch(remaining, frames)

    def epoch_batches(self) -> Iterator[Batch]:
        return self.progress.remaining(self._batches(), self.trainer.run, "warm-up", self.losses)

    def _batches(self) -> Iterator[Batch]:
        """The remaining minibatches, and endlessly more."""
        if self.idle:
            return repeat(Batch(torch.empty(0), torch.empty(0)))
        batches = self.trainer.batches
        first, skip = divmod(self.progress.minibatch, len(batches))
        later = (batches.epoch(FIRST_SHUFFLE + number) for number in count(first + 1))
        return chain(batches.epoch(FIRST_SHUFFLE + first, skip), chain.from_iterable(later))

    def train_minibatch(self, batch: Batch) -> Sums:
        if self.idle:
            return tuple(torch.zeros(()) for _ in self.losses.committed.names)
        return self.step(batch, self.learning_rate)

    def finish(self) -> None:
        """Gives all workers one model and records what the warm-up did. Collective. DivergedError: the loss is not finite."""
        t = self.trainer
        t.optimizer.set_lr_scale(t.averager.lr_scale)
        self.losses.excludes = t.averager.excludes
        t.averager.broadcast()
        t.end_warmup(self.averager.lr_scale)

    @property
    def parts(self) -> Mapping[str, Stateful]:
        return self.trainer.parts

    @property
    def shared_parts(self) -> Mapping[str, Stateful]:
        return self.trainer.shared_parts

    def metadata(self) -> dict[str, Any]:
        return self.trainer.metadata()
