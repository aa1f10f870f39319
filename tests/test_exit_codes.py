"""The exit codes of docs/reference/run-dir.md, each seen; also where the standard streams are full, closed or not read."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_data_dir
from distributed.mpi_worlds import need_mpi
from forked_python import forked_python
from jobs import Job, make_job
from training import deaths as deaths_module
from training.deaths import DEATHS

from ddnn.distributed.signals import EXIT_CODES
from ddnn.training.model_evaluation import evaluate_run

TABLE = Path(__file__).parents[1] / "docs" / "reference" / "run-dir.md"
SECONDS = 300.0  # a guard against hangs
NONE = "<&- >&- 2>&-"
SHOWING = (
    "--help",
    "--version",
    *(f"{name} --help" for name in ("train", "status", "completion")),
    "completion bash",
    "info {data}",
    "info {data} --json",
    "status {run}",
    "status {run} --follow",
    "report {run} {run} --no-plots",
    "evaluate {run} --data {data} --alignments {ali}",
    "train {recipe} --dry-run",
    "decode-prep {run} --data {data} --out -",
)
"""Commands that print."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A job with a finished run."""
    made = make_job(tmp_path_factory.mktemp("exit") / "job")
    done = ddnn("train", made.recipe, "--run-dir", made.run, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    return made


def variables(**more: str) -> dict[str, str]:
    """Of users, whose output is buffered."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def command(*words: object) -> list[str]:
    """`ddnn` with these words; forked where it imports torch."""
    python = forked_python() if words[0] in ("train", "evaluate", "decode-prep") else sys.executable
    return [python, "-m", "ddnn.cli", *map(str, words)]


def ddnn(*words: object, redirect: str = "", **more: str) -> subprocess.CompletedProcess[str]:
    """`ddnn` with these words, its streams redirected by a shell; with none of them by a real Python."""
    python, *others = command(*words)
    shell = ["/bin/sh", "-c", f'exec "$@" {redirect}', "sh", sys.executable if redirect == NONE else python, *others]
    streams: dict[str, Any] = {"capture_output": True, "stdin": subprocess.DEVNULL, "text": True, "timeout": SECONDS}
    return subprocess.run(shell, env=variables(**more), check=False, **streams)


def words_of(text: str, job: Job) -> Sequence[str]:
    paths = {name: str(getattr(job, name)) for name in ("data", "run", "ali", "recipe")}
    return [word.format(**paths) for word in text.split()]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("text", SHOWING)
def test_output_that_finds_no_space(job: Job, text: str) -> None:
    """2 and a message: not 120, with which Python ends where it cannot write at its end what it has kept."""
    done = ddnn(*words_of(text, job), redirect="> /dev/full")
    message = "ddnn: error: cannot read or write: No space left on device\n"
    assert (done.returncode, done.stderr[-len(message) :]) == (2, message)


@pytest.mark.parametrize("text", ["--help", "info {data}", "status {run} --follow", "info {data} --json"])
def test_output_that_nobody_reads(job: Job, text: str) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        command(*words_of(text, job)), stdout=write, stderr=subprocess.PIPE, text=True, env=variables(), check=False
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("jobs", ["", "--jobs 2"])
def test_an_archive_of_which_a_reader_has_seen_enough(job: Job, tmp_path: Path, jobs: str) -> None:
    """`| head -c 100`: 141, and no message but the log. The archive is larger than what a pipe holds."""
    data = write_data_dir(tmp_path / "data", {f"a-{n}": np.ones((1000, 4), np.float32) for n in range(20)})
    words = command(*words_of(f"decode-prep {{run}} --device cpu --out - {jobs} --data", job), data)
    shell = ["bash", "-c", 'set -o pipefail; "$@" | head -c 100', "bash", *words]
    done = subprocess.run(shell, env=variables(), capture_output=True, check=False, timeout=SECONDS)
    assert done.returncode == 141 and len(done.stdout) == 100, done.stderr
    assert not re.search(b"error|Traceback|Exception|Broken", done.stderr), done.stderr


@pytest.mark.parametrize("redirect", [">&-", "<&- >&-"])
def test_an_archive_is_not_written_to_a_closed_output(job: Job, redirect: str) -> None:
    done = ddnn(*words_of("decode-prep {run} --data {data} --out -", job), redirect=redirect)
    assert done.returncode == 2 and "standard output is closed\n  location: --out -" in done.stderr, done.stderr
    assert "utterances," not in done.stderr
    assert ddnn(*words_of("decode-prep {run} --data {data} --out -", job), redirect="> /dev/null").returncode == 0


@pytest.mark.parametrize("text", ["info {data}", "info {data}/nothing"])
def test_messages_that_nobody_can_be_told_do_not_change_the_code(job: Job, text: str) -> None:
    found = {}
    for redirect in ("", "2>&-", "2> /dev/full", "2>&- >&- <&-"):
        done = ddnn(*words_of(text, job), redirect=redirect)
        found[redirect] = done.returncode
    assert set(found.values()) == {2 if text.endswith("nothing") else 0}, found


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", NONE, "2> /dev/full", "> /dev/full"])
def test_a_training_needs_no_standard_stream(job: Job, tmp_path: Path, redirect: str, workers: int) -> None:
    """And none of its files takes the number of a closed one, into which messages would be written."""
    if workers > 1:
        need_mpi()
    run = tmp_path / "run"
    done = ddnn("train", job.recipe, "--run-dir", run, "--device", "cpu", "--workers", workers, redirect=redirect)
    assert done.returncode == 0, done.stderr
    log = (run / "train.log").read_text().splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ", line) for line in log), log
    assert f"finished: {run / 'final.safetensors'}" in log[-1]
    evaluate_run(run, job.data, job.ali)  # its files are whole


def format_problems() -> dict[int, str]:
    """Exit code -> meaning, of docs/reference/run-dir.md."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", TABLE.read_text(), re.MULTILINE)
    assert len({code for code, _ in rows}) == len(rows)
    return {int(code): meaning for code, meaning in rows}


def stopped(job: Job, run: Path, number: signal.Signals, *words: object) -> int:
    """The code of a training that gets this signal: in its loop with --resume=auto among the words, else as it loads."""
    process = subprocess.Popen(
        command("train", job.recipe, "--run-dir", run, "--device", "cpu", *words),
        env=variables(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    begun = run / ("checkpoints" if "--resume=auto" in words else "loading")
    until = time.monotonic() + SECONDS
    while not begun.exists() and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(number)
    return process.wait(SECONDS)


def seen(job: Job, folder: Path) -> dict[int, int]:
    """Code of docs/reference/run-dir.md -> the one of a command that should end with it."""
    need_mpi()
    shutil.copy(deaths_module.__file__, folder / "sitecustomize.py")
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])

    def two_workers(how: str) -> subprocess.CompletedProcess[str]:
        words = ("--workers", "2", "--device", "cpu", "--set", "parallel.max_restarts=0")
        deaths = f'[[1, "{how}", 3]]'
        return ddnn("train", job.recipe, "--run-dir", folder / how, *words, PYTHONPATH=path, **{DEATHS: deaths})

    diverging = ("--set", "model.activation=relu", "--set", "schedule.initial_learning_rate=1e38")
    endless = ("--set", "schedule={name: exponential, epochs: 100000, max_epochs: null}", "--resume=auto")
    slow = make_job(folder / "slow")
    (folder / "slow" / "run").mkdir()
    first, *others = slow.scp.read_text().splitlines(keepends=True)
    slow.scp.write_text(f"{first.split()[0]} touch {slow.run}/loading; exec sleep 600 |\n{''.join(others)}")
    found = {
        0: ddnn("--version").returncode,
        1: two_workers("raise").returncode,
        2: ddnn("info", folder / "nothing").returncode,
        3: ddnn("train", job.recipe, "--run-dir", folder / "diverged", *diverging).returncode,
        75: stopped(job, folder / "stopped", signal.SIGTERM, *endless),
    }
    for number in (signal.SIGINT, signal.SIGTERM):
        (slow.run / "loading").unlink(missing_ok=True)
        found[128 + number] = stopped(slow, slow.run, number, "--allow-pipes")
        for name in ("recipe.yaml", "train.log", "status.json"):
            (slow.run / name).unlink(missing_ok=True)
    killed = two_workers("minibatch")
    assert "a worker was killed by SIGKILL" in killed.stderr
    found[137] = killed.returncode
    test_output_that_nobody_reads(job, "--version")
    return {**found, 141: 141}


def test_every_exit_code_of_the_readme(job: Job, tmp_path: Path) -> None:
    found = seen(job, tmp_path)
    assert found == {code: code for code in found}
    assert set(format_problems()) == set(found) <= EXIT_CODES


def test_a_run_that_did_not_finish_ends_those_who_follow_it(job: Job, tmp_path: Path) -> None:
    shutil.copytree(job.run, tmp_path / "run")
    (tmp_path / "run" / "final.safetensors").unlink()
    status = tmp_path / "run" / "status.json"
    status.write_text(status.read_text().replace('"finished"', '"failed"'))
    assert ddnn("status", tmp_path / "run", "--follow").returncode == 1


def test_codes_of_mpirun_that_say_nothing(tmp_path: Path) -> None:
    """As of a shell that does not find the program on a node."""
    script = tmp_path / "run.py"
    script.write_text(
        "from ddnn.distributed import launcher\nlauncher.launch_workers = lambda *a, **k: 127\n"
        "launcher.run_distributed(2, [], print)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=variables(), check=False)
    assert (done.returncode, done.stderr.partition(":")[0]) == (2, "ddnn"), done.stderr
    assert "mpirun ended with exit code 127" in done.stderr


def test_a_signal_while_mpi_starts_has_its_own_code(job: Job, tmp_path: Path) -> None:
    """A worker gets the launcher's SIGUSR1 before anything but the command itself can handle its exception."""
    script = tmp_path / "run.py"
    script.write_text(
        "import os, signal, sys\nnumber = getattr(signal, sys.argv.pop())\nimport ddnn.distributed.mpi\nfrom ddnn.cli import main\n"
        "ddnn.distributed.mpi.init_communicator = lambda: os.kill(os.getpid(), number)\nmain()\n"
    )
    codes = {}
    for name in ("SIGUSR1", "SIGINT", "SIGTERM"):
        command = [forked_python(), script, "train", job.recipe, "--run-dir", tmp_path / "run", name]
        worker = variables(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="0", PMIX_RANK="0")
        done = subprocess.run(command, capture_output=True, text=True, env=worker, check=False)
        assert done.stderr.endswith("ddnn: interrupted\n"), done.stderr
        codes[name] = done.returncode
    assert codes == {name: 128 + getattr(signal, name) for name in codes}
