"""The newest checkpoint of a run dir, by its manifest alone: a file of a stranger, so bounded. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 20
"""Of a manifest."""
MOST_NAMES = 10_000
MOST_TRIES = 10
"""Damaged checkpoints to look behind."""
_MOST_COUNT = 2**53


@dataclass(frozen=True)
class Checkpoint:
    """What --resume would go on from, if its files are what the manifest says: only their sizes were compared.

    Attributes:
        number: its running number.
        workers: how many wrote it.
        epoch, minibatch: epochs finished, and minibatches into the next; None where it does not say.
        written: seconds since 1970.
    """

    number: int
    workers: int | None
    epoch: int | None
    minibatch: int | None
    written: float

    def as_text(self) -> str:
        """Where the training stood."""
        if self.epoch is None:
            return f"number {self.number}"
        into = f", {self.minibatch} minibatches into the next" if self.minibatch else ""
        return f"number {self.number}: after epoch {self.epoch}{into}"


class Damaged(Exception):
    """What is wrong with a checkpoint."""


def newest_checkpoint(run_dir: Path, problem: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that seems whole; None where there is none.

    Args:
        problem: told of each that is damaged, a sentence.
    """
    try:
        folder = _open(run_dir / "checkpoints", os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    except OSError as error:
        problem(f"checkpoints: {error.strerror}")
        return None
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MOST_NAMES)]
        numbers = sorted((int(name) for name in names if re.fullmatch(r"\d{8,15}", name, re.ASCII)), reverse=True)
        for number in numbers[:MOST_TRIES]:
            try:
                return _read(folder, number)
            except Damaged as error:
                problem(f"checkpoint {number} is damaged: {error}")
            except OSError as error:
                problem(f"checkpoint {number}: {error.strerror}")
    finally:
        os.close(folder)
    return None


def resume_command(run_dir: Path) -> str:
    """What goes on with the training of a run dir."""
    return f"ddnn train {shlex.quote(str(run_dir))} --resume"


def _read(parent: int, number: int) -> Checkpoint:
    folder = _open(f"{number:08d}", os.O_DIRECTORY, parent)
    try:
        text, written = _manifest(folder)
        value = _parsed(text)
        if value.get("number") != number:
            raise Damaged("its manifest is that of another one")
        for name, of in value["files"].items():
            if not re.fullmatch(r"(?:shared|worker\d{4,9})\.safetensors", name, re.ASCII):
                raise Damaged("its manifest names files that are none of a checkpoint")
            _check_size(folder, name, of[0] if isinstance(of, list) and of else None)
    finally:
        os.close(folder)
    header = value["header"]
    return Checkpoint(
        number, _count(value.get("workers")), _count(header.get("epoch")), _count(header.get("minibatch")), written
    )


def _manifest(folder: int) -> tuple[bytes, float]:
    """Its text, and when it was written."""
    try:
        descriptor = _open("checkpoint.json", 0, folder)
    except FileNotFoundError:
        raise Damaged("it has no manifest") from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            raise Damaged("its manifest is no regular file, or too long")
        return file.read(MOST_BYTES), found.st_mtime


def _parsed(text: bytes) -> dict[str, Any]:
    """The manifest, if it is what was written: its own sha256 says so."""
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        value = json.loads(text)
        sha256 = value.pop("sha256")
        canonical = json.dumps(value, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n"
        parts = (value, value["files"], value["header"])
        if hashlib.sha256(canonical).hexdigest() == sha256 and all(isinstance(part, dict) for part in parts):
            return dict(value)
    raise Damaged("its manifest is not what was written")


def _check_size(folder: int, name: str, size: object) -> None:
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        raise Damaged(f"{name} has not the size that was written")


def _open(name: Path | str, flags: int, parent: int | None = None) -> int:
    """Never through a symbolic link, never waiting on a FIFO."""
    return os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, dir_fd=parent)


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MOST_COUNT else None
