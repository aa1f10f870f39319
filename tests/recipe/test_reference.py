"""docs/reference/recipe.md is what the schema says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddnn.recipe.keys import keys, recipe_reference, sections
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "recipe.md"


def test_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == recipe_reference(), "run: python -m ddnn.recipe.keys > docs/reference/recipe.md"


def test_every_key_of_the_schema_is_there_with_a_meaning() -> None:
    text = recipe_reference()
    assert set(Recipe.model_fields) == {name.partition(".")[0] for name in [*keys(), *sections()] if name}
    for key in keys().values():
        assert f"| `{key.name}` |" in text
        assert len(key.meaning) > 10, key
        assert key.expects not in ("", "text"), key


def test_example_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/train_fmllr", "exp/tri4_ali"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    example = recipe_reference().partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "r.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert (recipe.model.hidden_units, recipe.minibatch_size, recipe.schedule.initial_learning_rate) == (
        2048,
        1024,
        0.002,
    )
    assert recipe.schedule.initial_learning_rate * recipe.minibatch_size == pytest.approx(2.048)


def test_shipped_recipes(an4: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = DOCUMENT.parents[2]
    monkeypatch.chdir(root)
    recipe = load_recipe(Path("recipes/an4/sgd-random.yaml"))
    assert recipe.data.cv.speakers == an4 / "cv_speakers.txt"
    assert (recipe.model.hidden_layers, recipe.model.hidden_units, recipe.minibatch_size) == (4, 512, 256)
    for path in (root / "recipes").rglob("*.yaml"):
        if path.name != "reproduce.yaml":
            load_recipe(path, must_exist=False)
    monkeypatch.chdir(tmp_path)
    demo = load_recipe(root / "recipes/demo/demo.yaml", must_exist=False)
    assert demo.data.train == tmp_path / "demo/corpus/train"
    assert (demo.model.hidden_layers, demo.model.hidden_units, demo.schedule.max_epochs) == (3, 256, 6)
