"""Progress where a person waits: a bar on a terminal, nothing elsewhere (the log has lines of its own)."""

from __future__ import annotations

import logging
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from ddnn.util.text import log_to, printable, terminal_level, unescaped

LAUNCHER_TERMINAL = "DDNN_PROGRESS"
"""Environment variable: host of the launcher of workers and path of its terminal. The first worker draws on it itself:
mpirun passes stderr on line by line, and a bar is a line that does not end before the epoch."""

FIGURES_SECONDS = 1.0
Item = TypeVar("Item")

_shown = True  # whether this process may show bars
_terminal: Any = None  # where bars are drawn; None: on stderr, if it is a terminal


def only_first_worker_shows(rank: int) -> None:
    """Bars of the other workers are off from here on; those of the first are drawn on the launcher's terminal, which gets
    its log, too."""
    global _shown, _terminal
    _shown = rank == 0
    host, _, path = os.environ.get(LAUNCHER_TERMINAL, "").partition(" ")
    if _shown and host == platform.node():
        with suppress(OSError):
            _terminal = Path(path).open("w", errors="backslashreplace")  # noqa: SIM115 (until the process ends)
            log_to(_terminal)  # a line that mpirun passes on would come too late, into a bar


def progress_bar(description: str) -> Callable[[Sequence[Item]], Iterable[Item]]:
    def wrap(items: Sequence[Item]) -> Iterator[Item]:
        with frame_counter(description, len(items), unit="utterances") as advance:
            for item in items:
                yield item
                advance(1)

    return wrap


@contextmanager
def frame_counter(
    description: str, total: int, done: int = 0, unit: str = "frames", figures: Callable[[], str] = str
) -> Iterator[Callable[[int], None]]:
    """Shows a bar on stderr while the block runs; yields the function that adds to what is done. `figures`: what else
    the bar says; called every `FIGURES_SECONDS`, and not at all where no bar is shown, since it may wait for the device."""
    terminal = _terminal or (unescaped(sys.stderr) if sys.stderr.isatty() else None)
    if not _shown or terminal is None or terminal_level() > logging.INFO:
        yield lambda number: None
        return
    from rich import progress as rich  # half a tenth of a second that commands without a terminal need not pay
    from rich.console import Console
    from rich.table import Column

    bar = rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(table_column=Column(no_wrap=True)),  # in a narrow terminal the bar alone gets shorter
        rich.TextColumn(unit),
        rich.TimeRemainingColumn(table_column=Column(no_wrap=True)),
        rich.TextColumn("{task.fields[figures]}", markup=False),
        console=Console(file=terminal, force_terminal=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(printable(description, ""), total=total, completed=done, figures="")
    shown_at = time.monotonic()

    def advance(number: int) -> None:
        nonlocal shown_at
        bar.advance(task, number)
        if time.monotonic() - shown_at >= FIGURES_SECONDS:
            bar.update(task, figures=printable(figures(), ""))
            shown_at = time.monotonic()

    with bar:
        yield advance
