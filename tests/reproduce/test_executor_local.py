"""Runs are made once, go on after a break, and end in records; a diverged one is a result."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reproduce.small import local_executor, write_corpus

from ddnn.reproduce.command import exclusive
from ddnn.reproduce.executor import command_error
from ddnn.reproduce.runs import PlannedRun, read_records
from ddnn.util.errors import DivergedError, UserError


def test_a_stack_that_fails_fails_once_for_all_its_runs(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path), tmp_path / "out"
    executor, runs = local_executor(folder, out)
    (tmp_path / "data" / "feats.ark").write_bytes(b"")
    problems = executor.execute(runs)
    assert len(runs) == 8 and len(problems) == 8, "all runs of two seeds"
    assert all(f"dbn-{run.seed}.txt" in str(problems[run.name]) for run in runs)
    for seed in (1, 2):
        assert (out / "logs" / f"dbn-{seed}.txt").read_text().count("ddnn: error:") == 1
    assert not (out / "runs").exists()


def test_one_call_at_a_time_makes_runs(tmp_path: Path, run_cli: Callable[..., Any]) -> None:
    folder, out = write_corpus(tmp_path, graphs=False, init="random"), tmp_path / "out"
    with exclusive(out):
        said = run_cli("reproduce", "table6", "--corpus", folder, "--out", out)
    assert said.exit_code == 2 and "another call" in said.stderr and not (out / "runs").exists()
    with exclusive(out):
        pass  # it was given back


def test_ctrl_c_while_runs_are_lined_up_begins_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Future[Any]] = []

    class Interrupted(ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Future[Any]:
            if submitted:
                raise KeyboardInterrupt
            submitted.append(super().submit(*arguments, **more))
            return submitted[0]

    monkeypatch.setattr("ddnn.reproduce.executor.ThreadPoolExecutor", Interrupted)
    executor, runs = local_executor(write_corpus(tmp_path, init="random"), tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        executor.execute(runs)
    assert executor.processes.run("ddnn.cli", ["--version"], tmp_path / "log")[1] == "not started"
    assert read_records(tmp_path / "out" / "records") == {}


@pytest.mark.parametrize(
    ("size", "rate", "why"), [(1, 1e38, "diverged"), (2, 1e38, "diverged"), (1, 3.0, "not below that of the initial")]
)
def test_a_run_that_diverges_or_learns_nothing_is_a_result(tmp_path: Path, size: int, rate: float, why: str) -> None:
    folder, out = write_corpus(tmp_path, init="random", graphs=False, rate=rate), tmp_path / "out"
    executor, runs = local_executor(folder, out)
    lines: list[str] = []
    executor.report = lines.append
    (run,) = (run for run in runs if run.name == f"sgd-{size}-1")
    assert executor.execute([run]) == {}
    records = read_records(out / "records")
    record = records[run.name]
    assert record.failed is not None and why in record.failed and record.cv is None
    assert record.failure == record.failed and run.is_recorded(records)
    assert lines == [f"1/1 {run.name}: did not train: {record.failed}"]


def test_a_failure_that_is_none_of_the_training_leaves_no_record(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, init="random"), tmp_path / "out"
    executor, runs = local_executor(folder, out)
    (tmp_path / "data" / "feats.ark").write_bytes(b"")
    problems = executor.execute([run for run in runs if run.name == "sgd-1-1"])
    assert list(problems) == ["sgd-1-1"] and "sgd-1-1.txt" in str(problems["sgd-1-1"])
    message = problems["sgd-1-1"].message
    assert message.startswith("exit code 2: ddnn: error: ") and "the file is empty" in message
    assert read_records(out / "records") == {}


@pytest.mark.parametrize(("cores", "sizes", "expected"), [(2, (1,), 2), (2, (2,), 1), (4, (2,), 2), (1, (2,), 1)])
def test_as_many_runs_at_once_as_there_are_cores_for_their_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, sizes: tuple[int, ...], expected: int
) -> None:
    executor, runs = local_executor(write_corpus(tmp_path, init="random"), tmp_path / "out")
    executor.cores = cores
    running: list[str] = []
    most = 0

    def execute(run: PlannedRun) -> str:
        nonlocal most
        running.append(run.name)
        time.sleep(0.05)
        most = max(most, len(running))
        running.remove(run.name)
        return "done"

    monkeypatch.setattr(executor, "_execute_run", execute)
    assert executor.execute([run for run in runs if run.workers in sizes]) == {} and most == expected


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "import sys\nsys.exit('ddnn: error: no such x\\n  location: y\\n  hint: z')",
            "exit code 1: ddnn: error: no such x",
        ),
        ("print(1 / 0)", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(4)", "exit code 4: it wrote nothing"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by SIGKILL: it wrote nothing"),
        (
            "import sys\nsys.exit('ddnn: worker 3 on vm: error: 4 workers have 1 GPU\\n  hint: take one worker')",
            "exit code 1: ddnn: worker 3 on vm: error: 4 workers have 1 GPU",
        ),
    ],
)
def test_how_a_command_failed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stand_in.py").write_text(body)
    executor, runs = local_executor(write_corpus(tmp_path), tmp_path / "out")
    with pytest.raises(UserError) as failed:
        executor._call("stand_in", ["a b"], runs[0], "log")
    assert failed.value.message == message and "python -m stand_in 'a b'" in str(failed.value)


@pytest.mark.parametrize(
    ("returncode", "output", "divergence"),
    [
        (3, "epoch 1\nddnn: error: the loss is nan\n  hint: lower it\n", "the loss is nan"),
        (3, "", "the training diverged"),
        (2, "ddnn: error: the training diverged\n", None),
        (-9, "ddnn: error: the training diverged\n", None),
    ],
)
def test_divergence_is_known_by_the_exit_code(
    tmp_path: Path, returncode: int, output: str, divergence: str | None
) -> None:
    error = command_error(["ddnn", "train"], returncode, output, tmp_path)
    assert (error.message if isinstance(error, DivergedError) else None) == divergence
