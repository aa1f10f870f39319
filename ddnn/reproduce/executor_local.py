"""Trains and evaluates runs on this machine, side by side on its cores."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddnn.reproduce import measure
from ddnn.reproduce.corpus import ReproduceConfig
from ddnn.reproduce.measure import TASK, EvaluationTask
from ddnn.reproduce.records import RunRecord, read_record, write_record
from ddnn.reproduce.runs import OutputLayout, PlannedRun
from ddnn.slurm.job import Job, read_job
from ddnn.training.run_status import DBN, FINAL, METRICS
from ddnn.util.errors import DivergedError, UserError
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.process import ProcessGroup, signal_name
from ddnn.util.system import usable_cores

GRACE = 300.0
"""Seconds that a training has for its checkpoint."""
EVALUATION = "evaluation"
"""Folder in a run dir while it is evaluated: the task, log-likelihoods, the record."""


class CommandFailed(UserError):
    """A process that did not end with exit code 0.

    Attributes:
        returncode: its exit code, negative where a signal ended it.
        output_tail: the end of its output.
    """

    def __init__(self, command: Sequence[str], returncode: int, output_tail: str, log: Path) -> None:
        """`command` as the user would give it."""
        lines = [line.strip() for line in output_tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ddnn: error:")]
        last = (errors or lines or ["it wrote nothing"])[-1]
        ended = f"ended by {signal_name(-returncode)}" if returncode < 0 else f"exit code {returncode}"
        self.returncode, self.output_tail = returncode, output_tail
        hint = f"see the log, then try again; it ran: {shlex.join(command)}"
        super().__init__(f"{ended}: {last[:300]}", location=log, hint=hint)

    @property
    def divergence(self) -> str | None:
        """How the training diverged, in a line; None where that is not why it failed."""
        if self.returncode != DivergedError.exit_code:
            return None
        lines = [line.strip() for line in self.output_tail.splitlines()]
        errors = [line.partition("error: ")[2] for line in lines if line.startswith("ddnn: error: ")]
        return errors[-1] if errors else "the training diverged"


class CorePool:
    """So many cores, given out in the order of requests. Who needs more than there are gets all of them."""

    def __init__(self, number: int) -> None:
        self.number = max(1, number)
        self._free = self.number
        self._queue: list[object] = []
        self._changed = threading.Condition()

    @contextmanager
    def acquire(self, number: int) -> Iterator[None]:
        """Waits for `number` cores, behind those who asked before, and returns them at the end of the block."""
        number, ticket = min(number, self.number), object()
        with self._changed:
            self._queue.append(ticket)
            self._changed.wait_for(lambda: self._queue[0] is ticket and self._free >= number)
            self._queue.pop(0)
            self._free -= number
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += number
                self._changed.notify_all()


@dataclass
class LocalExecutor:
    """Trains runs, evaluates them and writes their records; one object for one call of `ddnn reproduce`.

    Attributes:
        folder: of the corpus.
        report: shows the user one line.
        lock: descriptor that all processes keep open; None: none.
    """

    config: ReproduceConfig
    folder: Path
    layout: OutputLayout
    device: str
    cores: int
    report: Callable[[str], None]
    lock: int | None = None

    def __post_init__(self) -> None:
        self.pool = CorePool(self.cores)
        self.processes = ProcessGroup(() if self.lock is None else (self.lock,))
        self._dbns: dict[int, Future[None]] = {}

    def execute(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Makes the records of these runs; returns an error for each run that has none.

        The caller holds the lock of the output directory, from before it read which runs are missing.

        Raises:
            KeyboardInterrupt: after all trainings that were running have been stopped.
        """
        with ThreadPoolExecutor(self.pool.number + 1) as threads:
            try:
                return self._execute(runs, threads)
            except BaseException:
                self.report("stopping: trainings write a checkpoint, and the same command resumes them")
                threads.shutdown(wait=False, cancel_futures=True)
                self.processes.terminate(GRACE)
                raise

    def _execute(self, runs: Sequence[PlannedRun], threads: ThreadPoolExecutor) -> list[str]:
        """RBMs first, then the runs that need none of these, which compute while the RBMs are trained."""
        errors: list[str] = []
        start = time.monotonic()
        seeds = dict.fromkeys(run.seed for run in runs if self._needs_dbn(run))
        self._dbns = {seed: threads.submit(self._pretrain, seed) for seed in seeds}
        order = sorted(runs, key=self._needs_dbn)
        futures = [threads.submit(self._execute_one, run) for run in order]
        for done, (run, future) in enumerate(zip(order, futures, strict=True), 1):
            try:
                result = future.result()
            except UserError as error:
                errors.append(f"{run.name}: {error}")
                result = f"failed: {error.message}"
            remaining = (time.monotonic() - start) / done * (len(runs) - done)
            estimate = f"; about {remaining / 60:.0f} min remaining" if remaining else ""
            self.report(f"{done}/{len(runs)} {run.name}: {result}{estimate}")
        return errors

    def _needs_dbn(self, run: PlannedRun) -> bool:
        """Whether the run is still to be trained, from RBMs that do not exist yet."""
        trained = (self.layout.run_dir(run) / FINAL).exists()
        return run.from_dbn and not trained and not (self.layout.dbn_dir(run.seed) / DBN).exists()

    def _pretrain(self, seed: int) -> None:
        path = self.layout.dbn_dir(seed)
        arguments = ["pretrain", str(self.folder / self.config.dbn_recipe), "--set", f"seed={seed}"]
        arguments += ["--run-dir", str(path), "--device", self.device]
        with self.pool.acquire(1):
            self._call("ddnn.cli", arguments, f"dbn-{seed}")
        self.report(f"RBMs of seed {seed}: {path}")

    def _execute_one(self, run: PlannedRun) -> str:
        """One run, from whatever of it exists to its record; its result in a line."""
        run_dir = self.layout.run_dir(run)
        diverged, from_scratch = None, False
        arguments = train_arguments(self.layout, run, self.device)
        if not (run_dir / FINAL).exists():
            if run.from_dbn and run.seed in self._dbns:
                self._dbns[run.seed].result()
            from_scratch = not (run_dir / METRICS).exists()
            with self.pool.acquire(run.workers):
                diverged = self._train(run, arguments)
        record = new_record(run, arguments, diverged)
        if diverged is None:
            with self.pool.acquire(1):
                record = self._evaluate(run, record)
            record = self._with_provenance(run, record, read_job(run_dir), from_scratch)
        write_record(self.layout.records, record)
        return summarize(record)

    def _train(self, run: PlannedRun, arguments: Sequence[str]) -> str | None:
        """Trains, or resumes; how it diverged, where it did."""
        try:
            self._call("ddnn.cli", arguments, run.name)
        except CommandFailed as error:
            if error.divergence is None:
                raise
            return error.divergence
        return None

    def _evaluate(self, run: PlannedRun, record: RunRecord) -> RunRecord:
        """The record with results, by a process of its own.

        Raises:
            UserError: the process failed, was killed or told to stop; its folder cannot be created.
        """
        run_dir = self.layout.run_dir(run)
        folder = run_dir / EVALUATION
        task = EvaluationTask(record=record, run_dir=run_dir, tests=self.config.tests, device=self.device)
        _remove(folder)
        ensure_directory(folder)
        try:
            write_text(folder / TASK, task.model_dump_json())
            self._call(measure.MODULE, [str(folder)], run.name)
            return read_record(folder / f"{record.name}.json")
        finally:
            _remove(folder)

    def _call(self, module: str, arguments: Sequence[str], log: str) -> None:
        """`python -m MODULE` with these arguments, which computes in one thread: as many as the cores run at once."""
        path = self.layout.log(log)
        completed = self.processes.run(module, arguments, path, {**os.environ, "OMP_NUM_THREADS": "1"})
        if completed.returncode:
            program = ["ddnn"] if module == "ddnn.cli" else ["python", "-m", module]
            raise CommandFailed([*program, *arguments], completed.returncode, completed.output_tail, path)

    def _with_provenance(self, run: PlannedRun, record: RunRecord, job: Job | None, from_scratch: bool) -> RunRecord:
        """With the machine that trained, its cores, and the RBMs that it started from: the evaluation knows its own only.

        Args:
            job: that trained it; None where none did.
            from_scratch: whether it was trained here and now from the beginning; else what an earlier record of this
                very training says counts, and without one it is unknown.
        """
        if record.time is None:
            return record
        machine, cores = "", 0
        dbn = file_digest(self.layout.dbn_dir(run.seed) / DBN) if run.from_dbn and (from_scratch or job) else ""
        if job is not None:
            machine, cores = f"Slurm, {job.nodes} node{'s' * (job.nodes > 1)}", job.workers  # a core or GPU for each
        elif from_scratch:
            machine, cores = record.machine, usable_cores()
        elif (path := self.layout.records / f"{record.name}.json").is_file():
            before = read_record(path)
            if before.recipe == record.recipe and before.time and before.time.seconds == record.time.seconds:
                machine, cores, dbn = before.machine, before.time.cores, before.dbn
        spent = record.time.model_copy(update={"cores": cores})
        return record.model_copy(update={"machine": machine, "dbn": dbn, "time": spent})


def train_arguments(layout: OutputLayout, run: PlannedRun, device: str) -> list[str]:
    """Of `ddnn`, which trains this run, or resumes it."""
    arguments = ["train", str(run.recipe), "--run-dir", str(layout.run_dir(run)), "--device", device, "--resume"]
    return arguments + [word for override in overrides(layout, run) for word in ("--set", override)]


def overrides(layout: OutputLayout, run: PlannedRun) -> tuple[str, ...]:
    """As for --set, with the RBMs that the training starts from, where it does."""
    pretrain = {"dbn": str(layout.dbn_dir(run.seed)), "epochs": None}
    return (*run.overrides, "pretrain=" + json.dumps(pretrain)) if run.from_dbn else run.overrides


def new_record(run: PlannedRun, arguments: Sequence[str], diverged: str | None) -> RunRecord:
    """The record of a run without results, or of one that diverged."""
    return RunRecord(
        condition=run.condition,
        workers=run.workers,
        seed=run.seed,
        recipe=run.digest,
        failed=diverged,
        command=shlex.join(["ddnn", *arguments]),
    )


def file_digest(path: Path) -> str:
    """The first 12 digits of the SHA-256 of a file; "" where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return ""


def summarize(record: RunRecord) -> str:
    """The result of a run in a line."""
    if record.failed is not None:
        return record.failed
    parts = [] if record.cv is None else [f"CV frame accuracy {100 * record.cv.frame_accuracy:.2f} %"]
    parts += [f"{name} {100 * metrics.frame_accuracy:.2f} %" for name, metrics in record.tests.items()]
    parts += [f"WER {name} {words.wer:.2f} %" for name, words in record.wers.items()]
    return ", ".join(parts)


def _remove(folder: Path) -> None:
    try:
        if folder.exists():
            shutil.rmtree(folder)
    except OSError as error:
        message = f"cannot remove: {error.strerror or error}"
        raise UserError(message, location=folder, hint="remove it by hand") from error
