"""From a YAML file, its includes and `--set` to a checked Recipe, with all problems reported at once; and back."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddnn.recipe import source
from ddnn.recipe.keys import REQUIRED, keys, keys_of, layer_keys, sections, suggest_key, suggest_mapping
from ddnn.recipe.layers import LAYERS, LayerConfig, expand_repeats, layer_name, why_no_layer
from ddnn.recipe.schema import (
    VARIANTS,
    CrossValidationConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PretrainConfig,
    Recipe,
    SequenceConfig,
    TrainedModelConfig,
)
from ddnn.recipe.section import MAPPING, VALUE, OptionalPaths, Section, as_list, get_value, is_given
from ddnn.recipe.source import Problem, SourceTree
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
    Paths in the result are absolute. A key set to null takes its default.

    Args:
        must_exist: whether a data path that does not exist is a problem; the data of finished runs may be gone.
        optional_paths: keys of paths that need not exist in any case.
        user_supplied: the user named this file. Otherwise it and its includes are untrusted: only `overrides` may enable
            shell commands.
        note: told which keys of the files are dropped, because an override (another schedule, say) leaves them unread.

    Raises:
        RecipeError: all problems of all sources, one a line.
    """
    tree = SourceTree()
    own = _read_with_includes(path, tree, [])
    in_files, trusted = dict(tree.values), {own.sources.get(PIPES)} if user_supplied else set()
    for setting in overrides:
        parsed = source.parse_setting(setting)
        for name in [name for name in parsed.values if name.partition(".")[0] == "include"]:
            parsed.add_problem("include: cannot be set; write it in the recipe", parsed.sources[name])
            del parsed.values[name]
        _override(tree, parsed)
        trusted.add(parsed.sources.get(PIPES))
    if tree.values.get(PIPES) is True and tree.sources[PIPES] not in trusted:
        where = "on the command line, or in a recipe that it names: not in included files, run dirs and corpora"
        hint = f"give --allow-pipes if the commands are yours, or --set {PIPES}=false"
        tree.add_problem(f"{PIPES}: true counts only {where}; {hint}", tree.sources[PIPES])
    existing = {*keys()} - {*OUTPUT_PATHS, *optional_paths} if must_exist else set()
    recipe, problems = _build(path, tree, existing)
    while dropped := _unread_since_set(path, tree, in_files, existing, problems):
        sources = ", ".join(f"{key} [{tree.sources[key]}]" for key in in_files if key in dropped)
        note("--set chooses otherwise, so these keys of the recipe are not used: %s", sources)
        tree.values = {key: value for key, value in tree.values.items() if key not in dropped}
        recipe, problems = _build(path, tree, existing)
    if recipe is None or problems:
        similar = None if source.exists(path) else source.similar_file(path)
        lines = [problem.text if problem.source == str(path) else problem for problem in problems]
        message = source.format_problems(lines, "problems in the recipe", source.MAX_PROBLEMS)
        raise RecipeError(message, location=path, hint=similar)
    return recipe


def _unread_since_set(
    path: Path, tree: SourceTree, in_files: Mapping[str, Any], must_exist: Collection[str], problems: Sequence[Problem]
) -> set[str]:
    """The keys of the files that nothing reads only because of a `--set`."""
    unread = {key for problem in problems for key in problem.unread_keys if key in in_files}
    unread = {key for key in unread if not tree.sources[key].startswith("--set")}
    if unread:
        _, without_set = _build(path, replace(tree, values=dict(in_files), problems=[]), must_exist)
        unread -= {key for problem in without_set for key in problem.unread_keys}
    return unread


def recipe_values(recipe: Recipe) -> dict[str, Any]:
    """The values that a recipe gives or has by default, by dotted key in schema order, as YAML has them. Omitted are keys
    that were not given and have no default, and those that the chosen optimizer and schedule never read."""
    values = {name: get_value(recipe, name) for name in keys() if is_read(recipe, name)}
    return {name: _plain(value) for name, value in values.items() if not isinstance(value, Section | None)}


def dump_recipe(recipe: Recipe) -> str:
    """The `recipe_values` as YAML, paths absolute; `load_recipe` makes the recipe equal again."""
    return yaml.safe_dump(source.nested(recipe_values(recipe)), sort_keys=False, allow_unicode=True, width=10_000)


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
    own = source.read_yaml(path)
    _override(tree, SourceTree(problems=own.problems, incomplete=own.incomplete))
    own.problems = []
    values, place = own.nested(), own.sources.get("include", "")
    include = values.pop("include", None)
    own.values = source.flat(values)
    names = [] if include is None else include if isinstance(include, list) else [include]
    if not all(isinstance(name, str) and name and "\0" not in name for name in names):
        text = f"include: {source.format_value(include)} found, expected a file name or a list of them"
        tree.add_problem(text, place, incomplete=True)
        names = []
    chain = (*chain, path.resolve()) if names else chain
    for name in names:
        if len(files) >= MAX_FILES:
            tree.add_problem(f"include: more than {MAX_FILES} files in all", place, incomplete=True)
            break
        candidates = [path.parent / name, source.configs_folder() / name]
        fragment = next(filter(source.exists, candidates), None)
        if fragment is None:
            known = ", ".join(source.shipped_fragments()) or "none"
            text = f"include: {name} is neither {candidates[0]} nor {candidates[1]}; ddnn comes with {known}"
            tree.add_problem(text, place, incomplete=True)
        elif fragment.resolve() in chain:
            text = f"include: {name} includes itself, by way of {' -> '.join(p.name for p in chain)}"
            tree.add_problem(text, place, incomplete=True)
        else:
            _read_with_includes(fragment, tree, files, chain)
    _override(tree, own)
    return own


def _override(tree: SourceTree, later: SourceTree) -> None:
    """Adds values that win over those of `tree`, and problems. Of a key that takes a value or a mapping, either replaces the
    other; a null resets it."""
    tree.problems += later.problems
    tree.incomplete |= later.incomplete
    replaced = tuple(f"{name}[" for name in later.values)
    retained = {name: place for name, place in tree.sources.items() if not name.startswith(replaced)}
    tree.sources = retained | later.sources
    for name, value in later.values.items():
        section = name.rpartition(".")[0]
        if name in keys() and name in sections():
            for other in [other for other in tree.values if other.startswith(f"{name}.")]:
                del tree.values[other]
        elif section in keys() and section in sections() and value is not None:
            tree.values.pop(section, None)
        tree.values[name] = value


def _build(path: Path, tree: SourceTree, must_exist: Collection[str]) -> tuple[Recipe | None, list[Problem]]:
    """The recipe, if there is one, and all that is wrong. `must_exist`: keys whose paths must. Wrong values are not used, so
    that the rest is still checked. A null is as if it had not been given."""
    problems, wrong = list(tree.problems), set[str]()
    values = {name: value for name, value in tree.values.items() if value is not None and name not in REMOVED}
    for name in [name for name in values if name in keys() and keys()[name].is_path]:
        values[name], missing = _absolute(values[name], path.parent, name in must_exist)
        problems += [Problem(f"{name}: {text}", tree.sources[name]) for text in missing]
    recipe = None
    while recipe is None:
        try:
            recipe = Recipe.model_validate(source.nested({"data": {}} | values), strict=True)
        except ValidationError as error:
            details = [detail for detail in error.errors() if detail["type"] != "default_factory_not_called"]
            details_by_name = {_locate(detail): detail for detail in details}
            if not wrong:  # what a second look finds follows from the values that were removed after the first
                for key, name in sorted(details_by_name, key=lambda names: names[0] in keys()):
                    problems += _describe(key, name, details_by_name[key, name], path, tree)
            for key, _ in details_by_name:
                wrong.add(key)
                section = key.rpartition(".")[0]
                removed = section if section in keys() else key  # of the mapping that a key takes none is used
                values = {n: value for n, value in values.items() if not f"{n}.".startswith(f"{removed}.")}
                if removed == key and key in keys() and keys()[key].default is REQUIRED:
                    values[key] = Path("/")
    if tree.incomplete:
        return None, problems
    for number, layer in enumerate(recipe.model.layers or ()):
        layer.set_place(tree.source_of(f"{LAYERS_KEY}[{number}]") or "")
    for name, complaint, unread in contradictions(recipe):
        # How many data dirs there are is not known where they are wrong, nor which keys go with layers that are wrong.
        follows = name.startswith("model.") and LAYERS_KEY in wrong
        follows = follows or (name in ("data.alignments", "data.transforms") and "data.train" in wrong)
        if name not in wrong and not follows:
            problems.append(Problem(f"{name}: {complaint}", tree.source_of(name) or str(path), unread))
    return recipe, problems


def _absolute(value: Any, folder: Path, must_exist: bool) -> tuple[Any, list[str]]:
    """The path or paths that a key means, and what is wrong with them; one that is wrong is /."""
    paths, problems = list[Any](value) if isinstance(value, list) else [value], list[str]()
    for n, text in enumerate(paths):
        if isinstance(text, str):
            paths[n] = source.find_path(text, folder, must_exist)
        if isinstance(paths[n], str):
            problems.append(paths[n])
            paths[n] = Path("/")
    return paths if isinstance(value, list) else paths[0], problems


def _locate(detail: ErrorDetails) -> tuple[str, str]:
    """The dotted key that an error is about, without the index in a list and the names of a variant or of a type; and how
    messages name it, which of a layer is "model.layers[0].affine.units"."""
    section, *below = [part for part in detail["loc"] if part not in (VALUE.tag, MAPPING.tag)]
    if [section, *below[:1]] == LAYERS_KEY.split(".") and len(below) > 1:
        return LAYERS_KEY, ".".join((f"{LAYERS_KEY}[{below[1]}]", *map(str, below[2:4])))
    below = [part for part in below if isinstance(part, str)]
    if section in VARIANTS:
        below = [VARIANTS[section][0]] if detail["type"].startswith("union_tag") else below[1:]
    name = ".".join(map(str, (section, *below)))
    if name not in keys() and name not in sections() and detail["type"] != "extra_forbidden":
        # What follows the key names one of the types that it may have.
        name = next((key for key in keys() if name.startswith(f"{key}.")), name)
    return name, name


def _describe(key: str, name: str, detail: ErrorDetails, path: Path, tree: SourceTree) -> Iterator[Problem]:
    """The problem that pydantic found with a key, `name` in messages."""
    if key != name:
        yield _describe_layer(name, detail, tree)
        return
    info, section = keys().get(name), name.rpartition(".")[0]
    place, value = tree.source_of(name) or str(path), tree.values.get(name, detail["input"])
    if detail["type"] == "missing" and info is not None:
        if not tree.incomplete:
            yield Problem(info.as_missing(name), place if section in keys() else str(path))
    elif detail["type"] == "extra_forbidden" and info is not None:
        chooser, default = VARIANTS[section]
        chosen = tree.values.get(f"{section}.{chooser}", default)
        text = f"{name}: never read by {chosen}, only by {' or '.join(info.variants)}"
        yield Problem(f"{text}; remove it, set it to null, or change {section}.{chooser}", place, (name,))
    elif detail["type"] == "extra_forbidden":
        yield Problem(f"{source.format_key(name)}: unknown key; {suggest_key(name)}", place)
    elif detail["type"] == "value_error":
        yield Problem(f"{name}: {detail['ctx']['error']}", place)
    else:
        mapping = f"{name}: {source.format_value(value)} found, expected a mapping of {', '.join(keys_of(name))}"
        text = mapping if info is None else info.as_wrong(name, value)
        yield Problem(text + suggest_mapping(name, value, place), place)


def _describe_layer(name: str, detail: ErrorDetails, tree: SourceTree) -> Problem:
    """The problem with an item of `model.layers`, or with a key of it."""
    _, item, kind, key, *_ = (*name.split("."), "", "")
    place = tree.sources.get(f"model.{item}.{key}") or tree.source_of(name) or ""
    value, infos = detail["input"], layer_keys().get(kind, {})
    if not kind:
        text = f"{name}: {why_no_layer(value)}"
    elif not key:
        found = f"{source.format_value(value)} found, expected a mapping of {', '.join(infos)}"
        text = f"{name}: {detail['ctx']['error'] if detail['type'] == 'value_error' else found}"
    elif detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(key, infos, n=1)
        meant = f"did you mean {near[0]}?" if near else f"the keys here are {', '.join(infos)}"
        text = f"{source.format_key(name)}: unknown key; {meant}"
    elif detail["type"] == "missing":
        text = infos[key].as_missing(name)
    else:
        shown = value if detail["loc"][-1] in (key, VALUE.tag) else {}
        text = infos[key].as_wrong(name.removesuffix(f".{LAYERS[kind].primary_key}"), shown)
    return Problem(text, place)


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
    # One worker may be only the default, of a recipe that a job of several workers runs.
    yield from (each for each in worker_problems(recipe) if recipe.parallel.workers > 1 or "workers" not in each.key)
    yield from _comm_dtype(recipe.parallel)
    yield from _overlap(recipe.parallel)
    yield from _averaging_by_epochs(recipe.parallel)
    yield from _async(recipe.parallel)
    yield from _stages(recipe)
    yield from _whole_matrices(recipe)
    if recipe.criterion != "ce":
        yield from _sequence(recipe)


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
    if parallel.stages == 1:
        add("parallel", "parallel.stages is 1", "microbatches", "pipeline")
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
        add("parallel", "gradients are averaged at every minibatch", "averaging_period", "averaging_frames")
        add("parallel", "averaged gradients give every worker the same momentum", "local_momentum")
    elif parallel.averaging_frames == "epoch":
        add(
            "parallel", "the optimizer's momentum is cleared where parallel.averaging_frames is epoch", "local_momentum"
        )
        if parallel.strategy == "all-reduce":
            add("parallel", "the mean at the end of an epoch is sent as float32", "comm_dtype")
    if parallel.warmup == "none":
        add("parallel", "parallel.warmup is none", "warmup_minibatches")
    if isinstance(recipe.criterion, SequenceConfig):
        of_utterances = "criterion.utterances_per_update says what an update is"
        unread |= dict.fromkeys(("minibatch_size", "minibatch_scope", "randomizer_size"), of_utterances)
        mmi = recipe.criterion.name == "mmi"
        add(
            "criterion",
            f"criterion.name is {recipe.criterion}",
            *(("one_silence_class",) if mmi else ("drop_frames", "boost")),
        )
    return unread


def is_read(recipe: Recipe, key: str) -> bool:
    section, _, last = key.rpartition(".")
    return key not in unread_keys(recipe) and (section not in VARIANTS or hasattr(getattr(recipe, section), last))


def _is_chosen(recipe: Recipe, key: str) -> bool:
    """Whether a recipe gives a value to a key that nothing reads, and means it."""
    section, _, last = key.rpartition(".")
    fields = get_value(recipe, section) if section else recipe
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


def worker_problems(recipe: Recipe) -> Iterator[Complaint]:
    """Workers that do not fill replicas; a growing minibatch that shrinks; `minibatch_scope: total` with one that the
    workers cannot share equally."""
    parallel, shared = recipe.parallel, "columns" if recipe.parallel.stages == 1 else "columns x stages"
    total, shared_by = parallel.workers, math.prod(parallel.split)
    if total % shared_by:
        below = total - total % shared_by
        nearest = " or ".join(str(n) for n in (below, below + shared_by) if n)
        expected = f"a multiple of parallel.{shared} = {shared_by}"
        yield Complaint("parallel.workers", f"{total} found, expected {expected}: {nearest}")
    size_or_growth, workers = recipe.minibatch_size, recipe.minibatch_workers
    sizes = {"minibatch_size": size_or_growth} if isinstance(size_or_growth, int) else {}
    if not isinstance(size_or_growth, int):
        sizes = {"minibatch_size.start": size_or_growth.start, "minibatch_size.end": size_or_growth.end}
        if size_or_growth.end < size_or_growth.start:
            expected = f"at least minibatch_size.start = {size_or_growth.start}"
            yield Complaint("minibatch_size.end", f"{size_or_growth.end} found, expected {expected}")
    for key, size in sizes.items():
        if size % workers:
            below = size - size % workers
            nearest = " or ".join(str(n) for n in (below, below + workers) if n)
            sharing = "workers" if shared_by == 1 else f"workers / parallel.{shared}"
            share = f"a multiple of parallel.{sharing} = {workers}, as minibatch_scope is total: {nearest}"
            yield Complaint(key, f"{size} found, expected {share}")


def _stages(recipe: Recipe) -> Iterator[Complaint]:
    """More stages than layers, or microbatches than frames."""
    parallel, size = recipe.parallel, recipe.minibatch_size
    layers, (_, stages) = sum(recipe.model.layer_counts()) + 1, parallel.split
    if stages > layers and not isinstance(recipe.init, TrainedModelConfig):
        most = f"at most {layers}: a stage holds at least one layer"
        yield Complaint("parallel.stages", f"{stages} found, expected {most}")
    frames = (size if isinstance(size, int) else size.start) // recipe.minibatch_workers
    if parallel.microbatches and parallel.microbatches > frames > 0:
        most = f"at most {frames}, the frames of a minibatch"
        yield Complaint("parallel.microbatches", f"{parallel.microbatches} found, expected {most}")


def _sequence(recipe: Recipe) -> Iterator[Complaint]:
    """What a criterion over utterances cannot have beside it."""
    parallel, name = recipe.parallel, f"with criterion.name: {recipe.criterion}"
    if not isinstance(recipe.init, TrainedModelConfig) or recipe.init.output_layer != "keep":
        yield Complaint(
            "init", f"{name} training starts from a whole network: set init.model to one trained by cross-entropy"
        )
    if recipe.precision == "bf16":
        yield Complaint(
            "precision", f"bf16 found, expected float32 {name}: log-likelihoods are summed over whole utterances"
        )
    for key in ("columns", "stages"):
        if getattr(parallel, key) != 1:
            yield Complaint(
                f"parallel.{key}", f"{getattr(parallel, key)} found, expected 1 {name}: a worker has whole utterances"
            )


def _whole_matrices(recipe: Recipe) -> Iterator[Complaint]:
    """Workers that have parts of matrices, under an optimizer that takes them as a whole."""
    for key in ("columns", "stages"):
        name, number = recipe.optimizer.name, getattr(recipe.parallel, key)
        if name in ("muon", "shampoo") and number != 1:
            why = f"expected 1 with optimizer.name: {name}, which takes weight matrices as a whole"
            yield Complaint(f"parallel.{key}", f"{number} found, {why}")


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
        number = len(as_list(getattr(section, name)))
        if expected and number not in (0, expected) and not (name == "transforms" and number == 1):
            hint = f"give {single} for each data dir, in the same order"
            yield Complaint(f"{prefix}{name}", f"{number} found, but {key} names {expected}; {hint}")


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


def _averaging_by_epochs(parallel: ParallelConfig) -> Iterator[Complaint]:
    key, frames = "parallel.averaging_frames", parallel.averaging_frames
    if parallel.strategy == "async" and isinstance(frames, str):
        why = "whose workers exchange within an epoch, each for itself; give a number"
        yield Complaint(key, f"{frames} found beside strategy: async, {why}")
    if frames != "epoch":
        return
    if parallel.strategy in ("butterfly", "ring", "hopping-ring", "1-bit"):
        why = "whose epochs end with the mean of all-reduce; set strategy: all-reduce"
        yield Complaint(key, f"epoch found beside strategy: {parallel.strategy}, {why}")
    if parallel.overlap:
        yield Complaint(
            key, "epoch found beside overlap: true, but there is no interval to train beside; set it to false"
        )


def _comm_dtype(parallel: ParallelConfig) -> Iterator[Complaint]:
    if parallel.strategy == "1-bit" and parallel.comm_dtype != "float32":
        why = "which sends one bit for each parameter; set it to float32"
        yield Complaint("parallel.comm_dtype", f"{parallel.comm_dtype} found beside strategy: 1-bit, {why}")


def _async(parallel: ParallelConfig) -> Iterator[Complaint]:
    """What a parameter server cannot have beside it."""
    if parallel.strategy != "async":
        return
    whole = "a worker exchanges a whole network, when no other does"
    for key, expected, why in (
        ("comm_dtype", ("float32",), "the parameters of the server are sent, not only changes"),
        ("local_momentum", ("keep", "reset"), "workers do not exchange at the same time"),
        ("columns", (1,), whole),
        ("stages", (1,), whole),
    ):
        if (found := getattr(parallel, key)) not in expected:
            values = " or ".join(map(str, expected))
            yield Complaint(f"parallel.{key}", f"{found} found, expected {values} beside strategy: async: {why}")


def _overlap(parallel: ParallelConfig) -> Iterator[Complaint]:
    if not parallel.overlap:
        return
    against = {"gradient-all-reduce": "takes a step from every averaging", "bmuf": "starts a block from the last"}
    against |= {"elastic": "moves its center by each", "async": "waits for no other worker"}
    if parallel.strategy in against:
        which = f"{parallel.strategy}, which {against[parallel.strategy]}"
        yield Complaint("parallel.overlap", f"true found beside strategy: {which}; set it to false")
    for key, number in (("columns", parallel.columns), ("stages", parallel.stages)):
        if number != 1:
            why = "whose workers exchange in every minibatch; set one of them otherwise"
            yield Complaint("parallel.overlap", f"true found beside {key}: {number}, {why}")
    if parallel.local_momentum == "average":
        yield Complaint("parallel.overlap", "true found beside local_momentum: average; take keep or reset")
