"""Priors, and the log-likelihoods and script that `ddnn decode-prep` writes."""

from __future__ import annotations

import io
import itertools
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kaldiio
import numpy as np
import pytest
import torch
from corpora import unlike_utterances, write_data_dir
from forked_python import forked_python
from jobs import assert_refused, files_in
from kaldi_files import read_matrix

from ddnn.data.dataset import InputTransform
from ddnn.data.feature_reader import FeatureConfig
from ddnn.decoding.prepare import compute_scores, export_nnet1, import_nnet1, prepare_decoding
from ddnn.inspection.path import describe_path
from ddnn.kaldi import compressed
from ddnn.kaldi.alignments import TRANSITION_DIGEST, kaldi_counts, write_pdf_counts
from ddnn.kaldi.archive import iterate_matrices, read_scp
from ddnn.kaldi.nnet1 import Activation, AffineTransform
from ddnn.kaldi.nnet1_file import write_nnet1
from ddnn.kaldi.transforms import TransformConfig
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.nn.acoustic_model import NNET1_FEATURES, AcousticModel, from_nnet1, save_model
from ddnn.nn.scorer import log_priors
from ddnn.runs.run_dir import load_run
from ddnn.training.model_evaluation import load_for_model
from ddnn.util import pool
from ddnn.util.errors import DataError, UserError

pytestmark = pytest.mark.usefixtures("forked_children")

COUNTS = np.array([5, 15, 0, 20])
FMLLR = TransformConfig("ab" * 32, 3, 4, 4, adapted=True)


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


@pytest.mark.parametrize(
    ("features", "first"),
    [
        (FeatureConfig("none"), None),
        (FeatureConfig("none", 2), "deltas (order 2)"),
        (FeatureConfig("mean", 2), "CMVN (mean) and deltas (order 2)"),
        (FeatureConfig("mean-variance"), "CMVN (mean-variance)"),
        (FeatureConfig(transforms=FMLLR), f"transforms ({FMLLR.as_text()})"),
        (FeatureConfig("mean", transforms=FMLLR), f"CMVN (mean) and transforms ({FMLLR.as_text()})"),
    ],
    ids=str,
)
def test_what_export_writes_is_imported_as_a_directory(
    run_dir: Path, tmp_path: Path, features: FeatureConfig, first: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Network, counts, CMVN and deltas, as Kaldi's decode.sh reads them beside the network, which must not apply CMVN
    to features that have been through it and transforms; and these, which it cannot read."""
    model = load_run(run_dir)
    save_model(run_dir / "final.safetensors", replace(model, features=features))
    export_nnet1(run_dir, tmp_path / "nnet1")
    said = [message for message in caplog.messages if message.startswith("before")]
    assert said == ([] if first is None else [f"before nnet-forward run Kaldi's {first}"])
    assert (tmp_path / "nnet1/cmvn_opts").exists() == (features.cmvn != "none" and features.transforms is None)
    again = import_nnet1(tmp_path / "nnet1", None, tmp_path / "again")
    assert again.features == features
    assert describe_path(tmp_path / "nnet1").fields["features"] == str(features)
    assert torch.equal(again.network.parameters, model.network.parameters)
    assert (tmp_path / "again/ali_train_pdf.counts").read_text() == (run_dir / "ali_train_pdf.counts").read_text()


def test_an_nnet1_directory_that_cannot_be_imported(run_dir: Path, tmp_path: Path) -> None:
    export_nnet1(run_dir, tmp_path / "nnet1")
    with pytest.raises(UserError, match="has its own feature transform"):
        import_nnet1(tmp_path / "nnet1", tmp_path / "x.nnet", tmp_path / "again")
    options, described = tmp_path / "nnet1" / "cmvn_opts", tmp_path / "nnet1" / NNET1_FEATURES
    options.write_text("--norm-means=true --reverse=true\n")
    with pytest.raises(DataError, match="--reverse"):
        import_nnet1(tmp_path / "nnet1", None, tmp_path / "again")
    options.write_text("--norm-means=true\n")
    with pytest.raises(
        DataError, match="cmvn mean, deltas 0 in cmvn_opts and delta_opts, cmvn none, deltas 0 in ddnn_"
    ):
        import_nnet1(tmp_path / "nnet1", None, tmp_path / "again")
    options.unlink()
    damaged = ["", "[", "[1]", "{}", '{"cmvn": 1, "deltas": 0}', '{"cmvn": "none", "deltas": 5}', "[" * 50_000]
    for text in (
        *damaged,
        '{"cmvn": "none", "deltas": 0, "transforms": {"output_dim": -1}}',
        '"' + "x" * 100_000 + '"',
    ):
        described.write_text(text)
        with pytest.raises(DataError, match="cannot read what features the network was trained on") as caught:
            import_nnet1(tmp_path / "nnet1", None, tmp_path / "again")
        assert str(caught.value.location) == str(described)
    assert not (tmp_path / "again").exists()


def test_import_says_what_it_took_and_what_it_does_not_know(
    run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    export_nnet1(run_dir, tmp_path / "nnet1")
    nnet1 = (tmp_path / "nnet1").rename(tmp_path / "kaldi")

    def said(nnet: Path, name: str) -> str:
        caplog.clear()
        import_nnet1(nnet, None, tmp_path / name)
        return caplog.messages[-2]

    files = (
        f"network {nnet1 / 'final.nnet'}, feature_transform.nnet, ali_train_pdf.counts; features: cmvn none, deltas 0"
    )
    tree = "; there is no final.mdl: its tree is not known"
    assert said(nnet1, "of ddnn") == files + tree
    (nnet1 / NNET1_FEATURES).unlink()
    assert said(nnet1, "of Kaldi") == f"{files} (whether it had transforms is not known: taken as none){tree}"
    alone = f"network {nnet1 / 'final.nnet'}, no feature transform, no pdf counts; features: cmvn none, deltas 0"
    assert said(nnet1 / "final.nnet", "file") == f"{alone} (a network alone does not say it: name its directory)"


def test_kaldis_own_directory_is_imported(kaldi_nnet1: Path, tmp_path: Path) -> None:
    model = import_nnet1(kaldi_nnet1, None, tmp_path / "run")
    assert (model.transform.context, model.network.output_dim) == (5, 616)
    assert (tmp_path / "run/ali_train_pdf.counts").exists()


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


@pytest.fixture
def deep(tmp_path: Path) -> tuple[Path, Path]:
    """A run dir, of two hidden layers, spliced and normalized, with deltas and CMVN; and a data dir of 5 to 200 frames."""
    generator = torch.Generator().manual_seed(1)
    sizes, layers = (5 * 8, 24, 16, 7), []
    for inputs, outputs in itertools.pairwise(sizes):
        weight, bias = torch.randn(outputs, inputs, generator=generator) / 3, torch.randn(outputs, generator=generator)
        layers += [AffineTransform(weight.numpy(), bias.numpy()), Activation("sigmoid", outputs)]
    model = from_nnet1((*layers[:-1], Activation("softmax", 7)), (), tmp_path)
    shift, scale = torch.randn(2, 40, generator=generator).abs()
    transform = InputTransform(tuple(range(-2, 3)), 8, shift, scale)
    run = tmp_path / "deep"
    run.mkdir()
    write_pdf_counts(run / "ali_train_pdf.counts", np.arange(1, 8))
    save_model(run / "final.safetensors", replace(model, transform=transform, features=FeatureConfig("mean", 1)))
    return run, write_data_dir(tmp_path / "unlike", unlike_utterances()[0])


def scores_in(path: Path) -> dict[str, np.ndarray]:
    return dict(iterate_matrices(path))


@pytest.mark.parametrize("kind", ["log-likelihoods", "posteriors"])
def test_several_processes_write_the_bytes_of_one(deep: tuple[Path, Path], tmp_path: Path, kind: Any) -> None:
    run, data = deep
    archives = []
    for jobs in (1, 3):
        out = tmp_path / f"{kind} {jobs}"
        prepare_decoding(run, data, out, "cpu", kind=kind, jobs=jobs)
        (archive,) = out.glob("*.ark")
        archives.append(archive.read_bytes())
        assert [entry.key for entry in read_scp(archive.with_suffix(".scp"))] == [
            entry.key for entry in read_scp(data / "feats.scp")
        ]
    assert archives[0] == archives[1]


def test_posteriors_are_kaldis_through_a_pipe(golden: Path, tmp_path: Path) -> None:
    """What a program reads from `ddnn decode-prep --as posteriors --jobs 2 --out - |`, beside nnet-forward's output."""
    run, nnet1 = tmp_path / "run", golden / "nnet1"
    import_nnet1(nnet1 / "init.nnet", nnet1 / "feature_transform.nnet", run)
    lines = [line.split(None, 1) for line in (nnet1 / "feats.scp").read_text().splitlines()]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/feats.scp").write_text("".join(f"{key} {nnet1 / rest}\n" for key, rest in lines))
    words = [forked_python(), "-m", "ddnn.cli", "decode-prep", str(run), "--data", str(tmp_path / "data")]
    words += ["--device", "cpu", "--as", "posteriors", "--jobs", "2", "--out", "-"]
    done = subprocess.run(words, capture_output=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    (tmp_path / "piped.ark").write_bytes(done.stdout)
    expected, found = scores_in(nnet1 / "init.posterior.txt"), scores_in(tmp_path / "piped.ark")
    assert list(found) == list(expected)
    for key, posteriors in found.items():
        np.testing.assert_allclose(posteriors, expected[key], atol=2e-6, rtol=0)
        np.testing.assert_allclose(posteriors.sum(axis=1), 1.0, atol=1e-6)
    theirs = dict(kaldiio.load_ark(io.BytesIO(done.stdout)))
    assert all(np.array_equal(theirs[key], found[key]) for key in expected)


def test_only_log_likelihoods_come_with_a_script_and_need_counts(deep: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = deep
    (run / "ali_train_pdf.counts").unlink()
    for kind, name in (("log-posteriors", "posteriors"), ("activations", "activations")):
        layer = 1 if kind == "activations" else None
        prepare_decoding(run, data, tmp_path / kind, "cpu", kind=kind, layer=layer)  # type: ignore[arg-type]
        assert files_in(tmp_path / kind) == {f"{name}.ark", f"{name}.scp"}


def outputs(model: AcousticModel, data: Path, kind: Any, **options: Any) -> dict[str, np.ndarray]:
    return dict(compute_scores(model, load_for_model(model, data, None, allow_pipes=False), kind, **options))


def test_log_posteriors_stay_finite_where_posteriors_underflow(run_dir: Path, tmp_path: Path) -> None:
    model = load_run(run_dir)
    data = write_data_dir(tmp_path / "data", {"a-1": np.full((2, 3), 1e4, np.float32)})
    logits = outputs(model, data, "log-likelihoods")["a-1"].astype(np.float64)
    posteriors, found = (outputs(model, data, kind)["a-1"] for kind in ("posteriors", "log-posteriors"))
    assert (posteriors == 0).any() and np.isfinite(found).all()
    top = logits.max(axis=1, keepdims=True)
    np.testing.assert_allclose(found, logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True)), rtol=1e-6)


def test_activations_are_those_of_the_layer(deep: tuple[Path, Path], tmp_path: Path) -> None:
    """The last hidden layer's, multiplied with the last layer's weights, are the network's output."""
    run, data = deep
    model = load_run(run)
    prepare_decoding(run, data, tmp_path / "hidden", "cpu", kind="activations", layer=1)
    last = model.network.views[-1]
    hidden, expected = scores_in(tmp_path / "hidden/activations.ark"), outputs(model, data, "log-likelihoods")
    for key, activations in hidden.items():
        assert activations.shape == (len(expected[key]), 16) and ((activations > 0) & (activations < 1)).all()
        output = activations @ last["weight"].numpy().T + last["bias"].numpy()
        np.testing.assert_allclose(output, expected[key], atol=1e-5)


@pytest.mark.parametrize("method", compressed.METHODS)
def test_compressed_output_is_kaldis(deep: tuple[Path, Path], tmp_path: Path, method: int) -> None:
    run, data = deep
    for compress in (0, method):
        prepare_decoding(run, data, tmp_path / str(compress), "cpu", kind="log-posteriors", compress=compress)
    plain, found = (scores_in(tmp_path / str(compress) / "posteriors.ark") for compress in (0, method))
    theirs = dict(kaldiio.load_ark(str(tmp_path / str(method) / "posteriors.ark")))
    for key, matrix in plain.items():
        near = np.ptp(matrix) * (1 / 65_535 if method == 3 else 1 / 63)
        assert 0 < np.abs(found[key] - matrix).max() <= near
        np.testing.assert_allclose(theirs[key], found[key], rtol=1e-5, atol=1e-6)


BAD_OPTIONS: dict[str, tuple[str, ...]] = {
    "--as posteriors --prior-scale 1": ("nothing is subtracted from posteriors", "--prior-scale"),
    "--prior-scale=-1": ("-1 found, expected a number >= 0",),
    "--as activations": ("not given; it says whose activations", "--layer"),
    "--layer 0": ("given with --as log-likelihoods", "--layer"),
    "--as activations --layer 3": ("3 found, the network has the layers 0 to 2",),
    "--compression-method 3": ("given without --compress",),
}


@pytest.mark.parametrize("words", BAD_OPTIONS)
def test_options_that_do_not_fit_are_refused(
    deep: tuple[Path, Path], tmp_path: Path, run_cli: Callable[..., Any], words: str
) -> None:
    arguments = ["decode-prep", deep[0], "--data", deep[1], "--out", tmp_path / "out", "--device", "cpu"]
    assert_refused(run_cli(*arguments, *words.split()), *BAD_OPTIONS[words])
    assert not (tmp_path / "out").exists()


def test_no_job_and_a_terminal_and_posteriors_that_are_there_are_refused(
    deep: tuple[Path, Path], tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["decode-prep", deep[0], "--data", deep[1], "--device", "cpu", "--out"]
    result = run_cli(*arguments, tmp_path / "out", "--jobs", "0")
    assert result.exit_code == 2 and "'--jobs' / '--nj': 0 is not in the range x>=1" in result.stderr
    monkeypatch.setattr("ddnn.decoding.prepare.choose_device", lambda name: torch.device("meta"))
    assert_refused(run_cli(*arguments, tmp_path / "out", "--jobs", "2"), "only one process computes on a GPU")
    monkeypatch.undo()
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert_refused(run_cli(*arguments, "-"), "standard output is a terminal")
    monkeypatch.undo()
    for words in ((), ("--as", "posteriors"), ("--as", "log-posteriors")):
        result = run_cli(*arguments, tmp_path / "out", *words)
        assert result.exit_code == (2 if "log-posteriors" in words else 0), result.stderr
    assert_refused(result, "posteriors are there already")


def test_disabled_pdfs_are_not_compressed(run_dir: Path, tmp_path: Path) -> None:
    data = write_data_dir(tmp_path / "data", {"a-1": np.zeros((2, 3), np.float32)})
    with pytest.raises(UserError, match="compression would keep nothing of the others"):
        prepare_decoding(run_dir, data, tmp_path / "out", "cpu", compress=1)
    prepare_decoding(run_dir, data, tmp_path / "out", "cpu", kind="posteriors", compress=1)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failure_leaves_nothing_and_names_the_first_utterance(run_dir: Path, tmp_path: Path, jobs: int) -> None:
    features = {f"a-{n}": np.full((3, 3), 1e38 if n >= 4 else 1.0, np.float32) for n in range(8)}
    model = load_run(run_dir)
    model.network.parameters.mul_(1e3)
    save_model(run_dir / "final.safetensors", model)
    data = write_data_dir(tmp_path / "data", features)
    with pytest.raises(UserError, match="utterance a-4: the network's output is not finite"):
        prepare_decoding(run_dir, data, tmp_path / "out", "cpu", jobs=jobs)
    assert files_in(tmp_path / "out") == set()


def test_a_killed_process_is_an_error(deep: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = pool.WorkerPool.run

    def killed(workers: pool.WorkerPool, tasks: Any) -> Any:
        os.kill(next(iter(workers.children.values())).pid, signal.SIGKILL)
        return run(workers, tasks)

    monkeypatch.setattr(pool.WorkerPool, "run", killed)
    with pytest.raises(UserError, match="a process of --jobs was ended by signal 9") as caught:
        prepare_decoding(*deep, tmp_path / "out", "cpu", jobs=2)
    assert "--jobs 1 does without such processes" in str(caught.value) and files_in(tmp_path / "out") == set()


def test_scores_are_computed_as_they_are_read(deep: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive on standard output takes the memory of one utterance."""
    computed = []
    forward = "ddnn.nn.scorer.forward_batches"
    from ddnn.nn.scorer import forward_batches

    monkeypatch.setattr(forward, lambda *args: (computed.append(1), forward_batches(*args))[1])
    model = load_run(deep[0])
    scores = compute_scores(model, load_for_model(model, deep[1], None, allow_pipes=False), "posteriors")
    for n in range(1, 4):
        next(scores)
        assert len(computed) == n
