"""The warm-up before the first epoch: what it leaves, what it is compared with, and how it ends early."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.test_outcome import ScriptedTrainer
from training.toy import MINIBATCH, NoCheckpoints, Recorder, toy_trainer
from variants import make_parallel_config

from ddnn.averaging.averager import Request
from ddnn.distributed.communicator import Communicator, NoWatchdog, SingleProcess
from ddnn.distributed.signals import GracefulShutdown, InterruptedBeforeTraining
from ddnn.optim.schedule import Newbob, Schedule
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.training.evaluation import EvalResult
from ddnn.training.state import CheckpointPolicy
from ddnn.training.trainer import Trainer, train
from ddnn.util.errors import DivergedError

KINDS = ("single-worker", "all-reduce")


class RejectsTheFirstEpoch(Schedule):
    """Two epochs, of which the first is rejected; keeps the parameters from which each starts."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(0.01, 2)
        self.trainer, self.starts = trainer, list[Tensor]()

    def initialize(self, figures: Mapping[str, float]) -> None:
        self.starts.append(self.trainer.model.network.parameters.clone())

    def step(self, figures: Mapping[str, float]) -> bool:
        self.epoch += 1
        self.finished = self.epoch == 2
        return self.finished


@pytest.mark.parametrize("kind", KINDS)
def test_a_rejected_first_epoch_returns_to_the_network_after_the_warm_up(kind: str) -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        parallel = make_parallel_config(averaging_period=3, warmup=kind, warmup_minibatches=20)
        trainer = toy_trainer(comm, parallel)
        trainer.schedule = schedule = RejectsTheFirstEpoch(trainer)
        revert = trainer.revert_to_best

        def revert_and_look() -> None:
            revert()
            schedule.starts.append(trainer.model.network.parameters.clone())

        trainer.revert_to_best = revert_and_look  # type: ignore[method-assign]
        with closing(trainer.averager), closing(trainer.batches):
            train(trainer)
        first, second = schedule.starts
        return first, second

    for first, second in run_workers(2, work):
        assert torch.equal(first, second)


def warmed_up(
    figures: list[float], *, keeps_initial: bool = False, schedule: Schedule | None = None
) -> ScriptedTrainer:
    """A training after a warm-up whose cross-validation losses are `figures`: before the warm-up, after it, after each
    epoch."""
    scripted = ScriptedTrainer(schedule or Newbob(min_epochs=1), [(loss, 0.1) for loss in figures])
    scripted.trainer.warmup, scripted.trainer.warmup_minibatches = "all-reduce", 2
    scripted.trainer.keeps_initial = keeps_initial
    return scripted


@pytest.mark.parametrize("keeps_initial", [True, False])
def test_a_training_is_compared_with_the_network_before_the_warm_up(keeps_initial: bool) -> None:
    """Else a warm-up would hide that it has made the network of `init.model` worse."""
    with pytest.raises(DivergedError, match=r"2.5 after epoch 2, not below that of the initial network \(2\)"):
        warmed_up([2.0, 3.0, 2.6, 2.5, 2.6, 2.6], keeps_initial=keeps_initial).train()


def test_a_network_that_a_warm_up_made_worse_is_not_kept() -> None:
    schedule = Newbob(end_halving_impr=0.5)
    with pytest.raises(DivergedError, match=r"no epoch was accepted.* the initial network \(2\)"):
        warmed_up([2.0, 3.0, 3.1, 3.1], keeps_initial=True, schedule=schedule).train()


def test_the_network_of_a_warm_up_is_kept_where_it_is_better_than_before() -> None:
    _, trainer = warmed_up([2.0, 1.5, 1.6, 1.6], schedule=Newbob(), keeps_initial=True).train()
    assert (trainer.delivered.loss, trainer.kept_epoch) == (1.5, 0)


def test_a_warm_up_on_one_worker_is_recorded_with_the_learning_rate_of_one_worker() -> None:
    def work(comm: Communicator) -> list[float]:
        rates = list[float]()
        for kind in KINDS:
            recorder = Recorder()
            parallel = make_parallel_config(warmup=kind, warmup_minibatches=3, scale_learning_rate=True)
            trainer = toy_trainer(comm, parallel, run=recorder)
            with closing(trainer.averager), closing(trainer.batches):
                trainer.warm_up()
            (row,) = recorder.rows
            rates += [row["learning_rate"], row["schedule_learning_rate"]]
        return rates

    for rates in run_workers(2, work):
        assert rates == pytest.approx([0.01, 0.01, 0.02, 0.01])


@dataclass
class Watched(NoWatchdog):
    """A watchdog that keeps what it is told."""

    enabled: bool = True
    told: list[tuple[str, bool]] = field(default_factory=list)

    def enable(self) -> None:
        self.enabled = True

    def disable(self) -> None:
        self.enabled = False
        self.told.append(("disabled", False))

    def heartbeat(self) -> None:
        self.told.append(("heartbeat", self.enabled))


@pytest.mark.parametrize("kind", KINDS)
def test_the_watchdog_sees_progress_in_a_warm_up_and_expects_none_of_those_that_wait(kind: str) -> None:
    def work(comm: Communicator) -> tuple[list[tuple[str, bool]], bool]:
        parallel = make_parallel_config(warmup=kind, warmup_minibatches=25)
        trainer = toy_trainer(comm, parallel)
        trainer.validate = lambda: EvalResult({"loss": 2.0, "frame_accuracy": 0.1}, 40)  # type: ignore[method-assign]
        comm.watchdog = watchdog = Watched()
        with closing(trainer.averager), closing(trainer.batches):
            trainer.warm_up()
        return watchdog.told, watchdog.enabled

    (busy, enabled), (other, enabled_too) = run_workers(2, work)
    assert enabled and enabled_too
    assert busy == [("heartbeat", True)] * 25
    assert other == ([("disabled", False)] if kind == "single-worker" else busy)


class StopAfter(NoCheckpoints):
    """Worker `rank` is asked to stop by a signal in its warm-up; the policy itself decides what follows."""

    stop_if_asked = CheckpointPolicy.stop_if_asked

    def __init__(self, comm: Communicator, rank: int) -> None:
        self.comm, self.rank, self.shutdown, self.asked = comm, rank, GracefulShutdown(), threading.Event()
        self.calls = 0

    def request(self) -> Request:
        self.calls += 1
        if self.comm.rank == self.rank and self.calls == 5:
            self.shutdown.signal_name = "SIGUSR1"
        return Request.NONE if self.shutdown.signal_name is None else Request.STOP


@pytest.mark.parametrize(("kind", "rank"), [("single-worker", 0), ("all-reduce", 0), ("all-reduce", 1)])
def test_a_signal_ends_a_warm_up_on_all_workers_within_a_minibatch(kind: str, rank: int) -> None:
    def work(comm: Communicator) -> tuple[str, int]:
        parallel = make_parallel_config(warmup=kind, warmup_minibatches=1000)
        trainer = toy_trainer(comm, parallel)
        trainer.checkpoints = policy = StopAfter(comm, rank)
        trainer.averager.local_request = policy.request
        with closing(trainer.averager), closing(trainer.batches), pytest.raises(InterruptedBeforeTraining) as caught:
            train(trainer)
        return caught.value.signal_name, policy.calls

    names, calls = zip(*run_workers(2, work), strict=True)
    assert calls[rank] == 6  # once a minibatch, and once before it ends
    assert names[rank] == "SIGUSR1" and names[1 - rank] == "SIGTERM"


def test_a_checkpoint_that_is_due_does_not_end_a_warm_up() -> None:
    scripted = warmed_up([2.0, 1.5, 1.4], schedule=Newbob(max_epochs=1))
    trainer = scripted.trainer
    shutdown = GracefulShutdown()

    class Due(NoCheckpoints):
        stop_if_asked = CheckpointPolicy.stop_if_asked

        def __init__(self) -> None:
            self.shutdown = shutdown

    trainer.checkpoints = Due()
    trainer.averager.local_request = lambda: Request.CHECKPOINT
    scripted.train()
    assert trainer.kept_epoch == 1


@pytest.mark.parametrize("workers", [1, 2])
def test_checkpoints_are_written_after_just_so_many_minibatches(workers: int) -> None:
    """With several workers, at the averaging that completes the interval."""

    def work(comm: Communicator) -> list[int]:
        saved = list[int]()

        class Noting(CheckpointPolicy):
            def _save(self, trainer: object) -> None:
                saved.append(toy.progress.minibatch)
                self._saved_minibatch = toy.progress.minibatch
                toy.averager.requested = Request.NONE

            def after_epoch(self, trainer: object) -> None: ...

        policy = object.__new__(Noting)
        CheckpointPolicy.__init__(policy, StoreOf(comm), GracefulShutdown(), Recorder(), 1e6, 6)  # type: ignore[arg-type]
        toy = toy_trainer(comm, make_parallel_config(averaging_period=3), frames=20 * MINIBATCH, epochs=1)
        toy.checkpoints = policy
        policy.begin(toy)
        with closing(toy.averager), closing(toy.batches):
            train(toy)
        return saved

    found = [work(SingleProcess())] if workers == 1 else run_workers(2, work)
    assert found == [[6, 12, 18]] * workers


@dataclass
class StoreOf(CheckpointStore):
    """A store that is never written to."""

    comm: Communicator
