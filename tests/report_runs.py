"""Run dirs as trainings leave them, made up: for the tests of ddnn.report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

PARAMETERS = 1_329_768
"""Of 440-4x512-616."""


def epoch_row(epoch: int, split: str, /, **changes: object) -> dict[str, Any]:
    """A row of all workers together, as THE loop writes it."""
    row = {
        "type": "epoch", "epoch": epoch, "split": split, "loss": 4.0 * math.exp(-epoch / 4), "frame_accuracy": 0.6 - 0.5 / (1 + epoch),
        "learning_rate": 0.008, "frames": 57344 if split == "train" else 6000, "seconds": 3.1,
        "frames_per_second": 18000.0, "accepted": True,
    }  # fmt: skip
    return {**row, **changes}


def worker_row(epoch: int, rank: int, /, **changes: object) -> dict[str, Any]:
    """A row of one worker."""
    row = {
        "type": "worker", "epoch": epoch, "rank": rank, "host": "n1", "device": "cpu", "frames": 28672,
        "minibatches": 112, "seconds": 3.1, "frames_per_second": 9249.0, "compute_fraction": 0.93 - 0.02 * rank,
        "data_fraction": 0.01, "comm_fraction": 0.04, "wait_fraction": 0.02 * rank, "averagings": 11,
        "excluded_averagings": 0,
        "consensus_distance": 0.0123 * math.exp(-epoch / 5) * (1 + rank / 10), "bytes_sent": 58_554_848,
        "comm_seconds": 0.06, "num_parameters": PARAMETERS, "interval_seconds": 0.26 + 0.01 * rank,
        "interval_seconds_std": 0.01,
    }  # fmt: skip
    return {**row, **changes}


def start_row(workers: int, /, **changes: object) -> dict[str, Any]:
    """What a start of a training found."""
    row = {
        "type": "start", "epoch": 0, "date": "2026-11-22T18:32:05+0000", "command": "ddnn train", "version": "ddnn 0.2.0",
        "host": "n1", "machine": "Intel(R) Xeon(R) 8481C", "precision": "float32", "world_size": workers,
        "cpu_threads": 1, "cores_per_worker": 1.0, "learning_rate_scale": float(workers), "train_frames": 57344,
        "cv_frames": 6000, "train_digest": "aaaa1111", "cv_digest": "cccc3333",
    }  # fmt: skip
    return {**row, **changes}


def rows_of(
    workers: int, epochs: int = 4, *, start: dict[str, Any] | None = None, **changes: object
) -> list[dict[str, Any]]:
    """The metrics of a training; `changes` are made to the rows of workers, `start` to what its start found."""
    rows = [start_row(workers, **(start or {})), epoch_row(0, "cv")]
    for epoch in range(1, epochs + 1):
        speed = 9500.0 * workers * 0.95 ** (workers > 1)
        rows += [epoch_row(epoch, "train", frames_per_second=speed)]
        rows += [worker_row(epoch, rank, **changes) for rank in range(workers)]
        rows += [epoch_row(epoch, "cv")]
    return rows


def write_run(path: Path, rows: list[dict[str, Any]], parallel: str = "{}", more: str = "") -> Path:
    """A run dir of these metrics; `parallel` is that section of the recipe, `more` further lines."""
    path.mkdir(parents=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = "model: {hidden_layers: 4, hidden_units: 512}"
    text = f"data: {{train: /gone, alignments: /gone}}\n{model}\nparallel: {parallel}\n{more}"
    (path / "recipe.yaml").write_text(text)
    return path
