"""`ddnn status` on run dirs in every state, whole and damaged."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import assert_refused, make_job
from report_runs import start_row

from ddnn.inspection.path import describe_path
from ddnn.inspection.status import Status, follow_status, read_status
from ddnn.runs.checkpoint_manifest import CheckpointSummary, encode_manifest, peek_checkpoint
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import WarmupRow
from ddnn.runs.run_status import RunError, RunStatus, write_run_status
from ddnn.slurm.job import Job, SlurmState, write_job
from ddnn.util.errors import UserError
from ddnn.util.files import FileLock

RunCli = Callable[..., Any]
KILLED = "it ended without a message: it was killed, or its machine went down"
JOB = Job("4711", None, time.time() - 100, 2, 1, "mpirun")


def cv(epoch: int, loss: float | None, accepted: bool = True) -> dict[str, Any]:
    return {
        "type": "epoch",
        "epoch": epoch,
        "split": "cv",
        "loss": loss,
        "frame_accuracy": 0.5,
        "seconds": 1.0,
        "accepted": accepted,
    }


def trained(epoch: int, seconds: float = 9.0) -> dict[str, Any]:
    return {
        **cv(epoch, 1.0), "split": "train", "seconds": seconds, "learning_rate": 0.01, "frames_per_second": 3000.0,
    }  # fmt: skip


def worker(epoch: int, rank: int, waiting: float) -> dict[str, Any]:
    fractions = {"compute_fraction": 0.5, "data_fraction": 0.1, "comm_fraction": 0.2, "wait_fraction": waiting}
    return {
        "type": "worker", "epoch": epoch, "rank": rank, "frames": 9, "minibatches": 3, "seconds": 9.0, **fractions,
    }  # fmt: skip


WARMUP = {"type": "warmup", "epoch": 0, "loss": 4.25, "frame_accuracy": 0.1}
ROWS = [
    WARMUP,
    *(cv(0, 5.0), trained(1), worker(1, 0, 0.9), cv(1, 3.0), trained(2), worker(2, 0, 0.1), worker(2, 1, 0.3)),
    cv(2, 4.0, accepted=False),
]


def write_rows(run: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)


def write_status(path: Path, **fields: Any) -> None:
    """status.json of a training of two workers that was killed after two of ten epochs; `fields` differ."""
    now = time.time()
    values = {
        "kind": "training", "phase": "training", "pid": 77, "host": "n1", "world_size": 2, "epoch": 2, "max_epochs": 10,
        "started": now - 500, "updated": now - 100,
    }  # fmt: skip
    write_run_status(path, RunStatus.model_validate({**values, **fields}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The run dir of a training that was killed after two epochs, while it wrote its first checkpoint."""
    path = tmp_path / "run"
    (path / "checkpoints/.tmp-00000001").mkdir(parents=True)
    (path / "recipe.yaml").write_text("seed: 1\n")
    (path / "train.log").write_text("2026-11-21 20:40:01,123 INFO ddnn 0.1.0\n")
    write_status(path)
    write_rows(path, ROWS)
    return path


@contextmanager
def held(run: Path) -> Iterator[None]:
    """The run dir is that of a living process."""
    lock = FileLock(run / "train.log")
    lock.acquire()
    yield
    lock.release()


def lines(run: Path) -> dict[str, str]:
    """The lines of the status by name, without the first."""
    shown = [re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in read_status(run).as_text().splitlines()[1:]]
    return {line[0]: line[1] for line in shown if len(line) > 1}


def asked(answer: str | None, reason: str | None = None) -> Callable[[Job], SlurmState | None]:
    return lambda job: None if answer is None else SlurmState(answer, reason)


def test_figures(run: Path) -> None:
    status = read_status(run)
    assert (status.state, status.world_size, status.error) == ("interrupted", 2, KILLED)
    assert status.run is not None and (status.run.epoch, status.run.max_epochs) == (2, 10)
    assert status.last is not None and (status.last.epoch, status.last.loss, status.last.accepted) == (2, 4.0, False)
    assert status.metrics.last_accepted is not None and status.metrics.last_accepted.epoch == 1
    assert (status.metrics.train[-1].frames_per_second, status.metrics.warmup) == (
        3000.0,
        WarmupRow.model_validate(WARMUP),
    )
    assert status.fractions == pytest.approx({"compute": 0.5, "comm": 0.2, "wait": 0.2, "data": 0.1})
    assert status.seconds_since_update is not None and status.seconds_since_update < 60
    assert status.estimated_end is None and status.problems == ()
    shown = ("2 of at most 10", "rejected", "3000 frames/s", "wait 20.0 %", "warmup loss 4.2500")
    for text in ("interrupted", KILLED, *shown):
        assert text in status.as_text()
    assert json.loads(json.dumps(status.as_dict(), allow_nan=False))["last"]["epoch"] == 2


def test_the_model_of_a_finished_training_is_the_last_accepted_epochs(run: Path) -> None:
    """Not the one with the lowest loss, which is another model; and the learning rate is the one that was applied."""
    trained_row = {**trained(2), "learning_rate": 0.02, "schedule_learning_rate": 0.01}
    write_rows(run, [start_row(2), cv(0, 5.0), cv(1, 3.0), trained_row, cv(2, 3.5), cv(3, 9.0, accepted=False)])
    so_far = "epoch 2: cross-validation loss 3.5000, frame accuracy 50.00 %"
    assert lines(run)["model so far"] == so_far
    (run / "final.safetensors").touch()
    shown = lines(run)
    assert shown["final model"] == so_far and "model so far" not in shown
    lower = "epoch 1: cross-validation loss 3.0000, frame accuracy 50.00 %"
    assert shown["lowest loss"] == f"{lower}; that model was not kept"
    assert "learning rate 0.02 (2 x 0.01)" in shown["training"]
    assert shown["precision"] == "float32 on Intel(R) Xeon(R) 8481C"
    write_rows(run, [cv(0, 5.0), cv(1, 9.0, accepted=False)])
    shown = lines(run)
    assert shown["final model"] == "epoch 0: cross-validation loss 5.0000, frame accuracy 50.00 %, before training"
    assert "lowest loss" not in shown


def test_a_killed_training_is_told_from_a_running_one_by_its_lock(run: Path) -> None:
    with held(run):
        running = read_status(run)
    assert (running.state, running.error, running.resume_command) == ("running", None, None)
    assert running.as_text().startswith(f"{run}: running, training")
    assert running.estimated_end is not None and 75 < running.estimated_end - time.time() <= 80, "8 epochs of 10 s"
    assert read_status(run).state == "interrupted"


def test_a_training_that_may_be_restarted_is_not_over(run: Path) -> None:
    """Between the death of a worker and the restart by the launcher nobody holds the lock."""
    write_status(run, updated=time.time() - 5)
    assert read_status(run).state == "running"
    write_status(run, updated=time.time() - 5, world_size=1)
    assert read_status(run).state == "interrupted", "one worker has no launcher"
    rows = [
        {"type": "event", "event": "restarted", "epoch": 1, "minibatch": 8, "world_size": 2, "number": 1,
         "reason": "worker 1 was killed", "died_epoch": 1, "died_minibatch": 20},
    ]  # fmt: skip
    write_rows(run, [*ROWS, *rows])
    text = read_status(run).as_text()
    assert (
        "restart 1 after epoch 1 and 8 minibatches: worker 1 was killed; the job had been after epoch 1 and 20" in text
    )


@pytest.mark.parametrize("state", ["interrupted", "diverged", "failed"])
def test_how_a_training_ended(run: Path, state: str) -> None:
    (run / "job.out").write_text("slurmstepd: error: *** JOB 4711 CANCELLED ***\n")
    write_status(run, state=state, error=RunError(type="UserError", message="the loss is nan\x1b[2J", hint="lower it"))
    status = read_status(run)
    assert (status.state, status.error) == (state, "the loss is nan\x1b[2J\nhint: lower it")
    assert "the loss is nan\\x1b[2J\n" in status.as_text() and "\x1b" not in status.as_text()
    assert status.resume_command == (None if state == "diverged" else f"ddnn train {run} --resume")


@pytest.mark.parametrize("by", ["status.json", "final.safetensors"])
def test_a_finished_training(run: Path, by: str) -> None:
    (run / "final.safetensors").touch() if by == "final.safetensors" else write_status(run, state="finished")
    status = read_status(run, pytest.fail)  # nobody asks Slurm of what has finished
    assert (status.state, status.error, status.resume_command) == ("finished", None, None)


@pytest.mark.parametrize("content", [None, "{}", "[", '{"schema_version": 2}', "\0" * (2 << 20)])
def test_without_a_status_nothing_is_guessed(run: Path, content: str | None) -> None:
    (run / "status.json").unlink() if content is None else (run / "status.json").write_text(content)
    status = read_status(run)
    assert (status.state, len(status.problems)) == ("unknown", int(content is not None))
    assert status.metrics.last_accepted is not None and status.metrics.last_accepted.epoch == 1


@pytest.mark.parametrize(
    ("slurm", "begun", "state"),
    [
        ("PENDING", False, "pending"),
        ("CONFIGURING", True, "pending"),
        ("RUNNING", False, "running"),
        ("RUNNING", True, "running"),
        ("COMPLETING", True, "interrupted"),
        ("GONE", False, "failed"),
        ("GONE", True, "interrupted"),
        (None, False, "pending"),
        (None, True, "interrupted"),
    ],
)
def test_states_with_slurm(run: Path, slurm: str | None, begun: bool, state: str) -> None:
    write_job(run, JOB)
    if not begun:
        for name in ("train.log", "metrics.jsonl", "status.json"):
            (run / name).unlink()
    status = read_status(run, asked(slurm))
    assert (status.state, status.job) == (state, "4711")
    assert (slurm is None) == any("Slurm could not be asked" in problem for problem in status.problems)
    assert (" submitted " in status.as_text()) == (state == "pending")


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("ddnn 0.1\nddnn: worker 2 on n1: error: a\n  hint:  b\nddnn: worker 1: error: c\n",
         "ddnn: worker 2 on n1: error: a\n  hint:  b"),
        ("epoch 1\nslurmstepd-n1: error: *** JOB 5 ***\nsrun: error: x\n", "slurmstepd-n1: error: *** JOB 5 ***"),
        ("bash: x: command not found\njob.sh: exit code 127 from: x\n", "job.sh: exit code 127 from: x"),
        ("epoch 1\nlast words\n\0\n---\n", "last words"),
        ("", KILLED),
    ],
)  # fmt: skip
def test_the_likeliest_reason_in_the_jobs_output(run: Path, output: str, error: str | None) -> None:
    (run / "job.out").write_text(output)
    assert read_status(run).error == error


def test_a_line_that_is_being_written(run: Path) -> None:
    write_rows(run, ROWS, '{"type": "epoch", "epoch": 3, "split": "tr')
    status = read_status(run)
    assert status.last is not None and (status.last.epoch, status.problems) == (2, ())


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("metrics.jsonl", b'{"epoch": 1}\n{}\n', "metrics.jsonl"),
        ("status.json", b"{}", "status.json"),
        ("job.json", b"{}", "job.json"),
    ],
)
def test_damage_is_named_and_the_rest_told(run: Path, name: str, content: bytes, said: str) -> None:
    (run / name).write_bytes(content)
    status = read_status(run)
    assert any(said in problem for problem in status.problems)
    assert status.state == ("unknown" if name == "status.json" else "interrupted")
    assert (status.last is None) == (name == "metrics.jsonl")
    assert "problem: " in status.as_text()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(
    st.sampled_from(["metrics.jsonl", "status.json", "job.json", "train.log", "job.out"]),
    st.binary(max_size=60) | st.just(b"[" * 50_000),
)
def test_no_bytes_make_it_fail(run: Path, name: str, content: bytes) -> None:
    before = (run / name).read_bytes() if (run / name).exists() else None
    (run / name).write_bytes(content)
    status = read_status(run, asked(None))
    json.dumps(status.as_dict(), allow_nan=False)
    assert status.as_text().replace("\n", "").isprintable()
    (run / name).unlink() if before is None else (run / name).write_bytes(before)


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log", "job.json", "recipe.yaml", "status.json"])
def test_what_is_no_file(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    (run / name).mkdir()
    assert read_status(run, asked(None)).state == ("unknown" if name == "status.json" else "interrupted")


def test_pipes_do_not_hang_it(run: Path) -> None:
    for name in ("train.log", "job.out", "job.json", "metrics.jsonl", "status.json"):
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)
    assert read_status(run, asked(None)).problems


# --- pretraining


def test_a_training_that_trains_its_rbms(run: Path) -> None:
    write_status(run, phase="pretraining", rbm=2, num_rbms=6, epoch=3)
    with held(run):
        assert read_status(run).as_text().startswith(f"{run}: running, pretraining, RBM 2 of 6\n")


@pytest.fixture
def dbn(tmp_path: Path, run_cli: RunCli) -> Path:
    """The dir of a finished pretraining of two RBMs, by `ddnn pretrain`."""
    make_job(tmp_path / "job")
    shape = ("init=rbm", "model.hidden_layers=2", "pretrain.epochs=[2, 1]")
    made = run_cli(
        "pretrain", tmp_path / "job" / "recipe.yaml", "--run-dir", tmp_path / "my dbn", "--device", "cpu",
        *(word for setting in shape for word in ("--set", setting)),
    )  # fmt: skip
    assert made.exit_code == 0, made.stderr
    return tmp_path / "my dbn"


def test_how_far_a_pretraining_is(dbn: Path, run_cli: RunCli) -> None:
    finished = read_status(dbn, pytest.fail)
    assert (finished.state, finished.resume_command, finished.problems) == ("finished", None, ())
    assert "2 finished" in finished.as_text() and finished.run is not None
    means = {str(row.rbm): row.mean_reconstruction_error for row in read_metrics(dbn / "metrics.jsonl").pretraining}
    assert finished.metrics.reconstruction_errors == means and list(means) == ["1", "2"]
    text = ", ".join(f"RBM {n} {mean:.6g}" for n, mean in means.items())
    assert text in describe_path(dbn).fields["status"] and lines(dbn)["reconstruction error"] == text
    (dbn / "dbn.safetensors").unlink()
    (dbn / "rbm2.safetensors").unlink()
    write_run_status(dbn, finished.run.model_copy(update={"state": "running"}))
    killed = read_status(dbn)
    assert killed.state == "interrupted" and killed.metrics.pretraining
    text = killed.as_text()
    assert "  RBMs                  2 of 2 in training" in text and "rbm 2 epoch  1 of 1 reconstruction error" in text
    assert "  epochs" not in text and "checkpoint" not in text
    json.dumps(killed.as_dict(), allow_nan=False)
    assert killed.resume_command is not None
    again = run_cli(*shlex.split(killed.resume_command)[1:], "--device", "cpu")
    assert again.exit_code == 0, again.stderr
    assert read_status(dbn).state == "finished"


def test_a_pretraining_as_a_job(tmp_path: Path) -> None:
    """Before it begins, and where it ended without a message."""
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    write_job(tmp_path, JOB)
    (tmp_path / "job.out").write_text("slurmstepd: error: *** JOB 4711 CANCELLED DUE TO TIME LIMIT ***\n")
    states = [read_status(tmp_path, asked(slurm)).state for slurm in ("PENDING", "RUNNING", "GONE")]
    assert states == ["pending", "running", "failed"]
    write_status(tmp_path, kind="pretraining", phase="pretraining", rbm=1, num_rbms=2)
    ended = read_status(tmp_path, asked("GONE"))
    assert ended.state == "interrupted" and "TIME LIMIT" in (ended.error or "")
    assert ended.resume_command == f"ddnn pretrain {tmp_path}/recipe.yaml --run-dir {tmp_path}"


def test_nothing_there(tmp_path: Path, run_cli: RunCli) -> None:
    with pytest.raises(UserError, match="no run dir"):
        read_status(tmp_path)
    assert run_cli("status", tmp_path / "nope").exit_code == 2


def make_runs(folder: Path) -> list[Path]:
    """A finished training, one in the queue, and a pretraining; another folder beside them."""
    runs = [folder / name for name in ("exp/a", "exp/b", "exp/c")]
    for run in (*runs, folder / "exp/plots"):
        run.mkdir(parents=True)
    for run in runs:
        (run / "recipe.yaml").write_text("seed: 1\n")
    write_rows(runs[0], ROWS)
    write_status(runs[0], state="finished", epoch=2, max_epochs=9)
    write_job(runs[1], JOB)
    write_job(runs[2], replace(JOB, number="4712"))
    write_status(runs[2], kind="pretraining", state="failed", rbm=1, num_rbms=4)
    return runs


def test_several_run_dirs(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = make_runs(tmp_path)
    program = tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nprint('4711|PENDING|PartitionConfig')\nopen(__file__ + '.n', 'a').write('1')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    for paths in ([tmp_path / "exp"], runs):
        (program.parent / "squeue.n").unlink(missing_ok=True)
        result = run_cli("status", *paths)
        assert result.exit_code == 0, result.stderr
        header, *rows = [line.split() for line in result.stdout.splitlines()]
        assert header[:4] == ["run", "state", "epoch", "CV"]
        assert [row[:3] for row in rows[:2]] == [[str(runs[0]), "finished", "2/9"], [str(runs[1]), "pending", "0"]]
        assert rows[0][3:7] == ["3.0000", "50.00", "%", "3000"] and rows[1][3:] == ["PENDING:", "PartitionConfig"]
        assert rows[2][1:4] == ["failed", "RBM", "1/4"] and len(rows) == 3
        assert (program.parent / "squeue.n").read_text() == "1", "one call for all"
        found = json.loads(run_cli("status", *paths, "--json").stdout)
        assert [run["state"] for run in found] == ["finished", "pending", "failed"]
        assert found[1]["slurm_reason"] == "PartitionConfig"
    assert "pending, Slurm job 4711 (PENDING: PartitionConfig)" in run_cli("status", runs[1]).stdout
    assert_refused(run_cli("status", *runs, "--follow"), "several run dirs found, expected one", "location: --follow")
    assert_refused(run_cli("status", *runs, tmp_path / "exp/plots"), "there is no run dir")
    (tmp_path / "exp/plots/sub").mkdir()
    assert_refused(run_cli("status", tmp_path / "exp/plots"), "there is no run dir", "name the --run-dir of a training")


@pytest.mark.parametrize("options", [(), ("--slurm", "--cluster=my cluster.yaml", "--nodes=2")])
def test_a_job_that_was_cancelled_before_it_began(tmp_path: Path, options: tuple[str, ...]) -> None:
    """What resumes it submits a job as it was."""
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    write_job(tmp_path, replace(JOB, options=options))
    status = read_status(tmp_path, asked("GONE"))
    assert (status.state, status.error) == ("failed", "Slurm job 4711 was cancelled before it began")
    again = "--slurm '--cluster=my cluster.yaml' --nodes=2" if options else "--slurm"
    assert status.resume_command == f"ddnn train {tmp_path} --resume {again}"
    write_status(tmp_path, state="interrupted", slurm_job="4711")
    assert read_status(tmp_path, asked("GONE")).resume_command == status.resume_command
    write_status(tmp_path, state="interrupted")
    assert read_status(tmp_path, asked("GONE")).resume_command == f"ddnn train {tmp_path} --resume", "was no job"


def follow(run: Path, steps: list[Callable[[], object]], terminal: bool) -> tuple[Status, list[str]]:
    shown: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", lambda seconds: steps.pop(0)())
        return follow_status(run, shown.append, terminal=terminal), shown


@pytest.mark.parametrize("terminal", [False, True])
def test_follows_to_the_end(run: Path, terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    lock = FileLock(run / "train.log")
    lock.acquire()
    steps: list[Callable[[], object]] = [
        lambda: None,
        lambda: write_rows(run, [*ROWS, trained(3), cv(3, 2.0)]),
        lambda: (run / "final.safetensors").write_bytes(b""),
        lock.release,
    ]
    status, shown = follow(run, steps, terminal)
    assert (status.state, status.last and status.last.epoch) == ("finished", 3)
    if terminal:
        assert shown == [] and "finished" in capsys.readouterr().out
    else:
        assert ["running" in text for text in shown] == [True, True, False], "only what changes"


def test_command_line(run: Path, run_cli: RunCli) -> None:
    assert json.loads(run_cli("status", run, "--json").stdout)["epoch"] == 2
    ended = run_cli("status", run, "--follow")
    assert (ended.exit_code, ended.stdout.count("interrupted")) == (1, 1)
    (run / "final.safetensors").write_bytes(b"")
    assert run_cli("status", run, "--follow", "--json").exit_code == 0
    assert run_cli("status", run).stdout.startswith(f"{run}: finished\n")


def test_it_needs_no_torch(run: Path) -> None:
    code = "import sys; from ddnn.cli import cli; cli(['status', sys.argv[1]], standalone_mode=False); " \
        "sys.exit('torch' in sys.modules)"  # fmt: skip
    assert subprocess.run([sys.executable, "-c", code, run], capture_output=True, timeout=600).returncode == 0


# --- resuming


HEADER = {"epoch": 3, "minibatch": 120, "recipe": "x"}


def write_checkpoint(run: Path, number: int, header: dict[str, Any], workers: int = 1) -> Path:
    """As ddnn.runs.checkpoint does, with files of a few bytes."""
    folder = run / "checkpoints" / f"{number:08d}"
    folder.mkdir(parents=True)
    files = {}
    for name in ("global.safetensors", *(f"rank{rank:04d}.safetensors" for rank in range(workers))):
        (folder / name).write_bytes(b"12345")
        files[name] = (5, hashlib.sha256(b"12345").hexdigest())
    (folder / "manifest.json").write_bytes(encode_manifest(CheckpointSummary(number, workers, files, header)))
    return folder


def test_where_a_training_is_resumed(run: Path, run_cli: RunCli) -> None:
    write_checkpoint(run, 41, {"epoch": 3, "minibatch": 0})
    write_checkpoint(run, 42, HEADER, workers=2)
    status = read_status(run)
    assert status.checkpoint is not None and status.problems == ()
    assert [status.checkpoint[key] for key in ("number", "world_size", "epoch", "minibatch")] == [42, 2, 3, 120]
    assert status.resume_command == f"ddnn train {run} --resume"
    text = status.as_text()
    assert (
        "number 42: after epoch 3, 120 minibatches into the next, 0 s ago" in text and f"train {run} --resume" in text
    )
    told = run_cli("info", run).stdout
    assert "number 42: after epoch 3" in told and f"train {run} --resume" in told
    (run / "final.safetensors").write_bytes(b"")  # while it is made longer
    assert read_status(run).checkpoint is not None and read_status(run).state != "finished"
    shutil.rmtree(run / "checkpoints")
    assert (read_status(run).state, read_status(run).checkpoint, read_status(run).resume_command) == (
        "finished",
        None,
        None,
    )


def test_resuming_without_a_checkpoint(run: Path) -> None:
    assert "none: a resume begins from the start" in read_status(run).as_text()
    with held(run):
        assert "a resume" not in read_status(run).as_text()


@pytest.mark.parametrize(
    ("header", "text"),
    [({}, "number 42"), ({"epoch": 3}, "number 42: after epoch 3"), ({"epoch": True}, "number 42"),
     ({"epoch": -1, "minibatch": "x"}, "number 42"), ({"epoch": 3, "minibatch": 2**80}, "number 42: after epoch 3")],
)  # fmt: skip
def test_headers_of_any_kind(run: Path, header: dict[str, Any], text: str) -> None:
    write_checkpoint(run, 42, header)
    found = peek_checkpoint(run / "checkpoints", pytest.fail)
    assert found is not None and found.to_dict()["where"] == text


def no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def huge_manifest(folder: Path) -> None:
    with (folder / "manifest.json").open("r+b") as handle:
        handle.truncate(2**33)


def deep_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("[" * 100_000)


def pipe_for_a_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def linked_manifest(folder: Path) -> None:
    (folder / "manifest.json").rename(folder.parent / "elsewhere.json")
    (folder / "manifest.json").symlink_to(folder.parent / "elsewhere.json")


def linked_folder(folder: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def cut_part(folder: Path) -> None:
    (folder / "rank0000.safetensors").write_bytes(b"1")


def missing_part(folder: Path) -> None:
    (folder / "global.safetensors").unlink()


def another_number(folder: Path) -> None:
    (folder / "manifest.json").write_bytes((folder.parent / "00000041/manifest.json").read_bytes())


def one_byte(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"epoch": 3', '"epoch": 4'))


def names_outside(folder: Path) -> None:
    value = CheckpointSummary(42, 1, {"../../recipe.yaml": (5, ""), "global.safetensors": (5, "")}, {})
    (folder / "manifest.json").write_bytes(encode_manifest(value))


@pytest.mark.parametrize(
    "damage",
    [no_manifest, huge_manifest, deep_manifest, pipe_for_a_manifest, linked_manifest, linked_folder, cut_part,
     missing_part, another_number, one_byte, names_outside],
)  # fmt: skip
def test_behind_a_damaged_checkpoint_is_another(run: Path, damage: Callable[[Path], None]) -> None:
    write_checkpoint(run, 41, HEADER)
    damage(write_checkpoint(run, 42, HEADER))
    status = read_status(run)
    assert status.checkpoint is not None and status.checkpoint["number"] == 41
    assert len(status.problems) == 1 and "checkpoint 42" in status.problems[0]


@pytest.mark.parametrize("kind", ["file", "link", "fifo"])
def test_what_is_no_folder_of_checkpoints(run: Path, kind: str) -> None:
    path = (run / "checkpoints").rename(run / "elsewhere").with_name("checkpoints")
    {"file": path.touch, "link": lambda: path.symlink_to("elsewhere"), "fifo": lambda: os.mkfifo(path)}[kind]()
    status = read_status(run)
    assert status.checkpoint is None and status.problems[0].startswith("checkpoints: ")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["sha256", "files", "metadata", "number", "x"]), inner, max_size=5),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_manifest(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("run") / "checkpoints/00000042"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(content)
    said: list[str] = []
    assert peek_checkpoint(folder.parent, said.append) is None and len(said) == 1


def test_status_needs_no_torch(run: Path) -> None:
    write_checkpoint(run, 42, HEADER)
    code = (
        "import sys; from pathlib import Path; from ddnn.inspection.status import read_status; "
        "assert read_status(Path(sys.argv[1])).checkpoint; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, run], check=True)


@pytest.mark.parametrize(
    "name",
    ["recipe.yaml", "train.log", "metrics.jsonl", "final.safetensors", "best.safetensors", "job.json", "job.out",
     "checkpoints", "pretrain"],
)  # fmt: skip
def test_pipes_in_place_of_files_are_not_waited_for(run: Path, name: str, run_cli: RunCli) -> None:
    if (run / name).exists():
        (run / name).rename(run / "aside")
    os.mkfifo(run / name)
    for command in ("status", "info"):
        assert "Traceback" not in run_cli(command, run).stderr
