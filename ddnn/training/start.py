"""What `ddnn train` and `ddnn pretrain` do before there are workers: which run dir, and whether there is work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddnn.distributed.launcher import NodeRecovery, RunMonitor, read_restart, run_distributed
from ddnn.distributed.mpirun import in_mpi_job
from ddnn.recipe.load import dump_recipe, load_recipe, recipe_values
from ddnn.recipe.schema import Recipe, TrainedModelConfig
from ddnn.runs import run_status
from ddnn.runs.checkpoint_manifest import folder_name, peek_checkpoint
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import MetricsRow
from ddnn.runs.run_status import BEST, CHECKPOINTS, DBN, FINAL, LOG, METRICS, RECIPE, Kind, Resume
from ddnn.training.resume_rules import (
    EPOCHS,
    changed_keys,
    check_same_recipe,
    describe_changes,
    length_hint,
    refused_changes,
    with_recorded_network,
)
from ddnn.util.errors import RecipeError, UserError
from ddnn.util.files import is_locked
from ddnn.util.text import plural, printable

log = logging.getLogger(__name__)


def start_training(
    recipe: Path, run_dir: Path | None, settings: Sequence[str], workers: int | None, device: str, resume: Resume,
    on_row: Callable[[MetricsRow], object] | None = None, nodes: NodeRecovery | None = None,
) -> str | None:  # fmt: skip
    """`ddnn train` of a recipe (to resume, also the run dir, which has its own), on as many workers as it says; what to
    tell where there was nothing to do. `run_dir`: exp/NAME OF THE RECIPE where None. `on_row`: see `run_training`, in
    this process. `nodes`: what the launcher of several workers does when a node fails. UserError: anything that the user has to fix."""
    settings = _with_workers(settings, workers)
    recipe, location, loaded, finished, done = _read_training(recipe, run_dir, settings, resume)
    if done is not None:
        return done
    if on_row is not None and loaded.parallel.workers > 1 and not in_mpi_job():
        message = (
            f"on_epoch is called in this process, but {loaded.parallel.workers} workers are processes of their own"
        )
        hint = "leave it out, and read their epochs with ddnn.read_metrics, in a thread while they train"
        raise UserError(message, location="parallel.workers", hint=hint)
    if resume != "no" and read_restart() is None:
        run_status.refuse_lost_checkpoints(location)
    if resume != "no" and not finished and loaded.parallel.workers > 1 and not in_mpi_job():
        _check_resume(loaded, location)
    # A run dir in which another training has begun is refused by the first attempt, or by one that follows its death.
    begun = any((location / name).exists() for name in (METRICS, BEST, FINAL, CHECKPOINTS))
    arguments = worker_argv("train", recipe, location, settings, device, *_RESUME_OPTIONS[resume])

    def work(comm: Any) -> None:
        from ddnn.training.job import run_training

        run_training(loaded, location, device, comm, resume=resume != "no", on_row=on_row or (lambda row: None))

    def restart_arguments() -> list[str]:
        if begun and resume == "no":
            return arguments
        if (location / RECIPE).is_file() and not finished:  # resolved; the other file may have been edited meanwhile
            pipes = ["--allow-pipes"] * loaded.data.allow_pipes  # the user's word, which that file's is not
            return worker_argv("train", location / RECIPE, location, (), device, "--resume=auto", *pipes)
        return worker_argv("train", recipe, location, settings, device, "--resume=auto")

    run_distributed(
        loaded.parallel.workers,
        arguments,
        work,
        restart_arguments=restart_arguments,
        max_restarts=loaded.parallel.max_restarts,
        run=_Run(location, "training"),
        nodes=nodes,
    )
    return None


def _with_workers(settings: Sequence[str], workers: int | None) -> Sequence[str]:
    return settings if workers is None else (*settings, f"parallel.workers={workers}")


def _read_training(
    recipe: Path, run_dir: Path | None, settings: Sequence[str], resume: Resume, must_exist: bool = True
) -> tuple[Path, Path, Recipe, bool, str | None]:
    """Of `ddnn train` the recipe's file, the run dir, and the recipe; whether a training has finished there, and what to
    tell where nothing is to be done. Errors as of `start_training`."""
    location = run_dir or (recipe if recipe.is_dir() and resume != "no" else Path("exp", recipe.stem))
    trusted = not run_status.is_of_run_dir(recipe, location)
    recipe = run_status.find_recipe(recipe, location, resume)
    started = resume != "no" and ((location / FINAL).exists() or run_status.newest_checkpoint(location) is not None)
    gone = ("init.model",) if started else ()
    loaded = load_recipe(
        recipe, settings, must_exist=must_exist, user_supplied=trusted, optional_paths=gone, note=_note()
    )
    finished = resume != "no" and run_status.is_finished(location)
    longer = finished and makes_longer(loaded, location, settings)
    done = f"{location}: this training has finished: {location / FINAL}" if finished and not longer else None
    return recipe, location, loaded, finished, done


def describe(recipe: Recipe) -> str:
    """One sentence on what a recipe would train, without reading any data."""
    learning_rate, size = recipe.schedule.initial_learning_rate, recipe.minibatch_size
    first = size if isinstance(size, int) else size.start
    return (
        f"{recipe.model.summary()}, init {recipe.init}, {recipe.optimizer.name}, minibatch {recipe.minibatch}, "
        f"{recipe.schedule.name} from {learning_rate:g} (times the gradient summed over a minibatch, "
        f"{learning_rate * first:g} on its mean), {plural(recipe.parallel.workers, 'worker')}"
    )


def dry_run(
    kind: Kind, recipe: Path, run_dir: Path | None, settings: Sequence[str], workers: int | None, device: str,
    resume: Resume, no_data: bool,
) -> str:  # fmt: skip
    """What a training or pretraining would be, and its recipe, resolved; nothing is written. `no_data`: by the recipe
    alone. Errors as of `start_training`, and what the workers would refuse before they read features."""
    from ddnn.training.data import describe_data
    from ddnn.training.initial_model import with_initial_model

    settings = _with_workers(settings, workers)
    trained, lines = None, list[str]()
    if kind == "pretraining":
        _, loaded = _read_pretraining(recipe, run_dir, settings, must_exist=not no_data)
    else:
        _, location, loaded, finished, done = _read_training(recipe, run_dir, settings, resume, must_exist=not no_data)
        if done is not None:
            return f"{printable(done, '')}\n"
        if resume != "no" and not finished:
            _check_resume(loaded, location)
        if resume != "no" and (found := peek_checkpoint(location / CHECKPOINTS, lines.append)) is not None:
            lines.append(f"resumes {location} from checkpoint {found.to_dict()['where']}")
        if not no_data:
            loaded, trained = with_initial_model(loaded, location if resume != "no" else None)
    lines = [describe(loaded), *lines, *([] if no_data else describe_data(loaded, kind, device, trained))]
    return "".join(f"# {printable(line, '')}\n" for line in lines) + dump_recipe(loaded)


def _note() -> Callable[..., None]:
    """For what concerns the command line: workers have the same one as their launcher, which tells the user."""
    return log.debug if in_mpi_job() else log.info


def _check_resume(recipe: Recipe, location: Path) -> None:
    """RecipeError where the workers would refuse to resume, since the newest checkpoint is of another recipe: before
    they are started, which takes time, and mpirun writes more lines about their end than they do."""
    found = peek_checkpoint(location / CHECKPOINTS, lambda problem: None)
    before, precision = ("", None) if found is None else (found.metadata.get(key) for key in ("recipe", "precision"))
    if found is None or not isinstance(before, str) or not isinstance(precision, str):
        return  # the workers say what is wrong with it
    if isinstance(recipe.init, TrainedModelConfig) and (location / RECIPE).is_file():
        recipe = with_recorded_network(recipe, load_recipe(location / RECIPE, must_exist=False))
    check_same_recipe(before, recipe, location / CHECKPOINTS / folder_name(found.number), precision)


def makes_longer(recipe: Recipe, location: Path, settings: Sequence[str]) -> bool:
    """Whether a training that has finished is to continue by this recipe, as it only asks for more epochs; False where
    there is nothing to do. RecipeError: it was not by this recipe, or cannot continue."""
    if not (location / RECIPE).is_file():
        raise UserError(f"there is a {FINAL}, but no {RECIPE}: nothing to resume", location=location)
    before = load_recipe(location / RECIPE, must_exist=False)
    recipe = with_recorded_network(recipe, before)
    if recipe.parallel.workers == 1 and not any(one.startswith("parallel.workers=") for one in settings):
        update = {"workers": before.parallel.workers}  # no number was asked for
        recipe = recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update=update)})
    changed = changed_keys(recipe_values(before), recipe)
    if not changed:
        return False
    refused = refused_changes(recipe, changed)
    longer = [key for key in changed if key in EPOCHS]
    if refused or not longer:
        message = f"this training has finished, by another recipe: {describe_changes(changed)}"
        hint = f"{length_hint(recipe, refused)}nothing would be done: leave out what differs, "
        raise RecipeError(message, location=location, hint=f"{hint}or train in another run dir")
    hint = f"to train its network further, start another training from it: init.model={location}"
    problems = list[str]()
    if peek_checkpoint(location / CHECKPOINTS, problems.append) is not None:
        return True
    end = read_metrics(location / METRICS).end if (location / METRICS).is_file() else None
    if end is not None and end.reason == "converged":
        message = f"this training has converged ({end.detail}): {longer[0]} would change nothing"
    else:
        message = "there is no checkpoint to continue from" + "".join(f"; {problem}" for problem in problems)
    raise RecipeError(message, location=location, hint=hint)


def _read_pretraining(
    recipe: Path, run_dir: Path | None, settings: Sequence[str], must_exist: bool = True
) -> tuple[Path, Recipe]:
    location = run_dir or Path("exp", f"{recipe.stem}-rbm")
    trusted = not run_status.is_of_run_dir(recipe, location)
    return location, load_recipe(recipe, settings, must_exist=must_exist, user_supplied=trusted, note=_note())


def start_pretraining(
    recipe: Path, run_dir: Path | None, settings: Sequence[str], workers: int | None, device: str,
    nodes: NodeRecovery,
) -> None:  # fmt: skip
    """`ddnn pretrain`, on as many workers as the recipe says; arguments and errors as of `start_training`."""
    settings = _with_workers(settings, workers)
    location, loaded = _read_pretraining(recipe, run_dir, settings)

    def work(comm: Any) -> None:
        from ddnn.training.job import run_pretraining

        run_pretraining(loaded, location, device, comm)

    run_distributed(
        loaded.parallel.workers,
        worker_argv("pretrain", recipe, location, settings, device),
        work,
        max_restarts=loaded.parallel.max_restarts,
        run=_Run(location, "pretraining"),
        nodes=nodes,
    )


_RESUME_OPTIONS: dict[Resume, list[str]] = {"no": [], "yes": ["--resume"], "auto": ["--resume=auto"]}


class _Run(RunMonitor):
    """What the launcher asks about a run dir, or the dir of a pretraining."""

    def __init__(self, path: Path, kind: Kind) -> None:
        self.path, self.kind = path, kind
        self.result = path / (FINAL if kind == "training" else DBN)  # written last
        self._before, self._started = _file_signature(self.result), time.time()

    def newest_checkpoint(self) -> object:
        return run_status.newest_checkpoint(self.path)

    def is_locked(self) -> bool:
        return is_locked(self.path / LOG) is True

    def is_complete(self) -> bool:
        return _file_signature(self.result) not in (None, self._before)

    def record_failure(self, message: str) -> None:
        run_status.record_failure(self.path, message, self._started)

    def failure_hint(self) -> str | None:
        if self.newest_checkpoint() is None:
            return None
        return f"the last checkpoint is valid; resume with: {run_status.resume_command(self.path, self.kind)}"


def _file_signature(path: Path) -> tuple[int, int] | None:
    """By which a file that was written again is known; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def worker_argv(
    command: str, recipe: Path, run_dir: Path, settings: Sequence[str], device: str, *options: str
) -> list[str]:
    set_options = [word for setting in settings for word in ("--set", setting)]
    # Behind --, so that a name that begins with a dash is no option.
    return [command, "--run-dir", str(run_dir), "--device", device, *options, *set_options, "--", str(recipe)]
