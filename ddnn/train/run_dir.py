"""The run dir: everything a training leaves behind.

recipe.yaml              the recipe as it was run, includes and --set resolved
train.log                what the training said; its lock keeps a second training out
pretrain/                the stack of RBMs, where the training made one
metrics.jsonl            one JSON object a line: per epoch and split
best.safetensors         the best network so far, while training runs
checkpoints/             what --resume goes on from; gone once the training has finished
final.safetensors        the trained model
ali_train_pdf.counts     frames per pdf of the training alignment: the priors
job.sh, .json, .out      where it was submitted to Slurm: the script, the job's number, what it printed

The run dir itself may be a symbolic link; a link in place of one of these is refused, since a run dir may come from a
stranger and must not lead a training to write elsewhere.
"""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddnn.errors import DataError, UserError
from ddnn.files import make_directory, write_text
from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.model.acoustic import AcousticModel, load_model, save_model
from ddnn.train.checkpoint_files import folder_number, names_in, opened_folder, remove_folder
from ddnn.train.kept import Kept
from ddnn.train.run_dir_files import BEST, CHECKPOINTS, COUNTS, FINAL, LOG, METRICS, PRETRAIN, RECIPE, is_job_file
from ddnn.train.run_files import MetricsFile, flush_directory, refuse_what_is_not
from ddnn.train.run_log import RunLog, training_holds

log = logging.getLogger(__name__)


FILES = (RECIPE, LOG, METRICS, BEST, FINAL, COUNTS)
_BEFORE_TRAINING = {RECIPE, LOG, PRETRAIN, COUNTS}
_TEMPORARY = re.compile(rf"\.(?:{'|'.join(map(re.escape, (RECIPE, BEST, FINAL, COUNTS)))})\.tmp\d+")
_LOCK_SECONDS = 0.2
_TAKE_OVER_SECONDS = 30.0


class RunDir:
    """The run dir of a training that owns it: a new one, or one to go on in."""

    def __init__(self, path: Path, resume: bool = False) -> None:
        """Makes the directory, or takes one over in which no training has begun: its recipe or data were refused.

        Args:
            path: the run dir.
            resume: take over one in which a training has begun, too; everything in it is kept.

        Raises:
            UserError: it holds something else, or a link in place of a file of ours, or cannot be made.
        """
        self.path, self.resume = path, resume
        self._metrics = MetricsFile(path / METRICS)
        self._recipe: str | None = None
        self._counts: NDArray[Any] | None = None
        self._of_dead_owner: Kept | None = None
        self._best_failed = False
        if not resume and training_holds(path / LOG) is True:
            raise UserError("another training is running in this run dir", where=path, mend="wait for it, or end it")
        self._check()
        make_directory(path)

    def _check(self) -> None:
        path = self.path
        if path.exists() and not path.is_dir():
            raise UserError("the run dir is a file", where=path, mend="name a directory that does not exist yet")
        try:
            found = {p.name for p in path.iterdir() if not is_job_file(p.name)} if path.exists() else set()
            found -= {name for name in found if _TEMPORARY.fullmatch(name)}
            for name in found & {*FILES, PRETRAIN, CHECKPOINTS}:
                refuse_what_is_not(path / name, "file" if name in FILES else "directory")
            if CHECKPOINTS in found and not any((path / CHECKPOINTS).iterdir()):
                found.remove(CHECKPOINTS)
        except OSError as error:
            raise UserError(f"cannot look into the run dir: {error.strerror}", where=path) from error
        if not found - _BEFORE_TRAINING:
            return
        of_a_training = {RECIPE, LOG} <= found
        if not self.resume:
            raise UserError(
                "the run dir exists already and is not empty",
                where=path,
                mend=("go on with it by --resume; else " if of_a_training else "")
                + "name another directory, or remove this one if it is not needed",
            )
        if not of_a_training:
            raise UserError(
                f"the directory is not empty, and no run dir of a training: there is no {RECIPE} with a {LOG}",
                where=path,
                mend="name the --run-dir of the training to go on with",
            )

    @property
    def finished(self) -> bool:
        """Whether the trained model is there."""
        return (self.path / FINAL).exists()

    def open_log(self) -> logging.Handler:
        """`train.log`, locked, and begun anew unless this is a resumption; the caller closes it.

        Raises:
            UserError: it cannot be written, or another training holds the lock. A dead process holds none.
        """
        try:
            handler = RunLog(self.path / LOG)
        except OSError as error:
            raise UserError(f"cannot write {LOG}: {error.strerror}", where=self.path) from error
        try:
            self._take_lock(handler)
            self._check()  # what another training did until it let go of the lock
            handler.begin(anew=not self.resume)
            if self._of_dead_owner is not None:
                self._write_missing(self._of_dead_owner)
        except UserError:
            handler.close()
            raise
        for name in [p.name for p in self.path.iterdir() if _TEMPORARY.fullmatch(p.name)]:
            with suppress(OSError):  # left by a training that was killed as it wrote
                (self.path / name).unlink()
        return handler

    def _write_missing(self, kept: Kept) -> None:
        """What the dead owner of the run dir did not write any more."""
        self._recipe, self._counts = kept.recipe, kept.counts
        if kept.recipe is not None:
            self.write_recipe(kept.recipe)
        if kept.counts is not None:
            self.write_counts(kept.counts)
        self._metrics.cut()  # a line that was torn
        for row in kept.rows_not_in(self.path / METRICS):
            self.record(row)

    def _take_lock(self, handler: RunLog) -> None:
        try:
            handler.claim(_LOCK_SECONDS if self._of_dead_owner is None else _TAKE_OVER_SECONDS)
        except BlockingIOError as error:
            if self._of_dead_owner is not None:  # the workers agree that it is dead: its machine may hold the lock on
                log.warning("the lock of %s is not free; going on without it", self.path / LOG)
                return
            raise UserError(
                "another training is running in this run dir",
                where=self.path,
                mend="wait for it or end it. If its machine is gone and the file system keeps the lock: "
                f"cp -p {LOG} t && mv t {LOG}",
            ) from error
        except OSError as error:
            raise UserError(f"cannot lock {LOG}: {error.strerror}", where=self.path) from error

    def write_recipe(self, text: str) -> None:
        """The resolved recipe. What is there already is not written again, as a disk may be full by now."""
        if text != self._recipe or not (self.path / RECIPE).exists():
            write_text(self.path / RECIPE, text)
            self._recipe = text

    def record(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl; where the disk is full, as soon as there is space."""
        self._metrics.append(metrics)

    def record_once(self, metrics: dict[str, Any]) -> None:
        """Appends the line unless metrics.jsonl has one of its epoch, split and rank."""
        kept = Kept()
        kept.add(metrics)
        if kept.rows_not_in(self.path / METRICS, self._metrics.waiting()):
            self.record(metrics)

    def settle(self) -> None:
        """Before a checkpoint: rows that wait for space are tried again, and all are on the disk, if that can be."""
        with suppress(UserError):  # that it cannot be was said
            self._metrics.flush()

    def forget_epochs_after(self, epoch: int) -> None:
        """Takes the rows of later epochs out of metrics.jsonl: they are trained again.

        Raises:
            UserError: it cannot be written.
        """
        self._metrics.cut_after_epoch(epoch)

    def save_best(self, model: AcousticModel) -> None:
        """Keeps the best network so far, so that a crash loses one epoch at most. A full disk is only warned about.

        Raises:
            UserError: the network has values that are not finite.
        """
        try:
            save_model(self.path / BEST, model)
            self._best_failed = False
        except UserError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            if not self._best_failed:
                log.warning("%s in %s: training goes on, and tries again", error.what, self.path)
            self._best_failed = True

    def write_counts(self, pdf_counts: NDArray[Any]) -> None:
        """The priors, (pdfs,) frames of each; as of `write_recipe`."""
        if self._counts is None or not np.array_equal(self._counts, pdf_counts) or not (self.path / COUNTS).exists():
            write_pdf_counts(self.path / COUNTS, pdf_counts)
            self._counts = pdf_counts

    def finish(self, model: AcousticModel) -> None:
        """Writes the trained model, then removes what only --resume needs; the last thing that a training does.

        Raises:
            UserError: it cannot be written, or rows of metrics.jsonl cannot.
        """
        try:
            self._metrics.flush()
            save_model(self.path / FINAL, model)
        except UserError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            raise UserError(
                error.what, where=error.where, mend="free disk space or quota, then go on with --resume"
            ) from error
        flush_directory(self.path)
        with suppress(OSError):
            (self.path / BEST).unlink(missing_ok=True)
        _remove_checkpoints(self.path / CHECKPOINTS)


class NoRunDir(RunDir):
    """What the workers other than the first leave behind: nothing. They keep in memory what is small, so that one of
    them can take the run dir over."""

    def __init__(self, path: Path) -> None:
        """`path` is that of the first worker's run dir."""
        self.path, self.resume = path, False
        self._kept = Kept()

    def open_log(self) -> logging.Handler:
        return logging.NullHandler()

    def write_recipe(self, text: str) -> None:
        self._kept.recipe = text

    def record(self, metrics: dict[str, Any]) -> None:
        self._kept.add(metrics)

    def record_once(self, metrics: dict[str, Any]) -> None:
        self.record(metrics)

    def settle(self) -> None: ...

    def forget_epochs_after(self, epoch: int) -> None:
        self._kept.forget_epochs_after(epoch)

    def save_best(self, model: AcousticModel) -> None: ...

    def write_counts(self, pdf_counts: NDArray[Any]) -> None:
        self._kept.counts = pdf_counts

    def finish(self, model: AcousticModel) -> None: ...

    def take_over(self) -> RunDir:
        """The run dir, owned by this worker now, since the first one is dead.

        What that one did not write of recipe, counts and metrics is written by `open_log`, which waits some seconds for
        the lock of the dead one and then goes on without.

        Raises:
            UserError: as of `RunDir`.
        """
        run = RunDir(self.path, resume=True)
        run._of_dead_owner = self._kept
        return run


def _remove_checkpoints(directory: Path) -> None:
    """Removes all checkpoints, and their folder if nothing else is in it. What cannot be removed is warned about."""
    try:
        with opened_folder(directory) as folder:
            for name in names_in(folder):
                if folder_number(name.removeprefix(".tmp-")):
                    with suppress(OSError):  # something of others is in it: so its folder is not empty below
                        remove_folder(name, folder)
        directory.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("something is left in %s: %s", directory, error.strerror)


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
            mend="let it finish first, or go on with it by `ddnn train --resume`; its best network so far is in "
            "best.safetensors",
        )
    return load_model(path / FINAL)
