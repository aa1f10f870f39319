"""From a YAML file, its includes and `--set` to a checked Recipe, with all problems reported at once; and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddnn.recipe.checks import is_read, validate
from ddnn.recipe.keys import REQUIRED, keys, keys_of, sections, suggest_key
from ddnn.recipe.schema import VARIANTS, Recipe
from ddnn.recipe.source import SourceTree, exists, nested, read_with_includes
from ddnn.recipe.yaml_parser import Problem, SourceValue, format_value, parse_setting
from ddnn.util.errors import RecipeError

MOST_PROBLEMS = 50
"""Shown of what is wrong with a recipe; where as many keys are unknown it is something else."""

OUTPUT_PATHS = ("data.cache_dir",)
"""Paths that need not exist: they are made."""


def load_recipe(path: Path, overrides: Sequence[str] = (), *, must_exist: bool = True) -> Recipe:
    """Reads a recipe: first its includes, then its own keys, then `overrides` ("KEY=VALUE" each); the later one wins.

    Paths in the result are absolute. A key set to null takes its default.

    Args:
        path: the YAML file.
        overrides: as given to `--set`.
        must_exist: whether a data path that does not exist is a problem. False is for recipes of finished runs, whose
            training data may be gone.

    Raises:
        RecipeError: with all problems of all sources, one a line.
    """
    tree = SourceTree()
    read_with_includes(path, str(path), tree)
    for setting in overrides:
        values, problems = parse_setting(setting)
        tree.problems += problems
        if any(given_path[0] == "include" for given_path in values):
            tree.problems.append(Problem("include: cannot be set; write it in the recipe", f"--set {setting}"))
        tree.update({p: given for p, given in values.items() if p[0] != "include"})
    recipe = _build(path, tree, must_exist)
    if recipe is None or tree.problems:
        raise _error(path, tree.problems)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, in schema order, defaults written out, paths absolute; `load_recipe` makes it equal again.

    Omitted are keys that were not given and have no default, and those that the chosen optimizer and schedule never read.
    """
    values: dict[str, Any] = {}
    for name in keys():
        if is_read(recipe, name):
            value = get_value(recipe, name)
            if value is not None:
                values[name] = str(value) if isinstance(value, Path) else value
    return yaml.safe_dump(nested(values), sort_keys=False, allow_unicode=True, width=10_000)


def get_value(recipe: Recipe, name: str) -> Any:
    """The value of a dotted key; None where the chosen variant of its section does not have it."""
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _build(path: Path, tree: SourceTree, must_exist: bool) -> Recipe | None:
    """The recipe. Problems are added to `tree`; wrong values are not used, so that the rest is still checked."""
    unread = tree.unread
    sound = _known(tree)
    for name, given in list(sound.items()):
        if keys()[name].is_path and isinstance(given.value, str):
            found = _find_path(given.value, path.parent, must_exist and name not in OUTPUT_PATHS)
            if isinstance(found, str):
                tree.problems.append(Problem(f"{name}: {found}", given.source))
                found = Path("/")
            sound[name] = SourceValue(found, given.source)
    wrong: dict[str, str] = {}
    recipe = None
    while recipe is None:
        try:
            recipe = Recipe.model_validate(nested({"data": {}} | _plain(sound)), strict=True)
        except ValidationError as error:
            found_now = {name: detail["type"] for detail in error.errors() if (name := _key_of(detail)) not in wrong}
            if not wrong:  # what a second look finds follows from the values that were taken out after the first
                _report(found_now, sound, path, tree, unread)
            wrong |= found_now
            for name in found_now:
                sound.pop(name, None)
                if keys()[name].default is REQUIRED:
                    sound[name] = SourceValue(Path("/"), "")
    if unread:
        return None
    for name, complaint in validate(recipe):
        if name not in wrong:
            source = sound[name].source if name in sound else str(path)
            tree.problems.append(Problem(f"{name}: {complaint}", source))
    return recipe


def _plain(values: Mapping[str, SourceValue]) -> dict[str, Any]:
    return {name: given.value for name, given in values.items()}


def _key_of(detail: ErrorDetails) -> str:
    """The dotted key that an error is about: without the index in a list and the name of a variant."""
    section, *below = [part for part in detail["loc"] if isinstance(part, str)]
    if section in VARIANTS:
        below = below[1:] or [VARIANTS[section][0]]
    return ".".join((section, *below))


def _report(
    found: Mapping[str, str], sound: Mapping[str, SourceValue], path: Path, tree: SourceTree, unread: bool
) -> None:
    """Adds a problem for each key in `found` (with pydantic's type of error), in the order of the error."""
    for name, kind in found.items():
        key = keys()[name]
        if kind == "missing":
            if not unread:
                tree.problems.append(Problem(f"{name}: missing, expected {key.expects}. {key.meaning}", str(path)))
        elif kind == "extra_forbidden":
            section = name.rpartition(".")[0]
            chooser, default = VARIANTS[section]
            chosen = sound[f"{section}.{chooser}"].value if f"{section}.{chooser}" in sound else default
            text = (
                f"{name}: never read by {chosen}, only by {' or '.join(key.variants)}; remove it, set it to null, or "
            )
            tree.problems.append(Problem(f"{text}change {section}.{chooser}", sound[name].source))
        elif name in sound:
            text = f"{name}: {format_value(sound[name].value)} found, expected {key.expects}"
            tree.problems.append(Problem(text, sound[name].source))


def _known(tree: SourceTree) -> dict[str, SourceValue]:
    """The values whose keys exist; the others become problems, each once. A null is as if it had not been given."""
    known: dict[str, SourceValue] = {}
    reported: set[str] = set()
    for name, given in tree.values.items():
        parts = name.split(".")
        prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
        wrong = next((p for p in prefixes if p not in sections() and p not in keys()), None)
        leaf = next((p for p in prefixes[:-1] if p in keys()), None)
        if leaf is not None:
            wrong, text = leaf, f"{leaf}: a mapping found, expected {keys()[leaf].expects}"
        elif wrong is not None:
            meant = f"; {suggest_key(wrong)}" if len(reported) < MOST_PROBLEMS else ""
            text = f"{_printable(wrong)}: unknown key{meant}"
        elif name in sections():
            if given.value is not None and given.value != {}:
                text = f"{name}: {format_value(given.value)} found, expected a mapping of {', '.join(keys_of(name))}"
                tree.problems.append(Problem(text, given.source))
            continue
        else:
            if given.value is not None:
                known[name] = given
            continue
        if wrong not in reported:
            reported.add(wrong)
            tree.problems.append(Problem(text, given.source))
    return known


def _find_path(text: str, folder: Path, must_exist: bool) -> Path | str:
    """The absolute path that a recipe's path means, or what is wrong with it."""
    if not text or "\0" in text:
        return f"{format_value(text)} found, expected a path"
    tried = [Path(text)] if Path(text).is_absolute() else [Path.cwd() / text, folder.absolute() / text]
    for candidate in tried:
        if exists(candidate):
            return _tidy(candidate)
    if not must_exist:
        return _tidy(tried[0])
    places = list(dict.fromkeys(str(_tidy(candidate)) for candidate in tried))
    there_is_no = f"neither {' nor '.join(places)}" if len(places) > 1 else f"no {places[0]}"
    return f"{text!r} does not exist: there is {there_is_no}"


def _tidy(path: Path) -> Path:
    """Without `..`, unless that would name another file because of a symbolic link."""
    tidy = Path(os.path.normpath(path))
    return tidy if not exists(path) or (exists(tidy) and tidy.samefile(path)) else path


def _printable(text: str) -> str:
    return text if text.isprintable() and text else repr(text)


def _error(path: Path, problems: Sequence[Problem]) -> RecipeError:
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        return RecipeError(lines[0], location=path)
    further = [f"and {len(lines) - MOST_PROBLEMS} more"] if len(lines) > MOST_PROBLEMS else []
    text = "".join(f"\n  - {line}" for line in (*lines[:MOST_PROBLEMS], *further))
    return RecipeError(f"{len(lines)} problems in the recipe:{text}", location=path)
