"""`ddnn train` with `parallel.columns`, as a user runs it, over MPI."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from distributed.mpi_worlds import need_mpi
from training import deaths
from training.launching import mpi_script
from training.test_workers import ddnn, rows

from ddnn.nn.acoustic_model import load_model

NG = "optimizer: {name: ng-sgd, rank_in: 3, rank_out: 3}\nparallel: {averaging_period: 2}\nprecision: float32\n"


@pytest.fixture(autouse=True)
def with_mpi() -> None:
    need_mpi()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return new_recipe(tmp_path)


def new_recipe(folder: Path, **size: int) -> Path:
    features, labels = labelled_utterances(**size)
    data = write_data_dir(folder / "data", features)
    return write_recipe(folder / "recipe.yaml", data, write_pdfs(folder / "pdfs.txt", labels), NG)


def train(recipe: Path, run: Path, workers: int, columns: int, *more: str, **variables: str) -> Any:
    words = ("train", recipe, "--run-dir", run, "--workers", workers, "--set", f"parallel.columns={columns}", *more)
    return ddnn(*words, **variables)


def parameters(path: Path) -> torch.Tensor:
    return load_model(path).network.parameters


def cv_losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run) if row.get("split") == "cv"]


@pytest.mark.parametrize(("workers", "columns", "alike"), [(2, 2, 1), (3, 3, 1), (4, 2, 2)])
def test_columns_train_what_single_workers_train(
    recipe: Path, tmp_path: Path, workers: int, columns: int, alike: int
) -> None:
    for name, n, k in (("split", workers, columns), ("whole", alike, 1)):
        done = train(recipe, tmp_path / name, n, k)
        assert done.returncode == 0, done.stderr
    split, whole = tmp_path / "split", tmp_path / "whole"
    assert cv_losses(split) == pytest.approx(cv_losses(whole), abs=1e-4)
    found, expected = parameters(split / "final.safetensors"), parameters(whole / "final.safetensors")
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()
    row = next(row for row in rows(split) if row["type"] == "worker")
    assert row["columns"] == columns
    assert row["column_seconds"] > 0 and row["column_bytes"] > 0
    assert next(row for row in rows(whole) if row["type"] == "worker")["column_seconds"] is None
    figures = []
    for run in (split, whole):
        done = ddnn("evaluate", run, "--data", tmp_path / "data", "--alignments", tmp_path / "pdfs.txt", "--json")
        assert done.returncode == 0, done.stderr
        figures.append(json.loads(done.stdout)["loss"])
        assert (run / "ali_train_pdf.counts").read_bytes() == (whole / "ali_train_pdf.counts").read_bytes()
    assert figures[0] == pytest.approx(figures[1], abs=1e-4)


def test_filters_are_split(recipe: Path, tmp_path: Path) -> None:
    """With their pooling, scales, shifts and activations."""
    layers = "{conv: {filters: 5, patch: 2, pool: 2, pool_step: 1}}, {affine: 8}"
    model = [
        "--set",
        f"model.layers=[{layers}]",
        "--set",
        "model.hidden_layers=null",
        "--set",
        "model.hidden_units=null",
    ]
    for columns in (1, 2):
        done = train(recipe, tmp_path / str(columns), columns, columns, *model)
        assert done.returncode == 0, done.stderr
    assert cv_losses(tmp_path / "2") == pytest.approx(cv_losses(tmp_path / "1"), abs=1e-4)
    expected, found = (parameters(tmp_path / f"{columns}/final.safetensors") for columns in (1, 2))
    assert (found - expected).abs().max() <= 1e-3 * expected.abs().max()


def test_process_groups_carry_what_columns_exchange(recipe: Path, tmp_path: Path) -> None:
    """As NCCL does between GPUs: a group for the workers of a replica, and one for those that are averaged."""
    said = mpi_script("mpi_group.py", 4, recipe, tmp_path / "groups", "parallel.columns=2", "schedule.max_epochs=1")
    assert "opened [4, 4, 2, 2]\n" in said
    done = train(recipe, tmp_path / "mpi", 4, 2, "--set", "schedule.max_epochs=1")
    assert done.returncode == 0, done.stderr
    found, expected = (parameters(tmp_path / name / "final.safetensors") for name in ("groups", "mpi"))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run dir of a training by two columns, its recipe beside it."""
    folder = tmp_path_factory.mktemp("columns")
    (folder / "patch").mkdir()
    shutil.copy(deaths.__file__, folder / "patch/sitecustomize.py")
    done = train(new_recipe(folder, count=12, frames=100), folder / "run", 2, 2)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def train_disturbed(undisturbed: Path, run: Path, *death: object) -> Any:
    """The same, with checkpoints, by workers of which one dies like this (deaths.py)."""
    environment = {deaths.DEATHS: json.dumps([death]), "PYTHONPATH": str(undisturbed.parent / "patch")}
    words = ("--set", "checkpoint.interval_minibatches=20")
    return train(undisturbed.parent / "recipe.yaml", run, 2, 2, *words, **environment)


def test_stopped_amid_an_epoch_and_resumed_with_other_columns(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = train_disturbed(undisturbed, run, 1, "ask", 50)
    assert done.returncode == 75, done.stderr
    *_, checkpoint = sorted((run / "checkpoints").glob("[0-9]*"))
    assert {path.name for path in checkpoint.iterdir()} == {
        "manifest.json",
        "global.safetensors",
        "rank0000.safetensors",
    }
    losses = {}
    for columns in (2, 1):
        copy = tmp_path / f"by {columns}"
        shutil.copytree(run, copy)
        done = train(undisturbed.parent / "recipe.yaml", copy, columns, columns, "--resume")
        assert done.returncode == 0, done.stderr
        losses[columns] = cv_losses(copy)
        if columns == 1:
            assert re.search(r"parallel.columns is now 1; was 2", done.stderr)
    assert cv_losses(undisturbed) == losses[2]
    assert losses[1] == pytest.approx(losses[2], abs=1e-3)
    same = tmp_path / "by 2/final.safetensors"
    assert same.read_bytes() == (undisturbed / "final.safetensors").read_bytes()


def test_a_dead_worker_restarts_the_job(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = train_disturbed(undisturbed, run, 1, "minibatch", 50)
    assert done.returncode == 0, done.stderr
    (restart,) = [row for row in rows(run) if row["type"] == "event"]
    assert restart["event"] == "restarted" and restart["minibatch"] > 0, "from a checkpoint amid the epoch"
    assert (run / "final.safetensors").read_bytes() == (undisturbed / "final.safetensors").read_bytes()


def test_columns_that_no_layer_has(recipe: Path, tmp_path: Path) -> None:
    done = train(recipe, tmp_path / "run", 4, 4)
    assert done.returncode == 2
    assert done.stderr.count("parallel.columns") == 1
    assert "4 found, expected at most 3: layer 2 has 3 outputs" in done.stderr
