"""`parallel.strategy: async` in recipes."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe.test_columns import recipe_with

from ddnn.recipe.schema import AsyncConfig
from ddnn.util.errors import RecipeError, exit_code


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("overlap=true", "true found beside strategy: async, which waits for no other worker; set it to false"),
        (
            "comm_dtype=bfloat16",
            "bfloat16 found, expected float32 beside strategy: async: the parameters of the server",
        ),
        ("columns=2", "2 found, expected 1 beside strategy: async: a worker exchanges a whole network"),
        ("columns=auto", "auto found, expected 1 beside strategy: async"),
        ("stages=2", "2 found, expected 1 beside strategy: async"),
        ("local_momentum=average", "average found, expected keep or reset beside strategy: async: workers do not"),
        ("update_scale=0", "0 found, expected a number > 0 and <= 1"),
        ("averaging_frames=epoch", "epoch found beside strategy: async, whose workers exchange within an epoch"),
        ("elasticity=0.5", "elasticity"),
    ],
)
def test_what_is_refused(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe_with(tmp_path, "parallel.workers=4", "parallel.strategy=async", f"parallel.{setting}")
    assert f"parallel.{setting.partition('=')[0]}: " in str(caught.value) and message in str(caught.value)
    assert exit_code(caught.value) == 2


def test_defaults(tmp_path: Path) -> None:
    """Changes count together as in averaging, so that learning rates are multiplied by the number of workers."""
    parallel = recipe_with(tmp_path, "parallel.strategy=async").parallel
    assert isinstance(parallel, AsyncConfig)
    assert (parallel.scale_learning_rate, parallel.local_momentum, parallel.update_scale) == (True, "keep", None)
    recipe_with(tmp_path, "parallel.strategy=async", "parallel.averaging_frames=2000", "parallel.warmup=all-reduce")
