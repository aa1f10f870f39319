"""The watchdog kills a worker that hangs, leaves one that does not alone, and outlives neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from distributed.mpi_worlds import HERE, all_gone
from distributed.watched import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st

from ddnn.distributed import launcher_file, watchdog
from ddnn.distributed.failures import read_reports
from ddnn.distributed.launcher_file import LauncherFile
from ddnn.distributed.watchdog import HangDetector, is_stopped

ENDS_WELL = ["works", "exchanges", "disabled", "disabled again"]
KILLED = {
    "hangs": f"made no progress for {TIMEOUT:g} s (parallel.hang_timeout)",
    "hangs in an exchange": f"hung in an exchange or a checkpoint for 3 x {TIMEOUT:g} s (parallel.hang_timeout)",
    "holds the interpreter": f"made no progress for {TIMEOUT:g} s (parallel.hang_timeout)",
    "disabled stopped": f"was stopped (SIGSTOP) for {TIMEOUT:g} s (parallel.hang_timeout)",
}
STOPPED = [f"disabled stopped, {number}" for number in range(8)]
"""Several, since it is by chance which thread a signal to the whole process goes to."""
WAYS = [*ENDS_WELL, *KILLED, *STOPPED, "killed", "hangs, launched"]

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """Every worker, all at once."""
    started, file = {}, LauncherFile()
    for way in WAYS:
        out = tmp_path_factory.mktemp("watchdog")
        environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
        environment.pop(launcher_file.VARIABLE, None)
        if "launched" in way:
            environment |= file.environment
        command = [sys.executable, str(HERE / "watched.py"), way.partition(",")[0], str(out)]
        started[way] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment), out
    yield Started(started, file)
    for process, _ in started.values():
        process.kill()
        process.communicate()
    file.close()


class Started(NamedTuple):
    """Processes with their folders, by what they do; what those with a launcher report."""

    processes: dict[str, tuple[subprocess.Popen[str], Path]]
    file: LauncherFile


def ended(worker: tuple[subprocess.Popen[str], Path]) -> tuple[int, str]:
    """Exit code and stderr of a worker, once its guard is gone too."""
    process, out = worker
    _, errors = process.communicate(timeout=600)
    assert all_gone([int((out / "watchdog.pid").read_text())], 60)
    return process.returncode, errors


def ignores(pid: int, numbers: Iterable[signal.Signals]) -> bool:
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigIgn"))
    return all(int(line.split()[1], 16) >> (number - 1) & 1 for number in numbers)


@pytest.mark.parametrize("way", ENDS_WELL)
def test_a_worker_that_does_not_hang_is_left_alone(workers: Started, way: str) -> None:
    assert ended(workers.processes[way]) == (0, "")


@pytest.mark.parametrize("way", KILLED)
def test_a_worker_that_hangs_is_killed(workers: Started, way: str) -> None:
    code, said = ended(workers.processes[way])
    assert code == -signal.SIGKILL
    first, second, *stacks = said.splitlines()
    assert first == f"ddnn: worker 2 on n1 (pid {workers.processes[way][0].pid}) {KILLED[way]} and was killed"
    assert second == "where worker 2 hung, innermost calls first:"
    check_stacks(stacks, way)


def check_stacks(stacks: list[str], way: str) -> None:
    """Of all threads of a worker that hangs in this way; of one that was stopped, where it was."""
    functions = [line.rpartition(" in ")[2] for line in stacks if line.startswith("  File ")]
    assert "another_thread" in functions and "main" in functions, stacks
    assert ("hold_the_interpreter" in functions) == (way == "holds the interpreter"), stacks
    assert ("stop" in functions) == (way == "disabled stopped"), stacks


def test_a_stopped_worker_does_not_run_on_before_its_stacks_are_read(workers: Started) -> None:
    """Its main thread writes them."""
    for way in STOPPED:
        stacks = ended(workers.processes[way])[1]
        check_stacks(stacks.splitlines(), "disabled stopped")
        assert "in stop\n" in stacks.partition("Current thread ")[2].partition("\n\n")[0], stacks


def test_the_launcher_gets_the_report(workers: Started) -> None:
    assert ended(workers.processes["hangs, launched"]) == (-signal.SIGKILL, "")
    found = read_reports(launcher_file.entries(workers.file.environment))
    hung, (title, *stacks) = found.hung, found.stacks.splitlines()
    assert hung is not None
    assert hung.startswith("ddnn: worker 2 on n1 (pid ") and hung.endswith("(parallel.hang_timeout) and was killed\n")
    assert title == "where worker 2 hung, innermost calls first:"
    check_stacks(stacks, "hangs")


def test_a_worker_that_does_not_answer_has_no_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits for a file server."""
    monkeypatch.setattr(watchdog, "STACKS_SECONDS", 0.3)
    process = subprocess.Popen(["sh", "-c", "trap '' USR2; sleep 60"])
    with tempfile.TemporaryFile() as file:
        assert watchdog.read_stacks(process.pid, file.fileno()) == ""
        process.kill()
        process.wait()
        assert watchdog.read_stacks(process.pid, file.fileno()) == "", "it is gone"


def test_the_watchdog_of_a_killed_worker_ends(workers: Started) -> None:
    assert ended(workers.processes["killed"]) == (-signal.SIGKILL, "")


def test_the_watchdog_ignores_every_signal_that_is_for_the_worker(tmp_path: Path) -> None:
    command = [sys.executable, str(HERE / "watched.py"), "hangs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    deadline = time.monotonic() + 600
    while not (tmp_path / "watchdog.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    guard = int((tmp_path / "watchdog.pid").read_text())
    assert os.getpgid(guard) == guard
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
    while not ignores(guard, numbers) and time.monotonic() < deadline:  # it takes a moment to start
        time.sleep(0.01)
    for number in numbers:
        os.kill(guard, number)
    assert process.wait(timeout=600) == -signal.SIGKILL


@given(
    st.lists(st.tuples(st.floats(0, 1000), st.booleans(), st.sampled_from([0, 1, 2, 3, 5]), st.booleans()), max_size=60)
)
def test_detection(checks: list[tuple[float, bool, int, bool]]) -> None:
    """Against a plain account of the seconds in which nothing moved; a second check after long counts as two seconds."""
    detector, progress = HangDetector(4.0, 1.0), 0
    still = stopped = 0.0
    detector.check(0.0, progress, 0, False)
    for passed, moves, state, is_halted in checks:
        counted, armed = min(passed, 2.0), state % 2 == 1
        progress += moves
        still = still + counted if armed and not moves else 0.0
        stopped = stopped + counted if is_halted else 0.0
        limit = 12.0 if state > 1 else 4.0
        verdict = detector.check(passed, progress, state, is_halted)
        assert (verdict is not None) == (stopped >= 4.0 or (armed and still >= limit))


def test_a_suspended_watchdog_blames_nobody() -> None:
    detector = HangDetector(300.0, 1.0)
    detector.check(1.0, 7, 1, False)
    assert detector.check(86400.0, 7, 1, False) is None


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
