"""The parameter server, with workers that are threads: exchanges in a given order, requests, and what it is refused with."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import MINIBATCH, Recorder, toy_model, toy_trainer, train_to_end
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging import parameter_server
from ddnn.averaging.averager import Averager, Request
from ddnn.averaging.parameter_server import LAST, Answer, Link, ParameterServer, Push
from ddnn.averaging.strategy import NoFiniteModelError
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.signals import GracefulShutdown, TrainingInterrupted
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.training.resume import merge_rank_states, read_metadata
from ddnn.training.state import CheckpointPolicy, LoadedCheckpoint
from ddnn.training.trainer import Trainer
from ddnn.util.errors import DivergedError

SIZE = 11
START = torch.linspace(-1.0, 1.0, SIZE)


@pytest.fixture(autouse=True)
def no_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parameter_server, "require_thread_level", lambda *_: None)


def change(number: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(number))


def in_order(order: Sequence[tuple[int, Push]], scale: float = 1.0) -> tuple[list[tuple[Answer, Tensor]], list[Tensor]]:
    """The exchanges of three workers one after the other, the i-th by worker order[i][0], which sends `change(i)`: the
    answers with the parameters, and what the round leaves on worker 0."""
    turn, now = threading.Condition(), [0]
    found: dict[int, tuple[Answer, Tensor]] = {}

    def work(comm: Communicator) -> Tensor:
        link = Link(comm) if comm.rank else ParameterServer(comm, START, scale)
        link.begin(START)
        for number, (rank, push) in enumerate(order):
            with turn:
                assert turn.wait_for(lambda number=number: now[0] >= number, timeout=30)
            if rank == comm.rank:
                vector = change(number)
                found[number] = link.exchange(vector, push), vector.clone()
                with turn:
                    now[0] = number + 1
                    turn.notify_all()
        last = torch.zeros(SIZE)
        link.finish(last)
        return last

    ends = run_workers(3, work)
    return [found[number] for number in range(len(order))], ends


def test_the_server_adds_every_change_and_says_how_stale_it_was() -> None:
    """Against a list of vectors in float64. Worker 2 pushes once what does not count."""
    ranks = [1, 1, 0, 2, 1, 2, 0, 2, 0, 1]
    ends = {ranks.index(rank, n): rank for rank, n in ((2, 7), (0, 8), (1, 9))}
    order = [(rank, Push(0, LAST if n in ends else 5, n != 5)) for n, rank in enumerate(ranks)]
    found, last = in_order(order, scale=0.25)
    server, updates, fetched = START.double().clone(), 0, [0, 0, 0]
    for number, (rank, push) in enumerate(order):
        answer, parameters = found[number]
        assert answer == Answer(0, updates - fetched[rank]), number
        if push.counts:
            server += 0.25 * change(number).double()
            updates += 1
        fetched[rank] = updates
        np.testing.assert_allclose(parameters, server, atol=1e-6, rtol=0)
    np.testing.assert_allclose(last[0], server, atol=1e-6, rtol=0)
    assert [answer.staleness for answer, _ in found] == [0, 0, 2, 3, 2, 1, 2, 1, 1, 3]


STOP, CHECKPOINT, NONE = int(Request.STOP), int(Request.CHECKPOINT), int(Request.NONE)


@pytest.mark.parametrize(
    ("order", "granted"),
    [
        # Worker 1 is known to have no exchange left but its last, before which it would not hear of the request.
        (
            [(1, NONE, 0), (2, STOP, 3), (0, NONE, 2), (2, STOP, 2), (1, NONE, LAST), (0, NONE, LAST), (2, STOP, LAST)],
            [NONE] * 7,
        ),
        # Of worker 1 it is not known until it comes, and then it hears of it.
        ([(2, STOP, 3), (0, NONE, 2), (1, NONE, 0), (2, STOP, 2), (0, NONE, 1)], [NONE, NONE, STOP, STOP, STOP]),
        ([(0, CHECKPOINT, 3), (1, NONE, 3), (2, STOP, 3), (1, NONE, 2), (0, NONE, 2)], [NONE, NONE, STOP, STOP, STOP]),
        (
            [(1, CHECKPOINT, 1), (1, NONE, 0), (0, NONE, 3), (2, NONE, LAST), (1, NONE, LAST), (0, NONE, LAST)],
            [NONE] * 6,
        ),
    ],
    ids=["not any more", "once all are known", "the strongest", "not in a last exchange"],
)
def test_a_request_is_granted_where_all_will_hear_of_it(order: list[tuple[int, int, int]], granted: list[int]) -> None:
    found, _ = in_order([(rank, Push(request, left, True)) for rank, request, left in order])
    assert [answer.request for answer, _ in found] == granted


def async_trainer(comm: Communicator, **more: Any) -> Trainer:
    """Of shards of 20, 23 and 26 minibatches, with an exchange every 3."""
    parallel = make_parallel_config("async", averaging_period=3, **more.pop("parallel", {}))
    frames = MINIBATCH * (20 + 3 * comm.rank)
    return toy_trainer(comm, parallel, frames=frames, optimizer=make_optimizer_config(momentum=0.5), **more)


@pytest.mark.parametrize("parallel", [{}, {"local_momentum": "reset", "update_scale": 0.5}], ids=["keep", "reset"])
def test_a_training_ends_with_what_the_workers_have_sent(parallel: dict[str, Any]) -> None:
    """The model of each epoch is the one before and all changes, whatever their order, and the same on all workers."""
    scale, epochs = parallel.get("update_scale", 1 / 3), 3

    def work(comm: Communicator) -> tuple[list[Tensor], list[Tensor], list[dict[str, Any]]]:
        trainer = async_trainer(comm, epochs=epochs, parallel=parallel)
        link, parameters = trainer.averager._link, trainer.model.network.parameters  # type: ignore[attr-defined]
        exchange, finish = link.exchange, trainer.averager.end_epoch
        sent, models = [torch.zeros_like(parameters, dtype=torch.float64)], [parameters.clone()]

        def recorded(vector: Tensor, push: Push) -> Answer:
            sent[-1] += vector
            answer: Answer = exchange(vector, push)
            return answer

        def end_epoch() -> None:
            finish()
            models.append(parameters.clone())
            sent.append(torch.zeros_like(sent[0]))

        link.exchange, trainer.averager.end_epoch = recorded, end_epoch  # type: ignore[method-assign]
        rows = train_to_end(trainer)
        return sent, models, rows

    found = run_workers(3, work)
    _, models, rows = found[0]
    for epoch in range(epochs):
        total = scale * sum(sent[epoch] for sent, _, _ in found)
        torch.testing.assert_close(models[epoch + 1].double(), models[epoch].double() + total, rtol=0, atol=1e-5)
        assert total.abs().max() > 0.1
    for _, others, _ in found:
        assert all(torch.equal(a, b) for a, b in zip(models, others, strict=True))
    cv, train, workers = (
        [row for row in rows if name in (row["type"], row.get("split"))] for name in ("cv", "train", "worker")
    )
    assert cv[-1]["loss"] < 0.7 * cv[0]["loss"]
    assert [row["averagings"] for row in workers] == [6, 7, 8] * epochs
    assert [row["minibatches"] for row in workers] == [20, 23, 26] * epochs
    assert {row["frames"] for row in train} == {69 * MINIBATCH}
    assert all(0 <= row["staleness"] < 26 for row in workers) and any(row["staleness"] > 0 for row in workers)


def test_one_worker_trains_as_without() -> None:
    def trained(strategy: str) -> Tensor:
        parallel = make_parallel_config(strategy, averaging_period=3)
        trainer = toy_trainer(SingleProcess(), parallel)
        assert type(trainer.averager) is Averager
        train_to_end(trainer)
        return trainer.model.network.parameters

    assert torch.equal(trained("async"), trained("all-reduce"))


def test_beside_a_worker_that_changes_nothing_one_trains_as_alone() -> None:
    """To rounding; it sends a change after each interval, and the rest."""

    def work(comm: Communicator) -> Tensor:
        trainer = async_trainer(comm, parallel={"update_scale": 1.0, "scale_learning_rate": False})
        if comm.rank:
            trainer.optimizer.step = lambda *_: None  # type: ignore[method-assign]
        train_to_end(trainer)
        return trainer.model.network.parameters

    alone = work(SingleProcess())
    assert (alone - toy_model().network.parameters).abs().max() > 0.1
    for parameters in run_workers(2, work):
        torch.testing.assert_close(parameters, alone, rtol=0, atol=1e-5)


def test_nobody_waits_for_a_slow_worker() -> None:
    """Worker 2 takes 30 ms for a minibatch: the others make all their exchanges before its second."""
    order = list[int]()

    def work(comm: Communicator) -> None:
        trainer = async_trainer(comm, epochs=1)
        link, step = trainer.averager._link, trainer.optimizer.step  # type: ignore[attr-defined]
        exchange = link.exchange

        def recorded(vector: Tensor, push: Push) -> Answer:
            order.append(comm.rank)
            answer: Answer = exchange(vector, push)
            return answer

        def slow(*arguments: Any) -> None:
            time.sleep(0.1 if comm.rank == 2 else 0.0)
            step(*arguments)

        link.exchange, trainer.optimizer.step = recorded, slow  # type: ignore[method-assign]
        train_to_end(trainer)

    run_workers(3, work)
    assert [order.count(rank) for rank in range(3)] == [7, 8, 9], "one more each at the end of the epoch"
    first_two = [number for number, rank in enumerate(order) if rank == 2][1]
    assert sum(rank != 2 for rank in order[:first_two]) == 15


def test_a_model_that_is_not_finite_is_excluded() -> None:
    """By one frame of the last worker, once an epoch."""

    def work(comm: Communicator) -> tuple[list[dict[str, Any]], Tensor]:
        trainer = async_trainer(comm)
        if comm.rank == 2:
            trainer.batches.frames.dataset.features[17] = float("nan")
        return train_to_end(trainer), trainer.model.network.parameters

    for rows, parameters in run_workers(3, work):
        assert bool(parameters.isfinite().all())
        assert [row["excluded_averagings"] for row in rows if row["type"] == "worker"] == [0, 0, 1] * 3
        assert [row["loss"] for row in rows if row.get("split") == "cv"][-1] < 1.2


def test_a_server_that_is_not_finite_has_diverged() -> None:
    def work(comm: Communicator) -> str:
        trainer = async_trainer(comm, parallel={"update_scale": 1.0})
        made, parameters = trainer.averager, trainer.model.network.parameters
        made.begin_epoch(3, 3 * MINIBATCH)
        parameters.fill_(1e18)  # the norm is finite, but not that of the sum
        with pytest.raises(NoFiniteModelError) as raised:
            made.end_epoch()
        return raised.value.message

    assert set(run_workers(3, work)) == {"the training diverged: the parameters of the server are not finite"}


def test_workers_none_of_which_is_finite_have_diverged() -> None:
    def work(comm: Communicator) -> str:
        trainer = async_trainer(comm)
        trainer.batches.frames.dataset.features.fill_(float("nan"))
        with pytest.raises(DivergedError) as raised:
            train_to_end(trainer)
        return raised.value.message

    (message,) = set(run_workers(3, work))
    assert message.startswith("the training diverged: the training loss is nan"), message


class StopAfter(CheckpointPolicy):
    """Worker 1 is asked to stop by a signal once it has trained on so many minibatches of the second epoch."""

    def __init__(self, directory: Path, comm: Communicator, minibatch: int | None) -> None:
        super().__init__(CheckpointStore(directory, 2, comm), GracefulShutdown(), Recorder(), 1e6)
        self.minibatch = minibatch

    def _request(self) -> Request:
        place = self._progress.epoch, self._progress.minibatch
        asked = self.minibatch is not None and self.comm.rank == 1 and place >= (1, self.minibatch)
        return Request.STOP if asked else Request.NONE


@pytest.mark.parametrize("minibatch", [3, 12, 23], ids=["early", "later", "too late to stop within the epoch"])
def test_a_stop_loses_nothing_and_trains_nothing_twice(minibatch: int, tmp_path: Path) -> None:
    """All workers stop with the server's parameters, each after an exchange of its own. On as many workers each resumes
    from there; on another number from the mean, which these are."""

    def latest(comm: Communicator, *, alike: bool = True) -> LoadedCheckpoint:
        found = CheckpointStore(tmp_path, 2, comm).latest()
        assert found is not None
        states = [found.rank_state(rank) for rank in range(3)]
        state = states[comm.rank] if alike else merge_rank_states(states)
        return LoadedCheckpoint(read_metadata(found.metadata, found.path), found.global_state, state, alike, found.path)

    def stop(comm: Communicator) -> tuple[Tensor, int, int]:
        trainer = async_trainer(comm, checkpoints=StopAfter(tmp_path, comm, minibatch))
        with pytest.raises(TrainingInterrupted):
            train_to_end(trainer)
        return trainer.model.network.parameters.clone(), trainer.progress.epoch, trainer.progress.minibatch

    def resume(comm: Communicator) -> list[dict[str, Any]]:
        trainer = async_trainer(comm, checkpoints=StopAfter(tmp_path, comm, None))
        trainer.restore(latest(comm))
        return train_to_end(trainer)

    stopped = run_workers(3, stop)
    assert all(torch.equal(parameters, stopped[0][0]) for parameters, _, _ in stopped)
    places = [(epoch, done) for _, epoch, done in stopped]
    ended = places == [(2, 0)] * 3  # as where, on a busy machine, another worker is done before worker 1 has asked
    assert ended or minibatch != 23
    assert not ended or minibatch != 3
    if not ended:
        assert all(epoch == 1 and done % 3 == 0 and done > 0 for epoch, done in places) and places[1][1] >= minibatch
    merged = async_trainer(SingleProcess())
    merged.restore(latest(SingleProcess(), alike=False))
    assert torch.equal(merged.model.network.parameters, stopped[0][0])

    for rows in run_workers(3, resume):
        train, workers = (
            [row for row in rows if name in (row["type"], row.get("split"))] for name in ("train", "worker")
        )
        epochs = 1 if ended else 2
        assert [row["frames"] for row in train] == [69 * MINIBATCH] * epochs
        assert [row["minibatches"] for row in workers] == [20, 23, 26] * epochs
        assert [row["averagings"] for row in workers] == [6, 7, 8] * epochs
