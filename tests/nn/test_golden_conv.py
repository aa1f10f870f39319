"""Kaldi's own convolutional networks, forward and trained: golden/conv."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import load_all
from twins import batch_of, cross_entropy_step

from ddnn.data.batches import Batch, SequentialSampler, ShuffledSampler
from ddnn.data.dataset import AcousticDataset
from ddnn.decoding.prepare import compute_scores
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.nnet1_file import read_nnet1, write_nnet1
from ddnn.nn.acoustic_model import AcousticModel, from_nnet1, load_model, save_model, to_nnet1
from ddnn.nn.network import Workspace
from ddnn.nn.objective import Sums
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.evaluation import FigureSums
from ddnn.training.step import EagerStep

NETWORKS = (
    "conv_max", "conv_avg", "conv_step", "two_conv", "two_conv_true", "parallel", "prelu_lnorm", "maxnorm", "ties",
    "copy_cut", "one_patch",
)  # fmt: skip
OPTIONS = {"a": (0.01, SgdOptions(0.0, 0.0)), "b": (0.01, SgdOptions(0.9, 0.0)), "c": (0.02, SgdOptions(0.5, 0.001))}


@pytest.fixture
def corpus_of(golden: Path, tmp_path: Path) -> Callable[[AcousticModel, str], AcousticDataset]:
    """The features of a network, with the labels that all have."""

    def load(model: AcousticModel, name: str) -> AcousticDataset:
        bands = (golden / "conv" / name / "input").read_text().strip()
        folder = tmp_path / "data"
        folder.mkdir(exist_ok=True)
        shutil.copy(golden / f"conv/{bands}.feats.ark", folder)
        shutil.copy(golden / f"conv/{bands}.feats.scp", folder / "feats.scp")
        shutil.copy(golden / "conv/utt2spk", folder)
        return load_all(folder, read_alignments(golden / "conv/pdfs.txt", num_pdfs=10), model.transform.context)

    return load


def read_model(golden: Path, name: str, network: str = "init") -> AcousticModel:
    bands = (golden / "conv" / name / "input").read_text().strip()
    path = golden / f"conv/{name}/{network}.nnet"
    return from_nnet1(read_nnet1(path), read_nnet1(golden / f"conv/{bands}.transform.nnet"), path)


def figures(golden: Path, name: str) -> dict[str, tuple[str, str]]:
    """What Kaldi printed: loss and percentage of correct frames."""
    lines = map(str.split, (golden / f"conv/{name}/figures.txt").read_text().splitlines())
    return {what: (loss, accuracy) for what, loss, accuracy in lines}


def epoch(
    model: AcousticModel, workspace: Workspace, corpus: AcousticDataset, step: Callable[[Batch], Sums]
) -> tuple[str, str]:
    """Loss and percentage of correct frames over the whole minibatches, as Kaldi prints them."""
    sums = FigureSums(torch.device("cpu"))
    for rows in SequentialSampler(corpus.subset([0, 1, 2]), 16).epoch():
        if len(rows) == 16:
            sums.add(step(batch_of(workspace, corpus, model.transform, rows)), 16)
    found = sums.result()
    assert found.frames == 144
    return f"{found.loss:.6g}", f"{100 * found.figures['frame_accuracy']:.6g}"


def evaluated(model: AcousticModel, corpus: AcousticDataset) -> tuple[str, str]:
    workspace = Workspace(model.network, 16)

    def step(batch: Batch) -> Sums:
        workspace.forward()
        return cross_entropy_step(workspace, batch.labels)

    return epoch(model, workspace, corpus, step)


@pytest.mark.parametrize("name", NETWORKS)
def test_forward_equals_kaldis(golden: Path, corpus_of: Callable[..., AcousticDataset], name: str) -> None:
    model = read_model(golden, name)
    corpus = corpus_of(model, name)
    for kind, archive, atol in (("log-likelihoods", "presoftmax", 1e-5), ("posteriors", "posterior", 2e-6)):
        expected = dict(iterate_matrices(golden / f"conv/{name}/init.{archive}.ark"))
        found = dict(compute_scores(model, corpus, kind))
        assert found.keys() == expected.keys() == {"amy-01", "amy-02", "bob-01"}
        for utterance, values in found.items():
            np.testing.assert_allclose(values, expected[utterance], rtol=0, atol=atol)
    assert evaluated(model, corpus) == figures(golden, name)["init"]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", NETWORKS)
def test_one_epoch_ends_in_kaldis_network(
    golden: Path, corpus_of: Callable[..., AcousticDataset], name: str, options: str
) -> None:
    model = read_model(golden, name)
    corpus = corpus_of(model, name)
    rate, sgd = OPTIONS[options]
    workspace = Workspace(model.network, 16)
    step = partial(EagerStep(workspace, Sgd(model.network, sgd)), lr=rate)
    printed = figures(golden, name)
    assert epoch(model, workspace, corpus, step) == printed[options]
    expected = read_model(golden, name, f"trained_{options}").network.parameters
    np.testing.assert_allclose(model.network.parameters, expected, rtol=0, atol=1e-5)
    assert evaluated(model, corpus) == printed[f"cv_{options}"]


@pytest.mark.parametrize("name", NETWORKS)
def test_import_then_export_changes_no_byte(golden: Path, tmp_path: Path, name: str) -> None:
    """By way of a model file, which keeps everything too."""
    for network in ("init", "trained_a", "trained_b", "trained_c"):
        save_model(tmp_path / "model", read_model(golden, name, network))
        components, front = to_nnet1(load_model(tmp_path / "model"))
        write_nnet1(tmp_path / "network", components)
        assert (tmp_path / "network").read_bytes() == (golden / f"conv/{name}/{network}.nnet").read_bytes()
    write_nnet1(tmp_path / "front", front, text=True)
    bands = (golden / "conv" / name / "input").read_text().strip()
    assert (tmp_path / "front").read_bytes() == (golden / f"conv/{bands}.transform.nnet").read_bytes()


def test_rates_are_imported_as_they_were_given(golden: Path) -> None:
    """In a file they are float32, so that 0.1 is 0.10000000149."""
    coefs = [
        p.learn_rate_coef for one in read_model(golden, "conv_avg").network.layers for p in one.parameters.values()
    ]
    assert coefs == [0.7, 0.3, 0.5, 0.1, 1.0, 1.0]


def test_kaldis_network_of_spoken_digits_is_imported(
    shared: Path, fsdd: Path, tmp_path: Path, run_cli: Callable[..., Any]
) -> None:
    """Its own log-likelihoods, from static features: `delta_opts` says which deltas the network reads."""
    kaldi, folder, data = shared / "fsdd/kaldi_nnet1", tmp_path / "nnet1", tmp_path / "data"
    folder.mkdir()
    for name in ("cnn.nnet", "feature_transform.nnet", "ali_train_pdf.counts"):
        shutil.copy(kaldi / name, folder)
    (folder / "delta_opts").write_text("--delta-order=2\n")
    expected = dict(iterate_matrices(kaldi / "cnn.test3.loglikes.ark"))
    data.mkdir()
    lines = map(str.split, (fsdd / "test/feats.scp").read_text().splitlines())
    (data / "feats.scp").write_text("".join(f"{k} {fsdd / 'test' / v}\n" for k, v in lines if k in expected))
    assert run_cli("import-nnet1", folder, "--out", tmp_path / "run").exit_code == 0
    assert run_cli("decode-prep", tmp_path / "run", "--data", data, "--out", tmp_path / "out").exit_code == 0
    found = dict(iterate_matrices(tmp_path / "out/loglikes.ark"))
    assert found.keys() == expected.keys() and len(found) == 3
    for utterance, values in found.items():
        np.testing.assert_allclose(values, expected[utterance], rtol=0, atol=2e-6 * np.abs(values).max())
    (folder / "delta_opts").unlink()
    assert run_cli("import-nnet1", folder, "--out", tmp_path / "statics").exit_code == 0
    refused = run_cli("decode-prep", tmp_path / "statics", "--data", data, "--out", tmp_path / "none")
    assert refused.exit_code == 2 and not (tmp_path / "none").exists()
    assert "the features have 40 dims, the model was trained on 120" in refused.stderr
    assert "may lack its deltas (delta_opts in its directory)" in refused.stderr


@pytest.mark.parametrize(("name", "options"), list(zip(NETWORKS, "cbacbcbcaca", strict=True)))
def test_training_further_and_exporting_equals_kaldis(
    golden: Path, tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str, options: str
) -> None:
    """From Kaldi's directory to Kaldi's file: `ddnn train` with `init.model`, and frames in their order, then
    `ddnn export`."""
    monkeypatch.setattr(ShuffledSampler, "_draw", lambda sampler, epoch: torch.arange(len(sampler.frames)))
    bands = (golden / "conv" / name / "input").read_text().strip()
    kaldi, data, held_out = tmp_path / "kaldi", tmp_path / "data", tmp_path / "cv"
    for folder in (kaldi, data, held_out):
        folder.mkdir()
    shutil.copy(golden / f"conv/{name}/init.nnet", kaldi / "final.nnet")
    shutil.copy(golden / f"conv/{bands}.transform.nnet", kaldi / "final.feature_transform")
    features = map(str.split, (golden / f"conv/{bands}.feats.scp").read_text().splitlines())
    labels = (golden / "conv/pdfs.txt").read_text().splitlines()
    for key, place in features:
        for folder, prefix in ((data, ""), (held_out, "cv-")):  # no utterance may be in both
            with (folder / "feats.scp").open("a") as scp:
                scp.write(f"{prefix}{key} {golden / 'conv' / place}\n")
    (tmp_path / "cv.txt").write_text("".join(f"cv-{line}\n" for line in labels))
    rate, sgd = OPTIONS[options]
    (tmp_path / "further.yaml").write_text(
        f"data: {{train: {data}, alignments: {golden / 'conv/pdfs.txt'}, num_pdfs: 10, "
        f"cv: {{data: {held_out}, alignments: {tmp_path / 'cv.txt'}}}}}\n"
        f"init: {{model: {kaldi}}}\nminibatch_size: 16\noptimizer: {{momentum: {sgd.momentum}, l2: {sgd.l2}}}\n"
        f"schedule: {{name: constant, initial_learning_rate: {rate}, epochs: 1}}\n"
    )
    run, out = tmp_path / "run", tmp_path / "out"
    result = run_cli("train", tmp_path / "further.yaml", "--run-dir", run, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert run_cli("export", run, "--out", out).exit_code == 0
    found, expected = (
        from_nnet1(read_nnet1(path), (), path)
        for path in (out / "final.nnet", golden / f"conv/{name}/trained_{options}.nnet")
    )
    assert found.network.layers == expected.network.layers
    np.testing.assert_allclose(found.network.parameters, expected.network.parameters, rtol=0, atol=1e-5)
