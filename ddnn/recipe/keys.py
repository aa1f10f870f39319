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

    def as_missing(self, name: str) -> str:
        """The problem that the key, `name` in messages, is not given."""
        return f"{name}: missing, expected {self.expects}. {self.meaning}"

    def as_wrong(self, name: str, value: Any) -> str:
        """The problem that it does not take this value."""
        return f"{name}: {format_value(value)} found, expected {self.expects}"


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
    """For each kind of `model.layers` its keys by name: first the one whose value may stand for all, last those of other
    kinds too."""
    found = {}
    for kind, section in LAYERS.items():
        _, keys = _walk_schema(section.model_json_schema())
        order = sorted(
            section.model_fields,
            key=lambda name: (name != section.primary_key, name in TrainedLayerConfig.model_fields),
        )
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
    """The sections and keys of a recipe."""
    return _walk_schema(Recipe.model_json_schema())


def _walk_schema(schema: dict[str, Any]) -> tuple[dict[str, str], dict[str, KeyInfo]]:
    """The sections and keys of a JSON schema."""
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


SHARED_KEYS = ("repeat", "activation", "dropout", "learn_rate_coef", "max_norm")
"""Keys of a layer that may also stand beside its kind: `{affine: 512, repeat: 3}`."""
KINDS_THAT_ARE_ALSO_KEYS = ("activation", "dropout")  # beside another kind they are its keys
MAX_LAYERS = 1000  # repeated ones as often as they are


def read_layers(given: SourceValue, tree: SourceTree) -> list[LayerConfig] | None:
    """The layers that `model.layers` says; None where anything is wrong, which is added to `tree`."""
    name, before = "model.layers", len(tree.problems)
    if not isinstance(given.value, list):
        expected = "a list of layers, such as [{affine: 512, repeat: 3}]"
        tree.add_problem(f"{name}: {format_value(given.value)} found, expected {expected}", given.source)
        return None
    read = [_read_layer(item, f"{name}[{n}]", given.source, tree) for n, item in enumerate(given.value)]
    layers = [layer for layer in read if layer is not None]
    if sum(layer.repeat for layer in layers) > MAX_LAYERS:
        tree.add_problem(f"{name}: more than {MAX_LAYERS} layers", given.source)
    return layers if len(tree.problems) == before else None


def _read_layer(item: Any, name: str, source: str, tree: SourceTree) -> LayerConfig | None:
    """One layer, `name` in messages; None where anything is wrong with it."""
    source, before = tree.places.get(name, source), len(tree.problems)
    if isinstance(item, str) and item in LAYERS:
        item = {item: None}  # - scale-and-shift
    try:
        kind = _kind_of_layer(item)
    except ValueError as error:
        tree.add_problem(f"{name}: {error}", source)
        return None
    section, known, inside = LAYERS[kind], layer_keys()[kind], item[kind]

    def refuse(text: str, key: str = "") -> None:
        places = (f"{name}.{kind}.{key}", f"{name}.{key}", f"{name}.{kind}")
        tree.add_problem(text, next((tree.places[place] for place in places if place in tree.places), source))

    if section.primary_key and (kind == "stored" or not isinstance(inside, dict | None)):
        inside = {section.primary_key: inside}
    if not isinstance(inside, dict | None):
        refuse(f"{name}.{kind}: {format_value(inside)} found, expected a mapping of {', '.join(known)}")
        return None
    inside, beside = inside or {}, {key: value for key, value in item.items() if key != kind}
    siblings = [key for key in known if key in SHARED_KEYS]
    for keys_here, where, allowed in ((inside, f"{name}.{kind}", list(known)), (beside, name, siblings)):
        for key in [key for key in keys_here if key not in allowed]:
            meant = _nearest([key], allowed) or f"; the keys here are {', '.join(allowed)}"
            if (near := difflib.get_close_matches(key, known, n=1)) and near[0] not in allowed:
                meant = f"; did you mean {kind}: {{{near[0]}: ...}}?"
            refuse(f"{format_key(f'{where}.{key}')}: unknown key{meant}", key)
    for key in filter(inside.__contains__, beside):
        refuse(f"{name}.{key}: given twice, also as {name}.{kind}.{key}", key)
    given = {key: value for key, value in {**inside, **beside}.items() if key in known and value is not None}
    try:
        layer = section.model_validate(given, strict=True).at(source)
    except ValidationError as error:
        for key in dict.fromkeys(str(detail["loc"][0]) for detail in error.errors(include_url=False)):
            shown = f"{name}.{kind}" if key == section.primary_key and key in given else f"{name}.{kind}.{key}"
            refuse(known[key].as_wrong(shown, given[key]) if key in given else known[key].as_missing(shown), key)
        return None
    return layer if len(tree.problems) == before else None


def _kind_of_layer(item: Any) -> str:
    """ValueError: it is not one layer."""
    if not isinstance(item, dict):
        raise ValueError(f"{format_value(item)} found, expected a mapping such as affine: 512")
    named = [kind for kind in LAYERS if kind in item]
    kinds = [kind for kind in named if kind not in KINDS_THAT_ARE_ALSO_KEYS] or named[:1]
    if len(kinds) == 1:
        return kinds[0]
    meant = "" if kinds else _nearest([key for key in item if key not in SHARED_KEYS], LAYERS)
    found = " and ".join(kinds) or "no kind of layer"
    raise ValueError(f"{found} found, expected one of {', '.join(LAYERS)}{meant}")


def _nearest(words: Iterable[str], known: Iterable[str]) -> str:
    """The known word that one of these may mean, as the end of a sentence; else nothing."""
    known, words = list(known), list(words)
    tried = [*(word.replace("_", "-") for word in words), *words]
    near = (difflib.get_close_matches(word, known, n=1) for word in tried)
    return next((f"; did you mean {match[0]}?" for match in near if match), "")


if __name__ == "__main__":
    print(recipe_reference(), end="")
