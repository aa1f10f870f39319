"""Workers die, the launcher starts the job again, and it ends in the bits of one in which nobody died."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from distributed.mpi_worlds import need_mpi
from forked_python import forked_python
from training import deaths as deaths_module
from training.deaths import DEATHS
from training.killing import write_job

from ddnn.distributed.signals import EXIT_KILLED

WORKERS = 4 if "DDNN_TEST_EACH_DEATH" in os.environ else 3


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_mpi()
    folder = tmp_path_factory.mktemp("restarts")
    (folder / "patch").mkdir()
    (folder / "tmp").mkdir()
    shutil.copy(deaths_module.__file__, folder / "patch/sitecustomize.py")
    return write_job(folder, epochs=2)


def train(
    recipe: Path, run: Path, *deaths: tuple[int, str, int], settings: tuple[str, ...] = (), workers: int = WORKERS,
    python: str | None = None,
) -> Any:  # fmt: skip
    """`ddnn train` by workers that die like this; code, stderr."""
    words = ["train", recipe, "--run-dir", run, "--workers", workers, "--device", "cpu"]
    words += [word for setting in settings for word in ("--set", setting)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_COMM_", "PMIX_"))
    }
    environment |= {DEATHS: json.dumps(deaths), "PYTHONPATH": str(recipe.parent / "patch"), "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(recipe.parent / "tmp")
    command = [python or forked_python(), "-m", "ddnn.cli", *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)


def events(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["type"] == "event"]


def test_whoever_dies_wherever_the_bits_are_the_same(recipe: Path) -> None:
    undisturbed, run = recipe.parent / "undisturbed", recipe.parent / "run"
    more = ("schedule.epochs=4",)  # a stopped worker trains on while its stacks are read, maybe an epoch
    done = train(recipe, undisturbed, settings=more)
    assert done.returncode == 0, done.stderr
    deaths = [
        (1, "minibatch", 3),  # before there is a checkpoint
        (0, "minibatch", 35),
        (1, "exchange", 9),
        (2, "checkpoint", 2),
        (WORKERS - 1, "stop", 25),
        (0, "commit", 2),
    ]
    done = train(recipe, run, *deaths, settings=("parallel.hang_timeout=6", *more))
    assert done.returncode == 0, done.stderr
    assert (run / "final.safetensors").read_bytes() == (undisturbed / "final.safetensors").read_bytes()
    restarts = events(run)
    assert [row["event"] for row in restarts] == ["restarted"] * 6
    assert [row["number"] for row in restarts] == [1, 2, 3, 4, 5, 6]
    assert (restarts[0]["epoch"], restarts[0]["minibatch"]) == (0, 0), "from the beginning"
    assert all((row["epoch"], row["minibatch"]) > (0, 0) for row in restarts[1:])
    reasons = [row["reason"] for row in restarts]
    assert reasons[:4] + reasons[5:] == ["a worker was killed by SIGKILL"] * 5
    assert (
        f"worker {WORKERS - 1} on " in reasons[4]
        and "was stopped (SIGSTOP) for 6 s (parallel.hang_timeout)" in reasons[4]
    )
    assert done.stderr.count("; restart ") == 6
    log = (run / "train.log").read_text()
    assert log.count("resumed from checkpoint") == 5
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["num_restarts"]) == ("finished", 6)
    assert not list((recipe.parent / "tmp").glob("ddnn*")), "nothing is left in the temporary folder"


def test_a_death_after_the_warm_up_resumes_within_it(recipe: Path) -> None:
    """The rows that followed the warm-up are written once."""
    settings = ("parallel.warmup=all-reduce", "parallel.warmup_minibatches=12", "checkpoint.interval_minibatches=8")
    results = []
    for name, deaths in (("whole", ()), ("died", [(1, "minibatch", 14)])):
        run = recipe.parent / f"warm-up {name}"
        done = train(recipe, run, *deaths, settings=(*settings, "schedule.epochs=1"), workers=2)
        assert done.returncode == 0, done.stderr
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        figures = [(row["type"], row["epoch"], row["loss"]) for row in rows if row["type"] in ("warmup", "epoch")]
        results.append((figures, (run / "final.safetensors").read_bytes()))
    assert results[0] == results[1] and [figure[0] for figure in results[0][0]] == ["warmup", *["epoch"] * 3]
    assert "minibatches" in (run / "train.log").read_text() and "into the warm-up" in (run / "train.log").read_text()


@pytest.fixture(scope="module")
def undisturbed_parameters(recipe: Path) -> bytes:
    done = train(recipe, recipe.parent / "alone")
    assert done.returncode == 0, done.stderr
    return (recipe.parent / "alone/final.safetensors").read_bytes()


@pytest.mark.skipif("DDNN_TEST_EACH_DEATH" not in os.environ, reason="five minutes: make soak runs it")
@pytest.mark.parametrize("rank", range(WORKERS))
@pytest.mark.parametrize(
    ("place", "count"), [("minibatch", 35), ("exchange", 9), ("checkpoint", 2), ("commit", 2), ("stop", 25)]
)
def test_each_rank_in_each_place(
    recipe: Path, undisturbed_parameters: bytes, rank: int, place: str, count: int
) -> None:
    if place == "commit":
        rank = 0  # only it renames a checkpoint: four times the same
    run = recipe.parent / f"{place} {rank}"
    done = train(recipe, run, (rank, place, count), settings=("parallel.hang_timeout=6",))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("; restart ") == 1
    assert (run / "final.safetensors").read_bytes() == undisturbed_parameters
    shutil.rmtree(run)


def test_a_worker_that_raises_ends_the_job(recipe: Path) -> None:
    """Named with its rank, with a traceback, within ten seconds, and not started again."""
    run = recipe.parent / "raises"
    done = train(recipe, run, (2, "raise", 30))
    ended = time.time()
    assert done.returncode == 1
    assert ended - (run / "status.json").stat().st_mtime < 15
    assert "ddnn: worker 2 on" in done.stderr and "ZeroDivisionError: made up" in done.stderr
    assert "; restart " not in done.stderr
    assert not (run / "final.safetensors").exists()


def test_a_worker_that_dies_again_and_again(recipe: Path) -> None:
    run, settings = recipe.parent / "again", ("parallel.max_restarts=1",)
    done = train(recipe, run, *[(1, "minibatch", 2)] * 3, settings=settings, workers=2, python=sys.executable)
    assert done.returncode == EXIT_KILLED
    assert "not started again after 1 restart without a newer checkpoint" in done.stderr
