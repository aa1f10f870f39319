"""metrics.jsonl read back: by `ddnn info` and `ddnn report`, of a run that may still go on. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddnn.errors import DataError
from ddnn.files import read_regular

MOST_BYTES = 64 << 20
"""Ten thousand epochs of one worker, or a hundred epochs of a thousand."""

Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)] | None
"""null stands for what is not finite, or not known."""
NotNegative = Annotated[float, Field(ge=0.0, le=1e18, allow_inf_nan=False)] | None
Share = Annotated[float, Field(ge=0.0, le=1.1, allow_inf_nan=False)] | None
"""Of a worker's time; a little above 1 where two clocks differ."""


class Row(BaseModel):
    """A line of metrics.jsonl. Keys beyond these are of a later version, and passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class EpochRow(Row):
    """What an epoch came to, over all workers. Epoch 0 is the network before training."""

    epoch: Count
    split: Literal["train", "cv"]
    loss: Number
    frame_accuracy: Number
    learning_rate: Number = None
    frames: Count | None = None
    seconds: NotNegative = None
    frames_per_second: NotNegative = None
    accepted: bool = True


class WorkerRow(Row):
    """Where the time of one worker went in one epoch: shares are of `seconds`, those of its training thread.

    Attributes:
        block_seconds, block_seconds_std: mean and standard deviation over the epoch of the time of the minibatches
            between two averagings.
        exchange_seconds: spent moving parameters, with overlap in the background.
        divergence: mean relative distance of this worker's model from the mean before an averaging.
    """

    epoch: Count
    split: Literal["worker"]
    rank: Count
    host: Annotated[str, Field(max_length=1000)] = ""
    device: Annotated[str, Field(max_length=1000)] = ""
    frames: Count
    minibatches: Count
    seconds: NotNegative
    frames_per_second: NotNegative = None
    compute_share: Share = None
    data_share: Share = None
    communication_share: Share = None
    waiting_share: Share = None
    averagings: Count = 0
    left_out: Count = 0
    divergence: NotNegative = None
    bytes_sent: Count | None = None
    exchange_seconds: NotNegative = None
    parameters: Count | None = None
    block_seconds: NotNegative = None
    block_seconds_std: NotNegative = None


class EventRow(Row):
    """Where a training went on after it was broken off, or after workers were lost.

    Attributes:
        epoch: finished epochs.
        minibatch: resumed: those of the epoch under way that the first worker had behind it.
        workers: how many go on.
        rank, host: lost: the worker, by its rank when the training began.
    """

    epoch: Count
    split: Literal["resumed", "lost"]
    workers: Count
    minibatch: Count = 0
    rank: Count | None = None
    host: Annotated[str, Field(max_length=1000)] = ""

    def as_text(self) -> str:
        """A sentence."""
        where = f"after epoch {self.epoch}" + (f" and {self.minibatch} minibatches" if self.minibatch else "")
        if self.split == "resumed":
            return f"resumed {where} by {self.workers} worker(s)"
        host = "".join(c if c.isprintable() else "?" for c in self.host)
        return f"worker {self.rank} on {host} was lost {where}; {self.workers} went on"


class PretrainingRow(Row):
    """What a pass over an RBM came to."""

    layer: Count
    pass_: Annotated[Count, Field(alias="pass")]
    error: Annotated[Number, Field(alias="reconstruction_error_all_passes")]


@dataclass(frozen=True)
class Metrics:
    """The rows of a training, each in the order of epochs (and ranks); events in the order of the file."""

    train: tuple[EpochRow, ...]
    cv: tuple[EpochRow, ...]
    workers: tuple[WorkerRow, ...]
    events: tuple[EventRow, ...] = ()


RowType = TypeVar("RowType", bound=Row)
_KINDS: dict[str, type[EpochRow] | type[WorkerRow]] = {"train": EpochRow, "cv": EpochRow, "worker": WorkerRow}


def read_metrics(path: Path) -> Metrics:
    """The metrics of a training. A last line that is still being written is passed over, as are splits unknown here.

    Raises:
        DataError: the file is missing, no regular file or too large; a line is none of a training's; two rows are of
            the same epoch and rank.
    """
    found: dict[tuple[str, int, int], EpochRow | WorkerRow] = {}
    events = []
    for number, line in _lines(path):
        values = _parse(path, number, line)
        split = values.get("split")
        if not isinstance(split, str):
            _refuse(path, number, line, "no split")
        if split in ("resumed", "lost"):
            events.append(_checked(EventRow, path, number, line, values))
        if split not in _KINDS:
            continue
        row = _checked(_KINDS[split], path, number, line, values)
        rank = row.rank if isinstance(row, WorkerRow) else 0
        if (split, row.epoch, rank) in found:
            which = f"of worker {rank}" if split == "worker" else f"of {split}"
            raise DataError(
                f"line {number}: a second row {which} for epoch {row.epoch}",
                where=path,
                mend="give each training a run dir of its own",
            )
        found[split, row.epoch, rank] = row
    rows = [found[key] for key in sorted(found, key=lambda key: key[1:])]
    epochs = [row for row in rows if isinstance(row, EpochRow)]
    return Metrics(
        train=tuple(row for row in epochs if row.split == "train"),
        cv=tuple(row for row in epochs if row.split == "cv"),
        workers=tuple(row for row in rows if isinstance(row, WorkerRow)),
        events=tuple(events),
    )


def read_pretraining(path: Path) -> list[PretrainingRow]:
    """The metrics of a pretraining, in the order of the file.

    Raises:
        DataError: as of `read_metrics`.
    """
    return [_checked(PretrainingRow, path, number, line, _parse(path, number, line)) for number, line in _lines(path)]


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers from 1; without a last one that has no end and is no JSON: it is being written."""
    if not path.is_file():
        raise DataError("there is no such file", where=path, mend="name the run dir of a training")
    try:
        text = read_regular(path, MOST_BYTES)
    except OSError as error:
        what = f"cannot read: {error.strerror}; expected a line per epoch and split"
        raise DataError(what, where=path) from error
    *whole, last = text.split(b"\n")
    yield from enumerate(whole, 1)
    if last and not (whole and _is_cut(last)):
        yield len(whole) + 1, last


def _is_cut(line: bytes) -> bool:
    return line.lstrip().startswith(b"{") and not line.rstrip().endswith(b"}")


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse(path, number, line, f"no JSON ({error})"[:200], error)
    if not isinstance(values, dict):
        _refuse(path, number, line, "no JSON object")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is none of JSON's numbers; null stands for what is not finite")


def _checked(kind: type[RowType], path: Path, number: int, line: bytes, values: dict[str, Any]) -> RowType:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        key = str(detail["loc"][0])
        value = "missing" if detail["type"] == "missing" else f"{repr(values.get(key))[:60]} found"
        _refuse(path, number, line, f"{key}: {value}, {detail['msg']}", error)


def _refuse(path: Path, number: int, line: bytes, why: str, error: Exception | None = None) -> NoReturn:
    raise DataError(
        f"line {number} is no metrics of a training: {why}: {line[:60]!r}", where=path, mend="restore it or take it out"
    ) from error
