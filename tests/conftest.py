"""Fixtures that every test may use."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

# One thread per process: the tests run in parallel, and two OpenMP threads on small GEMMs are slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Open MPI's one-sided transfers by libfabric, which ddnn does not use: opening them takes each start of workers 1 s.
os.environ.setdefault("OMPI_MCA_btl", "^ofi")

# Under nohup SIGHUP is ignored, in the background of a script SIGINT: by whatever the tests start, too.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("test_restarts.py", "test_real_slurm.py")
"""Files that take minutes: they begin, so that at the end no core waits for them."""

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first; all others stay in their order. Without a GPU, those that need one are skipped."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if need_gpu:
        import torch

        for item in need_gpu if not torch.cuda.is_available() else ():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(autouse=True)
def parameters_are_not_written_behind_the_back_of_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """See parameter_check.py. Only for tests that import networks: torch takes seconds."""
    if "ddnn.nn.network" in sys.modules:
        from parameter_check import Workspace, checked

        monkeypatch.setattr(Workspace, "refresh", checked(Workspace.refresh))


@pytest.fixture
def forked_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ddnn starts by `sys.executable` is forked from a preloaded Python (forked_python.py)."""
    from forked_python import forked_python

    monkeypatch.setattr(sys, "executable", forked_python())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were skipped, and why: a green run that has not looked must say so."""
    reasons = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(autouse=True)
def signal_handlers_are_given_back() -> Iterator[None]:
    """A training that was stopped ignores SIGUSR1 from then on, and so would whatever a later test starts."""
    numbers = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def shared() -> Path:
    """What Kaldi made of the corpora, beside the project: its networks (`an4/kaldi_nnet1`), lattices, a local Slurm."""
    if not (SHARED / "an4").is_dir():
        pytest.skip(f"Kaldi's own networks and lattices not found at {SHARED}")
    return SHARED


@pytest.fixture(scope="session")
def golden() -> Path:
    """Kaldi's own numbers: tests/golden/README.md."""
    return Path(__file__).parent / "golden"


@pytest.fixture
def from_kaldi(golden: Path, request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """A file by its name: golden/..., recipes/..., or an4/kaldi_nnet1/..., without which the test is skipped."""

    def place(name: str) -> Path:
        folders = {"golden": golden.parent, "recipes": ROOT}
        return (folders.get(name.partition("/")[0]) or request.getfixturevalue("shared")) / name

    return place


@pytest.fixture(scope="session")
def an4() -> Path:
    """AN4 as Kaldi leaves it."""
    return ROOT / "recipes/an4/corpus"


@pytest.fixture(scope="session")
def kaldi_nnet1(shared: Path) -> Path:
    """The networks that Kaldi trained on AN4."""
    return shared / "an4/kaldi_nnet1"


@pytest.fixture(scope="session")
def fsdd() -> Path:
    """Spoken digits as Kaldi leaves them."""
    return ROOT / "recipes/fsdd/corpus"


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture(autouse=True)
def quiet_ends_with_the_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """--quiet and --verbose of a command that a test runs in this process."""
    from ddnn.util.text import TERMINAL_LEVEL

    monkeypatch.setenv(TERMINAL_LEVEL, os.environ.get(TERMINAL_LEVEL, "INFO"))
    loggers = [logging.getLogger("ddnn"), *logging.getLogger().handlers]
    levels = [(logger, logger.level) for logger in loggers]
    yield
    for logger, level in levels:
        logger.setLevel(level)


@pytest.fixture
def run_cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `ddnn` with the arguments, in this process."""
    from ddnn.cli import main

    def run(*arguments: object) -> Result:
        monkeypatch.setattr("sys.argv", ["ddnn", *map(str, arguments)])
        monkeypatch.setattr("sys.excepthook", sys.excepthook)
        handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
        with pytest.raises(SystemExit) as ended:
            main()
        for number, handler in handlers.items():  # a stopped training ignores SIGUSR1 to the end of its process
            signal.signal(number, handler)
        return Result(int(ended.value.code or 0), *capfd.readouterr())

    return run


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, signal.Signals], None]:
    """Sends this process a signal in the minibatch of this number, from 1; 0 for none."""
    from ddnn.averaging.averager import Averager

    after = Averager.after_minibatch

    def arrange(number: int, sent: signal.Signals = signal.SIGTERM) -> None:
        left = [number]

        def counting(self: Averager, frames: int) -> bool:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), sent)
            return after(self, frames)

        monkeypatch.setattr(Averager, "after_minibatch", counting)

    return arrange
