"""The programs of tests/compare.py train on the same frames, and its table compares like with like."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import compare
import numpy as np
import pytest
import torch
from corpora import load_all

from ddnn.data.dataset import splice, splice_only
from ddnn.kaldi.alignments import read_alignments
from ddnn.recipe.load import load_recipe

OPTIONS = argparse.Namespace(
    network="44-2x8-5",
    minibatch=64,
    precision="float32",
    frames=1000,
    rounds=1,
    workers=2,
    programs="torch",
    microbatches=2,
    epochs=3,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("compare")
    compare.write_frames(made, OPTIONS)
    return made


def test_all_programs_have_the_same_frames(folder: Path) -> None:
    dataset = load_all(folder / "data", read_alignments(folder / "pdfs"), splice=compare.SPLICE)
    rows = dataset.rows_of(range(2))  # the third utterance is held out
    spliced = splice(dataset, splice_only(4, compare.SPLICE), rows, torch.empty(1000, 44)).numpy()
    expected = (spliced - spliced.mean(axis=0)) / spliced.std(axis=0)
    np.testing.assert_allclose(np.load(folder / "x.npy"), expected, atol=1e-5)
    np.testing.assert_array_equal(np.load(folder / "labels.npy"), dataset.labels[rows])


def test_the_recipes_of_ddnn_can_be_trained(folder: Path) -> None:
    for name in ("ddnn", "ddnn-gradients", "ddnn-averaging"):
        path = folder / f"{name}.json"
        path.write_text(json.dumps(compare.ddnn_recipe(name, folder, OPTIONS)))
        recipe = load_recipe(path)
        assert recipe.minibatch_size == 64 and recipe.parallel.cpu_threads == 1


def test_the_loop_of_pytorch_learns(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare.train_torch(folder, OPTIONS)
    figures = json.loads(capsys.readouterr().out)
    assert figures["frames_per_second"] > 0 and figures["loss"] < 1.62


def test_the_table_compares_programs_with_as_many_workers() -> None:
    speeds = {
        "torch": [10.0, 20.0],
        "ddnn": [20.0, 30.0],
        "torch-averaging": [30.0, 40.0],
        "ddnn-averaging": [30.0, 80.0],
    }
    found = {
        name: [{"frames_per_second": v, "loss": 1.0, "cpu_share": 0.97} for v in values]
        for name, values in speeds.items()
    }
    lines = compare.table(found, OPTIONS).splitlines()
    assert lines[-3] == "| ddnn | 1 | 25 (20 to 30) | 1.75 | 1.75 | 97 | 1.0000 |"
    assert lines[-1] == "| ddnn, all-reduce every 10 | 2 | 55 (30 to 80) | 1.50 | 3.50 | 97 | 1.0000 |"
    drawn = json.loads(compare.figures(found, OPTIONS))["rows"][-1]
    assert drawn == {"name": "ddnn, all-reduce every 10, 2 workers", "of": "ddnn", "frames_per_second": [30, 80]}
