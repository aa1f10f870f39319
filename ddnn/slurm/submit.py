"""`ddnn train --slurm` and `ddnn pretrain --slurm`: checks what can be checked now, writes the script, submits it."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.slurm import SlurmOptions
from ddnn.slurm.cluster import ClusterConfig, check_word, load_cluster, parse_time_limit
from ddnn.slurm.job import Job, sbatch, write_job
from ddnn.slurm.placement import place
from ddnn.slurm.preflight import prepare_pretraining, prepare_training
from ddnn.slurm.script import JobScript, sbatch_options, script_text
from ddnn.training.run_status import JOB_OUTPUT, JOB_RECIPE, JOB_SCRIPT, LOG, RECIPE
from ddnn.util.errors import UserError
from ddnn.util.files import write_text


@dataclass(frozen=True)
class Submitted:
    """What was submitted: the job's `number`, None of a dry run, and a `text` to show: of a dry run the script."""

    number: str | None
    text: str


def submit_training(
    recipe_path: Path,
    run_dir: Path,
    settings: Sequence[str],
    workers: int | None,
    device: str,
    options: SlurmOptions,
    *,
    dry_run: bool = False,
    resume: bool = False,
    after: str | None = None,
) -> Submitted:
    """Submits the training of a recipe. A dry run only makes the script.

    The job trains by the recipe as it is now, resolved, from the run dir: later changes of the file do not count.

    Args:
        recipe_path: the recipe; to resume, also the run dir, which has its own.
        run_dir: where everything goes; made where it does not exist.
        settings: as given to --set.
        workers: as given to --workers; None where the nodes, the cluster or the recipe say the number.
        device: as given to --device. `auto` becomes cuda where the job has GPUs, so that a node on which they do not
            work is noticed, and cpu where it has none.
        options: those of Slurm.
        dry_run: nothing is written or submitted.
        resume: from the newest checkpoint of the run dir, if there is one.
        after: number of a job that must have ended well first. Where it does not, Slurm cancels this one.

    Raises:
        UserError: anything that is wrong with the recipe, the settings or the run dir, or sbatch refused the job.
    """
    if resume and recipe_path.is_dir():
        recipe_path = recipe_path / RECIPE
    job, recipe = _job(recipe_path, run_dir, settings, workers, device, options)
    text = script_text(job)
    if dry_run:
        return Submitted(None, text.rstrip("\n"))
    prepare_training(job.run_dir, recipe if resume else None)
    write_text(job.run_dir / RECIPE, dump_recipe(recipe))
    return _send(job, text, after)


def submit_pretraining(
    recipe_path: Path,
    run_dir: Path,
    settings: Sequence[str],
    workers: int | None,
    device: str,
    options: SlurmOptions,
    *,
    dry_run: bool = False,
) -> Submitted:
    """Submits `ddnn pretrain`, which resumes one in `run_dir` that was interrupted. Arguments as of `submit_training`.

    Within an RBM there is no checkpoint, so Slurm is not told to ask for one: the time limit ends the job, and the
    RBMs that were finished stay.

    Raises:
        UserError: anything that is wrong with the recipe, the settings or the dir, or sbatch refused the job.
    """
    from ddnn.training.options import check_pretrains

    job, recipe = _job(recipe_path, run_dir, settings, workers, device, options, pretraining=True)
    check_pretrains(recipe)
    text = script_text(job)
    if dry_run:
        return Submitted(None, text.rstrip("\n"))
    prepare_pretraining(job.run_dir, recipe)
    write_text(job.run_dir / JOB_RECIPE, dump_recipe(recipe))
    return _send(job, text)


def _job(
    recipe_path: Path,
    run_dir: Path,
    settings: Sequence[str],
    workers: int | None,
    device: str,
    options: SlurmOptions,
    *,
    pretraining: bool = False,
) -> tuple[JobScript, Recipe]:
    """What the script says, and the recipe with as many workers as there will be."""
    cluster = _merged(load_cluster(options.cluster) if options.cluster else ClusterConfig(), options, workers)
    if pretraining:
        cluster = cluster.model_copy(update={"signal_seconds": 0})
    else:
        _check_time(cluster)
    recipe = load_recipe(recipe_path, settings)
    placement = place(cluster, workers, recipe.parallel.workers, recipe.parallel.oversubscribe_gpus)
    recipe = load_recipe(recipe_path, (*settings, f"parallel.workers={placement.workers}"))
    run_dir = Path(os.path.abspath(run_dir))  # noqa: PTH100 (resolve() would follow links, which may be meant)
    if device == "auto":
        device = "cuda" if placement.gpus_per_node else "cpu"
    command, recipe_name = ("pretrain", JOB_RECIPE) if pretraining else ("train", RECIPE)
    job = JobScript(
        run_dir=run_dir,
        training=(
            *(sys.executable, "-m", "ddnn.cli", command, str(run_dir / recipe_name), "--run-dir", str(run_dir)),
            *("--workers", str(placement.workers), "--device", device),
            # --resume: from what is in the run dir when the job begins, or begins again
            *(() if pretraining else ("--resume",)),
        ),
        name=_job_name(options.job_name, run_dir),
        placement=placement,
        threads=recipe.parallel.cpu_threads,
        cluster=cluster,
        pretraining=pretraining,
    )
    return job, recipe


def _send(job: JobScript, text: str, after: str | None = None) -> Submitted:
    """Leaves the script and the job's record in the run dir, and submits it."""
    run_dir, placement = job.run_dir, job.placement
    script = run_dir / JOB_SCRIPT
    write_text(script, text)
    # Not in the script: by the time somebody submits it again by hand, Slurm has forgotten the other job.
    waits = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    number, slurm_cluster = sbatch([*sbatch_options(job), *waits], script)
    write_job(
        run_dir, Job(number, slurm_cluster, time.time(), placement.workers, placement.nodes, job.cluster.launcher)
    )
    follow = (
        f"tail -F {_quoted(run_dir / JOB_OUTPUT)}" if job.pretraining else f"ddnn status --follow {_quoted(run_dir)}"
    )
    log = "" if job.pretraining else f"  log:    {run_dir / LOG}\n"
    return Submitted(
        number,
        f"job {number}: {placement}\n{log}  output: {run_dir / JOB_OUTPUT}\n  follow: {follow}\n"
        f"  end it: scancel {number}",
    )


def _quoted(path: Path) -> str:
    """For a shell, as short as it can be named from here."""
    return shlex.quote(min(os.path.relpath(path), str(path), key=len))


def _merged(cluster: ClusterConfig, options: SlurmOptions, workers: int | None) -> ClusterConfig:
    """The settings with the command line's options over them. Its --workers overrides the file's number of nodes."""
    given = {**cluster.model_dump(), **options.settings}
    if workers is not None:
        given["nodes"] = options.settings.get("nodes")
    if "gpus_per_node" in options.settings and "workers_per_node" not in options.settings:
        given["workers_per_node"] = None if options.settings["gpus_per_node"] else cluster.workers_per_node
    try:
        return ClusterConfig.model_validate(given, strict=True)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        name = str(detail["loc"][0])
        raise UserError(
            f"{given[name]!r} found: {detail['msg'].removeprefix('Value error, ')}",
            location=f"--{name.replace('_', '-')}",
            hint=" ".join((ClusterConfig.model_fields[name].description or "").split()),
        ) from error


def _job_name(given: str | None, run_dir: Path) -> str:
    if given is None:
        return "ddnn-" + re.sub(r"[^A-Za-z0-9_.-]+", "_", run_dir.name)
    try:
        return check_word(given)
    except ValueError as error:
        raise UserError(
            f"{given!r} found: {error}", location="--job-name", hint="take letters, digits, - and _"
        ) from error


def _check_time(cluster: ClusterConfig) -> None:
    """UserError where Slurm would ask for the checkpoint as soon as the job begins, and so again and again."""
    if cluster.time is not None and parse_time_limit(cluster.time) <= cluster.signal_seconds:
        raise UserError(
            f"{cluster.time} found: no time to train, with the checkpoint {cluster.signal_seconds} s before the end",
            location="--time",
            hint="give more time, or lower signal_seconds in the cluster's settings",
        )
