"""`ddnn train --slurm` with a made-up sbatch and squeue: what is written, what is handed on, what is refused."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, assert_refused, make_job

from ddnn.recipe.load import load_recipe
from ddnn.runs.run_dir import RunDir

RunCli = Callable[..., Any]
LAYERS = (
    "--set",
    "model.hidden_layers=null",
    "--set",
    "model.hidden_units=null",
)  # of the job's recipe, not beside layers
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
            f"json.dump([sys.argv[1:], dict(os.environ), sys.stdin.read()], open({str(path) + '.called'!r}, 'w'))\n"
            f"sys.stdout.write({stdout!r}); sys.stderr.write({stderr!r}); sys.exit({code})\n"
        )
        path.chmod(0o755)

    def called(self, program: str) -> tuple[list[str], dict[str, str]]:
        arguments, environment, _ = json.loads((self.folder / f"{program}.called").read_text())
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
    (job.run / "checkpoints").rename(job.root / "aside")
    removed = run_cli("train", job.run, "--resume", "--slurm")
    assert_refused(removed, "has finished 1 epoch, but there is no checkpoint to resume from")
    (job.root / "aside").rename(job.run / "checkpoints")
    assert {path.name: path.read_bytes() for path in job.run.iterdir() if path.is_file()} == before

    result = run_cli("train", job.run, "--resume", "--slurm", "--workers-per-node", 2)
    assert result.exit_code == 0, result.stderr
    assert f" train --run-dir={job.run} --workers=2 " in (job.run / "job.sh").read_text()
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
    assert " --resume=auto -- " in (job.run / "job.sh").read_text()


def test_a_container_has_its_own_python(slurm: Slurm, job: Job, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("container: [apptainer, exec, x.sif]\n")
    call = ("train", job.recipe, "--run-dir", job.run, "--slurm", "--cluster", tmp_path / "c.yaml", "--dry-run")
    refused = run_cli(*call)
    assert refused.exit_code == 2 and "a container needs launcher: srun" in refused.stderr
    result = run_cli(*call, "--launcher", "srun")
    assert " apptainer exec x.sif python3 -c " in result.stdout and sys.executable not in result.stdout, result.stderr


def test_seeds_are_one_array_of_jobs(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    """Each in a run dir of its own, which it shares with nothing; resumed, those that have finished are not repeated."""
    base = job.root / HOSTILE
    call = ("train", job.recipe, "--run-dir", base, "--slurm", "--nodes", 2)
    dry = run_cli(*call, "--seeds", "3-5%2", "--dry-run")
    assert dry.stdout.startswith("#!/bin/bash\n#SBATCH --array=3,4,5%2\n"), dry.stderr
    assert "# Written by ddnn: 3 jobs, each 2 workers on 2 nodes" in dry.stdout and "seed 3\n" in dry.stdout
    assert not list(job.root.glob("r *")) and not (slurm.folder / "sbatch.called").exists()

    result = run_cli(*call, "--seeds", "3,40")
    assert result.exit_code == 0 and result.stdout.startswith("array job 4711: 2 jobs, each 2 workers"), result.stderr
    pattern = re.search("follow: ddnn status (.*)", result.stdout)[1]
    expand = {"input": f"printf '%s\\0' {pattern}", "env": {"PATH": os.defpath}}
    names = subprocess.run(["bash"], **expand, capture_output=True, text=True).stdout.split("\0")[:-1]
    assert {Path(name).resolve() for name in names} == {Path(f"{base}-seed{seed}").resolve() for seed in (3, 40)}
    arguments, _, script = json.loads((slurm.folder / "sbatch.called").read_text())
    assert (
        arguments[:2] == ["--parsable", "--array=3,40"]
        and f"--output={base}".replace("%", "%%") + "-seed%a/job.out" in arguments
    )
    for seed in (3, 40):
        run = Path(f"{base}-seed{seed}")
        assert {path.name for path in run.iterdir()} == {"recipe.yaml", "job.sh", "job.json"}
        assert load_recipe(run / "recipe.yaml").seed == seed
        assert json.loads((run / "job.json").read_text())["number"] == f"4711_{seed}"
        text = (run / "job.sh").read_text()
        assert shlex.quote(str(run / "recipe.yaml")) in text and 'scontrol requeue "$job_id"' in text
        (run / "job.sh").write_text('echo "$0"\n')
        environment = {"SLURM_ARRAY_TASK_ID": str(seed), "PATH": os.defpath}
        ran = subprocess.run(["bash"], input=script, env=environment, capture_output=True, text=True)
        assert ran.stdout == f"{run / 'job.sh'}\n", ran.stderr

    slurm.answer("squeue", "4711_40|PENDING\n4711_3|COMPLETED\n")
    refused = run_cli(*call, "--seeds", "40,41")
    assert refused.exit_code == 2 and "job 4711_40 of this run dir is PENDING" in refused.stderr
    assert not Path(f"{base}-seed41").exists(), "all are checked before one is written"
    slurm.answer("squeue")
    (Path(f"{base}-seed3") / "final.safetensors").touch()
    resumed = run_cli(*call, "--seeds", "3,40", "--resume=auto")
    assert f"seed 3 has finished: {base}-seed3" in resumed.stdout, resumed.stderr
    assert "--array=40" in slurm.called("sbatch")[0]
    refused = run_cli("train", f"{base}-seed3", "--resume", "--slurm", "--seeds", "3")
    assert refused.exit_code == 2 and "--seeds needs a recipe" in refused.stderr


def test_an_array_is_refused(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    slurm.answer("sbatch", "", "sbatch: error: Batch job submission failed: Invalid job array specification\n", 1)
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm", "--seeds", "1,5000")
    assert result.exit_code == 2 and "must be below Slurm's MaxArraySize" in result.stderr
    assert not list(job.root.glob("run*"))


def test_seeds_one_after_another(job: Job, run_cli: RunCli) -> None:
    """Without Slurm: the same bits as by themselves."""
    call = ("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    dry = run_cli(*call, "--seeds", "2,7", "--dry-run")
    assert dry.exit_code == 0 and f"# seed 2: {job.run}-seed2" in dry.stdout and "\nseed: 2\n" in dry.stdout
    assert run_cli(*call, "--seeds", "2,7").exit_code == 0
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "seed=7").exit_code == 0
    finals = [Path(f"{job.run}{more}", "final.safetensors").read_bytes() for more in ("-seed2", "-seed7", "")]
    assert finals[0] != finals[1] == finals[2]
    again = run_cli(*call, "--seeds", "2,7", "--resume=auto")
    assert again.exit_code == 0 and again.stdout.count("this training has finished") == 2


def test_an_interrupted_series_of_seeds(job: Job, run_cli: RunCli) -> None:
    """What goes on is said for all of them, not only for the one that was interrupted."""
    call = ("train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "schedule.max_epochs=2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunDir, "save_best", lambda self, model: os.kill(os.getpid(), signal.SIGINT))
        stopped = run_cli(*call, "--seeds", "1,2,3")
    assert stopped.exit_code == 75
    (said,) = [line for line in stopped.stderr.splitlines() if "continue all seeds with: " in line]
    command = shlex.split(said.partition("all seeds with: ")[2])
    assert {"--seeds=1,2,3", "--resume=auto", "--set=schedule.max_epochs=2"} <= set(command)
    assert run_cli(*command[1:]).exit_code == 0
    assert all(Path(f"{job.run}-seed{seed}", "final.safetensors").exists() for seed in (1, 2, 3))


def test_seeds_given_twice(job: Job, run_cli: RunCli) -> None:
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--seeds", "1,2", "--seeds", "3")
    assert_refused(result, "given 2 times", "location: --seeds", "--seeds 1,2,3")
    assert not list(job.root.glob("run*"))


def test_a_network_of_layers_in_the_script(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    """In a comment, of which a name that anybody wrote is no reason to begin another line."""
    layers = 'model.layers=[{affine: 9}, {stored: {kind: "a\\nrm b", width: 3}}]'
    (job.data / "feats.scp").unlink()  # what is wrong with the data the job says
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm", "--dry-run", *LAYERS, "--set", layers)
    assert result.exit_code == 0, result.stderr
    assert "; 1 x 9 sigmoid, a?rm?b, seed 1\n" in result.stdout


def test_dry_run_prints_and_leaves_nothing(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm", "--dry-run", "--cluster", "gpu")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("#!/bin/bash\n#SBATCH --") and "--gres=gpu:4" in result.stdout
    assert (
        "\n# Written by ddnn: 4 workers on 1 node, 4 GPUs each, 1-00:00:00 at most; 1 x 8 sigmoid, seed 1\n"
        in result.stdout
    )
    assert "--workers=4 --device=cuda" in result.stdout
    assert not job.run.exists() and not (slurm.folder / "sbatch.called").exists()


def test_the_command_line_wins_over_the_cluster(slurm: Slurm, job: Job, run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "partition: slow\nnodes: 9\ngpus_per_node: 4\nlauncher: srun\nqos: low\noptions: [--reservation=r]\n"
    )
    result = run_cli(
        "train", job.recipe, "--slurm", "--dry-run", "--cluster", tmp_path / "c.yaml", "--partition", "fast",
        "--gpus-per-node", 0, "--workers", 2, "--launcher", "mpirun", "--mem", "64G", "--constraint", "a100&ib",
        "--sbatch-option=--exclude=n1", "--sbatch-option", "--comment=two words",
    )  # fmt: skip
    for said in ("--partition=fast", "--qos=low", "--nodes=1", "--ntasks-per-node=2", "--device=cpu"):
        assert said in result.stdout, result.stderr
    assert "gres" not in result.stdout and "srun" not in result.stdout
    said = '#SBATCH --mem=64G\n#SBATCH --reservation=r\n#SBATCH --exclude=n1\n#SBATCH --comment="two words"\n'
    assert said in result.stdout and "#SBATCH --constraint=a100&ib\n" in result.stdout
    assert "#SBATCH --qos=high\n" in run_cli("train", job.recipe, "--slurm", "--dry-run", "--qos", "high").stdout


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
        (["--sbatch-option=--exclusive", "--mem", "1G"], "--mem, --sbatch-option without --slurm"),
        (["--slurm", "--mem", "2Gi"], "expected a whole number with K, M, G or T"),
        (["--slurm", "--qos", "a b"], "location: --qos"),
        (["--slurm", "--sbatch-option=--nodes=2"], "ddnn sets it itself: use --nodes\n  location: --sbatch-option"),
        (["--slurm", "--sbatch-option=--arr=1"], "ddnn sets it itself: use --seeds"),
        (["--slurm", "--sbatch-option=--x=a\n#SBATCH --uid=0"], "location: --sbatch-option"),
        (["--slurm", "--sbatch-option", "-N2"], "expected --name or --name=value"),
        (["--slurm", "--seeds", "1,x"], "'1,x' found, expected whole numbers"),
        (["--slurm", "--seeds", "1,1"], "expected 1 to 1000 different seeds"),
        (["--slurm", "--seeds", "1,2", "--set", "seed=3"], "the seed is given twice"),
        (["--seeds", "1,2%1"], "%1 without --slurm"),
        (
            ["--slurm", *LAYERS, "--set", "model.layers=[{conv: {filters: 2, patch: 5}}]"],
            "layer 0 (conv): patch 5 does not fit into 4 bands; 1 to 4 do",
        ),
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
    assert not job.run.exists() and str(job.run) not in result.stderr
    slurm.answer("sbatch", "12;far\n")
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--slurm").exit_code == 0
    assert json.loads((job.run / "job.json").read_text())["slurm_cluster"] == "far"


NO_CLUSTER = """sbatch: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host
sbatch: error: fetch_config: DNS SRV lookup failed
sbatch: error: _establish_config_source: failed to fetch config
sbatch: fatal: Could not establish a configuration source
"""


@pytest.mark.parametrize(
    ("stderr", "said", "hint"),
    [
        (NO_CLUSTER, "refused the job with 1: sbatch: fatal: Could not establish a configuration source\n", "location: --slurm\n  hint: is this a login node"),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", "partition", "location: --partition\n  hint: `sinfo` lists"),
        ("sbatch: error: Invalid account or account/partition combination specified", "account", "location: --account\n  hint: `sacctmgr"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "qos", "location: --qos\n  hint: `sacctmgr"),
        ("sbatch: error: Memory specification can not be satisfied", "Memory", "location: --mem\n  hint: `sinfo -o '%N %m'` shows"),
        ("sbatch: error: something else", "something else", "location: --slurm\n  hint: --dry-run shows"),
    ],
)  # fmt: skip
def test_hints_of_refusals(slurm: Slurm, job: Job, run_cli: RunCli, stderr: str, said: str, hint: str) -> None:
    slurm.answer("sbatch", "", stderr, 1)
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert_refused(result, said, hint)
    assert "DNS" not in result.stderr


def sbatch_lines(run: Path) -> list[str]:
    """Without the job's name, which an array's jobs share."""
    lines = (run / "job.sh").read_text().splitlines()
    return [line for line in lines if line.startswith("#SBATCH") and "--job-name" not in line]


def test_what_submits_a_job_again(slurm: Slurm, job: Job, run_cli: RunCli, tmp_path: Path) -> None:
    """job.json has the options of the command line: for what `ddnn status` offers."""
    cluster = tmp_path / "c.yaml"
    cluster.write_text("partition: gpu\n")
    given = [
        "--slurm",
        f"--cluster={cluster}",
        "--nodes=2",
        "--time=10",
        "--workers=4",
        "--sbatch-option=--comment=a b",
    ]
    for seeds in ((), ("--seeds", "1,2")):
        result = run_cli("train", job.recipe, "--run-dir", job.run, *given, *seeds)
        assert result.exit_code == 0, result.stderr
    for run in (job.run, job.root / f"{job.run.name}-seed2"):
        again = json.loads((run / "job.json").read_text())["options"]
        assert sorted(again) == sorted(given)
        slurm.answer("squeue", "")
        command = json.loads(run_cli("status", run, "--json").stdout)["resume_command"]
        assert command == f"ddnn train {run} --resume {shlex.join(again)}"
        (run / "job.json").unlink()
        options = sbatch_lines(run)
        assert run_cli(*shlex.split(command)[1:]).exit_code == 0
        assert sbatch_lines(run) == options


def test_no_sbatch(slurm: Slurm, job: Job, run_cli: RunCli) -> None:
    (slurm.folder / "sbatch").unlink()
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert result.exit_code == 2 and "sbatch is not found on PATH" in result.stderr
    call = ("--slurm", "--set", "init=rbm", "--set", "pretrain.epochs=[1]", "--set", "data.cv.fraction=0.3")
    for command, options in (("train", ()), ("train", ("--seeds", "1,2")), ("pretrain", call)):
        result = run_cli(command, job.recipe, "--run-dir", job.run, "--slurm", *options)
        assert result.exit_code == 2 and "sbatch is not found on PATH" in result.stderr, command
    assert not list(job.root.glob("run*")), "nothing half-made"


def test_sbatch_does_not_answer(slurm: Slurm, job: Job, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job may have been submitted: its run dir stays."""
    monkeypatch.setattr("ddnn.slurm.job.SBATCH_SECONDS", 0.0)
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm")
    assert result.exit_code == 2 and "the job may have been submitted all the same" in result.stderr
    assert (job.run / "job.sh").exists()


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


def test_a_pretraining_as_a_job(
    slurm: Slurm, job: Job, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, forked_children: None
) -> None:
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
    result = run_cli("pretrain", job.recipe, "--dry-run")
    assert result.exit_code == 2 and "nothing to pretrain" in result.stderr
    result = run_cli("pretrain", job.recipe, "--set", "init=rbm", "--dry-run")
    assert result.exit_code == 0 and "init: rbm" in result.stdout
