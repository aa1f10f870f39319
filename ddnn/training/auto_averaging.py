"""`parallel.averaging_frames: auto`: how often workers average, from minibatches and averagings that they time as the training
starts."""

from __future__ import annotations

import logging
import math
import time
from itertools import chain, count, islice

from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe
from ddnn.training.state import collect_state, restore_state
from ddnn.training.trainer import Trainer

log = logging.getLogger(__name__)

MAX_SHARE = 0.1
"""Of the time that averagings may take. Averaging as often as that allows costs the least accuracy: with 16 workers and 1, 5, 10, 20 and 50
minibatches between two averagings, AN4 lost 0.0, 0.4, 0.8, 1.0 and 1.8 points of frame accuracy (docs/results/an4.md, table 3)."""
TIMED = 4
"""Minibatches, and averagings, that are timed after one of each."""
CHANGED = ("network", "optimizer", "workspace")
"""Those of `Trainer.parts` that minibatches change."""


def with_averaging_frames(recipe: Recipe, trainer: Trainer) -> Recipe:
    """The recipe with a number in place of `auto`, by which `trainer` averages and which its checkpoints have; with one model
    `auto` stays. Parameters and optimizer are left as they were. Collective."""
    averager, world = trainer.averager, trainer.groups.world
    if recipe.parallel.averaging_frames != "auto" or not averager.excludes:
        return recipe
    parts = {name: trainer.parts[name] for name in CHANGED}
    before = {name: tensor.clone() for name, tensor in collect_state(parts).items()}
    world.barrier()
    own = [frame_seconds(trainer), averager.averaging_seconds(TIMED)]
    restore_state(parts, before, trainer.run.path)
    compute, averaging, longest = zip(*world.all_gather_object([*own, trainer.minibatch_sizes.end]), strict=True)
    chosen = choose_frames(max(longest), max(compute), max(averaging))
    share = max(averaging) / (max(averaging) + chosen * max(compute))
    log.info(
        "averaging_frames: auto chose %d: an averaging takes %.2g s, %d frames %.2g s, so that averagings take %.1f %% of "
        "the time; a run that is to repeat this one needs parallel.averaging_frames=%d",
        *(chosen, max(averaging), chosen, chosen * max(compute), 100 * share, chosen),
    )
    averager.average_every(chosen)
    parallel = recipe.parallel.model_copy(update={"averaging_frames": chosen})
    recipe = recipe.model_copy(update={"parallel": parallel})
    trainer.recipe = dump_recipe(recipe)
    return recipe


def choose_frames(longest: int, frame_seconds: float, averaging_seconds: float) -> int:
    """Frames of each worker between two averagings: as few as `MAX_SHARE` allows, and no fewer than the longest minibatch has."""
    return max(longest, math.ceil(averaging_seconds / frame_seconds * (1 / MAX_SHARE - 1)))


def frame_seconds(trainer: Trainer) -> float:
    """Seconds in which this worker trains on a frame, while the others train too."""
    started, frames = 0.0, 0
    minibatches = chain.from_iterable(trainer.batches.epoch(number) for number in count(1))
    for number, batch in enumerate(islice(minibatches, 1 + TIMED)):
        loss, *_ = trainer.train_minibatch(batch)
        loss.item()  # waits for the device
        frames += batch.num_frames if number else 0
        started = started or time.perf_counter()
    return (time.perf_counter() - started) / frames
