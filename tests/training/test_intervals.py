"""Averaging intervals that count frames, as minibatches of whole utterances need them: of unlike lengths."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import MINIBATCH, toy_trainer, train_to_end
from variants import make_parallel_config

from ddnn.averaging.averager import Averager, make_averager
from ddnn.averaging.strategies import AveragingOptions, FrameInterval, Interval
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
    options = AveragingOptions(strategy=strategy, averaging_period=PERIOD, interval=FrameInterval)
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

    def trained(period: int, interval: type[Interval]) -> list[Tensor]:
        def work(comm: Communicator) -> Tensor:
            parallel = make_parallel_config(strategy, averaging_period=period)
            trainer = toy_trainer(comm, parallel, frames=MINIBATCH * (7 + 3 * comm.rank), epochs=2, interval=interval)
            rows = train_to_end(trainer)
            counts = [row["averagings"] for row in rows if row["type"] == "worker" and row["rank"] == 0]
            return torch.cat([trainer.model.network.parameters, torch.tensor(counts)])

        return run_workers(2, work)

    for by_frames, by_minibatches in zip(trained(3 * MINIBATCH, FrameInterval), trained(3, Interval), strict=True):
        assert torch.equal(by_frames, by_minibatches)
        assert by_frames[-2:].tolist() == [2, 2]
