"""What a minibatch costs when several workers share a model: seconds, bytes and memory, by formulas. docs/explanation/scaling-model.md has them
with the symbols that docstrings name. Pure: `ddnn scale` predicts with it from measured constants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple

Schedule = Literal["fill-drain", "1f1b"]
"""In which order the stages of a pipeline take microbatches: `ddnn.training.microbatches`."""

MIN_ROWS = {"cpu": 64, "cuda": 128}
"""Rows of a microbatch at least; below, matrix products of 2048 columns lose a third of their speed on a CPU. The figure for
GPUs is assumed."""
PASS_FLOP = 400
"""Operations of matrix products in whose time a CPU makes its passes over an output of a layer and over its derivative: so many
as 140 GFLOP/s are in 24 bytes at 8 GB/s."""
BYTES_PER_PARAMETER = 40  # parameters, gradient, momentum, Fisher states, copies of an averaging
FIXED_BYTES = 1.5 * 2**30  # of a worker, whatever it holds: libraries, buffers of frames
WITHIN = 1.05  # layouts that are this much slower than the fastest count as equally fast


class Size(NamedTuple):
    """An affine layer; ranks of its Fisher matrices with NG-SGD, 0 with SGD."""

    in_features: int
    out_features: int
    in_rank: int = 0
    out_rank: int = 0

    @property
    def parameters(self) -> int:
        return (self.in_features + 1) * self.out_features


class Layout(NamedTuple):
    """d replicas of the model; each is split into k columns (every layer by its outputs) and p stages of consecutive layers,
    which a minibatch goes through in m microbatches."""

    replicas: int = 1
    columns: int = 1
    stages: int = 1
    microbatches: int = 1

    @property
    def shared_by(self) -> int:
        """Workers of a replica."""
        return self.columns * self.stages

    def __str__(self) -> str:
        return f"{self.replicas}x{self.columns}x{self.stages}"


class Machine(NamedTuple):
    """Constants of a worker, and of the messages between those that share a model."""

    flops: float  # R, floating-point operations per second of matrix products
    product_seconds: float  # tau, of a product beside its operations
    memory_bandwidth: float  # M, bytes per second
    latency: float  # alpha, seconds of a message
    byte_seconds: float  # beta
    activation_bytes: int = 4  # B; 2 in bf16

    @property
    def update_bytes(self) -> int:
        """Read and written for each parameter in an update: bf16 keeps float32 parameters and a copy."""
        return 12 if self.activation_bytes == 4 else 18


def layer_seconds(machine: Machine, layers: Sequence[Size], rows: int | float, columns: int) -> list[float]:
    """Of each layer with `rows` frames, forward and backward: its products, those of NG-SGD, passes over its outputs, and,
    among columns, the gather of its outputs, the exchange of the derivative of its input, the loss, NG-SGD's projections."""
    flops, tau, memory, alpha, beta, size = machine
    seconds = []
    for number, layer in enumerate(layers):
        first, last = number == 0, number == len(layers) - 1
        products = 2 if first else 3  # nobody needs the derivative of the input
        operations = 2 * rows * layer.in_features * layer.out_features
        total = products * (tau + operations / (columns * flops))
        total += 2 * tau + 6 * size * rows * layer.out_features / (columns * memory)
        if layer.in_rank:  # two thin products on each side; the input is whole on all workers
            ranks = rows * (layer.in_features * layer.in_rank + layer.out_features * layer.out_rank / columns)
            total += 4 * (tau + ranks / flops)
        if columns > 1:
            total += 8 * (columns - 1) / columns * (rows * layer.out_rank + (rows + 1) * (layer.out_rank > 0)) * beta
            exchanged = [0 if first else layer.in_features, 0 if last else layer.out_features]
            for width in filter(None, exchanged):
                values = rows * width * size
                total += alpha + (columns - 1) / columns * values * beta + 4 * values / memory
            if last:
                total += alpha + 16 * rows * (columns - 1) * beta
        seconds.append(total)
    return seconds


def partition(costs: Sequence[float], stages: int) -> list[slice]:
    """Divides layers into stages of consecutive ones, so that the most expensive stage is as cheap as possible; of equal
    divisions the one with the smallest sum of squares. Dynamic programming over (stage, end), as PipeDream (Narayanan et
    al. 2019); O(layers^2 stages). `stages` is at most the number of layers."""
    sums = list(accumulate(costs, initial=0.0))

    def divide(cost: Callable[[float], float], combine: Callable[[float, float], float]) -> list[int]:
        ends = range(1, len(costs) + 1)
        best = {end: (cost(sums[end]), [0, end]) for end in ends}
        for stage in range(2, stages + 1):
            best = {
                end: min(
                    (combine(best[start][0], cost(sums[end] - sums[start])), [*best[start][1], end])
                    for start in range(stage - 1, end)
                )
                for end in ends
                if end >= stage
            }
        return best[len(costs)][1]

    limit = max(sums[end] - sums[start] for start, end in pairwise(divide(float, max)))
    bounds = divide(lambda cost: cost**2 if cost <= limit else math.inf, float.__add__)
    return [slice(start, end) for start, end in pairwise(bounds)]


def held_microbatches(schedule: Schedule, stage: int, layout: Layout) -> int:
    """Microbatches whose activations a stage, counted from 0, holds at the same time, at most."""
    held = layout.microbatches if schedule == "fill-drain" else layout.stages - stage
    return min(layout.microbatches, held)


def divide(machine: Machine, layers: Sequence[Size], rows: int, layout: Layout) -> tuple[list[float], list[slice]]:
    """Seconds of each layer for a microbatch, and the layers of each stage."""
    seconds = layer_seconds(machine, layers, rows / layout.microbatches, layout.columns)
    return seconds, partition(seconds, layout.stages)


def minibatch_seconds(
    machine: Machine, layers: Sequence[Size], rows: int, layout: Layout, stages: Sequence[slice] | None = None
) -> float:
    """C: of a replica for a minibatch of `rows` frames, with its update, without averaging. `stages`: the layers of each; None:
    as `divide` has them."""
    size, m = machine.activation_bytes, layout.microbatches
    seconds, fastest = divide(machine, layers, rows, layout)
    stages = stages or fastest
    has_fisher = layout.columns > 1 and layers[0].out_rank > 0  # then a stage has two more messages
    of_stages = [sum(seconds[stage]) + 2 * has_fisher * machine.latency for stage in stages]
    sent = [rows / m * layers[stage.start].in_features * size / layout.columns for stage in stages[1:]]
    boundaries: float = sum(machine.latency + values * machine.byte_seconds for values in sent)
    parameters = max(sum(layer.parameters for layer in layers[stage]) for stage in stages)
    moved = (machine.update_bytes + (4 * m if m > 1 else 0)) * parameters
    update = moved / (layout.columns * machine.memory_bandwidth)
    return sum(of_stages) + (m - 1) * max(of_stages) + 2 * boundaries + update


def worker_bytes(
    machine: Machine, layers: Sequence[Size], rows: int, layout: Layout, schedule: Schedule = "fill-drain"
) -> float:
    """Memory of a worker of the stage that needs most: its part of the parameters with what belongs to them, the activations
    that it holds (inputs of layers whole, outputs of its own columns), and a fixed part."""
    needed = []
    for number, stage in enumerate(divide(machine, layers, rows, layout)[1]):
        own = layers[stage]
        held = held_microbatches(schedule, number, layout) * rows / layout.microbatches * machine.activation_bytes
        activations = sum(layer.in_features for layer in own) + own[-1].out_features / layout.columns
        parameters = sum(layer.parameters for layer in own) / layout.columns
        needed.append(BYTES_PER_PARAMETER * parameters + held * activations)
    return max(needed) + FIXED_BYTES


def received_bytes(machine: Machine, layers: Sequence[Size], rows: int, layout: Layout) -> dict[str, float]:
    """Bytes that a worker receives in a minibatch, in the stage that receives most: `gathers` of its layers' inputs, `exchanges`
    of their derivatives, `loss`, NG-SGD's `projections` and `norms`, and what comes over `boundaries` between stages. With
    one stage it sends as many."""
    columns, received = layout.columns, list[dict[str, float]]()
    share = (columns - 1) / columns
    for stage in divide(machine, layers, rows, layout)[1]:
        values = machine.activation_bytes * rows
        gathered = values * share * sum(layer.in_features for layer in layers[max(1, stage.start) : stage.stop])
        edges = [edge for edge in (stage.start, stage.stop) if 0 < edge < len(layers)]
        ranks = [layer.out_rank for layer in layers[stage] if layer.out_rank]
        received.append(
            {
                "gathers": gathered,
                "exchanges": gathered,
                "loss": 16.0 * rows * (columns - 1) * (stage.stop == len(layers)),
                "projections": 8 * share * rows * sum(ranks),
                "norms": 8 * share * (rows + 1) * len(ranks),
                "boundaries": values / columns * sum(layers[edge].in_features for edge in edges),
            }
        )
    return max(received, key=lambda parts: sum(parts.values()))


def fisher_update_bytes(layers: Sequence[Size], columns: int) -> dict[str, float]:
    """The same for an update of NG-SGD's Fisher matrices, with one stage: `sums` over the columns of K, L and the norm of the
    rows, and `results`, which the worker that updates a layer sends to all others: the factors of the update in float32, and
    d, e, rho and two flags in float64."""
    share, ranks = (columns - 1) / columns, [r for layer in layers for r in (layer.in_rank, layer.out_rank) if r]
    return {
        "sums": 8 * share * sum(2 * layer.out_rank**2 + 1 for layer in layers if layer.out_rank),
        "results": float(sum(4 * (r * r + r) + 8 * (2 * r + 3) for r in ranks)),
    }


class Prediction(NamedTuple):
    """A layout, and what the model says of it."""

    layout: Layout
    minibatch_seconds: float
    frame_seconds: float  # of all replicas, with averaging
    worker_bytes: float  # of memory
    received_bytes: float  # in a minibatch, besides averaging


def predictions(
    machine: Machine,
    layers: Sequence[Size],
    rows: int,
    workers: int,
    averaging: Callable[[Layout], float],
    fixed: Mapping[str, int] | None = None,
    min_rows: int = MIN_ROWS["cpu"],
    granule: int = 1,
) -> list[Prediction]:
    """All layouts of so many workers. `rows`: frames of the minibatch of a replica. `averaging`: its seconds in a
    minibatch. `fixed`: fields of the layout that are given; microbatches are those of a pipeline. Columns are of `granule` outputs at least, microbatches of
    `min_rows` unless their number is given."""
    result = []
    for layout in _layouts(workers, min(layer.out_features for layer in layers) // granule, len(layers), fixed or {}):
        smallest = rows / layout.microbatches
        if smallest >= min_rows or layout.microbatches in (1, (fixed or {}).get("microbatches")):
            seconds = minibatch_seconds(machine, layers, rows, layout)
            frame = (seconds + averaging(layout)) / (layout.replicas * rows)
            memory = worker_bytes(machine, layers, rows, layout)
            received = sum(received_bytes(machine, layers, rows, layout).values())
            result.append(Prediction(layout, seconds, frame, memory, received))
    return result


def _layouts(workers: int, max_columns: int, max_stages: int, fixed: Mapping[str, int]) -> Iterator[Layout]:
    """Layouts with the `fixed` fields; microbatches of a pipeline are powers of two up to 4 for each stage, or what is
    fixed."""
    for columns in _divisors(workers, max_columns):
        for stages in _divisors(workers // columns, max_stages):
            layout = Layout(workers // (columns * stages), columns, stages)
            powers = [2**i for i in range((4 * stages).bit_length())] if stages > 1 else [1]
            if stages > 1 and "microbatches" in fixed:
                powers = [fixed["microbatches"]]
            if all(fixed.get(name, size) == size for name, size in layout._asdict().items() if name != "microbatches"):
                yield from (layout._replace(microbatches=power) for power in powers)


def _divisors(number: int, largest: int) -> list[int]:
    return [n for n in range(1, min(number, largest) + 1) if number % n == 0]


def choose(predicted: Sequence[Prediction], free_bytes: float) -> Prediction | None:
    """The fastest whose workers have enough memory; of those almost as fast the one that splits the model least. None: not
    one of them fits."""
    fitting = [p for p in predicted if p.worker_bytes <= free_bytes]
    fastest = min((p.frame_seconds for p in fitting), default=0.0)
    near = [p for p in fitting if p.frame_seconds <= WITHIN * fastest]
    return min(near, key=lambda p: (p.layout.shared_by, *p.layout[2:]), default=None)
