"""How a training or pretraining is doing, by the files of its run dir, and by Slurm if it has a job. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ddnn.errors import UserError
from ddnn.info.checkpoints import newest_checkpoint, resume_command
from ddnn.info.pretraining import go_on_command, is_pretraining, rbms
from ddnn.info.status_text import ERROR_ENTRY, last_entry, render, why_it_ended
from ddnn.optim.schedule import make_schedule
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.slurm.job import Job, read_job, slurm_state
from ddnn.train.read_metrics import EpochRow, Metrics, PretrainingRow, read_metrics, read_pretraining
from ddnn.train.run_dir_files import FINAL, JOB_OUTPUT, JOB_RECORD, STACK
from ddnn.train.run_log import training_holds

State = Literal["submitted", "running", "finished", "stopped", "unfinished"]
SHARES = ("compute", "communication", "waiting", "data")
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_OVER = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY",
         "NODE_FAIL", "BOOT_FAIL", "GONE")  # fmt: skip
_EPOCHS_TO_JUDGE_BY = 3


@dataclass(frozen=True)
class Status:
    """A training, or a pretraining, at one moment; None where a figure is not known (yet), or is none of its.

    Attributes:
        state: submitted (it waits in Slurm's queue), running, finished, or stopped: begun, or its job gone, and no
            process holds the run dir. A pretraining holds nothing: it is unfinished where Slurm does not say more.
        phase: what a running one does, or what Slurm says of one that waits.
        job, submitted, slurm: number of the Slurm job, when it was submitted (seconds since 1970), its state there.
        error: of a stopped one, the last error in train.log since it was last begun, else the likeliest in the job's
            output.
        epochs_done, epochs_most: finished epochs, and how many there can be; Newbob may end before.
        last, best: cross-validation: epoch, loss, frame_accuracy; best among the accepted by loss.
        frames_per_second: of the last epoch's training, all workers together.
        shares: of the workers' time in the last epoch, mean over the workers: `SHARES`.
        estimated_end: seconds since 1970, if the epochs to come take as long as the last three.
        age: seconds since the last line of train.log or metrics.jsonl.
        checkpoint: the newest: number, workers, epoch, minibatch, and when it was written (`ddnn.info.checkpoints`).
        resume: of a stopped or unfinished one, the command that goes on with it.
        rbms: of a pretraining, how far it is (`ddnn.info.pretraining`).
        problems: files that are damaged, and what could not be found out, a sentence each.
    """

    run_dir: Path
    state: State
    phase: str | None
    error: str | None
    job: str | None
    submitted: float | None
    slurm: str | None
    workers: int | None
    epochs_done: int
    epochs_most: int | None
    last: dict[str, Any] | None
    best: dict[str, Any] | None
    learning_rate: float | None
    frames_per_second: float | None
    shares: dict[str, float] | None
    estimated_end: float | None
    age: float | None
    checkpoint: dict[str, Any] | None
    resume: str | None
    rbms: dict[str, Any] | None
    problems: tuple[str, ...]

    @property
    def frames_per_second_per_worker(self) -> float | None:
        """Frames per second divided by the workers."""
        return self.frames_per_second / self.workers if self.frames_per_second and self.workers else None

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; paths as text."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            **fields,
            "run_dir": str(self.run_dir),
            "frames_per_second_per_worker": self.frames_per_second_per_worker,
            "problems": list(self.problems),
        }

    def as_text(self) -> str:
        """Some lines to read."""
        return render(self.as_dict(), time.time())


def read_status(run_dir: Path, ask_slurm: Callable[[Job], str | None] = slurm_state) -> Status:
    """The status of a run dir, now. Damaged files are among its `problems`; what the others say is still told.

    Args:
        run_dir: of `ddnn train` or `ddnn pretrain`, with --slurm or without.
        ask_slurm: what Slurm says of a job; asked only where neither a process that holds the run dir nor a
            final model (or stack) is seen.

    Raises:
        UserError: there is no run dir.
    """
    log = run_dir / "train.log"
    known = (log.name, "recipe.yaml", "metrics.jsonl", FINAL, STACK, JOB_RECORD)
    if not any((run_dir / name).exists() for name in known):
        raise UserError("there is no run dir of a training", where=run_dir, mend="name the --run-dir of `ddnn train`")
    problems: list[str] = []
    recipe = _tolerant(problems, lambda: _recipe(run_dir / "recipe.yaml"))
    pretraining = is_pretraining(run_dir, recipe)
    read = None if pretraining else _tolerant(problems, lambda: _metrics(run_dir / "metrics.jsonl"))
    metrics = read or Metrics((), (), ())
    job = _tolerant(problems, lambda: read_job(run_dir))
    held = training_holds(log)
    finished = (run_dir / (STACK if pretraining else FINAL)).exists()
    slurm = ask_slurm(job) if job is not None and held is not True and not finished else None
    state = _state(finished, held is True, log.exists(), job is not None, slurm)
    if pretraining and slurm is None and not finished:
        state = "unfinished"
        unasked = "" if job is None else ", and Slurm could not be asked"
        problems.append(f"whether a process is at it is not known: a pretraining has no lock{unasked}")
    elif job is not None and slurm is None and state in ("submitted", "stopped"):
        problems.append("Slurm could not be asked: this is what the files and the lock of train.log say")
    elif state == "stopped" and held == "unknown":
        problems.append("the lock of train.log could not be looked at: it may be running")
    found = None if finished or pretraining else newest_checkpoint(run_dir, problems.append)
    times = [path.stat().st_mtime for path in (log, run_dir / "metrics.jsonl") if path.is_file()]
    age = max(0.0, time.time() - max(times)) if times else None
    most = None if recipe is None or pretraining else make_schedule(recipe.schedule).max_epochs
    done = metrics.cv[-1].epoch if metrics.cv else 0
    sound = [row for row in metrics.cv if row.accepted and row.loss is not None]
    running = state == "running"
    workers = recipe.parallel.workers if recipe is not None else job.workers if job is not None else None
    if metrics.workers:  # some may have been lost since
        workers = sum(row.epoch == metrics.workers[-1].epoch for row in metrics.workers)
    phase = slurm if state == "submitted" else None
    if running and not pretraining:
        phase = _phase(run_dir, metrics, problems)
    go_on_by = go_on_command if pretraining else resume_command
    return Status(
        run_dir=run_dir,
        state=state,
        phase=phase,
        error=_error(run_dir, problems) if state == "stopped" else None,
        job=None if job is None else job.number,
        submitted=None if job is None else job.submitted,
        slurm=slurm,
        workers=workers,
        epochs_done=done,
        epochs_most=most,
        last=_figures(metrics.cv[-1]) if metrics.cv else None,
        best=_figures(min(sound, key=lambda row: row.loss or 0.0)) if sound else None,
        learning_rate=metrics.train[-1].learning_rate if metrics.train else None,
        frames_per_second=metrics.train[-1].frames_per_second if metrics.train else None,
        shares=_shares(metrics),
        estimated_end=_estimated_end(metrics, most, done, age or 0.0) if running else None,
        age=age,
        checkpoint=None if found is None else {**asdict(found), "where": found.as_text()},
        resume=go_on_by(run_dir) if state in ("stopped", "unfinished") else None,
        rbms=rbms(run_dir, recipe, _pretrained(problems, run_dir / "metrics.jsonl")) if pretraining else None,
        problems=tuple(problems),
    )


def _tolerant(problems: list[str], read: Callable[[], Any]) -> Any:
    """What `read` returns; None and a problem where the file is damaged or cannot be read."""
    try:
        return read()
    except UserError as error:
        problems.append(" ".join(str(error).split()))
    except OSError as error:
        problems.append(f"cannot read {error.filename}: {error.strerror}")
    return None


def _recipe(path: Path) -> Recipe | None:
    return load_recipe(path, must_exist=False) if path.exists() else None


def _metrics(path: Path) -> Metrics | None:
    return read_metrics(path) if path.exists() else None


def _state(finished: bool, held: bool, begun: bool, submitted: bool, slurm: str | None) -> State:
    """`begun`: there is a train.log; `submitted`: there is a job; `slurm`: what Slurm says of it."""
    if held:
        return "running"
    if finished:
        return "finished"
    if submitted and (slurm in _WAITING or (slurm is None and not begun)):
        return "submitted"
    return "stopped" if slurm is None or slurm in _OVER else "running"


def _phase(run_dir: Path, metrics: Metrics, problems: list[str]) -> str:
    if metrics.cv:
        return "training"
    rows = _pretrained(problems, run_dir / "pretrain" / "metrics.jsonl")
    return f"pretraining, RBM {rows[-1].layer}, {rows[-1].pass_} passes done" if rows else "starting"


def _pretrained(problems: list[str], path: Path) -> list[PretrainingRow]:
    """What is written of passes over RBMs; nothing where there is no such file."""
    return (_tolerant(problems, lambda: read_pretraining(path)) if path.exists() else None) or []


def _error(run_dir: Path, problems: list[str]) -> str | None:
    said: str | None = _tolerant(problems, lambda: last_entry(run_dir / "train.log", ERROR_ENTRY))
    if said is None:
        said = _tolerant(problems, lambda: why_it_ended(run_dir / JOB_OUTPUT))
    return said


def _figures(row: EpochRow) -> dict[str, Any]:
    return {"epoch": row.epoch, "loss": row.loss, "frame_accuracy": row.frame_accuracy, "accepted": row.accepted}


def _shares(metrics: Metrics) -> dict[str, float] | None:
    if not metrics.workers:
        return None
    rows = [row for row in metrics.workers if row.epoch == metrics.workers[-1].epoch]
    found = {name: [getattr(row, f"{name}_share") for row in rows] for name in SHARES}
    return {name: sum(shares) / len(shares) for name, shares in found.items() if None not in shares}


def _estimated_end(metrics: Metrics, most: int | None, done: int, age: float) -> float | None:
    """When the last possible epoch ends; None before the first has."""
    epochs = [row.epoch for row in metrics.train][-_EPOCHS_TO_JUDGE_BY:]
    seconds = sum(row.seconds or 0.0 for row in (*metrics.train, *metrics.cv) if row.epoch in epochs)
    if most is None or not epochs or done < 1:
        return None
    return time.time() + max(0.0, (most - done) * seconds / len(epochs) - age)
