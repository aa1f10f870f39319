"""From a YAML file, its includes and `--set` to a checked Recipe, with all problems reported at once; and back."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddnn.recipe import source
from ddnn.recipe.keys import REQUIRED, keys, keys_of, read_layers, sections, suggest_key, suggest_mapping
from ddnn.recipe.layers import LayerConfig, expand_repeats, layer_name
from ddnn.recipe.schema import (
    VARIANTS,
    CrossValidationConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PretrainConfig,
    Recipe,
    TrainedModelConfig,
)
from ddnn.recipe.section import MAPPING, VALUE, OptionalPaths, Section, as_list, get_value, is_given
from ddnn.recipe.source import SourceTree, SourceValue
from ddnn.util.errors import RecipeError

log = logging.getLogger(__name__)

MAX_FILES = 20  # that a recipe may include, directly or not
LAYERS_KEY = "model.layers"
OUTPUT_PATHS = ("data.cache_dir",)  # paths that need not exist: they are made
PIPES = "data.allow_pipes"
REMOVED = {"model.allow_any_features"}  # keys of earlier versions, which run dirs still have: accepted without effect


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    must_exist: bool = True,
    user_supplied: bool = True,
    optional_paths: Collection[str] = (),
    note: Callable[..., None] = log.info,
) -> Recipe:
    """Reads a recipe: first its includes, then its own keys, then `overrides` ("KEY=VALUE" each); the later one wins.
    Keys of files that an override leaves unread, as it chooses another schedule, are dropped with a `note`.
    Paths in the result are absolute. A key set to null takes its default. `must_exist`: whether a data path that does
    not exist is a problem; the data of finished runs may be gone; `optional_paths`: keys of those that are no longer
    needed. `user_supplied`: whether the user has named this very file.
    Else it may be a stranger's, as what it includes may, and cannot allow shell commands: only `overrides` can.
    RecipeError: all problems of all sources, one a line."""
    tree = SourceTree()
    itself = _read_with_includes(path, tree, [])
    files = dict(tree.values)
    words = [itself.values.get(PIPES)] if user_supplied else []  # what the user says of shell commands
    for setting in overrides:
        given = source.parse_setting(setting)
        for name in [name for name in given.values if name.partition(".")[0] == "include"]:
            given.add_problem("include: cannot be set; write it in the recipe", given.values.pop(name).source)
        _override(tree, given)
        words.append(given.values.get(PIPES))
    pipes = tree.values.get(PIPES)
    if pipes is not None and pipes.value is True and not any(pipes is word for word in words):
        where = "on the command line, or in a recipe that it names: not in included files, run dirs and corpora"
        hint = f"give --allow-pipes if the commands are yours, or --set {PIPES}=false"
        tree.add_problem(f"{PIPES}: true counts only {where}; {hint}", pipes.source)
    recipe = _build_read(path, tree, files, {*keys()} - {*OUTPUT_PATHS, *optional_paths} if must_exist else (), note)
    if recipe is None or tree.problems:
        problems = [problem.text if problem.source == str(path) else problem for problem in tree.problems]
        similar = None if source.exists(path) else source.similar_file(path)
        message = source.format_problems(problems, "problems in the recipe", source.MAX_PROBLEMS)
        raise RecipeError(message, location=path, hint=similar)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, in schema order, defaults written out, paths absolute; `load_recipe` makes it equal again.
    Omitted are keys that were not given and have no default, and those that the chosen optimizer and schedule never
    read."""
    values = {name: get_value(recipe, name) for name in keys() if is_read(recipe, name)}
    plain = {name: _plain(value) for name, value in values.items() if not isinstance(value, Section | None)}
    return yaml.safe_dump(source.nested(plain), sort_keys=False, allow_unicode=True, width=10_000)


def _plain(value: Any) -> Any:
    """Paths as text, layers as a recipe has them."""
    if isinstance(value, LayerConfig):
        return value.as_yaml()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _read_with_includes(path: Path, tree: SourceTree, files: list[Path], chain: tuple[Path, ...] = ()) -> SourceTree:
    """Adds a recipe or fragment to `tree`, after what it includes; returns what is its own. `files` are all that have
    been read, `chain` those, resolved, that led here."""
    files.append(path)
    found = source.read_yaml(path)
    tree.problems += found.problems
    found.problems = []
    include = found.values.pop("include", SourceValue(None, ""))
    for name in [name for name in found.values if name.startswith("include.")]:
        include = SourceValue({}, found.values.pop(name).source)
    names = _included(include, tree)
    chain = (*chain, path.resolve()) if names else chain
    for wanted in names:
        if len(files) >= MAX_FILES:
            tree.add_problem(f"include: more than {MAX_FILES} files in all", include.source, unread=True)
            break
        tried = [path.parent / wanted, source.configs_folder() / wanted]
        fragment = next(filter(source.exists, tried), None)
        if fragment is None:
            known = ", ".join(source.shipped_fragments()) or "none"
            text = f"include: {wanted} is neither {tried[0]} nor {tried[1]}; ddnn comes with {known}"
            tree.add_problem(text, include.source, unread=True)
        elif fragment.resolve() in chain:
            text = f"include: {wanted} includes itself, by way of {' -> '.join(p.name for p in chain)}"
            tree.add_problem(text, include.source, unread=True)
        else:
            _read_with_includes(fragment, tree, files, chain)
    _override(tree, found)
    return found


def _override(tree: SourceTree, later: SourceTree) -> None:
    """Adds values that win over those of `tree`, and problems. Of a key that takes a value or a mapping, either replaces the
    other; a null resets it."""
    tree.problems += later.problems
    replaced = tuple(f"{name}[" for name in later.values)
    kept = {name: place for name, place in tree.places.items() if not name.startswith(replaced)}
    tree.places = kept | later.places
    for name, given in later.values.items():
        section = name.rpartition(".")[0]
        if name in keys() and name in sections():
            for other in [other for other in tree.values if other.startswith(f"{name}.")]:
                del tree.values[other]
        elif section in keys() and section in sections() and given.value is not None:
            tree.values.pop(section, None)
        tree.values[name] = given


def _included(include: SourceValue, tree: SourceTree) -> list[str]:
    wanted = include.value if isinstance(include.value, list) else [include.value]
    if include.value is None:
        return []
    if all(isinstance(name, str) and name and "\0" not in name for name in wanted):
        return wanted
    text = f"include: {source.format_value(include.value)} found, expected a file name or a list of them"
    tree.add_problem(text, include.source, unread=True)
    return []


def _build_read(
    path: Path,
    tree: SourceTree,
    files: Mapping[str, SourceValue],
    must_exist: Collection[str],
    note: Callable[..., None],
) -> Recipe | None:
    """As `_build`, without those keys of `files` that nothing reads only because of a `--set`."""
    before = len(tree.problems)
    recipe = _build(path, tree, must_exist)
    unread = {key for key in tree.unread_keys if key in files and tree.values.get(key) is files[key]}
    if unread:
        alone = SourceTree(dict(files), tree.places)
        _build(path, alone, must_exist)
        unread -= alone.unread_keys
    if not unread:
        return recipe
    dropped = ", ".join(f"{key} [{tree.values.pop(key).source}]" for key in files if key in unread)
    note("--set chooses otherwise, so these keys of the recipe are not used: %s", dropped)
    del tree.problems[before:]
    return _build_read(path, tree, files, must_exist, note)


def _build(path: Path, tree: SourceTree, must_exist: Collection[str]) -> Recipe | None:
    """The recipe; `must_exist`: keys whose paths must. Problems are added to `tree`; wrong values are not used, so that
    the rest is still checked. A null is as if it had not been given."""
    sound = {name: given for name, given in tree.values.items() if given.value is not None and name not in REMOVED}
    for name in [name for name in sound if name in keys() and keys()[name].is_path]:
        sound[name] = _absolute(name, sound[name], path.parent, name in must_exist, tree)
    wrong = set[str]()
    if LAYERS_KEY in sound:
        given = sound.pop(LAYERS_KEY)
        if (layers := read_layers(given, tree)) is None:
            wrong.add(LAYERS_KEY)
        else:
            sound[LAYERS_KEY] = SourceValue(layers, given.source)
    recipe, first = None, True
    while recipe is None:
        plain = {name: given.value for name, given in sound.items()}
        try:
            recipe = Recipe.model_validate(source.nested({"data": {}} | plain), strict=True)
        except ValidationError as error:
            details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
            found = {name: detail for detail in details if (name := _key_of(detail)) not in wrong}
            if first:  # what a second look finds follows from the values that were removed after the first
                for name in sorted(found, key=lambda name: name in keys()):
                    _refuse(name, found[name], path, tree)
            first = False
            wrong |= {*found}
            for name in found:
                section = name.rpartition(".")[0]
                removed = section if section in keys() else name  # of the mapping that a key takes none is used
                sound = {n: given for n, given in sound.items() if not f"{n}.".startswith(f"{removed}.")}
                if removed == name and name in keys() and keys()[name].default is REQUIRED:
                    sound[name] = SourceValue(Path("/"), "")
    if tree.unread:
        return None
    for name, complaint, unread in contradictions(recipe):
        # How many data dirs there are is not known where they are wrong, nor which keys go with layers that are wrong.
        follows = name.startswith("model.") and LAYERS_KEY in wrong
        follows = follows or (name in ("data.alignments", "data.transforms") and "data.train" in wrong)
        if name not in wrong and not follows:
            source_of = sound[name].source if name in sound else str(path)
            tree.add_problem(f"{name}: {complaint}", source_of, unread_keys=unread)
    return recipe


def _absolute(name: str, given: SourceValue, folder: Path, must_exist: bool, tree: SourceTree) -> SourceValue:
    """The path or paths that a key means; one that is wrong is added to `tree`, and is / from then on."""
    paths = list[Any](given.value) if isinstance(given.value, list) else [given.value]
    for n, text in enumerate(paths):
        if isinstance(text, str):
            paths[n] = source.find_path(text, folder, must_exist)
        if isinstance(paths[n], str):
            tree.add_problem(f"{name}: {paths[n]}", given.source)
            paths[n] = Path("/")
    return SourceValue(paths if isinstance(given.value, list) else paths[0], given.source)


def _key_of(detail: ErrorDetails) -> str:
    """The dotted key that an error is about: without the index in a list and the names of a variant or
    of a type."""
    section, *below = [part for part in detail["loc"] if isinstance(part, str) and part not in (VALUE.tag, MAPPING.tag)]
    if section in VARIANTS:
        below = [VARIANTS[section][0]] if detail["type"].startswith("union_tag") else below[1:]
    name = ".".join((section, *below))
    if name in keys() or name in sections() or detail["type"] == "extra_forbidden":
        return name
    # What follows the key names one of the types that it may have.
    return next((key for key in keys() if name.startswith(f"{key}.")), name)


def _refuse(name: str, detail: ErrorDetails, path: Path, tree: SourceTree) -> None:
    """Adds the problem that pydantic found with a key."""
    key, section = keys().get(name), name.rpartition(".")[0]
    place, value = tree.source_of(name) or str(path), tree.values.get(name, SourceValue(detail["input"], "")).value
    if detail["type"] == "missing" and key is not None:
        if not tree.unread:
            tree.add_problem(key.as_missing(name), place if section in keys() else str(path))
    elif detail["type"] == "extra_forbidden" and key is not None:
        chooser, default = VARIANTS[section]
        chosen = tree.values.get(f"{section}.{chooser}", SourceValue(default, "")).value
        text = f"{name}: never read by {chosen}, only by {' or '.join(key.variants)}"
        text += f"; remove it, set it to null, or change {section}.{chooser}"
        tree.add_problem(text, place, unread_keys=(name,))
    elif detail["type"] == "extra_forbidden":
        meant = f"; {suggest_key(name)}" if len(tree.problems) < source.MAX_PROBLEMS else ""
        tree.add_problem(f"{source.format_key(name)}: unknown key{meant}", place)
    else:
        mapping = f"{name}: {source.format_value(value)} found, expected a mapping of {', '.join(keys_of(name))}"
        text = mapping if key is None else key.as_wrong(name, value)
        tree.add_problem(text + suggest_mapping(name, SourceValue(value, place)), place)


class Complaint(NamedTuple):
    """What is wrong with a dotted key, with a hint how to fix it. `unread`: that is only that nothing reads these keys."""

    key: str
    text: str
    unread: tuple[str, ...] = ()


def contradictions(recipe: Recipe) -> Iterator[Complaint]:
    """All that is contradictory in a recipe whose single values are sound."""
    for key, why in unread_keys(recipe).items():
        if _is_chosen(recipe, key):
            yield Complaint(key, f"never read, as {why}; remove it or set it to null", (key,))
    yield from _cross_validation(recipe.data.cv)
    yield from _lists("data.train", recipe.data.train, "data.", recipe.data)
    yield from _lists("data.cv.data", recipe.data.cv.data, "data.cv.", recipe.data.cv)
    counted = any(is_given(recipe, key) for key in ("model.hidden_layers", LAYERS_KEY))
    if counted or not isinstance(recipe.init, TrainedModelConfig):
        yield from _freeze(recipe.model)  # else known when init.model is read
    if recipe.init == "rbm":
        yield from _rbms(recipe.model, recipe.pretrain)
    schedule = recipe.schedule
    if schedule.name == "exponential" and schedule.final_learning_rate > schedule.initial_learning_rate:
        most = f"at most schedule.initial_learning_rate = {schedule.initial_learning_rate:g}: the rate falls"
        yield Complaint("schedule.final_learning_rate", f"{schedule.final_learning_rate:g} found, expected {most}")
    yield from minibatch_problems(recipe)
    yield from _overlap(recipe.parallel)


UNIFORM_KEYS = ("hidden_layers", "hidden_units", "activation")  # of `model.layers`


def unread_keys(recipe: Recipe) -> dict[str, str]:
    """The keys that nothing reads because of what others say, each with the reason."""
    model, pretrain, parallel, cv = recipe.model, recipe.pretrain, recipe.parallel, recipe.data.cv
    unread = dict[str, str]()

    def add(section: str, why: str, *names: str) -> None:
        for name in names:
            unread.setdefault(f"{section}.{name}", why)

    if cv.data is None or recipe.data.transforms is None:
        add("data.cv", f"there is no {'data.cv.data' if cv.data is None else 'data.transforms'}", "transforms")
    if cv.fraction is None:
        add("data.cv", "there is no data.cv.fraction", "by")
    if model.layers is None:
        add("model", f"there is no {LAYERS_KEY}", "bands")
    else:
        add("model", f"{LAYERS_KEY} says it for each layer", *UNIFORM_KEYS)
    if recipe.init != "rbm":
        why = "init is random" if recipe.init == "random" else "training starts from init.model"
        add("pretrain", why, *PretrainConfig.model_fields)
    elif pretrain.dbn is not None:
        others = [key for key in PretrainConfig.model_fields if key not in ("dbn", "feature_transform")]
        add("pretrain", "pretrain.dbn names a finished DBN", *others)
    else:
        add("pretrain", "there is no pretrain.dbn", "feature_transform")
        if model.layers_below_rbms():
            add("pretrain", "the visible units of the lowest RBM are those of a convolution", "gaussian_learning_rate")
        else:
            add("pretrain", "all hidden layers come from RBMs", "below")
        if pretrain.epochs is not None:
            add("pretrain", "pretrain.epochs is given", "hours", "max_epochs")
    if parallel.strategy == "gradient-all-reduce":
        add("parallel", "gradients are averaged at every minibatch", "averaging_period")
        add("parallel", "averaged gradients give every worker the same momentum", "local_momentum")
    if parallel.warmup == "none":
        add("parallel", "parallel.warmup is none", "warmup_minibatches")
    return unread


def is_read(recipe: Recipe, key: str) -> bool:
    section, _, last = key.rpartition(".")
    return key not in unread_keys(recipe) and (section not in VARIANTS or hasattr(getattr(recipe, section), last))


def _is_chosen(recipe: Recipe, key: str) -> bool:
    """Whether a recipe gives a value to a key that nothing reads, and means it."""
    section, _, last = key.rpartition(".")
    fields = get_value(recipe, section)
    value = getattr(fields, last)
    if last not in fields.model_fields_set or value is None:
        return False
    if section == "parallel":  # fragments that strategies share have the averaging period
        return last != "averaging_period" and value != type(fields).model_fields[last].default
    return key != "model.bands" or not isinstance(recipe.init, TrainedModelConfig)


def _cross_validation(cv: CrossValidationConfig) -> Iterator[Complaint]:
    ways = {
        "fraction": cv.fraction,
        "speakers": cv.speakers,
        "utterances": cv.utterances,
        "data": cv.data or cv.alignments,
    }
    given = tuple(f"data.cv.{key}" for key, value in ways.items() if value is not None)
    if len(given) > 1:
        ways_are = "these are different ways to hold out data: keep one, set the others to null"
        yield Complaint(given[0], f"given together with {' and '.join(given[1:])}; {ways_are}", given)
    for key, other in (("data", "alignments"), ("alignments", "data")):
        if getattr(cv, key) is not None and getattr(cv, other) is None:
            name = f"data.cv.{key}"
            yield Complaint(name, f"needs data.cv.{other}; give both, or neither", (name,))


def minibatch_problems(recipe: Recipe) -> Iterator[Complaint]:
    """A growing minibatch that shrinks; `minibatch_scope: total` with one that the workers cannot share equally."""
    given, workers = recipe.minibatch_size, recipe.minibatch_workers
    sizes = {"minibatch_size": given} if isinstance(given, int) else {}
    if not isinstance(given, int):
        sizes = {"minibatch_size.start": given.start, "minibatch_size.end": given.end}
        if given.end < given.start:
            expected = f"at least minibatch_size.start = {given.start}"
            yield Complaint("minibatch_size.end", f"{given.end} found, expected {expected}")
    for key, size in sizes.items():
        if size % workers:
            below = size - size % workers
            nearest = " or ".join(str(n) for n in (below, below + workers) if n)
            share = f"a multiple of parallel.workers = {workers}, as minibatch_scope is total: {nearest}"
            yield Complaint(key, f"{size} found, expected {share}")


def _freeze(model: ModelConfig) -> Iterator[Complaint]:
    layers, frozen = sum(model.layer_counts()) + 1, model.freeze or []
    if wrong := [number for number in frozen if not 0 <= number < layers]:
        expected = f"0 (the first hidden layer) to {layers - 1} (the output layer)"
        yield Complaint("model.freeze", f"{wrong[0]} found, expected {expected}")
        return
    bare = {number for number, layer in expand_repeats(model.layers or ()) if not layer.trained}
    if len(set(frozen) | bare) == layers:
        which = f"all {layers} layers" if not bare else f"all {layers - len(bare)} layers that have parameters"
        yield Complaint("model.freeze", f"{which} are frozen, so that nothing is trained: leave at least one")


def _lists(
    key: str, dirs: OptionalPaths, prefix: str, section: DataConfig | CrossValidationConfig
) -> Iterator[Complaint]:
    """Of a section whose alignments and transforms are not those of as many corpora as it has data dirs."""
    expected = len(as_list(dirs))
    for name, single in (("alignments", "an alignment"), ("transforms", "transforms")):
        found = len(as_list(getattr(section, name)))
        if expected and found not in (0, expected) and not (name == "transforms" and found == 1):
            hint = f"give {single} for each data dir, in the same order"
            yield Complaint(f"{prefix}{name}", f"{found} found, but {key} names {expected}; {hint}")


def _rbms(model: ModelConfig, pretrain: PretrainConfig) -> Iterator[Complaint]:
    layers, epochs = len(model.rbm_units()), pretrain.epochs
    why = "expected sigmoid: RBMs have binary hidden units"
    if model.layers is None and model.activation != "sigmoid":
        yield Complaint("model.activation", f"{model.activation} found, {why}")
    for number, layer in list(expand_repeats(model.layers or ()))[model.layers_below_rbms() :]:
        if (activation := getattr(layer, "activation", "sigmoid")) != "sigmoid":
            yield Complaint(LAYERS_KEY, f"{layer_name(number, layer)}: {activation} found, {why}")
    if epochs is not None and len(epochs) > layers > 0:
        expected = f"at most one for each of {layers} RBMs"
        yield Complaint("pretrain.epochs", f"{len(epochs)} numbers found, expected {expected}")
    if layers == 0 and model.layers is None:
        yield Complaint("model.hidden_layers", "0 found, expected 1 or more: there is nothing to pretrain")
    elif layers == 0:
        yield Complaint(LAYERS_KEY, "no affine layer at the end: there is nothing to pretrain")
    elif model.layers_below_rbms() and pretrain.below is None and pretrain.dbn is None:
        hint = "train the network with init: random first, and name its run dir"
        yield Complaint("pretrain.below", f"not given, but there are other layers below those of the RBMs: {hint}")


def _overlap(parallel: ParallelConfig) -> Iterator[Complaint]:
    if not parallel.overlap:
        return
    against = {"gradient-all-reduce": "takes a step from every averaging", "bmuf": "starts a block from the last"}
    if parallel.strategy in against:
        which = f"{parallel.strategy}, which {against[parallel.strategy]}"
        yield Complaint("parallel.overlap", f"true found beside strategy: {which}; set it to false")
    if parallel.local_momentum == "average":
        yield Complaint("parallel.overlap", "true found beside local_momentum: average; take keep or reset")
