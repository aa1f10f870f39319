"""Training that starts from a trained network: what is kept of it, what must agree, and what is said where it does not."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import write_ali_dir, write_data_dir, write_recipe, write_transforms
from jobs import Job, RunCli, assert_refused, files_in, make_job

from ddnn.data.dataset import InputTransform
from ddnn.data.feature_reader import FeatureConfig
from ddnn.kaldi.nnet1_file import write_nnet1
from ddnn.kaldi.transforms import TransformConfig
from ddnn.nn.acoustic_model import NNET1_FEATURES, AcousticModel, load_model, save_model, to_nnet1
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network, initialize
from ddnn.recipe.load import load_recipe


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job, and in `run` a training of it; `nnet1` is its network as Kaldi has it."""
    from ddnn.decoding.prepare import export_nnet1
    from ddnn.training.job import run_training

    job = make_job(tmp_path_factory.mktemp("first"))
    run_training(load_recipe(job.recipe, ["schedule.max_epochs=2"]), job.run, "cpu")
    export_nnet1(job.run, job.root / "nnet1")
    return job


def recipe_from(job: Job, folder: Path, model: Path, *more: str) -> Path:
    """A recipe that gives nothing of the model that it starts from."""
    path = folder / "further.yaml"
    text = f"data: {{train: {job.data}, alignments: {job.ali}, cv: {{fraction: 0.25}}}}\n"
    text += f"init: {{model: {model}}}\nminibatch_size: 16\n"
    path.write_text(text + "schedule: {initial_learning_rate: 0.02, max_epochs: 1}\n" + "\n".join(more))
    return path


def cv_losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row.get("split") == "cv"]


def train(run_cli: RunCli, recipe: Path, run: Path, *settings: str) -> Any:
    options = [word for setting in settings for word in ("--set", setting)]
    return run_cli("train", recipe, "--run-dir", run, "--device", "cpu", *options)


def assert_dry_run_says_the_same(run_cli: RunCli, recipe: Path, refused: Any, *settings: str) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    result = run_cli("train", recipe, "--dry-run", *options)
    assert (result.exit_code, result.stdout) == (refused.exit_code, "")
    assert result.stderr.partition("ddnn: error: ")[2] == refused.stderr.partition("ddnn: error: ")[2] != ""


def held_out(job: Job, folder: Path) -> tuple[str, ...]:
    """Settings for cross-validation on a corpus of its own, of other names, and the corpus."""
    features = {f"x{name}": job.features[name] for name in job.names[:6]}
    data = write_data_dir(folder / "cv", features)
    ali = write_ali_dir(folder / "cv_ali", {f"x{name}": job.labels[name] for name in job.names[:6]})
    return "data.cv.fraction=null", f"data.cv.data={data}", f"data.cv.alignments={ali}"


@pytest.mark.parametrize("kind", ["run", "nnet1"])
def test_epoch_0_is_what_evaluate_says_of_the_same_bits(first: Job, tmp_path: Path, run_cli: RunCli, kind: str) -> None:
    settings = held_out(first, tmp_path)
    evaluated = run_cli("evaluate", first.run, "--data", tmp_path / "cv", "--alignments", tmp_path / "cv_ali", "--json")
    result = train(run_cli, recipe_from(first, tmp_path, first.root / kind), tmp_path / "run", *settings)
    assert result.exit_code == 0, result.stderr
    assert cv_losses(tmp_path / "run")[0] == json.loads(evaluated.stdout)["loss"]
    before, after = load_model(first.run / "final.safetensors"), load_model(tmp_path / "run" / "final.safetensors")
    assert before.transform.shift is not None and after.transform.shift is not None
    assert torch.equal(before.transform.shift, after.transform.shift), "the input is not normalized by other statistics"
    assert after.transition_digest == before.transition_digest is not None
    assert not torch.equal(before.network.parameters, after.network.parameters)
    resolved = load_recipe(tmp_path / "run" / "recipe.yaml")
    assert (resolved.model.summary(), resolved.data.splice) == ("1 x 8 sigmoid", 1)
    again = run_cli("evaluate", tmp_path / "run", "--data", first.data, "--alignments", first.ali)
    assert again.exit_code == 0, again.stderr
    assert run_cli("export", tmp_path / "run", "--out", tmp_path / "nnet1").exit_code == 0


def test_dry_run_shows_the_shape_of_the_network(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    shown = run_cli("train", recipe_from(first, tmp_path, first.run), "--dry-run").stdout
    assert shown.startswith(f"# 1 x 8 sigmoid, init from {first.run}, ")
    assert "  hidden_units: 8\n" in shown and "  splice: 1\n" in shown


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.splice=2"], "data.splice: 2 found, but the network of init.model has 1"),
        (["data.cmvn=mean"], "data.cmvn: the text 'mean' found, but the network of init.model has the text 'none'"),
        (["data.deltas=1"], "data.deltas: 1 found, but the network of init.model has 0"),
        (["data.normalize=false"], "data.normalize: false found, but the network of init.model has true"),
        (
            ["model.hidden_units=9", "model.hidden_layers=2"],
            "model.hidden_units: 9 found, but the network of init.model",
        ),
        (["model.activation=tanh"], "model.activation: the text 'tanh' found, but the network of init.model has"),
        (["model.freeze=[2]"], "model.freeze: 2 found, expected 0 (the first hidden layer) to 1 (the output layer)"),
        (["model.freeze=[0, 1]"], "model.freeze: all 2 layers are frozen"),
    ],
)
def test_a_recipe_that_describes_another_network(
    first: Job, tmp_path: Path, run_cli: RunCli, settings: list[str], said: str
) -> None:
    result = train(run_cli, recipe_from(first, tmp_path, first.run), tmp_path / "run", *settings)
    assert_refused(result, said)
    assert not (tmp_path / "run").exists()
    if len(settings) > 1:
        assert "2 keys do not fit" in result.stderr and "model.hidden_layers: 2 found" in result.stderr


def test_values_that_agree_may_be_given(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    given = ("data.splice=1", "model.hidden_layers=1", "model.hidden_units=8", "data.normalize=true")
    assert train(run_cli, recipe_from(first, tmp_path, first.run), tmp_path / "run", *given).exit_code == 0


def test_another_number_of_pdfs_needs_a_new_output_layer(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    ali = write_ali_dir(tmp_path / "ali", first.labels, pdfs=5)
    recipe = recipe_from(first, tmp_path, first.run)
    result = train(run_cli, recipe, tmp_path / "run", f"data.alignments={ali}")
    assert_refused(result, "5 pdfs, the network of init.model 3", "init.output_layer: random")
    assert_dry_run_says_the_same(run_cli, recipe, result, f"data.alignments={ali}")
    assert files_in(tmp_path / "run") <= {"recipe.yaml", "train.log", "status.json"}
    settings = (f"data.alignments={ali}", "init.output_layer=random", "model.freeze=[0]")
    for run in ("new", "same"):
        assert train(run_cli, recipe, tmp_path / run, *settings).exit_code == 0
    new, old = (load_model(one / "final.safetensors").network for one in (tmp_path / "new", first.run))
    assert (new.output_dim, new.layers[-1].parameters["bias"].learn_rate_coef) == (5, 0.1)
    assert torch.equal(new.views[0]["weight"], old.views[0]["weight"]), "frozen, as the trained network has it"
    assert (tmp_path / "new/final.safetensors").read_bytes() == (tmp_path / "same/final.safetensors").read_bytes()
    assert train(run_cli, recipe, tmp_path / "other", *settings, "seed=2").exit_code == 0
    other = load_model(tmp_path / "other/final.safetensors").network
    assert not torch.equal(other.views[1]["weight"], new.views[1]["weight"])
    assert cv_losses(tmp_path / "new")[0] > 1.0 > cv_losses(first.run)[-1]


def test_another_tree_needs_a_new_output_layer(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    from corpora import write_model

    ali = shutil.copytree(first.ali, tmp_path / "ali")
    write_model(ali / "final.mdl", (2, 1, 0))
    recipe = recipe_from(first, tmp_path, first.run)
    result = train(run_cli, recipe, tmp_path / "run", f"data.alignments={ali}")
    assert_refused(result, "its final.mdl is of another tree than that of the network of", "init.output_layer: random")
    assert_dry_run_says_the_same(run_cli, recipe, result, f"data.alignments={ali}")
    again = tmp_path / "again"
    assert train(run_cli, recipe, again, f"data.alignments={ali}", "init.output_layer=random").exit_code == 0


def test_features_of_other_dims(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    wide = {name: np.hstack([values, values]) for name, values in first.features.items()}
    data = write_data_dir(tmp_path / "wide", wide)
    recipe = recipe_from(first, tmp_path, first.run)
    for more in ((), ("init.output_layer=random",)):
        result = train(run_cli, recipe, tmp_path / "run", f"data.train={data}", *more)
        assert_refused(result, "the features have 8 dims, the model was trained on 4")
        assert_dry_run_says_the_same(run_cli, recipe, result, f"data.train={data}", *more)
    assert not (tmp_path / "run" / "final.safetensors").exists()


def test_directories_without_a_network(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    empty, unfinished, two = (tmp_path / name for name in ("empty", "unfinished", "two"))
    for folder in (empty, unfinished, two):
        folder.mkdir()
    (unfinished / "recipe.yaml").write_text("seed: 1\n")
    shutil.copy(first.root / "nnet1" / "final.nnet", two / "a.nnet")
    shutil.copy(first.root / "nnet1" / "final.nnet", two / "b.nnet")
    for model, said in (
        (empty, "there is no final.nnet and no final.safetensors"),
        (unfinished, "this training has not finished: there is no final.safetensors"),
        (two, "there are a.nnet, b.nnet, and no final.nnet"),
        (first.recipe, f"a file found, a directory expected\n  location: {first.recipe}\n  hint: name its directory: "),
    ):
        result = train(run_cli, recipe_from(first, tmp_path, model), tmp_path / "run")
        assert_refused(result, said)
        assert not (tmp_path / "run").exists()


def test_feature_transforms_that_differ(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    model = shutil.copytree(first.root / "nnet1", tmp_path / "nnet1")
    for name in ("final.nnet", "final.feature_transform", "ali_train_pdf.counts"):  # for steps/nnet/decode.sh
        assert (model / name).is_file()
    assert (model / "feature_transform.nnet").read_bytes() == (model / "final.feature_transform").read_bytes()
    assert run_cli("train", recipe_from(first, tmp_path, model), "--dry-run").exit_code == 0
    (model / "final.feature_transform").write_bytes((model / "final.nnet").read_bytes())
    result = run_cli("train", recipe_from(first, tmp_path, model), "--dry-run")
    assert_refused(result, "differ", "remove the one that the network was not trained with")


def test_cmvn_of_a_kaldi_network(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    """Where the directory says it, and where only the recipe can."""
    model = shutil.copytree(first.root / "nnet1", tmp_path / "nnet1")
    recipe = recipe_from(first, tmp_path, model)
    refused = run_cli("train", recipe, "--dry-run", "--set", "data.cmvn=mean")
    assert_refused(refused, "data.cmvn: the text 'mean' found, but the network of init.model has the text 'none'")
    for name in ("cmvn_opts", "delta_opts", NNET1_FEATURES):
        (model / name).unlink(missing_ok=True)
    assert "  cmvn: mean\n" in run_cli("train", recipe, "--dry-run", "--set", "data.cmvn=mean").stdout
    (model / "cmvn_opts").write_text("--norm-means=true --norm-vars=true\n")
    assert "  cmvn: mean-variance\n" in run_cli("train", recipe, "--dry-run").stdout
    result = run_cli("train", recipe, "--dry-run", "--set", "data.cmvn=mean")
    assert_refused(
        result, "data.cmvn: the text 'mean' found, but the network of init.model has the text 'mean-variance'"
    )


@pytest.mark.parametrize("kind", ["run", "nnet1"])
def test_a_network_that_was_trained_with_transforms(first: Job, tmp_path: Path, run_cli: RunCli, kind: str) -> None:
    """They are of the data, and no value of the network that the recipe could take."""
    from ddnn.decoding.prepare import export_nnet1

    model = load_model(first.run / "final.safetensors")
    transforms = TransformConfig("ab" * 32, 4, 4, 4, adapted=True)
    run = shutil.copytree(first.run, tmp_path / "run")
    save_model(run / "final.safetensors", replace(model, features=replace(model.features, transforms=transforms)))
    export_nnet1(run, tmp_path / "nnet1")
    recipe = recipe_from(first, tmp_path, tmp_path / kind)
    said = (
        "data.transforms: none found, but the network of init.model was trained with LDA+MLLT over 4+1+4 frames, fMLLR"
    )
    refused = run_cli("train", recipe, "--dry-run")
    assert_refused(
        refused, said, "hint: set data.transforms to the Kaldi dir", f"the recipe, with init.model: {tmp_path}"
    )
    assert "remove" not in refused.stderr
    both = run_cli("train", recipe, "--dry-run", "--set", "data.splice=2")
    assert_refused(both, said, "data.splice: 2 found", "remove what differs", "; set data.transforms to")
    write_transforms(tmp_path / "tri")
    recipe = recipe_from(first, tmp_path, first.root / kind)
    refused = run_cli("train", recipe, "--dry-run", "--set", f"data.transforms={tmp_path / 'tri'}")
    assert_refused(refused, "was trained with none", "hint: remove data.transforms")


@pytest.mark.parametrize(
    ("offsets", "layers", "said"),
    [
        (
            (-2, 0, 2),
            ((12, 8, "sigmoid"), (8, 3, "softmax")),
            "its input is the frames -2, 0, 2 around the present one",
        ),
        ((0,), ((4, 8, "sigmoid"), (8, 3, "sigmoid")), "its last layer is sigmoid, softmax expected"),
    ],
)
def test_networks_that_no_recipe_describes(
    first: Job, tmp_path: Path, run_cli: RunCli, offsets: tuple[int, ...], layers: Any, said: str
) -> None:
    network = Network([Affine(*layer) for layer in layers])
    initialize(network, 1)
    components, front = to_nnet1(AcousticModel(FeatureConfig(), InputTransform(offsets, 4), network))
    (tmp_path / "kaldi").mkdir()
    write_nnet1(tmp_path / "kaldi" / "final.nnet", components)
    write_nnet1(tmp_path / "kaldi" / "final.feature_transform", front)
    assert_refused(train(run_cli, recipe_from(first, tmp_path, tmp_path / "kaldi"), tmp_path / "run"), said)


def test_a_network_that_no_epoch_improves_is_kept(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    recipe = recipe_from(first, tmp_path, first.run)
    result = train(run_cli, recipe, tmp_path / "run", "schedule.initial_learning_rate=3")
    assert result.exit_code == 0, result.stderr
    log = (tmp_path / "run" / "train.log").read_text()
    assert "no epoch was better in cross-validation than the initial network (0." in log
    assert "change schedule.initial_learning_rate" in log and "for cross-validation, hold out others" in log
    assert (tmp_path / "run/final.safetensors").read_bytes() == (first.run / "final.safetensors").read_bytes()
    assert "epoch 0" in run_cli("info", tmp_path / "run").stdout
    settings = ("schedule={name: exponential, initial_learning_rate: 3, epochs: 1}",)
    recipe.write_text(recipe.read_text().partition("schedule:")[0])
    result = train(run_cli, recipe, tmp_path / "accepted", *settings)
    assert result.exit_code == 3 and "after epoch 1, not below that of the initial network" in result.stderr


def test_cross_validation_on_what_the_network_was_trained_on(
    first: Job, tmp_path: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture
) -> None:
    """A warning, also of a dry run, with the setting after which it is gone."""
    recipe, said = recipe_from(first, tmp_path, first.run), "the network of init.model was trained on"
    assert train(run_cli, recipe, tmp_path / "same").exit_code == 0
    assert said not in caplog.text, "the same seed holds out the same speaker"
    (tmp_path / "two").write_text("\n".join([first.names[0], (first.run / "cv_utterances").read_text()]))
    more = ("data.cv.fraction=null", f"data.cv.utterances={tmp_path / 'two'}")
    for name, settings, count in (("seed", ("seed=3",), "6 of the 6"), ("more", more, "1 of the 7")):
        caplog.clear()
        assert train(run_cli, recipe, tmp_path / name, *settings).exit_code == 0
        run_cli("train", recipe, "--dry-run", *[word for one in settings for word in ("--set", one)])
        assert caplog.text.count(f"{said} {count} utterances for cross-validation") == 2
        assert f"set data.cv.utterances: {first.run / 'cv_utterances'}, those that it was not" in caplog.text
    caplog.clear()
    advised = ("seed=3", "data.cv.fraction=null", f"data.cv.utterances={first.run / 'cv_utterances'}")
    assert train(run_cli, recipe, tmp_path / "advised", *advised).exit_code == 0
    assert said not in caplog.text


def test_cross_validation_after_one_on_a_corpus_of_its_own(
    first: Job, tmp_path: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture
) -> None:
    """The network was trained on all of the training data, here or moved elsewhere; not on another corpus."""
    settings, said = held_out(first, tmp_path), "trained on 6 of the 6 utterances for"
    assert train(run_cli, first.recipe, tmp_path / "own", "schedule.max_epochs=1", *settings).exit_code == 0
    recipes = []
    for name, model in (("again", tmp_path / "own"), ("other", first.run)):
        (tmp_path / name).mkdir()
        recipes.append(recipe_from(first, tmp_path / name, model))
    own, other = recipes
    for name, recipe in (("again", own), ("other", other)):
        assert train(run_cli, recipe, tmp_path / name / "run", *settings).exit_code == 0
    assert said not in caplog.text
    assert train(run_cli, own, tmp_path / "part").exit_code == 0
    assert said in caplog.text and f"data of {tmp_path / 'own' / 'recipe.yaml'}" in caplog.text
    caplog.clear()
    moved = shutil.copytree(first.data, tmp_path / "moved")
    assert train(run_cli, other, tmp_path / "elsewhere", f"data.train={moved}", "seed=3").exit_code == 0
    assert said in caplog.text


def test_a_resume_needs_the_first_network_no_more(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    """Not even to know the shape, which the recipe does not give."""
    from ddnn.training.job import run_training

    model = shutil.copytree(first.run, tmp_path / "model")
    recipe = recipe_from(first, tmp_path, model, "model: {freeze: [0]}", "optimizer: {name: ng-sgd, rank_in: 3}")
    settings = ("schedule.max_epochs=3", "schedule.min_epochs=3")
    run_training(load_recipe(recipe, settings), tmp_path / "whole", "cpu")
    stop_after(2, load_recipe(recipe, settings), tmp_path / "run")
    shutil.rmtree(model)
    options = [word for setting in settings for word in ("--set", setting)]
    result = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--device", "cpu", "--resume", *options)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run/final.safetensors").read_bytes() == (tmp_path / "whole/final.safetensors").read_bytes()
    result = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--resume", *options)
    assert result.exit_code == 0 and "has finished" in result.stdout
    result = run_cli("train", recipe, "--run-dir", tmp_path / "new", *options)
    assert_refused(result, "init.model: ", "does not exist")


def stop_after(epochs: int, recipe: Any, run: Path, *, resume: bool = False) -> None:
    """A training that is interrupted after so many epochs, with a checkpoint."""
    from ddnn.distributed.signals import TrainingInterrupted
    from ddnn.training.job import run_training
    from ddnn.training.state import CheckpointPolicy

    after = CheckpointPolicy.after_epoch

    def stopping(self: CheckpointPolicy, trainer: Any) -> None:
        after(self, trainer)
        if trainer.progress.epoch == epochs:
            raise TrainingInterrupted("SIGTERM")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingInterrupted):
        patch.setattr(CheckpointPolicy, "after_epoch", stopping)
        run_training(recipe, run, "cpu", resume=resume)


def test_pretrained_layers_may_be_frozen(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    recipe = write_recipe(tmp_path / "rbm.yaml", first.data, first.ali, "init: rbm\npretrain: {epochs: [1]}\n")
    result = train(run_cli, recipe, tmp_path / "run", "model.freeze=[0]", "optimizer.momentum=0.5", "optimizer.l2=0.01")
    assert result.exit_code == 0, result.stderr
    trained, dbn = (load_model(tmp_path / "run" / name) for name in ("final.safetensors", "pretrain/dbn.safetensors"))
    assert torch.equal(trained.network.parameters[: dbn.network.num_parameters], dbn.network.parameters)


def test_a_kaldi_network_is_trained_further(an4: Path, kaldi_nnet1: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """By one epoch on a few utterances; epoch 0 is what evaluate says of the imported network."""
    options = ("--feature-transform", kaldi_nnet1 / "feature_transform.nnet", "--out", tmp_path / "imported")
    assert run_cli("import-nnet1", kaldi_nnet1 / "rbm_ce.nnet", *options).exit_code == 0
    for name, source, count in (("train", "train", 40), ("cv", "test", 10)):
        (tmp_path / name).mkdir()
        lines = (an4 / source / "feats.scp").read_text().splitlines(keepends=True)[:count]
        (tmp_path / name / "feats.scp").write_text("".join(line.replace(" ", f" {an4 / source}/") for line in lines))
        shutil.copy(an4 / source / "utt2spk", tmp_path / name)
    evaluated = run_cli(
        "evaluate", tmp_path / "imported", "--data", tmp_path / "cv", "--alignments", an4 / "ali_test", "--json"
    )
    recipe = tmp_path / "an4.yaml"
    recipe.write_text(
        f"data: {{train: {tmp_path}/train, alignments: {an4}/ali,"
        f" cv: {{data: {tmp_path}/cv, alignments: {an4}/ali_test}}}}\n"
        f"precision: float32\ninit: {{model: {kaldi_nnet1}}}\nschedule: {{initial_learning_rate: 1.0e-4, max_epochs: 1}}\n"
    )
    result = train(run_cli, recipe, tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert cv_losses(tmp_path / "run")[0] == json.loads(evaluated.stdout)["loss"]
    assert run_cli("export", tmp_path / "run", "--out", tmp_path / "nnet1").exit_code == 0
    assert files_in(tmp_path / "nnet1") == {
        "final.nnet", "feature_transform.nnet", "final.feature_transform", "ali_train_pdf.counts",
        NNET1_FEATURES,
    }  # fmt: skip
