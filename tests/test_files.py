"""Files appear whole or not at all; appended to whole or not at all; locks end with their process."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddnn.util.errors import UserError
from ddnn.util.files import (
    FileLock,
    append_bytes,
    atomic_directory,
    atomic_write,
    is_locked,
    open_for_append,
    write_text,
)


def test_a_file_is_there_only_once_whole(tmp_path: Path) -> None:
    target = tmp_path / "größe 1.txt"
    with atomic_write(target) as handle:
        handle.write(b"half")
        assert not target.exists()
    assert target.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "counts"
    write_text(target, "old")
    with pytest.raises(ZeroDivisionError), atomic_write(target) as handle:
        handle.write(b"new")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_appears_with_all_its_content(tmp_path: Path, exists: bool) -> None:
    target = tmp_path / "a new" / "dir é"
    if exists:
        target.mkdir(parents=True)
    with pytest.raises(ZeroDivisionError), atomic_directory(target) as folder:
        (folder / "half").touch()
        raise ZeroDivisionError
    with pytest.raises(UserError, match="no space left while writing dir é"), atomic_directory(target) as folder:
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.exists() == exists and not any(path.name != target.name for path in target.parent.rglob("*"))
    with atomic_directory(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("whole")
        assert not (target / "sub").exists()
    assert [path.name for path in target.parent.iterdir()] == [target.name]
    assert [path.name for path in target.iterdir()] == ["sub"] and (target / "sub" / "file").read_text() == "whole"
    with pytest.raises(UserError, match="is not empty"), atomic_directory(target):
        raise AssertionError
    with pytest.raises(UserError, match="is not empty"), atomic_directory(target / "sub" / "file"):
        raise AssertionError


def test_a_full_disk_is_said_plainly(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no space left while writing model") as caught,
        atomic_write(tmp_path / "model"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.location == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_real_full_device(tmp_path: Path) -> None:
    """/dev/full answers every write with ENOSPC."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(UserError, match="no space left"),
        atomic_write(tmp_path / "x"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write x\.json"):
        write_text(tmp_path / "missing" / "x.json", "{}")


# --- appending


def test_text_is_appended_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "log", os.write
    append_bytes(path, b"first\n")

    def full(descriptor: int, data: bytes) -> int:
        if len(data) < 7:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, bytes(data)[:1])

    monkeypatch.setattr("ddnn.util.files.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        append_bytes(path, b"second\n")
    assert path.read_text() == "first\n"


@pytest.mark.parametrize("kind", ["link", "fifo", "device", "directory"])
def test_only_regular_files_are_opened_to_append(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/null" if kind == "device" else tmp_path / "elsewhere")
    with pytest.raises(UserError, match="it is a"):
        open_for_append(path)
    assert not (tmp_path / "elsewhere").exists()


# --- locks

HOLDER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert is_locked(path) is False
    holder = subprocess.Popen([sys.executable, "-S", "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    assert is_locked(path) is True
    with pytest.raises(BlockingIOError):
        FileLock(path).acquire(timeout=0.3)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    lock = FileLock(path)
    assert lock.acquire() and is_locked(path) is True
    lock.release()
    lock.release()
    assert is_locked(path) is False


def test_a_child_process_does_not_inherit_a_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.acquire()
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    lock.release()
    assert is_locked(tmp_path / "lock") is False
    child.kill()
    child.wait()


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def none(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", none)
    assert FileLock(tmp_path / "lock").acquire() is False
    assert is_locked(tmp_path / "lock") is None


def test_a_file_that_was_replaced_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its opening and the lock: who holds the old file does not keep others from the new one."""
    path, flock = tmp_path / "lock", fcntl.flock

    def replaced(descriptor: int, operation: int) -> None:
        path.unlink()
        path.touch()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replaced)
    with pytest.raises(BlockingIOError, match="replaced"):
        FileLock(path).acquire()


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "lock")
    assert is_locked(tmp_path / "lock") is None
    with pytest.raises(UserError, match="special file"):
        FileLock(tmp_path / "lock").acquire()
