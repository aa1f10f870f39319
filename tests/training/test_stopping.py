"""Signals: raised before the loop, noted in it, at once the second time. In processes of their own where they kill."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_python import forked_python

from ddnn.distributed.signals import GracefulShutdown, InterruptedBeforeTraining, TrainingInterrupted

ALL = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def handlers_are_given_back() -> Iterator[None]:
    before = {name: signal.getsignal(signal.Signals[name]) for name in ALL}
    yield
    after = {name: signal.getsignal(signal.Signals[name]) for name in ALL}
    for name, handler in before.items():
        signal.signal(signal.Signals[name], handler)
    after["SIGUSR1"] = before["SIGUSR1"]  # stays ignored after a stop: tested below
    assert after == before


def send(name: str) -> None:
    os.kill(os.getpid(), signal.Signals[name])


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129), ("SIGUSR1", 138)])
def test_before_the_loop_it_ends_at_once(name: str, code: int) -> None:
    with pytest.raises(InterruptedBeforeTraining) as stopped, GracefulShutdown():
        send(name)
        pytest.fail("not reached")
    assert (stopped.value.signal_name, stopped.value.code) == (name, code)
    assert isinstance(stopped.value, KeyboardInterrupt), "no `except Exception` swallows it"


@pytest.mark.parametrize("name", ALL)
def test_in_the_loop_it_is_noted(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulShutdown() as stop:
        stop.deferred = True
        assert stop.signal_name is None
        send(name)
        send("SIGUSR1")
        assert stop.signal_name == name
    said = f"ddnn: {name}: writing a checkpoint, then exiting; a second SIGTERM or Ctrl-C exits immediately"
    assert capfd.readouterr().err.strip() == said


def test_the_other_workers_are_silent(capfd: pytest.CaptureFixture[str]) -> None:
    with GracefulShutdown(verbose=False) as stop:
        stop.deferred = True
        send("SIGTERM")
    assert stop.signal_name == "SIGTERM" and capfd.readouterr().err == ""


def test_no_sigusr1_kills_what_is_ending() -> None:
    with GracefulShutdown() as stop:
        stop.deferred = True
        send("SIGUSR1")
    send("SIGUSR1")
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_ignored_on_entry() -> None:
    """nohup's SIGHUP is not heard; SIGUSR1 is, which the launcher ignores for its children."""
    before = {name: signal.signal(signal.Signals[name], signal.SIG_IGN) for name in ("SIGHUP", "SIGUSR1")}
    try:
        with GracefulShutdown() as stop:
            stop.deferred = True
            send("SIGHUP")
            assert stop.signal_name is None
            send("SIGUSR1")
            assert stop.signal_name == "SIGUSR1"
    finally:
        for name, handler in before.items():
            signal.signal(signal.Signals[name], handler)


def test_a_second_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt) as interrupted, GracefulShutdown() as stop:
        stop.deferred = True
        send("SIGUSR1")
        send("SIGINT")
        pytest.fail("not reached")
    assert not isinstance(interrupted.value, InterruptedBeforeTraining)


@pytest.mark.parametrize("safe", [True, False])
def test_a_second_sigterm_ends_the_process(safe: bool) -> None:
    code = (
        "import os, signal\nfrom ddnn.distributed.signals import InterruptedBeforeTraining, GracefulShutdown\n"
        f"with GracefulShutdown() as stop:\n    stop.deferred = {safe}\n"
        "    try: os.kill(os.getpid(), signal.SIGHUP)\n    except InterruptedBeforeTraining: print('early', flush=True)\n"
        "    print(stop.signal_name, flush=True)\n    os.kill(os.getpid(), signal.SIGTERM)\n    print('not reached')\n"
    )
    run = subprocess.run([forked_python(), "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == -signal.SIGTERM, run.stderr
    assert run.stdout == ("SIGHUP\n" if safe else "early\nSIGHUP\n")


def test_outside_the_main_thread_nothing_is_done() -> None:
    found: list[object] = []

    def listen() -> None:
        with GracefulShutdown() as stop:
            found.extend([stop.signal_name, signal.getsignal(signal.SIGTERM)])

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [None, before]


def test_stopped_is_an_exit_with_75() -> None:
    with pytest.raises(SystemExit) as ended:
        raise TrainingInterrupted("SIGTERM")
    assert ended.value.code == 75


def test_after_an_rbm_the_watchdog_rests_and_a_signal_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows an RBM (files, the next one's input, the training's start) has no heartbeat and no checkpoint."""
    from training.toy import toy_trainer
    from variants import make_parallel_config

    from ddnn.distributed.communicator import SingleProcess
    from ddnn.runs.checkpoint import CheckpointStore
    from ddnn.runs.run_dir import NullRunDir
    from ddnn.training.state import CheckpointPolicy

    comm = SingleProcess()
    calls: list[str] = []
    for name in ("enable", "disable"):
        monkeypatch.setattr(comm.watchdog, name, lambda name=name: calls.append(name))
    trainer = toy_trainer(comm, make_parallel_config(averaging_period=1))
    store = CheckpointStore(Path("nowhere"), 2, comm)
    with pytest.raises(InterruptedBeforeTraining), GracefulShutdown() as shutdown:
        policy = CheckpointPolicy(store, shutdown, NullRunDir(Path("nowhere")))
        policy.begin(trainer)
        assert shutdown.deferred and calls == ["enable"]
        policy.end()
        assert not shutdown.deferred and calls == ["enable", "disable"]
        send("SIGTERM")
        pytest.fail("not reached")
