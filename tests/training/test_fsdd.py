"""recipes/fsdd: tiny runs on synthetic filter banks that must learn them, and the first epoch on the spoken digits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ddnn.kaldi.archive import read_scp
from ddnn.synth.corpus import SynthOptions, synthesize

RECIPES = Path(__file__).parents[2] / "recipes/fsdd"


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 bands, 11 speakers to train on, whose vocal tracts are not those of the test set's."""
    out = tmp_path_factory.mktemp("fsdd") / "banks"
    synthesize(out, SynthOptions(hours=0.15, test_hours=0.04, speakers=12, dim=24, pdfs=120, features="fbank", seed=2))
    return out


def told(corpus: Path, *settings: str) -> list[str]:
    places = (f"train={corpus / 'train'}", f"alignments={corpus / 'ali'}", f"cv.speakers={corpus / 'cv_speakers.txt'}")
    return [word for one in (*(f"data.{place}" for place in places), *settings) for word in ("--set", one)]


def train(run_cli, recipe: str, corpus: Path, run: Path, *settings: str) -> dict[str, float]:  # type: ignore[no-untyped-def]
    """What `ddnn evaluate` says of the test set after the recipe with these settings."""
    trained = run_cli("train", RECIPES / recipe, "--run-dir", run, *told(corpus, *settings))
    assert trained.exit_code == 0, trained.stderr
    said = run_cli("evaluate", run, "--data", corpus / "test", "--alignments", corpus / "ali_test", "--json")
    assert said.exit_code == 0, said.stderr
    return json.loads(said.stdout)


SMALL = (
    *("data.cmvn=mean-variance", "data.deltas=0", "data.splice=2", "schedule.max_epochs=3"),
    *("optimizer.name=ng-sgd", "schedule.initial_learning_rate=0.004"),
)
"""Settings for a few seconds."""


def test_a_convolution_finds_formants_that_moved(run_cli, tmp_path: Path, banks: Path) -> None:  # type: ignore[no-untyped-def]
    """On other speakers it is better than affine layers of twice as many parameters, both by far better than chance: 1 /
    120, and some 10 % by the most frequent pdf."""
    layers = "model.layers=[{affine: 96, repeat: 2}]"
    affine = train(run_cli, "dnn.yaml", banks, tmp_path / "dnn", *SMALL, layers)
    layers = "model.layers=[{conv: {filters: 24, patch: 7, pool: 3}, activation: relu}, {affine: 64}]"
    convolutional = train(run_cli, "cnn.yaml", banks, tmp_path / "cnn", *SMALL, layers)
    assert affine["frame_accuracy"] > 0.3
    prepared = run_cli("decode-prep", tmp_path / "cnn", "--data", banks / "test", "--out", tmp_path / "decode")
    assert prepared.exit_code == 0, prepared.stderr
    assert len(read_scp(tmp_path / "decode/loglikes.scp")) == len(read_scp(banks / "test/feats.scp"))
    assert convolutional["loss"] < affine["loss"] - 0.05
    assert convolutional["frame_accuracy"] > affine["frame_accuracy"] + 0.02


def test_spoken_digits_are_learnt(run_cli, tmp_path: Path, fsdd: Path) -> None:  # type: ignore[no-untyped-def]
    """After one epoch of the recipe; with Kaldi it is 0.7892 after nine."""
    found = train(run_cli, "dnn.yaml", fsdd, tmp_path / "run", "schedule.max_epochs=1")
    assert found["frame_accuracy"] > 0.63 and found["loss"] < 1.2


@pytest.mark.parametrize(("recipe", "parameters"), [("dnn.yaml", 500_600), ("cnn.yaml", 312_216)])
def test_the_networks_have_as_many_parameters_as_kaldis(  # type: ignore[no-untyped-def]
    run_cli, fsdd: Path, recipe: str, parameters: int
) -> None:
    said = run_cli("train", RECIPES / recipe, "--dry-run", *told(fsdd))
    assert said.exit_code == 0 and f" {parameters:,} parameters" in said.stdout and "1320" in said.stdout


def test_kaldis_own_network_has_kaldis_figures(run_cli, tmp_path: Path, shared: Path, fsdd: Path) -> None:  # type: ignore[no-untyped-def]
    """The imported CNN on the test set: loss 0.7465, frame accuracy 75.27 %, as Kaldi says."""
    kaldi, source_dir = tmp_path / "kaldi", shared / "fsdd/kaldi_nnet1"
    kaldi.mkdir()
    (kaldi / "delta_opts").write_text("--delta-order=2\n")
    for name, source in (("final.nnet", "cnn.nnet"), ("final.feature_transform", "feature_transform.nnet")):
        shutil.copy(source_dir / source, kaldi / name)
    shutil.copy(source_dir / "ali_train_pdf.counts", kaldi)
    assert run_cli("import-nnet1", kaldi, "--out", tmp_path / "run").exit_code == 0
    said = run_cli("evaluate", tmp_path / "run", "--data", fsdd / "test", "--alignments", fsdd / "ali_test", "--json")
    found = json.loads(said.stdout)
    assert found["frames"] == 52_021
    assert (round(found["loss"], 4), round(100 * found["frame_accuracy"], 2)) == (0.7465, 75.27)
