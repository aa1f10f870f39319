"""Under a real Slurm of two nodes on this machine: the same result as without it, and what becomes of jobs that fail.

Skipped where Slurm cannot be installed. All tests that need it are in this file, so that one process runs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, make_job
from reproduce.small import write_corpus

from ddnn.distributed.mpirun import find_mpirun
from ddnn.reproduce.runs import read_records
from ddnn.util.errors import UserError

SECONDS = 120
SETTINGS = ("--set", "parallel.averaging_period=2", "--set", "schedule.max_epochs=2", "--set", "optimizer.momentum=0.5")


def free_ports(count: int) -> int:
    """The first of some ports in a row that nothing listens on."""
    for first in range(21000 + os.getpid() % 5000, 32000, count):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + count):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    pytest.fail("no free ports")


def end_leftovers(conf: str) -> list[str]:
    """Kills what still runs with this SLURM_CONF in its environment; the command lines of these processes."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"SLURM_CONF={conf}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"))
                os.kill(int(process.name), signal.SIGKILL)
    return found


class Slurm:
    """The cluster, started by `tool` with the environment `settings`."""

    def __init__(self, folder: Path, tool: Path, settings: dict[str, str]) -> None:
        self.folder, self.tool, self.settings = folder, tool, settings
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def ddnn(self, *arguments: object, timeout: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Runs `ddnn` where this Slurm is the cluster."""
        command = [sys.executable, "-m", "ddnn.cli", *map(str, arguments)]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=timeout)

    def command(self, *words: str) -> str:
        """Runs a program of Slurm; what it prints."""
        return subprocess.run(
            words, env=self.environment, timeout=600, check=True, capture_output=True, text=True
        ).stdout

    def submit(self, job: Job, run: Path, *options: object) -> str:
        """Submits a training of the job's recipe; its number."""
        submitted = self.ddnn("train", job.recipe, "--run-dir", run, *SETTINGS, "--slurm", *options)
        assert submitted.returncode == 0, submitted.stderr
        number = re.match(r"job (\d+): ", submitted.stdout)
        assert number, submitted.stdout
        return number[1]

    def wait(self, number: str) -> dict[str, str]:
        """What Slurm notes of a job once it is over: JobState, ExitCode, NodeList."""
        until = time.monotonic() + SECONDS
        log = self.folder / "log" / "jobcomp.txt"
        while time.monotonic() < until:
            for line in log.read_text().splitlines() if log.exists() else ():
                if line.startswith(f"JobId={number} ") and not {
                    "JobState=PENDING",
                    "JobState=NODE_FAIL",
                    "JobState=RESIZING",
                } & {*line.split()}:  # it is not over
                    return dict(word.partition("=")[::2] for word in line.split())
            time.sleep(0.2)
        pytest.fail(f"job {number} has not ended in {SECONDS} s")

    def lose(self, node: str) -> None:
        """Kills the daemon of a node, and all that it has started."""
        pids = {int((self.folder / "run" / f"slurmd.{node}.pid").read_text())}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_bytes().split(b"\0")
                if {f"SLURMD_NODENAME={node}".encode(), f"SLURM_CONF={self.folder}/slurm.conf".encode()} <= {
                    *variables
                }:
                    pids.add(int(process.name))
                    parent = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
                    if (Path("/proc") / parent / "comm").read_text().startswith("slurmstepd"):
                        pids.add(int(parent))
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def restore(self) -> None:
        """Starts the daemons again that were killed."""
        with (self.folder / "up.txt").open("w") as said:
            up = subprocess.run([self.tool, "up", "2"], env=self.settings, stdout=said, stderr=said, timeout=600)
        assert up.returncode == 0, (self.folder / "up.txt").read_text()

    def processes_of_jobs(self) -> list[str]:
        """Command lines of the trainings that run now."""
        said = subprocess.run(["ps", "-ww", "-eo", "args"], capture_output=True, text=True).stdout
        return [line for line in said.splitlines() if "ddnn.cli train" in line and str(self.folder) in line]


@pytest.fixture(scope="module")
def slurm(shared: Path) -> Iterator[Slurm]:
    if os.environ.get("DDNN_TEST_SLURM") != "1":
        pytest.skip("a real Slurm takes minutes: make test-slurm runs these tests")
    tool = shared / "tools" / "slurm-dev"
    if not tool.exists():
        pytest.skip(f"no Slurm for tests: there is no {tool}")
    if os.getuid() != 0 or shutil.which("apt-get") is None:
        pytest.skip("no Slurm for tests: it is installed and started as root, on Debian")
    try:
        find_mpirun(os.environ)
    except UserError as error:
        pytest.skip(error.message)
    folder = Path(tempfile.mkdtemp(prefix="ddnn-slurm-"))  # a short name: sockets are made in it
    settings = {"SLURM_DEV_DIR": str(folder), "SLURM_DEV_PORT": str(free_ports(3)), "SLURM_DEV_CPUS": "4"}
    environment = {**os.environ, **settings}
    try:
        with (folder / "up.txt").open("w") as said:  # a file: the daemons would hold a pipe open
            up = subprocess.run([tool, "up", "2"], env=environment, stdout=said, stderr=said, timeout=600)
        text = (folder / "up.txt").read_text()
        if up.returncode and "apt-get failed" in text:
            pytest.skip(f"no Slurm for tests: {text.splitlines()[-1]}")
        assert up.returncode == 0, text
        yield Slurm(folder, tool, environment)
    finally:
        subprocess.run([tool, "down"], env=environment, timeout=600, stdout=subprocess.DEVNULL)
        end_leftovers(str(folder / "slurm.conf"))
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def job(slurm: Slurm) -> Job:
    return make_job(slurm.folder / "work")


@pytest.fixture(scope="module")
def plain(slurm: Slurm, job: Job) -> Path:
    """The same training without Slurm."""
    run = job.root / "plain"
    ended = slurm.ddnn("train", job.recipe, "--run-dir", run, *SETTINGS, "--workers", 4, "--device", "cpu")
    assert ended.returncode == 0, ended.stderr
    return run


def losses(run: Path) -> list[tuple[Any, ...]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["epoch"], row["split"], row["loss"], row["frames"]) for row in rows if "split" in row]


@pytest.mark.parametrize("launcher", ["mpirun", "srun"])
def test_same_result_as_without(slurm: Slurm, job: Job, plain: Path, launcher: str) -> None:
    run = job.root / f"{launcher} ü $x 'y\" %j #z"
    number = slurm.submit(job, run, "--nodes", 2, "--workers-per-node", 2, "--launcher", launcher)
    followed = slurm.ddnn("status", run, "--follow")
    output = (run / "job.out").read_text()
    assert followed.returncode == 0, followed.stdout + output
    assert f"finished, Slurm job {number}" in followed.stdout
    ended = slurm.wait(number)
    assert (ended["JobState"], ended["ExitCode"], ended["NodeList"]) == ("COMPLETED", "0:0", "n[1-2]")
    ranks = [row["rank"] for row in map(json.loads, (run / "metrics.jsonl").open()) if row["type"] == "worker"]
    assert ranks == [0, 1, 2, 3] * 2
    assert losses(run) == losses(plain)
    assert (run / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()


WAITS_AT_FIRST = """\
import os
if "OMPI_COMM_WORLD_RANK" in os.environ and not {"DDNN_RESTART", "SLURM_RESTART_COUNT"} & {*os.environ}:
    import time
    from ddnn.training.step import EagerStep
    real, calls = EagerStep.__call__, []
    def slow(*arguments):
        calls.append(1)
        if len(calls) == 7:  # in the second epoch
            time.sleep(60)
        return real(*arguments)
    EagerStep.__call__ = slow
"""


SLOW_AT_FIRST = """\
import os
if "OMPI_COMM_WORLD_RANK" in os.environ or "PMIX_RANK" in os.environ:
    import time
    from ddnn.distributed.signals import GracefulShutdown
    from ddnn.training.step import EagerStep
    real, calls, requests, init = EagerStep.__call__, [], [], GracefulShutdown.__init__
    def remember(self, *arguments, **options):
        requests.append(self)
        init(self, *arguments, **options)
    def slow(*arguments):
        calls.append(1)
        if "SLURM_RESTART_COUNT" not in os.environ and len(calls) == 7:  # in the second epoch
            until = time.monotonic() + 600
            while not any(one.signal_name for one in requests) and time.monotonic() < until:
                time.sleep(0.1)
        return real(*arguments)
    GracefulShutdown.__init__, EagerStep.__call__ = remember, slow
"""


def test_a_job_that_is_asked_to_stop_queues_again_and_goes_on(slurm: Slurm, job: Job, plain: Path) -> None:
    """By both launchers: a checkpoint within the second epoch, requeued, and the same bytes as never stopped."""
    patch = job.root / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(SLOW_AT_FIRST)
    settings = job.root / "slow.yaml"
    settings.write_text(f"environment: {{PYTHONPATH: {patch}}}\n")
    options = ("--nodes", 2, "--workers-per-node", 2, "--cluster", settings)
    runs = {launcher: job.root / f"stopped by {launcher}" for launcher in ("mpirun", "srun")}
    numbers = {name: slurm.submit(job, run, *options, "--launcher", name) for name, run in runs.items()}
    until = time.monotonic() + SECONDS
    waiting = dict(runs)
    while waiting and time.monotonic() < until:
        for name, run in list(waiting.items()):
            if (run / "metrics.jsonl").exists() and (1, "cv") in [row[:2] for row in losses(run)]:
                slurm.command("scancel", "--batch", "--signal=USR1", numbers[name])
                del waiting[name]
        time.sleep(0.1)
    for name, run in runs.items():
        ended = slurm.wait(numbers[name])
        output = (run / "job.out").read_text()
        assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
        assert output.count("ddnn: stopped on SIGUSR1; resume with: ddnn train ") == 1, output
        assert f"job.sh: restart 1 of job {numbers[name]}, " in output
        assert re.search(r"resumed from checkpoint \d+: after epoch 1, \d minibatches", output), output
        assert losses(run) == losses(plain)
        assert (run / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()


def test_seeds_as_an_array_of_jobs(slurm: Slurm, job: Job) -> None:
    """The task whose own number is that of the array is asked to stop: it alone is requeued, and every seed gets the
    same bits as without Slurm."""
    patch, base = job.root / "slow array", job.root / "seeds ü %a"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(SLOW_AT_FIRST)
    cluster = job.root / "array.yaml"
    cluster.write_text(f"environment: {{PYTHONPATH: {patch}}}\noptions: [--no-kill]\nmem: 1M\n")
    call = ("train", job.recipe, "--run-dir", base, *SETTINGS, "--workers", 2, "--seeds", "1,5")
    submitted = slurm.ddnn(*call, "--slurm", "--cluster", cluster)
    assert submitted.returncode == 0, submitted.stderr
    array = submitted.stdout.split()[1]
    runs = {seed: Path(f"{base}-seed{seed}") for seed in (1, 5)}
    until = time.monotonic() + SECONDS
    for seed, run in runs.items():
        while not (run / "metrics.jsonl").exists() or (0, "cv") not in [row[:2] for row in losses(run)]:
            assert time.monotonic() < until, (run / "job.out").read_text()
            time.sleep(0.1)
        status = json.loads(slurm.ddnn("status", run, "--json").stdout)
        assert (status["state"], status["job"]) == ("running", f"{array}_{seed}")
        assert json.loads((run / "status.json").read_text())["slurm_job"] == f"{array}_{seed}"
    for seed in (5, 1):
        slurm.command("scancel", "--batch", "--signal=USR1", f"{array}_{seed}")
        while not (restarts := (runs[seed] / "job.out").read_text().count("job.sh: restart ")):
            assert time.monotonic() < until, (runs[seed] / "job.out").read_text()
            time.sleep(0.1)
    for seed, run in runs.items():
        followed = slurm.ddnn("status", run, "--follow")
        output = (run / "job.out").read_text()
        assert followed.returncode == 0 and f"finished, Slurm job {array}_{seed}" in followed.stdout, output
        assert (
            output.count("job.sh: restart ") == restarts == 1 and f"job.sh: restart 1 of job {array}_{seed}, " in output
        )
    plain = job.root / "plain seeds"
    again = slurm.ddnn(*call[:2], "--run-dir", plain, *call[4:], "--device", "cpu")
    assert again.returncode == 0, again.stderr
    for seed, run in runs.items():
        assert (run / "final.safetensors").read_bytes() == Path(f"{plain}-seed{seed}/final.safetensors").read_bytes()


WAITS_IN_AN_RBM = """\
import os
import sys
if "SLURM_JOB_ID" in os.environ and "ddnn.cli" in sys.orig_argv and "SLURM_RESTART_COUNT" not in os.environ:
    import time
    from pathlib import Path
    from ddnn.training.state import CheckpointPolicy
    real, calls = CheckpointPolicy.after_minibatch, []
    def waiting(self, *arguments):
        calls.append(1)
        if len(calls) == 5:
            Path(os.environ["REACHED"]).touch()
            until = time.monotonic() + 600
            while self.shutdown.signal_name is None and time.monotonic() < until:
                time.sleep(0.1)
        return real(self, *arguments)
    CheckpointPolicy.after_minibatch = waiting
"""


def test_a_pretraining_that_is_asked_to_stop(slurm: Slurm, job: Job) -> None:
    """A checkpoint within an RBM, requeued, and the same bytes as never stopped."""
    patch, reached = job.root / "waits in an rbm", job.root / "reached"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(WAITS_IN_AN_RBM)
    cluster = job.root / "rbm.yaml"
    cluster.write_text(f"environment: {{PYTHONPATH: {patch}, REACHED: {reached}}}\n")
    settings = ("--set", "init=rbm", "--set", "pretrain.epochs=[2]", "--set", "data.cv.fraction=0.3")
    submitted = slurm.ddnn(
        "pretrain", job.recipe, "--run-dir", job.root / "dbn", *settings, "--slurm", "--cluster", cluster
    )
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.split()[1].rstrip(":")
    until = time.monotonic() + SECONDS
    while not reached.exists() and time.monotonic() < until:
        time.sleep(0.1)
    slurm.command("scancel", "--batch", "--signal=USR1", number)
    ended, output = slurm.wait(number), (job.root / "dbn/job.out").read_text()
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
    assert f"job.sh: restart 1 of job {number}, " in output, output
    assert "rbm 1: resumed from checkpoint" in output, output
    plain = slurm.ddnn("pretrain", job.recipe, "--run-dir", job.root / "plain dbn", *settings, "--device", "cpu")
    assert plain.returncode == 0, plain.stderr
    found, expected = (job.root / "dbn/dbn.safetensors", job.root / "plain dbn/dbn.safetensors")
    assert found.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_node_is_lost(slurm: Slurm, job: Job, plain: Path, node: str) -> None:
    """The second one: all workers on the first, from the newest checkpoint. The first, on which the job's script runs:
    Slurm notices, and queues the job again."""
    run, settings = job.root / f"lost {node}", job.root / "waits.yaml"
    (job.root / "waits").mkdir(exist_ok=True)
    (job.root / "waits/sitecustomize.py").write_text(WAITS_AT_FIRST)
    settings.write_text(f"environment: {{PYTHONPATH: {job.root / 'waits'}}}\n")
    options = ("--nodes", 2, "--workers-per-node", 2, "--cluster", settings, "--launcher", "mpirun")
    number = slurm.submit(job, run, *options)
    until = time.monotonic() + SECONDS
    while not any(run.glob("checkpoints/0*")) and time.monotonic() < until:
        time.sleep(0.1)
    try:
        slurm.lose(node)
        if node == "n2":
            while b"4 workers on n1" not in (run / "job.out").read_bytes() and time.monotonic() < until:
                time.sleep(0.1)
            time.sleep(1)
            slurm.command("scontrol", "update", "nodename=n2", "state=down", "reason=lost")
        else:
            slurm.command("scontrol", "update", "nodename=n1", "state=down", "reason=lost")
            slurm.restore()
            with contextlib.suppress(subprocess.CalledProcessError):  # it may be back by itself
                slurm.command("scontrol", "update", "nodename=n1", "state=resume")
        ended = slurm.wait(number)
    finally:
        slurm.restore()
    output = (run / "job.out").read_text(errors="replace")
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), output
    if node == "n2":
        assert "ddnn: n2 no longer answers: 4 workers on n1" in output
        events = [row for row in map(json.loads, (run / "metrics.jsonl").open()) if row["type"] == "event"]
        assert [(row["event"], row["number"]) for row in events] == [("restarted", 1)]
    else:
        assert f"job.sh: restart 1 of job {number}, " in output
    assert losses(run) == losses(plain)
    assert (run / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()


def test_a_cancelled_job_leaves_nothing_running(slurm: Slurm, job: Job) -> None:
    run = job.root / "cancelled"
    for_ever = "schedule={name: exponential, initial_learning_rate: 0.001, epochs: 1000000}"
    number = slurm.submit(
        job, run, "--nodes", 2, "--workers-per-node", 1, "--set", "schedule.max_epochs=null", "--set", for_ever
    )
    until = time.monotonic() + SECONDS
    while not (run / "metrics.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.2)
    status = json.loads(slurm.ddnn("status", run, "--json").stdout)
    assert (status["state"], status["world_size"], status["job"]) == ("running", 2, number)
    assert slurm.processes_of_jobs()
    slurm.command("scancel", number)
    assert slurm.wait(number)["JobState"] == "CANCELLED"
    while slurm.processes_of_jobs() and time.monotonic() < until:
        time.sleep(0.2)
    assert slurm.processes_of_jobs() == []
    assert "Restarts=0" in slurm.command("scontrol", "show", "job", number).split()
    status = json.loads(slurm.ddnn("status", run, "--json").stdout)
    # By Slurm, or by the first worker where it found the time.
    assert status["state"] == "interrupted" and re.search("CANCELLED|on SIGTERM", status["error"])


def test_a_line_of_setup_that_fails(slurm: Slurm, job: Job) -> None:
    settings = job.root / "cluster.yaml"
    settings.write_text('setup: ["module_of_a_name load x"]\n')
    number = slurm.submit(job, job.root / "setup", "--cluster", settings)
    assert slurm.wait(number)["ExitCode"] == "127:0"
    status = json.loads(slurm.ddnn("status", job.root / "setup", "--json").stdout)
    assert (status["state"], status["slurm"]) == ("failed", "GONE")
    assert status["error"] == "job.sh: exit code 127 from: module_of_a_name load x"


def test_a_table_as_jobs(slurm: Slurm, tmp_path: Path) -> None:
    """`ddnn reproduce --slurm`: what waits for a stack that fails is cancelled; the same call again makes all of it."""
    folder, out = write_corpus(slurm.folder / "toy", graphs=False), slurm.folder / "reproduced"
    (tmp_path / "fails.yaml").write_text('setup: ["echo no module >&2; false"]\n')
    call = (
        "reproduce",
        "table6",
        "--corpus",
        folder,
        "--out",
        out,
        "--seeds",
        1,
        "--device",
        "cpu",
        "--json",
        "--slurm",
    )

    def jobs(*options: object) -> dict[str, Any]:
        said = slurm.ddnn(*call, *options)
        assert said.returncode == 0, said.stderr
        found: dict[str, Any] = json.loads(said.stdout).get("jobs", {})
        return found

    names = {"dbn-1", "sgd-1-1", "base-1-1", "sgd-2-1", "base-2-1"}
    first = jobs("--cluster", tmp_path / "fails.yaml")["submitted"]
    assert set(first) == names
    assert {name: slurm.wait(number)["JobState"] for name, number in first.items()} == {
        name: "FAILED" if name == "dbn-1" else "CANCELLED" for name in names
    }
    again = jobs()
    assert set(again["submitted"]) == names and {ended["job"] for ended in again["ended"]} == set(first.values())
    meanwhile = jobs()
    assert meanwhile["submitted"] == {} and meanwhile["ended"] == []
    for name, number in again["submitted"].items():
        assert slurm.wait(number)["JobState"] == "COMPLETED", name
    assert set(jobs()["finished"]) | set(meanwhile["finished"]) == names - {"dbn-1"}
    records = read_records(out / "records")
    assert {record.failed for record in records.values()} == {None} and set(records) == names - {"dbn-1"}
    assert jobs() == {}
