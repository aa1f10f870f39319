"""The result of one run: a JSON file of a few kilobytes that outlives the run dir, and from which tables are made."""

from __future__ import annotations

import json
import re
from dataclasses import astuple
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from ddnn.recipe.source import first_error
from ddnn.report.scaling import Job, Measurement, Way
from ddnn.reproduce.tables import FrozenModel
from ddnn.util.errors import DataError
from ddnn.util.files import ensure_directory, read_bytes_limited, write_text

MAX_BYTES = 16 << 20  # of a record: the errors of half a million utterances

Finite = Annotated[float, Field(allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0.0, le=1e15, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=1e-9, le=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]
PositiveCount = Annotated[int, Field(ge=1, le=2**53)]


class FrameMetrics(FrozenModel):
    """Loss per frame (nats) and frame accuracy (0 to 1) on some frames."""

    loss: Finite
    frame_accuracy: Annotated[float, Field(ge=0.0, le=1.0)]


class WordErrors(FrozenModel):
    """Word errors with one decoding graph, at the acoustic scale that was best for this run. `words`, `errors` and
    `speakers` are of each utterance, in the order of the test set; empty where another scorer counted. `speakers` has
    numbers; empty where they are unknown: each utterance then counts as a speaker."""

    wer: Percent  # of the words
    acoustic_scale: Finite | None = None  # the best one; None where another scorer chose
    words: tuple[Count, ...] = ()  # of the reference
    errors: tuple[Count, ...] = ()
    speakers: tuple[Count, ...] = ()


class TimeBreakdown(FrozenModel):
    """Where the time of a training went, summed over its epochs; times of workers are means over the workers."""

    seconds: Amount  # wall-clock time without cross-validation
    compute_seconds: Amount | None = None  # computing, and waiting for data
    comm_seconds: Amount | None = None  # moving parameters
    wait_seconds: Amount | None = None  # waiting for other workers
    averagings: Count = 0
    bytes_sent: Amount | None = None  # by one worker in the whole training
    cores: Count = 0  # of the machine, which the workers shared; 0: unknown


class MeasuredEpoch(FrozenModel):
    """A mean epoch, as the scaling model starts from: the fields of Way, of Job and of Measurement, in their order."""

    strategy: str
    comm_dtype: str
    overlap: bool
    num_parameters: PositiveCount
    flop_per_frame: Positive
    minibatch_size: PositiveCount
    averaging_period: PositiveCount
    frames: Positive
    seconds: Positive
    comm_seconds: Amount
    averagings: Amount
    compute_seconds: Amount | None
    other_seconds: Amount | None
    interval_seconds_std: Amount | None
    final_mean: bool

    @classmethod
    def of(cls, epoch: Measurement) -> MeasuredEpoch:
        _, _, way, job, *rest = astuple(epoch)
        return cls(**dict(zip(cls.model_fields, (*way, *job, *rest), strict=True)))

    def to_measurement(self, workers: int) -> Measurement:
        fields: list[Any] = list(dict(self).values())
        return Measurement("record", workers, Way(*fields[:3]), Job(*fields[3:8]), *fields[8:])


class RunRecord(FrozenModel):
    """One finished run of a condition."""

    condition: str
    workers: PositiveCount
    seed: Count
    recipe: str  # SHA-256 of what its recipe says, resolved, without paths; another recipe: another run
    test_digest: str = ""  # SHA-256 of what the model was tested on; other tests: it is evaluated again
    failed: str | None = None  # why there is no model (the training diverged); the results are then None or empty
    epochs: Count = 0
    cv: FrameMetrics | None = None  # the final model on the cross-validation set
    cv_by_epoch: tuple[FrameMetrics | None, ...] = ()  # the same after each epoch, from 1 on; None: not finite
    tests: dict[str, FrameMetrics] = Field(default={})  # test set -> the final model on it, where it has alignments
    wers: dict[str, WordErrors] = Field(default={})  # test set, or "NAME GRAPH" of several graphs -> word errors
    time: TimeBreakdown | None = None
    measured: MeasuredEpoch | None = None
    machine: str = ""  # the processor or GPU that trained it
    date: str = ""  # when it was recorded
    version: str = ""  # of ddnn and torch
    command: str = ""  # that trains it
    dbn: str = ""  # the first 12 digits of the SHA-256 of the RBMs that it was trained from; "": none, or unknown

    @property
    def name(self) -> str:
        return f"{self.condition}-{self.workers}-{self.seed}"


def write_record(folder: Path, record: RunRecord) -> Path:
    """Writes one record as NAME.json, whole or not at all; UserError where that is not possible."""
    path = folder / f"{record.name}.json"
    ensure_directory(folder)
    write_text(path, json.dumps(record.model_dump(mode="json"), separators=(",", ":")) + "\n")
    return path


def read_record(path: Path) -> RunRecord:
    """One record; DataError where it cannot be read, or is none."""
    if re.fullmatch(r".+-\d+-\d+", path.stem):
        hint = "delete it: its run is then evaluated again, or trained again if its run dir is gone"
    else:
        hint = "move it elsewhere: records are called CONDITION-WORKERS-SEED.json, without any other .json beside them"
    try:
        return RunRecord.model_validate_json(read_bytes_limited(path, MAX_BYTES), strict=True)
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path, hint=hint) from error
    except ValidationError as error:
        raise DataError(f"not the record of a run: {first_error(error)}", location=path, hint=hint) from error


def read_records(folder: Path) -> dict[str, RunRecord]:
    """Name -> record, of all in a folder, or of none where there is no folder; DataError where one is damaged."""
    records = {}
    for path in sorted(folder.glob("*.json")):
        record = records[path.stem] = read_record(path)
        if record.name != path.stem:
            raise DataError(f"the record of {record.name}", location=path, hint="a record has the name of its run")
    return records
