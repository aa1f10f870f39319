"""The run dir: opened, resumed, finished; its status, lock and log; links; a disk that is full for a while."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jobs import make_job

from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed.communicator import SingleProcess
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.nn.acoustic_model import AcousticModel, load_model
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, initialize
from ddnn.runs import run_dir
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.runs.metrics import MAX_PENDING_ROWS, MetricsWriter, read_metrics
from ddnn.runs.rows import EpochRow, EventRow, PretrainRow, WorkerRow
from ddnn.runs.run_dir import NullRunDir, RunDir
from ddnn.runs.run_status import (
    BEST,
    CHECKPOINTS,
    DBN,
    FILES,
    FINAL,
    PRETRAIN,
    check_run_dir,
    read_run_status,
    record_failure,
)
from ddnn.util.errors import DivergedError, UserError
from ddnn.util.files import FileLock, is_locked

HOLDER = """
import fcntl, os, sys, time
log = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(log, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def row(epoch: int, split: str = "cv") -> EpochRow:
    return EpochRow.model_validate({"epoch": epoch, "split": split, "loss": 1.0, "frame_accuracy": 0.5})


def model() -> AcousticModel:
    network = Network(mlp_layers(6, 1, 4, 3, "sigmoid"))
    initialize(network, 1)
    return AcousticModel(FeatureConfig("none", 0), splice_only(2, 1), network)


def begun(path: Path) -> RunDir:
    """A run dir in which a training was stopped after epoch 0."""
    run = RunDir.open(path)
    logging.getLogger("ddnn").warning("first")
    run.write_recipe("seed: 1\n")
    run.record(row(0))
    run.close()
    return run


def rows_of(path: Path) -> list[tuple[int, str]]:
    return [(one["epoch"], one["split"]) for one in map(json.loads, (path / "metrics.jsonl").read_text().splitlines())]


# --- resumed


def test_going_on_keeps_everything(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    (tmp_path / "run/notes").write_text("mine")
    run = RunDir.open(tmp_path / "run", resume=True)
    logging.getLogger("ddnn").warning("second")
    run.close()
    run.record(row(1))
    lines = (tmp_path / "run/train.log").read_text().splitlines()
    assert [line.split()[-1] for line in lines if "WARNING" in line] == ["first", "second"]
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]
    assert (run.path / "recipe.yaml").read_text() == "seed: 1\n"


def test_the_run_dir_of_a_training_that_diverged_is_not_to_be_resumed(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    run = RunDir.open(tmp_path / "run", resume=True)
    run.close(DivergedError("the loss is nan", hint="lower the learning rate"))
    with pytest.raises(UserError, match="the training in this run dir diverged") as refused:
        RunDir.open(tmp_path / "run")
    assert refused.value.hint is not None and "--resume" not in refused.value.hint
    assert refused.value.hint.startswith("lower the learning rate; name another directory")


def test_a_begun_run_dir_is_refused_without_resume(tmp_path: Path) -> None:
    begun(tmp_path / "run")
    with pytest.raises(UserError, match="exists already and is not empty") as caught:
        RunDir.open(tmp_path / "run")
    assert caught.value.hint is not None and "--resume" in caught.value.hint
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").write_text("")
    with pytest.raises(UserError, match="exists already") as caught:
        RunDir.open(tmp_path / "other")
    assert caught.value.hint is not None and "--resume" not in caught.value.hint


@pytest.mark.parametrize("names", [["precious"], ["recipe.yaml", "README.md"], ["train.log", DBN]])
def test_resume_refuses_what_is_no_run_dir(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "it").mkdir()
    for name in names:
        (tmp_path / "it" / name).write_text("x")
    refused = "a pretrained DBN, not a training" if DBN in names else "not a run dir of a training"
    with pytest.raises(UserError, match=refused):
        RunDir.open(tmp_path / "it", resume=True)
    assert sorted(p.name for p in (tmp_path / "it").iterdir()) == sorted(names)


@pytest.mark.parametrize("made", [False, True])
def test_resume_begins_where_there_is_nothing(tmp_path: Path, made: bool) -> None:
    if made:
        (tmp_path / "run/checkpoints").mkdir(parents=True)
        (tmp_path / "run/job.sh").write_text("")
        (tmp_path / "run/.recipe.yaml.tmp77").write_text("killed as it was wri")
    run = RunDir.open(tmp_path / "run", resume=True)
    assert not (run.path / FINAL).exists()
    run.truncate_after(-1)
    run.flush()
    run.close()
    assert (run.path / "metrics.jsonl").read_bytes() == b""
    assert not (run.path / ".recipe.yaml.tmp77").exists()


def test_a_torn_line_of_the_log_is_ended(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with (run.path / "train.log").open("a") as log:
        log.write("torn li")
    resumed = RunDir.open(run.path, resume=True)
    logging.getLogger("ddnn").warning("next")
    resumed.close()
    lines = (run.path / "train.log").read_text().splitlines()
    assert lines[-2] == "torn li" and lines[-1].endswith("WARNING next")


def test_rows_of_an_epoch_that_is_done_again_are_forgotten(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.record(row(1, "train"))
    run.record(row(1))
    run.truncate_after(0)
    assert rows_of(run.path) == [(0, "cv")]
    run.record(row(1))
    with (run.path / "metrics.jsonl").open("a") as handle:
        handle.write('{"epoch": 1, "torn')
    run.truncate_after(1)
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]


def test_an_endless_line_of_a_stranger_is_cut_off(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    with (run.path / "metrics.jsonl").open("r+b") as handle:
        handle.seek(0, os.SEEK_END)
        handle.truncate(handle.tell() + 2**33)  # takes no space
    run.truncate_after(5)
    assert rows_of(run.path) == [(0, "cv")]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 3))
def test_any_bytes_are_cut_back_to_whole_lines(tmp_path: Path, content: bytes, last: int) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = b"".join(b'{"epoch": %d}\n' % epoch for epoch in range(4))
    path.write_bytes(rows + content)
    MetricsWriter(path).truncate(lambda found: found.get("epoch") != last + 1)
    assert path.read_bytes() == rows[: 13 * (last + 1)] + (content[: content.rfind(b"\n") + 1] if last == 3 else b"")


def test_rows_of_an_rbm_that_is_trained_again_are_removed(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", "pretraining", recipe="seed: 1\n")
    for rbm, epoch in ((1, 1), (1, 2), (2, 1)):
        run.record(PretrainRow(rbm=rbm, epoch=epoch, mean_reconstruction_error=1.0))
    run.truncate_after(0, rbm=2)
    run.close()
    assert [(one.rbm, one.epoch) for one in read_metrics(run.path / "metrics.jsonl").pretraining] == [(1, 1), (1, 2)]


# --- the lock


def test_the_lock_of_a_killed_training_is_free_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(tmp_path / "run")
    holder = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, tmp_path / "run/train.log"], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another run is in progress"):
        check_run_dir(tmp_path / "run", resume=True)
    monkeypatch.setattr("ddnn.runs.run_dir.check_run_dir", lambda *_, **__: None)  # it began after the look
    with pytest.raises(UserError, match="another run is in progress") as caught:
        RunDir.open(tmp_path / "run", resume=True)
    monkeypatch.undo()
    assert "first" in (tmp_path / "run/train.log").read_text()
    assert caught.value.hint is not None and "mv t train.log" in caught.value.hint
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    RunDir.open(tmp_path / "run", resume=True).close()


def test_a_file_system_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FileLock, "acquire", lambda lock, timeout: False)
    RunDir.open(tmp_path / "run").close()
    assert "file system has no locks" in caplog.text


def test_what_another_training_did_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at the directory and the lock another training began and ended there."""
    acquire = FileLock.acquire

    def late(lock: FileLock, timeout: float) -> bool:
        monkeypatch.undo()
        begun(tmp_path / "run")
        return acquire(lock, timeout)

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(UserError, match="exists already"):
        RunDir.open(tmp_path / "run")
    assert "first" in (tmp_path / "run/train.log").read_text()
    assert is_locked(tmp_path / "run/train.log") is False


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
        RunDir.open(tmp_path / "run", resume=resume)
    assert outside.is_dir() or outside.read_text() == "precious\n"


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
@pytest.mark.parametrize("kind", ["fifo", "link", "device", "directory"])
def test_special_files_neither_hang_nor_are_written(tmp_path: Path, name: str, kind: str) -> None:
    """Those that appear after the first look, too."""
    (tmp_path / "run").mkdir()
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
        run._acquire_lock() if name == "train.log" else run.record(row(0))
    with pytest.raises(UserError, match=name):
        RunDir.open(tmp_path / "run")
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path: Path) -> None:
    run, outside = begun(tmp_path / "run"), tmp_path / "outside"
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
        for name in ("manifest.json", "global.safetensors", "rank0000.safetensors", "rank0001.safetensors"):
            (run / CHECKPOINTS / number / name).write_text("x")


def test_finishing_removes_what_only_resume_needs(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.save_best(model())
    fill_checkpoints(run.path)
    run.finish(model())
    assert {p.name for p in run.path.iterdir()} == {
        *("recipe.yaml", "train.log", "status.json", "metrics.jsonl", "final.safetensors"),
    }
    assert (run.path / FINAL).exists()


def test_finishing_leaves_what_is_not_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, outside = begun(tmp_path / "run"), tmp_path / "outside"
    fill_checkpoints(run.path)
    folder = run.path / CHECKPOINTS
    (folder / "00000041/notes").write_text("mine")
    (folder / "mine").mkdir()
    outside.mkdir()
    (outside / "global.safetensors").write_text("precious")
    (folder / "00000099").symlink_to(outside)
    (folder / "00000041/rank0007.safetensors").symlink_to(outside / "global.safetensors")
    run.finish(model())
    left = {str(p.relative_to(folder)) for p in folder.rglob("*")}
    assert left >= {"00000041", "00000041/notes", "mine", "00000099"}
    assert not any("global" in name or "manifest.json" in name for name in left if name.startswith("00000041/"))
    assert (outside / "global.safetensors").read_text() == "precious"
    assert "could be removed" in caplog.text


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

    monkeypatch.setattr("ddnn.util.files.os.write", limited)
    monkeypatch.setattr("ddnn.util.files.os.fsync", no_space)

    def full(now: bool, after: int = 0) -> None:
        state.update(full=now, bytes=after)

    return full


def test_rows_wait_for_space(tmp_path: Path, full: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    run = begun(tmp_path / "run")
    caplog.clear()
    caplog.set_level(logging.INFO)
    for epoch in (1, 2):
        full(True, after=7)
        run.record(row(epoch, "train"))
        run.record(row(epoch))
        assert rows_of(run.path) == [(0, "cv")], "whole lines only"
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1, "said once"
    run.flush()
    assert rows_of(run.path) == [(0, "cv")]
    full(False)
    run.record(row(3))
    assert rows_of(run.path) == [(0, "cv"), (1, "train"), (1, "cv"), (2, "train"), (2, "cv"), (3, "cv")]
    assert "5 pending rows" in caplog.text
    full(True)
    run.record(row(4))
    full(False)
    run.flush()  # a checkpoint is about to be written, which the row must not be younger than
    run.truncate_after(3)
    assert rows_of(run.path)[-1] == (3, "cv")
    assert [one.epoch for one in read_metrics(run.path / "metrics.jsonl").cv] == [0, 1, 2, 3]


def test_rows_kept_are_bounded(tmp_path: Path, full: Callable[..., None]) -> None:
    run = begun(tmp_path / "run")
    full(True)
    run._metrics._pending.extend(b"{}\n" for _ in range(MAX_PENDING_ROWS))
    run.record(row(1))
    assert len(run._metrics._pending) == MAX_PENDING_ROWS


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
    assert caught.value.hint is not None and "--resume" in caught.value.hint
    full(False)
    run.save_best(model())
    load_model(run.path / "best.safetensors")
    diverged = model()
    diverged.network.parameters[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        run.save_best(diverged)


def test_rows_without_space_at_the_end(tmp_path: Path, full: Callable[..., None]) -> None:
    """The model is written, and what it supersedes makes room for the rows; where there still is none, it is said."""
    run = begun(tmp_path / "run")
    save_checkpoints(run.path, 2)
    run.save_best(model())
    full(True)
    run.record(row(1))
    with pytest.raises(UserError, match=r"cannot write metrics.jsonl") as caught:
        run.finish(model())
    assert caught.value.hint == "the model is complete in final.safetensors; the newest rows of metrics.jsonl are lost"
    assert (run.path / FINAL).exists() and not (run.path / CHECKPOINTS).exists()
    full(False)
    run.finish(model())
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]


def test_checkpoints_make_room_for_the_rows(
    tmp_path: Path, full: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, remove = begun(tmp_path / "run"), run_dir.remove_checkpoints
    save_checkpoints(run.path, 2)
    run.save_best(model())
    full(True)
    run.record(row(1))

    def removed(directory: Path, keep: int | None = None) -> None:
        assert (run.path / FINAL).exists() and keep is None
        remove(directory)
        full(False)

    monkeypatch.setattr(run_dir, "remove_checkpoints", removed)
    run.finish(model())
    assert rows_of(run.path) == [(0, "cv"), (1, "cv")]


def save_checkpoints(run: Path, number: int) -> None:
    """Checkpoints 1 to `number`, after as many epochs each."""
    store = CheckpointStore(run / CHECKPOINTS, 9, SingleProcess())
    for epoch in range(1, number + 1):
        assert store.save({"epoch": epoch, "minibatch": 0}, {}, {"parameters": torch.zeros(3)})


def other_model() -> AcousticModel:
    """As `model`, with other parameters."""
    other = model()
    other.network.parameters.add_(1.0)
    return other


def test_the_best_network_is_renamed_where_it_is_the_trained_one(tmp_path: Path, full: Callable[..., None]) -> None:
    """Which needs no space."""
    run = begun(tmp_path / "run")
    run.save_best(model())
    inode = (run.path / "best.safetensors").stat().st_ino
    full(True)
    run.finish(model())
    assert (run.path / FINAL).stat().st_ino == inode
    assert torch.equal(load_model(run.path / FINAL).network.parameters, model().network.parameters)


def test_the_network_of_an_earlier_epoch_is_not_renamed(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.save_best(other_model())
    run.finish(model())
    assert torch.equal(load_model(run.path / FINAL).network.parameters, model().network.parameters)


def test_a_longer_training_replaces_the_model_of_before(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.finish(other_model())
    run.finish(model())
    assert torch.equal(load_model(run.path / FINAL).network.parameters, model().network.parameters)


def test_a_link_in_place_of_the_best_network_is_not_renamed(tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    run.save_best(model())
    (run.path / "best.safetensors").rename(tmp_path / "elsewhere")
    (run.path / "best.safetensors").symlink_to(tmp_path / "elsewhere")
    run.finish(model())
    assert not (run.path / FINAL).is_symlink() and (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("checkpoints", [0, 3])
def test_a_full_disk_at_the_end_leaves_what_a_resume_needs_and_says_what_it_does(
    tmp_path: Path, full: Callable[..., None], checkpoints: int
) -> None:
    run = begun(tmp_path / "run")
    run.save_best(other_model())
    save_checkpoints(run.path, checkpoints)
    full(True)
    with pytest.raises(UserError, match=r"no space left while writing final\.safetensors") as caught:
        run.finish(model())
    hint = caught.value.hint or ""
    assert "free disk space or quota" in hint and BEST not in hint
    assert not (run.path / BEST).exists(), "it was removed to make room"
    if checkpoints:
        assert [path.name for path in (run.path / CHECKPOINTS).iterdir()] == ["00000003"]
        assert hint.endswith("--resume; it continues from checkpoint number 3: after epoch 3")
    else:
        assert hint.startswith("there is no checkpoint") and hint.endswith("--resume starts from the beginning")


def test_nothing_is_removed_where_a_run_dir_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path / "run")
    run.save_best(other_model())
    save_checkpoints(run.path, 2)

    def read_only(descriptor: int) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("ddnn.util.files.os.fsync", read_only)
    with pytest.raises(UserError, match=r"cannot write final\.safetensors: Read-only") as caught:
        run.finish(model())
    assert "make the run dir writable, then resume" in (caught.value.hint or "")
    assert (run.path / BEST).exists() and len(list((run.path / CHECKPOINTS).iterdir())) == 2


# --- status.json


def test_the_status_of_a_run(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run")
    found = read_run_status(run.path)
    assert found is not None
    assert (found.state, found.kind, found.phase, found.pid) == ("running", "training", "starting", os.getpid())
    run.set_status(phase="training", max_epochs=20, world_size=4)
    run.set_progress(3, 17, str)
    run.set_progress(3, 18, str)  # too soon: it is not written
    found = read_run_status(run.path)
    assert found is not None
    assert (found.epoch, found.minibatch, found.max_epochs, found.world_size) == (3, 17, 20, 4)
    run.finish(model())
    run.close()
    found = read_run_status(run.path)
    assert found is not None and (found.state, found.error, found.minibatch) == ("finished", None, 0)


def test_a_line_of_the_log_within_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A minute after the last line or row, not before; only then are the figures, which wait for the device, asked for."""
    caplog.set_level(logging.INFO, "ddnn")
    clock, asked = [1000.0], list[float]()
    monkeypatch.setattr(run_dir, "time", SimpleNamespace(monotonic=lambda: clock[-1], time=time.time))

    def describe() -> str:
        asked.append(clock[-1])
        return f"half done at {clock[-1]:.0f}"

    run = RunDir.open(tmp_path / "run")
    rbms, run.log_interval = run.pretraining(""), 60.0
    assert rbms.log_interval == math.inf and run.pretraining("").log_interval == 60.0
    for now in (2000.0, 2059.0, 2060.0, 2119.0, 2120.0, 2170.0):
        clock.append(now)
        run.set_progress(1, 2, describe)
    run.record(EventRow(event="resumed", epoch=1, world_size=1))
    for now in (2200.0, 2229.0, 2230.0):
        clock.append(now)
        run.set_progress(1, 2, describe)
    assert asked == [2060.0, 2120.0, 2230.0]
    NullRunDir(tmp_path).set_progress(1, 2, describe)
    run.close()
    lines = [line for line in (tmp_path / "run/train.log").read_text().splitlines() if "half done" in line]
    assert [line.split()[-1] for line in lines] == ["2060", "2120", "2230"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (DivergedError("the loss is nan", hint="lower the rate"), "diverged"),
        (UserError("no alignments", hint="lower the rate"), "failed"),
        (RuntimeError("a bug"), "failed"),
        (KeyboardInterrupt(), "interrupted"),
        (TrainingInterrupted("SIGTERM"), "interrupted"),
    ],
)
def test_how_a_run_ended(tmp_path: Path, error: BaseException, state: str) -> None:
    run = RunDir.open(tmp_path / "run")
    run.close(error)
    found = read_run_status(run.path)
    assert found is not None and found.error is not None
    assert (found.state, found.error.type) == (state, type(error).__name__)
    assert found.error.hint == ("lower the rate" if isinstance(error, UserError) else None)
    assert found.error.message and f"ERROR {state}: " in (run.path / "train.log").read_text()
    assert is_locked(run.path / "train.log") is False


def test_what_an_earlier_process_left_is_known(tmp_path: Path) -> None:
    """Where a job had been that died, and how often it was restarted."""
    run = RunDir.open(tmp_path / "run")
    run.write_recipe("seed: 1\n")
    run.record(EventRow(event="restarted", epoch=0, world_size=2, number=1, reason="SIGKILL"))
    run.set_progress(2, 40, str)
    run.close()
    again = RunDir.open(tmp_path / "run", resume=True)
    again.close()
    assert again.previous is not None and (again.previous.epoch, again.previous.minibatch) == (2, 40)
    assert (again.status.num_restarts, again.status.minibatch) == (1, 0)
    (tmp_path / "run/status.json").write_text("{}")
    assert RunDir.open(tmp_path / "run", resume=True).previous is None


def test_a_full_disk_does_not_end_a_run_through_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.open(tmp_path / "run")

    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("ddnn.util.files.os.fsync", no_space)
    run.set_status(epoch=1)
    run.set_status(epoch=2)
    assert caplog.text.count("no space left while writing status.json") == 1
    monkeypatch.undo()
    run.set_status(phase="training")
    run.close()
    found = read_run_status(run.path)
    assert found is not None and found.epoch == 2


def test_rows_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = begun(tmp_path / "run")
    caplog.clear()
    caplog.set_level(logging.INFO)
    run.record(row(1))
    worker = WorkerRow(epoch=1, rank=3, host="n1", frames=9, minibatches=3, seconds=1.0, excluded_averagings=2)
    run.record(worker)
    run.record(worker.model_copy(update={"rank": 2, "excluded_averagings": 0}))
    NullRunDir(tmp_path / "run").record(row(2))
    assert [(record.levelname, record.message[:24]) for record in caplog.records] == [
        ("INFO", "epoch  1 cv     loss 1.0"),
        ("WARNING", "epoch  1 worker 3 on n1 "),
    ]


def test_a_failure_that_the_launcher_saw(tmp_path: Path) -> None:
    """Another worker failed, and the process that held the run dir was ended before it could say anything."""
    path, since = tmp_path / "run", time.time() - 1
    record_failure(path, "no run dir", since)
    run = RunDir.open(path)
    record_failure(path, "worker 2 on n1: error: no alignments", since)
    assert read_run_status(path) == run.status, "it is still at work"
    run.close()
    record_failure(path, "an earlier one's", time.time() + 1)
    assert read_run_status(path) == run.status
    record_failure(path, "worker 2 on n1: error: no alignments", since)
    found = read_run_status(path)
    assert found is not None and found.error is not None
    assert (found.state, found.error.message) == ("failed", "worker 2 on n1: error: no alignments")
    record_failure(path, "later", since)
    assert read_run_status(path) == found, "the first reason stays"


# --- pretraining


def test_a_pretraining_directory_belongs_to_one_recipe(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run", "pretraining", recipe="seed: 1\n")
    run.close()
    again = RunDir.open(tmp_path / "run", "pretraining", recipe="seed: 1\n")
    with pytest.raises(UserError, match="another run is in progress"):
        check_run_dir(tmp_path / "run", "pretraining", recipe="seed: 1\n")
    again.close()
    with pytest.raises(UserError, match="holds no pretraining with the same data"):
        RunDir.open(tmp_path / "run", "pretraining", recipe="seed: 2\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/precious").touch()
    with pytest.raises(UserError, match="holds no pretraining"):
        RunDir.open(tmp_path / "other", "pretraining", recipe="seed: 1\n")


def test_rbms_of_a_training_have_its_lock_and_status(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run")
    rbms = run.pretraining("seed: 1\n")
    rbms.set_status(phase="pretraining", rbm=1, num_rbms=2)
    rbms.finish(model())
    assert (rbms.path / DBN).exists() and not (run.path / FINAL).exists()
    assert {p.name for p in rbms.path.iterdir()} == {"recipe.yaml", "metrics.jsonl", "dbn.safetensors"}
    found = read_run_status(run.path)
    run.close()
    assert found is not None and (found.state, found.kind, found.rbm) == ("running", "training", 1)


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
    monkeypatch.setattr(RunDir, "record", lambda run, row: (record(run, row), look()))
    often = ("--set", "checkpoint.interval_minibatches=1")
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *often)
    assert result.exit_code == 0, result.stderr
    look()
    assert seen >= {"recipe.yaml", "train.log", "status.json", "metrics.jsonl", "final.safetensors", "best.safetensors"}
    assert seen >= {"manifest.json", "global.safetensors", "rank0000.safetensors"}
    dry = run_cli("train", job.recipe, "--run-dir", tmp_path / "other", "--slurm", "--dry-run")
    assert dry.exit_code == 0 and dry.stdout.startswith("#!"), dry.stderr
    assert secret not in dry.stdout + dry.stderr + result.stdout + result.stderr


def test_run_dirs_are_used_without_torch() -> None:
    """By `ddnn status`, reports and Slurm jobs: only the tensors of checkpoints need it."""
    modules = [
        path.stem for path in Path(run_dir.__file__).parent.glob("*.py") if path.stem not in ("__init__", "checkpoint")
    ]
    assert {"run_dir", "metrics", "checkpoint_manifest"} <= set(modules)
    code = "".join(f"import ddnn.runs.{name}\n" for name in modules) + "import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
