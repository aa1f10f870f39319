"""`ddnn train` in bf16: what its log says, what it leaves behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from jobs import RunCli

from ddnn.recipe.load import load_recipe
from ddnn.training.job import run_training
from ddnn.training.metrics import read_metrics
from ddnn.training.run_dir import load_run


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
    assert found["bf16"][0] == found["float32"][0], "cross-validation is in float32, and so is the start"
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
    assert json.loads(run_cli("status", run, "--json").stdout)["precision"] == chosen
    assert json.loads(run_cli("report", run, "--json", "--no-plots").stdout)["runs"][0]["start"]["precision"] == chosen


def test_tf32_is_for_gpus(recipe: Path, tmp_path: Path) -> None:
    run_training(load_recipe(recipe, ("allow_tf32=true", "schedule.max_epochs=1")), tmp_path / "run", "cpu")
    assert "tf32 does nothing here" in (tmp_path / "run/train.log").read_text()
    assert not torch.backends.cuda.matmul.allow_tf32
