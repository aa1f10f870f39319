"""The run dir: everything a training leaves behind.

recipe.yaml              the recipe as it was run, includes and --set resolved
train.log                what the training said
pretrain/                the stack of RBMs, where the training made one
metrics.jsonl            one JSON object a line: per epoch and split
best.safetensors         the best network so far, while training runs
final.safetensors        the trained model
ali_train_pdf.counts     frames per pdf of the training alignment: the priors
job.sh, .json, .out      where it was submitted to Slurm: the script, the job's number, what it printed
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ddnn.errors import DataError, UserError
from ddnn.files import make_directory, write_text
from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.model.acoustic import AcousticModel, load_model, save_model
from ddnn.train.job_files import is_job_file

COUNTS = "ali_train_pdf.counts"
FINAL = "final.safetensors"
RECIPE = "recipe.yaml"
LOG = "train.log"
METRICS = "metrics.jsonl"
PRETRAIN = "pretrain"
BEST = "best.safetensors"


class _RunLog(logging.FileHandler):
    """The log as a file. Where it cannot be written, that is said once: no reason to end a training of days."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Called where a line could not be written; logging's own prints a traceback for each."""
        if not self.failed:
            self.failed = True
            print(f"ddnn: lines of {self.baseFilename} are lost: {sys.exc_info()[1]}", file=sys.stderr)

    def close(self) -> None:
        """Closes the file; what finds no space is lost."""
        with suppress(OSError):
            super().close()


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Appends one JSON object as a line, whole or not at all; null stands for what is not finite.

    Raises:
        UserError: the file cannot be written (no permission, disk full).
    """
    finite = {k: None if isinstance(v, float) and not np.isfinite(v) else v for k, v in metrics.items()}
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(finite, allow_nan=False) + "\n")
    except OSError as error:
        with suppress(OSError):
            os.truncate(path, before)
        raise UserError(
            f"cannot write {path.name}: {error.strerror}",
            where=path.parent,
            mend="check that there is space, quota and permission to write, then run again",
        ) from error


def _lock(stream: TextIO) -> None:
    """Takes the lock or raises BlockingIOError; a second try, since `ddnn status` holds it while it looks."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.2)
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


class RunDir:
    """A new run dir, made by the training that owns it."""

    def __init__(self, path: Path) -> None:
        """Makes the directory, or takes one over in which no training has begun: its recipe or data were refused.

        Raises:
            UserError: it exists already with something in it, or cannot be made.
        """
        if path.exists() and not path.is_dir():
            raise UserError("the run dir is a file", where=path, mend="name a directory that does not exist yet")
        found = {p.name for p in path.iterdir() if not is_job_file(p.name)} if path.exists() else set()
        if found - {RECIPE, LOG, PRETRAIN, COUNTS}:
            raise UserError(
                "the run dir exists already and is not empty",
                where=path,
                mend="name another directory, or remove this one if it is not needed",
            )
        make_directory(path)
        self.path = path

    def open_log(self) -> logging.Handler:
        """`train.log`, begun anew and locked; the caller closes it.

        Raises:
            UserError: it cannot be written, or another training holds the lock. A dead process holds none.
        """
        try:
            handler = _RunLog(self.path / LOG, mode="a", encoding="utf-8", errors="backslashreplace")
            stream = handler.stream or handler._open()
            _lock(stream)
            with suppress(OSError):  # what is no regular file cannot be begun anew
                stream.truncate(0)
        except BlockingIOError as error:
            raise UserError("another training is running in this run dir", where=self.path) from error
        except OSError as error:
            raise UserError(f"cannot write {LOG}: {error.strerror}", where=self.path) from error
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        return handler

    def write_recipe(self, text: str) -> None:
        """The resolved recipe."""
        write_text(self.path / RECIPE, text)

    def record(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        append_metrics(self.path / METRICS, metrics)

    def save_best(self, model: AcousticModel) -> None:
        """Keeps the best network so far, so that a crash loses one epoch at most."""
        save_model(self.path / BEST, model)

    def write_counts(self, pdf_counts: np.ndarray) -> None:
        """The priors, (pdfs,) frames of each."""
        write_pdf_counts(self.path / COUNTS, pdf_counts)

    def finish(self, model: AcousticModel) -> None:
        """Writes the trained model; the last thing that a training does."""
        save_model(self.path / FINAL, model)
        (self.path / BEST).unlink(missing_ok=True)


class NoRunDir(RunDir):
    """What the workers other than the first leave behind: nothing."""

    def __init__(self, path: Path) -> None:
        """`path` is that of the first worker's run dir."""
        self.path = path

    def open_log(self) -> logging.Handler:
        return logging.NullHandler()

    def write_recipe(self, text: str) -> None: ...

    def record(self, metrics: dict[str, Any]) -> None: ...

    def save_best(self, model: AcousticModel) -> None: ...

    def write_counts(self, pdf_counts: np.ndarray) -> None: ...

    def finish(self, model: AcousticModel) -> None: ...


def load_run(path: Path) -> AcousticModel:
    """The final model of a run dir.

    Raises:
        DataError: no run dir, no final model in it yet, or a damaged one.
    """
    if not path.is_dir():
        raise DataError("there is no such run dir", where=path, mend="name the --run-dir of a finished training")
    if not (path / FINAL).exists() and (path / RECIPE).exists():
        raise DataError(
            "this training has not finished: there is no final.safetensors",
            where=path,
            mend="let it finish first; its best network so far is in best.safetensors",
        )
    return load_model(path / FINAL)
