"""Pretraining: the stack, going on where it was broken off, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe

from ddnn.errors import DataError, UserError
from ddnn.model.acoustic import load_model
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Pretrain
from ddnn.train import pretrain as pretraining
from ddnn.train.command import run_pretraining, run_training
from ddnn.train.nnet1_command import export_nnet1
from ddnn.train.run_dir import load_run

RBM = "init: rbm\npretrain: {passes: [3, 2], minibatch: 20}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    features, labels = labelled_utterances()
    data = write_data_dir(tmp_path / "data", features)
    path = write_recipe(tmp_path / "recipe.yaml", data, write_pdfs(tmp_path / "pdfs.txt", labels), RBM)
    path.write_text(path.read_text().replace("hidden_layers: 1", "hidden_layers: 3"))
    return path


def test_a_stack_on_the_reconstruction_record(recipe: Path, tmp_path: Path) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    lines = [json.loads(line) for line in (tmp_path / "rbm/metrics.jsonl").read_text().splitlines()]
    assert [(m["layer"], m["pass"]) for m in lines] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert lines[2]["reconstruction_error"] < lines[0]["reconstruction_error"]
    average = sum(m["reconstruction_error"] for m in lines[:3]) / 3
    assert lines[2]["reconstruction_error_all_passes"] == pytest.approx(average)
    assert all(m["frames"] == 480 for m in lines), "all utterances, those held out for cross-validation too"
    stack = load_model(tmp_path / "rbm" / pretraining.STACK)
    assert [(layer.inputs, layer.outputs) for layer in stack.network.layers] == [(12, 8), (8, 8), (8, 8)]


def test_a_broken_off_run_ends_in_the_same_bits(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "whole", "cpu")
    step, calls = pretraining.cd1_step, 0

    def breaks_off(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 100:  # in the second pass of the second layer
            raise KeyboardInterrupt
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "cd1_step", breaks_off)
    with pytest.raises(KeyboardInterrupt):
        run_pretraining(load_recipe(recipe), tmp_path / "broken", "cpu")
    monkeypatch.setattr(pretraining, "cd1_step", step)
    with (tmp_path / "broken/metrics.jsonl").open("a") as metrics:
        metrics.write('{"layer": 2, "pa')  # as a power failure may leave it
    assert sorted(p.name for p in (tmp_path / "broken").glob("*.safetensors")) == ["rbm1.safetensors"]
    first = (tmp_path / "broken/rbm1.safetensors").stat().st_mtime_ns
    run_pretraining(load_recipe(recipe), tmp_path / "broken", "cpu")
    assert (tmp_path / "broken/rbm1.safetensors").stat().st_mtime_ns == first, "a finished layer is not trained again"
    for name in ("rbm1.safetensors", "rbm2.safetensors", "rbm3.safetensors", pretraining.STACK):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "broken/metrics.jsonl").read_text().splitlines()]
    assert [(m["layer"], m["pass"]) for m in lines] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)]


def test_training_makes_its_stack_or_takes_one(recipe: Path, tmp_path: Path) -> None:
    run_training(load_recipe(recipe), tmp_path / "made", "cpu")
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    taking = [f"pretrain={{from: '{tmp_path / 'rbm'}', passes: null, minibatch: null}}"]
    run_training(load_recipe(recipe, taking), tmp_path / "taken", "cpu")
    made, taken = load_run(tmp_path / "made"), load_run(tmp_path / "taken")
    assert torch.equal(made.network.parameters, taken.network.parameters)
    assert torch.equal(made.transform.shift, taken.transform.shift)  # type: ignore[arg-type]


def test_training_starts_from_the_stack(recipe: Path, tmp_path: Path) -> None:
    run_training(load_recipe(recipe, ["schedule.initial=1e-30"]), tmp_path / "run", "cpu")
    stack = load_model(tmp_path / "run/pretrain" / pretraining.STACK)
    found = load_run(tmp_path / "run").network
    assert torch.equal(found.parameters[: stack.network.parameters.numel()], stack.network.parameters)
    assert not found.biases[-1].any()
    assert found.layers[-1].bias_rate == 1.0, "as in Kaldi's network of AN4 from RBMs"


def test_a_kaldi_dbn_is_taken(recipe: Path, tmp_path: Path) -> None:
    """What nnet1's pretrain_dbn.sh leaves: affine and sigmoid components, and a feature transform beside them."""
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    (tmp_path / "run").mkdir()
    (tmp_path / "rbm" / pretraining.STACK).rename(tmp_path / "run/final.safetensors")
    export_nnet1(tmp_path / "run", tmp_path / "kaldi")
    pair = f"from: '{tmp_path / 'kaldi/final.nnet'}', feature_transform: '{tmp_path / 'kaldi/feature_transform.nnet'}'"
    taking = [f"pretrain={{{pair}, passes: null, minibatch: null}}", "schedule.initial=1e-30"]
    run_training(load_recipe(recipe, taking), tmp_path / "taken", "cpu")
    stack = load_model(tmp_path / "run/final.safetensors")
    found = load_run(tmp_path / "taken")
    assert torch.equal(found.network.parameters[: stack.network.parameters.numel()], stack.network.parameters)
    assert torch.equal(found.transform.scale, stack.transform.scale)  # type: ignore[arg-type]


def test_a_stack_of_another_shape_is_refused(recipe: Path, tmp_path: Path) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    taking = [f"pretrain={{from: '{tmp_path / 'rbm'}', passes: null, minibatch: null}}", "model.hidden_units=9"]
    with pytest.raises(DataError, match="the stack was trained with 8 sigmoid, 8 sigmoid, 8 sigmoid, the recipe has 9"):
        run_training(load_recipe(recipe, taking), tmp_path / "run", "cpu")
    (tmp_path / "rbm" / pretraining.STACK).unlink()
    with pytest.raises(DataError, match="no pretraining has finished here"):
        run_training(load_recipe(recipe, taking), tmp_path / "run", "cpu")


def test_a_directory_of_another_recipe_is_not_touched(recipe: Path, tmp_path: Path) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    with pytest.raises(UserError, match="holds no pretraining by the same data, model, pretrain and seed"):
        run_pretraining(load_recipe(recipe, ["seed=9"]), tmp_path / "rbm", "cpu")


def test_nothing_to_pretrain(recipe: Path, tmp_path: Path) -> None:
    random = ["init=random", "pretrain={passes: null, minibatch: null}"]
    with pytest.raises(UserError, match="nothing to pretrain"):
        run_pretraining(load_recipe(recipe, random), tmp_path / "rbm", "cpu")


def test_hours_become_passes() -> None:
    three_hundred_hours = 300 * pretraining.FRAMES_PER_HOUR
    for hours in (300, 100):
        passes = [pretraining.passes_of_layer(Pretrain(hours=hours), k, three_hundred_hours) for k in range(3)]
        assert passes == [2, 1, 1], "the Gauss RBM twice as many"
    assert pretraining.passes_of_layer(Pretrain(hours=100), 0, pretraining.FRAMES_PER_HOUR) == 200
    assert [pretraining.passes_of_layer(Pretrain(passes=[10, 5]), k, 1) for k in range(4)] == [10, 5, 5, 5]


def test_kaldis_own_dbn_of_an4_is_taken(an4: Path) -> None:
    kaldi = an4 / "kaldi_nnet1"
    dbn, transform = kaldi / "rbm_4.dbn", kaldi / "feature_transform.nnet"
    taking = [
        "init=rbm", f"pretrain={{from: '{dbn}', feature_transform: '{transform}'}}",
        "model={hidden_layers: 4, hidden_units: 512}",
        f"data={{train: '{an4 / 'train'}', alignments: '{an4 / 'ali'}'}}",
    ]  # fmt: skip
    recipe = load_recipe(Path(__file__).parents[2] / "configs/schedule/newbob.yaml", taking)
    stack = pretraining.load_stack(recipe, kaldi / "rbm_4.dbn")
    assert [(layer.inputs, layer.outputs) for layer in stack.network.layers] == [(440, 512)] + [(512, 512)] * 3
    assert stack.transform.offsets == tuple(range(-5, 6))
    with pytest.raises(DataError, match="features have 39 dims, the model was trained on 40"):
        stack.check_features(39, kaldi)


def test_layers_of_other_features_are_refused(recipe: Path, tmp_path: Path) -> None:
    """The data dir was made anew with other dims after pretraining had been broken off."""
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    features, _ = labelled_utterances()
    write_data_dir(tmp_path / "data", {name: np.tile(matrix, 2) for name, matrix in features.items()})
    with pytest.raises(DataError, match="features have 8 dims, the model was trained on 4"):
        run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.splice=0", "set data.splice"),
        ("data.cmvn=mean", "set data.cmvn and data.deltas"),
        ("data.normalise=false", "set data.normalise"),
    ],
)
def test_a_stack_behind_another_front_end_is_refused(recipe: Path, tmp_path: Path, setting: str, said: str) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    taking = [f"pretrain={{from: '{tmp_path / 'rbm'}', passes: null, minibatch: null}}", setting]
    with pytest.raises(DataError, match="the stack was trained with") as caught:
        run_training(load_recipe(recipe, taking), tmp_path / "run", "cpu")
    assert said in str(caught.value)


def test_a_bernoulli_rbm_that_explodes_is_said_and_not_saved(recipe: Path, tmp_path: Path) -> None:
    exploding = ["pretrain={passes: [1, 40], minibatch: 5, rate: 1e38}"]
    with pytest.raises(UserError, match="reconstruction error of RBM 2 is nan") as caught:
        run_pretraining(load_recipe(recipe, exploding), tmp_path / "rbm", "cpu")
    assert "lower pretrain.rate" in str(caught.value)
    assert not (tmp_path / "rbm/rbm2.safetensors").exists()


def test_pretraining_goes_on_under_another_schedule(recipe: Path, tmp_path: Path) -> None:
    """Only what pretraining reads must be the same."""
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    (tmp_path / "rbm" / pretraining.STACK).unlink()
    run_pretraining(load_recipe(recipe, ["schedule.initial=0.1", "minibatch=8"]), tmp_path / "rbm", "cpu")
    assert (tmp_path / "rbm" / pretraining.STACK).exists()


def test_a_minibatch_of_pretraining_larger_than_the_data(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="480 frames do not fill one minibatch of 1000") as caught:
        run_pretraining(load_recipe(recipe, ["pretrain.minibatch=1000"]), tmp_path / "rbm", "cpu")
    assert caught.value.where == "pretrain.minibatch"
