"""What a training resumes from: the newest checkpoint of its run dir, checked against recipe and data."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddnn.distributed.communicator import Communicator
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe
from ddnn.recipe.source import MOST_BYTES, Problem, parse_file
from ddnn.training.checkpoint import CheckpointHandle, CheckpointStore
from ddnn.training.state import LoadedCheckpoint, merge_rank_states, read_metadata
from ddnn.util.errors import DataError, RecipeError

log = logging.getLogger(__name__)

RESUMABLE = (
    "checkpoint",
    "data.allow_pipes",
    "data.cache_dir",
    "data.cv.alignments",
    "data.cv.data",
    "data.cv.speakers",
    "data.loader_processes",
    "data.max_skipped_fraction",
    "data.feature_device",
    "data.train",
    "data.alignments",
    "cuda_graphs",
    "parallel.hang_timeout",
    "parallel.max_restarts",
    "parallel.oversubscribe_gpus",
    "parallel.cpu_threads",
    "parallel.gpu_transport",
    "parallel.workers",
)
"""Keys of a recipe that a resume may change. Where data has moved, its digest says whether it is the same."""


def load_latest(store: CheckpointStore, recipe: Recipe, comm: Communicator) -> LoadedCheckpoint | None:
    """What the newest whole checkpoint holds for this worker; None where there is none. Collective.

    Raises:
        RecipeError: the recipe is not the one that the checkpoint was made by.
        DataError: there are checkpoints, but none that can be used.
    """
    handle = store.latest()
    if handle is None:
        log.info("there is no checkpoint to resume from: training starts from the beginning")
        return None
    metadata = read_metadata(handle.metadata, handle.path)
    check_same_recipe(metadata.recipe, recipe, handle.path)
    bitwise = handle.world_size == comm.world_size
    log.info("resumed from checkpoint %d: %s", handle.number, metadata.summary())
    if not bitwise and comm.rank == 0:
        log.warning(
            "the checkpoint is of %d worker(s), %d resume: from the mean of the workers' models, without momentum; "
            "frames are distributed again, so that of an epoch under way some are seen twice and some not at all",
            *(handle.world_size, comm.world_size),
        )
    return LoadedCheckpoint(metadata, handle.global_state, _rank_state(handle, comm), bitwise, handle.path)


def _rank_state(handle: CheckpointHandle, comm: Communicator) -> Mapping[str, torch.Tensor]:
    if handle.world_size == comm.world_size:
        return handle.rank_state(comm.rank)
    if comm.rank == 0:
        try:
            return merge_rank_states(handle.rank_state(rank) for rank in range(handle.world_size))
        except (KeyError, RuntimeError) as error:
            raise DataError(
                f"the ranks of the checkpoint do not fit together: {error}", location=handle.path
            ) from error
    # Fisher matrices of another worker are a better start than none; all else comes from rank 0.
    state = handle.rank_state(comm.rank % handle.world_size)
    return {**state, "loss_sums": torch.zeros(2, 3, dtype=torch.float64)}


def check_same_recipe(before: str, recipe: Recipe, location: Path) -> None:
    """RecipeError where the recipe has changed in what a resume may not change."""
    old, problems = _flat(before)
    if problems:
        raise DataError(f"the recipe in the checkpoint is none: {problems[0]}"[:500], location=location)
    new, _ = _flat(dump_recipe(recipe))
    changed = [
        f"{key}: {str(new.get(key, 'not given'))[:200]} found, {str(old.get(key, 'not given'))[:200]} expected"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not any(key == one or key.startswith(f"{one}.") for one in RESUMABLE)
    ]
    if changed:
        listed = changed[0] if len(changed) == 1 else "".join(f"\n  - {line}" for line in changed)
        raise RecipeError(
            f"the recipe is not the one that the checkpoint was made by: {listed}",
            location=location,
            hint="resume with the run dir's own recipe.yaml, or start in another run dir",
        )


def _flat(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Values by dotted key. As careful as with any recipe: YAML alone would build a million things of twenty lines."""
    if len(text) > MOST_BYTES:
        return {}, [Problem(f"more than {MOST_BYTES} characters", "manifest.json")]
    tree = parse_file(text, "manifest.json")
    return {name: given.value for name, given in tree.values.items()}, tree.problems


def check_same_data(loaded: LoadedCheckpoint, digest: str, location: Path) -> None:
    """DataError where the data is not what the checkpoint's training read."""
    if loaded.metadata.data != digest:
        raise DataError(
            f"the data has changed since {loaded.location.name} was written: other utterances, lengths or alignments",
            location=location,
            hint="restore them, or start in another run dir",
        )
