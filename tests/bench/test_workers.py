"""`ddnn bench --workers`: real workers, no time asserted."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed.mpi_worlds import need_mpi
from forked_python import forked_python

from ddnn.averaging.averager import Averager
from ddnn.bench import step, workers
from ddnn.distributed.communicator import SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.nn.precision import bf16_is_fast
from ddnn.recipe.schema import AveragingConfig


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [forked_python(), "-m", "ddnn.cli", "bench", "--device", "cpu", "--seconds", "0.2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_two_workers_against_one() -> None:
    need_mpi()
    # Without instructions for it bf16 would take minutes.
    precision = "bf16" if bf16_is_fast(torch.device("cpu"))[0] else "float32"
    done = bench("--workers", "2", "--averaging-period", "2", "--strategy", "ring", "--precision", precision, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["workers"], found["strategy"], found["averaging_period"], found["network"]) == (2, "ring", 2, "an4")
    assert found["precision"] == precision
    assert found["spread"][0] <= found["speed_up"] <= found["spread"][1]
    assert found["efficiency_spread"][0] <= found["efficiency"] <= found["efficiency_spread"][1]
    assert 0.0 < found["comm_fraction"] < 1.0


def test_a_strategy_that_is_none() -> None:
    done = bench("--workers", "2", "--strategy", "star")
    assert done.returncode == 2
    assert "location: --strategy" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("option", ["--averaging-period", "--threads", "--plain", "--minibatch-size"])
def test_an_error_names_the_option(option: str, run_cli: Callable[..., Any]) -> None:
    refused = run_cli("bench", "--workers", "2", option, *(["0"] if option != "--plain" else []))
    assert refused.exit_code == 2 and f"location: {option}\n" in refused.stderr


def test_one_worker_needs_a_thread_too(run_cli: Callable[..., Any]) -> None:
    refused = run_cli("bench", "--threads", "0")
    assert refused.exit_code == 2 and "location: --threads\n" in refused.stderr


@pytest.mark.parametrize(("nodes", "most"), [("", 8), ("3", 24)])
def test_no_more_workers_than_the_cores_can_bear(
    nodes: str, most: int, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., Any]
) -> None:
    """100,000 workers were started once, for a missing comma. In a Slurm job all its nodes count."""
    started: list[int] = []
    monkeypatch.setattr(workers, "run_distributed", lambda number, arguments, work: started.append(number))
    monkeypatch.setattr(workers, "usable_cores", lambda: 2)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    assert run_cli("bench", "--workers", str(most)).exit_code == 0
    refused = run_cli("bench", "--workers", str(most + 1))
    assert refused.exit_code == 2 and "location: --workers" in refused.stderr and "at most 4 on each" in refused.stderr
    assert started == [most]


def test_the_last_exchange_of_a_round_is_waited_for() -> None:
    """With overlap it is under way while the figures are gathered: both at once would mix their messages."""
    need_mpi()
    done = bench("--workers", "3", "--averaging-period", "1", "--overlap", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["strategy"], found["precision"]) == ("all-reduce overlapped", "float32")


class WithOneOfHalfTheSpeed(SingleProcess):
    """Worker 0 of two, as long as they only gather figures; the other takes twice as long for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.world_size = 2

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value, 2 * value if isinstance(value, float) else value]


def test_speeds_of_two_workers_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each by itself they make 1 + 1/2 times the frames of the faster; where they average, twice those of the slower."""
    calls: list[tuple[bool, int]] = []
    averaging = Averager(Groups.data_parallel(SingleProcess()), None, None)  # type: ignore[arg-type]

    def timed(averager: Averager, minibatches: int) -> float:
        calls.append((averager is averaging, minibatches))
        return 0.5 if averager is averaging else 0.25

    monkeypatch.setattr(step, "ROUNDS", 3)
    monkeypatch.setattr(workers, "ROUNDS", 3)
    monkeypatch.setattr(workers, "make_averager", lambda *of: averaging)
    monkeypatch.setattr(workers, "_timed_steps", lambda *of: timed)
    monkeypatch.setattr(workers, "worker_row", lambda *of: type("", (), {"model_dump": lambda self: ROW})())
    options = AveragingConfig.model_validate({"strategy": "all-reduce", "workers": 2, "averaging_period": 6})
    found = workers.bench_workers(WithOneOfHalfTheSpeed(), "an4", options, torch.device("cpu"), 30.0, "float32")
    (_, warm_up), *rounds = calls
    assert warm_up == workers.WARM_UP
    assert [averages for averages, _ in rounds] == 3 * [False, False, True]
    minibatches = rounds[0][1]
    assert {n for _, n in rounds} == {minibatches}
    assert minibatches % 4 == minibatches % 6 == 0, "rank 0 would update its Fisher matrices in other minibatches"
    speeds = [minibatches * 256 / 0.25, minibatches * 256 * 1.5 / 0.25, minibatches * 256 / 0.5]
    assert [found.single_worker_fps, found.independent_fps, found.aggregate_fps] == pytest.approx(speeds)
    assert (found.speed_up, found.efficiency) == pytest.approx((1 / 2, 1 / 3))
    assert (found.comm_fraction, found.wait_fraction) == (0.25, 0.5)


ROW = {"comm_fraction": 0.25, "wait_fraction": 0.5}
