"""An anonymous file of the launcher, by which it and its workers on the same host tell each other things: lines of JSON.

The workers open it by /proc, so nothing is left behind, whoever is killed. There is none for workers on other hosts, and
where the system has no such files. Needs no installed package: watchdogs have none.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VARIABLE = "DDNN_LAUNCHER_FILE"
"""Environment variable: path of the file, a colon, and the name that it must have there: on another host the path may be
that of some other file."""


class LauncherFile:
    """The launcher's end. `environment`: of the workers that are to find the file; empty if there is none."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self._file = -1
        if hasattr(os, "memfd_create"):
            name = f"ddnn-{secrets.token_hex(8)}"
            self._file = os.memfd_create(name)
            self.environment[VARIABLE] = f"/proc/{os.getpid()}/fd/{self._file}:{name}"

    def clear(self) -> None:
        if self._file >= 0:
            os.ftruncate(self._file, 0)

    def close(self) -> None:
        self.environment.clear()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def append(environment: Mapping[str, str] = os.environ, /, **entry: Any) -> bool:
    """Appends an entry; False where there is no file."""
    try:
        with _path(environment).open("ab", buffering=0) as file:
            return file.write((json.dumps(entry) + "\n").encode()) > 0
    except OSError:
        return False


def entries(environment: Mapping[str, str] = os.environ) -> list[dict[str, Any]]:
    """All entries in their order, but for one that is half written, as by a worker that was killed; none where there is no
    file."""
    try:
        lines = _path(environment).read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _path(environment: Mapping[str, str]) -> Path:
    path, _, name = environment.get(VARIABLE, "").rpartition(":")
    if not path or name not in str(Path(path).readlink()):
        raise FileNotFoundError(path)
    return Path(path)
