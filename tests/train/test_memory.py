"""A training holds its memory from the first minibatch on: nothing grows, and no large block is taken per minibatch."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from ddnn.bench.step import Shape, random_setup
from ddnn.data.minibatches import shuffled_minibatches
from ddnn.model.network import Buffers, Precision
from ddnn.optim.sgd import make_optimizer
from ddnn.recipe.schema import Optimizer
from ddnn.train.loop import train_minibatch

SHAPE = Shape(2, 16, 60, 64)
STATM = Path("/proc/self/statm")


def stepper(optimizer: str, precision: Precision) -> Callable[[int], None]:
    """Trains a tiny network on so many minibatches, as the loop does."""
    setup = replace(random_setup(SHAPE, torch.device("cpu"), frames=1000), precision=precision)
    recipe = Optimizer(name=optimizer, rank_in=4, rank_out=4)
    setup = replace(setup, optimizer=make_optimizer(recipe, setup.model.network))
    buffers = Buffers(setup.model.network, SHAPE.minibatch, precision)
    rows = cycle(shuffled_minibatches(setup.train, SHAPE.minibatch, seed=1, epoch=1))

    def steps(minibatches: int) -> None:
        for one in islice(rows, minibatches):
            train_minibatch(setup, buffers, one, 1e-4)

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
