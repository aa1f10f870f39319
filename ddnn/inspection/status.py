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

from ddnn.nn.figures import FIGURES, FRAME_ACCURACY, LOSS
from ddnn.runs import run_status as files
from ddnn.runs.checkpoint_manifest import peek_checkpoint
from ddnn.runs.metrics import Metrics, read_metrics
from ddnn.runs.rows import EpochRow, MetricsRow, format_figures
from ddnn.runs.run_status import RunStatus, read_run_status, resume_command
from ddnn.slurm.job import Job, SlurmState, last_output, read_job, slurm_state, slurm_states
from ddnn.util.errors import UserError
from ddnn.util.files import is_locked
from ddnn.util.text import printable, render, table, unescaped

FRACTIONS = ("compute", "comm", "wait", "data")
ENDED = ("finished", "interrupted", "diverged", "failed", "unknown")
FOLLOW_SECONDS, SLURM_SECONDS = 5.0, 30.0
"""Between two looks at the files; and only once in so many is Slurm asked, whose one daemon serves a whole cluster."""
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT")
_OVER = ("COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "PREEMPTED", "DEADLINE", "OUT_OF_MEMORY",
         "NODE_FAIL", "BOOT_FAIL", "GONE")  # fmt: skip
_RESTART_SECONDS = 60.0  # the launcher of several workers may restart a job of which nothing was heard for so long
_ESTIMATE_EPOCHS = 3

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
        return {
            **({} if self.run is None else self.run.model_dump(mode="json", exclude={"schema_version"})),
            **{name: value for name, value in vars(self).items() if name not in ("run", "metrics")},
            **{name: row and row.model_dump() for name, row in rows.items()},
            **{"run_dir": str(self.run_dir), "fractions": self.fractions, "restarts": self.restarts},
            "reconstruction_errors": metrics.reconstruction_errors,
        }

    @property
    def slurm_text(self) -> str:
        return ": ".join(filter(None, (self.slurm, self.slurm_reason)))

    def row(self, figures_shown: Sequence[str]) -> tuple[str, ...]:
        """Its cells in the table of `Statuses`."""
        run, model, train = self.run, self.metrics.last_accepted, self.metrics.train[-1:]
        epoch = f"{self.last.epoch if self.last else 0}" + (f"/{run.max_epochs}" if run and run.max_epochs else "")
        if run is not None and run.kind == "pretraining":
            epoch = f"RBM {run.rbm}/{run.num_rbms}" if run.rbm else ""
        values = [(FIGURES[name], model.figures.get(name) if model else None) for name in figures_shown]
        figures = ["" if value is None else kind.format(value) for kind, value in values]
        speed = f"{train[0].frames_per_second or 0.0:.0f}" if train else ""
        reason = self.slurm_text if self.state == "pending" else self.error or self.warning
        note = next(filter(None, (reason, *self.problems)), "").partition("\n")[0]
        return (str(self.run_dir), self.state, epoch, *figures, speed, note)

    def as_text(self) -> str:
        text = render(
            "status.txt.j2",
            **{"status": self, "run": self.run, "metrics": self.metrics, "now": time.time()},
            end_time=time.strftime("%Y-%m-%d %H:%M", time.localtime(min(self.estimated_end or 0.0, 4e9))),
            **{"format_figures": format_figures, "printable": printable},
        )
        return "\n".join(filter(str.strip, text.splitlines()))


@dataclass(frozen=True)
class Statuses:
    """Of several runs, in the order in which they were named."""

    runs: tuple[Status, ...]

    def as_dict(self) -> list[dict[str, Any]]:
        return [run.as_dict() for run in self.runs]

    def as_text(self) -> str:
        models = [run.metrics.last_accepted for run in self.runs]
        known = {LOSS.name, FRAME_ACCURACY.name}.union(*(model.figures for model in models if model))
        names = [name for name in FIGURES if name in known]
        header = ("run", "state", "epoch", *(f"CV {FIGURES[name].label}" for name in names), "frames/s", "note")
        return table([run.row(names) for run in self.runs], header, "lll" + "r" * len(names) + "rl")


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
    inside = sorted(entry for entry in path.glob("*") if entry.is_dir() and _is_run_dir(entry))
    return [path] if _is_run_dir(path) else inside or [path]


def _is_run_dir(path: Path) -> bool:
    names = (files.STATUS, files.LOG, files.RECIPE, files.METRICS, files.JOB_RECORD, files.FINAL, files.DBN)
    return any((path / name).exists() for name in names)


def read_status(run_dir: Path, ask_slurm: Callable[[Job], SlurmState | None] = slurm_state) -> Status:
    """The status of a run dir, now. Damaged files are among its `problems`; what the others say is still reported.
    `ask_slurm` says what Slurm says of a job; asked only if the run has not finished and no process holds its lock.
    UserError: there is no run dir."""
    if not _is_run_dir(run_dir):
        raise UserError("there is no run dir", location=run_dir, hint=files.run_dir_hint(run_dir))
    problems: list[str] = []
    run = _tolerant(problems, lambda: read_run_status(run_dir))
    job = _tolerant(problems, lambda: read_job(run_dir))
    locked = is_locked(run_dir / files.LOG)
    finished = (run is not None and run.state == "finished") or files.is_finished(run_dir)
    finished = finished or (run_dir / files.DBN).exists()
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
        resume_command=_tolerant(problems, lambda: _resume_command(run_dir, run, job))
        if state in ("interrupted", "failed", "unknown")
        else None,
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


def _resume_command(run_dir: Path, run: RunStatus | None, job: Job | None) -> str:
    """As a Slurm job with the options of the last one, if the last start was a job. UserError: its checkpoints are lost."""
    files.refuse_lost_checkpoints(run_dir)
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
            live.update(Text(status.as_text()), refresh=True)
            run = status.run and status.run.model_copy(update={"updated": 0.0})
            lasting = replace(status, seconds_since_update=None, estimated_end=None, run=run)
            if (as_json or not terminal) and lasting != before:
                show(json.dumps(status.as_dict(), ensure_ascii=False) if as_json else status.as_text())
            if status.state in ENDED:
                return status
            before = lasting
            time.sleep(FOLLOW_SECONDS)
