"""From a YAML file, its includes and `--set` to a checked Recipe, with all problems reported at once; and back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from keyword import iskeyword
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ddnn.errors import RecipeError
from ddnn.recipe.include import Gathered, exists, gather_file
from ddnn.recipe.keys import keys, keys_of, sections, suggestion
from ddnn.recipe.schema import Recipe
from ddnn.recipe.validate import is_read, validate
from ddnn.recipe.yaml_tree import Given, Problem, parse_setting, shown

MOST_PROBLEMS = 50
"""Shown of what is wrong with a recipe; where as many keys are unknown it is something else."""

MADE = ("data.cache",)
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
    gathered = Gathered()
    gather_file(path, str(path), gathered)
    for setting in overrides:
        values, problems = parse_setting(setting)
        gathered.problems += problems
        if any(given_path[0] == "include" for given_path in values):
            gathered.problems.append(Problem("include: cannot be set; write it in the recipe", f"--set {setting}"))
        gathered.take({p: given for p, given in values.items() if p[0] != "include"})
    recipe = _build(path, gathered, must_exist)
    if recipe is None or gathered.problems:
        raise _error(path, gathered.problems)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, in schema order, defaults written out, paths absolute; `load_recipe` makes it equal again.

    Left out is what was not given and has no default, and what the chosen optimizer and schedule never read.
    """
    tree: dict[str, Any] = {}
    for name in keys():
        value: Any = recipe
        for part in name.split("."):
            value = getattr(value, f"{part}_" if iskeyword(part) else part)
        if value is None or not is_read(recipe, name):
            continue
        _put(tree, name, str(value) if isinstance(value, Path) else value)
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=10_000)


def _build(path: Path, gathered: Gathered, must_exist: bool) -> Recipe | None:
    """The recipe. Problems are added to `gathered`; unsound values are left out, so that the rest is still checked."""
    unread = any(problem.unread for problem in gathered.problems)
    sound = _known(gathered)
    for name, given in list(sound.items()):
        if keys()[name].is_path and isinstance(given.value, str):
            found = _find_path(given.value, path.parent, must_exist and name not in MADE)
            if isinstance(found, str):
                gathered.problems.append(Problem(f"{name}: {found}", given.source))
                found = Path("/")
            sound[name] = Given(found, given.source)
    wrong: set[str] = set()
    recipe = None
    try:
        recipe = Recipe.model_validate(_tree(sound), strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_context=False):
            # A place inside a list ends in its index: the key is what stands before.
            name = ".".join(part for part in detail["loc"] if isinstance(part, str))
            if name in wrong:
                continue
            wrong.add(name)
            if detail["type"] != "missing":
                text = f"{name}: {shown(sound[name].value)} found, expected {keys()[name].expects}"
                gathered.problems.append(Problem(text, sound.pop(name).source))
            elif not unread:
                key = keys()[name]
                gathered.problems.append(Problem(f"{name}: missing, expected {key.expects}. {key.meaning}", str(path)))
    if unread:
        return None
    if recipe is None:
        stand_ins = {name: Given(Path("/"), "") for name in wrong if keys()[name].is_path}
        recipe = Recipe.model_validate(_tree({**stand_ins, **sound}), strict=True)
    for name, complaint in validate(recipe):
        if name not in wrong:
            source = sound[name].source if name in sound else str(path)
            gathered.problems.append(Problem(f"{name}: {complaint}", source))
    return recipe


def _known(gathered: Gathered) -> dict[str, Given]:
    """The values whose keys exist; the others become problems, each once. A null is as if it had not been given."""
    known: dict[str, Given] = {}
    reported: set[str] = set()
    for name, given in gathered.values.items():
        parts = name.split(".")
        prefixes = [".".join(parts[: n + 1]) for n in range(len(parts))]
        wrong = next((p for p in prefixes if p not in sections() and p not in keys()), None)
        leaf = next((p for p in prefixes[:-1] if p in keys()), None)
        if leaf is not None:
            wrong, text = leaf, f"{leaf}: a mapping found, expected {keys()[leaf].expects}"
        elif wrong is not None:
            meant = f"; {suggestion(wrong)}" if len(reported) < MOST_PROBLEMS else ""
            text = f"{_printable(wrong)}: unknown key{meant}"
        elif name in sections():
            if given.value is not None and given.value != {}:
                text = f"{name}: {shown(given.value)} found, expected a mapping of {', '.join(keys_of(name))}"
                gathered.problems.append(Problem(text, given.source))
            continue
        else:
            if given.value is not None:
                known[name] = given
            continue
        if wrong not in reported:
            reported.add(wrong)
            gathered.problems.append(Problem(text, given.source))
    return known


def _find_path(text: str, folder: Path, must_exist: bool) -> Path | str:
    """The absolute path that a recipe's path means, or what is wrong with it."""
    if not text or "\0" in text:
        return f"{shown(text)} found, expected a path"
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


def _tree(values: dict[str, Given]) -> dict[str, Any]:
    tree: dict[str, Any] = {"data": {}}
    for name, given in values.items():
        _put(tree, name, given.value)
    return tree


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *above, last = name.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = value


def _printable(text: str) -> str:
    return text if text.isprintable() and text else repr(text)


def _error(path: Path, problems: Sequence[Problem]) -> RecipeError:
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        return RecipeError(lines[0], where=path)
    shown_lines = lines[:MOST_PROBLEMS]
    if len(lines) > MOST_PROBLEMS:
        shown_lines.append(f"and {len(lines) - MOST_PROBLEMS} more")
    listed = "".join(f"\n  - {line}" for line in shown_lines)
    return RecipeError(f"{len(lines)} problems in the recipe:{listed}", where=path)
