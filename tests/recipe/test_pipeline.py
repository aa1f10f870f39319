"""`parallel.stages`, `parallel.microbatches` and `parallel.pipeline` in recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe.test_columns import recipe_with

from ddnn.training.options import estimate_memory, minibatch_sizes, with_world_size
from ddnn.util.errors import RecipeError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ("workers=6", "columns=2", "stages=2"),
            "parallel.workers: 6 found, expected a multiple of parallel.columns x stages = 4: 4 or 8",
        ),
        (("stages=6",), "parallel.stages: 6 found, expected at most 5: a stage holds at least one layer"),
        (
            ("stages=2", "microbatches=512"),
            "parallel.microbatches: 512 found, expected at most 256, the frames of a minibatch",
        ),
        (("microbatches=4",), "parallel.microbatches: never read, as parallel.stages is 1"),
        (("pipeline=1f1b",), "parallel.pipeline: never read, as parallel.stages is 1"),
        (("workers=2", "stages=2", "overlap=true"), "parallel.overlap: true found beside stages: 2"),
        (("stages=0",), "parallel.stages: 0 found"),
        (("stages=two",), "parallel.stages: the text 'two' found"),
        (("stages=2", "microbatches=-1"), "parallel.microbatches: -1 found"),
        (("stages=2", "pipeline=gpipe"), "parallel.pipeline: the text 'gpipe' found, expected fill-drain or 1f1b"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: tuple[str, ...], message: str) -> None:
    more = ("model.hidden_layers=4", "minibatch_size=256")
    with pytest.raises(RecipeError) as caught:
        recipe_with(tmp_path, *more, *(f"parallel.{setting}" for setting in settings))
    assert message in str(caught.value)


def test_replicas_of_stages_share_a_total_minibatch(tmp_path: Path) -> None:
    settings = ("minibatch_scope=total", "minibatch_size=512", "parallel.columns=2", "parallel.stages=2")
    unstarted = recipe_with(tmp_path, *settings)
    recipe = with_world_size(unstarted, 8)
    assert recipe.parallel.replicas == 2
    assert minibatch_sizes(recipe).start == 256
    with pytest.raises(RecipeError, match=r"6 found, expected a multiple of parallel.columns x stages = 4"):
        with_world_size(unstarted, 6)
    with pytest.raises(RecipeError, match=r"a multiple of parallel.workers / parallel.columns x stages = 2"):
        recipe_with(tmp_path, *settings, "parallel.workers=8", "minibatch_size=511")


def test_a_stage_needs_memory_for_its_layers_alone(tmp_path: Path) -> None:
    needed = []
    for stages in (1, 2, 4):
        recipe = recipe_with(tmp_path, "model.hidden_layers=4", "model.hidden_units=1024", f"parallel.stages={stages}")
        needed.append(estimate_memory(recipe, 440, 1024, 1).cpu["parameters"])
    hidden, all_layers = 1025 * 1024, 4 * 1025 * 1024 + 441 * 1024
    copies = 4 * 4
    assert needed == [copies * size for size in (all_layers, all_layers - 2 * hidden, hidden + 441 * 1024)]
