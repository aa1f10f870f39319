"""metrics.jsonl: one JSON object a line, each a row of `ddnn.runs.rows`; how it is written and read. Needs no torch."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from ddnn.runs.rows import (
    ROW,
    EndRow,
    EpochRow,
    EventRow,
    MetricsRow,
    PretrainRow,
    StartRow,
    WarmupRow,
    WorkerRow,
    no_better_than_baseline,
)
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import append_bytes, open_for_append, read_bytes_limited, require_kind

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # ten thousand epochs of one worker, or a hundred epochs of a thousand
MAX_PENDING_ROWS = 10_000  # kept in memory while the disk is full, about 4 MB; beyond it the oldest are lost
_MAX_LINE = 1 << 20
MUCH_HIGHER = 1.02
"""A warning is given if the final model's cross-validation loss is more than this many times that of an earlier epoch."""


@dataclass(frozen=True)
class Metrics:
    """The rows of a training or pretraining by type: sorted by epoch and rank, events in the order of the file."""

    starts: tuple[StartRow, ...] = ()
    train: tuple[EpochRow, ...] = ()
    cv: tuple[EpochRow, ...] = ()
    workers: tuple[WorkerRow, ...] = ()
    warmup: WarmupRow | None = None
    events: tuple[EventRow, ...] = ()
    end: EndRow | None = None  # of the last start; None where it has not ended, or was killed
    pretraining: tuple[PretrainRow, ...] = ()

    @property
    def reconstruction_errors(self) -> dict[str, float]:
        """Of each RBM ("1", "2"), the mean over its epochs so far."""
        means = {str(row.rbm): row.mean_reconstruction_error for row in self.pretraining}
        return {rbm: mean for rbm, mean in means.items() if mean is not None}

    @property
    def last_accepted(self) -> EpochRow | None:
        """The cross-validation row of the model: the final one, or the one so far. Epoch 0 is the initial network. Where
        the final model is a `combination`, with its figures."""
        row, end = next((row for row in reversed(self.cv) if row.accepted), None), self.end
        if row is None or end is None or not self.combination:
            return row
        return row.model_copy(update={"figures": end.figures})

    @property
    def combination(self) -> str:
        """What mean the final model is; empty where it is that of the last accepted epoch, or training has not ended."""
        return self.end.combination if self.end is not None else ""

    @property
    def lowest_loss(self) -> EpochRow | None:
        """The accepted cross-validation row with a lower loss than the model's, the lowest; None if there is none."""
        model = self.last_accepted
        accepted = [(row.loss, row) for row in self.cv if row.accepted and row.loss is not None]
        lowest = min(accepted, key=lambda pair: pair[0])[1] if accepted else None
        return lowest if lowest and model and (model.loss is None or (lowest.loss or 0.0) < model.loss) else None

    @property
    def warning(self) -> str:
        """That the model is no better than one that ignores its input, or worse than that of an earlier epoch; empty
        where it is better, or nobody knows."""
        row, lowest = self.last_accepted, self.lowest_loss
        if row is None or row.loss is None or not self.starts:
            return ""
        warnings = [no_better_than_baseline(row.figures, self.starts[-1].baseline)]
        if lowest is not None and lowest.loss is not None and lowest.epoch and row.loss > MUCH_HIGHER * lowest.loss:
            percent = 100 * (row.loss / lowest.loss - 1) if lowest.loss else math.inf
            warnings.append(
                f"the model's cross-validation loss is {percent:.1f} % above that of epoch {lowest.epoch}, "
                f"{lowest.loss:.4f}: with schedule.keep: best that epoch's model would be the final one"
            )
        return "; ".join(filter(None, warnings))

    @property
    def num_workers(self) -> int:
        return len({row.rank for row in self.workers})

    @property
    def last_worker_rows(self) -> tuple[WorkerRow, ...]:
        return tuple(row for row in self.workers if row.epoch == self.workers[-1].epoch)


Row = TypeVar("Row", bound=MetricsRow)


def read_metrics(path: Path) -> Metrics:
    """The metrics of a training or pretraining, which may still run: without a last line that is still being written.
    DataError: the file is missing, no regular file or too large; a line is not a metrics row; two rows are of the same
    epoch and rank."""
    rows: dict[tuple[object, ...], MetricsRow] = {}
    for number, line in _lines(path):
        try:
            row = _parse_row(line)
        except ValueError as error:
            message = f"line {number} is not a metrics row: {error}: {line[:60]!r}"
            hint = "restore or remove the line"
            raise DataError(message, location=path, hint=hint) from error
        if row is None:
            continue
        key = (row.type, *((number,) if row.KEY is None else (f"{name} {getattr(row, name)}" for name in row.KEY)))
        if key in rows:
            of_what = f" for {', '.join(map(str, key[1:]))}" if key[1:] else ""
            message = f"line {number}: a second {row.type} row{of_what}"
            raise DataError(message, location=path, hint="use one run dir for each training")
        rows[key] = row

    def of(kind: type[Row]) -> list[Row]:
        return [row for row in rows.values() if isinstance(row, kind)]

    last = next((row for row in reversed(rows.values()) if isinstance(row, StartRow | EventRow | EndRow)), None)
    epochs = sorted(of(EpochRow), key=lambda row: row.epoch)
    return Metrics(
        starts=tuple(of(StartRow)),
        train=tuple(row for row in epochs if row.split == "train"),
        cv=tuple(row for row in epochs if row.split == "cv"),
        workers=tuple(sorted(of(WorkerRow), key=lambda row: (row.epoch, row.rank))),
        warmup=next(iter(of(WarmupRow)), None),
        events=tuple(of(EventRow)),
        end=last if isinstance(last, EndRow) else None,
        pretraining=tuple(of(PretrainRow)),
    )


def iterate_rows(path: Path) -> Iterator[MetricsRow]:
    """The rows in the order of the file, the last of which may still be being written. A missing file has none. Lines that
    are no rows are skipped."""
    with suppress(DataError):
        for _, line in _lines(path):
            with suppress(ValueError):
                row = _parse_row(line)
                if row is not None:
                    yield row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers from 1; without a last one that has no end and is no JSON: it is being written."""
    if not path.is_file():
        raise DataError("the file does not exist", location=path, hint="name the run dir of a training")
    try:
        text = read_bytes_limited(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}; expected one JSON object a line", location=path) from error
    *whole, last = text.split(b"\n")
    yield from enumerate(whole, 1)
    cut_off = last.lstrip().startswith(b"{") and not last.rstrip().endswith(b"}")
    if last and not (whole and cut_off):
        yield len(whole) + 1, last


def _parse_row(line: bytes) -> MetricsRow | None:
    """None for a row of an unknown type, of a later version; ValueError for what is no row."""
    try:
        return ROW.validate_json(line)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        if detail["type"] == "union_tag_invalid":
            return None
        if detail["type"] == "union_tag_not_found":
            raise ValueError("it has no `type` (run dirs of ddnn 0.1 are not read)") from error
        key = "".join(f"{name}: " for name in detail["loc"][1:2])
        value = "missing" if detail["type"] == "missing" else f"{repr(detail['input'])[:60]} found"
        raise ValueError(f"{key}{value}, {detail['msg'][:200]}") from error


class MetricsWriter:
    """Appends rows to metrics.jsonl. A full disk does not end a training: rows that cannot be written are kept in
    memory and written, in order, before the next one that can be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING_ROWS)
        self._failed = False

    def encode(self, row: MetricsRow) -> bytes:
        return json.dumps(row.model_dump(), allow_nan=False).encode() + b"\n"

    def write(self, row: MetricsRow) -> None:
        """One row, now or as soon as there is space. UserError: the file is a link, a FIFO or a device."""
        self._write(self.encode(row))

    def _write(self, data: bytes) -> None:
        self._pending.append(data)
        try:
            self._write_pending()
        except OSError as error:
            if not self._failed:
                log.warning("cannot write %s: %s; its rows are kept in memory until it can", self.path, error.strerror)
            self._failed = True

    def _write_pending(self) -> None:
        if self._pending:
            append_bytes(self.path, b"".join(self._pending))
            if self._failed:
                log.info("%s can be written again: %d pending rows are in it", self.path.name, len(self._pending))
            self._pending.clear()
        self._failed = False

    def flush(self) -> None:
        """Writes pending rows, and everything through to the disk; UserError if it cannot be written."""
        try:
            self._write_pending()
            with os.fdopen(open_for_append(self.path), "ab") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error

    def truncate(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Cuts the file before the first row that is not to be kept, since that row is about to be written again;
        pending rows alike. A last line that was cut off is removed. UserError: the file cannot be written. `keep`:
        called with each line as JSON; what is no JSON object is kept."""
        self._pending = deque((line for line in self._pending if _kept(line, keep)), MAX_PENDING_ROWS)
        if not self.path.exists():
            return
        require_kind(self.path, "file")
        try:
            with self.path.open("rb") as file:
                lines = iter(lambda: file.readline(_MAX_LINE), b"")
                end = sum(map(len, takewhile(lambda line: line.endswith(b"\n") and _kept(line, keep), lines)))
            with os.fdopen(open_for_append(self.path), "ab") as file:
                os.ftruncate(file.fileno(), end)
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> UserError:
        hint = "check that there is space, quota and permission to write, then resume with --resume"
        return UserError(f"cannot write {self.path.name}: {error.strerror}", location=self.path.parent, hint=hint)


def _kept(line: str | bytes, keep: Callable[[dict[str, Any]], bool]) -> bool:
    with suppress(ValueError, RecursionError):
        row = json.loads(line)
        return not isinstance(row, dict) or keep(row)
    return True
