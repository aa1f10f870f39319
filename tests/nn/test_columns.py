"""Networks that workers hold by columns compute what one worker computes. Workers are threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from column_split import Float64, minibatches, new_convnet, new_network
from distributed.threads import run_workers
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.distributed.communicator import CommStats, Communicator
from ddnn.nn.arithmetic import BFloat16, Float32
from ddnn.nn.columns import ColumnCrossEntropy, ColumnLink, ColumnPartition
from ddnn.nn.layout import cut
from ddnn.nn.loss import cross_entropy
from ddnn.nn.network import Network, Workspace, evaluation_workspace
from ddnn.nn.objective import CrossEntropy

PDFS, FRAMES = 50, 200


def integers(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Small ones, so that nearly all frames have ties."""
    return torch.randint(-2, 3, (FRAMES, PDFS), generator=generator).to(dtype)


def in_bf16(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return torch.randn(FRAMES, PDFS, generator=generator).bfloat16().to(dtype)


def far_apart(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    return 1e4 * torch.randn(FRAMES, PDFS, generator=generator).sign().to(dtype)


def with_nan(generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    logits = torch.randn(FRAMES, PDFS, generator=generator).to(dtype)
    logits[3, 30], logits[5, 2], logits[5, 45] = math.nan, math.nan, math.nan
    return logits


def split_loss(columns: int, logits: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Loss, number of correct frames and derivative, of each worker."""

    def work(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        start, end = cut(PDFS, columns)[comm.rank]
        own, grad = logits[:, start:end].clone(), torch.empty(FRAMES, end - start, dtype=logits.dtype)
        like = grad if grad.dtype != torch.bfloat16 else grad.float()
        return *ColumnCrossEntropy(comm, start, like, end - start, FRAMES)(own, labels, grad), grad

    return run_workers(columns, work)


@pytest.mark.parametrize("columns", range(1, 8))
@pytest.mark.parametrize("make", [integers, in_bf16, far_apart, with_nan])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_loss_of_split_outputs(columns: int, make: Callable[..., Tensor], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(columns)
    logits, labels = make(generator, dtype), torch.randint(0, PDFS, (FRAMES,), generator=generator)
    labels[:PDFS] = torch.arange(PDFS)  # one in each block, of whatever size
    expected_grad = torch.empty_like(logits)
    expected, correct = cross_entropy(logits, labels, expected_grad)
    bound = 1e-14 if dtype == torch.float64 else 1e-6
    found = split_loss(columns, logits, labels)
    for loss, num_correct, _ in found:
        assert int(num_correct) == int(correct)
        assert torch.equal(loss, found[0][0]) or bool(loss.isnan())
        assert math.isnan(loss) if make is with_nan else abs(loss - expected) <= bound * abs(expected)
    grad = torch.cat([grad for *_, grad in found], dim=1)
    finite = ~expected_grad.isnan()
    assert torch.equal(grad.isnan(), ~finite)
    assert (grad - expected_grad)[finite].abs().max() <= 4 * bound


def test_a_loss_in_bf16_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(1)
    logits, labels = 3 * torch.randn(FRAMES, PDFS, generator=generator).bfloat16(), torch.arange(FRAMES) % PDFS
    expected_grad = torch.empty(FRAMES, PDFS)
    expected, correct = cross_entropy(logits.float(), labels, expected_grad)
    found = split_loss(3, logits, labels)
    assert all(abs(loss - expected) <= 1e-6 * expected and num == correct for loss, num, _ in found)
    grad = torch.cat([grad for *_, grad in found], dim=1)
    assert ((grad.float() - expected_grad).abs() <= 2**-8 * expected_grad.abs() + 1e-7).all()


def gradient_of(network: Network, x: Tensor, labels: Tensor, arithmetic: Float32) -> tuple[Tensor, Tensor]:
    """Loss and gradient of this worker's part."""
    workspace = Workspace(network, len(x), arithmetic)
    workspace.x.copy_(x)
    loss, _ = CrossEntropy(workspace)(workspace.forward(), Batch(workspace.x, labels), workspace.derivative)
    workspace.backward()
    return loss, workspace.gradient(torch.empty_like(network.parameters))


def split_gradient(columns: int, whole: Network, x: Tensor, labels: Tensor, arithmetic: Float32) -> Tensor:
    def work(comm: Communicator) -> Tensor:
        partition = ColumnPartition(whole.layers, comm)
        return partition.whole(gradient_of(whole.part_of(partition), x, labels, arithmetic)[1])

    return run_workers(columns, work)[0]


@pytest.mark.parametrize("columns", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [new_network(40, 3, 64, 50, dtype=torch.float64), new_convnet(torch.float64)])
def test_the_gradient_is_that_of_one_worker(columns: int, whole: Network) -> None:
    ((x, labels),) = minibatches(whole, 1, 65)
    _, expected = gradient_of(whole, x, labels, Float64())
    found = split_gradient(columns, whole, x, labels, Float64())
    assert (found - expected).abs().max() <= 1e-14 * expected.abs().max()


@pytest.mark.parametrize("columns", [2, 4])
@pytest.mark.parametrize("whole", [new_network(440, 4, 512, 616), new_convnet()])
def test_a_gradient_in_bf16_is_as_good_as_one_workers(columns: int, whole: Network) -> None:
    arithmetic = BFloat16(torch.device("cpu"))
    ((x, labels),) = minibatches(whole, 1, 256)
    _, expected = gradient_of(whole, x, labels, Float32())
    _, unsplit = gradient_of(whole, x, labels, arithmetic)
    found = split_gradient(columns, whole, x, labels, arithmetic)
    assert (found - expected).norm() <= 1.2 * (unsplit - expected).norm()


def test_partial_sums_in_bf16_are_added_in_float32() -> None:
    """By rank: 1 and three times 2^-9, each of which alone would be lost in bf16."""

    def work(comm: Communicator) -> Tensor:
        link, frames = ColumnLink(comm, cut(8, 4)), 3
        derivatives = torch.zeros(frames, 2, dtype=torch.bfloat16)
        partial = torch.full((frames, 8), 1.0 if comm.rank == 0 else 2.0**-9).bfloat16()
        link.backward(partial, derivatives)
        return derivatives

    for derivatives in run_workers(4, work):
        assert (derivatives == torch.tensor(1.0 + 3 * 2.0**-9).bfloat16()).all()
        assert (derivatives > 1.0).all()


def test_frozen_layers_have_no_derivatives_to_exchange() -> None:
    whole = new_network(40, 3, 64, 50).with_frozen([0, 1])
    ((x, labels),) = minibatches(whole, 1, 16)

    def work(comm: Communicator) -> int:
        network = whole.part_of(ColumnPartition(whole.layers, comm))
        gradient_of(network, x, labels, Float32())
        return comm.stats.bytes_exchanged

    assert run_workers(2, work) == [4 * 16 * 64 // 2] * 2  # below the output layer alone


@pytest.mark.parametrize("precision", [Float32(), BFloat16(torch.device("cpu"))])
@pytest.mark.parametrize("whole", [new_network(40, 2, 64, 50), new_convnet()])
def test_an_evaluation_is_that_of_one_worker(precision: Float32, whole: Network) -> None:
    ((x, labels),) = minibatches(whole, 1, 64)

    def logits_of(network: Network) -> tuple[Tensor, Tensor]:
        workspace = evaluation_workspace(network, 64, precision)
        objective = CrossEntropy(workspace)
        workspace = workspace.of(40)
        workspace.x.copy_(x[:40])
        logits = workspace.forward()
        loss, _ = objective(logits, Batch(workspace.x, labels[:40]), workspace.derivative)
        return logits, loss

    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        return logits_of(whole.part_of(ColumnPartition(whole.layers, comm)))

    expected, expected_loss = logits_of(whole)
    found = run_workers(2, work)
    torch.testing.assert_close(torch.cat([logits for logits, _ in found], dim=1), expected, rtol=1e-2, atol=1e-2)
    for _, loss in found:
        torch.testing.assert_close(loss, expected_loss, rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("columns", [2, 3])
@pytest.mark.parametrize("arithmetic", [Float32(), BFloat16(torch.device("cpu"))])
def test_bytes_are_those_of_the_formulas(columns: int, arithmetic: Float32) -> None:
    """Received by all workers together in a minibatch: B N H (k - 1) each way, and 16 N (k - 1) of each for the loss."""
    frames, whole = 20, new_network(40, 3, 64, 50)
    ((x, labels),) = minibatches(whole, 1, frames)

    def work(comm: Communicator) -> CommStats:
        network = whole.part_of(ColumnPartition(whole.layers, comm))
        before = comm.stats.copy()
        gradient_of(network, x, labels, arithmetic)
        return comm.stats - before

    found = run_workers(columns, work)
    activations = arithmetic.dtype.itemsize * frames * 3 * 64 * (columns - 1)
    assert sum(stats.bytes_gathered for stats in found) == activations
    assert sum(stats.bytes_exchanged for stats in found) == activations
    widths = [[end - start for start, end in cut(64, columns)][comm] for comm in range(columns)]
    for stats, own in zip(found, widths, strict=True):
        sent = arithmetic.dtype.itemsize * frames * 3 * (own + 64 - own) + 16 * frames
        assert stats.bytes_sent == sent
        assert (stats.bytes_summed, stats.bytes_posted) == (0, 0)


def test_what_needs_its_own_filters_alone_gathers_nothing() -> None:
    """Pooling, scales, shifts and activations; the second convolution and the affine layers read all outputs below."""
    frames, whole = 20, new_convnet()
    ((x, labels),) = minibatches(whole, 1, frames)

    def work(comm: Communicator) -> CommStats:
        gradient_of(whole.part_of(ColumnPartition(whole.layers, comm)), x, labels, Float32())
        return comm.stats

    found, values = run_workers(2, work), frames * (5 * 13 + 3 * 11 + 35)
    assert sum(stats.bytes_gathered for stats in found) == 4 * values
    assert sum(stats.bytes_exchanged for stats in found) == 4 * values


@pytest.mark.parametrize("whole", [new_network(40, 2, 64, 50), new_convnet()])
def test_a_whole_vector_comes_back(whole: Network) -> None:
    def work(comm: Communicator) -> tuple[Tensor, Any]:
        network = whole.part_of(ColumnPartition(whole.layers, comm))
        again = network.whole()
        return again.parameters, again.layers

    for parameters, layers in run_workers(3, work):
        assert torch.equal(parameters, whole.parameters)
        assert layers == whole.layers
