"""The keys of a recipe, by their dotted names, as read from the schema: what each expects, its default, its meaning;
and `model.layers`, which they are read by.
`python -m ddnn.recipe.keys > docs/recipe.md` writes their reference."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from ddnn.recipe.layers import LAYERS, LayerConfig, TrainedLayerConfig
from ddnn.recipe.schema import VARIANTS, Recipe
from ddnn.recipe.source import SourceTree, SourceValue, format_key, format_value, shipped_fragments
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


@cache
def layer_keys() -> dict[str, dict[str, KeyInfo]]:
    """Of each kind of `model.layers` its keys by name: first that which its value may stand for, last those of others
    too."""
    found = {}
    for kind, section in LAYERS.items():
        schema = section.model_json_schema()
        keys = {name: _key_info(name, field, schema) for name, field in schema["properties"].items()}
        shared = [name for name in TrainedLayerConfig.model_fields if name in keys]
        order = [name for name in keys if name == section.value_key]
        order += [name for name in keys if name not in (*shared, *order)] + [
            name for name in shared if name not in order
        ]
        found[kind] = {name: keys[name] for name in order}
    return found


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


def suggest_mapping(name: str, given: SourceValue) -> str:
    """How a mapping is written of which only the key that chooses is given, as in optimizer=ng-sgd; else nothing."""
    choosers = {section: chooser for section, (chooser, _) in VARIANTS.items()} | {"init": "model"}
    if name not in choosers or not isinstance(given.value, str):
        return ""
    as_setting = f"{name}.{choosers[name]}={given.value}"
    as_line = f"{name}: {{{choosers[name]}: {given.value}}}"
    return f"; write {as_setting if given.source.startswith('--set') else as_line}"


def recipe_reference() -> str:
    """The text of docs/recipe.md: how a recipe is read, an example, all keys."""
    template = environment().get_template("recipe.md.j2")
    fragments = shipped_fragments()
    layers = {kind: (_unwrapped(section.__doc__ or ""), layer_keys()[kind]) for kind, section in LAYERS.items()}
    known = {"keys": keys().values(), "sections": sections(), "layers": layers}
    return template.render(known, fragments=fragments, REQUIRED=REQUIRED)


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
            kinds = [value] if value else _kinds(field)
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


def _kinds(field: dict[str, Any]) -> list[dict[str, Any]]:
    """What a field takes, but a null."""
    return [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]


def _key_info(name: str, field: dict[str, Any], schema: dict[str, Any]) -> KeyInfo:
    """Of a key that takes plain values."""
    default = field.get("default", REQUIRED if name in schema.get("required", ()) else None)
    nested = [one for kind in _kinds(field) for one in kind.get("oneOf", [kind])]
    refs = [schema["$defs"][one["$ref"].rpartition("/")[2]] for one in nested if "$ref" in one]
    expects = [_expects(one) for one in nested if "$ref" not in one]
    expects += [f"a mapping of {', '.join(one['properties'])}" for one in refs]
    return KeyInfo(name, " or ".join(expects), default, _unwrapped(field["description"]), False)


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
    if kind["type"] == "array" and "$ref" in kind["items"]:
        return "a list of layers"
    if kind["type"] == "array":
        return f"a list, each {_expects(kind['items'])}"
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [f"{sign} {_number(kind[limit])}" for limit, sign in signs.items() if limit in kind]
    noun = "a whole number" if kind["type"] == "integer" else "a number"
    return f"{noun} {' and '.join(limits)}".strip()


def _number(limit: float) -> str:
    return "2^63" if limit == 2**63 else "a million" if limit == 1e6 else f"{limit:g}"


SIBLINGS = ("repeat", "activation", "dropout", "learn_rate_coef", "max_norm")
"""Keys of a layer that may also stand beside its kind: `{affine: 512, repeat: 3}`."""
AFTER_OTHERS = ("activation", "dropout")  # beside another kind they are its keys
MOST_LAYERS = 1000  # repeated ones as often as they are


def read_layers(given: SourceValue, tree: SourceTree) -> list[LayerConfig] | None:
    """The layers that `model.layers` says; None where anything is wrong, which is added to `tree`."""
    if not isinstance(given.value, list):
        expected = "a list of layers, such as [{affine: 512, repeat: 3}]"
        tree.refuse(f"model.layers: {format_value(given.value)} found, expected {expected}", given.source)
        return None
    layers = [_read_layer(item, f"model.layers[{n}]", given.source, tree) for n, item in enumerate(given.value)]
    sound = [layer for layer in layers if layer is not None]
    if sum(layer.repeat for layer in sound) > MOST_LAYERS:
        tree.refuse(f"model.layers: more than {MOST_LAYERS} layers", given.source)
        return None
    return sound if len(sound) == len(layers) else None


def _read_layer(given: Any, name: str, source: str, tree: SourceTree) -> LayerConfig | None:
    """One layer, `name` in messages; None where anything is wrong with it."""
    if isinstance(given, str) and given in LAYERS:
        given = {given: None}  # - scale-and-shift
    source, sources = getattr(given, "source", source), getattr(given, "sources", {})
    if not isinstance(given, dict):
        tree.refuse(f"{name}: {format_value(given)} found, expected a mapping such as affine: 512", source)
        return None
    named = [kind for kind in LAYERS if kind in given]
    kinds = [kind for kind in named if kind not in AFTER_OTHERS] or named[:1]
    if len(kinds) != 1:
        found = " and ".join(kinds) or "no kind of layer"
        meant = "" if kinds else _suggestion([key for key in given if key not in SIBLINGS], LAYERS)
        tree.refuse(f"{name}: {found} found, expected one of {', '.join(LAYERS)}{meant}", source)
        return None
    kind, value = kinds[0], given[kinds[0]]
    place, known, before = sources.get(kind, source), layer_keys()[kind], len(tree.problems)
    inside, places = value, getattr(value, "sources", {})
    if kind == "stored" or not isinstance(value, dict | None):
        if not LAYERS[kind].value_key:
            expected = f"a mapping of {', '.join(known)}"
            tree.refuse(f"{name}.{kind}: {format_value(value)} found, expected {expected}", place)
            return None
        inside, places = {LAYERS[kind].value_key: value}, {}
    values: dict[str, SourceValue] = {}
    beside = {key: one for key, one in given.items() if key != kind}
    for keys_here, where, around, allowed in (
        (inside or {}, places, f"{name}.{kind}", list(known)),
        (beside, sources, name, [key for key in known if key in SIBLINGS]),
    ):
        for key, one in keys_here.items():
            at = where.get(key, place)
            if key not in allowed:
                meant = _suggestion([key], allowed) or f"; the keys here are {', '.join(allowed)}"
                if (near := difflib.get_close_matches(key, known, n=1)) and near[0] not in allowed:
                    meant = f"; did you mean {kind}: {{{near[0]}: ...}}?"
                tree.refuse(f"{format_key(f'{around}.{key}')}: unknown key{meant}", at)
            elif key in values:
                tree.refuse(f"{around}.{key}: given twice, also as {name}.{kind}.{key}", at)
            elif one is not None:  # a null is as if it had not been given
                values[key] = SourceValue(one, at)
    layer = _validated(kind, values, f"{name}.{kind}", place, tree)
    return layer if len(tree.problems) == before else None


def _suggestion(words: Iterable[str], known: Iterable[str]) -> str:
    known, words = list(known), list(words)
    tried = [*(word.replace("_", "-") for word in words), *words]
    near = (difflib.get_close_matches(word, known, n=1) for word in tried)
    return next((f"; did you mean {one[0]}?" for one in near if one), "")


def _validated(
    kind: str, found: dict[str, SourceValue], name: str, source: str, tree: SourceTree
) -> LayerConfig | None:
    """The layer of these keys; problems with their values are added to `tree`."""
    try:
        return LAYERS[kind].model_validate({key: one.value for key, one in found.items()}, strict=True).at(source)
    except ValidationError as error:
        for key in dict.fromkeys(str(detail["loc"][0]) for detail in error.errors(include_url=False)):
            expected = layer_keys()[kind][key].expects
            if key in found:
                text = f"{format_value(found[key].value)} found, expected {expected}"
                tree.refuse(f"{name if LAYERS[kind].value_key == key else f'{name}.{key}'}: {text}", found[key].source)
            else:
                tree.refuse(f"{name}.{key}: missing, expected {expected}. {layer_keys()[kind][key].meaning}", source)
        return None


if __name__ == "__main__":
    print(recipe_reference(), end="")
