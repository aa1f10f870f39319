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
from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling
from ddnn.nn.elementwise import Activation, ParametricRelu, Scale, Shift
from ddnn.nn.layers import Affine, mlp_layers
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


def new_convnet(dtype: torch.dtype = torch.float32) -> Network:
    """12 bands of 3 streams through all kinds of layers that can be split; 2 and 3 divide neither filters nor widths. Outputs
    are not nearly constant, as they are where sigmoids start: of such rows NG-SGD magnifies the rounding, with or without columns."""
    layers = (
        Convolution.of_pieces(36, 3, 1, 12, 13, max_norm=2.0, weight_stddev=0.5, bias_mean=0.0),
        MaxPooling.of_patches(130, 2, 2, 13),
        Scale(65),
        Shift(65, 0.5),
        Activation(65, "sigmoid"),
        Convolution(
            1, 13, 5, 1, 2, 11, 1, 1, channels_last=True, weight_stddev=0.5, bias_mean=0.0
        ),  # reads all filters
        AveragePooling.of_patches(44, 2, 1, 11),
        ParametricRelu(33, 1.0, 1.0, beta=0.25),
        Affine(33, 35),
        Affine(35, 23, "softmax", bias_learn_rate_coef=0.1),
    )
    network = Network(layers)
    initialize(network, 3)
    return Network(layers, network.parameters.to(dtype))


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
