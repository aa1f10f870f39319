"""What `ddnn train` and `ddnn pretrain` do before there are workers: which run dir, and whether there is work."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddnn.distributed.launcher import NodeRecovery, RunMonitor, read_restart, run_distributed
from ddnn.distributed.mpirun import in_mpi_job
from ddnn.recipe.load import dump_recipe, load_recipe, recipe_values
from ddnn.recipe.schema import Recipe, SequenceConfig, TrainedModelConfig
from ddnn.runs import run_status
from ddnn.runs.checkpoint_manifest import folder_name, peek_checkpoint
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import MetricsRow
from ddnn.runs.run_status import BEST, CHECKPOINTS, DBN, FINAL, LOG, METRICS, RECIPE, Kind
from ddnn.training.command import ALLOW_PIPES, TrainingCommand
from ddnn.training.resume_rules import (
    EPOCHS,
    changed_keys,
    check_same_recipe,
    describe_changes,
    length_hint,
    refused_changes,
    with_recorded_network,
)
from ddnn.util.errors import DataError, RecipeError, UserError
from ddnn.util.files import is_locked
from ddnn.util.text import plural, printable

log = logging.getLogger(__name__)


def start_training(
    command: TrainingCommand,
    nodes: NodeRecovery,
    on_end: Callable[[Path], object],
    on_row: Callable[[MetricsRow], object] | None = None,
) -> str | None:
    """`ddnn train` or `pretrain`, on as many workers as its recipe says; what to tell where there was nothing to do.
    `on_end`, `on_row`: see `run_training`, the second in this process. `nodes`: what the launcher of several workers does when a node fails.
    UserError: anything that the user has to fix."""
    location, resume = command.location, command.resume != "no"
    recipe, file = read_recipe(command), find_recipe(command)
    finished = resume and run_status.is_finished(location)
    if finished and not makes_longer(command, recipe):
        return finished_message(command)
    if on_row is not None and recipe.parallel.workers > 1 and not in_mpi_job():
        message = (
            f"on_epoch is called in this process, but {recipe.parallel.workers} workers are processes of their own"
        )
        hint = "leave it out, and read their epochs with ddnn.read_metrics, in a thread while they train"
        raise UserError(message, location="parallel.workers", hint=hint)
    if resume and read_restart() is None:
        run_status.refuse_lost_checkpoints(location)
    if resume and not finished and recipe.parallel.workers > 1 and not in_mpi_job():
        check_resume(recipe, location)
    # If the run dir already holds another training, the first attempt, or the restart after a crash, rejects it.
    begun = any((location / name).exists() for name in (METRICS, BEST, FINAL, CHECKPOINTS))
    here = replace(command, recipe=file, run_dir=location)

    def work(comm: Any) -> None:
        from ddnn.training import job

        if command.kind == "pretraining":
            job.run_pretraining(recipe, location, command.device, comm)
        else:
            job.run_training(recipe, location, command.device, comm, resume=resume, on_row=on_row, on_end=on_end)

    def restart_arguments() -> list[str]:
        if command.kind == "pretraining" or (begun and not resume):
            return here.arguments()
        again = replace(here, resume="auto")
        if (location / RECIPE).is_file() and not finished:  # resolved; the other file may have been edited meanwhile
            pipes = (ALLOW_PIPES,) if recipe.data.allow_pipes else ()  # the user's word, which that file's is not
            again = replace(again, recipe=location / RECIPE, settings=pipes, workers=None)
        return again.arguments()

    run_distributed(
        recipe.parallel.workers,
        here.arguments(),
        work,
        restart_arguments=restart_arguments,
        max_restarts=recipe.parallel.max_restarts,
        run=_Run(location, command.kind),
        nodes=nodes,
    )
    return None


def find_recipe(command: TrainingCommand) -> Path:
    """The file of its recipe. UserError: as `run_status.find_recipe`."""
    if command.kind == "pretraining":
        return command.recipe
    return run_status.find_recipe(command.recipe, command.location, command.resume)


def read_recipe(command: TrainingCommand, *, must_exist: bool = True) -> Recipe:
    """The recipe that a command trains by. What concerns the command line is logged by the launcher alone, whose workers
    have the same one."""
    location = command.location
    resumes = command.resume != "no"
    started = resumes and ((location / FINAL).exists() or run_status.newest_checkpoint(location) is not None)
    return load_recipe(
        find_recipe(command),
        command.all_settings,
        must_exist=must_exist,
        user_supplied=not run_status.is_recorded_recipe(command.recipe, location),
        optional_paths=("init.model",) if started else (),
        note=log.debug if in_mpi_job() else log.info,
    )


def finished_message(command: TrainingCommand) -> str:
    return f"{command.location}: this training has finished: {command.location / FINAL}"


def describe(recipe: Recipe) -> str:
    """One sentence on what a recipe would train, without reading any data."""
    learning_rate, size = recipe.schedule.initial_learning_rate, recipe.minibatch_size
    if isinstance(sequence := recipe.criterion, SequenceConfig):
        updates = f"{sequence}, {plural(sequence.utterances_per_update, 'utterance')} in an update"
        rates = f"{recipe.schedule.name} from {learning_rate:g} (times the gradient summed over an update)"
        return f"init {recipe.init}, {recipe.optimizer.name}, {updates}, {rates}, {plural(recipe.parallel.workers, 'worker')}"
    first = size if isinstance(size, int) else size.start
    return (
        f"{recipe.model.summary()}, init {recipe.init}, {recipe.optimizer.name}, minibatch {recipe.minibatch}, "
        f"{recipe.schedule.name} from {learning_rate:g} (times the gradient summed over a minibatch, "
        f"{learning_rate * first:g} on its mean), {plural(recipe.parallel.workers, 'worker')}"
    )


def dry_run(command: TrainingCommand, no_data: bool) -> str:
    """What a training or pretraining would be, and its recipe, resolved; nothing is written. `no_data`: by the recipe
    alone. Errors as of `start_training`, and what the workers would refuse before they read features."""
    from ddnn.training.data import describe_data
    from ddnn.training.initial_model import with_initial_model

    recipe, location, resume = read_recipe(command, must_exist=not no_data), command.location, command.resume != "no"
    trained, lines = None, list[str]()
    if command.kind == "training":
        finished = resume and run_status.is_finished(location)
        if finished and not makes_longer(command, recipe):
            return f"{printable(finished_message(command), '')}\n"
        if resume and not finished:
            check_resume(recipe, location)
        if resume and (checkpoint := peek_checkpoint(location / CHECKPOINTS, lines.append)) is not None:
            lines.append(f"resumes {location} from checkpoint {checkpoint.to_dict()['where']}")
        if not no_data:
            recipe, trained = with_initial_model(recipe, location if resume else None)
    lines = [describe(recipe), *lines]
    lines += [] if no_data else describe_data(recipe, command.kind, command.device, trained)
    return "".join(f"# {printable(line, '')}\n" for line in lines) + dump_recipe(recipe)


def check_resume(recipe: Recipe, location: Path) -> None:
    """RecipeError where the workers would refuse to resume, since the newest checkpoint is of another recipe; DataError where
    none of the checkpoints can be used: before they are started, which takes time, and mpirun writes more lines about their
    end than they do."""
    problems = list[str]()
    checkpoint = peek_checkpoint(location / CHECKPOINTS, problems.append)
    if checkpoint is None:
        for problem in problems:
            raise DataError(f"there is no checkpoint to resume from: {problem}", location=location / CHECKPOINTS)
        return
    path = location / CHECKPOINTS / folder_name(checkpoint.number)
    before, precision = (checkpoint.metadata.get(key) for key in ("recipe", "precision"))
    if not isinstance(before, str) or not isinstance(precision, str):
        raise DataError("not a checkpoint of a training: it has no recipe or no precision", location=path)
    if isinstance(recipe.init, TrainedModelConfig) and (location / RECIPE).is_file():
        recipe = with_recorded_network(recipe, load_recipe(location / RECIPE, must_exist=False))
    check_same_recipe(before, recipe, path, precision)


def makes_longer(command: TrainingCommand, recipe: Recipe) -> bool:
    """Whether a training that has finished is to continue by this recipe, as it only asks for more epochs; False where
    there is nothing to do. RecipeError: it was not by this recipe, or cannot continue."""
    location = command.location
    if not (location / RECIPE).is_file():
        raise UserError(f"there is a {FINAL}, but no {RECIPE}: nothing to resume", location=location)
    before = load_recipe(location / RECIPE, must_exist=False)
    recipe = with_recorded_network(recipe, before)
    if recipe.parallel.workers == 1 and not any(word.startswith("parallel.workers=") for word in command.all_settings):
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
        info = path.stat()
    except OSError:
        return None
    return info.st_ino, info.st_mtime_ns
