"""The text of the job's script, and that bash and sbatch read in it what was meant. Needs no Slurm."""

from __future__ import annotations

import dataclasses
import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddnn.slurm.cluster import ClusterConfig, Placement
from ddnn.slurm.submit import JobScript, sbatch_options, script_text
from ddnn.training.command import TrainingCommand
from ddnn.util.errors import UserError

HOSTILE = "r ü $HOME`id` 'x\" %j #z;&|*~!"
GPU = ClusterConfig(
    partition="gpu,gpu2", account="speech", qos="high", constraint="a100&[ib|roce]", time="1-00", gpu_type="a100",
    cpus_per_worker=4, mem="0", options=["--exclusive"], setup=["module load cuda", 'echo "$HOME"'],
    environment={"A": "it's $5"},
)  # fmt: skip


def job(
    cluster: ClusterConfig = GPU, run_dir: str = "/exp/an4", nodes: int = 2, each: int = 4, gpus: int = 4
) -> JobScript:
    training = ("/my venv/python", "-m", "ddnn.cli", "train", f"{run_dir}/recipe.yaml", "--run-dir", run_dir)
    return JobScript(Path(run_dir), training, "ddnn-an4", Placement(nodes, each, gpus), 1, cluster)


def test_whole_text() -> None:
    assert (
        script_text(job())
        == """\
#!/bin/bash
#SBATCH --job-name=ddnn-an4
#SBATCH --output=/exp/an4/job.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
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

# Written by ddnn: 8 workers on 2 nodes, 4 GPUs each, 1-00 at most
# `ddnn status /exp/an4` follows it.

# A line that fails ends the job, with its exit code. No -u: module and conda read variables that nobody set.
set -eo pipefail
trap 'echo "job.sh: exit code $? from: $BASH_COMMAND" >&2' ERR
[ -z "$SLURM_RESTART_COUNT" ] || echo "job.sh: restart $SLURM_RESTART_COUNT of job $SLURM_JOB_ID, $(date)"

# Before the time limit Slurm sends SIGUSR1 to this script. It passes the signal on to the training, which writes a
# checkpoint and ends; once a second, because the training does not handle signals while it is starting. SIGTERM ends a
# job; Slurm sends it to the training, too, and a second signal would end that without a checkpoint: after SIGTERM the
# script waits a second before it passes anything on.
first_signal='' signalled='' training=''
stop_training() {
    [ "$first_signal" = USR1 ] || sleep 1
    while kill -USR1 "$training" 2>/dev/null; do sleep 1; done
}
on_signal() {
    signalled=1
    [ -z "$first_signal" ] || return 0
    first_signal=$1
    if [ -n "$training" ]; then stop_training & fi
}
trap 'on_signal USR1' USR1
trap 'on_signal TERM' TERM

# `setup` of the cluster's settings
module load cuda
echo "$HOME"

export SLURM_EXPORT_ENV=ALL
export OMP_NUM_THREADS=1
export A='it'"'"'s $5'

# The training starts with SIGUSR1 ignored: otherwise the signal would kill it until it has set its handler.
(trap '' USR1; exec '/my venv/python' -m ddnn.cli train /exp/an4/recipe.yaml --run-dir /exp/an4) &
training=$!
if [ -n "$first_signal" ]; then { sleep 1; stop_training; } & fi  # a signal came before the training was started
# A signal also ends `wait`: then wait again.
while signalled='' code=0; wait "$training" || code=$?; [ -n "$signalled" ]; do :; done

# Exit code 75: there is a checkpoint to resume from. Over 128: the training was killed by a signal. If it was asked to
# stop or preempted, the job is requeued in this case, too, and resumes from the last checkpoint; where there is none,
# it starts from the beginning, three times at most.
job=''
if [ "$code" = 75 ] || [ "$code" -gt 128 ]; then job=$(scontrol --oneliner show job "$SLURM_JOB_ID") || job=unknown; fi
case $job in *' PreemptTime='[0-9]*) first_signal=preempted ;; esac
if [ "$code" = 75 ] || { [ "$code" -gt 128 ] && [ -n "$first_signal" ] &&
    { [ -d /exp/an4/checkpoints ] || [ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]; }; }; then
    # Only while Slurm counts it as running: a job that was cancelled is not requeued.
    case $job in
    *' JobState=RUNNING '* | *' JobState=SIGNALING '*) scontrol requeue "$SLURM_JOB_ID" || job=unknown ;;
    esac
    [ "$job" != unknown ] || echo "job.sh: the job cannot be requeued: submit it again, with --resume" >&2
fi

exit "$code"
"""
    )


def test_the_script_in_the_docs() -> None:
    python = ("/home/me/venv/bin/python", "-c", "import sys; ...", "ddnn.cli")
    run_dir = Path("/home/me/exp/an4")
    command = TrainingCommand("training", run_dir / "recipe.yaml", run_dir, (), 8, "cuda", "auto")
    training = (*python, *command.arguments())
    cluster = ClusterConfig(partition="gpu", time="1-00:00:00", cpus_per_worker=4)
    made = dataclasses.replace(job(cluster, "/home/me/exp/an4"), training=training, trains="6 x 2048 sigmoid, seed 1")
    assert (
        f"```bash\n{script_text(made)}```\n"
        in (Path(__file__).parents[2] / "docs" / "reference" / "slurm-job.md").read_text()
    )


def words_of_training(text: str) -> list[str]:
    """The command that trains, as bash reads it."""
    (line,) = [line for line in text.splitlines() if line.startswith("(trap '' USR1; exec ")]
    assert line.endswith(") &")
    return shlex.split(line.removeprefix("(trap '' USR1; exec ").removesuffix(") &"))


def test_srun_joins_the_job_with_open_mpis_settings() -> None:
    text = script_text(job(ClusterConfig(launcher="srun"), gpus=0))
    assert words_of_training(text)[:-5] == [
        *("srun", "--mpi=pmix", "--kill-on-bad-exit=1", "--nodes=2", "--ntasks=8", "--ntasks-per-node=4"),
        *("--cpus-per-task=1", "/bin/sh", "-c", 'trap "" USR1; exec "$@"', "sh", "/my venv/python", "-m"),
    ]
    assert "export OMPI_MCA_coll='^han,adapt'\n" in text
    assert "gres" not in text


def test_one_worker_needs_no_launcher() -> None:
    assert "srun" not in script_text(job(ClusterConfig(launcher="srun"), nodes=1, each=1, gpus=0))


def test_as_many_cores_as_threads() -> None:
    assert "--cpus-per-task=3" in sbatch_options(dataclasses.replace(job(ClusterConfig()), threads=3))


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_in_a_container(workers: int) -> None:
    """SIGUSR1 is ignored before the container starts; options of Pyxis are srun's."""
    words = ["apptainer", "exec", "--bind", "/my data", "ddnn.sif"]
    ignoring = ["/bin/sh", "-c", 'trap "" USR1; exec "$@"', "sh"]
    for container, expected in (
        (words, [*ignoring, *words]),
        (["--container-image=ddnn.sqsh"], ["--container-image=ddnn.sqsh", *ignoring]),
    ):
        settings = ClusterConfig(launcher="srun", container=container)
        command = words_of_training(script_text(job(settings, nodes=1, each=workers, gpus=0)))
        assert command[0] == "srun" and command[7:-5] == [*expected, "/my venv/python", "-m"]


def test_as_many_openmp_threads_as_the_recipe_says() -> None:
    text = script_text(dataclasses.replace(job(ClusterConfig()), threads=3))
    assert [line for line in text.splitlines() if "OMP_NUM_THREADS" in line] == ["export OMP_NUM_THREADS=3"]


def test_killed_workers_under_srun_queue_the_job_again() -> None:
    """Under mpirun the launcher starts them again, on the remaining nodes where one is lost."""
    by_srun = job(ClusterConfig(launcher="srun"))
    few = '[ "${SLURM_RESTART_COUNT:-0}" -lt 3 ]'
    assert f"|| {few}; }}; }}; then" in script_text(by_srun)
    assert script_text(by_srun).count('[ -n "$first_signal" ] && [ -d ') == 1


def test_no_requeue_and_no_signal() -> None:
    off = job(ClusterConfig(requeue=False, signal_seconds=0))
    assert "--no-requeue" in sbatch_options(off) and "scontrol" not in script_text(off)
    assert not [option for option in sbatch_options(off) if option.startswith("--signal")]
    assert "--signal=B:USR1@300" in sbatch_options(job(ClusterConfig(signal_seconds=300)))


def run_bash(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "job.sh").write_text(text)
    return subprocess.run(["bash", folder / "job.sh"], capture_output=True, text=True, timeout=600)


def show_arguments(folder: Path) -> str:
    """A program with a hostile name that prints its arguments."""
    program = folder / HOSTILE.replace("/", "")
    program.write_text(f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], os.environ['B'])\nsys.exit(7)\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def test_bash_reads_what_was_meant(tmp_path: Path) -> None:
    arguments = [HOSTILE, "", "-x", "a  b", "*"]
    settings = ClusterConfig(
        environment={"B": HOSTILE}, setup=["false | true || echo pipefail", "unset_is=$NOBODY_SET_IT"]
    )
    training = (show_arguments(tmp_path), *arguments)
    run = run_bash(script_text(dataclasses.replace(job(settings, gpus=0), training=training)), tmp_path)
    assert run.stdout == f"pipefail\n{arguments} {HOSTILE}\n", run.stderr
    assert run.returncode == 7, "the training's exit code is the job's"


def test_a_line_of_setup_that_fails_ends_the_job(tmp_path: Path) -> None:
    settings = ClusterConfig(setup=["echo before", "(exit 9) | cat", "echo not reached"])
    run = run_bash(script_text(job(settings, gpus=0)), tmp_path)
    assert (run.returncode, run.stdout) == (9, "before\n")
    assert run.stderr.startswith("job.sh: exit code 9 from: ")


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job went that was sent signals: `requeued` is what scontrol was called with."""

    code: int
    heard: list[str]
    requeued: str
    errors: str


def signal_job(
    folder: Path,
    numbers: list[str],
    code: int,
    *,
    cluster: ClusterConfig | None = None,
    restarts: int = 0,
    checkpoint: bool = False,
    state: str = "RUNNING",
    fails: bool = False,
) -> Ended:
    """Runs a job's script with a stand-in that listens to SIGUSR1 after a while, and then ends with `code`; the signals
    go to the shell, as soon as the stand-in has begun."""
    (folder / "train.py").write_text(
        "import pathlib, signal, sys, time\nheard = pathlib.Path('heard')\nheard.touch()\ntime.sleep(0.5)\n"
        "def hear(*_):\n    signal.signal(signal.SIGUSR1, signal.SIG_IGN)\n    heard.write_text(heard.read_text() + 'USR1\\n')\n    sys.exit(int(sys.argv[1]))\n"
        f"signal.signal(signal.SIGUSR1, hear)\ntime.sleep({600 if numbers else 0})\nsys.exit(int(sys.argv[1]))\n"
    )
    scontrol = folder / "scontrol"
    shown = f"JobId=4711 UserId=me(1) JobState={state} Reason=None Command=x"
    scontrol.write_text(
        f'#!/bin/sh\ncase $1 in requeue) echo "$@" > requeued; exit {int(fails)} ;; *) echo "{shown}" ;; esac\n'
    )
    scontrol.chmod(0o755)
    if checkpoint:
        (folder / "checkpoints").mkdir()
    training = (sys.executable, "train.py", str(code))
    made = dataclasses.replace(job(cluster or ClusterConfig(), gpus=0), training=training, run_dir=folder)
    (folder / "job.sh").write_text(script_text(made))
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "4711"}
    environment |= {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
    shell = subprocess.Popen(
        ["bash", "job.sh"], cwd=folder, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 600
    while not (folder / "heard").exists() and time.monotonic() < until:
        time.sleep(0.01)
    for number in numbers:
        shell.send_signal(signal.Signals[number])
        time.sleep(0.05)
    _, errors = shell.communicate(timeout=600)
    requeued = folder / "requeued"
    called = requeued.read_text().strip() if requeued.exists() else ""
    return Ended(shell.returncode, (folder / "heard").read_text().split(), called, errors)


REQUEUED = "requeue 4711"
CANNOT = "job.sh: the job cannot be requeued: submit it again, with --resume\n"
# Signals, exit code of the training, what is special; what scontrol is called with, what is said.
CASES: dict[str, tuple[list[str], int, dict[str, Any], str, str]] = {
    "asked": (["USR1"], 75, {}, REQUEUED, ""),
    "asked twice, after many restarts": (["USR1", "USR1"], 75, {"restarts": 9}, REQUEUED, ""),
    "before there is a checkpoint": (["USR1"], 138, {"restarts": 2}, REQUEUED, ""),
    "so too often": (["USR1"], 138, {"restarts": 3}, "", ""),
    "a mistake of the user's": (["USR1"], 2, {}, "", ""),
    "finished all the same": (["USR1"], 0, {}, "", ""),
    "killed, with a checkpoint": (["TERM"], 143, {"restarts": 9, "checkpoint": True}, REQUEUED, ""),
    "preempted": (["TERM"], 75, {"state": "SIGNALING"}, REQUEUED, ""),
    "scancel": (["TERM"], 75, {"state": "COMPLETING"}, "", ""),
    "killed by nobody knows whom": ([], 137, {"checkpoint": True}, "", ""),
    "preempted unheard": ([], 137, {"checkpoint": True, "state": "RUNNING PreemptTime=2026-11-22"}, REQUEUED, ""),
    "scancel after it was asked": (["USR1", "TERM"], 75, {"state": "COMPLETING"}, "", ""),
    "scontrol fails": (["USR1"], 75, {"fails": True}, REQUEUED, CANNOT),
    "not to be requeued": (["USR1"], 75, {"cluster": ClusterConfig(requeue=False)}, "", ""),
    "during setup": (["USR1"], 75, {"cluster": ClusterConfig(setup=["touch heard", "sleep 0.5"])}, REQUEUED, ""),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Ended]]]:
    """All of them at once: they mostly sleep."""
    with ThreadPoolExecutor(len(CASES)) as pool:
        yield {
            name: pool.submit(
                signal_job, tmp_path_factory.mktemp("job"), [f"SIG{signal}" for signal in signals], code, **special
            )
            for name, (signals, code, special, _, _) in CASES.items()
        }


@pytest.mark.parametrize("name", CASES)
def test_slurms_signals(ended: dict[str, Future[Ended]], name: str) -> None:
    signals, code, _, requeued, said = CASES[name]
    assert ended[name].result() == Ended(code, ["USR1"] if signals else [], requeued, said)


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
    made = job(ClusterConfig(), f"/exp/{name}", gpus=0)
    try:
        text = script_text(made)
    except UserError as error:
        assert not name.isprintable() or "\\" in name
        assert "\n" not in error.message
        return
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert [as_sbatch_reads(line) for line in lines] == sbatch_options(made)
    assert f"--output={made.run_dir}/job.out" == as_sbatch_reads(lines[1]).replace("%%", "%")
    assert words_of_training(text) == list(made.training)


@pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\0b", "a\x1bb", "a\tb", os.fsdecode(b"a\xff")])
def test_what_slurm_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="Slurm cannot have"):
        script_text(job(run_dir=f"/exp/{name}"))


def test_a_line_break_elsewhere_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be in a job script"):
        script_text(dataclasses.replace(job(), training=("a\nb",)))
