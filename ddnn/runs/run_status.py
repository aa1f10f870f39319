"""What programs that do not hold the lock of a run directory need to know: the names of its files, status.json, and whether
a run may begin in it. Needs no torch."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ddnn.recipe.source import read_yaml
from ddnn.runs.metrics import iterate_rows
from ddnn.runs.rows import EndRow, EpochRow
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import atomic_write, is_locked, open_regular, read_bytes_limited, require_kind
from ddnn.util.text import plural, printable

RECIPE = "recipe.yaml"  # the recipe as it was run: includes and --set resolved
LOG = "train.log"  # the log; its lock keeps a second process out
STATUS = "status.json"  # what the run is doing, or how it ended: `RunStatus`
METRICS = "metrics.jsonl"  # one JSON object a line: `ddnn.runs.metrics`
BEST = "best.safetensors"  # the latest accepted network, where it is better than the initial one
FINAL = "final.safetensors"  # the trained model
PDF_COUNTS = "ali_train_pdf.counts"  # frames per pdf of the training alignment, for the priors
MODEL_DIGEST = "model.sha256"  # beside log-likelihoods, lattices and alignments: what network made them, `digest_line`
CV_UTTERANCES = "cv_utterances"  # ids of the utterances for cross-validation, one a line
PAGE = "report.html"  # the training as a page, written when it ends
CHECKPOINTS = "checkpoints"  # what a resume needs; removed in the end
PRETRAIN = "pretrain"  # the RBMs that a training trains itself: a pretraining directory without lock and log
TENSORBOARD = "tensorboard"  # the rows of metrics.jsonl for TensorBoard (`log.tensorboard`)
DBN = "dbn.safetensors"  # of a pretraining, beside rbm1.safetensors, ...: all of them as hidden layers
# Of a Slurm job: its script, number and output; of a pretraining also the recipe with all sections.
JOB_SCRIPT, JOB_RECORD, JOB_OUTPUT, JOB_RECIPE = "job.sh", "job.json", "job.out", "submitted_recipe.yaml"

FILES = (RECIPE, LOG, STATUS, METRICS, BEST, FINAL, PDF_COUNTS, CV_UTTERANCES, PAGE)
_BEFORE_TRAINING = {RECIPE, LOG, STATUS, PRETRAIN, TENSORBOARD, PDF_COUNTS, CV_UTTERANCES}
_FOLDERS = (PRETRAIN, CHECKPOINTS, TENSORBOARD)
TEMPORARY = re.compile(rf"\.(?:{'|'.join(map(re.escape, (*FILES, DBN)))}|rbm\d+\.safetensors)\.tmp\d+")
"""Names under which these files are written."""
_JOB_FILES = {JOB_SCRIPT, JOB_RECORD, JOB_OUTPUT, JOB_RECIPE}
_JOB_TEMPORARY = (f".{JOB_RECORD}.tmp", f".{JOB_RECIPE}.tmp")  # may be being written at the moment when the job begins
_MAX_STATUS_BYTES = 1 << 20
_MAX_DIGEST_BYTES = 8192
MAX_MESSAGE = 2000  # characters of an error

Kind = Literal["training", "pretraining"]
Resume = Literal["no", "yes", "auto"]  # auto: where there is something to resume, else a training starts
State = Literal["running", "finished", "interrupted", "diverged", "failed"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class RunError(_Part):
    """Why a run ended; `type` is the exception's, or the signal's."""

    type: str
    message: str
    hint: str | None = None


class RunStatus(_Part):
    """status.json: what the process that holds the run directory does, or how it ended."""

    schema_version: Literal[1] = 1
    kind: Kind
    state: State = "running"  # true only while train.log is locked; after that the process was killed
    phase: str = "starting"  # or pretraining, training
    pid: int
    host: str
    slurm_job: str | None = None
    world_size: int = 1
    epoch: int = 0  # finished epochs (of a pretraining: those over `rbm`)
    max_epochs: int | None = None
    minibatch: int = 0  # finished ones of the next epoch, at the last update
    rbm: int | None = None  # in training, from 1
    num_rbms: int | None = None
    started: float  # seconds since 1970
    updated: float
    num_restarts: int = 0  # by the launcher, each an event in metrics.jsonl
    error: RunError | None = None
    end: EndRow | None = None  # why the training ended, and its model; None of a pretraining or a killed training


def read_run_status(run_dir: Path) -> RunStatus | None:
    """The status of a run directory; None if it has none. DataError if it is damaged, or of another version."""
    path = run_dir / STATUS
    if not path.exists():
        return None
    try:
        return RunStatus.model_validate_json(read_bytes_limited(path, _MAX_STATUS_BYTES))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path) from error
    except ValueError as error:
        raise DataError("damaged, or written by another version of ddnn", location=path) from error


def known_status(run_dir: Path) -> RunStatus | None:
    """The same; None also where it is damaged."""
    with suppress(DataError):
        return read_run_status(run_dir)
    return None


def write_run_status(run_dir: Path, status: RunStatus, *, sync: bool = True) -> None:
    """Replaces status.json atomically; with `sync` it is on the disk afterwards. UserError if it cannot be written."""
    with atomic_write(run_dir / STATUS, sync=sync) as handle:
        handle.write(status.model_dump_json(indent=1).encode() + b"\n")


def record_failure(run_dir: Path, message: str, since: float) -> None:
    """Records why a run ended whose rank 0 could not: another worker failed or was killed. For the launcher. A status
    from before `since` (seconds since 1970) stays."""
    with suppress(UserError):
        status = read_run_status(run_dir)
        if status is None or status.started < since or status.state not in ("running", "interrupted"):
            return
        if is_locked(run_dir / LOG) is not True:
            error = RunError(type="WorkerError", message=message[:MAX_MESSAGE])
            update = {"state": "failed", "error": error, "updated": time.time()}
            write_run_status(run_dir, status.model_copy(update=update))


def newest_checkpoint(run_dir: Path) -> object:
    """A value that changes with each new checkpoint and each finished RBM; None where there is none to resume from."""
    progress = []
    for directory in (run_dir, run_dir / PRETRAIN):
        numbers = [int(path.name) for path in (directory / CHECKPOINTS).glob("[0-9]*") if path.name.isdigit()]
        progress.append((max(numbers, default=0), sorted(path.name for path in directory.glob("rbm*.safetensors"))))
    return progress if progress != [(0, []), (0, [])] else None


def is_finished(run_dir: Path) -> bool:
    """Whether a training has written its model, and has not been made longer since (`schedule.max_epochs`): until that
    has ended, the model of before stays."""
    status = known_status(run_dir)
    longer = status is not None and status.state != "finished" and any((run_dir / CHECKPOINTS).glob("[0-9]*"))
    return (run_dir / FINAL).exists() and not longer


def run_dir_of(model: Path) -> Path:
    """The run dir of a model that is named by its file, such as `BEST`, or by the run dir itself."""
    return model.parent if model.is_file() else model


def model_digest(model: Path) -> str | None:
    """16 digits of the SHA-256 of a model file, which tell results of the current final model from those of the model before
    it was trained longer. `model`: a run dir, or a file. None where it cannot be read."""
    digest = hashlib.sha256()
    try:
        with open_regular(model if model.is_file() else model / FINAL) as handle:
            while chunk := handle.read(4 << 20):
                digest.update(chunk)
    except OSError:
        return None
    return digest.hexdigest()[:16]


def digest_line(model: Path, folder: Path) -> bytes:
    """For `MODEL_DIGEST` in `folder`: `model_digest`, and the path from there to the run dir."""
    path = os.path.relpath(run_dir_of(model).resolve(), folder.resolve())
    return os.fsencode(f"{model_digest(model) or ''} {path}\n")


def read_digest(file: Path) -> tuple[str | None, Path | None]:
    """A digest that was left beside what a model has made, and the path behind it; None where there is none."""
    try:
        digest, _, path = os.fsdecode(read_bytes_limited(file, _MAX_DIGEST_BYTES)).rstrip("\n").partition(" ")
    except OSError:
        return None, None
    return digest or None, (file.parent / path).resolve() if path else None


def resume_command(run_dir: Path, kind: Kind = "training") -> str:
    """With --allow-pipes where the run has been allowed shell commands: its recipe alone does not allow them again."""
    path, recipe = (printable(shlex.quote(str(name)), "") for name in (run_dir, run_dir / RECIPE))
    pipes = read_yaml(run_dir / RECIPE).values.get("data.allow_pipes")
    allow = " --allow-pipes" if pipes is True else ""
    if kind == "training":
        return f"ddnn train {path} --resume{allow}"
    return f"ddnn pretrain {recipe} --run-dir {path}{allow}"


def is_recorded_recipe(recipe: Path, run_dir: Path) -> bool:
    """Whether the recipe was written by an earlier run, in `run_dir` or any other run dir, rather than by the user. It may
    come from an untrusted run dir."""
    folders = recipe.parent.resolve(), recipe.resolve().parent
    left = any((folder / name).exists() for folder in folders for name in (LOG, STATUS))
    return recipe.is_dir() or run_dir.resolve() in folders or left


def find_recipe(recipe: Path, run_dir: Path, resume: Resume) -> Path:
    """The recipe to train by: to resume, that of the run dir where `recipe` names one. UserError: there is none, or
    nothing to resume in `run_dir` where there must be; a training that failed before its first checkpoint will do."""
    of_run_dir = recipe / RECIPE
    if resume != "no" or recipe.is_dir():
        refuse_pretraining(recipe if recipe.is_dir() else run_dir)
    if resume == "no" and of_run_dir.is_file():
        raise UserError("this is a run dir, no recipe", location=recipe, hint="resume it with --resume")
    if resume != "no" and not (of_run_dir if recipe.is_dir() else recipe).exists():
        problem = f"there is no {RECIPE}" if recipe.is_dir() else "no such recipe or run dir"
        hint = "name a recipe, or the run dir of a training"
        raise UserError(f"{problem}: nothing to resume", location=recipe, hint=hint)
    if resume == "yes" and not any((run_dir / name).exists() for name in (RECIPE, LOG, CHECKPOINTS)):
        problem = "there is no training in this directory" if run_dir.exists() else "no such run dir"
        hint = "check the name; to start a training there, leave out --resume"
        raise UserError(f"{problem}: nothing to resume", location=run_dir, hint=hint)
    return of_run_dir if recipe.is_dir() and resume != "no" else recipe


def dbn_settings(run_dir: Path) -> str:
    """What lets a training start from the DBN of a pretraining dir."""
    return f"--set {printable(shlex.quote(f'pretrain.dbn={run_dir}'), '')} --set pretrain.epochs=null"


def refuse_pretraining(run_dir: Path) -> None:
    """DataError where this is the directory of a pretraining, in which there is no training."""
    status = known_status(run_dir)
    if not (run_dir / DBN).exists() if status is None else status.kind == "training":
        return
    if (run_dir / DBN).exists():
        hint = f"train on it in another run dir, with {dbn_settings(run_dir)}"
        raise DataError("this is a pretrained DBN, not a training", location=run_dir, hint=hint)
    hint = f"resume it: {resume_command(run_dir, 'pretraining')}"
    raise DataError("this is a pretraining that has not finished, not a training", location=run_dir, hint=hint)


def refuse_lost_checkpoints(run_dir: Path) -> None:
    """UserError where a training has finished epochs, and its checkpoints were removed: a resume would begin again, and
    remove their rows and network. One that died while it wrote its first checkpoint has left a part of that."""
    rows = iterate_rows(run_dir / METRICS)
    epochs = max((row.epoch for row in rows if isinstance(row, EpochRow)), default=0)
    if not epochs or (run_dir / FINAL).exists() or next((run_dir / CHECKPOINTS).glob("*"), None) is not None:
        return
    hint = "remove the run dir to begin again"
    if (run_dir / BEST).exists():
        setting = printable(shlex.quote(f"init.model={run_dir / BEST}"), "")
        hint = f"start another training from its network, with --set {setting}; or {hint}"
    message = f"this training has finished {plural(epochs, 'epoch')}, but there is no checkpoint to resume from: was it removed?"
    raise UserError(message, location=run_dir, hint=hint)


def in_progress(run_dir: Path) -> UserError:
    """Another process holds the lock of the run directory: which, as far as its status says."""
    message, holder = "another run is in progress in this run dir", known_status(run_dir)
    message += "" if holder is None else f" (process {holder.pid} on {printable(holder.host, '')})"
    hint = "wait for it or end it. If its machine is gone and the file system keeps the lock: "
    return UserError(message, location=run_dir, hint=f"{hint}cp -p {LOG} t && mv t {LOG}")


def run_dir_hint(path: Path, name: str = RECIPE) -> str:
    """The hint where this is no run dir: its directory, if it is a file; those in it, if it is a folder of run dirs,
    which have a file of this name."""
    if path.is_file():
        return f"name its directory: {path.parent}"
    if (path / "feats.scp").exists():
        return "this is a data dir; ddnn info describes it"
    inside = ", ".join(str(file.parent) for file in sorted(path.glob(f"*/{name}"))[:3])
    return f"name a run dir in it, such as {inside}" if inside else "name the --run-dir of a training"


def check_run_dir(
    path: Path, kind: Kind = "training", *, resume: bool = False, recipe: str = "", held: bool = False
) -> None:
    """Whether a run may begin in this directory, or resume (a pretraining always does). Changes nothing. `recipe`: text
    of the recipe.yaml that a pretraining must have that has begun. `held`: whether this process holds the lock.
    UserError: it holds something else, or a link in place of a file of ours, or another process is running in it."""
    if not held and is_locked(path / LOG) is True:
        raise in_progress(path)
    if path.exists() and not path.is_dir():
        raise UserError("the run dir is a file", location=path, hint="name a directory that does not exist yet")
    try:
        names = {p.name for p in path.iterdir()} - _JOB_FILES if path.exists() else set()
        names = {name for name in names if not (name.startswith(_JOB_TEMPORARY) or TEMPORARY.fullmatch(name))}
        for name in names & {*FILES, *_FOLDERS, DBN}:
            require_kind(path / name, "directory" if name in _FOLDERS else "file")
        if CHECKPOINTS in names and not any((path / CHECKPOINTS).iterdir()):
            names.remove(CHECKPOINTS)
        remove, begun = "or remove this one if it is not needed", {RECIPE, LOG} <= names
        if kind == "training" and names - _BEFORE_TRAINING:
            refuse_pretraining(path)
            if not resume:
                status, hint = known_status(path), f"name another directory, {remove}"
                if status is not None and status.state == "diverged":
                    advice = f"{status.error.hint}; " if status.error is not None and status.error.hint else ""
                    raise UserError("the training in this run dir diverged", location=path, hint=advice + hint)
                hint = f"resume it with --resume; else {hint}" if begun else hint
                raise UserError("the run dir exists already and is not empty", location=path, hint=hint)
            if not begun:
                message = "the directory is not empty and not a run dir of a training: there is no "
                hint = "name the --run-dir of the training to resume"
                raise UserError(f"{message}{RECIPE} with a {LOG}", location=path, hint=hint)
        if kind == "pretraining" and names - {LOG, STATUS}:
            recorded = read_bytes_limited(path / RECIPE, 64 << 20) if RECIPE in names else b""
            if RECIPE not in names or recorded.decode("utf-8", "replace") != recipe:
                message = "the directory exists already and holds no pretraining with the same data, model, pretrain"
                hint = f"name another --run-dir, {remove}; pretrain.dbn takes finished RBMs"
                raise UserError(f"{message} and seed", location=path, hint=hint)
    except OSError as error:
        raise UserError(f"cannot look into the run dir: {error.strerror}", location=path) from error


def model_file(path: Path) -> Path:
    """The file of the final model of a run directory, or `path` itself if it is a file. DataError: there is none (yet)."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError("there is no such run dir", location=path, hint=run_dir_hint(path))
    if not (path / FINAL).exists() and (path / RECIPE).exists():
        refuse_pretraining(path)
        status = known_status(path)
        outcome, hint = "has not finished", f"let it finish first, or resume it: {resume_command(path)}"
        if status is not None and status.state == "diverged":
            outcome, hint = "diverged", (status.error.hint if status.error is not None else "") or ""
        if (path / BEST).exists():
            hint += f"{'; ' if hint else ''}or name its latest accepted network: {path / BEST}"
        raise DataError(f"this training {outcome}: there is no {FINAL}", location=path, hint=hint or None)
    if not (path / FINAL).exists():
        raise DataError(f"there is no {FINAL}", location=path, hint=run_dir_hint(path))
    return path / FINAL
