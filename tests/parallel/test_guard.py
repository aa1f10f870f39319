"""The guard kills a worker that hangs, leaves one that does not alone, and outlives neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.guarded import TIMEOUT
from parallel.mpi_worlds import HERE, all_gone

from ddnn.parallel.last_words import LAST_WORDS
from ddnn.parallel.watch import Watch, is_stopped

ENDS_WELL = ["works", "exchanges", "unarmed", "disarmed", "closed"]
KILLED = {
    "hangs": f"made no progress for {TIMEOUT:g} s (parallel.timeout)",
    "hangs in an exchange": f"hung in an exchange or a checkpoint for 3 x {TIMEOUT:g} s (parallel.timeout)",
    "unarmed stopped": f"was stopped (SIGSTOP) for {TIMEOUT:g} s (parallel.timeout)",
}
WAYS = [*ENDS_WELL, *KILLED, "killed", "hangs, launched"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[str], Path]]]:
    """Every worker, all at once."""
    started = {}
    for way in WAYS:
        out = tmp_path_factory.mktemp("guard")
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMPI_MCA_mpi_ft_enable": "0"}
        environment.pop(LAST_WORDS, None)
        if "launched" in way:
            environment[LAST_WORDS] = str(out)
        command = [sys.executable, str(HERE / "guarded.py"), way.partition(",")[0], str(out)]
        started[way] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment), out
    yield started
    for process, _ in started.values():
        process.kill()
        process.communicate()


def ended(worker: tuple[subprocess.Popen[str], Path]) -> tuple[int, str]:
    """Exit code and stderr of a worker, once its guard is gone too."""
    process, out = worker
    _, errors = process.communicate(timeout=30)
    assert all_gone([int((out / "guard.pid").read_text())], 2)
    return process.returncode, errors


@pytest.mark.parametrize("way", ENDS_WELL)
def test_a_worker_that_does_not_hang_is_left_alone(
    workers: dict[str, tuple[subprocess.Popen[str], Path]], way: str
) -> None:
    assert ended(workers[way]) == (0, "")


@pytest.mark.parametrize("way", KILLED)
def test_a_worker_that_hangs_is_killed(workers: dict[str, tuple[subprocess.Popen[str], Path]], way: str) -> None:
    said = f"ddnn: worker 2 on n1 (pid {workers[way][0].pid}) {KILLED[way]} and was killed\n"
    assert ended(workers[way]) == (-signal.SIGKILL, said)


def test_the_launcher_gets_the_last_words(workers: dict[str, tuple[subprocess.Popen[str], Path]]) -> None:
    assert ended(workers["hangs, launched"]) == (-signal.SIGKILL, "")
    said = (workers["hangs, launched"][1] / "2.txt").read_text()
    assert said.startswith("ddnn: worker 2 on n1 (pid ") and said.endswith("(parallel.timeout) and was killed\n")


def test_the_guard_of_a_killed_worker_ends(workers: dict[str, tuple[subprocess.Popen[str], Path]]) -> None:
    assert ended(workers["killed"]) == (-signal.SIGKILL, "")


def test_the_guard_heeds_no_signal_that_is_for_the_worker(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "guarded.py"), "hangs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 20
    while not (tmp_path / "guard.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    guard = int((tmp_path / "guard.pid").read_text())
    assert os.getpgid(guard) == guard
    time.sleep(0.2)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        os.kill(guard, number)
    assert process.wait(timeout=20) == -signal.SIGKILL


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.booleans(), st.sampled_from([0, 1, 2, 3, 5]), st.booleans()), max_size=60)
)
def test_judgement(looks: list[tuple[float, bool, int, bool]]) -> None:
    """Against a plain account of the seconds in which nothing moved; a second look after long counts as two seconds."""
    judge, progress = Watch(4.0, "limit", 3, 1.0), 0
    still = stopped = 0.0
    judge.look(0.0, progress, 0, False)
    for passed, moves, state, is_halted in looks:
        counted, armed = min(passed, 2.0), state % 2 == 1
        progress += moves
        still = still + counted if armed and not moves else 0.0
        stopped = stopped + counted if is_halted else 0.0
        limit = 12.0 if state > 1 else 4.0
        verdict = judge.look(passed, progress, state, is_halted)
        assert (verdict is not None) == (stopped >= 4.0 or (armed and still >= limit))


def test_a_suspended_guard_blames_nobody() -> None:
    judge = Watch(300.0, "limit", 3, 1.0)
    judge.look(1.0, 7, 1, False)
    assert judge.look(86400.0, 7, 1, False) is None


def test_stopped_processes_are_known() -> None:
    process = subprocess.Popen(["sleep", "60"])
    try:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert is_stopped(process.pid)
    finally:
        process.kill()
        process.wait()
    assert not is_stopped(process.pid)
