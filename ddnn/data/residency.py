"""Where the corpus lies while a GPU trains: on the GPU where it fits beside the training, else in host memory.

Decided once, before the frames are moved, and said in the log. Not yet seen on a GPU.
"""

from __future__ import annotations

import logging

import torch

from ddnn.data.corpus import Corpus
from ddnn.data.needs import EVALUATED, count_parameters, layer_widths, training_needs
from ddnn.device import device_identity
from ddnn.errors import DataError
from ddnn.parallel.exchange import Exchange
from ddnn.recipe.schema import Recipe

log = logging.getLogger(__name__)

MARGIN = 2**30 + 2**29
"""Bytes left for the workspaces of libraries and for what an allocator cannot use."""
PARAMETER_COPIES = 10
"""Of 4 bytes a parameter: parameters, gradient, momentum, the best so far, the bf16 copies, the averaging's, those of
the check of a captured step."""


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
    free = _free_on_gpu(device, exchange or Exchange())
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


def require_on_gpu(recipe: Recipe, dim: int, pdfs: int, device: torch.device, exchange: Exchange) -> None:
    """Nothing on the CPU; on a GPU DataError where training cannot fit even beside no corpus. Collective.

    Args:
        dim: of a frame, before splicing.
        pdfs: number of outputs.
    """
    if device.type != "cuda":
        return
    needs = training_needs(recipe, dim, pdfs, exchange.size)
    needed = needs["parameters"] + needs["activations"]  # at the least, so that nothing is refused that would fit
    free_here = _free_on_gpu(device, exchange)
    for host, identity, free in exchange.gather([exchange.host, device_identity(device), free_here]):
        if needed > int(free):
            raise DataError(
                f"training needs at least {needed / 2**30:.1f} GiB of GPU memory, {int(free) / 2**30:.1f} GiB are free "
                f"on {identity} of {host}",
                where="minibatch" if needs["activations"] > needs["parameters"] else "model",
                mend="take a smaller minibatch or network, or a GPU that nobody else uses",
            )


def _free_on_gpu(device: torch.device, exchange: Exchange) -> int:
    """Bytes that are free on this worker's GPU; workers on the same one share them. Collective."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, of a training before
    free = torch.cuda.mem_get_info(device)[0] + kept
    here = [exchange.host, device_identity(device)]
    on_it = [int(other[2]) for other in exchange.gather([*here, free]) if list(other[:2]) == here]
    return min(on_it) // len(on_it)


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
    widths = layer_widths(recipe, dim, pdfs)
    # Inputs, outputs and derivatives; as much again for what NG-SGD and the loss work on; all of it in a graph too.
    a_frame = 4 * 4 * (sum(widths) + pdfs)
    return 4 * PARAMETER_COPIES * count_parameters(widths) + 2 * a_frame * max(recipe.minibatch, EVALUATED) + MARGIN
