"""Progress where a person waits: a bar on a terminal, nothing elsewhere (the log has its own lines)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")


def progress_bar(description: str, unit: str = "utt") -> Callable[[Sequence[Item]], Iterable[Item]]:
    """Wraps a sequence in a bar that shows only on a terminal."""

    def wrap(items: Sequence[Item]) -> Iterable[Item]:
        return tqdm(items, desc=description, unit=f" {unit}", disable=None, leave=False, mininterval=0.5)

    return wrap


def frame_counter(description: str, total: int) -> tqdm:  # type: ignore[type-arg]
    """A bar counting frames, for a terminal only."""
    return tqdm(
        total=total, desc=description, unit=" frames", unit_scale=True, disable=None, leave=False, mininterval=0.5
    )
