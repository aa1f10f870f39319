"""Flat vectors in one bit a value: the quantization of Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its
Application to Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014. Pure: nothing is sent here.

The threshold is 0, and a value becomes the mean of the values of its sign that belong to the same unit: of all pairs of numbers the
one with the smallest squared error. A unit is what belongs to one output of a layer, in the paper a column of the weight matrix: a
row of a weight (outputs, inputs), a filter, or one value of a bias, which is sent exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor


class Stripe:
    """Consecutive units of a flat vector, and the message that encodes their values.

    A message is uint8: of each unit the mean of its negative values and that of the others, in float32, then a bit for each value,
    1 where it is not negative; bit k of a byte is that of a value in the k-th eighth. What follows `num_bytes` is ignored.

    Attributes:
        blocks: number of units, and of values of each, of units of one size that follow each other.
        units, size: number of all units and of all values.
        num_bytes: of a message, a multiple of 8, so that the numbers of one that follows another are aligned.
    """

    def __init__(self, unit_sizes: Sequence[int]) -> None:
        self.blocks = [(len(list(same)), size) for size, same in groupby(unit_sizes)]
        self.units, self.size = len(unit_sizes), sum(unit_sizes)
        self.num_bytes = 8 * (self.units + math.ceil(self.size / 64))

    def encode(self, vector: Tensor, message: Tensor) -> None:
        """message <- that for `vector`; vector <- what it lacks, the residual. (size,) float32 or float64, all of it finite."""
        means, packed = self._fields(message)
        bits = torch.zeros(8, len(packed), dtype=torch.bool, device=vector.device)
        torch.ge(vector, 0, out=bits.view(-1)[: self.size])
        torch.sum(bits.view(torch.uint8) << _shifts(packed), 0, dtype=torch.uint8, out=packed)
        for values, bit, mean in self._by_block(vector, bits.to(vector.dtype), means):
            count, total, absolute = bit.sum(1), values.sum(1), torch.linalg.vector_norm(values, 1, 1)
            # (total - absolute) / 2 is the sum of the negative values, (total + absolute) / 2 that of the others.
            mean[:, 0] = (total - absolute) / (2 * (values.shape[1] - count).clamp(min=1))
            mean[:, 1] = (total + absolute) / (2 * count.clamp(min=1))
            _add(values, bit, mean, -1)

    def add(self, message: Tensor, vector: Tensor) -> None:
        """vector <- vector + what `message` encodes."""
        means, packed = self._fields(message)
        bits = (packed >> _shifts(packed)) & 1
        for values, bit, mean in self._by_block(vector, bits.to(vector.dtype), means):
            _add(values, bit, mean)

    def _fields(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Views: the means, (units, 2), and the packed bits."""
        end = 8 * self.units
        return message[:end].view(torch.float32).view(-1, 2), message[end : self.num_bytes]

    def _by_block(self, vector: Tensor, bits: Tensor, means: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Views of each block: (units, values) of the first two, and (units, 2)."""
        value = unit = 0
        for units, size in self.blocks:
            part = slice(value, value := value + units * size)
            yield vector[part].view(-1, size), bits.view(-1)[part].view(-1, size), means[unit : (unit := unit + units)]


def cut_into_stripes(shapes: Iterable[Sequence[int]], number: int) -> list[Stripe]:
    """The units of tensors of these `shapes`, which follow each other in a flat vector, in `number` stripes with messages of about
    the same length; some are empty where there are fewer units."""
    sizes = [math.prod(shape[1:]) for shape in shapes for _ in range(shape[0])]
    ends = list(accumulate(64 + size for size in sizes))  # of their messages, in bits
    stripes = [list[int]() for _ in range(number)]
    for size, end in zip(sizes, ends, strict=True):
        stripes[(end - 1) * number // ends[-1]].append(size)
    return list(map(Stripe, stripes))


def _add(values: Tensor, bit: Tensor, mean: Tensor, factor: int = 1) -> None:
    """values <- values + factor * what `bit`, 0 or 1, chooses from the two columns of `mean`. torch.where is 10 times as slow on CPUs."""
    values.add_(mean[:, :1], alpha=factor).addcmul_(bit, mean[:, 1:] - mean[:, :1], value=factor)


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)[:, None]
