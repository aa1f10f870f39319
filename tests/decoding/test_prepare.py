"""Priors, and the log-likelihoods and script that `ddnn decode-prep` writes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from corpora import write_data_dir
from kaldi_files import read_matrix

from ddnn.decoding.prepare import import_nnet1, log_priors, prepare_decoding
from ddnn.kaldi.alignments import TRANSITION_DIGEST, kaldi_counts, write_pdf_counts
from ddnn.kaldi.archive import read_scp
from ddnn.kaldi.nnet1 import Activation, AffineTransform, write_nnet1
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.nn.acoustic_model import save_model
from ddnn.training.run_dir import load_run

COUNTS = np.array([5, 15, 0, 20])


def test_priors_are_scaled() -> None:
    expected = np.log([5 / 40, 15 / 40, 1.0, 20 / 40])
    expected[2] = np.sqrt(np.finfo(np.float32).max)  # a pdf that was never seen never wins
    for scale in (1.0, 0.5, 0.0):
        np.testing.assert_allclose(log_priors(COUNTS, scale), scale * expected)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An imported network of one layer: pre-softmax activations are the features times `WEIGHT`."""
    weight = np.random.default_rng(4).normal(size=(4, 3)).astype(np.float32)
    write_nnet1(tmp_path / "x.nnet", (AffineTransform(weight, np.zeros(4, np.float32)), Activation("softmax", 4)))
    write_pdf_counts(tmp_path / "counts", COUNTS)
    import_nnet1(tmp_path / "x.nnet", None, tmp_path / "run", tmp_path / "counts")
    return tmp_path / "run"


def test_the_prior_scale_reaches_the_log_likelihoods(run_dir: Path, tmp_path: Path) -> None:
    data = write_data_dir(tmp_path / "data", {"a-1": np.random.default_rng(5).normal(size=(6, 3)).astype(np.float32)})
    scores = {}
    for scale in (0.0, 0.5, 1.0):
        out = tmp_path / f"decode {scale}"
        prepare_decoding(run_dir, data, out, "cpu", scale)
        (entry,) = read_scp(out / "loglikes.scp")
        scores[scale] = read_matrix(entry)
    seen, priors = [0, 1, 3], np.log(np.array([5, 15, 20]) / 40)
    for scale in (0.5, 1.0):
        np.testing.assert_allclose((scores[0.0] - scores[scale])[:, seen], np.tile(scale * priors, (6, 1)), atol=1e-5)
        assert (scores[scale][:, 2] < -1e18).all()


def test_the_script_checks_the_model_first(run_dir: Path, tmp_path: Path) -> None:
    """Without Kaldi: a stand-in for hmm-info that says 9 pdfs."""
    data = write_data_dir(tmp_path / "data", {"a-1": np.zeros((2, 3), np.float32)})
    prepare_decoding(run_dir, data, tmp_path / "out", "cpu")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("hmm-info", "echo number of pdfs 9"), ("latgen-faster-mapped", "echo decoded")):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    for name in ("HCLG.fst", "words.txt", "final.mdl"):
        (tmp_path / name).touch()
    command = [
        "bash",
        str(tmp_path / "out" / "decode.sh"),
        str(tmp_path),
        str(tmp_path / "final.mdl"),
        str(tmp_path / "x"),
    ]
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 2 and "final.mdl has 9 pdfs, the log-likelihoods have 4" in done.stderr
    (programs / "hmm-info").write_text("#!/bin/sh\necho number of pdfs 4\n")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "decoded\n" and (tmp_path / "x" / "num_jobs").read_text() == "1\n"


def test_no_pdf_is_disabled_by_kaldis_counts_and_a_disabled_one_is_named(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    np.testing.assert_allclose(log_priors(kaldi_counts(COUNTS)), np.log((COUNTS + 0.5) / 42))
    data = write_data_dir(tmp_path / "data", {"a-1": np.zeros((2, 3), np.float32)})
    prepare_decoding(run_dir, data, tmp_path / "out", "cpu")
    assert "1 pdfs have no frames" in caplog.text and "every path through them is disabled" in caplog.text


def test_the_script_refuses_the_model_of_another_tree(run_dir: Path, golden: Path, tmp_path: Path) -> None:
    """A stand-in for copy-transition-model, which prints what Kaldi's own printed."""
    tree = read_transition_model(golden / "tables/mono.mdl").digest
    save_model(run_dir / "final.safetensors", replace(load_run(run_dir), transition_digest=tree))
    data = write_data_dir(tmp_path / "data", {"a-1": np.zeros((2, 3), np.float32)})
    prepare_decoding(run_dir, data, tmp_path / "out", "cpu")
    assert (tmp_path / "out" / TRANSITION_DIGEST).read_text() == f"{tree}\n"
    programs = tmp_path / "bin"
    programs.mkdir()
    mono = golden / "tables/mono_transitions.txt"
    (tmp_path / "other.txt").write_text(mono.read_text().replace("\n1 0 0 \n", "\n1 0 1 \n", 1))
    assert (tmp_path / "other.txt").read_text() != mono.read_text()
    for file in ("HCLG.fst", "words.txt", "final.mdl"):
        (tmp_path / file).touch()
    command = ["bash", *map(str, (tmp_path / "out/decode.sh", tmp_path, tmp_path / "final.mdl", tmp_path / "x"))]
    for printed, code in ((mono, 0), (tmp_path / "other.txt", 2)):
        stand_ins = {"hmm-info": "echo number of pdfs 4", "latgen-faster-mapped": "echo decoded"}
        for name, text in {**stand_ins, "copy-transition-model": f"cat '{printed}'"}.items():
            (programs / name).write_text(f"#!/bin/sh\n{text}\n")
            (programs / name).chmod(0o755)
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
        assert (done.returncode, "another tree" in done.stderr) == (code, code == 2), done.stderr
