"""The rows of metrics.jsonl, declared here once for the trainer that writes them and all who read them. `type` names the
kind of row: `start` (one for each start of the training), `epoch` (all workers together, `split` train or cv), `worker`
(one worker in one epoch), `warmup`, `event` (a resume or restart), `end` (why a start of the training ended, and with which
model) and, in a pretraining dir, `pretrain`. Their lines of the log are in `templates/row.txt.j2`. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)

from ddnn.nn.figures import FIGURES, FRAME_ACCURACY, LOSS, check_known, describe, texts
from ddnn.util.text import environment, printable

if TYPE_CHECKING:
    import jinja2


@cache
def _template() -> jinja2.Template:
    return environment().get_template("row.txt.j2")


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
        """The row as a line of the log; empty if there is nothing to say."""
        return self._line(short=False)

    def _line(self, **values: Any) -> str:
        return _template().render(row=self, describe=describe, printable=printable, **values).strip("\n")


class _Result(MetricsRow):
    """Figures of a model. `loss`: the first, which training minimizes."""

    FIGURES = {"figures": ""}

    figures: Annotated[Figures, Field(min_length=1)]

    @property
    def loss(self) -> float | None:
        return next(iter(self.figures.values()), None)


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

    @property
    def is_initial(self) -> bool:
        """Whether no learning rate has been applied yet: the cross-validation of the initial network."""
        return False

    def as_short_text(self, last_rate: float | None) -> str:
        """A line of the log for a terminal of 80 columns; without the learning rate if it is still `last_rate`."""
        return self._line(short=True, last_rate=last_rate)


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

    @property
    def baseline_texts(self) -> list[str]:
        known = {name: value for name, value in self.baseline.items() if value is not None}
        return [f"CV {FIGURES[name].text(value)} ({BASELINES[name][0]})" for name, value in known.items()]


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

    @property
    def is_initial(self) -> bool:
        return (self.epoch, self.split) == (0, "cv")


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
    staleness: Distance = None  # of async: mean number of other workers' changes between fetch and push
    bytes_sent: Count | None = None
    comm_seconds: Seconds = None  # spent moving parameters, with overlap in the background
    num_parameters: Count | None = None
    columns: Count = 1  # workers that share its model, and these frames
    column_seconds: Seconds = None  # in messages to them, part of `compute_fraction`; None where there are none
    column_bytes: Count | None = None  # sent in these
    stages: Count = 1  # of the pipeline that its model is
    microbatches: Count = 1  # of a minibatch there
    pipe_seconds: Seconds = None  # in messages to other stages, mostly waiting; part of `compute_fraction`
    pipe_bytes: Count | None = None  # sent in these
    bubble_share: Fraction = None  # `pipe_seconds` of `seconds`
    interval_seconds: Seconds = None  # of the minibatches between two averagings, mean and standard deviation
    interval_seconds_std: Seconds = None

    @property
    def column_fraction(self) -> float | None:
        """Of its time, in messages within its model."""
        return self.column_seconds and self.seconds and self.column_seconds / self.seconds

    def as_text(self) -> str:
        return super().as_text() if self.excluded_averagings else ""


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


EndReason = Literal["converged", "epochs-exhausted", "stopped", "diverged", "failed"]


class EndRow(_Result):
    """Why this run of the training ended, and which model it left: the final one, or, for the last three reasons, the best
    so far. A worker that is killed leaves no such row."""

    KEY = None
    type: Literal["end"] = "end"
    reason: EndReason
    detail: Name  # the reason in words
    figures: Figures  # empty without validation
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
    def reason_text(self) -> str:
        return self.detail if self.reason == "epochs-exhausted" else f"{self.reason}: {self.detail}"

    @property
    def summary(self) -> str:
        """Which model it is, its figures in cross-validation, and why training ended."""
        parts = [self.combination or f"epoch {self.kept_epoch}", *texts(self.figures)]
        if self.figures:
            parts[1] = f"CV {parts[1]}{' (bf16)' if self.precision == 'bf16' else ''}"
        kept = next(iter(self.kept.values()), None)
        alone = f"; epoch {self.kept_epoch} alone {math.nan if kept is None else kept:.4f}" if self.combination else ""
        return f"{', '.join(parts)}{alone} ({self.reason_text})"


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


def throughput(frames: int, seconds: float) -> dict[str, Any]:
    """The fields `frames`, `seconds` and `frames_per_second` of a row."""
    return {"frames": frames, "seconds": seconds, "frames_per_second": frames / max(seconds, 1e-9)}


ROW: TypeAdapter[MetricsRow] = TypeAdapter(
    Annotated[
        StartRow | EpochRow | WarmupRow | WorkerRow | EventRow | EndRow | PretrainRow, Field(discriminator="type")
    ]
)
"""Reads a row of any type."""
