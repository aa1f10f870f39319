"""The text of the job's script, and that bash and sbatch read in it what was meant. Needs no Slurm."""

from __future__ import annotations

import dataclasses
import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddnn.errors import UserError
from ddnn.slurm.cluster import Cluster
from ddnn.slurm.plan import Placement
from ddnn.slurm.script import JobScript, sbatch_options, script_text

HOSTILE = "r ü $HOME`id` 'x\" %j #z;&|*~!"
GPU = Cluster(
    partition="gpu,gpu2", account="speech", qos="high", constraint="a100&[ib|roce]", time="1-00", gpu_type="a100",
    cpus_per_worker=4, mem="0", options=["--exclusive"], setup=["module load cuda", 'echo "$HOME"'],
    environment={"A": "it's $5"},
)  # fmt: skip


def job(cluster: Cluster = GPU, run_dir: str = "/exp/an4", nodes: int = 2, each: int = 4, gpus: int = 4) -> JobScript:
    training = ("/my venv/python", "-m", "ddnn.cli", "train", f"{run_dir}/recipe.yaml", "--run-dir", run_dir)
    return JobScript(Path(run_dir), training, "ddnn-an4", Placement(nodes, each, gpus), 1, cluster)


def test_whole_text() -> None:
    assert (
        script_text(job())
        == """\
#!/bin/bash
# Written by ddnn: 8 workers on 2 nodes, 4 GPUs each. `ddnn status /exp/an4` follows it.
#SBATCH --job-name=ddnn-an4
#SBATCH --output=/exp/an4/job.out
#SBATCH --open-mode=truncate
#SBATCH --no-requeue
#SBATCH --partition=gpu,gpu2
#SBATCH --account=speech
#SBATCH --qos=high
#SBATCH --constraint=a100&[ib|roce]
#SBATCH --time=1-00
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:a100:4
#SBATCH --mem=0
#SBATCH --exclusive

# A line that fails ends the job, with its exit code. No -u: module and conda read variables that nobody set.
set -eo pipefail
trap 'echo "job.sh: exit code $? from: $BASH_COMMAND" >&2' ERR

# setup of the cluster's settings, as it stands there
module load cuda
echo "$HOME"

export SLURM_EXPORT_ENV=ALL
export OMP_NUM_THREADS=1
export PYTHONSAFEPATH=1
export A='it'"'"'s $5'
# In place of this shell: Slurm's signals reach it, and its exit code is the job's.
exec '/my venv/python' -m ddnn.cli train /exp/an4/recipe.yaml --run-dir /exp/an4
"""
    )


def test_srun_joins_the_job_with_open_mpis_settings() -> None:
    text = script_text(job(Cluster(launcher="srun"), gpus=0))
    (line,) = [line for line in text.splitlines() if line.startswith("exec ")]
    assert line.startswith(
        "exec srun --mpi=pmix --kill-on-bad-exit=1 --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=1 '/my venv"
    )
    assert "export OMPI_MCA_coll='^han,adapt'\n" in text
    assert "gres" not in text


def test_one_worker_needs_no_launcher() -> None:
    assert "srun" not in script_text(job(Cluster(launcher="srun"), nodes=1, each=1, gpus=0))


def test_as_many_cores_as_threads() -> None:
    assert "--cpus-per-task=3" in sbatch_options(dataclasses.replace(job(Cluster()), threads=3))


def run_bash(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "job.sh").write_text(text)
    return subprocess.run(["bash", folder / "job.sh"], capture_output=True, text=True, timeout=30)


def show_arguments(folder: Path) -> str:
    """A program with a hostile name that prints its arguments."""
    program = folder / HOSTILE.replace("/", "")
    program.write_text(f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], os.environ['B'])\nsys.exit(7)\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_bash_reads_what_was_meant(tmp_path: Path) -> None:
    arguments = [HOSTILE, "", "-x", "a  b", "*"]
    settings = Cluster(environment={"B": HOSTILE}, setup=["false | true || echo pipefail", "unset_is=$NOBODY_SET_IT"])
    training = (show_arguments(tmp_path), *arguments)
    run = run_bash(script_text(dataclasses.replace(job(settings, gpus=0), training=training)), tmp_path)
    assert run.stdout == f"pipefail\n{arguments} {HOSTILE}\n", run.stderr
    assert run.returncode == 7, "the training's exit code is the job's"


def test_a_line_of_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    settings = Cluster(setup=["echo before", "(exit 9) | cat", "echo not reached"])
    run = run_bash(script_text(job(settings, gpus=0)), tmp_path)
    assert (run.returncode, run.stdout) == (9, "before\n")
    assert run.stderr.startswith("job.sh: exit code 9 from: ")


def as_sbatch_reads(line: str) -> str:
    """One word of an #SBATCH line, as Slurm's own reader takes it: quotes, backslashes, # begins a comment."""
    word, quote, escaped = "", "", False
    for c in line.removeprefix("#SBATCH "):
        if escaped:
            word, escaped = word + c, False
        elif c == "\\":
            escaped = True
        elif quote:
            word, quote = (word, "") if c == quote else (word + c, quote)
        elif c in "\"'":
            quote = c
        elif c.isspace() or c == "#":
            raise AssertionError(f"{line!r} is more than one word")
        else:
            word += c
    assert not quote and not escaped
    return word


@given(st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="/"), min_size=1, max_size=20))
def test_any_run_dir_is_quoted_or_refused(name: str) -> None:
    made = job(Cluster(), f"/exp/{name}", gpus=0)
    try:
        text = script_text(made)
    except UserError as error:
        assert not name.isprintable() or "\\" in name
        assert "\n" not in error.what
        return
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert [as_sbatch_reads(line) for line in lines] == sbatch_options(made)
    assert f"--output={made.run_dir}/job.out" == as_sbatch_reads(lines[1]).replace("%%", "%")
    (last,) = [line for line in text.splitlines() if line.startswith("exec ")]
    assert shlex.split(last)[1:] == list(made.training)


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\0b", "a\x1bb", "a\tb", os.fsdecode(b"a\xff")])
def test_what_slurm_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="Slurm cannot have"):
        script_text(job(run_dir=f"/exp/{name}"))


def test_a_line_break_elsewhere_is_refused() -> None:
    with pytest.raises(UserError, match="cannot stand in a job script"):
        script_text(dataclasses.replace(job(), training=("a\nb",)))
