"""`ddnn train --slurm` and `ddnn pretrain --slurm`: check all that can be checked now, write the script, submit it."""

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

from ddnn.errors import UserError
from ddnn.files import write_text
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.slurm.claim import claim_for_pretraining, claim_for_training
from ddnn.slurm.cluster import Cluster, load_cluster, seconds_of, word
from ddnn.slurm.job import Job, write_job
from ddnn.slurm.options import SlurmOptions
from ddnn.slurm.plan import Placement, place
from ddnn.slurm.sbatch import sbatch
from ddnn.slurm.script import JobScript, sbatch_options, script_text
from ddnn.train.run_dir_files import JOB_OUTPUT, JOB_SCRIPT, RECIPE

PRETRAINING_RECIPE = "job.yaml"
"""In the dir of a pretraining: the recipe as it was submitted. Its recipe.yaml says only what the stack depends on."""


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
        recipe_path: the recipe; to go on, also the run dir, which has its own.
        run_dir: where everything goes; made where it does not exist.
        settings: as given to --set.
        workers: as given to --workers; None where the nodes, the cluster or the recipe say the number.
        device: as given to --device. `auto` becomes cuda where the job has GPUs, so that a node on which they do not
            work is noticed, and cpu where it has none.
        options: those of Slurm.
        dry_run: nothing is written or submitted.
        resume: go on from the last checkpoint of the run dir, if it has one.
        after: number of a job that must have ended well first. Where it does not, Slurm cancels this one.

    Raises:
        UserError: anything that is wrong with the recipe, the settings or the run dir, or sbatch refused the job.
    """
    cluster = _merged(load_cluster(options.cluster) if options.cluster else Cluster(), options, workers)
    _check_time(cluster)
    if resume and recipe_path.is_dir():
        recipe_path = recipe_path / RECIPE
    recipe, placement = _placed(recipe_path, settings, workers, cluster)
    run_dir = _absolute(run_dir)
    job = JobScript(
        run_dir=run_dir,
        # --resume: by what is in the run dir when the job begins, or begins again
        training=(*_command("train", run_dir / RECIPE, run_dir, placement, device), "--resume"),
        name=_job_name(options.job_name, run_dir),
        placement=placement,
        threads=recipe.parallel.threads,
        cluster=cluster,
    )
    text = script_text(job)
    if dry_run:
        return Submitted(None, text.rstrip("\n"))
    claim_for_training(run_dir, recipe if resume else None)
    write_text(run_dir / RECIPE, dump_recipe(recipe))
    number = _send(job, text, after)
    return Submitted(
        number,
        f"job {number}: {placement}\n  log:    {run_dir / 'train.log'}\n  output: {run_dir / JOB_OUTPUT}\n"
        f"  follow: ddnn status --follow {_quoted(run_dir)}\n  end it: scancel {number}",
    )


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
    """Submits `ddnn pretrain`, which goes on where one in `run_dir` was broken off. Arguments as of `submit_training`.

    Within an RBM there is no checkpoint, so Slurm is not told to ask for one: the time limit ends the job, and the
    RBMs that were finished stay.

    Raises:
        UserError: anything that is wrong with the recipe, the settings or the dir, or sbatch refused the job.
    """
    from ddnn.train.command import check_pretrains

    cluster = _merged(load_cluster(options.cluster) if options.cluster else Cluster(), options, workers)
    cluster = cluster.model_copy(update={"signal_seconds": 0})
    recipe, placement = _placed(recipe_path, settings, workers, cluster)
    check_pretrains(recipe)
    run_dir = _absolute(run_dir)
    job = JobScript(
        run_dir=run_dir,
        training=_command("pretrain", run_dir / PRETRAINING_RECIPE, run_dir, placement, device),
        name=_job_name(options.job_name, run_dir),
        placement=placement,
        threads=recipe.parallel.threads,
        cluster=cluster,
        pretraining=True,
    )
    text = script_text(job)
    if dry_run:
        return Submitted(None, text.rstrip("\n"))
    claim_for_pretraining(run_dir, recipe)
    write_text(run_dir / PRETRAINING_RECIPE, dump_recipe(recipe))
    number = _send(job, text, None)
    return Submitted(
        number,
        f"job {number}: {placement}\n  output: {run_dir / JOB_OUTPUT}\n"
        f"  follow: tail -F {_quoted(run_dir / JOB_OUTPUT)}\n  end it: scancel {number}",
    )


def _placed(path: Path, settings: Sequence[str], workers: int | None, cluster: Cluster) -> tuple[Recipe, Placement]:
    """The recipe with as many workers as there will be, and where they go."""
    recipe = load_recipe(path, settings)
    placement = place(cluster, workers, recipe.parallel.workers, recipe.parallel.share_devices)
    return load_recipe(path, (*settings, f"parallel.workers={placement.workers}")), placement


def _absolute(run_dir: Path) -> Path:
    return Path(os.path.abspath(run_dir))  # noqa: PTH100 (resolve() would follow links, which may be meant)


def _command(name: str, recipe: Path, run_dir: Path, placement: Placement, device: str) -> tuple[str, ...]:
    """`ddnn train` or `pretrain` as it stands in the job."""
    if device == "auto":
        device = "cuda" if placement.gpus_per_node else "cpu"
    return (
        *(sys.executable, "-m", "ddnn.cli", name, str(recipe)),
        *("--run-dir", str(run_dir), "--workers", str(placement.workers), "--device", device),
    )


def _send(job: JobScript, text: str, after: str | None) -> str:
    """Leaves the script and the job's record in the run dir; the number of the job."""
    script = job.run_dir / JOB_SCRIPT
    write_text(script, text)
    # Not in the script: by the time somebody submits it again by hand, Slurm has forgotten the other job.
    waits = [] if after is None else [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]
    number, slurm_cluster = sbatch([*sbatch_options(job), *waits], script)
    placement, launcher = job.placement, job.cluster.launcher
    write_job(job.run_dir, Job(number, slurm_cluster, time.time(), placement.workers, placement.nodes, launcher))
    return number


def _quoted(path: Path) -> str:
    """For a shell, as short as it can be named from here."""
    return shlex.quote(min(os.path.relpath(path), str(path), key=len))


def _merged(cluster: Cluster, options: SlurmOptions, workers: int | None) -> Cluster:
    """The settings with the command line's options over them. Its --workers puts the file's number of nodes aside."""
    given = {**cluster.model_dump(), **options.settings}
    if workers is not None:
        given["nodes"] = options.settings.get("nodes")
    if "gpus_per_node" in options.settings and "workers_per_node" not in options.settings:
        given["workers_per_node"] = None if options.settings["gpus_per_node"] else cluster.workers_per_node
    try:
        return Cluster.model_validate(given, strict=True)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        name = str(detail["loc"][0])
        raise UserError(
            f"{given[name]!r} found: {detail['msg'].removeprefix('Value error, ')}",
            where=f"--{name.replace('_', '-')}",
            mend=" ".join((Cluster.model_fields[name].description or "").split()),
        ) from error


def _job_name(given: str | None, run_dir: Path) -> str:
    if given is None:
        return "ddnn-" + re.sub(r"[^A-Za-z0-9_.-]+", "_", run_dir.name)
    try:
        return word(given)
    except ValueError as error:
        raise UserError(
            f"{given!r} found: {error}", where="--job-name", mend="take letters, digits, - and _"
        ) from error


def _check_time(cluster: Cluster) -> None:
    """UserError where Slurm would ask for the checkpoint as soon as the job begins, and so again and again."""
    if cluster.time is not None and seconds_of(cluster.time) <= cluster.signal_seconds:
        raise UserError(
            f"{cluster.time} found: no time to train, with the checkpoint {cluster.signal_seconds} s before the end",
            where="--time",
            mend="give more time, or lower signal_seconds in the cluster's settings",
        )
