"""`model.layers`: what is read, what is said about layers that cannot be, and the sizes that a recipe alone rules out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from ddnn.recipe.layers import LAYERS, AffineLayerConfig, ConvLayerConfig
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.recipe.source import parse_file
from ddnn.training.resume_rules import changed_keys
from ddnn.util.errors import RecipeError

DATA = "data: {train: ., alignments: .}\n"
CNN = """model:
  layers:
    - conv: {filters: 128, patch: 8, pool: 3}
    - conv: {filters: 256, patch: 4}
      activation: relu
    - affine: 1024
      repeat: 4
      dropout: 0.1
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "r.yaml"
    path.write_text(DATA + text)
    return load_recipe(path, overrides)


def problem(tmp_path: Path, text: str, *overrides: str) -> str:
    """The only one, its file shortened to its line."""
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, *overrides)
    return caught.value.message.replace(f"{tmp_path / 'r.yaml'}, ", "")


def layers(tmp_path: Path, *items: str) -> str:
    """What is wrong with these layers, which begin in line 4."""
    return problem(tmp_path, "model:\n  layers:\n" + "".join(f"  - {item}\n" for item in items))


def test_a_network_of_layers(tmp_path: Path) -> None:
    model = load(tmp_path, CNN).model
    assert model.layers == [
        ConvLayerConfig(filters=128, patch=8, pool=3),
        ConvLayerConfig(filters=256, patch=4, activation="relu"),
        AffineLayerConfig(units=1024, repeat=4, dropout=0.1),
    ]
    summary = "conv 128 of 8 bands pool 3, conv 256 of 4 bands relu, 4 x 1024 sigmoid dropout 0.1"
    assert model.summary() == summary


def test_keys_of_a_layer_stand_beside_its_kind_or_in_its_mapping(tmp_path: Path) -> None:
    beside = load(tmp_path, "", "model.layers=[{affine: 8, repeat: 2, activation: tanh, max_norm: 1}]")
    inside = load(tmp_path, "", "model.layers=[{affine: {units: 8, repeat: 2, activation: tanh, max_norm: 1.0}}]")
    assert beside == inside
    reset = load(tmp_path, "", "model.layers=[{affine: 8, repeat: null, activation: ~}]")
    assert reset.model.layers == [AffineLayerConfig(units=8)]


@pytest.mark.parametrize(
    "text",
    [
        CNN,
        "model: {layers: []}",
        "model: {layers: [{affine: 9}, scale-and-shift, {scale-and-shift: }, {dropout: 0.5}, {activation: prelu}]}",
        "model: {bands: 9, layers: [{conv: {filters: 2, patch: 3, max_norm: 0}}, {pool: 7}]}",
        "model: {layers: [{stored: {kind: copy, width: 3, columns: [2, 0]}, repeat: 2}]}",
    ],
)
def test_dump_and_load_give_the_same_layers(tmp_path: Path, text: str) -> None:
    recipe = load(tmp_path, text)
    dumped = dump_recipe(recipe)
    (tmp_path / "again.yaml").write_text(dumped)
    assert load_recipe(tmp_path / "again.yaml") == recipe
    assert not {"hidden_layers", "hidden_units", "activation"} & set(yaml.safe_load(dumped)["model"])


def test_equal_layers_are_dumped_as_ever(tmp_path: Path) -> None:
    """So that the checkpoints and records of earlier versions are still those of the same recipe."""
    tree = yaml.safe_load(dump_recipe(load(tmp_path, "")))
    assert tree["model"] == {"hidden_layers": 6, "hidden_units": 2048, "activation": "sigmoid"}


KINDS = "affine, conv, pool, scale-and-shift, dropout, activation, stored"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (
            "conv: {filters: 9, patch: 2, pol: 3}",
            "model.layers[0].conv.pol: unknown key; did you mean pool?  [line 4]",
        ),
        (
            "{conv: {filters: 9, patch: 2}, pol_step: 3}",
            "model.layers[0].conv.pol_step: unknown key; did you mean pool_step?  [line 4]",
        ),
        (
            "{affine: 9,\n     colour: 3}",
            "model.layers[0].affine.colour: unknown key; the keys here are units, max_norm, repeat, activation, dropout, "
            "learn_rate_coef  [line 5]",
        ),
        (
            "{affine: 9, activaton: tanh}",
            "model.layers[0].affine.activaton: unknown key; did you mean activation?  [line 4]",
        ),
        ("{affine: 0}", "model.layers[0].affine: 0 found, expected a whole number >= 1 and <= a million  [line 4]"),
        (
            "{affine: 9, repeat: 101}",
            "model.layers[0].affine.repeat: 101 found, expected a whole number >= 1 and <= 100",
        ),
        (
            "{affine: 9, dropout: 1}",
            "model.layers[0].affine.dropout: 1 found, expected a number >= 0 and < 1  [line 4]",
        ),
        (
            "{affine: 9, activation: relx}",
            "model.layers[0].affine.activation: the text 'relx' found, expected sigmoid, tanh, relu, prelu or linear",
        ),
        (
            "conv: {filters: 9}",
            "model.layers[0].conv.patch: missing, expected a whole number >= 1 and <= a million, or a mapping ",
        ),
        ("conv: 9", "model.layers[0].conv: 9 found, expected a mapping of filters, patch, step, dilation, pool, "),
        ("{conv: {filters: 9, patch: 2, weight_stddev: .nan}}", ".weight_stddev: .nan found, expected a number >= 0"),
        (
            "{affine: {units: 9, repeat: 2}, repeat: 3}",
            "model.layers[0].affine: repeat given twice, in the mapping of affine and beside it  [line 4]",
        ),
        (
            "{affine: 9, conv: {filters: 2, patch: 2}}",
            f"model.layers[0]: affine and conv found, expected one of {KINDS}  [line 4]",
        ),
        ("{afine: 9}", f"model.layers[0]: no kind of layer found, expected one of {KINDS}; did you mean affine?"),
        ("{scale_and_shift: }", "; did you mean scale-and-shift?  [line 4]"),
        ("{repeat: 2}", f"model.layers[0]: no kind of layer found, expected one of {KINDS}  [line 4]"),
        ("9", "model.layers[0]: 9 found, expected a mapping such as affine: 512  ["),
        ("affine", "model.layers[0].affine.units: missing, expected a whole number"),
        ("pool: {size: 2, kind: mix}", "model.layers[0].pool.kind: the text 'mix' found, expected max or average"),
        ("stored: 3", "model.layers[0].stored: 3 found, expected a mapping  [line 4]"),
        ("{affine: 3, affine: 3}", "model.layers[0].affine: given twice, first in line 4  [line 4]"),
        ("{affine: 3, a.b: 3}", "'a.b': names with dots are for --set; here write a: {b: ...}  [line 4]"),
    ],
)
def test_what_no_layer_is(tmp_path: Path, item: str, said: str) -> None:
    assert said in layers(tmp_path, item)


def test_all_problems_of_all_layers_at_once(tmp_path: Path) -> None:
    found = layers(tmp_path, "affine: x", "affine: 3", "conv: {patch: 0, filters: 0}").split("\n")
    assert [line.partition(": ")[0] for line in found] == [
        "3 problems in the recipe:",
        "  - model.layers[0].affine",
        "  - model.layers[2].conv.filters",
        "  - model.layers[2].conv.patch",
    ]
    assert [line.rpartition("  ")[2] for line in found[1:]] == ["[line 4]", "[line 6]", "[line 6]"]


def test_layers_of_a_later_file_have_its_lines(tmp_path: Path) -> None:
    """Not those of the file that it includes, whose layers it replaces."""
    included = "\n\nmodel:\n  layers:\n  - affine:\n      units: 3\n      dropout: 0.1\n"
    (tmp_path / "base.yaml").write_text(included)
    said = problem(tmp_path, "include: base.yaml\nmodel:\n  layers:\n  - affine: x\n")
    assert said == "model.layers[0].affine: the text 'x' found, expected a whole number >= 1 and <= a million  [line 5]"


def test_a_key_of_one_layer_cannot_be_set(tmp_path: Path) -> None:
    said = problem(tmp_path, "model: {layers: [affine: 3]}", "model.layers[0].affine.units=4")
    assert "model.layers[0]: unknown key; model.layers is set as a whole: model.layers=[...]  [--set" in said


def test_what_follows_from_layers_that_are_wrong_is_not_said(tmp_path: Path) -> None:
    """`model.bands` counts with `model.layers`, also where those cannot be read."""
    assert "never read" not in problem(tmp_path, "model: {bands: 8, layers: [{conf: {filters: 3, patch: 2}}]}")


@pytest.mark.parametrize(
    "said",
    [
        ("model: {layers: 3}", "model.layers: 3 found, expected a list of layers, such as [{affine: 512, repeat: 3}]"),
        (
            "model: {layers: {affine: 3}}",
            "model.layers: a mapping found, expected a list of layers, such as [{affine: 512, repeat: 3}]  [line 2]",
        ),
        (
            "model: {layers: [{affine: 3, repeat: 100}" + ", {affine: 3, repeat: 91}" * 10 + "]}",
            "more than 1000 layers",
        ),
        (
            "model: {layers: [], hidden_units: 3}",
            "model.hidden_units: never read, as model.layers says it for each layer; remove it or set it to null",
        ),
        (
            "model: {bands: 3}",
            "model.bands: never read, as there is no model.layers; remove it or set it to null  [line 2]",
        ),
        (
            "model: {layers: [{affine: 3, repeat: 2}, dropout: 0.1], freeze: [4]}",
            "model.freeze: 4 found, expected 0 (the first hidden layer) to 3 (the output layer)",
        ),
        (
            "model: {layers: [{affine: 3}, {dropout: 0.1}, {activation: relu}], freeze: [0, 3]}",
            "model.freeze: all 2 layers that have parameters are frozen, so that nothing is trained: leave at least one",
        ),
    ],
)
def test_contradictions(tmp_path: Path, said: tuple[str, str]) -> None:
    assert said[1] in problem(tmp_path, said[0])


def test_an_activation_that_is_trained_may_be_all_that_is(tmp_path: Path) -> None:
    text = "model: {layers: [{affine: 3}, {activation: prelu}], freeze: [0, 2]}"
    assert load(tmp_path, text).model.freeze == [0, 2]


def test_a_key_that_was_removed_is_accepted_without_effect(tmp_path: Path) -> None:
    """Run dirs of earlier versions have it."""
    with_key = load(tmp_path, "model: {layers: [conv: {filters: 3, patch: 2}], allow_any_features: true}")
    assert with_key == load(tmp_path, "model: {layers: [conv: {filters: 3, patch: 2}]}", "model.allow_any_features=no")
    assert "allow_any_features" not in dump_recipe(with_key)
    before = dump_recipe(with_key).replace("model:\n", "model:\n  allow_any_features: false\n")
    assert changed_keys(parse_file(before.encode(), "recipe.yaml").values, with_key) == {}


def test_every_kind_has_its_keys_in_the_reference() -> None:
    text = Path("docs/reference/recipe/layers.md").read_text()
    for kind, section in LAYERS.items():
        part = text.partition(f"\n## `{kind}`\n")[2].partition("\n## ")[0]
        names = re.findall(rf"^### `{kind}\.(\w+)`$", part, re.MULTILINE)
        assert sorted(names) == sorted(section.model_fields)
        assert names[0] == (section.primary_key or names[0])
