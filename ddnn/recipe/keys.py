"""The keys of a recipe, by their dotted names, as read from the schema: what each expects, its default, its meaning."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ddnn.recipe.schema import VARIANTS, Recipe

REQUIRED = object()
"""Default of a key that has none."""

ALIASES = {
    "learning_rate": "schedule.initial_learning_rate",
    "learn_rate": "schedule.initial_learning_rate",
    "lr": "schedule.initial_learning_rate",
    "batch_size": "minibatch_size",
    "hidden_dim": "model.hidden_units",
    "hid_layers": "model.hidden_layers",
    "hid_dim": "model.hidden_units",
    "max_iters": "schedule.max_epochs",
    "min_iters": "schedule.min_epochs",
    "keep_lr_iters": "schedule.keep_lr_epochs",
    "on_failure": "parallel.max_restarts",
    "timeout": "parallel.hang_timeout",
}
"""What Kaldi's scripts, other trainers and earlier versions call the same thing; offered where an unknown key is
reported."""


OLD_KEYS = {
    "minibatch": "minibatch_size",
    "graphs": "cuda_graphs",
    "tf32": "allow_tf32",
    "data.pdfs": "data.num_pdfs",
    "data.normalise": "data.normalize",
    "data.store": "data.feature_dtype",
    "data.place": "data.feature_device",
    "data.cache": "data.cache_dir",
    "data.loaders": "data.loader_processes",
    "data.max_missing": "data.max_skipped_fraction",
    "data.cv.speakers_file": "data.cv.speakers",
    "optimizer.max_change_mode": "optimizer.max_change_scope",
    "schedule.initial": "schedule.initial_learning_rate",
    "schedule.final": "schedule.final_learning_rate",
    "schedule.start_halving": "schedule.start_halving_impr",
    "schedule.end_halving": "schedule.end_halving_impr",
    "schedule.keep_epochs": "schedule.keep_lr_epochs",
    "pretrain.from": "pretrain.dbn",
    "pretrain.gauss_rate": "pretrain.gaussian_learning_rate",
    "pretrain.rate": "pretrain.learning_rate",
    "pretrain.passes": "pretrain.epochs",
    "pretrain.minibatch": "pretrain.minibatch_size",
    "pretrain.momentum_as_kaldi": "pretrain.kaldi_momentum",
    "parallel.reduce": "parallel.strategy",
    "parallel.every": "parallel.averaging_period",
    "parallel.start": "parallel.warmup",
    "parallel.start_minibatches": "parallel.warmup_minibatches",
    "parallel.momentum_rule": "parallel.local_momentum",
    "parallel.block_rate": "parallel.block_learning_rate",
    "parallel.wire": "parallel.comm_dtype",
    "parallel.transport": "parallel.gpu_transport",
    "parallel.share_devices": "parallel.oversubscribe_gpus",
    "parallel.pretrain": "parallel.pretrain_data",
    "parallel.threads": "parallel.cpu_threads",
    "checkpoint.keep": "checkpoint.keep_last",
    "checkpoint.every_minutes": "checkpoint.interval_minutes",
    "checkpoint.every_minibatches": "checkpoint.interval_minibatches",
}
"""What keys were called in version 0.1."""


@dataclass(frozen=True)
class KeyInfo:
    """One key: dotted `name`, what it `expects` in words, `default` (or REQUIRED), `meaning`, whether it `is_path`.

    `variants` are those that have it, where it is in a section that has variants and not in all of them.
    """

    name: str
    expects: str
    default: Any
    meaning: str
    is_path: bool
    variants: tuple[str, ...] = ()


@cache
def sections() -> dict[str, str]:
    """Dotted names of the recipe's mappings, in schema order, with their meaning. The recipe itself is ""."""
    return _walk()[0]


@cache
def keys() -> dict[str, KeyInfo]:
    """All keys by dotted name, in schema order."""
    return _walk()[1]


def keys_of(section: str) -> list[str]:
    """The names directly in `section`, its subsections included, without the section's own name."""
    names = [*keys(), *(name for name in sections() if name)]
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]


def suggest_key(unknown: str) -> str:
    """What the writer of the dotted key `unknown` may have meant, as the end of a sentence."""
    section, _, last = unknown.rpartition(".")
    everywhere: dict[str, list[str]] = {}
    for name in [*keys(), *(name for name in sections() if name)]:
        everywhere.setdefault(name.rpartition(".")[2], []).append(name)
    if unknown in OLD_KEYS:
        return f"it is now called {OLD_KEYS[unknown]}"
    if last in ALIASES:
        return _or([ALIASES[last]])
    if last in everywhere:
        return _or(everywhere[last])
    in_section = keys_of(section)
    near = difflib.get_close_matches(last, in_section, n=1)
    if near:
        return _or([f"{section}.{near[0]}".lstrip(".")])
    near = difflib.get_close_matches(unknown, OLD_KEYS, n=1, cutoff=0.8)
    if near:
        return _or([OLD_KEYS[near[0]]])
    near = difflib.get_close_matches(last, everywhere, n=1, cutoff=0.7)
    if near:
        return _or(everywhere[near[0]])
    return f"the keys here are {', '.join(in_section)}"


def _or(names: list[str]) -> str:
    return f"did you mean {' or '.join(names)}?"


@cache
def _walk() -> tuple[dict[str, str], dict[str, KeyInfo]]:
    schema = Recipe.model_json_schema()
    found_sections: dict[str, str] = {}
    found_keys: dict[str, KeyInfo] = {}

    def visit(prefix: str, *variants: dict[str, Any]) -> None:
        found_sections[prefix] = _unwrapped(variants[0]["description"])
        for name in _names(prefix, variants):
            dotted = f"{prefix}.{name}".lstrip(".")
            having = [variant for variant in variants if name in variant["properties"]]
            field = having[0]["properties"][name]
            inner = [one["$ref"] for one in (field, *field.get("oneOf", ())) if "$ref" in one]
            if inner:
                visit(dotted, *(schema["$defs"][reference.rpartition("/")[2]] for reference in inner))
                continue
            kind = next((k for k in field.get("anyOf", []) if k["type"] != "null"), field)
            if (prefix, name) in _TAGS:
                kind = {"enum": [tag for variant in variants for tag in _tags(variant, name)]}
            default = field.get("default", REQUIRED if name in having[0].get("required", ()) else None)
            only = (
                [tag for variant in having for tag in _tags(variant, VARIANTS[prefix][0])]
                if len(variants) > len(having)
                else []
            )
            found_keys[dotted] = KeyInfo(
                dotted,
                _expects(kind),
                default,
                _unwrapped(field["description"]),
                kind.get("format") == "path",
                tuple(only),
            )

    visit("", schema)
    return found_sections, found_keys


_TAGS = {(section, key) for section, (key, _) in VARIANTS.items()}


def _names(prefix: str, variants: Sequence[dict[str, Any]]) -> list[str]:
    """Names of the keys of all variants, the one that chooses the variant first."""
    names = dict.fromkeys([VARIANTS[prefix][0]] if prefix in VARIANTS else [])
    for variant in variants:
        names |= dict.fromkeys(variant["properties"])
    return list(names)


def _tags(variant: dict[str, Any], key: str) -> list[str]:
    """The values of the key that choose a variant."""
    chooser = variant["properties"][key]
    return [chooser["const"]] if "const" in chooser else list(chooser["enum"])


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
