"""What a worker without a run dir keeps in memory of it, in case its owner dies."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from ddnn.train.read_metrics import MOST_BYTES

MOST_ROWS = 10_000
"""Beyond it the oldest are forgotten: their owner wrote them long ago."""

Key = tuple[Any, Any, Any, Any]
"""Epoch, split, rank and minibatch, where a row has them: metrics.jsonl has one row of each."""


class Kept:
    """The small things that the owner of the run dir writes, and every worker knows.

    Attributes:
        recipe: text of the resolved recipe.
        counts: frames per pdf, (pdfs,).
        rows: of metrics.jsonl.
    """

    def __init__(self) -> None:
        self.recipe: str | None = None
        self.counts: NDArray[Any] | None = None
        self.rows: dict[Key, dict[str, Any]] = {}

    def add(self, row: dict[str, Any]) -> None:
        """One row of metrics.jsonl."""
        self.rows[_key(row)] = row
        if len(self.rows) > MOST_ROWS:
            del self.rows[next(iter(self.rows))]

    def forget_epochs_after(self, epoch: int) -> None:
        """Forgets the rows of later epochs."""
        self.rows = {key: row for key, row in self.rows.items() if not isinstance(key[0], int) or key[0] <= epoch}

    def rows_not_in(self, metrics: Path, waiting: Sequence[str] = ()) -> list[dict[str, Any]]:
        """Rows that are neither in the file nor among the lines that wait to be written to it, in their order. Lines
        that cannot be read are passed over."""
        there: set[Key] = set()
        lines: list[str | bytes] = list(waiting)
        if metrics.is_file():
            with metrics.open("rb") as handle:
                lines += handle.read(MOST_BYTES).splitlines()
        for line in lines:
            with suppress(ValueError, RecursionError, AttributeError, TypeError):
                there.add(_key(json.loads(line)))
        return [row for key, row in self.rows.items() if key not in there]


def _key(row: dict[str, Any]) -> Key:
    return row.get("epoch"), row.get("split"), row.get("rank"), row.get("minibatch")
