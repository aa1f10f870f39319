"""A training holds its memory from the first minibatch on: nothing grows, and no large block is taken per minibatch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ddnn.bench.task import Shape, endless, random_task
from ddnn.nn.arithmetic import Precision, make_arithmetic
from ddnn.nn.network import Workspace
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.sgd import SgdOptions
from ddnn.training.step import EagerStep

SHAPE = Shape(2, 16, 60, 64)
STATM = Path("/proc/self/statm")


def stepper(optimizer: str, precision: Precision) -> Callable[[int], None]:
    """Trains a tiny network on so many minibatches, as the loop does."""
    task = random_task(SHAPE, torch.device("cpu"), frames=1000)
    network = task.model.network
    options = SgdOptions() if optimizer == "sgd" else NgSgdOptions(rank_in=4, rank_out=4)
    workspace = Workspace(network, SHAPE.minibatch, make_arithmetic(precision, torch.device("cpu")))
    step, batches = EagerStep(workspace, make_optimizer(options, network)), endless(task.batches(workspace))

    def steps(minibatches: int) -> None:
        for batch in islice(batches, minibatches):
            step(batch, 1e-4)

    return steps


@pytest.mark.skipif(not STATM.exists(), reason="no /proc here")
@pytest.mark.parametrize(("optimizer", "precision"), [("sgd", "float32"), ("ng-sgd", "bf16")])
def test_memory_does_not_grow(optimizer: str, precision: Precision) -> None:
    steps, page = stepper(optimizer, precision), os.sysconf("SC_PAGE_SIZE")
    steps(200)
    gc.collect()
    before = int(STATM.read_text().split()[1]) * page
    steps(1200)
    gc.collect()
    grown = int(STATM.read_text().split()[1]) * page - before
    # Had each minibatch left behind the derivative of one hidden layer: 64 x 16 x 4 x 1200 = 4.9 million bytes.
    assert grown < 4e6


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_step_takes_no_memory_the_size_of_a_layers_output(precision: Precision) -> None:
    steps = stepper("sgd", precision)
    steps(20)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        steps(10)
    events = profiled.events()
    assert events is not None
    assert any(event.name == "aten::addmm" for event in events), "the steps were not seen"
    largest = max(event.self_cpu_memory_usage for event in events)
    # Frame numbers and labels are 8 bytes a frame; the output layer's activations are 60 values a frame.
    assert largest <= 8 * SHAPE.minibatch, [(e.name, e.self_cpu_memory_usage) for e in events]
