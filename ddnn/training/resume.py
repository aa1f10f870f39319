"""What a training resumes from: the newest checkpoint of its run dir, checked against recipe and data. On as many
workers as wrote it, it is the training to the same bits. On another number training resumes from the mean of the
workers' models: `LoadedCheckpoint.bitwise` says which of the two, and docs/explanation/reliability.md what is not exact then."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import Tensor

from ddnn.distributed.communicator import Communicator
from ddnn.distributed.launcher import read_restart
from ddnn.recipe.schema import Recipe, WorkersConfig
from ddnn.recipe.section import get_value
from ddnn.recipe.source import first_error, parse_file
from ddnn.runs.checkpoint import CheckpointHandle, CheckpointStore
from ddnn.runs.rows import EventRow
from ddnn.runs.run_dir import RunDir
from ddnn.training.data_identity import DataIdentity
from ddnn.training.resume_rules import check_same_recipe
from ddnn.training.state import CheckpointMetadata, LoadedCheckpoint
from ddnn.util.errors import DataError
from ddnn.util.text import plural

log = logging.getLogger(__name__)

PARAMETERS, SUMS = "network.parameters", "losses.sums"  # of `Trainer.parts`


def load_latest(store: CheckpointStore, recipe: Recipe) -> LoadedCheckpoint | None:
    """What the newest whole checkpoint holds for this worker; None where there is none. Collective. DataError where
    there are checkpoints, but none that can be used; RecipeError as of `check_same_recipe`."""
    handle, world = store.latest(), store.comm
    if handle is None:
        log.info("there is no checkpoint to resume from: training starts from the beginning")
        return None
    metadata = read_metadata(handle.metadata, handle.path)
    changed = check_same_recipe(metadata.recipe, recipe, handle.path, metadata.precision)
    for key, (now, then) in changed.items():
        log.info("%s is now %s; was %s", key, now, then)
    bitwise = handle.world_size == store.world_size
    log.info("resumed from checkpoint %d: %s", handle.number, metadata.summary())
    if not bitwise and world.rank == 0:
        log.warning(
            "resuming a checkpoint of %s with %d: starting from the mean of the workers' models, momentum reset; "
            "some frames of the current epoch will be seen twice, others not at all",
            *(plural(handle.world_size, "worker"), store.world_size),
        )
    state = rank_state(handle, store.rank, metadata.started, bitwise)
    return LoadedCheckpoint(metadata, handle.global_state, state, bitwise, handle.path)


def with_recorded_averaging(recipe: Recipe, loaded: LoadedCheckpoint) -> Recipe:
    """The recipe with what the checkpoint has in place of `parallel.averaging_frames: auto`, which with one worker is that again.
    DataError: it has no such value."""
    key, values = "averaging_frames", parse_file(loaded.metadata.recipe.encode(errors="surrogatepass"), "").values
    if recipe.parallel.averaging_frames != "auto":
        return recipe
    try:
        recorded = WorkersConfig.model_validate({key: values.get(f"parallel.{key}")}).averaging_frames
    except ValidationError as error:
        message = f"the recipe in the checkpoint is not valid: parallel.{first_error(error)}"
        raise DataError(message, location=loaded.location) from error
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={key: recorded})})


def record_resume(loaded: LoadedCheckpoint | None, run: RunDir, world: Communicator) -> None:
    """Records from where this job resumes, and why, if the launcher has restarted it; nothing where it begins."""
    restart, died = read_restart(), run.previous
    if loaded is None and restart is None:
        return
    epoch, minibatch = (0, 0) if loaded is None else (loaded.metadata.epoch, loaded.metadata.minibatch)
    event = EventRow(event="resumed", epoch=epoch, minibatch=minibatch, world_size=world.world_size)
    if restart is not None:
        update = {"event": "restarted", "number": restart.number, "reason": restart.reason[:1000]}
        if died is not None and died.phase == "training":
            update |= {"died_epoch": died.epoch, "died_minibatch": died.minibatch}
        event = event.model_copy(update=update)
    run.record(event)


def rank_state(handle: CheckpointHandle, rank: int, started: bool, bitwise: bool) -> Mapping[str, Tensor]:
    """What a worker resumes from. In a warm-up, where training has not `started`, rank 0 has the model."""
    if bitwise:
        return handle.rank_state(rank)
    if rank == 0:
        try:
            return merge_rank_states(handle.rank_state(n) for n in range(handle.world_size if started else 1))
        except (KeyError, RuntimeError) as error:
            message = f"the ranks of the checkpoint do not fit together: {error}"
            raise DataError(message, location=handle.path) from error
    # Fisher matrices of another worker are a better start than none; all else comes from rank 0.
    state = handle.rank_state(rank % handle.world_size)
    return {**state, SUMS: torch.zeros_like(state[SUMS])}


def merge_rank_states(states: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The state of rank 0 where there are fewer or more workers than before: all workers' loss sums, and the mean
    model, which counts every worker alike, as if each had trained on as many frames since the last averaging."""
    every = list(states)
    # As in an averaging: a worker whose model is not finite is excluded, with the losses of its interval.
    finite = [state for state in every if bool(state[PARAMETERS].isfinite().all())] or every
    total, sums = (
        torch.zeros_like(finite[0][PARAMETERS], dtype=torch.float64),
        torch.zeros_like(finite[0][SUMS]),
    )
    for state in finite:
        total += state[PARAMETERS]
        sums += state[SUMS]
    return {**every[0], PARAMETERS: (total / len(finite)).float(), SUMS: sums}


def read_metadata(values: object, location: Path) -> CheckpointMetadata:
    """The metadata of a checkpoint of a training, validated; DataError where it is none."""
    try:
        return CheckpointMetadata.model_validate(values)
    except ValidationError as error:
        raise DataError(f"not a checkpoint of a training: {first_error(error)}", location=location) from error


def check_same_data(before: object, found: DataIdentity, recipe: Recipe, since: Path) -> None:
    """DataError where the data is not what was read `since` a checkpoint was written, wherever it is stored. `before`:
    what the checkpoint has, validated or not."""
    try:
        changed = found.differences(DataIdentity.model_validate(before))
    except ValidationError as error:
        raise DataError(f"not a checkpoint of this version: data: {first_error(error)}", location=since) from error
    if changed:
        key, _, number = next(iter(changed)).partition("[")
        value = get_value(recipe, key)
        found_in = {f"{n}]": path for n, path in enumerate(value)} if isinstance(value, list) else {"": value}
        path = found_in.get(number)
        lines = [f"{key}: {text}" for key, text in changed.items()]
        listed = lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
        message = f"the data has changed since checkpoint {since.name.lstrip('0')} was written: {listed}"
        hint = "restore what the training began with, or start in another run dir"
        raise DataError(message, location=path if isinstance(path, Path) else since, hint=hint)
