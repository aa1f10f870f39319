"""Runs are made once, go on after a break, and end in records; a diverged one is a result."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from reproduce.small import TOY, write_corpus

from ddnn.nn.acoustic_model import load_model
from ddnn.reproduce.command import exclusive
from ddnn.reproduce.executor import CommandFailed, LocalExecutor, summarize
from ddnn.reproduce.runs import PlannedRun, RunRecord, missing_runs, plan_runs, read_records, write_record
from ddnn.reproduce.tables import load_config
from ddnn.util.system import usable_cores


def local_executor(folder: Path, out: Path) -> tuple[LocalExecutor, list[PlannedRun]]:
    """With all runs of the toy table."""
    config = load_config(folder)
    executor = LocalExecutor(folder, folder / config.dbn_recipe, out / "records", "cpu", 2, lambda line: None)
    return executor, plan_runs(config, folder, [TOY], out)


def execute(folder: Path, out: Path, sizes: tuple[int, ...] = (1, 2), seeds: tuple[int, ...] = (1,)) -> list[str]:
    """Executes what is missing; the names of the runs that were missing, and the errors."""
    executor, runs = local_executor(folder, out)
    runs = [run for run in runs if run.workers in sizes and run.seed in seeds]
    todo = missing_runs(runs, read_records(executor.records))
    return [*(run.name for run in todo), *executor.execute(todo)]


def test_runs_are_made_judged_and_recorded_once(tmp_path: Path) -> None:
    pytest.importorskip("kaldi_decoder")
    folder, out = write_corpus(tmp_path / "a b"), tmp_path / "out"
    assert execute(folder, out) == ["sgd-1-1", "base-1-1", "sgd-2-1", "base-2-1"]
    assert execute(folder, out) == []
    records = read_records(out / "records")
    assert len(list((out / "dbns").iterdir())) == 1
    dbn = next((out / "dbns").glob("*/dbn.safetensors"))
    for name, record in records.items():
        parameters = load_model(dbn).network.parameters.numpy().tobytes()
        assert record.dbn == f"parameters {hashlib.sha256(parameters).hexdigest()[:12]}", "of no header"
        assert record.failure is None and record.baseline is not None and record.initial_cv is not None
        optimizer = "ng-sgd" if record.condition == "base" else "sgd"
        assert record.precision == "float32" and f"name {optimizer}" in record.optimizer
        assert len(record.train_digest) > 10 and record.machine
        assert record.epochs == 2 and len(record.cv_by_epoch) == 2
        assert record.cv is not None and record.cv == record.cv_by_epoch[-1]
        assert record.tests["test"].frame_accuracy > 0.3
        words = record.wers["test loop"]
        assert sum(words.words) == 24 and words.wer == pytest.approx(100 * sum(words.errors) / 24)
        assert record.time is not None and (record.time.bytes_sent or 0) > 0 if "-2-" in name else record.time
        assert record.measured is not None and record.measured.strategy == "all-reduce"
        assert record.command.startswith("ddnn train ") and str(folder) in record.command
    assert not list(out.glob("runs/*/evaluation"))


def test_what_was_trained_before_a_break_is_only_judged(tmp_path: Path) -> None:
    folder, out = write_corpus(tmp_path, graphs=False, init="random"), tmp_path / "out"
    assert execute(folder, out, sizes=(1,)) == ["sgd-1-1", "base-1-1"]
    (out / "records" / "base-1-1.json").unlink()
    run_dir = next((out / "runs").glob("base-1-1-*"))
    before = (run_dir / "final.safetensors").stat()
    first = read_records(out / "records")["sgd-1-1"]
    assert first.time is not None and first.time.cores == usable_cores() and first.machine and not first.dbn
    first = first.model_copy(update={"dbn": "of its own"})
    write_record(out / "records", first.model_copy(update={"test_digest": "on other tests"}))
    assert execute(folder, out, sizes=(1,)) == ["sgd-1-1", "base-1-1"]
    assert (run_dir / "final.safetensors").stat().st_ino == before.st_ino
    again = read_records(out / "records")
    assert again["sgd-1-1"] == first, "its record said where it was trained, and from what"
    assert again["base-1-1"].time is not None and again["base-1-1"].time.cores == usable_cores()
    assert again["base-1-1"].machine == first.machine, "its metrics say where it was trained"


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
    assert execute(folder, out, sizes=(size,)) == [f"sgd-{size}-1", f"base-{size}-1"]
    record = read_records(out / "records")[f"sgd-{size}-1"]
    assert record.failed is not None and why in record.failed and record.cv is None
    assert record.failure == record.failed
    assert execute(folder, out, sizes=(size,)) == []


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


def test_a_record_says_what_came_out() -> None:

    assert summarize(RunRecord(condition="a", workers=1, seed=1, recipe="", failed="the training diverged")).endswith(
        "diverged"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "import sys\nsys.exit('ddnn: error: no such x\\n  location: y\\n  hint: z')",
            "exit code 1: ddnn: error: no such x",
        ),
        ("print(1 / 0)", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "exit code 3: it wrote nothing"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by SIGKILL: it wrote nothing"),
    ],
)
def test_how_a_command_failed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stand_in.py").write_text(body)
    executor, runs = local_executor(write_corpus(tmp_path), tmp_path / "out")
    with pytest.raises(CommandFailed) as failed:
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
    assert CommandFailed(["ddnn", "train"], returncode, output, tmp_path).divergence == divergence
