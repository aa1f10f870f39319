"""Progress where a person waits: a bar on a terminal, nothing elsewhere (the log has lines of its own)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ddnn.util.text import printable, terminal_level, unescaped

SHOWN_BY_LAUNCHER = "DDNN_PROGRESS"
"""Environment variable: the launcher of workers has a terminal, which the first worker writes to through a pipe."""

Item = TypeVar("Item")

_shown: bool | None = None  # whether bars are shown; None: on a terminal only


def only_first_worker_shows(rank: int) -> None:
    """Bars of the other workers are off from here on; the first one's reach the terminal of their launcher."""
    global _shown
    if rank:
        _shown = False
    elif os.environ.get(SHOWN_BY_LAUNCHER):
        _shown = True


def progress_bar(description: str) -> Callable[[Sequence[Item]], Iterable[Item]]:
    def wrap(items: Sequence[Item]) -> Iterator[Item]:
        with frame_counter(description, len(items), unit="utterances") as advance:
            for item in items:
                yield item
                advance(1)

    return wrap


@contextmanager
def frame_counter(description: str, total: int, done: int = 0, unit: str = "frames") -> Iterator[Callable[[int], None]]:
    """Shows a bar on stderr while the block runs; yields the function that adds to what is done."""
    if not (sys.stderr.isatty() if _shown is None else _shown) or terminal_level() > logging.INFO:
        yield lambda number: None
        return
    from rich import progress as rich  # half a tenth of a second that commands without a terminal need not pay
    from rich.console import Console

    bar = rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn(unit),
        rich.TimeRemainingColumn(),
        console=Console(file=unescaped(sys.stderr), force_terminal=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    task = bar.add_task(printable(description, ""), total=total, completed=done)
    with bar:
        yield lambda number: bar.advance(task, number)
