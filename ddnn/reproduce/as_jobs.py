"""`ddnn reproduce --slurm`: a job for each run that is missing, and what became of the jobs of earlier calls."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddnn.errors import DIVERGED, UserError
from ddnn.info.status import read_status
from ddnn.info.status_text import why_it_ended
from ddnn.recipe.load import load_recipe
from ddnn.reproduce.corpus import CorpusPlan
from ddnn.reproduce.jobs import Ended, Jobs
from ddnn.reproduce.measure import refuse_lost
from ddnn.reproduce.plan import Run
from ddnn.reproduce.records import Record, write_record
from ddnn.reproduce.run import Place, settings_of, train_arguments
from ddnn.slurm.job import Job, read_job, slurm_states
from ddnn.slurm.options import SlurmOptions
from ddnn.slurm.sbatch import SbatchError
from ddnn.slurm.submit import submit_pretraining, submit_training
from ddnn.train.run_dir_files import JOB_OUTPUT, STACK


@dataclass(frozen=True)
class Sender:
    """What all jobs of a call have in common.

    Attributes:
        folder: of the corpus, with its recipes.
        stack_digest: of the recipe of the RBMs; empty where no run starts from them.
        device: as given to --device.
        options: those of Slurm.
    """

    plan: CorpusPlan
    folder: Path
    stack_digest: str
    place: Place
    device: str
    options: SlurmOptions

    def stack(self, run: Run) -> Path | None:
        """Dir of the RBMs that the run starts from."""
        return self.place.stack(run.seed, self.stack_digest) if run.stack else None


@dataclass
class _Found:
    """What became of the runs so far; `left` have neither a job nor a result, `refused` one that does not count."""

    left: list[Run] = field(default_factory=list)
    waiting: dict[str, str] = field(default_factory=dict)
    running: dict[str, str] = field(default_factory=dict)
    finished: list[str] = field(default_factory=list)
    diverged: dict[str, str] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def check_sbatch() -> None:
    """UserError where no job can be submitted from here."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not found on PATH: is this a login node of a Slurm cluster?",
            where="--slurm",
            mend="give the command on one, or with --dry-run to see which jobs there would be",
        )


def send_jobs(
    sender: Sender, runs: Sequence[Run], again: Collection[str], *, dry_run: bool = False
) -> tuple[Jobs, list[str]]:
    """Looks at each run, submits those that no job has, and records those that diverged.

    The caller is alone in the folder (`ddnn.reproduce.lock.alone`), from before it read which runs there are.

    Args:
        runs: without a record that counts.
        again: names of those that diverged before and are to be tried once more.
        dry_run: submit nothing, write nothing.

    Returns:
        What became of them (the finished are not yet judged), and what was refused or could not be submitted, a
        sentence each.

    Raises:
        UserError: the options do not fit a run, Slurm cannot be asked about a job that there was, or a job's record is
            damaged. Nothing has been submitted then.
    """
    found = _look(sender, runs, again)
    stacks = _check(sender, found)
    names = [*(f"stack-{seed}" for seed in stacks), *(run.name for run in found.left)]
    submitted, problems = dict.fromkeys(names, ""), list[str]()
    if not dry_run:
        for run in runs:
            if run.name in found.diverged:
                write_record(sender.place.records, _diverged(sender, run, found.diverged[run.name]))
        submitted, problems = _submit(sender, found, again)
    jobs = Jobs(
        dry_run, submitted, found.waiting, found.running, tuple(found.finished), found.diverged, tuple(found.ended)
    )
    return jobs, [*found.refused, *problems]


def _look(sender: Sender, runs: Sequence[Run], again: Collection[str]) -> _Found:
    """What there is of each run, and of the stacks that those without a job need."""
    found = _Found()
    ask = _asked(sender, runs)
    for run in runs:
        run_dir = sender.place.run_dir(run)
        status = read_status(run_dir, ask) if run_dir.is_dir() and any(run_dir.iterdir()) else None
        if status is None:
            found.left.append(run)
            continue
        error = status.error or ""
        diverged = error[error.index(DIVERGED) :].splitlines()[0] if DIVERGED in error and run.name not in again else ""
        if status.slurm not in (None, "GONE") or status.state == "running":
            jobs = found.waiting if status.state == "submitted" else found.running
            jobs[run.name] = status.job or "none of Slurm"
        elif (status.state == "finished" or diverged) and (why := _refused(run_dir)) is not None:
            found.ended.append(Ended(run.name, status.job or "none of Slurm", why.what, run_dir))
            found.refused.append(f"{run.name}: {why}")
        elif status.state == "finished":
            found.finished.append(run.name)
        elif diverged:
            found.diverged[run.name] = diverged
        else:
            found.left.append(run)
            if status.job is not None:  # else it was trained without Slurm, and broken off
                found.ended.append(Ended(run.name, status.job, status.error, run_dir / JOB_OUTPUT))
    _look_at_stacks(sender, runs, found, ask)
    return found


def _refused(run_dir: Path) -> UserError | None:
    """Why what came of a run does not count: workers were lost, or nobody can say whether any were."""
    try:
        refuse_lost(run_dir)
    except UserError as error:
        return error
    return None


def _look_at_stacks(sender: Sender, runs: Sequence[Run], found: _Found, ask: Callable[[Job], str | None]) -> None:
    for seed, stack in _stacks(sender, runs).items():
        job = read_job(stack)
        if job is None:
            continue
        state, output = ask(job), stack / JOB_OUTPUT
        if state == "GONE":
            found.ended.append(Ended(f"stack-{seed}", job.number, why_it_ended(output), output))
        else:
            jobs = found.waiting if state == "PENDING" else found.running
            jobs[f"stack-{seed}"] = job.number


def _stacks(sender: Sender, runs: Sequence[Run]) -> dict[int, Path]:
    """Seed -> dir of the RBMs that are missing."""
    needed = {run.seed: stack for run in runs if (stack := sender.stack(run)) is not None}
    return {seed: stack for seed, stack in needed.items() if not (stack / STACK).exists()}


def _asked(sender: Sender, runs: Sequence[Run]) -> Callable[[Job], str | None]:
    """What Slurm says now of the jobs of these runs and of their stacks, asked all at once."""
    folders = [sender.place.run_dir(run) for run in runs] + list(_stacks(sender, runs).values())
    jobs = {job: folder for folder in folders if (job := read_job(folder)) is not None}
    states = slurm_states(list(jobs))

    def ask(job: Job) -> str | None:
        if states.get(job) is None:
            raise UserError(
                f"Slurm does not say what became of job {job.number}, and no run gets two jobs",
                where=jobs.get(job),
                mend="give the command where squeue answers",
            )
        return states[job]

    return ask


def _check(sender: Sender, found: _Found) -> list[int]:
    """Makes all scripts without submitting one: what is wrong is said before there are jobs. Seeds of new stacks."""
    seeds = [seed for seed in _stacks(sender, found.left) if not _job_of_stack(found, seed)]
    for seed in seeds:
        _submit_stack(sender, seed, dry_run=True)
    for run in found.left:
        _submit_run(sender, run, None, None, dry_run=True)  # its stack may not be there yet
    return seeds


def _submit(sender: Sender, found: _Found, again: Collection[str]) -> tuple[dict[str, str], list[str]]:
    """Run (or stack) -> the job that it got, and what could not be submitted."""
    submitted: dict[str, str] = {}
    problems: list[str] = []
    missing = _stacks(sender, found.left)
    stacks = {seed: job for seed in missing if (job := _job_of_stack(found, seed))}
    for run in found.left:
        name, stack = run.name, sender.stack(run)
        try:
            if stack is not None and run.seed in missing and run.seed not in stacks:
                name = f"stack-{run.seed}"
                submitted[name] = stacks[run.seed] = _submit_stack(sender, run.seed)
            name = run.name
            submitted[name] = _submit_run(sender, run, stack, stacks.get(run.seed) if stack is not None else None)
        except UserError as error:
            problems.append(f"{name}: {error}")
            if isinstance(error, SbatchError):
                break
            continue
        if run.name in again:  # what comes of it now counts
            (sender.place.records / f"{run.name}.json").unlink(missing_ok=True)
    return submitted, problems


def _job_of_stack(found: _Found, seed: int) -> str | None:
    """The job that makes the RBMs of a seed, waiting or running."""
    name = f"stack-{seed}"
    return found.waiting.get(name) or found.running.get(name)


def _submit_stack(sender: Sender, seed: int, *, dry_run: bool = False) -> str:
    recipe = sender.folder / sender.plan.stack
    options = sender.options
    options = replace(  # one stack serves runs of all sizes: the nodes of theirs are not for it
        options,
        job_name=options.job_name or f"ddnn-stack-{seed}",
        settings={key: value for key, value in options.settings.items() if key not in ("nodes", "workers_per_node")},
    )
    workers = load_recipe(recipe).parallel.workers
    where = sender.place.stack(seed, sender.stack_digest)
    sent = submit_pretraining(recipe, where, (f"seed={seed}",), workers, sender.device, options, dry_run=dry_run)
    return sent.number or ""


def _submit_run(sender: Sender, run: Run, stack: Path | None, after: str | None, *, dry_run: bool = False) -> str:
    run_dir, settings = sender.place.run_dir(run), settings_of(run, stack)
    sent = submit_training(
        run.recipe, run_dir, settings, run.workers, sender.device, sender.options,
        dry_run=dry_run, resume=True, after=after,
    )  # fmt: skip
    return sent.number or ""


def _diverged(sender: Sender, run: Run, said: str) -> Record:
    command = train_arguments(run, sender.place.run_dir(run), sender.stack(run), sender.device)
    return Record(
        setting=run.setting, workers=run.workers, seed=run.seed, recipe=run.digest, failed=said,
        command=shlex.join(["ddnn", *command]),
    )  # fmt: skip
