"""kill -9 at random moments: a training that is gone on with ends in the same bits every time."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel.mpi_worlds import need_mpi
from train.killing import kill_and_go_on

KILLS = 20


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_killed_at_random_moments(workers: int, tmp_path: Path) -> None:
    if workers > 1:
        need_mpi()
    figures = kill_and_go_on(tmp_path, workers, KILLS, seed=workers)
    assert figures.kills == KILLS
    assert figures.finished == figures.same >= 1
