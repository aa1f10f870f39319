"""The keys of a recipe, by their dotted names, as read from the schema: what each expects, its default, its meaning.
`python -m ddnn.recipe.keys > docs/recipe.md` writes their reference."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddnn.recipe.schema import VARIANTS, Recipe
from ddnn.recipe.source import shipped_fragments
from ddnn.util.text import environment

REQUIRED = object()  # default of a key that has none


@dataclass(frozen=True)
class KeyInfo:
    """One key: dotted `name`, what it `expects` in words, `default` (or REQUIRED), `meaning`, whether it `is_path`.
    `variants` are those that have it, where it is in a section that has variants and not in all of them."""

    name: str
    expects: str
    default: Any
    meaning: str
    is_path: bool
    variants: tuple[str, ...] = ()


def sections() -> dict[str, str]:
    """Dotted names of the recipe's mappings, in schema order, with their meaning. The recipe itself is ""."""
    return _walk()[0]


def keys() -> dict[str, KeyInfo]:
    """All keys by dotted name, in schema order."""
    return _walk()[1]


def keys_of(section: str) -> list[str]:
    return [name.rpartition(".")[2] for name in _names() if name.rpartition(".")[0] == section]


def _names() -> list[str]:
    """Of all keys and sections, each once: a key that takes a value or a mapping is both."""
    return list(dict.fromkeys([*keys(), *filter(None, sections())]))


def suggest_key(unknown: str) -> str:
    """What the writer of the dotted key `unknown` may have meant, as the end of a sentence."""
    section, _, last = unknown.rpartition(".")
    everywhere: dict[str, list[str]] = {}
    for name in _names():
        everywhere.setdefault(name.rpartition(".")[2], []).append(name)
    other = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
    if unknown in other["renamed"]:
        return f"it is now called {other['renamed'][unknown]}"
    meant = [other["aliases"][last]] if last in other["aliases"] else everywhere.get(last)
    if meant is None and (near := difflib.get_close_matches(last, keys_of(section), n=1)):
        meant = [f"{section}.{near[0]}".lstrip(".")]
    if meant is None and (near := difflib.get_close_matches(unknown, other["renamed"], n=1, cutoff=0.8)):
        meant = [other["renamed"][near[0]]]
    if meant is None and (near := difflib.get_close_matches(last, everywhere, n=1, cutoff=0.7)):
        meant = everywhere[near[0]]
    return f"did you mean {' or '.join(meant)}?" if meant else f"the keys here are {', '.join(keys_of(section))}"


def recipe_reference() -> str:
    """The text of docs/recipe.md: how a recipe is read, an example, all keys."""
    template = environment().get_template("recipe.md.j2")
    fragments = shipped_fragments()
    return template.render(keys=keys().values(), sections=sections(), fragments=fragments, REQUIRED=REQUIRED)


@cache
def _walk() -> tuple[dict[str, str], dict[str, KeyInfo]]:
    """The sections and keys of the recipe's JSON schema."""
    schema = Recipe.model_json_schema()
    found_sections: dict[str, str] = {}
    found_keys: dict[str, KeyInfo] = {}

    def visit(prefix: str, *variants: dict[str, Any]) -> None:
        found_sections[prefix] = _unwrapped(variants[0]["description"])
        chooser = VARIANTS[prefix][0] if prefix in VARIANTS else ""
        names = dict.fromkeys([chooser, *(name for variant in variants for name in variant["properties"])])
        for name in filter(None, names):  # the one that chooses the variant comes first
            dotted = f"{prefix}.{name}".lstrip(".")
            having = [variant for variant in variants if name in variant["properties"]]
            field = having[0]["properties"][name]
            inner = [one["$ref"] for one in (field, *field.get("oneOf", ())) if "$ref" in one]
            mappings = [schema["$defs"][reference.rpartition("/")[2]] for reference in inner]
            value = next((one for one in field.get("oneOf", ()) if "$ref" not in one), None)
            if mappings and value is None:
                visit(dotted, *mappings)
                continue
            kinds = [k for k in [value] if k] or [k for k in field.get("anyOf", [field]) if k.get("type") != "null"]
            if name == chooser:
                kinds = [{"enum": _tags(variants, name)}]
            default = field.get("default", REQUIRED if name in having[0].get("required", ()) else None)
            only = _tags(having, chooser) if chooser and len(variants) > len(having) else []
            meaning, is_path = _unwrapped(field["description"]), kinds[0].get("format") == "path"
            expects = " or ".join(map(_expects, kinds))
            if mappings:
                expects += f", or a mapping of {', '.join(mappings[0]['properties'])}"
            found_keys[dotted] = KeyInfo(dotted, expects, default, meaning, is_path, tuple(only))
            if mappings:
                visit(dotted, *mappings)

    visit("", schema)
    return found_sections, found_keys


def _tags(variants: Sequence[dict[str, Any]], chooser: str) -> list[str]:
    kinds = [variant["properties"][chooser] for variant in variants]
    return [tag for kind in kinds for tag in ([kind["const"]] if "const" in kind else kind["enum"])]


def _unwrapped(docstring: str) -> str:
    return " ".join(docstring.split())


def _expects(kind: dict[str, Any]) -> str:
    """In words, what a field of the JSON schema takes: "a number >= 0 and < 1"."""
    if "enum" in kind or "const" in kind:
        *others, last = kind.get("enum", [kind.get("const")])
        return f"{', '.join(others)} or {last}" if others else str(last)
    if kind["type"] == "boolean":
        return "true or false"
    if kind["type"] == "string":
        return "a path" if kind.get("format") == "path" else "text"
    if kind["type"] == "array":
        return f"a list, each {_expects(kind['items'])}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_number(kind[limit])}" for limit, sign in signs.items() if limit in kind]
    noun = "a whole number" if kind["type"] == "integer" else "a number"
    return f"{noun} {' and '.join(limits)}".strip()


def _number(limit: float) -> str:
    return "2^63" if limit == 2**63 else f"{limit:g}"


if __name__ == "__main__":
    print(recipe_reference(), end="")
