"""Runs as Slurm jobs: submits a job for each run that is missing, and checks the jobs of earlier calls."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddnn.inspection.status import Status, read_status
from ddnn.recipe.load import load_recipe
from ddnn.reproduce.executor_local import LocalExecutor, new_record, overrides, train_arguments
from ddnn.reproduce.records import write_record
from ddnn.reproduce.runs import PlannedRun
from ddnn.slurm import SlurmOptions
from ddnn.slurm.job import Job, SbatchError, last_output, read_job, slurm_states
from ddnn.slurm.submit import submit_pretraining, submit_training
from ddnn.training.run_status import DBN, JOB_OUTPUT
from ddnn.util.errors import UserError

MAX_LINES = 20


@dataclass(frozen=True)
class EndedJob:
    """A job that ended without a result: of which run (or DBN), its id, the last error, and its output."""

    name: str
    job_id: str
    error: str | None
    output: Path

    def __str__(self) -> str:
        error = (self.error or "no message: cancelled, or its time limit was reached").strip().splitlines()[0]
        return f"{self.name}, job {self.job_id}: {error[:300]}; see {self.output}"


@dataclass
class JobReport:
    """What became of runs that had no record.

    Attributes:
        dry_run: whether `submitted` only would be.
        submitted: run, or "dbn-SEED" of RBMs -> id of the job that it got in this call.
        pending, running: the same of jobs of earlier calls.
        finished: runs whose model exists, to be evaluated in this call.
        diverged: run -> the error.
        ended: jobs that ended without a result; their runs are among the submitted.
    """

    dry_run: bool
    submitted: dict[str, str] = field(default_factory=dict)
    pending: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    diverged: dict[str, str] = field(default_factory=dict)
    ended: list[EndedJob] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "submitted": {} if self.dry_run else self.submitted,
            "to_submit": list(self.submitted) if self.dry_run else [],
            "pending": self.pending,
            "running": self.running,
            "finished": self.finished,
            "diverged": self.diverged,
            "ended": [{"run": e.name, "job": e.job_id, "error": e.error, "output": str(e.output)} for e in self.ended],
        }

    def to_lines(self) -> list[str]:
        """Counts, jobs by name, and what to do next."""
        groups = {
            "would be submitted" if self.dry_run else "submitted": _named(self.submitted),
            "pending": _named(self.pending),
            "running": _named(self.running),
            "finished": self.finished,
            "diverged": [f"{name}: {error}" for name, error in self.diverged.items()],
            "ended without a result": list(map(str, self.ended)),
        }
        lines = [f"jobs: {', '.join(f'{len(items)} {group}' for group, items in groups.items())}"]
        for group, items in groups.items():
            if group != "finished":
                lines += [f"{group}: {item}" for item in items[:MAX_LINES]]
                lines += [f"{group}: and {len(items) - MAX_LINES} more"] if len(items) > MAX_LINES else []
        if not self.dry_run and (self.submitted or self.pending or self.running):
            lines.append("run the same command again when jobs have ended: it records them and submits what is missing")
        return lines


def _named(jobs: Mapping[str, str]) -> list[str]:
    return [f"{name}: job {job_id}" if job_id else name for name, job_id in jobs.items()]


def check_sbatch() -> None:
    """UserError where no job can be submitted from here."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not found on PATH: is this a login node of a Slurm cluster?",
            location="--slurm",
            hint="run it on one, or with --dry-run to see which jobs it would submit",
        )


@dataclass
class SlurmExecutor:
    """Submits the runs that have neither a job nor a result; evaluates on this machine those that have finished.

    Attributes:
        local: evaluates; also has the corpus and the layout.
        device: of the jobs, as given to --device.
        retried: names of runs that diverged before and are tried once more.
        dry_run: submit nothing, write nothing.
    """

    local: LocalExecutor
    device: str
    options: SlurmOptions
    retried: Collection[str] = ()
    dry_run: bool = False

    def __post_init__(self) -> None:
        self.jobs = JobReport(self.dry_run)

    def execute(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Checks each of these runs, which have no record that counts; `jobs` then says what became of them.

        The caller holds the lock of the output directory, from before it read which runs are missing.

        Returns:
            What could not be submitted or evaluated, a sentence each.

        Raises:
            UserError: the options do not fit a run, Slurm cannot be asked about an existing job, or a job's record is
                damaged. Nothing has been submitted then.
        """
        to_submit = self._check_runs(runs)
        dbns = self._check_scripts(to_submit)
        if self.dry_run:
            self.jobs.submitted = dict.fromkeys(
                [*(f"dbn-{seed}" for seed in dbns), *(run.name for run in to_submit)], ""
            )
            return []
        for run in runs:
            if run.name in self.jobs.diverged:
                arguments = train_arguments(self.local.layout, run, self.device)
                write_record(self.local.layout.records, new_record(run, arguments, self.jobs.diverged[run.name]))
        errors = self._submit(to_submit)
        return errors + self.local.execute([run for run in runs if run.name in self.jobs.finished])

    def _check_runs(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Fills `jobs` with what became of the runs and of the DBNs that they need; those that have no job now."""
        to_submit = []
        ask = self._ask_slurm(runs)
        for run in runs:
            run_dir = self.local.layout.run_dir(run)
            status = read_status(run_dir, ask) if run_dir.is_dir() and any(run_dir.iterdir()) else None
            diverged = None if status is None or run.name in self.retried else _divergence(status)
            if status is None:
                to_submit.append(run)
            elif status.slurm not in (None, "GONE") or status.state == "running":
                jobs = self.jobs.pending if status.state == "pending" else self.jobs.running
                jobs[run.name] = status.job or "none of Slurm"
            elif status.state == "finished":
                self.jobs.finished.append(run.name)
            elif diverged is not None:
                self.jobs.diverged[run.name] = diverged
            else:
                to_submit.append(run)
                if status.job is not None:  # else it was trained without Slurm, and interrupted
                    self.jobs.ended.append(EndedJob(run.name, status.job, status.error, run_dir / JOB_OUTPUT))
        for seed, dbn_dir in self._missing_dbns(runs).items():
            job = read_job(dbn_dir)
            if job is None:
                continue
            state, output = ask(job), dbn_dir / JOB_OUTPUT
            if state == "GONE":
                self.jobs.ended.append(EndedJob(f"dbn-{seed}", job.number, last_output(output), output))
            else:
                jobs = self.jobs.pending if state == "PENDING" else self.jobs.running
                jobs[f"dbn-{seed}"] = job.number
        return to_submit

    def _missing_dbns(self, runs: Sequence[PlannedRun]) -> dict[int, Path]:
        """Seed -> dir of the RBMs that do not exist."""
        needed = {run.seed: self.local.layout.dbn_dir(run.seed) for run in runs if run.from_dbn}
        return {seed: dbn_dir for seed, dbn_dir in needed.items() if not (dbn_dir / DBN).exists()}

    def _ask_slurm(self, runs: Sequence[PlannedRun]) -> Callable[[Job], str | None]:
        """The states of the jobs of these runs and of their DBNs, asked for all at once."""
        folders = [self.local.layout.run_dir(run) for run in runs] + list(self._missing_dbns(runs).values())
        jobs = {job: folder for folder in folders if (job := read_job(folder)) is not None}
        states = slurm_states(list(jobs))

        def ask(job: Job) -> str | None:
            if states.get(job) is None:
                raise UserError(
                    f"Slurm does not say what became of job {job.number}, and no run gets two jobs",
                    location=jobs.get(job),
                    hint="run the command where squeue answers",
                )
            return states[job]

        return ask

    def _check_scripts(self, runs: Sequence[PlannedRun]) -> list[int]:
        """Makes all scripts without submitting one, so that errors appear before there are jobs. Seeds of new DBNs."""
        seeds = [seed for seed in self._missing_dbns(runs) if not self._dbn_job(seed)]
        for seed in seeds:
            self._submit_dbn(seed, dry_run=True)
        for run in runs:
            self._submit_run(run, None, dry_run=True)
        return seeds

    def _submit(self, runs: Sequence[PlannedRun]) -> list[str]:
        """Submits jobs, those of missing DBNs before their runs; what could not be submitted."""
        errors: list[str] = []
        missing = self._missing_dbns(runs)
        dbn_jobs = {seed: job_id for seed in missing if (job_id := self._dbn_job(seed))}
        for run in runs:
            name = run.name
            try:
                if run.from_dbn and run.seed in missing and run.seed not in dbn_jobs:
                    name = f"dbn-{run.seed}"
                    self.jobs.submitted[name] = dbn_jobs[run.seed] = self._submit_dbn(run.seed)
                name = run.name
                self.jobs.submitted[name] = self._submit_run(run, dbn_jobs.get(run.seed) if run.from_dbn else None)
            except UserError as error:
                errors.append(f"{name}: {error}")
                if isinstance(error, SbatchError):
                    break
                continue
            if run.name in self.retried:  # its new result counts
                (self.local.layout.records / f"{run.name}.json").unlink(missing_ok=True)
        return errors

    def _dbn_job(self, seed: int) -> str | None:
        """The job that trains the RBMs of a seed, pending or running."""
        name = f"dbn-{seed}"
        return self.jobs.pending.get(name) or self.jobs.running.get(name)

    def _submit_dbn(self, seed: int, *, dry_run: bool = False) -> str:
        recipe = self.local.folder / self.local.config.dbn_recipe
        options = replace(  # one DBN serves runs of all sizes: the nodes of theirs are not for it
            self.options,
            job_name=self.options.job_name or f"ddnn-dbn-{seed}",
            settings={k: v for k, v in self.options.settings.items() if k not in ("nodes", "workers_per_node")},
        )
        workers = load_recipe(recipe).parallel.workers
        dbn_dir = self.local.layout.dbn_dir(seed)
        sent = submit_pretraining(recipe, dbn_dir, (f"seed={seed}",), workers, self.device, options, dry_run=dry_run)
        return sent.number or ""

    def _submit_run(self, run: PlannedRun, after: str | None, *, dry_run: bool = False) -> str:
        # In a dry run the RBMs may not exist yet.
        settings = run.overrides if dry_run else overrides(self.local.layout, run)
        sent = submit_training(
            run.recipe,
            self.local.layout.run_dir(run),
            settings,
            run.workers,
            self.device,
            self.options,
            dry_run=dry_run,
            resume=True,
            after=after,
        )
        return sent.number or ""


def _divergence(status: Status) -> str | None:
    """How the training diverged, in a line; None where that is not why it ended."""
    return status.error.partition("\n")[0] if status.state == "diverged" and status.error else None
