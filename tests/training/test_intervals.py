"""Averaging intervals that count frames, as minibatches of whole utterances need them: of unlike lengths."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import MINIBATCH, toy_trainer, train_to_end
from variants import make_parallel_config

from ddnn.averaging.averager import Averager, Request
from ddnn.averaging.choice import make_averager
from ddnn.averaging.strategy import AveragingOptions, NoFiniteModelError
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network
from ddnn.optim.sgd import Sgd, SgdOptions

PERIOD = 100
LENGTHS = ([40, 70, 100, 30, 60, 90, 10], [99, 2, 98, 1, 100], [50] * 8 + [35])
"""Frames of each minibatch of three workers: 400, 300 and 435 in all."""


def averager_of(comm: Communicator, strategy: str = "all-reduce") -> Averager:
    network = Network((Affine(1, 2, "softmax"),))
    options = AveragingOptions(strategy=strategy, averaging_frames=PERIOD)
    return make_averager(options, Groups.data_parallel(comm), network, Sgd(network, SgdOptions()))


@pytest.mark.parametrize("interrupted", [False, True])
def test_workers_average_when_each_has_trained_on_as_many_frames(interrupted: bool) -> None:
    """As often as the worker with the fewest frames can. Models weigh what the interval had, with what went beyond the
    multiple of the period. A checkpoint within an interval changes nothing."""

    def work(comm: Communicator) -> tuple[list[int], list[float], float]:
        made, lengths = averager_of(comm), LENGTHS[comm.rank]
        assert made.begin_epoch(len(lengths), sum(lengths)) == len(lengths)
        averaged, values = [], []
        for number, frames in enumerate(lengths, start=1):
            made.network.parameters.fill_(100.0 * comm.rank + number)
            if made.after_minibatch(frames):
                averaged.append(number)
                values.append(float(made.network.parameters[0]))
            elif interrupted:
                state = {name: tensor.clone() for name, tensor in made.state_dict().items()}
                made = averager_of(comm)
                made.load_state_dict(state)
        made.network.parameters.fill_(float(comm.rank))
        made.end_epoch()
        return averaged, values, float(made.network.parameters[0])

    places = [[2, 3, 5], [2, 4, 5], [2, 4, 6]]
    taken = [list(accumulate(lengths)) for lengths in LENGTHS]
    expected, before = [], [0, 0, 0]
    for index in range(3):
        ends = [taken[rank][places[rank][index] - 1] for rank in range(3)]
        weights = [end - begin for end, begin in zip(ends, before, strict=True)]
        models = [100.0 * rank + places[rank][index] for rank in range(3)]
        expected.append(sum(w * model for w, model in zip(weights, models, strict=True)) / sum(weights))
        before = ends
    assert before == [300, 300, 300], "the next interval is shorter by what the last had more"
    for rank, (averaged, values, last) in enumerate(run_workers(3, work)):
        assert averaged == places[rank]
        assert values == pytest.approx(expected)
        assert last == pytest.approx((300 + 2 * 435) / (400 + 300 + 435))


@pytest.mark.parametrize("strategy", ["all-reduce", "ring", "bmuf"])
def test_with_minibatches_of_one_size_frames_are_minibatches(strategy: str) -> None:
    """To the same bits."""

    def trained(**interval: int) -> list[Tensor]:
        def work(comm: Communicator) -> Tensor:
            parallel = make_parallel_config(strategy, **interval)
            trainer = toy_trainer(comm, parallel, frames=MINIBATCH * (7 + 3 * comm.rank), epochs=2)
            rows = train_to_end(trainer)
            counts = [row["averagings"] for row in rows if row["type"] == "worker" and row["rank"] == 0]
            return torch.cat([trainer.model.network.parameters, torch.tensor(counts)])

        return run_workers(2, work)

    for by_frames, by_minibatches in zip(
        trained(averaging_frames=3 * MINIBATCH), trained(averaging_period=3), strict=True
    ):
        assert torch.equal(by_frames, by_minibatches)
        assert by_frames[-2:].tolist() == [2, 2]


def once_an_epoch(comm: Communicator, world_size: int = 3, **keys: Any) -> Averager:
    network = Network((Affine(1, 2, "softmax"),))
    options = AveragingOptions(averaging_frames="epoch", averaging_period=2, **keys)
    return make_averager(options, Groups.data_parallel(comm), network, Sgd(network, SgdOptions(momentum=0.5)))


def test_once_an_epoch_a_request_does_not_wait_for_its_end() -> None:
    """Of the last worker, in the second minibatch: all hear of it after that, none averages. The worker with the fewest
    minibatches has two exchanges, so that the others do not wait for more."""

    def work(comm: Communicator) -> tuple[list[Request], list[bool], int, list[float]]:
        made, requests = once_an_epoch(comm), list[Request]()
        made.local_request = lambda: Request.STOP if comm.rank == 2 and made.counters.minibatches == 2 else Request.NONE
        made.begin_epoch(5 + comm.rank, PERIOD * (5 + comm.rank))
        made.network.parameters.fill_(float(comm.rank))
        averaged = []
        for _ in range(5 + comm.rank):
            averaged.append(made.after_minibatch(PERIOD))
            requests.append(made.requested)
        before = made.network.parameters.tolist()
        made.end_epoch()
        assert made.network.parameters.tolist() == pytest.approx([(6 + 2 * 7) / 18] * 4)
        return requests, averaged, made.counters.averagings, before

    for rank, (requests, averaged, averagings, before) in enumerate(run_workers(3, work)):
        assert requests == [Request.NONE, Request.STOP] + [Request.NONE] * (3 + rank)
        assert not any(averaged) and averagings == 0 and before == [rank] * 4


def test_once_an_epoch_requests_are_exchanged_rarely() -> None:
    """In the first epoch, where nothing is known of the time that an interval takes, after each; then at every eighth, or
    about twice a minute."""

    def work(comm: Communicator) -> list[list[int]]:
        made, exchanged = once_an_epoch(comm), list[list[int]]()
        made.local_request = lambda: exchanged[-1].append(made.counters.minibatches) or Request.NONE
        for seconds in (0.0, 0.0, 15.0 - 5.0 * comm.rank):
            exchanged.append([])
            made.counters.interval_seconds = [seconds] if seconds else made.counters.interval_seconds
            made.begin_epoch(40, 40 * PERIOD)
            for _ in range(40):
                made.after_minibatch(PERIOD)
            made.end_epoch()
        return exchanged

    for first, second, slow in run_workers(2, work):
        assert first == list(range(2, 41, 2))
        assert second == [16, 32]
        assert slow == list(range(4, 41, 4)), "of the slowest worker"


def test_once_an_epoch_a_model_that_is_not_finite_is_noticed_within_it(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and counted once; where no model is finite, training ends."""

    def work(comm: Communicator, diverged: int) -> tuple[int, int, list[float]]:
        made = once_an_epoch(comm)
        made.begin_epoch(8, 8 * PERIOD)
        made.network.parameters.fill_(1.0)
        for number in range(1, 9):
            if comm.rank >= diverged and number == 3:
                made.network.parameters[0] = math.nan
            try:
                made.after_minibatch(PERIOD)
            except NoFiniteModelError:
                return number, made.counters.excluded_averagings, []
        made.end_epoch()
        return 0, made.counters.excluded_averagings, made.network.parameters.tolist()

    assert run_workers(3, lambda comm: work(comm, 2)) == [(0, int(rank == 2), [1.0] * 4) for rank in range(3)]
    said = [record.getMessage() for record in caplog.records if "will be excluded" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("worker 2 on ")
    assert run_workers(3, lambda comm: work(comm, 0)) == [(4, 0, [])] * 3


@pytest.mark.parametrize("strategy", ["all-reduce", "bmuf", "elastic"])
def test_once_an_epoch_one_model_is_sent(strategy: str) -> None:
    """Beside a few numbers. With an averaging after every third of 12 minibatches four more; the fourth is that of the epoch's
    end with bmuf and elastic, which have no remainder then."""

    def sent(**interval: Any) -> list[float]:
        """Models that a worker has sent in each epoch."""

        def work(comm: Communicator) -> list[float]:
            parallel = make_parallel_config(strategy, averaging_period=3, **interval)
            trainer = toy_trainer(comm, parallel, frames=12 * MINIBATCH, epochs=2)
            rows = [row for row in train_to_end(trainer) if row["type"] == "worker"]
            assert {row["averagings"] for row in rows} == {0 if interval else 4}
            return [row["bytes_sent"] / (4 * row["num_parameters"]) for row in rows if row["rank"] == 0]

        return run_workers(3, work)[0]

    assert all(1.0 < models < 1.2 for models in sent(averaging_frames="epoch"))
    assert sent() == pytest.approx([5.0 if strategy == "all-reduce" else 4.0] * 2, rel=0.2)
