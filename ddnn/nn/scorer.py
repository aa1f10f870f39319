"""The scores of an utterance's frames that decoders, alignments and sequence objectives need, and the log-priors that are
subtracted from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddnn.data.batches import EVAL_BATCH, Batch, Sampler, SequentialSampler, make_batch_loader
from ddnn.data.dataset import AcousticDataset, FrameSubset
from ddnn.kaldi.alignments import read_pdf_counts
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.network import Workspace
from ddnn.util.errors import DataError

PRIOR_CUTOFF = 1e-10  # pdfs of a smaller relative frequency are disabled (nnet1's --prior-cutoff)

DISABLED_LOG_PRIOR = math.sqrt(float(np.finfo(np.float32).max))
"""nnet1's log-prior of these pdfs: their log-likelihood becomes about -1.8e19 and they never win."""

ScoreKind = Literal["log-likelihoods", "posteriors", "log-posteriors", "activations"]

_SCORES: dict[ScoreKind, Callable[[Tensor, Tensor | None], Tensor]] = {
    "log-likelihoods": lambda outputs, priors: outputs if priors is None else outputs - priors,
    "posteriors": lambda outputs, _: outputs.softmax(1),
    "log-posteriors": lambda outputs, _: outputs.log_softmax(1),
    "activations": lambda outputs, _: outputs.clone(),
}
"""From the network's outputs before the softmax, (n, pdfs), and the log-priors to the scores, in other memory."""


def read_counts(path: Path, num_pdfs: int) -> NDArray[np.float64]:
    """The pdf counts of a run, float64 (pdfs,). DataError: there are none, or they are not those of this model."""
    if not path.exists():
        hint = "import the network again with --pdf-counts, or copy the counts of its training alignment there"
        raise DataError(f"there is no {path.name}, of which the priors are made", location=path.parent, hint=hint)
    counts = read_pdf_counts(path)
    if len(counts) != num_pdfs:
        hint = "use the counts of the alignment that the model was trained on"
        raise DataError(f"{path.name} has {len(counts)} pdfs, the model {num_pdfs}", location=path.parent, hint=hint)
    if not counts.sum() > 0.0:
        raise DataError("no pdf has any frame", location=path, hint="use the counts of the training alignment")
    return counts


def log_priors(counts: NDArray[np.float64], prior_scale: float = 1.0) -> NDArray[np.float64]:
    """Subtracted from pre-softmax activations: prior_scale * log(count / total), float64 (pdfs,). Pdfs with relative
    frequency under 1e-10 have sqrt(FLT_MAX) for log(count / total) (nnet1's PdfPrior)."""
    relative = counts / counts.sum()
    seen = relative > PRIOR_CUTOFF
    priors = np.full(len(counts), DISABLED_LOG_PRIOR)
    priors[seen] = np.log(relative[seen])
    return prior_scale * priors


def forward_batches(
    model: AcousticModel, frames: FrameSubset, workspace: Workspace, sampler: Sampler | None = None
) -> Iterator[tuple[Batch, Tensor]]:
    """Minibatches and their logits (n, pdfs), each valid until the next. Without `sampler` of consecutive frames, as many
    as fit into `workspace`."""
    sampler, kernel = sampler or SequentialSampler(frames, len(workspace.x)), workspace.arithmetic.gather_kernel
    loader = make_batch_loader(
        *(frames, model.transform, sampler),
        out=workspace.x, gather_kernel=kernel, labels_only=workspace.receives,
    )  # fmt: skip
    with closing(loader):
        for batch in loader.epoch():
            yield batch, workspace.of(batch.num_frames).forward()
            workspace.wait()


class Scorer:
    """Scores utterances one at a time. `priors`: of log-likelihoods, from `log_priors`, float32 (pdfs,), on the model's
    device. `max_frames`: of the longest utterance; blocks of 1024 frames at most are computed at once."""

    def __init__(self, model: AcousticModel, kind: ScoreKind, priors: Tensor | None, max_frames: int) -> None:
        self.model, self.kind, self.priors = model, kind, priors
        self.workspace = Workspace(model.network, max(1, min(EVAL_BATCH, max_frames)))

    def __call__(self, dataset: AcousticDataset, u: int = 0) -> NDArray[np.float32]:
        """(frames, pdfs) float32 of the utterance with this index. DataError: they are not finite."""
        blocks = forward_batches(self.model, dataset.subset([u]), self.workspace)
        parts = [_SCORES[self.kind](outputs, self.priors).cpu().numpy() for _, outputs in blocks]
        scores: NDArray[np.float32] = np.concatenate(parts)
        if not np.isfinite(scores).all():
            message = f"utterance {dataset.utterances[u]}: the network's output is not finite"
            raise DataError(message, hint="retrain: the model has diverged")
        return scores


def one_utterance(name: str, rows: NDArray[np.float32], context: int) -> AcousticDataset:
    """A dataset of one utterance; `rows`: its features with `context` repeated edge frames on each side."""
    labels = torch.full((len(rows),), -1, dtype=torch.int32)
    lengths = np.array([context]), np.array([len(rows) - 2 * context])
    return AcousticDataset(torch.from_numpy(rows), labels, (name,), None, *lengths, context)
