"""The keys of a recipe, by their dotted names, as read from the schema: what each expects, its default, its meaning."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from typing import Any

from ddnn.recipe.schema import Recipe

REQUIRED = object()
"""Default of a key that has none."""

FROM_OTHER_TOOLS = {
    "learning_rate": "schedule.initial",
    "learn_rate": "schedule.initial",
    "lr": "schedule.initial",
    "batch_size": "minibatch",
    "minibatch_size": "minibatch",
    "hidden_dim": "model.hidden_units",
    "hid_layers": "model.hidden_layers",
    "hid_dim": "model.hidden_units",
    "max_iters": "schedule.epochs",
    "min_iters": "schedule.min_epochs",
    "keep_lr_iters": "schedule.keep_epochs",
}
"""What Kaldi's scripts and other trainers call the same thing; offered where an unknown key is reported."""


@dataclass(frozen=True)
class Key:
    """One key: dotted `name`, what it `expects` in words, `default` (or REQUIRED), `meaning`, whether it `is_path`."""

    name: str
    expects: str
    default: Any
    meaning: str
    is_path: bool


@cache
def sections() -> dict[str, str]:
    """Dotted names of the recipe's mappings, in schema order, with their meaning. The recipe itself is ""."""
    return _walk()[0]


@cache
def keys() -> dict[str, Key]:
    """All keys by dotted name, in schema order."""
    return _walk()[1]


def keys_of(section: str) -> list[str]:
    """The names directly in `section`, its subsections included, without the section's own name."""
    names = [*keys(), *(name for name in sections() if name)]
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]


def suggestion(unknown: str) -> str:
    """What the writer of the dotted key `unknown` may have meant, as the end of a sentence."""
    section, _, last = unknown.rpartition(".")
    everywhere: dict[str, list[str]] = {}
    for name in [*keys(), *(name for name in sections() if name)]:
        everywhere.setdefault(name.rpartition(".")[2], []).append(name)
    if last in everywhere:
        return _or(everywhere[last])
    if last in FROM_OTHER_TOOLS:
        return _or([FROM_OTHER_TOOLS[last]])
    in_section = keys_of(section)
    near = difflib.get_close_matches(last, in_section, n=1)
    if near:
        return _or([f"{section}.{near[0]}".lstrip(".")])
    near = difflib.get_close_matches(last, everywhere, n=1, cutoff=0.7)
    if near:
        return _or(everywhere[near[0]])
    return f"the keys here are {', '.join(in_section)}"


def _or(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?"


@cache
def _walk() -> tuple[dict[str, str], dict[str, Key]]:
    schema = Recipe.model_json_schema()
    found_sections: dict[str, str] = {}
    found_keys: dict[str, Key] = {}

    def visit(prefix: str, section: dict[str, Any]) -> None:
        found_sections[prefix] = _unwrapped(section["description"])
        for name, field in section["properties"].items():
            dotted = f"{prefix}.{name}".lstrip(".")
            if "$ref" in field:
                visit(dotted, schema["$defs"][field["$ref"].rpartition("/")[2]])
                continue
            kind = next((k for k in field.get("anyOf", []) if k["type"] != "null"), field)
            default = field.get("default", REQUIRED)
            is_path = kind.get("format") == "path"
            found_keys[dotted] = Key(dotted, _expects(kind), default, _unwrapped(field["description"]), is_path)

    visit("", schema)
    return found_sections, found_keys


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
