"""Every communicator does the same: a single process, MPI, MPI with a process group of torch.distributed, and the threads
that take the place of MPI's processes in tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from distributed.conformance import conformance
from distributed.mpi_worlds import launch
from distributed.threads import run_workers

from ddnn.distributed.communicator import CommStats, SingleProcess

WORLDS = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def answers_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], dict[str, Any]]:
    """Kind of communicator and number of its workers -> what they answered."""
    out = tmp_path_factory.mktemp("conformance")
    process = launch(4, "conformance.py", out)
    _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")
    return lambda kind, n: json.loads((out / f"{n}.json").read_text())[kind]


@pytest.mark.parametrize(
    ("kind", "n"), [("single", 1), *(("mpi", n) for n in WORLDS), *(("process group", n) for n in WORLDS[1:])]
)
def test_conformance(answers_of: Callable[[str, int], dict[str, Any]], kind: str, n: int) -> None:
    check(conformance(SingleProcess()) if kind == "single" else answers_of(kind, n), kind, n)


def test_conformance_of_a_process_group_of_some_workers(answers_of: Callable[[str, int], dict[str, Any]]) -> None:
    """The even ones of four, while the odd ones do the same."""
    check(answers_of("part", 4), "process group", 2)


@pytest.mark.parametrize("n", WORLDS)
def test_conformance_of_threads(n: int) -> None:
    for answers in run_workers(n, conformance):
        check(answers, "threads", n)


def check(answers: dict[str, Any], kind: str, n: int) -> None:
    for dtype in ("torch.float32", "torch.float64", "torch.int64"):
        assert answers["sums"][dtype] == [n * (n - 1) // 2, n]
    assert answers["received"] == [10 * ((rank - 1) % n) for rank in range(n)]
    assert answers["workspace kept"]
    assert answers["all_to_all"] == [[rank + 100 * other for other in range(n)] for rank in range(n)]
    assert answers["all_gather"] == [[float(rank) for rank in range(n) for _ in range(2)]] * n
    assert answers["broadcast"] == [[[n - 1, 7], [n - 1.0]]] * n
    assert answers["min"] == 1000 - (n - 1)
    assert answers["objects"] == [{"rank": rank, "text": "ü" * rank, "none": None} for rank in range(n)]
    assert answers["local"] == [[rank, n] for rank in range(n)]
    assert answers["sent"] == [[40, True, 0.0] if kind != "single" else [0, False, 0.0]] * n
    assert answers["waited"] == [[8, 0.0, True] if kind != "single" else [0, 0.0, False]] * n
    assert answers["together"] == [True] * n
    for rank, part in enumerate(answers["parts"]):
        ranks = [other for other in reversed(range(n)) if other % 2 == rank % 2]
        place = ranks.index(rank)
        assert part == {
            "ranks": ranks,
            "place": [place, len(ranks), place, len(ranks), True],
            "sum": sum(ranks),
            "own stats": True,
            "own bytes": kind != "single",
            "watchdog": True,
            "split again": [[other, True] for other in ranks],
        }
    for rank, moved in enumerate(answers["moved"]):
        for values in moved.values():
            assert values["gathered"] == [0.5 + other for other in range(n) for _ in range(other + 1)]
            assert values["received"] == [10.0 * other + rank for other in range(n) for _ in range(2 * other + rank)]
            previous = float((rank - 1) % n)
            assert values["posted"] == ([[[previous]], [[previous] * 2]] if n > 1 else [])
            to_others = sum(2 * rank + other for other in range(n) if other != rank)
            from_others = sum(2 * other + rank for other in range(n) if other != rank)
            posted, gathered = 3 if n > 1 else 0, sum(other + 1 for other in range(n) if other != rank)
            elements = [gathered, from_others, posted, (rank + 1) + to_others + posted]
            assert values["elements"] == (elements if kind != "single" else [0] * 4)
    assert len(answers["refused"]) == 6
    assert "not torch.bfloat16" in answers["refused"][0]
    assert "strides (4,)" in answers["refused"][1]
    assert answers["refused"][3].startswith(f"one chunk for each of {n} workers, not ({n + 1}, 2)")
    assert answers["refused"][4] == "contiguous, 2 elements expected, not (1,)"
    assert answers["refused"][5] == f"contiguous, {' + '.join(['2'] * n)} elements expected, not ({n},)"


def test_stats_of_a_span_are_a_difference() -> None:
    assert CommStats(9, 4.0, 2.0) - CommStats(3, 1.0, 0.5) == CommStats(6, 3.0, 1.5)


def test_one_worker_sends_nothing() -> None:
    comm = SingleProcess()
    conformance(comm)
    assert comm.stats == CommStats()
    with pytest.raises(SystemExit):
        comm.abort(3)
