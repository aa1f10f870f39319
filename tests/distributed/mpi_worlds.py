"""What the tests of this folder share: starting workers by mpirun, waiting for processes to be gone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked_python import forked_python

from ddnn.distributed.mpirun import find_mpirun
from ddnn.util.errors import UserError

HERE = Path(__file__).parent
LAUNCH = """import sys
from ddnn.distributed.launcher import RunMonitor, launch_workers
class Run(RunMonitor):
    def failure_hint(self):
        return "hint of the test"
workers, *argv = sys.argv[1:]
sys.exit(launch_workers(int(workers), argv, run=Run()))
"""


def need_mpi() -> None:
    """Skips where several workers cannot be started."""
    try:
        find_mpirun(os.environ)
    except UserError as error:
        pytest.skip(error.message)


def launch(
    workers: int, script: str | Path, *arguments: str | Path, python: str | None = None
) -> subprocess.Popen[str]:
    """A launcher, as `ddnn train --workers N` is one, of `workers` copies of a script beside this file, which `python`
    runs (forked_python.py)."""
    need_mpi()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", LAUNCH, str(workers)]
    command += [python or forked_python(), str(HERE / script), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def alive(pid: int) -> bool:
    """Whether a process still runs; a zombie that waits for its parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: list[int], seconds: float) -> bool:
    """Whether every process has ended before the seconds are over."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False
