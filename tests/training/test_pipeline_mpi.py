"""`ddnn train` with `parallel.stages`, as a user runs it, over MPI."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from distributed.mpi_worlds import need_mpi
from training import deaths
from training.test_columns_mpi import cv_losses, new_recipe, parameters
from training.test_workers import ddnn, rows

MICROBATCHES = ("--set", "parallel.microbatches=4")


@pytest.fixture(autouse=True)
def with_mpi() -> None:
    need_mpi()


def train(
    recipe: Path, run: Path, workers: int, *more: str, stages: int = 1, columns: int = 1, **variables: str
) -> Any:
    shape = ("--set", f"parallel.stages={stages}", "--set", f"parallel.columns={columns}")
    return ddnn("train", recipe, "--run-dir", run, "--workers", workers, *shape, *more, **variables)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run dir of a training by a pipeline of two stages in four microbatches, its recipe beside it."""
    folder = tmp_path_factory.mktemp("stages")
    (folder / "patch").mkdir()
    shutil.copy(deaths.__file__, folder / "patch/sitecustomize.py")
    done = train(new_recipe(folder, count=12, frames=100), folder / "run", 2, *MICROBATCHES, stages=2)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def train_disturbed(undisturbed: Path, run: Path, *death: object) -> Any:
    """The same, with checkpoints, by workers of which one dies like this (deaths.py)."""
    environment = {deaths.DEATHS: json.dumps([death]), "PYTHONPATH": str(undisturbed.parent / "patch")}
    words = ("--set", "checkpoint.interval_minibatches=20", *MICROBATCHES)
    return train(undisturbed.parent / "recipe.yaml", run, 2, *words, stages=2, **environment)


def test_a_pipeline_trains_what_one_worker_trains(undisturbed: Path, tmp_path: Path) -> None:
    """And so do two stages of two columns; each evaluates the whole network."""
    recipe, whole, hybrid = undisturbed.parent / "recipe.yaml", tmp_path / "whole", tmp_path / "hybrid"
    for run, shape in ((whole, {}), (hybrid, {"stages": 2, "columns": 2})):
        done = train(recipe, run, 4 if shape else 1, **shape)
        assert done.returncode == 0, done.stderr
    expected = parameters(whole / "final.safetensors")
    for run in (undisturbed, hybrid):
        assert cv_losses(run) == pytest.approx(cv_losses(whole), abs=1e-4)
        found = parameters(run / "final.safetensors")
        assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    for row in (row for row in rows(undisturbed) if row["type"] == "worker"):
        assert (row["stages"], row["microbatches"]) == (2, 4)
        assert row["pipe_seconds"] > 0 and row["pipe_bytes"] > 0 and 0 < row["bubble_share"] <= 1
    assert next(row for row in rows(whole) if row["type"] == "worker")["pipe_seconds"] is None


def test_two_pipelines_are_averaged_in_1f1b(undisturbed: Path, tmp_path: Path) -> None:
    recipe, options = undisturbed.parent / "recipe.yaml", ("--set", "optimizer.name=sgd")
    for name, n, shape in (("split", 4, {"stages": 2}), ("whole", 2, {})):
        more = (*MICROBATCHES, "--set", "parallel.pipeline=1f1b") if shape else ()
        done = train(recipe, tmp_path / name, n, *options, *more, **shape)
        assert done.returncode == 0, done.stderr
    assert cv_losses(tmp_path / "split") == pytest.approx(cv_losses(tmp_path / "whole"), abs=1e-4)


def test_stopped_amid_an_epoch_and_resumed_by_other_workers(undisturbed: Path, tmp_path: Path) -> None:
    run, recipe = tmp_path / "run", undisturbed.parent / "recipe.yaml"
    done = train_disturbed(undisturbed, run, 1, "ask", 50)
    assert done.returncode == 75, done.stderr
    losses = {}
    for name, workers, shape in (("same", 2, {"stages": 2}), ("one", 1, {})):
        shutil.copytree(run, tmp_path / name)
        more = MICROBATCHES if "stages" in shape else ()
        done = train(recipe, tmp_path / name, workers, "--resume", *more, **shape)
        assert done.returncode == 0, done.stderr
        losses[name] = cv_losses(tmp_path / name)
        if name == "one":
            assert re.search(r"parallel.stages is now 1; was 2", done.stderr)
    assert cv_losses(undisturbed) == losses["same"]
    same = tmp_path / "same/final.safetensors"
    assert same.read_bytes() == (undisturbed / "final.safetensors").read_bytes()
    assert losses["one"] == pytest.approx(losses["same"], abs=1e-4)


@pytest.mark.parametrize("where", ["minibatch", "raise"])
def test_a_stage_that_ends_early(undisturbed: Path, tmp_path: Path, where: str) -> None:
    """One that is killed restarts the job from the newest checkpoint, one that raises ends it."""
    done = train_disturbed(undisturbed, tmp_path / "run", 1, where, 50)
    if where == "raise":
        assert done.returncode not in (0, 75), done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert [row["event"] for row in rows(tmp_path / "run") if row["type"] == "event"] == ["restarted"]
    final = tmp_path / "run/final.safetensors"
    assert final.read_bytes() == (undisturbed / "final.safetensors").read_bytes()
