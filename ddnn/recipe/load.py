"""From a YAML file, its includes and `--set` to a checked Recipe, with all problems reported at once; and back."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from ddnn.recipe.checks import contradictions, is_read
from ddnn.recipe.keys import REQUIRED, keys, keys_of, sections, suggest_key
from ddnn.recipe.schema import VARIANTS, Recipe
from ddnn.recipe.source import (
    MOST_PROBLEMS,
    SourceTree,
    SourceValue,
    configs_folder,
    exists,
    format_key,
    format_value,
    listed,
    nested,
    parse_setting,
    read_yaml,
    shipped_fragments,
)
from ddnn.util.errors import RecipeError

MOST_FILES = 20  # that a recipe may include, directly or not
OUTPUT_PATHS = ("data.cache_dir",)  # paths that need not exist: they are made


def load_recipe(path: Path, overrides: Sequence[str] = (), *, must_exist: bool = True) -> Recipe:
    """Reads a recipe: first its includes, then its own keys, then `overrides` ("KEY=VALUE" each); the later one wins.
    Paths in the result are absolute. A key set to null takes its default. `must_exist`: whether a data path that does
    not exist is a problem; the data of finished runs may be gone. RecipeError: all problems of all sources, one a line.
    """
    tree = SourceTree()
    _read_with_includes(path, tree, [])
    for setting in overrides:
        given = parse_setting(setting)
        tree.problems += given.problems
        own = {name: value for name, value in given.values.items() if name.partition(".")[0] != "include"}
        if len(own) < len(given.values):
            tree.refuse("include: cannot be set; write it in the recipe", f"--set {setting}")
        tree.values |= own
    recipe = _build(path, tree, must_exist)
    if recipe is None or tree.problems:
        raise RecipeError(listed(tree.problems, "problems in the recipe", MOST_PROBLEMS), location=path)
    return recipe


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML, in schema order, defaults written out, paths absolute; `load_recipe` makes it equal again.
    Omitted are keys that were not given and have no default, and those that the chosen optimizer and schedule never
    read."""
    values = {name: get_value(recipe, name) for name in keys() if is_read(recipe, name)}
    plain = {n: str(v) if isinstance(v, Path) else v for n, v in values.items() if v is not None}
    return yaml.safe_dump(nested(plain), sort_keys=False, allow_unicode=True, width=10_000)


def get_value(recipe: Recipe, name: str) -> Any:
    """The value of a dotted key; None where the chosen variant of its section does not have it."""
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def _read_with_includes(path: Path, tree: SourceTree, files: list[Path], chain: tuple[Path, ...] = ()) -> None:
    """Adds a recipe or fragment to `tree`, after what it includes. `files` are all that have been read, `chain` those,
    resolved, that led here."""
    files.append(path)
    found = read_yaml(path)
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
        tried = [path.parent / wanted, configs_folder() / wanted]
        fragment = next(filter(exists, tried), None)
        if fragment is None:
            known = ", ".join(shipped_fragments()) or "none"
            text = f"include: {wanted} is neither {tried[0]} nor {tried[1]}; ddnn comes with {known}"
            tree.refuse(text, include.source, unread=True)
        elif fragment.resolve() in chain:
            text = f"include: {wanted} includes itself, by way of {' -> '.join(p.name for p in chain)}"
            tree.refuse(text, include.source, unread=True)
        else:
            _read_with_includes(fragment, tree, files, chain)
    tree.values |= found.values


def _included(include: SourceValue, tree: SourceTree) -> list[str]:
    wanted = include.value if isinstance(include.value, list) else [include.value]
    if include.value is None:
        return []
    if all(isinstance(name, str) and name and "\0" not in name for name in wanted):
        return wanted
    text = f"include: {format_value(include.value)} found, expected a file name or a list of them"
    tree.refuse(text, include.source, unread=True)
    return []


def _build(path: Path, tree: SourceTree, must_exist: bool) -> Recipe | None:
    """The recipe. Problems are added to `tree`; wrong values are not used, so that the rest is still checked."""
    unread = tree.unread
    sound = _known(tree)
    for name, given in list(sound.items()):
        if keys()[name].is_path and isinstance(given.value, str):
            found = _find_path(given.value, path.parent, must_exist and name not in OUTPUT_PATHS)
            if isinstance(found, str):
                tree.refuse(f"{name}: {found}", given.source)
                found = Path("/")
            sound[name] = SourceValue(found, given.source)
    wrong: dict[str, str] = {}
    recipe = None
    while recipe is None:
        try:
            plain = {name: given.value for name, given in sound.items()}
            recipe = Recipe.model_validate(nested({"data": {}} | plain), strict=True)
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
    for name, complaint in contradictions(recipe):
        if name not in wrong:
            tree.refuse(f"{name}: {complaint}", sound[name].source if name in sound else str(path))
    return recipe


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
                tree.refuse(f"{name}: missing, expected {key.expects}. {key.meaning}", str(path))
        elif kind == "extra_forbidden":
            section = name.rpartition(".")[0]
            chooser, default = VARIANTS[section]
            chosen = sound[f"{section}.{chooser}"].value if f"{section}.{chooser}" in sound else default
            text = f"{name}: never read by {chosen}, only by {' or '.join(key.variants)}"
            tree.refuse(f"{text}; remove it, set it to null, or change {section}.{chooser}", sound[name].source)
        elif name in sound:
            given = sound[name]
            tree.refuse(f"{name}: {format_value(given.value)} found, expected {key.expects}", given.source)


def _known(tree: SourceTree) -> dict[str, SourceValue]:
    """The values whose keys exist; the others become problems, each once. A null is as if it had not been given."""
    known: dict[str, SourceValue] = {}
    reported: set[str] = set()
    for name, given in tree.values.items():
        if name in keys():
            if given.value is not None:
                known[name] = given
        elif name in sections():
            if given.value is not None and given.value != {}:
                text = f"{name}: {format_value(given.value)} found, expected a mapping of {', '.join(keys_of(name))}"
                tree.refuse(text, given.source)
        else:
            parts = name.split(".")
            prefixes = (".".join(parts[: n + 1]) for n in range(len(parts)))
            wrong = next(prefix for prefix in prefixes if prefix in keys() or prefix not in sections())
            if wrong in reported:
                continue
            if wrong in keys():
                text = f"{wrong}: a mapping found, expected {keys()[wrong].expects}"
            else:
                meant = f"; {suggest_key(wrong)}" if len(reported) < MOST_PROBLEMS else ""
                text = f"{format_key(wrong)}: unknown key{meant}"
            reported.add(wrong)
            tree.refuse(text, given.source)
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
