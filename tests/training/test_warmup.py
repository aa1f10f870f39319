"""The warm-up before the first epoch: what it leaves, what it is compared with, and how it ends early."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.test_outcome import ScriptedTrainer
from training.toy import MINIBATCH, Recorder, toy_trainer, train_to_end
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging.averager import Request
from ddnn.distributed.communicator import Communicator, NoWatchdog, SingleProcess
from ddnn.distributed.signals import GracefulShutdown, TrainingInterrupted
from ddnn.optim.schedule import Newbob, Schedule
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.training.evaluation import EvalResult
from ddnn.training.loop import train, warm_up
from ddnn.training.resume import rank_state
from ddnn.training.state import Checkpointable, CheckpointMetadata, CheckpointPolicy, LoadedCheckpoint
from ddnn.training.trainer import Trainer
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
        revert = trainer.reject

        def revert_and_look() -> None:
            revert()
            schedule.starts.append(trainer.model.network.parameters.clone())

        trainer.reject = revert_and_look  # type: ignore[method-assign]
        with closing(trainer.averager), closing(trainer.batches):
            train(trainer)
        first, second = schedule.starts
        return first, second

    for first, second in run_workers(2, work):
        assert torch.equal(first, second)


def warmed_up(
    figures: list[float], *, may_keep_initial: bool = False, schedule: Schedule | None = None
) -> ScriptedTrainer:
    """A training after a warm-up whose cross-validation losses are `figures`: before the warm-up, after it, after each
    epoch."""
    scripted = ScriptedTrainer(schedule or Newbob(min_epochs=1), [(loss, 0.1) for loss in figures])
    scripted.trainer.warmup, scripted.trainer.warmup_minibatches = "all-reduce", 2
    scripted.trainer.may_keep_initial = may_keep_initial
    return scripted


@pytest.mark.parametrize("may_keep_initial", [True, False])
def test_a_training_is_compared_with_the_network_before_the_warm_up(may_keep_initial: bool) -> None:
    """Else a warm-up would hide that it has made the network of `init.model` worse."""
    with pytest.raises(DivergedError, match=r"2.5 after epoch 2, not below that of the initial network \(2\)"):
        warmed_up([2.0, 3.0, 2.6, 2.5, 2.6, 2.6], may_keep_initial=may_keep_initial).train()


def test_a_network_that_a_warm_up_made_worse_is_not_kept() -> None:
    schedule = Newbob(end_halving_impr=0.5)
    with pytest.raises(DivergedError, match=r"no epoch was accepted.* the initial network \(2\)"):
        warmed_up([2.0, 3.0, 3.1, 3.1], may_keep_initial=True, schedule=schedule).train()


def test_the_network_of_a_warm_up_is_kept_where_it_is_better_than_before() -> None:
    _, trainer = warmed_up([2.0, 1.5, 1.6, 1.6], schedule=Newbob(), may_keep_initial=True).train()
    assert (trainer.final.loss, trainer.accepted_epoch) == (1.5, 0)


def test_a_warm_up_on_one_worker_is_recorded_with_the_learning_rate_of_one_worker() -> None:
    def work(comm: Communicator) -> list[float]:
        rates = list[float]()
        for kind in KINDS:
            recorder = Recorder()
            parallel = make_parallel_config(warmup=kind, warmup_minibatches=3, scale_learning_rate=True)
            trainer = toy_trainer(comm, parallel, run=recorder)
            with closing(trainer.averager), closing(trainer.batches):
                warm_up(trainer)
            (row,) = recorder.rows
            rates += [row["learning_rate"], row["schedule_learning_rate"]]
        return rates

    for rates in run_workers(2, work):
        assert rates == pytest.approx([0.01, 0.01, 0.02, 0.01])


@dataclass
class Watched(NoWatchdog):
    """A watchdog that counts the heartbeats, and notices when it is switched off."""

    heartbeats: int = 0
    disabled: bool = False

    def disable(self) -> None:
        self.disabled = True

    def heartbeat(self) -> None:
        self.heartbeats += 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_watchdog_sees_progress_of_all_workers_in_a_warm_up(kind: str) -> None:
    """Also of those that wait for rank 0: they wait for one averaging period at most."""

    def work(comm: Communicator) -> tuple[int, bool]:
        trainer = toy_trainer(comm, make_parallel_config(warmup=kind, warmup_minibatches=25))
        trainer.validate = lambda: EvalResult({"loss": 2.0, "frame_accuracy": 0.1}, 40)  # type: ignore[method-assign]
        comm.watchdog = watchdog = Watched()
        with closing(trainer.averager), closing(trainer.batches):
            warm_up(trainer)
        return watchdog.heartbeats, watchdog.disabled

    assert run_workers(2, work) == [(25, False)] * 2


class StopAfter(CheckpointPolicy):
    """Worker `rank` is asked to stop by a signal in the fifth minibatch that it counts."""

    def __init__(self, directory: Path, comm: Communicator, rank: int | None) -> None:
        super().__init__(CheckpointStore(directory, 2, comm), GracefulShutdown(), Recorder(), 1e6)
        self.rank, self.calls = rank, 0

    def _request(self) -> Request:
        self.calls += 1
        if self.comm.rank == self.rank and self.calls == 5:
            self.shutdown.signal_name = "SIGUSR1"
        return super()._request()


@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
@pytest.mark.parametrize(
    ("kind", "strategy", "rank"),
    [
        ("single-worker", "all-reduce", 0),
        ("single-worker", "gradient-all-reduce", 1),
        ("all-reduce", "butterfly", 0),
        ("all-reduce", "all-reduce", 1),
        ("all-reduce", "gradient-all-reduce", 1),
    ],
)
def test_a_warm_up_that_was_stopped_resumes_to_the_same_bits(
    kind: str, strategy: str, rank: int, optimizer: str, tmp_path: Path
) -> None:
    """A signal to any worker, also to one that waits, ends it on all with a checkpoint."""

    def work(comm: Communicator) -> list[tuple[Tensor, list[dict[str, Any]]]]:
        parallel = make_parallel_config(strategy, averaging_period=2, warmup=kind, warmup_minibatches=50)
        results = []
        for stops in (None, rank, None):
            policy, recorder = StopAfter(tmp_path / "checkpoints", comm, stops), Recorder()
            trainer = toy_trainer(
                comm, parallel, epochs=2, optimizer=make_optimizer_config(optimizer), run=recorder, checkpoints=policy,
                frames=(14 + 6 * comm.rank) * MINIBATCH,
            )  # fmt: skip
            if stops is None and results:
                handle = policy.store.latest()
                assert handle is not None
                metadata = CheckpointMetadata.model_validate(handle.metadata)
                assert not metadata.started and metadata.epoch == 0 and 5 <= metadata.minibatch <= 10
                assert "into the warm-up" in metadata.summary()
                state = handle.global_state, handle.rank_state(comm.rank)
                trainer.restore(LoadedCheckpoint(metadata, *state, True, handle.path))
            if stops is None:
                train_to_end(trainer)
                results.append((trainer.model.network.parameters, recorder.rows))
                shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
            else:
                with pytest.raises(TrainingInterrupted):
                    train_to_end(trainer)
            comm.barrier()
        return results

    for (whole, rows), (resumed, rows_again) in run_workers(2, work):
        assert torch.equal(whole, resumed)
        figures = [[(row["type"], row["loss"]) for row in part if "loss" in row] for part in (rows, rows_again)]
        assert figures[0] == figures[1] and figures[0][0][0] == "warmup"


@pytest.mark.parametrize("kind", KINDS)
def test_other_workers_continue_a_warm_up_from_the_model_of_rank_0(kind: str, tmp_path: Path) -> None:
    parallel = make_parallel_config(averaging_period=2, warmup=kind, warmup_minibatches=20)

    def stop(comm: Communicator) -> None:
        policy = StopAfter(tmp_path, comm, 0)
        with pytest.raises(TrainingInterrupted):
            train_to_end(toy_trainer(comm, parallel, checkpoints=policy))

    run_workers(2, stop)

    def work(comm: Communicator) -> list[str]:
        recorder = Recorder()
        trainer = toy_trainer(comm, parallel, run=recorder, checkpoints=(policy := StopAfter(tmp_path, comm, None)))
        handle = policy.store.latest()
        assert handle is not None
        metadata = CheckpointMetadata.model_validate(handle.metadata)
        state = rank_state(handle, comm.rank, started=False, bitwise=False)
        trainer.restore(LoadedCheckpoint(metadata, handle.global_state, state, False, handle.path))
        assert trainer.progress.minibatch == metadata.minibatch >= 5
        assert torch.equal(trainer.model.network.parameters, handle.rank_state(0)["network.parameters"])
        train_to_end(trainer)
        return [row["type"] for row in recorder.rows]

    for types in run_workers(3, work):
        assert types.count("warmup") == 1 and types.count("epoch") == 7


def test_a_checkpoint_interval_begins_anew_after_a_warm_up(tmp_path: Path) -> None:
    def work(comm: Communicator) -> list[int]:
        parallel = make_parallel_config(averaging_period=3, warmup="all-reduce", warmup_minibatches=8)
        policy = CheckpointPolicy(CheckpointStore(tmp_path, 2, comm), GracefulShutdown(), Recorder(), 1e6, 6)
        trainer = toy_trainer(comm, parallel, epochs=1, checkpoints=policy)
        saved, save = list[int](), policy._save

        def noting(training: Checkpointable) -> None:
            saved.append(training.progress.minibatch)
            save(training)

        policy._save = noting  # type: ignore[method-assign]
        train_to_end(trainer)
        return saved

    assert run_workers(2, work) == [[6, 6, 12, 18, 0]] * 2


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
