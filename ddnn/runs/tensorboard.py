"""RUN_DIR/tensorboard (`log.tensorboard`): the rows of metrics.jsonl as an event file of TensorBoard. A start of the
training begins a new file with all rows that metrics.jsonl has then, so that a resume has no point twice. The package
tensorboard is imported only when needed."""

from __future__ import annotations

import io
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

from ddnn.runs.metrics import MetricsWriter, iterate_rows
from ddnn.runs.rows import EpochRow, MetricsRow, PretrainRow, WarmupRow, WorkerRow
from ddnn.runs.run_status import TENSORBOARD
from ddnn.util.errors import UserError
from ddnn.util.files import ensure_directory, require_kind

_PREFIX = "events.out.tfevents."  # by which TensorBoard knows its files
_OF_WORKERS = {
    "compute_fraction": "time/compute",
    "data_fraction": "time/data",
    "comm_fraction": "time/communication",
    "wait_fraction": "time/waiting",
    "consensus_distance": "workers/consensus_distance",
}
"""Fields of the workers' rows whose means are shown, with their tags."""


def import_tensorboard() -> Any:
    """The classes Event, SessionLog, Summary and RecordWriter. UserError: the package is missing, or cannot be
    imported."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter
    except (ImportError, TypeError) as error:  # a TypeError comes from a protobuf of another version
        message = f"log.tensorboard: true needs the package tensorboard, which cannot be imported: {error}"
        hint = "pip install 'ddnn[tensorboard]', or --set log.tensorboard=false"
        raise UserError(message, location="log.tensorboard", hint=hint) from error
    return Event, SessionLog, Summary, RecordWriter


class TensorBoardWriter(MetricsWriter):
    """Writes what `MetricsWriter` writes as scalars by epoch, after each epoch; fractions of time and consensus
    distances are means over the workers. A full disk does not end a training either."""

    def __init__(self, metrics: Path) -> None:
        """Of the run dir that has this metrics.jsonl. UserError: the package is missing, or cannot be imported."""
        super().__init__(metrics.with_name(TENSORBOARD) / _PREFIX)
        self._metrics = metrics
        self._workers: list[WorkerRow] = []  # of the epoch whose other rows have not been written yet
        self._begun = False
        self._event, self._session_log, self._summary, self._record_writer = import_tensorboard()

    def encode(self, row: MetricsRow) -> bytes:
        return self._encode_at(row, time.time())

    def write(self, row: MetricsRow) -> None:
        if self._begun:  # rows of before are in metrics.jsonl, from which the file begins
            super().write(row)

    def truncate(self, keep: Callable[[dict[str, Any]], bool]) -> None:
        """Begins this start's file with the rows that metrics.jsonl has now; later calls of the same start remove no
        row. UserError: the folder is a link or a file, or cannot be written."""
        if self._begun:
            return
        folder, now = self.path.parent, time.time()
        require_kind(folder, "directory")
        ensure_directory(folder)
        for old in folder.glob(f"{_PREFIX}*"):
            with suppress(OSError):
                old.unlink()
        self.path, self._begun = folder / f"{_PREFIX}{int(now):010d}.{socket.gethostname()}.{os.getpid()}", True
        # A TensorBoard that shows the removed file drops its points where it finds the start of a session at step 0.
        started = self._session_log(status=self._session_log.START)
        pieces = [self._framed(file_version="brain.Event:2", wall_time=now)]
        pieces.append(self._framed(session_log=started, wall_time=now))
        rows = list(iterate_rows(self._metrics))
        took = (0.0 if isinstance(row, WorkerRow) else getattr(row, "seconds", None) or 0.0 for row in rows)
        ends = list(accumulate(took))
        pieces += [self._encode_at(row, now - ends[-1] + end) for row, end in zip(rows, ends, strict=True)]
        self._write(b"".join(pieces))

    def _encode_at(self, row: MetricsRow, wall_time: float) -> bytes:
        """The events of a row that is recorded at this time (seconds since 1970); none where it has no scalars."""
        if isinstance(row, WorkerRow):
            self._workers.append(row)
            return b""
        scalars = [(tag, value) for tag, value in self._scalars(row) if value is not None]
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars]
        step, summary = getattr(row, "epoch", 0), self._summary(value=values)
        return self._framed(step=step, summary=summary, wall_time=wall_time) if values else b""

    def _framed(self, **fields: Any) -> bytes:
        """An event as a record of the file."""
        record = io.BytesIO()
        self._record_writer(record).write(self._event(**fields).SerializeToString())
        return record.getvalue()

    def _scalars(self, row: MetricsRow) -> Iterator[tuple[str, float | None]]:
        """Tag and value, None where it is not known; the step is the epoch."""
        if isinstance(row, PretrainRow):
            yield f"rbm{row.rbm}/reconstruction_error", row.reconstruction_error
            yield f"rbm{row.rbm}/frames_per_second", row.frames_per_second
        if not isinstance(row, (EpochRow, WarmupRow)):
            return
        split = row.split if isinstance(row, EpochRow) else "warmup"
        for name, value in row.figures.items():
            yield f"{name}/{split}", value
        if split == "train":
            yield "learning_rate/applied", row.learning_rate
            yield "learning_rate/schedule", row.schedule_learning_rate
            yield "speed/frames_per_second", row.frames_per_second
        if split == "cv":  # the last row of an epoch
            workers, self._workers = self._workers, []
            for field, tag in _OF_WORKERS.items():
                values = [value for worker in workers if (value := getattr(worker, field)) is not None]
                yield tag, fmean(values) if values else None
