"""Commands as processes: their output, their environment, how they ended, and what a stop does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddnn.reproduce.children import CHILD, Children, CommandFailed

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no parent's death is told")
PARENT = """\
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ddnn.reproduce.children import Children
with ThreadPoolExecutor(1) as threads:
    threads.submit(Children().run, [], Path(sys.argv[1]), "stand_in").result()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `stand_in`, which children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "stand_in.py"


def test_what_a_command_says_is_kept_and_its_end_given_back(tmp_path: Path) -> None:
    children, log = Children(), tmp_path / "a" / "log"
    code, said = children.run(["status", "--help"], log)
    assert code == 0 and said.startswith("Usage") and said == log.read_text()
    children.call(["--version"], log)
    assert log.read_text().startswith(said) and len(log.read_text()) > len(said)
    children.stop()
    assert children.run(["--version"], log) == (143, "not begun")


def test_one_thread_computes_whatever_the_user_has_set(
    tmp_path: Path, module: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.write_text("import os\nprint(os.environ['OMP_NUM_THREADS'], os.environ['OTHER'])\n")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("OTHER", "kept")
    assert Children().run([], tmp_path / "log", "stand_in") == (0, "1 kept\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "import sys\nsys.exit('ddnn: error: no such x\\n  where: y\\n  mend:  z')",
            "exit code 1: ddnn: error: no such x",
        ),
        ("print(1 / 0)", "exit code 1: ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(3)", "exit code 3: it said nothing"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by SIGKILL: it said nothing"),
    ],
)
def test_how_a_command_failed_is_said(tmp_path: Path, module: Path, body: str, said: str) -> None:
    module.write_text(body)
    with pytest.raises(CommandFailed) as failed:
        Children().call(["a b"], tmp_path / "log", "stand_in")
    assert failed.value.what == said and "python -m stand_in 'a b'" in str(failed.value)


def test_a_stop_ends_what_runs(tmp_path: Path, module: Path) -> None:
    module.write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    children, log, ended = Children(), tmp_path / "log", list[int]()
    thread = threading.Thread(target=lambda: ended.append(children.run([], log, "stand_in")[0]))
    thread.start()
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    children.stop()
    thread.join(60)
    assert ended == [-15]


@on_linux
def test_kill_9_asks_what_runs_to_end(tmp_path: Path, module: Path) -> None:
    module.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(print('asked', flush=True)))\n"
        "print(os.getpid(), flush=True)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"

    def said(lines: int) -> list[str]:
        deadline = time.monotonic() + 30
        while len(found := log.read_text().split() if log.exists() else []) < lines and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    with subprocess.Popen([sys.executable, "-c", PARENT, log]) as parent:
        begun = said(1)
        parent.kill()
    assert begun and said(2) == [*begun, "asked"]


@on_linux
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_child_whose_parent_is_gone_does_not_begin(tmp_path: Path, module: Path, handler: signal.Handlers) -> None:
    module.write_text("print('began')\n")
    before = signal.signal(signal.SIGUSR1, handler)  # that it is ignored, a child inherits
    try:
        child = subprocess.run(
            [sys.executable, "-m", CHILD, str(os.getpid() + 1), "stand_in"], capture_output=True, timeout=60
        )
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (child.returncode, child.stdout) == (-signal.SIGUSR1, b"")
