"""Where the corpus lies while a GPU trains: on the GPU where it fits beside the training, else in host memory.

Decided once, before the frames are moved, and said in the log. Not yet seen on a GPU.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import torch

from ddnn.data.corpus import Corpus
from ddnn.device import device_identity
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Recipe

log = logging.getLogger(__name__)

MARGIN = 2**30 + 2**29
"""Bytes left for the workspaces of libraries and for what an allocator cannot use."""
PARAMETER_COPIES = 10
"""Of 4 bytes a parameter: parameters, gradient, momentum, the best so far, the bf16 copies, the averaging's, those of
the check of a captured step."""
EVALUATED = 1024
"""Frames in a block of cross-validation."""


def place_of_corpus(
    recipe: Recipe, corpus: Corpus, pdfs: int, device: torch.device, exchange: Exchange | None = None
) -> torch.device:
    """`device`, or the CPU where the corpus does not fit on it beside the training, or `data.place` is `host`.

    Args:
        corpus: this worker's, in host memory.
        exchange: collective where given: workers that share a GPU share what is free on it.
    """
    host = torch.device("cpu")
    if device.type != "cuda":
        return device
    exchange = exchange or Exchange()
    free = torch.cuda.mem_get_info(device)[0]
    here = [exchange.host, device_identity(device)]
    on_it = [int(other[2]) for other in exchange.gather([*here, free]) if list(other[:2]) == here]
    free = min(on_it) // len(on_it)
    if recipe.data.place == "host":
        log.info("the corpus stays in host memory, as data.place says")
        return host
    needed, beside = corpus_bytes(corpus), training_bytes(recipe, corpus.dim, pdfs)
    figures = [round(one / 2**30, 1) for one in (needed, beside, free)]
    if needed + beside <= free:
        log.info("the corpus lies on the GPU: %.1f GiB beside %.1f GiB for training, %.1f GiB are free", *figures)
        return device
    log.warning(
        "the corpus stays in host memory, its minibatches are read ahead: %.1f GiB beside %.1f GiB for training do not "
        "fit into the %.1f GiB that are free on the GPU%s",
        *(*figures, "" if recipe.data.store == "float16" else "; data.store: float16 takes half"),
    )
    return host


def corpus_bytes(corpus: Corpus) -> int:
    """What a corpus takes on a GPU: frames, labels, and of each frame its row and its place in two orders."""
    frames = int(corpus.num_frames.sum())
    return corpus.store.nbytes + corpus.labels.nbytes + 3 * 8 * frames


def training_bytes(recipe: Recipe, dim: int, pdfs: int) -> int:
    """What training takes on a GPU besides the corpus, somewhat too high.

    Args:
        dim: of a frame, before splicing.
        pdfs: number of outputs.
    """
    model = recipe.model
    widths = [dim * (2 * recipe.data.splice + 1), *[model.hidden_units] * model.hidden_layers, pdfs]
    parameters = sum(outputs * (inputs + 1) for inputs, outputs in pairwise(widths))
    # Inputs, outputs and derivatives; as much again for what NG-SGD and the loss work on; all of it in a graph too.
    a_frame = 4 * 4 * (sum(widths) + pdfs)
    return 4 * PARAMETER_COPIES * parameters + 2 * a_frame * max(recipe.minibatch, EVALUATED) + MARGIN
