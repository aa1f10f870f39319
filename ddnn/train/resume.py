"""What a training goes on from: the newest checkpoint of its run dir, checked against recipe and data."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ddnn.errors import DataError, RecipeError
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe
from ddnn.recipe.yaml_tree import MOST_BYTES, Problem, parse_file
from ddnn.train.checkpoint import Checkpoints, Found
from ddnn.train.load import TrainingData
from ddnn.train.state import Header, Saved, mean_of_parts, read_header

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "checkpoint",
    "data.allow_pipes",
    "data.cache",
    "data.cv.alignments",
    "data.cv.data",
    "data.cv.speakers_file",
    "data.loaders",
    "data.max_missing",
    "data.place",
    "data.train",
    "data.alignments",
    "graphs",
    "parallel.on_failure",
    "parallel.share_devices",
    "parallel.threads",
    "parallel.timeout",
    "parallel.transport",
    "parallel.workers",
)
"""Keys of a recipe that a resume may set anew. Where data has moved, its digest says whether it is the same."""


def newest_saved(checkpoints: Checkpoints, recipe: Recipe, exchange: Exchange) -> Saved | None:
    """What the newest whole checkpoint holds for this worker; None where there is none. Collective.

    Raises:
        RecipeError: the recipe is not the one that the checkpoint was made by.
        DataError: there are checkpoints, but none that can be used.
    """
    found = checkpoints.newest()
    if found is None:
        return None
    header = read_header(found.header, found.path)
    check_same_recipe(header.recipe, recipe, found.path)
    exact = found.workers == exchange.size and header.whole
    log.info("resumed from checkpoint %d: %s", found.number, describe(header))
    if not exact and exchange.rank == 0:
        log.warning(
            "the checkpoint is of %d worker(s)%s, %d go on: from the mean of the workers' models, without momentum; "
            "frames are shared out anew, so that of an epoch under way some are seen twice and some not",
            *(found.workers, "" if header.whole else " that had just lost others", exchange.size),
        )
    return Saved(header, found.shared(), _own(found, exchange, exact), exact, found.path)


def _own(found: Found, exchange: Exchange, exact: bool) -> Mapping[str, torch.Tensor]:
    if exact:
        return found.part(exchange.rank)
    if exchange.rank == 0:
        try:
            return mean_of_parts(found.part(rank) for rank in range(found.workers))
        except (KeyError, RuntimeError) as error:
            raise DataError(f"the workers' parts of the checkpoint do not fit: {error}", where=found.path) from error
    # Fisher matrices of some worker are a better start than none; all else comes from the first worker.
    part = found.part(exchange.rank % found.workers)
    return {**part, "tallies": torch.zeros(2, 3, dtype=torch.float64)}


def describe(header: Header) -> str:
    """Where a header's training stood."""
    where = f"after epoch {header.epoch}"
    return (
        f"{where}, {header.minibatch} minibatches ({100 * header.share:.0f} %) into the next" if header.share else where
    )


def check_same_recipe(before: str, recipe: Recipe, where: Path) -> None:
    """RecipeError where the recipe has changed in what a resume may not change."""
    old, problems = _flat(before)
    if problems:
        raise DataError(f"the recipe in the checkpoint is none: {problems[0]}"[:500], where=where)
    new, _ = _flat(dump_recipe(recipe))
    changed = [
        f"{key}: {str(new.get(key, 'not given'))[:200]} found, {str(old.get(key, 'not given'))[:200]} expected"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key) and not any(key == one or key.startswith(f"{one}.") for one in MAY_CHANGE)
    ]
    if changed:
        listed = changed[0] if len(changed) == 1 else "".join(f"\n  - {line}" for line in changed)
        raise RecipeError(
            f"the recipe is not the one that the checkpoint was made by: {listed}",
            where=where,
            mend="go on with the run dir's own recipe.yaml, or begin anew in another run dir",
        )


def _flat(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Values by dotted key. As careful as with any recipe: YAML alone would build a million things of twenty lines."""
    if len(text) > MOST_BYTES:
        return {}, [Problem(f"more than {MOST_BYTES} characters", "checkpoint.json")]
    values, problems = parse_file(text, "checkpoint.json")
    return {".".join(path): given.value for path, given in values.items()}, problems


def data_digest(data: TrainingData) -> str:
    """Of which utterances there are to train on and to judge by, how long each is, and how often each pdf is
    aligned."""
    digest = hashlib.sha256()
    plan = data.frames.plan
    for utterance, frames in zip(plan.utterances, plan.num_frames.tolist(), strict=True):
        digest.update(f"{utterance} {frames}\n".encode())
    digest.update(f"train {data.train_utterances}\n".encode())
    held_out = data.cv_source
    if held_out is not None:
        for utterance, frames in zip(held_out.plan.utterances, held_out.plan.num_frames.tolist(), strict=True):
            digest.update(f"held out {utterance} {frames}\n".encode())
        digest.update(held_out.pdf_counts().tobytes())
    digest.update(data.source.pdf_counts().tobytes())
    return digest.hexdigest()


def check_same_data(saved: Saved, digest: str, where: Path) -> None:
    """DataError where the data is not what the checkpoint's training read."""
    if saved.header.data != digest:
        raise DataError(
            f"the data has changed since {saved.where.name} was written: other utterances, lengths or alignments",
            where=where,
            mend="restore them, or begin anew in another run dir",
        )
