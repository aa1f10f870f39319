"""`parallel.columns: auto` and `parallel.stages: auto`: how many workers share a model, chosen by the model of cost
(`ddnn.distributed.cost`) from products, a copy and messages that the workers of the job time as it starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from timeit import repeat
from typing import Any

import torch

from ddnn.averaging.strategies import STRATEGIES
from ddnn.distributed.communicator import CPU, Communicator
from ddnn.distributed.cost import Layout, Machine, Prediction, Size, choose, minibatch_seconds, predictions
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.nn.precision import bf16_is_fast
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.recipe.section import as_list
from ddnn.runs.run_status import RECIPE
from ddnn.training import options
from ddnn.training.memory import describe_bytes
from ddnn.training.network_layers import network_layers
from ddnn.util.errors import DataError, RecipeError
from ddnn.util.system import available_memory, choose_device

log = logging.getLogger(__name__)

KEYS = ("columns", "stages", "microbatches")
WHERE = "parallel.columns, parallel.stages"
MAX_FLOP = 5e8  # of a product that is timed: 10 ms at 50 GFLOP/s
COPIED = 1 << 24  # float32 numbers, more than caches hold
SMALL, LARGE = 1 << 12, 1 << 21  # bytes of the all-gathers that are timed

Machines = Mapping[int, Machine]
"""By the number of neighbors that share a model, with the messages between these. All workers average by those of all."""


def with_layout(recipe: Recipe, device: str, world: Communicator, run_dir: Path | None = None) -> Recipe:
    """The recipe with numbers in place of `auto`: those of the training in `run_dir`, if it has as many workers, else
    what the first worker chooses. Collective. RecipeError: the cost is not known of this network, or on this device.
    DataError: no choice fits into memory; as `read_alignments`."""
    if "auto" not in (recipe.parallel.columns, recipe.parallel.stages):
        return recipe
    numbers, *_ = world.all_gather_object(_recorded(recipe, run_dir))
    if numbers is None:
        numbers, *_ = world.all_gather_object(_measured(recipe, device, world)[1:])
    log.info("auto: columns %d, stages %d", *numbers[:2])
    return _with_numbers(recipe, *numbers)


def _recorded(recipe: Recipe, run_dir: Path | None) -> list[Any] | None:
    """The numbers that a training has begun with, where the recipe has `auto` or none."""
    if run_dir is None or not (run_dir / RECIPE).is_file():
        return None
    now, before = recipe.parallel, load_recipe(run_dir / RECIPE, must_exist=False).parallel
    numbers = [getattr(before if getattr(now, key) in ("auto", None) else now, key) for key in KEYS]
    return numbers if before.workers == now.workers else None


def _with_numbers(recipe: Recipe, columns: int, stages: int, microbatches: int | None = None) -> Recipe:
    numbers = {"columns": columns, "stages": stages, "microbatches": recipe.parallel.microbatches or microbatches}
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=numbers)})


def _rows(recipe: Recipe, shared_by: int) -> int:
    """Frames in the minibatch of a replica of so many workers."""
    return options.minibatch_sizes(_with_numbers(recipe, shared_by, 1)).start


def _measured(recipe: Recipe, device: str, world: Communicator) -> Layout:
    """Of the data only what says how large the network is has been read: a header, and a model or alignments."""
    on_cpu = choose_device(device, world.local_rank, threads=recipe.parallel.cpu_threads) == CPU
    input_dim, path = options.network_input_dim(recipe), as_list(recipe.data.alignments)[0]
    alignments = read_transition_model(path / "final.mdl") if path.is_dir() else read_alignments(path)
    layers = network_layers(recipe, input_dim or 1, recipe.data.num_pdfs or alignments.num_pdfs)
    sizes = options.affine_sizes(recipe.optimizer, layers)
    if not (on_cpu and input_dim and sizes):
        message = "auto found, but only the cost of affine layers on CPUs, with features in archives, is known"
        raise RecipeError(message, location=WHERE, hint="give numbers")
    options.cut_network(layers, *recipe.parallel.split)  # by the numbers that are given
    bf16 = recipe.precision != "float32" and bf16_is_fast(CPU)[0]
    machines = time_machines(sizes, _rows(recipe, 1), torch.bfloat16 if bf16 else torch.float32, world)
    free = world.all_reduce_min((available_memory() or 1 << 62) // world.local_size)
    return choose_layout(recipe, sizes, machines, free)


def time_machines(sizes: Sequence[Size], rows: int, dtype: torch.dtype, world: Communicator) -> Machines:
    """Times products of the widest layer with `rows` frames and of the narrowest with a quarter of them, a copy, and
    all-gathers among neighbors, in under two seconds. The first worker's times count. Collective."""
    (operations, seconds), (fewer, less) = _product(max(sizes), rows, dtype), _product(min(sizes), -(-rows // 4), dtype)
    copied = torch.ones(2, COPIED)
    bandwidth = copied.nbytes / _seconds(partial(copied[0].copy_, copied[1]))  # read and written
    constants = [operations / seconds, max(0.0, less - fewer * seconds / operations), bandwidth]
    neighbors = [n for n in range(2, world.world_size + 1) if world.world_size % n == 0]
    messages = [_messages(world.split(world.rank // n, world.rank), n) for n in neighbors]
    (constants, messages), *_ = world.all_gather_object([constants, messages])
    each = zip((1, *neighbors), ([0.0, 0.0], *messages), strict=True)
    machines = {n: Machine(*constants, *message, dtype.itemsize) for n, message in each}  # type: ignore[call-arg]
    text = "auto: %.3g FLOP/s, %.2g s a product, memory %.3g bytes/s, messages among all workers %.2g s, %.2g s a byte"
    log.info(text, *machines[world.world_size][:5])
    return machines


def _product(size: Size, rows: int, dtype: torch.dtype) -> tuple[float, float]:
    """Operations and seconds."""
    width = min(size.out_features, 1 + int(MAX_FLOP / (2 * rows * size.in_features)))
    x, w = torch.ones(rows, size.in_features, dtype=dtype), torch.ones(size.in_features, width, dtype=dtype)
    return 2.0 * rows * w.numel(), _seconds(partial(torch.mm, x, w))


def _messages(group: Communicator, workers: int) -> list[float]:
    """alpha and beta."""
    blocks = [torch.ones(size // workers, dtype=torch.uint8) for size in (SMALL, LARGE)]
    small, large = (_seconds(partial(group.all_gather, block)) for block in blocks)
    return [small, max(0.0, large - small) / ((LARGE - SMALL) * (workers - 1) / workers)]


def _seconds(work: Callable[[], object]) -> float:
    """Of one call: the least of three means of as many, after one that does not count."""
    work()
    return min(repeat(work, number=3, repeat=3)) / 3


def choose_layout(recipe: Recipe, sizes: Sequence[Size], machines: Machines, free: int) -> Layout:
    """The best layout that the recipe allows (`ddnn.distributed.cost.choose`), which is logged beside others. Pure. `free`:
    bytes of memory for each worker. DataError: none fits."""
    predicted, workers = _predictions(recipe, sizes, machines), recipe.parallel.workers
    chosen = choose(predicted, free)
    if chosen is None:
        nearest = choose(_predictions(recipe, sizes, machines, ()), free)
        hint = f"take {_needs(nearest)}" if nearest else "take more workers, more memory, or a smaller network"
        least = min(predicted, key=lambda prediction: prediction.worker_bytes)
        message = f"{_needs(least)} are needed on each worker, {describe_bytes(free)} are free"
        raise DataError(message, location=WHERE, hint=hint)
    rows, whole = _rows(recipe, workers), Layout(workers)
    alone = minibatch_seconds(machines[1], sizes, rows, Layout()) / rows
    speed_ups = {prediction.layout: alone / prediction.frame_seconds for prediction in predicted}
    texts = [
        f"{layout} {speed_ups[layout]:.2f}" for layout in dict.fromkeys((chosen.layout, whole)) if layout in speed_ups
    ]
    split = max((speed_ups[layout] for layout in speed_ups if layout != whole), default=1.0)
    if split < 1.0:
        texts.append(f"a split over {workers} workers would be slower than one ({split:.2f})")
    log.info("auto: predicted speed-ups over one worker (replicas x columns x stages): %s", ", ".join(texts))
    return chosen.layout


def _needs(prediction: Prediction) -> str:
    _, columns, stages, _ = prediction.layout
    return f"columns {columns}, stages {stages}: {describe_bytes(int(prediction.worker_bytes))}"


def _predictions(
    recipe: Recipe, sizes: Sequence[Size], machines: Machines, given: Sequence[str] = KEYS
) -> list[Prediction]:
    """Of all layouts that the recipe allows, of whose numbers those of `given` count; memory as of a training."""
    parallel, workers, strategy = recipe.parallel, recipe.parallel.workers, STRATEGIES[recipe.parallel.strategy]
    parameters = sum(size.parameters for size in sizes)
    fixed = {key: number for key in given if isinstance(number := getattr(parallel, key), int)}
    *_, latency, byte_seconds, _ = machines[workers]

    def averaging(layout: Layout) -> float:
        traffic = strategy.traffic(layout.replicas)
        period = parallel.averaging_minibatches(_rows(recipe, layout.shared_by)) if strategy.unit == "parameters" else 1
        sent = traffic.num_bytes(parameters / layout.shared_by, parallel.comm_dtype)
        return (traffic.messages * latency + sent * byte_seconds) / period

    result = []
    for shared_by, machine in machines.items():
        fixed["replicas"] = workers // shared_by
        for prediction in predictions(machine, sizes, _rows(recipe, shared_by), workers, averaging, fixed):
            split = _with_numbers(recipe, *prediction.layout[1:])
            dims = sizes[0].in_features, sizes[-1].out_features
            memory = options.estimate_memory(split, *dims, prediction.layout.replicas)
            result.append(prediction._replace(worker_bytes=sum(memory.cpu.values())))
    return result
