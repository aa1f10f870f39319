"""`ddnn train --slurm` with a made-up sbatch and squeue: what is written, what is handed on, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, assert_refused, make_job

from ddnn.recipe.load import load_recipe
from ddnn.training.run_dir import RunDir

RunCli = Callable[..., Any]
HOSTILE = "r ü $HOME`id` 'x\" %j #z;&"


class Slurm:
    """Programs of Slurm that do as they are told, and note how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.answer("sbatch", "4711\n")
        self.answer("squeue", "4711|PENDING\n")

    def answer(self, program: str, stdout: str = "", stderr: str = "", code: int = 0) -> None:
        path = self.folder / program
        path.write_text(
            f"#!{sys.executable}\nimport json, os, sys\n"
            f"json.dump([sys.argv[1:], dict(os.environ)], open({str(path) + '.called'!r}, 'w'))\n"
            f"sys.stdout.write({stdout!r}); sys.stderr.write({stderr!r}); sys.exit({code})\n"
        )
        path.chmod(0o755)

    def called(self, program: str) -> tuple[list[str], dict[str, str]]:
        arguments, environment = json.loads((self.folder / f"{program}.called").read_text())
        return arguments, environment


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(made.folder))
    return made


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path / "job")


def test_submits(slurm: Slurm, job: Job, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    run = job.root / HOSTILE
    for name in ("PMIX_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "SLURM_MEM_PER_CPU"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/x.conf")
    monkeypatch.setenv("OMPI_MCA_coll", "basic")
    result = run_cli(
        "train", job.recipe, "--run-dir", run, "--set", "seed=5", "--slurm", "--nodes", 2, "--workers-per-node", 3,
        "--partition", "p1", "--time", "2:00:00", "--account", "acc", "--job-name", "mine",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("job 4711: 6 workers on 2 nodes, CPU cores\n")
    assert str(run / "train.log") in result.stdout and "ddnn status --follow" in result.stdout
    assert {path.name for path in run.iterdir()} == {"recipe.yaml", "job.sh", "job.json"}
    arguments, environment = slurm.called("sbatch")
    assert arguments[0] == "--parsable" and arguments[-1] == str(run / "job.sh")
    for said in ("--partition=p1", "--time=2:00:00", "--account=acc", "--job-name=mine", "--ntasks-per-node=3"):
        assert said in arguments, "on the command line too, where it wins over SBATCH_* variables"
    assert (environment["SLURM_CONF"], environment["OMPI_MCA_coll"]) == ("/etc/x.conf", "basic")
    assert not {"PMIX_RANK", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "SLURM_MEM_PER_CPU"} & set(environment)
    recipe = load_recipe(run / "recipe.yaml")
    assert (recipe.seed, recipe.parallel.workers) == (5, 6), "the job trains by what was resolved now"
    RunDir(run)  # the job finds the run dir as a training wants it
    assert json.loads((run / "job.json").read_text())["number"] == "4711"


def test_the_job_trains_where_it_was_submitted(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    """The training that the script starts, without Slurm: it takes the run dir with the job's files in it."""
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--slurm").exit_code == 0
    before = (job.run / "recipe.yaml").read_text()
    (job.run / "job.out").write_text("from Slurm\n")
    assert run_cli("train", job.run / "recipe.yaml", "--run-dir", job.run, "--workers", 1).exit_code == 0
    assert (job.run / "recipe.yaml").read_text() == before.replace("precision: auto", "precision: float32")
    assert (job.run / "final.safetensors").exists() and (job.run / "job.out").read_text() == "from Slurm\n"
    refused = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert refused.exit_code == 2 and "PENDING" in refused.stderr
    slurm.answer("squeue", "", "slurm_load_jobs error: Invalid job id specified\n", 1)
    refused = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert refused.exit_code == 2 and "exists already and is not empty" in refused.stderr


def test_goes_on_in_a_run_dir(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    """What was begun without Slurm, here; of the recipe is said at once what the job would say hours later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "save_best", lambda self, model: os.kill(os.getpid(), signal.SIGUSR1))
        stopped = run_cli(
            "train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "schedule.max_epochs=3"
        )
    assert stopped.exit_code == 75, stopped.stderr
    (job.run / "job.out").write_text("of an earlier job\n")
    before = {path.name: path.read_bytes() for path in job.run.iterdir() if path.is_file()}

    changed = run_cli("train", job.run, "--resume", "--slurm", "--set", "seed=77")
    assert changed.exit_code == 2 and "seed: 77 found, 1 expected" in changed.stderr
    anew = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert anew.exit_code == 2 and "--resume" in anew.stderr
    assert {path.name: path.read_bytes() for path in job.run.iterdir() if path.is_file()} == before

    result = run_cli("train", job.run, "--resume", "--slurm", "--workers-per-node", 2)
    assert result.exit_code == 0, result.stderr
    assert f"{job.run / 'recipe.yaml'} --run-dir {job.run} --workers 2" in (job.run / "job.sh").read_text()
    for name in ("job.out", "train.log", "metrics.jsonl"):
        assert (job.run / name).read_bytes() == before[name], name

    (job.run / "job.json").unlink()
    assert run_cli("train", job.run, "--resume", "--workers", 1, "--device", "cpu").exit_code == 0
    result = run_cli("train", job.run, "--resume", "--slurm")
    assert result.exit_code == 2 and "this training has finished" in result.stderr


def test_resume_of_nothing_begins(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    refused = run_cli("train", job.recipe, "--run-dir", job.run, "--resume", "--slurm")
    assert_refused(refused, "no such run dir: nothing to resume")
    assert not job.run.exists() and not (slurm.folder / "sbatch.called").exists()
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--resume=auto", "--slurm").exit_code == 0
    assert " --resume=auto) &" in (job.run / "job.sh").read_text()


def test_dry_run_prints_and_leaves_nothing(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm", "--dry-run", "--cluster", "gpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("#!/bin/bash\n") and "--gres=gpu:4" in result.stdout
    assert "--workers 4 --device cuda" in result.stdout
    assert not job.run.exists() and not (slurm.folder / "sbatch.called").exists()


def test_the_command_line_wins_over_the_cluster(slurm: Slurm, job: Job, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("partition: slow\nnodes: 9\ngpus_per_node: 4\nlauncher: srun\nqos: low\n")
    result = run_cli(
        "train", job.recipe, "--slurm", "--dry-run", "--cluster", tmp_path / "c.yaml", "--partition", "fast",
        "--gpus-per-node", 0, "--workers", 2, "--launcher", "mpirun",
    )  # fmt: skip
    for said in ("--partition=fast", "--qos=low", "--nodes=1", "--ntasks-per-node=2", "--device cpu"):
        assert said in result.stdout, result.stderr
    assert "gres" not in result.stdout and "srun" not in result.stdout


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--nodes", "2"], "--nodes without --slurm"),
        (["--slurm", "--time", "7h"], "no time as Slurm writes it"),
        (["--slurm", "--time", "2:00"], "the checkpoint 120 s before the end"),
        (["--slurm", "--nodes", "0"], "greater than or equal to 1"),
        (["--slurm", "--partition", "a\n#SBATCH --x"], "location: --partition"),
        (["--slurm", "--job-name", "a b"], "location: --job-name"),
        (["--slurm", "--cluster", "nope"], "there are cpu, gpu"),
        (["--slurm", "--workers", "3", "--nodes", "2"], "cannot be spread evenly"),
        (["--slurm", "--set", "minibtach=2"], "did you mean minibatch"),
        (["--slurm", "--run-dir", "a\\b"], "Slurm cannot have"),
    ],
)
def test_mistakes(slurm: Slurm, job: Job, run_cli: RunCli, options: list[str], said: str) -> None:
    result = run_cli("train", job.recipe, *(["--run-dir", job.run] if "--run-dir" not in options else []), *options)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert not job.run.exists() and not (slurm.folder / "sbatch.called").exists()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (("", "sbatch: error: invalid partition specified: x\n", 1), "with 1: sbatch: error: invalid partition"),
        (("Submitted batch job 7\n", "", 0), "with 0: Submitted batch job 7"),
        (("", "", 3), "it printed nothing"),
    ],
)
def test_sbatch_refuses(slurm: Slurm, job: Job, run_cli: RunCli, answer: tuple[str, str, int], said: str) -> None:
    slurm.answer("sbatch", *answer)
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert result.exit_code == 2 and said in result.stderr
    assert not (job.run / "job.json").exists()
    slurm.answer("sbatch", "12;far\n")
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--slurm").exit_code == 0
    assert json.loads((job.run / "job.json").read_text())["slurm_cluster"] == "far"


def test_no_sbatch(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    (slurm.folder / "sbatch").unlink()
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert result.exit_code == 2 and "sbatch is not found on PATH" in result.stderr


def test_a_second_job_in_one_run_dir(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--slurm").exit_code == 0
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert result.exit_code == 2 and "job 4711 of this run dir is PENDING" in result.stderr
    owner = RunDir.open(job.run)
    try:
        result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    finally:
        owner.close()
    assert result.exit_code == 2 and "another run is in progress" in result.stderr


def test_a_pretraining_as_a_job(slurm: Slurm, job: Job, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its script makes the stack; broken off it goes on; a second job and a finished stack are refused."""
    monkeypatch.setenv("PATH", f"{slurm.folder}:/usr/bin:/bin")
    stack = job.root / HOSTILE
    settings = ("--set", "init=rbm", "--set", "pretrain.epochs=[1]", "--set", "data.cv.fraction=0.3")
    call = ("pretrain", job.recipe, "--run-dir", stack, *settings, "--slurm", "--time", "10:00")
    dry = run_cli(*call, "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.startswith("#!/bin/bash\n") and not stack.exists()
    assert "--signal=B:USR1@120" in dry.stdout and "--time=10:00" in dry.stdout
    assert "/rbm1.safetensors" in dry.stdout and "/checkpoints" in dry.stdout and "with --resume" not in dry.stdout

    submitted = run_cli(*call)
    assert submitted.exit_code == 0 and submitted.stdout.startswith("job 4711: 1 worker on 1 node"), submitted.stderr
    assert {path.name for path in stack.iterdir()} == {"recipe.yaml", "submitted_recipe.yaml", "job.sh", "job.json"}
    refused = run_cli(*call)
    assert refused.exit_code == 2 and "job 4711 of this run dir is PENDING" in refused.stderr
    slurm.answer("squeue")
    other = run_cli(*call, "--set", "seed=9")
    assert other.exit_code == 2 and "holds no pretraining with the same" in other.stderr
    assert run_cli(*call).exit_code == 0, "broken off: submitted again, it goes on"
    for _ in range(2):  # begun again by Slurm it is content
        ended = subprocess.run(["bash", stack / "job.sh"], capture_output=True, text=True, timeout=600)
        assert ended.returncode == 0, ended.stderr
    finished = run_cli(*call)
    assert finished.exit_code == 2 and "this pretraining has finished" in finished.stderr
    started = run_cli("pretrain", job.recipe, "--run-dir", job.root / "plain", *settings, "--device", "cpu")
    assert started.exit_code == 0, started.stderr
    plain = (job.root / "plain" / "dbn.safetensors").read_bytes()
    assert (stack / "dbn.safetensors").read_bytes() == plain


def test_nothing_to_pretrain(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    result = run_cli("pretrain", job.recipe, "--run-dir", job.run, "--slurm")
    assert result.exit_code == 2 and "nothing to pretrain" in result.stderr and not job.run.exists()
    result = run_cli("pretrain", job.recipe, "--set", "init=rbm", "--dry-run")
    assert result.exit_code == 0 and "init: rbm" in result.stdout
