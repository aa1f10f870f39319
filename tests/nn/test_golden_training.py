"""Kaldi's own training runs on a small network: golden/nnet1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import load_all
from twins import batch_of, biases, weights

from ddnn.data.batches import SequentialSampler
from ddnn.decoding.prepare import compute_scores
from ddnn.kaldi.alignments import read_alignments, read_pdf_counts
from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.nnet1 import AffineTransform
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.nn.acoustic_model import AcousticModel, from_nnet1
from ddnn.nn.network import Workspace
from ddnn.nn.scorer import log_priors
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.training.evaluation import FigureSums
from ddnn.training.step import EagerStep


@pytest.fixture
def data_dir(golden: Path, tmp_path: Path) -> Path:
    """A data dir around the golden features."""
    (tmp_path / "feats.scp").write_text(
        "".join(
            f"{key} {golden / 'nnet1' / rest}\n"
            for key, rest in (line.split(None, 1) for line in (golden / "nnet1/feats.scp").read_text().splitlines())
        )
    )
    (tmp_path / "utt2spk").write_text("".join(f"utt{i} utt{i}\n" for i in range(3)))
    return tmp_path


def initial_model(golden: Path) -> AcousticModel:
    front = read_nnet1(golden / "nnet1/feature_transform.nnet")
    return from_nnet1(read_nnet1(golden / "nnet1/init.nnet"), front, golden)


@pytest.mark.parametrize(
    ("name", "rate", "momentum", "l2", "loss", "accuracy"),
    [
        ("a", 0.01, 0.0, 0.0, 2.54923, 0.15625),
        ("b", 0.01, 0.9, 0.0, 2.52894, 0.145833),
        ("c", 0.02, 0.5, 0.001, 2.4778, 0.125),
    ],
)
def test_one_epoch_ends_in_kaldis_network(
    golden: Path, data_dir: Path, name: str, rate: float, momentum: float, l2: float, loss: float, accuracy: float
) -> None:
    model = initial_model(golden)
    labels = read_alignments(golden / "nnet1/pdfs.txt", num_pdfs=9)
    corpus = load_all(data_dir, labels, model.transform.context)
    frames = corpus.subset([0, 1, 2])
    assert len(frames) == 108
    workspace, sums = Workspace(model.network, 16), FigureSums(torch.device("cpu"))
    step = EagerStep(workspace, Sgd(model.network, SgdOptions(momentum, l2)))
    for rows in SequentialSampler(frames, 16).epoch():
        if len(rows) == 16:
            sums.add(step(batch_of(workspace, corpus, model.transform, rows), rate), 16)
    figures = sums.result()
    assert figures.frames == 96
    assert figures.loss == pytest.approx(loss, abs=2e-5)
    assert figures.figures["frame_accuracy"] == pytest.approx(accuracy, abs=1e-6)
    expected = [c for c in read_nnet1(golden / f"nnet1/trained_{name}.nnet") if isinstance(c, AffineTransform)]
    for weight, bias, affine in zip(weights(model.network), biases(model.network), expected, strict=True):
        np.testing.assert_allclose(weight.numpy(), affine.weight, atol=1e-5)
        np.testing.assert_allclose(bias.numpy(), affine.bias, atol=1e-5)


def test_forward_equals_kaldis(golden: Path, data_dir: Path) -> None:
    model = initial_model(golden)
    corpus = load_all(data_dir, None, model.transform.context)
    activations = dict(compute_scores(model, corpus, "log-likelihoods"))
    posteriors = dict(compute_scores(model, corpus, "posteriors"))
    log_posteriors = dict(compute_scores(model, corpus, "log-posteriors"))
    priors = torch.from_numpy(log_priors(read_pdf_counts(golden / "nnet1/pdf.counts"))).float()
    scores = dict(compute_scores(model, corpus, "log-likelihoods", priors))
    expected = {
        kind: dict(iterate_matrices(golden / f"nnet1/init.{kind}.txt"))
        for kind in ("presoftmax", "posterior", "loglikes")
    }
    assert set(activations) == set(expected["presoftmax"]) == {"utt0", "utt1", "utt2"}
    for utterance, found in activations.items():
        np.testing.assert_allclose(found, expected["presoftmax"][utterance], atol=1e-5)
        np.testing.assert_allclose(posteriors[utterance], expected["posterior"][utterance], atol=2e-6)
        np.testing.assert_allclose(posteriors[utterance].sum(axis=1), 1.0, atol=1e-6)
        np.testing.assert_allclose(np.exp(log_posteriors[utterance]), expected["posterior"][utterance], atol=2e-6)
        np.testing.assert_allclose(scores[utterance], expected["loglikes"][utterance], rtol=1e-5, atol=1e-5)


def test_kaldis_an4_log_likelihoods_are_reproduced(an4: Path, kaldi_nnet1: Path, tmp_path: Path) -> None:
    kaldi = dict(iterate_matrices(kaldi_nnet1 / "loglikes_first3.ark"))
    lines = [line.split() for line in (an4 / "test/feats.scp").read_text().splitlines()]
    (tmp_path / "feats.scp").write_text("".join(f"{k} {an4 / 'test' / v}\n" for k, v in lines if k in kaldi))
    (tmp_path / "utt2spk").write_text("".join(f"{k} {k}\n" for k in kaldi))
    front = read_nnet1(kaldi_nnet1 / "feature_transform.nnet")
    model = from_nnet1(read_nnet1(kaldi_nnet1 / "rbm_ce.nnet"), front, an4)
    corpus = load_all(tmp_path, None, model.transform.context)
    priors = torch.from_numpy(log_priors(read_pdf_counts(kaldi_nnet1 / "ali_train_pdf.counts"))).float()
    found = dict(compute_scores(model, corpus, "log-likelihoods", priors))
    assert set(found) == set(kaldi)
    for utterance, scores in found.items():
        # Activations reach 1e2 through five float32 layers of another summation order than Kaldi's.
        np.testing.assert_allclose(scores, kaldi[utterance], rtol=1e-4, atol=2e-4)
