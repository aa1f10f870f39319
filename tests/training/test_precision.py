"""`ddnn train` in bf16: what its log says, what it leaves behind."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from jobs import RunCli
from training.toy import Recorder, toy_trainer, train_to_end, with_combination
from variants import make_parallel_config

from ddnn.bench.task import Shape, random_task
from ddnn.distributed.communicator import SingleProcess
from ddnn.nn.arithmetic import make_arithmetic
from ddnn.nn.elementwise import Dropout, Shift
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, Workspace, evaluation_workspace
from ddnn.recipe.load import load_recipe
from ddnn.runs.metrics import read_metrics
from ddnn.runs.run_dir import load_run
from ddnn.training.evaluation import EvalResult, evaluate
from ddnn.training.job import run_training
from ddnn.training.step import EagerStep
from ddnn.training.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    features, labels = labelled_utterances()
    data = write_data_dir(tmp_path / "data", features)
    return write_recipe(tmp_path / "recipe.yaml", data, write_pdfs(tmp_path / "pdfs.txt", labels))


def losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row.get("split") == "cv"]


@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
def test_a_training_in_bf16_ends_near_that_in_float32(recipe: Path, tmp_path: Path, optimizer: str) -> None:
    found = {}
    for precision in ("float32", "bf16"):
        settings = (f"precision={precision}", f"optimizer.name={optimizer}")
        run_training(load_recipe(recipe, settings), tmp_path / precision, "cpu")
        found[precision] = losses(tmp_path / precision)
    assert found["bf16"][0] == pytest.approx(found["float32"][0], rel=1e-3), "the same initial network"
    assert found["bf16"][-1] < 0.6 * found["bf16"][0]
    assert found["bf16"] == pytest.approx(found["float32"], rel=0.05, abs=0.02)
    assert found["bf16"] != found["float32"]
    assert "precision bf16, as the recipe says" in (tmp_path / "bf16/train.log").read_text()
    assert "precision float32, as the recipe says" in (tmp_path / "float32/train.log").read_text()
    assert load_run(tmp_path / "bf16").network.parameters.dtype == torch.float32


def test_auto_trains_a_small_network_in_float32_to_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    for precision in ("auto", "float32"):
        run_training(load_recipe(recipe, (f"precision={precision}",)), tmp_path / precision, "cpu")
    assert "too small for bf16 to matter" in (tmp_path / "auto/train.log").read_text()
    assert losses(tmp_path / "auto") == losses(tmp_path / "float32")


@pytest.mark.parametrize(("facts", "chosen"), [((True, "it has AMX"), "bf16"), ((False, "it is old"), "float32")])
def test_what_auto_has_chosen_is_recorded_and_shown(
    facts: tuple[bool, str], chosen: str, recipe: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddnn.nn.precision.MIN_FLOP", 0)
    monkeypatch.setattr("ddnn.nn.precision.bf16_is_fast", lambda device: facts)
    run = tmp_path / "run"
    run_training(load_recipe(recipe), run, "cpu")
    assert f"INFO precision {chosen}: {facts[1]}\n" in (run / "train.log").read_text()
    assert load_recipe(run / "recipe.yaml").precision == chosen
    assert [start.precision for start in read_metrics(run / "metrics.jsonl").starts] == [chosen]
    for command, options in (("status", ()), ("info", ()), ("report", ("--no-plots",))):
        shown = run_cli(command, run, *options)
        assert re.search(rf"(?m)^ *precision +{chosen}( on .*)?$", shown.stdout), command
    for path, found in ((run / "metrics.jsonl", chosen), (run / "recipe.yaml", chosen), (recipe, "auto")):
        assert json.loads(run_cli("info", path, "--json").stdout)["precision"] == found
    assert json.loads(run_cli("status", run, "--json").stdout)["start"]["precision"] == chosen
    assert json.loads(run_cli("report", run, "--json", "--no-plots").stdout)["runs"][0]["start"]["precision"] == chosen


def test_tf32_is_for_gpus(recipe: Path, tmp_path: Path) -> None:
    run_training(load_recipe(recipe, ("allow_tf32=true", "schedule.max_epochs=1")), tmp_path / "run", "cpu")
    assert "tf32 does nothing here" in (tmp_path / "run/train.log").read_text()
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "shape", [Shape(2, 128, 616, 64), Shape(3, 64, 3000, 64), Shape(1, 32, 200, 64, convolutional=True)]
)
def test_cross_validation_in_bf16_differs_by_less_than_a_thousandth(shape: Shape, compiled: bool) -> None:
    """Three blocks, the last of them short."""
    task = random_task(shape, CPU, frames=2600)
    wide = evaluate(task.model, task.train)
    low = evaluate(task.model, task.train, None, make_arithmetic("bf16", CPU, use_kernels=compiled))
    assert (wide.precision, low.precision) == ("float32", "bf16")
    assert wide.frames == low.frames == len(task.train)
    assert low.loss != wide.loss and low.loss == pytest.approx(wide.loss, rel=1e-3)
    assert low.figures["frame_accuracy"] == pytest.approx(wide.figures["frame_accuracy"], abs=0.01)


@pytest.mark.parametrize("compiled", [True, False])
def test_the_output_layer_is_evaluated_in_float32(compiled: bool) -> None:
    """In bf16 logits of 30 would be rounded by up to 0.06. Also with a layer that has no product behind it."""
    arithmetic = make_arithmetic("bf16", CPU, use_kernels=compiled)
    network = random_task(Shape(2, 64, 40, 64), CPU, frames=100).model.network
    weight, shift = network.views[-1]["weight"].mul_(10.0), torch.linspace(-1.0, 1.0, 40)
    network.parameters_changed()
    shifted = Network((*network.layers, Shift(40)), torch.cat([network.parameters, shift]))
    for one, added in ((network, torch.zeros(40)), (shifted, shift)):
        workspace = evaluation_workspace(one, 50, arithmetic).of(30)
        workspace.x.copy_(torch.randn(30, 440, generator=torch.Generator().manual_seed(1)))
        found, hidden = workspace.forward(), workspace.activations[-1]
        assert (found.dtype, hidden.dtype) == (torch.float32, torch.bfloat16) and float(found.abs().max()) > 30
        expected = hidden.double() @ weight.double().t() + (network.views[-1]["bias"] + added).double()
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-4)
    single = Network(mlp_layers(8, 0, 0, 5))
    assert evaluation_workspace(single, 9, arithmetic).arithmetic.precision == "float32"


def in_bf16(trainer: Trainer) -> Trainer:
    network = trainer.model.network
    workspace = Workspace(network, trainer.minibatch_sizes.end, make_arithmetic("bf16", CPU))
    trainer.eager_step = trainer.step = EagerStep(workspace, trainer.optimizer)
    trainer.validation = replace(trainer.validation, arithmetic=workspace.arithmetic)
    return trainer


def test_a_training_and_all_that_it_compares_are_in_one_precision() -> None:
    """Epochs, and the means that may be the final model; none of it is in float32."""
    trainer = in_bf16(toy_trainer(SingleProcess(), make_parallel_config(), epochs=4, learning_rate=0.3, run=Recorder()))
    results = list[tuple[float, float]]()
    validate = trainer.validate

    def both() -> EvalResult:
        result = validate()
        results.append((result.loss, evaluate(trainer.model, trainer.validation.frames).loss))
        assert result == evaluate(trainer.model, trainer.validation.frames, None, trainer.arithmetic)
        return result

    trainer.validate = both  # type: ignore[method-assign]
    rows = train_to_end(with_combination(trainer))
    epochs, end = [row for row in rows if row["type"] == "epoch"], trainer.end_row()
    assert trainer.precision == end.precision == "bf16" and {row["precision"] for row in epochs} == {"bf16"}
    assert [row["loss"] for row in epochs if row["split"] == "cv"] == [low for low, _ in results[:5]]
    assert len(results) == 5 + 3, "the means of two and three epochs, and a moving one"
    assert end.loss == min(low for low, _ in results[4:]) and end.kept["loss"] == results[4][0]
    assert all(low != wide for low, wide in results)
    assert f"{end.loss:.4f} (bf16)" in end.summary


def test_layers_that_draw_are_as_outside_training_in_bf16_too() -> None:
    task = random_task(Shape(1, 32, 20, 64), CPU, frames=500)
    layers = task.model.network.layers
    noisy = Network((layers[0], Dropout(32, 0.5), layers[1]), task.model.network.parameters)
    found = [
        evaluate(replace(task.model, network=network), task.train, None, make_arithmetic("bf16", CPU))
        for network in (task.model.network, noisy)
    ]
    assert found[0] == found[1]


def test_log_and_evaluate_say_the_precision(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """Cross-validation is in the training's, `ddnn evaluate` in float32."""
    said = {}
    for precision in ("float32", "bf16"):
        run = tmp_path / precision
        run_training(load_recipe(recipe, (f"precision={precision}", "schedule.max_epochs=2")), run, "cpu")
        log = (run / "train.log").read_text()
        assert log.count(" frames/s  bf16\n") == 5 * (precision == "bf16") and log.count(" frames/s") == 5
        assert log.count(" (bf16), frame accuracy") == (precision == "bf16")
        data = (
            "evaluate",
            run,
            "--data",
            tmp_path / "data",
            "--alignments",
            tmp_path / "pdfs.txt",
            "--by",
            "utterance",
        )
        lines = run_cli(*data).stdout.splitlines()
        assert lines[0].endswith("480 frames, float32") and not any("float32" in line for line in lines[1:])
        said[precision] = json.loads(run_cli(*data, "--json").stdout)
        assert said[precision]["precision"] == "float32"
        assert not any("precision" in part for part in said[precision]["parts"].values())
    assert said["bf16"]["loss"] == pytest.approx(said["float32"]["loss"], rel=0.05)
