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

MAX_FRAMES = 10_240
"""Frames of each worker between two averagings, unless that would be too often or too rare: ten minibatches of 1024, as in arXiv
1507.01239. Twice as many raised its word error rates by 0.7 to 1.0 points with 16 GPUs (table 3)."""
MIN_AVERAGINGS = 10
"""Averagings of an epoch, for a corpus so small that it would have fewer. On AN4 (docs/results/an4.md) 11 an epoch lost 0.03 points
of frame accuracy with 8 workers and 0.4 with 16; 5 an epoch lost 0.8, and one 1.8."""
MAX_SHARE = 0.1
"""Of the time that averagings may take; where they are slow, there are fewer, whatever the accuracy."""
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
    frames = trainer.batches.sampler.num_frames()
    compute, averaging, shards, longest = zip(
        *world.all_gather_object([*own, frames, trainer.minibatch_sizes.end]), strict=True
    )
    chosen = choose_frames(min(shards), max(longest), max(compute), max(averaging))
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


def choose_frames(shard: int, longest: int, frame_seconds: float, averaging_seconds: float) -> int:
    """Frames of each worker between two averagings, for the worker with the fewest, `shard`, in an epoch, and the longest minibatch."""
    wanted = min(MAX_FRAMES, shard // MIN_AVERAGINGS)
    affordable = math.ceil(averaging_seconds / frame_seconds * (1 / MAX_SHARE - 1))
    return max(wanted, affordable, longest)


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
