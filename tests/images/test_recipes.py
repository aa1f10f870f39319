"""recipes/images: tiny runs, on images of the recipes' shapes and on the digits themselves, that must learn them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from idx import ConvertOptions, convert_idx, write_idx

from ddnn.nn.layers import num_parameters
from ddnn.recipe.load import load_recipe
from ddnn.training.network_layers import network_layers

RECIPES = Path(__file__).parents[2] / "recipes/images"


def write_noisy(folder: Path, count: int, pixels: int, part: int) -> Path:
    """Images of ten random patterns of 2 x 2 pixels under noise, `part` their own noise; a data dir of 10 speakers."""
    patterns = np.kron(np.random.default_rng(1).integers(0, 256, (10, pixels // 2, pixels // 2)), np.ones((1, 2, 2)))
    rng = np.random.default_rng([2, part])
    labels = rng.integers(0, 10, count, dtype=np.uint8)
    images = np.clip(patterns[labels] / 2 + rng.normal(64, 25, (count, pixels, pixels)), 0, 255).astype(np.uint8)
    folder.mkdir(parents=True)
    write_idx(folder / "images.gz", images)
    write_idx(folder / "labels.gz", labels)
    convert_idx(folder / "images.gz", folder / "labels.gz", folder / "data", ConvertOptions(speakers=10))
    return folder / "data"


def accuracy(run_cli, recipe: str, train: Path, test: Path, run: Path, *settings: str) -> float:
    """Test frame accuracy in percent after the recipe with these settings."""
    told = [f"data.train={train}", f"data.alignments={train / 'pdfs.ark'}", *settings]
    trained = run_cli("train", RECIPES / recipe, "--run-dir", run, *(word for one in told for word in ("--set", one)))
    assert trained.exit_code == 0, trained.stderr
    said = run_cli("evaluate", run, "--data", test, "--alignments", test / "pdfs.ark", "--json")
    assert said.exit_code == 0, said.stderr
    return 100 * float(json.loads(said.stdout)["frame_accuracy"])


@pytest.mark.parametrize(
    ("recipe", "pixels", "settings"),
    [
        ("digits.yaml", 8, ["schedule.epochs=8"]),
        ("digits-cnn.yaml", 8, ["schedule.epochs=2"]),
        ("digits-cnn-columns.yaml", 8, ["schedule.epochs=4"]),
        ("fashion-mnist.yaml", 28, ["schedule.epochs=8", "model.hidden_units=64", "minibatch_size=16"]),
        ("fashion-mnist-cnn.yaml", 28, ["schedule.epochs=2", "minibatch_size=16"]),
    ],
)
def test_noisy_patterns_are_learnt(run_cli, tmp_path: Path, recipe: str, pixels: int, settings: list[str]) -> None:
    train, test = (write_noisy(tmp_path / str(part), count, pixels, part) for part, count in enumerate((1000, 300)))
    assert accuracy(run_cli, recipe, train, test, tmp_path / "run", *settings) > 95


@pytest.mark.parametrize(
    ("recipe", "parameters"),
    [
        ("digits.yaml", 26122),
        ("digits-cnn.yaml", 23946),
        ("digits-cnn-columns.yaml", 25434),
        ("fashion-mnist.yaml", 669706),
        ("fashion-mnist-cnn.yaml", 663670),
    ],
)
def test_the_networks_that_are_compared_are_of_about_equal_size(recipe: str, parameters: int) -> None:
    """The sizes that README.md gives."""
    pixels = 28 if recipe.startswith("fashion") else 8
    told = load_recipe(RECIPES / recipe, ["data.train=.", "data.alignments=."])
    assert num_parameters(network_layers(told, pixels * pixels, 10)) == parameters


@pytest.mark.parametrize(
    ("recipe", "epochs"), [("digits.yaml", 10), ("digits-cnn.yaml", 2), ("digits-cnn-columns.yaml", 4)]
)
def test_digits_are_learnt(run_cli, tmp_path: Path, recipe: str, epochs: int) -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    spec = importlib.util.spec_from_file_location("digits", RECIPES / "digits.py")
    assert spec is not None and spec.loader is not None
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    digits.main(tmp_path / "digits")
    train, test = tmp_path / "digits/train", tmp_path / "digits/test"
    assert accuracy(run_cli, recipe, train, test, tmp_path / "run", f"schedule.epochs={epochs}") > 85
