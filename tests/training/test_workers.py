"""`ddnn train --workers N` as a user runs it: by itself, inside an MPI job, when something goes wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe
from distributed.mpi_worlds import all_gone, need_mpi
from forked_python import forked_python
from training.launching import mpi_script

from ddnn.distributed.mpirun import find_mpirun
from ddnn.runs.run_status import read_run_status
from ddnn.util.system import usable_cores

DDNN = [sys.executable, "-m", "ddnn.cli"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_COMM_", "PMIX_"))},
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}
FILES = {
    "recipe.yaml",
    "status.json",
    "train.log",
    "metrics.jsonl",
    "final.safetensors",
    "checkpoints",
    "report.html",
    "ali_train_pdf.counts",
    "cv_utterances",
}


@pytest.fixture(autouse=True)
def with_mpi() -> None:
    need_mpi()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def write_job(folder: Path, more: str = "", **size: int) -> Path:
    features, labels = labelled_utterances(**size)
    data = write_data_dir(folder / "data dir ü", features)
    return write_recipe(folder / "recipe.yaml", data, write_pdfs(folder / "pdfs.txt", labels), more)


def ddnn(*words: object, prefix: tuple[str, ...] = (), **more: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, forked_python(), "-m", "ddnn.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRONMENT | more, check=False)


def mpirun(workers: int) -> tuple[str, ...]:
    return (find_mpirun(os.environ), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "-n", str(workers))


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_started_by_itself_or_by_mpirun_is_the_same(recipe: Path, tmp_path: Path) -> None:
    by_itself, joined = tmp_path / "by itself", tmp_path / "joined"
    done = ddnn("train", recipe, "--run-dir", by_itself, "--workers", "3", "--set", "parallel.averaging_period=2")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in by_itself.iterdir()} == FILES
    assert done.stderr.count("finished") == 1, "one worker speaks"
    assert "3 workers" in (by_itself / "train.log").read_text()
    assert "learning rates times 3 multiply the gradient summed over 16 frames of each worker" in done.stderr
    # A row of a restart may come first: on a loaded machine mpirun sometimes loses a worker as it starts.
    start = next(row for row in rows(by_itself) if row["type"] == "start")
    workers = [row for row in rows(by_itself) if row["type"] == "worker"]
    assert (start["world_size"], start["cores_per_worker"]) == (3, pytest.approx(usable_cores() / 3))
    assert all(0.0 <= row["compute_cpu_seconds"] < 2.0 * row["seconds"] for row in workers)
    assert [row["rank"] for row in workers] == [0, 1, 2] * 3
    trained = next(row for row in rows(by_itself) if row.get("split") == "train")
    assert sum(row["frames"] for row in workers[:3]) == trained["frames"]
    done = ddnn("train", recipe, "--run-dir", joined, "--set", "parallel.averaging_period=2", prefix=mpirun(3))
    assert done.returncode == 0, done.stderr
    for name in ("final.safetensors", "recipe.yaml"):
        assert (by_itself / name).read_bytes() == (joined / name).read_bytes()


def test_one_worker_in_an_mpi_job_is_one_without(recipe: Path, tmp_path: Path) -> None:
    for name, prefix in (("alone", ()), ("job", mpirun(1))):
        done = ddnn("train", recipe, "--run-dir", tmp_path / name, prefix=prefix)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "alone/final.safetensors").read_bytes() == (tmp_path / "job/final.safetensors").read_bytes()


def test_another_number_of_workers_than_the_job_has(recipe: Path, tmp_path: Path) -> None:
    done = ddnn("train", recipe, "--run-dir", tmp_path / "run", "--workers", "3", prefix=mpirun(2))
    assert done.returncode == 2
    assert done.stderr.count("3 found, but 2 workers were started") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_too_many_workers_for_the_data(recipe: Path, tmp_path: Path) -> None:
    done = ddnn("train", recipe, "--run-dir", tmp_path / "run", "--workers", "4", "--set", "minibatch_size=300")
    assert done.returncode == 2
    assert "of the smallest of 4 shards do not fill one minibatch of 300" in done.stderr
    assert "fewer workers" in done.stderr


def test_an_existing_run_dir_is_refused_by_all(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/precious").write_text("x")
    done = ddnn("train", recipe, "--run-dir", tmp_path / "run", "--workers", "2")
    assert done.returncode == 2
    assert "exists already and is not empty" in done.stderr and "Traceback" not in done.stderr


def test_damage_in_one_shard_stops_all(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    broken = sorted(features)[3]
    features[broken][5, 1] = np.nan
    data = write_data_dir(tmp_path / "data", features)
    recipe = write_recipe(tmp_path / "recipe.yaml", data, write_pdfs(tmp_path / "pdfs.txt", labels))
    done = ddnn("train", recipe, "--run-dir", tmp_path / "run", "--workers", "3")
    assert done.returncode == 2
    assert broken in done.stderr and "Traceback" not in done.stderr
    assert "ddnn: worker " in done.stderr, "whose shard it is in"


def test_a_worker_that_raises_stops_all(tmp_path: Path) -> None:
    """A bug in the midst of one worker's training: named with rank and traceback."""
    recipe = write_job(tmp_path)
    patch = (
        "import sys\n"
        "if 'ddnn.cli' in sys.orig_argv and 'train' in sys.orig_argv:\n"
        "    import os, time\n"
        "    from ddnn.training.step import EagerStep\n"
        "    real, calls = EagerStep.__call__, []\n"
        "    def broken(*arguments):\n"
        "        calls.append(1)\n"
        "        if os.environ.get('OMPI_COMM_WORLD_RANK') == '1' and len(calls) == 12:\n"
        f"            open({str(tmp_path / 'when')!r}, 'w').write(str(time.time()))\n"
        "            raise ZeroDivisionError('made up')\n"
        "        return real(*arguments)\n"
        "    EagerStep.__call__ = broken\n"
    )
    (tmp_path / "patch").mkdir()
    (tmp_path / "patch/sitecustomize.py").write_text(patch)
    paths = os.pathsep.join([str(tmp_path / "patch"), os.environ.get("PYTHONPATH", "")])
    done = ddnn("train", recipe, "--run-dir", tmp_path / "run", "--workers", "3", PYTHONPATH=paths)
    seconds = time.time() - float((tmp_path / "when").read_text())
    assert done.returncode == 1
    assert seconds < 300, "the others would have waited for ever"
    assert "ddnn: worker 1 on" in done.stderr and "ZeroDivisionError: made up" in done.stderr
    assert ", in broken" in done.stderr
    assert not (tmp_path / "run/final.safetensors").exists()
    status = read_run_status(tmp_path / "run")
    assert status is not None and status.error is not None, "rank 0 was ended before it could say why"
    assert status.state == "failed" and "ZeroDivisionError: made up" in status.error.message


def test_when_no_model_is_finite_the_last_good_one_is_named(recipe: Path, tmp_path: Path) -> None:
    """The rate rises without end: an epoch is saved before every worker's model is lost."""
    settings = [
        "schedule={name: exponential, initial_learning_rate: 1e-3, final_learning_rate: null, epochs: 3}",
        "schedule.max_epochs=null",
        "data.normalize=false",
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'ddnn.cli' in sys.orig_argv and 'train' in sys.orig_argv:\n"
        "    import ddnn.optim.schedule as schedule\n"
        "    real = schedule.Exponential.step\n"
        "    def step(self, figures):\n"
        "        accepted = real(self, figures)\n"
        "        self.learning_rate = 1e38\n"
        "        return accepted\n"
        "    schedule.Exponential.step = step\n"
    )
    paths = os.pathsep.join([str(patch), os.environ.get("PYTHONPATH", "")])
    run = tmp_path / "run"
    done = ddnn("train", recipe, "--run-dir", run, "--workers", "2", *words, PYTHONPATH=paths)
    assert done.returncode == 3
    assert f"the last good model is {run / 'best.safetensors'}" in done.stderr
    assert (run / "best.safetensors").exists()
    assert "diverged: " in (run / "train.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_leaves_a_checkpoint_and_no_process(tmp_path: Path, number: signal.Signals) -> None:
    recipe, run = write_job(tmp_path, "", count=200), tmp_path / "run"
    command = [*DDNN, "train", recipe, "--run-dir", run, "--workers", "2", "--set", "schedule.max_epochs=5000"]
    command += ["--set", "schedule.min_epochs=5000"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)
    deadline = time.monotonic() + 600
    while not (run / "best.safetensors").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(process.pid)
    assert len(family) >= 3, "mpirun and two workers"
    process.send_signal(number)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75
    assert "resume with: ddnn train" in errors
    status = json.loads((run / "status.json").read_text())
    assert status["error"]["message"].startswith(f"stopped on {number.name}; resume") and "SIGUSR1" not in errors
    assert any((run / "checkpoints").glob("0*"))
    assert all_gone(family, 60)


def descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [each for child in children for each in descendants(child)]


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_one_process_group_serves_all_that_a_job_trains(tmp_path: Path) -> None:
    """Two RBMs and the network, each with an averager of its own; the group is closed at the end."""
    recipe = write_job(tmp_path, "init: rbm\npretrain: {epochs: [1], minibatch_size: 20}\n")
    said = mpi_script("mpi_group.py", 2, recipe, tmp_path / "run", "parallel.pretrain_data=sharded")
    assert "opened [2, 2]\n" in said
    assert (tmp_path / "run/final.safetensors").exists()


def test_a_replicated_pretraining_is_stopped_at_once(tmp_path: Path) -> None:
    """All workers end together, once rank 0 has written its checkpoint; they wait without a core meanwhile."""
    recipe, run = write_job(tmp_path, "init: rbm\npretrain: {epochs: [100000], minibatch_size: 20}\n"), tmp_path / "run"
    command = [*DDNN, "train", str(recipe), "--run-dir", str(run), "--workers", "2"]
    command += ["--set", "parallel.pretrain_data=replicated"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, start_new_session=True)
    deadline = time.monotonic() + 600
    while not any((run / "pretrain/checkpoints").glob("0*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    family = descendants(process.pid)
    before = [cpu_seconds(pid) for pid in family]
    training = 0.0
    while training < 0.5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
        *_, waiting, training = sorted(cpu_seconds(pid) - started for pid, started in zip(family, before, strict=True))
    assert waiting < 0.2, "a worker that waits has used a core"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75
    assert "ddnn: SIGTERM: writing a checkpoint" in errors and "resume with: ddnn train" in errors
    assert "MPI" not in errors and "prterun" not in errors, "rank 0 has given up waiting for the others"
    assert read_run_status(run).state == "interrupted"


def test_pretraining_sharded_or_replicated(tmp_path: Path) -> None:
    """Replicated RBMs are one worker's to the same bits; sharded ones learn too, and are one model."""
    recipe = write_job(tmp_path, "init: rbm\npretrain: {epochs: [6], minibatch_size: 20}\n")
    stacks, errors, quiet = {}, {}, ("--quiet", "--set", "log.interval_minutes=1e-9")
    for name, words in (
        ("alone", ("--workers", "1")),
        ("replicated", ("--workers", "3", "--set", "parallel.pretrain_data=replicated")),
        ("sharded", ("--workers", "3", "--set", "parallel.averaging_period=2", *quiet)),
    ):
        done = ddnn("train", recipe, "--run-dir", tmp_path / name, *words)
        assert done.returncode == 0, done.stderr
        log = (tmp_path / name / "train.log").read_text()
        assert (name == "sharded") is (done.stderr == "") is (" % done, " in log)
        stacks[name] = (tmp_path / name / "pretrain/dbn.safetensors").read_bytes()
        errors[name] = [row["reconstruction_error"] for row in rows(tmp_path / name / "pretrain")]
        assert {row["frames"] for row in rows(tmp_path / name / "pretrain")} <= {480, 420, 440, 460}
    assert re.search(r"rbm 1 epoch 1 of \d+: \d+ % done, .* frames/s, about \d+ s left, reconstruction error \d", log)
    assert re.search(r"epoch 1: \d+ % done, .* left, loss .*, frame accuracy .* % \(worker 0\)", log)
    assert stacks["alone"] == stacks["replicated"]
    assert stacks["alone"] != stacks["sharded"]
    assert errors["sharded"][-1] < 0.9 * errors["sharded"][0]


def test_sharded_pretraining_goes_on_where_it_was_broken_off(tmp_path: Path) -> None:
    recipe = write_job(tmp_path, "init: rbm\npretrain: {epochs: [2], minibatch_size: 20}\n")
    recipe.write_text(recipe.read_text().replace("hidden_layers: 1", "hidden_layers: 2"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for run in (whole, broken):
        done = ddnn("pretrain", recipe, "--run-dir", run, "--workers", "2")
        assert done.returncode == 0, done.stderr
        if run == whole:
            broken.mkdir()
            for name in ("recipe.yaml", "rbm1.safetensors", "metrics.jsonl"):
                (broken / name).write_bytes((whole / name).read_bytes())
    for name in ("rbm1.safetensors", "rbm2.safetensors", "dbn.safetensors"):
        assert (whole / name).read_bytes() == (broken / name).read_bytes()
    assert "rbm 1: finished before" in done.stderr
