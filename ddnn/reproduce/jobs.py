"""Executes runs as Slurm jobs, a `ddnn train --slurm` for each: every call submits the runs that have neither a job nor a
result, and evaluates on this machine those that have finished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
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


class SlurmExecutor:
    """`jobs`: the state of the runs and of the RBMs that they need, by name (RBMs are called dbn-SEED), as in `--json`:
    `submitted` in this call, `pending` and `running`: name -> number of the job; `finished`: evaluated in this call;
    `diverged`: name -> error; `ended` without a result: these are submitted again."""

    def __init__(
        self,
        local: LocalExecutor,
        device: str,
        options: SlurmOptions,
        retried: Collection[str] = (),
        dry_run: bool = False,
    ) -> None:
        """`device`: for the jobs; `retried`: names of runs that diverged before and are tried once more; `dry_run`:
        submit and write nothing."""
        self.local, self.device, self.options, self.retried, self.dry_run = local, device, options, retried, dry_run
        self.jobs: dict[str, Any] = {name: {} for name in ("submitted", "pending", "running", "diverged")}
        self.jobs |= {name: [] for name in ("to_submit", "finished", "ended")}

    def execute(self, runs: Sequence[PlannedRun]) -> dict[str, UserError]:
        """Looks at each of these runs, which have no record that counts. The caller holds the lock of the output
        directory, as for `LocalExecutor.execute`.

        Returns what could not be submitted or evaluated, by name. UserError: the options do not fit a run, Slurm cannot
        be asked about an existing job, or a job's record is damaged. Nothing has been submitted then.
        """
        dbns = {run.dbn_name: run.dbn_dir for run in runs if run.lacks_dbn}
        folders = {**dbns, **{run.name: run.run_dir for run in runs}}
        ask_slurm = _ask_slurm(folders.values())
        without_job = {name for name, folder in folders.items() if self._needs_job(name, folder, ask_slurm)}
        to_submit = [run for run in runs if run.name in without_job]
        # All scripts are made without submitting one, so that errors appear before there are jobs.
        self._submit(to_submit, dry_run=True)
        self.jobs["to_submit"] = list(self.jobs["submitted"]) if self.dry_run else []
        self.jobs["submitted"].clear()
        if self.dry_run:
            return {}
        for run in runs:
            if error := self.jobs["diverged"].get(run.name):
                write_record(self.local.records, new_record(run, train_arguments(run, self.device), error))
        errors = self._submit(to_submit)
        return errors | self.local.execute([run for run in runs if run.name in self.jobs["finished"]])

    def _needs_job(self, name: str, folder: Path, ask_slurm: Callable[[Job], SlurmState | None]) -> bool:
        """Records the state of a run or of RBMs in `jobs`; returns whether they must be submitted."""
        if not folder.is_dir() or not any(folder.iterdir()):
            return True
        status, is_run = read_status(folder, ask_slurm), folder.name.startswith(name)
        if status.slurm not in (None, "GONE") or status.state == "running":
            self.jobs["pending" if status.state == "pending" else "running"][name] = status.job or "none of Slurm"
        elif status.state == "finished":
            self.jobs["finished"].append(name)
        elif status.state == "diverged" and status.error and is_run and name not in self.retried:
            self.jobs["diverged"][name] = status.error.partition("\n")[0]
        else:
            if status.job is not None:  # else it was trained without Slurm, and interrupted
                output = str(folder / JOB_OUTPUT)
                self.jobs["ended"].append({"run": name, "job": status.job, "error": status.error, "output": output})
            return True
        return False

    def _submit(self, runs: Sequence[PlannedRun], *, dry_run: bool = False) -> dict[str, UserError]:
        """Submits jobs, those of missing RBMs before their runs; returns what could not be submitted."""
        errors: dict[str, UserError] = {}
        submitted = self.jobs["submitted"]
        for run in runs:
            dbn_jobs = self.jobs["pending"] | self.jobs["running"] | submitted
            try:
                if run.lacks_dbn and run.dbn_name not in dbn_jobs:
                    dbn_jobs[run.dbn_name] = submitted[run.dbn_name] = self._submit_dbn(run, dry_run)
                after = dbn_jobs.get(run.dbn_name) if run.lacks_dbn else None
                overrides = run.overrides[:2] if dry_run else run.overrides  # in a dry run the RBMs may not exist yet
                arguments = run.recipe, run.run_dir, overrides, run.workers, self.device
                command = TrainingCommand("training", *arguments, resume="auto")
                job = submit(command, self.options, dry_run=dry_run, after=after)
            except UserError as error:
                if dry_run:
                    raise
                errors[run.name] = error
                if isinstance(error, SbatchError):
                    break
            else:
                submitted[run.name] = job.number
                if run.name in self.retried and not dry_run:  # its new result counts
                    (self.local.records / f"{run.name}.json").unlink(missing_ok=True)
        return errors

    def _submit_dbn(self, run: PlannedRun, dry_run: bool) -> str | None:
        recipe = self.local.dbn_recipe
        options = replace(  # the RBMs serve runs of all sizes: the nodes of these are not for them
            self.options,
            job_name=self.options.job_name or f"ddnn-{run.dbn_name}",
            settings={k: v for k, v in self.options.settings.items() if k not in ("nodes", "workers_per_node")},
        )
        arguments = recipe, run.dbn_dir, (f"seed={run.seed}",), load_recipe(recipe).parallel.workers, self.device
        return submit(TrainingCommand("pretraining", *arguments), options, dry_run=dry_run).number


def _ask_slurm(folders: Collection[Path]) -> Callable[[Job], SlurmState | None]:
    """The states of the jobs of these folders, asked for all at once."""
    jobs = {job: folder for folder in folders if (job := read_job(folder)) is not None}
    states = slurm_states(list(jobs))

    def ask(job: Job) -> SlurmState | None:
        if states.get(job) is None:
            message = f"Slurm does not say what became of job {job.number}, and no run gets two jobs"
            raise UserError(message, location=jobs.get(job), hint="run the command where squeue answers")
        return states[job]

    return ask
