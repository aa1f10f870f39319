"""metrics.jsonl: one JSON object a line, declared here once for the trainer that writes it and all who read it. `type`
names the kind of row: `start` (one for each start of the training), `epoch` (all workers together, `split` train or
cv), `worker` (one worker in one epoch), `warmup`, `event` (a resume or restart), `end` (why a start of the training
ended, and with which model) and, in a pretraining dir, `pretrain`. Needs no torch."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from ddnn.nn.figures import FIGURES, FRAME_ACCURACY, LOSS, check_known, describe
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import append_bytes, open_for_append, read_bytes_limited, require_kind
from ddnn.util.text import duration, plural, printable

log = logging.getLogger(__name__)

MAX_BYTES = 64 << 20  # ten thousand epochs of one worker, or a hundred epochs of a thousand
MAX_PENDING_ROWS = 10_000  # kept in memory while the disk is full, about 4 MB; beyond it the oldest are lost
_MAX_LINE = 1 << 20


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rounded(digits: int) -> AfterValidator:
    return AfterValidator(lambda value: None if value is None else round(value, digits))


Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float | None, BeforeValidator(_finite)]  # None (null) where the value is not finite, or not known
_NotNegative = Annotated[float, Field(ge=0.0, le=1e18)]
Seconds = Annotated[_NotNegative | None, BeforeValidator(_finite), _rounded(6)]
Speed = Annotated[_NotNegative | None, BeforeValidator(_finite), _rounded(1)]
Distance = Annotated[_NotNegative | None, BeforeValidator(_finite), _rounded(8)]
Fraction = Annotated[Annotated[float, Field(ge=0.0, le=1.1)] | None, BeforeValidator(_finite), _rounded(5)]
"""Of a worker's time; may slightly exceed 1 where two clocks differ."""
Name = Annotated[str, Field(max_length=1000)]
Figures = Annotated[dict[str, Number], AfterValidator(check_known)]
Precision = Literal["float32", "bf16"]  # as in `ddnn.nn.arithmetic`, which imports torch


class MetricsRow(BaseModel):
    """A line of metrics.jsonl. Unknown keys (of a later version) are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")
    KEY: ClassVar[tuple[str, ...] | None] = ()
    """Fields whose values, together, only one row of the type has; None where there is no such rule."""
    FIGURES: ClassVar[Mapping[str, str]] = {}
    """Fields that hold an objective's figures by name (`ddnn.nn.figures`), and what precedes the names in the file, where
    each figure is a key of its own: "loss", "frame_accuracy"."""

    type: str

    @model_validator(mode="before")
    @classmethod
    def _collect_figures(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        for field, prefix in cls.FIGURES.items():
            if field not in values:
                known = {name: values[prefix + name] for name in FIGURES if prefix + name in values}
                values = {**values, field: known}
        return values

    @model_serializer(mode="wrap")
    def _flatten_figures(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        row: dict[str, Any] = {}
        for key, value in serialize(self).items():
            prefix = self.FIGURES.get(key)
            row |= {key: value} if prefix is None else {prefix + name: figure for name, figure in value.items()}
        return row

    def as_text(self) -> str:
        """The row as a line of the log; empty where there is nothing to say."""
        raise NotImplementedError


class _Result(MetricsRow):
    """Figures of a model. `loss`: the first, which training minimizes."""

    FIGURES = {"figures": ""}

    figures: Annotated[Figures, Field(min_length=1)]

    @property
    def loss(self) -> float | None:
        return next(iter(self.figures.values()))

    @property
    def frame_accuracy(self) -> float | None:
        return self.figures.get(FRAME_ACCURACY.name)


class _Figures(_Result):
    """Figures and speed over some frames, all workers together."""

    epoch: Count
    learning_rate: Number = None  # that was applied to the gradient summed over a worker's minibatch
    schedule_learning_rate: Number = None  # before it was multiplied by the number of workers, where it is
    minibatch_size: Count | None = None  # frames in a minibatch of each worker in this epoch's training
    precision: Precision | None = None  # None in older files: cross-validation was in float32
    frames: Count | None = None
    seconds: Seconds = None
    frames_per_second: Speed = None

    def _text(self, name: str) -> str:
        rate = math.nan if self.learning_rate is None else self.learning_rate
        own, precision = self.schedule_learning_rate, "  bf16" * (self.precision == "bf16")
        scaled = f" ({rate / own:.6g} x {own:.6g})" if own and own != rate else ""
        # At the initial network's cross-validation none has been applied.
        applied = "" if (self.epoch, name) == (0, "cv") else f"learning rate {rate:.6g}{scaled}  "
        return f"epoch {self.epoch:2d} {name:<6} {describe(self.figures, '  ')}  {applied}{self.seconds or 0.0:.1f} s  {self.frames_per_second or 0.0:.0f} frames/s{precision}"


class StartRow(MetricsRow):
    """What a start of the training found: one row for each start, so that a reader can tell which runs compare."""

    KEY = None
    type: Literal["start"] = "start"
    epoch: Count  # finished epochs
    date: Name  # local time, ISO 8601
    command: Name  # as it was given, quoted for a shell
    version: Name  # of ddnn and torch
    host: Name  # of rank 0, as `machine`
    machine: Name  # the kinds of processor of all hosts, or of GPU where one is used
    precision: Precision
    world_size: Count
    cpu_threads: Count = 1  # of a worker
    cores_per_worker: Number = None  # on the host with the fewest; with GPUs: GPUs
    learning_rate_scale: Number  # what the schedule's learning rates are multiplied by
    train_frames: Count
    cv_frames: Count
    train_digest: Name  # of the utterances to train on and their lengths
    cv_digest: Name  # of those for cross-validation
    # What models that ignore their input reach in cross-validation: `ddnn.training.evaluation.baseline_result`.
    baseline: Figures = {}

    FIGURES = {"baseline": "baseline_"}

    def as_text(self) -> str:
        known = {name: value for name, value in self.baseline.items() if value is not None}
        texts = [f"CV {FIGURES[name].text(value)} ({BASELINES[name][0]})" for name, value in known.items()]
        return f"baselines: {', '.join(texts)}" if texts else ""


MUCH_HIGHER = 1.02
"""A final model is warned of whose cross-validation loss is so many times that of an earlier epoch."""


BASELINES = {
    LOSS.name: ("pdf priors", "by the relative frequencies of the pdfs alone"),
    FRAME_ACCURACY.name: ("most frequent pdf", "by always choosing the most frequent pdf"),
}
"""What reaches a figure without looking at the input, in short and in a sentence."""


def no_better_than_baseline(
    figures: Mapping[str, float | None], baseline: Mapping[str, float | None], where: str = "in cross-validation "
) -> str:
    """Which figure of a model is no better than that of one that ignores its input; empty where all are better, or not
    known."""
    problems = []
    for name, reached in baseline.items():
        value, figure = figures.get(name), FIGURES[name]
        if value is not None and reached is not None and figure.is_no_better(value, reached):
            problems.append(f"{where}{figure.text(value)}, {figure.format(reached)} {BASELINES[name][1]}")
    return f"the network is no better than one that ignores its input: {'; '.join(problems)}" if problems else ""


class EpochRow(_Figures):
    """The result of an epoch over all workers. Epoch 0 is the network before training."""

    KEY = ("split", "epoch")
    type: Literal["epoch"] = "epoch"
    split: Literal["train", "cv"]
    accepted: bool = True  # False if the schedule rejected the epoch and returned to the best parameters

    def as_text(self) -> str:
        rejected = self.split == "cv" and not self.accepted
        return self._text(self.split) + "  rejected: back to the last accepted epoch" * rejected


def format_figures(row: EpochRow | None, model: str = "") -> str:
    """Epoch, or the `model` that it is, and figures of a cross-validation row, in a few words; empty for None."""
    if row is None:
        return ""
    known = {name: value for name, value in row.figures.items() if value is not None}
    figures = describe(known) if row.loss is not None else ", ".join(filter(None, ["loss not finite", describe(known)]))
    remark = ", rejected" if not row.accepted else ", before training" if row.epoch == 0 else ""
    return f"{model or f'epoch {row.epoch}'}: cross-validation {figures}{remark}"


class WarmupRow(_Figures):
    """The minibatches before the first epoch (`parallel.warmup`)."""

    type: Literal["warmup"] = "warmup"

    def as_text(self) -> str:
        return self._text("warmup")


class WorkerRow(MetricsRow):
    """Where the time of one worker went in one epoch: fractions are of `seconds`, those of its training thread."""

    KEY = ("epoch", "rank")
    type: Literal["worker"] = "worker"
    epoch: Count
    rank: Count
    host: Name = ""
    device: Name = ""
    frames: Count
    minibatches: Count
    seconds: Seconds
    frames_per_second: Speed = None
    compute_fraction: Fraction = None  # on CUDA with what the host waits for at the end of an interval
    compute_cpu_seconds: Seconds = None  # CPU time of the process in it; None of an epoch resumed within
    data_fraction: Fraction = None  # on CUDA only what the host itself does
    comm_fraction: Fraction = None  # what averaging takes from the training thread, without `wait_fraction`
    wait_fraction: Fraction = None  # for the slowest worker before an averaging; with overlap part of `comm_fraction`
    averagings: Count = 0
    excluded_averagings: Count = 0  # with the epoch's last mean: without this worker's model, as it was not finite
    consensus_distance: Distance = None  # mean relative distance of this model from the mean before an averaging
    bytes_sent: Count | None = None
    comm_seconds: Seconds = None  # spent moving parameters, with overlap in the background
    num_parameters: Count | None = None
    interval_seconds: Seconds = None  # of the minibatches between two averagings, mean and standard deviation
    interval_seconds_std: Seconds = None

    def as_text(self) -> str:
        if not self.excluded_averagings:
            return ""
        return (
            f"epoch {self.epoch:2d} worker {self.rank} on {printable(self.host, '')} was excluded from "
            f"{plural(self.excluded_averagings, 'averaging')}: its model was not finite"
        )


class EventRow(MetricsRow):
    """The training was resumed from a checkpoint by its user, or restarted by the launcher after a worker had died."""

    KEY = None
    type: Literal["event"] = "event"
    event: Literal["resumed", "restarted"]
    epoch: Count  # finished epochs at the checkpoint, 0 without one
    minibatch: Count = 0  # finished minibatches of rank 0 in the next one
    world_size: Count  # number of workers now
    number: Count = 0  # of a restart, from 1
    reason: Name = ""  # of a restart: why the job had ended
    died_epoch: Count | None = None  # of a restart: how far the job had come; None where that is not known
    died_minibatch: Count | None = None

    def as_text(self) -> str:
        if self.event == "resumed":
            return f"resumed after {_place(self.epoch, self.minibatch)} with {plural(self.world_size, 'worker')}"
        text = f"restart {self.number} after {_place(self.epoch, self.minibatch)}: {printable(self.reason, '')}"
        if self.died_epoch is None:
            return text
        return f"{text}; the job had been after {_place(self.died_epoch, self.died_minibatch or 0)}"


EndReason = Literal["converged", "epochs-exhausted", "stopped", "diverged", "failed"]


class EndRow(_Result):
    """Why a start of the training ended, and its model: the final one, or after the last three reasons what was kept so
    far. A worker that is killed leaves none."""

    KEY = None
    type: Literal["end"] = "end"
    reason: EndReason
    detail: Name  # the reason in words
    epoch: Count  # finished epochs
    kept_epoch: Count  # the last that was accepted, 0 if none
    combination: Name = ""  # what mean it is, in words; empty: it is that of `kept_epoch`, whose own figures are `kept`
    kept: Figures = {}
    precision: Precision | None = None  # of the figures, which are of cross-validation

    FIGURES = {"figures": "", "kept": "kept_"}

    def as_text(self) -> str:
        """Empty: the last line of the log says it, once the model is written."""
        return ""

    @property
    def why(self) -> str:
        return self.detail if self.reason == "epochs-exhausted" else f"{self.reason}: {self.detail}"

    @property
    def summary(self) -> str:
        """Which model it is, its figures in cross-validation, and why training ended."""
        loss, *others = describe(self.figures, separator="\n").split("\n")
        figures = ", ".join([f"CV {loss}{' (bf16)' * (self.precision == 'bf16')}", *others])
        kept = next(iter(self.kept.values()), None)
        alone = f"; epoch {self.kept_epoch} alone {math.nan if kept is None else kept:.4f}" if self.combination else ""
        return f"{self.combination or f'epoch {self.kept_epoch}'}, {figures}{alone} ({self.why})"


def _place(epoch: int, minibatch: int) -> str:
    return f"epoch {epoch}" + (f" and {minibatch} minibatches" if minibatch else "")


class PretrainRow(MetricsRow):
    """One epoch over one RBM, all workers together; RBMs and epochs count from 1."""

    KEY = ("rbm", "epoch")
    type: Literal["pretrain"] = "pretrain"
    rbm: Count
    epoch: Count
    num_epochs: Count | None = None  # of this RBM
    reconstruction_error: Number = None
    mean_reconstruction_error: Number  # over the RBM's epochs so far
    data_mean_error: Number = None  # of a reconstruction by the mean of the data, which ignores the frame
    frames: Count | None = None
    seconds: Seconds = None
    frames_per_second: Speed = None
    guard_count: Count = 0  # how often the guard against exploding weights acted
    seconds_left: Seconds = None  # for the other epochs of this RBM, if they take as long

    def as_text(self) -> str:
        errors = (self.reconstruction_error, self.mean_reconstruction_error)
        error, mean = (math.nan if x is None else x for x in errors)
        epoch = f"{self.epoch:2d}" + ("" if self.num_epochs is None else f" of {self.num_epochs}")
        baseline = "" if self.data_mean_error is None else f"; data mean {self.data_mean_error:.6g}"
        return (
            f"rbm {self.rbm} epoch {epoch} reconstruction error {error:.6g}  (mean over epochs {mean:.6g}{baseline})  "
            f"{self.seconds or 0.0:.1f} s  {self.frames_per_second or 0.0:.0f} frames/s"
            + (f"  {duration(self.seconds_left)} left" if self.seconds_left else "")
        )


def throughput(frames: int, seconds: float) -> dict[str, Any]:
    """The fields `frames`, `seconds` and `frames_per_second` of a row."""
    return {"frames": frames, "seconds": seconds, "frames_per_second": frames / max(seconds, 1e-9)}


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


ROWS: dict[str, type[MetricsRow]] = {
    kind.model_fields["type"].default: kind
    for kind in (StartRow, EpochRow, WarmupRow, WorkerRow, EventRow, EndRow, PretrainRow)
}
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
    """The rows in the order of the file, of which a training may just write the last; none of a missing file. Lines
    that are no rows are passed over."""
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
    """None for a row of an unknown type; ValueError for what is none."""
    try:
        values = json.loads(line, parse_constant=_refuse_constant, parse_float=_parse_float)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON ({error})"[:200]) from error
    if not isinstance(values, dict):
        raise ValueError("no JSON object")
    if not isinstance(values.get("type"), str):
        raise ValueError("it has no `type` (run dirs of ddnn 0.1 are not read)")
    if values["type"] not in ROWS:
        return None
    try:
        return ROWS[values["type"]].model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        key = str(detail["loc"][0])
        value = "missing" if detail["type"] == "missing" else f"{repr(values.get(key))[:60]} found"
        raise ValueError(f"{key}: {value}, {detail['msg']}") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON; null represents values that are not finite")


def _parse_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


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
