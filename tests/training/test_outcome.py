"""How a training ends: with a model that has learned something, or as diverged."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest
from conftest import Result
from distributed.threads import run_workers
from jobs import RunCli, make_job
from training.toy import toy_shard

from ddnn.data.dataset import FrameSubset
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.training.evaluation import EvalResult, baseline_result
from ddnn.training.metrics import read_metrics

NUM_PDFS = 7
"""Two of them, 5 and 6, have no frame in `toy_shard`."""


def expected_baseline(train: list[int], cv: list[int]) -> tuple[float, float]:
    counts = Counter(train)
    losses = [-math.log((counts[pdf] + 0.5) / (len(train) + 0.5 * NUM_PDFS)) for pdf in cv]
    return sum(losses) / len(cv), max(map(cv.count, cv)) / len(cv)


def labels(*shards: FrameSubset) -> list[int]:
    return [int(label) for shard in shards for label in shard.dataset.labels[shard.indices]]


def test_the_baseline_is_the_relative_frequencies_of_the_training_labels() -> None:
    train, cv = toy_shard(0, 333), toy_shard(1, 40)
    cv.dataset.labels[:20] = 6  # a pdf that training has not seen: the best constant answer here
    train.dataset.labels[300:] = 6  # and which is not among the training frames, but in their dataset
    train = FrameSubset(train.dataset, train.indices[:300])
    found = baseline_result(train, cv, NUM_PDFS, SingleProcess())
    assert (found.loss, found.frame_accuracy) == pytest.approx(expected_baseline(labels(train), labels(cv)), rel=1e-12)
    assert found.frames == 40


def test_the_baseline_is_that_of_all_workers_frames() -> None:
    sizes, cv_sizes = (7, 300, 53), (90, 3, 20)

    def work(comm: Communicator) -> EvalResult:
        return baseline_result(
            toy_shard(comm.rank, sizes[comm.rank]), toy_shard(50 + comm.rank, cv_sizes[comm.rank]), NUM_PDFS, comm
        )

    train = labels(*(toy_shard(rank, size) for rank, size in enumerate(sizes)))
    cv = labels(*(toy_shard(50 + rank, size) for rank, size in enumerate(cv_sizes)))
    for found in run_workers(3, work):
        assert (found.loss, found.frame_accuracy) == pytest.approx(expected_baseline(train, cv), rel=1e-12)


def test_each_start_records_the_baseline(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path)
    result: Result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert result.exit_code == 0, result.stderr
    (start,) = read_metrics(job.run / "metrics.jsonl").starts
    assert start.baseline_loss is not None and start.baseline_frame_accuracy is not None
    # Three pdfs, about equally frequent.
    assert 1.0 < start.baseline_loss < 1.3 and 0.2 < start.baseline_frame_accuracy < 0.6
    assert f"without looking at the input: loss {start.baseline_loss:.4f} by" in (job.run / "train.log").read_text()
