"""`parallel.columns` in recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ddnn.recipe.load import load_recipe
from ddnn.training.options import minibatch_sizes, with_world_size
from ddnn.util.errors import RecipeError


def recipe_with(folder: Path, *settings: str) -> Any:
    path = folder / "recipe.yaml"
    path.write_text("data: {train: train, alignments: ali}\n")
    return load_recipe(path, settings, must_exist=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("workers=6", "columns=4"), "parallel.workers: 6 found, expected a multiple of parallel.columns = 4: 4 or 8"),
        (("workers=2", "columns=3"), "parallel.workers: 2 found, expected a multiple of parallel.columns = 3: 3"),
        (("workers=4", "columns=2", "overlap=true"), "parallel.overlap: true found beside columns: 2"),
        (("columns=0",), "parallel.columns: 0 found"),
        (("columns=two",), "parallel.columns: the text 'two' found"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_with(tmp_path, *(f"parallel.{setting}" for setting in settings))
    assert message in str(caught.value)


def test_a_job_whose_workers_do_not_fill_replicas(tmp_path: Path) -> None:
    recipe = recipe_with(tmp_path, "parallel.columns=2")  # how many workers there are, the job says
    assert with_world_size(recipe, 4).parallel.replicas == 2
    for workers in (1, 3):
        with pytest.raises(RecipeError, match=f"{workers} found, expected a multiple of parallel.columns = 2"):
            with_world_size(recipe, workers)


def test_replicas_share_a_total_minibatch(tmp_path: Path) -> None:
    settings = ("parallel.workers=4", "minibatch_scope=total", "minibatch_size=512")
    for columns, size in ((1, 128), (2, 256), (4, 512)):
        recipe = recipe_with(tmp_path, *settings, f"parallel.columns={columns}")
        assert minibatch_sizes(recipe).start == size
    with pytest.raises(RecipeError, match=r"a multiple of parallel.workers / parallel.columns = 2"):
        recipe_with(tmp_path, *settings, "parallel.columns=2", "minibatch_size=511")
