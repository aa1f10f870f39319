"""A whole training on a small corpus: what it leaves behind, that it repeats itself, what it refuses."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import PDFS, labelled_utterances, write_ali_dir, write_data_dir, write_model, write_pdfs, write_recipe
from distributed.threads import run_workers
from jobs import assert_refused, make_job
from kaldi_files import read_matrix
from training.toy import NoCheckpoints

from ddnn.data.pipeline import training_data
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.distributed.signals import GracefulShutdown
from ddnn.kaldi.archive import iterate_matrices, read_scp
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.nn.network import Network
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import StartRow
from ddnn.runs.run_dir import NullRunDir, RunDir, load_run
from ddnn.training.criterion import make_criterion
from ddnn.training.data import load_data
from ddnn.training.data_identity import DataIdentity, check_shared_data
from ddnn.training.evaluation import evaluate
from ddnn.training.job import Job, assemble_trainer, assign_device, build_trainer, initial_model, run_training
from ddnn.training.model_evaluation import evaluate_run
from ddnn.training.options import data_config
from ddnn.util.errors import DataError, RecipeError, UserError
from ddnn.util.system import usable_cores
from ddnn.util.text import TERMINAL_LEVEL, terminal_level

RunCli = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    features, labels = labelled_utterances()
    data = write_data_dir(tmp_path / "data dir ü", features)
    return write_recipe(tmp_path / "recipe.yaml", data, write_pdfs(tmp_path / "pdfs.txt", labels))


def train(recipe: Path, run_dir: Path, *overrides: str) -> list[dict[str, object]]:
    run_training(load_recipe(recipe, overrides), run_dir, "cpu")
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["type"] == "epoch"]


def test_a_run_dir_holds_everything(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    metrics = train(recipe, run)
    assert {p.name for p in run.iterdir()} == {
        "recipe.yaml", "train.log", "status.json", "metrics.jsonl", "final.safetensors", "ali_train_pdf.counts", "cv_utterances", "checkpoints",
    }  # fmt: skip
    assert [(m["epoch"], m["split"]) for m in metrics] == [
        (0, "cv"), (1, "train"), (1, "cv"), (2, "train"), (2, "cv"), (3, "train"), (3, "cv"),
    ]  # fmt: skip
    for m in metrics:
        assert set(m) == {
            "type", "epoch", "split", "loss", "frame_accuracy", "learning_rate", "schedule_learning_rate", "minibatch_size", "precision",
            "frames", "seconds", "frames_per_second", "accepted",
        }  # fmt: skip
    assert metrics[-1]["loss"] < 0.5 < metrics[0]["loss"]
    assert metrics[-1]["frame_accuracy"] > 0.8
    assert metrics[1]["frames"] == 22 * 16, "360 frames to train on, the tail of 8 dropped"
    assert metrics[2]["frames"] == 120
    counts = (run / "ali_train_pdf.counts").read_text().strip(" []\n").split()
    assert sum(map(float, counts)) == 480 + 3 * 0.5, "as in Kaldi, half a frame more for each pdf"
    assert load_recipe(run / "recipe.yaml") == load_recipe(recipe, ("precision=float32",))
    finished = f"finished: {run / 'final.safetensors'}, epoch 3, CV loss {metrics[-1]['loss']:.4f}, frame accuracy"
    assert finished in (run / "train.log").read_text()


def test_every_start_is_recorded_with_what_tells_whether_runs_compare(recipe: Path, tmp_path: Path) -> None:
    def start(run: str, *overrides: str) -> StartRow:
        train(recipe, tmp_path / run, *overrides)
        (row,) = read_metrics(tmp_path / run / "metrics.jsonl").starts
        return row

    first, other_cv = start("a"), start("b", "data.cv.fraction=0.5")
    assert (first.epoch, first.world_size, first.learning_rate_scale, first.precision) == (0, 1, 1.0, "float32")
    assert (first.train_frames, first.cv_frames) == (360, 120)
    assert (first.cores_per_worker, first.cpu_threads) == (usable_cores(), 1)
    assert first.machine and first.host and first.command.startswith("ddnn") and first.version.startswith("ddnn ")
    assert first.train_digest != other_cv.train_digest
    assert first.cv_digest not in (other_cv.cv_digest, first.train_digest)
    assert start("c", "seed=1", "minibatch_size=8").cv_digest == first.cv_digest


def test_same_seed_same_bits(recipe: Path, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        train(recipe, tmp_path / name, f"seed={3 if name == 'c' else 2}", "optimizer.momentum=0.5", "optimizer.l2=1e-4")
    a, b, c = ((tmp_path / n / "final.safetensors").read_bytes() for n in "abc")
    assert a == b
    assert a != c


def test_half_precision_store_and_exponential_schedule(recipe: Path, tmp_path: Path) -> None:
    metrics = train(
        recipe,
        tmp_path / "run",
        "data.feature_dtype=float16",
        "schedule={name: exponential, initial_learning_rate: 0.05, epochs: 4, max_epochs: null}",
    )
    rates = [m["learning_rate"] for m in metrics if m.get("split") == "train"]
    np.testing.assert_allclose(rates, 0.05 * 0.01 ** (np.arange(4) / 3))
    assert metrics[-1]["frame_accuracy"] > 0.8


def test_a_rejected_epoch_is_taken_back(recipe: Path, tmp_path: Path) -> None:
    """At a rate too high epochs are rejected; what is saved is the best network, as its recorded loss shows."""
    metrics = train(
        recipe, tmp_path / "run", "schedule.initial_learning_rate=5", "schedule.max_epochs=6", "minibatch_size=8"
    )
    cv = [m for m in metrics if m.get("split") == "cv"]
    assert not all(m["accepted"] for m in cv)
    best = min(float(m["loss"]) for m in cv)  # type: ignore[arg-type]
    found = load_run(tmp_path / "run")
    data = training_data(data_config(load_recipe(recipe)), torch.device("cpu"), Groups.data_parallel(SingleProcess()))
    assert evaluate(found, data.cv).loss == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("scope", "scale"), [("global", 2.0), ("unscaled", 2.0), ("local", 1.0)])
def test_the_scope_of_max_change_says_whose_frames_limit_a_step(recipe: Path, scope: str, scale: float) -> None:
    """Two workers: the optimizer limits its step at the rate of one of them, or at the rate that it is given."""
    optimizer = f"optimizer={{name: ng-sgd, max_change_scope: {scope}}}"
    settings = load_recipe(recipe, [optimizer, "parallel.workers=2"])

    def work(comm: Communicator) -> tuple[float, float]:
        cpu, run, policy = torch.device("cpu"), NullRunDir(Path("nowhere")), NoCheckpoints()
        groups = Groups.data_parallel(comm)
        job, criterion = (
            Job(settings, "", groups, run, GracefulShutdown(), cpu),
            make_criterion(settings, cpu, groups, run),
        )
        model = initial_model(settings, criterion.data, None, None, groups)
        trainer = assemble_trainer(job, model, criterion.data, criterion, "", policy, None)
        return trainer.averager.lr_scale, trainer.optimizer.included_lr_scale

    assert run_workers(2, work) == [(2.0, scale)] * 2


def test_only_workers_that_share_a_network_check_its_gradient(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = list[Network]()
    monkeypatch.setattr("ddnn.training.job.check_split", lambda whole, partition, arithmetic: checked.append(whole))
    for columns in (1, 2):
        settings = load_recipe(recipe, ["parallel.workers=2", f"parallel.columns={columns}"])

        def work(comm: Communicator, settings: Recipe = settings, columns: int = columns) -> int:
            groups, run = Groups.split(comm, columns), NullRunDir(Path("nowhere"))
            trainer = build_trainer(Job(settings, "", groups, run, GracefulShutdown(), torch.device("cpu")), False)
            return trainer.model.network.num_parameters

        counts = run_workers(2, work)
        assert [whole.num_parameters for whole in checked] == ([] if columns == 1 else [sum(counts)] * 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.columns=4"], "4 found, expected at most 3: layer 2 has 3 outputs"),
        (
            ["parallel.stages=2", "model.layers=[{affine: 8}, {dropout: 0.5}]"],
            "2 found, but a layer draws random numbers",
        ),
    ],
)
def test_a_split_that_cannot_be_is_refused_before_features_are_read(
    recipe: Path, tmp_path: Path, settings: list[str], message: str, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.append("parallel.workers=4")
    words = [word for setting in settings for word in ("--set", setting)]
    assert_refused(run_cli("train", recipe, "--run-dir", tmp_path / "run", "--dry-run", *words), message)
    split = load_recipe(recipe, settings)
    monkeypatch.setattr("ddnn.data.source.DataSource.load", None)

    def work(comm: Communicator) -> None:
        with pytest.raises(RecipeError) as caught:
            load_data(split, torch.device("cpu"), Groups.split(comm, split.parallel.columns, split.parallel.stages))
        assert message in str(caught.value) and caught.value.location == settings[0].partition("=")[0]

    run_workers(4, work)


def test_workers_of_a_model_on_two_hosts_are_warned_of(recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    def work(comm: Communicator, columns: int) -> None:
        comm.host = f"n{comm.rank // 2}"
        assign_device(load_recipe(recipe, ["parallel.workers=4", f"parallel.columns={columns}"]), "cpu", comm)

    run_workers(4, lambda comm: work(comm, 2))
    assert "share every layer" not in caplog.text
    run_workers(4, lambda comm: work(comm, 4))
    assert caplog.text.count("workers 0 to 3 share every layer, but are on n0 and n1") == 1


def test_workers_of_a_model_must_read_the_same_data() -> None:
    def work(comm: Communicator, columns: int) -> None:
        identity = DataIdentity(contents={"data.train": f"digest {comm.rank}"}, features={})
        check_shared_data(identity, Groups.split(comm, columns))

    run_workers(2, lambda comm: work(comm, 1))
    with pytest.raises(
        DataError, match=r"workers 0 on here and 1 on here share a model, but their data differs: data.train"
    ):
        run_workers(2, lambda comm: work(comm, 2))


def test_frames_are_shared_among_models_not_workers(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    settings = ("minibatch_size=300", "parallel.workers=4", "parallel.columns=2")
    words = [word for setting in settings for word in ("--set", setting)]
    refused = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--dry-run", *words)
    assert_refused(refused, "of the smallest of 2 shards do not fill one minibatch of 300")


def test_cross_validation_data_of_its_own(recipe: Path, tmp_path: Path) -> None:
    features, labels = labelled_utterances(count=4, speaker="cv")
    data, pdfs = write_data_dir(tmp_path / "cv", features), write_pdfs(tmp_path / "cv.txt", labels)
    metrics = train(recipe, tmp_path / "run", f"data.cv={{data: '{data}', alignments: '{pdfs}', fraction: null}}")
    assert metrics[0]["frames"] == 160
    assert metrics[1]["frames"] == 480


def test_a_run_dir_with_something_in_it_is_not_touched(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "precious").write_text("x")
    with pytest.raises(UserError, match="exists already and is not empty"):
        train(recipe, tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["precious"]


def test_bad_data_leaves_the_run_dir_as_it_was(recipe: Path, tmp_path: Path) -> None:
    """A mistake in the data must not cost the user the name of the run dir."""
    with (tmp_path / "data dir ü/feats.ark").open("r+b") as handle:
        handle.truncate(3000)
    with pytest.raises(DataError, match="spk"):
        train(recipe, tmp_path / "run")
    assert not (tmp_path / "run" / "final.safetensors").exists()
    features, _ = labelled_utterances()
    write_data_dir(tmp_path / "data dir ü", features)
    train(recipe, tmp_path / "run")


def test_a_rate_that_explodes_is_said_plainly(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the training loss is nan") as caught:
        train(recipe, tmp_path / "run", "schedule.initial_learning_rate=1e38", "model.activation=relu")
    assert "check the features for outliers; learning rates multiply the gradient summed" in str(caught.value)
    assert "lower schedule.initial_learning_rate" in str(caught.value)


def test_too_few_frames_for_a_minibatch(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="360 frames do not fill one minibatch of 4096"):
        train(recipe, tmp_path / "run", "minibatch_size=4096")


def test_from_recipe_to_log_likelihoods_and_back_from_nnet1(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    data, run = tmp_path / "data dir ü", tmp_path / "run"
    assert run_cli("train", recipe, "--run-dir", run).exit_code == 0
    assert run_cli("decode-prep", run, "--data", data, "--out", tmp_path / "decode").exit_code == 0
    entries = read_scp(tmp_path / "decode/loglikes.scp")
    features, labels = labelled_utterances()
    assert [e.key for e in entries] == sorted(features)
    scores = read_matrix(entries[0])
    assert scores.shape == (40, PDFS)
    assert {p.name for p in (tmp_path / "decode").iterdir()} == {
        "loglikes.ark", "loglikes.scp", "ali_train_pdf.counts", "decode.sh", "transition_model.sha256",
        "model.sha256",
    }  # fmt: skip

    assert run_cli("export", run, "--format", "nnet1", "--out", tmp_path / "nnet1").exit_code == 0
    imported = run_cli(
        "import-nnet1", tmp_path / "nnet1/final.nnet", "--feature-transform", tmp_path / "nnet1/feature_transform.nnet",
        "--pdf-counts", run / "ali_train_pdf.counts", "--out", tmp_path / "back",
    )  # fmt: skip
    assert imported.exit_code == 0, imported.stderr
    one, two = load_run(run), load_run(tmp_path / "back")
    assert torch.equal(one.network.parameters, two.network.parameters)
    assert one.network.layers == two.network.layers
    assert run_cli("export", tmp_path / "back", "--out", tmp_path / "again").exit_code == 0
    for name in ("final.nnet", "feature_transform.nnet"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "nnet1" / name).read_bytes()
    assert run_cli("decode-prep", tmp_path / "back", "--data", data, "--out", tmp_path / "decode2").exit_code == 0
    twice = dict(iterate_matrices(tmp_path / "decode2/loglikes.ark"))
    np.testing.assert_array_equal(twice[entries[0].key], scores)

    figures = run_cli("evaluate", run, "--data", data, "--alignments", tmp_path / "pdfs.txt", "--json")
    found = json.loads(figures.stdout)
    assert found["frames"] == 480
    everything = np.concatenate([labels[k] for k in sorted(labels)])
    counts = np.bincount(everything) + 0.5
    priors = np.log(counts / counts.sum())
    right = np.concatenate([(twice[k] + priors).argmax(1) == labels[k] for k in sorted(labels)])
    assert found["frame_accuracy"] == pytest.approx(right.mean())


def test_decode_prep_refuses_counts_of_another_model(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    run = tmp_path / "run"
    train(recipe, run)
    (run / "ali_train_pdf.counts").write_text(" [ 1 2 3 4 ]\n")
    result = run_cli("decode-prep", run, "--data", tmp_path / "data dir ü", "--out", tmp_path / "decode")
    assert result.exit_code == 2
    assert "has 4 pdfs, the model 3" in result.stderr
    assert not (tmp_path / "decode").exists()


def test_features_of_another_kind_are_refused(recipe: Path, tmp_path: Path) -> None:
    train(recipe, tmp_path / "run")
    features, labels = labelled_utterances()
    other = write_data_dir(tmp_path / "other", {k: v[:, :3].copy() for k, v in features.items()})
    with pytest.raises(DataError, match="features have 3 dims, the model was trained on 4"):
        evaluate_run(tmp_path / "run", other, tmp_path / "pdfs.txt")
    labels[sorted(labels)[0]][0] = 7
    more = write_pdfs(tmp_path / "more.txt", labels)
    with pytest.raises(DataError, match="alignment has 8 pdfs, the model 3"):
        evaluate_run(tmp_path / "run", tmp_path / "data dir ü", more)


def test_a_run_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such run dir"):
        load_run(tmp_path / "nothing")
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(DataError, match="has not finished") as without:
        load_run(tmp_path)
    (tmp_path / "best.safetensors").touch()
    with pytest.raises(DataError, match=f"; or name its latest accepted network: {tmp_path}/best.safetensors"):
        load_run(tmp_path)
    assert "best.safetensors" not in str(without.value)


def test_the_alignment_dir_of_another_tree_is_refused(recipe: Path, tmp_path: Path) -> None:
    """A model of 4 pdfs, an alignment dir of which the final.mdl has 3: surely not the tree it was trained on."""
    train(recipe, tmp_path / "run", "data.num_pdfs=4")
    _, labels = labelled_utterances()
    other = write_ali_dir(tmp_path / "ali", labels)
    with pytest.raises(DataError, match="the alignment has 3 pdfs, the model 4"):
        evaluate_run(tmp_path / "run", tmp_path / "data dir ü", other)
    assert evaluate_run(tmp_path / "run", tmp_path / "data dir ü", tmp_path / "pdfs.txt").frames == 480


def test_the_pdf_ids_of_another_tree_of_as_many_leaves_are_refused(recipe: Path, tmp_path: Path) -> None:
    """In evaluation, as cross-validation set and in a model: only the digest of the transition model tells."""
    _, labels = labelled_utterances()
    data, own = tmp_path / "data dir ü", write_ali_dir(tmp_path / "ali", labels)
    other = write_ali_dir(tmp_path / "other", labels)
    write_model(other / "final.mdl", (1, 2, 0))
    train(recipe, tmp_path / "run", f"data.alignments={own}")
    digest = read_transition_model(own / "final.mdl").digest
    assert load_run(tmp_path / "run").transition_digest == digest
    assert evaluate_run(tmp_path / "run", data, own).figures["frame_accuracy"] > 0.8
    with pytest.raises(DataError, match="another tree than that of the model of"):
        evaluate_run(tmp_path / "run", data, other)
    features, cv_labels = ({f"cv-{name}": value for name, value in found.items()} for found in labelled_utterances())
    held_out = write_data_dir(tmp_path / "cv", features)
    cv_ali = write_ali_dir(tmp_path / "cv_ali", cv_labels)
    cv = f"data.cv={{fraction: null, data: '{held_out}', alignments: '{cv_ali}'}}"
    train(recipe, tmp_path / "with a CV set", f"data.alignments={own}", cv)
    write_model(cv_ali / "final.mdl", (1, 2, 0))
    with pytest.raises(DataError, match=r"another tree than that of .*ali"):
        train(recipe, tmp_path / "refused", f"data.alignments={own}", cv)


def test_features_too_large_for_half_precision_name_the_utterance(recipe: Path, tmp_path: Path) -> None:
    features, _ = labelled_utterances()
    features["spk1-utt001"][3, 2] = 1e5
    write_data_dir(tmp_path / "data dir ü", features)
    with pytest.raises(DataError, match=r"spk1-utt001: values up to 100000 .* float16 cannot hold"):
        train(recipe, tmp_path / "run", "data.feature_dtype=float16")


def test_cross_validation_that_is_not_finite_ends_training(recipe: Path, tmp_path: Path) -> None:
    """Finite features, a network that overflows on those held out: nothing is saved as a result."""
    features, labels = labelled_utterances(count=4, speaker="cv")
    huge = write_data_dir(tmp_path / "cv", {name: np.full_like(m, 3e38) for name, m in features.items()})
    pdfs = write_pdfs(tmp_path / "cv.txt", labels)
    own = f"data.cv={{data: '{huge}', alignments: '{pdfs}', fraction: null}}"
    with pytest.raises(UserError, match="the cross-validation loss is"):
        train(recipe, tmp_path / "run", own, "model.activation=relu", "data.normalize=false")
    assert not (tmp_path / "run/final.safetensors").exists()


def test_one_pdf_is_learnt_at_once(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    data = write_data_dir(tmp_path / "data", features)
    alone = write_pdfs(tmp_path / "pdfs.txt", {name: pdfs * 0 for name, pdfs in labels.items()})
    metrics = train(write_recipe(tmp_path / "recipe.yaml", data, alone), tmp_path / "run")
    assert metrics[-1]["loss"] == 0.0


def test_a_second_training_into_a_run_dir_at_work_is_refused(recipe: Path, tmp_path: Path) -> None:
    owner = RunDir.open(tmp_path / "run")
    logging.getLogger("ddnn").warning("at work")
    with pytest.raises(UserError, match="another run is in progress in this run dir"):
        train(recipe, tmp_path / "run")
    assert "at work" in (tmp_path / "run/train.log").read_text()
    owner.close()
    train(recipe, tmp_path / "run")


def test_decode_prep_leaves_the_counts_of_another_model_alone(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    train(recipe, tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/ali_train_pdf.counts").write_text(" [ 9 9 9 ]\n")
    result = run_cli("decode-prep", tmp_path / "run", "--data", tmp_path / "data dir ü", "--out", tmp_path / "other")
    assert result.exit_code == 2 and "of another model is there" in result.stderr
    assert (tmp_path / "other/ali_train_pdf.counts").read_text() == " [ 9 9 9 ]\n"


def test_counts_of_no_frames_are_refused(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    train(recipe, tmp_path / "run")
    (tmp_path / "run/ali_train_pdf.counts").write_text(" [ 0 0 0 ]\n")
    result = run_cli("decode-prep", tmp_path / "run", "--data", tmp_path / "data dir ü", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "no pdf has any frame" in result.stderr


@pytest.mark.parametrize("pipeline", ["cmvn: mean-variance", "deltas: 2", "splice: 0"])
def test_evaluation_and_decoding_repeat_the_front_end(tmp_path: Path, pipeline: str, run_cli: RunCli) -> None:
    """Evaluating the held-out speakers gives what training recorded for them."""
    features, labels = labelled_utterances(count=24)
    held_out = {name: matrix for name, matrix in features.items() if name.startswith("spk2")}
    data = write_data_dir(tmp_path / "data", features)
    cv, pdfs = write_data_dir(tmp_path / "cv", held_out), write_pdfs(tmp_path / "pdfs.txt", labels)
    (tmp_path / "speakers").write_text("spk2\n")
    recipe = write_recipe(tmp_path / "recipe.yaml", data, pdfs)
    settings = [f"data={{{pipeline}, cv: {{fraction: null, speakers: '{tmp_path / 'speakers'}'}}}}"]
    metrics = train(recipe, tmp_path / "run", *settings)
    best = min((m for m in metrics if m.get("split") == "cv"), key=lambda m: m["loss"])  # type: ignore[return-value,arg-type]
    found = evaluate_run(tmp_path / "run", cv, pdfs)
    assert found.loss == pytest.approx(best["loss"], rel=1e-6)
    assert found.figures["frame_accuracy"] == best["frame_accuracy"]
    for by, names in (("utterance", set(held_out)), ("speaker", {"spk2"})):
        parts = evaluate_run(tmp_path / "run", cv, pdfs, by=by).parts  # type: ignore[arg-type]
        assert set(parts) == names
        frames = sum(part.frames for part in parts.values())
        assert sum(part.loss * part.frames for part in parts.values()) / frames == pytest.approx(found.loss, rel=1e-6)
    assert run_cli("decode-prep", tmp_path / "run", "--data", cv, "--out", tmp_path / "decode").exit_code == 0
    scores = dict(iterate_matrices(tmp_path / "decode/loglikes.ark"))
    counts = np.bincount(np.concatenate(list(labels.values())))
    right = [(scores[k] + np.log(counts / counts.sum())).argmax(1) == labels[k] for k in scores]
    assert np.concatenate(right).mean() == pytest.approx(found.figures["frame_accuracy"])


def test_dry_run_looks_at_the_data(run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the training then logs, from tables and headers; nothing is written, no cache and no run dir."""
    job = make_job(tmp_path / "job")
    before = sorted(tmp_path.rglob("*"))
    call = (
        "train",
        job.recipe,
        "--run-dir",
        job.run,
        "--workers",
        2,
        "--dry-run",
        "--set",
        f"data.cache_dir={tmp_path / 'cache'}",
    )
    with monkeypatch.context() as patch:
        patch.setattr("ddnn.data.source.load_features", None)
        patch.setattr("ddnn.kaldi.archive.MatrixReader.read", None)
        dry = run_cli(*call)
        by_utterance = run_cli(*call, "--set", "data.cv.by=utterance").stdout
        pretraining = run_cli("pretrain", *call[1:], "--set", "init=rbm")
    assert dry.exit_code == 0, dry.stderr
    assert sorted(tmp_path.rglob("*")) == before
    lines = dry.stdout.splitlines()
    assert lines[1:6] == [
        f"# data: {job.data}: 4 speakers, 24 utterances, 480 frames (4 s at 10 ms a frame) of 4 dims",
        "# skipped: 0 utterances (0 without an alignment, 0 of another length, 0 empty); trimmed: 0",
        f"# alignments: {job.ali}: 3 pdfs, 3 of them with frames",
        "# cross-validation: 1 speaker, 6 utterances, 120 frames, 25.0 % of the frames",
        "# network: 12-8-3, 131 parameters; about 11 minibatches an epoch for each worker",
    ]
    assert lines[6].startswith("# memory of each worker: about ") and lines[7] == "seed: 1"
    assert "% of the frames; its 3 speakers are also trained on\n" in by_utterance
    assert "cross-validation: " not in pretraining.stdout and "24 utterances" in pretraining.stdout, pretraining.stderr
    trained = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    log = (job.run / "train.log").read_text()
    network = "network: 12-8-3, 131 parameters; 360 training frames, 120 cross-validation frames"
    assert trained.exit_code == 0 and network in log


def test_frozen_layers_are_named(run_cli: RunCli, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(tmp_path / "job")
    call = ("train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "model.freeze=[0]")
    parameters = "131 parameters, 27 of them trained (frozen: layer 0)"
    warning = "model.freeze: layer 0 keeps its random initial parameters (init: random)"
    assert parameters in run_cli(*call, "--dry-run").stdout and warning in caplog.text
    run_cli(*call)
    log = (job.run / "train.log").read_text()
    assert parameters in log and warning in log
    further = f"init={{model: {job.run}, output_layer: %s}}"
    for layer, output, random in ((0, "keep", False), (0, "random", False), (1, "keep", False), (1, "random", True)):
        call = ("train", job.recipe, "--dry-run", "--set", f"model.freeze=[{layer}]", "--set", further % output)
        caplog.clear()
        assert run_cli(*call).exit_code == 0
        assert ("random initial parameters" in caplog.text) == random


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ("parallel.workers=16", "averaging period of 10 minibatches"),
        ("parallel.workers=15", ""),
        ("parallel.workers=16 parallel.averaging_period=1", ""),
        ("parallel.workers=17 parallel.averaging_period=1", "averaging period of 1 minibatches"),
        ("parallel.workers=16 parallel.averaging_frames=16", ""),
        ("parallel.workers=16 parallel.averaging_frames=32", "averaging period of 32 frames"),
        ("parallel.workers=16 parallel.averaging_frames=auto", ""),
        ("parallel.workers=16 parallel.averaging_frames=epoch", "averaging period of one epoch"),
        ("parallel.workers=16 parallel.strategy=1-bit", "averaging period of 10 minibatches"),
        ("parallel.workers=16 parallel.strategy=gradient-all-reduce", ""),
        ("parallel.workers=16 minibatch_scope=total", ""),
        ("parallel.workers=16 parallel.scale_learning_rate=false", ""),
        ("parallel.workers=16 parallel.strategy=bmuf", ""),
        ("parallel.workers=16 init=rbm", ""),
    ],
)
def test_a_warning_where_many_workers_start_from_random_parameters(
    run_cli: RunCli, tmp_path: Path, caplog: pytest.LogCaptureFixture, settings: str, warned: str
) -> None:
    job = make_job(tmp_path / "job")
    options = [word for setting in ("minibatch_size=16", *settings.split()) for word in ("--set", setting)]
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--dry-run", *options)
    assert result.exit_code == 0, result.stderr
    assert ("start from random parameters" in caplog.text) == bool(warned) and warned in caplog.text
    recipe, groups = load_recipe(job.recipe, options[1::2]), Groups.data_parallel(SingleProcess())
    caplog.clear()
    initial_model(recipe, load_data(recipe, torch.device("cpu"), groups), None, None, groups)
    assert ("start from random parameters" in caplog.text) == bool(warned)


def test_dry_run_refuses_what_does_not_fit_into_memory(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the message of the training itself."""
    job = make_job(tmp_path / "job")
    call = ("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    monkeypatch.setattr("ddnn.training.memory.available_memory", lambda: 80 << 20)
    assert run_cli(*call, "--dry-run").exit_code == 0
    dry, trained = (run_cli(*call, "--set", "model.hidden_units=900000", *more) for more in (("--dry-run",), ()))
    assert (dry.exit_code, dry.stdout) == (2, "") and dry.stderr == trained.stderr
    assert "of memory" in dry.stderr and "and 80 MiB are available" in dry.stderr
    several = run_cli(*call, "--dry-run", "--workers", 2)
    assert several.exit_code == 2 and "2 workers on " in several.stderr, "libraries alone take 128 MiB"


def test_dry_run_finds_what_is_wrong_with_the_data(run_cli: RunCli, tmp_path: Path) -> None:
    job = make_job(tmp_path / "job")
    call = ("train", job.recipe, "--run-dir", job.run, "--dry-run")
    large = run_cli(*call, "--set", "minibatch_size=400")
    assert large.exit_code == 2 and "360 frames do not fill one minibatch of 400" in large.stderr
    (job.data / "utt2spk").write_text("other speaker\n")
    assert run_cli(*call).exit_code == 2
    job.write()
    job.ark.write_bytes(job.ark.read_bytes()[:-500])
    truncated = run_cli(*call)
    assert truncated.exit_code == 2 and "cut short: the header claims 20 rows" in truncated.stderr
    job.ark.write_bytes(b"\0")
    damaged = run_cli(*call)
    assert damaged.exit_code == 2 and "feats.ark" in damaged.stderr and damaged.stdout == ""
    assert not job.run.exists()


def test_the_bar_of_an_epoch_has_speed_and_loss(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddnn.util.progress.FIGURES_SECONDS", 0.0)
    with (tmp_path / "terminal").open("w") as terminal:
        monkeypatch.setattr("ddnn.util.progress._terminal", terminal)
        train(recipe, tmp_path / "run")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", (tmp_path / "terminal").read_text())
    loss = re.findall(r"epoch 1 .* 22/22 minibatches .* [0-9.e+]+ frames/s, loss ([0-9.]+)", shown)[-1]
    assert f"epoch  1 train  loss {loss} " in (tmp_path / "run/train.log").read_text()


def test_lines_within_an_epoch(recipe: Path, tmp_path: Path) -> None:
    """The figures are those of the epoch, whose results are the same. By default they come every five minutes."""
    plain, lines = tmp_path / "plain", tmp_path / "lines"
    train(recipe, plain)
    train(recipe, lines, "log.interval_minutes=1e-9")
    assert " % done, " not in (plain / "train.log").read_text()
    text = (lines / "train.log").read_text()
    assert text.count(" % done, ") == 3 * 22 and "epoch 1: 5 % done, " in text and "finished: " in text
    (last,) = re.findall(r"epoch 2: 100 % done, [0-9.e+]+ frames/s, about 0 s left, (.*)\n", text)
    (row,) = (
        r for r in map(json.loads, (lines / "metrics.jsonl").open()) if (r.get("split"), r["epoch"]) == ("train", 2)
    )
    assert last == f"loss {row['loss']:.4f}, frame accuracy {100 * row['frame_accuracy']:.2f} %"
    assert (lines / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()


def test_quiet_and_verbose(run_cli: RunCli, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TERMINAL_LEVEL, "INFO")
    shown = logging.StreamHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [shown])
    result = run_cli("train", recipe, "--quiet", "--verbose")
    assert_refused(result, "--quiet and --verbose contradict each other")
    for option, level, of_package in (("--quiet", 30, 20), ("--verbose", 10, 10)):
        assert run_cli("train", recipe, option, "--dry-run").exit_code == 0
        assert (shown.level, logging.getLogger("ddnn").level, terminal_level()) == (level, of_package, level)


def test_an_evaluation_of_training_data_and_of_features_of_another_kind(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are warned of; the data by ids and lengths, wherever it is."""
    monkeypatch.setattr("ddnn.training.model_evaluation.FEWEST_FRAMES", 100)
    job = make_job(tmp_path / "job")
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu").exit_code == 0
    held_out = set((job.run / "cv_utterances").read_text().split())
    trained = {name: matrix for name, matrix in job.features.items() if name not in held_out}
    shorter = {name: matrix[:-1] for name, matrix in job.features.items()}
    labels = {name: ids[:-1] for name, ids in job.labels.items()}
    of_others = {name: 3 * matrix for name, matrix in job.features.items()}
    write_data_dir(tmp_path / "copy", job.features)
    write_data_dir(tmp_path / "trained", trained)
    write_data_dir(tmp_path / "shorter", shorter)
    write_ali_dir(tmp_path / "shorter_ali", labels)
    write_data_dir(tmp_path / "others", of_others)
    same, unlike = "the network was trained on ", "the features seem to be of another kind"
    for name, ali, is_same, is_unlike in (
        ("copy", job.ali, True, False),
        ("trained", job.ali, True, False),
        ("shorter", tmp_path / "shorter_ali", False, False),
        ("others", job.ali, True, True),
    ):
        caplog.clear()
        result = run_cli("evaluate", job.run, "--data", tmp_path / name, "--alignments", ali, "--json")
        assert result.exit_code == 0, result.stderr
        assert (same in caplog.text, unlike in caplog.text) == (is_same, is_unlike), name
        found = json.loads(result.stdout)
        assert (found["data"], found["alignments"]) == (str(tmp_path / name), str(ali))
        caplog.clear()
        result = run_cli("decode-prep", job.run, "--data", tmp_path / name, "--out", tmp_path / f"{name}_decode")
        assert result.exit_code == 0 and caplog.text.count(unlike) == is_unlike
