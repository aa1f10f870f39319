"""Training that starts from a trained network that only `model.layers` can describe: imported CNNs, layers of unequal
width, networks within networks."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from jobs import Job, RunCli, assert_refused, make_job
from training.test_finetuning import recipe_from, stop_after, train

from ddnn.data.dataset import InputTransform
from ddnn.data.feature_reader import FeatureConfig
from ddnn.kaldi.nnet1_file import write_nnet1
from ddnn.nn.acoustic_model import AcousticModel, load_model, to_nnet1
from ddnn.nn.convolution import AveragePooling, Convolution, MaxPooling
from ddnn.nn.elementwise import Activation, Copy, Dropout, LengthNorm, Scale, Shift
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine, Parallel
from ddnn.nn.network import Network, initialize
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.training.initial_model import with_initial_model
from ddnn.training.network_layers import network_layers

CONV = "conv: {filters: 3, patch: 2, pool: 3}"
LAYERS = f"model: {{layers: [{{{CONV}}}, {{affine: 8, repeat: 2}}]}}"


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job, and in `run` a training of a CNN on it."""
    from ddnn.training.job import run_training

    job = make_job(tmp_path_factory.mktemp("first"))
    text = job.recipe.read_text().replace("model: {hidden_layers: 1, hidden_units: 8}", LAYERS)
    job.recipe.write_text(text)
    run_training(load_recipe(job.recipe, ["schedule.max_epochs=2"]), job.run, "cpu")
    return job


def kaldi_dir(folder: Path, *layers: Layer) -> Path:
    """A Kaldi dir with the network of these layers, which read three frames of 4 dims, and a softmax of 3 pdfs."""
    network = Network([*layers, Affine(layers[-1].output_dim, 3, "softmax", bias_learn_rate_coef=0.1)])
    initialize(network, 1)
    front = InputTransform((-1, 0, 1), 4, shift=torch.zeros(12), scale=torch.ones(12))
    components, transform = to_nnet1(AcousticModel(FeatureConfig(), front, network))
    folder.mkdir()
    write_nnet1(folder / "final.nnet", components)
    write_nnet1(folder / "final.feature_transform", transform)
    return folder


NETWORKS: dict[str, tuple[tuple[Layer, ...], str]] = {
    "unequal widths": ((Affine(12, 8), Affine(8, 6), Affine(6, 6, max_norm=2.0)), "affine, affine, affine"),
    "functions": ((Affine(12, 8), Affine(8, 8, "tanh")), "affine, affine"),
    "activation of its own": ((Activation(12, "sigmoid"), Affine(12, 12)), "activation, affine"),
    "cnn": (
        (Convolution.of_pieces(12, 2, 1, 4, 3, max_norm=2.0), MaxPooling.of_patches(9, 3, 3, 3), Scale(3), Shift(3), Activation(3), Affine(3, 5)),
        "conv, max-pool, scale, shift, activation, affine",
    ),
    "own rates": (
        (Convolution.of_pieces(12, 2, 1, 4, 3, 0.5, 0.25), AveragePooling.of_patches(9, 2, 1, 3), Activation(6, "tanh")),
        "conv, average-pool, activation",
    ),
    "all frames as one": ((Convolution.of_pieces(12, 9, 1, 12, 2),), "conv"),
    "side by side": (
        (Copy(12, (11, 3, 3, 0)), Parallel(((Affine(1, 2), LengthNorm(2)), (Affine(3, 4, "tanh"),)))),
        "copy, parallel",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_taken_over_as_it_is_and_resumed_to_the_bit(
    name: str, first: Job, tmp_path: Path, run_cli: RunCli
) -> None:
    """The recipe says nothing of its layers; that of the run dir says all, and the network may be gone."""
    from ddnn.training.job import run_training

    layers, summary = NETWORKS[name]
    model = kaldi_dir(tmp_path / "kaldi", *layers)
    recipe = recipe_from(first, tmp_path, model)
    dry = run_cli("train", recipe, "--dry-run")
    assert dry.stdout.startswith(f"# {summary}, init from {model}, "), dry.stderr
    settings = ("schedule.max_epochs=3", "schedule.min_epochs=3")
    run_training(load_recipe(recipe, settings), tmp_path / "whole", "cpu")
    stop_after(2, load_recipe(recipe, settings), tmp_path / "run")
    assert load_recipe(tmp_path / "run" / "recipe.yaml").model.summary() == summary
    shutil.rmtree(model)
    options = [word for setting in settings for word in ("--set", setting)]
    result = run_cli("train", recipe, "--run-dir", tmp_path / "run", "--device", "cpu", "--resume", *options)
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "run/final.safetensors").read_bytes() == (tmp_path / "whole/final.safetensors").read_bytes()
    trained = load_model(tmp_path / "whole" / "final.safetensors").network
    assert trained.layers[:-1] == layers and (trained.layers[-1].output_dim, trained.input_dim) == (3, 12)


def test_a_network_of_ddnn_is_described_as_its_recipe_did(first: Job, tmp_path: Path) -> None:
    recipe, model = with_initial_model(load_recipe(recipe_from(first, tmp_path, first.run)))
    before = load_recipe(first.recipe).model
    assert model is not None and recipe.model.summary() == before.summary()
    assert network_layers(recipe, 12, 3) == model.network.layers == network_layers(load_recipe(first.recipe), 12, 3)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            "model: {hidden_units: 9, activation: tanh}",
            "model.hidden_units: 9 found, but the network of init.model has layers of its own: conv 3 of 2 bands pool 3, "
            "2 x 8 sigmoid",
        ),
        (
            "model: {layers: [{affine: 8, repeat: 2}]}",
            "model.layers: 2 x 8 sigmoid found, but the network of init.model has conv 3 of 2 bands pool 3, 2 x 8 sigmoid",
        ),
        (
            LAYERS.replace("pool: 3", "pool: 3, pool_kind: average"),
            "model.layers: conv 3 of 2 bands pool 3, 2 x 8 sigmoid",
        ),
        (LAYERS.replace("patch: 2", "patch: 5"), "layer 0 (conv): patch 5 does not fit into 4 bands; 1 to 4 do"),
        ("model: {bands: 2}", "model.bands: 2 found, but the network of init.model has 4"),
        ("model: {freeze: [4]}", "model.freeze: 4 found, expected 0 (the first hidden layer) to 3 (the output layer)"),
        (LAYERS.replace("layers:", "bands: 2, layers:"), "does not fit into 2 bands"),
    ],
)
def test_a_recipe_that_describes_another_network(
    first: Job, tmp_path: Path, run_cli: RunCli, more: str, said: str
) -> None:
    if "into 2 bands" in said:
        more = more.replace("patch: 2, pool: 3", "patch: 3")
    result = train(run_cli, recipe_from(first, tmp_path, first.run, more), tmp_path / "run")
    assert_refused(result, said, "found, " if "layer 0" not in said and "into" not in said else "layer 0")
    assert not (tmp_path / "run").exists()


def test_layers_that_agree_may_be_given_and_say_how_they_are_trained(
    first: Job, tmp_path: Path, run_cli: RunCli
) -> None:
    text = LAYERS.replace("repeat: 2", "repeat: 2, dropout: 0.2, learn_rate_coef: 0.5, max_norm: 9").replace(
        "pool: 3", "pool: 3, max_norm: 7"
    )
    recipe = recipe_from(first, tmp_path, first.run, text)
    assert train(run_cli, recipe, tmp_path / "run", "model.freeze=[0]").exit_code == 0
    trained, before = (load_model(run / "final.safetensors").network for run in (tmp_path / "run", first.run))
    assert trained.layers[0].config() == {**before.layers[0].config(), "max_norm": 7.0}
    assert [layer for layer in trained.layers if isinstance(layer, Dropout)] == [Dropout(8, 0.2)] * 2
    assert [layer.config()["learn_rate_coef"] for layer in trained.layers if isinstance(layer, Affine)] == [
        0.5,
        0.5,
        1.0,
    ]
    for name in ("weight", "bias"):
        assert torch.equal(trained.views[0][name], before.views[0][name])


def test_a_new_output_layer_on_a_cnn(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    recipe = recipe_from(first, tmp_path, first.run)
    settings = ("init.output_layer=random", "model.freeze=[0, 1, 2]")
    assert train(run_cli, recipe, tmp_path / "run", *settings).exit_code == 0
    new, old = (load_model(run / "final.safetensors").network for run in (tmp_path / "run", first.run))
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(new.views, old.views, strict=True)]
    assert same == [True] * (len(same) - 1) + [False]


NAMES = [
    "conv_avg",
    "conv_max",
    "conv_step",
    "copy_cut",
    "maxnorm",
    "one_patch",
    "parallel",
    "prelu_lnorm",
    "ties",
    "two_conv",
    "two_conv_true",
]


@pytest.mark.parametrize("name", NAMES)
def test_kaldi_s_networks_are_described(name: str, golden: Path, tmp_path: Path) -> None:
    """As model files have their layers, also once the recipe is written into a run dir and read again."""
    source, model = golden / "conv", tmp_path / "model"
    model.mkdir()
    shutil.copy(source / name / "init.nnet", model / "final.nnet")
    bands = {"parallel": 10, "conv_step": 11, "prelu_lnorm": 11}.get(name, 8)
    shutil.copy(source / f"bands{bands}.transform.nnet", model / "final.feature_transform")
    path = tmp_path / "r.yaml"
    path.write_text(f"data: {{train: ., alignments: .}}\ninit: {{model: {model}}}\n")
    recipe, trained = with_initial_model(load_recipe(path))
    assert trained is not None and recipe.model.layers is not None
    assert recipe.model.summary() == ", ".join(layer.kind for layer in trained.network.layers[:-1])
    assert network_layers(recipe, trained.network.input_dim, 10)[:-1] == trained.network.layers[:-1]
    path.write_text(dump_recipe(recipe))
    assert with_initial_model(load_recipe(path))[0] == recipe
    assert "hidden_layers" not in yaml.safe_load(path.read_text())["model"]


def test_a_network_too_large_for_a_recipe(first: Job, tmp_path: Path, run_cli: RunCli) -> None:
    model = kaldi_dir(tmp_path / "kaldi", Copy(12, tuple(range(12)) * 1000), Affine(12_000, 2))
    result = train(run_cli, recipe_from(first, tmp_path, model), tmp_path / "run")
    assert_refused(result, "its layers cannot be written into recipe.yaml: more than 100000 bytes")
    assert not (tmp_path / "run").exists()
