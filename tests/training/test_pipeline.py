"""Networks whose layers are divided among the stages of a pipeline are trained as one worker does, to rounding. Workers are
threads, whose messages are received from the very memory that was sent."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from column_split import Float64, difference, minibatches, new_network
from distributed.threads import run_workers
from nn.test_dtensor import WORKER, by_pytorch
from torch import Tensor
from training.test_columns import WAYS, StopAfter, outcome, resumed, trainer_of
from training.toy import train_to_end

from ddnn.data.batches import Batch
from ddnn.distributed.communicator import CommStats, Communicator
from ddnn.distributed.cost import Layout, held_microbatches
from ddnn.distributed.groups import Groups
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.nn.arithmetic import BFloat16, Float32
from ddnn.nn.elementwise import Dropout
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, evaluation_workspace
from ddnn.nn.objective import CrossEntropy
from ddnn.optim.adam import AdamOptions
from ddnn.optim.columns import ColumnNgSgd
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions, make_optimizer
from ddnn.optim.schedule import MinibatchSizes
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.options import make_partition
from ddnn.training.pipeline import AccumulatingPipelineStep, make_eager_step
from ddnn.util.errors import RecipeError

STEPS, FRAMES = 20, 66  # no multiple of 4 or 5
SHAPE = (40, 3, 64, 50)
OPTIMIZERS: dict[str, SgdOptions] = {
    "sgd": SgdOptions(momentum=0.9, l2=1e-5),
    "short gradients": SgdOptions(momentum=0.5, max_gradient_norm=0.05),
    "adam": AdamOptions(l2=1e-5, epsilon=1e-3),  # with a smaller one the sign of a gradient's rounding would count
    "ng-sgd": NgSgdOptions(momentum=0.5, l2=1e-5, rank_in=10, rank_out=20, max_change_per_sample=0.0),
    "ng-sgd, max-change bites": NgSgdOptions(rank_in=10, rank_out=20, max_change_per_sample=1e-3),
}
Data = list[tuple[Tensor, Tensor]]


def optimizer_of(options: SgdOptions, network: Network) -> Sgd:
    if not isinstance(options, NgSgdOptions):
        return make_optimizer(options, network)
    within = network.partition.within_stage
    return ColumnNgSgd(network, within, options) if hasattr(within, "comm") else NgSgd(network, options)  # type: ignore[arg-type]


def trained(network: Network, options: SgdOptions, data: Data, arithmetic: Float32, **pipeline: Any) -> list[Tensor]:
    """Figures and whole parameters after each step, then the optimizer's state."""
    frames = len(data[0][0])
    optimizer = optimizer_of(options, network)
    step = make_eager_step(network, MinibatchSizes(frames, frames), arithmetic, optimizer, **pipeline)
    found = list[Tensor]()
    for x, labels in data:
        sums = step(Batch(x, labels), 1e-3)
        found += [torch.stack([each.double() for each in sums]), network.partition.whole(network.parameters).clone()]
    state = optimizer.state_dict()
    for name in sorted(state):
        if name.endswith(".w"):
            found.append(state[name].T @ state[name])
        elif not name.endswith(".t"):
            found.append(state[name])
    return found


def on_layout(columns: int, stages: int, whole: Network, work: Callable[[Network], Any]) -> list[Any]:
    def worker(comm: Communicator) -> Any:
        partition = make_partition(whole.layers, Groups.split(comm, columns, stages))
        return work(Network(whole.layers, whole.parameters.clone()).part_of(partition))

    return run_workers(columns * stages, worker)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b"])
@pytest.mark.parametrize("microbatches", [1, 4, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_trains_as_one_worker(stages: int, microbatches: int, schedule: str, name: str) -> None:
    whole = new_network(*SHAPE, dtype=torch.float64)
    data, options = minibatches(whole, STEPS, FRAMES), OPTIMIZERS[name]
    pipeline = {"schedule": schedule, "microbatches": microbatches}
    found = on_layout(1, stages, whole, lambda network: trained(network, options, data, Float64(), **pipeline))
    expected = trained(Network(whole.layers, whole.parameters.clone()), options, data, Float64())
    for values in found:
        assert len(values) == len(expected)
        assert max(map(difference, values, expected)) <= 1e-10


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b"])
def test_loss_and_gradients_are_those_of_torch_distributed_pipelining(schedule: str, tmp_path: Path) -> None:
    whole = new_network(20, 3, 33, 27, dtype=torch.float64)
    ((x, labels),) = minibatches(whole, 1, 40)

    def work(network: Network) -> tuple[Tensor, Tensor]:
        optimizer, before = Sgd(network, SgdOptions()), network.parameters.clone()
        step = make_eager_step(
            *(network, MinibatchSizes(40, 40), Float64(), optimizer), schedule=schedule, microbatches=4
        )  # type: ignore[arg-type]
        loss, *_ = step(Batch(x, labels), 1.0)
        return loss.double(), before - network.parameters

    expected = by_pytorch(WORKER.with_name("pipelining_worker.py"), tmp_path, whole, x, labels)
    expected[-1][1][-27:] *= 0.1  # the learning rate of the output layer's bias, as in nnet1
    for (loss, change), (_, gradient) in zip(on_layout(1, 2, whole, work), expected, strict=True):
        torch.testing.assert_close(loss, expected[-1][0], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(change, gradient, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("columns", "stages", "schedule"), [(2, 2, "fill-drain"), (3, 2, "1f1b"), (2, 4, "1f1b")])
def test_stages_of_columns_train_as_one_worker(columns: int, stages: int, schedule: str, name: str) -> None:
    whole = new_network(*SHAPE, dtype=torch.float64)
    data, options = minibatches(whole, STEPS, FRAMES), OPTIMIZERS[name]
    pipeline = {"schedule": schedule, "microbatches": 4}
    found = on_layout(columns, stages, whole, lambda network: trained(network, options, data, Float64(), **pipeline))
    expected = trained(Network(whole.layers, whole.parameters.clone()), options, data, Float64())
    for values in found:
        assert max(map(difference, values, expected)) <= 1e-10


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b"])
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_that_wait_for_what_they_have_sent_would_wait_for_ever(stages: int, schedule: str) -> None:
    """A message is received from where it is, and has been sent once it is received: nothing may wait for that before the end of
    the minibatch."""
    whole = new_network(*SHAPE)
    data = minibatches(whole, 3, FRAMES)

    def worker(comm: Communicator) -> int:
        network = whole.part_of(make_partition(whole.layers, Groups.split(comm, 1, stages)))
        return len(trained(network, SgdOptions(), data, Float32(), schedule=schedule, microbatches=6))

    assert run_workers(stages, worker, timeout=5.0) == [6] * stages


@pytest.mark.parametrize("options", [SgdOptions(), NgSgdOptions(rank_in=3, rank_out=3)])
def test_microbatches_that_are_held(options: SgdOptions) -> None:
    """Of `1f1b` with SGD a stage has memory for p - s of m microbatches, in one piece; else for all."""
    stages, microbatches, frames = 4, 5, 50

    def rows(network: Network, schedule: str) -> tuple[int, int, int]:
        step = make_eager_step(
            *(network, MinibatchSizes(frames, frames), Float32(), optimizer_of(options, network)),
            schedule=schedule, microbatches=microbatches,
        )  # fmt: skip
        assert step.inputs.shape == (len(step.inputs), step.workspace.x.shape[1])
        return len(step.workspace.x), len(step.inputs), int(isinstance(step, AccumulatingPipelineStep))

    whole = new_network(*SHAPE)
    found = on_layout(1, stages, whole, lambda network: rows(network, "1f1b"))
    layout = Layout(stages=stages, microbatches=microbatches)
    held = [held_microbatches("1f1b", stage, layout) for stage in range(stages)]
    assert held == [4, 3, 2, 1]
    accumulates = not isinstance(options, NgSgdOptions)
    assert [rows for rows, *_ in found] == ([10 * number for number in held] if accumulates else [frames] * stages)
    assert [kind for *_, kind in found] == [int(accumulates)] * stages
    assert found[0][1] == frames  # minibatches are read here
    assert on_layout(1, stages, whole, lambda network: rows(network, "fill-drain")) == [(frames, frames, 0)] * stages


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("arithmetic", [Float32(), BFloat16(torch.device("cpu"))])
def test_bytes_are_those_of_the_formula(columns: int, arithmetic: Float32) -> None:
    """B N D / k over each boundary, each way, and the figures of the last stage."""
    whole, frames, stages = new_network(*SHAPE), 20, 3
    ((x, labels),) = minibatches(whole, 1, frames)

    def worker(comm: Communicator) -> CommStats:
        groups = Groups.split(comm, columns, stages)
        network = whole.part_of(make_partition(whole.layers, groups))
        step = make_eager_step(network, MinibatchSizes(frames, frames), arithmetic, Sgd(network), microbatches=3)
        before = groups.stage.stats.copy()
        step(Batch(x, labels), 1e-3)
        return groups.stage.stats - before

    found = run_workers(columns * stages, worker)
    boundary = arithmetic.dtype.itemsize * frames * 64 // columns
    of_stages = [stats.bytes_posted for stats in found[::columns]]
    assert of_stages == [boundary, 2 * boundary, boundary]
    assert [stats.bytes_sent - stats.bytes_posted for stats in found] == [0] * (2 * columns) + [16] * columns


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b"])
def test_a_gradient_in_bf16_is_as_good_as_one_workers(schedule: str) -> None:
    """Also of sixteen microbatches, whose gradients are bf16 numbers, but not their sum."""
    whole, arithmetic, frames = new_network(440, 2, 128, 616), BFloat16(torch.device("cpu")), 64
    ((x, labels),) = minibatches(whole, 1, frames)

    def gradient(network: Network, computed_in: Float32, **pipeline: Any) -> Tensor:
        sizes = MinibatchSizes(frames, frames)
        step = make_eager_step(network, sizes, computed_in, Sgd(network, SgdOptions(max_gradient_norm=1e9)), **pipeline)
        step(Batch(x, labels), 1.0)
        return network.partition.whole(step.optimizer.gradient)

    def copy() -> Network:
        return Network(whole.layers, whole.parameters.clone())

    expected, unsplit = gradient(copy(), Float32()), gradient(copy(), arithmetic)
    pipeline = {"schedule": schedule, "microbatches": 16}
    found = on_layout(1, 2, whole, lambda network: gradient(network, arithmetic, **pipeline))[0]
    assert (found - expected).norm() <= 1.2 * (unsplit - expected).norm()
    if schedule == "1f1b":
        assert (found == found.bfloat16()).double().mean() < 0.5


def on(replicas: int, columns: int, stages: int, work: Callable[[Groups], Any]) -> list[Any]:
    """What `work` returns on each worker."""
    return run_workers(replicas * columns * stages, lambda comm: work(Groups.split(comm, columns, stages)))


def test_ranks_of_a_replica() -> None:
    def work(groups: Groups) -> list[list[int]]:
        of_groups = (groups.replica, groups.column, groups.stage, groups.data)
        return [group.all_gather_object(groups.world.rank) for group in of_groups]

    for rank, found in enumerate(on(2, 2, 3, work)):
        first = 6 * (rank // 6)
        pair, column = rank - rank % 2, first + rank % 2
        expected = [list(range(first, first + 6)), [pair, pair + 1], [column, column + 2, column + 4]]
        assert found == [*expected, [rank % 6, rank % 6 + 6]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("columns", "stages"), [(1, 2), (2, 2)])
def test_replicas_of_stages_train_as_single_workers(columns: int, stages: int, way: str) -> None:
    found = on(2, columns, stages, lambda groups: outcome(trainer_of(groups, way)))
    expected, figures = on(2, 1, 1, lambda groups: outcome(trainer_of(groups, way)))[0]
    bound = 2e-2 if way == "mean, 16 bits" else 1e-5
    for parameters, own_figures in found:
        assert torch.equal(parameters, found[0][0])
        assert own_figures == found[0][1]
        assert (parameters - expected).abs().max() <= bound * expected.abs().max()
        torch.testing.assert_close(torch.tensor(own_figures), torch.tensor(figures), rtol=max(bound, 1e-4), atol=0.0)


def test_layers_that_are_frozen_stay_as_they_are() -> None:
    """Numbers of frozen layers count those of the whole network."""
    whole = new_network(*SHAPE, dtype=torch.float64).with_frozen([1, 2])
    data = minibatches(whole, 5, FRAMES)
    frozen = Network(whole.layers, whole.parameters.clone(), whole.frozen)
    expected = trained(frozen, SgdOptions(momentum=0.5), data, Float64())

    def work(comm: Communicator) -> list[Tensor]:
        network = whole.part_of(make_partition(whole.layers, Groups.split(comm, 1, 2)))
        return trained(network, SgdOptions(momentum=0.5), data, Float64(), microbatches=4)

    for values in run_workers(2, work):
        assert max(map(difference, values, expected)) <= 1e-10


@pytest.mark.parametrize("way", ["average momentum", "bmuf", "gradient"])
def test_a_checkpoint_holds_whole_models(way: str, tmp_path: Path) -> None:
    """Amid an epoch: the same stages resume to the same bits, other layouts to rounding."""

    def interrupted(groups: Groups) -> None:
        with pytest.raises(TrainingInterrupted):
            train_to_end(trainer_of(groups, way, checkpoints=StopAfter(tmp_path / "x", groups, 4)))

    undisturbed = on(2, 1, 2, lambda groups: outcome(trainer_of(groups, way)))[0]
    on(2, 1, 2, interrupted)
    for columns, stages in ((1, 2), (1, 1), (2, 2), (2, 1)):
        copy = tmp_path / f"{columns} {stages}"
        shutil.copytree(tmp_path / "x", copy)
        found = on(2, columns, stages, lambda groups, c=copy: resumed(groups, c, way))  # type: ignore[misc]
        for parameters, figures in found:
            if (columns, stages) == (1, 2):
                assert torch.equal(parameters, undisturbed[0])
                assert figures == undisturbed[1][-len(figures) :]
            assert (parameters - undisturbed[0]).abs().max() <= 1e-5 * undisturbed[0].abs().max()


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("arithmetic", [Float32(), BFloat16(torch.device("cpu"))])
def test_an_evaluation_is_that_of_one_worker(arithmetic: Float32, stages: int) -> None:
    """In bf16 the last product is in float32, also where the last stage has no other."""
    whole = new_network(*SHAPE[:1], 2, *SHAPE[2:])
    ((x, labels),) = minibatches(whole, 1, 64)

    def loss_of(network: Network) -> Tensor:
        workspace = evaluation_workspace(network, 64, arithmetic)
        objective = CrossEntropy(workspace)
        if not workspace.receives:
            workspace.x.copy_(x)
        sums = objective(workspace.forward(), Batch(workspace.x, labels), workspace.derivative)
        workspace.wait()
        return network.partition.of_last_stage(torch.stack([*sums]))

    for found in on_layout(1, stages, whole, loss_of):
        torch.testing.assert_close(found, loss_of(whole), rtol=1e-6, atol=0.0)


def test_what_no_pipeline_can_be() -> None:
    def work(comm: Communicator) -> None:
        groups, layers = Groups.split(comm, 1, 3), mlp_layers(6, 1, 8, 2)
        with pytest.raises(RecipeError, match="3 found, expected at most 2: a stage holds at least one layer"):
            make_partition(layers, groups)
        with pytest.raises(RecipeError, match="draws random numbers") as caught:
            make_partition((*mlp_layers(6, 2, 8, 8), Dropout(8, 0.5), *mlp_layers(8, 0, 0, 2)), groups)
        assert caught.value.location == "parallel.stages"

    run_workers(3, work)
