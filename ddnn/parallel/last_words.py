"""What failing workers leave for their launcher, which prints it below mpirun's own lines, once mpirun has ended."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

LAST_WORDS = "DDNN_LAST_WORDS"
"""Environment variable: a folder in which a worker that fails leaves its message, one file each: so it is not lost with
what mpirun drops as it is told to abort."""

EXIT_CODE = "exit-code"
"""File there: the code that the job is to end with, where mpirun is not to be told of it, or will not tell."""


def leave_last_words(number: int, message: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Leaves a worker's message for the launcher; False where there is none on this host: then it is to be printed."""
    return _leave(f"{number}.txt", message, environment)


def leave_exit_code(code: int, environment: Mapping[str, str] = os.environ) -> bool:
    """Leaves the exit code of the job for the launcher; False where there is none on this host."""
    return _leave(EXIT_CODE, str(code), environment)


def last_words(folder: Path) -> str:
    """What failing workers left, the first worker's first; what several say alike once."""
    said: dict[str, str] = {}
    for file in sorted(folder.glob("*.txt"), key=lambda file: int(file.stem)):
        text = file.read_text(encoding="utf-8", errors="replace")
        said.setdefault(text.partition(": ")[2].partition(": ")[2] or text, text)
    return "".join(["\n", *said.values()]) if said else ""  # mpirun's own last line does not end


def exit_code(folder: Path) -> int | None:
    """The code that workers have left, if any."""
    try:
        return int((folder / EXIT_CODE).read_text())
    except FileNotFoundError:
        return None


def _leave(name: str, text: str, environment: Mapping[str, str]) -> bool:
    folder = environment.get(LAST_WORDS)
    if not folder or not Path(folder).is_dir():
        return False
    try:
        # Each worker writes a file of its own, then names it: several may leave the same exit code.
        written = Path(folder, f"{name}.{os.getpid()}.tmp")
        written.write_text(text, encoding="utf-8", errors="backslashreplace")
        written.rename(Path(folder, name))
    except OSError:
        return False
    return True
