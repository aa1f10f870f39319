"""The normalization of a network's input: shift and scale from the frames to train on."""

from __future__ import annotations

import torch

from ddnn.data.dataset import STATISTICS_UTTERANCES, AcousticDataset, InputTransform, splice_only
from ddnn.data.index import local_positions
from ddnn.data.pipeline import TrainingData
from ddnn.distributed.communicator import Communicator, SingleProcess

VARIANCE_FLOOR = 1e-10  # as in Kaldi's cmvn-to-nnet


def input_transform(data: TrainingData, comm: Communicator, *, all_utterances: bool = False) -> InputTransform:
    """Splice and, if `data.normalize`, the normalization that the frames to train on give, or all frames. Collective."""
    transform = splice_only(data.dataset.dim, data.dataset.context)
    if not data.normalize:
        return transform
    chosen = list(range(len(data.index.entries))) if all_utterances else data.train_utterances
    if len(data.source.parts) > 1 and len(chosen) > STATISTICS_UTTERANCES:  # evenly; of one the first, as nnet1
        chosen = [chosen[n * len(chosen) // STATISTICS_UTTERANCES] for n in range(STATISTICS_UTTERANCES)]
    local = local_positions(data.shards[comm.rank], chosen[:STATISTICS_UTTERANCES])
    return estimate_normalization(transform, data.dataset, local, comm)


def estimate_normalization(
    transform: InputTransform, dataset: AcousticDataset, utterances: list[int], comm: Communicator | None = None
) -> InputTransform:
    """The transform with shift and scale for zero mean and unit variance over the utterances' spliced frames, which
    `comm` sums over the workers, to the same bits. Collective. ValueError: no worker has any frame.

    Statistics are float64, over the first 10,000 utterances as in nnet1: of several workers each passes those of its
    shard that are among these. A spliced dimension sees the dataset's rows shifted by its offset, so that sums over all
    offsets are one product, of (offsets x rows) 0/1 weights and the features.
    """
    rows, context = dataset.rows_of(utterances[:STATISTICS_UTTERANCES]), transform.context
    is_frame = torch.zeros(dataset.features.shape[0] + 2 * context, dtype=torch.float64)
    is_frame[rows + context] = 1.0
    totals = torch.zeros(2 * transform.output_dim + 1, dtype=torch.float64)  # sums, sums of squares, number of frames
    sums, squares = totals[:-1].view(2, len(transform.offsets), transform.dim)
    totals[-1] = len(rows)
    end = int(rows.max()) + context + 1 if len(rows) else 0
    block = 1 << 16
    for start in range(0, end, block):
        values = dataset.features[start : start + block].double().cpu()
        n = len(values)
        weights = torch.stack([is_frame[start + context - k : start + context - k + n] for k in transform.offsets])
        sums += weights @ values
        squares += weights @ values.square_()
    (comm or SingleProcess()).all_reduce(totals)
    frames = int(totals[-1])
    if frames == 0:
        raise ValueError("there is no frame to take the statistics of the normalization from")
    mean = sums / frames
    variance = (squares / frames - mean.square()).clamp_(min=VARIANCE_FLOOR)
    shift, scale = (-mean).flatten().float(), variance.rsqrt().flatten().float()
    return InputTransform(transform.offsets, transform.dim, shift, scale)
