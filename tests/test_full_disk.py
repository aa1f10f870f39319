"""A full disk at every point: one message, no corrupt file, no temporary one, and nothing lost that was whole."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from jobs import BEFORE_TRAINING, Job, RunCli, assert_refused, assert_trains, files_in, make_job

from ddnn.kaldi.archive import iterate_matrices
from ddnn.nn.acoustic_model import NNET1_FRONTS, load_model
from ddnn.runs.rows import EpochRow, MetricsRow
from ddnn.runs.run_dir import RunDir
from ddnn.util import files
from ddnn.util.errors import UserError

PAGE = 4096
FINISHED = {*BEFORE_TRAINING, "metrics.jsonl", "final.safetensors", "report.html"}
BESIDE = {"ali_train_pdf.counts", "decode.sh", "transition_model.sha256", "model.sha256"}
DECODABLE = {"loglikes.ark", "loglikes.scp", *BESIDE}


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path / "job")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """full(name, ...): from now on no file of these names can be flushed to disk; full(None): all can."""
    fsync, names = os.fsync, []

    def no_space(descriptor: int) -> None:
        written = Path(f"/proc/self/fd/{descriptor}").readlink().name
        if any(written.startswith(f".{name}.tmp") for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr("ddnn.util.files.os.fsync", no_space)

    def full(*full_names: str | None) -> None:
        names[:] = filter(None, full_names)

    return full


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """disk(pages): a real file system of that size, emptied; with 0 pages the one there is gets large."""
    place = tmp_path / "small disk"
    place.mkdir()
    mounted = False

    def mount(*options: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", place], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.decode().strip()}")

    def disk(pages: int) -> Path:
        nonlocal mounted
        if not pages:
            mount("-o", "remount,size=1m")
            return place
        if mounted:
            subprocess.run(["umount", place], check=True)
        mounted = False
        mount("-o", f"size={pages * PAGE}")
        mounted = True
        return place

    yield disk
    if mounted:
        subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("recipe.yaml", {"train.log", "status.json"}),
        ("ali_train_pdf.counts", {"recipe.yaml", "train.log", "status.json"}),
        ("cv_utterances", {"recipe.yaml", "train.log", "status.json", "ali_train_pdf.counts"}),
    ],
)
def test_train(job: Job, run_cli: RunCli, full: Callable[..., None], name: str, left: set[str]) -> None:
    full(name)
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert_refused(result, f"no space left while writing {name}", str(job.run), "free disk space or quota")
    assert files_in(job.run) == left
    full(None)
    assert_trains(run_cli, job)


def test_the_trained_model_without_space(job: Job, run_cli: RunCli, full: Callable[..., None]) -> None:
    """After the only epoch, with the checkpoint at its end."""
    full("final.safetensors")
    assert_trains(run_cli, job, run=job.root / "renamed")
    full("best.safetensors", "final.safetensors")
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert_refused(result, "no space left while writing final.safetensors", str(job.run))
    assert "--resume; it continues from checkpoint number 1: after epoch 1" in result.stderr
    assert files_in(job.run) == {*BEFORE_TRAINING, "metrics.jsonl", "checkpoints"}
    full(None)
    assert_refused(run_cli("train", job.recipe, "--run-dir", job.run), "exists already", str(job.run), "--resume")
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--resume").exit_code == 0
    assert files_in(job.run) == {*FINISHED, "checkpoints"}


def test_the_best_network_without_space_does_not_end_a_training(
    job: Job, run_cli: RunCli, full: Callable[..., None]
) -> None:
    full("best.safetensors")
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert files_in(job.run) == {*FINISHED, "checkpoints"}
    assert (job.run / "train.log").read_text().count("no space left while writing best.safetensors") == 1


def test_train_on_disks_of_every_size(
    job: Job, run_cli: RunCli, disk: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    sizes = []
    for pages in range(1, 12):
        run = disk(pages) / "run"
        result = run_cli("train", job.recipe, "--run-dir", run, "--device", "cpu")
        left = files_in(run)
        for line in (run / "metrics.jsonl").read_text().splitlines() if "metrics.jsonl" in left else []:
            assert json.loads(line)["type"] in ("start", "epoch", "worker", "end")
        for model in left & {"best.safetensors", "final.safetensors"}:
            load_model(run / model)
        if "final.safetensors" in left:
            assert left - {"checkpoints", "report.html"} == FINISHED - {"report.html"}
            assert result.exit_code == 0
            missing = "the model is written, its report is not: no space left while writing report.html"
            assert (missing in caplog.text) is ("report.html" not in left)
            break
        sizes.append(pages)
        assert_refused(result, "o space left", str(run))
    assert len(sizes) >= 4, "the sizes end in every file, from the first to the last"
    assert "final.safetensors" in left


class Filler:
    """A file that takes all the space of a disk while it is there."""

    def __init__(self, disk: Path) -> None:
        self.path = disk / "filler"

    def fill(self) -> None:
        with suppress(OSError), self.path.open("wb", buffering=0) as handle:
            while True:
                handle.write(bytes(PAGE))

    def free(self) -> None:
        self.path.unlink(missing_ok=True)


@pytest.fixture
def at_epoch(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, Callable[[], None]]], None]:
    """at_epoch({1: f}): f is called when the cross-validation of epoch 1 has been recorded."""
    record = RunDir.record

    def at_epoch(calls: dict[int, Callable[[], None]]) -> None:
        def recorded(run: RunDir, row: MetricsRow) -> None:
            record(run, row)
            if isinstance(row, EpochRow) and row.split == "cv" and row.epoch in calls:
                calls[row.epoch]()

        class LongRow(EpochRow):  # none fits into what the last page has left
            more: str = "x" * PAGE

        monkeypatch.setattr("ddnn.training.trainer.EpochRow", LongRow)

        monkeypatch.setattr(RunDir, "record", recorded)

    return at_epoch


LONGER = (
    "schedule={name: exponential, initial_learning_rate: 0.05, epochs: 5, max_epochs: null}",
    "checkpoint.interval_minibatches=3",
    "minibatch_size=64",
)


def train_longer(run_cli: RunCli, job: Job, run: Path, *more: str) -> Any:
    options = [word for setting in LONGER for word in ("--set", setting)]
    return run_cli("train", job.recipe, "--run-dir", run, "--device", "cpu", *options, *more)


def epochs_of(run: Path) -> list[tuple[int, str]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["epoch"], row["split"]) for row in rows if row["type"] == "epoch"]


EVERY_ROW = [(0, "cv"), *((epoch, split) for epoch in range(1, 6) for split in ("train", "cv"))]


def test_a_disk_that_is_full_for_a_while(
    job: Job,
    run_cli: RunCli,
    disk: Callable[[int], Path],
    at_epoch: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No checkpoint, no best network, no row and no line of the log finds space for three epochs: training goes on, and
    ends as if there had always been space."""
    assert train_longer(run_cli, job, job.run).exit_code == 0
    place = disk(200)
    filler, held = Filler(place), []
    at_epoch({1: filler.fill, 3: lambda: held.extend(epochs_of(place / "run")), 4: filler.free})
    result = train_longer(run_cli, job, place / "run")
    assert result.exit_code == 0, result.stderr
    assert held == EVERY_ROW[:3], "no row of the epochs 2 and 3 found space"
    assert epochs_of(place / "run") == EVERY_ROW
    assert files_in(place / "run") == FINISHED
    assert (place / "run/final.safetensors").read_bytes() == (job.run / "final.safetensors").read_bytes()
    said = caplog.text
    assert said.count("best.safetensors in") == said.count("rows are kept in memory until it can") == 1
    assert "pending rows are in it" in said


@pytest.mark.parametrize("checkpoints", [True, False])
def test_a_disk_that_stays_full_to_the_end(
    job: Job, run_cli: RunCli, disk: Callable[[int], Path], at_epoch: Callable[..., None], checkpoints: bool
) -> None:
    """From the first epoch on. The network of that epoch, and an older checkpoint if there are any, make room for the
    trained model, and checkpoints also for the rows."""
    settings = ["--set", "model.hidden_units=400", "--set", "schedule.initial_learning_rate=0.002"]
    settings += [] if checkpoints else ["--set", "checkpoint.interval_minibatches=null"]
    assert train_longer(run_cli, job, job.run, *settings).exit_code == 0
    place = disk(300)
    at_epoch({1: Filler(place).fill})
    result = train_longer(run_cli, job, place / "run", *settings)
    assert (place / "run/final.safetensors").read_bytes() == (job.run / "final.safetensors").read_bytes()
    assert files_in(place / "run") == (FINISHED if checkpoints else FINISHED - {"report.html"})
    if checkpoints:
        assert result.exit_code == 0, result.stderr
        assert epochs_of(place / "run") == EVERY_ROW
    else:
        assert_refused(result, "cannot write metrics.jsonl", "the model is complete in final.safetensors", "are lost")


def test_ended_while_the_disk_is_full(
    job: Job, run_cli: RunCli, disk: Callable[[int], Path], at_epoch: Callable[..., None]
) -> None:
    """The last good checkpoint is intact, and a resumption ends in the same bits."""
    assert train_longer(run_cli, job, job.run).exit_code == 0
    place = disk(200)
    filler = Filler(place)

    def interrupted() -> None:
        raise UserError("ended here")

    at_epoch({2: filler.fill, 4: interrupted})
    assert_fails_with(train_longer(run_cli, job, place / "run"), "ended here")
    assert (4, "cv") not in epochs_of(place / "run")
    filler.free()
    at_epoch({})
    result = train_longer(run_cli, job, place / "run", "--resume")
    assert result.exit_code == 0, result.stderr
    assert epochs_of(place / "run") == EVERY_ROW
    assert (place / "run/final.safetensors").read_bytes() == (job.run / "final.safetensors").read_bytes()


def assert_fails_with(result: Any, said: str) -> None:
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.stderr


def test_a_log_that_finds_no_space_does_not_end_a_training(
    job: Job, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_log = files.LogFile._open

    def without_space(log: files.LogFile) -> io.TextIOWrapper:
        stream = open_log(log)
        os.dup2(os.open("/dev/full", os.O_WRONLY), stream.fileno())
        return stream

    monkeypatch.setattr(files.LogFile, "_open", without_space)
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    assert files_in(job.run) == {*FINISHED, "checkpoints"}
    assert "Traceback" not in result.stderr and "Logging error" not in result.stderr
    assert result.stderr.count("train.log are lost: [Errno 28] No space left on device") == 1


@pytest.mark.parametrize("name", sorted(DECODABLE))
def test_decode_prep(job: Job, run_cli: RunCli, full: Callable[..., None], name: str) -> None:
    assert_trains(run_cli, job)
    out = job.root / "decode"
    arguments = ["decode-prep", job.run, "--data", job.data, "--out", out, "--device", "cpu"]
    full(name)
    assert_refused(run_cli(*arguments), f"no space left while writing {name}", str(out))
    assert "loglikes.scp" not in files_in(out)
    full(None)
    assert run_cli(*arguments).exit_code == 0
    assert files_in(out) == DECODABLE


def test_decode_prep_on_disks_of_every_size(job: Job, run_cli: RunCli, disk: Callable[[int], Path]) -> None:
    assert_trains(run_cli, job)
    for pages in range(1, 12):
        out = disk(pages) / "decode"
        arguments = ["decode-prep", job.run, "--data", job.data, "--out", out, "--device", "cpu"]
        result = run_cli(*arguments)
        if result.exit_code == 0:
            break
        assert_refused(result, "no space left while writing", str(out))
        assert not files_in(out) & {"loglikes.ark", "loglikes.scp"}
        disk(0)
        assert run_cli(*arguments).exit_code == 0, "the same command works once there is space"
        assert len(list(iterate_matrices(out / "loglikes.ark"))) == 24
    assert pages >= 4
    assert files_in(out) == DECODABLE


@pytest.mark.parametrize("name", ["final.nnet", *NNET1_FRONTS, "ali_train_pdf.counts"])
def test_export(job: Job, run_cli: RunCli, full: Callable[..., None], name: str) -> None:
    assert_trains(run_cli, job)
    full(name)
    arguments = ["export", job.run, "--out", job.root / "nnet"]
    assert_refused(run_cli(*arguments), f"no space left while writing {name}")
    assert files_in(job.root / "nnet") <= {"ali_train_pdf.counts"}
    full(None)
    assert run_cli(*arguments).exit_code == 0


@pytest.mark.parametrize("name", ["ali_train_pdf.counts", "final.safetensors"])
def test_import(job: Job, run_cli: RunCli, full: Callable[..., None], name: str) -> None:
    assert_trains(run_cli, job)
    assert run_cli("export", job.run, "--out", job.root / "nnet").exit_code == 0
    nnet, counts = job.root / "nnet", job.run / "ali_train_pdf.counts"
    arguments = ["import-nnet1", nnet / "final.nnet", "--feature-transform", nnet / "feature_transform.nnet"]
    arguments += ["--pdf-counts", counts, "--out", job.root / "imported"]
    full(name)
    assert_refused(run_cli(*arguments), f"no space left while writing {name}")
    assert files_in(job.root / "imported") == set()
    full(None)
    assert run_cli(*arguments).exit_code == 0
    assert files_in(job.root / "imported") == {"final.safetensors", "ali_train_pdf.counts"}


def test_pretraining_goes_on_once_there_is_space(job: Job, run_cli: RunCli, disk: Callable[[int], Path]) -> None:
    job.recipe.write_text(
        job.recipe.read_text().replace("hidden_layers: 1", "hidden_layers: 2") + "init: rbm\npretrain: {epochs: [2]}\n"
    )
    for pages in range(1, 12):
        run = disk(pages) / "rbm"
        arguments = ["pretrain", job.recipe, "--run-dir", run, "--device", "cpu"]
        result = run_cli(*arguments)
        if result.exit_code == 0:
            break
        assert_refused(result, "o space left", str(run))
        assert "dbn.safetensors" not in files_in(run)
        disk(0)
        assert run_cli(*arguments).exit_code == 0
        assert len((run / "metrics.jsonl").read_text().splitlines()) == 4
    assert pages >= 4
    assert files_in(run) == {
        *("recipe.yaml", "train.log", "status.json", "metrics.jsonl"),
        *("rbm1.safetensors", "rbm2.safetensors", "dbn.safetensors"),
    }  # fmt: skip


def test_synth(tmp_path: Path, run_cli: RunCli, disk: Callable[[int], Path]) -> None:
    out = disk(100) / "corpus"
    assert_refused(run_cli("synth", out, "--hours", "0.05"), "no space left while writing")
    assert [path for path in out.rglob("*") if ".tmp" in path.name] == []


def test_output_that_finds_no_space(job: Job) -> None:
    with Path("/dev/full").open("w") as sink:
        command = [sys.executable, "-m", "ddnn.cli", "info", job.scp]
        done = subprocess.run(command, stdout=sink, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert (done.returncode, done.stderr) == (2, "ddnn: error: cannot read or write: No space left on device\n")
