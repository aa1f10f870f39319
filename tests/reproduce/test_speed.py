"""Speed-ups from records."""

from __future__ import annotations

import pytest
from reproduce.synthetic import by_name, record

from ddnn.reproduce.records import MeasuredEpoch, Record
from ddnn.reproduce.speed import speed_ups
from ddnn.reproduce.table import Setting


def epoch(workers: int, seconds: float) -> MeasuredEpoch:
    """Of a run in which each worker had a core."""
    return MeasuredEpoch(
        strategy="all-reduce",
        wire="float32",
        overlap=False,
        parameters=468_584,
        operations=2.6e6,
        minibatch=256,
        every=10,
        frames=230_000.0,
        seconds=seconds,
        exchange=0.0 if workers == 1 else 0.1,
        averagings=0.0 if workers == 1 else 45.0,
        compute=0.95 * seconds,
        rest=0.0,
        block_std=None,
        final_mean=True,
    )


def run(workers: int, seed: int, seconds: float, machine: str) -> Record:
    return record("base", workers, seed, 0.6, measured=epoch(workers, seconds), machine=machine)


def measured(*runs: Record) -> dict[int, float]:
    found = speed_ups([Setting("base", "all-reduce")], (1, 2, 16), by_name(runs))
    return {one.workers: one.speed_up for one in found if one.kind == "measured"}


def test_only_runs_of_one_kind_of_machine_are_held_against_each_other() -> None:
    slow_alone, fast_two = run(1, 1, 30.0, "slow, 2 cores"), run(2, 2, 5.0, "fast, 4 cores")
    assert measured(slow_alone, fast_two) == {1: 1.0}
    assert measured(slow_alone, fast_two, run(2, 1, 16.0, "slow, 2 cores"))[2] == pytest.approx(30 / 16)
    fast_alone = run(1, 2, 9.0, "fast, 2 cores")
    assert measured(slow_alone, fast_two, fast_alone)[2] == pytest.approx(9 / 5)


def test_the_fastest_run_counts() -> None:
    runs = [run(1, 1, 10.0, "a"), run(1, 2, 8.0, "a"), run(2, 1, 6.0, "a"), run(2, 2, 5.0, "a")]
    assert measured(*runs)[2] == pytest.approx(8 / 5)
