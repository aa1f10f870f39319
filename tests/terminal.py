"""Commands on a terminal: a pseudo-terminal of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress


def on_terminal(
    command: Sequence[str], columns: int, environment: Mapping[str, str] | None = None, lines: int = 24
) -> tuple[int, str]:
    """Exit code of the command, and all that it has written to its terminal. `environment`: changes to that of the tests;
    COLUMNS, NO_COLOR and the like are not set otherwise."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    names = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "DDNN_PROGRESS")
    inherited = {name: value for name, value in os.environ.items() if name not in names}
    variables = {**inherited, "TERM": "xterm-256color", **(environment or {})}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    written = b""
    with suppress(OSError):  # EIO: nobody has it open any more
        while data := os.read(ours, 65536):
            written += data
    os.close(ours)
    return process.wait(), written.decode().replace("\r\n", "\n")


def plain(text: str) -> str:
    """What is left on the screen: without colors and movements of the cursor, and without lines that were drawn over."""
    kept = re.sub(r"\x1b\[\??[0-9;]*[A-Za-z]", "", text)
    return "\n".join(line.rpartition("\r")[2] for line in kept.split("\n"))
