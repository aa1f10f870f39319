"""Whatever happens to one worker or to the launcher, no worker waits for ever and no process is left behind."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from distributed.mpi_worlds import all_gone, launch, need_mpi

from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.failures import abort_all_on_error, message_and_code, read_reports
from ddnn.distributed.launcher_file import VARIABLE, LauncherFile, append, entries
from ddnn.distributed.signals import EXIT_KILLED
from ddnn.util.errors import DivergedError, UserError

WORKERS = {"raise": 3, "all-reduce": 3, "slow": 3}
"""Two where not named."""
AVERAGING = ["all-reduce", "butterfly beside"]
"""Strategies in the middle of which a worker raises."""
LISTENING = ["user-error, listening", "killed, listening"]
"""Where mpirun ends the others by SIGTERM, they are not in a message but in Python, and say that they are interrupted."""
FAILING = ["raise", "user-error", "exit", "thread", "killed", "hung", "hung in MPI", "stop", *AVERAGING, *LISTENING]
SOON = 120.0
"""Seconds: no worker ends by itself before 900, and a busy machine takes its time."""
STOPPED = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL, "mpirun": signal.SIGKILL}
REAL = {*STOPPED, "killed", "hung", "raise"}
"""In these the workers are processes that mpirun itself has started."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended: `seconds` from the moment of the failure or signal to the end of the launcher."""

    code: int
    output: str
    errors: str
    seconds: float
    all_gone: bool
    out: Path


def when_they_run(out: Path, workers: int, real: bool) -> tuple[list[int], float]:
    """Waits until all workers are past their start; the pids of the workers and, if those are real, of mpirun, their
    parent; when worker 1 failed."""
    deadline = time.monotonic() + 600
    while len(found := list(out.glob("*.pid"))) < workers:
        assert time.monotonic() < deadline, "the workers do not start"
        time.sleep(0.02)
    words = {file.stem: file.read_text().split() for file in found}
    return sorted({int(pid) for line in words.values() for pid in line[: 1 + real]}), float(words["1"][2])


def outcome(way: str, out: Path) -> Outcome:
    out.mkdir()
    workers = WORKERS.get(way, 2)
    real = way in REAL
    process = launch(workers, "mpi_failing.py", way, out, python=sys.executable if real else None)
    try:
        pids, since = when_they_run(out, workers, real)
        if way in STOPPED:
            since = time.time()
            os.kill(child_of(process.pid) if way == "mpirun" else process.pid, STOPPED[way])
            if way in ("SIGINT", "SIGTERM"):  # these workers do not listen to the first, which asks
                time.sleep(1.5)
                process.send_signal(STOPPED[way])
        output, errors = process.communicate(timeout=600)
        seconds = time.time() - since
    finally:
        process.kill()
    return Outcome(process.returncode, output, errors, seconds, all_gone(pids, SOON), out)


def child_of(pid: int) -> int:
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Outcome]]]:
    """Every run that goes wrong, three at a time."""
    need_mpi()
    folder = tmp_path_factory.mktemp("failing")
    with ThreadPoolExecutor(3) as pool:
        yield {way: pool.submit(outcome, way, folder / way) for way in [*FAILING, *STOPPED, "slow"]}


@pytest.mark.parametrize(
    ("way", "code", "said", "unsaid"),
    [
        ("raise", 1, ["RuntimeError: boom of the test", "Traceback", "mpi_failing.py", "in fail"], []),
        ("user-error", 2, ["error: the rate is -1", "location: recipe.yaml", "hint: take a"], ["Traceback"]),
        ("user-error, listening", 2, ["error: the rate is -1"], ["Traceback", "interrupted"]),
        ("exit", 7, ["stopped with 7"], ["Traceback"]),
        ("thread", 1, ["RuntimeError: boom of the test", "Traceback", "in fail"], []),
        *((way, 1, ["RuntimeError: boom of the test", "Traceback", "average_for_ever"], []) for way in AVERAGING),
    ],
)
def test_one_worker_that_fails_stops_all(
    outcomes: dict[str, Future[Outcome]], way: str, code: int, said: list[str], unsaid: list[str]
) -> None:
    found, workers = outcomes[way].result(), WORKERS.get(way, 2)
    assert found.code == code
    assert found.seconds < SOON
    assert found.all_gone
    assert sorted(found.output.splitlines()) == [f"worker {rank} of {workers}" for rank in range(workers)]
    (line,) = [line for line in found.errors.splitlines() if line.startswith("ddnn: worker ")]
    assert line.startswith("ddnn: worker 1 on ")
    assert all(text in found.errors for text in said), found.errors
    assert not any(text in found.errors for text in unsaid), found.errors
    assert not any(text in found.errors for text in ("\0", "MPI_ABORT", "prterun", "-----")), "what happened is said"


def test_the_others_wait_for_a_slow_worker(outcomes: dict[str, Future[Outcome]]) -> None:
    found = outcomes["slow"].result()
    assert (found.code, found.errors) == (0, "")
    told = json.loads((found.out / "slow.json").read_text())
    assert list(told["mean"]) == ["all-reduce", "butterfly", "ring", "hopping-ring"]
    for name, mean in told["mean"].items():
        assert mean == pytest.approx(1.0, abs=1e-6), name
        waited = told["waited"][name]  # in a ring only the next one waits for the slow one
        assert max(waited[0], waited[2]) > waited[1], name


@pytest.mark.parametrize("way", ["killed", "killed, listening"])
def test_a_worker_killed_by_the_system_stops_all(outcomes: dict[str, Future[Outcome]], way: str) -> None:
    found = outcomes[way].result()
    assert found.code == 128 + signal.SIGKILL
    assert found.seconds < SOON
    assert found.all_gone
    assert "rank 1" in found.errors and "interrupted" not in found.errors
    assert "\0" not in found.errors
    assert found.errors.endswith("\nddnn: hint of the test\n")


@pytest.mark.parametrize(
    ("way", "why", "where"),
    [
        ("hung", "was stopped (SIGSTOP) for 2 s (parallel.hang_timeout)", "in fail"),
        ("hung in MPI", "hung in an exchange or a checkpoint for 3 x 2 s (parallel.hang_timeout)", "in barrier"),
    ],
)
def test_a_hung_worker_is_killed_and_stops_all(
    outcomes: dict[str, Future[Outcome]], way: str, why: str, where: str
) -> None:
    found = outcomes[way].result()
    assert found.code == EXIT_KILLED
    assert found.seconds < SOON
    assert found.all_gone
    title, *stacks, said, advice = found.errors.splitlines()
    assert title == "where worker 1 hung, innermost calls first:"
    assert any(line.endswith(where) for line in stacks), stacks
    assert said.startswith("ddnn: worker 1 on ") and said.endswith(f"{why} and was killed")
    assert advice == "ddnn: hint of the test"


def test_workers_that_stop_together_say_nothing(outcomes: dict[str, Future[Outcome]]) -> None:
    found = outcomes["stop"].result()
    assert (found.code, found.errors) == (75, "")
    assert found.all_gone


@pytest.mark.parametrize("way", STOPPED)
def test_a_launcher_or_mpirun_that_is_stopped_leaves_no_process(outcomes: dict[str, Future[Outcome]], way: str) -> None:
    found = outcomes[way].result()
    assert found.all_gone
    assert found.seconds < SOON
    assert found.code == (-signal.SIGKILL if way == "SIGKILL" else 128 + STOPPED[way])


def test_a_single_worker_keeps_its_exceptions() -> None:
    with pytest.raises(UserError, match="mine"), abort_all_on_error(SingleProcess()):
        raise UserError("mine")


def test_messages_name_the_worker() -> None:
    comm = Communicator(3, 4, "node7", {})
    assert message_and_code(comm, UserError("bad", hint="better")) == (
        "ddnn: worker 3 on node7: error: bad\n  hint: better\n",
        2,
    )
    assert message_and_code(comm, KeyboardInterrupt())[1] == 130
    assert message_and_code(comm, DivergedError("the loss is nan"))[1] == 3
    assert message_and_code(comm, RuntimeError("CUDA out of memory. Tried 2 GiB\nmore"))[1] == 2, "as with one worker"
    assert message_and_code(comm, OSError(28, "No space left on device", "x")) == (
        "ddnn: worker 3 on node7: error: cannot read or write: No space left on device\n  location: x\n",
        2,
    )
    assert message_and_code(comm, RuntimeError("shapes do not fit"))[1] == 1
    assert message_and_code(comm, dist.DistError("connection reset"))[1] == EXIT_KILLED
    assert [message_and_code(comm, SystemExit(code))[1] for code in (None, 0, 5, "text")] == [0, 0, 5, 1]


BAD_DATA, INTERRUPTED, STOPPED_143, HUNG, RESUMABLE = (
    {"rank": 1, "message": "ddnn: worker 1 on n: error: bad data\n", "exit_code": 2},
    {"rank": 0, "message": "ddnn: worker 0 on n: interrupted\n", "exit_code": 143},
    {"rank": 2, "message": "ddnn: worker 2 on n: stopped with 143\n", "exit_code": 143},
    {"rank": 3, "message": "ddnn: worker 3 on n made no progress and was killed\n", "hung": "in x.py\n"},
    {"exit_code": 75},
)
BAD_DATA_0 = {**BAD_DATA, "rank": 0, "message": "ddnn: worker 0 on n: error: bad data\n", "exit_code": 3}


@pytest.mark.parametrize(
    ("reported", "killed", "messages", "code"),
    [
        ([], False, [], None),
        # mpirun ends the others of a worker that fails by SIGTERM
        ([BAD_DATA, INTERRUPTED, STOPPED_143], False, [BAD_DATA], 2),
        ([BAD_DATA, RESUMABLE], False, [BAD_DATA], 2),
        ([RESUMABLE, BAD_DATA], False, [BAD_DATA], 2),
        ([RESUMABLE, RESUMABLE], False, [], 75),
        ([RESUMABLE, INTERRUPTED], False, [INTERRUPTED], 143),
        ([INTERRUPTED, BAD_DATA], False, [INTERRUPTED, BAD_DATA], 143),
        ([INTERRUPTED, STOPPED_143], False, [INTERRUPTED, STOPPED_143], 143),
        ([BAD_DATA, BAD_DATA_0], False, [BAD_DATA_0], 2),
        # the job is to be started again
        ([HUNG, INTERRUPTED, RESUMABLE], False, [], None),
        ([INTERRUPTED, RESUMABLE], True, [], None),
        ([BAD_DATA, INTERRUPTED], True, [BAD_DATA], 2),
    ],
)  # fmt: skip
def test_the_first_error_counts(
    reported: list[dict[str, Any]], killed: bool, messages: list[dict[str, Any]], code: int | None
) -> None:
    with closing(LauncherFile()) as file:
        assert append(file.environment, signal="SIGTERM"), "which the launcher says to the workers"
        for entry in reported:
            assert append(file.environment, **entry)
        found = read_reports(entries(file.environment), killed)
        assert (found.messages, found.exit_code) == (tuple(entry["message"] for entry in messages), code)
        assert found.hung == (HUNG["message"] if HUNG in reported else None)
        assert found.stacks == ("in x.py\n" if HUNG in reported else "")
        file.clear()
        assert entries(file.environment) == []
    assert not append(file.environment, **BAD_DATA) and not append({}, **BAD_DATA)


def test_an_entry_that_a_killed_worker_has_half_written_is_passed_over() -> None:
    with closing(LauncherFile()) as file:
        assert append(file.environment, message="whole")
        path, _, _ = file.environment[VARIABLE].rpartition(":")
        with Path(path).open("ab") as half:
            half.write(b'{"message": "ha')
        assert entries(file.environment) == [{"message": "whole"}]
