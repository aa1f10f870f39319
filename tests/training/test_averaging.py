"""Trainings of three real MPI processes together: what mpi_training.py computed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from distributed.mpi_worlds import launch

WORKERS = 3


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    out = tmp_path_factory.mktemp("trainings")
    process = launch(WORKERS, str(Path(__file__).with_name("mpi_training.py")), out)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return lambda name: json.loads((out / f"{name}.json").read_text())


def rows_of(run: dict[str, Any], split: str) -> list[dict[str, Any]]:
    return [row for row in run["rows"] if split in (row["type"], row.get("split"))]


def test_averaging_every_minibatch_is_one_worker_with_larger_minibatches(results: Any) -> None:
    """Plain SGD with l2, without momentum, with averaged momentum, and with each worker's own (a linear recursion: the
    mean of the workers' momenta is the momentum of the mean)."""
    found = results("equal")
    assert found["moved"] > 0.5, "a training that moves nothing proves nothing"
    assert len(found["differences"]) == 9
    for name, difference in found["differences"].items():
        assert difference < (5e-3 if "bfloat16" in name else 1e-5), name


@pytest.mark.parametrize("name", ["all-reduce", "butterfly", "ring", "hopping-ring"])
def test_overlap_without_local_change_is_blocking(results: Any, name: str) -> None:
    found = results("overlap")[name]
    assert found["difference"] < 1e-6
    assert (found["spread"] == 0.0) == (name == "all-reduce")


def test_overlap_trains(results: Any) -> None:
    found = results("overlap")
    cv = rows_of(found, "cv")
    assert cv[-1]["loss"] < 0.7 * cv[0]["loss"]
    assert {row["averagings"] for row in rows_of(found, "worker")} == {6}


def test_every_strategy_ends_in_one_model_on_unequal_shards(results: Any) -> None:
    """Shards of 7, 17 and 27 minibatches: no worker waits for ever, and all have the same bits in the end."""
    found = results("strategies")
    assert len(found) == 34
    for name, run in found.items():
        assert run["same"], name
        cv, workers = rows_of(run, "cv"), rows_of(run, "worker")
        assert cv[-1]["loss"] < 0.8 * cv[0]["loss"], name
        every = 1 if "gradient-all-reduce" in name else 3 if "averaging_period=3" in name else 10
        minibatches = [7, 7, 7] if "gradient-all-reduce" in name else [7, 17, 27]
        assert [row["minibatches"] for row in workers[:3]] == minibatches, name
        own = "async" in name  # each exchanges as often as it likes
        assert [row["averagings"] for row in workers[:3]] == [(n if own else 7) // every for n in minibatches], name
        assert rows_of(run, "train")[0]["frames"] == 16 * sum(minibatches), name


def test_frozen_layers_keep_their_bits_on_every_worker(results: Any) -> None:
    found = results("frozen")
    assert len(found) == 6
    for name, workers in found.items():
        assert workers == [[True, False, True]] * WORKERS, name


def test_what_a_row_of_a_worker_says(results: Any) -> None:
    found = results("strategies")
    plain, narrow = (
        rows_of(found[f"averaging_period=3 {key} sgd"], "worker")
        for key in ("strategy=butterfly", "comm_dtype=bfloat16")
    )
    for row in plain:
        shares = [row[f"{name}_fraction"] for name in ("compute", "data", "comm", "wait")]
        assert all(0.0 <= share <= 1.0 for share in shares) and sum(shares) <= 1.0 + 1e-4
        assert 0.0 < row["consensus_distance"] < 0.1
        assert row["frames"] == 16 * row["minibatches"]
        assert row["frames_per_second"] == pytest.approx(row["frames"] / row["seconds"], rel=0.01)
    # Sent as bfloat16, the first averaging of an epoch is sent as float32; the other one in two halves.
    assert narrow[0]["bytes_sent"] < plain[0]["bytes_sent"]
    gradients = rows_of(found["strategy=gradient-all-reduce sgd"], "worker")
    assert gradients[0]["consensus_distance"] is None
    assert gradients[0]["bytes_sent"] > 7 * 4 * gradients[0]["num_parameters"]


def test_a_worker_whose_model_is_nan_is_excluded_and_continues(results: Any) -> None:
    """Each epoch its shard makes the last worker's model NaN once."""
    found = results("nan")
    assert "no worker has a finite model to average" in found.pop("everyone")
    assert found.pop("at the end") == [0, 0, 1]
    assert len(found) == 18
    for name, run in found.items():
        assert run["finite"], name
        assert [row["excluded_averagings"] for row in rows_of(run, "worker")] == [0, 0, 1] * 3, name
        cv, train = rows_of(run, "cv"), rows_of(run, "train")
        assert cv[-1]["loss"] < 0.6 * cv[0]["loss"], name
        for row in train:
            assert math.isfinite(row["loss"]) and 320 * WORKERS - 64 <= row["frames"] < 320 * WORKERS, name


def test_averaged_gradients_leave_one_model_where_workers_round_differently(results: Any) -> None:
    assert results("drift")["all as the first"] == [True] * WORKERS


def test_the_others_wait_for_a_slow_worker_and_say_so(results: Any) -> None:
    rows = rows_of(results("slow"), "worker")
    assert [row["averagings"] for row in rows] == [4, 4, 4]
    fast, slow = rows[0], rows[2]
    assert fast["wait_fraction"] > slow["wait_fraction"]
    assert slow["compute_fraction"] > fast["compute_fraction"]


def test_nobody_waits_for_a_slow_worker_that_exchanges_with_a_server(results: Any) -> None:
    """And while it trains on an interval, the others send two changes or more each, or have ended."""
    rows = rows_of(results("slow, async"), "worker")
    assert [row["averagings"] for row in rows] == [4, 4, 4]
    fast, slow = rows[1], rows[2]
    assert fast["interval_seconds"] < 0.6 * slow["interval_seconds"]
    assert sum(row["staleness"] for row in rows) > 0
    assert all(row["wait_fraction"] <= 1.0 for row in rows)


def test_warm_up_on_one_worker(results: Any) -> None:
    found = results("warm")
    assert found["difference"] == 0.0 and found["same"]
    (row,) = rows_of(found, "warmup")
    assert row["frames"] == 25 * 16
