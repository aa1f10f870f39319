"""Workers that die in the middle of a training, and the others that go on (`parallel.on_failure: continue`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from parallel.mpi_worlds import need_mpi
from train.dying import WORKERS, accuracy_of_three, rows, write_job
from train.launching import mpi_script


@pytest.fixture(autouse=True)
def with_mpi() -> None:
    need_mpi()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_job(tmp_path_factory.mktemp("job"))
    path.with_name("two.yaml").write_text(path.read_text().replace("workers: 4", "workers: 2"))
    return path


@pytest.fixture(scope="module")
def of_three(recipe: Path) -> float:
    """Frame accuracy that three workers reach from the start."""
    return accuracy_of_three(recipe)


# Each rank, in compute and in an exchange; each time another worker dies later.
DEATHS = [
    ("0:minibatch:5", "2:exchange:9"),
    ("1:exchange:3", "0:minibatch:20"),
    ("2:minibatch:13", "3:minibatch:14"),
    ("3:exchange:1", "1:bug:21"),
    ("0:exchange:7", "1:exchange:7"),
]
OVERLAPPED = {DEATHS[0], DEATHS[4]}


@pytest.mark.parametrize("deaths", DEATHS, ids="+".join)
def test_the_others_go_on(recipe: Path, of_three: float, deaths: tuple[str, ...]) -> None:
    run = recipe.parent / re.sub(r"\W", "_", "-".join(deaths))
    if deaths in OVERLAPPED:
        text, recipe = recipe.read_text(), recipe.with_name("overlap.yaml")
        recipe.write_text(text.replace("on_failure", "overlap: true, on_failure"))
    said = mpi_script("mpi_dying.py", WORKERS, recipe, run, *deaths, tolerant=True)
    assert (run / "final.safetensors").exists(), said
    lost = rows(run, "lost")
    assert sorted(row["rank"] for row in lost) == sorted(int(death[0]) for death in deaths)
    assert lost[-1]["workers"] == 2
    judged = rows(run, "cv")
    assert [row["epoch"] for row in judged] == [0, 1, 2, 3]
    assert [row["epoch"] for row in rows(run, "train")] == [1, 2, 3]
    assert len({row["frames"] for row in judged}) == 1, "all that is held out is judged, whoever has died"
    assert abs(judged[-1]["frame_accuracy"] - of_three) < 0.03
    log = (run / "train.log").read_text()
    for death in deaths:
        assert f"worker {death[0]} on " in log and "is lost" in log
    assert "finished: " in log


def test_a_mistake_of_one_ends_all(recipe: Path) -> None:
    """What the user has to mend is no death: the others do not go on as if it had not been."""
    run = recipe.parent / "mistake"
    said = mpi_script("mpi_dying.py", WORKERS, recipe, run, "2:mistake:7", tolerant=True, code=2)
    assert "error: a made-up mistake" in said and "Traceback" not in said
    assert "stopped: a made-up mistake" in (run / "train.log").read_text()
    assert not (run / "final.safetensors").exists()


def test_a_run_dir_of_others_is_not_taken_over(recipe: Path) -> None:
    """The first worker refuses it: that is a mistake, no death after which another one would take it over."""
    run = recipe.parent / "finished"
    run.mkdir()
    for name in ("final.safetensors", "recipe.yaml", "train.log", "metrics.jsonl"):
        (run / name).write_text(name)
    said = mpi_script("mpi_dying.py", 2, recipe.with_name("two.yaml"), run, tolerant=True, code=2)
    assert said.count("error: the run dir exists already and is not empty") == 1
    assert {path.name: path.read_text() for path in run.iterdir()} == {path.name: path.name for path in run.iterdir()}


def test_a_model_left_out_and_a_death(recipe: Path) -> None:
    """A worker whose model is not finite brings none into the meeting, and no sums."""
    run = recipe.parent / "left_out"
    mpi_script("mpi_dying.py", WORKERS, recipe, run, "1:nan:6", "2:exchange:3", tolerant=True)
    assert (run / "final.safetensors").exists()
    assert [row["rank"] for row in rows(run, "lost")] == [2]


def test_deaths_in_pretraining(recipe: Path) -> None:
    """The others begin the RBM anew, also without the worker that writes the run dir."""
    more = "init: rbm\npretrain: {passes: [1, 1], minibatch: 16}\n"
    with_rbms = recipe.parent / "rbms.yaml"
    with_rbms.write_text(recipe.read_text().replace("hidden_layers: 1", "hidden_layers: 2") + more)
    run = recipe.parent / "rbms"
    mpi_script("mpi_dying.py", WORKERS, with_rbms, run, "2:exchange:3", "0:exchange:24", tolerant=True)
    assert (run / "final.safetensors").exists()
    log = (run / "train.log").read_text()
    assert "rbm 1: finished before" in log and "worker 1 writes the run dir from here on" in log
    assert [row["rank"] for row in rows(run, "lost")] == [2, 0]
