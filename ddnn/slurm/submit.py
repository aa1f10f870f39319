"""`ddnn train --slurm`: checks everything that can be checked now, writes the job's script, submits it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from ddnn.errors import UserError
from ddnn.files import write_text
from ddnn.recipe.load import dump_recipe, load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.slurm.cluster import Cluster, load_cluster, seconds_of, word
from ddnn.slurm.job import Job, read_job, slurm_state, write_job
from ddnn.slurm.options import SlurmOptions
from ddnn.slurm.plan import place
from ddnn.slurm.script import JobScript, sbatch_options, script_text
from ddnn.train.run_dir_files import JOB_OUTPUT, JOB_RECORD, JOB_SCRIPT
from ddnn.train.run_log import training_holds

if TYPE_CHECKING:
    from ddnn.train.run_dir import RunDir

SBATCH_SECONDS = 120.0
_KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_TIME_FORMAT", "SLURM_JWT")
_OF_A_RANK = ("OMPI_COMM_WORLD_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "SLURMD_")


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
) -> str:
    """Submits the training of a recipe; what to tell the user. A dry run only returns the script.

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

    Raises:
        UserError: anything that is wrong with the recipe, the settings or the run dir, or sbatch refused the job.
    """
    cluster = _merged(load_cluster(options.cluster) if options.cluster else Cluster(), options, workers)
    _check_time(cluster)
    if resume and recipe_path.is_dir():
        recipe_path = recipe_path / "recipe.yaml"
    recipe = load_recipe(recipe_path, settings)
    placement = place(cluster, workers, recipe.parallel.workers, recipe.parallel.share_devices)
    recipe = load_recipe(recipe_path, (*settings, f"parallel.workers={placement.workers}"))
    run_dir = Path(os.path.abspath(run_dir))  # noqa: PTH100 (resolve() would follow links, which may be meant)
    if device == "auto":
        device = "cuda" if placement.gpus_per_node else "cpu"
    job = JobScript(
        run_dir=run_dir,
        training=(
            *(sys.executable, "-m", "ddnn.cli", "train", str(run_dir / "recipe.yaml")),
            *("--run-dir", str(run_dir), "--workers", str(placement.workers), "--device", device),
            "--resume",  # by what is in the run dir when the job begins, or begins again
        ),
        name=_job_name(options.job_name, run_dir),
        placement=placement,
        threads=recipe.parallel.threads,
        cluster=cluster,
    )
    text = script_text(job)
    if dry_run:
        return text.rstrip("\n")
    _claim(run_dir, recipe if resume else None)
    write_text(run_dir / "recipe.yaml", dump_recipe(recipe))
    write_text(run_dir / JOB_SCRIPT, text)
    number, slurm_cluster = _sbatch([*sbatch_options(job), str(run_dir / JOB_SCRIPT)], run_dir)
    write_job(run_dir, Job(number, slurm_cluster, time.time(), placement.workers, placement.nodes, cluster.launcher))
    quoted = shlex.quote(
        os.path.relpath(run_dir) if len(os.path.relpath(run_dir)) < len(str(run_dir)) else str(run_dir)
    )
    return (
        f"job {number}: {placement}\n  log:    {run_dir / 'train.log'}\n  output: {run_dir / JOB_OUTPUT}\n"
        f"  follow: ddnn status --follow {quoted}\n  end it: scancel {number}"
    )


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


def _claim(run_dir: Path, resumed: Recipe | None) -> None:
    """Makes the run dir, or takes it over, also one to go on in by the recipe `resumed`; refuses what the job itself
    would refuse hours later, and a second job."""
    from ddnn.train.run_dir import RunDir

    if training_holds(run_dir / "train.log") is True:
        raise UserError("another training is running in this run dir", where=run_dir)
    before = read_job(run_dir)
    state = None if before is None else slurm_state(before)
    if before is not None and state not in ("GONE", None):
        raise UserError(
            f"job {before.number} of this run dir is {state}",
            where=run_dir,
            mend=f"wait for it, or end it with `scancel {before.number}`, or name another --run-dir",
        )
    run = RunDir(run_dir, resume=resumed is not None)
    if resumed is not None:
        _check_resume(run, resumed)
        return
    for name in (JOB_RECORD, JOB_OUTPUT, "train.log"):  # of a job that ended before its training began
        (run_dir / name).unlink(missing_ok=True)


def _check_resume(run: RunDir, recipe: Recipe) -> None:
    """UserError where the training has finished, or the recipe does not go on with that of the checkpoint."""
    from ddnn.parallel.exchange import Exchange
    from ddnn.train.checkpoint import Checkpoints
    from ddnn.train.resume import check_same_recipe
    from ddnn.train.run_dir_files import CHECKPOINTS
    from ddnn.train.state import read_header

    if run.finished:
        raise UserError("this training has finished", where=run.path, mend="name another --run-dir to train anew")
    found = Checkpoints(run.path / CHECKPOINTS, recipe.checkpoint.keep, Exchange()).newest()
    if found is not None:
        check_same_recipe(read_header(found.header, found.path).recipe, recipe, found.path)


def _sbatch(arguments: Sequence[str], run_dir: Path) -> tuple[str, str | None]:
    """Submits; the job's number and, in a federation, its cluster."""
    kept = f"the script is {run_dir / JOB_SCRIPT}"
    try:
        answer = subprocess.run(
            ["sbatch", "--parsable", *arguments],
            env=_outside_of_jobs(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SBATCH_SECONDS,
        )
    except FileNotFoundError as error:
        raise UserError(
            "sbatch is not found on PATH: is this a login node of a Slurm cluster?",
            mend=f"run it there, or see the script with --dry-run; {kept}",
        ) from error
    except OSError as error:
        raise UserError(f"sbatch cannot be started: {error.strerror}", mend=kept) from error
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"sbatch has not answered in {SBATCH_SECONDS:g} s; the job may have been submitted all the same",
            mend="look for it with `squeue --me`, and end it with scancel before you try again",
        ) from error
    said = answer.stdout.strip().splitlines()
    number, _, slurm_cluster = (said[-1] if said else "").partition(";")
    if answer.returncode != 0 or not number.isdigit():
        words = " ".join(answer.stderr.split()) or " ".join(answer.stdout.split()) or "it said nothing"
        raise UserError(f"sbatch refused the job with {answer.returncode}: {words[:1000]}", where=run_dir, mend=kept)
    return number, slurm_cluster or None


def _outside_of_jobs(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for sbatch, which hands it on to the job: without what says that this process is itself part of
    a job (an interactive `srun --pty bash`, say), since the training would take itself for that one's rank."""
    return {name: value for name, value in environment.items() if name in _KEPT or not name.startswith(_OF_A_RANK)}
