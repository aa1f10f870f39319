"""The keys of a recipe, by their dotted names, as read from the schema: what each expects, its default, its meaning;
what the writer of an unknown one may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ddnn.recipe.layers import LAYERS, TrainedLayerConfig
from ddnn.recipe.schema import VARIANTS, Recipe
from ddnn.recipe.section import Section
from ddnn.recipe.source import format_value

REQUIRED = object()  # default of a key that has none


@dataclass(frozen=True)
class KeyInfo:
    """One key: dotted `name`, what it `expects` in words, `default` (or REQUIRED), `meaning`, whether it `is_path`.
    `variants` are those that have it, where it is in a section that has variants and not in all of them. `examples` are
    values in YAML, of keys for which `expects` does not say it all."""

    name: str
    expects: str
    default: Any
    meaning: str
    is_path: bool
    variants: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def as_missing(self, name: str) -> str:
        """The problem that the key, `name` in messages, is not given."""
        return f"{name}: missing, expected {self.expects}. {self.meaning}"

    def as_wrong(self, name: str, value: Any) -> str:
        """The problem that it does not take this value."""
        return f"{name}: {format_value(value)} found, expected {self.expects}"


def sections() -> dict[str, str]:
    """Dotted names of the recipe's mappings, in schema order, with their meaning. The recipe itself is ""."""
    return _walk(Recipe)[0]


def keys() -> dict[str, KeyInfo]:
    """All keys by dotted name, in schema order."""
    return keys_in(Recipe)


def keys_of(section: str) -> list[str]:
    return [name.rpartition(".")[2] for name in _names() if name.rpartition(".")[0] == section]


@cache
def layer_keys() -> dict[str, dict[str, KeyInfo]]:
    """For each kind of `model.layers` its keys by name: first the one whose value may stand for all, last those of other
    kinds too."""
    by_kind = {}
    for kind, section in LAYERS.items():
        keys = keys_in(section)
        order = sorted(
            section.model_fields,
            key=lambda name: (name != section.primary_key, name in TrainedLayerConfig.model_fields),
        )
        by_kind[kind] = {name: keys[name] for name in order}
    return by_kind


def _names() -> list[str]:
    """Of all keys and sections, each once: a key that takes a value or a mapping is both."""
    return list(dict.fromkeys([*keys(), *filter(None, sections())]))


@cache
def _other_names() -> dict[str, dict[str, Any]]:
    text = Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8")
    return dict[str, dict[str, Any]](yaml.safe_load(text))


def _names_by_last_part() -> dict[str, list[str]]:
    everywhere: dict[str, list[str]] = {}
    for name in _names():
        everywhere.setdefault(name.rpartition(".")[2], []).append(name)
    return everywhere


def keys_called(last: str) -> list[str]:
    """The dotted keys that a name without its section means, also as other programs call them."""
    meant = _other_names()["aliases"].get(last, _names_by_last_part().get(last, []))
    return [meant] if isinstance(meant, str) else list(meant)


def suggest_key(unknown: str) -> str:
    """What the writer of the dotted key `unknown` may have meant, as the end of a sentence."""
    section, _, last = unknown.rpartition(".")
    other, everywhere = _other_names(), _names_by_last_part()
    if unknown in other["renamed"]:
        return f"it is now called {other['renamed'][unknown]}"
    if unknown.startswith("model.layers["):  # as messages name the key of a layer
        return "model.layers is set as a whole: model.layers=[...]"
    meant = keys_called(last) or None
    if meant is None and (near := difflib.get_close_matches(last, keys_of(section), n=1)):
        meant = [f"{section}.{near[0]}".lstrip(".")]
    if meant is None and (near := difflib.get_close_matches(unknown, other["renamed"], n=1, cutoff=0.8)):
        meant = [other["renamed"][near[0]]]
    if meant is None and (near := difflib.get_close_matches(last, everywhere, n=1, cutoff=0.7)):
        meant = everywhere[near[0]]
    return f"did you mean {' or '.join(meant)}?" if meant else f"the keys here are {', '.join(keys_of(section))}"


def suggest_mapping(name: str, value: Any, source: str) -> str:
    """How a mapping is written of which only the key that chooses is given, as in optimizer=ng-sgd; else nothing."""
    choosers = {section: chooser for section, (chooser, _) in VARIANTS.items()} | {"init": "model"}
    if name not in choosers or not isinstance(value, str):
        return ""
    as_setting, as_line = f"{name}.{choosers[name]}={value}", f"{name}: {{{choosers[name]}: {value}}}"
    return f"; write {as_setting if source.startswith('--set') else as_line}"


def keys_in(section: type[Section]) -> dict[str, KeyInfo]:
    """The keys of any section by name, in schema order."""
    return _walk(section)[1]


@cache
def _walk(section: type[Section]) -> tuple[dict[str, str], dict[str, KeyInfo]]:
    """A section and those below it with their meaning, and their keys."""
    schema = section.model_json_schema()
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
            types = [each for kind in field.get("anyOf", [field]) for each in kind.get("oneOf", [kind])]
            types = [each for each in types if each.get("type") != "null"]
            mappings = [schema["$defs"][each["$ref"].rpartition("/")[2]] for each in types if "$ref" in each]
            values = [each for each in types if "$ref" not in each]
            if name == chooser:
                values = [{"enum": _tags(variants, name)}]
            if values:
                default = field.get("default", REQUIRED if name in having[0].get("required", ()) else None)
                only = _tags(having, chooser) if chooser and len(variants) > len(having) else []
                meaning, is_path = _unwrapped(field["description"]), values[0].get("format") == "path"
                expects = " or ".join(map(_expects, values))
                if mappings:
                    expects += f", or a mapping of {', '.join(mappings[0]['properties'])}"
                found_keys[dotted] = KeyInfo(
                    dotted, expects, default, meaning, is_path, tuple(only), tuple(field.get("examples", ()))
                )
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
    if kind["type"] == "object":
        return "a mapping"
    if kind["type"] == "array" and "oneOf" in kind["items"]:
        return "a list of layers, such as [{affine: 512, repeat: 3}]"
    if kind["type"] == "array":
        return f"a list, each {_expects(kind['items'])}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_number(kind[limit])}" for limit, sign in signs.items() if limit in kind]
    noun = "a whole number" if kind["type"] == "integer" else "a number"
    return f"{noun} {' and '.join(limits)}".strip()


def _number(limit: float) -> str:
    return "2^63" if limit == 2**63 else "a million" if limit == 1e6 else f"{limit:g}"
