"""`ddnn bench --workers`: real workers, no time asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from distributed.mpi_worlds import need_mpi


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddnn.cli", "bench", "--device", "cpu", "--seconds", "0.2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_two_workers_against_one() -> None:
    need_mpi()
    done = bench("--workers", "2", "--averaging-period", "2", "--strategy", "ring", "--precision", "bf16", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["workers"], found["strategy"], found["averaging_period"], found["network"]) == (2, "ring", 2, "an4")
    assert found["precision"] == "bf16"
    assert found["spread"][0] <= found["speed_up"] <= found["spread"][1]
    assert 0.0 < found["comm_fraction"] < 1.0


def test_a_strategy_that_is_none() -> None:
    done = bench("--workers", "2", "--strategy", "star")
    assert done.returncode == 2
    assert "location: --strategy" in done.stderr and "Traceback" not in done.stderr


def test_the_last_exchange_of_a_round_is_waited_for() -> None:
    """With overlap it is under way while the figures are gathered: both at once would mix their messages."""
    need_mpi()
    done = bench("--workers", "3", "--averaging-period", "1", "--overlap", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["strategy"], found["precision"]) == ("all-reduce overlapped", "float32")
