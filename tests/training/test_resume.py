"""A training that is stopped and resumed ends in the bits of one that never was: model, metrics, NG-SGD."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe, write_transforms
from distributed.mpi_worlds import need_mpi
from distributed.threads import run_workers
from forked_python import forked_python
from jobs import RunCli, assert_refused, make_job
from training.launching import mpi_script
from training.mpi_resume import check as check_resume
from training.toy import MINIBATCH, toy_trainer
from variants import make_parallel_config

import ddnn
from ddnn.averaging.averager import Averager
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.inspection.path import describe_path
from ddnn.inspection.status import read_status
from ddnn.kaldi.archive import write_matrices
from ddnn.nn.acoustic_model import load_model
from ddnn.optim.schedule import MinibatchSizes
from ddnn.recipe.keys import keys
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.runs.metrics import MetricsWriter, read_metrics
from ddnn.runs.rows import EndRow, EventRow
from ddnn.runs.run_status import model_digest
from ddnn.training import job
from ddnn.training.job import run_training
from ddnn.training.resume import merge_rank_states, read_metadata
from ddnn.training.resume_rules import check_same_recipe
from ddnn.training.state import LoadedCheckpoint, TrainingProgress, capture
from ddnn.util.errors import DataError, RecipeError, UserError

TIMES = (
    "seconds", "frames_per_second", "interval_seconds", "interval_seconds_std", "comm_seconds", "compute_cpu_seconds",
)  # fmt: skip
WAYS = {
    "sgd, newbob": "optimizer: {momentum: 0.5}\n",
    "sgd, newbob, blocks": "optimizer: {momentum: 0.5}\nrandomizer_size: 50\n",
    "sgd, newbob with rejected epochs": "optimizer: {momentum: 0.9, l2: 0.01}\n",
    "power, growing minibatch": "optimizer: {name: ng-sgd, rank_in: 3, rank_out: 4}\n",
    "means": "optimizer: {momentum: 0.9, l2: 0.01}\n",
    "ng-sgd, exponential": "optimizer: {name: ng-sgd, rank_in: 3, rank_out: 4, momentum: 0.3}\n",
    "adam": "optimizer: {name: adam, l2: 0.01}\n",
    "muon": "optimizer: {name: muon}\n",
    "shampoo": "optimizer: {name: shampoo, update_period: 3}\n",
    "sgd, newbob, bf16": "precision: bf16\n",
}


def recipe_of(folder: Path, more: str, epochs: str = "schedule: {initial_learning_rate: 0.05, max_epochs: 4}") -> Path:
    folder.mkdir(exist_ok=True)
    features, labels = labelled_utterances(count=16)
    data = write_data_dir(folder / "data", features)
    path = write_recipe(folder / "recipe.yaml", data, write_pdfs(folder / "pdfs.txt", labels), more)
    path.write_text(path.read_text().replace("schedule: {initial_learning_rate: 0.05, max_epochs: 3}", epochs))
    return path


def way(folder: Path, name: str) -> Path:
    epochs = "schedule: {initial_learning_rate: 0.05, max_epochs: 4}"
    if "exponential" in name:
        epochs = "schedule: {name: exponential, initial_learning_rate: 0.02, epochs: 3}"
    if "power" in name:
        epochs = "schedule: {name: power, initial_learning_rate: 0.02, epochs: 4}"
    if name == "means":
        epochs = "schedule: {initial_learning_rate: 1.5, max_epochs: 5, average_last: 3, moving_average_epochs: 0.5}"
    if "rejected" in name:
        epochs = "schedule: {initial_learning_rate: 1.5, max_epochs: 6}"
    path = recipe_of(folder, WAYS[name], epochs)
    if "growing" in name:
        text = path.read_text()
        assert "minibatch_size: 16\n" in text
        path.write_text(text.replace("minibatch_size: 16\n", "minibatch_size: {start: 8, end: 24, epochs: 3}\n"))
    return path


def rows(run: Path) -> list[dict[str, Any]]:
    """What does not depend on time; without the rows that tell of resuming."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [row for row in found if row["type"] not in ("start", "event") and row.get("reason") != "stopped"]
    return [{key: value for key, value in row.items() if key not in TIMES and "fraction" not in key} for row in kept]


@pytest.mark.parametrize("name", WAYS)
def test_stopped_anywhere_and_resumed(
    name: str, tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]
) -> None:
    recipe, whole = load_recipe(way(tmp_path, name)), tmp_path / "whole"
    run_training(recipe, whole, "cpu")
    minibatches = sum(row["minibatches"] for row in rows(whole) if row["type"] == "worker")
    if "rejected" in name:
        assert any(not row["accepted"] for row in rows(whole) if row.get("split") == "cv")
    if "blocks" in name:
        run_training(load_recipe(way(tmp_path, "sgd, newbob")), tmp_path / "not in blocks", "cpu")
        assert rows(whole) != rows(tmp_path / "not in blocks")
    moments = random.Random(name).sample(range(minibatches // 8, minibatches), 4)
    for number, moment in enumerate(moments):
        run, gone = tmp_path / f"run{number}", 0
        sent = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)[number % 4]
        while not (run / "final.safetensors").exists():  # stopped again and again
            stop_at(moment, sent)
            try:
                run_training(recipe, run, "cpu", resume=True)
            except TrainingInterrupted as stopped:
                assert (stopped.code, stopped.signal_name) == (75, sent.name)
                gone += 1
        assert gone == minibatches // moment, "so often it was stopped"
        assert (run / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
        assert rows(run) == rows(whole)
        kept = [len(list((one / "checkpoints").glob("0*"))) for one in (run, whole)]
        assert kept[0] == kept[1] <= 1, "one stays where the training can be made longer"
        log = (run / "train.log").read_text()
        assert (
            f"interrupted: stopped on {sent.name}; resume with: ddnn train " in log and "resumed from checkpoint" in log
        )


def test_each_start_records_how_it_ended(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    recipe, run = load_recipe(way(tmp_path, "ng-sgd, exponential")), tmp_path / "run"
    stop_at(40, signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run_training(recipe, run, "cpu")
    status, stopped = read_status(run), read_metrics(run / "metrics.jsonl").end
    assert stopped is not None and (stopped.reason_text, stopped.epoch, stopped.kept_epoch) == (
        "stopped: on SIGTERM",
        1,
        1,
    )
    assert stopped.figures == status.last.figures  # type: ignore
    assert status.metrics.end == stopped == status.run.end and re.search(r"ended +stopped\n", status.as_text())  # type: ignore[union-attr]
    assert status.as_dict()["end"]["reason"] == "stopped"
    stop_at(0)
    run_training(recipe, run, "cpu", resume=True)
    ends = [
        row for line in (run / "metrics.jsonl").read_text().splitlines() if (row := json.loads(line))["type"] == "end"
    ]
    assert [row["reason"] for row in ends] == ["stopped", "epochs-exhausted"]
    status, info = read_status(run), describe_path(run).fields
    assert status.metrics.end is not None and status.metrics.end.kept_epoch == 3
    assert all(re.search(r"ended +3 epochs done\n", text) for text in (status.as_text(), info["status"]))
    assert describe_path(run / "metrics.jsonl").fields["ended"] == "3 epochs done"
    assert (run / "train.log").read_text().count("resumed ") == 1


def test_a_start_that_has_not_ended_has_no_end(tmp_path: Path) -> None:
    end = EndRow(reason="stopped", detail="on SIGTERM", epoch=1, kept_epoch=1, loss=1.0, frame_accuracy=0.5)
    resumed = EventRow(event="resumed", epoch=1, world_size=1)
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    for row, expected in ((end, end), (resumed, None), (end, end)):
        writer.write(row)
        assert read_metrics(writer.path).end == expected


@pytest.fixture(scope="module")
def resumed_workers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What mpi_resume.py has found."""
    need_mpi()
    out = tmp_path_factory.mktemp("resumed")
    mpi_script("mpi_resume.py", 3, out, 2)
    found: dict[str, Any] = json.loads((out / "found.json").read_text())
    return found


def test_workers_stopped_anywhere_and_resumed(resumed_workers: dict[str, Any]) -> None:
    found = resumed_workers["same"]
    assert len(found) == 14 and any(one["within"] for one in found.values())
    assert sum(one["fisher"] for one in found.values()) == 5, "with NG-SGD the Fisher matrices are compared too"
    for name, one in found.items():
        assert (one["stopped"], one["same"], one["rows"]) == (True, True, True), name


@pytest.mark.parametrize("requests", range(8))
@pytest.mark.parametrize("name", ["once an epoch", "bmuf once an epoch"])
def test_workers_that_average_once_an_epoch_are_stopped_within_it(name: str, requests: int, tmp_path: Path) -> None:
    """At each of the six exchanges of requests of the first epoch, where their models differ, and at the end of the first two
    epochs."""
    found = run_workers(3, lambda comm: check_resume(comm, tmp_path, name, requests))
    for one in found:
        assert (one["stopped"], one["same"], one["rows"]) == (True, True, True)
        assert (one["epoch"], one["within"], one["models"]) == (
            (0, True, 3) if requests < 6 else (requests - 5, False, 1)
        )


def test_a_checkpoint_of_another_number_of_workers(resumed_workers: dict[str, Any]) -> None:
    """Three workers' checkpoint, one resumes: from the mean of their models."""
    assert resumed_workers["fewer"] == {"mean": True, "epoch": 1, "minibatch": 9, "finishes": True}


def test_a_resume_on_other_workers_finds_its_place_in_a_growing_minibatch(tmp_path: Path) -> None:
    """Half of the second epoch is done, 5 of its 10 minibatches."""
    sizes = MinibatchSizes(8, 32, 2)
    stopped, resumed = (toy_trainer(SingleProcess(), make_parallel_config(), sizes=sizes) for _ in range(2))
    stopped.progress.epoch = 1
    stopped.begin_epoch()
    stopped.progress.minibatch = 5
    metadata, shared, rank = capture(stopped)
    resumed.restore(LoadedCheckpoint(read_metadata(metadata, tmp_path), shared, rank, False, tmp_path))
    assert (resumed.minibatch_size, resumed.progress.minibatch, len(resumed.batches)) == (32, 5, 10)


@pytest.mark.parametrize("within", [True, False])
def test_what_all_workers_share_in_a_checkpoint_is_equal_on_all(within: bool) -> None:
    """Shards of unlike sizes, and minibatches as after a resume on another number of workers."""

    def work(comm: Communicator) -> dict[str, Any]:
        trainer = toy_trainer(comm, make_parallel_config(averaging_period=3), frames=(20 + 4 * comm.rank) * MINIBATCH)
        if within:
            trainer.begin_epoch()
            trainer.progress.minibatch = 5 + comm.rank
        metadata, shared, _ = capture(trainer)
        everyone = comm.all_gather_object([json.dumps(metadata), {name: v.tolist() for name, v in shared.items()}])
        assert all(one == everyone[0] for one in everyone)
        return metadata

    for metadata in run_workers(3, work):
        assert metadata["minibatch"] == (5 if within else 0)
        assert metadata["epoch_fraction"] == ((5 + 6 + 7) / (20 + 24 + 28) if within else 0.0)


@pytest.mark.parametrize("length", [None, 0, 7])
def test_an_epoch_of_no_minibatches_is_not_the_pause_between_two(length: int | None) -> None:
    before, after = TrainingProgress(num_minibatches=length), TrainingProgress()
    after.load_state_dict(before.state_dict())
    assert after.num_minibatches == length


def stopped_run(folder: Path, stop_at: Callable[[int, signal.Signals], None], more: str = "") -> tuple[Path, Path]:
    recipe, run = recipe_of(folder, more), folder / "run"
    stop_at(40, signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(recipe), run, "cpu")
    stop_at(0, signal.SIGTERM)
    return recipe, run


def test_what_a_resume_may_change(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    recipe, run = stopped_run(tmp_path, stop_at)
    with pytest.raises(RecipeError, match=r"minibatch_size: 32 found, 16 expected"):
        run_training(load_recipe(recipe, ["minibatch_size=32"]), run, "cpu", resume=True)
    with pytest.raises(RecipeError, match=r"(?s)model.hidden_units: 9 found.*seed: 2 found, 1 expected"):
        run_training(load_recipe(recipe, ["seed=2", "model.hidden_units=9"]), run, "cpu", resume=True)
    run_training(load_recipe(recipe, ["checkpoint.keep_last=5", "parallel.hang_timeout=60"]), run, "cpu", resume=True)
    assert (run / "final.safetensors").exists()


MAY_CHANGE = {
    "checkpoint.interval_minibatches", "checkpoint.interval_minutes", "checkpoint.keep_last", "cuda_graphs",
    "data.alignments", "data.allow_pipes", "data.cache_dir", "data.cv.alignments", "data.cv.data", "data.cv.speakers",
    "data.cv.transforms", "data.cv.utterances", "data.transforms", "data.feature_device", "data.loader_processes", "data.max_skipped_fraction",
    "data.train",
    "log.interval_minutes", "log.tensorboard", "parallel.cpu_threads", "parallel.gpu_transport", "parallel.hang_timeout", "parallel.max_restarts",
    "parallel.columns", "parallel.microbatches", "parallel.oversubscribe_gpus", "parallel.pipeline", "parallel.stages", "parallel.workers",
}  # fmt: skip


OF_UTTERANCES = {"criterion.class_counts", "criterion.lattices", "criterion.silence_phones"}
"""May change where the criterion is a mapping: test_sequence.py."""


@pytest.mark.parametrize("key", [key for key in keys() if key not in OF_UTTERANCES])
def test_every_other_key_may_not_change(key: str, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_of(tmp_path, "precision: float32\n"))
    before = yaml.safe_load(dump_recipe(recipe))
    section = before
    *sections, name = key.split(".")
    for part in sections:
        if not isinstance(section.get(part), dict):  # a key that takes a value or a mapping has a value here
            section[part] = {}
        section = section[part]
    section[name] = "another value"
    if key in MAY_CHANGE:
        check_same_recipe(yaml.safe_dump(before), recipe, tmp_path)
    else:
        with pytest.raises(RecipeError, match=f"(?s){re.escape(key)}: .* another value expected"):
            check_same_recipe(yaml.safe_dump(before), recipe, tmp_path)


def test_a_checkpoint_is_left_at_the_end_of_an_epoch(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]
) -> None:
    """Stopped in the second epoch, of 30 minibatches: one for the first, one for the stop."""
    _, run = stopped_run(tmp_path, stop_at, "checkpoint: {interval_minutes: 1000}\n")
    found = []
    for path in sorted((run / "checkpoints").iterdir()):
        metadata = json.loads((path / "manifest.json").read_text())["metadata"]
        found.append((metadata["epoch"], metadata["minibatch"]))
    assert found == [(1, 0), (1, 10)]


def test_a_resume_keeps_the_precision_that_was_chosen(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`auto` is decided once: on another machine it might be decided otherwise."""
    asked, choose = list[str](), job.choose_arithmetic

    def recorded(precision: Any, *arguments: Any, **options: Any) -> Any:
        asked.append(precision)
        return choose(precision, *arguments, **options)

    monkeypatch.setattr(job, "choose_arithmetic", recorded)
    recipe, run = stopped_run(tmp_path, stop_at, "precision: auto\n")
    assert load_recipe(run / "recipe.yaml").precision == "float32", "what was chosen"
    run_training(load_recipe(recipe), run, "cpu", resume=True)
    assert asked == ["auto", "float32"]
    assert load_recipe(run / "recipe.yaml").precision == "float32"


@pytest.mark.parametrize("by", ["recipe", "run dir"])
def test_a_resume_may_not_change_the_precision_that_was_chosen(
    by: str, tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]
) -> None:
    recipe, run = stopped_run(tmp_path, stop_at, "precision: auto\n")
    given = recipe if by == "recipe" else run / "recipe.yaml"
    before = [(run / name).read_text() for name in ("recipe.yaml", "metrics.jsonl")]
    with pytest.raises(RecipeError, match="precision: bf16 found, float32 expected"):
        run_training(load_recipe(given, ["precision=bf16"]), run, "cpu", resume=True)
    assert [(run / name).read_text() for name in ("recipe.yaml", "metrics.jsonl")] == before
    run_training(load_recipe(given, ["precision=float32"]), run, "cpu", resume=True)


@pytest.mark.parametrize(
    ("before", "chosen", "now", "refused"),
    [
        ("auto", "bf16", "auto", None),
        ("auto", "bf16", "bf16", None),
        ("auto", "bf16", "float32", "float32 found, bf16 expected"),
        ("bf16", "bf16", "auto", None),
        ("bf16", "bf16", "float32", "float32 found, bf16 expected"),
        ("bf16", "float32", "bf16", None),  # bf16 was unsafe there
        ("bf16", "float32", "float32", None),
        ("float32", "float32", "bf16", "bf16 found, float32 expected"),
    ],
)
def test_the_precision_of_a_recipe_that_resumes(
    before: str, chosen: str, now: str, refused: str | None, tmp_path: Path
) -> None:
    recipe = recipe_of(tmp_path, "")
    text = dump_recipe(load_recipe(recipe, [f"precision={before}"]))
    given = load_recipe(recipe, [f"precision={now}"])
    if refused is None:
        check_same_recipe(text, given, tmp_path, chosen)
    else:
        with pytest.raises(RecipeError, match=f"precision: {refused}"):
            check_same_recipe(text, given, tmp_path, chosen)


def test_the_seconds_of_an_interrupted_epoch_count(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]
) -> None:
    recipe, run = stopped_run(tmp_path, stop_at)
    store = CheckpointStore(run / "checkpoints", 3, SingleProcess())
    found = store.latest()
    assert found is not None
    state = {**found.rank_state(0), "progress.seconds": torch.tensor(1000.0, dtype=torch.float64)}
    store.save(found.metadata, found.global_state, state)
    run_training(load_recipe(recipe), run, "cpu", resume=True)
    all_rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = [row["seconds"] for row in all_rows if row.get("split") == "train"]
    assert [value >= 1000.0 for value in seconds[:3]] == [False, True, False]
    known = [row["compute_cpu_seconds"] is not None for row in all_rows if row["type"] == "worker"]
    assert known[:3] == [True, False, True], "CPU time before the checkpoint is not known"


def test_states_of_several_ranks_are_merged() -> None:
    """Three workers' models and sums; all else is that of rank 0."""
    states = [
        {
            "network.parameters": torch.tensor([rank, 1.0 + 4 * rank]),
            "losses.sums": torch.tensor([[10.0 * rank, rank, 16], [1, 0, 16 * rank]], dtype=torch.float64),
            "progress.minibatches": torch.tensor([rank, 9]),
        }
        for rank in (1, 2, 6)
    ]
    found = merge_rank_states(states)
    assert found["network.parameters"].tolist() == [3.0, 13.0]
    assert found["losses.sums"].tolist() == [[90.0, 9.0, 48.0], [3.0, 0.0, 144.0]]
    assert found["progress.minibatches"].tolist() == [1, 9]


def test_what_is_refused_changes_nothing(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, run = stopped_run(tmp_path, stop_at)
    before = {path.name: path.read_bytes() for path in run.glob("*.*") if path.name != "train.log"}
    other = recipe_of(tmp_path / "other", "")
    wrong = [
        f"data.train={other.parent / 'data'}",
        f"data.alignments={other.parent / 'pdfs.txt'}",
        "checkpoint.keep_last=7",
    ]
    features, labels = labelled_utterances(count=15)
    write_data_dir(other.parent / "data", features)
    write_pdfs(other.parent / "pdfs.txt", labels)
    with pytest.raises(DataError, match="the data has changed since"):
        run_training(load_recipe(recipe, wrong), run, "cpu", resume=True)
    with pytest.raises(RecipeError, match="seed: 2 found"):
        run_training(load_recipe(recipe, ["seed=2"]), run, "cpu", resume=True)
    assert {path.name: path.read_bytes() for path in run.glob("*.*") if path.name != "train.log"} == before
    status = read_status(run)
    assert (status.state, status.run.phase, status.run.max_epochs) == ("interrupted", "training", 4)  # type: ignore[union-attr]
    refused = [line for line in (run / "train.log").read_text().splitlines() if "the resume was refused: " in line]
    assert "the data has changed since" in refused[0] and "seed: 2 found" in refused[1] and len(refused) == 2
    run_training(load_recipe(recipe), run, "cpu", resume=True)
    assert read_status(run).state == "finished"


def test_workers_are_not_started_for_another_recipe(
    tmp_path: Path,
    stop_at: Callable[[int, signal.Signals], None],
    run_cli: RunCli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe, run = stopped_run(tmp_path, stop_at)
    started: list[int] = []
    monkeypatch.setattr("ddnn.training.start.run_distributed", lambda workers, *_, **__: started.append(workers))
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    words = ("train", recipe, "--run-dir", run, "--resume", "--workers", 2)
    assert_refused(run_cli(*words, "--set", "seed=2"), "seed: 2 found, 1 expected", "start in another run dir")
    assert started == [] and {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert run_cli(*words, "--set", "schedule.max_epochs=9").exit_code == 0
    assert run_cli(*words, "--set", "seed=2", "--set", "parallel.workers=1").exit_code == 2, ()
    assert started == [2]


def test_a_resume_that_is_refused_while_rbms_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, run = recipe_of(tmp_path, "init: rbm\npretrain: {epochs: [2]}\n"), tmp_path / "run"

    def stop(*arguments: object) -> None:
        raise TrainingInterrupted("SIGTERM")

    monkeypatch.setattr(job, "pretrain_dbn", stop)
    with pytest.raises(SystemExit):
        run_training(load_recipe(recipe), run, "cpu")
    before = (run / "status.json").read_bytes()
    with pytest.raises(UserError, match="holds no pretraining with the same data"):
        run_training(load_recipe(recipe, ["seed=2"]), run, "cpu", resume=True)
    assert (run / "status.json").read_bytes() == before


def test_the_held_out_data_has_changed(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    def write_cv(count: int) -> None:
        features, labels = labelled_utterances(count=count, speaker="cv")
        write_data_dir(held_out / "data", features)
        write_pdfs(held_out / "pdfs.txt", labels)

    held_out = tmp_path / "cv"
    write_cv(16)
    recipe = recipe_of(tmp_path, "")
    cv = f"cv: {{data: '{held_out / 'data'}', alignments: '{held_out / 'pdfs.txt'}'}}"
    recipe.write_text(recipe.read_text().replace("cv: {fraction: 0.25}", cv))
    stop_at(40, signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(recipe), tmp_path / "run", "cpu")
    stop_at(0, signal.SIGTERM)
    write_cv(9)
    with pytest.raises(DataError, match="the data has changed since"):
        run_training(load_recipe(recipe), tmp_path / "run", "cpu", resume=True)


def reversed_alignments(folder: Path) -> list[str]:
    """The same utterances, lengths and numbers of frames of each pdf."""
    labels = labelled_utterances(count=16)[1]
    return [f"data.alignments={write_pdfs(folder / 'reversed', {n: pdfs[::-1] for n, pdfs in labels.items()})}"]


def scaled_features(folder: Path) -> list[str]:
    features = {name: 2 * matrix + 1 for name, matrix in labelled_utterances(count=16)[0].items()}
    return [f"data.train={write_data_dir(folder / 'scaled', features)}"]


def cmvn_of_others(folder: Path) -> list[str]:
    """Statistics of each speaker in place of those that were computed from the features."""
    stats = np.zeros((2, 5))
    stats[0], stats[1] = [10, 20, 30, 40, 100], [200, 400, 600, 800, 0]
    write_matrices(folder / "cmvn.ark", folder / "data/cmvn.scp", [(f"spk{n}", stats) for n in range(4)])
    return []


def other_speakers(folder: Path) -> list[str]:
    """Held out, with as many utterances and frames."""
    (folder / "cv").write_text("spk2\n")
    return []


REFUSED = {
    reversed_alignments: r"data\.alignments: pdf-ids of digest \w{32} found, pdf-ids of digest \w{32} expected",
    scaled_features: r"data\.train: other features: dimension \d: mean .* found, mean .* expected",
    cmvn_of_others: r"data\.train: other features: dimension \d: mean .* found, mean .* expected",
    other_speakers: r"data\.cv: 12 of 16 utterances to train on, digest \w+ found, 12 of 16 utterances .* expected",
}


@pytest.mark.parametrize("settings", [[], ["data.normalize=false"]], ids=["", "not normalized"])
@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_other_data_of_the_same_sizes(
    change: Callable[[Path], list[str]],
    settings: list[str],
    tmp_path: Path,
    stop_at: Callable[[int, signal.Signals], None],
    run_cli: RunCli,
) -> None:
    recipe, run = recipe_of(tmp_path, ""), tmp_path / "run"
    recipe.write_text(recipe.read_text().replace("cv: {fraction: 0.25}", f"cv: {{speakers: {tmp_path / 'cv'}}}"))
    (tmp_path / "cv").write_text("spk1\n")
    words = ["train", recipe, "--run-dir", run, "--device", "cpu"]
    settings = [*settings, f"data.cmvn={'mean' if change is cmvn_of_others else 'none'}"]
    words += [word for one in settings for word in ("--set", one)]
    stop_at(40, signal.SIGTERM)
    assert run_cli(*words).exit_code == 75
    stop_at(0, signal.SIGTERM)
    before = (run / "recipe.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes()
    changed = [word for one in change(tmp_path) for word in ("--set", one)]
    refused = run_cli(*words, "--resume", *changed)
    assert_refused(refused, "the data has changed since")
    assert re.search(REFUSED[change], refused.stderr), refused.stderr
    assert ((run / "recipe.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes()) == before


def test_data_may_be_stored_elsewhere(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    recipe, run = stopped_run(tmp_path, stop_at)
    run_training(load_recipe(recipe), tmp_path / "whole", "cpu")
    data = write_data_dir(tmp_path / "elsewhere", labelled_utterances(count=16)[0])
    run_training(load_recipe(recipe, [f"data.train={data}"]), run, "cpu", resume=True)
    assert f"data.train is now {data}; was {tmp_path / 'data'}" in (run / "train.log").read_text()
    assert (run / "final.safetensors").read_bytes() == (tmp_path / "whole/final.safetensors").read_bytes()


def test_a_training_with_transforms_is_resumed_to_the_bit(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]
) -> None:
    path = write_transforms(tmp_path / "tri4")
    recipe, run = recipe_of(tmp_path, ""), tmp_path / "run"
    recipe.write_text(recipe.read_text().replace("  splice: 1\n", f"  splice: 1\n  transforms: {path}\n"))
    run_training(load_recipe(recipe), tmp_path / "whole", "cpu")
    stop_at(40, signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(recipe), run, "cpu")
    stop_at(0, signal.SIGTERM)
    moved = path.rename(tmp_path / "moved")
    run_training(load_recipe(recipe, [f"data.transforms={moved}"]), run, "cpu", resume=True)
    assert (run / "final.safetensors").read_bytes() == (tmp_path / "whole/final.safetensors").read_bytes()


def test_a_resume_never_changes_the_precision(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    """The one that was trained in counts, whatever the recipe has asked for."""
    recipe, run = stopped_run(tmp_path, stop_at, "precision: auto\n")
    with pytest.raises(RecipeError, match=r"precision: bf16 found, float32 expected"):
        run_training(load_recipe(recipe, ["precision=bf16"]), run, "cpu", resume=True)
    run_training(load_recipe(recipe, ["precision=float32"]), run, "cpu", resume=True)
    assert (run / "final.safetensors").exists()


def test_what_a_finished_training_would_ignore_is_refused(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path)
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu").exit_code == 0
    before = {path: path.read_bytes() for path in job.run.rglob("*") if path.is_file()}
    other = tmp_path / "other.yaml"
    other.write_text(job.recipe.read_text().replace("minibatch_size: 16", "minibatch_size: 32"))
    moved = write_data_dir(tmp_path / "moved", job.features)
    for words, differs in (
        ([job.run, "--set", "schedule.min_epochs=1"], "schedule.min_epochs: 1 found, 0 expected"),
        ([job.run, "--set", "checkpoint.keep_last=9"], "checkpoint.keep_last: 9 found, 2 expected"),
        ([job.run, "--set", f"data.train={moved}"], f"data.train: {moved} found, {job.data} expected"),
        ([job.run, "--workers", 2], "parallel.workers: 2 found, 1 expected"),
        ([other, "--run-dir", job.run], "minibatch_size: 32 found, 16 expected"),
    ):
        for resume in ("--resume", "--resume=auto"):
            assert_refused(run_cli("train", *words, resume), "this training has finished, by another recipe", differs)
    for words in ([job.run], [job.run, "--set", "seed=1", "--workers", 1], [job.recipe, "--run-dir", job.run]):
        result = run_cli("train", *words, "--resume")
        assert result.exit_code == 0 and "this training has finished" in result.stdout
    assert {path: path.read_bytes() for path in job.run.rglob("*") if path.is_file()} == before


def test_a_finished_training_of_several_workers(tmp_path: Path, run_cli: RunCli) -> None:
    """A recipe for one worker was trained by as many as mpirun has started, which its recipe.yaml says."""
    job = make_job(tmp_path)
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu").exit_code == 0
    path = job.run / "recipe.yaml"
    path.write_text(path.read_text().replace("workers: 1", "workers: 4"))
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--resume").exit_code == 0
    refused = run_cli("train", job.recipe, "--run-dir", job.run, "--resume", "--workers", 1)
    assert_refused(refused, "parallel.workers: 1 found, 4 expected")


def test_nothing_to_resume(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistyped name is an error, and makes no run dir; --resume=auto starts there."""
    monkeypatch.chdir(tmp_path)
    job = make_job(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/mine").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for name, message in (("typo", "no such run dir: nothing"), ("notes", "there is no training in this directory")):
        refused = run_cli("train", job.recipe, "--run-dir", name, "--resume")
        assert_refused(refused, message, f"location: {name}", "leave out --resume")
    assert_refused(run_cli("train", job.recipe, "--resume"), "no such run dir", "location: exp/recipe")
    for resume in ("--resume", "--resume=auto"):
        assert_refused(run_cli("train", "typo", resume), "no such", "location: typo")
    assert sorted(tmp_path.rglob("*")) == before
    assert run_cli("train", job.recipe, "--run-dir", "new", "--resume=auto", "--device", "cpu").exit_code == 0
    assert (
        run_cli("train", "--resume", "new").exit_code == 0 and run_cli("train", "--resume=auto", "new").exit_code == 0
    )
    assert run_cli("train", "new", "--resume=maybe").exit_code == 2


def test_a_training_that_failed_before_its_first_checkpoint(tmp_path: Path, run_cli: RunCli) -> None:
    """It exists: --resume starts it from the beginning, and says so."""
    job = make_job(tmp_path)
    job.ark.write_bytes(job.ark.read_bytes()[:-40])
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu").exit_code == 2
    job.write()
    result = run_cli("train", job.run, "--resume", "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    log = (job.run / "train.log").read_text()
    assert "there is no checkpoint to resume from: training starts from the beginning" in log
    assert (job.run / "final.safetensors").exists()


@pytest.fixture
def interrupted_run(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> tuple[Path, Path]:
    """The recipe and run dir of a training that was stopped in its third epoch."""
    recipe, run = recipe_of(tmp_path, ""), tmp_path / "run"
    stop_at(90, signal.SIGTERM)
    with pytest.raises(TrainingInterrupted):
        run_training(load_recipe(recipe), run, "cpu")
    stop_at(0)
    return recipe, run


def test_epochs_whose_checkpoints_were_removed_are_not_thrown_away(
    interrupted_run: tuple[Path, Path], tmp_path: Path, run_cli: RunCli
) -> None:
    """A training that died while it wrote its first checkpoint begins again, though."""
    recipe, run = interrupted_run
    (run / "checkpoints").rename(tmp_path / "aside")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    message = "has finished 2 epochs, but there is no checkpoint to resume from"
    setting = f"init.model={run}/best.safetensors"
    for words in ((run, "--resume"), (run, "--resume=auto"), (recipe, "--run-dir", run, "--resume=auto")):
        result = run_cli("train", *words)
        assert_refused(result, message, f"start another training from its network, with --set {setting}; or remove")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    status = read_status(run)
    assert status.resume_command is None and any(message in problem for problem in status.problems)
    words = ("train", recipe, "--run-dir", tmp_path / "again", "--device", "cpu", "--set", setting)
    assert run_cli(*words, "--set", "model={}").exit_code == 0, "as hinted"
    (run / "checkpoints/.tmp-00000001").mkdir(parents=True)
    assert run_cli("train", run, "--resume", "--device", "cpu").exit_code == 0
    assert (run / "final.safetensors").exists()


def test_the_network_of_an_unfinished_training_is_taken_by_its_file(
    interrupted_run: tuple[Path, Path], tmp_path: Path, run_cli: RunCli
) -> None:
    recipe, run = interrupted_run
    best, expected = run / "best.safetensors", load_model(run / "best.safetensors").network.parameters
    taking = ("--data", tmp_path / "data", "--device", "cpu")
    labels = ("--alignments", tmp_path / "pdfs.txt")
    for words in (("evaluate", run, *taking, *labels), ("export", run, "--out", tmp_path / "nnet1")):
        assert_refused(run_cli(*words), "has not finished", f"or name its latest accepted network: {best}")
    result = run_cli("evaluate", best, *taking, *labels, "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["model"] == model_digest(best)
    assert run_cli("decode-prep", best, *taking, "--out", tmp_path / "decode").exit_code == 0
    assert (tmp_path / "decode/ali_train_pdf.counts").read_bytes() == (run / "ali_train_pdf.counts").read_bytes()
    assert (tmp_path / "decode/model.sha256").read_text().startswith(model_digest(best) or "none")
    assert run_cli("export", best, "--out", tmp_path / "nnet1").exit_code == 0
    assert (tmp_path / "nnet1/ali_train_pdf.counts").exists()
    model = ddnn.load(best)
    assert model.run_dir == run and torch.equal(model.acoustic_model.network.parameters, expected)
    model.log_likelihoods(np.zeros((5, model.dim)))
    words = ("train", recipe, "--run-dir", tmp_path / "again", "--device", "cpu", "--set", f"init.model={best}")
    assert run_cli(*words, "--set", "schedule.initial_learning_rate=1e-30", "--set", "model={}").exit_code == 0
    assert torch.equal(load_model(tmp_path / "again/final.safetensors").network.parameters, expected)


def test_no_checkpoint_of_a_model_that_is_not_finite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be whole, and refused for ever."""
    after = Averager.after_minibatch

    def spoiled(self: Averager, frames: int) -> bool:
        if self.counters.minibatches == 12:
            self.network.parameters[0] = float("nan")
            self.network.parameters_changed()
        return after(self, frames)

    monkeypatch.setattr(Averager, "after_minibatch", spoiled)
    recipe, run = recipe_of(tmp_path, "checkpoint: {interval_minibatches: 5}\n"), tmp_path / "run"
    with pytest.raises(UserError, match="the training loss is nan"):
        run_training(load_recipe(recipe), run, "cpu")
    monkeypatch.undo()
    run_training(load_recipe(recipe), run, "cpu", resume=True)
    assert (run / "final.safetensors").exists()


def test_nobody_hears_that_it_was_stopped(tmp_path: Path) -> None:
    """A closed terminal or pipe: exit code 75 all the same."""
    recipe, run = (
        recipe_of(tmp_path, "", "schedule: {name: exponential, initial_learning_rate: 0.001, epochs: 100000}"),
        tmp_path / "r",
    )
    words = [forked_python(), "-m", "ddnn.cli", "train", str(recipe), "--run-dir", str(run), "--device", "cpu"]
    training = subprocess.Popen(words, stderr=subprocess.PIPE)
    try:
        until = time.monotonic() + 600
        while not any(run.glob("checkpoints/0*")) and time.monotonic() < until:
            time.sleep(0.05)
        assert training.stderr is not None
        training.stderr.close()
        training.send_signal(signal.SIGHUP)
        training.send_signal(signal.SIGHUP)
        assert training.wait(60) == 75
    finally:
        training.kill()
        training.wait()


def test_the_data_has_changed(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    recipe, run = stopped_run(tmp_path, stop_at)
    features, labels = labelled_utterances(count=15)
    write_data_dir(tmp_path / "data", features)
    write_pdfs(tmp_path / "pdfs.txt", labels)
    with pytest.raises(DataError, match="the data has changed since"):
        run_training(load_recipe(recipe), run, "cpu", resume=True)


def test_a_damaged_checkpoint_falls_back(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None], caplog: pytest.LogCaptureFixture
) -> None:
    recipe, run = stopped_run(tmp_path, stop_at, "checkpoint: {interval_minibatches: 7}\n")
    whole = tmp_path / "whole"
    run_training(load_recipe(recipe), whole, "cpu")
    newest, before = sorted((run / "checkpoints").iterdir(), reverse=True)
    part = newest / "rank0000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    run_training(load_recipe(recipe), run, "cpu", resume=True)
    assert f"{newest} is corrupt" in caplog.text and f"resumed from checkpoint {int(before.name)}" in caplog.text
    assert (run / "final.safetensors").read_bytes() == (whole / "final.safetensors").read_bytes()
    assert rows(run) == rows(whole)


def test_nothing_to_resume_from(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(recipe_of(tmp_path, ""))
    run_training(recipe, tmp_path / "new", "cpu", resume=True)
    assert (
        "there is no checkpoint to resume from: training starts from the beginning"
        in (tmp_path / "new" / "train.log").read_text()
    )

    def interrupted(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("ddnn.training.criterion.load_data", interrupted)
    with pytest.raises(SystemExit) as ended:
        run_training(recipe, tmp_path / "early", "cpu")
    assert ended.value.code == 128 + signal.SIGTERM


def test_no_checkpoint_can_be_written(
    tmp_path: Path, stop_at: Callable[[int, signal.Signals], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddnn.runs.checkpoint.CheckpointStore.save", lambda *_: False)
    recipe = load_recipe(recipe_of(tmp_path, ""))
    stop_at(5, signal.SIGTERM)
    with pytest.raises(UserError, match="no checkpoint could be written"):
        run_training(recipe, tmp_path / "run", "cpu")


def test_a_checkpoint_of_a_stranger(tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]) -> None:
    """Whole by its checksums, but of another network: refused with what was found and expected."""
    recipe, run = stopped_run(tmp_path, stop_at)
    checkpoints = CheckpointStore(run / "checkpoints", 3, SingleProcess())
    found = checkpoints.latest()
    assert found is not None
    shared, own = found.global_state, found.rank_state(0)
    for change in (
        {"network.parameters": torch.zeros(3)},
        {"losses.sums": torch.zeros(2, 2, dtype=torch.float64)},
        {"averager.counters": torch.zeros(2, dtype=torch.int64)},
        {"progress.minibatches": torch.zeros(1, dtype=torch.int64)},
        {"progress.minibatches": torch.tensor([-1, 9])},
        {"progress.epoch": torch.tensor(-1)},
    ):
        checkpoints.save(found.metadata, shared, {**own, **change})
        with pytest.raises(DataError):
            run_training(load_recipe(recipe), run, "cpu", resume=True)
    for header in (
        {},
        {**found.metadata, "epoch": -1},
        {**found.metadata, "model": {}},
        {**found.metadata, "schedule": {}},
    ):
        checkpoints.save(header, shared, own)
        with pytest.raises(DataError):
            run_training(load_recipe(recipe), run, "cpu", resume=True)


def test_a_worker_whose_model_is_not_finite_is_left_out_of_the_mean() -> None:
    """With overlap it may hold NaN as the checkpoint is written; the number of workers has changed."""
    states = [
        {"network.parameters": torch.full((2,), value), "losses.sums": torch.full((2, 3), value, dtype=torch.float64)}
        for value in (1.0, math.nan, 3.0)
    ]
    merged = merge_rank_states(states)
    assert merged["network.parameters"].tolist() == [2.0, 2.0] and merged["losses.sums"].tolist() == [[4.0] * 3] * 2
