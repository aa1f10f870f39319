"""When a job is started again, from where, and on which nodes. mpirun, scontrol and srun are scripts of the test."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from distributed.mpi_worlds import need_mpi

from ddnn.distributed import launcher
from ddnn.distributed.launcher import Restart, RunMonitor, launch_workers, read_restart
from ddnn.slurm.recovery import SlurmNodes
from ddnn.util.errors import UserError
from ddnn.util.text import TERMINAL_LEVEL

MPIRUN = f"""#!{sys.executable}
import json, os, signal, sys, time
attempts = sorted(os.listdir("attempts"))
kept = {{name: value for name, value in os.environ.items() if name in ("DDNN_RESTART", "SLURM_OVERLAP")}}
end = json.load(open("ends.json"))[len(attempts)]
if "sleep" in end:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(end["code"]))
with open("attempt", "w") as file:
    json.dump([sys.argv[1:], kept], file)
os.rename("attempt", f"attempts/{{len(attempts):02}}")  # whole: a test reads it meanwhile
if "error" in end:
    path = os.environ["DDNN_LAUNCHER_FILE"].rpartition(":")[0]
    with open(path, "a") as file:
        file.write(json.dumps(end["error"]) + "\\n")
if "checkpoint" in end:
    open(f"checkpoints/{{end['checkpoint']}}", "w").close()
if "sleep" in end:
    time.sleep(end["sleep"])
print(end.get("stderr", ""), end="", file=sys.stderr)
sys.exit(end["code"])
"""


class Run(RunMonitor):
    """A run dir whose checkpoints are files, and which is `locked` so often."""

    def __init__(self, locked: int = 0) -> None:
        self.locked = locked

    def newest_checkpoint(self) -> object:
        return max((path.name for path in Path("checkpoints").iterdir()), default=None)

    def is_locked(self) -> bool:
        self.locked -= 1
        return self.locked >= 0

    def is_complete(self) -> bool:
        return not Path("incomplete").exists()

    def failure_hint(self) -> str | None:
        return "hint of the test"


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with a fake mpirun."""
    monkeypatch.chdir(tmp_path)
    for name in ("attempts", "checkpoints", "bin"):
        (tmp_path / name).mkdir()
    script("mpirun", MPIRUN)
    monkeypatch.setattr(launcher, "find_mpirun", lambda environment: str(tmp_path / "bin" / "mpirun"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)


def script(name: str, text: str) -> None:
    path = Path("bin", name)
    path.write_text(text)
    path.chmod(0o755)


def launch(*ends: dict[str, object], max_restarts: int = 3, workers: int = 4, run: Run | None = None) -> int:
    """The exit code, where the attempts end like this; a further one fails the test."""
    Path("ends.json").write_text(json.dumps(ends))
    return launch_workers(
        workers,
        ["first"],
        restart_argv=lambda: ["again"],
        max_restarts=max_restarts,
        run=run or Run(),
        nodes=SlurmNodes(),
    )


def attempts() -> list[tuple[list[str], dict[str, str]]]:
    return [tuple(json.loads(path.read_text())) for path in sorted(Path("attempts").iterdir())]  # type: ignore[misc]


KILLED = {"code": 137}


def test_a_killed_worker_starts_the_job_again(capfd: pytest.CaptureFixture[str]) -> None:
    assert launch(KILLED, {"code": 139, "checkpoint": 1}, {"code": 0}) == 0
    first, second, third = attempts()
    assert [words[-1] for words, _ in (first, second, third)] == ["first", "again", "again"]
    assert read_restart(first[1]) is None
    assert read_restart(second[1]) == Restart(1, "a worker was killed by SIGKILL")
    assert read_restart(third[1]) == Restart(2, "a worker was killed by SIGSEGV")
    assert capfd.readouterr().err.splitlines() == [
        "ddnn: a worker was killed by SIGKILL; restart 1, from the beginning (1 of at most 3 without a newer checkpoint)",
        "ddnn: a worker was killed by SIGSEGV; restart 2, from the newest checkpoint (1 of at most 3 without a newer "
        "checkpoint)",
    ]


@pytest.mark.parametrize(("code", "hinted"), [(137, True), (143, False), (130, False)])
def test_no_hint_where_somebody_has_asked_for_the_end(
    code: int, hinted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch({"code": code}, max_restarts=0) == code
    assert ("hint of the test" in capfd.readouterr().err) == hinted


def test_a_hung_worker_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    hung = {"rank": 2, "message": "ddnn: worker 2 on n1 (pid 7) made no progress and was killed\n", "hung": "in x.py\n"}
    assert launch({"code": 137, "error": hung}, {"code": 0}) == 0
    assert read_restart(attempts()[1][1]) == Restart(1, "worker 2 on n1 (pid 7) made no progress and was killed")
    shown = capfd.readouterr().err
    assert shown.startswith("in x.py\nddnn: worker 2 on n1") and shown.count("worker 2 on n1") == 1


def test_what_mpirun_says_is_shown_where_nobody_else_says_more(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = "-" * 74 + "\n"
    own = f"{rule}prterun noticed that process rank 1 with PID 0 on node vm exited on signal 9 (Killed).\n{rule}"
    error = {"rank": 1, "message": "ddnn: worker 1 on n1: error: bad data\n", "exit_code": 2}
    assert launch({"code": 137, "stderr": f"a warning\n{own}\0"}, max_restarts=0) == 137
    assert capfd.readouterr().err.startswith(f"a warning\n{own}ddnn: ")
    Path("attempts/00").unlink()
    assert launch({"code": 137, "stderr": f"a warning\n{own}\0", "error": error}) == 2
    assert capfd.readouterr().err == "a warning\nddnn: worker 1 on n1: error: bad data\n"
    Path("attempts/00").unlink()
    monkeypatch.setenv(TERMINAL_LEVEL, "DEBUG")
    assert launch({"code": 137, "stderr": own, "error": error}) == 2
    assert capfd.readouterr().err == f"{own}ddnn: worker 1 on n1: error: bad data\n", "with --verbose"


@pytest.mark.parametrize("code", [0, 1, 2, 3, 7, 75, 130, 143])
def test_what_workers_end_with_themselves_is_not_retried(code: int) -> None:
    assert launch({"code": code}) == code


def test_an_error_that_a_worker_reports_is_not_retried(capfd: pytest.CaptureFixture[str]) -> None:
    """Also where mpirun says that it had to kill the others."""
    error = {"rank": 1, "message": "ddnn: worker 1 on n1: error: bad data\n", "exit_code": 2}
    assert launch({"code": 137, "error": error}) == 2
    assert capfd.readouterr().err == "ddnn: worker 1 on n1: error: bad data\n"


def test_workers_that_the_end_of_a_killed_one_interrupts_do_not_prevent_a_restart(
    capfd: pytest.CaptureFixture[str],
) -> None:
    interrupted = {"rank": 1, "message": "ddnn: worker 1 on n1: interrupted\n", "exit_code": 143}
    assert launch({"code": 137, "error": interrupted}, {"code": 0}) == 0
    assert read_restart(attempts()[1][1]) == Restart(1, "a worker was killed by SIGKILL")
    assert "interrupted" not in capfd.readouterr().err


def test_restarts_without_a_newer_checkpoint_are_limited(capfd: pytest.CaptureFixture[str]) -> None:
    ends = [KILLED, {"code": 137, "checkpoint": 1}, KILLED, KILLED]
    assert launch(*ends, max_restarts=2) == 137
    assert len(attempts()) == 4, "the checkpoint started the count again"
    assert capfd.readouterr().err.splitlines()[-2:] == [
        "ddnn: a worker was killed by SIGKILL; not started again after 2 restarts without a newer checkpoint",
        "ddnn: hint of the test",
    ]


def test_no_restarts_where_none_are_allowed() -> None:
    assert launch(KILLED, max_restarts=0) == 137


def test_success_is_the_work_done(capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun said 0 of a training of two nodes that Slurm had ended by SIGTERM, and of one that had lost a node."""
    Path("incomplete").touch()
    assert launch({"code": 0}, {"code": 0}, max_restarts=1) == 137
    assert "the work is not done" in capfd.readouterr().err
    assert attempts()[1][1]["DDNN_RESTART"] == '{"number": 1, "reason": "mpirun ended before the work was done"}'


def test_the_run_dir_must_be_free_before_a_restart() -> None:
    run = Run(locked=3)
    assert launch(KILLED, {"code": 0}, run=run) == 0
    assert run.locked < 0


def test_a_job_that_is_asked_to_stop_is_not_started_again() -> None:
    def send() -> None:
        until = time.monotonic() + 600
        while not attempts() and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=send)
    thread.start()
    assert launch({"code": 137, "sleep": 30}) == 137
    thread.join()
    assert len(attempts()) == 1


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation of two nodes; those that do not answer are in the file `dead`."""
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    script("scontrol", '#!/bin/sh\n[ "$1" = show ] || exec echo "$@" > "$HOME/updated"\necho n1\necho n2\n')
    monkeypatch.setenv("HOME", str(Path.cwd()))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    script(
        "srun", '#!/bin/sh\nfor word; do case $word in --nodelist=*) ! grep -qx "${word#*=}" dead; exit;; esac; done\n'
    )
    Path("dead").write_text("")


@pytest.mark.usefixtures("slurm")
def test_the_remaining_nodes_run_all_workers() -> None:
    Path("dead").write_text("n2\n")
    Path("incomplete").touch()
    ends = [{"code": 0}, {"code": 137}, {"code": 75}]
    assert launch(*ends) == 75
    (first, _), (second, environment), (third, _) = attempts()
    assert "--host" not in first
    assert second[:4] == third[:4] == ["--host", "n1:4", "--map-by", "ppr:4:node:OVERSUBSCRIBE"]
    assert environment["SLURM_OVERLAP"] == "1"
    assert Path("updated").read_text() == "update JobId=7 NodeList=n1\n", "else Slurm ends the job later"


@pytest.mark.usefixtures("slurm")
def test_a_failure_of_mpirun_that_lost_a_node_is_retried() -> None:
    """It may end with 1: no error of a worker."""
    Path("dead").write_text("n2\n")
    assert launch({"code": 1}, {"code": 0}) == 0
    assert read_restart(attempts()[1][1]) == Restart(1, "n2 no longer answers")


@pytest.mark.usefixtures("slurm")
def test_all_nodes_where_all_answer_or_srun_does_not_work() -> None:
    assert launch({"code": 1}) == 1
    Path("dead").write_text("n1\nn2\n")
    assert launch({"code": 0}, KILLED, {"code": 0}) == 0
    assert "--host" not in attempts()[-1][0]


@pytest.mark.usefixtures("slurm")
def test_a_job_that_the_remaining_nodes_cannot_run_is_queued_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("dead").write_text("n2\n")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "2")
    assert launch(KILLED) == 75
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert launch(KILLED, KILLED) == 137, "not for ever"
    assert launch(KILLED, KILLED, {"code": 137, "checkpoint": 5}) == 75, "but as long as there is progress"


@pytest.mark.usefixtures("slurm")
def test_too_little_memory_on_the_remaining_nodes() -> None:
    Path("dead").write_text("n2\n")
    assert launch(KILLED, {"code": 2}) == 75


def test_real_workers_that_kill_themselves(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    need_mpi()
    monkeypatch.undo()
    code = (
        "import os, signal\n"
        "if 'DDNN_RESTART' not in os.environ and os.environ['OMPI_COMM_WORLD_RANK'] == '1':\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert launch_workers(2, [sys.executable, "-c", code], max_restarts=1) == 0
    assert "ddnn: a worker was killed by SIGKILL; restart 1" in capfd.readouterr().err


def test_no_mpirun_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(environment: object) -> str:
        raise UserError("no mpirun")

    monkeypatch.setattr(launcher, "find_mpirun", missing)
    with pytest.raises(UserError, match="no mpirun"):
        launch(KILLED)
