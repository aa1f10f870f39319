"""`ddnn bench`: the real training step against the machine's GEMM limit for the same shapes, in one run.

The limit is the time of the step's matrix products alone: per layer x W^T, d W (not for the first layer) and d^T x, in
the same precision and on the same buffers, by the same library. Both are timed in turn, so that a machine that drifts
slows both, and so are the other parts of a step; medians and spreads are over the rounds.

On a GPU the step is what training runs, a CUDA graph where it can be one. The parts are launched one operation at a
time: for a small network they take longer alone than in the graph, and the rest of the shares goes below 0.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from ddnn.bench.results import PARTS, BenchReport, StepBench
from ddnn.data.corpus import Corpus, FeaturePipeline
from ddnn.data.minibatches import frame_set, shuffled_minibatches
from ddnn.data.transform import gather, normalising, plain_splice
from ddnn.device import choose_device
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.loss import cross_entropy_in_place
from ddnn.model.network import (
    Buffers,
    Network,
    Precision,
    backward,
    forward,
    gradient_by_layer,
    hidden_stack,
    layer_views,
)
from ddnn.model.precision import choose_precision, products_flop
from ddnn.model.product import product
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import Sgd, make_optimizer
from ddnn.recipe.schema import Optimizer, Schedule
from ddnn.train.averaging import no_averaging
from ddnn.train.loop import Setup, fastest_step
from ddnn.train.step import Feed


@dataclass(frozen=True)
class Shape:
    """A network and minibatch to measure."""

    hidden_layers: int
    hidden_units: int
    pdfs: int
    minibatch: int


NETWORKS = {
    "an4": Shape(4, 512, 616, 256),
    "swbd": Shape(6, 2048, 8806, 1024),
}
DIM, SPLICE = 40, 5
OPTIMIZERS: tuple[Literal["sgd", "ng-sgd"], ...] = ("sgd", "ng-sgd")
RATE = 1e-4
LITTLE = 1e-12
"""A rate for updates over and over from one gradient."""
ROUNDS, FEWEST_ROUNDS = 25, 3
"""Many short ones: on a shared machine its speed changes within seconds, and a ratio is of one round."""
WARM_UP = 12
"""Calls before timing: NG-SGD updates its Fisher matrices in each of its first 10."""


def run_bench(
    networks: tuple[str, ...] = ("an4",),
    device: str = "auto",
    seconds: float = 20.0,
    threads: int = 1,
    precisions: tuple[Precision, ...] = (),
) -> BenchReport:
    """Measures the named networks for about `seconds` each.

    Args:
        precisions: to measure; if none is given, float32, and bf16 where `precision: auto` would take it.
    """
    on = choose_device(device)
    torch.set_num_threads(threads)
    results: list[StepBench] = []
    for name in networks:
        setup = random_setup(NETWORKS[name], on)
        wanted = precisions or _worthwhile(setup)
        results += bench_network(name, setup, wanted, seconds)
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "device": str(on),
        "torch": torch.__version__,
        "threads": str(threads),
    }
    if on.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(on)
    return BenchReport(machine, tuple(results))


def _worthwhile(setup: Setup) -> tuple[Precision, ...]:
    chosen = choose_precision("auto", setup.model.network, setup.minibatch)
    return ("float32",) if chosen == "float32" else ("float32", chosen)


def bench_network(name: str, setup: Setup, precisions: Sequence[Precision], seconds: float) -> list[StepBench]:
    """One network: rounds of the training step with each optimizer, and of the step's parts, in turn."""
    network, device = setup.model.network, setup.model.network.parameters.device
    functions: dict[tuple[Precision, str], Callable[[], object]] = {}
    for precision in precisions:
        low = replace(setup, precision=precision)
        functions |= {(precision, part): function for part, function in parts_of_step(low).items()}
        for optimizer in OPTIMIZERS:
            made = make_optimizer(Optimizer(name=optimizer), network)
            functions[precision, optimizer] = training_step(replace(low, optimizer=made))
    times = dict(zip(functions, _in_turn(list(functions.values()), device, seconds), strict=True))
    results = []
    for precision, optimizer in itertools.product(precisions, OPTIMIZERS):
        step, sgd, limit = (times[precision, what] for what in (optimizer, "sgd", "gemm"))
        speeds, flop = [setup.minibatch / t for t in step], products_flop(network) * setup.minibatch
        results.append(
            StepBench(
                network=name,
                optimizer=optimizer,
                precision=precision,
                minibatch=setup.minibatch,
                frames_per_second=statistics.median(speeds),
                spread=(min(speeds), max(speeds)),
                gflops=flop / statistics.median(step) / 1e9,
                gemm_gflops=flop / statistics.median(limit) / 1e9,
                share_of_limit=_ratio(limit, step),
                time_over_sgd=_ratio(step, sgd),
                over_float32=_ratio(times["float32", optimizer], step) if "float32" in precisions else None,
                shares=_shares(
                    {what: times[precision, what] for what in ("gemm", "passes", "update", "data")}, sgd, step
                ),
            )
        )
    return results


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    """Median over the rounds."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _shares(parts: dict[str, list[float]], sgd: list[float], step: list[float]) -> dict[str, float]:
    """`StepBench.shares`, from the seconds of the parts, of SGD's step and of the step, each by rounds."""
    rounds = []
    for gemm, passes, update, data, plain, whole in zip(*parts.values(), sgd, step, strict=True):
        known = [gemm, passes - gemm, update, whole - plain, data]
        rounds.append([part / whole for part in (*known, whole - sum(known))])
    return dict(zip(PARTS, map(statistics.median, zip(*rounds, strict=True)), strict=True))


def training_step(setup: Setup) -> Callable[[], object]:
    """The trainer's own step, on one minibatch after another."""
    buffers = Buffers(setup.model.network, setup.minibatch, setup.precision)
    feed = Feed(setup.train, setup.model.transform, setup.minibatch, buffers.x.device)
    inputs = feed.over(itertools.cycle(shuffled_minibatches(setup.train, setup.minibatch, seed=1, epoch=1)))
    step = fastest_step(setup, buffers, feed)
    return lambda: step(next(inputs), RATE)


def parts_of_step(setup: Setup) -> dict[str, Callable[[], object]]:
    """The parts of SGD's step, each by itself: `gemm`, `passes` (which hold the products), `update` and `data`."""
    network, corpus = setup.model.network, setup.train.corpus
    buffers, read = (Buffers(network, setup.minibatch, setup.precision) for _ in range(2))
    optimizer = Sgd(network)
    batches = itertools.cycle(shuffled_minibatches(setup.train, setup.minibatch, seed=1, epoch=1))
    rows = next(batches)
    gather(corpus, setup.model.transform, rows, buffers.x)
    labels = corpus.labels[rows].long()
    made = optimizer.gradient if buffers.low_gradient is None else buffers.low_gradient
    places = buffers.scratch or list(zip(*layer_views(network.layers, made), strict=True))

    def passes() -> None:
        if buffers.kernels is not None:  # as after a step, which leaves nothing to cast
            buffers.descended(network)
        forward(network, buffers)
        cross_entropy_in_place(buffers, labels)
        backward(network, buffers)
        for _ in gradient_by_layer(buffers, places):
            pass

    def update() -> None:
        if buffers.kernels is not None:
            for i in range(len(network.layers)):
                optimizer.apply_to_layer(i, network, buffers, LITTLE)
            return
        if made is not optimizer.gradient:
            optimizer.gradient.copy_(made)
        optimizer.apply(network, LITTLE, setup.minibatch)

    def data() -> None:
        rows = next(batches)
        gather(corpus, setup.model.transform, rows, read.x)
        corpus.labels[rows].long()

    passes()  # so that no part works on what was in the memory before
    return {
        "gemm": lambda: matrix_products(network, buffers, [weight for weight, _ in places]),
        "passes": passes,
        "update": update,
        "data": data,
    }


def matrix_products(network: Network, buffers: Buffers, gradients: Sequence[torch.Tensor]) -> None:
    """The matrix products of one training step, and nothing else.

    Args:
        gradients: where those of the weights' gradients go.
    """
    factors = network if buffers.low is None else buffers.low
    for x, weight, out in zip(buffers.inputs(), factors.weights, buffers.padded_outputs, strict=True):
        torch.mm(x, weight.t(), out=out)
    for i in range(len(network.layers) - 1, 0, -1):
        torch.mm(buffers.padded_derivatives[i], factors.weights[i], out=buffers.padded_derivatives[i - 1])
    for x, derivative, out in zip(buffers.inputs(), buffers.derivatives, gradients, strict=True):
        product(derivative.t(), x, out=out)


def _in_turn(functions: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> list[list[float]]:
    """Seconds per call of each function, all of them in every one of `ROUNDS` rounds, in about `seconds`.

    Every function gets as much of a round. Where a round takes too long for that, there are fewer.
    """
    for function in functions:
        _timed(function, WARM_UP, device)
    share = seconds / ROUNDS / len(functions)
    calls = [max(1, int(share / max(_timed(function, 3, device), 1e-6))) for function in functions]
    rounds: list[list[float]] = []
    started = time.perf_counter()
    while len(rounds) < FEWEST_ROUNDS or (len(rounds) < ROUNDS and time.perf_counter() - started < 2 * seconds):
        rounds.append([])
        for function, n in zip(functions, calls, strict=True):
            function()  # what the function before has left in the caches is not this one's time
            rounds[-1].append(_timed(function, n, device))
    return [list(times) for times in zip(*rounds, strict=True)]


def _timed(function: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / calls


def random_setup(shape: Shape, device: torch.device, frames: int = 60_000) -> Setup:
    """The trainer on random frames: speed does not depend on what they say."""
    generator = torch.Generator().manual_seed(1)
    store = torch.randn(frames, DIM, generator=generator)
    labels = torch.randint(0, shape.pdfs, (frames,), generator=generator, dtype=torch.int32)
    spoken = frames - 2 * SPLICE
    corpus = Corpus(store, labels, ("random",), ("random",), np.array([SPLICE]), np.array([spoken]), SPLICE)
    transform = normalising(plain_splice(DIM, SPLICE), corpus, [0])
    network = Network(
        hidden_stack(transform.output_dim, shape.hidden_layers, shape.hidden_units, shape.pdfs, "sigmoid")
    )
    initialise_randomly(network, 1)
    model = AcousticModel(FeaturePipeline(), transform, network).to(device)
    train = frame_set(corpus.to(device), [0])
    optimizer = Sgd(model.network)
    alone = no_averaging(model.network.parameters, optimizer, shape.minibatch)
    return Setup(model, optimizer, make_schedule(Schedule()), train, train, shape.minibatch, 1, alone)


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            return next(
                (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
            )
    except OSError:
        return platform.machine()
