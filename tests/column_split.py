"""Networks whose layers are split by columns over threads, beside the whole ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from distributed.threads import Result, run_workers
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.distributed.communicator import Communicator
from ddnn.nn.arithmetic import Float32
from ddnn.nn.columns import ColumnPartition
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.objective import CrossEntropy
from ddnn.optim.sgd import Sgd
from ddnn.training.step import EagerStep


class Float64(Float32):
    """In which the order of sums hardly shows."""

    dtype = x_dtype = gradient_dtype = bias_input_dtype = torch.float64


def new_network(*shape: int, dtype: torch.dtype = torch.float32) -> Network:
    """A network that `initialize` made, of `input, hidden layers, hidden units, pdfs`."""
    network = Network(mlp_layers(*shape))
    initialize(network, 3)
    return Network(network.layers, network.parameters.to(dtype))


def minibatches(network: Network, count: int, frames: int) -> list[tuple[Tensor, Tensor]]:
    """Correlated rows, and labels that they tell something about."""
    generator = torch.Generator().manual_seed(5)
    dims, pdfs = network.input_dim, network.output_dim
    mix = torch.randn(dims, dims, generator=generator) * torch.logspace(0, -1.5, dims)
    means = torch.randn(pdfs, dims, generator=generator)
    made = []
    for _ in range(count):
        labels = torch.randint(0, pdfs, (frames,), generator=generator)
        x = means[labels] + torch.randn(frames, dims, generator=generator) @ mix + 0.3
        made.append((x.to(network.parameters.dtype), labels))
    return made


def trained(
    network: Network,
    make_optimizer: Callable[[Network], Sgd],
    data: Iterable[tuple[Tensor, Tensor]],
    arithmetic: Float32,
    lr: float,
) -> tuple[list[Tensor], Sgd]:
    """This worker's losses and parameters after each step, and the optimizer."""
    optimizer, found = make_optimizer(network), list[Tensor]()
    step = None
    for x, labels in data:
        step = step or EagerStep(Workspace(network, len(x), arithmetic), optimizer, None, CrossEntropy)
        loss, _ = step(Batch(x, labels), lr)
        found += [loss[None], network.partition.whole(network.parameters).clone()]
    return found, optimizer


def on_columns(columns: int, whole: Network, work: Callable[[Network], Result]) -> list[Result]:
    """What `work` returns for each worker's part of the network."""

    def worker(comm: Communicator) -> Result:
        return work(whole.part_of(ColumnPartition(whole.layers, comm)))

    return run_workers(columns, worker)


def difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())
