"""`ddnn status` on run dirs in every state, whole and damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddnn.errors import UserError
from ddnn.info.follow import follow_status
from ddnn.info.status import Status, read_status
from ddnn.info.status_text import duration
from ddnn.slurm.job import Job, write_job
from ddnn.train.run_dir import RunDir

RunCli = Callable[..., Any]
RECIPE = """\
data: {train: /gone/train, alignments: /gone/ali}
schedule: {name: exponential, epochs: 10}
parallel: {workers: 2}
"""
JOB = Job("4711", None, time.time() - 100, 2, 1, "mpirun")


def cv(epoch: int, loss: float | None, accepted: bool = True) -> dict[str, Any]:
    return {"epoch": epoch, "split": "cv", "loss": loss, "frame_accuracy": 0.5, "seconds": 1.0, "accepted": accepted}


def trained(epoch: int, seconds: float = 9.0) -> dict[str, Any]:
    return {
        **cv(epoch, 1.0), "split": "train", "seconds": seconds, "learning_rate": 0.01, "frames_per_second": 3000.0,
    }  # fmt: skip


def worker(epoch: int, rank: int, waiting: float) -> dict[str, Any]:
    shares = {"compute_share": 0.5, "data_share": 0.1, "communication_share": 0.2, "waiting_share": waiting}
    return {
        "epoch": epoch, "split": "worker", "rank": rank, "frames": 9, "minibatches": 3, "seconds": 9.0, **shares,
    }  # fmt: skip


ROWS = [
    *(cv(0, 5.0), trained(1), worker(1, 0, 0.9), cv(1, 3.0), trained(2), worker(2, 0, 0.1), worker(2, 1, 0.3)),
    cv(2, 4.0, accepted=False),
]


def write_rows(run: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run dir of a training that has stopped after two epochs."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "recipe.yaml").write_text(RECIPE)
    (path / "train.log").write_text("2026-11-21 20:40:01,123 INFO ddnn 0.1.0\n")
    write_rows(path, ROWS)
    return path


def asked(answer: str | None) -> Callable[[Job], str | None]:
    return lambda job: answer


def test_figures(run: Path) -> None:
    status = read_status(run)
    assert (status.state, status.workers, status.epochs_done, status.epochs_most) == ("stopped", 2, 2, 10)
    assert status.last == {"epoch": 2, "loss": 4.0, "frame_accuracy": 0.5, "accepted": False}
    assert status.best is not None and status.best["epoch"] == 1
    assert (status.frames_per_second, status.frames_per_second_per_worker) == (3000.0, 1500.0)
    assert status.shares == pytest.approx({"compute": 0.5, "communication": 0.2, "waiting": 0.2, "data": 0.1})
    assert status.age is not None and status.age < 60 and status.estimated_end is None
    assert status.problems == ()
    for said in ("stopped", "2 of at most 10", "rejected", "3000 frames/s, 1500 for each of 2", "waiting 20.0 %"):
        assert said in status.as_text()


def test_states_without_slurm(run: Path) -> None:
    lock = RunDir(run, resume=True).open_log()
    running = read_status(run)
    lock.close()
    assert (running.state, running.phase) == ("running", "training")
    assert running.estimated_end is not None and 75 < running.estimated_end - time.time() <= 80, "8 epochs of 10 s"
    assert read_status(run).state == "stopped"
    (run / "final.safetensors").write_bytes(b"")
    finished = read_status(run, pytest.fail)  # nobody asks Slurm of what has finished
    assert (finished.state, finished.error) == ("finished", None)


@pytest.mark.parametrize(
    ("slurm", "begun", "state"),
    [
        ("PENDING", False, "submitted"),
        ("CONFIGURING", True, "submitted"),
        ("RUNNING", False, "running"),
        ("RUNNING", True, "running"),
        ("COMPLETING", True, "stopped"),
        ("GONE", False, "stopped"),
        ("GONE", True, "stopped"),
        (None, False, "submitted"),
        (None, True, "stopped"),
    ],
)
def test_states_with_slurm(run: Path, slurm: str | None, begun: bool, state: str) -> None:
    write_job(run, JOB)
    if not begun:
        (run / "train.log").unlink()
        (run / "metrics.jsonl").unlink()
    status = read_status(run, asked(slurm))
    assert (status.state, status.job) == (state, "4711")
    assert (slurm is None) == any("Slurm could not be asked" in problem for problem in status.problems)
    assert (" submitted " in status.as_text()) == (state == "submitted")


def test_the_last_error_of_the_log(run: Path) -> None:
    (run / "job.out").write_text("slurmstepd: error: *** JOB 4711 CANCELLED ***\n")
    log = run / "train.log"
    log.write_text(
        log.read_text() + "2026-11-21 20:41:01,1 ERROR stopped: first\n"
        "2026-11-21 20:41:02,1 ERROR stopped: the training loss is nan\n  where: x\x1b[2J\n"
        "2026-11-21 20:41:03,1 INFO bye\n"
    )
    status = read_status(run)
    assert status.error == "stopped: the training loss is nan\n  where: x?[2J"
    assert "the training loss is nan\n" in status.as_text() and "\x1b" not in status.as_text()


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("ddnn 0.1\nddnn: worker 2 on n1: error: a\n  mend:  b\nddnn: worker 1: error: c\n",
         "ddnn: worker 2 on n1: error: a\n  mend:  b"),
        ("epoch 1\nslurmstepd-n1: error: *** JOB 5 ***\nsrun: error: x\n", "slurmstepd-n1: error: *** JOB 5 ***"),
        ("bash: x: command not found\njob.sh: exit code 127 from: x\n", "job.sh: exit code 127 from: x"),
        ("epoch 1\nlast words\n\0\n---\n", "last words"),
        ("", None),
    ],
)  # fmt: skip
def test_the_likeliest_reason_in_the_jobs_output(run: Path, output: str, error: str | None) -> None:
    (run / "job.out").write_text(output)
    assert read_status(run).error == error


def test_a_line_that_is_being_written(run: Path) -> None:
    write_rows(run, ROWS, '{"epoch": 3, "split": "tr')
    status = read_status(run)
    assert (status.epochs_done, status.problems) == (2, ())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b'{"epoch": 1}\n{}\n', "metrics.jsonl"),
        ("recipe.yaml", b"minibtach: 1\n", "did you mean minibatch"),
        ("recipe.yaml", b"\0" * 200_000, "recipe.yaml"),
        ("job.json", b"{}", "job.json"),
    ],
)
def test_damage_is_named_and_the_rest_told(run: Path, name: str, content: bytes, said: str) -> None:
    (run / name).write_bytes(content)
    status = read_status(run)
    assert any(said in problem for problem in status.problems)
    assert status.state == "stopped"
    assert (status.epochs_done == 2) == (name != "metrics.jsonl")
    assert "problem: " in status.as_text()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    st.sampled_from(["metrics.jsonl", "recipe.yaml", "job.json", "train.log", "job.out"]),
    st.binary(max_size=60) | st.just(b"[" * 50_000),
)
def test_no_bytes_make_it_fail(run: Path, name: str, content: bytes) -> None:
    before = (run / name).read_bytes() if (run / name).exists() else None
    (run / name).write_bytes(content)
    status = read_status(run, asked(None))
    json.dumps(status.as_dict(), allow_nan=False)
    assert status.as_text().replace("\n", "").isprintable()
    (run / name).unlink() if before is None else (run / name).write_bytes(before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "job.json", "recipe.yaml"])
def test_what_is_no_file(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    assert read_status(run, asked(None)).state == "stopped"


def test_pipes_do_not_hang_it(run: Path) -> None:
    for name in ("train.log", "job.out", "job.json", "metrics.jsonl"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert read_status(run, asked(None)).problems


def test_pretraining(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    write_job(run, JOB)
    assert read_status(run, asked("RUNNING")).phase == "starting"
    (run / "pretrain").mkdir()
    row = {"layer": 2, "pass": 3, "reconstruction_error_all_passes": 0.5}
    (run / "pretrain" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert read_status(run, asked("RUNNING")).phase == "pretraining, RBM 2, 3 passes done"


def test_nothing_there(tmp_path: Path, run_cli: RunCli) -> None:
    with pytest.raises(UserError, match="no run dir"):
        read_status(tmp_path)
    assert run_cli("status", tmp_path / "nope").exit_code == 2


def follow(run: Path, steps: list[Callable[[], object]], terminal: bool) -> tuple[Status, list[str]]:
    shown: list[str] = []
    return follow_status(run, shown.append, terminal=terminal, pause=lambda seconds: steps.pop(0)()), shown


@pytest.mark.parametrize("terminal", [False, True])
def test_follows_to_the_end(run: Path, terminal: bool) -> None:
    owner = RunDir(run, resume=True)
    lock = owner.open_log()
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: write_rows(run, [*ROWS, trained(3), cv(3, 2.0)]),
        lambda: (run / "final.safetensors").write_bytes(b""),
        lambda: lock.close(),
    ]
    status, shown = follow(run, steps, terminal)
    assert (status.state, status.epochs_done) == ("finished", 3)
    if terminal:
        assert len(shown) == 5 and all(text.startswith("\x1b[") for text in shown[1:])
    else:
        assert ["running" in text for text in shown] == [True, True, False], "only what changes"


def test_command_line(run: Path, run_cli: RunCli) -> None:
    assert json.loads(run_cli("status", run, "--json").stdout)["epochs_done"] == 2
    stopped = run_cli("status", run, "--follow")
    assert (stopped.exit_code, stopped.stdout.count("stopped")) == (1, 1)
    (run / "final.safetensors").write_bytes(b"")
    assert run_cli("status", run, "--follow", "--json").exit_code == 0
    assert run_cli("status", run).stdout.startswith(f"{run}: finished\n")


def test_it_needs_no_torch(run: Path) -> None:
    code = "import sys; from ddnn.cli import cli; cli(['status', sys.argv[1]], standalone_mode=False); " \
        "sys.exit('torch' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code, run], capture_output=True, timeout=60).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (61, "1 min 1 s"), (7300, "2 h 1 min"), (90_000, "1 d 1 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
