"""`ddnn bench`: the real training step against the machine's GEMM limit for the same shapes, in one run.

The limit is the time of the step's matrix products alone: per layer x W^T, d W (not for the first layer) and d^T x, in
the same precision and on the same buffers, by the same library. Both are timed in turn, so that a machine that drifts
slows both; medians and spreads are over the rounds.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from ddnn.data.corpus import Corpus, FeaturePipeline
from ddnn.data.minibatches import frame_set, shuffled_minibatches
from ddnn.data.transform import normalising, plain_splice
from ddnn.device import choose_device
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Buffers, Network, hidden_stack, layer_views
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import Sgd, make_optimizer
from ddnn.recipe.schema import Optimizer, Schedule
from ddnn.train.averaging import no_averaging
from ddnn.train.loop import Setup, train_minibatch


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
ROUNDS = 9
WARM_UP = 12
"""Calls before timing: NG-SGD updates its Fisher matrices in each of its first 10."""


@dataclass(frozen=True)
class StepBench:
    """What one network reached.

    Attributes:
        frames_per_second: of the training step, median over the rounds.
        spread: smallest and largest of the rounds.
        gflops: floating-point operations of its matrix products per second of the whole step, in 10^9.
        gemm_gflops: the same operations per second of the matrix products alone: the limit.
        share_of_limit: median over the rounds of the one over the other, 0 to 1.
        time_over_sgd: time of a minibatch over that of plain SGD in the same round, median.
    """

    network: str
    optimizer: str
    precision: str
    minibatch: int
    frames_per_second: float
    spread: tuple[float, float]
    gflops: float
    gemm_gflops: float
    share_of_limit: float
    time_over_sgd: float


@dataclass(frozen=True)
class BenchReport:
    """All results, and the machine they are from."""

    machine: dict[str, str]
    results: tuple[StepBench, ...]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def as_text(self) -> str:
        """A table."""
        lines = [", ".join(f"{k} {v}" for k, v in self.machine.items())]
        lines.append(
            "network  optimizer  precision  minibatch   frames/s  "
            "(min .. max)        GFLOP/s  GEMM limit   share  time/SGD"
        )
        for r in self.results:
            spread = f"({r.spread[0]:.0f} .. {r.spread[1]:.0f})"
            lines.append(
                f"{r.network:8} {r.optimizer:10} {r.precision:10} {r.minibatch:9d} {r.frames_per_second:10.0f}  "
                f"{spread:18} {r.gflops:8.1f}  {r.gemm_gflops:10.1f}  {100 * r.share_of_limit:5.1f} %"
                f"  {r.time_over_sgd:8.3f}"
            )
        return "\n".join(lines)


def run_bench(
    networks: tuple[str, ...] = ("an4",), device: str = "auto", seconds: float = 20.0, threads: int = 1
) -> BenchReport:
    """Measures the named networks for about `seconds` each."""
    on = choose_device(device)
    torch.set_num_threads(threads)
    results = tuple(r for name in networks for r in bench_network(name, NETWORKS[name], on, seconds))
    machine = {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": cpu_name(),
        "device": str(on),
        "torch": torch.__version__,
        "threads": str(threads),
    }
    if on.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(on)
    return BenchReport(machine, results)


def bench_network(name: str, shape: Shape, device: torch.device, seconds: float) -> tuple[StepBench, ...]:
    """One network: rounds of the training step with each optimizer and of its matrix products, in turn."""
    setup = random_setup(shape, device)
    network = setup.model.network
    buffers = Buffers(network, shape.minibatch)
    batches = itertools.cycle(shuffled_minibatches(setup.train, shape.minibatch, seed=1, epoch=1))
    functions: list[Callable[[], object]] = [lambda: matrix_products(network, buffers, setup.optimizer.gradient)]
    for optimizer in OPTIMIZERS:
        stepping = replace(setup, optimizer=make_optimizer(Optimizer(name=optimizer), network))
        functions.append(lambda stepping=stepping: train_minibatch(stepping, buffers, next(batches), RATE))  # type: ignore[misc]
    limits, *steps = _in_turn(functions, device, seconds)
    flop = matrix_flop(network) * shape.minibatch
    results = []
    for optimizer, times in zip(OPTIMIZERS, steps, strict=True):
        speeds = [shape.minibatch / t for t in times]
        results.append(
            StepBench(
                network=name,
                optimizer=optimizer,
                precision="float32",
                minibatch=shape.minibatch,
                frames_per_second=statistics.median(speeds),
                spread=(min(speeds), max(speeds)),
                gflops=flop / statistics.median(times) / 1e9,
                gemm_gflops=flop / statistics.median(limits) / 1e9,
                share_of_limit=statistics.median(limit / t for limit, t in zip(limits, times, strict=True)),
                time_over_sgd=statistics.median(t / sgd for t, sgd in zip(times, steps[0], strict=True)),
            )
        )
    return tuple(results)


def matrix_flop(network: Network) -> int:
    """Floating-point operations per frame in the matrix products of a training step: 7.5 million for 440-4x512-616.

    Three products a layer, but two for the first: nobody needs the derivative of the input.
    """
    sizes = [layer.inputs * layer.outputs for layer in network.layers]
    return 6 * sum(sizes) - 2 * sizes[0]


def matrix_products(network: Network, buffers: Buffers, flat: torch.Tensor) -> None:
    """The matrix products of one training step, and nothing else."""
    gradients, _ = layer_views(network.layers, flat)
    for x, weight, out in zip(buffers.inputs(), network.weights, buffers.outputs, strict=True):
        torch.mm(x, weight.t(), out=out)
    for i in range(len(network.layers) - 1, 0, -1):
        torch.mm(buffers.derivatives[i], network.weights[i], out=buffers.derivatives[i - 1])
    for x, derivative, out in zip(buffers.inputs(), buffers.derivatives, gradients, strict=True):
        torch.mm(derivative.t(), x, out=out)


def _in_turn(functions: Sequence[Callable[[], object]], device: torch.device, seconds: float) -> list[list[float]]:
    """Seconds per call of each function, one of each a round, `ROUNDS` rounds in about `seconds`."""
    for function in functions:
        _timed(function, WARM_UP, device)
    slowest = max(_timed(function, 3, device) for function in functions)
    calls = max(1, int(seconds / ROUNDS / len(functions) / max(slowest, 1e-6)))
    return [
        list(times)
        for times in zip(*([_timed(f, calls, device) for f in functions] for _ in range(ROUNDS)), strict=True)
    ]


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
