"""Loss per frame and frame accuracy of a model on labelled frames."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddnn.data.corpus import Corpus, load_corpus
from ddnn.data.minibatches import FrameSet, frame_set, in_order
from ddnn.data.transform import gather, labels_of
from ddnn.device import choose_device
from ddnn.errors import DataError
from ddnn.kaldi.alignments import Alignments, read_alignments
from ddnn.model.acoustic import AcousticModel
from ddnn.model.network import Buffers, cross_entropy, forward
from ddnn.parallel.exchange import Exchange
from ddnn.progress import progress_bar
from ddnn.train.run_dir import load_run

BLOCK = 1024
"""Frames per forward pass: enough for full GEMM speed, few enough to stay in a CPU's cache."""


@dataclass(frozen=True)
class Evaluation:
    """What a model reaches on some frames.

    Attributes:
        loss: cross-entropy per frame, in nats.
        frame_accuracy: share of frames whose most probable pdf is the aligned one, 0 to 1.
        frames: how many were judged.
        utterances: how many were used, skipped (by reason) and trimmed, where a data dir was loaded.
    """

    loss: float
    frame_accuracy: float
    frames: int
    utterances: dict[str, int]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def as_text(self) -> str:
        """One line, and one more where utterances were skipped or trimmed."""
        figures = (
            f"loss {self.loss:.4f} per frame, frame accuracy {100 * self.frame_accuracy:.2f} %, {self.frames} frames"
        )
        notable = [f"{count} {reason.replace('_', ' ')}" for reason, count in self.utterances.items() if count]
        return figures if len(notable) < 2 else f"{figures}\nutterances: {', '.join(notable)}"


class Tally:
    """Sums of loss and rightly classified frames; stays on the device, so that adding never waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.right = torch.zeros((), dtype=torch.int64, device=device)
        self.frames = 0

    def add(self, loss: Tensor, right: Tensor, frames: int) -> None:
        """One minibatch."""
        self.loss += loss
        self.right += right
        self.frames += frames

    def take_over(self, block: Tally) -> None:
        """Adds what `block` has if it is finite, and empties it; waits for the device."""
        if math.isfinite(block.loss.item()):
            self.loss += block.loss
            self.right += block.right
            self.frames += block.frames
        block.loss.zero_()
        block.right.zero_()
        block.frames = 0

    def evaluation(self) -> Evaluation:
        """The averages; waits for the device."""
        return _averages(self.loss.item(), self.right.item(), self.frames)

    def over_workers(self, exchange: Exchange) -> Evaluation:
        """The averages over all workers' frames, the same bits on each; waits for the device."""
        sums = torch.tensor([self.loss.item(), self.right.item(), self.frames], dtype=torch.float64)
        loss, right, frames = exchange.all_gather(sums).sum(dim=0).tolist()
        return _averages(loss, right, int(frames))


def _averages(loss: float, right: float, frames: int) -> Evaluation:
    if frames == 0:
        return Evaluation(math.nan, math.nan, 0, {})
    return Evaluation(loss / frames, right / frames, frames, {})


def outputs(model: AcousticModel, frames: FrameSet, buffers: Buffers) -> Iterator[tuple[Tensor, Tensor]]:
    """Store rows (n,) and activations (n, outputs) before softmax of consecutive blocks, each valid until the next.

    Args:
        buffers: memory for one block; its size is the largest block.
    """
    for rows in in_order(frames, len(buffers.x)):
        block = buffers.of(len(rows))
        gather(frames.corpus, model.transform, rows, block.x)
        yield rows, forward(model.network, block)


def evaluate(model: AcousticModel, frames: FrameSet, exchange: Exchange | None = None) -> Evaluation:
    """Loss and frame accuracy of `model` over all of `frames`.

    Args:
        exchange: where `frames` is this worker's shard; all workers evaluate the same model and get the same figures.
    """
    device = model.network.parameters.device
    tally = Tally(device)
    for rows, activations in outputs(model, frames, Buffers(model.network, max(1, min(BLOCK, len(frames))))):
        tally.add(*cross_entropy(activations, labels_of(frames.corpus, rows, device)), len(rows))
        if exchange is not None:
            exchange.tick()
    return tally.evaluation() if exchange is None else tally.over_workers(exchange)


def evaluate_run(
    run_dir: Path, data: Path, alignments: Path, device: str = "auto", allow_pipes: bool = False
) -> Evaluation:
    """Loss and frame accuracy of a run's final model on a data dir and its alignment.

    Raises:
        DataError: damaged or unfit input; another feature dimension or number of pdfs than the model's.
    """
    on = choose_device(device)
    model = load_run(run_dir)
    labels = read_alignments(alignments)
    most = model.network.output_dim
    # The pdfs of a final.mdl are all that its tree has; an archive of pdf-ids may lack the last ones.
    if labels.num_pdfs > most or (alignments.is_dir() and labels.num_pdfs != most):
        beyond = next((f"; utterance {u} has more" for u, ids in labels.pdfs.items() if (ids >= most).any()), "")
        raise DataError(
            f"the alignment has {labels.num_pdfs} pdfs, the model {most}{beyond}",
            where=alignments,
            mend="use an alignment made with the same final.mdl as the training alignment",
        )
    corpus = load_for_model(model, data, labels, allow_pipes=allow_pipes)
    everything = frame_set(corpus.to(on), list(range(len(corpus.utterances))))
    result = evaluate(model.to(on), everything)
    return Evaluation(result.loss, result.frame_accuracy, result.frames, corpus.counts)


def load_for_model(model: AcousticModel, data: Path, alignments: Alignments | None, *, allow_pipes: bool) -> Corpus:
    """A data dir as `model` reads it: its CMVN, deltas and context. Utterances that cannot be used are skipped.

    Raises:
        DataError: damaged input, features of other dims than the model's, or no utterance that can be used.
    """
    corpus = load_corpus(
        data,
        alignments,
        context=model.transform.context,
        pipeline=model.pipeline,
        allow_pipes=allow_pipes,
        max_missing=None,
        progress=progress_bar("loading"),
    )
    model.check_features(corpus.dim, where=data)
    return corpus
