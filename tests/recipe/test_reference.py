"""docs/reference/recipe.md and its pages, cluster.md and environment.md are what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from reference import CLUSTER, RECIPE, ROOT, pages, recipe_page

from ddnn.recipe.keys import keys, layer_keys, sections
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.recipe.source import shipped_fragments
from ddnn.slurm.cluster import ClusterConfig

INDEX = (ROOT / "docs" / "reference" / "recipe.md").read_text()


def test_pages_are_up_to_date() -> None:
    written = [CLUSTER, *(path.relative_to(ROOT) for path in (ROOT / RECIPE).glob("*.md"))]
    assert {path: (ROOT / path).read_text() for path in written} == pages(), "run: python tests/reference.py"


def test_every_key_has_a_heading_and_a_meaning() -> None:
    assert set(Recipe.model_fields) == {name.partition(".")[0] for name in [*keys(), *sections()] if name}
    for key in keys().values():
        assert re.search(rf"^#+ `{key.name}`$", pages()[recipe_page(key.name)], re.MULTILINE), key
        assert len(key.meaning) > 10, key
        assert key.expects not in ("", "text"), key
    for name in ClusterConfig.model_fields:
        assert f"\n## `{name}`\n" in pages()[CLUSTER]


def test_the_first_page_leads_to_every_section_and_fragment() -> None:
    linked = {path.name for path in pages() if path.parent == RECIPE}
    assert set(re.findall(r"\]\(recipe/(\w+\.md)\)", INDEX)) == linked
    named = re.findall(r"`([\w-]+/[\w-]+\.yaml)`", INDEX.partition("## Fragments that come with ddnn")[2])
    assert sorted(set(named)) == shipped_fragments()
    top = [name for name in keys() if "." not in name and recipe_page(name).name == "general.md"]
    assert f"| {', '.join(f'`{name}`' for name in top)} |" in INDEX


def test_defaults_and_meanings_of_variants() -> None:
    """The variants of a section need not have the same; and a key whose default depends on others says how."""
    schedule, parallel, data = (pages()[RECIPE / f"{name}.md"] for name in ("schedule", "parallel", "data"))
    epochs = schedule.partition("## `schedule.epochs`")[2].partition("##")[0]
    assert (
        "**Default:** `15`; `4` with `passes` · **Only with** [`schedule.name: exponential`](#schedulename)," in epochs
    )
    assert "Number of epochs. With `passes`: largest number of passes; training ends earlier" in epochs
    assert "**Default:** `true`; `false` with `bmuf`\n" in parallel
    assert "**Value:** a number > 0 and < 1 · **Default:** 0.1 if nothing else in this section is given\n" in data
    assert "**Value:** a path · **Optional**\n\nFile that lists the speakers" in data


def test_mentions_of_keys_and_pages_are_links() -> None:
    data, layers = pages()[RECIPE / "data.md"], pages()[RECIPE / "layers.md"]
    assert "Whether [`fraction`](#datacvfraction) holds out" in data  # of its own section
    assert "the recipe's [`seed`](general.md#seed)" in data
    assert "at most [`pool`](#convpool)" in layers
    assert "[extending.md](../../development/extending.md)" in layers
    assert "`parallel.cpu_threads`](recipe/parallel.md#parallelcpu_threads)" in pages()[CLUSTER]
    assert not re.search(r"(?<![\w(/.])docs/[\w/-]+\.md", "".join(pages().values()))


def test_examples_of_keys_can_be_read(tmp_path: Path) -> None:
    examples = {key.name: example for key in keys().values() for example in key.examples}
    assert {"data.train", "init", "minibatch_size"} <= set(examples)
    examples["model.layers"] = f"[conv: {{filters: 2, patch: {layer_keys()['conv']['patch'].examples[0]}}}]"
    inputs = "".join(f"  {name}: {examples.pop(f'data.{name}')}\n" for name in ("train", "alignments"))
    (tmp_path / "recipe.yaml").write_text(f"data:\n{inputs}init: {{model: exp/dnn}}\n")
    for name, example in examples.items():
        others = ["init=rbm"] if name.startswith("pretrain.") else []
        load_recipe(tmp_path / "recipe.yaml", [*others, f"{name}={example}"], must_exist=False)


def test_variables_of_the_environment_are_all_explained() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "ddnn").rglob("*.py"))
    read = r'environ(?:ment)?(?:\.get\(|\.pop\(|\[|, )"(\w+)"|"(\w+)" (?:not )?in (?:os\.)?environ'
    names = {name for found in re.findall(read, code) for name in found if name} | set(
        re.findall(r'"(DDNN_\w+)"', code)
    )
    assert {"DDNN_PROGRESS", "CC", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES", "_DDNN_COMPLETE"} <= names
    page = (ROOT / "docs" / "reference" / "environment.md").read_text()
    assert not {name for name in names if f"`{name}`" not in page}


def test_example_is_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/train_fmllr", "exp/tri4_ali"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    example = INDEX.partition("```yaml\n")[2].partition("```")[0]
    (tmp_path / "r.yaml").write_text(example)
    recipe = load_recipe(tmp_path / "r.yaml")
    assert (recipe.model.hidden_units, recipe.minibatch_size, recipe.schedule.initial_learning_rate) == (
        2048,
        1024,
        0.002,
    )
    assert recipe.schedule.initial_learning_rate * recipe.minibatch_size == pytest.approx(2.048)


def test_shipped_recipes(an4: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(Path("recipes/an4/sgd-random.yaml"))
    assert recipe.data.cv.speakers == an4 / "cv_speakers.txt"
    assert (recipe.model.hidden_layers, recipe.model.hidden_units, recipe.minibatch_size) == (4, 512, 256)
    for path in (ROOT / "recipes").rglob("*.yaml"):
        if path.name != "reproduce.yaml":
            load_recipe(path, must_exist=False)
    monkeypatch.chdir(tmp_path)
    demo = load_recipe(ROOT / "recipes/demo/demo.yaml", must_exist=False)
    assert demo.data.train == tmp_path / "demo/corpus/train"
    assert (demo.model.hidden_layers, demo.model.hidden_units, demo.schedule.max_epochs) == (3, 256, 6)
