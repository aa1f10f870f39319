"""No key of a recipe is lost on its way to the part that it is for: each has a value unlike its default here."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from training.toy import toy_model
from variants import make_optimizer_config, make_parallel_config, make_schedule_config

from ddnn.averaging.averager import Request
from ddnn.averaging.strategies import BlockMomentum, make_strategy
from ddnn.averaging.strategy import AveragingOptions, FrameInterval, Interval
from ddnn.distributed.communicator import SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.optim.adam import AdamOptions
from ddnn.optim.muon import MuonOptions
from ddnn.optim.natural_gradient import NaturalGradientOptions
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions, make_optimizer
from ddnn.optim.schedule import Constant, Exponential, MinibatchSizes, Newbob, Passes, Power
from ddnn.optim.sgd import SgdOptions
from ddnn.optim.shampoo import ShampooOptions
from ddnn.recipe.schema import (
    AdamConfig,
    AveragingConfig,
    BmufConfig,
    CheckpointConfig,
    ConstantConfig,
    ExponentialConfig,
    GrowingMinibatchConfig,
    LogConfig,
    MuonConfig,
    NewbobConfig,
    NgSgdConfig,
    PassesConfig,
    PowerConfig,
    Recipe,
    SgdConfig,
    ShampooConfig,
    WorkersConfig,
)
from ddnn.recipe.section import Section
from ddnn.runs.run_dir import NullRunDir
from ddnn.training import state
from ddnn.training.combination import BestEpoch, MeanOfEpochs, MovingAverage
from ddnn.training.job import Job
from ddnn.training.options import (
    averaging_options,
    estimate_memory,
    make_combination,
    make_schedule,
    minibatch_sizes,
    optimizer_options,
    with_world_size,
)
from ddnn.util.errors import RecipeError

NG_SGD = {
    "momentum": 0.5, "l2": 1e-3, "rank_in": 3, "rank_out": 2, "alpha": 3.0, "num_samples_history": 500.0,
    "update_period": 2, "max_change_per_sample": 0.01, "max_change_scope": "unscaled", "exact": True,
}  # fmt: skip
ADAM = {"momentum": 0.5, "l2": 1e-3, "beta2": 0.9, "epsilon": 0.1}
NEWBOB = {
    "initial_learning_rate": 0.1, "max_epochs": 7, "criterion": "frame-accuracy", "start_halving_impr": 0.02,
    "end_halving_impr": 0.002, "halving_factor": 0.7, "keep_lr_epochs": 3, "min_epochs": 4,
}  # fmt: skip
EXPONENTIAL = {"initial_learning_rate": 0.1, "final_learning_rate": 0.02, "epochs": 5}
CONSTANT = {"initial_learning_rate": 0.1, "epochs": 5}
PASSES = {**CONSTANT, "halving_factor": 0.5}
POWER = {**CONSTANT, "decay_epochs": 3.0, "exponent": 0.5}
COMBINATION = {"keep": "best", "average_last": 4, "moving_average_epochs": 0.5}
WORKERS = {"averaging_period": 4, "overlap": True, "comm_dtype": "bfloat16", "averaging_frames": 5}
AVERAGING = {**WORKERS, "strategy": "ring", "scale_learning_rate": False, "local_momentum": "average"}
BMUF = {
    **WORKERS, "strategy": "bmuf", "scale_learning_rate": True, "local_momentum": "keep", "block_momentum": 0.3,
    "block_learning_rate": 0.5, "nesterov": True,
}  # fmt: skip
ELASTIC = {**AVERAGING, "strategy": "elastic", "elasticity": 0.5}
ASYNC = {**AVERAGING, "strategy": "async", "local_momentum": "reset", "update_scale": 0.5}
ELSEWHERE = {
    "workers", "warmup", "warmup_minibatches", "oversubscribe_gpus", "pretrain_data", "max_restarts", "hang_timeout",
    "cpu_threads", "gpu_transport", "columns", "stages", "microbatches", "pipeline",
}  # fmt: skip
"""Keys of `parallel` that are no option of an averaging."""


@pytest.mark.parametrize(
    ("section", "given"),
    [
        (SgdConfig, {"momentum", "l2", "max_gradient_norm"}),
        (NgSgdConfig, {*NG_SGD}),
        (AdamConfig, {*ADAM}),
        (MuonConfig, {*ADAM}),
        (ShampooConfig, {*ADAM, "update_period", "max_dimension"}),
        (NewbobConfig, {*NEWBOB, *COMBINATION}),
        (ExponentialConfig, {*EXPONENTIAL, *COMBINATION}),
        (ConstantConfig, {*CONSTANT, *COMBINATION}),
        (PowerConfig, {*POWER, *COMBINATION}),
        (PassesConfig, {*PASSES, *COMBINATION}),
        (WorkersConfig, {*WORKERS, *ELSEWHERE}),
        (AveragingConfig, {*AVERAGING, *ELSEWHERE}),
        (BmufConfig, {*BMUF, *ELSEWHERE}),
        (CheckpointConfig, {"interval_minutes", "interval_minibatches", "keep_last"}),
        (LogConfig, {"tensorboard", "interval_minutes"}),
    ],
)
def test_every_key_of_a_section_is_given_here(section: type[Section], given: set[str]) -> None:
    """A new key needs a value in this file."""
    assert set(section.model_fields) - {"name"} == given


def test_options_of_optimizers() -> None:
    assert optimizer_options(make_optimizer_config(momentum=0.5, l2=1e-3, max_gradient_norm=2.0)) == SgdOptions(
        0.5, 1e-3, 2.0
    )
    options = optimizer_options(make_optimizer_config("ng-sgd", **NG_SGD))
    assert options == NgSgdOptions(0.5, 1e-3, 0.0, 3, 2, 3.0, 500.0, 2, 0.01, "unscaled", True)
    assert optimizer_options(make_optimizer_config("adam", **ADAM)) == AdamOptions(0.5, 1e-3, 0.0, 0.9, 0.1)
    assert optimizer_options(make_optimizer_config("muon", **ADAM)) == MuonOptions(0.5, 1e-3, 0.0, 0.9, 0.1)
    assert optimizer_options(make_optimizer_config("muon")) == MuonOptions()
    shampoo = make_optimizer_config("shampoo", **ADAM, update_period=3, max_dimension=5)
    assert optimizer_options(shampoo) == ShampooOptions(0.5, 1e-3, 0.0, 0.9, 0.1, 3, 5)
    optimizer = make_optimizer(options, toy_model().network)
    assert isinstance(optimizer, NgSgd) and (optimizer.momentum, optimizer.l2) == (0.5, 1e-3)
    ranks = [3] * 3 + [2] * 3
    assert [one.options for one in optimizer.preconditioners] == [
        NaturalGradientOptions(rank, alpha=3.0, num_samples_history=500.0, update_period=2) for rank in ranks
    ]


def test_options_of_schedules() -> None:
    newbob = make_schedule(make_schedule_config(**NEWBOB))
    names = {"initial_learning_rate": "initial_lr"}
    assert isinstance(newbob, Newbob)
    assert {key: getattr(newbob, names.get(key, key)) for key in NEWBOB} == NEWBOB
    exponential = make_schedule(make_schedule_config("exponential", **EXPONENTIAL))
    assert isinstance(exponential, Exponential)
    assert (exponential.initial_lr, exponential.final_lr, exponential.max_epochs) == (0.1, 0.02, 5)
    assert make_schedule(make_schedule_config("constant", **CONSTANT)) == Constant(0.1, 5)
    assert make_schedule(make_schedule_config("power", **POWER)) == Power(0.1, 5, 3.0, 0.5)
    assert make_schedule(make_schedule_config("passes", **PASSES)) == Passes(0.1, 5, 0.5)


def test_options_of_the_combination() -> None:
    network, recipe = toy_model().network, Recipe.model_construct(schedule=make_schedule_config(**COMBINATION))
    made = make_combination(recipe, network, Groups.data_parallel(SingleProcess()), range(7))
    best, last, moving = made.parts.values()
    assert isinstance(best, BestEpoch)
    assert isinstance(last, MeanOfEpochs) and last.models.maxlen == 4
    assert isinstance(moving, MovingAverage) and (moving.epochs, moving.period, len(moving.batches)) == (0.5, 10, 7)
    assert not make_combination(
        Recipe.model_construct(), network, Groups.data_parallel(SingleProcess()), range(7)
    ).parts
    plain = estimate_memory(Recipe.model_construct(), 6, 5, 1).cpu
    one_copy = plain["files"] // 3
    found = estimate_memory(recipe, 6, 5, 1).cpu["parameters"] - plain["parameters"]
    assert found == (1 + 4 + 5 + 5) * one_copy


@pytest.mark.parametrize("keys", [AVERAGING, BMUF, ELASTIC, ASYNC], ids=["averaging", "bmuf", "elastic", "async"])
def test_options_of_averaging(keys: dict[str, Any]) -> None:
    options = averaging_options(make_parallel_config(**keys), momentum=0.9)
    assert {key: getattr(options, key) for key in keys} == keys
    assert averaging_options(make_parallel_config(**keys), momentum=0.0).local_momentum == "keep"


def test_an_interval_of_frames() -> None:
    options = averaging_options(make_parallel_config(averaging_frames=2500))
    assert options.interval == FrameInterval(2500) and str(options.interval) == "2500 frames"
    assert averaging_options(make_parallel_config()).interval == Interval(10)
    assert make_parallel_config(averaging_frames=2500).period == "2500 frames"
    assert make_parallel_config(averaging_frames="epoch").period == "one epoch"
    assert make_parallel_config(averaging_frames="auto").period == "auto"
    frames = {2500: 10.0, 100: 1.0, "epoch": math.inf, "auto": 10.0, None: 10.0}
    assert {key: make_parallel_config(averaging_frames=key).averaging_minibatches(250) for key in frames} == frames
    assert make_parallel_config().period == "10 minibatches"


def test_defaults_of_bmuf() -> None:
    options = averaging_options(make_parallel_config("bmuf"), momentum=0.9)
    assert options == AveragingOptions("bmuf", local_momentum="reset", scale_learning_rate=False)


def test_options_of_block_momentum() -> None:
    made = make_strategy(averaging_options(make_parallel_config(**BMUF)), SingleProcess())
    assert isinstance(made, BlockMomentum)
    made.start(torch.zeros(2))
    theta = torch.ones(2)
    made.average(theta, 0, 1.0)  # G = 1, D = 0.5, W = 0.5, S = W + 0.3 D
    torch.testing.assert_close(theta, torch.full((2,), 0.65))
    theta = torch.ones(2)
    made.average(theta, 1, 1.0)  # G = 0.35, D = 0.15 + 0.175, W = 0.825, S = W + 0.3 D
    torch.testing.assert_close(theta, torch.full((2,), 0.825 + 0.3 * 0.325))


def test_options_of_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a minute of a clock of the test's own, or seven minibatches, a checkpoint is due; not before."""
    now = 1000.0
    monkeypatch.setattr(state, "time", SimpleNamespace(monotonic=lambda: now))
    config = CheckpointConfig(interval_minutes=1.0, interval_minibatches=7, keep_last=5)
    run, groups = NullRunDir(tmp_path), Groups.data_parallel(SingleProcess())
    job = Job(
        SimpleNamespace(checkpoint=config),
        "",
        groups,
        run,
        SimpleNamespace(signal_name=None),
        torch.device("cpu"),
    )  # type: ignore[arg-type]
    policy = job.checkpoint_policy(run, groups)
    assert policy.store.keep_last == 5
    now = 1059.9
    assert policy._request() is Request.NONE
    now = 1060.0
    assert policy._request() is Request.CHECKPOINT
    now, policy._progress.minibatch = 1000.0, 6
    assert policy._request() is Request.NONE
    policy._progress.minibatch = 7
    assert policy._request() is Request.CHECKPOINT


def test_a_minibatch_is_of_each_worker_or_of_all_together() -> None:
    recipe = Recipe.model_construct(minibatch_size=256, parallel=make_parallel_config(workers=4))
    assert minibatch_sizes(recipe) == MinibatchSizes(256, 256)
    assert minibatch_sizes(recipe.model_copy(update={"minibatch_scope": "total"})) == MinibatchSizes(64, 64)
    alone = recipe.model_copy(update={"parallel": make_parallel_config(), "minibatch_scope": "total"})
    assert minibatch_sizes(alone) == MinibatchSizes(256, 256)
    assert [with_world_size(alone, n).minibatch for n in (1, 2)] == ["256", "256 of all workers"]
    growing = recipe.model_copy(update={"minibatch_size": GrowingMinibatchConfig(start=64, end=256, epochs=3)})
    assert minibatch_sizes(growing) == MinibatchSizes(64, 256, 3)
    assert minibatch_sizes(growing.model_copy(update={"minibatch_scope": "total"})) == MinibatchSizes(16, 64, 3)
    with pytest.raises(RecipeError, match="256 found, expected a multiple of parallel"):
        with_world_size(alone, 3)  # as many as mpirun has started


def test_the_memory_of_a_growing_minibatch_is_that_of_its_largest() -> None:
    recipe = Recipe.model_construct(minibatch_size=256, optimizer=make_optimizer_config("ng-sgd"))
    growing = recipe.model_copy(update={"minibatch_size": GrowingMinibatchConfig(start=64, end=256, epochs=3)})
    assert estimate_memory(growing, 440, 616, 1) == estimate_memory(recipe, 440, 616, 1)
