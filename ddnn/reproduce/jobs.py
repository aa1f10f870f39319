"""Executes runs as Slurm jobs, a `ddnn train --slurm` for each: every call submits the runs that have neither a job nor a
result, and evaluates on this machine those that have finished."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddnn.inspection.status import read_status
from ddnn.recipe.load import load_recipe
from ddnn.reproduce.executor import LocalExecutor, new_record, train_arguments
from ddnn.reproduce.runs import PlannedRun, write_record
from ddnn.runs.run_status import JOB_OUTPUT
from ddnn.slurm.job import Job, SbatchError, SlurmState, read_job, slurm_states
from ddnn.slurm.options import SlurmOptions
from ddnn.slurm.submit import submit
from ddnn.training.command import TrainingCommand
from ddnn.util.errors import UserError


@dataclass
class SlurmExecutor:
    """`jobs`: the state of the runs and of the RBMs that they need, by name (RBMs are called dbn-SEED), as in `--json`:
    `submitted` in this call, `pending` and `running`: name -> number of the job; `finished`: evaluated in this call;
    `diverged`: name -> error; `ended` without a result: these are submitted again."""

    local: LocalExecutor
    device: str  # for the jobs
    options: SlurmOptions
    retried: Collection[str] = ()  # names of runs that diverged before and are tried once more
    dry_run: bool = False  # submit and write nothing

    def __post_init__(self) -> None:
        self.jobs: dict[str, Any] = {name: {} for name in ("submitted", "pending", "running", "diverged")}
        self.jobs |= {name: [] for name in ("to_submit", "finished", "ended")}

    def execute(self, runs: Sequence[PlannedRun]) -> dict[str, UserError]:
        """Looks at each of these runs, which have no record that counts. The caller holds the lock of the output
        directory, as for `LocalExecutor.execute`.

        Returns what could not be submitted or evaluated, by name. UserError: the options do not fit a run, Slurm cannot
        be asked about an existing job, or a job's record is damaged. Nothing has been submitted then.
        """
        folders = {run.dbn_name: run.dbn_dir for run in runs if run.lacks_dbn}
        folders |= {run.name: run.run_dir for run in runs}
        states = slurm_states([job for folder in folders.values() if (job := read_job(folder)) is not None])
        without_job = {name for name, folder in folders.items() if self._needs_job(name, folder, states)}
        to_submit = [run for run in runs if run.name in without_job]
        # All scripts are made without submitting one, so that errors appear before there are jobs.
        self._submit(to_submit, dry_run=True)
        names, self.jobs["submitted"] = list(self.jobs["submitted"]), {}
        if self.dry_run:
            self.jobs["to_submit"] = names
            return {}
        for run in runs:
            if error := self.jobs["diverged"].get(run.name):
                write_record(self.local.records, new_record(run, train_arguments(run, self.device), error))
        errors = self._submit(to_submit)
        return errors | self.local.execute([run for run in runs if run.name in self.jobs["finished"]])

    def _needs_job(self, name: str, folder: Path, states: Mapping[Job, SlurmState | None]) -> bool:
        """Records the state of a run or of RBMs in `jobs`; returns whether they must be submitted."""
        if not folder.is_dir() or not any(folder.iterdir()):
            return True

        def ask(job: Job) -> SlurmState:
            if (state := states.get(job)) is None:
                message = f"Slurm does not say what became of job {job.number}, and no run gets two jobs"
                raise UserError(message, location=folder, hint="run the command where squeue answers")
            return state

        status, jobs = read_status(folder, ask), self.jobs
        if status.slurm not in (None, "GONE") or status.state == "running":
            jobs["pending" if status.state == "pending" else "running"][name] = status.job or "none of Slurm"
        elif status.state == "finished":
            jobs["finished"].append(name)
        elif status.state == "diverged" and status.error and folder.name.startswith(name) and name not in self.retried:
            jobs["diverged"][name] = status.error.partition("\n")[0]
        else:
            if status.job is not None:  # else it was trained without Slurm, and interrupted
                output = str(folder / JOB_OUTPUT)
                jobs["ended"].append({"run": name, "job": status.job, "error": status.error, "output": output})
            return True
        return False

    def _submit(self, runs: Sequence[PlannedRun], *, dry_run: bool = False) -> dict[str, UserError]:
        """Submits jobs, those of missing RBMs before their runs; returns what could not be submitted."""
        errors: dict[str, UserError] = {}
        submitted, device = self.jobs["submitted"], self.device
        for run in runs:
            dbn_jobs = self.jobs["pending"] | self.jobs["running"] | submitted
            try:
                if run.lacks_dbn and run.dbn_name not in dbn_jobs:
                    recipe, settings = self.local.dbn_recipe, (f"seed={run.seed}",)
                    workers = load_recipe(recipe).parallel.workers
                    command = TrainingCommand("pretraining", recipe, run.dbn_dir, settings, workers, device)
                    options = self._options_for_dbn(run.dbn_name)
                    dbn_jobs[run.dbn_name] = submit(command, options, dry_run=dry_run).number
                    submitted[run.dbn_name] = dbn_jobs[run.dbn_name]
                overrides = run.overrides[:2] if dry_run else run.overrides  # in a dry run the RBMs may not exist yet
                arguments = run.recipe, run.run_dir, overrides, run.workers, device
                command = TrainingCommand("training", *arguments, resume="auto")
                after = dbn_jobs.get(run.dbn_name) if run.lacks_dbn else None
                submitted[run.name] = submit(command, self.options, dry_run=dry_run, after=after).number
                if run.name in self.retried and not dry_run:  # its new result counts
                    (self.local.records / f"{run.name}.json").unlink(missing_ok=True)
            except UserError as error:
                if dry_run:
                    raise
                errors[run.name] = error
                if isinstance(error, SbatchError):
                    break
        return errors

    def _options_for_dbn(self, name: str) -> SlurmOptions:
        """The RBMs serve runs of all sizes: the nodes of these are not for them."""
        settings = {k: v for k, v in self.options.settings.items() if k not in ("nodes", "workers_per_node")}
        return replace(self.options, job_name=self.options.job_name or f"ddnn-{name}", settings=settings)
