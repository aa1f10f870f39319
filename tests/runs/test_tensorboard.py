"""`log.tensorboard`: what TensorBoard reads is what metrics.jsonl has, once, also after a resume."""

from __future__ import annotations

import errno
import os
import signal
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from jobs import Job, RunCli, assert_refused, make_job
from report_runs import rows_of, write_run

from ddnn.distributed.signals import TrainingInterrupted
from ddnn.recipe.load import load_recipe
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import EpochRow, StartRow
from ddnn.training.job import run_pretraining, run_training
from ddnn.training.state import CheckpointPolicy

Points = dict[str, list[tuple[int, float]]]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed")
    return make_job(tmp_path)


def points(run: Path) -> Points:
    """Tag -> step and value of all events in all files, none purged, in the order in which they were written."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found: Points = {}
    for path in sorted((run / "tensorboard").iterdir()):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def recorded(run: Path) -> Points:
    metrics = read_metrics(run / "metrics.jsonl")
    found: Points = {}
    for row in (*metrics.train, *metrics.cv):
        figures = {f"loss/{row.split}": row.loss, f"frame_accuracy/{row.split}": row.figures["frame_accuracy"]}
        if row.split == "train":
            figures |= {"learning_rate/applied": row.learning_rate, "speed/frames_per_second": row.frames_per_second}
            (worker,) = (one for one in metrics.workers if one.epoch == row.epoch)
            figures |= {"time/compute": worker.compute_fraction, "time/waiting": worker.wait_fraction}
        for tag, value in figures.items():
            found.setdefault(tag, []).append((row.epoch, pytest.approx(value, rel=1e-6, abs=1e-12)))
    return found


def as_tensorboard_shows(run: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run / "tensorboard")).Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_a_resume_continues_the_same_curves(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["log.tensorboard=true", "schedule.max_epochs=3", "checkpoint.interval_minibatches=1"]
    after, left = CheckpointPolicy.after_minibatch, [60]

    def stop(self: CheckpointPolicy, trainer: Any) -> None:
        left[0] -= 1
        if left[0] == 0:  # within the third epoch
            os.kill(os.getpid(), signal.SIGTERM)
        after(self, trainer)

    monkeypatch.setattr(CheckpointPolicy, "after_minibatch", stop)
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(job.recipe, settings), job.run, "cpu")
    before = points(job.run)
    assert before["loss/train"] == recorded(job.run)["loss/train"] and len(before["loss/train"]) == 2
    run_training(load_recipe(job.recipe, settings), job.run, "cpu", resume=True)
    found, expected = points(job.run), recorded(job.run)
    assert {tag: found[tag] for tag in expected} == expected
    assert [step for step, _ in found["loss/cv"]] == [0, 1, 2, 3]
    assert {tag: found[tag] for tag in found} == as_tensorboard_shows(job.run)
    assert len(list((job.run / "tensorboard").iterdir())) == 1
    assert "workers/consensus_distance" not in found, "one worker has none"


def test_a_resume_may_begin_or_end_it(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that begins later has the epochs of before."""
    after = CheckpointPolicy.after_epoch

    def stop(self: CheckpointPolicy, trainer: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        after(self, trainer)

    monkeypatch.setattr(CheckpointPolicy, "after_epoch", stop)
    epochs = "schedule.max_epochs=3"
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(job.recipe, [epochs]), job.run, "cpu")
    assert not (job.run / "tensorboard").exists()
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(job.recipe, [epochs, "log.tensorboard=true"]), job.run, "cpu", resume=True)
    assert points(job.run)["loss/cv"] == recorded(job.run)["loss/cv"]
    assert len(points(job.run)["loss/cv"]) == 3
    monkeypatch.undo()
    run_training(load_recipe(job.recipe, [epochs]), job.run, "cpu", resume=True)
    assert len(points(job.run)["loss/cv"]) == 3


def test_pretraining(job: Job) -> None:
    rbm = ["init=rbm", "pretrain={epochs: [2, 1], minibatch_size: 20}", "model.hidden_layers=2"]
    settings = [*rbm, "log.tensorboard=true"]
    run_training(load_recipe(job.recipe, settings), job.run, "cpu")
    found = points(job.run / "pretrain")
    errors = [row.reconstruction_error for row in read_metrics(job.run / "pretrain" / "metrics.jsonl").pretraining]
    assert found["rbm1/reconstruction_error"] == [(1, pytest.approx(errors[0])), (2, pytest.approx(errors[1]))]
    assert found["rbm2/reconstruction_error"] == [(1, pytest.approx(errors[2]))]
    assert "loss/cv" in points(job.run)
    run_pretraining(load_recipe(job.recipe, settings), job.root / "rbm", "cpu")
    assert points(job.root / "rbm")["rbm1/reconstruction_error"] == found["rbm1/reconstruction_error"]
    (job.root / "rbm" / "dbn.safetensors").unlink()
    run_pretraining(load_recipe(job.recipe, rbm), job.root / "rbm", "cpu")  # the same RBMs, whatever is logged


def test_several_workers_have_a_mean_and_times_are_of_the_training(tmp_path: Path, job: Job) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    from ddnn.runs.tensorboard import TensorBoardWriter

    run = write_run(tmp_path / "made-up", [*rows_of(3, epochs=2), {"type": "of a later version"}])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"type": "epo')  # killed while it wrote
    writer = TensorBoardWriter(run / "metrics.jsonl")
    writer.write(EpochRow(split="cv", epoch=9, loss=1.0, frame_accuracy=0.5))  # before the file begins: not here
    writer.truncate(lambda row: True)
    writer.truncate(lambda row: True)
    rows = read_metrics(run / "metrics.jsonl").workers[:3]
    mean = sum(row.consensus_distance or 0.0 for row in rows) / 3
    found = points(run)
    assert found["workers/consensus_distance"][0] == (1, pytest.approx(mean))
    assert found["time/waiting"] == [(epoch, pytest.approx(0.02)) for epoch in (1, 2)]
    (path,) = (run / "tensorboard").iterdir()
    walls = [event.wall_time for event in LegacyEventFileLoader(str(path)).Load() if event.summary.value]
    assert [b - a for a, b in pairwise(walls)] == pytest.approx([3.1] * 4, abs=1e-4)


def test_a_full_disk_ends_no_training(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddnn.runs import metrics as module
    from ddnn.runs.tensorboard import TensorBoardWriter

    append = module.append_bytes
    run = write_run(tmp_path / "made-up", rows_of(1, epochs=1))

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    writer = TensorBoardWriter(run / "metrics.jsonl")
    monkeypatch.setattr(module, "append_bytes", full)
    writer.truncate(lambda row: True)
    writer.write(EpochRow(split="cv", epoch=2, loss=1.0, frame_accuracy=0.5))
    monkeypatch.setattr(module, "append_bytes", append)
    start = read_metrics(run / "metrics.jsonl").starts[0]
    assert isinstance(start, StartRow)
    writer.write(start)  # has no figures, but there is space
    assert [step for step, _ in points(run)["loss/cv"]] == [0, 1, 2]


def test_a_link_in_its_place_is_refused(tmp_path: Path, job: Job, run_cli: RunCli) -> None:
    (tmp_path / "elsewhere").mkdir()
    job.run.mkdir()
    (job.run / "tensorboard").symlink_to(tmp_path / "elsewhere")
    words = ("train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "log.tensorboard=true")
    assert_refused(run_cli(*words), "tensorboard is a symbolic link, expected a directory")
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("command", ["train", "pretrain"])
def test_without_the_package(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Before any data are read, and before there is a run dir."""
    job = make_job(tmp_path)
    data = job.ark.read_bytes()
    job.ark.write_bytes(b"damaged")
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    words = (command, job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "log.tensorboard=true")
    result = run_cli(*words, "--set", "init=rbm")
    assert_refused(result, "needs the package tensorboard", "pip install 'ddnn[tensorboard]'")
    assert not job.run.exists()
    job.ark.write_bytes(data)
    dry = (*words, "--set", "init=rbm", "--dry-run")
    for more in ((), ("--slurm",)):
        assert_refused(run_cli(*dry, *more), "needs the package tensorboard", "pip install 'ddnn[tensorboard]'")
    assert run_cli(*dry, "--no-data").exit_code == 0
