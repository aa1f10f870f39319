"""Makes the records of runs: trains and evaluates them on this machine, side by side on its cores, or as Slurm jobs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from ddnn.inspection.status import read_status
from ddnn.recipe.load import load_recipe
from ddnn.reproduce import measure
from ddnn.reproduce.measure import TASK, EvaluationTask
from ddnn.reproduce.runs import OutputLayout, PlannedRun, RunRecord, dbn_parameters, read_record, write_record
from ddnn.reproduce.tables import ReproduceConfig
from ddnn.runs.run_status import DBN, JOB_OUTPUT, METRICS
from ddnn.slurm.job import Job, SbatchError, SlurmState, last_output, read_job, slurm_states
from ddnn.slurm.options import SlurmOptions, TrainingCommand
from ddnn.slurm.submit import submit
from ddnn.util.errors import DivergedError, UserError
from ddnn.util.files import ensure_directory, write_text
from ddnn.util.process import ProcessGroup, signal_name
from ddnn.util.system import usable_cores
from ddnn.util.text import plural

GRACE = 300.0  # seconds that a training has for its checkpoint
EVALUATION = "evaluation"  # folder in a run dir while it is evaluated: the task, log-likelihoods, the record


class CommandFailed(UserError):
    """A process that did not end with exit code 0; `divergence` is how the training diverged, where it did."""

    def __init__(self, command: Sequence[str], returncode: int, output_tail: str, log: Path) -> None:
        """`command` as the user would give it; `returncode` is negative where a signal ended it."""
        lines = [line.strip() for line in output_tail.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ddnn: error:")]
        last = (errors or lines or ["it wrote nothing"])[-1]
        self.divergence = None
        if returncode == DivergedError.exit_code:
            self.divergence = errors[-1].partition("error: ")[2] if errors else "the training diverged"
        ended = f"ended by {signal_name(-returncode)}" if returncode < 0 else f"exit code {returncode}"
        hint = f"see the log, then try again; it ran: {shlex.join(command)}"
        super().__init__(f"{ended}: {last[:300]}", location=log, hint=hint)


class CorePool:
    """So many cores, given out in the order of requests. Who needs more than there are gets all of them."""

    def __init__(self, number: int) -> None:
        self.number = max(1, number)
        self._free = threading.Semaphore(self.number)
        self._turn = threading.Semaphore()

    @contextmanager
    def acquire(self, number: int) -> Iterator[None]:
        """Waits for `number` cores, behind those who asked before, and returns them at the end of the block."""
        number = min(number, self.number)
        with self._turn:
            for _ in range(number):
                self._free.acquire()
        try:
            yield
        finally:
            self._free.release(number)


@dataclass
class LocalExecutor:
    """Trains runs, evaluates them and writes their records; one object for one call of `ddnn reproduce`."""

    config: ReproduceConfig
    folder: Path  # of the corpus
    layout: OutputLayout
    device: str
    cores: int
    report: Callable[[str], None]  # shows the user one line
    lock: int | None = None  # descriptor that all processes keep open

    def __post_init__(self) -> None:
        self.pool = CorePool(self.cores)
        self.processes = ProcessGroup(() if self.lock is None else (self.lock,))
        self._dbns: dict[int, Future[None]] = {}

    def execute(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Makes the records of these runs; returns an error for each run that has none. The caller holds the lock of
        the output directory, from before it read which runs are missing. KeyboardInterrupt: after all trainings that
        were running have been stopped."""
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
        dbns = {run.seed: run for run in runs if self.layout.needs_dbn(run)}
        self._dbns = {seed: threads.submit(self._pretrain, run) for seed, run in dbns.items()}
        order = sorted(runs, key=self.layout.needs_dbn)
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

    def _pretrain(self, run: PlannedRun) -> None:
        """Trains the RBMs that this run and the others of its seed start from."""
        path = self.layout.dbn_dir(run)
        arguments = ["pretrain", str(self.folder / self.config.dbn_recipe), "--set", f"seed={run.seed}"]
        with self.pool.acquire(1):
            self._call("ddnn.cli", [*arguments, "--run-dir", str(path), "--device", self.device], f"dbn-{run.seed}")
        self.report(f"RBMs of seed {run.seed}: {path}")

    def _execute_one(self, run: PlannedRun) -> str:
        """One run, from whatever of it exists to its record; its result in a line."""
        diverged, from_scratch = None, False
        arguments = train_arguments(self.layout, run, self.device)
        if not self.layout.is_trained(run):
            if run.dbn_digest and run.seed in self._dbns:
                self._dbns[run.seed].result()
            from_scratch = not (self.layout.run_dir(run) / METRICS).exists()
            with self.pool.acquire(run.workers):
                try:
                    self._call("ddnn.cli", arguments, run.name)
                except CommandFailed as error:
                    if error.divergence is None:
                        raise
                    diverged = error.divergence
        record = new_record(run, arguments, diverged)
        if diverged is None:
            with self.pool.acquire(1):
                record = self._evaluate(run, record)
            record = self._with_provenance(run, record, from_scratch)
        write_record(self.layout.records, record)
        return summarize(record)

    def _evaluate(self, run: PlannedRun, record: RunRecord) -> RunRecord:
        """The record with results, by a process of its own; UserError where that fails, is killed or told to stop."""
        run_dir = self.layout.run_dir(run)
        folder = run_dir / EVALUATION
        task = EvaluationTask(record=record, run_dir=run_dir, tests=self.config.tests, device=self.device)
        shutil.rmtree(folder, ignore_errors=True)
        ensure_directory(folder)
        try:
            write_text(folder / TASK, task.model_dump_json())
            self._call(measure.MODULE, [str(folder)], run.name)
            return read_record(folder / f"{record.name}.json")
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _call(self, module: str, arguments: Sequence[str], log: str) -> None:
        """The program of a module with these arguments, which computes in one thread: as many as the cores run at once."""
        path = self.layout.log(log)
        returncode, output_tail = self.processes.run(module, arguments, path, {**os.environ, "OMP_NUM_THREADS": "1"})
        if returncode:
            program = ["ddnn"] if module == "ddnn.cli" else ["python", "-m", module]
            raise CommandFailed([*program, *arguments], returncode, output_tail, path)

    def _with_provenance(self, run: PlannedRun, record: RunRecord, from_scratch: bool) -> RunRecord:
        """With the machine that trained, its cores, the RBMs that it started from; the evaluation knows only its own.
        Where it was not trained by a job, nor here and now `from_scratch`, what an earlier record of this very training
        says counts, and without one it is unknown."""
        if record.time is None:
            return record
        machine, cores, dbn = record.machine if record.precision else "", 0, ""  # a start row says both
        job, before = read_job(self.layout.run_dir(run)), self.layout.records / f"{record.name}.json"
        if (from_scratch or job) and run.dbn_digest and (file := self.layout.dbn_dir(run) / DBN).is_file():
            dbn = dbn_parameters(file)
        if job is not None:
            nodes = f"Slurm, {plural(job.nodes, 'node')}"
            machine, cores = f"{machine}, {nodes}" if machine else nodes, job.workers  # a core or GPU for each
        elif from_scratch:
            machine, cores = record.machine, usable_cores()
        elif before.is_file():
            earlier = read_record(before)
            if earlier.recipe == record.recipe and earlier.time and earlier.time.seconds == record.time.seconds:
                machine, cores, dbn = machine or earlier.machine, earlier.time.cores, earlier.dbn
        spent = record.time.model_copy(update={"cores": cores})
        return record.model_copy(update={"machine": machine, "dbn": dbn, "time": spent})


def train_arguments(layout: OutputLayout, run: PlannedRun, device: str) -> list[str]:
    """Of `ddnn`, which trains this run, or resumes it."""
    arguments = ["train", str(run.recipe), "--run-dir", str(layout.run_dir(run)), "--device", device, "--resume=auto"]
    return arguments + [word for override in overrides(layout, run) for word in ("--set", override)]


def overrides(layout: OutputLayout, run: PlannedRun) -> tuple[str, ...]:
    """As for --set, with the RBMs that the training starts from, where it does."""
    pretrain = json.dumps({"dbn": str(layout.dbn_dir(run)), "epochs": None})
    return (*run.overrides, f"pretrain={pretrain}") if run.dbn_digest else run.overrides


def new_record(run: PlannedRun, arguments: Sequence[str], diverged: str | None) -> RunRecord:
    names = {"condition": run.condition, "workers": run.workers, "seed": run.seed, "recipe": run.digest}
    return RunRecord.model_validate({**names, "failed": diverged, "command": shlex.join(["ddnn", *arguments])})


def summarize(record: RunRecord) -> str:
    if record.failure is not None:
        return f"did not train: {record.failure}"
    parts = [] if record.cv is None else [f"CV frame accuracy {100 * record.cv.frame_accuracy:.2f} %"]
    parts += [f"{name} {100 * metrics.frame_accuracy:.2f} %" for name, metrics in record.tests.items()]
    parts += [f"WER {name} {words.wer:.2f} %" for name, words in record.wers.items()]
    return ", ".join(parts)


class EndedJob(NamedTuple):
    """A job that ended without a result: of which run (or DBN), its id, the last error, and its output."""

    run: str
    job: str
    error: str | None
    output: str

    def __str__(self) -> str:
        error = (self.error or "no message: cancelled, or its time limit was reached").strip().splitlines()[0]
        return f"{self.run}, job {self.job}: {error[:300]}; see {self.output}"


@dataclass
class JobReport:
    """What became of runs that had no record, and of the RBMs that they need, by name: RBMs are called dbn-SEED."""

    dry_run: bool  # whether `submitted` only would be
    submitted: dict[str, str] = field(default_factory=dict)  # in this call -> id of the job
    pending: dict[str, str] = field(default_factory=dict)  # by earlier calls -> id of the job
    running: dict[str, str] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)  # their models exist, and are evaluated in this call
    diverged: dict[str, str] = field(default_factory=dict)  # -> the error
    ended: list[EndedJob] = field(default_factory=list)  # their runs are among the submitted

    def to_dict(self) -> dict[str, object]:
        would, did = ({}, self.submitted) if not self.dry_run else (self.submitted, {})
        told = {name: value for name, value in vars(self).items() if name not in ("dry_run", "submitted")}
        ended = [job._asdict() for job in self.ended]
        return {"submitted": did, "to_submit": list(would), **told, "ended": ended}


@dataclass
class SlurmExecutor:
    """Submits the runs that have neither a job nor a result; evaluates on this machine those that have finished."""

    local: LocalExecutor
    device: str  # of the jobs, as given to --device
    options: SlurmOptions
    retried: Collection[str] = ()  # names of runs that diverged before and are tried once more
    dry_run: bool = False  # submit nothing, write nothing

    def __post_init__(self) -> None:
        self.layout = self.local.layout
        self.jobs = JobReport(self.dry_run)

    def execute(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Checks each of these runs, which have no record that counts; `jobs` then says what became of them.

        The caller holds the lock of the output directory, as of `LocalExecutor.execute`. Returns what could not be
        submitted or evaluated, a sentence each. UserError: the options do not fit a run, Slurm cannot be asked about an
        existing job, or a job's record is damaged. Nothing has been submitted then.
        """
        ask = self._ask_slurm(runs)
        to_submit = [run for run in runs if not self._has_job_or_result(run, ask)]
        self._check_dbns(runs, ask)
        # All scripts are made without submitting one, so that errors appear before there are jobs.
        dbns = [run for run in self._missing_dbns(to_submit) if not self._dbn_job(run)]
        for run in dbns:
            self._submit_dbn(run, dry_run=True)
        for run in to_submit:
            self._submit_run(run, None, dry_run=True)
        if self.dry_run:
            self.jobs.submitted = dict.fromkeys([*map(_dbn_name, dbns), *(run.name for run in to_submit)], "")
            return []
        for run in runs:
            if run.name in self.jobs.diverged:
                arguments = train_arguments(self.layout, run, self.device)
                write_record(self.layout.records, new_record(run, arguments, self.jobs.diverged[run.name]))
        errors = self._submit(to_submit)
        return errors + self.local.execute([run for run in runs if run.name in self.jobs.finished])

    def _has_job_or_result(self, run: PlannedRun, ask: Callable[[Job], SlurmState | None]) -> bool:
        """Notes what became of a run; false where it must be submitted."""
        run_dir = self.layout.run_dir(run)
        if not run_dir.is_dir() or not any(run_dir.iterdir()):
            return False
        status = read_status(run_dir, ask)
        if status.slurm not in (None, "GONE") or status.state == "running":
            jobs = self.jobs.pending if status.state == "pending" else self.jobs.running
            jobs[run.name] = status.job or "none of Slurm"
        elif status.state == "finished":
            self.jobs.finished.append(run.name)
        elif status.state == "diverged" and status.error and run.name not in self.retried:
            self.jobs.diverged[run.name] = status.error.partition("\n")[0]
        else:
            if status.job is not None:  # else it was trained without Slurm, and interrupted
                self.jobs.ended.append(EndedJob(run.name, status.job, status.error, str(run_dir / JOB_OUTPUT)))
            return False
        return True

    def _check_dbns(self, runs: Sequence[PlannedRun], ask: Callable[[Job], SlurmState | None]) -> None:
        """Notes what became of the RBMs that these runs need."""
        for run in self._missing_dbns(runs):
            if (job := read_job(self.layout.dbn_dir(run))) is None:
                continue
            slurm, output = ask(job), self.layout.dbn_dir(run) / JOB_OUTPUT
            if slurm == SlurmState("GONE"):
                self.jobs.ended.append(EndedJob(_dbn_name(run), job.number, last_output(output), str(output)))
            else:
                jobs = self.jobs.pending if slurm is not None and slurm.name == "PENDING" else self.jobs.running
                jobs[_dbn_name(run)] = job.number

    def _missing_dbns(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """A run of each seed whose RBMs do not exist."""
        return list({run.seed: run for run in runs if self.layout.lacks_dbn(run)}.values())

    def _ask_slurm(self, runs: Sequence[PlannedRun]) -> Callable[[Job], SlurmState | None]:
        """The states of the jobs of these runs and of their DBNs, asked for all at once."""
        folders = [*map(self.layout.run_dir, runs), *map(self.layout.dbn_dir, self._missing_dbns(runs))]
        jobs = {job: folder for folder in folders if (job := read_job(folder)) is not None}
        states = slurm_states(list(jobs))

        def ask(job: Job) -> SlurmState | None:
            if states.get(job) is None:
                message = f"Slurm does not say what became of job {job.number}, and no run gets two jobs"
                raise UserError(message, location=jobs.get(job), hint="run the command where squeue answers")
            return states[job]

        return ask

    def _submit(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Submits jobs, those of missing DBNs before their runs; what could not be submitted."""
        errors: list[str] = []
        dbn_jobs = {run.seed: self._dbn_job(run) for run in self._missing_dbns(runs)}
        for run in runs:
            name, after = run.name, None
            try:
                if run.dbn_digest and run.seed in dbn_jobs:
                    if dbn_jobs[run.seed] is None:
                        name = _dbn_name(run)
                        self.jobs.submitted[name] = dbn_jobs[run.seed] = self._submit_dbn(run)
                    name, after = run.name, dbn_jobs[run.seed]
                self.jobs.submitted[name] = self._submit_run(run, after)
            except UserError as error:
                errors.append(f"{name}: {error}")
                if isinstance(error, SbatchError):
                    break
                continue
            if run.name in self.retried:  # its new result counts
                (self.layout.records / f"{run.name}.json").unlink(missing_ok=True)
        return errors

    def _dbn_job(self, run: PlannedRun) -> str | None:
        """The job that trains the RBMs of its seed, pending or running."""
        return self.jobs.pending.get(_dbn_name(run)) or self.jobs.running.get(_dbn_name(run))

    def _submit_dbn(self, run: PlannedRun, *, dry_run: bool = False) -> str:
        recipe = self.local.folder / self.local.config.dbn_recipe
        options = replace(  # one DBN serves runs of all sizes: the nodes of theirs are not for it
            self.options,
            job_name=self.options.job_name or f"ddnn-{_dbn_name(run)}",
            settings={k: v for k, v in self.options.settings.items() if k not in ("nodes", "workers_per_node")},
        )
        run_dir, workers = self.layout.dbn_dir(run), load_recipe(recipe).parallel.workers
        command = TrainingCommand("pretraining", recipe, run_dir, (f"seed={run.seed}",), workers, self.device)
        return submit(command, options, dry_run=dry_run).number or ""

    def _submit_run(self, run: PlannedRun, after: str | None, *, dry_run: bool = False) -> str:
        settings = run.overrides if dry_run else overrides(self.layout, run)  # in a dry run the RBMs may not exist yet
        run_dir = self.layout.run_dir(run)
        command = TrainingCommand("training", run.recipe, run_dir, settings, run.workers, self.device, "auto")
        return submit(command, self.options, dry_run=dry_run, after=after).number or ""


def _dbn_name(run: PlannedRun) -> str:
    return f"dbn-{run.seed}"
