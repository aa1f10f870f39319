"""Progress where a person waits: a bar on a terminal, nothing elsewhere (the log has lines of its own)."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

SHOWN_BY_LAUNCHER = "DDNN_PROGRESS"
"""Environment variable: the launcher of workers has a terminal, which the first worker writes to through a pipe."""

Item = TypeVar("Item")

_shown: bool | None = None
"""Whether bars are shown; None: on a terminal only."""


def only_first_worker_shows(rank: int) -> None:
    """Bars of the other workers are off from here on; the first one's reach the terminal of their launcher."""
    global _shown
    if rank:
        _shown = False
    elif os.environ.get(SHOWN_BY_LAUNCHER):
        _shown = True


def progress_bar(description: str, unit: str = "utterances") -> Callable[[Sequence[Item]], Iterable[Item]]:
    """Wraps a sequence in a bar."""

    def wrap(items: Sequence[Item]) -> Iterator[Item]:
        with Bar(description, len(items), unit=unit) as bar:
            for item in items:
                yield item
                bar.update(1)

    return wrap


def frame_counter(description: str, total: int, done: int = 0) -> Bar:
    """A bar that counts frames from `done` on."""
    return Bar(description, total, done)


class Bar:
    """A context manager that shows a bar on stderr while it is open; `update` adds to what is done."""

    def __init__(self, description: str, total: int, done: int = 0, unit: str = "frames") -> None:
        shown = sys.stderr.isatty() if _shown is None else _shown
        self._progress = _rich_progress(unit) if shown else None
        if self._progress is not None:
            self._task = self._progress.add_task(description, total=total, completed=done)

    def update(self, number: int) -> None:
        """`number` more are done."""
        if self._progress is not None:
            self._progress.advance(self._task, number)

    def __enter__(self) -> Bar:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


def _rich_progress(unit: str) -> Any:
    from rich import progress as rich  # half a tenth of a second that commands without a terminal need not pay
    from rich.console import Console

    return rich.Progress(
        rich.TextColumn("{task.description}", markup=False),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn(unit),
        rich.TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
