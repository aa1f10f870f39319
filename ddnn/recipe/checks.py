"""Conditions between the keys of a recipe, beyond the type and range of each key."""

from __future__ import annotations

from collections.abc import Iterator

from ddnn.recipe.schema import VARIANTS, CrossValidationConfig, ParallelConfig, PretrainConfig, Recipe, ScheduleConfig

Complaint = tuple[str, str]  # A dotted key and what is wrong with it, with a hint how to fix it


def contradictions(recipe: Recipe) -> Iterator[Complaint]:
    """All that is contradictory in a recipe whose single values are sound."""
    yield from _cross_validation(recipe.data.cv)
    yield from _pretrain(recipe)
    yield from _schedule(recipe.schedule)
    yield from _parallel(recipe.parallel)


def is_read(recipe: Recipe, key: str) -> bool:
    section, _, last = key.rpartition(".")
    if section == "pretrain":
        return last not in _unread_pretrain(recipe)
    if section == "parallel" and last in _unread_parallel(recipe.parallel):
        return False
    return section not in VARIANTS or hasattr(getattr(recipe, section), last)


def _cross_validation(cv: CrossValidationConfig) -> Iterator[Complaint]:
    ways = {"fraction": cv.fraction, "speakers": cv.speakers, "data": cv.data or cv.alignments}
    given = [f"data.cv.{key}" for key, value in ways.items() if value is not None]
    if len(given) > 1:
        ways_are = "these are different ways to hold out data: keep one, set the others to null"
        yield given[0], f"given together with {' and '.join(given[1:])}; {ways_are}"
    for key, other in (("data", "alignments"), ("alignments", "data")):
        if getattr(cv, key) is not None and getattr(cv, other) is None:
            yield f"data.cv.{key}", f"needs data.cv.{other}; give both, or neither"


def _unread_pretrain(recipe: Recipe) -> dict[str, str]:
    """The keys of `pretrain` that are not read, and why."""
    if recipe.init == "random":
        return dict.fromkeys(PretrainConfig.model_fields, "init is random")
    if recipe.pretrain.dbn is not None:
        of_making = [key for key in PretrainConfig.model_fields if key not in ("dbn", "feature_transform")]
        return dict.fromkeys(of_making, "pretrain.dbn names a finished DBN")
    unread = {"feature_transform": "there is no pretrain.dbn"}
    return unread if recipe.pretrain.epochs is None else {**unread, "hours": "pretrain.epochs is given"}


def _pretrain(recipe: Recipe) -> Iterator[Complaint]:
    for key, why in _unread_pretrain(recipe).items():
        if key in recipe.pretrain.model_fields_set and getattr(recipe.pretrain, key) is not None:
            yield f"pretrain.{key}", f"never read, as {why}; remove it or set it to null"
    if recipe.init != "rbm":
        return
    layers, activation, epochs = recipe.model.hidden_layers, recipe.model.activation, recipe.pretrain.epochs
    if activation != "sigmoid":
        yield "model.activation", f"{activation} found, expected sigmoid: RBMs have binary hidden units"
    if epochs is not None and len(epochs) > layers > 0:
        yield "pretrain.epochs", f"{len(epochs)} numbers found, expected at most one for each of {layers} RBMs"
    if layers == 0:
        yield "model.hidden_layers", "0 found, expected 1 or more: there is nothing to pretrain"


def _schedule(schedule: ScheduleConfig) -> Iterator[Complaint]:
    if schedule.name == "exponential" and schedule.final_learning_rate > schedule.initial_learning_rate:
        most = f"at most schedule.initial_learning_rate = {schedule.initial_learning_rate:g}: the rate falls"
        yield "schedule.final_learning_rate", f"{schedule.final_learning_rate:g} found, expected {most}"


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
            yield f"parallel.{key}", f"never read: {why}; remove it or set it to null"
    against = {
        "gradient-all-reduce": "takes a step from every averaging",
        "bmuf": "starts a block from the last",
    }
    if parallel.overlap and parallel.strategy in against:
        which = f"{parallel.strategy}, which {against[parallel.strategy]}"
        yield "parallel.overlap", f"true found beside strategy: {which}; set it to false"
    if parallel.overlap and parallel.local_momentum == "average":
        yield "parallel.overlap", "true found beside local_momentum: average; take keep or reset"
