"""Files appear whole or not at all."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ddnn.errors import UserError
from ddnn.files import write_json, write_text, written_whole


def test_a_file_is_there_only_once_whole(tmp_path: Path) -> None:
    target = tmp_path / "größe 1.txt"
    with written_whole(target) as handle:
        handle.write(b"half")
        assert not target.exists()
    assert target.read_bytes() == b"half"
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "counts"
    write_text(target, "old")
    with pytest.raises(ZeroDivisionError), written_whole(target) as handle:
        handle.write(b"new")
        raise ZeroDivisionError
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_full_disk_is_said_plainly(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="no space left while writing model") as caught,
        written_whole(tmp_path / "model"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.where == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_real_full_device(tmp_path: Path) -> None:
    """/dev/full answers every write with ENOSPC."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with (
        pytest.raises(UserError, match="no space left"),
        written_whole(tmp_path / "x"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
    assert not list(tmp_path.iterdir())


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot write x\.json"):
        write_json(tmp_path / "missing" / "x.json", {"a": 1})
