"""Trainings whose replicas are split by columns are those of as many single workers, to rounding. Workers are threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import MINIBATCH, Recorder, toy_trainer, train_to_end, with_combination
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging.averager import Request
from ddnn.data.batches import Batch
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.distributed.signals import GracefulShutdown, TrainingInterrupted
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, initialize
from ddnn.nn.objective import Sums
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.training.options import make_partition
from ddnn.training.resume import rank_state
from ddnn.training.state import CheckpointMetadata, CheckpointPolicy, LoadedCheckpoint
from ddnn.training.step import check_split
from ddnn.training.trainer import Trainer
from ddnn.util.errors import DivergedError, RecipeError, UserError

Ways = dict[str, tuple[dict[str, Any], dict[str, Any]]]
WAYS: Ways = {
    "mean": ({"averaging_period": 3}, {}),
    "mean, 16 bits": ({"averaging_period": 3, "comm_dtype": "bfloat16"}, {}),
    "average momentum": ({"averaging_period": 2, "local_momentum": "average"}, {"momentum": 0.5}),
    "butterfly": ({"strategy": "butterfly", "averaging_period": 3}, {}),
    "ring": ({"strategy": "ring", "averaging_period": 3}, {"momentum": 0.5}),
    "hopping ring": ({"strategy": "hopping-ring", "averaging_period": 3}, {}),
    "bmuf": ({"strategy": "bmuf", "averaging_period": 3}, {"momentum": 0.5}),
    "elastic": ({"strategy": "elastic", "averaging_period": 3}, {"momentum": 0.5}),
    "1-bit": ({"strategy": "1-bit", "averaging_period": 3}, {"momentum": 0.5}),
    "gradient": ({"strategy": "gradient-all-reduce", "averaging_period": 3}, {"momentum": 0.5}),
    "adam": ({"averaging_period": 2, "local_momentum": "average"}, {"name": "adam", "epsilon": 1e-2}),
    "warm-up": ({"warmup": "single-worker", "warmup_minibatches": 5, "averaging_period": 3}, {}),
}


def trainer_of(groups: Groups, way: str, **more: Any) -> Trainer:
    parallel, optimizer = make_parallel_config(**WAYS[way][0]), make_optimizer_config(**WAYS[way][1])
    frames = MINIBATCH * (10 + groups.data.rank)  # of replicas unlike
    trainer = toy_trainer(groups, parallel, frames=frames, optimizer=optimizer, epochs=2, learning_rate=0.02, **more)
    return with_combination(trainer, most=2)


def outcome(trainer: Trainer) -> tuple[Tensor, list[list[float]]]:
    """The model that is delivered, whole, and the figures of training and validation."""
    rows = train_to_end(trainer)
    figures = [[row["loss"], row["frame_accuracy"], row["frames"]] for row in rows if row.get("split")]
    return trainer.whole_model().network.parameters, figures


def on(replicas: int, columns: int, work: Callable[[Groups], Any]) -> list[Any]:
    """What `work` returns on each worker."""
    return run_workers(replicas * columns, lambda comm: work(Groups.split(comm, columns)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("columns", [2, 3])
def test_replicas_of_columns_train_as_single_workers(columns: int, way: str) -> None:
    found = on(2, columns, lambda groups: outcome(trainer_of(groups, way)))
    expected, figures = on(2, 1, lambda groups: outcome(trainer_of(groups, way)))[0]
    bound = 2e-2 if way == "mean, 16 bits" else 1e-5  # a difference of a bit may be rounded to one of bf16
    for parameters, own_figures in found:
        assert torch.equal(parameters, found[0][0])
        assert own_figures == found[0][1]
        assert (parameters - expected).abs().max() <= bound * expected.abs().max()
        torch.testing.assert_close(torch.tensor(own_figures), torch.tensor(figures), rtol=max(bound, 1e-4), atol=0.0)


def test_one_replica_trains_as_one_worker() -> None:
    """And its workers learn of each other's requests once in a period."""

    def work(groups: Groups) -> tuple[Tensor, list[int]]:
        trainer, requests = trainer_of(groups, "mean"), list[int]()
        assert trainer.averager.lr_scale == 1.0
        trainer.averager.begin_epoch(7, 7 * MINIBATCH)
        trainer.averager.local_request = lambda: Request.STOP if groups.world.rank else Request.NONE
        for _ in range(7):
            assert not trainer.averager.after_minibatch(MINIBATCH)
            requests.append(int(trainer.averager.requested))
        trainer.averager.local_request = lambda: Request.NONE
        return outcome(trainer)[0], requests

    expected = on(1, 1, lambda groups: outcome(trainer_of(groups, "mean"))[0])[0]
    for parameters, requests in on(1, 2, work):
        assert (parameters - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert requests == [0, 0, 2, 0, 0, 2, 0]


class StopAfter(CheckpointPolicy):
    """Worker 1 is asked to stop by a signal at its `minibatch`-th call, one after each averaging."""

    def __init__(self, directory: Path, groups: Groups, minibatch: int | None) -> None:
        store = CheckpointStore(directory, 2, groups.world, groups)
        super().__init__(store, GracefulShutdown(), Recorder(), 1e6)
        self.minibatch, self.calls = minibatch, 0

    def _request(self) -> Request:
        self.calls += 1
        if self.comm.rank == 1 and self.calls == self.minibatch:
            self.shutdown.signal_name = "SIGUSR1"
        return super()._request()


def resumed(groups: Groups, directory: Path, way: str) -> tuple[Tensor, list[list[float]]]:
    policy = StopAfter(directory, groups, None)
    trainer, handle = trainer_of(groups, way, checkpoints=policy), policy.store.latest()
    assert handle is not None
    metadata, bitwise = CheckpointMetadata.model_validate(handle.metadata), handle.world_size == groups.data.world_size
    state = rank_state(handle, policy.store.rank, metadata.started, bitwise)
    trainer.restore(LoadedCheckpoint(metadata, handle.global_state, state, bitwise, handle.path))
    return outcome(trainer)


@pytest.mark.parametrize("way", ["average momentum", "bmuf", "elastic", "1-bit", "adam", "gradient"])
def test_a_checkpoint_holds_whole_models(way: str, tmp_path: Path) -> None:
    """Amid an epoch: the same columns resume to the same bits, others to rounding; each writes the same files."""

    def interrupted(groups: Groups, directory: Path) -> None:
        with pytest.raises(TrainingInterrupted):
            train_to_end(trainer_of(groups, way, checkpoints=StopAfter(directory, groups, 2)))

    bound = 1e-3 if way == "1-bit" else 1e-5  # other columns have other stripes, so that other residuals are quantized
    undisturbed = on(2, 2, lambda groups: outcome(trainer_of(groups, way)))[0]
    for columns in (1, 2, 3):
        on(2, columns, lambda groups, c=columns: interrupted(groups, tmp_path / str(c)))  # type: ignore[misc]
    files = [sorted(p.name for p in (tmp_path / str(columns)).glob("*/*")) for columns in (1, 2, 3)]
    assert files == [["global.safetensors", "manifest.json", "rank0000.safetensors", "rank0001.safetensors"]] * 3
    for columns in (1, 2, 3):
        copy = tmp_path / f"of 2 by {columns}"
        copy.mkdir()
        for path in (tmp_path / "2").glob("*/*"):
            (copy / path.parent.name).mkdir(exist_ok=True)
            (copy / path.parent.name / path.name).write_bytes(path.read_bytes())
        for parameters, figures in on(2, columns, lambda groups, c=copy: resumed(groups, c, way)):  # type: ignore[misc]
            if columns == 2:
                assert torch.equal(parameters, undisturbed[0])
                assert figures == undisturbed[1][-len(figures) :]
            assert (parameters - undisturbed[0]).abs().max() <= bound * undisturbed[0].abs().max()


def test_a_replica_resumes_what_two_have_trained(tmp_path: Path) -> None:
    """From the mean of their models."""

    def interrupted(groups: Groups) -> None:
        with pytest.raises(TrainingInterrupted):
            train_to_end(trainer_of(groups, "mean", checkpoints=StopAfter(tmp_path / "x", groups, 4)))

    on(2, 2, interrupted)
    found, figures = on(1, 2, lambda groups: resumed(groups, tmp_path / "x", "mean"))[1]
    assert bool(found.isfinite().all()) and figures[-1][0] < 1.6


def poison(trainer: Trainer) -> None:
    """The first minibatch leaves a NaN in this worker's part of the model."""
    step, network = trainer.step, trainer.model.network

    def poisoned(batch: Batch, lr: float) -> Sums:
        sums = step(batch, lr)
        if trainer.progress.epoch == trainer.progress.minibatch == 0:
            network.parameters[5] = math.nan
            network.parameters_changed()
        return sums

    trainer.step = poisoned


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_split_network_has_the_gradient_of_the_whole_one(precision: Precision) -> None:
    whole = Network(mlp_layers(12, 2, 33, 9))
    initialize(whole, 3)
    for columns, stages in ((3, 1), (1, 3), (2, 2)):

        def work(comm: Communicator, columns: int = columns, stages: int = stages) -> None:
            groups = Groups.split(comm, columns, stages)
            check_split(whole, make_partition(whole.layers, groups), arithmetic_of(precision))

        run_workers(columns * stages, work)


@pytest.mark.parametrize(
    ("precision", "method"),
    [
        ("float32", "all_gather_into"),
        ("float32", "all_to_all_into"),
        ("float32", "all_gather"),
        ("bf16", "all_gather_into"),
        ("bf16", "all_to_all_into"),
    ],
)
def test_messages_that_arrive_in_the_wrong_place_end_the_training(precision: Precision, method: str) -> None:
    """Blocks of two workers are swapped; or each gets its own numbers in place of the other's."""
    whole = Network(mlp_layers(12, 2, 32, 8))
    initialize(whole, 3)

    def swap(blocks: Tensor) -> None:
        blocks.copy_(blocks.clone().view(2, -1).flip(0).reshape(blocks.shape))

    def work(groups: Groups) -> None:
        right = getattr(groups.column, method)

        def wrong(block: Tensor, *rest: Any) -> Any:
            if method == "all_to_all_into":
                swap(block)
            made = right(block, *rest)
            if method == "all_gather_into":
                swap(rest[0])
            if method == "all_gather":
                made[1 - groups.column.rank] = block
            return made

        setattr(groups.column, method, wrong)
        with pytest.raises(
            UserError, match=r"differs by [\d.]+ from that of one, whose norm is [\d.]+: their messages"
        ):
            check_split(whole, make_partition(whole.layers, groups), arithmetic_of(precision))

    on(1, 2, work)


def arithmetic_of(precision: Precision) -> Float32:
    return make_arithmetic(precision, torch.device("cpu"), use_kernels=False)


def test_rows_tell_the_whole_networks_parameters() -> None:
    def counted(groups: Groups) -> set[int]:
        rows = train_to_end(trainer_of(groups, "mean"))
        return {row["num_parameters"] for row in rows if row.get("type") == "worker"}

    found = on(1, 2, counted)
    assert found[0] and found == on(1, 1, counted) * 2


def test_a_column_that_is_not_finite_leaves_its_replica_out() -> None:
    def work(groups: Groups) -> tuple[Tensor, list[int]]:
        trainer = trainer_of(groups, "mean")
        if groups.world.rank == 3:
            poison(trainer)
        parameters, _ = outcome(trainer)
        rows = [row for row in trainer.run.rows if row.get("excluded_averagings") is not None and row["epoch"] == 1]  # type: ignore[attr-defined]
        return parameters, [row["excluded_averagings"] for row in rows]

    for parameters, excluded in on(2, 2, work):
        assert bool(parameters.isfinite().all())
        assert excluded == [0, 0, 1, 1]


def test_a_single_replica_that_is_not_finite_has_diverged() -> None:
    def work(groups: Groups) -> None:
        trainer = trainer_of(groups, "mean")
        if groups.world.rank == 1:
            poison(trainer)
        with pytest.raises(DivergedError, match="the training diverged"):
            outcome(trainer)

    on(1, 2, work)


class Kept(Recorder):
    """Remembers the parameters of the models that are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.saved = list[Tensor]()

    def save_best(self, model: AcousticModel | None) -> None:
        self.saved += [model.network.parameters.clone()] if model is not None else []


def test_models_that_are_saved_are_whole() -> None:
    def work(groups: Groups) -> list[Tensor]:
        run = Kept()
        outcome(trainer_of(groups, "mean", run=run))
        return run.saved

    (expected, *_), (found, other) = on(1, 1, work), on(1, 2, work)
    assert len(found) == len(expected) == 2
    for one, another, parameters in zip(found, other, expected, strict=True):
        assert torch.equal(one, another)
        torch.testing.assert_close(one, parameters, rtol=1e-4, atol=1e-5)


def test_more_columns_than_outputs() -> None:
    def work(comm: Communicator) -> None:
        with pytest.raises(RecipeError, match="3 found, expected at most 2: layer 3 has 2 outputs") as caught:
            make_partition(mlp_layers(6, 2, 8, 2), Groups.split(comm, 3))
        assert caught.value.location == "parallel.columns"

    run_workers(3, work)
