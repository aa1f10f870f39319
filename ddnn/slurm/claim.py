"""Whether a run dir may get a job: refused before it is submitted, and not by the job hours later."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ddnn.errors import UserError
from ddnn.recipe.schema import Recipe
from ddnn.slurm.job import read_job, slurm_state
from ddnn.train.run_dir_files import JOB_OUTPUT, JOB_RECORD, STACK
from ddnn.train.run_log import training_holds

if TYPE_CHECKING:
    from ddnn.train.run_dir import RunDir


def claim_for_training(run_dir: Path, resumed: Recipe | None) -> None:
    """Makes the run dir of a job, or takes it over, also one to go on in by the recipe `resumed`.

    Raises:
        UserError: what the job itself would say hours later, or another job or training has the run dir.
    """
    from ddnn.train.run_dir import RunDir

    if training_holds(run_dir / "train.log") is True:
        raise UserError("another training is running in this run dir", where=run_dir)
    _refuse_second_job(run_dir)
    run = RunDir(run_dir, resume=resumed is not None)
    if resumed is not None:
        _check_resume(run, resumed)
        return
    for name in (JOB_RECORD, JOB_OUTPUT, "train.log"):  # of a job that ended before its training began
        (run_dir / name).unlink(missing_ok=True)


def _refuse_second_job(run_dir: Path) -> None:
    before = read_job(run_dir)
    state = None if before is None else slurm_state(before)
    if before is not None and state not in ("GONE", None):
        raise UserError(
            f"job {before.number} of this run dir is {state}",
            where=run_dir,
            mend=f"wait for it, or end it with `scancel {before.number}`, or name another --run-dir",
        )


def claim_for_pretraining(run_dir: Path, recipe: Recipe) -> None:
    """Makes the dir of a pretraining, or takes one over in which the same was begun.

    Raises:
        UserError: what the job itself would say hours later, or another job has the dir.
    """
    from ddnn.train.pretrain import claim

    _refuse_second_job(run_dir)
    if (run_dir / STACK).exists():
        raise UserError("this pretraining has finished", where=run_dir, mend=f"take it by pretrain.from: {run_dir}")
    claim(recipe, run_dir)


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
