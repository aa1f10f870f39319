"""The run directory of a training or pretraining: its lock, log, status and metrics, and what is left in it at the end.
`ddnn.runs.run_status` names its files. The directory itself may be a symbolic link. A link in place of one of the
files is refused, since a run directory may come from a stranger and must not lead a training to write elsewhere."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from ddnn.distributed.failures import EXIT_BARRIER_TIMEOUT
from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.runs import run_status
from ddnn.runs.checkpoint_manifest import CheckpointSummary, peek_checkpoint, remove_checkpoints
from ddnn.runs.metrics import MetricsWriter
from ddnn.runs.rows import EndRow, EpochRow, EventRow, MetricsRow, WorkerRow
from ddnn.runs.run_status import BEST, CHECKPOINTS, DBN, FINAL, LOG, RECIPE, Kind, RunStatus, check_run_dir
from ddnn.runs.tensorboard import TensorBoardWriter
from ddnn.util.errors import DivergedError, UserError
from ddnn.util.files import (
    FileLock,
    LogFile,
    atomic_write,
    ensure_directory,
    fsync_directory,
    has_content,
    is_full_disk,
    write_text,
)
from ddnn.util.system import slurm_job_id

if TYPE_CHECKING:  # they import torch
    from ddnn.distributed.communicator import Communicator
    from ddnn.nn.acoustic_model import AcousticModel

log = logging.getLogger(__name__)
Arguments = ParamSpec("Arguments")

STATUS_SECONDS = 2.0  # between two updates of status.json within an epoch


def _by_writer(
    method: Callable[Concatenate[RunDir, Arguments], None],
) -> Callable[Concatenate[RunDir, Arguments], None]:
    """Does nothing on the ranks that write nothing."""

    @wraps(method)
    def guarded(run: RunDir, /, *args: Arguments.args, **options: Arguments.kwargs) -> None:
        if run.writes:
            method(run, *args, **options)

    return guarded


class RunDir:
    """A run directory that this process writes. With several workers that is rank 0; the others have a `NullRunDir`.
    `status`: the latest written to status.json; `previous`: the one that an earlier process left, None if there is none."""

    writes = True

    def __init__(self, path: Path, kind: Kind = "training", parent: RunDir | None = None) -> None:
        """See `open`. With a `parent`, the directory of the RBMs that a training trains: lock, log and status are the
        training's."""
        self.path, self.kind, self._parent = path, kind, parent
        now, job = time.time(), slurm_job_id(os.environ) or None
        pid, host = os.getpid(), socket.gethostname()
        self.status = RunStatus(kind=kind, pid=pid, host=host, slurm_job=job, started=now, updated=now)
        self._metrics = MetricsWriter(path / run_status.METRICS)
        self._writers = [self._metrics]  # of the rows that are recorded
        self._lock: FileLock | None = None
        self._log: LogFile | None = None
        self._failed: set[str] = set()
        self._progress_written = 0.0
        self.log_interval: float = parent.log_interval if parent is not None else math.inf  # seconds within an epoch
        self._logged: float | None = None  # the last row, or line within an epoch
        self._rate: float | None = None  # the learning rate of the last row of an epoch
        self.previous: RunStatus | None = None
        self._refused = False  # whether this process was to resume what it must leave alone
        self.on_row: Callable[[MetricsRow], object] = lambda row: None  # called with each row that was recorded
        self.on_end: Callable[[Path], object] = lambda run_dir: None  # called by `report`

    @classmethod
    def open(
        cls, path: Path, kind: Kind = "training", *, resume: bool = False, recipe: str = "", tensorboard: bool = False
    ) -> RunDir:
        """Creates the directory, or takes one in which no training has begun or which is to be resumed; locks it, and
        sends the log of `ddnn` to train.log until `close`. `tensorboard`: whether rows are also written for TensorBoard.
        For other arguments and errors see `check_run_dir`; UserError: the package tensorboard is missing."""
        check_run_dir(path, kind, resume=resume, recipe=recipe)
        run = cls(path, kind)
        if tensorboard:
            run._writers.append(TensorBoardWriter(path / run_status.METRICS))
        ensure_directory(path)
        run._acquire_lock()
        try:
            # Again: what another run did until it released the lock.
            check_run_dir(path, kind, resume=resume, recipe=recipe, held=True)
            try:
                run._log = LogFile(path / LOG, append=resume or kind == "pretraining")
            except OSError as error:
                raise UserError(f"cannot write {LOG}: {error.strerror}", location=path) from error
            logging.getLogger("ddnn").addHandler(run._log)
            for name in [p.name for p in path.iterdir() if run_status.TEMPORARY.fullmatch(p.name)]:
                with suppress(OSError):  # left by a process that was killed while it wrote
                    (path / name).unlink()
            run.previous = run_status.known_status(path)
            run.set_status(num_restarts=run.previous.num_restarts if run.previous is not None else 0)
            if kind == "pretraining":
                run.write_recipe(recipe)
        except BaseException:
            run.close()
            raise
        return run

    def _acquire_lock(self) -> None:
        self._lock = FileLock(self.path / LOG)
        try:
            if not self._lock.acquire(timeout=0.2):
                log.warning("%s: this file system has no locks; nobody notices a second run in this run dir", self.path)
        except BlockingIOError as error:
            raise run_status.in_progress(self.path) from error
        except OSError as error:
            raise UserError(f"cannot write or lock {LOG}: {error.strerror}", location=self.path) from error

    def pretraining(self, recipe: str) -> RunDir:
        """The directory `pretrain` for the RBMs of this training, new or to be resumed; raises as `check_run_dir`."""
        path = self.path / run_status.PRETRAIN
        if not self.writes:
            return NullRunDir(path, "pretraining")
        check_run_dir(path, "pretraining", recipe=recipe, held=True)
        ensure_directory(path)
        run = RunDir(path, "pretraining", self)
        if len(self._writers) > 1:  # the training writes for TensorBoard too
            run._writers.append(TensorBoardWriter(path / run_status.METRICS))
        run.write_recipe(recipe)
        return run

    @_by_writer
    def set_status(self, /, *, sync: bool = True, **fields: Any) -> None:
        """Changes fields of `status` and writes status.json. If it cannot be written that is logged once."""
        if self._parent is not None:
            self._parent.set_status(sync=sync, **fields)
            return
        assert fields.keys() <= RunStatus.model_fields.keys(), fields
        self.status = self.status.model_copy(update={**fields, "updated": time.time()})
        self._tolerate_full_disk(lambda: run_status.write_run_status(self.path, self.status, sync=sync))

    @contextmanager
    def may_refuse_resume(self, comm: Communicator, refusal: type[UserError] = UserError) -> Iterator[None]:
        """A `refusal` in this block, which is raised on all workers of `comm`, leaves status.json as the training has left
        it: the run has not failed, and can still be resumed."""
        try:
            yield
        except refusal:
            (self._parent or self)._restore_status()
            comm.try_barrier(EXIT_BARRIER_TIMEOUT)  # the error of another worker would end this one before
            raise

    @_by_writer
    def _restore_status(self) -> None:
        if (before := self.previous) is not None:
            self._refused, self.status = True, before
            self._tolerate_full_disk(lambda: run_status.write_run_status(self.path, before))

    @_by_writer
    def set_progress(self, epoch: int, minibatch: int, describe: Callable[[], str]) -> None:
        """Says how far the training is, at most every `STATUS_SECONDS`, and logs what `describe` says, which may wait for
        the device, every `log_interval` seconds; cheap enough to be called at each minibatch."""
        now = time.monotonic()
        self._logged = now if self._logged is None else self._logged
        if now - self._logged >= self.log_interval:
            self._logged = now
            log.info(describe())
        if now - self._progress_written >= STATUS_SECONDS:
            self._progress_written = now
            self.set_status(sync=False, epoch=epoch, minibatch=minibatch)

    def _tolerate_full_disk(self, write: Callable[[], None]) -> None:
        try:
            write()
        except UserError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            if error.message not in self._failed:
                log.warning("%s in %s: the training continues and tries again", error.message, self.path)
            self._failed.add(error.message)

    @_by_writer
    def write_recipe(self, text: str) -> None:
        write_text(self.path / RECIPE, text)

    @_by_writer
    def write_pdf_counts(self, pdf_counts: NDArray[np.float64]) -> None:
        write_pdf_counts(self.path / run_status.PDF_COUNTS, pdf_counts)

    @_by_writer
    def write_cv_utterances(self, utterances: Sequence[str]) -> None:
        """The list that `data.cv.utterances` of another recipe takes."""
        write_text(self.path / run_status.CV_UTTERANCES, "".join(f"{name}\n" for name in utterances))

    @_by_writer
    def record(self, row: MetricsRow) -> None:
        """Logs a row and appends it to metrics.jsonl; if the disk is full, as soon as there is space."""
        text, self._logged = row.as_text(), time.monotonic()
        logged = isinstance(row, EventRow) and row.event == "resumed"  # as the checkpoint was read
        more = {}  # for a terminal
        if isinstance(row, EpochRow):
            rejected = row.split == "cv" and not row.accepted
            more = {"short": row.as_short_text(self._rate)} | ({"color": "yellow"} if rejected else {})
            self._rate = None if row.is_initial else row.learning_rate
        if text and not logged:
            log.log(logging.WARNING if isinstance(row, WorkerRow) else logging.INFO, text, extra=more)
        for writer in self._writers:
            writer.write(row)
        if isinstance(row, EventRow) and row.event == "restarted":
            self.set_status(num_restarts=self.status.num_restarts + 1)
        if isinstance(row, EndRow):
            self.set_status(end=row)
        self.on_row(row)

    @_by_writer
    def report(self, ended: str) -> None:
        """Calls `on_end`, once the training has `ended`; an error of it is a warning."""
        try:
            self.on_end(self.path)
        except Exception as error:  # noqa: BLE001 (whatever it is: how the training ended does not depend on it)
            log.warning("%s, its report is not: %s", ended, error)

    @_by_writer
    def flush(self) -> None:
        """Before a checkpoint: pending rows are tried again, and all rows are flushed to the disk if possible."""
        with suppress(UserError):  # that it is not possible has been logged
            self._metrics.flush()

    @_by_writer
    def truncate_after(self, epoch: int, rbm: int | None = None) -> None:
        """Removes the rows of later epochs from metrics.jsonl, which are trained again: all of them after epoch -1, and
        of a pretraining those of later epochs of `rbm` (counted from 1) and of later RBMs."""
        last: tuple[int, ...] = (epoch,) if rbm is None else (rbm, epoch)

        def keep(row: dict[str, Any]) -> bool:
            place = tuple(row.get(name) for name in ("rbm", "epoch")[-len(last) :])
            return not all(type(value) is int for value in place) or place <= last

        for writer in self._writers:
            writer.truncate(keep)

    @_by_writer
    def save_best(self, model: AcousticModel | None) -> None:
        """Saves the network of the latest accepted epoch, or removes it if that is no better than the initial one.
        UserError if it is not finite. A full disk is only logged."""
        from ddnn.nn.acoustic_model import save_model  # imports torch

        if model is None:
            with suppress(OSError):
                (self.path / BEST).unlink(missing_ok=True)
        else:
            self._tolerate_full_disk(lambda: save_model(self.path / BEST, model))

    @_by_writer
    def finish(self, model: AcousticModel, *, keep_checkpoint: bool = False) -> None:
        """Writes the trained model (of a pretraining: all RBMs as hidden layers) and all rows of metrics.jsonl, and
        removes what only a resume needs; with `keep_checkpoint` the newest checkpoint stays, from which the training
        can be made longer. On a full disk room is made: for the model by what a resume does not need,
        which is all checkpoints but the newest and the network of an earlier epoch; then for the rows by all that the
        model supersedes. UserError if there still is no room."""
        from ddnn.nn.acoustic_model import encode_model  # imports torch

        result, best = self.path / (FINAL if self.kind == "training" else DBN), self.path / BEST
        data = encode_model(model, result)
        checkpoint = peek_checkpoint(self.path / CHECKPOINTS, lambda problem: None)
        newest = None if checkpoint is None else checkpoint.number
        if has_content(best, data, follow_symlinks=False):
            with suppress(OSError):  # needs no space
                best.replace(result)

        def write() -> None:
            if not has_content(result, data, follow_symlinks=False):
                with atomic_write(result) as handle:
                    handle.write(data)

        self._make_room_for(write, newest, lambda error: self._unfinished_hint(error, checkpoint))
        fsync_directory(self.path)
        lost = f"the model is complete in {result.name}; the newest rows of {run_status.METRICS} are lost"
        self._make_room_for(self._metrics.flush, None, lambda error: lost)
        self._remove_superseded(newest if keep_checkpoint else None)
        if self._parent is None:
            self.set_status(state="finished", minibatch=0)

    def _remove_superseded(self, keep: int | None) -> None:
        """What nobody needs once the model is written; the checkpoint `keep` stays, from which it can be written again."""
        with suppress(OSError):
            (self.path / BEST).unlink(missing_ok=True)
        remove_checkpoints(self.path / CHECKPOINTS, keep)

    def _make_room_for(self, write: Callable[[], None], keep: int | None, hint: Callable[[UserError], str]) -> None:
        """Writes; on a full disk once more without what is superseded. If the disk is the reason of a UserError, it gets
        this hint."""
        try:
            try:
                write()
            except UserError as error:
                if not is_full_disk(error):
                    raise
                self._remove_superseded(keep)
                write()
        except UserError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            raise UserError(error.message, location=error.location, hint=hint(error)) from error

    def _unfinished_hint(self, error: UserError, checkpoint: CheckpointSummary | None) -> str:
        """What to do where the model could not be written, and what a resume does then."""
        whole = self._parent or self
        resume = run_status.resume_command(whole.path, whole.kind)
        first = "free disk space or quota" if is_full_disk(error) else "make the run dir writable"
        if self.kind == "pretraining":
            return f"{first}, then resume: {resume}; all RBMs are complete"
        if checkpoint is None:
            return f"there is no checkpoint: {first}, then {resume} starts from the beginning"
        return f"{first}, then resume: {resume}; it continues from checkpoint {checkpoint.to_dict()['where']}"

    @_by_writer
    def close(self, error: BaseException | None = None, message: str | None = None) -> None:
        """Records how the run ended, ends the log and releases the lock. A second call does nothing. `error`: what
        ended it, SystemExit or KeyboardInterrupt after a signal. `message`: to record in place of the error's own."""
        if error is not None and self._log is not None:
            text = message or str(error) or type(error).__name__
            hint = error.hint if isinstance(error, UserError) else None
            message = message or (error.message if isinstance(error, UserError) else text)
            stopped = isinstance(error, (SystemExit, KeyboardInterrupt))
            state = "diverged" if isinstance(error, DivergedError) else "interrupted" if stopped else "failed"
            message = message[: run_status.MAX_MESSAGE]
            if not self._refused:
                recorded = run_status.RunError(type=type(error).__name__, message=message, hint=hint)
                self.set_status(state=state, error=recorded)
            outcome = "the resume was refused" if self._refused else state
            record = {"msg": f"{outcome}: {text}", "levelno": logging.ERROR, "levelname": "ERROR"}
            self._log.handle(logging.makeLogRecord(record))  # only here: the command line tells the person
        if self._log is not None:
            logging.getLogger("ddnn").removeHandler(self._log)
            self._log.close()
            self._log = None
        if self._lock is not None:
            self._lock.release()


class NullRunDir(RunDir):
    """The run directory of the ranks that write nothing."""

    writes = False


def open_run_dir(
    path: Path,
    comm: Communicator,
    kind: Kind = "training",
    *,
    resume: bool = False,
    recipe: str = "",
    tensorboard: bool = False,
) -> RunDir:
    """`RunDir.open` on rank 0, a `NullRunDir` on the others. Collective: the UserError of rank 0 is raised on all."""
    run: RunDir = NullRunDir(path, kind)
    refused: list[str | None] | None = None
    if comm.rank == 0:
        try:
            run = RunDir.open(path, kind, resume=resume, recipe=recipe, tensorboard=tensorboard)
            run.set_status(world_size=comm.world_size)
        except UserError as error:
            refused = [error.message, error.location, error.hint]
    refused = comm.all_gather_object(refused)[0]
    if refused is not None:
        raise UserError(refused[0] or "", location=refused[1], hint=refused[2])
    return run


def load_run(path: Path) -> AcousticModel:
    """The final model of a run directory, or the one in a file, such as `BEST` of a training that has not finished;
    DataError if there is none (yet), or a damaged one."""
    from ddnn.nn.acoustic_model import load_model  # imports torch

    return load_model(run_status.model_file(path))
