"""With real MPI: whoever is killed, and wherever, the others go on together with the exact mean of those left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from parallel.mpi_worlds import HERE, all_gone, launch, need_mpi

from ddnn.parallel.exchange import Exchange, Member
from ddnn.parallel.launch import KILLED, fault_tolerant, run_workers
from ddnn.parallel.lost import WorkerLost, deaths_noticed
from ddnn.parallel.survive import finish, survivors

ROUNDS = 16
DEATHS = {
    "0:0.2:any,3:8:compute": [0, 3],
    "1:0.3:any,0:0.3:any,2:0.005:meeting": [0, 1, 2],
    "2:0.3:stopped,1:8:raise": [1, 2],
    "3:0.4:any,2:8:call": [3],
}
"""Plan, see mpi_survive.py, and who is dead at the end."""
ENDS = {"2:0.2:any,-1:8:user-error": 2, "0:0.2:any,-1:8:stop": 75}
"""Plan, and exit code: all that are left end the job together, some rounds after a death."""


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    code: int
    errors: str
    reports: dict[int, dict[str, Any]]
    none_left: bool


def outcome(plan: str, out: Path) -> Outcome:
    out.mkdir()
    process = launch(4, "mpi_survive.py", plan, str(ROUNDS), out, fault_tolerant=True)
    try:
        _, errors = process.communicate(timeout=150)
    finally:
        process.kill()
    pids = [int(file.read_text()) for file in out.glob("*.pid")]
    assert len(pids) == 8, errors  # workers and guards
    reports = {int(file.stem): json.loads(file.read_text()) for file in out.glob("*.json")}
    return Outcome(process.returncode, errors, reports, all_gone(pids, 3))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Outcome]]]:
    need_mpi()
    folder = tmp_path_factory.mktemp("survive")
    with ThreadPoolExecutor(2) as pool:
        yield {plan: pool.submit(outcome, plan, folder / plan) for plan in [*DEATHS, *ENDS]}


@pytest.mark.parametrize(("plan", "dead"), DEATHS.items())
def test_the_others_go_on(outcomes: dict[str, Future[Outcome]], plan: str, dead: list[int]) -> None:
    found = outcomes[plan].result()
    assert found.code == 0, found.errors
    left = [number for number in range(4) if number not in dead]
    assert sorted(found.reports) == left, found.errors
    for report in found.reports.values():
        assert report["size"] == len(left)
        assert report["round"] == ROUNDS
        told = [(step["lost"], step["left"]) for step in report["recoveries"]]
        first = found.reports[left[0]]["recoveries"]
        assert told == [(step["lost"], step["left"]) for step in first], "all tell the same"
    assert sorted(number for step in first for number in step["lost"]) == dead
    assert first[-1]["left"] == left
    assert found.none_left
    said = [line for line in found.errors.splitlines() if line.startswith("ddnn: ")]
    if "raise" not in plan:
        assert found.errors == ""
    else:
        assert [line[:17] for line in said] == ["ddnn: worker 2 on", "ddnn: worker 1 on"], found.errors
        assert said[0].endswith("(parallel.timeout) and was killed")
        assert "RuntimeError: boom of the test" in said[1]


@pytest.mark.parametrize(("plan", "code"), ENDS.items())
def test_those_that_are_left_end_together(outcomes: dict[str, Future[Outcome]], plan: str, code: int) -> None:
    found = outcomes[plan].result()
    assert found.code == code
    assert found.none_left
    assert found.reports == {}
    if code == 2:
        assert found.errors.count("error: the rate is -1") == 1
        assert found.errors.startswith("\nddnn: worker 0 on ")
        assert "Traceback" not in found.errors
    else:
        assert found.errors == ""


def test_a_job_of_which_no_worker_is_left_has_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun itself ends with 0."""
    need_mpi()
    argv = [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]

    def run(done: Callable[[], bool] | None) -> int:
        return run_workers(2, argv, fault_tolerant=True, done=done, advice=lambda: "go on with --resume")

    assert run(lambda: True) == 0
    assert capfd.readouterr().err == ""
    assert run(lambda: False) == KILLED == 128 + signal.SIGKILL
    assert capfd.readouterr().err == "ddnn: no worker is left, and the work is not done\nddnn: go on with --resume\n"


def test_a_death_before_all_have_met_ends_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    """MPI's own start waits for the dead one for ever."""
    need_mpi()
    code = (
        "import os\nif os.environ['PMIX_RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "from ddnn.parallel.connect import connect\nconnect(start_limit=60.0)"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    argv = [sys.executable, "-c", code]
    assert run_workers(2, argv, environment, fault_tolerant=True, done=lambda: False) == KILLED
    first, last = capfd.readouterr().err.splitlines()
    assert first.startswith("ddnn: worker 0 on ")
    assert first.endswith("cannot meet the others, of which one has died, and was killed")
    assert last == "ddnn: no worker is left, and the work is not done"


def test_the_environment_says_whether_a_job_is_fault_tolerant() -> None:
    assert fault_tolerant({"OMPI_MCA_mpi_ft_enable": "1"})
    assert not fault_tolerant({"OMPI_MCA_mpi_ft_enable": "0"})
    assert not fault_tolerant({})


def test_a_single_worker_loses_nobody() -> None:
    exchange = Exchange(members=[Member(3, "n1", 0)])
    finish(exchange)
    assert survivors(exchange, {"a": 1}) == (exchange, [{"a": 1}], [])
    assert exchange.number == 3


def test_only_deaths_become_lost_workers() -> None:
    need_mpi()
    code = """
from mpi4py import MPI
from ddnn.parallel.lost import WorkerLost, deaths_noticed
for number in (MPI.ERR_PROC_FAILED, MPI.ERR_PROC_FAILED_PENDING, MPI.ERR_REVOKED, MPI.ERR_TRUNCATE):
    try:
        with deaths_noticed():
            raise MPI.Exception(number)
    except (WorkerLost, MPI.Exception) as error:
        print(type(error).__name__)
"""
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, timeout=60)
    assert run.stdout.split() == ["WorkerLost"] * 3 + ["Exception"], run.stderr
    with pytest.raises(RuntimeError, match="mine"), deaths_noticed():
        raise RuntimeError("mine")
    assert not issubclass(WorkerLost, RuntimeError)
