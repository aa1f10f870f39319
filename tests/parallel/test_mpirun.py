"""Signals handed on to mpirun: the first as SIGUSR1, again and again until it is heard; the second as SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from parallel.mpi_worlds import need_mpi

from ddnn.parallel.launch import run_workers
from ddnn.parallel.mpirun import run_mpirun

WAIT = "import signal, sys, time\n"
LISTENS_LATE = (
    WAIT + "open(sys.argv[1], 'a').write('begun\\n')\ntime.sleep(0.6)\nheard = []\n"
    "signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))\n"
    "until = time.monotonic() + 30\n"
    "while not heard and time.monotonic() < until: time.sleep(0.01)\n"
    "time.sleep(0.3)\n"  # all have heard it before the first of them ends
    "sys.exit(int(sys.argv[2]))\n"
)


def ends(before: float, *numbers: signal.Signals, ready: Callable[[], bool] = lambda: True) -> threading.Thread:
    """Sends this process the signals once it is `ready`, `before` seconds before each."""

    def send() -> None:
        until = time.monotonic() + 60
        while not ready() and time.monotonic() < until:
            time.sleep(0.02)
        for number in numbers:
            time.sleep(before)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@contextmanager
def deaf(*numbers: signal.Signals) -> Iterator[None]:
    """Ignores signals, as nohup and a job script do, for a block."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            assert signal.getsignal(number) is signal.SIG_IGN, "given back"
            signal.signal(number, handler)


def run(code: str, *arguments: object, grace: float = 10, patience: float = 60) -> int:
    return run_mpirun([sys.executable, "-c", code, *map(str, arguments)], os.environ, grace, patience)


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGINT", 0), ("SIGHUP", 3), ("SIGUSR1", 75)])
def test_the_first_is_handed_on_until_heard_and_the_workers_code_counts(tmp_path: Path, number: str, code: int) -> None:
    thread = ends(0, signal.Signals[number], ready=(tmp_path / "begun").exists)
    assert run(LISTENS_LATE, tmp_path / "begun", code) == code
    thread.join()


def test_what_the_workers_call_sigusr1_is_the_first_signal() -> None:
    thread = ends(0.5, signal.SIGTERM)
    assert run(WAIT + "signal.signal(signal.SIGUSR1, signal.SIG_DFL); time.sleep(30)") == 143
    thread.join()


def test_the_second_ends() -> None:
    thread = ends(0.3, signal.SIGUSR1, signal.SIGUSR1, signal.SIGINT)
    begun = time.monotonic()
    assert run(WAIT + "time.sleep(30)") == 130
    assert time.monotonic() - begun < 20
    thread.join()


@pytest.mark.parametrize(("numbers", "code"), [(["SIGTERM"], 143), (["SIGTERM", "SIGHUP", "SIGINT"], 130)])
def test_what_does_not_end_is_killed(numbers: list[str], code: int) -> None:
    thread = ends(0.3, *(signal.Signals[number] for number in numbers))
    assert run(WAIT + "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(30)", grace=0.5, patience=1.5) == code
    thread.join()


def test_ignored_ones() -> None:
    """SIGHUP under nohup is not heard; SIGUSR1 is, though a job script ignores it for its children."""
    with deaf(signal.SIGHUP, signal.SIGUSR1):
        thread = ends(0.3, signal.SIGHUP)
        assert run(WAIT + "time.sleep(1)") == 0
        thread.join()
        thread = ends(0.3, signal.SIGUSR1)
        assert run(WAIT + "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75)); time.sleep(30)") == 75
        thread.join()


def test_real_workers_that_do_not_listen_yet(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """mpirun is told before it has started anything: neither it nor the workers die of it, and nothing is lost."""
    need_mpi()
    thread = ends(0.05, signal.SIGTERM)
    assert run_workers(2, [sys.executable, "-c", LISTENS_LATE, str(tmp_path / "begun"), "75"]) == 75
    thread.join()
    assert (tmp_path / "begun").read_text() == "begun\n" * 2
    assert "signal" not in capfd.readouterr().err
