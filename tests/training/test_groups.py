"""Trainings whose groups of workers are parts of the world, as those of networks that several workers hold together."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import MINIBATCH, toy_shard, toy_trainer, train_to_end, with_combination
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging import averager
from ddnn.averaging.averager import Request
from ddnn.averaging.choice import make_averager
from ddnn.averaging.strategy import AveragingOptions
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups, watch
from ddnn.distributed.watchdog import NoWatchdog
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.trainer import Trainer

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mean": ({"averaging_period": 3}, {}),
    "momentum": ({"averaging_period": 2, "local_momentum": "average"}, {"momentum": 0.5}),
    "overlap": ({"averaging_period": 3, "overlap": True}, {}),
    "gossip": ({"strategy": "ring", "averaging_period": 3}, {}),
    "bmuf": ({"strategy": "bmuf", "averaging_period": 3}, {}),
    "elastic": ({"strategy": "elastic", "averaging_period": 3}, {}),
    "1-bit": ({"strategy": "1-bit", "averaging_period": 3}, {}),
    "gradient": ({"strategy": "gradient-all-reduce"}, {"momentum": 0.5}),
    "warm-up": ({"warmup": "single-worker", "warmup_minibatches": 5, "averaging_period": 3}, {}),
    "ng-sgd": ({"averaging_period": 3}, {"name": "ng-sgd", "rank_in": 2, "rank_out": 2, "update_period": 2}),
}
RATES = (0.02, 0.005)  # of the first and of the second training


def trained(trainer: Trainer) -> tuple[Tensor, Tensor, list[Any]]:
    """What a training leaves on a worker that must not depend on workers outside its data group."""
    rows = train_to_end(trainer)
    kept = ("split", "epoch", "loss", "frame_accuracy", "frames", "learning_rate")
    figures = [[row[key] for key in kept] for row in rows if row.get("split")]
    average = next(trainer.combination.parts["moving"].candidates())[1]
    return trainer.model.network.parameters, average, figures


@pytest.mark.parametrize("name", CASES)
def test_two_data_groups_train_as_two_trainings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four workers, of which 0 and 2 are one training and 1 and 3 another: to the same bits."""
    monkeypatch.setattr(averager, "require_thread_level", lambda *_: None)  # there is no MPI
    parallel, optimizer = make_parallel_config(**CASES[name][0]), make_optimizer_config(**CASES[name][1])

    def trainer_of(groups: Groups, number: int) -> Trainer:
        frames = MINIBATCH * (7 + groups.data.rank)
        trainer = toy_trainer(
            groups, parallel, frames=frames, optimizer=optimizer, epochs=2, learning_rate=RATES[number]
        )
        trainer.validation.frames = toy_shard(50 + 10 * number + groups.data.rank, 40)
        return with_combination(trainer, most=1)

    def together(world: Communicator) -> tuple[Tensor, Tensor, list[Any]]:
        alone, data = SingleProcess(), world.split(world.rank % 2, world.rank)
        return trained(trainer_of(Groups(world, alone, alone, alone, data), world.rank % 2))

    def by_itself(number: int) -> list[tuple[Tensor, Tensor, list[Any]]]:
        return run_workers(2, lambda comm: trained(trainer_of(Groups.data_parallel(comm), number)))

    found, expected = run_workers(4, together), [by_itself(0), by_itself(1)]
    for rank, (parameters, average, figures) in enumerate(found):
        other_parameters, other_average, other_figures = expected[rank % 2][rank // 2]
        assert torch.equal(parameters, other_parameters)
        assert torch.equal(average, other_average)
        assert figures == other_figures
    assert not torch.equal(found[0][0], found[1][0])


def test_the_columns_of_a_replica_have_ranks_that_follow_each_other() -> None:
    def work(world: Communicator) -> list[list[int]]:
        groups = Groups.split(world, 3)
        assert groups.stage.world_size == 1
        return [group.all_gather_object(world.rank) for group in (groups.replica, groups.column, groups.data)]

    for rank, found in enumerate(run_workers(6, work)):
        replica = [0, 1, 2] if rank < 3 else [3, 4, 5]
        assert found == [replica, replica, [rank % 3, rank % 3 + 3]]


def in_columns(world: Communicator) -> Groups:
    """Four workers: two replicas of two columns each."""
    column = world.split(world.rank // 2, world.rank)
    return Groups(world, column, column, SingleProcess(), world.split(world.rank % 2, world.rank))


@pytest.mark.parametrize("strategy", ["all-reduce", "bmuf"])
def test_a_replica_is_averaged_as_a_whole_or_not_at_all(strategy: str) -> None:
    """One column of the second replica is not finite: the other is excluded with it. Distances are those of the whole
    vector of a replica."""

    def work(world: Communicator) -> tuple[list[float], int, int, list[float]]:
        network = Network((Affine(2, 2, "softmax"),))
        optimizer = Sgd(network, SgdOptions(momentum=0.5))
        made = make_averager(
            AveragingOptions(strategy=strategy, averaging_period=1, block_momentum=0.0),
            in_columns(world), network, optimizer,
        )  # fmt: skip
        made.begin_epoch(4, 4 * MINIBATCH)
        network.parameters.fill_(1.0 + world.rank)
        made.after_minibatch(MINIBATCH)
        first = made.counters.consensus_distances.copy()
        if world.rank == 3:
            network.parameters[0] = math.nan
        if world.rank == 2:
            optimizer.momentum_buffer.fill_(1.0)
        if world.rank < 2:
            network.parameters.add_(1.0)
        made.after_minibatch(MINIBATCH)
        made.end_epoch()
        momentum = int(optimizer.momentum_buffer.count_nonzero())
        return network.parameters.tolist(), made.counters.excluded_averagings, momentum, first

    # After the first: columns are (1 + 3) / 2 and (2 + 4) / 2; then those of the first replica are 1 more.
    found = run_workers(4, work)
    assert [parameters for parameters, *_ in found] == [[3.0] * 6, [4.0] * 6] * 2
    assert [(excluded, momentum) for _, excluded, momentum, _ in found] == [(0, 0), (0, 0), (1, 0), (1, 0)]
    moved = math.sqrt(6 + 6)  # each of the parameters by 1
    norms = [math.sqrt(6 * (1 + 4)), math.sqrt(6 * (9 + 16))]
    assert [first for *_, first in found] == [[pytest.approx(moved / norms[rank // 2])] for rank in range(4)]


def test_the_moving_average_of_a_replica_is_finite_as_a_whole() -> None:
    def work(world: Communicator) -> tuple[bool, Tensor]:
        trainer = with_combination(toy_trainer(in_columns(world), make_parallel_config(averaging_period=50)))
        moving = trainer.combination.parts["moving"]
        moving.weight = 1.0  # type: ignore[attr-defined]
        if world.rank == 3:
            moving.mean.fill_(math.nan)  # type: ignore[attr-defined]
        elif world.rank == 2:
            moving.mean.fill_(1e6)  # type: ignore[attr-defined]
        moving.end_epoch()
        return bool(moving.mean.isfinite().all()), moving.mean.max()  # type: ignore[attr-defined]

    assert all(finite and largest < 100.0 for finite, largest in run_workers(4, work))


def test_a_request_reaches_all_data_groups() -> None:
    def work(world: Communicator) -> Request:
        toy = toy_trainer(in_columns(world), make_parallel_config(averaging_period=2))
        toy.averager.local_request = lambda: Request.STOP if world.rank == 3 else Request.NONE
        toy.averager.begin_epoch(4, 4 * MINIBATCH)
        for _ in range(2):
            toy.averager.after_minibatch(MINIBATCH)
        return toy.averager.requested

    assert run_workers(4, work) == [Request.STOP] * 4


def test_all_workers_average_as_often() -> None:
    """Also those of another data group: else they would wait for each other's requests."""
    minibatches = (9, 6, 8, 7)  # of 0 and 2 at least four intervals, of 1 and 3 three

    def work(world: Communicator) -> int:
        toy = toy_trainer(in_columns(world), make_parallel_config(averaging_period=2))
        toy.averager.begin_epoch(minibatches[world.rank], minibatches[world.rank] * MINIBATCH)
        return sum(toy.averager.after_minibatch(MINIBATCH) for _ in range(minibatches[world.rank]))

    assert run_workers(4, work) == [3] * 4


def test_one_worker_is_watched_by_nobody() -> None:
    alone = SingleProcess()
    watch(alone, 60.0)
    assert type(Groups.data_parallel(alone).world.watchdog) is NoWatchdog


def test_each_of_several_workers_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(NoWatchdog):
        def __init__(self, *arguments: Any) -> None:
            self.arguments = arguments

    def work(world: Communicator) -> tuple[tuple[Any, ...], bool]:
        watch(world, 60.0)
        data = Groups.data_parallel(world).data
        assert isinstance(world.watchdog, Named)
        return world.watchdog.arguments, data.split(0, 0).watchdog is world.watchdog

    monkeypatch.setattr("ddnn.distributed.groups.Watchdog", Named)
    assert run_workers(2, work) == [((0, "here", 60.0), True), ((1, "here", 60.0), True)]
