"""Which keys of a recipe a resume may change. The launcher asks before there are workers, so that nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddnn.recipe.load import LAYERS_KEY, REMOVED, is_read, recipe_values
from ddnn.recipe.schema import ModelConfig, Recipe, TrainedModelConfig
from ddnn.recipe.section import get_value, with_defaults
from ddnn.recipe.source import parse_file
from ddnn.util.errors import DataError, RecipeError

RESUMABLE = re.compile(
    r"(checkpoint|criterion\.(class_counts|lattices|silence_phones)|cuda_graphs|log"
    r"|data\.(alignments|allow_pipes|cache_dir|cv\.(alignments|data|speakers|transforms|utterances)"
    r"|feature_device|loader_processes|max_skipped_fraction|train|transforms)"
    r"|parallel\.(columns|cpu_threads|gpu_transport|hang_timeout|max_restarts|microbatches|oversubscribe_gpus|pipeline|stages|workers))(\..*)?"
)
"""Keys that a resume may change. Where data has moved, `DataIdentity` says whether it is the same."""
CHOSEN = ("precision", "parallel.columns", "parallel.stages", "parallel.averaging_frames")
"""Keys whose `auto` is replaced by what was chosen at the start."""
EPOCHS = {"schedule.epochs", "schedule.max_epochs"}
"""Keys that a resume may raise, unless the schedule depends on its length."""

MODEL_KEYS = (
    *("data.splice", "data.cmvn", "data.deltas", "data.normalize"),
    *("model.hidden_layers", "model.hidden_units", "model.activation"),
    *("model.layers", "model.bands"),
)
"""Keys that take the values of the network of `init.model` where they are not given."""

Changes = Mapping[str, tuple[str, str]]  # by key its value now and before, as text


def changed_keys(before: Mapping[str, Any], recipe: Recipe) -> Changes:
    """The keys in which `recipe` differs from the `recipe_values` `before`, each with its value now and before. `auto` asks
    for nothing else than what was chosen before, of `parallel.stages` also how these take a minibatch."""
    now = recipe_values(recipe)
    keys = [key for key in sorted({*now, *before} - REMOVED) if now.get(key) != before.get(key)]
    as_auto = {key for key in CHOSEN if get_value(recipe, key) == "auto"}
    if "parallel.stages" in as_auto:
        as_auto |= {"parallel.microbatches", "parallel.pipeline"}
    return {key: (_as_text(key, now.get(key)), _as_text(key, before.get(key))) for key in keys if key not in as_auto}


def _as_text(key: str, value: Any) -> str:
    if key == LAYERS_KEY:
        with suppress(ValidationError):
            value = ModelConfig(layers=value).layers
    return "not given" if value is None else str(value)[:500]


def refused_changes(recipe: Recipe, changed: Changes) -> Changes:
    """Those that a resume may not make."""
    return {key: values for key, values in changed.items() if not _may_change(recipe, key, *values)}


def _may_change(recipe: Recipe, key: str, now: str, then: str) -> bool:
    if key in EPOCHS and not recipe.schedule.depends_on_length:
        return now.isdecimal() and then.isdecimal() and int(now) > int(then)
    return RESUMABLE.fullmatch(key) is not None


def length_hint(recipe: Recipe, refused: Collection[str]) -> str:
    """Why the number of epochs is among the refused keys, as the beginning of a hint; empty if it is not."""
    if EPOCHS.isdisjoint(refused):
        return ""
    if not recipe.schedule.depends_on_length:
        return "a training can be made longer, not shorter; "
    return (
        f"with schedule.name: {recipe.schedule.name} the learning rates of all epochs depend on their number: "
        "to train further, start from the network with init.model; "
    )


def describe_changes(changed: Changes) -> str:
    """A single change in the same line, several in a line each."""
    lines = [f"{key}: {now} found, {then} expected" for key, (now, then) in changed.items()]
    return lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)


def check_same_recipe(before: str, recipe: Recipe, location: Path, precision: str | None = None) -> Changes:
    """The `changed_keys` since the checkpoint at `location` was written, whose recipe was `before`. `precision`: the one
    that was chosen, which `auto` means from then on. RecipeError: a resume may not change one of them."""
    old = parse_file(before.encode(errors="surrogatepass"), "manifest.json")
    if old.problems:
        message = f"the recipe in the checkpoint is not valid: {old.problems[0]}"
        raise DataError(message[:500], location=location)
    if precision is not None and old.values.get("precision") != recipe.precision:
        old.values["precision"] = precision
    changed = changed_keys(old.values, recipe)
    if refused := refused_changes(recipe, changed):
        message = f"the recipe is not the one that the checkpoint was made by: {describe_changes(refused)}"
        hint = f"{length_hint(recipe, refused)}resume with the run dir's own recipe.yaml, or start in another run dir"
        raise RecipeError(message, location=location, hint=hint)
    return changed


def with_recorded_network(recipe: Recipe, before: Recipe) -> Recipe:
    """A recipe with `init.model`, with the keys of the network as in `before`, the recipe by which its training began."""
    if not isinstance(recipe.init, TrainedModelConfig):
        return recipe
    return with_defaults(recipe, {name: get_value(before, name) for name in MODEL_KEYS if is_read(before, name)})
