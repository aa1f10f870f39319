"""What a training will need of memory, known before a frame is loaded, and refused where it is not there.

The figures are of what is allocated on purpose: frames, copies of the parameters, activations, what files are made in.
Seen on CPUs: one worker took 87 to 98 % of what is said here less `LIBRARIES`, each of two 56 to 71 %.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import pairwise
from os import PathLike

from ddnn.data.memory import available_memory
from ddnn.errors import DataError
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Recipe

log = logging.getLogger(__name__)

EVALUATED = 1024
"""Frames in a block of cross-validation."""
LIBRARIES = 64 << 20
"""What libraries take of the host once they compute and exchange."""
WARN_ABOVE = 0.8
"""Share of the available memory."""

FRAMES = {"float32": "frames in float32", "float16": "frames in float16"}

Needs = Mapping[str, int]
"""What it is for -> bytes."""


def layer_widths(recipe: Recipe, dim: int, pdfs: int) -> list[int]:
    """Inputs of the network, units of each hidden layer, outputs; `dim` of a frame before splicing."""
    model = recipe.model
    return [dim * (2 * recipe.data.splice + 1), *[model.hidden_units] * model.hidden_layers, pdfs]


def count_parameters(widths: Sequence[int]) -> int:
    """Weights and biases."""
    return sum(outputs * (inputs + 1) for inputs, outputs in pairwise(widths))


def frames_needs(store: str, frames: int, rows: int, dim: int) -> Needs:
    """What frames take on the host: the store, labels, and of each frame its row and two orders.

    Args:
        store: `data.store`, float32 or float16.
        frames: how many.
        rows: of the store, repeated edges among them; 0 where it is not loaded but mapped.
        dim: of a row.
    """
    return {FRAMES[store]: rows * (dim * (2 if store == "float16" else 4) + 4) + 3 * 8 * frames}


def training_needs(recipe: Recipe, dim: int, pdfs: int, workers: int, device: str = "cpu") -> Needs:
    """What one worker's training takes of the host besides the frames.

    Args:
        dim: of a frame, before splicing.
        pdfs: number of outputs.
        workers: of the whole training.
        device: type of the device that trains. On a GPU the host only makes the first parameters and writes files.
    """
    widths = layer_widths(recipe, dim, pdfs)
    one = 4 * count_parameters(widths)
    if device != "cpu":
        pinned = {"averaging": 2 * one} if workers > 1 else {}
        return {"files": 4 * one, **pinned, "libraries": LIBRARIES}
    minibatch, options, optimizer = recipe.minibatch, recipe.parallel, recipe.optimizer
    low = recipe.precision != "float32"
    copies = 3 + (optimizer.momentum > 0) + low  # parameters, gradient, best so far; the two 16-bit ones of bf16
    needs = {
        "parameters": copies * one,
        # Inputs, outputs and derivatives of a minibatch, and of a block of cross-validation.
        "activations": 4 * (minibatch + EVALUATED) * (widths[0] + 2 * sum(widths[1:])),
        "files": 3 * one,  # a model on its way into a file takes two copies, a checkpoint that is read three
        "libraries": LIBRARIES,
    }
    if optimizer.name == "ng-sgd":
        needs["natural gradient"] = _natural_gradient_bytes(recipe, widths)
    if workers > 1:
        # The model before an averaging, and MPI's own copy of it; those that the strategies keep.
        kept = 2 + 2 * options.overlap + 3 * (options.reduce == "bmuf") + 3 * (options.wire == "bfloat16")
        needs["averaging"] = kept * one
    return needs


def _natural_gradient_bytes(recipe: Recipe, widths: Sequence[int]) -> int:
    """Per side of a layer W and its update, in float64 as it begins; per minibatch the inputs once more, and H."""
    ranks = (recipe.optimizer.rank_in, recipe.optimizer.rank_out)
    sides = [(width + 1, ranks[0]) for width in widths[:-1]] + [(width, ranks[1]) for width in widths[1:]]
    matrices = sum(4 * 4 * min(rank, dim - 1) * dim for dim, rank in sides)
    minibatch = sum(4 * recipe.minibatch * 2 * rank for _, rank in sides)
    return matrices + minibatch + 4 * recipe.minibatch * (sum(widths[:-1]) + max(widths[1:]))


def require_for_training(needs: Needs, where: str | PathLike[str], exchange: Exchange) -> None:
    """Compares what all workers of a host need with what it has. Collective: all workers get the same error.

    Args:
        needs: of this worker, what it has taken already not among it.
        where: the data, for the message.

    Raises:
        DataError: a host has not so much. Above 80 % of it is a warning.
    """
    everyone = exchange.gather([exchange.host, dict(needs), available_memory()])
    for host in dict.fromkeys(str(one[0]) for one in everyone):
        here = [one for one in everyone if one[0] == host]
        known = [int(one[2]) for one in here if one[2] is not None]
        if not known:
            continue
        needed, available = sum(sum(one[1].values()) for one in here), min(known)
        of = ", ".join(f"{what} {_size(size)}" for what, size in here[0][1].items())
        who = f"{len(here)} workers on {host}, each with about" if len(here) > 1 else f"training on {host} with about"
        said = f"{who} {of}: {_size(needed)} of memory needed, {_size(available)} available"
        if needed > available:
            spread = "fewer workers on each" if len(here) > 1 else "more workers on more machines"
            half = ", or data.store: float16, which halves the frames" if FRAMES["float32"] in here[0][1] else ""
            raise DataError(
                said,
                where=where,
                mend=f"use machines (containers, jobs) with more memory, {spread}, fewer utterances{half}",
            )
        if exchange.rank == 0:
            scarce = needed > WARN_ABOVE * available
            log.log(logging.WARNING if scarce else logging.INFO, "memory%s: %s", " is scarce" if scarce else "", said)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{-(-size // 2**20)} MiB"
