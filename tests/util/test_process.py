"""Processes: their output, their environment, how they ended, what termination does, the death of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from ddnn.util import process
from ddnn.util.process import ProcessGroup, end_with_parent, run

on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere no parent's death is told")
PARENT = """\
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from ddnn.util.process import ProcessGroup
with ThreadPoolExecutor(1) as threads:
    threads.submit(ProcessGroup().run, "stand_in", [], Path(sys.argv[1])).result()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a module `stand_in`, which children can run."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "stand_in.py"


def test_output_is_appended_to_the_log_and_its_end_returned(tmp_path: Path, module: Path) -> None:
    module.write_text("import sys\nprint(*sys.argv[1:])\n")
    group, log = ProcessGroup(), tmp_path / "a" / "log"
    assert group.run("stand_in", ["one", "a b"], log) == (0, "one a b\n")
    assert group.run("stand_in", ["two"], log) == (0, "two\n")
    assert log.read_text() == "one a b\ntwo\n"
    group.terminate(grace=10.0)
    assert group.run("stand_in", ["three"], log) == (143, "not started")


def test_the_environment_is_the_given_one(tmp_path: Path, module: Path) -> None:
    module.write_text("import os\nprint(os.environ['NUMBER'])\n")
    group, log = ProcessGroup(), tmp_path / "log"
    assert group.run("stand_in", [], log, {**os.environ, "NUMBER": "1"})[1] == "1\n"


@pytest.mark.parametrize(
    ("body", "code", "output"),
    [
        ("import sys\nsys.exit(3)", 3, ""),
        ("import os\nos.kill(os.getpid(), 9)", -9, ""),
        ("print('x' * 10000)", 0, 3999 * "x" + "\n"),
    ],
)
def test_exit_codes_and_the_end_of_the_output(tmp_path: Path, module: Path, body: str, code: int, output: str) -> None:
    module.write_text(body)
    assert ProcessGroup().run("stand_in", [], tmp_path / "log") == (code, output)


def test_a_short_command() -> None:
    completed = run([sys.executable, "-c", "import sys; print(sys.stdin.read() + 'x'); sys.exit(3)"], timeout=600)
    assert (completed.returncode, completed.stdout) == (3, "x\n")
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.1)


def test_termination_ends_what_runs(tmp_path: Path, module: Path) -> None:
    module.write_text("import time\nprint('began', flush=True)\ntime.sleep(600)\n")
    group, log, ended = ProcessGroup(), tmp_path / "log", list[int]()
    thread = threading.Thread(target=lambda: ended.append(group.run("stand_in", [], log)[0]))
    thread.start()
    deadline = time.monotonic() + 600
    while not (log.exists() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    group.terminate(grace=60.0)
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
        deadline = time.monotonic() + 600
        while len(found := log.read_text().split() if log.exists() else []) < lines and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    with subprocess.Popen([sys.executable, "-c", PARENT, log]) as parent:
        begun = said(1)
        parent.kill()
    assert begun and said(2) == [*begun, "asked"]


@on_linux
@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_child_whose_parent_is_gone_does_not_begin(
    tmp_path: Path, module: Path, handler: signal.Handlers, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.write_text("print('began')\n")
    monkeypatch.setattr(process, "end_with_parent", lambda number, parent: end_with_parent(number, parent + 1))
    before = signal.signal(signal.SIGUSR1, handler)  # that it is ignored, a child inherits
    try:
        ended = ProcessGroup().run("stand_in", [], tmp_path / "log")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == (-signal.SIGUSR1, "")
