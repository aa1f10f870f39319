"""What `ddnn train` and `ddnn pretrain` do before there are workers: which run dir, and whether there is work."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddnn.errors import UserError
from ddnn.recipe.load import load_recipe
from ddnn.train.run_dir_files import CHECKPOINTS, FINAL, RECIPE
from ddnn.train.workers import run_together

if TYPE_CHECKING:
    from ddnn.parallel.failures import Job  # needs torch, which takes seconds: a launcher does without


def start_training(
    recipe: Path,
    run_dir: Path | None,
    settings: Sequence[str],
    workers: int | None,
    device: str,
    resume: bool,
) -> str | None:
    """`ddnn train`, on as many workers as the recipe says; what to tell where there was nothing to do.

    Args:
        recipe: the recipe; to go on, also the run dir, which has its own.
        run_dir: where everything goes; exp/NAME OF THE RECIPE where None.
        settings: as given to --set.
        workers: as given to --workers.

    Raises:
        UserError: anything that the user must mend.
    """
    if recipe.is_dir() and not resume and (recipe / RECIPE).is_file():
        raise UserError("this is a run dir, no recipe", where=recipe, mend="go on with it by --resume")
    if recipe.is_dir() and resume:
        run_dir, recipe = run_dir or recipe, recipe / RECIPE
        if not recipe.is_file():
            raise UserError(f"there is no {RECIPE}", where=run_dir, mend="name a recipe, or the run dir of a training")
    settings = (*settings, *(() if workers is None else (f"parallel.workers={workers}",)))
    loaded = load_recipe(recipe, settings)
    where = run_dir or Path("exp", recipe.stem)
    if resume and (where / FINAL).exists():
        return f"{where}: this training has finished: {where / FINAL}"
    before = _stamp(where / FINAL)
    arguments = worker_arguments("train", recipe, where, settings, device, *(["--resume"] if resume else []))

    def advice() -> str | None:
        if not any((where / CHECKPOINTS).glob("[0-9]*")):
            return None
        return f"the last checkpoint is whole; go on with: ddnn train {shlex.quote(str(where))} --resume"

    def work(job: Job) -> None:
        from ddnn.train.command import run_training

        run_training(loaded, where, device, resume=resume, job=job)

    run_together(
        loaded.parallel.workers,
        arguments,
        work,
        fault_tolerant=loaded.parallel.on_failure == "continue",
        done=lambda: _stamp(where / FINAL) not in (None, before),
        advice=advice,
    )
    return None


def _stamp(path: Path) -> tuple[int, int] | None:
    """By which a file that was written anew is known; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def start_pretraining(
    recipe: Path, run_dir: Path | None, settings: Sequence[str], workers: int | None, device: str
) -> None:
    """`ddnn pretrain`, on as many workers as the recipe says.

    Raises:
        UserError: anything that the user must mend.
    """
    settings = (*settings, *(() if workers is None else (f"parallel.workers={workers}",)))
    loaded = load_recipe(recipe, settings)
    where = run_dir or Path("exp", f"{recipe.stem}-rbm")

    def work(job: Job) -> None:
        from ddnn.train.command import run_pretraining

        run_pretraining(loaded, where, device, job.exchange)

    run_together(loaded.parallel.workers, worker_arguments("pretrain", recipe, where, settings, device), work)


def worker_arguments(
    command: str, recipe: Path, run_dir: Path, settings: Sequence[str], device: str, *options: str
) -> list[str]:
    """The command line of one of several workers."""
    set_options = [word for setting in settings for word in ("--set", setting)]
    # Behind --, so that a name that begins with a dash is no option.
    return [command, "--run-dir", str(run_dir), "--device", device, *options, *set_options, "--", str(recipe)]
