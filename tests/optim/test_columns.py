"""Trainings of networks that workers hold by columns are those of one worker, to rounding. Workers are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch
from column_split import Float64, difference, minibatches, new_convnet, new_network, on_columns, trained
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.distributed.cost import Layout, Machine, Size, fisher_update_bytes, received_bytes
from ddnn.nn.arithmetic import Float32, make_arithmetic
from ddnn.nn.columns import ColumnPartition
from ddnn.nn.network import Network, Workspace
from ddnn.optim import natural_gradient
from ddnn.optim.columns import ColumnNgSgd
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.step import EagerStep

STEPS = 16  # the Fisher matrices are updated in each of the first 11, and in the 15th
PLAIN = {
    "plain": SgdOptions(),
    "momentum and l2": SgdOptions(momentum=0.9, l2=1e-5),
    "short gradients": SgdOptions(momentum=0.5, max_gradient_norm=0.05),
}


NETWORKS = {
    "affine": lambda dtype: new_network(40, 3, 64, 50, dtype=dtype),
    "convolutions": new_convnet,
}


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("network", NETWORKS)
def test_sgd(columns: int, name: str, dtype: torch.dtype, network: str) -> None:
    whole = NETWORKS[network](dtype)
    data, arithmetic = minibatches(whole, STEPS, 64), Float64() if dtype == torch.float64 else Float32()

    def train(network: Network) -> list[Tensor]:
        network = Network(network.layers, network.parameters.clone(), partition=network.partition)
        return trained(network, lambda network: Sgd(network, PLAIN[name]), data, arithmetic, 2e-3)[0]

    expected = train(whole)
    bound = 1e-13 if dtype == torch.float64 else 1e-6
    for found in on_columns(columns, whole, train):
        assert max(map(difference, found, expected)) <= bound


NG = {
    "free": NgSgdOptions(rank_in=10, rank_out=20, max_change_per_sample=0.0),
    "max-change bites": NgSgdOptions(rank_in=10, rank_out=20, max_change_per_sample=1e-4, momentum=0.5, l2=1e-5),
    "unscaled": NgSgdOptions(rank_in=10, rank_out=20, max_change_per_sample=0.02, max_change_scope="unscaled"),
}


def make_ng_sgd(network: Network, options: NgSgdOptions) -> NgSgd:
    if isinstance(network.partition, ColumnPartition):
        return ColumnNgSgd(network, network.partition, options)
    return NgSgd(network, options)


def ng_trained(
    whole: Network, options: NgSgdOptions, data: list[tuple[Tensor, Tensor]], arithmetic: Float32, lr: float = 2e-3
) -> Callable[[Network], tuple[list[Tensor], list[Tensor]]]:
    """Of a worker: losses and parameters after each step, and the Fisher matrices by W^T W, d and rho."""

    def train(network: Network) -> tuple[list[Tensor], list[Tensor]]:
        network = Network(network.layers, network.parameters.clone(), partition=network.partition)
        found, optimizer = trained(network, lambda network: make_ng_sgd(network, options), data, arithmetic, lr)
        states = [preconditioner.state_dict() for preconditioner in optimizer.preconditioners]
        fisher = [[s["w"].t() @ s["w"], s["d"], s["rho"][None]] for s in states]
        assert all(int(state["t"]) == len(data) for state in states)
        return found, [tensor for of_side in fisher for tensor in of_side]

    return train


def largest_difference(
    columns: int, whole: Network, options: NgSgdOptions, data: list[tuple[Tensor, Tensor]], arithmetic: Float32
) -> tuple[float, float]:
    """Of parameters and losses, and of Fisher matrices, on any worker at any time."""
    train = ng_trained(whole, options, data, arithmetic)
    expected, expected_fisher = train(whole)
    found = on_columns(columns, whole, train)
    assert all(map(torch.equal, found[0][1], found[-1][1]))
    return (
        max(max(map(difference, own, expected)) for own, _ in found),
        max(max(map(difference, own, expected_fisher)) for _, own in found),
    )


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("frames", [64, 300])
@pytest.mark.parametrize("name", NG)
@pytest.mark.parametrize("skewed", [False, True])
def test_ng_sgd(columns: int, frames: int, name: str, skewed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with every update followed by an orthonormalization."""
    if skewed:
        monkeypatch.setattr(natural_gradient, "_CONDITION", 0.0)
        monkeypatch.setattr(natural_gradient, "_ORTHONORMAL", -1.0)
    whole = new_network(40, 3, 64, 50, dtype=torch.float64)
    data = minibatches(whole, STEPS, frames)
    parameters, fisher = largest_difference(columns, whole, NG[name], data, Float64())
    assert parameters <= 1e-10
    assert fisher <= 1e-10


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("frames", [64, 300])
@pytest.mark.parametrize("name", NG)
def test_ng_sgd_of_convolutions(columns: int, frames: int, name: str) -> None:
    whole, options = new_convnet(torch.float64), replace(NG[name], rank_in=5, rank_out=8)
    data = minibatches(whole, STEPS, frames)
    parameters, fisher = largest_difference(columns, whole, options, data, Float64())
    assert parameters <= 1e-10
    assert fisher <= 1e-10


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_ng_sgd_in_float32(columns: int, use_kernels: bool, network: str) -> None:
    whole, options = NETWORKS[network](torch.float32), replace(NG["free"], rank_in=5 if network != "affine" else 10)
    arithmetic = make_arithmetic("float32", torch.device("cpu"), use_kernels=use_kernels)
    parameters, fisher = largest_difference(columns, whole, options, minibatches(whole, STEPS, 64), arithmetic)
    assert parameters <= 2e-5
    assert fisher <= 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_columns_on_a_gpu(network: str, exact: bool, precision: Literal["float32", "bf16"]) -> None:
    """That the threads share: in float32 as one worker there, in bf16 as near to float32."""
    device = torch.device("cuda")
    whole = NETWORKS[network](torch.float32)
    data = [(x.to(device), labels.to(device)) for x, labels in minibatches(whole, STEPS, 64)]
    whole, options = whole.to(device), replace(NG["free"], rank_in=5, exact=exact)
    expected, _ = ng_trained(whole, options, data, Float32())(whole)
    train = ng_trained(whole, options, data, make_arithmetic(precision, device))
    unsplit, _ = train(whole)
    for found, _ in on_columns(2, whole, train):
        error, bound = (found[-1] - expected[-1]).norm(), (unsplit[-1] - expected[-1]).norm()
        assert error <= 1.5 * bound + 2e-5 * expected[-1].norm()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("use_kernels", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_ng_sgd_in_bf16(exact: bool, use_kernels: bool, network: str) -> None:
    """As near to float32 as one worker's is."""
    whole, options = NETWORKS[network](torch.float32), replace(NG["free"], exact=exact)
    data = minibatches(whole, STEPS, 64)
    arithmetic = make_arithmetic("bf16", torch.device("cpu"), use_kernels=use_kernels)
    expected = ng_trained(whole, options, data, Float32())(whole)[0][-1]
    unsplit = ng_trained(whole, options, data, arithmetic)(whole)[0][-1]
    for found, _ in on_columns(2, whole, ng_trained(whole, options, data, arithmetic)):
        assert (found[-1] - expected).norm() <= 1.5 * (unsplit - expected).norm()


@pytest.mark.parametrize("columns", [2, 3])
def test_bytes_are_those_of_the_formulas(columns: int) -> None:
    """All-reduces of H and of norms in every minibatch, and of K and L on updates, after the first minibatch."""
    frames, steps = 64, 14
    whole, options = new_network(40, 3, 64, 50), NG["free"]
    data = minibatches(whole, steps, frames)

    def work(network: Network) -> list[tuple[int, int]]:
        optimizer, comm = make_ng_sgd(network, options), network.partition.comm  # type: ignore[attr-defined]
        step, found = EagerStep(Workspace(network, frames), optimizer), list[tuple[int, int]]()
        for x, labels in data:
            before = comm.stats.copy()
            step(Batch(x, labels), 1e-3)
            spent = comm.stats - before
            found.append((spent.bytes_summed, spent.bytes_gathered))
        return found

    sizes = [Size(inputs, outputs, 10, 20) for inputs, outputs in ((40, 64), (64, 64), (64, 64), (64, 50))]
    machine, layout, share = Machine(1.0, 0.0, 1.0, 0.0, 0.0), Layout(1, columns), 2 * (columns - 1) / columns
    of_minibatch, of_update = received_bytes(machine, sizes, frames, layout), fisher_update_bytes(sizes, columns)
    always = round((of_minibatch["projections"] + of_minibatch["norms"]) / share)
    on_update = round(of_update["sums"] / share)
    updates = [t for t in range(1, steps) if t <= 10 or (t - 10) % options.update_period == 0]
    everyone = on_columns(columns, whole, work)
    for t in range(1, steps):
        summed, gathered = zip(*(found[t] for found in everyone), strict=True)
        assert set(summed) == {always + (on_update if t in updates else 0)}
        after_update = t == 1 or t - 1 in updates
        assert sum(gathered) == (columns - 1) * (4 * frames * 3 * 64 + of_update["results"] * after_update)


def bytes_held(network: Network, options: SgdOptions) -> tuple[int, int]:
    """Of the storage of what columns divide: parameters, gradients, momentum, and W and J of NG-SGD's output sides; and of what
    every worker has a copy of: NG-SGD's input sides, and r x r matrices of the output sides."""
    optimizer = make_ng_sgd(network, options) if isinstance(options, NgSgdOptions) else Sgd(network, options)
    divided, copied = [network.parameters, optimizer.gradient, optimizer.momentum_buffer], list[Tensor]()
    sides = optimizer.preconditioners
    for number, side in enumerate(sides):
        is_output = number >= len(sides) // 2
        divided += [side.w, side.j] if is_output else []
        copied += [value for value in vars(side).values() if isinstance(value, Tensor)]
    at = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in (*copied, *divided)}
    own = sum(at.pop(place) for place in {tensor.untyped_storage().data_ptr() for tensor in divided})
    return own, sum(at.values())


@pytest.mark.parametrize(
    "options", [SgdOptions(), SgdOptions(momentum=0.9), NgSgdOptions(), NgSgdOptions(momentum=0.9)]
)
def test_two_columns_halve_what_a_worker_holds(options: SgdOptions) -> None:
    whole = new_network(440, 2, 1024, 2048)
    held, copies = bytes_held(whole, options)
    for own, own_copies in on_columns(2, whole, lambda network: bytes_held(network, options)):
        assert (2 * own, own_copies) == (held, copies)
        assert own + own_copies <= 0.52 * (held + copies)
