"""From frames in the store to the network's input: splice, shift, scale (nnet1's feature_transform)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ddnn.data.corpus import Corpus
from ddnn.kernels import load_kernels
from ddnn.parallel.exchange import Exchange

VARIANCE_FLOOR = 1e-10
"""As in Kaldi's cmvn-to-nnet."""

STATISTICS_UTTERANCES = 10_000
"""nnet1 takes its statistics from so many utterances of the training set."""


@dataclass(frozen=True)
class InputTransform:
    """x = (splice(frame) + shift) * scale.

    Attributes:
        offsets: frames to splice, relative to the frame itself; (-5, ..., 5) for splice 5.
        dim: feature dimension before splicing.
        shift: (len(offsets) * dim,) float32, or None.
        scale: (len(offsets) * dim,) float32, or None.
    """

    offsets: tuple[int, ...]
    dim: int
    shift: Tensor | None = None
    scale: Tensor | None = None

    @property
    def output_dim(self) -> int:
        """Dimension of the network's input."""
        return self.dim * len(self.offsets)

    @property
    def context(self) -> int:
        """Repeated edge frames that a corpus needs for this splice."""
        return max(abs(offset) for offset in self.offsets)

    def to(self, device: torch.device) -> InputTransform:
        """The same transform with its vectors on `device`."""
        shift = None if self.shift is None else self.shift.to(device)
        scale = None if self.scale is None else self.scale.to(device)
        return InputTransform(self.offsets, self.dim, shift, scale)


def gather(corpus: Corpus, transform: InputTransform, rows: Tensor, out: Tensor) -> Tensor:
    """Fills `out` (n, output_dim) with the network's input for the frames at `rows` (n,) of the store.

    It is made in float32. Where `out` is bf16 the compiled kernels do it in one pass, if the store is float32.

    On a GPU the host waits for nothing, unless the corpus lies in host memory and `out` does not
    (`ddnn.data.streaming` reads ahead there).

    Raises:
        ValueError: the corpus has other dims, or fewer repeated edge frames, than the transform needs.
    """
    if out.dtype == torch.float32:
        return normalise(splice(corpus, transform, rows, out), transform)
    kernels, offsets, store = load_kernels(), transform.offsets, corpus.store
    if kernels is None or store.dtype != torch.float32 or store.device.type != "cpu" or not consecutive(offsets):
        return out.copy_(gather(corpus, transform, rows, out.new_empty(out.shape, dtype=torch.float32)))
    check_fits(corpus, transform)
    kernels.gather(store, rows, offsets[0], transform.shift, transform.scale, out)
    return out


def splice(corpus: Corpus, transform: InputTransform, rows: Tensor, out: Tensor) -> Tensor:
    """Fills `out` (n, output_dim) with the spliced frames as they lie in the store, not yet shifted and scaled.

    Consecutive offsets are one contiguous piece of the store per frame: a single gather, no index arithmetic.
    `gather_plain` is the reference, and takes offsets with gaps.

    Raises:
        ValueError: as `gather`.
    """
    offsets, store = transform.offsets, corpus.store
    check_fits(corpus, transform)
    rows = rows.to(store.device)
    if not consecutive(offsets):
        return gather_plain(corpus, transform, rows, out)
    if len(rows) == 0:  # the store may have fewer rows than a splice
        return out
    windows = store.as_strided((store.shape[0] - len(offsets) + 1, transform.output_dim), (store.shape[1], 1))
    if store.dtype == out.dtype and store.device == out.device:
        return torch.index_select(windows, 0, rows + offsets[0], out=out)
    return out.copy_(windows.index_select(0, rows + offsets[0]))


def check_fits(corpus: Corpus, transform: InputTransform) -> None:
    """ValueError where the corpus has other dims, or fewer repeated edge frames, than the transform needs."""
    if corpus.store.shape[1] != transform.dim or corpus.context < transform.context:
        found = f"{corpus.store.shape[1]} dims with context {corpus.context}"
        raise ValueError(f"the corpus has {found}, the transform needs {transform.dim} with {transform.context}")


def consecutive(offsets: tuple[int, ...]) -> bool:
    """Whether no frame between the first and the last is left out."""
    return offsets == tuple(range(offsets[0], offsets[0] + len(offsets)))


def gather_plain(corpus: Corpus, transform: InputTransform, rows: Tensor, out: Tensor) -> Tensor:
    """Fills `out` with the spliced frames, each offset gathered by itself; not yet shifted and scaled."""
    for i, offset in enumerate(transform.offsets):
        frames = corpus.store.index_select(0, rows + offset)
        out[:, i * transform.dim : (i + 1) * transform.dim].copy_(frames)
    return out


def labels_of(corpus: Corpus, rows: Tensor, device: torch.device) -> Tensor:
    """The pdf-ids (n,) int64 of the frames at `rows` (n,), on `device`."""
    return corpus.labels.index_select(0, rows.to(corpus.labels.device)).to(device).long()


def normalise(x: Tensor, transform: InputTransform) -> Tensor:
    """Shifts and scales spliced frames (n, output_dim) in place."""
    if transform.shift is not None:
        x.add_(transform.shift)
    if transform.scale is not None:
        x.mul_(transform.scale)
    return x


def plain_splice(dim: int, context: int) -> InputTransform:
    """Splices `context` frames on each side and leaves the values as they are."""
    return InputTransform(tuple(range(-context, context + 1)), dim)


def normalising(
    transform: InputTransform, corpus: Corpus, utterances: list[int], exchange: Exchange | None = None
) -> InputTransform:
    """The transform with shift and scale that give zero mean and unit variance over the utterances' spliced frames.

    Statistics are float64, over the first 10,000 utterances as in nnet1. A spliced dimension sees the store's rows
    moved by its offset, so that sums over all offsets are one product: (offsets x rows) 0/1 weights times the store.

    Args:
        utterances: indices into the corpus; of several workers each gives those of its shard that are among the first
            `STATISTICS_UTTERANCES` of all workers' training set (`shards.positions`), or none.
        exchange: sums the statistics over the workers, who get the same bits each. Collective.

    Raises:
        ValueError: no worker has any frame.
    """
    rows = corpus.rows_of(utterances[:STATISTICS_UTTERANCES])
    sums, squares = _sums(transform, corpus, rows)
    frames = len(rows)
    if exchange is not None and exchange.size > 1:
        together = torch.cat([sums.flatten(), squares.flatten(), torch.tensor([frames], dtype=torch.float64)])
        exchange.sum_in_place(together)
        sums, squares = together[:-1].view(2, *sums.shape)
        frames = int(together[-1])
    if frames == 0:
        raise ValueError("there is no frame to take the statistics of the normalisation from")
    mean = sums / frames
    variance = (squares / frames - mean.square()).clamp_(min=VARIANCE_FLOOR)
    shift = (-mean).flatten().float()
    scale = variance.rsqrt().flatten().float()
    return InputTransform(transform.offsets, transform.dim, shift, scale)


def _sums(transform: InputTransform, corpus: Corpus, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and sums of squares of the spliced frames at `rows`, (len(offsets), dim) float64 each."""
    context = transform.context
    is_frame = torch.zeros(corpus.store.shape[0] + 2 * context, dtype=torch.float64)
    is_frame[rows + context] = 1.0
    sums = torch.zeros(len(transform.offsets), corpus.dim, dtype=torch.float64)
    squares = torch.zeros_like(sums)
    end = int(rows.max()) + context + 1 if len(rows) else 0
    block = 1 << 16
    for start in range(0, end, block):
        values = corpus.store[start : start + block].double().cpu()
        n = len(values)
        weights = torch.stack([is_frame[start + context - k : start + context - k + n] for k in transform.offsets])
        sums += weights @ values
        squares += weights @ values.square_()
    return sums, squares
