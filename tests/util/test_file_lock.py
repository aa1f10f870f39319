"""Locks of files: children that inherit one hold it too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddnn.util.files import FileLock


def test_a_child_that_inherits_it_holds_it_too(tmp_path: Path) -> None:
    lock, other = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert lock.acquire()
    command = [sys.executable, "-c", "input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lock.fileno()]) as child:
        lock.release()
        with pytest.raises(BlockingIOError):
            other.acquire()
        child.communicate(b"\n")
    assert other.acquire()
    other.release()
