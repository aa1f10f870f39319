"""From the sections of a recipe to the configurations of a training's parts, none of which reads the recipe."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence, Sized
from contextlib import suppress
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

from ddnn.averaging.strategies import STRATEGIES
from ddnn.averaging.strategy import AveragingOptions
from ddnn.data.batches import EVAL_BATCH
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import UtteranceIndex
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.pipeline import CvSelection, TrainingDataConfig
from ddnn.distributed.cost import Size
from ddnn.distributed.groups import Groups
from ddnn.kaldi.archive import MatrixReader, read_scp
from ddnn.kaldi.transforms import read_transform_config
from ddnn.kaldi.transition_model import TransitionModel
from ddnn.lattices.criteria import SequenceCriterion
from ddnn.nn.columns import ColumnPartition
from ddnn.nn.layer import Layer
from ddnn.nn.layers import activation_floats, num_parameters
from ddnn.nn.layout import Part, stage_sizes, stages_of
from ddnn.nn.network import Network, without_noise
from ddnn.nn.partition import Partition
from ddnn.nn.stages import StagePartition
from ddnn.optim.columns import ColumnNgSgd
from ddnn.optim.ng_sgd import OPTIMIZERS, NgSgdOptions, make_optimizer
from ddnn.optim.schedule import Constant, Exponential, MinibatchSizes, Newbob, Passes, Power, Schedule
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.recipe.load import worker_problems
from ddnn.recipe.schema import OptimizerConfig, ParallelConfig, Recipe, ScheduleConfig, SequenceConfig
from ddnn.recipe.section import OptionalPaths, Section, as_list
from ddnn.runs.tensorboard import import_tensorboard
from ddnn.training.combination import BestEpoch, Combination, MeanOfEpochs, MovingAverage
from ddnn.training.memory import (
    GPU_ACTIVATION_COPIES,
    GPU_PARAMETER_COPIES,
    LIBRARY_BYTES,
    RESERVED_BYTES,
    TrainingMemory,
)
from ddnn.training.network_layers import frozen_layers, hidden_layers, network_layers
from ddnn.util.errors import DataError, RecipeError
from ddnn.util.files import read_bytes_limited
from ddnn.util.progress import progress_bar

Options = TypeVar("Options")

MAX_PHONE_LIST = 1 << 20  # bytes

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    "newbob": Newbob,
    "exponential": Exponential,
    "power": Power,
    "constant": Constant,
    "passes": Passes,
}
"""By `schedule.name`."""


def with_world_size(recipe: Recipe, world_size: int) -> Recipe:
    """The recipe with as many workers as there are; RecipeError if it names another number."""
    workers = recipe.parallel.workers
    if workers not in (1, world_size):
        message = f"{workers} found, but {world_size} workers were started"
        hint = f"start {workers} workers, or give --workers {world_size}"
        raise RecipeError(message, location="parallel.workers", hint=hint)
    recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"workers": world_size})})
    for key, complaint, _ in worker_problems(recipe):
        raise RecipeError(complaint, location=key)
    return recipe


def check_pretrains(recipe: Recipe) -> None:
    if recipe.init != "rbm" or recipe.pretrain.dbn is not None:
        message = "the recipe has nothing to pretrain"
        hint = "set init: rbm, and leave pretrain.dbn unset"
        raise RecipeError(message, location="init" if recipe.init != "rbm" else "pretrain.dbn", hint=hint)


def check_packages(recipe: Recipe) -> None:
    """UserError where a package that only this recipe needs is missing."""
    if recipe.log.tensorboard:
        import_tensorboard()


def check_layers_fit(recipe: Recipe) -> None:
    """RecipeError where sizes of `model.layers` do not fit the features, by the first header of the training data. What is
    wrong with the data is left to those who read them."""
    with suppress(DataError):
        if recipe.model.layers is not None and (input_dim := network_input_dim(recipe)):
            deque(hidden_layers(recipe, input_dim), maxlen=0)


def network_input_dim(recipe: Recipe) -> int | None:
    """Values of a frame that the network reads, by the first header of the training data; None where commands write all of
    them. DataError: it is damaged, or not there."""
    entries = read_scp(as_list(recipe.data.train)[0] / "feats.scp", allow_pipes=recipe.data.allow_pipes)
    first = next((entry for entry in entries if entry.pipe is None), None)
    if first is None:
        return None
    with MatrixReader() as reader:
        return model_features(recipe).width(reader.shape(first)[1]) * (2 * recipe.data.splice + 1)


def cut_network(layers: Sequence[Layer], columns: int, stages: int) -> list[list[Part]]:
    """What each worker holds of a network of these layers, by stage and column. RecipeError: it cannot be split over so
    many."""
    if stages > 1 and without_noise(layers) != tuple(layers):
        message = f"{stages} found, but a layer draws random numbers, which microbatches would draw otherwise"
        raise RecipeError(message, location="parallel.stages", hint="set it to 1, or do without dropout")
    key = "stages"
    try:
        sizes, key = stage_sizes(layers, stages), "columns"
        return stages_of(layers, sizes, columns)
    except ValueError as error:
        raise RecipeError(str(error), location=f"parallel.{key}") from error


def make_partition(layers: Sequence[Layer], groups: Groups) -> Partition:
    """How these workers share a network of these layers. RecipeError: as `cut_network`."""
    stages, columns = groups.stage.world_size, groups.column.world_size
    sizes = [len(parts[0].layers) for parts in cut_network(layers, columns, stages)]
    if stages > 1:
        return StagePartition(layers, sizes, groups)
    return ColumnPartition(layers, groups.column) if columns > 1 else Partition()


def averaging_options(parallel: ParallelConfig, momentum: float = 0.0) -> AveragingOptions:
    """How the workers of a training average; `momentum` is the optimizer's."""
    options = _taken(AveragingOptions, parallel)
    return options if momentum else replace(options, local_momentum="keep")


def optimizer_options(recipe: OptimizerConfig) -> SgdOptions:
    return _taken(OPTIMIZERS[recipe.name][0], recipe)


def affine_sizes(recipe: OptimizerConfig, layers: Sequence[Layer]) -> tuple[Size, ...]:
    """What the model of cost reads of a network and its optimizer; empty where a layer is not affine."""
    options, sizes = optimizer_options(recipe), list[Size]()
    for layer in layers:
        if layer.gemm is None or layer.num_parameters != (layer.input_dim + 1) * layer.output_dim:
            return ()
        sides = options.sides(layer.gemm) if isinstance(options, NgSgdOptions) else ()
        sizes.append(Size(layer.input_dim, layer.output_dim, *(min(rank, dim - 1) for dim, rank in sides)))
    return tuple(sizes)


def optimizer_of(recipe: OptimizerConfig, network: Network) -> Sgd:
    """The optimizer of this worker's part of a network."""
    options, partition = optimizer_options(recipe), network.partition.within_stage
    if isinstance(partition, ColumnPartition) and isinstance(options, NgSgdOptions):
        return ColumnNgSgd(network, partition, options)
    return make_optimizer(options, network)


def make_schedule(recipe: ScheduleConfig) -> Schedule:
    own_names = {"initial_lr": "initial_learning_rate", "final_lr": "final_learning_rate", "max_epochs": "epochs"}
    renamed = {own: getattr(recipe, key) for own, key in own_names.items() if hasattr(recipe, key)}
    renamed["depends_on_length"] = recipe.depends_on_length
    return _taken(SCHEDULES[recipe.name], recipe, **renamed)


def sequence_criterion(recipe: SequenceConfig, model: TransitionModel) -> SequenceCriterion:
    """The criterion of an utterance. DataError: the file of silence phones cannot be read, or has no phone-ids."""
    path, expected = recipe.silence_phones, "phone-ids with colons or blanks between them"
    try:
        words = re.split(r"[:\s]+", read_bytes_limited(path, MAX_PHONE_LIST).decode("ascii", "replace").strip(": \n"))
    except OSError as error:
        raise DataError(f"cannot read the silence phones: {error.strerror}", location=path) from error
    if not all(re.fullmatch("[0-9]{1,9}", word) for word in words):
        raise DataError(
            f"expected {expected}, found {' '.join(words)[:80]!r}", location=path, hint="give phones/silence.csl"
        )
    return _taken(SequenceCriterion, recipe, transition_model=model, silence=[int(word) for word in words])


def make_combination(recipe: Recipe, network: Network, groups: Groups, batches: Sized) -> Combination:
    """What the final model may be a mean of. `batches`: this worker's minibatches of the epoch under way."""
    most, epochs, parts = recipe.schedule.average_last, recipe.schedule.moving_average_epochs, dict[str, Combination]()
    if recipe.schedule.keep == "best":
        parts["best"] = BestEpoch(network)
    if most > 1:
        parts["last"] = MeanOfEpochs(network, most)
    if epochs is not None:
        period = recipe.parallel.averaging_period
        parts["moving"] = MovingAverage(network, groups, batches, epochs=epochs, period=period)
    return Combination(**parts)


def minibatch_sizes(recipe: Recipe) -> MinibatchSizes:
    """Of each worker; the most, where they are of utterances."""
    if isinstance(recipe.criterion, SequenceConfig):
        most = recipe.criterion.max_frames * recipe.criterion.utterances_per_update
        return MinibatchSizes(most, most)
    size, workers = recipe.minibatch_size, recipe.minibatch_workers
    if isinstance(size, int):
        return MinibatchSizes(size // workers, size // workers)
    return MinibatchSizes(size.start // workers, size.end // workers, size.epochs)


def _taken(kind: Callable[..., Options], section: Section, **others: Any) -> Options:
    """One of a class: the arguments that the section has a key for, and `others`."""
    names = signature(kind).parameters.keys() & type(section).model_fields.keys()
    return kind(**{name: getattr(section, name) for name in names}, **others)


def model_features(recipe: Recipe) -> FeatureConfig:
    """What a model trained by the recipe keeps of its features. DataError: as `read_transform_config`. RecipeError:
    deltas beside transforms."""
    features, paths = FeatureConfig(recipe.data.cmvn, recipe.data.deltas), as_list(recipe.data.transforms)
    if not paths:
        return features
    path = paths[0]  # those of further corpora must be alike
    transforms = read_transform_config(path)
    if features.deltas:
        message = f"{features.deltas} found beside data.transforms: {path}, which has {transforms.as_text()}"
        hint = "remove data.deltas: with transforms, delta_opts of their dir says which deltas there are, if any"
        raise RecipeError(message, location="data.deltas", hint=hint)
    return replace(features, transforms=transforms)


def corpora(
    keys: tuple[str, str], data: OptionalPaths, alignments: OptionalPaths, transforms: OptionalPaths
) -> tuple[Corpus, ...]:
    """The corpora that these two keys of the recipe name: each a path, or lists of as many. Transforms: of each, or a
    single dir for all."""
    pairs = list(zip(as_list(data), as_list(alignments), strict=True))
    dirs: list[Path | None] = [*as_list(transforms)] or [None]
    dirs = dirs * len(pairs) if len(dirs) == 1 else dirs
    numbers = [f"[{n}]" for n in range(len(pairs))] if len(pairs) > 1 else [""]
    named = ((keys[0] + number, keys[1] + number) for number in numbers)
    return tuple(Corpus(*pair, names, path) for pair, names, path in zip(pairs, named, dirs, strict=bool(pairs)))


def data_config(recipe: Recipe, *, held_out: bool = True) -> TrainingDataConfig:
    """What the recipe says about data; `held_out`: whether there is cross-validation, which RBMs do without."""
    data = recipe.data
    features = replace(model_features(recipe), splice=data.splice, dtype=data.feature_dtype)
    cv_keys, cv_transforms = ("data.cv.data", "data.cv.alignments"), data.cv.transforms or as_list(data.transforms)[:1]
    cv = corpora(cv_keys, data.cv.data, data.cv.alignments, cv_transforms)
    tolerance = {} if recipe.criterion == "ce" else {"length_tolerance": 1}  # as Kaldi: nothing is trimmed
    return TrainingDataConfig(
        corpora(("data.train", "data.alignments"), data.train, data.alignments, data.transforms),
        _taken(DataConfig, data, features=features, progress=progress_bar("loading"), **tolerance),
        _taken(CvSelection, data.cv, corpora=cv) if held_out else None,
        recipe.seed,
        normalize=data.normalize,
    )


def require_minibatch(index: UtteranceIndex, key: str, batch_size: int, shards: list[list[int]]) -> None:
    """RecipeError, which names the recipe's key, where the smallest of `shards` does not fill one minibatch."""
    smallest, several = min(int(index.num_frames[shard].sum()) for shard in shards), len(shards) > 1
    if smallest < batch_size:
        of_shard = f" of the smallest of {len(shards)} shards" if several else ""
        message = f"{smallest} frames{of_shard} do not fill one minibatch of {batch_size}"
        hint = "take a smaller minibatch" + (", fewer workers" if several else "") + " or more data"
        raise RecipeError(message, location=key, hint=hint)


def estimate_memory(recipe: Recipe, input_dim: int, num_pdfs: int, workers: int) -> TrainingMemory:
    """What a worker of the largest stage needs besides its frames in a training by this recipe. RecipeError: as
    `cut_network`."""
    parallel, optimizer = recipe.parallel, optimizer_options(recipe.optimizer)
    layers, minibatch = network_layers(recipe, input_dim, num_pdfs), minibatch_sizes(recipe).end
    (columns, stages), first, frozen, shares = parallel.split, 0, frozen_layers(recipe, layers), []
    for part, *_ in cut_network(layers, columns, stages):  # the first column has the most outputs
        end = first + len(part.layers)
        trainable = [layer for i, layer in enumerate(part.layers, first) if i not in frozen]
        shares.append((num_parameters(part.layers), layers[first:end], trainable))
        first = end
    own, of_stage, trainable = max(shares, key=lambda share: share[0])
    one_copy, own_copy, per_frame = 4 * num_parameters(layers), 4 * own, 4 * activation_floats(of_stage)
    if columns > 1:  # own outputs, and the whole inputs that were gathered
        per_frame += per_frame // columns
    # The model before an averaging, and MPI's own copy of it; those that the strategy keeps.
    averaging_copies = 2 + 2 * parallel.overlap + STRATEGIES[parallel.strategy].copies(parallel.comm_dtype, workers)
    last, moving = recipe.schedule.average_last, recipe.schedule.moving_average_epochs is not None
    # The epochs' models, and their sum and mean in float64; a moving average in float64, what was kept of it, a term.
    means = (last + 5 if last > 1 else 0) + 5 * moving + (recipe.schedule.keep == "best")
    copies = 3 + means + (recipe.precision != "float32")  # parameters, gradient, the best so far; bf16
    cpu = {
        "parameters": copies * own_copy,
        "momentum": own_copy if optimizer.momentum > 0 else 0,
        "activations": (minibatch + EVAL_BATCH) * per_frame,  # of a minibatch, and of a block of cross-validation
        "files": 3 * one_copy,  # a model being written takes two copies, a checkpoint that is read three
        "libraries": LIBRARY_BYTES,
        "optimizer": optimizer.num_bytes(trainable, minibatch),
        "averaging": averaging_copies * own_copy if workers > 1 else 0,
    }
    beside_gpu = {"files": 4 * one_copy, "averaging": 2 * one_copy if workers > 1 else 0, "libraries": LIBRARY_BYTES}
    gpu_activations = 2 * GPU_ACTIVATION_COPIES * per_frame * max(minibatch, EVAL_BATCH)
    return TrainingMemory(
        {purpose: size for purpose, size in cpu.items() if size},
        {purpose: size for purpose, size in beside_gpu.items() if size},
        gpu=GPU_PARAMETER_COPIES * one_copy + gpu_activations + RESERVED_BYTES,
        min_gpu=cpu["parameters"] + cpu["momentum"] + cpu["activations"],
    )
