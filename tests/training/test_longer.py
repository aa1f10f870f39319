"""A training that has finished is made longer, to the bits of one that was so long from the start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from jobs import Job, RunCli, assert_refused, make_job
from training.test_finetuning import stop_after
from training.test_resume import rows

from ddnn.nn.acoustic_model import load_model
from ddnn.recipe.load import load_recipe
from ddnn.runs.run_status import MODEL_DIGEST, is_finished, model_digest
from ddnn.training.job import run_training

WAYS = {
    "newbob": ("optimizer.momentum=0.5", "schedule.start_halving_impr=0.3"),
    "newbob, ng-sgd": ("optimizer={name: ng-sgd, rank_in: 3, rank_out: 2}", "minibatch_size={start: 8, end: 32}"),
    "constant": ("schedule.name=constant",),
    "power": ("schedule.name=power", "init=rbm", "pretrain.epochs=[1]"),
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    made = make_job(tmp_path_factory.mktemp("longer"))
    made.recipe.write_text(made.recipe.read_text().replace("max_epochs: 1", ""))
    run_training(load_recipe(made.recipe, ["schedule.max_epochs=2"]), made.root / "two", "cpu")
    return made


@pytest.fixture
def finished(job: Job, tmp_path: Path) -> Path:
    """A training of two epochs that has finished."""
    return shutil.copytree(job.root / "two", tmp_path / "run")


def epochs(way: str, number: int) -> str:
    return f"schedule.{'max_' if way.startswith('newbob') else ''}epochs={number}"


@pytest.mark.parametrize("way", WAYS)
def test_two_epochs_and_two_more_are_four(job: Job, tmp_path: Path, run_cli: RunCli, way: str) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    run_training(load_recipe(job.recipe, [*WAYS[way], epochs(way, 4)]), whole, "cpu")
    run_training(load_recipe(job.recipe, [*WAYS[way], epochs(way, 2)]), run, "cpu")
    before = (run / "final.safetensors").read_bytes()
    assert len(list((run / "checkpoints").iterdir())) == 1, "one stays, whatever checkpoint.keep_last is"
    result = run_cli("train", run, "--resume", "--device", "cpu", "--set", epochs(way, 4))
    assert result.exit_code == 0, result.stderr
    assert before != (run / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
    last = [[row for row in rows(one) if row["type"] != "end"] for one in (run, whole)]
    assert last[0] == last[1]
    assert (run / "recipe.yaml").read_text() == (whole / "recipe.yaml").read_text()
    log = (run / "train.log").read_text()
    assert f"{epochs(way, 4).partition('=')[0]} is now 4; was 2" in log and "resumed from checkpoint" in log
    again = run_cli("train", run, "--resume", "--device", "cpu")
    assert again.exit_code == 0 and "this training has finished" in again.stdout


def test_dry_run_of_a_resume(job: Job, finished: Path, run_cli: RunCli) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    call = ("train", finished, "--resume", "--dry-run", "--device", "cpu", "--set")
    longer, same = run_cli(*call, "schedule.max_epochs=4"), run_cli(*call, "schedule.max_epochs=2")
    assert longer.exit_code == 0 and "\n  max_epochs: 4\n" in longer.stdout
    assert f"# resumes {finished} from checkpoint number 2: after epoch 2\n" in longer.stdout
    assert same.exit_code == 0 and same.stdout.startswith(f"{finished}: this training has finished")
    assert_refused(run_cli(*call, "minibatch_size=9"), "minibatch_size: 9 found, 16 expected")
    assert_refused(run_cli("train", finished, "--dry-run"), "this is a run dir, no recipe", "resume it with --resume")
    (finished / "final.safetensors").unlink()
    assert_refused(run_cli(*call, "minibatch_size=9"), "not the one that the checkpoint was made by")
    (finished / "final.safetensors").write_bytes(before[finished / "final.safetensors"])
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before, "nothing is written"


def test_one_that_is_interrupted_again(job: Job, finished: Path, run_cli: RunCli) -> None:
    """The model of before stays until there is the new one, and the training is not taken for finished."""
    before = (finished / "final.safetensors").read_bytes()
    run_training(load_recipe(job.recipe, ["schedule.max_epochs=4"]), job.root / "four", "cpu")
    assert is_finished(finished) and run_cli("status", finished).stdout.startswith(f"{finished}: finished")
    recipe = load_recipe(finished / "recipe.yaml", ["schedule.max_epochs=4"])
    stop_after(3, recipe, finished, resume=True)
    assert (finished / "final.safetensors").read_bytes() == before
    assert not is_finished(finished)
    shown = run_cli("status", finished)
    assert shown.stdout.startswith(f"{finished}: interrupted") and "3 of at most 4" in shown.stdout
    assert run_cli("evaluate", finished, "--data", job.data, "--alignments", job.ali).exit_code == 0
    assert run_cli("train", finished, "--resume", "--device", "cpu").exit_code == 0
    assert is_finished(finished)
    assert (finished / "final.safetensors").read_bytes() == (job.root / "four" / "final.safetensors").read_bytes()


def test_results_of_the_model_of_before_are_told_from_those_of_the_longer_training(
    job: Job, finished: Path, run_cli: RunCli
) -> None:
    arguments = ["evaluate", finished, "--data", job.data, "--alignments", job.ali, "--by", "utterance", "--json"]
    before = json.loads(run_cli(*arguments).stdout)
    assert before["model"] == model_digest(finished) and "model" not in next(iter(before["parts"].values()))
    (finished / "before.json").write_text(json.dumps(before))
    decode = ["decode-prep", finished, "--data", job.data, "--out", finished / "decode"]
    assert run_cli(*decode).exit_code == 0
    assert (finished / "decode" / MODEL_DIGEST).read_text() == f"{before['model']} ..\n"
    assert "before: loss per frame" in run_cli("report", finished, "--no-plots").stdout
    assert run_cli("train", finished, "--resume", "--device", "cpu", "--set", "schedule.max_epochs=4").exit_code == 0
    after = run_cli(*arguments).stdout
    assert json.loads(after)["model"] == model_digest(finished) != before["model"]
    (finished / "after.json").write_text(after)
    shown = run_cli("report", finished, "--no-plots").stdout
    assert "after: loss per frame" in shown and "before: loss" not in shown and "before: of another model than" in shown


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["schedule.max_epochs=1"], ["schedule.max_epochs: 1 found, 2 expected", "made longer, not shorter"]),
        (["schedule.max_epochs=4", "seed=2"], ["seed: 2 found, 1 expected"]),
        (["schedule.max_epochs=4", "schedule.initial_learning_rate=0.1"], ["initial_learning_rate: 0.1 found"]),
        (["schedule.max_epochs=0"], ["schedule.max_epochs: 0 found, expected a whole number >= 1"]),
    ],
)
def test_what_does_not_only_make_it_longer(
    finished: Path, run_cli: RunCli, settings: list[str], said: list[str]
) -> None:
    options = [word for setting in settings for word in ("--set", setting)]
    names = {path.name for path in finished.iterdir()}
    assert_refused(run_cli("train", finished, "--resume", *options), *said)
    assert {path.name for path in finished.iterdir()} == names and is_finished(finished)


def test_other_settings_that_a_resume_allows(finished: Path, run_cli: RunCli) -> None:
    options = ("--set", "schedule.max_epochs=3", "--set", "checkpoint.keep_last=1")
    assert run_cli("train", finished, "--resume", "--device", "cpu", *options).exit_code == 0
    assert rows(finished)[-1]["epoch"] == 3


def test_without_a_checkpoint(finished: Path, run_cli: RunCli) -> None:
    shutil.rmtree(finished / "checkpoints")
    result = run_cli("train", finished, "--resume", "--set", "schedule.max_epochs=4")
    assert_refused(result, "there is no checkpoint to continue from", f"init.model={finished}")


def test_one_that_has_converged(job: Job, tmp_path: Path, run_cli: RunCli) -> None:
    run = tmp_path / "run"
    settings = ["schedule.start_halving_impr=0.9", "schedule.end_halving_impr=0.8", "schedule.max_epochs=9"]
    run_training(load_recipe(job.recipe, settings), run, "cpu")
    assert not (run / "checkpoints").exists()
    result = run_cli("train", run, "--resume", "--set", "schedule.max_epochs=30")
    assert_refused(result, "this training has converged (improvement ", f"init.model={run}")


def test_learning_rates_that_depend_on_the_number_of_epochs(job: Job, tmp_path: Path, run_cli: RunCli) -> None:
    run = tmp_path / "run"
    run_training(load_recipe(job.recipe, ["schedule.name=exponential", "schedule.epochs=2"]), run, "cpu")
    assert not (run / "checkpoints").exists()
    result = run_cli("train", run, "--resume", "--set", "schedule.epochs=4")
    assert_refused(result, "schedule.epochs: 4 found, 2 expected", "depend on their number", "init.model")


def test_a_training_under_way_may_be_made_longer_too(job: Job, tmp_path: Path, run_cli: RunCli) -> None:
    run = tmp_path / "run"
    stop_after(1, load_recipe(job.recipe, ["schedule.max_epochs=2"]), run)
    assert run_cli("train", run, "--resume", "--device", "cpu", "--set", "schedule.max_epochs=3").exit_code == 0
    run_training(load_recipe(job.recipe, ["schedule.max_epochs=3"]), tmp_path / "whole", "cpu")
    models = [load_model(one / "final.safetensors").network.parameters for one in (run, tmp_path / "whole")]
    assert bool((models[0] == models[1]).all())
