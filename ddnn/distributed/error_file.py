"""What failing workers report to their launcher, which prints it below mpirun's own lines once mpirun has ended.

The reports go through an anonymous file of the launcher, which the workers of the same host open by /proc: nothing is
left behind, whoever is killed. Workers on other hosts, and all where the system has no such files, print to stderr.
Imports no installed package, since the process of a watchdog uses it, too.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddnn.distributed.mpirun import EXIT_RESUMABLE

ERROR_FILE = "DDNN_ERROR_FILE"
"""Environment variable: path of the launcher's file, a colon, and the name that it must have there: on another host the
path may be that of some other file."""


@dataclass(frozen=True)
class Reports:
    """What the workers of one attempt have reported.

    Attributes:
        messages: of workers that failed, by rank; what several report alike once, from the lowest rank.
        hung: why a watchdog has killed its worker; None where none has.
        exit_code: that the job is to end with; None where no worker has said.
    """

    messages: tuple[str, ...] = ()
    hung: str | None = None
    exit_code: int | None = None


class ErrorFile:
    """The launcher's end."""

    def __init__(self) -> None:
        self._name = f"ddnn-errors-{secrets.token_hex(8)}"
        self._file = os.memfd_create(self._name) if hasattr(os, "memfd_create") else None

    @property
    def environment(self) -> dict[str, str]:
        """What the workers need in their environment."""
        return {} if self._file is None else {ERROR_FILE: f"/proc/{os.getpid()}/fd/{self._file}:{self._name}"}

    def read(self, killed: bool = False) -> Reports:
        """What has been reported; afterwards the file is empty.

        The first worker that fails ends the others by SIGTERM, so what a worker says of a signal counts only where
        nothing else has ended it before.

        Args:
            killed: whether it is known that a worker was killed, which then is what has ended the others.
        """
        if self._file is None:
            return Reports()
        content = os.pread(self._file, os.fstat(self._file).st_size, 0)
        os.ftruncate(self._file, 0)
        entries = []
        for entry in map(json.loads, content.decode(errors="replace").splitlines()):
            if not _by_signal(entry):
                killed = True
            elif killed:
                continue
            entries.append(entry)
        messages: dict[str, str] = {}
        for entry in sorted(
            (e for e in entries if "message" in e and "hung" not in e), key=lambda entry: entry["rank"]
        ):
            # "ddnn: worker 1 on host: what went wrong"
            messages.setdefault(entry["message"].split(": ", 2)[-1], entry["message"])
        codes = [entry["exit_code"] for entry in entries if "exit_code" in entry]
        hung = [entry["message"] for entry in entries if "hung" in entry]
        code = min(codes, key=lambda code: code == EXIT_RESUMABLE, default=None)  # the first, 75 only if there is none
        return Reports(tuple(messages.values()), hung[0] if hung else None, code)

    def close(self) -> None:
        """Frees the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def report_error(rank: int, message: str, exit_code: int | None, environment: Mapping[str, str] = os.environ) -> bool:
    """Reports why a worker fails; False where no launcher listens on this host, and the message is to be printed.

    Args:
        exit_code: that the job is to end with; None where the launcher is to start it again.
    """
    entry: dict[str, Any] = {"rank": rank, "message": message}
    return _append(entry if exit_code is None else {**entry, "exit_code": exit_code}, environment)


def report_exit_code(code: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Reports the exit code of a job whose workers end together; False where no launcher listens on this host."""
    return _append({"exit_code": code}, environment)


def report_hung(rank: int, message: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Reports why a worker is killed by its watchdog; False where no launcher listens on this host."""
    return _append({"rank": rank, "message": message, "hung": True}, environment)


def _by_signal(entry: Mapping[str, Any]) -> bool:
    """Whether a worker reports that a signal has ended it."""
    code = int(entry.get("exit_code", 0))
    return code == EXIT_RESUMABLE or code > 128


def _append(entry: Mapping[str, Any], environment: Mapping[str, str]) -> bool:
    path, _, name = environment.get(ERROR_FILE, "").rpartition(":")
    try:
        if name not in str(Path(path).readlink()):
            return False
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(descriptor, (json.dumps(entry) + "\n").encode())
    finally:
        os.close(descriptor)
    return True
