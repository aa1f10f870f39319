"""What must hold between the keys of a recipe, beyond each key's own type and range."""

from __future__ import annotations

from ddnn.recipe.schema import Recipe, Schedule

UNREAD = {
    "newbob": ("final",),
    "exponential": (
        "criterion",
        "start_halving",
        "end_halving",
        "halving_factor",
        "keep_epochs",
        "min_epochs",
    ),
}
"""Keys of `schedule` that each schedule never reads."""

Complaint = tuple[str, str]
"""A dotted key and what is wrong with it, with how to mend it."""


def validate(recipe: Recipe) -> list[Complaint]:
    """All that is contradictory in a recipe whose single values are sound; empty where nothing is."""
    return [*not_yet(recipe), *_cross_validation(recipe), *_schedule(recipe.schedule)]


def not_yet(recipe: Recipe) -> list[Complaint]:
    """What the schema knows and this version cannot do."""
    found: list[Complaint] = []
    if recipe.init == "rbm":
        found.append(("init", "rbm is not there yet in this version; use random"))
    if recipe.optimizer.name == "ng-sgd":
        found.append(("optimizer.name", "ng-sgd is not there yet in this version; use sgd"))
    if recipe.parallel.workers > 1:
        workers = recipe.parallel.workers
        found.append(("parallel.workers", f"{workers} found; several workers are not there yet in this version; use 1"))
    return found


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


def _schedule(schedule: Schedule) -> list[Complaint]:
    found: list[Complaint] = []
    for key in UNREAD[schedule.name]:
        if key in schedule.model_fields_set and getattr(schedule, key) is not None:
            other = next(name for name, unread in UNREAD.items() if key not in unread)
            text = f"never read by {schedule.name}, only by {other}; drop it, set it to null, or change schedule.name"
            found.append((f"schedule.{key}", text))
    if schedule.name == "exponential" and schedule.final is not None and schedule.final > schedule.initial:
        text = f"{schedule.final:g} found, expected at most schedule.initial = {schedule.initial:g}: the rate falls"
        found.append(("schedule.final", text))
    return found
