"""Progress where a person waits: a bar on a terminal, nothing elsewhere (the log has its own lines)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

SHOWN_BY_LAUNCHER = "DDNN_PROGRESS"
"""Environment variable: the launcher of workers has a terminal, which the first worker writes to through a pipe."""

Item = TypeVar("Item")


_disabled: bool | None = None
"""What tqdm gets: None shows bars on a terminal only."""


def only_first_worker_shows(rank: int) -> None:
    """Bars of the other workers are off from here on; the first one's reach the terminal of their launcher."""
    global _disabled
    if rank:
        _disabled = True
    elif os.environ.get(SHOWN_BY_LAUNCHER):
        _disabled = False


def progress_bar(description: str, unit: str = "utt") -> Callable[[Sequence[Item]], Iterable[Item]]:
    """Wraps a sequence in a bar that shows only on a terminal."""

    def wrap(items: Sequence[Item]) -> Iterable[Item]:
        return tqdm(items, desc=description, unit=f" {unit}", disable=_disabled, leave=False, mininterval=0.5)

    return wrap


def frame_counter(description: str, total: int, done: int = 0) -> tqdm:  # type: ignore[type-arg]
    """A bar counting frames from `done` on, for a terminal only."""
    return tqdm(
        initial=done,
        total=total,
        desc=description,
        unit=" frames",
        unit_scale=True,
        disable=_disabled,
        leave=False,
        mininterval=0.5,
    )
