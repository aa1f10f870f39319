"""The run dir: taken, resumed, handed over, finished; locks, links, a disk that is full for a while."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import make_job

from ddnn.data.corpus import FeaturePipeline
from ddnn.data.transform import plain_splice
from ddnn.errors import UserError
from ddnn.model.acoustic import AcousticModel, load_model
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Network, hidden_stack
from ddnn.train.read_metrics import read_metrics
from ddnn.train.run_dir import FILES, NoRunDir, RunDir
from ddnn.train.run_dir_files import CHECKPOINTS, PRETRAIN
from ddnn.train.run_files import MOST_KEPT, MetricsFile

HOLDER = """
import fcntl, os, sys, time
log = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(log, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def row(epoch: int, split: str = "cv", **more: Any) -> dict[str, Any]:
    return {"epoch": epoch, "split": split, "loss": 1.0, "frame_accuracy": 0.5, **more}


def model() -> AcousticModel:
    network = Network(hidden_stack(6, 1, 4, 3, "sigmoid"))
    initialise_randomly(network, 1)
    return AcousticModel(FeaturePipeline("none", 0), plain_splice(2, 1), network)


def begun(path: Path) -> RunDir:
    """A run dir in which a training was stopped after epoch 0."""
    run = RunDir(path)
    handler = run.open_log()
    handler.handle(logging.makeLogRecord({"msg": "first", "levelname": "INFO"}))
    run.write_recipe("seed: 1\n")
    run.record(row(0))
    handler.close()
    return run


def rows_of(path: Path) -> list[tuple[int, str]]:
    return [(one["epoch"], one["split"]) for one in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())]


# --- resumed


def test_going_on_keeps_everything(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    (tmp_path / "run/notes").write_text("mine")
    run = RunDir(tmp_path / "run", resume=True)
    handler = run.open_log()
    handler.handle(logging.makeLogRecord({"msg": "second", "levelname": "INFO"}))
    handler.close()
    run.record(row(1))
    assert [line.split()[-1] for line in (tmp_path / "run/train.log").read_text().splitlines()] == ["first", "second"]
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]
    assert (run.path / "recipe.yaml").read_text() == "seed: 1\n"


def test_a_begun_run_dir_is_refused_without_resume(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with pytest.raises(UserError, match="exists already and is not empty") as caught:
        RunDir(tmp_path / "run")
    assert caught.value.mend is not None and "--resume" in caught.value.mend
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").write_text("")
    with pytest.raises(UserError, match="exists already") as caught:
        RunDir(tmp_path / "other")
    assert caught.value.mend is not None and "--resume" not in caught.value.mend


@pytest.mark.parametrize("names", [["precious"], ["recipe.yaml", "README.md"], ["train.log", "stack.safetensors"]])
def test_resume_refuses_what_is_no_run_dir(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "it").mkdir()
    for name in names:
        (tmp_path / "it" / name).write_text("x")
    with pytest.raises(UserError, match="no run dir of a training"):
        RunDir(tmp_path / "it", resume=True)
    assert sorted(p.name for p in (tmp_path / "it").iterdir()) == sorted(names)


@pytest.mark.parametrize("made", [False, True])
def test_resume_begins_where_there_is_nothing(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "run/checkpoints").mkdir(parents=True)
        (tmp_path / "run/job.sh").write_text("")
        (tmp_path / "run/.recipe.yaml.tmp77").write_text("killed as it was wri")
    run = RunDir(tmp_path / "run", resume=True)
    assert not run.finished
    run.open_log().close()
    run.forget_epochs_after(-1)
    run.settle()
    assert (run.path / "metrics.jsonl").read_bytes() == b""
    assert not (run.path / ".recipe.yaml.tmp77").exists()


def test_a_torn_line_of_the_log_is_ended(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with (run.path / "train.log").open("a") as log:
        log.write("torn li")
    handler = RunDir(run.path, resume=True).open_log()
    handler.handle(logging.makeLogRecord({"msg": "next", "levelname": "INFO"}))
    handler.close()
    lines = (run.path / "train.log").read_text().splitlines()
    assert lines[1] == "torn li" and lines[2].endswith("INFO next")


def test_rows_of_an_epoch_that_is_done_again_are_forgotten(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.record(row(1, "train"))
    run.record(row(1))
    run = RunDir(run.path, resume=True)
    run.forget_epochs_after(0)
    assert rows_of(run.path) == [(0, "cv")]
    run.record(row(1))
    with (run.path / "metrics.jsonl").open("a") as handle:
        handle.write('{"epoch": 1, "torn')
    run.forget_epochs_after(1)
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]
    run.record_once(row(1))
    run.record_once(row(1, "train"))
    assert rows_of(run.path) == [(0, "cv"), (1, "cv"), (1, "train")]


def test_an_endless_line_of_a_stranger_is_cut_off(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with (run.path / "metrics.jsonl").open("r+b") as handle:
        handle.seek(0, os.SEEK_END)
        handle.truncate(handle.tell() + 2**33)  # takes no space
    run.forget_epochs_after(5)
    assert rows_of(run.path) == [(0, "cv")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 250))
def test_cut_back_to_whole_lines(tmp_path: Path, content: bytes, offset: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    MetricsFile(path).cut(offset)
    expected = content[:offset]
    assert path.read_bytes() == expected[: expected.rfind(b"\n") + 1]


def test_cut_looks_back_over_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"{}\n" + b"x" * 200_000)
    MetricsFile(path).cut()
    assert path.read_bytes() == b"{}\n"


# --- taken over


def test_another_worker_takes_over(tmp_path: Path) -> None:
    """The first worker dies as it writes: what it had written stays, what it had not is written, a torn row once."""
    first, other = RunDir(tmp_path / "run"), NoRunDir(tmp_path / "run")
    log = first.open_log()
    for run in (first, other):
        run.write_recipe("seed: 1\n")
        run.record(row(0))
        run.record(row(1, "worker", rank=0))
        run.record(row(1, "worker", rank=1))
    with (first.path / "metrics.jsonl").open("a") as handle:
        handle.write('{"epoch": 1, "split": "tr')
    log.close()  # as a killed process does
    other.write_counts(np.array([3, 4]))
    other.record(row(1, "train"))
    other.record(row(1))
    owner = other.take_over()
    handler = owner.open_log()
    owner.record(row(2))
    handler.close()
    assert rows_of(owner.path) == [(0, "cv"), (1, "worker"), (1, "worker"), (1, "train"), (1, "cv"), (2, "cv")]
    assert (owner.path / "ali_train_pdf.counts").read_text() == " [ 3 4 ]\n"
    assert (owner.path / "recipe.yaml").read_text() == "seed: 1\n"


def test_a_take_over_before_the_first_worker_wrote_anything(tmp_path: Path) -> None:
    other = NoRunDir(tmp_path / "run")
    other.write_recipe("seed: 1\n")
    other.record(row(0))
    other.take_over().open_log().close()
    assert rows_of(tmp_path / "run") == [(0, "cv")]


def test_the_lock_of_a_dead_owner_is_waited_for_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = RunDir(tmp_path / "run"), NoRunDir(tmp_path / "run")
    log = first.open_log()
    monkeypatch.setattr("ddnn.train.run_dir._TAKE_OVER_SECONDS", 0.3)
    other.record(row(0))
    other.take_over().open_log().close()
    assert "going on without it" in caplog.text
    assert rows_of(tmp_path / "run") == [(0, "cv")]
    log.close()


def test_what_was_forgotten_is_not_written_by_the_heir(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    other = NoRunDir(tmp_path / "run")
    other.record(row(1))
    other.forget_epochs_after(0)
    other.take_over().open_log().close()
    assert rows_of(tmp_path / "run") == [(0, "cv")]


# --- the lock


def test_the_lock_of_a_killed_training_is_free_at_once(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, tmp_path / "run/train.log"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another training is running") as caught:
        RunDir(tmp_path / "run", resume=True).open_log()
    assert "first" in (tmp_path / "run/train.log").read_text()
    assert caught.value.mend is not None and "mv t train.log" in caught.value.mend
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    RunDir(tmp_path / "run", resume=True).open_log().close()


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    """A loading process that outlives its parent for a moment must not keep a resumption out."""
    handler = RunDir(tmp_path / "run").open_log()
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    handler.close()
    try:
        RunDir(tmp_path / "run", resume=True).open_log().close()
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    RunDir(tmp_path / "run").open_log().close()
    assert "file system without locks" in caplog.text


def test_what_another_training_did_meanwhile_is_seen(tmp_path: Path) -> None:
    """Between the look at the directory and the lock another training began and ended there."""
    late = RunDir(tmp_path / "run")
    begun(tmp_path / "run")
    with pytest.raises(UserError, match="exists already"):
        late.open_log()
    assert "first" in (tmp_path / "run/train.log").read_text()


def test_a_log_that_is_replaced_is_not_locked_in_vain(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    from ddnn.train.run_log import RunLog

    log = RunLog(tmp_path / "run/train.log")
    (tmp_path / "run/train.log").unlink()
    (tmp_path / "run/train.log").write_text("")
    with pytest.raises(BlockingIOError):
        log.claim(0.0)
    log.close()


# --- links and special files


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("name", [*FILES, PRETRAIN, CHECKPOINTS])
def test_links_out_of_the_run_dir_are_refused(tmp_path: Path, name: str, resume: bool) -> None:
    outside = tmp_path / "outside"
    if name in FILES:
        outside.write_text("precious\n")
    else:
        outside.mkdir()
        (outside / "00000001").mkdir()
    if resume:
        begun(tmp_path / "run")
        (tmp_path / "run" / name).unlink(missing_ok=True)
    else:
        (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(outside)
    with pytest.raises(UserError, match=f"{name} is a symbolic link"):
        RunDir(tmp_path / "run", resume)
    assert outside.is_dir() or outside.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
@pytest.mark.parametrize("kind", ["fifo", "link", "device", "directory"])
def test_special_files_neither_hang_nor_are_written(tmp_path: Path, name: str, kind: str) -> None:
    """Those that appear after the first look, too."""
    run = RunDir(tmp_path / "run")
    path = run.path / name
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(UserError, match=name):
        run.open_log() if name == "train.log" else run.record(row(0))
    with pytest.raises(UserError, match=name):
        RunDir(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    run, outside = RunDir(tmp_path / "run"), tmp_path / "outside"
    outside.write_text("precious")
    (run.path / f".recipe.yaml.tmp{os.getpid()}").symlink_to(outside)
    run.write_recipe("seed: 1\n")
    assert outside.read_text() == "precious"
    assert (run.path / "recipe.yaml").read_text() == "seed: 1\n" and not (run.path / "recipe.yaml").is_symlink()


def test_the_run_dir_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "scratch")
    begun(tmp_path / "run")
    assert rows_of(tmp_path / "scratch") == [(0, "cv")]


# --- finished


def fill_checkpoints(run: Path) -> None:
    for number in ("00000041", ".tmp-00000042"):
        (run / CHECKPOINTS / number).mkdir(parents=True)
        for name in ("checkpoint.json", "shared.safetensors", "worker0000.safetensors", "worker0001.safetensors"):
            (run / CHECKPOINTS / number / name).write_text("x")


def test_finishing_removes_what_only_resume_needs(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.save_best(model())
    fill_checkpoints(run.path)
    run.finish(model())
    assert {p.name for p in run.path.iterdir()} == {"recipe.yaml", "train.log", "metrics.jsonl", "final.safetensors"}
    assert run.finished


def test_finishing_leaves_what_is_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, outside = begun(tmp_path / "run"), tmp_path / "outside"
    fill_checkpoints(run.path)
    folder = run.path / CHECKPOINTS
    (folder / "00000041/notes").write_text("mine")
    (folder / "mine").mkdir()
    outside.mkdir()
    (outside / "shared.safetensors").write_text("precious")
    (folder / "00000099").symlink_to(outside)
    (folder / "00000041/worker0007.safetensors").symlink_to(outside / "shared.safetensors")
    run.finish(model())
    left = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    assert left >= {"00000041", "00000041/notes", "mine", "00000099"}
    assert not any("shared" in name or "checkpoint.json" in name for name in left if name.startswith("00000041/"))
    assert (outside / "shared.safetensors").read_text() == "precious"
    assert "something is left" in caplog.text


def test_a_link_in_place_of_the_checkpoints_is_not_followed(tmp_path: Path) -> None:
    run, outside = begun(tmp_path / "run"), tmp_path / "outside"
    fill_checkpoints(tmp_path / "other")
    (tmp_path / "other" / CHECKPOINTS).rename(outside)
    (run.path / CHECKPOINTS).symlink_to(outside)
    run.finish(model())
    assert len([p for p in outside.rglob("*") if p.is_file()]) == 8


# --- a full disk


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool, int], None]:
    """full(True, n): from now on writing to metrics.jsonl ends after n bytes, and models cannot be flushed."""
    write, fsync, state = os.write, os.fsync, {"full": False, "bytes": 0}

    def name(descriptor: int) -> str:
        return Path(f"/proc/self/fd/{descriptor}").readlink().name

    def limited(descriptor: int, text: Any) -> int:
        if not state["full"] or name(descriptor) != "metrics.jsonl":
            return write(descriptor, text)
        left, state["bytes"] = state["bytes"], 0
        if left:
            return write(descriptor, bytes(text)[:left])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def no_space(descriptor: int) -> None:
        if state["full"] and "safetensors" in name(descriptor):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr("ddnn.train.run_files.os.write", limited)
    monkeypatch.setattr("ddnn.files.os.fsync", no_space)

    def full(now: bool, after: int = 0) -> None:
        state.update(full=now, bytes=after)

    return full


def test_rows_wait_for_space(tmp_path: Path, full: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = begun(tmp_path / "run")
    for epoch in (1, 2):
        full(True, after=7)
        run.record(row(epoch, "train"))
        run.record(row(epoch))
        assert rows_of(run.path) == [(0, "cv")], "whole lines only"
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1, "said once"
    run.record_once(row(2))  # waits already
    run.settle()
    assert rows_of(run.path) == [(0, "cv")]
    full(False)
    run.record(row(3))
    assert rows_of(run.path) == [(0, "cv"), (1, "train"), (1, "cv"), (2, "train"), (2, "cv"), (3, "cv")]
    assert "5 rows that were kept" in caplog.text
    full(True)
    run.record(row(4))
    full(False)
    run.settle()  # a checkpoint is about to be written, which the row must not be younger than
    run.forget_epochs_after(3)
    assert rows_of(run.path)[-1] == (3, "cv")
    assert [one.epoch for one in read_metrics(run.path / "metrics.jsonl").cv] == [0, 1, 2, 3]


def test_rows_kept_are_bounded(tmp_path: Path, full: Callable[..., None]) -> None:
    run = begun(tmp_path / "run")
    full(True)
    run._metrics._kept.extend("{}\n" for _ in range(MOST_KEPT))
    run.record(row(1))
    assert len(run._metrics._kept) == MOST_KEPT


def test_the_best_network_waits_for_space(
    tmp_path: Path, full: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    run = begun(tmp_path / "run")
    full(True)
    run.save_best(model())
    run.save_best(model())
    assert caplog.text.count("no space left while writing best.safetensors") == 1
    with pytest.raises(UserError, match=r"no space left while writing final.safetensors") as caught:
        run.finish(model())
    assert caught.value.mend is not None and "--resume" in caught.value.mend
    full(False)
    run.save_best(model())
    load_model(run.path / "best.safetensors")
    diverged = model()
    diverged.network.parameters[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        run.save_best(diverged)


def test_what_is_there_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are left begin again after a death, maybe on a full disk."""
    run, other = RunDir(tmp_path / "run"), NoRunDir(tmp_path / "run")
    for one in (run, other):
        one.write_recipe("seed: 1\n")
        one.write_counts(np.array([3, 4]))
    heir = other.take_over()
    heir.open_log().close()
    monkeypatch.setattr("ddnn.files.os.fsync", lambda _: pytest.fail("written"))
    for one in (run, heir):
        one.write_recipe("seed: 1\n")
        one.write_counts(np.array([3, 4]))


def test_finishing_needs_every_row(tmp_path: Path, full: Callable[..., None]) -> None:
    run = begun(tmp_path / "run")
    fill_checkpoints(run.path)
    full(True)
    run.record(row(1))
    with pytest.raises(UserError, match=r"cannot write metrics.jsonl") as caught:
        run.finish(model())
    assert caught.value.mend is not None and "--resume" in caught.value.mend
    assert not run.finished and (run.path / CHECKPOINTS / "00000041").exists()
    full(False)
    run.finish(model())
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]


# --- secrets


def test_nothing_of_the_environment_is_written(
    tmp_path: Path, run_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while a training goes on, when there are checkpoints, not in what it leaves, not in a job's script."""
    secret = "wJalrXUtnFEMIK7MDENGbPxRfiCY"
    for name in ("AWS_SECRET_ACCESS_KEY", "MY_TOKEN", "SLURM_JWT", "OMPI_MCA_secret"):
        monkeypatch.setenv(name, secret)
    job, seen = make_job(tmp_path / "job"), set()

    def look() -> None:
        for path in job.run.rglob("*"):
            if path.is_file():
                seen.add(path.name)
                assert secret.encode() not in path.read_bytes(), path

    record = RunDir.record
    monkeypatch.setattr(RunDir, "record", lambda run, metrics: (record(run, metrics), look()))
    often = ("--set", "checkpoint.every_minibatches=1")
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *often)
    assert result.exit_code == 0, result.stderr
    look()
    assert seen >= {"recipe.yaml", "train.log", "metrics.jsonl", "final.safetensors", "best.safetensors"}
    assert seen >= {"checkpoint.json", "shared.safetensors", "worker0000.safetensors"}
    dry = run_cli("train", job.recipe, "--run-dir", tmp_path / "other", "--slurm", "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.startswith("#!"), dry.stderr
    assert secret not in dry.stdout + dry.stderr + result.stdout + result.stderr
