"""What one run came to: a JSON file of a few kilobytes that outlives the run dir, and from which tables are made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ddnn.errors import DataError
from ddnn.files import make_directory, read_regular, write_text

MOST_BYTES = 16 << 20
"""Of a record: the errors of half a million utterances."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
Percent = Annotated[float, Field(ge=0.0, le=1e6, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0.0, le=1e15, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=1e-9, le=1e18, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=2**53)]


class Part(BaseModel):
    """A part of a record: immutable, no keys but its own."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class FrameFigures(Part):
    """Loss per frame (nats) and frame accuracy (0 to 1) on some frames."""

    loss: Finite
    frame_accuracy: Annotated[float, Field(ge=0.0, le=1.0)]


class WordErrors(Part):
    """Word errors with one decoding graph, at the acoustic scale that was best for this run.

    Attributes:
        wer: percent of the words.
        acoustic_scale: the best one; None where another scorer chose.
        words, errors: of each utterance, in the order of the test set; empty where another scorer counted.
    """

    wer: Percent
    acoustic_scale: Finite | None = None
    words: tuple[Count, ...] = ()
    errors: tuple[Count, ...] = ()


class Time(Part):
    """Where the time of a training went, summed over its epochs.

    Attributes:
        seconds: on the clock, without cross-validation.
        compute_seconds: of computing (and data), mean over the workers.
        exchange_seconds: of moving parameters, mean over the workers.
        waiting_seconds: of waiting for other workers, mean over the workers.
        averagings: of the training.
        bytes_sent: by one worker in the training, mean over the workers.
        cores: of the machine, which the workers shared; 0: not known.
    """

    seconds: Amount
    compute_seconds: Amount | None = None
    exchange_seconds: Amount | None = None
    waiting_seconds: Amount | None = None
    averagings: Count = 0
    bytes_sent: Amount | None = None
    cores: Count = 0


class MeasuredEpoch(Part):
    """A mean epoch, as the scaling model starts from: attributes of ddnn.report.measured.Measurement and its job."""

    strategy: str
    wire: str
    overlap: bool
    parameters: Annotated[int, Field(ge=1, le=2**53)]
    operations: Positive
    minibatch: Annotated[int, Field(ge=1)]
    every: Annotated[int, Field(ge=1)]
    frames: Positive
    seconds: Positive
    exchange: Amount
    averagings: Amount
    compute: Amount | None
    rest: Amount | None
    block_std: Amount | None
    final_mean: bool


class Record(Part):
    """One finished run of a setting.

    Attributes:
        setting, workers, seed: which run.
        recipe: SHA-256 of what its recipe says, resolved, but for where things lie. Another recipe: another run.
        judged: SHA-256 of what the model was tested on; other tests: it is judged again.
        failed: why the training ended without a model (it diverged); the figures are then None or empty.
        epochs: that were trained.
        cv: the final model on the cross-validation set.
        cv_by_epoch: the same after each epoch, from 1 on; None where it was not finite.
        tests: name of a test set -> the final model on it; none where it has no alignments.
        wers: name of a test set (or "NAME GRAPH" of several graphs) -> word errors.
        time: of the training.
        measured: of its epochs, for the scaling model.
        machine, date, version: the processor or GPU; the day it was recorded; ddnn's and torch's.
        command: that trains it.
        stack: the RBMs that it was trained from, by the first 12 digits of the SHA-256 of their file; "": it starts
            from random parameters, or nobody knows.
    """

    setting: str
    workers: Annotated[int, Field(ge=1)]
    seed: Count
    recipe: str
    judged: str = ""
    failed: str | None = None
    epochs: Count = 0
    cv: FrameFigures | None = None
    cv_by_epoch: tuple[FrameFigures | None, ...] = ()
    tests: dict[str, FrameFigures] = {}
    wers: dict[str, WordErrors] = {}
    time: Time | None = None
    measured: MeasuredEpoch | None = None
    machine: str = ""
    date: str = ""
    version: str = ""
    command: str = ""
    stack: str = ""

    @property
    def name(self) -> str:
        """Of its run dir and file: setting, workers and seed."""
        return f"{self.setting}-{self.workers}-{self.seed}"


def write_record(folder: Path, record: Record) -> Path:
    """Writes one record as NAME.json, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    path = folder / f"{record.name}.json"
    make_directory(folder)
    write_text(path, json.dumps(record.model_dump(mode="json"), separators=(",", ":")) + "\n")
    return path


def read_record(path: Path) -> Record:
    """One record.

    Raises:
        DataError: it cannot be read or is none.
    """
    if re.fullmatch(r".+-\d+-\d+", path.stem):
        mend = "delete it: its run is then judged again, or trained again where its run dir is gone"
    else:
        mend = "move it elsewhere: records are called SETTING-WORKERS-SEED.json, and their folder holds no other .json"
    try:
        return Record.model_validate_json(read_regular(path, MOST_BYTES))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", where=path, mend=mend) from error
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, detail["loc"])) or "the file"
        raise DataError(f"no record of a run: {place}: {detail['msg']}", where=path, mend=mend) from error


def read_records(folder: Path) -> dict[str, Record]:
    """Name -> record, of all in a folder; none where there is no folder.

    Raises:
        DataError: one of them is damaged.
    """
    found = {}
    for path in sorted(folder.glob("*.json")):
        record = read_record(path)
        if record.name != path.stem:
            raise DataError(
                f"the record of {record.name}", where=path, mend="a record is called after its run: move it"
            )
        found[record.name] = record
    return found
