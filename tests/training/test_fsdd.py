"""recipes/fsdd: tiny runs on synthetic filter banks that must learn them, and the first epoch on the spoken digits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddnn.synth.corpus import SynthOptions, synthesize

RECIPES = Path(__file__).parents[2] / "recipes/fsdd"


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fsdd") / "banks"
    synthesize(out, SynthOptions(hours=0.15, test_hours=0.03, speakers=20, dim=40, pdfs=120, features="fbank", seed=2))
    return out


def train(run_cli, recipe: str, corpus: Path, run: Path, *settings: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """What `ddnn evaluate` says of the test set after the recipe with these settings."""
    told = [f"data.train={corpus / 'train'}", f"data.alignments={corpus / 'ali'}"]
    told += [f"data.cv.speakers={corpus / 'cv_speakers.txt'}", *settings]
    trained = run_cli("train", RECIPES / recipe, "--run-dir", run, *(word for one in told for word in ("--set", one)))
    assert trained.exit_code == 0, trained.stderr
    said = run_cli("evaluate", run, "--data", corpus / "test", "--alignments", corpus / "ali_test", "--json")
    assert said.exit_code == 0, said.stderr
    return json.loads(said.stdout)


def test_synthetic_filter_banks_are_learnt(run_cli, tmp_path: Path, banks: Path) -> None:  # type: ignore[no-untyped-def]
    """Far better than chance, 1 / 120, and than the most frequent pdf, some 10 %."""
    settings = ["data.cmvn=mean-variance", "model.hidden_layers=2", "model.hidden_units=64", "schedule.max_epochs=4"]
    assert train(run_cli, "dnn.yaml", banks, tmp_path / "run", *settings)["frame_accuracy"] > 0.25


def test_spoken_digits_are_learnt(run_cli, tmp_path: Path, shared: Path) -> None:  # type: ignore[no-untyped-def]
    """After one epoch of the recipe; with Kaldi it is 0.7892 after nine."""
    found = train(run_cli, "dnn.yaml", shared / "fsdd", tmp_path / "run", "schedule.max_epochs=1")
    assert found["frame_accuracy"] > 0.63 and found["loss"] < 1.2
