"""`ddnn reproduce` from the command line: once, again, and after a stop."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_python import forked_python
from reproduce.small import Toy, one_seed, write_corpus

from ddnn.nn.acoustic_model import load_model
from ddnn.reproduce.command import LOCK, ReproduceResult, exclusive
from ddnn.reproduce.runs import PlannedRun, RunRecord, plan_runs, read_records, write_record
from ddnn.reproduce.tables import load_config, select_tables
from ddnn.util.errors import UserError
from ddnn.util.files import is_locked
from ddnn.util.system import usable_cores

pytest.importorskip("matplotlib")

RunCli = Callable[..., Any]
PYTHON = sys.executable
"""Whose processes have the command's words in their names, as forked ones have not."""


def runs_of(folder: Path) -> list[PlannedRun]:
    return plan_runs(load_config(folder), folder, select_tables(("table6",)), folder.parents[1] / "out")


def record_of(run: PlannedRun, **changes: object) -> RunRecord:
    """One that counts, but for the changes."""
    names = {"condition": run.condition, "workers": run.workers, "seed": run.seed}
    return RunRecord.model_validate({**names, "recipe": run.digest, "test_digest": run.test_digest, **changes})


def test_a_table_from_nothing_then_nothing_to_do(tmp_path: Path, run_cli: RunCli) -> None:
    pytest.importorskip("kaldi_decoder")
    folder, out = one_seed(write_corpus(tmp_path / "a b")), tmp_path / "out"
    (folder / "reproduce.yaml").write_text((folder / "reproduce.yaml").read_text() + "aliases: {sgd: base}\n")
    arguments = ("reproduce", "table6", "--corpus", folder, "--out", out, "--device", "cpu")
    planned = run_cli(*arguments, "--dry-run")
    assert planned.exit_code == 0 and "0 runs recorded, 2 missing" in planned.stdout and not out.exists()
    first = run_cli(*arguments)
    assert first.exit_code == 0, first.stderr
    assert "2 runs recorded, 0 missing" in first.stdout and "3/3" in first.stderr
    markdown, html = (out / "report.md").read_text(), (out / "report.html").read_text()
    assert "NG-SGD is better than SGD" in markdown and "test loop WER" in markdown
    assert html.count("<svg ") == 3 and not re.search(r"(src|href)=.https?:", html)
    assert (out / "report" / "table6.svg").read_text().startswith("<svg ")
    (dbn,) = (out / "dbns").glob("*/dbn.safetensors")
    parameters = load_model(dbn).network.parameters.numpy().tobytes()
    for name, record in read_records(out / "records").items():
        assert record.dbn == f"parameters {hashlib.sha256(parameters).hexdigest()[:12]}", "of no header"
        assert record.failure is None and record.baseline is not None and record.initial_cv is not None
        assert record.precision == "float32" and "name ng-sgd" in record.optimizer
        assert len(record.train_digest) > 10 and record.machine
        assert record.epochs == 2 and len(record.cv_by_epoch) == 2
        assert record.cv is not None and record.cv == record.cv_by_epoch[-1]
        assert record.tests["test"].frame_accuracy > 0.3
        words = record.wers["test loop"]
        assert sum(words.words) == 24 and words.wer == pytest.approx(100 * sum(words.errors) / 24)
        assert record.time is not None and ((record.time.bytes_sent or 0) > 0) == ("-2-" in name)
        assert record.time.cores == usable_cores()
        assert record.measured is not None and record.measured.strategy == "all-reduce"
        assert record.command.startswith("ddnn train ") and str(folder) in record.command
    assert not list(out.glob("runs/*/evaluation"))
    made = {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")}
    second = run_cli(*arguments, "--json")
    assert second.exit_code == 0 and json.loads(second.stdout)["missing"] == []
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").rglob("*")} == made


def test_what_was_trained_is_only_evaluated_but_all_is_reported(toy: Toy, tmp_path: Path, run_cli: RunCli) -> None:
    arguments = ("reproduce", "table6", "--corpus", toy.folder, "--out", toy.out, "--device", "cpu")
    first = read_records(toy.out / "records")
    made = {path: path.stat().st_mtime_ns for path in (toy.out / "runs").rglob("*.safetensors")}
    (toy.out / "records" / "base-1-1.json").unlink()
    write_record(toy.out / "records", first["sgd-1-1"].model_copy(update={"test_digest": "on other tests"}))
    some = run_cli(*arguments, "--workers", "1")
    assert some.exit_code == 0 and "2 runs recorded, 2 missing" in some.stdout
    again = read_records(toy.out / "records")
    assert {name: made.model_copy(update={"command": first[name].command}) for name, made in again.items()} == first
    assert {path: path.stat().st_mtime_ns for path in (toy.out / "runs").rglob("*.safetensors")} == made
    assert "2 runs missing" in (toy.out / "report.md").read_text()
    none = run_cli(*arguments, "--report-only", "--report", tmp_path / "elsewhere" / "toy")
    assert none.exit_code == 0 and (tmp_path / "elsewhere" / "toy.html").exists()
    assert len(list((toy.out / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("table7",), "no table 'table7'"),
        (("table6", "--corpus", "nowhere"), "no corpus 'nowhere'"),
        (("table6", "--seeds", "x"), "--seeds"),
        (("table6", "--seeds", "9", "--corpus", "TOY"), "these tables have 1, 2"),
        (("table6", "--workers", "3", "--corpus", "TOY"), "these tables have 1, 2"),
        (
            ("table6", "--conditions", "base,sdg", "--corpus", "TOY"),
            "sdg found, the runs of these tables have base, sgd",
        ),
        (("table6", "--report", ".", "--dry-run", "--corpus", "TOY"), "expected DIR/NAME"),
        (("table6", "--report-only", "--records", "TOY/nowhere", "--corpus", "TOY"), "no such folder of records"),
        (("table6", "--report-only", "--records", "TOY/tables", "--corpus", "TOY"), "it has no record"),
        (
            ("table6", "--report-only", "--records", "TOY/reproduce.yaml", "--corpus", "TOY"),
            "is a file, expected a directory",
        ),
        (
            ("table6", "--dry-run", "--records", "TOY/reproduce.yaml", "--corpus", "TOY"),
            "is a file, expected a directory",
        ),
        (
            ("table6", "--records", "TOY/reproduce.yaml/here", "--corpus", "TOY", "--out", "TOY/out"),
            "name another folder with --rec",
        ),
        (
            ("table6", "--report", "TOY/reproduce.yaml/here/r", "--corpus", "TOY", "--out", "TOY/out"),
            "name another folder with --rep",
        ),
        (("table6", "--out", "TOY/reproduce.yaml/out", "--corpus", "TOY"), "name another folder with --out"),
        (
            ("table6", "--report", "TOY/reproduce.yaml", "--corpus", "TOY", "--out", "TOY/out"),
            "is a file, expected a directory",
        ),
    ],
)
def test_what_cannot_be_is_said(tmp_path: Path, run_cli: RunCli, arguments: tuple[str, ...], said: str) -> None:
    toy = write_corpus(tmp_path, graphs=False)
    result = run_cli("reproduce", *(word.replace("TOY", str(toy)) for word in arguments))
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr
    assert "\n  hint: " in result.stderr and not (toy / "out" / "logs").exists()


def test_a_dry_run_lists_what_this_call_would_make(tmp_path: Path, run_cli: RunCli) -> None:
    folder, out = write_corpus(tmp_path), tmp_path / "out"
    arguments = ("reproduce", "table6", "--corpus", folder, "--out", out, "--cores", "3", "--dry-run")
    said = run_cli(*arguments, "--seeds", "2", "--workers", "1").stdout
    assert f"to execute: 2 runs and 1 DBN in {out}, on 3 cores" in said
    assert re.findall("to execute: (.*-.*)", said)[1:] == ["sgd-1-2", "base-1-2"]
    assert "0 runs recorded, 8 missing" in said and "6 more missing and not selected" in said
    assert "no estimate of the time: no run is recorded yet" in said
    assert "to execute: 4 runs and 2 DBNs" in run_cli(*arguments, "--conditions", "sgd").stdout
    runs = {run.name: run for run in runs_of(folder)}
    write_record(out / "records", record_of(runs["sgd-1-2"]))
    run_dir = runs["base-1-2"].run_dir
    run_dir.mkdir(parents=True)
    (run_dir / "final.safetensors").touch()
    told = json.loads(run_cli(*arguments, "--seeds", "2", "--workers", "1", "--json").stdout)
    assert told["would_execute"] == {
        "runs": ["base-1-2"],
        "trained": ["base-1-2"],
        "dbns": [],
        "out": str(out),
        "cores": 3,
        "training_seconds": None,
    }
    assert len(told["missing"]) == 7 and len(told["not_selected"]) == 6
    assert "to execute: no runs" in run_cli(*arguments, "--report-only").stdout


def test_a_dry_run_estimates_the_time_from_what_is_recorded(tmp_path: Path, run_cli: RunCli) -> None:
    """By core seconds: 100 of one worker, 2 x 60 of two, 100 s of two workers on one core."""
    folder, out = write_corpus(tmp_path), tmp_path / "out"
    recorded = {"sgd-1-1": (100.0, 2), "sgd-2-1": (60.0, 2), "base-2-1": (100.0, 1)}
    for run in runs_of(folder):
        if run.name in recorded:
            seconds, cores = recorded[run.name]
            write_record(out / "records", record_of(run, time={"seconds": seconds, "cores": cores}))
    arguments = ("reproduce", "table6", "--corpus", folder, "--out", out, "--dry-run")
    for cores, said in (("2", "4 min 10 s"), ("1", "8 min 20 s")):
        assert f"training takes about {said} by the recorded runs" in run_cli(*arguments, "--cores", cores).stdout


def test_sizes_that_no_run_of_the_table_has_are_refused(tmp_path: Path, run_cli: RunCli) -> None:
    folder = write_corpus(tmp_path, graphs=False)
    path = folder / "reproduce.yaml"
    path.write_text(path.read_text().replace("workers: [1, 2]", "workers: [1, 2, 4]"))
    result = run_cli(
        "reproduce", "table6", "--corpus", folder, "--out", tmp_path / "out", "--workers", "4", "--dry-run"
    )
    assert result.exit_code == 2 and "4 found, the runs of these tables have 1, 2" in result.stderr


def test_records_that_do_not_count_are_named(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, out = write_corpus(tmp_path, graphs=False), tmp_path / "out"
    first, second, third, *_ = runs_of(folder)
    write_record(out / "records", record_of(first))
    write_record(out / "records", record_of(second, recipe="another"))
    write_record(out / "records", record_of(third, test_digest="another"))
    arguments = ("reproduce", "table6", "--corpus", folder, "--out", out)
    said = run_cli(*arguments, "--dry-run").stdout
    assert "1 run recorded, 7 missing" in said
    assert re.search(f"of another recipe or other data: 1,.* trained again: {second.name}$", said, re.MULTILINE)
    assert re.search(
        f"evaluated on other tests: 1,.* evaluated again, or trained .*: {third.name}$", said, re.MULTILINE
    )
    told = json.loads(run_cli(*arguments, "--report-only", "--json").stdout)
    assert (told["outdated_recipe"], told["outdated_tests"]) == ([second.name], [third.name])
    monkeypatch.setattr("ddnn.reproduce.command.LocalExecutor.execute", lambda *_: {})
    assert "of another recipe or other data: 1" in run_cli(*arguments).stderr, "before it is trained again"


def test_runs_that_did_not_train_are_named(tmp_path: Path, run_cli: RunCli) -> None:
    folder, out = one_seed(write_corpus(tmp_path, graphs=False)), tmp_path / "out"
    figures = {"baseline": {"loss": 1.1, "frame_accuracy": 0.4}}
    for run in runs_of(folder):
        accuracy = 0.3 if run.name == "sgd-2-1" else 0.9
        write_record(out / "records", record_of(run, cv={"loss": 0.5, "frame_accuracy": accuracy}, **figures))
    arguments = ("reproduce", "table6", "--corpus", folder, "--out", out, "--report-only")
    result = run_cli(*arguments)
    assert result.exit_code == 0, result.stderr
    named = [line for line in result.stdout.splitlines() if "did not train" in line]
    assert named == ["did not train: sgd-2-1"]
    found = json.loads(run_cli(*arguments, "--json").stdout)
    assert found["failed"] == ["sgd-2-1"] and found["verdicts"]["not comparable"] == 1


def test_a_report_is_called_as_it_is_given_without_its_ending(tmp_path: Path, run_cli: RunCli) -> None:
    folder, out = write_corpus(tmp_path, graphs=False), tmp_path / "out"
    write_record(out / "records", record_of(runs_of(folder)[0]))
    arguments = ("reproduce", "table6", "--corpus", folder, "--out", out, "--report-only", "--report")
    assert run_cli(*arguments, tmp_path / "a" / "r.html").exit_code == 0
    assert {"r.md", "r.html"} <= {path.name for path in (tmp_path / "a").iterdir()} <= {"r.md", "r.html", "r"}


def test_what_failed_is_reported_with_one_hint() -> None:
    def raised(**errors: UserError) -> str:
        with pytest.raises(UserError) as error:
            ReproduceResult({}, errors).raise_errors()
        return str(error.value)

    assert raised(a=UserError("it broke", hint="repair it")).count("hint:") == 1
    assert raised(a=UserError("it broke")).startswith("1 run failed: a: it broke\n  hint: fix it, then run")
    assert raised(a=UserError("x"), b=UserError("y")).startswith("2 runs failed, the first of them: a: x")


def test_a_stop_leaves_checkpoints_and_the_same_call_goes_on(tmp_path: Path, run_cli: RunCli) -> None:
    folder, out = one_seed(write_corpus(tmp_path, graphs=False, init="random")), tmp_path / "out"
    base = folder / "tables" / "base.yaml"
    base.write_text(base.read_text().replace("epochs: 2", "epochs: 100"))
    (folder / "reproduce.yaml").write_text((folder / "reproduce.yaml").read_text() + "aliases: {sgd: base}\n")
    arguments = ["reproduce", "table6", "--corpus", str(folder), "--out", str(out), "--device", "cpu", "--workers", "1"]
    command = [forked_python(), "-m", "ddnn.cli", *arguments, "--cores", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        deadline = time.monotonic() + 600
        while not list(out.glob("runs/*/checkpoints/[0-9]*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=600)
    assert process.returncode not in (0, 1) and b"the same command resumes them" in said and b"Traceback" not in said
    assert not list((out).glob("records/*")) and list(out.glob("runs/*/checkpoints/[0-9]*"))
    result = run_cli(*arguments)
    assert result.exit_code == 0 and "1 run recorded, 1 missing" in result.stdout
    assert any('"resumed"' in path.read_text() for path in out.glob("runs/*/metrics.jsonl"))


def test_what_another_call_recorded_just_before_it_ended_is_not_made_again(
    toy: Toy, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(toy.out / "runs")
    hidden = (toy.out / "records").rename(tmp_path / "hidden")

    def flock(descriptor: object, operation: int) -> None:
        """The other call writes its last records and lets go."""
        if hidden.exists():
            hidden.rename(toy.out / "records")

    monkeypatch.setattr("ddnn.util.files.fcntl", SimpleNamespace(flock=flock, LOCK_EX=2, LOCK_NB=4))
    late = run_cli("reproduce", "table6", "--corpus", toy.folder, "--out", toy.out, "--device", "cpu", "--workers", "1")
    assert late.exit_code == 0 and "2 runs recorded, 2 missing" in late.stdout
    assert not (toy.out / "runs").exists() and not hidden.exists()


def processes_of(out: Path) -> list[int]:
    """Those whose command names this folder, but for ones that have ended and are not yet reaped."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if str(out) in command_of(path)]


def command_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has just ended
        return ""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no parent's death is told")
def test_kill_9_leaves_checkpoints_and_no_process(tmp_path: Path) -> None:
    folder, out = one_seed(write_corpus(tmp_path, graphs=False, init="random")), tmp_path / "out"
    base = folder / "tables" / "base.yaml"
    base.write_text(base.read_text().replace("epochs: 2", "epochs: 100000"))
    command = [PYTHON, "-m", "ddnn.cli", "reproduce", "table6", "--corpus", folder, "--out", out]
    try:
        with subprocess.Popen([*command, "--device", "cpu", "--workers", "2", "--cores", "2"]) as process:
            deadline = time.monotonic() + 600
            while not list(out.glob("runs/*/best.safetensors")) and time.monotonic() < deadline:
                time.sleep(0.05)
            training = set(processes_of(out)) - {process.pid}
            process.kill()
        with pytest.raises(UserError, match="trainings of one that was killed"), exclusive(out):
            pass
        deadline = time.monotonic() + 600
        while (left := processes_of(out)) and time.monotonic() < deadline:
            time.sleep(0.05)
        while is_locked(out / LOCK) and time.monotonic() < deadline:  # it has no command any more, but still its files
            time.sleep(0.05)
    finally:
        for pid in processes_of(out):
            os.kill(pid, signal.SIGKILL)
    assert len(training) >= 4 and left == [], "its launcher, mpirun and two workers"
    assert list(out.glob("runs/*/checkpoints/[0-9]*"))
    with exclusive(out):
        pass  # the lock went with the last process


def test_a_missing_package_is_said_before_anything_is_trained(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddnn.reproduce.command.find_spec", lambda name: None if name == "kaldi_decoder" else object())
    result = run_cli("reproduce", "table6", "--corpus", write_corpus(tmp_path), "--out", tmp_path / "out")
    assert result.exit_code == 2 and "kaldi_decoder" in result.stderr and not (tmp_path / "out").exists()
