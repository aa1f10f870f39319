"""Cores to share out: jobs begin in their order, each once the cores that it needs are free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Slots:
    """So many cores. A job that needs more than there are gets all of them."""

    def __init__(self, number: int) -> None:
        """`number` of cores, at least 1."""
        self.number = max(1, number)
        self._free = self.number
        self._turns: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        """Waits for `wanted` cores, behind those who asked before, and gives them back at the end of the block."""
        wanted, turn = min(wanted, self.number), object()
        with self._changed:
            self._turns.append(turn)
            self._changed.wait_for(lambda: self._turns[0] is turn and self._free >= wanted)
            self._turns.pop(0)
            self._free -= wanted
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += wanted
                self._changed.notify_all()
