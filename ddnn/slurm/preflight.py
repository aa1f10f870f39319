"""Checks a run dir before a job is submitted, so that nothing is refused by the job hours later."""

from __future__ import annotations

from pathlib import Path

from ddnn.recipe.schema import Recipe
from ddnn.slurm.job import read_job, slurm_state
from ddnn.training.checkpoint_manifest import peek_checkpoint
from ddnn.training.run_status import CHECKPOINTS, DBN, FINAL, JOB_OUTPUT, JOB_RECORD, LOG, RECIPE, STATUS, check_run_dir
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import ensure_directory, is_locked, write_text


def prepare_training(run_dir: Path, resumed: Recipe | None) -> None:
    """Creates the run dir of a job, or checks one that is to be resumed by the recipe `resumed`.

    Raises:
        UserError: what the job itself would refuse, or another job or training uses the run dir.
    """
    if is_locked(run_dir / LOG) is True:
        raise UserError("another run is in progress in this run dir", location=run_dir)
    _refuse_second_job(run_dir)
    check_run_dir(run_dir, resume=resumed is not None)
    ensure_directory(run_dir)
    if resumed is not None:
        _check_resume(run_dir, resumed)
        return
    for name in (JOB_RECORD, JOB_OUTPUT, LOG, STATUS):  # of a job that ended before its training began
        (run_dir / name).unlink(missing_ok=True)


def _refuse_second_job(run_dir: Path) -> None:
    before = read_job(run_dir)
    state = None if before is None else slurm_state(before)
    if before is not None and state not in ("GONE", None):
        raise UserError(
            f"job {before.number} of this run dir is {state}",
            location=run_dir,
            hint=f"wait for it, or end it with `scancel {before.number}`, or name another --run-dir",
        )


def prepare_pretraining(run_dir: Path, recipe: Recipe) -> None:
    """Creates the dir of a pretraining, or checks one in which the same pretraining has begun.

    Raises:
        UserError: what the job itself would refuse, or another job uses the dir.
    """
    from ddnn.training.pretraining import pretraining_recipe

    _refuse_second_job(run_dir)
    if (run_dir / DBN).exists():
        raise UserError("this pretraining has finished", location=run_dir, hint=f"take it by pretrain.dbn: {run_dir}")
    text = pretraining_recipe(recipe)
    check_run_dir(run_dir, "pretraining", recipe=text)
    ensure_directory(run_dir)
    write_text(run_dir / RECIPE, text)


def _check_resume(run_dir: Path, recipe: Recipe) -> None:
    """Raises UserError if the training has finished, or the recipe differs from the checkpoint's in what may not change."""
    from ddnn.training.resume import check_same_recipe, read_metadata

    if (run_dir / FINAL).exists():
        raise UserError("this training has finished", location=run_dir, hint="name another --run-dir")
    problems: list[str] = []
    found = peek_checkpoint(path := run_dir / CHECKPOINTS, problems.append)
    if found is None and problems:
        raise DataError(f"there is no checkpoint to resume from: {problems[0]}", location=path)
    if found is not None:
        check_same_recipe(read_metadata(found.metadata, path).recipe, recipe, path)
