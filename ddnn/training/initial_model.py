"""What a training starts from: random parameters, RBMs, or a network that has been trained already (`init.model`), whose
shape and input the recipe takes over where it does not give them itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddnn.averaging.strategies import STRATEGIES
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import MAX_LIST_BYTES
from ddnn.data.pipeline import TrainingData
from ddnn.data.source import DataSource
from ddnn.distributed.groups import Groups
from ddnn.kaldi.alignments import check_same_tree
from ddnn.nn.acoustic_model import NNET1_FEATURES, AcousticModel, find_nnet1, nnet1_features, read_nnet1_dir
from ddnn.nn.network import Network, initialize
from ddnn.recipe.layers import StoredLayerConfig
from ddnn.recipe.load import UNIFORM_KEYS, contradictions, dump_recipe, load_recipe
from ddnn.recipe.schema import ModelConfig, Recipe, TrainedModelConfig
from ddnn.recipe.section import as_list, get_value, is_given, with_defaults
from ddnn.recipe.source import format_problems, format_value, parse_file
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import CV_UTTERANCES, FINAL, RECIPE, newest_checkpoint, run_dir_of
from ddnn.training import options
from ddnn.training.network_layers import is_equivalent, network_layers, static_dims
from ddnn.training.normalization import input_transform
from ddnn.training.pretraining import load_dbn
from ddnn.training.resume_rules import with_recorded_network
from ddnn.util.errors import DataError, RecipeError, UserError
from ddnn.util.files import read_bytes_limited
from ddnn.util.text import plural

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def load_trained(path: Path, features: FeatureConfig) -> AcousticModel:
    """The network of a run dir or a model file, or of a directory of nnet1 files; `features`: what it reads where these do not say it."""
    if path.suffix == ".safetensors" or (path / FINAL).exists() or (path / RECIPE).exists():
        return load_run(path)
    stated = nnet1_features(path) if features.transforms is None or (path / NNET1_FEATURES).exists() else None
    return read_nnet1_dir(path, stated or features)


def with_initial_model(recipe: Recipe, run_dir: Path | None = None) -> tuple[Recipe, AcousticModel | None]:
    """The recipe with the shape and input of the network of `init.model`, and the network; other recipes as they are.
    To resume in `run_dir`, where there is a checkpoint, both come from there, and the network may be gone. DataError:
    there is no such network, or not one that a recipe can describe. RecipeError: the recipe gives other values."""
    if not isinstance(recipe.init, TrainedModelConfig):
        return recipe, None
    if run_dir is not None and newest_checkpoint(run_dir) is not None:
        before = load_recipe(run_dir / RECIPE, must_exist=False) if (run_dir / RECIPE).is_file() else recipe
        return with_recorded_network(recipe, before), None
    path = recipe.init.model
    model = load_trained(path, options.model_features(recipe))
    network_values = _described_input(model, path)
    described = _described_layers(with_defaults(recipe, network_values), model, path)
    if recipe.model.layers is None:
        network_values |= described
    problems = [
        f"{name}: {_shown(get_value(recipe, name))} found, but the network of init.model has {_shown(value)}"
        for name, value in network_values.items()
        if is_given(recipe, name) and get_value(recipe, name) != value
    ]
    if "model.layers" in network_values:
        given = (f"model.{key}" for key in UNIFORM_KEYS if is_given(recipe, f"model.{key}"))
        of_network = f"but the network of init.model has layers of its own: {_shown(network_values['model.layers'])}"
        problems += [f"{name}: {_shown(get_value(recipe, name))} found, {of_network}" for name in given]
    network_transforms, recipe_transforms = model.features.transforms, options.model_features(recipe).transforms
    if not problems and network_transforms == recipe_transforms and recipe.model.layers is not None:
        model, problems = _trained_by(with_defaults(recipe, network_values), model, described)
    hints = ["remove what differs: keys that are not given take the values of the network"] if problems else []
    if network_transforms != recipe_transforms:
        of_network, of_recipe = (
            transforms.as_text() if transforms is not None else "none"
            for transforms in (network_transforms, recipe_transforms)
        )
        problems.append(
            f"data.transforms: {of_recipe} found, but the network of init.model was trained with {of_network}"
        )
        give = "set data.transforms to the Kaldi dir of this data's transforms, such as exp/tri4_ali"
        hints.append("remove data.transforms" if network_transforms is None else give)
    location = f"the recipe, with init.model: {path}"
    if problems:
        raise RecipeError(format_problems(problems, "keys do not fit"), location=location, hint="; ".join(hints))
    recipe = with_defaults(recipe, network_values)
    for key, complaint, _ in contradictions(recipe):
        raise RecipeError(f"{key}: {complaint}", location=location)
    for problem in parse_file(dump_recipe(recipe).encode(), RECIPE).problems:
        raise DataError(f"its layers cannot be written into recipe.yaml: {problem.text}", location=path)
    return recipe, model


def _shown(value: Any) -> str:
    return ModelConfig(layers=value).summary() if isinstance(value, list) else format_value(value)


def _trained_by(recipe: Recipe, model: AcousticModel, described: dict[str, Any]) -> tuple[AcousticModel, list[str]]:
    """The network of `init.model` with the layers of a recipe that names them, by whose rates, limits and dropout it is
    trained; and what does not fit. `described`: the network's own layers."""
    network = model.network
    *hidden, _ = network_layers(recipe, network.input_dim, network.output_dim)
    if is_equivalent(hidden, network.layers[:-1]):
        network = Network((*hidden, network.layers[-1]), network.parameters)
        return replace(model, network=network), []
    own_layers = ModelConfig(**{key.removeprefix("model."): value for key, value in described.items()}).summary()
    return model, [f"model.layers: {recipe.model.summary()} found, but the network of init.model has {own_layers}"]


def _described_input(model: AcousticModel, path: Path) -> dict[str, Any]:
    """What a recipe says of a model's input, by key. DataError where a recipe cannot."""
    offsets = model.transform.offsets
    splice = len(offsets) // 2
    if offsets != tuple(range(-splice, splice + 1)):
        frames = ", ".join(map(str, offsets))
        message = f"its input is the frames {frames} around the present one, which data.splice cannot describe"
        raise DataError(message, location=path)
    if (last := model.network.layers[-1].label) not in ("softmax", "linear"):
        raise DataError(f"its last layer is {last}, softmax expected", location=path)
    normalizes = model.transform.scale is not None or model.transform.shift is not None
    features = {"data.cmvn": model.features.cmvn, "data.deltas": model.features.deltas}
    return {"data.splice": splice, **features, "data.normalize": normalizes}


def _described_layers(recipe: Recipe, model: AcousticModel, path: Path) -> dict[str, Any]:
    """The keys of a recipe for a model's hidden layers: in the short form where they are equal, as in the recipe of its run
    dir where that is theirs, else as model files have them. `recipe`: that of its input."""
    *hidden, _ = model.network.layers
    shapes = {(layer.kind, layer.output_dim, layer.label) for layer in hidden}
    kind, units, label = next(iter(shapes), ("affine", None, "sigmoid"))
    if len(shapes) < 2 and kind == "affine" and label in ("sigmoid", "tanh", "relu"):
        shape = {"model.hidden_units": units, "model.activation": label} if hidden else {}
        return {"model.hidden_layers": len(hidden), **shape}
    with suppress(UserError):
        trained_by = load_recipe(run_dir_of(path) / RECIPE, must_exist=False, user_supplied=False).model
        bands = {} if trained_by.bands is None else {"bands": trained_by.bands}
        same = ModelConfig(layers=trained_by.layers, **bands)
        input_dim, pdfs = model.network.input_dim, model.network.output_dim
        layers = network_layers(recipe.model_copy(update={"model": same}), input_dim, pdfs)
        if trained_by.layers is not None and list(layers[:-1]) == hidden:
            if is_given(recipe, "model.bands"):
                bands = {"bands": trained_by.bands or static_dims(recipe, input_dim)}
            return {f"model.{key}": value for key, value in {"layers": trained_by.layers, **bands}.items()}
    return {"model.layers": [StoredLayerConfig(config=layer.config()) for layer in hidden]}


def check_initial_model(recipe: Recipe, trained: AcousticModel | None, source: DataSource) -> None:
    """DataError where `trained`, the network of `init.model`, or the DBN that the recipe names does not fit its shape or
    the data, which is known from headers."""
    warn_of_random_frozen_layers(recipe)
    warn_of_random_parameters(recipe)
    if trained is not None and isinstance(recipe.init, TrainedModelConfig):
        _check_trained(recipe.init, trained, source)
    elif recipe.init == "rbm" and recipe.pretrain.dbn is not None:
        load_dbn(recipe, recipe.pretrain.dbn).check_features(source.width, recipe.pretrain.dbn)


def _check_trained(init: TrainedModelConfig, model: AcousticModel, source: DataSource) -> None:
    model.check_features(source.width, init.model)
    if init.output_layer == "random":
        return
    pdfs, alignments = source.index.num_pdfs, source.alignments
    hint = "use alignments of the system that the network is of, or init.output_layer: random for a new output layer"
    if pdfs != model.network.output_dim:
        message = f"the alignment has {pdfs} pdfs, the network of init.model {model.network.output_dim}"
        hint += "" if source.has_model else "; if the alignment merely lacks its last pdfs, set data.num_pdfs"
        raise DataError(message, location=alignments, hint=hint)
    tree, network = source.transition_digest(), f"the network of {init.model}"
    try:
        check_same_tree(tree, model.transition_digest, Path(alignments), network)
    except DataError as error:
        raise DataError(error.message, location=alignments, hint=hint) from error


def warn_of_random_frozen_layers(recipe: Recipe) -> None:
    """A warning where `model.freeze` names layers whose initial parameters are random, which nothing then trains."""
    output = sum(recipe.model.layer_counts())
    new_output = recipe.init == "rbm" or (
        isinstance(recipe.init, TrainedModelConfig) and recipe.init.output_layer == "random"
    )
    random = {
        number for number in recipe.model.freeze or () if recipe.init == "random" or (new_output and number == output)
    }
    if random:
        message = (
            "model.freeze: layer %s keeps its random initial parameters (init: %s); freeze layers of RBMs or of a "
        )
        log.warning(f"{message}trained network (init.model)", ", ".join(map(str, sorted(random))), recipe.init)


def warn_of_random_parameters(recipe: Recipe) -> None:
    """A warning where many workers start from random parameters at learning rates multiplied by their number: 16 that do not
    average after every minibatch, or over 16. What it costs was measured on AN4 and on ten hours of the spoken corpus:
    docs/how-to/parallel.md."""
    parallel, size = recipe.parallel, options.minibatch_sizes(recipe).start
    often = parallel.averaging_frames == "auto" or parallel.averaging_minibatches(size) <= 1
    often |= STRATEGIES[parallel.strategy].unit == "gradients"
    multiplied = parallel.scale_learning_rate and recipe.minibatch_workers == 1
    if recipe.init == "random" and multiplied and parallel.replicas >= 16 + often:
        message = (
            "%d workers start from random parameters (init: random), with an averaging period of %s: 16 workers lost 13 to "
            "14 points of frame accuracy with 10 minibatches and 0.2 by averaging after every minibatch, but 32 lost 21 even so; "
            "set init: rbm or, with 16 workers, parallel.averaging_period: 1"
        )
        log.warning(message, parallel.replicas, parallel.period)


def warn_of_known_utterances(
    recipe: Recipe, source: DataSource, cv_source: DataSource | None, cv: Sequence[str]
) -> None:
    """Warns if the network of `init.model`, from a run dir, was trained on some of the cross-validation utterances `cv`. A run
    trains on every utterance of its corpora except those it held out. Two corpora count as the same if their paths are equal
    or a held-out utterance occurs in both."""
    if not isinstance(recipe.init, TrainedModelConfig):
        return
    run, corpora, held_out = run_dir_of(recipe.init.model), set[Path](), set[str]()
    with suppress(OSError, UserError):
        held_out = set(read_bytes_limited(run / CV_UTTERANCES, MAX_LIST_BYTES).decode("utf-8", "replace").split())
        corpora = {path.resolve() for path in as_list(load_recipe(run / RECIPE, must_exist=False).data.train)}
    trained_on = set[str]()
    for part in (*source.parts, *(cv_source.parts if cv_source is not None else ())):
        names = set(part.index.utterances)
        if held_out and (part.corpus.data.resolve() in corpora or held_out & names):
            trained_on |= names & {*cv} - held_out
    if trained_on:
        message = "CV: the network of init.model was trained on %d of the %s for cross-validation, which will look too "
        message += "good, and Newbob may accept no epoch: %s"
        same = held_out <= {entry.key for entry in source.index.directory.entries}
        advice = f"set data.cv.utterances: {run / CV_UTTERANCES}, those that it was not trained on"
        advice = advice if same else f"take the cross-validation data of {run / RECIPE}"
        log.warning(message, len(trained_on), plural(len(cv), "utterance"), advice)


def initial_model(
    recipe: Recipe, data: TrainingData, dbn: AcousticModel | None, trained: AcousticModel | None, groups: Groups
) -> AcousticModel:
    """The model that training starts from, on the CPU: random, or on the DBN that was trained or that the recipe names,
    or `trained`, that of `init.model`. Collective."""
    if groups.world.rank == 0:
        warn_of_random_frozen_layers(recipe)
        warn_of_random_parameters(recipe)
    if trained is not None and isinstance(recipe.init, TrainedModelConfig):
        if groups.world.rank == 0:
            warn_of_known_utterances(recipe, data.source, data.cv_source, data.cv_index().utterances)
        return _continued(recipe, recipe.init, trained, data)
    if recipe.init == "rbm" and recipe.pretrain.dbn is not None:
        dbn = load_dbn(recipe, recipe.pretrain.dbn)
        dbn.check_features(data.dataset.dim, recipe.pretrain.dbn)
    transform = input_transform(data, groups.data) if dbn is None else dbn.transform.to(CPU)
    layers = network_layers(recipe, transform.output_dim, data.index.num_pdfs, on_dbn=dbn is not None)
    network = Network(layers)
    initialize(network, recipe.seed)
    if dbn is not None:
        network.load_lower_layers(dbn.network)
    return AcousticModel(options.model_features(recipe), transform, network, data.source.transition_digest())


def _continued(recipe: Recipe, init: TrainedModelConfig, model: AcousticModel, data: TrainingData) -> AcousticModel:
    """`model` to be trained further, with a random output layer if the recipe says so."""
    _check_trained(init, model, data.source)
    pdfs, tree = data.index.num_pdfs, data.source.transition_digest()
    if init.output_layer == "keep":
        source = init.model
        with suppress(UserError):  # a run dir has none of nnet1
            source = source if (source / FINAL).exists() else find_nnet1(source)[0]
        log.info("training starts from the network of %s", source)
        return replace(model, transition_digest=tree or model.transition_digest)
    *hidden, _ = model.network.layers
    network = Network((*hidden, network_layers(recipe, model.transform.output_dim, pdfs)[-1]))
    initialize(network, recipe.seed)
    lower = sum(layer.num_parameters for layer in hidden)
    network.load_lower_layers(Network(hidden, model.network.parameters[:lower]))
    log.info("training starts from the hidden layers of %s, with a new output layer of %d pdfs", init.model, pdfs)
    return replace(model, network=network, transition_digest=tree)
