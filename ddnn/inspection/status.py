"""How a training or pretraining is doing: status.json, the newest metrics, the lock of train.log, and Slurm if it has a
job. Needs no torch."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ddnn.nn.figures import FRAME_ACCURACY
from ddnn.runs import run_status as files
from ddnn.runs.checkpoint_manifest import peek_checkpoint
from ddnn.runs.metrics import Metrics, read_metrics
from ddnn.runs.rows import EpochRow, MetricsRow, format_figures
from ddnn.runs.run_status import RunStatus, read_run_status, resume_command
from ddnn.slurm.job import Job, SlurmState, last_output, read_job, slurm_state, slurm_states
from ddnn.util.errors import UserError
from ddnn.util.files import is_locked
from ddnn.util.text import definitions, duration, printable, table, unescaped

FRACTIONS = ("compute", "comm", "wait", "data")
ENDED = ("finished", "interrupted", "diverged", "failed", "unknown")
FOLLOW_SECONDS, SLURM_SECONDS = 5.0, 30.0
"""Between two looks at the files; and only once in so many is Slurm asked, whose one daemon serves a whole cluster."""
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_OVER = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY",
         "NODE_FAIL", "BOOT_FAIL", "GONE")  # fmt: skip
_RESTART_SECONDS = 60.0  # the launcher of several workers may restart a job of which nothing was heard for so long
_ESTIMATE_EPOCHS = 3
_AFTER_DIVERGENCE = "start again in another run dir with another learning rate, or from a better initial network"

State = Literal["pending", "running", "finished", "interrupted", "diverged", "failed", "unknown"]
T = TypeVar("T")


@dataclass(frozen=True)
class Status:
    """A training or pretraining at one moment; None where a value is not known (yet) or does not apply."""

    run_dir: Path
    # pending: in Slurm's queue; interrupted: by a signal, or killed; unknown: there is no status.json, and no Slurm job
    # that ended without one (failed).
    state: State
    run: RunStatus | None  # status.json
    world_size: int | None
    job: str | None  # its number in Slurm
    submitted: float | None  # seconds since 1970
    slurm: str | None  # the job's state in Slurm
    slurm_reason: str | None  # why Slurm has not started it
    error: str | None  # why it ended, if it did not finish
    warning: str | None  # that it finished, but with a model that is no better than one that ignores its input
    metrics: Metrics  # of the RBMs, while a training trains them
    estimated_end: float | None  # seconds since 1970, if the remaining epochs take as long as the last three
    seconds_since_update: float | None  # of train.log, status.json or metrics.jsonl, whichever is newest
    checkpoint: dict[str, Any] | None  # the newest: number, world_size, epoch, minibatch, and when it was written
    resume_command: str | None  # of one that ended without finishing, unless it diverged, which it would do again
    problems: tuple[str, ...]  # damaged files, and what could not be found out, a sentence each

    @property
    def last(self) -> EpochRow | None:
        """The newest cross-validation."""
        return self.metrics.cv[-1] if self.metrics.cv else None

    @property
    def fractions(self) -> dict[str, float]:
        """Of the workers' time in the last epoch, mean over the workers."""
        workers = self.metrics.last_worker_rows
        known = {name: [getattr(row, f"{name}_fraction") for row in workers] for name in FRACTIONS}
        return {name: fmean(values) for name, values in known.items() if values and None not in values}

    @property
    def restarts(self) -> list[str]:
        """By the launcher, a sentence each."""
        return [event.as_text() for event in self.metrics.events if event.event == "restarted"]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`: the fields of status.json, those of this class, and the newest rows of the metrics."""
        metrics = self.metrics
        newest = {"start": metrics.starts, "train": metrics.train, "last": metrics.cv, "pretrain": metrics.pretraining}
        rows: dict[str, MetricsRow | None] = {name: rows[-1] if rows else None for name, rows in newest.items()}
        rows |= {name: getattr(metrics, name) for name in ("warmup", "last_accepted", "lowest_loss", "end")}
        run = {} if self.run is None else self.run.model_dump(mode="json", exclude={"schema_version"})
        return {
            **run,
            **{name: value for name, value in vars(self).items() if name not in ("run", "metrics")},
            **{name: row and row.model_dump() for name, row in rows.items()},
            "run_dir": str(self.run_dir),
            "fractions": self.fractions,
            "reconstruction_errors": metrics.reconstruction_errors,
            "restarts": self.restarts,
        }

    def lines(self) -> dict[str, Any]:
        """Name and text of what is known; some texts have several lines."""
        run, metrics, checkpoint, resume = self.run, self.metrics, self.checkpoint, self.resume_command or ""
        pretraining = run is not None and "pretraining" in (run.kind, run.phase)
        epochs, rbms = f"{self.last.epoch if self.last else 0}", None
        if run is not None and run.max_epochs is not None:
            epochs += f" of at most {run.max_epochs}"
        if run is not None and run.rbm is not None and pretraining:
            rbms = f"{run.rbm} of {run.num_rbms} in training"
            rbms = f"{run.num_rbms} finished" if run.state == "finished" else rbms
        rbm = metrics.pretraining[-1].as_text() if pretraining and metrics.pretraining else None
        begun = metrics.starts[-1] if metrics.starts else None
        return {
            "ended": metrics.end and (metrics.end.reason if self.error else metrics.end.why),
            "error": self.error,
            "warning": self.warning,
            "submitted": _ago(self.submitted) if self.state == "pending" else None,
            "RBMs": rbms,
            "mean reconstruction error": ", ".join(
                f"RBM {number} {error:.6g}" for number, error in metrics.reconstruction_errors.items()
            ),
            "epochs": None if pretraining else epochs,
            "warm-up": metrics.warmup and metrics.warmup.as_text(),
            "training": metrics.train[-1].as_text() if metrics.train else None,
            "last": rbm or format_figures(self.last),
            "final model" if self.state == "finished" else "model so far": format_figures(
                metrics.last_accepted, metrics.combination
            ),
            "lowest loss": metrics.lowest_loss and f"{format_figures(metrics.lowest_loss)}; that model was not kept",
            "precision": begun and f"{begun.precision} on {begun.machine}",
            "time of workers": ", ".join(f"{name} {100 * part:.1f} %" for name, part in self.fractions.items()),
            "RBM ends" if pretraining else "ends": self.estimated_end and _end(self.estimated_end),
            "restarts": "\n".join(self.restarts),
            "checkpoint": f"{checkpoint['where']}, {_ago(checkpoint['written'])}"
            if checkpoint is not None
            else "none: a resume begins from the start"
            if resume and not pretraining
            else None,
            "resume": resume,
            "next": _AFTER_DIVERGENCE if self.state == "diverged" else None,
            "note": "--allow-pipes runs the shell commands of its scp files: give it only if they are yours"
            if " --allow-pipes" in resume
            else None,
            "last update": self.seconds_since_update and f"{duration(self.seconds_since_update)} ago",
        }

    @property
    def slurm_text(self) -> str:
        return ": ".join(filter(None, (self.slurm, self.slurm_reason)))

    def row(self) -> tuple[str, ...]:
        """Its cells in the table of `Statuses`."""
        run, model, train = self.run, self.metrics.last_accepted, self.metrics.train
        loss, accuracy = (model.loss, model.figures.get(FRAME_ACCURACY.name)) if model else (None, None)
        note = self.slurm_text if self.state == "pending" else (self.error or self.warning or "").partition("\n")[0]
        epoch = f"{self.last.epoch if self.last else 0}" + (f"/{run.max_epochs}" if run and run.max_epochs else "")
        if run is not None and run.kind == "pretraining":
            epoch = f"RBM {run.rbm}/{run.num_rbms}" if run.rbm else ""
        return (
            str(self.run_dir),
            self.state,
            epoch,
            "" if loss is None else f"{loss:.4f}",
            "" if accuracy is None else f"{100 * accuracy:.2f}",
            f"{train[-1].frames_per_second or 0.0:.0f}" if train else "",
            note or (self.problems[0] if self.problems else ""),
        )

    def as_text(self) -> str:
        title = f"{printable(str(self.run_dir), '')}: {self.state}"
        if self.state == "running" and self.run is not None:
            title += f", {self.run.phase}"
            if self.run.rbm is not None and self.run.phase == "pretraining":
                title += f", RBM {self.run.rbm}" + (f" of {self.run.num_rbms}" if self.run.num_rbms else "")
        title += (f", Slurm job {self.job}" if self.job else "") + (f" ({self.slurm_text})" if self.slurm else "")
        shown = definitions([(name, printable(text)) for name, text in self.lines().items() if text], indent="  ")
        return "\n".join([title, shown, *(f"  problem: {printable(problem)}" for problem in self.problems)])


def _ago(then: float | None) -> str | None:
    return None if then is None else f"{duration(max(0.0, time.time() - then))} ago"


def _end(end: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(end, 4e9)))
    return f"{when} at the latest, in {duration(max(0.0, end - time.time()))}, if epochs take as long as the last"


@dataclass(frozen=True)
class Statuses:
    """Of several runs, in the order in which they were named."""

    runs: tuple[Status, ...]

    def as_dict(self) -> list[dict[str, Any]]:
        return [run.as_dict() for run in self.runs]

    def as_text(self) -> str:
        header = ("run", "state", "epoch", "CV loss", "accuracy (%)", "frames/s", "note")
        return table([run.row() for run in self.runs], header, "lllrrrl")


def read_statuses(paths: Sequence[Path]) -> Status | Statuses:
    """Of one run dir its status; of several, or of a folder of run dirs, a table. squeue is called once for all. UserError:
    one of them is neither."""
    run_dirs = [run_dir for path in paths for run_dir in _run_dirs(path)]
    if run_dirs == list(paths) and len(paths) == 1:
        return read_status(paths[0])
    jobs = [_tolerant([], partial(read_job, run_dir)) for run_dir in run_dirs]
    ask_once = cache(lambda: slurm_states([job for job in jobs if job is not None], seconds=10.0))
    return Statuses(tuple(read_status(run_dir, lambda job: ask_once().get(job)) for run_dir in run_dirs))


def _run_dirs(path: Path) -> list[Path]:
    if _files_of_run(path):
        return [path]
    return sorted(entry for entry in path.glob("*") if entry.is_dir() and _files_of_run(entry)) or [path]


def _files_of_run(run_dir: Path) -> set[str]:
    begun, results = (files.STATUS, files.LOG, files.RECIPE, files.METRICS, files.JOB_RECORD), (files.FINAL, files.DBN)
    return {name for name in (*begun, *results) if (run_dir / name).exists()}


def read_status(run_dir: Path, ask_slurm: Callable[[Job], SlurmState | None] = slurm_state) -> Status:
    """The status of a run dir, now. Damaged files are among its `problems`; what the others say is still reported.
    `ask_slurm` says what Slurm says of a job; asked only if the run has not finished and no process holds its lock.
    UserError: there is no run dir."""
    if not (found := _files_of_run(run_dir)):
        raise UserError("there is no run dir", location=run_dir, hint=files.run_dir_hint(run_dir))
    problems: list[str] = []
    run = _tolerant(problems, lambda: read_run_status(run_dir))
    job = _tolerant(problems, lambda: read_job(run_dir))
    locked = is_locked(run_dir / files.LOG)
    finished = (run is not None and run.state == "finished") or files.is_finished(run_dir) or files.DBN in found
    answer = ask_slurm(job) if job is not None and not locked and not finished else None
    slurm = None if answer is None else answer.name
    state = _state(run, locked is True, finished, job, slurm)
    if job is not None and slurm is None and state not in ("running", "finished"):
        problems.append("Slurm could not be asked: this is what the files and the lock of train.log say")
    elif locked is None and state in ("interrupted", "unknown"):
        problems.append("the lock of train.log could not be examined: it may be running")
    checkpoint = None if finished else peek_checkpoint(run_dir / files.CHECKPOINTS, problems.append)
    of_rbms = run is not None and run.kind == "training" and run.phase == "pretraining"
    figures = (run_dir / files.PRETRAIN if of_rbms else run_dir) / files.METRICS
    metrics = (_tolerant(problems, lambda: read_metrics(figures)) if figures.exists() else None) or Metrics()
    if state == "running":  # an earlier start may have ended
        metrics = replace(metrics, end=None)
    return Status(
        run_dir=run_dir,
        state=state,
        run=run,
        job=None if job is None else job.number,
        submitted=None if job is None else job.submitted,
        slurm=slurm,
        slurm_reason=None if answer is None else answer.reason,
        error=_error(run_dir, run, job, state, problems) if state in ENDED and state != "finished" else None,
        warning=(metrics.warning or None) if state == "finished" else None,
        seconds_since_update=_age(run_dir, files.LOG, files.STATUS, files.METRICS),
        checkpoint=None if checkpoint is None else checkpoint.to_dict(),
        resume_command=_resume_command(run_dir, run, job, state, problems),
        world_size=run.world_size if run else metrics.num_workers or (job.workers if job else None),
        metrics=metrics,
        estimated_end=_estimated_end(metrics, run, figures) if state == "running" else None,
        problems=tuple(problems),
    )


def _age(run_dir: Path, *names: str) -> float | None:
    """Seconds since one of these files was last written."""
    times = [path.stat().st_mtime for path in (run_dir / name for name in names) if path.is_file()]
    return max(0.0, time.time() - max(times)) if times else None


def _tolerant(problems: list[str], read: Callable[[], T]) -> T | None:
    """What `read` returns; None and a problem where the file is damaged or cannot be read."""
    try:
        return read()
    except UserError as error:
        problems.append(" ".join(str(error).split()))
    except OSError as error:
        problems.append(f"cannot read {error.filename}: {error.strerror}")
    return None


def _state(run: RunStatus | None, locked: bool, finished: bool, job: Job | None, slurm: str | None) -> State:
    """`slurm`: what Slurm says of the job, None if it was not or could not be asked."""
    if locked:
        return "running"
    if finished:
        return "finished"
    if slurm in _PENDING or (job is not None and slurm is None and run is None):
        return "pending"
    if slurm is not None and slurm not in _OVER:
        return "running"
    if run is None:  # the Slurm job is over, and no training has begun
        return "unknown" if slurm is None else "failed"
    if run.state != "running":
        return run.state
    restarting = run.world_size > 1 and time.time() - run.updated < _RESTART_SECONDS
    return "running" if restarting and slurm is None else "interrupted"


def _resume_command(
    run_dir: Path, run: RunStatus | None, job: Job | None, state: State, problems: list[str]
) -> str | None:
    """As a Slurm job with the options of the last one, if the last start was a job."""
    if state not in ("interrupted", "failed", "unknown"):  # one that diverged would diverge again
        return None
    known = len(problems)
    _tolerant(problems, lambda: files.refuse_lost_checkpoints(run_dir))
    if len(problems) > known:
        return None
    kind = run.kind if run is not None else "pretraining" if (run_dir / files.JOB_RECIPE).exists() else "training"
    command = resume_command(run_dir, kind)
    if job is None or (run is not None and run.slurm_job is None):
        return command
    return f"{command} {shlex.join(job.options or ('--slurm',))}"


def _error(run_dir: Path, run: RunStatus | None, job: Job | None, state: State, problems: list[str]) -> str | None:
    if run is not None and run.error is not None:
        return run.error.message + (f"\nhint: {run.error.hint}" if run.error.hint else "")
    output: str | None = _tolerant(problems, lambda: last_output(run_dir / files.JOB_OUTPUT))
    if output is None and state == "interrupted":
        return "it ended without a message: it was killed, or its machine went down"
    if output is None and state == "failed" and job is not None:
        return f"Slurm job {job.number} was cancelled before it began"
    return output


def _estimated_end(metrics: Metrics, run: RunStatus | None, path: Path) -> float | None:
    """When the last possible epoch ends, of a pretraining that of its RBM; None before the first has. `path`: of the
    metrics."""
    rbm = [row for row in metrics.pretraining if run is not None and row.rbm == run.rbm]
    trained, last = (rbm, rbm) if rbm else (metrics.train, metrics.cv)
    epochs = [row.epoch for row in trained][-_ESTIMATE_EPOCHS:]
    seconds = sum(row.seconds or 0.0 for row in (*trained, *metrics.cv) if row.epoch in epochs)
    if run is None or run.max_epochs is None or not epochs or not last:
        return None
    remaining = run.max_epochs - last[-1].epoch
    return time.time() + max(0.0, remaining * seconds / len(epochs) - (_age(path.parent, path.name) or 0.0))


def follow_status(run_dir: Path, show: Callable[[str], None], *, terminal: bool, as_json: bool = False) -> Status:
    """Shows the status every few seconds until the run has ended; returns the last one. On a terminal each replaces the
    one before. Elsewhere, and as JSON (one object a line), `show` gets one only when something in it has changed other
    than the time."""
    in_period = lru_cache(maxsize=1)(lambda job, period: slurm_state(job))
    before = None
    console = Console(file=unescaped(sys.stdout), quiet=not terminal or as_json)
    with Live(console=console, auto_refresh=False) as live:
        while True:
            status = read_status(run_dir, lambda job: in_period(job, time.monotonic() // SLURM_SECONDS))
            values = status.as_dict()
            lasting = {k: v for k, v in values.items() if k not in ("seconds_since_update", "estimated_end", "updated")}
            live.update(Text(status.as_text()), refresh=True)
            if (as_json or not terminal) and lasting != before:
                show(json.dumps(values, ensure_ascii=False) if as_json else status.as_text())
            if status.state in ENDED:
                return status
            before = lasting
            time.sleep(FOLLOW_SECONDS)
