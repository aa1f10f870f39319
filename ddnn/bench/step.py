"""`ddnn bench`: the real training step against the machine's GEMM limit for the same shapes, in one run.

The limit is the time of the step's matrix products alone, in the same precision, with the same library. All parts are
timed alternately, so that a change of the machine's speed affects all; medians and spreads are over the rounds. On a
GPU the step is a CUDA graph if possible, but its parts are launched one operation at a time: for a small network they
take longer than in the graph, and the remaining share is negative.

`--workers N` runs the trainer's own steps in N processes. In each round rank 0 trains alone while the others wait, then all
train at the same time, each by itself, then all train and average. The efficiency is the third speed over the second:
what averaging costs, whatever the workers share of the machine. The speed-up is the third over the first. Both are
medians of the ratio within a round.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from ddnn.averaging.averager import Averager, make_averager
from ddnn.data.batches import Batch, BatchLoader, ShuffledSampler, make_batch_loader
from ddnn.data.dataset import AcousticDataset, FrameSubset, estimate_normalization, splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.launcher import run_distributed
from ddnn.distributed.transport import open_transport
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.arithmetic import Float32, Precision, make_arithmetic, matmul_out
from ddnn.nn.convolution import Convolution, MaxPooling
from ddnn.nn.elementwise import Activation, Scale, Shift
from ddnn.nn.layer import Layer
from ddnn.nn.layers import mlp_layers, training_flop_per_frame
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.precision import choose_arithmetic
from ddnn.optim.natural_gradient import SETTLED
from ddnn.optim.ng_sgd import NgSgd, NgSgdOptions, make_optimizer
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.recipe.schema import AveragingConfig, BmufConfig, ParallelConfig
from ddnn.training.options import averaging_options
from ddnn.training.step import EagerStep, make_step
from ddnn.training.trainer import worker_row
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def speeds(self) -> list[tuple[str, int, float]]:
        """Network, optimizer and precision in words, minibatch size and frames/s of each result."""
        named = [(f"{r.network} {r.optimizer} {r.precision}", r) for r in self.results]
        return [(name, r.minibatch, r.frames_per_second) for name, r in named]

    def as_text(self) -> str:
        names = ["network", "optimizer", "precision", "size"]
        of_speeds = [*names, "frames/s", "min .. max", "GFLOP/s", "GEMM limit", "of limit", "time/SGD", "x float32"]
        of_shares = [*names, *(part.replace("_", "-") for part in PARTS)]
        speeds, shares = [], []
        for r in self.results:
            row = [r.network, r.optimizer, r.precision, str(r.minibatch)]
            speed = [f"{r.frames_per_second:.0f}", "{:.0f} .. {:.0f}".format(*r.spread)]
            speed += [f"{r.gflops:.1f}", f"{r.gemm_gflops:.1f}", f"{100 * r.gemm_efficiency:.1f} %"]
            ratio = "-" if r.speedup_over_float32 is None else f"{r.speedup_over_float32:.3f}"
            speeds.append([*row, *speed, f"{r.time_ratio_to_sgd:.3f}", ratio])
            if r.shares:
                shares.append([*row, *(f"{max(0.0, 100 * r.shares[part]):.1f}" for part in PARTS)])
        tables = {"speeds": table(speeds, of_speeds, "lllr"), "shares": table(shares, of_shares, "lllr")}
        return render("bench.txt.j2", report=self, **tables)


@dataclass(frozen=True)
class RandomTask:
    """A network to train, and random frames to train it on: the speed does not depend on their values."""

    model: AcousticModel
    train: FrameSubset
    minibatch: int

    def batches(self, workspace: Workspace) -> BatchLoader:
        """The minibatches of training, in `workspace.x`."""
        sampler = ShuffledSampler(self.train, self.minibatch, seed=1)
        kernel = workspace.arithmetic.gather_kernel
        return make_batch_loader(self.train, self.model.transform, sampler, out=workspace.x, gather_kernel=kernel)


class Shape(NamedTuple):
    """A network and minibatch to measure."""

    hidden_layers: int
    hidden_units: int
    pdfs: int
    minibatch: int
    convolutional: bool = False  # whether the hidden layers are on top of two convolutions

    @property
    def dim(self) -> int:
        """Of a frame: for convolutions filter banks with their deltas, of two orders."""
        return 3 * DIM if self.convolutional else DIM

    def layers(self) -> tuple[Layer, ...]:
        """With convolutions as in Kaldi's make_cnn_proto.py, but that the second runs along frequency."""
        dim, below = (1 + 2 * SPLICE) * self.dim, tuple[Layer, ...]()
        if self.convolutional:
            below = (
                *(Convolution(dim, 8, 1, DIM, 128), MaxPooling(4224, 3, 3, 128)),
                *(Scale(1408), Shift(1408), Activation(1408), Convolution(1408, 4 * 128, 128, 1408, 256)),
                *(Scale(2048), Shift(2048), Activation(2048)),
            )
            dim = below[-1].output_dim
        return (*below, *mlp_layers(dim, self.hidden_layers, self.hidden_units, self.pdfs))


NETWORKS = {
    "an4": Shape(4, 512, 616, 256),
    "swbd": Shape(6, 2048, 8806, 1024),
    "cnn": Shape(2, 512, 2000, 256, convolutional=True),
}
DIM, SPLICE = 40, 5
OPTIMIZERS: dict[Literal["sgd", "ng-sgd"], SgdOptions] = {"sgd": SgdOptions(), "ng-sgd": NgSgdOptions()}
PLAIN = "plain"  # in the place of an optimizer's name: SGD in plain PyTorch
LR = 1e-4
TINY_LR = 1e-12  # for many updates from one gradient
ROUNDS, FEWEST_ROUNDS = 25, 3
"""Many short rounds: the speed of a shared machine changes within seconds, and each ratio is within a round."""
Name = tuple[Precision, str]  # of what is timed: in which precision, and what
WARM_UP = 12  # calls before timing, if there is time: NG-SGD updates its Fisher matrices in each of its first 10
LARGEST = 50_000  # minibatch, of the 60,000 frames of a task


def run_bench(
    networks: tuple[str, ...],
    device: str,
    seconds: float,
    threads: int = 1,
    precisions: tuple[Precision, ...] = (),
    plain: bool = False,
    minibatches: Sequence[int] = (),
) -> BenchReport:
    """Measures the named networks for about `seconds` each, with each of these sizes of minibatches (its own if none is
    given). `precisions`: to measure; if none is given, float32, and bf16 if `precision: auto` would select it. `plain`:
    a loop in plain PyTorch too. UserError: a size out of range; a network has layers for which there is no such loop."""
    on = choose_device(device)
    if plain and any(NETWORKS[name].convolutional for name in networks):
        hint = "measure networks with convolutions without --plain"
        raise UserError("the loop in plain PyTorch has affine layers only", location="--plain", hint=hint)
    if wrong := [size for size in minibatches if not 1 <= size <= LARGEST]:
        raise UserError(f"{wrong[0]} found, expected 1 to {LARGEST:,}", location="--minibatch-size")
    torch.set_num_threads(threads)
    results: list[StepBench] = []
    shapes = [(name, NETWORKS[name], size) for name, size in itertools.product(networks, minibatches or [0])]
    for name, shape, size in shapes:
        task, of = random_task(shape._replace(minibatch=size or shape.minibatch), on), precisions
        if not of:
            chosen = choose_arithmetic("auto", task.model.network, task.minibatch).precision
            of = tuple(dict.fromkeys(("float32", chosen)))
        results += bench_network(name, task, of, seconds, plain)
    gpu = {"gpu": torch.cuda.get_device_name(on)} if on.type == "cuda" else {}
    return BenchReport({**machine_facts(on), "threads": str(threads), **gpu}, tuple(results))


def machine_facts(device: torch.device) -> dict[str, str]:
    return {"date": time.strftime("%Y-%m-%d"), "cpu": cpu_name(), "device": str(device), "torch": torch.__version__}


def bench_network(
    name: str, task: RandomTask, precisions: Sequence[Precision], seconds: float, plain: bool = False
) -> list[StepBench]:
    """One network: alternating rounds of the training step with each optimizer, of the parts of the step, and, where
    asked for, of the loop in plain PyTorch."""
    network, device, end = task.model.network, task.model.network.parameters.device, time.perf_counter() + seconds
    functions: dict[Name, Callable[[], object]] = {}
    units: dict[Name, int] = {}
    for precision in precisions:
        arithmetic = make_arithmetic(precision, device)
        functions |= {(precision, part): function for part, function in parts_of_step(task, arithmetic).items()}
        for of, options in OPTIMIZERS.items():
            optimizer = make_optimizer(options, network)
            functions[precision, of] = training_step(task, arithmetic, optimizer)
            if optimizer.preconditioners:
                _warm_up(functions[precision, of], seconds / ROUNDS, device)
                units[precision, of] = settle(optimizer)
        if plain:
            functions[precision, PLAIN] = plain_step(task, precision)
    title = f"{name}, minibatch size {task.minibatch}"
    times = dict(zip(functions, _in_turn(functions, units, device, end, title), strict=True))
    flop, results = training_flop_per_frame(network.layers) * task.minibatch, []
    for precision, loop in itertools.product(precisions, [*OPTIMIZERS, *[PLAIN] * plain]):
        step, sgd, gemm = (times[precision, part] for part in (loop, "sgd", "gemm"))
        speeds = [task.minibatch / t for t in step]
        parts = {part: times[precision, part] for part in ("gemm", "passes", "update", "data")}
        results.append(
            StepBench(
                network=name,
                optimizer=loop,
                precision=precision,
                minibatch=task.minibatch,
                frames_per_second=statistics.median(speeds),
                spread=(min(speeds), max(speeds)),
                gflops=flop / statistics.median(step) / 1e9,
                gemm_gflops=flop / statistics.median(gemm) / 1e9,
                gemm_efficiency=_ratio(gemm, step),
                time_ratio_to_sgd=_ratio(step, sgd),
                speedup_over_float32=_ratio(times["float32", loop], step) if "float32" in precisions else None,
                shares={} if loop == PLAIN else _shares(parts, sgd, step),
            )
        )
    return results


def _ratio(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def _shares(parts: dict[str, list[float]], sgd: list[float], step: list[float]) -> dict[str, float]:
    """`StepBench.shares`, from the seconds of the parts, of SGD's step and of the step, each by rounds."""
    rounds = []
    for gemm, passes, update, data, plain, whole in zip(*parts.values(), sgd, step, strict=True):
        known = [gemm, passes - gemm, update, whole - plain, data]
        rounds.append([part / whole for part in (*known, whole - sum(known))])
    return dict(zip(PARTS, map(statistics.median, zip(*rounds, strict=True)), strict=True))


def training_step(task: RandomTask, arithmetic: Float32, optimizer: Sgd) -> Callable[[], object]:
    """The trainer's own step, on one minibatch after another."""
    workspace = Workspace(task.model.network, task.minibatch, arithmetic)
    loader = task.batches(workspace)
    step = make_step(EagerStep(workspace, optimizer), loader.sample, LR)
    batches = endless(loader)
    return lambda: step(next(batches), LR)


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

    def orders() -> Iterator[Tensor]:
        while True:
            whole = torch.randperm(frames, device=device)[: frames // task.minibatch * task.minibatch]
            yield from whole.view(-1, task.minibatch)

    order = orders()

    def step() -> Tensor:
        chosen = next(order)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss = torch.nn.functional.cross_entropy(network(inputs[chosen]), labels[chosen])
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.detach()

    return step


def endless(loader: BatchLoader) -> Iterator[Batch]:
    for epoch in itertools.count(1):
        yield from loader.epoch(epoch)


def parts_of_step(task: RandomTask, arithmetic: Float32) -> dict[str, Callable[[], object]]:
    """The parts of SGD's step, each by itself: `gemm`, `passes` (which include the products), `update` and `data`."""
    network = task.model.network
    workspace, read = (Workspace(network, task.minibatch, arithmetic) for _ in range(2))
    optimizer = Sgd(network)
    by_layer = optimizer.updates_by_layer(workspace)
    labels = next(endless(task.batches(workspace))).labels
    gradients = workspace.layer_gradients or network.split(optimizer.gradient)
    batches = endless(task.batches(read))

    def passes() -> None:
        if by_layer:  # as after a step, which leaves nothing to cast
            workspace.copy_updated()
        else:
            network.parameters_changed()
        workspace.forward()
        workspace.cross_entropy(labels)
        workspace.backward()
        for _ in optimizer.fill_gradient(workspace, TINY_LR, gradients):
            pass

    def update() -> None:
        for i in range(len(network.layers)):
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
    return {"gemm": gemm, "passes": passes, "update": update, "data": lambda: next(batches)}


Factors = tuple[Tensor, Tensor, Tensor]  # two matrices, and where their product goes


def matrix_products(workspace: Workspace) -> list[Factors]:
    """The factors and results of all matrix products of one training step, in its order, on memory of the sizes that
    the step uses. Per layer x W^T, d W (not for the first layer) and d^T x, as `Layer.gemm` has them; what a layer
    gives is what the next reads, where it has as many values."""
    a, frames, device = workspace.arithmetic, len(workspace.x), workspace.x.device

    def noise(*shape: int, dtype: torch.dtype = a.dtype) -> Tensor:
        return torch.randn(shape, device=device).mul_(0.01).to(dtype)

    forward: list[Factors] = []
    backward: list[Factors] = []
    gradients: list[Factors] = []
    y, grad = torch.empty(0), torch.empty(0)
    for i, layer in enumerate(workspace.compute.layers):
        if layer.gemm is None:
            continue
        rows, fan_in, fan_out = frames * layer.gemm.rows, layer.gemm.fan_in, layer.gemm.fan_out
        x = y if y.shape == (rows, fan_in) else noise(rows, fan_in)
        below = grad if grad.shape == x.shape else torch.empty_like(x)
        weight, y, grad = noise(fan_out, fan_in), noise(rows, fan_out), noise(rows, fan_out)
        forward.append((x, weight.t(), y))
        if i:
            backward.insert(0, (grad, weight, below))
        gradients.append((grad.t(), x, noise(fan_out, fan_in, dtype=a.gradient_dtype)))
    return [*forward, *backward, *gradients]


def settle(optimizer: Sgd) -> int:
    """Takes an optimizer that has made a step to where most of a training is. Returns after how many minibatches its
    steps recur, with an update of the Fisher matrices: 1 for those without."""
    for one in optimizer.preconditioners:
        one.t = SETTLED
    return max((one.period_at(SETTLED) for one in optimizer.preconditioners), default=1)


def _in_turn(
    named: Mapping[Name, Callable[[], object]], units: Mapping[Name, int], device: torch.device, end: float, title: str
) -> list[list[float]]:
    """Seconds per call of each function, all of them in every one of at most `ROUNDS` rounds, up to the time `end`, which
    `FEWEST_ROUNDS` may exceed. Every function gets as much of a round, in multiples of its unit of calls, if any."""
    functions = list(named.values())
    share = (end - time.perf_counter()) / (ROUNDS + 2) / len(functions)
    expected = [_warm_up(function, share, device) for function in functions]
    of_unit = zip(expected, (units.get(name, 1) for name in named), strict=True)
    calls = [-(-max(1, int(share / max(took, 1e-6))) // unit) * unit for took, unit in of_unit]
    of_round = sum(took * (n + (n > 1)) for took, n in zip(expected, calls, strict=True))
    rounds: list[list[float]] = []
    for _ in _rounds(title, of_round, end - time.perf_counter()):
        if len(rounds) >= FEWEST_ROUNDS and time.perf_counter() > end:
            break
        rounds.append([])
        for function, n in zip(functions, calls, strict=True):
            if n > 1:
                function()  # what the function before has left in the caches is not this one's time
            rounds[-1].append(seconds_per_call(function, n, device))
    return [list(times) for times in zip(*rounds, strict=True)]


def _warm_up(function: Callable[[], object], seconds: float, device: torch.device) -> float:
    """Calls it once, and up to `WARM_UP` times more within these seconds. Returns what the last calls took."""
    started = time.perf_counter()
    took, calls = seconds_per_call(function, 1, device), 0
    while calls < WARM_UP and time.perf_counter() - started < seconds:
        took, calls = seconds_per_call(function, 3, device), calls + 3
    return took


def _rounds(title: str, seconds: float, available: float) -> Iterator[int]:
    """As many rounds of so many seconds as there is time for, under a bar; the log says how long they will take."""
    number = max(FEWEST_ROUNDS, min(ROUNDS, int(available / max(seconds, 1e-6))))
    more = f", more than --seconds: {FEWEST_ROUNDS} rounds are needed" if number * seconds > available else ""
    log.info("%s: %d rounds, about %s%s", title, number, duration(number * seconds), more)
    with frame_counter(title, number, unit="rounds") as advance:
        for done in range(number):
            yield done
            advance(1)


def seconds_per_call(function: Callable[[], object], calls: int, device: torch.device) -> float:
    """How long so many calls take, work on a GPU included, over their number."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(calls):
        function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / calls


def random_task(shape: Shape, device: torch.device, frames: int = 60_000) -> RandomTask:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(frames, shape.dim, generator=generator)
    labels = torch.randint(0, shape.pdfs, (frames,), generator=generator, dtype=torch.int32)
    names, begins, lengths = ("random",), np.array([SPLICE]), np.array([frames - 2 * SPLICE])
    dataset = AcousticDataset(features, labels, names, names, begins, lengths, SPLICE)
    transform = estimate_normalization(splice_only(shape.dim, SPLICE), dataset, [0])
    network = Network(shape.layers())
    initialize(network, 1)
    model = AcousticModel(FeatureConfig(), transform, network).to(device)
    return RandomTask(model, dataset.to(device).subset([0]), shape.minibatch)


@dataclass(frozen=True)
class WorkersBench:
    """The result of several workers; medians over the rounds."""

    machine: dict[str, str]
    network: str
    optimizer: str
    precision: Precision
    workers: int
    strategy: str
    averaging_period: int
    single_worker_fps: float  # frames/s of rank 0 alone
    independent_fps: float  # of all workers at the same time, each by itself
    aggregate_fps: float  # of all workers that average
    speed_up: float  # the third over the first
    spread: tuple[float, float]  # of it, smallest and largest
    efficiency: float  # the third over the second
    efficiency_spread: tuple[float, float]
    comm_fraction: float  # of the workers' time, mean over workers and rounds, 0 to 1
    wait_fraction: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def as_text(self) -> str:
        return render("bench-workers.txt.j2", r=self)


def run_bench_workers(
    networks: Sequence[str],
    options: Mapping[str, Any],
    device: str,
    seconds: float,
    precisions: Sequence[Precision],
    json_: bool,
    show: Callable[[WorkersBench], None],
) -> None:
    """Starts the workers and shows the result of each network in each precision (float32 if none is given), `seconds`
    for each. `options`: keys of `parallel`, as a recipe gives them; UserError where one is out of range."""
    try:
        model = BmufConfig if options["strategy"] == "bmuf" else AveragingConfig
        parallel: ParallelConfig = model.model_validate(dict(options))
    except ValidationError as error:
        bad = error.errors()[0]
        option = {"cpu_threads": "threads"}.get(key := str(bad["loc"][0]), key.replace("_", "-"))
        raise UserError(f"{bad['input']} found: {bad['msg']}", location=f"--{option}") from error
    given = [("device", device), ("seconds", seconds), ("workers", parallel.workers), ("strategy", parallel.strategy)]
    given += [("averaging-period", parallel.averaging_period), ("threads", parallel.cpu_threads)]
    given += [("network", network) for network in networks] + [("precision", precision) for precision in precisions]
    arguments = ["bench", *(word for name, value in given for word in (f"--{name}", str(value)))]
    arguments += ["--overlap"] * parallel.overlap + ["--json"] * json_

    def work(comm: Communicator) -> None:
        for network, precision in itertools.product(networks, precisions or ("float32",)):
            on = choose_device(device, comm.local_rank, threads=parallel.cpu_threads)
            with open_transport(parallel.gpu_transport, on, comm):
                result = bench_workers(comm, network, parallel, on, seconds, precision)
            if comm.rank == 0:
                show(result)

    run_distributed(parallel.workers, arguments, work)


def bench_workers(
    comm: Communicator, network: str, options: ParallelConfig, on: torch.device, seconds: float, precision: Precision
) -> WorkersBench:
    """Measures for about `seconds`, on the device `on`. Collective; every worker returns the same result."""
    logging.getLogger("ddnn").setLevel(logging.WARNING)
    log.setLevel(logging.WARNING if comm.rank else logging.INFO)
    task = random_task(NETWORKS[network], on)
    trained = task.model.network
    optimizer = NgSgd(trained)
    by_itself = Averager(SingleProcess(), trained, optimizer)
    with_others = make_averager(averaging_options(options), comm, trained, optimizer)
    run_seconds = _timed_steps(task, optimizer, precision)
    each = comm.all_gather_object(run_seconds(by_itself, WARM_UP) / WARM_UP)
    # Of a training all workers update their Fisher matrices in the same minibatch, also after rank 0 was alone.
    unit = math.lcm(options.averaging_period, settle(optimizer))
    minibatches = max(1, int(seconds / ROUNDS / 3 / max(each) / unit)) * unit
    alone, apart, together = [], [], []
    rows: list[dict[str, Any]] = []

    def in_all(averager: Averager) -> list[float]:
        """Every worker's frames/s."""
        comm.barrier()
        took = run_seconds(averager, minibatches)
        if averager is with_others:
            rows.extend(comm.all_gather_object(worker_row(0, averager).model_dump()))
        return [minibatches * task.minibatch / seconds for seconds in comm.all_gather_object(took)]

    for _ in _rounds(f"{network}, {comm.world_size} workers", 3 * minibatches * max(each), seconds):
        comm.barrier()
        took = run_seconds(by_itself, minibatches) if comm.rank == 0 else 0.0
        alone.append(minibatches * task.minibatch / comm.all_gather_object(took)[0])
        apart.append(sum(in_all(by_itself)))
        together.append(comm.world_size * min(in_all(with_others)))
    with_others.close()
    speed_ups, efficiencies = ([both / one for both, one in zip(together, of, strict=True)] for of in (alone, apart))
    return WorkersBench(
        machine=machine_facts(on),
        network=network,
        optimizer="ng-sgd",
        precision=precision,
        workers=comm.world_size,
        strategy=options.strategy + (" overlapped" if options.overlap else ""),
        averaging_period=options.averaging_period,
        single_worker_fps=statistics.median(alone),
        independent_fps=statistics.median(apart),
        aggregate_fps=statistics.median(together),
        speed_up=statistics.median(speed_ups),
        spread=(min(speed_ups), max(speed_ups)),
        efficiency=statistics.median(efficiencies),
        efficiency_spread=(min(efficiencies), max(efficiencies)),
        comm_fraction=statistics.fmean(row["comm_fraction"] for row in rows),
        wait_fraction=statistics.fmean(row["wait_fraction"] for row in rows),
    )


def _timed_steps(task: RandomTask, optimizer: Sgd, precision: Precision) -> Callable[[Averager, int], float]:
    """Trains on so many more minibatches of random frames, and tells the seconds."""
    network = task.model.network
    workspace = Workspace(network, task.minibatch, make_arithmetic(precision, network.parameters.device))
    batches = endless(task.batches(workspace))

    def seconds(averager: Averager, minibatches: int) -> float:
        step = EagerStep(workspace, optimizer, averager.average_gradient)
        averager.begin_epoch(minibatches)

        def run() -> None:
            for batch in itertools.islice(batches, minibatches):
                averager.timer.mark("data")
                step(batch, LR)
                averager.after_minibatch(len(batch.labels))
            averager.wait()

        return seconds_per_call(run, 1, workspace.x.device)

    return seconds
