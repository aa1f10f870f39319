"""Which keys of a recipe a resume may change. The launcher asks before there are workers, so that nothing here imports torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ddnn.recipe import source
from ddnn.recipe.keys import read_layers
from ddnn.recipe.load import LAYERS_KEY, REMOVED, dump_recipe, is_read
from ddnn.recipe.schema import Recipe, TrainedModelConfig
from ddnn.recipe.section import get_value, with_defaults
from ddnn.recipe.source import SourceTree, SourceValue
from ddnn.util.errors import DataError, RecipeError

RESUMABLE = re.compile(
    r"(checkpoint|cuda_graphs|log"
    r"|data\.(alignments|allow_pipes|cache_dir|cv\.(alignments|data|speakers|transforms|utterances)"
    r"|feature_device|loader_processes|max_skipped_fraction|train|transforms)"
    r"|parallel\.(cpu_threads|gpu_transport|hang_timeout|max_restarts|oversubscribe_gpus|workers))(\..*)?"
)
"""Keys that a resume may change. Where data has moved, `DataIdentity` says whether it is the same."""
EPOCHS = {"schedule.epochs", "schedule.max_epochs"}
"""Keys that a resume may raise, unless the schedule depends on its length."""

MODEL_KEYS = (
    *("data.splice", "data.cmvn", "data.deltas", "data.normalize"),
    *("model.hidden_layers", "model.hidden_units", "model.activation"),
    *("model.layers", "model.bands"),
)
"""Keys that take the values of the network of `init.model` where they are not given."""

Changes = Mapping[str, tuple[str, str]]  # by key its value now and before, as text


def recorded_values(text: str) -> SourceTree:
    """The values by dotted key of what `dump_recipe` wrote into a file that anybody may have changed. As careful as with
    any recipe: YAML alone would build a million things of twenty lines."""
    if len(text) > source.MAX_BYTES:
        return SourceTree(problems=[source.Problem(f"more than {source.MAX_BYTES} characters", "manifest.json")])
    return source.parse_file(text, "manifest.json")


def changed_keys(before: SourceTree, recipe: Recipe) -> dict[str, tuple[str, str]]:
    """The keys in which `recipe` differs, each with its value now and before. `precision: auto` asks for nothing else than
    what was chosen before."""
    now, then = recorded_values(dump_recipe(recipe)).values, before.values
    unset = SourceValue(None, "")
    changed = {}
    for key in sorted({*now, *then} - REMOVED):
        values = now.get(key, unset).value, then.get(key, unset).value
        if values[0] != values[1] and (key, values[0]) != ("precision", "auto"):
            changed[key] = _as_text(key, values[0]), _as_text(key, values[1])
    return changed


def _as_text(key: str, value: Any) -> str:
    if key == LAYERS_KEY and (layers := read_layers(SourceValue(value, ""), SourceTree())) is not None:
        value = layers
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


def check_same_recipe(
    before: str, recipe: Recipe, location: Path, precision: str | None = None
) -> dict[str, tuple[str, str]]:
    """The `changed_keys` since the checkpoint at `location` was written, whose recipe was `before`. `precision`: the one
    that was chosen, which `auto` means from then on. RecipeError: a resume may not change one of them."""
    old = recorded_values(before)
    if old.problems:
        message = f"the recipe in the checkpoint is not valid: {old.problems[0]}"
        raise DataError(message[:500], location=location)
    asked = old.values.get("precision")
    if asked is not None and asked.value == "auto" and precision is not None:
        old.values["precision"] = SourceValue(precision, asked.source)
    changed = changed_keys(old, recipe)
    if "precision" in changed and changed["precision"][0] == precision:
        del changed["precision"]
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
