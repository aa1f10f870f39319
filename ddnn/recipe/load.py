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
from ddnn.recipe.layers import LayerConfig, layer_name, numbered
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
from ddnn.recipe.section import MAPPING, VALUE, MaybePaths, Section, as_list, get_value, is_given
from ddnn.recipe.source import SourceTree, SourceValue
from ddnn.util.errors import RecipeError

log = logging.getLogger(__name__)

MOST_FILES = 20  # that a recipe may include, directly or not
LAYERS_KEY = "model.layers"
OUTPUT_PATHS = ("data.cache_dir",)  # paths that need not exist: they are made
PIPES = "data.allow_pipes"
REMOVED = {"model.allow_any_features"}  # keys of earlier versions, which run dirs still have: accepted without effect
MODEL_KEYS = (
    *("data.splice", "data.cmvn", "data.deltas", "data.normalize"),
    *("model.hidden_layers", "model.hidden_units", "model.activation"),
    *("model.layers", "model.bands"),
)
"""Keys that take the values of the network of `init.model` where they are not given."""


def load_recipe(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    must_exist: bool = True,
    trusted: bool = True,
    may_be_gone: Collection[str] = (),
    note: Callable[..., None] = log.info,
) -> Recipe:
    """Reads a recipe: first its includes, then its own keys, then `overrides` ("KEY=VALUE" each); the later one wins.
    Keys of files that an override leaves unread, as it chooses another schedule, are dropped with a `note`.
    Paths in the result are absolute. A key set to null takes its default. `must_exist`: whether a data path that does
    not exist is a problem; the data of finished runs may be gone; `may_be_gone`: keys of those that are no longer
    needed. `trusted`: whether the user has named this very file.
    Else it may be a stranger's, as what it includes may, and cannot allow shell commands: only `overrides` can.
    RecipeError: all problems of all sources, one a line."""
    tree = SourceTree()
    itself = _read_with_includes(path, tree, [])
    files = dict(tree.values)
    words = [itself.get(PIPES)] if trusted else []  # what the user says of shell commands
    for setting in overrides:
        given = source.parse_setting(setting)
        tree.problems += given.problems
        own = {name: value for name, value in given.values.items() if name.partition(".")[0] != "include"}
        if len(own) < len(given.values):
            tree.refuse("include: cannot be set; write it in the recipe", f"--set {setting}")
        _override(tree, own)
        words.append(own.get(PIPES))
    pipes = tree.values.get(PIPES)
    if pipes is not None and pipes.value is True and not any(pipes is word for word in words):
        where = "on the command line, or in a recipe that it names: not in included files, run dirs and corpora"
        hint = f"give --allow-pipes if the commands are yours, or --set {PIPES}=false"
        tree.refuse(f"{PIPES}: true counts only {where}; {hint}", pipes.source)
    recipe = _build_read(path, tree, files, {*keys()} - {*OUTPUT_PATHS, *may_be_gone} if must_exist else (), note)
    if recipe is None or tree.problems:
        problems = [problem.text if problem.source == str(path) else problem for problem in tree.problems]
        similar = None if source.exists(path) else source.similar_file(path)
        message = source.listed(problems, "problems in the recipe", source.MOST_PROBLEMS)
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
        return value.written()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _read_with_includes(
    path: Path, tree: SourceTree, files: list[Path], chain: tuple[Path, ...] = ()
) -> dict[str, SourceValue]:
    """Adds a recipe or fragment to `tree`, after what it includes; returns its own values. `files` are all that have
    been read, `chain` those, resolved, that led here."""
    files.append(path)
    found = source.read_yaml(path)
    tree.problems += found.problems
    include = found.values.pop("include", SourceValue(None, ""))
    for name in [name for name in found.values if name.startswith("include.")]:
        include = SourceValue({}, found.values.pop(name).source)
    names = _included(include, tree)
    chain = (*chain, path.resolve()) if names else chain
    for wanted in names:
        if len(files) >= MOST_FILES:
            tree.refuse(f"include: more than {MOST_FILES} files in all", include.source, unread=True)
            break
        tried = [path.parent / wanted, source.configs_folder() / wanted]
        fragment = next(filter(source.exists, tried), None)
        if fragment is None:
            known = ", ".join(source.shipped_fragments()) or "none"
            text = f"include: {wanted} is neither {tried[0]} nor {tried[1]}; ddnn comes with {known}"
            tree.refuse(text, include.source, unread=True)
        elif fragment.resolve() in chain:
            text = f"include: {wanted} includes itself, by way of {' -> '.join(p.name for p in chain)}"
            tree.refuse(text, include.source, unread=True)
        else:
            _read_with_includes(fragment, tree, files, chain)
    _override(tree, found.values)
    return found.values


def _override(tree: SourceTree, later: Mapping[str, SourceValue]) -> None:
    """Adds values that win over those of `tree`. Of a key that takes a value or a mapping, either replaces the other;
    a null resets it."""
    for name, given in later.items():
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
    tree.refuse(text, include.source, unread=True)
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
        alone = SourceTree(dict(files))
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
    the rest is still checked."""
    sound = _known(tree)
    for name, given in list(sound.items()):
        if not keys()[name].is_path:
            continue
        paths = list[Any](given.value) if isinstance(given.value, list) else [given.value]
        for n, text in enumerate(paths):
            if isinstance(text, str):
                paths[n] = source.find_path(text, path.parent, name in must_exist)
            if isinstance(paths[n], str):
                tree.refuse(f"{name}: {paths[n]}", given.source)
                paths[n] = Path("/")
        sound[name] = SourceValue(paths if isinstance(given.value, list) else paths[0], given.source)
    layers_refused = False
    if LAYERS_KEY in sound:
        given = sound.pop(LAYERS_KEY)
        layers = read_layers(given, tree)
        layers_refused = layers is None
        if layers is not None:
            sound[LAYERS_KEY] = SourceValue(layers, given.source)
    wrong: dict[str, str] = {}
    recipe = None
    while recipe is None:
        try:
            plain = {name: given.value for name, given in sound.items()}
            recipe = Recipe.model_validate(source.nested({"data": {}} | plain), strict=True)
        except ValidationError as error:
            found_now = {name: detail["type"] for detail in error.errors() if (name := _key_of(detail)) not in wrong}
            if not wrong:  # what a second look finds follows from the values that were taken out after the first
                for name, kind in found_now.items():
                    _refuse(name, kind, sound, path, tree)
            wrong |= found_now
            for name in found_now:
                sound.pop(name, None)
                if (section := name.rpartition(".")[0]) in keys():  # the mapping that a key takes: none of it is used
                    sound = {n: given for n, given in sound.items() if not f"{n}.".startswith(f"{section}.")}
                elif keys()[name].default is REQUIRED:
                    sound[name] = SourceValue(Path("/"), "")
    if tree.unread:
        return None
    for name, complaint, unread in contradictions(recipe):
        # How many data dirs there are is not known where they are wrong, nor which keys go with layers that are wrong.
        follows = name.startswith("model.") and layers_refused
        follows = follows or (name in ("data.alignments", "data.transforms") and "data.train" in wrong)
        if name not in wrong and not follows:
            source_of = sound[name].source if name in sound else str(path)
            tree.refuse(f"{name}: {complaint}", source_of, unread_keys=unread)
    return recipe


def _key_of(detail: ErrorDetails) -> str:
    """The dotted key that an error is about: without the index in a list and the names of a variant or
    of a type."""
    section, *below = [part for part in detail["loc"] if isinstance(part, str) and part not in (VALUE.tag, MAPPING.tag)]
    if section in VARIANTS:
        below = below[1:] or [VARIANTS[section][0]]
    name = ".".join((section, *below))
    if name in keys() or name in sections():
        return name
    # What follows the key names one of the types that it may have.
    return next((key for key in keys() if name.startswith(f"{key}.")), name)


def _refuse(name: str, kind: str, sound: Mapping[str, SourceValue], path: Path, tree: SourceTree) -> None:
    """Adds the problem with a key; `kind` is pydantic's type of error."""
    key = keys()[name]
    if kind == "missing":
        if not tree.unread:
            place = (tree.source_of(name) if name.rpartition(".")[0] in keys() else None) or str(path)
            tree.refuse(f"{name}: missing, expected {key.expects}. {key.meaning}", place)
    elif kind == "extra_forbidden":
        section = name.rpartition(".")[0]
        chooser, default = VARIANTS[section]
        chosen = sound[f"{section}.{chooser}"].value if f"{section}.{chooser}" in sound else default
        text = f"{name}: never read by {chosen}, only by {' or '.join(key.variants)}"
        text += f"; remove it, set it to null, or change {section}.{chooser}"
        tree.refuse(text, sound[name].source, unread_keys=(name,))
    elif name in sound:
        given = sound[name]
        text = f"{name}: {source.format_value(given.value)} found, expected {key.expects}"
        tree.refuse(text + suggest_mapping(name, given), given.source)


def _known(tree: SourceTree) -> dict[str, SourceValue]:
    """The values whose keys exist; the others become problems, each once. A null is as if it had not been given."""
    known: dict[str, SourceValue] = {}
    reported: set[str] = set()
    for name, given in tree.values.items():
        if name in REMOVED:
            continue
        if name in keys():
            if given.value is not None:
                known[name] = given
        elif name in sections():
            if given.value is not None and given.value != {}:
                text = f"{name}: {source.format_value(given.value)} found, expected a mapping of {', '.join(keys_of(name))}"
                tree.refuse(text + suggest_mapping(name, given), given.source)
        else:
            parts = name.split(".")
            prefixes = (".".join(parts[: n + 1]) for n in range(len(parts)))
            wrong = next(prefix for prefix in prefixes if prefix not in sections())
            if wrong in reported:
                continue
            if wrong in keys():
                text = f"{wrong}: a mapping found, expected {keys()[wrong].expects}"
            else:
                meant = f"; {suggest_key(wrong)}" if len(reported) < source.MOST_PROBLEMS else ""
                text = f"{source.format_key(wrong)}: unknown key{meant}"
            reported.add(wrong)
            tree.refuse(text, given.source)
    return known


class Complaint(NamedTuple):
    """What is wrong with a dotted key, with a hint how to fix it. `unread`: that is only that nothing reads these keys."""

    key: str
    text: str
    unread: tuple[str, ...] = ()


def _unread(key: str, text: str) -> Complaint:
    return Complaint(key, text, (key,))


def contradictions(recipe: Recipe) -> Iterator[Complaint]:
    """All that is contradictory in a recipe whose single values are sound."""
    cv, schedule = recipe.data.cv, recipe.schedule
    ways: dict[str, Any] = {"fraction": cv.fraction, "speakers": cv.speakers, "utterances": cv.utterances}
    ways["data"] = cv.data or cv.alignments
    given = [f"data.cv.{key}" for key, value in ways.items() if value is not None]
    if len(given) > 1:
        ways_are = "these are different ways to hold out data: keep one, set the others to null"
        yield Complaint(given[0], f"given together with {' and '.join(given[1:])}; {ways_are}", tuple(given))
    for key, other in (("data", "alignments"), ("alignments", "data")):
        if getattr(cv, key) is not None and getattr(cv, other) is None:
            yield _unread(f"data.cv.{key}", f"needs data.cv.{other}; give both, or neither")
    if cv.transforms is not None and (cv.data is None or recipe.data.transforms is None):
        absent = "data.cv.data" if cv.data is None else "data.transforms"
        yield _unread("data.cv.transforms", f"never read without {absent}; remove it or set it to null")
    if cv.by is not None and cv.fraction is None:
        why = f"{cv.by} found, but there is no data.cv.fraction to hold out; remove it or set it to null"
        yield _unread("data.cv.by", why)
    yield from _lists("data.train", recipe.data.train, "data.", recipe.data)
    yield from _lists("data.cv.data", cv.data, "data.cv.", cv)
    counted = any(is_given(recipe, key) for key in ("model.hidden_layers", LAYERS_KEY))
    if counted or not isinstance(recipe.init, TrainedModelConfig):
        yield from _freeze(recipe.model)  # else known when init.model is read
    yield from _model(recipe)
    yield from _pretrain(recipe)
    if schedule.name == "exponential" and schedule.final_learning_rate > schedule.initial_learning_rate:
        most = f"at most schedule.initial_learning_rate = {schedule.initial_learning_rate:g}: the rate falls"
        yield Complaint("schedule.final_learning_rate", f"{schedule.final_learning_rate:g} found, expected {most}")
    yield from minibatch_problems(recipe)
    yield from _parallel(recipe.parallel)


def minibatch_problems(recipe: Recipe) -> Iterator[Complaint]:
    """A growing minibatch that shrinks; `minibatch_scope: total` with one that the workers cannot share equally."""
    given, workers = recipe.minibatch_size, recipe.minibatch_workers
    sizes = {"minibatch_size": given} if isinstance(given, int) else {}
    if not isinstance(given, int):
        sizes = {"minibatch_size.start": given.start, "minibatch_size.end": given.end}
        if given.end < given.start:
            yield Complaint(
                "minibatch_size.end", f"{given.end} found, expected at least minibatch_size.start = {given.start}"
            )
    for key, size in sizes.items():
        if size % workers:
            near = [n for n in (size - size % workers, size - size % workers + workers) if n]
            nearest = " or ".join(map(str, near))
            share = f"a multiple of parallel.workers = {workers}, as minibatch_scope is total: {nearest}"
            yield Complaint(key, f"{size} found, expected {share}")


SHORT_FORM = ("hidden_layers", "hidden_units", "activation")  # of `model.layers`
OF_LAYERS = ("layers", "bands")


def _model(recipe: Recipe) -> Iterator[Complaint]:
    model = recipe.model
    for key in (key for key in _unread_model(model) if key in model.model_fields_set):
        if getattr(model, key) is None:
            continue
        if model.layers is not None:
            why = f"given together with {LAYERS_KEY}, which says it for each layer; give one of the two"
            yield _unread(f"model.{key}", why)
        elif not isinstance(recipe.init, TrainedModelConfig):
            yield _unread(f"model.{key}", f"never read without {LAYERS_KEY}; remove it or set it to null")


def _unread_model(model: ModelConfig) -> tuple[str, ...]:
    return OF_LAYERS[1:] if model.layers is None else SHORT_FORM


def _freeze(model: ModelConfig) -> Iterator[Complaint]:
    layers, frozen = sum(model.layer_counts()) + 1, model.freeze or []
    if wrong := [number for number in frozen if not 0 <= number < layers]:
        expected = f"0 (the first hidden layer) to {layers - 1} (the output layer)"
        yield Complaint("model.freeze", f"{wrong[0]} found, expected {expected}")
        return
    bare = {number for number, layer in numbered(model.layers or ()) if not layer.trained}
    if len(set(frozen) | bare) == layers:
        which = f"all {layers} layers" if not bare else f"all {layers - len(bare)} layers that have parameters"
        yield Complaint("model.freeze", f"{which} are frozen, so that nothing is trained: leave at least one")


def _lists(key: str, dirs: MaybePaths, prefix: str, section: DataConfig | CrossValidationConfig) -> Iterator[Complaint]:
    """Of a section whose alignments and transforms are not those of as many corpora as it has data dirs."""
    expected = len(as_list(dirs))
    for name, paths in (("alignments", section.alignments), ("transforms", section.transforms)):
        found = len(as_list(paths))
        if expected and found not in (0, expected) and not (name == "transforms" and found == 1):
            hint = (
                f"give {'an alignment' if name == 'alignments' else 'transforms'} for each data dir, in the same order"
            )
            yield Complaint(f"{prefix}{name}", f"{found} found, but {key} names {expected}; {hint}")


def is_read(recipe: Recipe, key: str) -> bool:
    section, _, last = key.rpartition(".")
    if section == "model":
        return last not in _unread_model(recipe.model)
    if section == "pretrain":
        return last not in _unread_pretrain(recipe)
    if section == "parallel" and last in _unread_parallel(recipe.parallel):
        return False
    return section not in VARIANTS or hasattr(getattr(recipe, section), last)


def _unread_pretrain(recipe: Recipe) -> dict[str, str]:
    """The keys of `pretrain` that are not read, and why."""
    if recipe.init != "rbm":
        why = "init is random" if recipe.init == "random" else "training starts from init.model"
        return dict.fromkeys(PretrainConfig.model_fields, why)
    if recipe.pretrain.dbn is not None:
        of_making = [key for key in PretrainConfig.model_fields if key not in ("dbn", "feature_transform")]
        return dict.fromkeys(of_making, "pretrain.dbn names a finished DBN")
    unread = {"feature_transform": "there is no pretrain.dbn"}
    if recipe.model.layers_below_rbms():
        unread["gaussian_learning_rate"] = "the visible units of the lowest RBM are those of a convolution"
    else:
        unread["below"] = "all hidden layers come from RBMs"
    by_hours = (
        {} if recipe.pretrain.epochs is None else dict.fromkeys(("hours", "max_epochs"), "pretrain.epochs is given")
    )
    return {**unread, **by_hours}


def _pretrain(recipe: Recipe) -> Iterator[Complaint]:
    for key, why in _unread_pretrain(recipe).items():
        if key in recipe.pretrain.model_fields_set and getattr(recipe.pretrain, key) is not None:
            yield _unread(f"pretrain.{key}", f"never read, as {why}; remove it or set it to null")
    if recipe.init != "rbm":
        return
    model, layers, epochs = recipe.model, len(recipe.model.rbm_units()), recipe.pretrain.epochs
    why = "expected sigmoid: RBMs have binary hidden units"
    if model.layers is None and model.activation != "sigmoid":
        yield Complaint("model.activation", f"{model.activation} found, {why}")
    for number, layer in list(numbered(model.layers or ()))[model.layers_below_rbms() :]:
        if (activation := getattr(layer, "activation", "sigmoid")) != "sigmoid":
            yield Complaint(LAYERS_KEY, f"{layer_name(number, layer)}: {activation} found, {why}")
    if epochs is not None and len(epochs) > layers > 0:
        yield Complaint(
            "pretrain.epochs", f"{len(epochs)} numbers found, expected at most one for each of {layers} RBMs"
        )
    if layers == 0 and model.layers is None:
        yield Complaint("model.hidden_layers", "0 found, expected 1 or more: there is nothing to pretrain")
    elif layers == 0:
        yield Complaint(LAYERS_KEY, "no affine layer at the end: there is nothing to pretrain")
    elif model.layers_below_rbms() and recipe.pretrain.below is None and recipe.pretrain.dbn is None:
        hint = "train the network with init: random first, and name its run dir"
        yield Complaint("pretrain.below", f"not given, but there are other layers below those of the RBMs: {hint}")


def _unread_parallel(parallel: ParallelConfig) -> dict[str, str]:
    unread: dict[str, str] = {}
    if parallel.strategy == "gradient-all-reduce":
        unread["averaging_period"] = "gradients are averaged at every minibatch"
        unread["local_momentum"] = "averaged gradients give every worker the same momentum"
    if parallel.warmup == "none":
        unread["warmup_minibatches"] = "parallel.warmup is none"
    return unread


def _parallel(parallel: ParallelConfig) -> Iterator[Complaint]:
    for key, why in _unread_parallel(parallel).items():
        default = type(parallel).model_fields[key].default
        # The averaging period is in fragments that strategies share.
        if key != "averaging_period" and key in parallel.model_fields_set and getattr(parallel, key) != default:
            yield _unread(f"parallel.{key}", f"never read: {why}; remove it or set it to null")
    against = {"gradient-all-reduce": "takes a step from every averaging", "bmuf": "starts a block from the last"}
    if parallel.overlap and parallel.strategy in against:
        which = f"{parallel.strategy}, which {against[parallel.strategy]}"
        yield Complaint("parallel.overlap", f"true found beside strategy: {which}; set it to false")
    if parallel.overlap and parallel.local_momentum == "average":
        yield Complaint("parallel.overlap", "true found beside local_momentum: average; take keep or reset")
