"""1-bit averaging: the quantization against a plain one, and that nothing is lost. Workers are threads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.toy import MINIBATCH, toy_trainer, train_to_end
from twins import quantized
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging.one_bit import Stripe, cut_into_stripes
from ddnn.averaging.strategies import OneBit, make_strategy
from ddnn.averaging.strategy import AveragingOptions
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups

Shapes = Sequence[Sequence[int]]
NETWORK: Shapes = [(6, 5), (6,)]
SHAPES: tuple[Shapes, ...] = (
    NETWORK,
    [(50, 60), (50,), (7, 50), (7,)],
    [(5, 6), (7,)],
    [(3,)],
    [(1, 9)],
    [(4, 2), (3, 2)],
)


def size_of(shapes: Shapes) -> int:
    return sum(map(math.prod, shapes))


def random_vector(shapes: Shapes, *seeds: int, scale: float = 1.0) -> Tensor:
    seed = sum(1000**position * number for position, number in enumerate(seeds, start=1))
    return scale * torch.randn(size_of(shapes), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def said(stripe: Stripe, vector: Tensor) -> tuple[Tensor, Tensor]:
    """What the message for a vector says, and the residual."""
    residual, message = vector.clone(), torch.full((stripe.num_bytes + 8,), 255, dtype=torch.uint8)
    stripe.encode(residual, message)
    stripe.add(message, found := torch.zeros_like(vector))
    return found, residual


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_a_message_says_the_means_of_each_unit(shapes: Shapes, workers: int, dtype: torch.dtype) -> None:
    vector = random_vector(shapes, 1).to(dtype)
    vector[0] = 0.0
    stripes = cut_into_stripes(shapes, workers)
    parts = torch.split(vector, [stripe.size for stripe in stripes])
    found, residuals = zip(*(said(stripe, part) for stripe, part in zip(stripes, parts, strict=True)), strict=True)
    torch.testing.assert_close(torch.cat(found).double(), quantized(vector.double(), shapes), rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.cat(found) + torch.cat(residuals), vector, rtol=0, atol=1e-6)


def test_units_that_are_zero_or_of_one_sign_and_values_by_themselves() -> None:
    (stripe,) = cut_into_stripes([(3, 2), (2,)], 1)
    found, residual = said(stripe, torch.tensor([0.0, 0.0, 1.0, 3.0, -1.0, -2.0, 0.3, -0.7]))
    assert found.tolist() == pytest.approx([0.0, 0.0, 2.0, 2.0, -1.5, -1.5, 0.3, -0.7])
    assert residual.tolist() == pytest.approx([0.0, 0.0, -1.0, 1.0, 0.5, -0.5, 0.0, 0.0])


def test_stripes_are_of_whole_units_and_about_equal() -> None:
    stripes = cut_into_stripes([(512, 440), (512,), (512, 512), (512,), (616, 512), (616,)], 4)
    assert sum(stripe.units for stripe in stripes) == 2 * (512 + 512 + 616)
    assert sum(stripe.size for stripe in stripes) == 441 * 512 + 513 * 512 + 513 * 616
    sizes = [stripe.num_bytes for stripe in stripes]
    assert max(sizes) - min(sizes) <= 2 * (8 + 512 / 8), "one unit at each end"
    assert all(8 * stripe.num_bytes <= stripe.size + 64 * (stripe.units + 1) for stripe in stripes)


class CountMemory(TorchDispatchMode):
    """Bytes of tensors that PyTorch's operations read and write. What `out=` and `copy_` overwrite counts as read, too: 4 % here."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = op(*args, **(kwargs or {}))
        inputs, outputs = (
            [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in ((args, kwargs), output)
        )
        memory = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        is_view = not op._schema.is_mutable and all(tensor.untyped_storage().data_ptr() in memory for tensor in outputs)
        self.count += 0 if is_view else sum(tensor.nbytes for tensor in (*inputs, *outputs))
        return output


def test_the_memory_that_coding_reads_and_writes_is_what_forecasts_assume() -> None:
    shapes = [(500, 500), (500,)]
    strategy = OneBit(AveragingOptions(strategy="1-bit"), SingleProcess(), shapes)
    strategy.start(vector := torch.randn(size_of(shapes)))
    with CountMemory() as memory:
        strategy.average(vector, 0, 256.0)
    assert memory.count / len(vector) == pytest.approx(OneBit.traffic(1).coding_bytes, rel=0.05)


STEPS = 1000


def run(comm: Communicator, steps: int) -> tuple[OneBit, Tensor, Tensor]:
    """Averagings of random changes in float64, with unlike weights; now and then the last worker's model is not finite. The strategy,
    the model, and what it would be without quantization."""
    strategy = make_strategy(AveragingOptions(strategy="1-bit"), comm, NETWORK)
    assert isinstance(strategy, OneBit)
    theta = random_vector(NETWORK, 99)
    exact = theta.clone()
    strategy.start(theta)
    for step in range(steps):
        weights = torch.tensor([16.0 * (1 + (step + rank) % 3) for rank in range(comm.world_size)])
        lost = step % 7 == 3
        weights[-1] = 0.0 if lost else weights[-1]
        changes = [random_vector(NETWORK, rank, step, scale=1 + step % 5) for rank in range(comm.world_size)]
        exact += sum(weight / weights.sum() * change for weight, change in zip(weights.double(), changes, strict=True))
        theta += changes[comm.rank]
        if lost and comm.rank == comm.world_size - 1:
            theta.fill_(math.nan)
        strategy.average(theta, step, float(weights[comm.rank]))
        assert torch.equal(theta, strategy.reference)
    return strategy, theta, exact


def test_nothing_is_lost_where_a_resume_cuts_other_stripes() -> None:
    """As with another number of columns."""

    def work(comm: Communicator) -> None:
        strategy, theta, _ = run(comm, 5)
        other = OneBit(AveragingOptions(strategy="1-bit"), comm, [(2, 1), (len(theta) - 2,)])
        other.start(theta)
        other.load_worker_state_dict(strategy.worker_state_dict())
        assert other.stripe_residual.numel() != strategy.stripe_residual.numel()
        before, after = (sum(one.worker_state_dict().values()) for one in (strategy, other))
        torch.testing.assert_close(after, before, rtol=0, atol=1e-14)

    run_workers(3, work)


def test_nothing_is_lost_over_a_thousand_steps() -> None:
    """What was applied and what is left make up all changes, to the rounding of float64; and the end of an epoch applies the rest."""

    def work(comm: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        strategy, theta, exact = run(comm, STEPS)
        left = strategy.residual.clone()
        strategy._split(left)[comm.rank].add_(strategy.stripe_residual)
        comm.all_reduce(left)
        with_rest = theta + left
        applied = theta.clone()
        theta += (change := random_vector(NETWORK, comm.rank, STEPS))
        strategy.end_epoch(theta, STEPS, 1.0, 16)
        comm.all_reduce(change)
        assert not strategy.residual.any() and not strategy.stripe_residual.any()
        return applied, with_rest, theta, exact, exact + change / comm.world_size

    workers = run_workers(3, work)
    for applied, with_rest, end, exact, exact_end in workers:
        assert torch.equal(applied, workers[0][0]) and torch.equal(end, workers[0][2])
        assert (applied - exact).abs().max() > 0.1, "something was left"
        torch.testing.assert_close(with_rest, exact, rtol=0, atol=1e-11)
        torch.testing.assert_close(end, exact_end, rtol=0, atol=1e-11)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_bytes_that_are_sent_are_those_that_are_counted(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers as wide as usual: 1/25 of float32."""
    shapes = [(512, 440), (512,), (512, 512), (512,)]

    def work(comm: Communicator) -> tuple[int, int]:
        strategy = make_strategy(AveragingOptions(strategy="1-bit"), comm, shapes)
        theta = random_vector(shapes, comm.rank).float()
        strategy.start(theta)
        sent: list[Tensor] = []
        backend = comm.backends["cpu"]
        to_all, gather = backend.all_to_all, backend.all_gather

        def all_to_all(chunks: Tensor, received: Tensor) -> None:
            sent.extend(chunk for rank, chunk in enumerate(chunks) if rank != comm.rank)
            to_all(chunks, received)

        def all_gather(tensor: Tensor, gathered: Tensor) -> None:
            sent.append(tensor)
            gather(tensor, gathered)

        before = comm.stats.bytes_sent
        with monkeypatch.context() as patch:
            patch.setattr(backend, "all_to_all", all_to_all)
            patch.setattr(backend, "all_gather", all_gather)
            strategy.average(theta + 1e-3 * random_vector(shapes, comm.rank, 2).float(), 0, 16.0)
        return comm.stats.bytes_sent - before, sum(tensor.nbytes for tensor in sent)

    for counted, seen in run_workers(workers, work):
        assert counted == seen
        assert counted - 8 == pytest.approx(size_of(shapes) / 8 + 2 * 8 * 1024, rel=0.01), "the 8 bytes of the weight"
        assert counted < 4 * size_of(shapes) / 24.5


def test_a_worker_that_is_excluded_sends_what_it_had_left() -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        strategy, theta, _ = run(comm, 3)
        before = strategy.residual.clone()
        strategy.average(theta.fill_(math.nan) if comm.rank else theta, 3, float(comm.rank == 0))
        return before, strategy.residual

    for before, after in run_workers(3, work):
        assert after.abs().max() > 0.1
        torch.testing.assert_close(after, before - quantized(before, NETWORK), rtol=0, atol=1e-6)


def test_one_worker_trains_as_without_averaging() -> None:
    def trained(strategy: str) -> Tensor:
        optimizer = make_optimizer_config(momentum=0.5)
        trainer = toy_trainer(SingleProcess(), make_parallel_config(strategy=strategy), optimizer=optimizer)
        train_to_end(trainer)
        return trainer.model.network.parameters

    assert torch.equal(trained("1-bit"), trained("all-reduce"))


def test_the_state_of_a_worker_is_its_own_and_restored() -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        groups = Groups.data_parallel(comm)
        keys = make_parallel_config(strategy="1-bit", averaging_period=1)

        def trained(*, restored: bool) -> Tensor:
            trainer = toy_trainer(groups, keys, frames=4 * MINIBATCH)
            averager, parameters = trainer.averager, trainer.model.network.parameters
            averager.begin_epoch(4, 4 * MINIBATCH)
            for minibatch in range(4):
                if restored and minibatch == 2:
                    own = {name: tensor.clone() for name, tensor in averager.state_dict().items()}
                    shared = {name: tensor.clone() for name, tensor in averager.shared_state_dict().items()}
                    averager.reset()  # as a new process
                    averager.load_state_dict(own)
                    averager.load_shared_state_dict(shared)
                generator = torch.Generator().manual_seed(10 * comm.rank + minibatch)
                parameters.add_(torch.randn(parameters.shape, generator=generator))
                averager.after_minibatch(MINIBATCH)
            return parameters.clone()

        return trained(restored=False), trained(restored=True)

    first, *others = run_workers(2, work)
    for plain, restored in (first, *others):
        assert torch.equal(plain, restored) and torch.equal(plain, first[0])
