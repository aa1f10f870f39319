"""Conditions between the keys of a recipe, beyond the type and range of each key."""

from __future__ import annotations

from ddnn.recipe.schema import VARIANTS, ParallelConfig, Recipe, ScheduleConfig

Complaint = tuple[str, str]
"""A dotted key and what is wrong with it, with a hint how to fix it."""


def validate(recipe: Recipe) -> list[Complaint]:
    """All that is contradictory in a recipe whose single values are sound; empty where nothing is."""
    return [
        *_cross_validation(recipe),
        *_pretrain(recipe),
        *_schedule(recipe.schedule),
        *_parallel(recipe),
    ]


def is_read(recipe: Recipe, key: str) -> bool:
    """Whether the dotted `key` is read at all, as the recipe has it."""
    section, _, last = key.rpartition(".")
    if section == "pretrain":
        return last not in _unread_pretrain(recipe)
    if section == "parallel" and last in _unread_parallel(recipe.parallel):
        return False
    return section not in VARIANTS or hasattr(getattr(recipe, section), last)


def _cross_validation(recipe: Recipe) -> list[Complaint]:
    cv = recipe.data.cv
    found: list[Complaint] = []
    ways = {
        "data.cv.fraction": cv.fraction is not None,
        "data.cv.speakers": cv.speakers is not None,
        "data.cv.data": cv.data is not None or cv.alignments is not None,
    }
    given = [key for key, is_given in ways.items() if is_given]
    if len(given) > 1:
        others = " and ".join(given[1:])
        text = (
            f"given together with {others}; these are different ways to hold out data: keep one, set the others to null"
        )
        found.append((given[0], text))
    if cv.data is not None and cv.alignments is None:
        found.append(("data.cv.data", "needs data.cv.alignments; give both, or neither"))
    if cv.alignments is not None and cv.data is None:
        found.append(("data.cv.alignments", "needs data.cv.data; give both, or neither"))
    return found


def _unread_pretrain(recipe: Recipe) -> tuple[str, ...]:
    """The keys of `pretrain` that are not read."""
    making = ("epochs", "hours", "minibatch_size", "gaussian_learning_rate", "learning_rate", "l2", "kaldi_momentum")
    if recipe.init == "random":
        return ("dbn", "feature_transform", *making)
    if recipe.pretrain.dbn is not None:
        return making
    return ("feature_transform", "hours") if recipe.pretrain.epochs is not None else ("feature_transform",)


def _pretrain(recipe: Recipe) -> list[Complaint]:
    found: list[Complaint] = []
    given = recipe.pretrain.model_fields_set
    reason = "init is random" if recipe.init == "random" else "pretrain.dbn names a finished DBN"
    for key in _unread_pretrain(recipe):
        if key in given and getattr(recipe.pretrain, key) is not None:
            why = reason
            if recipe.init == "rbm" and recipe.pretrain.dbn is None:
                why = "pretrain.epochs is given" if key == "hours" else "there is no pretrain.dbn"
            found.append((f"pretrain.{key}", f"never read, as {why}; remove it or set it to null"))
    if recipe.init == "rbm" and recipe.model.activation != "sigmoid":
        activation = recipe.model.activation
        found.append(("model.activation", f"{activation} found, expected sigmoid: RBMs have binary hidden units"))
    epochs = recipe.pretrain.epochs
    if recipe.init == "rbm" and epochs is not None and len(epochs) > recipe.model.hidden_layers > 0:
        layers = recipe.model.hidden_layers
        found.append(
            ("pretrain.epochs", f"{len(epochs)} numbers found, expected at most one for each of {layers} RBMs")
        )
    if recipe.init == "rbm" and recipe.model.hidden_layers == 0:
        found.append(("model.hidden_layers", "0 found, expected 1 or more: there is nothing to pretrain"))
    return found


def _schedule(schedule: ScheduleConfig) -> list[Complaint]:
    found: list[Complaint] = []
    if schedule.name == "exponential" and schedule.final_learning_rate > schedule.initial_learning_rate:
        text = f"{schedule.final_learning_rate:g} found, expected at most "
        text += f"schedule.initial_learning_rate = {schedule.initial_learning_rate:g}: the rate falls"
        found.append(("schedule.final_learning_rate", text))
    return found


def _unread_parallel(parallel: ParallelConfig) -> dict[str, str]:
    """The keys of `parallel` that are not read, and why."""
    unread: dict[str, str] = {}
    if parallel.strategy == "gradient-all-reduce":
        unread["averaging_period"] = "gradients are averaged at every minibatch"
        unread["local_momentum"] = "averaged gradients give every worker the same momentum"
    if parallel.warmup == "none":
        unread["warmup_minibatches"] = "parallel.warmup is none"
    return unread


def _parallel(recipe: Recipe) -> list[Complaint]:
    parallel = recipe.parallel
    found: list[Complaint] = []
    for key, why in _unread_parallel(parallel).items():
        default = type(parallel).model_fields[key].default
        # `every` is in fragments that strategies share.
        if key != "averaging_period" and key in parallel.model_fields_set and getattr(parallel, key) != default:
            found.append((f"parallel.{key}", f"never read: {why}; remove it or set it to null"))
    if parallel.overlap and parallel.strategy in ("gradient-all-reduce", "bmuf"):
        why = (
            "takes a step from every averaging"
            if parallel.strategy == "gradient-all-reduce"
            else "starts a block from the last"
        )
        found.append(
            ("parallel.overlap", f"true found beside strategy: {parallel.strategy}, which {why}; set it to false")
        )
    if parallel.overlap and parallel.local_momentum == "average":
        found.append(("parallel.overlap", "true found beside local_momentum: average; take keep or reset"))
    return found
