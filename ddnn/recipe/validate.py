"""What must hold between the keys of a recipe, beyond each key's own type and range."""

from __future__ import annotations

from ddnn.recipe.schema import Parallel, Recipe, Schedule

_ONLY_NEWBOB = ("criterion", "start_halving", "end_halving", "halving_factor", "keep_epochs", "min_epochs")
_ONLY_BMUF = ("block_momentum", "block_rate", "nesterov")
_ONLY_NG_SGD = (
    "rank_in",
    "rank_out",
    "alpha",
    "num_samples_history",
    "update_period",
    "max_change_per_sample",
    "max_change_mode",
)
UNREAD: dict[str, dict[str, tuple[str, ...]]] = {
    "optimizer": {"sgd": _ONLY_NG_SGD, "ng-sgd": ()},
    "schedule": {"newbob": ("final",), "exponential": _ONLY_NEWBOB},
}
"""By section and its `name`: the keys that are then never read."""

Complaint = tuple[str, str]
"""A dotted key and what is wrong with it, with how to mend it."""


def validate(recipe: Recipe) -> list[Complaint]:
    """All that is contradictory in a recipe whose single values are sound; empty where nothing is."""
    return [
        *_cross_validation(recipe),
        *_unread(recipe),
        *_pretrain(recipe),
        *_schedule(recipe.schedule),
        *_parallel(recipe),
    ]


def is_read(recipe: Recipe, key: str) -> bool:
    """Whether the dotted `key` is read at all, as the recipe has it."""
    section, _, last = key.rpartition(".")
    if section == "pretrain":
        return last not in _unread_pretrain(recipe)
    if section == "parallel":
        return last not in _unread_parallel(recipe.parallel)
    return section not in UNREAD or last not in UNREAD[section][getattr(recipe, section).name]


def _cross_validation(recipe: Recipe) -> list[Complaint]:
    cv = recipe.data.cv
    found: list[Complaint] = []
    ways = {
        "data.cv.fraction": cv.fraction is not None,
        "data.cv.speakers_file": cv.speakers_file is not None,
        "data.cv.data": cv.data is not None or cv.alignments is not None,
    }
    given = [key for key, is_given in ways.items() if is_given]
    if len(given) > 1:
        others = " and ".join(given[1:])
        text = f"stands beside {others}; these are different ways to hold out data: keep one, set the others to null"
        found.append((given[0], text))
    if cv.data is not None and cv.alignments is None:
        found.append(("data.cv.data", "has no data.cv.alignments beside it; give both, or neither"))
    if cv.alignments is not None and cv.data is None:
        found.append(("data.cv.alignments", "has no data.cv.data beside it; give both, or neither"))
    return found


def _unread(recipe: Recipe) -> list[Complaint]:
    found: list[Complaint] = []
    for section, unread in UNREAD.items():
        given = getattr(recipe, section)
        for key in unread[given.name]:
            if key in given.model_fields_set and getattr(given, key) is not None:
                other = next(name for name, keys in unread.items() if key not in keys)
                text = f"never read by {given.name}, only by {other}; drop it, set it to null, or change {section}.name"
                found.append((f"{section}.{key}", text))
    return found


def _unread_pretrain(recipe: Recipe) -> tuple[str, ...]:
    """The keys of `pretrain` that are not read."""
    making = ("passes", "hours", "minibatch", "gauss_rate", "rate", "l2", "momentum_as_kaldi")
    if recipe.init == "random":
        return ("from", "feature_transform", *making)
    if recipe.pretrain.from_ is not None:
        return making
    return ("feature_transform", "hours") if recipe.pretrain.passes is not None else ("feature_transform",)


def _pretrain(recipe: Recipe) -> list[Complaint]:
    found: list[Complaint] = []
    given = {name.rstrip("_") for name in recipe.pretrain.model_fields_set}
    reason = "init is random" if recipe.init == "random" else "pretrain.from brings a finished stack"
    for key in _unread_pretrain(recipe):
        if key in given and getattr(recipe.pretrain, "from_" if key == "from" else key) is not None:
            why = reason
            if recipe.init == "rbm" and recipe.pretrain.from_ is None:
                why = "pretrain.passes says it" if key == "hours" else "there is no pretrain.from"
            found.append((f"pretrain.{key}", f"never read, as {why}; drop it or set it to null"))
    if recipe.init == "rbm" and recipe.model.activation != "sigmoid":
        activation = recipe.model.activation
        found.append(("model.activation", f"{activation} found, expected sigmoid: RBMs have binary hidden units"))
    passes = recipe.pretrain.passes
    if recipe.init == "rbm" and passes is not None and len(passes) > recipe.model.hidden_layers > 0:
        layers = recipe.model.hidden_layers
        found.append(
            ("pretrain.passes", f"{len(passes)} numbers found, expected at most one for each of {layers} RBMs")
        )
    if recipe.init == "rbm" and recipe.model.hidden_layers == 0:
        found.append(("model.hidden_layers", "0 found, expected 1 or more: there is nothing to pretrain"))
    return found


def _schedule(schedule: Schedule) -> list[Complaint]:
    found: list[Complaint] = []
    if schedule.name == "exponential" and schedule.final is not None and schedule.final > schedule.initial:
        text = f"{schedule.final:g} found, expected at most schedule.initial = {schedule.initial:g}: the rate falls"
        found.append(("schedule.final", text))
    return found


def _unread_parallel(parallel: Parallel) -> dict[str, str]:
    """The keys of `parallel` that are not read, and why."""
    unread: dict[str, str] = {}
    if parallel.reduce != "bmuf":
        unread |= dict.fromkeys(_ONLY_BMUF, f"parallel.reduce is {parallel.reduce}, not bmuf")
    if parallel.reduce == "gradient":
        unread["every"] = "gradients are averaged at every minibatch"
        unread["momentum_rule"] = "averaged gradients give every worker the same momentum"
    if parallel.start == "none":
        unread["start_minibatches"] = "parallel.start is none"
    return unread


def _parallel(recipe: Recipe) -> list[Complaint]:
    parallel = recipe.parallel
    found: list[Complaint] = []
    for key, why in _unread_parallel(parallel).items():
        default = type(parallel).model_fields[key].default
        # `every` stands in fragments that are shared between strategies: only a reader of one recipe would miss it.
        if key != "every" and key in parallel.model_fields_set and getattr(parallel, key) != default:
            found.append((f"parallel.{key}", f"never read: {why}; drop it or set it to null"))
    if parallel.overlap and parallel.reduce in ("gradient", "bmuf"):
        why = "takes a step from every averaging" if parallel.reduce == "gradient" else "starts a block from the last"
        found.append(("parallel.overlap", f"true found beside reduce: {parallel.reduce}, which {why}; set it to false"))
    if parallel.overlap and parallel.momentum_rule == "average":
        found.append(("parallel.overlap", "true found beside momentum_rule: average; take keep or reset"))
    return found
