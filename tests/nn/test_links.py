"""A network whose layers are split over workers trains as the whole one, by another link between its layers."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import DIM, MINIBATCH, PDFS, SIZES, NoCheckpoints, Recorder, toy_shard

from ddnn.averaging.averager import Averager
from ddnn.data.batches import ShuffledSampler, make_batch_loader
from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.partition import Link
from ddnn.optim.schedule import Exponential
from ddnn.optim.sgd import Sgd
from ddnn.training.evaluation import Validation
from ddnn.training.loop import train
from ddnn.training.step import EagerStep
from ddnn.training.trainer import Trainer

HIDDEN = 6


class Gather(Link):
    """The outputs of all workers' columns side by side; each worker takes the derivative of its own."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def memory(self, outputs: Tensor, derivatives: Tensor) -> tuple[Tensor, Tensor]:
        frames, columns = outputs.shape
        whole = (frames, columns * self.comm.world_size)
        return outputs.new_zeros(whole), outputs.new_zeros(whole)

    def forward(self, outputs: Tensor, inputs: Tensor) -> None:
        for columns, gathered in zip(
            inputs.chunk(self.comm.world_size, dim=1), self.comm.all_gather(outputs), strict=True
        ):
            columns.copy_(gathered)

    def backward(self, input_derivatives: Tensor, derivatives: Tensor) -> None:
        derivatives.copy_(input_derivatives.chunk(self.comm.world_size, dim=1)[self.comm.rank])


def whole_network() -> Network:
    network = Network((Affine(DIM, HIDDEN, "sigmoid"), Affine(HIDDEN, PDFS, "softmax")))
    initialize(network, 3)
    return network


def trained(network: Network, links: list[Link]) -> list[dict[str, Tensor]]:
    """The layers' parameters after three epochs of the trainer's loop."""
    model = AcousticModel(FeatureConfig(), splice_only(DIM, 0), network)
    workspace, optimizer, frames = (
        Workspace(network, MINIBATCH, links=links),
        Sgd(network),
        toy_shard(0, 20 * MINIBATCH),
    )
    step, averager = (
        EagerStep(workspace, optimizer),
        Averager(Groups.data_parallel(SingleProcess()), network, optimizer),
    )
    sampler = ShuffledSampler(frames, MINIBATCH, seed=1)
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        schedule=Exponential(0.02, 3, 0.02),
        batches=make_batch_loader(frames, model.transform, sampler, out=workspace.x, mark=averager.timer.mark),
        validation=Validation(),
        minibatch_sizes=SIZES,
        eager_step=step,
        step=step,
        averager=averager,
        checkpoints=NoCheckpoints(),
        run=Recorder(),
    )
    with closing(trainer.batches):
        train(trainer)
    return network.views


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_split_layer_trains_as_the_whole_one(workers: int) -> None:
    whole = whole_network()

    def work(comm: Communicator) -> list[dict[str, Tensor]]:
        columns = HIDDEN // workers
        own = slice(comm.rank * columns, (comm.rank + 1) * columns)
        network = Network((Affine(DIM, columns, "sigmoid"), Affine(HIDDEN, PDFS, "softmax")))
        below, above = whole.views
        for name, parameter in network.views[0].items():
            parameter.copy_(below[name][own])
        for name, parameter in network.views[1].items():
            parameter.copy_(above[name])
        # The layer below is narrower than what the one above reads, which only a link between them makes fit.
        return trained(network, [Link(), Gather(comm), Link()])

    parts = run_workers(workers, work)
    below, above = trained(whole_network(), [Link()] * 3)
    for name in ("weight", "bias"):
        gathered = torch.cat([layers[0][name] for layers in parts])
        torch.testing.assert_close(gathered, below[name], rtol=1e-5, atol=1e-6)
        for layers in parts:
            torch.testing.assert_close(layers[1][name], above[name], rtol=1e-5, atol=1e-6)
