"""`ddnn bench`: the real training step against the machine's GEMM limit for the same shapes, in one run.

The limit is the time of the step's matrix products alone, in the same precision, with the same library. All parts are
timed alternately, so that a change of the machine's speed affects all; medians and spreads are over the rounds. On a
GPU the step is a CUDA graph if possible, and its parts, but for `data`, are graphs of their own.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.bench.task import NETWORKS, RandomTask, endless, random_task
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic
from ddnn.nn.layers import training_flop_per_frame
from ddnn.nn.network import Workspace
from ddnn.nn.objective import CrossEntropy
from ddnn.nn.precision import choose_arithmetic
from ddnn.nn.products import matmul_out
from ddnn.optim.natural_gradient import SETTLED
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.step import CudaGraphs, EagerStep, make_step
from ddnn.util.errors import UserError
from ddnn.util.progress import frame_counter
from ddnn.util.system import choose_device, cpu_name
from ddnn.util.text import duration, render, table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepBench:
    """The result of one network, optimizer and precision; medians over the rounds.

    `shares` of the parts in the time of the step: `gemm`, matrix products; `element_wise`, forward pass, loss, backward
    pass and gradient without them, with casts; `update` of the parameters; `ng`, the additional time of an NG-SGD step;
    `data`, order, splice, normalization, labels; `other`, the rest. Parts are timed by themselves, so that the rest may
    be slightly below 0. Empty for `plain`, the loop in plain PyTorch.
    """

    network: str
    optimizer: str
    precision: Precision
    minibatch: int
    frames_per_second: float
    spread: tuple[float, float]  # smallest and largest of the rounds
    gflops: float  # operations of the matrix products per second of the whole step, in 10^9
    gemm_gflops: float  # the same per second of the products alone, in the same precision: the limit
    gemm_efficiency: float  # the first over the second, 0 to 1
    time_ratio_to_sgd: float  # time of a minibatch over that of plain SGD in the same round and precision
    speedup_over_float32: float | None  # frames/s over those in float32 in the same round; None without float32
    shares: dict[str, float]


PARTS = ("gemm", "element_wise", "update", "ng", "data", "other")


@dataclass(frozen=True)
class BenchReport:
    """All results, and the machine on which they were measured."""

    machine: dict[str, str]
    results: tuple[StepBench, ...]

    as_dict = asdict

    def speeds(self) -> list[tuple[str, int, float]]:
        """Network, optimizer and precision in words, minibatch size and frames/s of each result."""
        return [(f"{r.network} {r.optimizer} {r.precision}", r.minibatch, r.frames_per_second) for r in self.results]

    def as_text(self) -> str:
        return render("bench.txt.j2", report=self, table=table)


OPTIMIZERS: dict[Literal["sgd", "ng-sgd"], SgdOptions] = {"sgd": SgdOptions(), "ng-sgd": NgSgdOptions()}
PLAIN = "plain"  # in the place of an optimizer's name: SGD in plain PyTorch
LR = 1e-4
TINY_LR = 1e-12  # for many updates from one gradient
ROUNDS, MIN_ROUNDS = 25, 3
"""Many short rounds: the speed of a shared machine changes within seconds, and each ratio is within a round."""
WARM_UP = 12  # calls before timing, if there is time: NG-SGD updates its Fisher matrices in each of its first 10
MAX_MINIBATCH = 50_000  # of the 60,000 frames of a task

Name = tuple[Precision, str]  # what is timed: the precision, and an optimizer, PLAIN, or a part of the step
Rounds = NDArray[np.float64]  # one figure for each round


def run_bench(
    networks: tuple[str, ...],
    device: str,
    seconds: float,
    threads: int = 1,
    precisions: tuple[Precision, ...] = (),
    plain: bool = False,
    minibatches: Sequence[int] | None = None,
) -> BenchReport:
    """Measures the named networks for about `seconds` each, with each of these sizes of minibatches (its own if none is
    given). `precisions`: to measure; if none is given, float32, and bf16 if `precision: auto` would select it. `plain`:
    a loop in plain PyTorch too. UserError: a size or number of threads out of range; a network has layers for which there
    is no such loop."""
    on = choose_device(device)
    if plain and any(NETWORKS[name].convolutional for name in networks):
        hint = "measure networks with convolutions without --plain"
        raise UserError("the loop in plain PyTorch has affine layers only", location="--plain", hint=hint)
    if wrong := [size for size in minibatches or () if not 1 <= size <= MAX_MINIBATCH]:
        raise UserError(f"{wrong[0]} found, expected 1 to {MAX_MINIBATCH:,}", location="--minibatch-size")
    if threads < 1:
        raise UserError(f"{threads} found, expected at least 1", location="--threads")
    torch.set_num_threads(threads)
    results: list[StepBench] = []
    for name, size in itertools.product(networks, minibatches or [0]):
        shape = NETWORKS[name]
        task = random_task(shape._replace(minibatch=size or shape.minibatch), on)
        auto = choose_arithmetic("auto", task.model.network, task.minibatch).precision
        results += bench_network(name, task, precisions or tuple(dict.fromkeys(("float32", auto))), seconds, plain)
    machine = {**machine_facts(on), "threads": str(threads)}
    if on.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(on)
    return BenchReport(machine, tuple(results))


def machine_facts(device: torch.device) -> dict[str, str]:
    return {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "device": str(device), "torch": torch.__version__}


def bench_network(
    name: str, task: RandomTask, precisions: Sequence[Precision], seconds: float, plain: bool = False
) -> list[StepBench]:
    """One network: alternating rounds of the training step with each optimizer, of the parts of the step, and, where
    asked for, of the loop in plain PyTorch."""
    network, device, end = task.model.network, task.model.network.parameters.device, time.perf_counter() + seconds
    functions: dict[Name, Callable[[], object]] = {}
    steps: dict[Name, int] = {}
    for precision in precisions:
        arithmetic = make_arithmetic(precision, device)
        functions |= {(precision, part): function for part, function in parts_of_step(task, arithmetic).items()}
        for kind, options in OPTIMIZERS.items():
            optimizer = make_optimizer(options, network)
            functions[precision, kind], steps[precision, kind] = training_steps(task, arithmetic, optimizer)
        if plain:
            functions[precision, PLAIN] = plain_step(task, precision)
    times = interleave(functions, device, end, f"{name}, minibatch size {task.minibatch}")
    for key, number in steps.items():
        times[key] /= number
    gflop = training_flop_per_frame(network.layers) * task.minibatch / 1e9
    results = []
    for precision, loop in itertools.product(precisions, [*OPTIMIZERS, PLAIN] if plain else OPTIMIZERS):
        step = times[precision, loop]
        parts = {part: times[precision, part] for part in ("gemm", "passes", "update", "data", "sgd")}
        speeds = task.minibatch / step
        results.append(
            StepBench(
                network=name,
                optimizer=loop,
                precision=precision,
                minibatch=task.minibatch,
                frames_per_second=median(speeds),
                spread=spread(speeds),
                gflops=median(gflop / step),
                gemm_gflops=median(gflop / parts["gemm"]),
                gemm_efficiency=median(parts["gemm"] / step),
                time_ratio_to_sgd=median(step / parts["sgd"]),
                speedup_over_float32=median(times["float32", loop] / step) if "float32" in precisions else None,
                shares={} if loop == PLAIN else _shares(**parts, step=step),
            )
        )
    return results


def median(rounds: Rounds) -> float:
    return float(np.median(rounds))


def spread(rounds: Rounds) -> tuple[float, float]:
    return float(rounds.min()), float(rounds.max())


def _shares(gemm: Rounds, passes: Rounds, update: Rounds, data: Rounds, sgd: Rounds, step: Rounds) -> dict[str, float]:
    """`StepBench.shares`, from the times of the parts, of SGD's step and of the step itself."""
    parts = [gemm, passes - gemm, update, step - sgd, data]
    return {name: median(part / step) for name, part in zip(PARTS, [*parts, step - sum(parts)], strict=True)}


def training_steps(task: RandomTask, arithmetic: Float32, optimizer: Sgd) -> tuple[Callable[[], None], int]:
    """The trainer's own steps, from one update of NG-SGD's Fisher matrices to the next, and how many these are."""
    workspace = Workspace(task.model.network, task.minibatch, arithmetic)
    loader = task.batches(workspace)
    step, batches = make_step(EagerStep(workspace, optimizer), loader.sample, LR), endless(loader)
    step(next(batches), LR)
    number = settle(optimizer)

    def run() -> None:
        for batch in itertools.islice(batches, number):
            step(batch, LR)

    return run, number


def plain_step(task: RandomTask, precision: Precision) -> Callable[[], Tensor]:
    """One minibatch of SGD after another as in a plain PyTorch script, for a network of sigmoid layers: modules,
    autograd, autocast for bf16, and random frames, spliced in memory. Gives the loss."""
    layers, dataset = task.model.network.layers, task.train.dataset
    device, frames = dataset.features.device, len(dataset.features)
    modules = [(torch.nn.Linear(layer.input_dim, layer.output_dim), torch.nn.Sigmoid()) for layer in layers]
    network = torch.nn.Sequential(*itertools.chain(*modules))[:-1].to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    inputs = torch.randn(frames, layers[0].input_dim, device=device)
    labels = dataset.labels.long()

    size, number = task.minibatch, frames // task.minibatch
    minibatches = (
        rows
        for _ in itertools.count()
        for rows in torch.randperm(frames, device=device)[: number * size].view(number, size)
    )

    def step() -> Tensor:
        rows = next(minibatches)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = torch.nn.functional.cross_entropy(network(inputs[rows]), labels[rows])
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def parts_of_step(task: RandomTask, arithmetic: Float32) -> dict[str, Callable[[], object]]:
    """The parts of SGD's step, each by itself: `gemm`, `passes` (which include the products), `update` and `data`."""
    network = task.model.network
    workspace, read = (Workspace(network, task.minibatch, arithmetic) for _ in range(2))
    optimizer = Sgd(network)
    by_layer = optimizer.updates_by_layer(workspace)
    objective = CrossEntropy(workspace)
    batch = next(endless(task.batches(workspace)))
    gradients = workspace.layer_gradients or network.split(optimizer.gradient)
    batches = endless(task.batches(read))

    def passes() -> None:
        if by_layer:  # as after a step, which leaves nothing to cast
            workspace.copy_updated()
        else:
            network.parameters_changed()
        objective(workspace.forward(), batch, workspace.derivative)
        workspace.backward()
        for i in optimizer.trainable:
            optimizer.fill_gradient(i, workspace, gradients[i])

    def update() -> None:
        for i in optimizer.trainable:
            if by_layer:
                optimizer.update_layer(i, workspace, TINY_LR)
            else:
                optimizer.collect_gradient(i, workspace)
        if by_layer:
            workspace.copy_updated()
        else:
            optimizer.update(TINY_LR, task.minibatch)

    products = matrix_products(workspace)

    def gemm() -> None:
        for factors in products:
            matmul_out(*factors)

    passes()  # so that no part works on what was in the memory before
    device = workspace.x.device
    parts = {"gemm": gemm, "passes": passes, "update": update}
    return {name: as_graph(part, device) for name, part in parts.items()} | {"data": lambda: next(batches)}


def as_graph(part: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """On a GPU the same as a CUDA graph: launched one by one, small operations would take longer than in the step."""
    if device.type != "cuda":
        return part
    graphs = CudaGraphs(device)
    graphs.warm_up(part)
    graphs.capture("part", part)
    return partial(graphs.replay, "part")


Factors = tuple[Tensor, Tensor, Tensor]  # two matrices, and where their product goes


def matrix_products(workspace: Workspace) -> list[Factors]:
    """The factors and results of all matrix products of one training step, in its order, on memory of the sizes that
    the step uses. Per layer x W^T, d W (not for the first layer) and d^T x, as `Layer.gemm` has them; what a layer
    gives is what the next reads, where it has as many values."""
    arithmetic, device = workspace.arithmetic, workspace.x.device

    def noise(*shape: int, dtype: torch.dtype = arithmetic.dtype) -> Tensor:
        return torch.randn(shape, device=device).mul_(0.01).to(dtype)

    forward: list[Factors] = []
    backward: list[Factors] = []
    gradients: list[Factors] = []
    y = grad = torch.empty(0)
    for i, layer in enumerate(workspace.compute.layers):
        if layer.gemm is None:
            continue
        rows, fan_in, fan_out = len(workspace.x) * layer.gemm.rows, layer.gemm.fan_in, layer.gemm.fan_out
        x = y if y.shape == (rows, fan_in) else noise(rows, fan_in)
        below = grad if grad.shape == x.shape else torch.empty_like(x)
        weight, y, grad = noise(fan_out, fan_in), noise(rows, fan_out), noise(rows, fan_out)
        forward.append((x, weight.t(), y))
        if i:
            backward.insert(0, (grad, weight, below))
        gradients.append((grad.t(), x, noise(fan_out, fan_in, dtype=arithmetic.gradient_dtype)))
    return [*forward, *backward, *gradients]


def settle(optimizer: Sgd) -> int:
    """Takes an optimizer that has made a step to where most of a training is. Returns after how many minibatches its
    steps recur, with an update of the Fisher matrices: 1 for those without."""
    for preconditioner in optimizer.preconditioners:
        preconditioner.t = SETTLED
    return max((each.period_at(SETTLED) for each in optimizer.preconditioners), default=1)


def interleave(
    functions: Mapping[Name, Callable[[], object]], device: torch.device, end: float, title: str
) -> dict[Name, Rounds]:
    """Seconds per call of every function, in each of at most `ROUNDS` rounds, up to the time `end`, which `MIN_ROUNDS`
    may exceed. Every function gets as much of a round."""
    share = (end - time.perf_counter()) / (ROUNDS + 2) / len(functions)
    calls: dict[Name, int] = {}
    round_seconds = 0.0
    for name, function in functions.items():
        seconds = seconds_per_call(function, 1, device)
        if WARM_UP * seconds < share:
            seconds = seconds_per_call(function, WARM_UP, device)
        calls[name] = max(1, int(share / max(seconds, 1e-6)))
        round_seconds += seconds * (calls[name] + (calls[name] > 1))
    times: dict[Name, list[float]] = {name: [] for name in functions}
    for number in rounds(title, round_seconds, end - time.perf_counter()):
        if number >= MIN_ROUNDS and time.perf_counter() > end:
            break
        for name, function in functions.items():
            if calls[name] > 1:
                function()  # the caches still hold the data of the function before
            times[name].append(seconds_per_call(function, calls[name], device))
    return {name: np.array(seconds) for name, seconds in times.items()}


def rounds(title: str, seconds: float, available: float) -> Iterator[int]:
    """As many rounds of so many seconds as there is time for, under a bar; the log says how long they will take."""
    number = max(MIN_ROUNDS, min(ROUNDS, int(available / max(seconds, 1e-6))))
    more = f", more than --seconds: {MIN_ROUNDS} rounds are needed" if number * seconds > available else ""
    log.info("%s: %d rounds, about %s%s", title, number, duration(number * seconds), more)
    with frame_counter(title, number, unit="rounds") as advance:
        for done in range(number):
            yield done
            advance(1)


def seconds_per_call(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """How long so many calls take, work on a GPU included, over their number."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    start = now()
    for _ in range(calls):
        function()
    return (now() - start) / calls
